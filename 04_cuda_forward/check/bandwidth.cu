// What the levels of a GPU's memory deliver when all multiprocessors read at once, in TB/s: a file
// for results/, from which docs/memory.svg is drawn.
//
//     nvcc -O3 -std=c++20 -arch=native -I. 04_cuda_forward/check/bandwidth.cu -o build/bandwidth
//     build/bandwidth > 04_cuda_forward/results/nvidia-h200.bandwidth.txt
#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "common/core/cuda.hpp"

namespace {

constexpr int threads = 1024, rounds = 21, shared_turns = 4096, held = 2048;

// Reads `n` times 16 bytes over and over, past L1. Neighbouring threads read neighbouring places.
__global__ void read(const float4* x, long long n, int turns, float* sink) {
  const long long all = (long long)gridDim.x * blockDim.x;
  float sum = 0;
  for (int turn = 0; turn < turns; ++turn)
#pragma unroll 8
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += all) {
      float4 v;
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                   : "l"(x + i));
      sum += v.x + v.y + v.z + v.w;
    }
  if (sum == 12345) *sink = sum;  // never: but the compiler cannot know
}

// The same in shared memory, 32 KiB a block.
__global__ void read_shared(float* sink) {
  __shared__ float4 s[held];
  for (int i = threadIdx.x; i < held; i += threads) s[i] = make_float4(0, 0, 0, 0);
  __syncthreads();
  float sum = 0;
#pragma unroll 8
  for (int turn = 0; turn < shared_turns; ++turn) {
    const auto at = unsigned(__cvta_generic_to_shared(&s[(threadIdx.x + 32 * turn) % held]));
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at));
    sum += v.x + v.y + v.z + v.w;
  }
  if (sum == 12345) *sink = sum;
}

// The median over the rounds, after one that is not counted.
double tera_bytes_per_second(double bytes, const std::function<void()>& launch) {
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> ms(rounds);
  launch();
  for (float& time : ms) {
    FA_CUDA_CHECK(cudaEventRecord(begin));
    launch();
    FA_CUDA_CHECK(cudaEventRecord(end));
    FA_CUDA_CHECK(cudaEventSynchronize(end));
    FA_CUDA_CHECK(cudaEventElapsedTime(&time, begin, end));
  }
  std::nth_element(ms.begin(), ms.begin() + rounds / 2, ms.end());
  return bytes / ms[rounds / 2] / 1e9;
}

}  // namespace

int main() {
  cudaDeviceProp gpu;
  FA_CUDA_CHECK(cudaGetDeviceProperties(&gpu, 0));
  const int blocks = 2 * gpu.multiProcessorCount;
  float* sink;
  FA_CUDA_CHECK(cudaMalloc(&sink, sizeof(float)));
  const auto from = [&](long long bytes) {
    float4* x;
    FA_CUDA_CHECK(cudaMalloc(&x, bytes));
    FA_CUDA_CHECK(cudaMemset(x, 0, bytes));
    const int turns = int((4ll << 30) / bytes);
    const double rate = tera_bytes_per_second(
        double(bytes) * turns, [&] { read<<<blocks, threads>>>(x, bytes / 16, turns, sink); });
    FA_CUDA_CHECK(cudaFree(x));
    return rate;
  };
  std::printf("%s, %.0f MiB of L2; all multiprocessors reading, TB/s; medians of %d rounds\n",
              gpu.name, gpu.l2CacheSize / 1048576.0, rounds);
  std::printf("shared memory   %5.1f\n",
              tera_bytes_per_second(double(blocks) * threads * shared_turns * 16,
                                    [&] { read_shared<<<blocks, threads>>>(sink); }));
  std::printf("L2, 8 MiB       %5.2f\n", from(8ll << 20));
  std::printf("L2, 16 MiB      %5.2f\n", from(16ll << 20));
  std::printf("L2, 32 MiB      %5.2f\n", from(32ll << 20));
  std::printf("device memory   %5.2f\n", from(4ll << 30));
}
