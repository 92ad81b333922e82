// ./learn export 06, backward: 0_around.cu, which every launch needs. Some of its names are also
// the kernel's, so it has a namespace of its own here.
#pragma once
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/mma.cuh"

namespace around {
namespace fa::optimized {
using namespace ::fa;
using namespace ::fa::optimized;
}  // namespace fa::optimized
#include "06_optimized/backward/0_around.cu"
}  // namespace around

namespace fa::optimized {

template <class T>
void launch_before(const Problem& p, const Backward<T>& t, const Passed& passed,
                   cudaStream_t stream) {
  around::fa::optimized::launch_before(p, t, passed, stream);
}
template <class T>
void launch_after(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                  cudaStream_t stream) {
  around::fa::optimized::launch_after(p, t, scale, passed, stream);
}

}  // namespace fa::optimized
