// The suite in fp16 and bf16, on trial: attention as a kernel on tensor cores does it (fp32 scores,
// statistics and sums; P, dS and the results rounded) must pass every family, and the same with a
// defect must not.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/core/check.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/conformance.hpp"
#include "common/judge/random.hpp"
#include "common/judge/sanitizer.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using Int = std::int64_t;

enum class Defect {
  none,
  half_sums,       // O is summed in the half type
  half_scores,     // S is rounded before the softmax
  half_weights_l,  // l sums the rounded P
  zero_keys,       // the last tile's padding is keys of zeros
  last_key,        // is left out
  key_twice,       // the last key counts twice
  last_tile,       // is left out if it is not full
  scale,           // is left out
  no_rescale,      // of O where the maximum grows
  no_rescale_l,    // of l
  l_of_last_tile,  // l is that of the last tile
  row_too_far,     // V is read one row too far
  unwritten,       // the last row's last element
};

template <class T>
float rounded(float x) {
  return float(T(x));
}

float dot(const auto* x, const auto* y, Int d) {
  float sum = 0;
  for (Int n = 0; n < d; ++n) sum += float(x[n]) * float(y[n]);
  return sum;
}

template <class T>
void forward(const Problem& p, const Forward<T>& t, Defect defect = Defect::none) {
  check_problem("half", p, 256);
  check_key_lengths("half", p);
  check_tensors("half", p, t);
  constexpr Int Bc = 64;
  const float scale = defect == Defect::scale ? 1 : float(p.softmax_scale());
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> acc(static_cast<std::size_t>(p.d)), s(Bc);
  for (Int row = 0; row < p.B * p.Hq * p.Nq; ++row) {
    const Int b = row / (p.Hq * p.Nq), h = row / p.Nq % p.Hq, i = row % p.Nq, g = p.key_head(h);
    Int n = visible_keys(p, b, i);
    if (defect == Defect::last_key && n > 1) --n;
    if (defect == Defect::last_tile && n > Bc) n -= n % Bc;
    float m = -infinity, l = 0;
    acc.assign(acc.size(), 0);
    for (Int first = 0; first < n; first += Bc) {
      const bool padded = defect == Defect::zero_keys && p.causal == Causal::none;
      const Int last = padded ? first + Bc : std::min(first + Bc, n);
      float m_new = m;
      for (Int j = first; j < last; ++j) {
        float x = j < n ? scale * dot(t.Q.at(b, h, i), t.K.at(b, g, j), p.d) : 0;
        if (defect == Defect::half_scores) x = rounded<T>(x);
        s[std::size_t(j - first)] = x;
        m_new = std::max(m_new, x);
      }
      const float base = m_new == -infinity ? 0 : m_new, correction = std::exp(m - base);
      if (defect != Defect::no_rescale_l) l *= correction;
      if (defect == Defect::l_of_last_tile) l = 0;
      if (defect != Defect::no_rescale)
        for (float& x : acc) x *= correction;
      for (Int j = first; j < last; ++j) {
        float P = std::exp(s[std::size_t(j - first)] - base);
        if (defect == Defect::key_twice && j == n - 1) P *= 2;
        l += defect == Defect::half_weights_l ? rounded<T>(P) : P;
        const Int at = defect == Defect::row_too_far && j + 1 < n ? j + 1 : j;
        for (Int x = 0; j < n && x < p.d; ++x) {
          float& sum = acc[std::size_t(x)];
          sum += rounded<T>(P) * float(t.V.at(b, g, at)[x]);
          if (defect == Defect::half_sums) sum = rounded<T>(sum);
        }
      }
      m = m_new;
    }
    for (Int x = 0; x < p.d; ++x)
      if (defect != Defect::unwritten || row + 1 < p.B * p.Hq * p.Nq || x + 1 < p.d)
        t.O.at(b, h, i)[x] = T(l == 0 ? 0 : acc[std::size_t(x)] / l);
    if (t.LSE) t.LSE[row] = l == 0 ? -infinity : m + std::log(l);
  }
}

