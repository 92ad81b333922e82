// What the fast fp32 kernels of stages 04 and 05 share and none is about: four numbers at once where
// the tensors allow it, and tiles of shared memory whose rows do not all begin in the same bank.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/core/cp_async.cuh"
#include "common/core/cuda.hpp"
#include "common/core/problem.hpp"
#include "common/core/tensor.hpp"

namespace fa {

inline __device__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
inline __device__ void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }

// Four numbers at once need addresses that are multiples of 16 bytes: the first and all strides.
template <class T>
bool aligned(const View<T>& v) {
  return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.batch % 4 == 0 &&
         v.head % 4 == 0 && v.row % 4 == 0;
}
inline bool aligned(const Problem& p, const Forward<float>& t) {
  return p.d % 4 == 0 && aligned(t.Q) && aligned(t.K) && aligned(t.V) && aligned(t.O);
}
inline bool aligned(const Problem& p, const Backward<float>& t) {
  return p.d % 4 == 0 && aligned(t.Q) && aligned(t.K) && aligned(t.V) && aligned(t.O) &&
         aligned(t.dO) && aligned(t.dQ) && aligned(t.dK) && aligned(t.dV);
}

// Row r of a tile begins at r columns + 4 (r / every): after `every` rows the banks move on by
// four. With every = none the rows lie without gaps.
constexpr int none = 1 << 20;

// For each group of four columns of rows first ... of X that the tile holds:
// copy(to, from, there, left) with the columns that are left from there on. Rows from `present` on
// and columns from X.cols on are not `there`. A thread keeps its four columns and goes down the
// rows.
template <int threads, int columns, int rows, int every, class Copy>
__device__ __forceinline__ void for_each_four(float* tile, const Rows<const float>& X,
                                              std::int64_t first, int present, int x0,
                                              const Copy& copy) {
  constexpr int at_once = threads / (columns / 4);
  static_assert(every == none || at_once % every == 0 || every % at_once == 0);
  const int r0 = threadIdx.x / (columns / 4), x = threadIdx.x % (columns / 4) * 4;
  const int left = int(X.cols) - x0 - x;
  const float* from = X[first + r0] + x0 + x;
  float* const to = tile + r0 * columns + r0 / every * 4 + x;
#pragma unroll
  for (int r = 0; r < rows; r += at_once) {
    copy(to + r * columns + r / every * 4, from, r0 + r < present, left);
    from += at_once * X.stride;
  }
}

// Columns x0 ... x0 + columns - 1 of rows first ... first + rows - 1 of X into the tile; what does
// not exist is 0.
template <int threads, int columns, int rows, int every, bool vectorised>
__device__ __forceinline__ void load_tile(float* tile, const Rows<const float>& X,
                                          std::int64_t first, int present, int x0 = 0) {
  for_each_four<threads, columns, rows, every>(
      tile, X, first, present, x0, [](float* to, const float* from, bool there, int left) {
        if constexpr (vectorised) {
          store4(to, there && left > 0 ? load4(from) : make_float4(0, 0, 0, 0));
        } else {
#pragma unroll 2
          for (int e = 0; e < 4; ++e) to[e] = there && e < left ? from[e] : 0;
        }
      });
}
// The same, asked for: there after cp_async_wait() of all threads and a barrier.
template <int threads, int columns, int rows, int every, bool vectorised>
__device__ __forceinline__ void ask_for_tile(float* tile, const Rows<const float>& X,
                                             std::int64_t first, int present, int x0 = 0) {
  for_each_four<threads, columns, rows, every>(
      tile, X, first, present, x0, [](float* to, const float* from, bool there, int left) {
        if constexpr (vectorised)
          cp_async<16>(to, from, there && left > 0);
        else
#pragma unroll 1
          for (int e = 0; e < 4; ++e) cp_async<4>(to + e, from + e, there && e < left);
      });
}

// O[x ... x + 3] = factor times four numbers, as far as there are columns.
template <bool vectorised>
__device__ __forceinline__ void store_columns(float* O, int x, int d, const float* numbers,
                                              float factor) {
  if (vectorised && x < d)
    store4(O + x, make_float4(factor * numbers[0], factor * numbers[1], factor * numbers[2],
                              factor * numbers[3]));
  for (int e = 0; !vectorised && e < 4; ++e)
    if (x + e < d) O[x + e] = factor * numbers[e];
}

// O[x ... x + 3] += four numbers, as far as there are columns, into memory that others add to as well.
// From compute capability 9.0 on all four are one operation of the L2.
template <bool vectorised>
__device__ __forceinline__ void add_columns(float* O, int x, int d, float4 numbers) {
#if !defined(FA_EMULATED) && __CUDA_ARCH__ >= 900
  if constexpr (vectorised) {
    if (x < d) atomicAdd(reinterpret_cast<float4*>(O + x), numbers);
    return;
  }
#endif
  if (x < d) atomicAdd(O + x, numbers.x);
  if (x + 1 < d) atomicAdd(O + x + 1, numbers.y);
  if (x + 2 < d) atomicAdd(O + x + 2, numbers.z);
  if (x + 3 < d) atomicAdd(O + x + 3, numbers.w);
}

// 2^x by the hardware, with 0 for less than 2^-126.
inline __device__ float exp2_of(float x) {
#ifdef FA_EMULATED
  return std::exp2(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace fa
