// Tests of stage 02: both kernels under the conformance suite; the running sum by itself; merging.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "01_safe_softmax/safe_softmax.hpp"
#include "02_online_softmax/online_softmax.hpp"
#include "common/core/simd.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/random.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using online_softmax::Kernel, online_softmax::Running;
using Int = std::int64_t;
constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
Functions<T> functions(Kernel kernel) {
  return {on_host_forward<T>([kernel](const Problem& p, const Forward<T>& t) {
            online_softmax::forward(p, t, {kernel});
          }),
          nullptr};
}

StageUnderTest stage(const char* name) {
  StageUnderTest s;
  s.name = name;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.large_scores = true;
  return s;
}

StageUnderTest rows() {
  StageUnderTest s = stage("rows");
  s.promises.extra_bytes = [](const Problem&) { return 256.0; };  // what checking strides takes
  s.f32 = functions<float>(Kernel::rows);
  s.f64 = functions<double>(Kernel::rows);
  return s;
}
StageUnderTest lanes() {
  StageUnderTest s = stage("lanes");
  s.promises.nan_tile = simd::W;  // lanes of one vector run over the same keys
  s.promises.extra_bytes = [](const Problem& p) {
    return 4.0 * 2 * simd::W * double(p.d) + 256;  // q and o, and what checking strides takes
  };
  s.f32 = functions<float>(Kernel::lanes);
  return s;
}
const bool registered = register_conformance(rows()) && register_conformance(lanes());

// Sequences that rescale at every step, at no step, once, or that hold nothing.
std::vector<std::vector<double>> sequences() {
  std::vector<std::vector<double>> all = {{3, 2, 5, 1},
                                          {1, 2, 3, 4, 5, 6},
                                          {6, 5, 4, 3, 2, 1},
                                          {7, 7, 7, 7},
                                          {-1e5, -1e5, -99999},
                                          {1e4, -1e4, 1e4},
                                          {-infinity, -infinity, 2, -infinity, 3},
                                          {2},
                                          {-infinity},
                                          {}};
  for (int n : {2, 7, 64, 1000}) {
    all.emplace_back();
    for (int j = 0; j < n; ++j) all.back().push_back(5 * normal(11, std::uint64_t(j)));
  }
  return all;
}

// The induction of the chapter, step by step: after i numbers m is their maximum and
// l = sum over j < i of exp(x_j - m).
TEST(Running, EveryPrefixIsRight) {
  for (const auto& x : sequences()) {
    SCOPED_TRACE("case  " + testing::PrintToString(x));
    Running<double> r;
    for (std::size_t i = 0; i < x.size(); ++i) {
      double p = -1;
      const double m_before = r.m, rescale = r.add(x[i], p);
      double m = -infinity, l = 0;
      for (std::size_t j = 0; j <= i; ++j) m = std::max(m, x[j]);
      for (std::size_t j = 0; j <= i && m > -infinity; ++j) l += std::exp(x[j] - m);
      EXPECT_EQ(r.m, m) << "prefix of " << i + 1;
      EXPECT_NEAR(r.l, l, 1e-13 * l) << "prefix of " << i + 1;
      if (x[i] > -infinity) {
        EXPECT_EQ(p, std::exp(x[i] - m));
        EXPECT_EQ(rescale, std::exp(m_before - m));
      }
    }
  }
}

TEST(Running, TheChaptersExample) {
  Running<double> r;
  double p;
  const double l[] = {1, 1 + std::exp(-1.0), 1 + std::exp(-2.0) + std::exp(-3.0), 1.2034380};
  int i = 0;
  for (double x : {3., 2., 5., 1.}) {
    r.add(x, p);
    EXPECT_NEAR(r.l, l[i++], 1e-6);
  }
}

TEST(Softmax, AgreesWithTheDefinition) {
  for (const auto& x : sequences()) {
    SCOPED_TRACE("case  " + testing::PrintToString(x));
    std::vector<double> p = x;
    online_softmax::softmax(p.data(), Int(p.size()), p.data());
    double m = -infinity, l = 0;
    for (double e : x) m = std::max(m, e);
    for (double e : x) l += m > -infinity ? std::exp(e - m) : 0;
    for (std::size_t j = 0; j < x.size(); ++j)
      EXPECT_NEAR(p[j], l > 0 ? std::exp(x[j] - m) / l : 0, 1e-15);
  }
}

