#include "common/judge/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace fa::judge {

void Comparison::add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double got,
                     double want, double tolerance, double usual) {
  ++count_;
  if (x == 0) {
    rows4_ += row2_ * row2_;
    row2_ = 0;
  }
  const double error = std::fabs(got - want);
  const bool same = (std::isnan(got) && std::isnan(want)) || got == want;
  if (std::isfinite(error)) {
    error2_ += error * error;
    want2_ += want * want;
    usual2_ += usual * usual;
    row2_ += usual * usual;
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

// The rows' errors are independent, but not those within a row. The fewer rows there are that
// count, the further their mean may stray; their number, (sum u^2)^2 / sum u^4, is 1 if one
// outweighs all others.
bool Comparison::too_large_together() const {
  if (usual2_ == 0) return false;
  const double rows = usual2_ * usual2_ / (rows4_ + row2_ * row2_);
  return !(std::sqrt(error2_) <= (1 + 3 / std::sqrt(rows)) * std::sqrt(usual2_));
}

std::string Comparison::report() const {
  if (ok()) return {};
  std::ostringstream s;
  s.precision(9);
  s << what_ << ": " << wrong_ << " of " << count_ << " elements are wrong";
  if (too_large_together())
    s << ", together they are: the mean error is " << std::sqrt(error2_ / usual2_)
      << " of what is usual";
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
double lse_tolerance<float>(double LSE, double) {
  return 5e-6 * std::max(1.0, std::fabs(LSE));
}
template <>
double lse_tolerance<double>(double LSE, double) {
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

// The half types. V may be as small as their smallest numbers, so there is no floor but that of
// fp32. Tensor cores cut off what does not fit fp32 where others round: LSE gets twice the room.
namespace {

double half_forward(double A, double PV) { return 1e-5 * std::max(1.0, A / 16) * PV + 1e-37; }
double half_lse(double LSE, double A) { return 1e-5 * std::max({1.0, std::fabs(LSE), A / 16}); }

}  // namespace

template <>
double forward_tolerance<Eigen::half>(double A, double PV) {
  return half_forward(A, PV);
}
template <>
double forward_tolerance<Eigen::bfloat16>(double A, double PV) {
  return half_forward(A, PV);
}
template <>
double lse_tolerance<Eigen::half>(double LSE, double A) {
  return half_lse(LSE, A);
}
template <>
double lse_tolerance<Eigen::bfloat16>(double LSE, double A) {
  return half_lse(LSE, A);
}
template <>
double gradient_tolerance<Eigen::half>(double A, double largest, double noise) {
  return gradient_tolerance<float>(A, largest, noise);
}
template <>
double gradient_tolerance<Eigen::bfloat16>(double A, double largest, double noise) {
  return gradient_tolerance<float>(A, largest, noise);
}

}  // namespace fa::judge
