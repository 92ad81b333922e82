// The judge on trial: comparator, oracle, data, buffers, and the suite's own helpers.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <tuple>

#include "common/judge/at_work.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/conformance.hpp"
#include "common/judge/random.hpp"
#include "common/judge/sanitizer.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using Int = std::int64_t;
const double nan_ = std::nan("");
const double inf = std::numeric_limits<double>::infinity();

bool accepts(double got, double want, double tolerance) {
  Comparison c("x");
  c.add(0, 0, 0, 0, got, want, tolerance);
  EXPECT_EQ(c.ok(), c.report().empty());
  return c.ok();
}

TEST(Comparison, NaNAndInfinityNeverPassForANumber) {
  EXPECT_FALSE(accepts(nan_, 1, 1e9));
  EXPECT_FALSE(accepts(1, nan_, 1e9));
  EXPECT_FALSE(accepts(inf, 1, 1e9));
  EXPECT_FALSE(accepts(1, inf, 1e9));
  EXPECT_FALSE(accepts(inf, -inf, inf));
  EXPECT_FALSE(accepts(1, 1.1, nan_));
  EXPECT_TRUE(accepts(nan_, nan_, 0));
  EXPECT_TRUE(accepts(inf, inf, 0));
  EXPECT_TRUE(accepts(-inf, -inf, 0));
}

TEST(Comparison, TheToleranceIsALimitNotAHint) {
  EXPECT_TRUE(accepts(1.5, 1, 0.5));
  EXPECT_FALSE(accepts(1.5 + 1e-12, 1, 0.5));
  EXPECT_TRUE(accepts(0, -0.0, 0));
}

TEST(Comparison, ReportNamesTheWorstPlaceAndCountsAll) {
  Comparison c("O");
  c.add(0, 0, 0, 0, 1, 1, 0.1);
  c.add(0, 1, 2, 3, 2, 1, 0.1);
  c.add(1, 0, 5, 7, 9, 1, 0.1);
  c.add(1, 1, 0, 0, 1.2, 1, 0.1);
  EXPECT_NE(c.report().find("3 of 4"), std::string::npos) << c.report();
  EXPECT_NE(c.report().find("(b 1, h 0, i 5, x 7): got 9, want 1"), std::string::npos);
  c.add(0, 0, 9, 9, nan_, 1, 0.1);
  EXPECT_NE(c.report().find("i 9, x 9): got nan"), std::string::npos) << c.report();
}

TEST(Comparison, TellsWhatIsRightBesideWhatIsWrong) {
  Comparison o("O"), lse("LSE"), unasked("dQ");
  lse.add(0, 0, 0, 0, 1, 1, 0.1);
  EXPECT_EQ(Comparison::reports({o, lse, unasked}), "");
  o.add(0, 0, 0, 0, 2, 1, 0.1);
  const std::string text = Comparison::reports({o, lse, unasked});
  EXPECT_EQ(text, o.report() + "\nright: LSE\n");
  EXPECT_EQ(Comparison::reports({o}), o.report() + "\n");
}

// A tensor [2, 4, 70, 40] of which wrong(b, h, i, x) are wrong.
template <class F>
std::string pattern(F wrong, const std::string& what = "O", Int every = 1) {
  Comparison c(what);
  for (Int b = 0; b < 2; ++b)
    for (Int h = 0; h < 4; ++h)
      for (Int i = 0; i < 70; i += every)
        for (Int x = 0; x < 40; ++x) c.add(b, h, i, x, wrong(b, h, i, x) ? nan_ : 0, 0, 0);
  return c.pattern();
}

