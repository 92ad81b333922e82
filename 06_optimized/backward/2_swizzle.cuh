// What both kernels of rung 2 are made of: tiles that come and go, and products of fragments.
#pragma once
#include <type_traits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::optimized::swizzle_backward {

constexpr int warps = 4, threads = 32 * warps;
constexpr std::size_t most_shared = 99 * 1024;  // of a block on 8.6 and 8.9; 8.0 and 9.0 have more

// dK and dV, in 2_swizzle_keys.cu.
template <class T>
void launch_swizzle_dkv(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                        cudaStream_t stream);

// Where chunk c of row r of a tile lies. From there chunk c + x is at ^ 8 x, if c and x have no bit
// in common: one instruction, where a sum would have to be swizzled anew.
template <int D>
__device__ int at(int r, int c) {
  return r * D + 8 * swizzled(r, c);
}

// tile[r][x] = X[first + r][x] for r < rows and x < d, 0 beyond: 0 * NaN is NaN, so that P = 0
// would not keep out what lies behind the last row. A thread starts copies of eight numbers, 16
// bytes; where addresses are not multiples of 16 it fetches them one by one, and waits.
template <int D, int tile_rows, class T>
__device__ void load(T* tile, const Rows<const T>& X, std::int64_t first, int rows, bool aligned) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const int inside = min(8, max(0, int(X.cols) - 8 * chunk));  // of the eight
  const T* from = X[first + r0] + 8 * chunk;
  if (aligned) {
#pragma unroll
    for (int r = r0; r < r0 + tile_rows; r += at_once) {
      cp_async(tile + at<D>(r, chunk), from, r < rows ? 2 * inside : 0);
      from += at_once * X.stride;
    }
  } else {
#pragma unroll 1
    for (int r = r0; r < r0 + tile_rows; r += at_once) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        tile[at<D>(r, chunk) + e] = r < rows && e < inside ? from[e] : T(0.f);
      from += at_once * X.stride;
    }
  }
}

// S += A B^T: the warp's rows of A, all `cols` rows of B. B's rows are the columns of the operand,
// so its pairs lie in memory.
template <int D, int groups, int cols, class T>
__device__ void add_product(float (&S)[groups][cols / 8][4], const T* A, const T* B) {
  const RowChunk by_rows = ldmatrix_by_rows(threadIdx.x % 32);
  const RowChunk by_columns = ldmatrix_by_columns(threadIdx.x % 32);
  const int a_at = at<D>(by_rows.row, by_rows.chunk);  // what this lane names to ldmatrix: of the
  const int b_at = at<D>(by_columns.row, by_columns.chunk);  // first block, others differ from it
#pragma unroll 4
  for (int x = 0; x < D / 16; ++x) {
    std::uint32_t A16[groups][4];
#pragma unroll
    for (int g = 0; g < groups; ++g) ldmatrix(A16[g], A + 16 * g * D + (a_at ^ 16 * x));
#pragma unroll
    for (int j = 0; j < cols / 8; j += 2) {
      std::uint32_t B16[4];
      ldmatrix(B16, B + 8 * j * D + (b_at ^ 16 * x));
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        mma<T>(S[g][j], A16[g], B16[0], B16[1]);
        mma<T>(S[g][j + 1], A16[g], B16[2], B16[3]);
      }
    }
  }
}

// S = A B^T
template <int D, int groups, int cols, class T>
__device__ void product(float (&S)[groups][cols / 8][4], const T* A, const T* B) {
#pragma unroll
  for (auto& of_group : S)
    for (auto& block : of_group)
      for (float& s : block) s = 0;
  add_product<D, groups, cols>(S, A, B);
}

// W16 = W rounded to T, as the left operand of a product: columns 16 k to 16 k + 15 are two blocks
// of W, already where they must be.
template <class T, int steps, int groups>
__device__ void round(std::uint32_t (&W16)[steps][groups][4],
                      const float (&W)[groups][2 * steps][4]) {
#pragma unroll
  for (int k = 0; k < steps; ++k)
#pragma unroll
    for (int i = 0; i < 4 * groups; ++i) {
      const float* two = W[i / 4][2 * k + i / 2 % 2] + i % 2 * 2;
      W16[k][i / 4][i % 4] = rounded_pair<T>(two[0], two[1]);
    }
}

// G += W X: the rows of the tile X are the columns of W.
template <int D, int steps, int groups, class T>
__device__ void accumulate(float (&G)[groups][D / 8][4],
                           const std::uint32_t (&W16)[steps][groups][4], const T* X) {
  const RowChunk by_rows = ldmatrix_by_rows(threadIdx.x % 32);
  const int x_at = at<D>(by_rows.row, by_rows.chunk);
#pragma unroll
  for (int k = 0; k < steps; ++k)
#pragma unroll
    for (int y = 0; y < D / 8; y += 2) {
      std::uint32_t X16[4];
      ldmatrix_transposed(X16, X + 16 * k * D + (x_at ^ 8 * y));
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        mma<T>(G[g][y], W16[k][g], X16[0], X16[1]);
        mma<T>(G[g][y + 1], W16[k][g], X16[2], X16[3]);
      }
    }
}

// X[first + r] = factor G, of the warp's rows those that exist. They pass through `tile`, of which
// a warp reads and writes its own rows only, so that memory is written in chunks of 16 bytes.
template <int D, int groups, class T>
__device__ void store(const Rows<T>& X, std::int64_t first, int rows, float factor,
                      const float (&G)[groups][D / 8][4], T* tile, bool aligned) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4, x0 = lane % 4 * 2, d = int(X.cols);
  __syncwarp();  // what was there is no longer read
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i)
#pragma unroll
    for (int y = 0; y < D / 8; ++y) {
      const float* two = G[i / 2][y] + i % 2 * 2;
      *reinterpret_cast<std::uint32_t*>(tile + at<D>(r0 + 8 * i, y) + x0) =
          rounded_pair<T>(factor * two[0], factor * two[1]);
    }
  __syncwarp();  // the warp's rows are complete
  for (int chunk = lane; chunk < 16 * groups * (D / 8); chunk += 32) {
    const int r = warp_row + chunk / (D / 8), x = chunk % (D / 8) * 8;
    if (r >= rows || x >= d) continue;
    const T* from = tile + at<D>(r, x / 8);
    T* to = X[first + r] + x;
    if (aligned && x + 8 <= d)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int e = 0; e < 8 && x + e < d; ++e) to[e] = from[e];
  }
}

template <class T>
bool all_in_16_bytes(const Backward<T>& t) {
  return in_16_bytes(t.Q) && in_16_bytes(t.K) && in_16_bytes(t.V) && in_16_bytes(t.dO) &&
         in_16_bytes(t.dQ) && in_16_bytes(t.dK) && in_16_bytes(t.dV);
}

}  // namespace fa::optimized::swizzle_backward
