// Tests of stage 00: the conformance suite on what it promises, and what only this stage has.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "00_naive/naive.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;

template <class T>
Functions<T> functions() {
  return {
      on_host_forward<T>([](const Problem& p, const Forward<T>& t) { naive::forward(p, t); }),
      on_host_backward<T>([](const Problem& p, const Backward<T>& t) { naive::backward(p, t); })};
}

StageUnderTest stage() {
  StageUnderTest s;
  s.name = "naive";
  s.promises.nan_tile = 0;
  s.promises.extra_bytes = [](const Problem& p) {
    // S and P, and the packing buffers of Eigen's matrix product
    return 2.0 * 4 * double(p.Nq) * double(p.Nk) + 2e6;
  };
  s.promises.extra_bytes_backward = [](const Problem& p) {
    return 4.0 * 4 * double(p.Nq) * double(p.Nk) + 1e6;
  };
  s.promises.backward_reads_O_and_LSE = false;
  s.f32 = functions<float>();
  s.f64 = functions<double>();
  return s;
}
const bool registered = register_conformance(stage());

Problem square(std::int64_t N, std::int64_t d) {
  Problem p;
  p.Nq = p.Nk = N;
  p.d = d;
  return p;
}

// The flaw that stage 01 is about, kept on purpose: exp overflows float at 88.7.
TEST(Overflow, ScoresOf80AreFineScoresOf100AreNot) {
  ForwardCase<float> fine({square(8, 4), {Data::Kind::level, 80}}, false);
  naive::forward(fine.p, fine.call().t);
  EXPECT_EQ(fine.verdict(), "");

  ForwardCase<float> broken({square(8, 4), {Data::Kind::level, 100}}, false);
  naive::forward(broken.p, broken.call().t);
  int finite = 0;
  broken.O.for_each(
      [&](auto b, auto h, auto i, auto x) { finite += std::isfinite(broken.O.at(b, h, i, x)); });
  EXPECT_EQ(finite, 0) << "exp(100) does not fit a float, so no output can be a number";
}

TEST(Overflow, TheSumOverflowsFirst) {  // 64 keys with score 85: O is 0, not 0.5, and no NaN warns
  const float q = 85;
  const std::vector<float> K(64, 1.0f);
  std::vector<float> V(64);
  for (std::size_t j = 0; j < 64; ++j) V[j] = float(j % 2);
  float O = -1;
  Problem p;
  p.Nq = p.d = 1;
  p.Nk = 64;
  p.scale = 1.0;
  naive::forward(
      p, Forward<float>{contiguous(&q, 1, 1, 1), contiguous(K.data(), 1, 64, 1),
                        contiguous<const float>(V.data(), 1, 64, 1), contiguous(&O, 1, 1, 1)});
  EXPECT_EQ(O, 0);

  // The opening of 01: its largest score, 88.2469, lies below the limit of each of Eigen's exps.
  TinyProblem tiny;
  tiny.Q[6] = 123.8f;
  naive::forward(tiny.p, tiny.tensors(false));
  EXPECT_EQ(tiny.O[6], 0);
  EXPECT_EQ(tiny.O[7], 0);
}

TEST(SoftmaxGradient, JacobianAndRowSumAgree) {
  for (auto [Nq, Nk, d] : {std::tuple{1, 1, 1}, {3, 5, 2}, {17, 30, 8}, {64, 65, 16}}) {
    Spec spec;
    spec.p.Nq = Nq;
    spec.p.Nk = Nk;
    spec.p.d = d;
    spec.p.Hq = 4;
    spec.p.Hkv = 2;
    BackwardCase<double> jacobian(spec), row_sum(spec);
    naive::backward(jacobian.p, jacobian.call().t, {naive::SoftmaxGradient::jacobian});
    naive::backward(row_sum.p, row_sum.call().t, {naive::SoftmaxGradient::row_sum});
    EXPECT_EQ(jacobian.verdict(), "") << "jacobian, " << spec.name();
    EXPECT_EQ(row_sum.verdict(), "") << "row_sum, " << spec.name();
  }
}

TEST(Memory, WhatCannotFitIsRefusedInWords) {
  const Problem p = square(std::int64_t(1) << 24, 64);  // 2 PiB of scores
  std::string text;
  try {
    naive::forward(p, Forward<float>{});
  } catch (const std::invalid_argument& e) {
    text = e.what();
  }
  EXPECT_NE(text.find("naive: no memory for 2 matrices of Nq x Nk:"), std::string::npos) << text;
  EXPECT_NE(text.find("MiB are free"), std::string::npos) << text;
}

// Empty, or the words of the refusal; the memory is asked for before any tensor is looked at.
template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return {};
}
TEST(Memory, CountsWhatEachMethodAndTypeTakes) {
  const Problem p = square(std::int64_t(1) << 24, 64);
  EXPECT_NE(refusal([&] { naive::forward(p, Forward<float>{}); }).find(": 2147483648.0 MiB"),
            std::string::npos);
  EXPECT_NE(refusal([&] { naive::forward(p, Forward<double>{}); }).find(": 4294967296.0 MiB"),
            std::string::npos);
  EXPECT_NE(refusal([&] { naive::backward(p, Backward<float>{}); }).find(": 4294967296.0 MiB"),
            std::string::npos);
  // One query: its row is short, but the Jacobian has a row for every key.
  Problem one = p;
  one.Nq = 1;
  EXPECT_NE(refusal([&] {
              naive::backward(one, Backward<float>{}, {naive::SoftmaxGradient::jacobian});
            }).find("no memory"),
            std::string::npos);
}

TEST(TinyProblem, MatchesTheChapter) {
  TinyProblem tiny;
  naive::forward(tiny.p, tiny.tensors(false));
  EXPECT_TRUE(tiny.matches(false));
}

}  // namespace
