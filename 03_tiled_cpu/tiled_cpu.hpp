// Stage 03: FlashAttention-2's forward on the CPU. Tiles of queries against tiles of keys, each
// small enough for the cache; no row of scores longer than a tile ever exists.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/core/tensor.hpp"

namespace fa::tiled_cpu {

enum class Kernel {
  tiled,  // the lesson, for float and double
  fast,   // the side trail in fast/: the same algorithm near the processor's peak, float only
};

struct Options {
  Kernel kernel = Kernel::tiled;
  int threads = 0;                // 0: all cores
  std::int64_t Br = 64, Bc = 64;  // tile of queries, tile of keys: 1 to 65536. For `tiled` only
};

// O = softmax(scale Q K^T + mask) V and, if asked for, LSE. T: float or double.
// Promises what stage 02 does, tiles of these sizes, and threads: the result is the same, bit by
// bit, for any number of them. Extra memory for each thread: Br Bc + Bc d + 2 Br elements, with
// tiles clipped to Nq and Nk (`tiled`); at most 1 MiB for d <= 256 (`fast`). `fast` multiplies the
// scale by log2(e): the product must be finite in float. A NaN in the value of a hidden key stays
// hidden with `tiled`; with `fast` it may reach a row if one of its group of fast::lanes rows sees
// a key of the same tile of 64, for 0 * NaN is NaN. Padding never does. Throws
// std::invalid_argument, before any write, for arguments outside these promises, and if that memory
// is not there.
template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options& options = {});

// The lesson: queries [i0, i0 + Br) of one head, clipped to its end. Q, O: [Nq, d]; K, V: [Nk, d];
// LSE: [Nq] or null. `scratch` holds scratch_elements(Br, Bc, d) elements that only this call uses.
template <class T>
void attention_tile(const Rows<const T>& Q, const Rows<const T>& K, const Rows<const T>& V, T scale,
                    const Mask& mask, std::int64_t i0, std::int64_t Br, std::int64_t Bc, T* scratch,
                    const Rows<T>& O, T* LSE);
inline std::size_t scratch_elements(std::int64_t Br, std::int64_t Bc, std::int64_t d) {
  return static_cast<std::size_t>(Br * Bc + Bc * d + 2 * Br);
}

}  // namespace fa::tiled_cpu
