// Built for one architecture only, without PTX, so that it cannot run on any other.
#include "common/core/cuda.hpp"

namespace fa::test_kernels {
namespace {
__global__ void nothing() {}
}  // namespace
void launch_on_another_architecture() { FA_LAUNCH(nothing, dim3(1), dim3(1), 0, nullptr); }
}  // namespace fa::test_kernels
