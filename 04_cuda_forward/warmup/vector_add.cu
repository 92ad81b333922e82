// Warm-up 1: c = a + b, a thread for each element. Neighbouring threads read neighbouring
// addresses, and the last block has more threads than there are elements left.
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "common/core/cuda.hpp"

namespace {

// [quote kernel]
__global__ void vector_add_kernel(const float* a, const float* b, float* c, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) c[i] = a[i] + b[i];
}
// [end quote]

int run() {
#ifndef FA_EMULATED
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || count == 0) {
    const char* why = code != cudaSuccess ? cudaGetErrorString(code) : "the driver finds none";
    std::printf("skipped, no usable GPU: %s\n", why);
    return 77;
  }
#endif
  constexpr int n = 100003, threads = 256;
  constexpr int blocks = (n + threads - 1) / threads;  // rounded up
  constexpr int extra = blocks * threads - n;          // threads that must do nothing

  std::vector<float> a(n), b(n), c(n + extra);
  for (int i = 0; i < n; ++i) {
    a[i] = float(i);
    b[i] = 1 / float(i + 1);
  }
  const fa::DeviceMemory da(n * sizeof(float)), db(n * sizeof(float)),
      dc((n + extra) * sizeof(float));
  FA_CUDA_CHECK(cudaMemcpy(da.as<float>(), a.data(), da.bytes(), cudaMemcpyHostToDevice));
  FA_CUDA_CHECK(cudaMemcpy(db.as<float>(), b.data(), db.bytes(), cudaMemcpyHostToDevice));
  FA_CUDA_CHECK(cudaMemset(dc.as<float>(), 0xff, dc.bytes()));  // NaN: nobody wrote here

  FA_LAUNCH(vector_add_kernel, dim3(blocks), dim3(threads), 0, nullptr, da.as<float>(),
            db.as<float>(), dc.as<float>(), n);
  // Waits for the kernel, for it is on the same stream.
  FA_CUDA_CHECK(cudaMemcpy(c.data(), dc.as<float>(), dc.bytes(), cudaMemcpyDeviceToHost));

  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += !(c[i] == a[i] + b[i]);
  for (int i = n; i < n + extra; ++i) wrong += !std::isnan(c[i]);
  std::printf("c = a + b for %d elements in %d blocks of %d threads, %d of them idle: %d wrong\n",
              n, blocks, threads, extra, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