TEST(Pattern, SaysWhereTheWrongElementsLie) {
  using I = Int;
  EXPECT_EQ(pattern([](I, I, I, I) { return false; }), "");
  EXPECT_EQ(pattern([](I, I, I, I) { return true; }), "wrong: every element");
  EXPECT_EQ(pattern([](I, I h, I i, I x) { return h % 2 == 1 && i >= 64 && x >= 32; }),
            "wrong: all of heads 1 and 3, rows >= 64, columns >= 32");
  EXPECT_EQ(pattern([](I b, I, I, I) { return b == 0; }), "wrong: all of batch entry 0");
  EXPECT_EQ(pattern([](I, I h, I, I) { return h > 0; }), "wrong: all of heads >= 1");
  EXPECT_EQ(pattern([](I, I, I i, I) { return i < 16; }), "wrong: all of rows <= 15");
  EXPECT_EQ(pattern([](I, I, I i, I) { return i == 69; }), "wrong: all of row 69 (the last)");
  EXPECT_EQ(pattern([](I, I, I j, I) { return j >= 16 && j < 32; }, "dK"),
            "wrong: all of keys 16 to 31");
  EXPECT_EQ(pattern([](I, I, I, I x) { return x % 4 == 3; }),
            "wrong: all of columns with x % 4 == 3");
  EXPECT_EQ(pattern([](I, I, I i, I) { return i % 8 != 0; }), "wrong: all of rows with i % 8 != 0");
  EXPECT_EQ(pattern([](I, I, I i, I) { return i % 16 >= 8; }),
            "wrong: all of rows with i % 16 >= 8");
  EXPECT_EQ(pattern([](I, I, I i, I) { return i % 16 >= 4 && i % 16 < 8; }),
            "wrong: all of rows with i % 16 from 4 to 7");
  EXPECT_EQ(pattern([](I, I, I i, I) { return i == 3 || i == 4 || (i >= 20 && i < 25); }),
            "wrong: all of rows 3, 4 and 20 to 24");
  EXPECT_EQ(pattern([](I, I, I i, I) { return hash(1, std::uint64_t(i)) % 4 == 0; }),
            "wrong: all of 17 of the 70 rows");
}

TEST(Pattern, DoesNotClaimWhatItsPartsDoNotFill) {
  using I = Int;
  EXPECT_EQ(pattern([](I, I, I i, I x) { return i >= 60 && x == i % 40; }),
            "wrong: some of rows >= 60, columns 20 to 29");
  EXPECT_EQ(pattern([](I, I, I i, I x) { return x == i % 40; }),
            "wrong: some of every batch entry, head, row and column");
}

TEST(Pattern, OfASampleIsInItsOwnNumbers) {  // rows 0, 7, 14 ... 63
  using I = Int;
  EXPECT_EQ(pattern([](I, I, I i, I) { return i >= 50; }, "O", 7), "wrong: all of rows >= 56");
}

Outcome outcome(Problem p, bool failed, const Data& data = {}) {
  return {{p, data}, "f32", failed};
}

TEST(Contrast, NamesTheParameterThatSeparates) {
  std::vector<Outcome> all;
  for (Int Nq : {1, 17, 65})
    for (Int Nk : {1, 63, 64, 65, 130}) all.push_back(outcome(shape(Nq, Nk, 8), Nk > 64));
  EXPECT_EQ(contrast(all), "passes: all 9 cases with Nk <= 64; fails: all 6 with Nk > 64");
  for (Outcome& o : all) o.failed = false;
  EXPECT_EQ(contrast(all), "");
  for (Outcome& o : all) o.failed = true;
  EXPECT_EQ(contrast(all), "");
  all.clear();
  for (Int d : {1, 2, 3, 4, 7, 8, 11, 12, 13, 59, 64})
    all.push_back(outcome(shape(9, 9, d), d % 4 == 3));
  EXPECT_EQ(contrast(all), "passes: all 7 cases with d % 4 != 3; fails: all 4 with d % 4 == 3");
  all = {outcome(shape(5, 5, 8, 1, 4, 2), true), outcome(shape(5, 5, 8, 1, 4, 4), false)};
  EXPECT_EQ(contrast(all),
            "passes: the one case with a key head for each query head; fails: the one with groups "
            "of query heads");
}

TEST(Contrast, ComparesLikeWithLike) {
  std::vector<Outcome> all;
  for (Int Nk : {3, 5, 64}) {
    all.push_back(outcome(shape(99, Nk, 8), false));
    all.push_back(outcome(shape(99, Nk, 8), true));
    all.back().what = "padding NaN";
  }
  EXPECT_EQ(contrast(all),
            "passes: all 3 cases with no 'padding NaN'; fails: all 3 with 'padding NaN'");
  all[4].failed = true;
  EXPECT_EQ(contrast(all), "passes: all 2 cases with Nk <= 5; fails: the one with Nk > 5");
}

