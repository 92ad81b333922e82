// How long one thread waits for one number from each level of a GPU's memory, in cycles: a file for
// results/, from which the warm-up's picture of the machine is drawn.
//
//     nvcc -O3 -std=c++20 -arch=native -I. 04_cuda_forward/check/latency.cu -o build/latency
//     build/latency > 04_cuda_forward/results/nvidia-h200.latency.txt
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "common/core/cuda_program.hpp"

namespace {

constexpr int steps = 16384, rounds = 21;
constexpr int line = 128 / sizeof(unsigned long long);  // an address in each 128 bytes
enum class From { shared, L1, L2 };  // L2: past L1, and further if it is not there

// Each number read is the address of the next: no load can begin before the one before it ended.
template <From from>
__global__ void chase(unsigned long long at, int n, long long* cycles, unsigned long long* end) {
  extern __shared__ unsigned chain[];
  if (from == From::shared) {
    for (int i = 0; i < n; ++i) chain[i] = unsigned(__cvta_generic_to_shared(&chain[(i + 33) % n]));
    at = chain[0];
  }
  unsigned near = unsigned(at);
  const long long begin = clock64();
  for (int step = 0; step < steps; ++step) {
    if (from == From::shared)
      asm volatile("ld.shared.u32 %0, [%0];" : "+r"(near));
    else if (from == From::L1)
      asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(at));
    else
      asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));
  }
  *end = at + near;  // waits for the last
  *cycles = clock64() - begin;
}

// The median over the rounds, after one that is not counted. `prepare` comes before each.
template <class Prepare>
double cycles(void (*kernel)(unsigned long long, int, long long*, unsigned long long*),
              unsigned long long at, int n, const Prepare& prepare) {
  const fa::DeviceMemory taken(sizeof(long long)), end(sizeof(unsigned long long));
  std::vector<double> all;
  for (int round = 0; round <= rounds; ++round) {
    prepare();
    kernel<<<1, 1, 4096 * sizeof(unsigned)>>>(at, n, taken.as<long long>(),
                                              end.as<unsigned long long>());
    FA_CUDA_CHECK(cudaGetLastError());
    long long one = 0;
    FA_CUDA_CHECK(cudaMemcpy(&one, taken.as<void>(), sizeof one, cudaMemcpyDeviceToHost));
    if (round > 0) all.push_back(double(one) / steps);
  }
  std::nth_element(all.begin(), all.begin() + rounds / 2, all.end());
  return all[rounds / 2];
}

// A walk through all lines of `bytes` in an order drawn at random.
double from_global(void (*kernel)(unsigned long long, int, long long*, unsigned long long*),
                   std::size_t bytes, bool past_L2) {
  const fa::DeviceMemory x(bytes), other(std::size_t(256) << 20);
  const auto begin = reinterpret_cast<unsigned long long>(x.as<void>());
  const std::size_t lines = bytes / 128;
  std::vector<std::size_t> order(lines);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  std::vector<unsigned long long> chain(lines * line);
  for (std::size_t i = 0; i < lines; ++i)
    chain[order[i] * line] = begin + 128 * order[(i + 1) % lines];
  FA_CUDA_CHECK(cudaMemcpy(x.as<void>(), chain.data(), bytes, cudaMemcpyHostToDevice));
  return cycles(kernel, begin + 128 * order[0], 0, [&] {  // what is written pushes x out of L2
    if (past_L2) FA_CUDA_CHECK(cudaMemset(other.as<void>(), 0, other.bytes()));
  });
}

int run() {
  cudaDeviceProp gpu;
  FA_CUDA_CHECK(cudaGetDeviceProperties(&gpu, 0));
  std::printf("%s; one thread, each load after the one before it, cycles; medians of %d rounds\n",
              gpu.name, rounds);
  std::printf("shared memory   %4.0f\n", cycles(chase<From::shared>, 0, 4096, [] {}));
  std::printf("L1, 16 KiB      %4.0f\n", from_global(chase<From::L1>, 16 << 10, false));
  std::printf("L2, 2 MiB       %4.0f\n", from_global(chase<From::L2>, 2 << 20, false));
  std::printf("device memory   %4.0f\n", from_global(chase<From::L2>, 64 << 20, true));
  return 0;
}

}  // namespace

int main() { return fa::cuda_program(run); }