enum class GradientDefect {
  none,
  no_D,       // dS = P dP
  half_sums,  // dK is summed in the half type
  dQ_scale,   // scale is left out of dQ
  dV_scaled,
  last_query,  // adds nothing to dK and dV
  group,       // only the group's first query head adds to dK and dV
  normalised_twice,
  key_tile,        // the second tile of keys adds nothing to dQ
  key_tile_twice,  // it adds twice
  query_tile,      // the second tile of queries adds nothing to dK and dV
};

template <class T>
void backward(const Problem& p, const Backward<T>& t, GradientDefect defect = {}) {
  using enum GradientDefect;
  check_problem("half", p, 256);
  check_key_lengths("half", p);
  check_tensors("half", p, t);
  require(t.O.data || p.B * p.Hq * p.Nq == 0, "half: O is a null pointer");
  require(t.LSE || p.B * p.Hq * p.Nq == 0, "half: LSE is a null pointer");
  const float scale = float(p.softmax_scale());
  const auto size = std::size_t(p.Nk * p.d);
  const auto put = [&](const View<T>& to, Int b, Int h, Int i, const float* from) {
    for (Int x = 0; x < p.d; ++x) to.at(b, h, i)[x] = T(from[x]);
  };
  for (Int b = 0; b < p.B; ++b)
    for (Int g = 0; g < p.Hkv; ++g) {
      std::vector<float> dK(size), dV(size);
      const Int group = p.Hq / p.Hkv;
      for (Int h = g * group; h < (g + 1) * group; ++h)
        for (Int i = 0; i < p.Nq; ++i) {
          const float D = defect == no_D ? 0 : dot(t.dO.at(b, h, i), t.O.at(b, h, i), p.d);
          const float LSE = t.LSE[(b * p.Hq + h) * p.Nq + i];
          const bool adds = (defect != last_query || i + 1 < p.Nq) &&
                            (defect != GradientDefect::group || h == g * group) &&
                            (defect != query_tile || i / 64 != 1);
          std::vector<float> dQ(std::size_t(p.d));
          const Int keys = std::isinf(LSE) ? 0 : visible_keys(p, b, i);  // a row without weight
          for (Int j = 0; j < keys; ++j) {
            float P = std::exp(scale * dot(t.Q.at(b, h, i), t.K.at(b, g, j), p.d) - LSE);
            if (defect == normalised_twice) P *= float(j + 1) / float(j + 2);
            const float dP = dot(t.dO.at(b, h, i), t.V.at(b, g, j), p.d);
            const float dS = rounded<T>(P * (dP - D));
            const float times = j / 64 != 1                ? 1.0f
                                : defect == key_tile       ? 0.0f
                                : defect == key_tile_twice ? 2.0f
                                                           : 1.0f;
            for (Int x = 0; x < p.d; ++x) {
              const auto at = std::size_t(j * p.d + x);
              dQ[std::size_t(x)] += times * dS * float(t.K.at(b, g, j)[x]);
              if (!adds) continue;
              dK[at] += scale * dS * float(t.Q.at(b, h, i)[x]);
              dV[at] += rounded<T>(P) * float(t.dO.at(b, h, i)[x]);
              if (defect == half_sums) dK[at] = rounded<T>(dK[at]);
            }
          }
          if (defect != dQ_scale)
            for (float& x : dQ) x *= scale;
          put(t.dQ, b, h, i, dQ.data());
        }
      if (defect == dV_scaled)
        for (float& x : dV) x *= scale;
      for (Int j = 0; j < p.Nk; ++j) {
        put(t.dK, b, g, j, &dK[std::size_t(j * p.d)]);
        put(t.dV, b, g, j, &dV[std::size_t(j * p.d)]);
      }
    }
}