TEST(Contrast, SaysWhereSomethingPassesTooAndNothingWhereNothingTells) {
  std::vector<Outcome> all;
  for (Causal c : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (Int N : {3, 5, 7, 9})
      all.push_back(outcome(shape(N, 10 - N, 8, 1, 1, 1, c), c != Causal::none && N != 5));
  EXPECT_EQ(contrast(all),
            "passes: all 4 cases with no causal mask; fails: 6 of the 8 with a causal mask");
  all.clear();
  for (Int n = 0; n < 40; ++n)
    all.push_back(outcome(shape(integer(3, std::uint64_t(n), 1, 99), 50, 8),
                          hash(4, std::uint64_t(n)) % 2 == 0));
  EXPECT_EQ(contrast(all), "");
}

Array random_array(Int B, Int H, Int N, Int d, std::uint64_t seed) {
  Array a(B, H, N, d);
  for (std::size_t n = 0; n < a.data.size(); ++n) a.data[n] = normal(seed, n);
  return a;
}

TEST(Oracle, OneKeyReturnsItsValue) {
  const Problem p = shape(3, 1, 2);
  const Array Q = random_array(1, 1, 3, 2, 1), K = random_array(1, 1, 1, 2, 2);
  const Array V = random_array(1, 1, 1, 2, 3);
  const ForwardOracle f = oracle_forward(p, Q, K, V);
  for (Int i = 0; i < 3; ++i) {
    EXPECT_EQ(f.O.at(0, 0, i, 1), V.at(0, 0, 0, 1));
    const double s = (Q.at(0, 0, i, 0) * K.at(0, 0, 0, 0) + Q.at(0, 0, i, 1) * K.at(0, 0, 0, 1)) /
                     std::sqrt(2.0);
    EXPECT_NEAR(f.LSE.at(0, 0, i), s, 1e-15);
  }
}

TEST(Oracle, EqualScoresGiveTheMean) {
  const Problem p = shape(1, 4, 1);
  Array Q(1, 1, 1, 1), K = random_array(1, 1, 4, 1, 2), V(1, 1, 4, 1);
  V.data = {1, 2, 3, 6};
  const ForwardOracle f = oracle_forward(p, Q, K, V);
  EXPECT_DOUBLE_EQ(f.O.data[0], 3);
  EXPECT_DOUBLE_EQ(f.LSE.data[0], std::log(4.0));
}

TEST(Oracle, TwoByTwoByHand) {
  Problem p = shape(2, 2, 1);
  p.scale = 1;
  Array Q(1, 1, 2, 1), K(1, 1, 2, 1), V(1, 1, 2, 1);
  Q.data = {1, 2};
  K.data = {0, std::log(3.0)};
  V.data = {0, 1};
  const ForwardOracle f = oracle_forward(p, Q, K, V);
  EXPECT_NEAR(f.O.data[0], 3.0 / 4, 1e-15);   // weights 1 : 3
  EXPECT_NEAR(f.O.data[1], 9.0 / 10, 1e-15);  // weights 1 : 9
  EXPECT_NEAR(f.LSE.data[1], std::log(10.0), 1e-15);
  p.causal = Causal::top_left;
  EXPECT_EQ(oracle_forward(p, Q, K, V).O.data[0], 0);
}

TEST(Oracle, OneKeyOutweighsAll) {
  const Problem p = shape(1, 3, 1);
  Array Q(1, 1, 1, 1), K(1, 1, 3, 1), V(1, 1, 3, 1);
  Q.data = {1000};
  K.data = {0, 1, 0};
  V.data = {5, 7, 9};
  EXPECT_EQ(oracle_forward(p, Q, K, V).O.data[0], 7);
}

TEST(Oracle, NoKeysAndHiddenKeysGiveZeroAndMinusInfinity) {
  const Array none(1, 1, 0, 2), Q = random_array(1, 1, 5, 2, 1), two = random_array(1, 1, 2, 2, 2);
  const ForwardOracle empty = oracle_forward(shape(5, 0, 2), Q, none, none);
  EXPECT_EQ(empty.O.at(0, 0, 4, 1), 0);
  EXPECT_EQ(empty.LSE.at(0, 0, 4), -inf);
  Problem p = shape(5, 2, 2);
  p.causal = Causal::bottom_right;
  const ForwardOracle f = oracle_forward(p, Q, two, two);
  EXPECT_EQ(f.O.at(0, 0, 2, 0), 0);
  EXPECT_EQ(f.LSE.at(0, 0, 2), -inf);
  EXPECT_EQ(f.O.at(0, 0, 3, 0), two.at(0, 0, 0, 0));  // the first row that sees one key
}

TEST(Oracle, SampledRowsAreThoseOfTheWhole) {
  const Problem p = shape(9, 7, 3);
  const Array Q = random_array(1, 1, 9, 3, 1), K = random_array(1, 1, 7, 3, 2);
  const Array V = random_array(1, 1, 7, 3, 3);
  const ForwardOracle all = oracle_forward(p, Q, K, V), some = oracle_rows(p, Q, K, V, {8, 2});
  EXPECT_EQ(some.O.at(0, 0, 0, 1), all.O.at(0, 0, 8, 1));
  EXPECT_EQ(some.LSE.at(0, 0, 1), all.LSE.at(0, 0, 2));
}

TEST(Oracle, BackwardIsTheDerivativeOfItsForward) {
  for (Causal c : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    Problem p = shape(4, 5, 3, 1, 2, 1, c);
    Array Q = random_array(1, 2, 4, 3, 1), K = random_array(1, 1, 5, 3, 2);
    Array V = random_array(1, 1, 5, 3, 3);
    const Array dO = random_array(1, 2, 4, 3, 4);
    const auto loss = [&] {
      const ForwardOracle f = oracle_forward(p, Q, K, V);
      double sum = 0;
      for (std::size_t n = 0; n < dO.data.size(); ++n) sum += dO.data[n] * f.O.data[n];
      return sum;
    };
    const BackwardOracle g = oracle_backward(p, Q, K, V, dO);
    const auto check = [&](Array& x, const Array& gradient) {
      std::vector<double*> elements;
      for (double& e : x.data) elements.push_back(&e);
      const std::vector<double> want = central_differences(elements, loss);
      for (std::size_t n = 0; n < want.size(); ++n) EXPECT_NEAR(gradient.data[n], want[n], 1e-8);
    };
    check(Q, g.dQ);
    check(K, g.dK);
    check(V, g.dV);
  }
}

// All hooks at once: a window, softcap and a bias, dropout, a sink. O and LSE by hand, gradients by
// differences, dS by the bias's.
TEST(Oracle, HooksChangeTheProblemAndItsGradients) {
  const Problem p = shape(4, 5, 3, 1, 2, 1, Causal::bottom_right);
  Array Q = random_array(1, 2, 4, 3, 1), K = random_array(1, 1, 5, 3, 2);
  Array V = random_array(1, 1, 5, 3, 3), bias = random_array(1, 2, 4, 5, 5);
  const Array dO = random_array(1, 2, 4, 3, 4);
  std::vector<double> sink = {0.3, -0.8};
  Array dbias(1, 2, 4, 5);
  Hooks hooks;
  hooks.visible = [](Int, Int, Int i, Int j) { return j >= i - 1; };
  hooks.score = [&](double s, Int b, Int h, Int i, Int j) {
    return 2 * std::tanh(s / 2) + bias.at(b, h, i, j);
  };
  hooks.slope = [](double s, Int, Int, Int, Int) { return 1 - std::pow(std::tanh(s / 2), 2); };
  hooks.keep = [](Int, Int h, Int i, Int j) { return (h + i + j) % 3 == 0 ? 0 : 1.5; };
  hooks.sink = [&](Int, Int h) { return sink[static_cast<std::size_t>(h)]; };
  hooks.each = [&](Int b, Int h, Int i, Int j, double dS) { dbias.at(b, h, i, j) = dS; };

  const ForwardOracle f = oracle_forward(p, Q, K, V, {}, hooks);
  for (Int h = 0; h < 2; ++h)
    for (Int i = 0; i < 4; ++i) {
      double l = std::exp(sink[static_cast<std::size_t>(h)]), o = 0;
      for (Int j = std::max<Int>(0, i - 1); j <= i + 1; ++j) {  // bottom right: 5 keys, 4 queries
        double s = 0;
        for (Int x = 0; x < 3; ++x) s += Q.at(0, h, i, x) * K.at(0, 0, j, x) / std::sqrt(3.0);
        const double weight = std::exp(hooks.score(s, 0, h, i, j));
        l += weight;
        o += hooks.keep(0, h, i, j) * weight * V.at(0, 0, j, 2);
      }
      EXPECT_NEAR(f.O.at(0, h, i, 2), o / l, 1e-13);
      EXPECT_NEAR(f.LSE.at(0, h, i), std::log(l), 1e-13);
    }

  const BackwardOracle g = oracle_backward(p, Q, K, V, dO, {}, hooks);
  const auto loss = [&] {
    const ForwardOracle now = oracle_forward(p, Q, K, V, {}, hooks);
    double sum = 0;
    for (std::size_t n = 0; n < dO.data.size(); ++n) sum += dO.data[n] * now.O.data[n];
    return sum;
  };
  const auto check = [&](std::vector<double>& x, const Array& gradient) {
    std::vector<double*> elements(x.size());
    std::transform(x.begin(), x.end(), elements.begin(), [](double& e) { return &e; });
    const std::vector<double> want = central_differences(elements, loss);
    for (std::size_t n = 0; n < want.size(); ++n) EXPECT_NEAR(gradient.data[n], want[n], 1e-8);
  };
  check(Q.data, g.dQ);
  check(K.data, g.dK);
  check(V.data, g.dV);
  check(bias.data, dbias);
  check(sink, g.dsink);

  hooks.each = nullptr;
  const BackwardInputs in{Q, K, V, f.O, dO, f.LSE};
  const BackwardRowsOracle some = oracle_backward_rows(p, in, {3, 1}, {2, 4}, {}, hooks);
  for (Int x = 0; x < 3; ++x) {
    EXPECT_NEAR(some.dQ.value.at(0, 1, 0, x), g.dQ.at(0, 1, 3, x), 1e-13);
    EXPECT_NEAR(some.dK.value.at(0, 0, 0, x), g.dK.at(0, 0, 2, x), 1e-13);
    EXPECT_NEAR(some.dV.value.at(0, 0, 1, x), g.dV.at(0, 0, 4, x), 1e-13);
  }
}

// A row that sees no key but has a sink: O = 0, and the denominator is the sink alone.
TEST(Oracle, ASinkAloneTakesAll) {
  Hooks hooks;
  hooks.visible = [](Int, Int, Int, Int) { return false; };
  hooks.sink = [](Int, Int) { return 1.25; };
  const Array X = random_array(1, 1, 2, 3, 1);
  const ForwardOracle f = oracle_forward(shape(2, 2, 3), X, X, X, {}, hooks);
  EXPECT_EQ(f.O.at(0, 0, 1, 2), 0);
  EXPECT_EQ(f.LSE.at(0, 0, 1), 1.25);
}

TEST(Oracle, SampledGradientsAreThoseOfTheWhole) {
  const Int queries = 13, keys = 11;
  for (Causal c : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    const Problem p = shape(queries, keys, 3, 2, 4, 2, c);
    BackwardInputs in{random_array(2, 4, queries, 3, 1), random_array(2, 2, keys, 3, 2),
                      random_array(2, 2, keys, 3, 3),    {},
                      random_array(2, 4, queries, 3, 4), {}};
    const ForwardOracle f = oracle_forward(p, in.Q, in.K, in.V);
    in.O = f.O;
    in.LSE = f.LSE;
    const Rounding rounding{0x1p-8, 0x1p-126};
    const BackwardOracle all = oracle_backward(p, in.Q, in.K, in.V, in.dO, rounding);
    const BackwardRowsOracle some = oracle_backward_rows(p, in, {12, 0, 5}, {0, 10, 7}, rounding);
    const auto compare = [&](const GradientRows& got, const Array& want, const Spread& e) {
      got.value.for_each([&](auto b, auto h, auto r, auto x) {
        const Int i = got.rows[static_cast<std::size_t>(r)];
        EXPECT_NEAR(got.value.at(b, h, r, x), want.at(b, h, i, x), 1e-14);
        EXPECT_LE(got.noise.at(b, h, r), std::max(all.noise, 6.0));  // dV: P |dO|
        // The whole's allows for an O that is rounded; here O is what it is.
        EXPECT_LE(got.e.most.at(b, h, r, x), e.most.at(b, h, i, x) * (1 + 1e-12));
        EXPECT_LE(got.e.square.at(b, h, r, x), e.square.at(b, h, i, x) * (1 + 1e-12));
      });
    };
    compare(some.dQ, all.dQ, all.eQ);
    compare(some.dK, all.dK, all.eK);
    compare(some.dV, all.dV, all.eV);
    EXPECT_GT(some.dV.e.most.at(0, 0, 0, 0), 0);
    EXPECT_LE(some.A, all.A * (1 + 1e-12));
    double largest = 0;
    for (double x : some.dK.value.data) largest = std::max(largest, std::fabs(x));
    EXPECT_EQ(some.dK.largest(), largest);
  }
}

// A backward is a function of the O and LSE that it is given, wrong ones too.
TEST(Oracle, SampledGradientsTakeOAndLSEAsTheyAre) {
  const Problem p = shape(1, 1, 1);
  BackwardInputs in{Array(1, 1, 1, 1), Array(1, 1, 1, 1), Array(1, 1, 1, 1),
                    Array(1, 1, 1, 1), Array(1, 1, 1, 1), Array(1, 1, 1, 1)};
  in.Q.data = {1};
  in.K.data = {2};
  in.V.data = {5};
  in.O.data = {4};
  in.dO.data = {3};
  in.LSE.data = {2 + std::log(2.0)};  // P = 1/2, dP = 15, D = 12
  const BackwardRowsOracle g = oracle_backward_rows(p, in, {0}, {0});
  EXPECT_NEAR(g.dQ.value.data[0], 0.5 * 3 * 2, 1e-14);
  EXPECT_NEAR(g.dK.value.data[0], 0.5 * 3 * 1, 1e-14);
  EXPECT_NEAR(g.dV.value.data[0], 0.5 * 3, 1e-14);
  EXPECT_NEAR(g.dQ.noise.data[0], 0.5 * (15 + 12) * 2, 1e-14);
}

TEST(BackwardCase, SampledRowsSeeWhatTheyAreAndNaNAnywhere) {
  const auto forward = [](const ForwardCall<double>& call) {
    BackwardCase<double> same({call.p});  // the same numbers, and the oracle's O and LSE
    for (Int i = 0; i < 9; ++i) {
      call.t.LSE[i] = same.LSE.at(0, 0, i);
      for (Int x = 0; x < 4; ++x) call.t.O.at(0, 0, i)[x] = same.O.at(0, 0, i, x);
    }
  };
  BackwardCase<double> c({shape(9, 7, 4)}, forward);
  c.call();
  const BackwardOracle want =
      oracle_backward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V), to_array(c.dO));
  const auto put = [](Buffer<double>& to, const Array& from) {
    to.for_each([&](auto b, auto h, auto i, auto x) { to.at(b, h, i, x) = from.at(b, h, i, x); });
  };
  put(c.dQ, want.dQ);
  put(c.dK, want.dK);
  put(c.dV, want.dV);
  const std::vector<Int> queries = {1, 8}, keys = {0, 6};
  EXPECT_EQ(c.verdict(queries, keys), "");
  for (auto [x, name, seen] : {std::tuple{&c.dQ, "dQ", 8}, {&c.dK, "dK", 6}, {&c.dV, "dV", 0}}) {
    double& in_sample = x->at(0, 0, seen, 3);
    in_sample += 1e-6;
    EXPECT_EQ(c.verdict(queries, keys).find(name), 0u) << c.verdict(queries, keys);
    in_sample -= 1e-6;
    const double kept = x->at(0, 0, 4, 0);
    x->at(0, 0, 4, 0) = nan_;
    EXPECT_EQ(c.verdict(queries, keys), std::string(name) + " is no number in 1 places\n");
    x->at(0, 0, 4, 0) = kept;
  }
  EXPECT_EQ(c.verdict(queries, keys), "");
}

