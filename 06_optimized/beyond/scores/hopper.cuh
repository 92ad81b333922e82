// What hopper does to the scores that a thread has after wgmma, forward and backward: number i of a
// row, r = i / 2 % 2, is place(i) columns behind the thread's first one.
//
// Left of a position, and right of it, ALiBi is a line: slope place(i), one instruction for each
// score, since the place is a number in the code, and `first[r]`, which all numbers of a row have
// in common. So nobody adds it to them; the softmax knows. Only where |.| has its edge, in a tile
// or two of all, each score gets all of it.
#pragma once
#include <cfloat>
#include <cmath>
#include <string>

#include "06_optimized/beyond/scores/change.cuh"
#include "06_optimized/ptx/mma.cuh"

namespace fa::scores {

// f(built), as std::integral_constant, of the kernel for a change. Where no GPU runs it, and a
// sanitizer or a mistake is at work, there is one that has all lines.
template <class T, class F>
void with_changes([[maybe_unused]] const Change<T>& change, const F& f) {
#ifdef FA_ONE_FOR_ALL
  f(std::integral_constant<int, with_all>());
#else
  const bool capped = change.parts & with_cap;
  capped ? f(std::integral_constant<int, with_cap>())
         : f(std::integral_constant<int, with_alibi>());
#endif
}

// A larger one is fa2's: to within 2^-22 of the cap is not enough. In units and back it is rounded.
constexpr float most_cap = 1000 * 1.00001f;

// Why hopper takes none of these changes, or "".
template <class T>
std::string not_for_hopper(const Change<T>& change, float scale) {
  const int parts = change.parts & ~behind;
  if (parts != 0 && parts != with_alibi && parts != with_cap)
    return "hopper takes ALiBi alone or a soft cap alone, no bias and no rotary positions";
  if (change.parts & with_cap && !(change.cap * scale <= most_cap))
    return "hopper takes a cap up to 1000, got " + std::to_string(change.cap * scale);
  return {};
}

// 1 / x for x in [1, 4], one instruction: right to one unit in the last place.
__device__ inline float reciprocal(float x) {
#ifdef FA_EMULATED
  return 1 / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

template <class T>
FA_HOST_DEVICE float per_tanh(const Change<T>& change) {
  return fminf(2 * log2_e * change.per_cap, FLT_MAX);
}
// tanh (x / cap), times `top`: +-(2 / (1 + e) - 1) with e = exp(-2 |x| / cap), to within 2^-22. One
// reciprocal serves two numbers, `apart` from each other: 1 / a = b / (a b). A NaN takes the other
// along.
struct Tanh {
  float top, k;  // e = 2^(-|k x|)

  template <int apart, int n>
  __device__ void of(float (&S)[n]) const {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i % (2 * apart) >= apart) continue;
      const float a = 1 + optimized::ex2(-fabsf(k * S[i]));
      const float b = 1 + optimized::ex2(-fabsf(k * S[i + apart]));
      const float both = reciprocal(a * b);
      S[i] = copysignf(fmaf(b * both, 2 * top, -top), S[i]);
      S[i + apart] = copysignf(fmaf(a * both, 2 * top, -top), S[i + apart]);
    }
  }
};

__device__ constexpr float place(int i) { return float(8 * (i / 4) + i % 2); }

// S_ij += slope place: ALiBi on one side, but for what a row has in common.
template <int n>
__device__ void add_line(float (&S)[n], float slope) {
#pragma unroll
  for (int i = 0; i < n; ++i) S[i] = fmaf(slope, place(i), S[i]);
}
// S_ij -= slope |distance|, all of it; first[r] is slope times the distance of the first.
template <int n>
__device__ void add_edge(float (&S)[n], float slope, const float (&first)[2]) {
#pragma unroll
  for (int i = 0; i < n; ++i) S[i] += copysignf(fmaf(slope, place(i), first[i / 2 % 2]), -slope);
}

}  // namespace fa::scores
