// The tiles of this walk's backward in fp32.
#pragma once
#include "06_optimized/beyond/dropout/keep.cuh"
#include "06_optimized/beyond/tile.cuh"

namespace fa::dropout {

using namespace beyond::fp32;

// f(Tile()) with the tile for head dimension d.
template <class F>
void with_tile(std::int64_t d, F f) {
  if (d <= 32) return f(Tile<32, 4, 8>());
  if (d <= 64) return f(Tile<64, 4, 8>());
  f(Tile<128, 4, 4>());
}

}  // namespace fa::dropout
