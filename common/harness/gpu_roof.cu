#include "common/harness/gpu_roof.hpp"

#include "common/core/cuda.hpp"

namespace fa::bench {
namespace {

constexpr int chains = 16, steps = 4096;

// Independent chains of multiply-adds in registers: nothing but the arithmetic units is used.
__global__ void fma_kernel(float* out, float a, float b) {
  float x[chains];
  for (int c = 0; c < chains; ++c) x[c] = float(threadIdx.x + c);
  for (int s = 0; s < steps; ++s)
#pragma unroll
    for (int c = 0; c < chains; ++c) x[c] = x[c] * a + b;
  float sum = 0;
  for (int c = 0; c < chains; ++c) sum += x[c];
  if (sum == 12345) *out = sum;  // never: but the compiler cannot know
}

// Counter-based: element i is the same whatever the grid. Two rounds of a 64-bit mix, Box-Muller.
__global__ void fill_kernel(float* data, long long n, unsigned long long seed) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x) {
    unsigned long long z = seed + 0x9e3779b97f4a7c15ull * (unsigned long long)(i + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (float(z >> 40) + 0.5f) * 0x1p-24f, v = float(z & 0xffffff) * 0x1p-24f;
    data[i] = sqrtf(-2 * logf(u)) * cospif(2 * v);
  }
}

}  // namespace

double gpu_fma_peak() {
  static DeviceMemory out(sizeof(float));
  int device = 0, processors = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  const unsigned blocks = unsigned(processors) * 8;
  constexpr int launches = 4;
  FA_CUDA_CHECK(cudaEventRecord(begin));
  for (int n = 0; n < launches; ++n)
    FA_LAUNCH(fma_kernel, dim3(blocks), dim3(256), 0, nullptr, out.as<float>(), 0.5f, 0.25f);
  FA_CUDA_CHECK(cudaEventRecord(end));
  FA_CUDA_CHECK(cudaEventSynchronize(end));
  float ms = 0;
  FA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  FA_CUDA_CHECK(cudaEventDestroy(begin));
  FA_CUDA_CHECK(cudaEventDestroy(end));
  return 2.0 * chains * steps * 256 * blocks * launches / (1e-3 * ms);
}

void gpu_fill(float* data, long long n, unsigned long long seed) {
  if (n > 0) FA_LAUNCH(fill_kernel, dim3(1024), dim3(256), 0, nullptr, data, n, seed);
}

}  // namespace fa::bench
