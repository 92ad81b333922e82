#include "common/measure/gpu_roof.hpp"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>

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
template <class T>
__global__ void fill_kernel(T* data, long long n, unsigned long long seed) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x) {
    unsigned long long z = seed + 0x9e3779b97f4a7c15ull * (unsigned long long)(i + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (float(z >> 40) + 0.5f) * 0x1p-24f, v = float(z & 0xffffff) * 0x1p-24f;
    data[i] = T(sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(call) + ": " + cublasGetStatusString(status));
}

// Seconds that the GPU needs for what f enqueues.
template <class F>
double seconds(F f) {
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  FA_CUDA_CHECK(cudaEventRecord(begin));
  f();
  FA_CUDA_CHECK(cudaEventRecord(end));
  FA_CUDA_CHECK(cudaEventSynchronize(end));
  float ms = 0;
  FA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  FA_CUDA_CHECK(cudaEventDestroy(begin));
  FA_CUDA_CHECK(cudaEventDestroy(end));
  return 1e-3 * double(ms);
}

}  // namespace

double gpu_fma_peak() {
  static DeviceMemory out(sizeof(float));
  int device = 0, processors = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const unsigned blocks = unsigned(processors) * 8;
  constexpr int launches = 4;
  const double taken = seconds([&] {
    for (int n = 0; n < launches; ++n)
      FA_LAUNCH(fma_kernel, dim3(blocks), dim3(256), 0, nullptr, out.as<float>(), 0.5f, 0.25f);
  });
  return 2.0 * chains * steps * 256 * blocks * launches / taken;
}

template <class T>
double gpu_matmul_peak() {
  constexpr int n = 8192, launches = 3;
  constexpr long long elements = (long long)n * n;
  constexpr cudaDataType type = std::is_same_v<T, __half> ? CUDA_R_16F : CUDA_R_16BF;
  static const DeviceMemory a(sizeof(T) * elements), b(sizeof(T) * elements),
      c(sizeof(T) * elements);
  static const cublasHandle_t cublas = [] {
    cublasHandle_t handle;
    check_cublas(cublasCreate(&handle), "cublasCreate");
    gpu_fill(a.as<T>(), elements, 21);
    gpu_fill(b.as<T>(), elements, 22);
    return handle;
  }();
  const auto multiply = [&] {
    const float one = 1, zero = 0;
    check_cublas(
        cublasGemmEx(cublas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a.as<T>(), type, n, b.as<T>(),
                     type, n, &zero, c.as<T>(), type, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
  };
  multiply();
  return 2.0 * n * elements * launches / seconds([&] {
           for (int i = 0; i < launches; ++i) multiply();
         });
}
template double gpu_matmul_peak<__half>();
template double gpu_matmul_peak<__nv_bfloat16>();

template <class T>
void gpu_fill(T* data, long long n, unsigned long long seed) {
  if (n > 0) FA_LAUNCH(fill_kernel, dim3(1024), dim3(256), 0, nullptr, data, n, seed);
}
template void gpu_fill(float*, long long, unsigned long long);
template void gpu_fill(__half*, long long, unsigned long long);
template void gpu_fill(__nv_bfloat16*, long long, unsigned long long);

}  // namespace fa::bench
