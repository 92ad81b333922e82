// Attention with changed scores as C functions, for scores_bench.py; part of libstage06_peer.so.
#include "06_optimized/beyond/scores/check/peer.hpp"

#include <algorithm>
#include <cstdint>

#include "06_optimized/beyond/scores/scores.hpp"
#include "common/measure/peers/peer.hpp"

namespace {

using namespace fa;
using T = __nv_bfloat16;

Problem problem_of(const fa_scores_call& c) {
  Problem p;
  p.B = c.B;
  p.Hq = p.Hkv = c.H;
  p.Nq = p.Nk = c.N;
  p.d = c.d;
  p.causal = c.causal ? Causal::bottom_right : Causal::none;
  return p;
}

View<T> view(const fa_scores_call& c, void* data) {
  return contiguous(static_cast<T*>(data), c.H, c.N, c.d);
}

scores::Scores<T> scores_of(const fa_scores_call& c) {
  scores::Scores<T> s;
  s.slopes = static_cast<const float*>(c.slopes);
  if (c.cap != 0) s.cap = c.cap;
  if (c.bias) s.bias = {static_cast<const T*>(c.bias), c.bias_batch, c.bias_head, c.bias_row};
  if (c.dims > 0)
    s.rotary = {static_cast<const float*>(c.cos), static_cast<const float*>(c.sin), c.positions,
                c.dims, c.interleaved != 0};
  return s;
}

// With scratch hopper counts its tiles.
scores::Options options_of(const fa_scores_call& c) {
  return {static_cast<cudaStream_t>(c.stream),
          {c.scratch, std::size_t(c.scratch_bytes)},
          static_cast<scores::Kernel>(std::min(c.kernel, std::int64_t(2))),
          c.kernel == 3};
}

}  // namespace

// Null, or what is wrong.
extern "C" const char* fa_scores_forward(const fa_scores_call* c) {
  return bench::as_c([&] {
    scores::forward<T>(problem_of(*c),
                       {view(*c, c->Q), view(*c, c->K), view(*c, c->V), view(*c, c->O),
                        static_cast<float*>(c->LSE)},
                       scores_of(*c), options_of(*c));
  });
}
extern "C" const char* fa_scores_backward(const fa_scores_call* c) {
  return bench::as_c([&] {
    View<float> dbias;
    if (c->dbias) dbias = {static_cast<float*>(c->dbias), c->bias_batch, c->bias_head, c->bias_row};
    scores::backward<T>(
        problem_of(*c),
        {view(*c, c->Q), view(*c, c->K), view(*c, c->V), view(*c, c->O), view(*c, c->dO),
         static_cast<const float*>(c->LSE), view(*c, c->dQ), view(*c, c->dK), view(*c, c->dV)},
        scores_of(*c), dbias, options_of(*c));
  });
}

// Device memory that a backward needs.
extern "C" const char* fa_scores_scratch_bytes(const fa_scores_call* c, std::int64_t* bytes) {
  return bench::as_c([&] { *bytes = std::int64_t(scores::scratch_bytes<T>(problem_of(*c))); });
}
