// When some cases of a family fail and others pass: which parameter tells the two apart.
#pragma once
#include <string>
#include <vector>

#include "common/judge/cases.hpp"

namespace fa::judge {

struct Outcome {
  Spec spec;
  std::string type;  // "f32"
  bool failed = false;
  std::string what = {};  // what was done beside a comparison with the oracle, "padding NaN"
};

// One line: "passes: all 31 cases with Nk <= 64; fails: all 12 with Nk > 64". If no single
// parameter separates them, the one that explains most of what passes, as long as that is half.
// Empty if there is none, or unless some fail and some pass.
std::string contrast(const std::vector<Outcome>& outcomes);

}  // namespace fa::judge
