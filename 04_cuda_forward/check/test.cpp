// Tests of stage 04. The same file is built twice: for the GPU, and with FA_EMULATED for the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "03_tiled_cpu/tiled_cpu.hpp"
#include "04_cuda_forward/cuda_forward.hpp"
#include "common/harness/cases.hpp"
#include "common/harness/gpu.hpp"
#include "common/harness/gpu_test.hpp"
#include "common/harness/stage.hpp"
#include "common/harness/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::harness;
using cuda_forward::Kernel, cuda_forward::Options;
using Int = std::int64_t;

StageUnderTest stage(Kernel kernel, Int nan_tile) {
  StageUnderTest s;
  s.name = cuda_forward::name(kernel);
  s.promises.max_d = cuda_forward::max_d;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.rejects_lengths = false;
  s.promises.large_scores = true;
  s.promises.nan_tile = nan_tile;
  s.promises.host_memory = false;
  s.f32.forward = on_gpu_forward<float>([kernel](const Problem& p, const Forward<float>& t) {
    cuda_forward::forward(p, t, {kernel});
  });
  s.effort = gpu_effort();
  s.unavailable = no_gpu;
  return s;
}
const bool registered = register_conformance(stage(Kernel::tiled, 32)) &&
                        register_conformance(stage(Kernel::register_tiled, 64));

}  // namespace
