// The tiles of this walk's backward in fp32.
#pragma once
#include "06_optimized/beyond/packed/sequence.cuh"
#include "06_optimized/beyond/tile.cuh"

namespace fa::packed {

using namespace beyond::fp32;

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

}  // namespace fa::packed
