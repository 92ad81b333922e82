// In which order blocks of threads take the tiles of all heads.
//
// Heads come in sections. In each, first the first tile of every head (or the last one), then the
// next ... With a causal mask tiles cost from one block of keys to all of them: the last rows see
// most keys, and most rows see the first keys. If the tiles that cost most are taken first, those
// taken last are short, and all SMs are done at about the same time. Sections are there for the L2
// cache: of what the tiles under way read, most should be in it. How large they may be is measured,
// kernel by kernel.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/core/problem.hpp"

namespace fa::optimized {

// Int: int, or std::int64_t where that is better for the registers of the whole kernel.
template <class Int>
struct Order {
  Int tiles, heads, section;  // tiles of a head, all heads, heads of a section
  bool last_first;            // of a head, the last tile

  // The head and the tile that number n takes, n < heads tiles.
  FA_HOST_DEVICE void place(Int n, Int& head, Int& tile) const {
    const Int first = n / (section * tiles) * section;
    const Int here = section < heads - first ? section : heads - first;
    const Int rest = n - first * tiles;
    head = first + rest % here;
    tile = last_first ? tiles - 1 - rest / here : rest / here;
  }
};

// How many heads a section may have if each has so many bytes, and the section `all`: a power of
// two, or all heads; at least one.
inline int heads_within(std::int64_t all, std::int64_t bytes, std::int64_t heads) {
  std::int64_t section = 1;
  while (section < heads && 2 * section * bytes <= all) section *= 2;
  return int(std::min(section, heads));
}

}  // namespace fa::optimized
