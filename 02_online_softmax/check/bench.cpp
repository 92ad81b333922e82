// One thing at a time: the same loop over rows with safe softmax (which stores a row of scores) and
// with online softmax (which stores nothing); then the same with lanes; and stage 01.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "01_safe_softmax/safe_softmax.hpp"
#include "02_online_softmax/check/ladder.hpp"
#include "02_online_softmax/online_softmax.hpp"
#include "common/measure/bench.hpp"

namespace {

// The control: stage 02's loops with stage 01's softmax.
void safe_rows(const fa::Problem& p, const fa::Forward<float>& t) {
  std::vector<float> s(std::size_t(p.Nk));
  const float scale = float(p.softmax_scale());
  for (std::int64_t h = 0; h < p.Hq; ++h)
    for (std::int64_t i = 0; i < p.Nq; ++i) {
      const float* q = t.Q.at(0, h, i);
      float* o = t.O.at(0, h, i);
      float m = -std::numeric_limits<float>::infinity(), l = 0;
      for (std::int64_t j = 0; j < p.Nk; ++j) {
        const float* k = t.K.at(0, h, j);
        float dot = 0;
        for (std::int64_t x = 0; x < p.d; ++x) dot += q[x] * k[x];
        s[std::size_t(j)] = scale * dot;
        m = std::max(m, scale * dot);
      }
      std::fill_n(o, p.d, 0.0f);
      for (std::int64_t j = 0; j < p.Nk; ++j) {
        const float weight = std::exp(s[std::size_t(j)] - m), *v = t.V.at(0, h, j);
        l += weight;
        for (std::int64_t x = 0; x < p.d; ++x) o[x] += weight * v[x];
      }
      for (std::int64_t x = 0; x < p.d; ++x) o[x] /= l;
    }
}

}  // namespace

void fa::bench::register_benchmarks(Size size) {
  const auto run = [](online_softmax::Kernel kernel) {
    return [kernel](const Problem& q, const Forward<float>& t) {
      online_softmax::forward(q, t, {kernel});
    };
  };
  for (std::int64_t N : sizes(size, {256, 512, 1024, 2048}, {4096, 8192})) {
    Problem p;
    p.Hq = p.Hkv = 4;
    p.Nq = p.Nk = N;
    p.d = 64;
    if (N > 2048) p.Hq = p.Hkv = 1;  // the slow rows keep to a few seconds a round
    forward<float>("stage01/forward/safe_softmax", p,
                   [](const Problem& q, const Forward<float>& t) { safe_softmax::forward(q, t); });
    forward<float>("stage02/forward/safe_rows", p, safe_rows);
    forward<float>("stage02/forward/rows", p, run(online_softmax::Kernel::rows));
    forward<float>("stage02/forward/lanes", p, run(online_softmax::Kernel::lanes));
    if (N > 1024) continue;
    forward<float>("stage02/forward/vector_dot", p, ladder::vector_dot<ladder::Also::nothing>);
    forward<float>("stage02/forward/one_exp", p, ladder::vector_dot<ladder::Also::one_exp>);
    forward<float>("stage02/forward/o_in_registers", p,
                   ladder::vector_dot<ladder::Also::o_in_registers>);
    forward<float>("stage02/forward/row_block", p, ladder::row_block<ladder::Rows::together>);
    forward<float>("stage02/forward/vector_exp", p, ladder::row_block<ladder::Rows::in_one_vector>);
  }
}
