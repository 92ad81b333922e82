// How parts of a block wait for each other on Hopper (compute capability 9.0), beside
// __syncthreads: barriers in shared memory that also count bytes, numbered barriers for some of the
// warps, a branch that keeps code on its side, and registers that go from those who wait to those
// who work.
#pragma once
#include <cstdint>

#include "common/core/cuda.hpp"
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/barrier.hpp"
#endif

namespace fa::optimized {

#ifndef FA_EMULATED
// Where a pointer into shared memory points, as the instructions want it.
__device__ inline std::uint32_t shared_address(const void* p) {
  return std::uint32_t(__cvta_generic_to_shared(p));
}

// ---- a branch that is never taken ----
// ptxas moves arithmetic across barriers and waits, but nothing across a branch. So
// `if (what never holds) stop();` keeps apart what stands before and behind it. Were it reached,
// the launch would end with an error.

__device__ inline void stop() { asm volatile("brkpt;"); }

// ---- barriers in shared memory ("mbarrier") ----
// A barrier has a phase, 0 first, that ends when `count` arrivals have come and all the bytes that
// were announced; then it counts anew. Who waits names the phase that must have ended: 0, 1, 0 ...

using Barrier = std::uint64_t;

// By one thread; then fence_barriers() by it, then __syncthreads().
__device__ inline void init(Barrier* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(b)), "r"(count)
               : "memory");
}
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
__device__ inline void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(b)) : "memory");
}
// Arrives, and announces bytes that a copy will bring.
__device__ inline void arrive_expecting(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(b)), "r"(bytes)
               : "memory");
}
// Waits for the end of a phase. A barrier that was never used counts as one whose phase 1 has
// ended: who waits for free space passes at once.
__device__ inline void wait(Barrier* b, std::uint32_t phase) {
  std::uint32_t done = 0;
  do
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(phase)
        : "memory");
  while (!done);
}

// ---- clusters: blocks that run at the same time and reach each other's shared memory ----

__device__ inline unsigned rank_in_cluster() {
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Arrives at the barrier that lies at the same place in the block of that rank. It orders nothing
// but what has ended by then, as products waited for have: `.release.cluster` takes much longer.
__device__ inline void arrive_at(Barrier* b, unsigned rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
      :
      : "r"(shared_address(b)), "r"(rank)
      : "memory");
}
// __syncthreads for all blocks of a cluster: before one arrives where another has yet to initialise
// its barriers, or ends where another will still arrive, or read.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;"
      :
      :
      : "memory");
}

// The same place in the shared memory of the block of that rank, to read and write there.
template <class T>
__device__ T* in_block(T* p, unsigned rank) {
  std::uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// ---- numbered barriers, 1 to 15 (0 is __syncthreads) ----
// `threads` of the block, a multiple of 32, take part: some wait, others only say that they came.

__device__ inline void sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
__device__ inline void arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

// ---- kernels that overlap ----
// A kernel launched with programmatic stream serialization may start when every block of the kernel
// before it has said so, or has ended; where there is room, that is, beside that kernel's last
// blocks. Until that kernel is done it must neither use what it writes nor overwrite what it reads.
// And one of its blocks should wait for it before it ends: nobody promises that who comes later in
// the stream waits for more than this kernel.

__device__ inline void next_kernel_may_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
// Waits until the kernel before this one has ended and its writes are visible.
__device__ inline void previous_kernel_is_done() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
}

// ---- roles ----

// All threads of a warpgroup at once: give registers back, or take what was given back.
template <int registers>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers));
}
template <int registers>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers));
}
// True in one thread of the warp.
__device__ inline bool elected() {
  std::uint32_t me;
  asm volatile(
      "{ .reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(me));
  return me;
}
#endif  // not FA_EMULATED

// Was the kernel built for compute capability 9.0 or later? One that has other code for older GPUs
// may run there, too, and then the host launches it in another way.
template <class Kernel>
bool built_for_9_0([[maybe_unused]] Kernel kernel) {
#ifdef FA_EMULATED
  return true;
#else
  cudaFuncAttributes of{};
  FA_CUDA_CHECK(cudaFuncGetAttributes(&of, kernel));
  return of.ptxVersion >= 90;
#endif
}

// ---- what they are used for, on GPU and CPU alike ----

// A place in a ring of buffers, and the phase in which it is visited.
template <int size>
struct Ring {
  int at = 0;
  std::uint32_t phase = 0;
  __device__ void next() {
    if (++at == size) {
      at = 0;
      phase ^= 1;
    }
  }
};

// The barriers of a ring: a buffer is full when the loader says so and its bytes are there, free
// when all its readers have said so.
template <int size>
__device__ void init(Barrier (&full)[size], Barrier (&free)[size], int readers) {
  for (int i = 0; i < size; ++i) {
    init(&full[i], 1);
    init(&free[i], readers);
  }
}

// The same value in all lanes, and the compiler knows it.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

}  // namespace fa::optimized
