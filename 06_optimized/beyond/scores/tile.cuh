// The tiles of this walk's backward in fp32. Q and K are turned as they are loaded, dQ and dK
// turned back as they go.
#pragma once
#include "06_optimized/beyond/scores/change.cuh"
#include "06_optimized/beyond/tile.cuh"

namespace fa::scores {

namespace fp32 {

using namespace beyond::fp32;

// f(Tile()) with the tile for head dimension d: at d <= 64 the small one, for positions and a bias
// are read besides.
template <class F>
auto with_tile(std::int64_t d, F f) {
  if (d <= 64) return f(Tile<64, 4, 4>());
  return wants_small_tiles(d) ? f(Tile<128, 2, 4>()) : f(Tile<128, 4, 4>());
}

// The same as load, of a tile of Q or K: row first + r is turned for position offset + first + r.
template <class Tile, int tile_rows>
__device__ void load_turned(float* tile, const Rows<const float>& X, std::int64_t first, int rows,
                            const Rotary& rotary, std::int64_t offset) {
  for (int n = threadIdx.x; n < tile_rows * Tile::D; n += threads) {
    const int r = n / Tile::D, x = n % Tile::D;
    tile[r * Tile::pitch + x] =
        r < rows && x < X.cols ? turned(rotary, X[first + r], x, offset + first + r) : 0;
  }
}

// The same as store, by way of the tile: what is written is turned back.
template <class Tile>
__device__ void store_turned_back(const Rows<float>& X, std::int64_t first, int rows, int r0,
                                  float scale, const float4 (&g)[Tile::TR][Tile::columns],
                                  float* tile, const Rotary& rotary, std::int64_t offset) {
  __syncthreads();  // what was there is no longer read
#pragma unroll
  for (int i = 0; i < Tile::TR; ++i)
#pragma unroll
    for (int y = 0; y < Tile::columns; ++y)
      store4(
          tile + (r0 + 4 * i) * Tile::pitch + 4 * (threadIdx.x % 8) + 32 * y,
          make_float4(scale * g[i][y].x, scale * g[i][y].y, scale * g[i][y].z, scale * g[i][y].w));
  __syncthreads();  // all rows are complete
  for (int n = threadIdx.x; n < rows * Tile::D; n += threads) {
    const int r = n / Tile::D, x = n % Tile::D;
    if (x < X.cols)
      X[first + r][x] = turned(rotary, tile + r * Tile::pitch, x, offset + first + r, -1);
  }
}

}  // namespace fp32
}  // namespace fa::scores
