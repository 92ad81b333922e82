#include "common/harness/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace fa::harness {

void Comparison::add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double got,
                     double want, double tolerance) {
  ++count_;
  const double error = std::fabs(got - want);
  const bool same = (std::isnan(got) && std::isnan(want)) || got == want;
  if (std::isfinite(error)) {
    error2_ += error * error;
    want2_ += want * want;
  }
  if (same) return;
  // Not !(error > tolerance), which NaN would pass; nor may infinity meet an infinite tolerance.
  const bool right = std::isfinite(error) && error <= tolerance;
  const double use =
      std::isfinite(error) ? error / tolerance : std::numeric_limits<double>::infinity();
  if (!std::isfinite(got) || !std::isfinite(want)) ++non_finite_;
  if (!right) ++wrong_;
  if (use > worst_ || (wrong_ == 1 && !right)) {
    worst_ = std::max(worst_, use);
    at_ = {b, h, i, x, got, want, tolerance};
  }
}

std::string Comparison::report() const {
  if (ok()) return {};
  std::ostringstream s;
  s.precision(9);
  s << what_ << ": " << wrong_ << " of " << count_ << " elements are wrong";
  if (non_finite_) s << " (" << non_finite_ << " of them NaN or infinite on one side)";
  s << "; worst at (b " << at_.b << ", h " << at_.h << ", i " << at_.i << ", x " << at_.x
    << "): got " << at_.got << ", want " << at_.want << ", tolerance " << at_.tolerance
    << (non_finite_ ? "; relative L2 error of the finite ones " : "; relative L2 error ")
    << (want2_ > 0 ? std::sqrt(error2_ / want2_) : std::sqrt(error2_));
  return s.str();
}

template <>
double forward_tolerance<float>(double A, double PV) {
  return 1e-5 * std::max(1.0, A / 16) * PV + 1e-7;
}
template <>
double forward_tolerance<double>(double A, double PV) {
  return 1e-12 * std::max(1.0, A) * PV + 1e-15;
}
template <>
double lse_tolerance<float>(double LSE) {
  return 5e-6 * std::max(1.0, std::fabs(LSE));
}
template <>
double lse_tolerance<double>(double LSE) {
  return 1e-12 * std::max(1.0, std::fabs(LSE));
}
template <>
double gradient_tolerance<float>(double A, double largest, double noise) {
  return 1e-5 * std::max(1.0, A / 16) * largest + 1e-6 * noise + 1e-30;
}
template <>
double gradient_tolerance<double>(double A, double largest, double noise) {
  return 1e-12 * std::max(1.0, A) * largest + 1e-14 * noise + 1e-300;
}

}  // namespace fa::harness
