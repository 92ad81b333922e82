// Stage 05's tiles and products, for the two owners of a backward in fp32, as the walks have it:
//   a warp      4 TR rows of the tile that the block owns; its lanes lie in 4 rows of 8
//   a thread    rows ty + 4 i (i < TR), columns tx + 8 j (j < TK) of a tile of scores,
//               columns 4 tx + 32 y + {0, 1, 2, 3} of a gradient
#pragma once
#include "common/core/cuda.hpp"
#include "common/core/tiles.cuh"

namespace fa::beyond::fp32 {

inline constexpr int warps = 4, threads = 32 * warps;

// For head dimensions of at most D. `rows`: of the tile that the block owns. `cols`: of the tiles
// that come by. Rows are padded so that what 8 lanes touch at once lies in different banks.
template <int D_, int TR_, int TK_>
struct Tile {
  static constexpr int D = D_, TR = TR_, TK = TK_;
  static constexpr int rows = warps * 4 * TR, cols = 8 * TK;
  static constexpr int columns = (D + 31) / 32;
  static constexpr int pitch = D + 4, score_pitch = cols + 8;
  // Two tiles that stay, one that changes, the scores, and two numbers for each column.
  static constexpr std::size_t shared_bytes =
      sizeof(float) * (2 * rows * pitch + cols * pitch + rows * score_pitch + 2 * cols);
};

// f(Tile()) with the tile for head dimension d. The small ones fit into 64 KiB (a T4), the large
// ones read shared memory less often.
template <class F>
auto with_tile(std::int64_t d, bool small, F f) {
  if (d <= 32) return f(Tile<32, 4, 8>());
  if (d <= 64) return small ? f(Tile<64, 4, 4>()) : f(Tile<64, 4, 8>());
  return small ? f(Tile<128, 2, 4>()) : f(Tile<128, 4, 4>());
}
inline bool wants_small_tiles(std::int64_t d) {
  return with_tile(d, false, [](auto tile) { return decltype(tile)::shared_bytes; }) >
         shared_memory_limit();
}
template <class F>
auto with_tile(std::int64_t d, F f) {
  return with_tile(d, wants_small_tiles(d), f);
}

// tile[r][x] = X[first + r][x] for r < rows and x < d; rows and columns beyond are 0.
template <class Tile, int tile_rows>
__device__ void load(float* tile, const Rows<const float>& X, std::int64_t first, int rows,
                     bool vectorised) {
  constexpr int lanes = Tile::D / 4, at_once = threads / lanes;
  const int d = int(X.cols), r0 = threadIdx.x / lanes, x = threadIdx.x % lanes * 4;
  const float* from = X[first + r0] + x;
#pragma unroll
  for (int r = r0; r < r0 + tile_rows; r += at_once) {
    float4 four = make_float4(0, 0, 0, 0);
    if (r < rows && x < d) {
      if (vectorised)
        four = load4(from);
      else
        four = make_float4(from[0], x + 1 < d ? from[1] : 0, x + 2 < d ? from[2] : 0,
                           x + 3 < d ? from[3] : 0);
    }
    *reinterpret_cast<float4*>(tile + r * Tile::pitch + x) = four;
    from += at_once * X.stride;
  }
}

// X[first + r0 + 4 i][...] = scale g[i], for the rows of the tile that exist.
template <class Tile>
__device__ void store(const Rows<float>& X, std::int64_t first, int rows, int r0, float scale,
                      const float4 (&g)[Tile::TR][Tile::columns], bool vectorised) {
  const int d = int(X.cols), tx = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < Tile::TR; ++i) {
    if (r0 + 4 * i >= rows) continue;
#pragma unroll
    for (int y = 0; y < Tile::columns; ++y) {
      const int x = 4 * tx + 32 * y;
      float* to = X[first + r0 + 4 * i] + x;
      const float4 v =
          make_float4(scale * g[i][y].x, scale * g[i][y].y, scale * g[i][y].z, scale * g[i][y].w);
      if (vectorised && x < d) {
        *reinterpret_cast<float4*>(to) = v;
      } else {
        if (x < d) to[0] = v.x;
        if (x + 1 < d) to[1] = v.y;
        if (x + 2 < d) to[2] = v.z;
        if (x + 3 < d) to[3] = v.w;
      }
    }
  }
}

template <class Tile>
__device__ void clear(float4 (&g)[Tile::TR][Tile::columns]) {
#pragma unroll
  for (int i = 0; i < Tile::TR; ++i)
#pragma unroll
    for (int y = 0; y < Tile::columns; ++y) g[i][y] = make_float4(0, 0, 0, 0);
}

// s = A B^T: rows of A are the block's (r0 + 4 i), rows of B are the columns of s (tx + 8 j).
template <class Tile>
__device__ void product(float (&s)[Tile::TR][Tile::TK], const float* A, const float* B, int r0) {
  constexpr int TR = Tile::TR, TK = Tile::TK, pitch = Tile::pitch;
  const int tx = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < TR; ++i)
#pragma unroll
    for (int j = 0; j < TK; ++j) s[i][j] = 0;
#pragma unroll 2
  for (int x = 0; x < Tile::D; x += 4) {
    float4 a[TR];
#pragma unroll
    for (int i = 0; i < TR; ++i) a[i] = load4(A + (r0 + 4 * i) * pitch + x);
#pragma unroll
    for (int j = 0; j < TK; ++j) {
      const float4 b = load4(B + (tx + 8 * j) * pitch + x);
#pragma unroll
      for (int i = 0; i < TR; ++i) {
        s[i][j] += a[i].x * b.x;
        s[i][j] += a[i].y * b.y;
        s[i][j] += a[i].z * b.z;
        s[i][j] += a[i].w * b.w;
      }
    }
  }
}

// g += W X: W, [rows, cols], are weights in shared memory; rows of X are the columns of W.
template <class Tile>
__device__ void accumulate(float4 (&g)[Tile::TR][Tile::columns], const float* W, const float* X,
                           int r0) {
  constexpr int TR = Tile::TR, columns = Tile::columns;
  const int tx = threadIdx.x % 8;
#pragma unroll 2
  for (int c = 0; c < Tile::cols; c += 4) {
    float4 weight[TR];
#pragma unroll
    for (int i = 0; i < TR; ++i) weight[i] = load4(W + (r0 + 4 * i) * Tile::score_pitch + c);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int y = 0; y < columns; ++y) {
        const float4 v = load4(X + (c + k) * Tile::pitch + 4 * tx + 32 * y);
#pragma unroll
        for (int i = 0; i < TR; ++i) {
          const float w = (&weight[i].x)[k];
          g[i][y] = make_float4(g[i][y].x + w * v.x, g[i][y].y + w * v.y, g[i][y].z + w * v.z,
                                g[i][y].w + w * v.w);
        }
      }
  }
}

// W[r0 + 4 i][tx + 8 j] = s[i][j]: from registers to where accumulate() reads. Only the warp's own
// rows are written, and only the warp reads them; all may after a __syncthreads.
template <class Tile>
__device__ void share(float* W, const float (&s)[Tile::TR][Tile::TK], int r0) {
  const int tx = threadIdx.x % 8;
  __syncwarp();  // what was there has been read
#pragma unroll
  for (int i = 0; i < Tile::TR; ++i)
#pragma unroll
    for (int j = 0; j < Tile::TK; ++j) W[(r0 + 4 * i) * Tile::score_pitch + tx + 8 * j] = s[i][j];
  __syncwarp();  // what is there now may be read
}

}  // namespace fa::beyond::fp32
