// Warm-up 4: how long does a kernel take? Three answers: when the launch had returned and when the
// kernel had ended, both by the host's clock; and the time between two events that the GPU itself
// notes in the stream, before the kernel and behind it.
// On the CPU's emulation the kernel runs inside the launch, and all three are times of the CPU.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "common/core/cuda_program.hpp"

namespace {

constexpr int n = 1000, threads = 256, blocks = (n + threads - 1) / threads;
constexpr int single = 3, many = 20;  // launches: one by one, then many at once
constexpr int additions = 20000;      // of each launch; all together are exact in a float

__global__ void count_kernel(float* x) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  float value = x[i];
  for (int k = 0; k < additions; ++k) value += 1;  // each waits for the one before it
  x[i] = value;
}

double microseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

struct Clocks {
  double returned, ended, between;  // microseconds for each launch
};

// [quote clocks]
Clocks time_launches(int launches, float* x, cudaStream_t stream, cudaEvent_t before,
                     cudaEvent_t behind) {
  FA_CUDA_CHECK(cudaEventRecord(before, stream));
  const auto begin = std::chrono::steady_clock::now();
  for (int launch = 0; launch < launches; ++launch)
    FA_LAUNCH(count_kernel, dim3(blocks), dim3(threads), 0, stream, x);
  const double returned = microseconds_since(begin);

  FA_CUDA_CHECK(cudaEventRecord(behind, stream));
  FA_CUDA_CHECK(cudaStreamSynchronize(stream));  // here the host waits, and nowhere before
  const double ended = microseconds_since(begin);

  float milliseconds = 0;
  FA_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, before, behind));
  return {returned / launches, ended / launches, 1000 * milliseconds / launches};
}
// [end quote]

int run() {
  const fa::DeviceMemory dx(n * sizeof(float));
  FA_CUDA_CHECK(cudaMemset(dx.as<float>(), 0, dx.bytes()));
  cudaStream_t stream;
  cudaEvent_t before, behind;
  FA_CUDA_CHECK(cudaStreamCreate(&stream));
  FA_CUDA_CHECK(cudaEventCreate(&before));
  FA_CUDA_CHECK(cudaEventCreate(&behind));
  FA_CUDA_CHECK(cudaDeviceSynchronize());  // CUDA is ready, and the GPU has nothing to do

  std::printf("microseconds      launch returned   kernel ended   between the events\n");
  for (int row = 1; row <= single + 1; ++row) {
    const int launches = row <= single ? 1 : many;
    const Clocks t = time_launches(launches, dx.as<float>(), stream, before, behind);
    const std::string name =
        row <= single ? "launch " + std::to_string(row) : std::to_string(many) + " launches, each";
    std::printf("%-17s%16.1f%15.1f%21.1f\n", name.c_str(), t.returned, t.ended, t.between);
  }
  FA_CUDA_CHECK(cudaEventDestroy(before));
  FA_CUDA_CHECK(cudaEventDestroy(behind));
  FA_CUDA_CHECK(cudaStreamDestroy(stream));

  std::vector<float> x(n);
  FA_CUDA_CHECK(cudaMemcpy(x.data(), dx.as<float>(), dx.bytes(), cudaMemcpyDeviceToHost));
  const auto wrong = std::count_if(x.begin(), x.end(),
                                   [](float v) { return v != float((single + many) * additions); });
  std::printf("%d numbers, %d additions each: %d wrong\n", n, (single + many) * additions,
              int(wrong));
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() { return fa::cuda_program(run); }
