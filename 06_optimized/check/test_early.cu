// A kernel for test_backward.cpp that is launched early. On compute capability 9.0; elsewhere it
// does nothing.
#include "06_optimized/ptx/barrier.cuh"
#include "common/core/cuda.hpp"

namespace fa::harness {

void fill_early(void* to, std::size_t bytes, cudaStream_t stream);

namespace {

__global__ void fill_kernel(unsigned* to, std::size_t count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  optimized::previous_kernel_is_done();
  const std::size_t i = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) to[i] = 0xffffffff;
#endif
}

}  // namespace

void fill_early(void* to, std::size_t bytes, cudaStream_t stream) {
  const std::size_t count = bytes / sizeof(unsigned);
  FA_LAUNCH_EARLY(fill_kernel, dim3(unsigned((count + 255) / 256)), dim3(256), 0, stream,
                  static_cast<unsigned*>(to), count);
}

}  // namespace fa::harness
