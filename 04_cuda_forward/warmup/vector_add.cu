// Warm-up 1: c = a + b, a thread for each element. All that a CUDA program does stands here in
// CUDA's own words: allocate, copy there, launch, copy back, free. Neighbouring threads read
// neighbouring addresses, and the last block has more threads than there are elements left.
#include <cmath>
#include <cstdio>
#include <vector>

#include "common/core/cuda_program.hpp"

namespace {

// [quote kernel]
__global__ void vector_add_kernel(const float* a, const float* b, float* c, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) c[i] = a[i] + b[i];
}
// [end quote]

int run() {
  constexpr int n = 100003, threads = 256;
  constexpr int blocks = (n + threads - 1) / threads;  // rounded up
  constexpr int extra = blocks * threads - n;          // threads that must do nothing

  std::vector<float> a(n), b(n), c(n + extra);
  for (int i = 0; i < n; ++i) {
    a[i] = float(i);
    b[i] = 1 / float(i + 1);
  }

  // [quote host]
  const std::size_t bytes = n * sizeof(float), longer = (n + extra) * sizeof(float);
  float *da = nullptr, *db = nullptr, *dc = nullptr;  // d for device
  FA_CUDA_CHECK(cudaMalloc(&da, bytes));
  FA_CUDA_CHECK(cudaMalloc(&db, bytes));
  FA_CUDA_CHECK(cudaMalloc(&dc, longer));
  FA_CUDA_CHECK(cudaMemcpy(da, a.data(), bytes, cudaMemcpyHostToDevice));
  FA_CUDA_CHECK(cudaMemcpy(db, b.data(), bytes, cudaMemcpyHostToDevice));
  FA_CUDA_CHECK(cudaMemset(dc, 0xff, longer));  // NaN: nobody wrote here

#ifndef FA_EMULATED
  vector_add_kernel<<<blocks, threads>>>(da, db, dc, n);
  FA_CUDA_CHECK(cudaGetLastError());  // a launch returns nothing: ask whether it began
#else
  FA_LAUNCH(vector_add_kernel, dim3(blocks), dim3(threads), 0, nullptr, da, db, dc, n);
#endif

  FA_CUDA_CHECK(cudaMemcpy(c.data(), dc, longer, cudaMemcpyDeviceToHost));  // waits for the kernel
  FA_CUDA_CHECK(cudaFree(da));
  FA_CUDA_CHECK(cudaFree(db));
  FA_CUDA_CHECK(cudaFree(dc));
  // [end quote]

  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += !(c[i] == a[i] + b[i]);
  for (int i = n; i < n + extra; ++i) wrong += !std::isnan(c[i]);
  std::printf("c = a + b for %d elements in %d blocks of %d threads, %d of them idle: %d wrong\n",
              n, blocks, threads, extra, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() { return fa::cuda_program(run); }
