// Copies from device to shared memory that no thread waits for: 4 or 16 bytes each, asked for by one
// thread and there after that thread's cp_async_wait(); a barrier afterwards tells the others.
// From compute capability 8.0 on the copy engine of the SM does it; older GPUs load and store. On
// the CPU the place holds NaN from the request until the wait: neither may be read too early nor
// written while somebody still reads.
#pragma once
#include <cstdint>

#include "common/core/cuda.hpp"

namespace fa {

// to[0 .. bytes / 4 - 1] = from[...], or 0 where it is not `there`: then nothing is read. Both
// addresses are multiples of `bytes`.
template <int bytes>
__device__ __forceinline__ void cp_async(float* to, const float* from, bool there) {
  static_assert(bytes == 4 || bytes == 16);
#ifdef FA_EMULATED
  emulator::check_alignment(to, bytes);
  if (there) emulator::check_alignment(from, bytes);
  emulator::copy_later(to, there ? from : nullptr, bytes);
#elif __CUDA_ARCH__ >= 800
  const auto address = std::uint32_t(__cvta_generic_to_shared(to));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(address), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
#else
  for (int e = 0; e < bytes / 4; ++e) to[e] = there ? from[e] : 0;
#endif
}

// Until all that this thread has asked for is there.
__device__ __forceinline__ void cp_async_wait() {
#ifdef FA_EMULATED
  emulator::copy_now();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace fa
