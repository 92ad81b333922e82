// The problem that every chapter carries by hand: N = 4, d = 2. The wanted numbers are those that
// the chapters print, so four decimals are right.
#pragma once
#include <cmath>
#include <limits>

#include "common/core/tensor.hpp"

namespace fa::judge {

struct TinyProblem {
  float Q[8] = {1, 0, 0, 1, 1, 1, 2, -1}, K[8] = {1, 0, 0, 1, 1, 1, 1, -1};
  float V[8] = {1, 0, 0, 1, 2, 2, -1, 1};
  float want_O[8] = {0.5726f, 1.0000f, 0.8223f, 1.1853f, 1.0093f, 1.2274f, -0.0115f, 0.8608f};
  float want_LSE[4] = {1.9579f, 1.7137f, 2.2159f, 2.7065f};
  float O[8], LSE[4];
  Problem p;

  TinyProblem() {
    p.Nq = p.Nk = 4;
    p.d = 2;
    for (float& o : O) o = std::numeric_limits<float>::quiet_NaN();
    for (float& l : LSE) l = std::numeric_limits<float>::quiet_NaN();
  }
  Forward<float> tensors(bool with_lse) {
    return {contiguous<const float>(Q, 1, 4, 2), contiguous<const float>(K, 1, 4, 2),
            contiguous<const float>(V, 1, 4, 2), contiguous(O, 1, 4, 2), with_lse ? LSE : nullptr};
  }
  // Does the result agree with the chapters to four decimals? NaN does not.
  bool matches(bool with_lse) const {
    bool ok = true;
    for (int n = 0; n < 8; ++n) ok = ok && std::fabs(O[n] - want_O[n]) <= 5e-5f;
    for (int i = 0; with_lse && i < 4; ++i) ok = ok && std::fabs(LSE[i] - want_LSE[i]) <= 5e-5f;
    return ok;
  }
};

}  // namespace fa::judge
