// A kernel or a variant of it as a C function for ab.py: bf16, and no choice among kernels.
// FA_KERNEL: the file; FA_LAUNCHER: its host function; FA_BACKWARD: of the backward ladder.
// FA_COUNTS, FA_ADDS_DQ: it counts tiles, or adds up dQ, in the scratch.
#include FA_KERNEL

#include "common/measure/peers/peer.hpp"

using namespace fa;
using T = __nv_bfloat16;

#ifdef FA_BACKWARD

static optimized::Passed passed(const Problem& p, void* scratch) {
  optimized::Passed x{};
  x.rows = optimized::Passed::padded_rows(p.Nq);
  const std::int64_t rows = p.B * p.Hq * x.rows;
  x.LSE2 = static_cast<float*>(scratch);
  x.D = x.LSE2 + rows;
#ifdef FA_ADDS_DQ
  x.dQ = x.D + rows;
#endif
  return x;
}

static void launch(const Problem& p, const fa_peer_call& c) {
  optimized::FA_LAUNCHER(p, bench::backward_of<T>(c), float(p.softmax_scale()),
                         passed(p, c.scratch), static_cast<cudaStream_t>(c.stream));
}

#elif defined(FA_COUNTS)

static void launch(const Problem& p, const fa_peer_call& c) {
#ifdef FA_COUNT_ALWAYS
  const bool count = true;
#else
  const bool count = p.causal != Causal::none;
#endif
  optimized::FA_LAUNCHER(p, bench::forward_of<T>(c), float(p.softmax_scale()),
                         count ? static_cast<unsigned*>(c.scratch) : nullptr,
                         static_cast<cudaStream_t>(c.stream));
}

#else

static void launch(const Problem& p, const fa_peer_call& c) {
  optimized::FA_LAUNCHER(p, bench::forward_of<T>(c), float(p.softmax_scale()),
                         static_cast<cudaStream_t>(c.stream));
}

#endif

// Null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fa_ab_launch(const fa_peer_call* c) {
  return bench::as_c([&] { launch(bench::problem_of(*c), *c); });
}
