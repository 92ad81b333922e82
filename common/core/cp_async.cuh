// Copies from device to shared memory that no thread waits for: 4 or 16 bytes each, asked for by
// one thread, there after that thread's wait; a barrier afterwards tells the others. A thread's
// copies since its last commit are a group: it waits for all but the newest groups, or for all.
// From compute capability 8.0 on the copy engine of the SM does it; older GPUs load and store. On
// the CPU the place holds NaN from the request until the wait that covers it: neither may be read
// too early nor written while somebody still reads.
#pragma once
#include <cstdint>

#include "common/core/cuda.hpp"

namespace fa {

// `size` bytes, of which only the first `bytes` are read; the rest becomes 0. Both addresses are
// multiples of `size`.
template <int size = 16, class T>
__device__ __forceinline__ void cp_async(T* to, const T* from, int bytes) {
  static_assert(size == 4 || size == 16);
#ifdef FA_EMULATED
  emulator::check_alignment(to, size);
  if (bytes > 0) emulator::check_alignment(from, size);
  emulator::copy_later(to, from, bytes, size);
#elif __CUDA_ARCH__ >= 800
  const auto address = std::uint32_t(__cvta_generic_to_shared(to));
  if constexpr (size == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(address), "l"(from), "r"(bytes)
                 : "memory");
#else
  constexpr int each = int(sizeof(T));
  for (int e = 0; e < size / each; ++e) to[e] = e * each < bytes ? from[e] : T{};
#endif
}

// All of `size` bytes, or 0 where `from` is not `there`: then nothing is read.
template <int size = 16, class T>
__device__ __forceinline__ void cp_async(T* to, const T* from, bool there) {
  cp_async<size>(to, from, there ? size : 0);
}

__device__ __forceinline__ void cp_async_commit() {
#ifdef FA_EMULATED
  emulator::commit_copies();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most the `newest` latest groups of this thread are still on their way.
template <int newest>
__device__ __forceinline__ void cp_async_wait() {
#ifdef FA_EMULATED
  emulator::wait_for_copies(newest);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" : : "n"(newest) : "memory");
#endif
}

// Until all that this thread has asked for is there, in a group or not.
__device__ __forceinline__ void cp_async_wait() {
#ifdef FA_EMULATED
  emulator::commit_copies();
  emulator::wait_for_copies(0);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace fa
