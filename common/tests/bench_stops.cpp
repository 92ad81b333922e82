// Rows of a method that is right until it is timed: the benchmark program must find it out. With
// one key O is V, whatever the scores are. And a row of a part, which claims nothing;
// and a method of two lines that sleep.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <thread>

#include "common/measure/bench.hpp"
#ifdef FA_ON_GPU
#include "common/measure/gpu_bench.hpp"
#include "common/tests/cuda_kernels.hpp"
#endif

namespace fa::bench {

void register_benchmarks(Size) {
  Problem shape;
  shape.Nk = 1;
  shape.d = 64;
#ifdef FA_ON_GPU
  needs_gpu();
  // Before the timing each copy of the tensors is used twice: for the first verdict, and to warm
  // up. One copy, and four.
  for (auto [prefix, Nq] : {std::pair("stage99/forward/stops_one_copy", 1 << 20),
                            {"stage99/forward/stops_four_copies", 1 << 18}}) {
    shape.Nq = Nq;
    auto calls = std::make_shared<std::map<const void*, int>>();
    gpu_forward(
        prefix, shape, 0,
        [calls](const Problem& p, const Forward<float>& t, const Scratch&, cudaStream_t stream) {
          if (++(*calls)[t.O.data] <= 2) test_kernels::one_key(p, t, stream);
        });
  }
#else
  shape.Nq = 100;
  for (auto [prefix, working_calls] :
       {std::pair("stage99/forward/stops", 1), {"stage99/forward/works", 1 << 30}}) {
    auto calls = std::make_shared<int>(0);
    forward<float>(prefix, shape,
                   [=, most = working_calls](const Problem& p, const Forward<float>& t) {
                     if (++*calls > most) return;
                     for (std::int64_t i = 0; i < p.Nq; ++i)
                       std::copy_n(t.V.at(0, 0, 0), p.d, t.O.at(0, 0, i));
                   });
  }
  part("stage99/ablation/part", shape, [](const Problem&, const Forward<float>&) {});
  lines("stage99", shape, {{"short", 1}, {"long", 1}},
        [](const Problem& p, const Forward<float>& t, const Lap& lap) {
          for (std::int64_t i = 0; i < p.Nq; ++i)
            std::copy_n(t.V.at(0, 0, 0), p.d, t.O.at(0, 0, i));
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          lap(0);
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          lap(1);
        });
#endif
}

}  // namespace fa::bench
