// What both kernels of rung 1 are made of: tiles that come, gradients that leave, and the products
// of fragments in between.
#pragma once
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/ptx/mma.cuh"

namespace fa::optimized::mma_backward {

constexpr int warps = 4, threads = 32 * warps;
constexpr int Br = 64, Bc = 64;  // queries and keys in a tile

// Q_i, dO_i, K_j, V_j
template <int D>
constexpr std::size_t shared_bytes = (2 * Br + 2 * Bc) * D * 2;

// tile[r][x] = X[first + r][x] for r < rows, 0 beyond: 0 * NaN is NaN, so that P = 0 would not
// keep out what lies behind the last row. A thread copies eight numbers, 16 bytes, at a time.
template <int D, class T>
__device__ void load(T* tile, const Rows<const T>& X, std::int64_t first, int rows) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const T* from = X[first + r0] + 8 * chunk;
#pragma unroll
  for (int r = r0; r < r0 + 64; r += at_once) {
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (r < rows) eight = *reinterpret_cast<const uint4*>(from);
    *reinterpret_cast<uint4*>(tile + r * D + 8 * chunk) = eight;
    from += at_once * X.stride;
  }
}

// S = A B^T: the warp's 16 rows of A, all 64 of B. B's rows are the columns of the operand, so its
// pairs lie in memory.
template <int D, class T>
__device__ void product(float (&S)[8][4], const T* A, const T* B) {
  const int row = threadIdx.x % 32 / 4, x0 = threadIdx.x % 4 * 2;
#pragma unroll
  for (auto& block : S)
    for (float& s : block) s = 0;
#pragma unroll 4
  for (int x = x0; x < D; x += 16) {
    const T* a = A + row * D + x;
    const std::uint32_t A16[4] = {pair(a), pair(a + 8 * D), pair(a + 8), pair(a + 8 * D + 8)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const T* b = B + (8 * j + row) * D + x;
      mma<T>(S[j], A16, pair(b), pair(b + 8));
    }
  }
}

// G += W X: W is the warp's 16 x 64 of P or dS, rounded to T here, X a tile of 64 rows. Columns
// 16 c to 16 c + 15 of W are two blocks, already where they must be.
template <int D, class T>
__device__ void accumulate(float (&G)[D / 8][4], const float (&W)[8][4], const T* X) {
  const int row = threadIdx.x % 4 * 2, column = threadIdx.x % 32 / 4;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float(&left)[4] = W[2 * c], (&right)[4] = W[2 * c + 1];
    const std::uint32_t W16[4] = {
        rounded_pair<T>(left[0], left[1]), rounded_pair<T>(left[2], left[3]),
        rounded_pair<T>(right[0], right[1]), rounded_pair<T>(right[2], right[3])};
#pragma unroll
    for (int y = 0; y < D / 8; ++y) {
      // A pair of X is one column of two rows: two reads of 16 bits.
      const T* x = X + (16 * c + row) * D + 8 * y + column;
      mma<T>(G[y], W16, pair(x[0], x[D]), pair(x[8 * D], x[9 * D]));
    }
  }
}

// X[first + r] = factor G, of this thread's two rows r0 and r0 + 8 those that exist
template <int D, class T>
__device__ void store(const Rows<T>& X, std::int64_t first, int rows, int r0, float factor,
                      const float (&G)[D / 8][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (r0 + 8 * i >= rows) continue;
    T* to = X[first + r0 + 8 * i] + threadIdx.x % 4 * 2;
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
      *reinterpret_cast<std::uint32_t*>(to + 8 * y) =
          rounded_pair<T>(factor * G[y][2 * i], factor * G[y][2 * i + 1]);
  }
}

}  // namespace fa::optimized::mma_backward