// What a kernel of few promises refuses.
template <class T, class Tensors>
void check_rung(const Problem& p, const Tensors& t) {
  check_problem("rung", p, 128);
  require(p.d == 64 || p.d == 128, "rung: d must be 64 or 128, got ", p.d);
  require(!p.key_lengths, "rung: takes no key_lengths");
  require(p.softmax_scale() > 0, "rung: scale must be positive and finite");
  check_tensors("rung", p, t);
  const auto aligned = [](const auto& v) {
    const auto bytes = [](Int stride) { return stride * Int(sizeof(T)); };
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && bytes(v.row) % 16 == 0 &&
           bytes(v.head) % 16 == 0 && bytes(v.batch) % 16 == 0;
  };
  bool all = aligned(t.Q) && aligned(t.K) && aligned(t.V) && aligned(t.O);
  if constexpr (requires { t.dO; })
    all = all && aligned(t.dO) && aligned(t.dQ) && aligned(t.dK) && aligned(t.dV);
  require(all, "rung: rows must begin at multiples of 16 bytes");
}

template <class T>
Functions<T> functions(bool rung) {
  return {on_host_forward<T>([rung](const Problem& p, const Forward<T>& t) {
            if (rung) check_rung<T>(p, t);
            forward(p, t);
          }),
          on_host_backward<T>([rung](const Problem& p, const Backward<T>& t) {
            if (rung) check_rung<T>(p, t);
            backward(p, t);
          })};
}

StageUnderTest whole_contract() {
  StageUnderTest s;
  s.name = "half";
  s.promises.max_d = 256;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.large_scores = true;
  s.f16 = functions<Eigen::half>(false);
  s.bf16 = functions<Eigen::bfloat16>(false);
  return s;
}
StageUnderTest rung() {
  StageUnderTest s;
  s.name = "half_rung";
  s.promises.head_dims = {64, 128};
  s.promises.unaligned = false;
  s.promises.positive_scale_only = true;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.large_scores = true;
  s.bf16 = functions<Eigen::bfloat16>(true);
  s.effort = StageUnderTest::Effort::small;
  return s;
}
const bool registered = register_conformance(whole_contract()) && register_conformance(rung());

// ---- what the judge must see ----

template <class T>
class Half : public testing::Test {};
using HalfTypes = testing::Types<Eigen::half, Eigen::bfloat16>;
TYPED_TEST_SUITE(Half, HalfTypes);

// Minutes under a sanitizer, for a question of numbers.
const char* const same_without_sanitizer =
    "how much a comparison sees is tested without a sanitizer";

template <class T>
std::string verdict(const Spec& spec, Defect defect) {
  ForwardCase<T> c(spec, true);
  const ForwardCall<T> call = c.call();
  forward(call.p, call.t, defect);
  return c.verdict();
}
template <class T>
std::string verdict(const Spec& spec, GradientDefect defect) {
  BackwardCase<T> c(spec);
  const BackwardCall<T> call = c.call();
  backward(call.p, call.t, defect);
  return c.verdict();
}

TYPED_TEST(Half, TheTypesAreThemselves) {
  EXPECT_EQ(sizeof(TypeParam), 2u);
  const bool fp16 = std::is_same_v<TypeParam, Eigen::half>;
  EXPECT_EQ(std::string(type_name<TypeParam>()), fp16 ? "f16" : "bf16");
  EXPECT_EQ(float(TypeParam(1.0f + 1.0f / 512)), fp16 ? 1.0f + 1.0f / 512 : 1.0f);
  // Half of the distance to the next number is what is lost at most, of 1 and of the smallest.
  const double u = rounding<TypeParam>().unit;
  EXPECT_EQ(float(TypeParam(float(1 + 0.9 * u))), 1);
  EXPECT_EQ(float(TypeParam(float(1 + 1.1 * u))), 1 + 2 * u);
}