TEST(CentralDifferences, OfAPolynomial) {
  double x = 3, y = -2;
  const auto gradient = central_differences({&x, &y}, [&] { return x * x * y; });
  EXPECT_NEAR(gradient[0], -12, 1e-8);
  EXPECT_NEAR(gradient[1], 9, 1e-8);
  EXPECT_EQ(x, 3);
}

TEST(Random, IsTheSameEverywhere) {
  // Golden values: a change of generator would silently change every recorded case.
  EXPECT_EQ(hash(1, 0), 0x2d0f28c7e7e786b2u);
  EXPECT_EQ(hash(7, 123456789), 0x3b28ed612e6ddc90u);
  EXPECT_EQ(normal(1, 0), -0x1.b94c000000000p+0);
  EXPECT_EQ(normal(9, 1000), 0x1.1944000000000p-1);
}

TEST(Random, NormalHasMeanZeroAndVarianceOne) {
  double sum = 0, square = 0, largest = 0;
  const int n = 200000;
  for (int k = 0; k < n; ++k) {
    const double z = normal(3, static_cast<std::uint64_t>(k));
    sum += z;
    square += z * z;
    largest = std::max(largest, std::fabs(z));
  }
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(square / n, 1, 0.01);
  EXPECT_GT(largest, 3.5);
  for (int k = 0; k < 1000; ++k) {
    const Int x = integer(5, static_cast<std::uint64_t>(k), -2, 2);
    EXPECT_TRUE(x >= -2 && x <= 2);
  }
}

