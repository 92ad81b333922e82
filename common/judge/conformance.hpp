// Inside of the conformance suite: how a family of properties runs its cases.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "common/judge/cases.hpp"
#include "common/judge/contrast.hpp"
#include "common/judge/edge.hpp"
#include "common/judge/function_ref.hpp"
#include "common/judge/stage.hpp"

namespace fa::judge {

// A family that runs on a stage. `about` tells a reader whose code fails what idea is wrong.
struct Family {
  std::string name, about;
  std::function<bool(const StageUnderTest&)> promised;
  std::function<void(class Run&)> body;
};
std::vector<Family> forward_families();
std::vector<Family> backward_families();

// One run of one family: filters by FA_CASE, tells a few failures and how to rerun one, counts the
// others, and says what tells those that fail from those that pass.
class Run {
 public:
  Run(const StageUnderTest& stage, const Family& family) : stage_(stage), family_(family) {}

  const StageUnderTest& stage() const { return stage_; }
  const Promises& promises() const { return stage_.promises; }
  bool large() const { return stage_.effort == StageUnderTest::Effort::large; }
  bool small() const { return stage_.effort <= StageUnderTest::Effort::small; }
  bool tiny() const { return stage_.effort == StageUnderTest::Effort::tiny; }

  // Runs check(...) unless FA_CASE asks for others; a non-empty result or an exception is a
  // failure. With a Spec, the case counts for the contrast.
  void run(const std::string& case_name, FunctionRef<std::string()> check) {
    run_case(case_name, check, nullptr, "", "");
  }
  template <class T>
  void run(const Spec& spec, const std::string& what, FunctionRef<std::string()> check);

  // After the last case: what tells those that fail from those that pass.
  void conclude() const;

  // The nearest head dimension to `wanted` that the stage takes: the first from there on, or its
  // last.
  std::int64_t d(std::int64_t wanted) const;

  // More environment that "this case alone" needs.
  void rerun_with(const std::string& environment) { environment_ = environment + " "; }
  int cases() const { return cases_; }

  // Against the oracle, in every type that the stage promises.
  void forward(const Spec& spec);
  void backward(const Spec& spec);

  // body(T()) for each promised type.
  template <class Body>
  void each_type(Body body) {
    if (stage_.f32.forward || stage_.f32.backward) body(float());
    if (stage_.f64.forward || stage_.f64.backward) body(double());
#ifndef FA_WITHOUT_HALF
    if (stage_.f16.forward || stage_.f16.backward) body(Eigen::half());
    if (stage_.bf16.forward || stage_.bf16.backward) body(Eigen::bfloat16());
#endif
  }
  template <class T>
  const Functions<T>& functions() const {
    if constexpr (std::is_same_v<T, double>)
      return stage_.f64;
    else if constexpr (std::is_same_v<T, Eigen::half>)
      return stage_.f16;
    else if constexpr (std::is_same_v<T, Eigen::bfloat16>)
      return stage_.bf16;
    else
      return stage_.f32;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void run_case(const std::string& name, FunctionRef<std::string()> check, const Spec* spec,
                const std::string& what, const std::string& type);
  bool has_seen_enough() const;

  const StageUnderTest& stage_;
  const Family& family_;
  std::string environment_;
  int cases_ = 0, failures_ = 0, left_out_ = 0, thrown_in_turn_ = 0;
  Clock::time_point first_failure_;
  // Of the failures that are not shown: the one with the most rows, in which the wrong elements
  // are most likely to form a pattern.
  std::int64_t most_rows_ = 0;
  std::string largest_;
  std::vector<Outcome> outcomes_;
};

template <class T>
const char* type_name() {
  if (is_half<T>) return std::is_same_v<T, Eigen::half> ? "f16" : "bf16";
  return sizeof(T) == 8 ? "f64" : "f32";
}

template <class T>
void Run::run(const Spec& spec, const std::string& what, FunctionRef<std::string()> check) {
  run_case(spec.name() + (what.empty() ? "" : " " + what) + " " + type_name<T>(), check, &spec,
           what, type_name<T>());
}

// Runs the stage's forward on a case. Throws what the stage throws.
template <class T>
void forward(Run& run, ForwardCase<T>& c) {
  run.functions<T>().forward(c.call());
}
template <class T>
void backward(Run& run, BackwardCase<T>& c) {
  run.functions<T>().backward(c.call());
}

// Empty if f throws std::invalid_argument whose text contains every one of `words`.
std::string expect_refusal(FunctionRef<void()> f, const std::vector<std::string>& words);

// Bitwise comparison of two results: empty, or the first place that differs.
template <class T>
std::string same_bits(const char* what, const Buffer<T>& x, const Buffer<T>& y) {
  std::string text;
  x.for_each([&](auto b, auto h, auto i, auto e) {
    const T u = x.at(b, h, i, e), v = y.at(b, h, i, e);
    if (text.empty() && std::memcmp(&u, &v, sizeof(T)) != 0)
      text = std::string(what) + " differs at (b " + std::to_string(b) + ", h " +
             std::to_string(h) + ", i " + std::to_string(i) + ", x " + std::to_string(e) +
             "): " + std::to_string(u) + " and " + std::to_string(v);
  });
  return text;
}

// The bits of x after a factor of 2^n, but where a type's numbers lose digits because they are
// small: there one rounding apart.
template <class T>
bool scaled_bits(double x, double factor, double y) {
  const double smallest = double(std::numeric_limits<T>::min());
  if (!is_half<T> || std::fabs(x) >= smallest || std::fabs(y) >= smallest * std::fabs(factor))
    return factor * x == y;
  return std::fabs(factor * x - y) <= 2 * rounding<T>().tiny * std::max(1.0, std::fabs(factor));
}

// A shape with one size for heads and batch unless said otherwise.
Problem shape(std::int64_t Nq, std::int64_t Nk, std::int64_t d, std::int64_t B = 1,
              std::int64_t Hq = 1, std::int64_t Hkv = 1, Causal causal = Causal::none);

// Awkward sizes: 1, just below, at and above usual tiles, primes, Nq != Nk; d beyond any vector.
std::vector<Problem> awkward_sizes(const Run& run, Causal causal);

// Some rows of N >= 129, the edges among them.
std::vector<std::int64_t> sample(std::int64_t N);

// Addresses without memory behind them until they are used, so that tensors may lie far apart.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes);
  ~Reserved();
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  void* data() const { return data_; }  // null if so many addresses cannot be had
  // The block as a call's storage of which only so much at either end holds anything.
  Storage storage(std::size_t part) const {
    return {data_, bytes_, {{0, part}, {bytes_ - part, part}}};
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Does row i share a tile, of the size that the stage promises, with a row that sees key j?
bool shares_a_tile(const Promises& promises, const Problem& p, std::int64_t i, std::int64_t j);

// Layouts in which the rows of a tensor are no longer at multiples of 16 bytes, one reason each.
struct OutOfLine {
  const char* what;
  Layout layout;
};
const std::vector<OutOfLine>& out_of_line();

// Empty if f() comes to its end in a child process; else what ended it.
std::string survives(FunctionRef<void()> f);

}  // namespace fa::judge