TYPED_TEST(Half, ForwardDefectsAreSeen) {
  if (FA_SANITIZED) GTEST_SKIP() << same_without_sanitizer;
  using enum Defect;
  using T = TypeParam;
  const Data::Kind equal = Data::Kind::equal;
  for (Defect d : {half_sums, half_scores, zero_keys, last_key, key_twice, last_tile, scale,
                   no_rescale, no_rescale_l, l_of_last_tile, row_too_far, unwritten})
    EXPECT_NE(verdict<T>({shape(65, 130, 64)}, d), "") << "defect " << int(d);
  for (Defect d : {half_sums, zero_keys, last_key, key_twice, last_tile, l_of_last_tile, no_rescale,
                   no_rescale_l})
    EXPECT_NE(verdict<T>({shape(70, 1000, 64)}, d), "") << "defect " << int(d);
  EXPECT_NE(verdict<T>({shape(65, 130, 64)}, half_weights_l), "");
  EXPECT_NE(verdict<T>({shape(5, 130, 64), {equal}}, last_key), "");
  // What the mean of many elements shows.
  EXPECT_NE(verdict<T>({shape(33, 16384, 64)}, half_sums), "");
  EXPECT_EQ(verdict<T>({shape(33, 16384, 64)}, none), "");
}

TYPED_TEST(Half, GradientDefectsAreSeen) {
  if (FA_SANITIZED) GTEST_SKIP() << same_without_sanitizer;
  using enum GradientDefect;
  for (const Spec& spec : {Spec{shape(65, 70, 32, 1, 2, 1)}, Spec{shape(130, 200, 64, 1, 2, 1)}})
    for (GradientDefect d :
         {no_D, half_sums, dQ_scale, dV_scaled, last_query, group, normalised_twice})
      EXPECT_NE(verdict<TypeParam>(spec, d), "") << "defect " << int(d);
}

// The same by sampled rows, where a tile is little of the whole.
TYPED_TEST(Half, GradientDefectsAreSeenInSamples) {
  if (FA_SANITIZED) GTEST_SKIP() << same_without_sanitizer;
  using T = TypeParam;
  using enum GradientDefect;
  const Spec spec{shape(1500, 2000, 16)};
  BackwardCase<T> c(spec, [](const ForwardCall<T>& call) { forward(call.p, call.t); });
  const auto verdict = [&](GradientDefect defect) {
    const BackwardCall<T> call = c.call();
    backward(call.p, call.t, defect);
    return c.verdict(sample(spec.p.Nq), sample(spec.p.Nk));
  };
  EXPECT_EQ(verdict(none), "");
  for (GradientDefect d : {no_D, half_sums, dQ_scale, dV_scaled, last_query, normalised_twice,
                           key_tile, key_tile_twice, query_tile})
    EXPECT_NE(verdict(d), "") << "defect " << int(d);
}

// A right backward whose dQ differs from run to run by so much of itself.
template <class T>
Functions<T> unsteady(double by) {
  const auto run = std::make_shared<std::uint64_t>(0);
  return {nullptr, on_host_backward<T>([by, run](const Problem& p, const Backward<T>& t) {
            backward(p, t);
            const std::uint64_t seed = ++*run;
            for (Int row = 0, n = 0; row < p.B * p.Hq * p.Nq; ++row)
              for (Int x = 0; x < p.d; ++x, ++n) {
                T& dQ = t.dQ.at(row / (p.Hq * p.Nq), row / p.Nq % p.Hq, row % p.Nq)[x];
                // As if it had been so before rounding: a step of T, seldom.
                const double step = 2 * rounding<T>().of(double(dQ));
                const double u = uniform(seed, std::uint64_t(n));
                if (u < by * std::fabs(double(dQ)) / step) dQ = T(double(dQ) + step);
              }
          })};
}
TYPED_TEST(Half, TheSpreadOfARightKernelPassesAndNoMore) {
  using T = TypeParam;
  const auto families = backward_families();
  const auto spread = std::find_if(families.begin(), families.end(),
                                   [](const Family& f) { return f.name == "BackwardSpread"; });
  ASSERT_NE(spread, families.end());
  static StageUnderTest stage;
  stage = whole_contract();
  EXPECT_FALSE(spread->promised(stage));
  stage.promises.deterministic_backward = false;
  EXPECT_TRUE(spread->promised(stage));
  stage.f16 = {};
  stage.bf16 = {};
  const auto run = [&](double by) {
    if constexpr (std::is_same_v<T, Eigen::half>)
      stage.f16 = unsteady<T>(by);
    else
      stage.bf16 = unsteady<T>(by);
    Run once(stage, *spread);
    spread->body(once);
  };
  run(1e-6);
  testing::TestPartResultArray failures;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    run(3e-5);
  }
  EXPECT_EQ(failures.size(), 1);
}