TEST(Data, LevelPutsEveryScoreNearTheLevel) {
  for (double level : {100.0, -500.0, -1e5}) {
    const Spec spec{shape(6, 9, 8), {Data::Kind::level, level}};
    ForwardCase<double> c(spec, true);
    for (Int i = 0; i < 6; ++i)
      for (Int j = 0; j < 9; ++j) {
        double s = 0;
        for (Int x = 0; x < 8; ++x) s += c.Q.at(0, 0, i, x) * c.K.at(0, 0, j, x);
        EXPECT_NEAR(s / std::sqrt(8.0), level, 1);
      }
  }
}

TEST(Data, ASliceHasTheSameNumbersAlone) {
  Spec big{shape(6, 9, 8, 2, 2, 2)}, small{shape(3, 4, 8)};
  ForwardCase<float> x(big, false), y(small, false);
  EXPECT_EQ(x.K.at(0, 0, 3, 7), y.K.at(0, 0, 3, 7));
  EXPECT_NE(x.K.at(0, 0, 3, 7), x.K.at(1, 1, 3, 7));
}

TEST(Buffer, SeesEveryWriteOutsideInGapsAndToInputs) {
  for (const Layout& layout : {Layout{}, Layout{Layout::Order::BNHD, 3, 2, false, false},
                               Layout{Layout::Order::BHND, 1, 0, true, false}}) {
    Buffer<float> x(2, 3, 4, 5, layout);
    x.fill([](auto...) { return 1.0; });
    EXPECT_EQ(x.changed(), "");
    const View<float> v = x.view();
    EXPECT_EQ(v.at(1, 2, 3) + 4, &x.at(1, 2, 3, 4));
    x.at(1, 2, 3, 4) = 2;
    EXPECT_NE(x.changed(), "");
    EXPECT_EQ(x.written_outside(), "");
    if (layout.gap) {
      v.at(0, 0, 0)[5] = 0;
      EXPECT_NE(x.written_outside(), "") << "a write into the gap";
    }
    x.poison();
    float* last = layout.reversed ? v.at(1, 2, 0) : v.at(1, 2, 3);
    last[5 + layout.gap] = 0;
    EXPECT_NE(x.written_outside(), "") << "a write behind the tensor";
  }
}

