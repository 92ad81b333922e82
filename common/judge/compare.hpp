// Comparison that NaN cannot pass: an element is right only if |got - want| <= tolerance is true,
// or if both are NaN, or if both are the same infinity.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "common/judge/half.hpp"
#include "common/judge/oracle.hpp"

namespace fa::judge {

class Comparison {
 public:
  // what: "O", "dQ" ...; the place is (b, h, i, x).
  explicit Comparison(std::string what) : what_(std::move(what)) {}

  // usual: how large the error of an element may be on the average, that is, as a root mean square
  // over the tensor; 0: that is not judged.
  void add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double got, double want,
           double tolerance, double usual = 0);

  bool ok() const { return wrong_ == 0 && !too_large_together(); }
  // Largest |got - want| / tolerance seen; infinity once a non-finite element was wrong.
  double worst() const { return worst_; }
  // No element need be wrong for the whole to be: many errors just below their tolerances. Expects
  // the elements of a row, x = 0 first, one after the other.
  bool too_large_together() const;
  // Empty if all is well; else how many are wrong, the worst place with both values, relative L2;
  // and in a line of its own, where the wrong ones lie.
  std::string report() const;
  // "wrong: all of heads 1 and 3, rows >= 64"; empty if no element is wrong.
  std::string pattern() const;
  // The reports of results of one call, and which of them are right beside those that are wrong.
  static std::string reports(const std::vector<Comparison>& results);

 private:
  // The elements at one index of b, h, i or x.
  struct Slice {
    std::int64_t seen = 0, wrong = 0;
  };
  std::string what_;
  std::int64_t count_ = 0, wrong_ = 0, non_finite_ = 0;
  double worst_ = 0, error2_ = 0, want2_ = 0;
  // usual squared: of all, of the current row, and the square of that of all earlier rows.
  double usual2_ = 0, row2_ = 0, rows4_ = 0;
  std::array<std::vector<Slice>, 4> slices_;  // by b, h, i and x
  struct {
    std::int64_t b, h, i, x;
    double got, want, tolerance;
  } at_{};
};

// Tolerances (relative to the conditioning of the problem; A and PV as in oracle.hpp).
// Element by element, "relative error <= 1e-5" is impossible near zero even for a perfect kernel.
// For fp16 and bf16 these three are what is due to fp32 arithmetic, which their kernels use too.
template <class T>
double forward_tolerance(double A, double PV);  // O
template <class T>
double lse_tolerance(double LSE, double A = 0);
template <class T>
double gradient_tolerance(double A, double largest, double noise);  // largest = max |gradient|

template <>
double forward_tolerance<float>(double A, double PV);
template <>
double lse_tolerance<float>(double LSE, double A);
template <>
double gradient_tolerance<float>(double A, double largest, double noise);
template <>
double forward_tolerance<double>(double A, double PV);
template <>
double lse_tolerance<double>(double LSE, double A);
template <>
double gradient_tolerance<double>(double A, double largest, double noise);
template <>
double forward_tolerance<Eigen::half>(double A, double PV);
template <>
double lse_tolerance<Eigen::half>(double LSE, double A);
template <>
double gradient_tolerance<Eigen::half>(double A, double largest, double noise);
template <>
double forward_tolerance<Eigen::bfloat16>(double A, double PV);
template <>
double lse_tolerance<Eigen::bfloat16>(double LSE, double A);
template <>
double gradient_tolerance<Eigen::bfloat16>(double A, double largest, double noise);

// What rounding to T loses. Only the half types round factors of a sum: P, in the backward also dS
// and O, and then the result. bf16's smallest numbers may be flushed to zero.
template <class T>
Rounding rounding() {
  return {};
}
template <>
inline Rounding rounding<Eigen::half>() {
  return {0x1p-11, 0x1p-25};
}
template <>
inline Rounding rounding<Eigen::bfloat16>() {
  return {0x1p-8, 0x1p-126};
}

// How far an element may be off, and how far on the average (0: the first says it all).
struct Tolerance {
  double element = 0, usual = 0;
};

// With the half types, the largest part is the rounding of factors. For few terms, all at their
// worst is the bound; for many, whose errors are independent, four times the root of the sum of
// squares: ten standard deviations, as a rounding error is 0.41 of its bound in the mean. That is
// also what a right kernel's mean error is of the root; 0.75 leaves room, but not twice as much.
template <class T>
Tolerance tolerance(double fp32, const Spread& e, double want, std::int64_t b, std::int64_t h,
                    std::int64_t i, std::int64_t x) {
  if constexpr (!is_half<T>) {
    return {fp32, 0};
  } else {
    const double result = rounding<T>().of(want), square = e.square.at(b, h, i, x);
    return {std::min(e.most.at(b, h, i, x), 4 * std::sqrt(square)) + result + fp32,
            0.75 * std::sqrt(square + result * result) + fp32};
  }
}

// Of O at row r of the oracle's.
template <class T>
Tolerance tolerance(const ForwardOracle& want, std::int64_t b, std::int64_t h, std::int64_t r,
                    std::int64_t x) {
  return tolerance<T>(forward_tolerance<T>(want.A.at(b, h, r), want.PV.at(b, h, r, x)), want.eO,
                      want.O.at(b, h, r, x), b, h, r, x);
}

}  // namespace fa::judge
