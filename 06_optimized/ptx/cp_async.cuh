// Copies from global to shared memory that pass by the registers and do not wait, from compute
// capability 8.0 on. A thread's copies since its last commit are a group; it waits for groups.
// Waiting covers the thread's own copies only: a __syncthreads() must follow.
#pragma once
#include <cstdint>

namespace fa::optimized {

// 16 bytes; both addresses are multiples of 16. Only the first `bytes` are read, the rest is 0.
template <class T>
__device__ void cp_async(T* to, const T* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(std::uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most the `newest` latest groups of this thread are still on their way.
template <int newest>
__device__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(newest) : "memory");
}

}  // namespace fa::optimized
