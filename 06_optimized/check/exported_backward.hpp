// ./learn export 06, backward: how a launch is called. O and LSE come from a reference.
#pragma once
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "common/practice/exported.hpp"

namespace fa::optimized {

using Element = __nv_bfloat16;
constexpr std::int64_t exported_d = 128;

inline bool check(const char* name, const Problem& p,
                  void (*launch)(const Problem&, const Backward<Element>&, float, const Passed&,
                                 cudaStream_t)) {
  const std::int64_t head = Passed::padded_rows(p.Nq), rows = p.B * p.Hq * head;
  const auto floats = [](std::int64_t count) {
    return exported::unwritten(std::size_t(count) * sizeof(float));
  };
  const std::int64_t sums = rows * Passed::padded(p.d);
  const DeviceMemory LSE2 = floats(rows), D = floats(rows), dQ = floats(sums);
  const DeviceMemory turns = floats(sums / 4096);
  const std::int64_t tiles = (p.Nk + 63) / 64;
  const DeviceMemory dS = exported::unwritten(std::size_t(rows * tiles * 64) * sizeof(Element));
  const bool keeps = std::string(name).find("hopper_wide") != std::string::npos;
  const bool in_order = std::string(name).find("in_order") != std::string::npos;
  return exported::check_backward<Element>(
      name, p, {true, true, false}, [&](const Backward<Element>& t, const float*) {
        Passed passed{LSE2.as<float>(), D.as<float>(), dQ.as<float>(), head,
                      in_order ? turns.as<int>() : nullptr};
        if (keeps) passed.kept = dS.as<void>();
        passed.kept_tiles = int(tiles);
        launch(p, t, float(p.softmax_scale()), passed, nullptr);
      });
}

}  // namespace fa::optimized