TEST(Softmax, NaNIsNotLost) {
  for (std::size_t bad : {0, 1, 3}) {
    std::vector<double> x = {-infinity, 1, 2, 3};
    x[bad] = std::nan("");
    online_softmax::softmax(x.data(), 4, x.data());
    EXPECT_TRUE(std::isnan(x[2])) << "NaN at " << bad;
  }
}

// Attention over keys [first, last) of one head, by the stage itself.
struct Part {
  std::vector<double> O;
  std::vector<double> LSE;
};
Part attend(ForwardCase<double>& c, Int first, Int last) {
  Problem p = c.p;
  p.Nk = last - first;
  Part part{std::vector<double>(std::size_t(p.Nq * p.d)), std::vector<double>(std::size_t(p.Nq))};
  View<const double> K = c.K.view(), V = c.V.view();
  K.data = K.at(0, 0, first);
  V.data = V.at(0, 0, first);
  online_softmax::forward(
      p,
      Forward<double>{c.Q.view(), K, V, contiguous(part.O.data(), 1, p.Nq, p.d), part.LSE.data()});
  return part;
}
Part merged(const Part& a, const Part& b, Int d) {
  Part whole = a;
  for (std::size_t i = 0; i < a.LSE.size(); ++i) {
    const std::size_t at = i * std::size_t(d);
    online_softmax::merge(&whole.O[at], whole.LSE[i], &b.O[at], b.LSE[i], d, &whole.O[at],
                          &whole.LSE[i]);
  }
  return whole;
}
void expect_near(const Part& a, const Part& b) {
  for (std::size_t n = 0; n < a.O.size(); ++n)
    EXPECT_NEAR(a.O[n], b.O[n], 1e-13) << "O, element " << n;
  for (std::size_t n = 0; n < a.LSE.size(); ++n) {
    if (b.LSE[n] == -infinity)
      EXPECT_EQ(a.LSE[n], -infinity) << "LSE of row " << n;
    else
      EXPECT_NEAR(a.LSE[n], b.LSE[n], 1e-13 * std::max(1.0, std::fabs(b.LSE[n])))
          << "LSE of row " << n;
  }
}

TEST(Merge, AnySplitGivesTheWhole) {
  for (Data data : {Data{}, Data{Data::Kind::rising, 1000}, Data{Data::Kind::spike_last, 1e4}}) {
    Spec spec{{}, data};
    spec.p.Nq = 5;
    spec.p.Nk = 23;
    spec.p.d = 6;
    ForwardCase<double> c(spec, true);
    const Part whole = attend(c, 0, 23);
    for (Int split = 0; split <= 23; ++split) {  // 0 and 23: one part is empty
      SCOPED_TRACE("case  " + spec.name() + ", split after key " + std::to_string(split));
      expect_near(merged(attend(c, 0, split), attend(c, split, 23), 6), whole);
    }
  }
}

TEST(Merge, TheResultMayTakeThePlaceOfEitherPart) {
  for (bool second : {false, true}) {
    double O1[] = {1, -2, 3}, O2[] = {-5, 7, 11}, O[3], L = 0, L_in_place = 0;
    online_softmax::merge(O1, 0.5, O2, -0.25, 3, O, &L);
    double* const place = second ? O2 : O1;
    online_softmax::merge(O1, 0.5, O2, -0.25, 3, place, &L_in_place);
    for (int x = 0; x < 3; ++x) EXPECT_EQ(place[x], O[x]) << (second ? "O2" : "O1");
    EXPECT_EQ(L_in_place, L);
  }
}

TEST(Merge, OrderAndGroupingDoNotMatter) {
  Spec spec;
  spec.p.Nq = 4;
  spec.p.Nk = 30;
  spec.p.d = 3;
  ForwardCase<double> c(spec, true);
  for (auto [s, t] : {std::pair<Int, Int>{7, 19}, {0, 30}, {10, 10}, {1, 2}}) {
    SCOPED_TRACE("case  " + spec.name() + ", split after keys " + std::to_string(s) + " and " +
                 std::to_string(t));
    const Part x = attend(c, 0, s), y = attend(c, s, t), z = attend(c, t, 30);
    expect_near(merged(merged(x, y, 3), z, 3), merged(x, merged(y, z, 3), 3));
    expect_near(merged(x, y, 3), merged(y, x, 3));
  }
  SCOPED_TRACE("case  two parts without keys");
  const Part nothing = attend(c, 4, 4);
  expect_near(merged(nothing, nothing, 3), nothing);
}

