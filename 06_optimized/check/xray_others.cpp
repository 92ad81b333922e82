// Beside check/xray.cpp: what one file's launches want of other files. Linked behind it, so that
// what that file has itself is taken from there.
#include <stdexcept>

#include "06_optimized/backward/0_around.cu"
#include "06_optimized/optimized.hpp"

namespace fa::optimized {

using Half = __nv_bfloat16;

// For problems without keys, or d > 128: nobody looks at these.
template <class T>
void launch_swizzle(const Problem&, const Forward<T>&, float, cudaStream_t) {
  throw std::logic_error("not here");
}
template void launch_swizzle(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
