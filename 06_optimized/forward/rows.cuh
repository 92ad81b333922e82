// A row of S in rungs 2 to 5, fa2 and the walks: an accumulator of mma.sync holds it in 4 lanes,
// which combine what each of them has found. Rung 1 spells this out.
#pragma once
#include "common/core/cuda.hpp"

namespace fa::optimized {

__device__ inline float row_max(float x) {
  for (int bits = 2; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ inline float row_sum(float x) {
  for (int bits = 2; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}

}  // namespace fa::optimized