TEST(Buffer, PoisonIsNaN) {
  Buffer<float> x(1, 1, 2, 2);
  x.fill([](auto...) { return 1.0; });
  x.poison();
  EXPECT_TRUE(std::isnan(x.at(0, 0, 1, 1)));
}

TEST(ForwardCase, AnOutputThatIsNeverWrittenIsWrong) {
  ForwardCase<float> c({shape(2, 3, 4)}, true);
  c.call();
  EXPECT_NE(c.verdict().find("O: 8 of 8"), std::string::npos);
  EXPECT_NE(c.verdict().find("LSE: 2 of 2"), std::string::npos);
}

TEST(ForwardCase, AChangedInputIsWrong) {
  ForwardCase<float> c({shape(2, 3, 4)}, false);
  c.call();
  c.K.at(0, 0, 1, 1) += 1;
  EXPECT_NE(c.verdict().find("K: element 5"), std::string::npos) << c.verdict();
}

TEST(Sample, HasTheEdgesInOrder) {
  const std::vector<Int> rows = sample(65536);
  EXPECT_EQ(rows.front(), 0);
  EXPECT_EQ(rows.back(), 65535);
  for (std::size_t n = 1; n < rows.size(); ++n) EXPECT_LT(rows[n - 1], rows[n]);
}

