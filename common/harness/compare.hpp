// Comparison that NaN cannot pass: an element is right only if |got - want| <= tolerance is true,
// or if both are NaN, or if both are the same infinity.
#pragma once
#include <cstdint>
#include <string>

namespace fa::harness {

class Comparison {
 public:
  // what: "O", "dQ" ...; the place is (b, h, i, x).
  explicit Comparison(std::string what) : what_(std::move(what)) {}

  void add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double got, double want,
           double tolerance);

  bool ok() const { return wrong_ == 0; }
  // Largest |got - want| / tolerance seen; infinity once a non-finite element was wrong.
  double worst() const { return worst_; }
  // Empty if all is well; else how many are wrong, the worst place with both values, relative L2.
  std::string report() const;

 private:
  std::string what_;
  std::int64_t count_ = 0, wrong_ = 0, non_finite_ = 0;
  double worst_ = 0, error2_ = 0, want2_ = 0;
  struct {
    std::int64_t b, h, i, x;
    double got, want, tolerance;
  } at_{};
};

// Tolerances (relative to the conditioning of the problem; A and PV as in oracle.hpp).
// Element by element, "relative error <= 1e-5" is impossible near zero even for a perfect kernel.
template <class T>
double forward_tolerance(double A, double PV);  // O
template <class T>
double lse_tolerance(double LSE);
template <class T>
double gradient_tolerance(double A, double largest, double noise);  // largest = max |gradient|

template <>
double forward_tolerance<float>(double A, double PV);
template <>
double forward_tolerance<double>(double A, double PV);
template <>
double lse_tolerance<float>(double LSE);
template <>
double lse_tolerance<double>(double LSE);
template <>
double gradient_tolerance<float>(double A, double largest, double noise);
template <>
double gradient_tolerance<double>(double A, double largest, double noise);

}  // namespace fa::harness
