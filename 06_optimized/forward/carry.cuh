// Where TMA cannot go (addresses or rows that are no multiples of 16 bytes, d no multiple of 8):
// the 128 threads of a loading warpgroup carry tiles into shared memory themselves, a number at a
// time, and a thread that computes writes its numbers of O. Slow, and right everywhere.
#pragma once
#include <cstdint>

#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/tma.cuh"
#include "common/core/tensor.hpp"

namespace fa::optimized {

// tile[r][x] = X[first + r][x] for first + r < end and x < d, 0 beyond, swizzled as TMA does it: a
// tile of `rows` rows in boxes of 64 columns. `barrier` is a numbered one for these threads.
template <int D, int rows, class T>
__device__ void carry(T* tile, const View<const T>& X, Barrier* full, int barrier, std::int64_t end,
                      std::int64_t d, int first, int h, int b) {
#pragma unroll 1
  for (int e = threadIdx.x; e < rows * D; e += 128) {
    const int r = e / D, x = e % D;
    tile[x / 64 * rows * 64 + swizzled_chunk(r, x % 64 / 8) + x % 8] =
        first + r < end && x < d ? X.at(b, h, first + r)[x] : T(0.0f);
  }
  fence_async();
  sync(barrier, 128);
  if (threadIdx.x == 0) arrive(full);
}

// The thread's numbers of O, in rows `row` and row + 8 of a tile of `rows` that begins at i0.
template <class T, int n>
__device__ void carry_out(const View<T>& X, const float (&O)[n], std::int64_t d, int row, int rows,
                          int i0, int h, int b) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int r = row + 8 * (i / 2 % 2), x = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
    if (r < rows && x < d) X.at(b, h, i0 + r)[x] = T(O[i]);
  }
}

}  // namespace fa::optimized
