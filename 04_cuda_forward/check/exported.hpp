// ./learn export 04: how a launch is called.
#pragma once
#include "04_cuda_forward/cuda_forward.hpp"
#include "common/practice/exported.hpp"

namespace fa::cuda_forward {

using Element = float;
constexpr std::int64_t exported_d = 64;

inline bool check(const char* name, const Problem& p,
                  void (*launch)(const Problem&, const Forward<float>&, float, cudaStream_t)) {
  return exported::check_forward<float>(
      name, p, [&](const Forward<float>& t) { launch(p, t, float(p.softmax_scale()), nullptr); });
}

}  // namespace fa::cuda_forward
