// Who needs a fence between the two ways into shared memory, and who does not: one small kernel for
// each pair of accesses, without what orders them and with it, and what the emulator says.
#include <array>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "06_optimized/ptx/barrier.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"
#include "common/core/cuda_program.hpp"

namespace fa::optimized {
namespace {

using T = __half;
alignas(128) std::array<T, 64 * 64> memory;  // of the device
volatile float result;                       // that compilers must believe in

struct Shared {
  alignas(1024) T A[64 * 64];
  alignas(1024) T B[64 * 64];
  Barrier full;
};

__device__ CUtensorMap map() {
  return tensor_map(View<T>{memory.data(), 0, 0, 64}, 1, 1, 64, 64, 64);
}

// Tiles of zeros that both ways know of, and a barrier.
__device__ Shared& begin() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&s.full, 1);
    fence_barriers();
  }
  for (unsigned i = threadIdx.x; i < 64 * 64; i += 128) s.A[i] = s.B[i] = T(0.0f);
  fence_async();
  __syncthreads();
  return s;
}
__device__ void load(Shared& s) {
  arrive_expecting(&s.full, sizeof(s.B));
  tma_load(s.B, map(), &s.full, 0, 0, 0, 0);
}
__device__ void store(Shared& s) {
  tma_store(map(), s.B, 0, 0, 0, 0);
  tma_commit();
}
__device__ void ask(float (&C)[32], Shared& s) {
  wgmma_fence();
  multiply_transposed<T, 64, 64, 64>(C, s.A, s.B);
  wgmma_commit();
}

// ---- threads first, then the engines: a fence by the thread that wrote or read ----

template <bool kept>
__global__ void product_reads() {
  Shared& s = begin();
  s.B[threadIdx.x] = T(1.0f);
  if (kept) fence_async();
  __syncthreads();
  float C[32];
  ask(C, s);
  wgmma_wait<0>(C);
}
template <bool kept>
__global__ void store_reads() {
  Shared& s = begin();
  s.B[threadIdx.x] = T(1.0f);
  if (kept) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    store(s);
    tma_wait_read();
  }
}
template <bool kept>
__global__ void copy_writes() {
  Shared& s = begin();
  result = float(s.B[threadIdx.x]);
  if (kept) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) load(s);
  wait(&s.full, 0);
}
template <bool kept>
__global__ void another_fences() {
  Shared& s = begin();
  s.B[threadIdx.x] = T(1.0f);
  if (kept) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!kept) fence_async();  // of what thread 0 has written, and of nothing else
    store(s);
    tma_wait_read();
  }
}

// ---- an engine first: whoever comes next waits for its end, and needs no fence ----

template <bool kept>
__global__ void thread_reads_copy() {
  Shared& s = begin();
  if (threadIdx.x == 0) load(s);
  __syncthreads();
  if (kept) wait(&s.full, 0);
  result = float(s.B[threadIdx.x]);
  wait(&s.full, 0);
}
template <bool kept>
__global__ void product_reads_copy() {
  Shared& s = begin();
  if (threadIdx.x == 0) load(s);
  __syncthreads();
  if (kept) wait(&s.full, 0);
  float C[32];
  ask(C, s);
  wgmma_wait<0>(C);
  wait(&s.full, 0);
}
template <bool kept>
__global__ void copy_follows_product() {
  Shared& s = begin();
  float C[32];
  ask(C, s);
  if (kept) wgmma_wait<0>(C);
  __syncthreads();
  if (threadIdx.x == 0) load(s);
  wgmma_wait<0>(C);
  wait(&s.full, 0);
}
template <bool kept>
__global__ void thread_follows_store() {
  Shared& s = begin();
  if (threadIdx.x == 0) {
    store(s);
    if (kept) tma_wait_read();
    s.B[0] = T(1.0f);
    tma_wait_read();
  }
}

// ---- fences of other kinds ----

template <bool kept>
__global__ void registers_follow() {
  Shared& s = begin();
  float C[32] = {};
  wgmma_fence();
  for (float& x : C) x = 1;
  if (kept) wgmma_fence();
  multiply_transposed<T, 64, 64, 64>(C, s.A, s.B);
  wgmma_commit();
  wgmma_wait<0>(C);
}
template <bool kept>
__global__ void barrier_follows() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&s.full, 128);
    if (kept) fence_barriers();
  }
  __syncthreads();
  arrive(&s.full);
  wait(&s.full, 0);
}

// ---- what is said ----

using Kernel = void (*)();
std::string said(Kernel kernel) {
  try {
    allow_shared_memory(kernel, sizeof(Shared));
    FA_LAUNCH(kernel, 1, 128, sizeof(Shared), nullptr);
  } catch (const std::logic_error& error) {
    const std::string text = error.what();
    return text.substr(text.find("block 0") + 9);
  }
  return "";
}

void print_folded(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = text.size();
    if (end - at > 96) end = text.rfind(' ', at + 96);
    std::printf("   %s\n", text.substr(at, end - at).c_str());
    at = end + 1;
  }
}

int run() {
  struct Row {
    const char *pair, *missing;
    Kernel broken, kept;
  };
  const Row rows[] = {
      {"threads write, a product reads", "fence_async()", product_reads<false>,
       product_reads<true>},
      {"threads write, a store reads", "fence_async()", store_reads<false>, store_reads<true>},
      {"threads read, a copy writes", "fence_async()", copy_writes<false>, copy_writes<true>},
      {"threads write, one fences for all", "their own fence_async()", another_fences<false>,
       another_fences<true>},
      {"a copy writes, threads read", "wait()", thread_reads_copy<false>, thread_reads_copy<true>},
      {"a copy writes, a product reads", "wait()", product_reads_copy<false>,
       product_reads_copy<true>},
      {"a product reads, a copy writes", "wgmma_wait()", copy_follows_product<false>,
       copy_follows_product<true>},
      {"a store reads, a thread writes", "tma_wait_read()", thread_follows_store<false>,
       thread_follows_store<true>},
      {"threads write registers, a product adds to them", "wgmma_fence()", registers_follow<false>,
       registers_follow<true>},
      {"a thread makes a barrier, others use it", "fence_barriers()", barrier_follows<false>,
       barrier_follows<true>}};
  int number = 0, wrong = 0;
  for (const Row& row : rows) {
    const std::string broken = said(row.broken), kept = said(row.kept);
    std::printf("%2d %s; without %s:\n", ++number, row.pair, row.missing);
    print_folded(broken.empty() ? "nothing" : broken);
    wrong += broken.empty() || !kept.empty();
    if (!kept.empty()) print_folded("but with it, too: " + kept);
  }
  std::printf("with what was missing: nothing is said of the same %d kernels\n", number);
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace fa::optimized

int main() { return fa::cuda_program(fa::optimized::run); }
