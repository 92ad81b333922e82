// What the tests of walks compare with: the stage's own kernels.
#pragma once
#include <Eigen/Core>

#include "06_optimized/backward/backward.hpp"
#include "common/judge/gpu.hpp"

namespace fa::judge {

// The backward's hopper, in turns: the same bits from run to run.
inline void hopper_in_turns(const BackwardCall<Eigen::bfloat16>& call) {
  on_gpu_backward<Eigen::bfloat16>([](const Problem& p, const Backward<Eigen::bfloat16>& t) {
    optimized::BackwardOptions options;
    options.kernel = optimized::BackwardKernel::hopper;
    options.deterministic = true;
    const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
    options.scratch = scratch;
    optimized::backward(p, as_device<__nv_bfloat16>(t), options);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  })(call);
}

}  // namespace fa::judge
