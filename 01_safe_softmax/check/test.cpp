// Tests of stage 01: the conformance suite on what it promises, and the reason why it exists.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "00_naive/naive.hpp"
#include "01_safe_softmax/safe_softmax.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;

template <class T>
Functions<T> functions() {
  return {on_host_forward<T>(
              [](const Problem& p, const Forward<T>& t) { safe_softmax::forward(p, t); }),
          nullptr};
}

StageUnderTest stage() {
  StageUnderTest s;
  s.name = "safe_softmax";
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.large_scores = true;
  s.promises.nan_tile = 0;  // O = P V is one product: 0 * NaN is NaN for every row
  s.promises.extra_bytes = [](const Problem& p) {
    // S and P, and the packing buffers of Eigen's matrix product
    return 2.0 * 4 * double(p.Nq) * double(p.Nk) + 2e6;
  };
  s.f32 = functions<float>();
  s.f64 = functions<double>();
  return s;
}
const bool registered = register_conformance(stage());

Spec square(std::int64_t N, std::int64_t d, Data data) {
  Spec spec{{}, data};
  spec.p.Nq = spec.p.Nk = N;
  spec.p.d = d;
  return spec;
}

template <class T>
int finite_elements(const Buffer<T>& x) {
  int n = 0;
  x.for_each([&](auto b, auto h, auto i, auto e) { n += std::isfinite(x.at(b, h, i, e)); });
  return n;
}

TEST(WhyThisStage, Stage00ReturnsNaNWhereThisStageIsRight) {
  for (double level : {100.0, 1000.0, 1e4}) {
    ForwardCase<float> naive_case(square(16, 8, {Data::Kind::level, level}), false);
    naive::forward(naive_case.p, naive_case.call().t);
    EXPECT_EQ(finite_elements(naive_case.O), 0) << "stage 00 at scores of " << level;

    ForwardCase<float> safe_case(square(16, 8, {Data::Kind::level, level}), true);
    safe_softmax::forward(safe_case.p, safe_case.call().t);
    EXPECT_EQ(safe_case.verdict(), "") << "stage 01 at scores of " << level;
  }
}

TEST(WhyThisStage, ScoresFarBelowZeroUnderflowInStage00) {
  // exp(-500) is 0 in float, so stage 00 divides 0 by 0, or, where Eigen's vectorised exp stops
  // just above 0 (SSE and AVX2), gives all keys the same weight.
  ForwardCase<float> naive_case(square(16, 8, {Data::Kind::level, -500}), false);
  naive::forward(naive_case.p, naive_case.call().t);
  EXPECT_NE(naive_case.verdict(), "");

  ForwardCase<float> safe_case(square(16, 8, {Data::Kind::level, -500}), true);
  safe_softmax::forward(safe_case.p, safe_case.call().t);
  EXPECT_EQ(safe_case.verdict(), "");
}

TEST(PreviousStage, AgreesWhereStage00IsRight) {
  for (std::int64_t N : {1, 17, 130}) {
    ForwardCase<double> x(square(N, 16, {}), false), y(square(N, 16, {}), false);
    naive::forward(x.p, x.call().t);
    safe_softmax::forward(y.p, y.call().t);
    Comparison c("O of stages 00 and 01");
    x.O.for_each([&](auto b, auto h, auto i, auto e) {
      c.add(b, h, i, e, y.O.at(b, h, i, e), x.O.at(b, h, i, e), 1e-12);
    });
    EXPECT_EQ(c.report(), "") << x.spec.name();
  }
}

template <class T>
std::string refusal(const Problem& p) {
  try {
    safe_softmax::forward(p, Forward<T>{});
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}
TEST(Memory, WhatCannotFitIsRefusedInWords) {
  const Problem p = square(std::int64_t(1) << 24, 64, {}).p;  // 2 PiB of scores
  EXPECT_NE(
      refusal<float>(p).find("safe_softmax: no memory for 2 matrices of Nq x Nk: 2147483648.0 MiB"),
      std::string::npos)
      << refusal<float>(p);
  EXPECT_NE(refusal<double>(p).find(": 4294967296.0 MiB"), std::string::npos);
}

TEST(TinyProblem, MatchesTheChapter) {
  TinyProblem tiny;
  safe_softmax::forward(tiny.p, tiny.tensors(true));
  EXPECT_TRUE(tiny.matches(true));

  tiny.p.causal = Causal::top_left;
  safe_softmax::forward(tiny.p, tiny.tensors(true));
  EXPECT_EQ(tiny.O[0], tiny.V[0]);  // the first row sees one key, so its output is that value
  EXPECT_EQ(tiny.O[1], tiny.V[1]);
}

}  // namespace
