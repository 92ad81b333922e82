// What hopper does to the scores that a thread has after wgmma, forward and backward: number i of a
// row, r = i / 2 % 2, is place(i) columns behind the thread's first one.
//
// Left of a position, and right of it, ALiBi is a line: slope place(i), one instruction for each
// score, since the place is a number in the code, and `first[r]`, which all numbers of a row have
// in common. So nobody adds it to them; the softmax knows. Only where |.| has its edge, in a tile
// or two of all, each score gets all of it. In the forward at d <= 64, where exponentials take
// longer than products, the line is a product, and costs none: S_ij += line j (LineProduct). In the
// backward it is in the LSE of the queries.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

#include "06_optimized/beyond/scores/change.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"

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
constexpr float most_cap = 100 * 1.00001f;

// Why hopper takes none of these changes, or "".
template <class T>
std::string not_for_hopper(const Change<T>& change, float scale) {
  const int parts = change.parts & ~behind;
  if (parts != 0 && parts != with_alibi && parts != with_cap)
    return "hopper takes ALiBi alone or a soft cap alone, no bias and no rotary positions";
  if (change.parts & with_cap && !(change.cap * scale <= most_cap))
    return "hopper takes a cap up to 100, got " + std::to_string(change.cap * scale);
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
// The same as one more product, S += A B: A's rows are all alike, `line` in three pieces of 8 bits;
// B's first three rows are the columns' numbers 0, 1, 2, ..., which bf16 has up to 256. So all that
// is multiplied is exact, whatever T is. A product wants 16 rows: the others are zeros.
struct LineProduct {
  std::uint32_t A[1][4];  // a lane has columns 2 (lane % 4) and the next, and those 8 behind

  __device__ explicit LineProduct(float line) {
    const auto rounded = [](float x) { return float(__nv_bfloat16(x)); };
    const float high = rounded(line), middle = rounded(line - high), low = line - high - middle;
    const int pair = threadIdx.x % 4;
    A[0][0] = A[0][1] = pair == 0   ? optimized::rounded_pair<__nv_bfloat16>(high, middle)
                        : pair == 1 ? optimized::rounded_pair<__nv_bfloat16>(low, 0)
                                    : 0;
    A[0][2] = A[0][3] = 0;
  }
  // B, 16 x n, in boxes of 64 columns as TMA would bring them. By all threads of the block.
  template <int n>
  static __device__ void columns(__nv_bfloat16* B) {
    for (int i = threadIdx.x; i < 16 * n; i += blockDim.x) {
      const int k = i / n, j = i % n;
      B[j / 64 * 16 * 64 + optimized::swizzled_chunk(k, j % 64 / 8) + j % 8] =
          __nv_bfloat16(k < 3 ? float(j) : 0.f);
    }
    optimized::fence_async();
  }
};
// S_ij -= slope |distance|, all of it; first[r] is slope times the distance of the first.
template <int n>
__device__ void add_edge(float (&S)[n], float slope, const float (&first)[2]) {
#pragma unroll
  for (int i = 0; i < n; ++i) S[i] += copysignf(fmaf(slope, place(i), first[i / 2 % 2]), -slope);
}

}  // namespace fa::scores
