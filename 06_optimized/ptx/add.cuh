// Sums in global memory to which several blocks add, in any order or in turns: the addition happens
// in the L2 cache, and nothing comes back. Of whole tiles: bulk_add in tma.cuh.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/copies.hpp"
#endif
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

// ---- in turns ----
// A sum of floats depends on the order. Blocks of threads that add one after the other count in
// `turn`, which begins as 0, how many have done so. A block must not wait for one that starts
// later: it may hold the SM that the other one needs.

#ifndef FA_EMULATED
// Waits until n have added. What they have done is seen, by the copy engine too.
__device__ inline void wait_turn(const int* turn, int n) {
  int now;
  do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  while (now != n);
  asm volatile("fence.proxy.async.global;" : : : "memory");
}
// The next one may add: what this thread has done is done, and what others did before a barrier
// that it has passed. What it asked the copy engine for it has waited for by tma_wait().
__device__ inline void pass_turn(int* turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(turn) : "memory");
}
#endif

}  // namespace fa::optimized