// The vector exp2 that lanes rest on.
float exp2_of(float x) {
  simd::Vec v{};
  v[simd::W - 1] = x;
  return simd::exp2(v)[simd::W - 1];
}
TEST(Exp2, ExactAtZeroAndAtMinusInfinityAndKeepsNaN) {
  EXPECT_EQ(exp2_of(0.0f), 1.0f);
  EXPECT_EQ(exp2_of(-0.0f), 1.0f);
  EXPECT_EQ(exp2_of(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(exp2_of(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(exp2_of(std::nanf(""))));
  for (int n = -126; n <= 0; ++n) EXPECT_EQ(exp2_of(float(n)), std::exp2(float(n))) << n;
}
TEST(Exp2, RelativeErrorIsBelow3e7) {
  double worst = 0;
  for (int k = 0; k < 200000; ++k) {
    const float x = float(-125.9 * uniform(3, std::uint64_t(k)));
    worst = std::max(worst, std::fabs(double(exp2_of(x)) / std::exp2(double(x)) - 1));
  }
  EXPECT_LT(worst, 3e-7);
}

TEST(PreviousStage, AgreesWithStage01) {
  for (Causal mask : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    Spec spec;
    spec.p.Nq = 33;
    spec.p.Nk = 50;
    spec.p.d = 16;
    spec.p.causal = mask;
    ForwardCase<double> x(spec, true), y(spec, true);
    safe_softmax::forward(x.p, x.call().t);
    online_softmax::forward(y.p, y.call().t);
    Comparison c("O of stages 01 and 02");
    x.O.for_each([&](auto b, auto h, auto i, auto e) {
      c.add(b, h, i, e, y.O.at(b, h, i, e), x.O.at(b, h, i, e), 1e-12);
    });
    EXPECT_EQ(c.report(), "") << spec.name();
  }
}

TEST(Lanes, DoubleIsRefusedInWords) {
  Spec spec;
  spec.p.Nq = spec.p.Nk = spec.p.d = 2;
  ForwardCase<double> c(spec, false);
  const auto call = c.call();
  EXPECT_THROW(online_softmax::forward(call.p, call.t, {Kernel::lanes}), std::invalid_argument);
}

// Empty, or the words of the refusal.
std::string refusal(const Problem& p, const Forward<float>& t, Kernel kernel) {
  try {
    online_softmax::forward(p, t, {kernel});
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return {};
}

// All keys are one row in memory: a row stride of 0 makes a long problem out of few numbers.
TEST(Lanes, MoreKeysThan32BitsCountAreRefusedInWords) {
  const float Q[2] = {1, 2}, K[2] = {3, 4}, V[2] = {5, 6};
  float O[2] = {7, 8};
  Problem p;
  p.Nq = 1;
  p.d = 2;
  const Forward<float> t{{Q, 2, 2, 2}, {K, 2, 2, 0}, {V, 2, 2, 0}, {O, 2, 2, 2}, nullptr};
  p.Nk = (Int(1) << 31) + 5;
  EXPECT_NE(refusal(p, t, Kernel::lanes).find("got Nk = 2147483653"), std::string::npos);
  EXPECT_EQ(O[0], 7);
  p.Nk = 1000;
  EXPECT_EQ(refusal(p, t, Kernel::lanes), "");
  EXPECT_NEAR(O[0], 5, 1e-4);
}

// With Q = 0 every score is 0, unless the factor of the scores has become infinite: 0 * inf is NaN.
TEST(Scale, ThatOverflowsOnlyInBase2IsTakenByRowsAndRefusedByLanes) {
  Spec spec;
  spec.p.Nq = 3;
  spec.p.Nk = 5;
  spec.p.d = 4;
  spec.p.scale = 3e38;
  ForwardCase<float> c(spec, true);
  c.Q.fill([](auto...) { return 0.0; });
  const auto call = c.call();
  EXPECT_EQ(refusal(call.p, call.t, Kernel::rows), "");
  EXPECT_EQ(c.verdict(), "");
  EXPECT_NE(refusal(call.p, call.t, Kernel::lanes).find("scale * log2(e)"), std::string::npos);
  Problem p = call.p;
  p.scale = 2.3e38;
  EXPECT_EQ(refusal(p, call.t, Kernel::lanes), "");
  EXPECT_EQ(c.verdict(), "");
}

TEST(TinyProblem, MatchesTheChapter) {
  for (Kernel kernel : {Kernel::rows, Kernel::lanes}) {
    TinyProblem tiny;
    online_softmax::forward(tiny.p, tiny.tensors(true), {kernel});
    EXPECT_TRUE(tiny.matches(true));
  }
}

}  // namespace
