// The side trail: stage 03's algorithm close to the multiply-add peak of the processor.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "03_tiled_cpu/fast/micro_kernel.hpp"
#include "common/core/tensor.hpp"

namespace fa::tiled_cpu::fast {

inline constexpr std::int64_t Bc = 64;                                    // keys in a tile
inline constexpr int groups = std::max(1, 256 / lanes);                   // that share a tile
inline constexpr std::int64_t block_rows = std::int64_t(groups) * lanes;  // queries in a task

// Q and O transposed, the scores of one tile, m and l.
inline std::size_t scratch_elements(std::int64_t d) {
  return std::size_t(2 * block_rows * d + Bc * lanes + 2 * block_rows + simd::W);
}

// Queries [i0, i0 + Groups * lanes) of one head, clipped to its end; otherwise as attention_tile.
// The parameters exist so that the benchmark can take single ideas away: Groups of queries that
// share a tile of keys (1 or `groups`), and transposes InRegisters (only together with `groups`).
template <int Groups = groups, bool InRegisters = true>
void attention_block(const Rows<const float>& Q, const Rows<const float>& K,
                     const Rows<const float>& V, float scale, const Mask& mask, std::int64_t i0,
                     float* scratch, const Rows<float>& O, float* LSE);

}  // namespace fa::tiled_cpu::fast
