// Warm-up 2: the largest number of each row of a matrix, a warp for each row. The lanes share the
// columns out among them, then pass their maxima on with shuffles.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "common/core/cuda_program.hpp"

namespace {

constexpr int lanes = 32, warps = 4;

// [quote kernel]
__global__ void row_maximum_kernel(const float* X, float* maximum, int rows, int cols) {
  const int lane = threadIdx.x % lanes, row = blockIdx.x * warps + threadIdx.x / lanes;
  if (row >= rows) return;  // all 32 lanes leave together: no shuffle will miss one

  float m = -INFINITY;
  for (int j = lane; j < cols; j += lanes) m = fmaxf(m, X[row * cols + j]);
  for (int bits = lanes / 2; bits > 0; bits /= 2)
    m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, bits));
  if (lane == 0) maximum[row] = m;
}
// [end quote]

int run() {
  constexpr int rows = 1001, cols = 77;  // no multiples of 4 and 32
  constexpr int blocks = (rows + warps - 1) / warps;

  std::vector<float> X(rows * cols), maximum(rows);
  for (int n = 0; n < rows * cols; ++n) X[n] = float(n * 7919LL % 10007) - 10007;  // all below 0
  const fa::DeviceMemory dX(X.size() * sizeof(float)), dm(rows * sizeof(float));
  FA_CUDA_CHECK(cudaMemcpy(dX.as<float>(), X.data(), dX.bytes(), cudaMemcpyHostToDevice));

  FA_LAUNCH(row_maximum_kernel, dim3(blocks), dim3(lanes * warps), 0, nullptr, dX.as<float>(),
            dm.as<float>(), rows, cols);
  FA_CUDA_CHECK(cudaMemcpy(maximum.data(), dm.as<float>(), dm.bytes(), cudaMemcpyDeviceToHost));

  int wrong = 0;
  for (int i = 0; i < rows; ++i)
    wrong += !(maximum[i] == *std::max_element(&X[i * cols], &X[i * cols] + cols));
  std::printf("the maxima of %d rows of %d numbers, a warp for each row: %d wrong\n", rows, cols,
              wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() { return fa::cuda_program(run); }
