// What the tests of walks compare with: the stage's own kernels.
#pragma once
#include <Eigen/Core>
#include <type_traits>

#include "06_optimized/backward/backward.hpp"
#include "common/judge/gpu.hpp"

namespace fa::judge {

// The backward's hopper, in turns: the same bits from run to run.
template <class T>
void hopper_in_turns(const BackwardCall<T>& call) {
  using Device = std::conditional_t<std::is_same_v<T, Eigen::half>, __half, __nv_bfloat16>;
  on_gpu_backward<T>([](const Problem& p, const Backward<T>& t) {
    optimized::BackwardOptions options;
    options.kernel = optimized::BackwardKernel::hopper;
    options.deterministic = true;
    const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
    options.scratch = scratch;
    optimized::backward(p, as_device<Device>(t), options);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  })(call);
}

}  // namespace fa::judge
