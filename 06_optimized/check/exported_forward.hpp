// ./learn export 06, forward: how a launch is called.
#pragma once
#include "06_optimized/forward/forward.hpp"
#include "common/practice/exported.hpp"

namespace fa::optimized {

using Element = __nv_bfloat16;
constexpr std::int64_t exported_d = 128;

inline bool check(const char* name, const Problem& p,
                  void (*launch)(const Problem&, const Forward<Element>&, float, cudaStream_t)) {
  return exported::check_forward<Element>(
      name, p, [&](const Forward<Element>& t) { launch(p, t, float(p.softmax_scale()), nullptr); });
}
inline bool check(const char* name, const Problem& p,
                  void (*launch)(const Problem&, const Forward<Element>&, float, unsigned*,
                                 cudaStream_t)) {
  const DeviceMemory taken(sizeof(unsigned));  // for a mask
  return exported::check_forward<Element>(name, p, [&](const Forward<Element>& t) {
    launch(p, t, float(p.softmax_scale()),
           p.causal == Causal::none ? nullptr : taken.as<unsigned>(), nullptr);
  });
}

}  // namespace fa::optimized
