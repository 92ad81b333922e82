// Part of check/xray.cpp: what a file's launches want of other files, and nobody looks at. Linked
// behind it, so that what that file has itself is taken from there.
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"

namespace fa::optimized {

namespace two_kernels {
// dK and dV for d > 128, and dS, which their second kernel wants
template <class T>
void launch_wide_dkv(const Problem&, const Backward<T>&, float, const Passed&, cudaStream_t) {}
template void launch_wide_dkv(const Problem&, const Backward<__half>&, float, const Passed&,
                              cudaStream_t);
template void launch_wide_dkv(const Problem&, const Backward<__nv_bfloat16>&, float, const Passed&,
                              cudaStream_t);
}  // namespace two_kernels

// Before the backward and after it: LSE2 and D are there already, and nobody wants dQ.
template <class T>
void launch_before(const Problem&, const Backward<T>&, const Passed&, cudaStream_t) {}
template <class T>
void launch_after(const Problem&, const Backward<T>&, float, const Passed&, cudaStream_t) {}

#define FA_NOBODY_LOOKS_AT(T)                                                                   \
  template void launch_before(const Problem&, const Backward<T>&, const Passed&, cudaStream_t); \
  template void launch_after(const Problem&, const Backward<T>&, float, const Passed&,          \
                             cudaStream_t);
FA_NOBODY_LOOKS_AT(__half)
FA_NOBODY_LOOKS_AT(__nv_bfloat16)

}  // namespace fa::optimized
