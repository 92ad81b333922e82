// Four methods for the trials of ./learn practice: one that is right, and three that are wrong in a
// single thing, which one trial each must show. What they print is looked at by ctest.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/core/problem.hpp"
#include "common/judge/stage.hpp"

namespace {

using namespace fa;
using Int = std::int64_t;

struct Mistakes {
  bool hidden_maximum = false, nan_passed_over = false, hidden_V_read = false;
};

void forward(const Problem& p, const Forward<float>& t, const Mistakes& wrong) {
  std::vector<float> s(std::size_t(p.Nk));
  for (Int b = 0; b < p.B; ++b)
    for (Int h = 0; h < p.Hq; ++h)
      for (Int i = 0; i < p.Nq; ++i) {
        const Int g = p.key_head(h), n = Mask(p, b).visible_keys(i);
        float m = -INFINITY, l = 0;
        bool nan = false;
        for (Int j = 0; j < p.Nk; ++j) {
          float& score = s[std::size_t(j)] = 0;
          for (Int x = 0; x < p.d; ++x) score += t.Q.at(b, h, i)[x] * t.K.at(b, g, j)[x];
          score *= float(p.softmax_scale());
          nan = nan || (j < n && std::isnan(score));
          if (j < n || wrong.hidden_maximum) m = std::max(m, score);
        }
        if (nan && !wrong.nan_passed_over) m = NAN;
        const float shift = m == -INFINITY ? 0 : m;
        for (Int j = 0; j < p.Nk; ++j) {
          float& weight = s[std::size_t(j)];
          weight = j < n && m != -INFINITY ? std::exp(weight - shift) : 0;
          l += weight;
        }
        for (Int x = 0; x < p.d; ++x) {
          float sum = 0;
          for (Int j = 0; j < (wrong.hidden_V_read ? p.Nk : n); ++j)
            sum += s[std::size_t(j)] * t.V.at(b, g, j)[x];
          t.O.at(b, h, i)[x] = l == 0 ? 0 : sum / l;
        }
        if (t.LSE) t.LSE[(b * p.Hq + h) * p.Nq + i] = m + std::log(l);
      }
}

bool method(const char* name, const Mistakes& wrong) {
  judge::StageUnderTest s;
  s.name = name;
  s.promises.lse = s.promises.causal = s.promises.key_lengths = s.promises.large_scores = true;
  s.f32.forward = judge::on_host_forward<float>(
      [wrong](const Problem& p, const Forward<float>& t) { forward(p, t, wrong); });
  return judge::register_conformance(s);
}
const bool registered = method("right", {}) && method("hidden_maximum", {true, false, false}) &&
                        method("nan_passed_over", {false, true, false}) &&
                        method("hidden_V_read", {false, false, true});

}  // namespace