// A sum of many in the half type stops growing; the family must say so.
TYPED_TEST(Half, SumsThatStopGrowingAreSeen) {
  Spec spec{shape(3, 4096, 8), {Data::Kind::uniform}};
  ForwardCase<TypeParam> c(spec, false);
  c.Q.fill([](auto...) { return 0.0; });
  c.V.fill([](auto...) { return 1.0; });
  const auto call = c.call();
  forward(call.p, call.t, Defect::half_sums);
  EXPECT_LT(float(c.O.at(0, 0, 0, 0)), 0.6f);
  EXPECT_NE(c.verdict(), "");
}

// The error of a right kernel, and the limit, relative to the whole: 5e-3 in bf16 for the forward
// and 1e-2 for gradients, an eighth of that in fp16.
TYPED_TEST(Half, LimitsAreAsTightAsTheTypeAllows) {
  using T = TypeParam;
  const double eighth = std::is_same_v<T, Eigen::half> ? 0.125 : 1;
  BackwardCase<T> c({shape(257, 300, 64)});
  const BackwardOracle g = oracle_backward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V),
                                           to_array(c.dO), rounding<T>());
  const ForwardOracle f =
      oracle_forward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V), rounding<T>());
  const auto relative = [](const Array& want, const std::function<Tolerance(Int, Int)>& tolerance) {
    double sum = 0, all = 0;
    want.for_each([&](auto, auto, auto i, auto x) {
      sum += std::pow(tolerance(i, x).usual, 2);
      all += std::pow(want.at(0, 0, i, x), 2);
    });
    return std::sqrt(sum / all);
  };
  EXPECT_LT(relative(f.O, [&](Int i, Int x) { return tolerance<T>(f, 0, 0, i, x); }),
            5e-3 * eighth);
  const auto gradient = [&](const Array& want, const Spread& e) {
    double largest = 0;
    for (double w : want.data) largest = std::max(largest, std::fabs(w));
    const double fp32 = gradient_tolerance<T>(g.A, largest, g.noise);
    return relative(
        want, [&](Int i, Int x) { return tolerance<T>(fp32, e, want.at(0, 0, i, x), 0, 0, i, x); });
  };
  EXPECT_LT(gradient(g.dQ, g.eQ), 1e-2 * eighth);
  EXPECT_LT(gradient(g.dK, g.eK), 1e-2 * eighth);
  EXPECT_LT(gradient(g.dV, g.eV), 1e-2 * eighth);
}

TYPED_TEST(Half, NaNNeverPasses) {
  ForwardCase<TypeParam> c({shape(33, 65, 8)}, true);
  const auto call = c.call();
  forward(call.p, call.t);
  EXPECT_EQ(c.verdict(), "");
  c.O.at(0, 0, 7, 3) = std::numeric_limits<TypeParam>::quiet_NaN();
  EXPECT_NE(c.verdict(), "");
  EXPECT_NE(c.verdict({0, 1}).find("NaN in 1 places"), std::string::npos) << c.verdict({0, 1});
}

TYPED_TEST(Half, ErrorsThatAreSmallOneByOneAreSeenTogether) {
  ForwardCase<TypeParam> c({shape(70, 90, 32)}, false);
  const auto call = c.call();
  forward(call.p, call.t);
  const ForwardOracle want =
      oracle_forward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V), rounding<TypeParam>());
  Comparison all("O");
  c.O.for_each([&](auto b, auto h, auto i, auto x) {
    const Tolerance t = tolerance<TypeParam>(want, b, h, i, x);
    all.add(b, h, i, x, want.O.at(b, h, i, x) + 0.9 * t.element, want.O.at(b, h, i, x), t.element,
            t.usual);
  });
  EXPECT_FALSE(all.ok());
  EXPECT_NE(all.report().find("0 of 2240 elements are wrong, together they are"), std::string::npos)
      << all.report();
}

}  // namespace
