// The last kernel of a ladder, or a variant of it, as a C function for ab.py: bf16, and no choice
// among kernels. FA_KERNEL: the file; FA_BACKWARD: of the backward ladder.
#include FA_KERNEL

#include "common/harness/peers/peer.hpp"

using namespace fa;
using T = __nv_bfloat16;

#ifdef FA_BACKWARD

static optimized::Passed passed(const Problem& p, void* scratch) {
  optimized::Passed x{};
  x.rows = optimized::Passed::padded_rows(p.Nq);
  const std::int64_t rows = p.B * p.Hq * x.rows;
  x.dQ = static_cast<float*>(scratch);
  x.LSE2 = x.dQ + rows * optimized::Passed::padded(p.d);
  x.D = x.LSE2 + rows;
  return x;
}

static void launch(const Problem& p, const fa_peer_call& c) {
  optimized::launch_backward_hopper(p, harness::backward_of<T>(c), float(p.softmax_scale()),
                                    passed(p, c.scratch), static_cast<cudaStream_t>(c.stream));
}

#else

static void launch(const Problem& p, const fa_peer_call& c) {
#ifdef FA_COUNT_ALWAYS
  const bool count = true;
#else
  const bool count = p.causal != Causal::none;
#endif
  optimized::launch_hopper(p, harness::forward_of<T>(c), float(p.softmax_scale()),
                           count ? static_cast<unsigned*>(c.scratch) : nullptr,
                           static_cast<cudaStream_t>(c.stream));
}

#endif

// Null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fa_ab_launch(const fa_peer_call* c) {
  return harness::as_c([&] { launch(harness::problem_of(*c), *c); });
}
