// The k largest weights of a row, kept by a warp: a weight and its key are one number, a lane holds
// one of them, and who comes in moves the smaller ones a lane further.
#pragma once
#include "06_optimized/beyond/weights/weights.hpp"

namespace fa::weights {

// The weight's bits above, the key's complement below: a larger weight is a larger rank, and of
// equal weights the smaller key. The bits of numbers >= 0 are in the numbers' order, NaN last. 0 is
// nobody, and reads as weight 0 of key -1.
using Rank = unsigned long long;

__device__ inline Rank rank_of(float weight, std::int64_t key) {
  std::uint32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  return Rank(bits & 0x7fffffff) << 32 | ~std::uint32_t(key);
}
__device__ inline float weight_of(Rank rank) {
  const std::uint32_t bits = std::uint32_t(rank >> 32);
  float weight;
  memcpy(&weight, &bits, sizeof weight);
  return weight;
}
__device__ inline std::int32_t key_of(Rank rank) { return std::int32_t(~std::uint32_t(rank)); }

// Every lane passes the number of its place, first the largest, and a rank that may belong there,
// or 0; gets the new number of its place. By all lanes of a warp.
__device__ inline Rank with_offers(Rank here, Rank offer, int k) {
  constexpr unsigned all = 0xffffffff;
  const int lane = threadIdx.x % 32;
  // [quote insert]
  // Most offers are smaller than all that are there, and then one question is all it costs.
  while (__any_sync(all, offer > __shfl_sync(all, here, k - 1))) {
    Rank top = offer;
    for (int bits = 16; bits > 0; bits /= 2) {
      const Rank other = __shfl_xor_sync(all, top, bits);
      if (other > top) top = other;
    }
    if (offer == top) offer = 0;  // no two keys have the same rank
    const Rank before = __shfl_sync(all, here, (lane + 31) % 32);
    if (here < top) here = lane > 0 && before < top ? before : top;
  }
  // [end quote]
  return here;
}

}  // namespace fa::weights
