// Sums in global memory to which several blocks add: the addition happens in the L2 cache, and
// nothing comes back. Of whole tiles: bulk_add in tma.cuh.
#pragma once
#include "common/core/cuda.hpp"

namespace fa::optimized {

// to[0 .. 3] += x, on Hopper (compute capability 9.0); `to` is a multiple of 16 bytes.
__device__ inline void add(float* to, const float* x) {
#ifdef FA_EMULATED
  emulator::check_alignment(to, 16);
  for (int e = 0; e < 4; ++e) atomicAdd(to + e, x[e]);
#else
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#endif
}

}  // namespace fa::optimized
