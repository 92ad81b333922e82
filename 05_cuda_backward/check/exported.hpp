// ./learn export 05: how a launch is called. O, LSE and D come from a reference.
#pragma once
#include <cstring>

#include "05_cuda_backward/cuda_backward.hpp"
#include "common/practice/exported.hpp"

namespace fa::cuda_backward {

using Element = float;
constexpr std::int64_t exported_d = 64;

inline bool check(const char* name, const Problem& p,
                  void (*launch)(const Problem&, const Backward<float>&, float*, cudaStream_t)) {
  return exported::check_backward<float>(
      name, p, {false, false, true},
      [&](const Backward<float>& t, float* D) { launch(p, t, D, nullptr); });
}
template <class Deltas>  // float* or const float*
bool check(const char* name, const Problem& p,
           void (*launch)(const Problem&, const Backward<float>&, float, const Options&, Deltas)) {
  Options options;
  options.tiles = Tiles::lesson;
  const bool atomic = std::strstr(name, "atomic"), dq = std::strstr(name, "dq");
  return exported::check_backward<float>(
      name, p, {atomic || dq, !dq, false}, [&](const Backward<float>& t, float* D) {
        if (std::strcmp(name, "fast_atomic") == 0)  // who adds to dQ finds 0 there
          FA_CUDA_CHECK(cudaMemsetAsync(t.dQ.data, 0, sizeof(float) * p.B * p.Hq * p.Nq * p.d));
        launch(p, t, float(p.softmax_scale()), options, D);
      });
}

}  // namespace fa::cuda_backward
