// ptx/barrier.cuh on the CPU: the same functions; barrier.cpp says what they do.
#pragma once
#include <cstdint>

#include "common/core/cuda.hpp"

namespace fa::optimized {

using Barrier = std::uint64_t;

std::uint32_t shared_address(const void* p);
void init(Barrier* b, int count);
void fence_barriers();
void arrive(Barrier* b);
void arrive_expecting(Barrier* b, int bytes);
void wait(Barrier* b, std::uint32_t phase);
unsigned rank_in_cluster();
void arrive_at(Barrier* b, unsigned rank);
void sync_cluster();
void* in_block(void* p, unsigned rank);
template <class T>
[[gnu::always_inline]] inline T* in_block(T* p, unsigned rank) {  // a finding names who calls it
  return static_cast<T*>(in_block(static_cast<void*>(p), rank));
}
void sync(int number, int threads);
void arrive(int number, int threads);
void next_kernel_may_start();
void previous_kernel_is_done();
void give_registers_to(int registers);
void take_registers_to(int registers);
template <int registers>
__device__ void give_registers() {
  give_registers_to(registers);
}
template <int registers>
__device__ void take_registers() {
  take_registers_to(registers);
}
bool elected();
void stop();

}  // namespace fa::optimized
