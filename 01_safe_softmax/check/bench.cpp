// What safety buys (error against the size of the scores) and what it costs (time against stage
// 00).
#include "common/measure/bench.hpp"
#include "00_naive/naive.hpp"
#include "01_safe_softmax/safe_softmax.hpp"

void fa::bench::register_benchmarks(Size size) {
  const auto stage00 = [](const Problem& q, const Forward<float>& t) { naive::forward(q, t); };
  const auto stage01 = [](const Problem& q, const Forward<float>& t) {
    safe_softmax::forward(q, t);
  };
  for (std::int64_t N : sizes(size, {256, 512, 1024, 2048}, {4096, 8192})) {
    Problem p;
    p.Hq = p.Hkv = 4;
    p.Nq = p.Nk = N;
    p.d = 64;
    forward<float>("stage00/forward/naive", p, stage00);
    forward<float>("stage01/forward/safe_softmax", p, stage01);
    p.causal = Causal::top_left;
    forward<float>("stage01/forward/safe_softmax", p, stage01);
  }
  for (double scores : {1., 10., 30., 60., 80., 88., 89., 100., 300., 1000., 10000.}) {
    error("stage00/error/naive", scores, stage00);
    error("stage01/error/safe_softmax", scores, stage01);
  }
}