TEST(ExpectRefusal, WantsTheRightExceptionWithTheRightWords) {
  EXPECT_EQ(expect_refusal([] { throw std::invalid_argument("Nq is -1"); }, {"Nq", "-1"}), "");
  EXPECT_NE(expect_refusal([] { throw std::invalid_argument("bad"); }, {"Nq"}), "");
  EXPECT_NE(expect_refusal([] { throw std::runtime_error("Nq"); }, {"Nq"}), "");
  EXPECT_NE(expect_refusal([] {}, {}), "");
}

// ---- what a test program says when it is ended ----

TEST(AtWork, ACrashNamesItsCase) {
  // Each in a child process, which inherits the handlers.
  const auto die = [](int how) {
    at_work_on("case  B1 Nq3\nthis case alone:  FA_CASE='B1 Nq3' program\n");
    if (how == SIGABRT) std::abort();
    volatile std::uintptr_t nowhere = 64;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address without memory is what is wanted
    if (how == SIGSEGV) *reinterpret_cast<int*>(nowhere) = 1;
    raise(how);
  };
  for (auto [signal, words] : {std::pair{SIGSEGV, FA_SANITIZED ? "sanitizer" : "SIGSEGV"},
                               {SIGABRT, "abort()"},
                               {SIGFPE, FA_SANITIZED ? "sanitizer" : "SIGFPE"},
                               {SIGTERM, "interrupted"}})
    EXPECT_DEATH(die(signal), std::string(words) +
                                  "[^\n]* at\ncase  B1 Nq3\nthis case alone:  "
                                  "FA_CASE='B1 Nq3' program");
}

