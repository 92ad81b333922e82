// dS in memory: from the kernel that makes it to the one that multiplies it with K.
//
// A block has 64 keys and 64 queries, 8 KiB, and lies in one piece: blocks [B, Hq, rows / 64,
// kept_tiles]. The warpgroup that has made dS^T writes it as it holds it, a register of a warp in
// 128 bytes in a row: a matrix of 8 keys and 8 queries. So a block is [8, 8, 8, 8]: which eight
// keys, which eight queries, a key, a query. ldmatrix reads it as dS, transposed.
#pragma once
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/ptx/mma.cuh"

namespace fa::optimized {

struct KeptBlock {
  static constexpr int keys = 64, queries = 64, numbers = keys * queries;
  static constexpr int bytes = 2 * numbers;

  // Where the 8 x 8 matrix of these eight keys and eight queries begins.
  __device__ static int matrix(int key, int query) { return (key * 8 + query) * 64; }
};

// Number t (of this part) of the tiles of keys, and 64 queries from i on, a multiple of 64.
template <class T>
__device__ T* kept_block(const Passed& passed, int head, int i, int t) {
  const std::int64_t block = (head * passed.rows + i) / 64 * passed.kept_tiles + t;
  return static_cast<T*>(passed.kept) + block * KeptBlock::numbers;
}

// dS^T of a warp, 16 keys and 64 queries, rounded.
template <class T>
__device__ void keep(T* block, const std::uint32_t (&dS)[4][4], int warp, int lane) {
#pragma unroll
  for (int x = 0; x < 4; ++x)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      reinterpret_cast<std::uint32_t*>(
          block + KeptBlock::matrix(2 * warp + k % 2, 2 * x + k / 2))[lane] = dS[x][k];
}

// dS of a warp, 16 queries and 64 keys, as A of a product, from a block in shared memory.
template <class T>
__device__ void get_kept(std::uint32_t (&dS)[4][4], const T* block, int warp, int lane) {
  const int i = lane / 8, row = lane % 8;
#pragma unroll
  for (int x = 0; x < 4; ++x)
    ldmatrix_transposed(dS[x],
                        block + KeptBlock::matrix(2 * x + i / 2, 2 * warp + i % 2) + 8 * row);
}

}  // namespace fa::optimized
