// Time and memory of stage 00 against the length of the sequence.
#include "common/measure/bench.hpp"
#include "00_naive/naive.hpp"

void fa::bench::register_benchmarks(Size size) {
  for (std::int64_t N : sizes(size, {256, 512, 1024, 2048}, {4096, 8192})) {
    Problem p;
    p.Hq = p.Hkv = 4;
    p.Nq = p.Nk = N;
    p.d = 64;
    forward<float>("stage00/forward/naive", p,
                   [](const Problem& q, const Forward<float>& t) { naive::forward(q, t); });
  }
}