TEST(AtWork, ACaseThatTakesLongIsNamedBeforeItIsKilled) {
  const auto wait = [] {
    tell_what_ends(1);
    at_work_on("case  B1 Nq3\n");
    sleep(5);  // ends with the alarm
    std::_Exit(3);
  };
  EXPECT_EXIT(wait(), testing::ExitedWithCode(3), "still at it:\ncase  B1 Nq3");
}

TEST(AtWork, NothingIsSaidOfWhatIsOver) {
  const auto die = [] {
    at_work_on("case  B1 Nq3\n");
    at_work_on("");
    raise(SIGTERM);
  };
  EXPECT_EXIT(die(), testing::KilledBySignal(SIGTERM), "^$");
}

// A forward that is wrong for more than one tile of keys, and one that cannot go on.
StageUnderTest a_stage(const std::function<void(const ForwardCall<float>&)>& f) {
  StageUnderTest s;
  s.name = "invented";
  s.f32.forward = f;
  return s;
}
std::string output_of(const StageUnderTest& s, const Family& family) {
  testing::TestPartResultArray failures;
  testing::internal::CaptureStdout();
  {
    testing::ScopedFakeTestPartResultReporter instead(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    Run run(s, family);
    family.body(run);
    run.conclude();
  }
  std::string text;
  for (int n = 0; n < failures.size(); ++n) text += failures.GetTestPartResult(n).message();
  return text + testing::internal::GetCapturedStdout();
}
int occurrences(const std::string& text, const std::string& word) {
  int n = 0;
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

TEST(Run, TellsThreeFailuresAndWhatTheyHaveInCommon) {
  const StageUnderTest s = a_stage([](const ForwardCall<float>& call) {
    BackwardCase<float> same({call.p});  // the same numbers, and the oracle's O
    same.O.for_each([&](auto b, auto h, auto i, auto x) {
      call.t.O.at(b, h, i)[x] = same.O.at(b, h, i, x) + (call.p.Nk > 64 && i >= 4 ? 1.0f : 0.0f);
    });
  });
  const std::string text = output_of(s, {"Sizes", "awkward sizes", nullptr, [](auto& run) {
                                           for (Int Nq : {3, 5, 7})
                                             for (Int Nk : {1, 64, 65, 70, 90})
                                               run.forward({shape(Nq, Nk, 4)});
                                         }});
  EXPECT_EQ(occurrences(text, "case  B1"), 4) << text;  // and of the others the longest
  EXPECT_NE(text.find("the longest:\ncase  B1 Hq1 Hkv1 Nq7 Nk90 "), std::string::npos) << text;
  EXPECT_NE(text.find("wrong: all of rows >= 4"), std::string::npos) << text;
  EXPECT_NE(text.find("wrong: all of row 4 (the last)"), std::string::npos) << text;
  EXPECT_NE(text.find("6 of 15 cases fail, the first 3 are shown"), std::string::npos) << text;
  EXPECT_NE(text.find("passes: all 6 cases with Nk <= 64; fails: 6 of the 9 with Nk > 64"),
            std::string::npos)
      << text;
}

TEST(Run, LeavesOffWhereNothingWorksAnyMore) {
  int calls = 0;
  const StageUnderTest s = a_stage([&](const ForwardCall<float>&) {
    ++calls;
    throw std::runtime_error("illegal address");
  });
  const std::string text = output_of(s, {"Sizes", "awkward sizes", nullptr, [](auto& run) {
                                           for (Int Nk = 1; Nk < 20; ++Nk)
                                             run.forward({shape(2, Nk, 4)});
                                         }});
  EXPECT_EQ(calls, 3);
  EXPECT_NE(text.find("3 of 3 cases fail; 16 more are left out"), std::string::npos) << text;
}

TEST(Run, WhatFollowsStandsOnALineOfItsOwn) {
  const StageUnderTest s =
      a_stage([](const ForwardCall<float>&) { throw std::runtime_error("out of memory"); });
  const std::string text =
      output_of(s, {"Sizes", "awkward sizes", nullptr, [](auto& run) {
                      for (Int Nk : {1, 2, 3, 4, 5})
                        run.run(std::to_string(Nk), [&] { return std::string(); }),
                            run.forward({shape(2, Nk, 4)});
                    }});
  EXPECT_NE(text.find("longest:\ncase  B1 Hq1 Hkv1 Nq2 Nk5"), std::string::npos) << text;
  EXPECT_EQ(text.back(), '\n') << text;
}

}  // namespace
