#include "common/judge/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace fa::judge {
namespace {

using Indices = std::vector<std::int64_t>;

// "1", "1 and 3", "1, 3 and 4"
std::string enumerate(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t n = 0; n < words.size(); ++n)
    text += (n == 0 ? "" : n + 1 < words.size() ? ", " : " and ") + words[n];
  return text;
}

// Which of the indices that were looked at are `wrong` (at least one, not all), after the name of
// one of them: "row 3", "rows >= 64", "rows 16 to 31", "rows with i % 4 == 3", "rows 1, 3 and 7 to
// 9", "17 of the 40 rows". Both lists ascend. `letter`: what the index is called in the report.
std::string which(const std::string& name, char letter, const Indices& seen, const Indices& wrong) {
  const auto text = [](std::int64_t n) { return std::to_string(n); };
  if (wrong.size() == 1)
    return name + " " + text(wrong[0]) + (wrong[0] == seen.back() ? " (the last)" : "");
  const std::string names = name == "batch entry" ? "batch entries" : name + "s";
  // Runs of neighbours among the indices seen, which may be a sample.
  std::vector<std::string> runs;
  for (std::size_t s = 0, w = 0; w < wrong.size();) {
    while (seen[s] != wrong[w]) ++s;
    const std::size_t first = w;
    while (w < wrong.size() && s < seen.size() && seen[s] == wrong[w]) ++s, ++w;
    const std::size_t n = w - first;
    for (std::size_t k = first; n <= 2 && k < w; ++k) runs.push_back(text(wrong[k]));
    if (n > 2) runs.push_back(text(wrong[first]) + " to " + text(wrong[w - 1]));
  }
  const bool one_run = std::lower_bound(seen.begin(), seen.end(), wrong.back()) -
                           std::lower_bound(seen.begin(), seen.end(), wrong.front()) + 1 ==
                       std::ptrdiff_t(wrong.size());
  if (one_run && wrong.back() == seen.back()) return names + " >= " + text(wrong.front());
  if (one_run && wrong.front() == seen.front()) return names + " <= " + text(wrong.back());
  if (runs.size() <= 2) return names + " " + enumerate(runs);
  // What repeats: a remainder, all but one, or a part of every m.
  for (std::int64_t m = 2; 2 * m <= seen.back() - seen.front() + 1; m *= 2) {
    std::vector<bool> bad(std::size_t(m), false), good(std::size_t(m), false);
    for (std::size_t s = 0, w = 0; s < seen.size(); ++s) {
      const bool is_wrong = w < wrong.size() && wrong[w] == seen[s];
      w += is_wrong;
      (is_wrong ? bad : good)[std::size_t(seen[s] % m)] = true;
    }
    std::int64_t count = 0, first = -1, last = -1, right = -1;
    bool separate = true;
    for (std::int64_t r = 0; r < m; ++r) {
      const auto k = std::size_t(r);
      separate = separate && bad[k] != good[k];
      if (bad[k]) {
        if (first < 0) first = r;
        last = r;
        ++count;
      } else {
        right = r;
      }
    }
    if (!separate) continue;
    const std::string with = names + " with " + letter + " % " + text(m);
    if (count == 1) return with + " == " + text(first);
    if (count == m - 1) return with + " != " + text(right);
    if (last - first + 1 != count) continue;
    if (last == m - 1) return with + " >= " + text(first);
    if (first == 0) return with + " <= " + text(last);
    return with + " from " + text(first) + " to " + text(last);
  }
  if (runs.size() <= 4) return names + " " + enumerate(runs);
  return text(std::int64_t(wrong.size())) + " of the " + text(std::int64_t(seen.size())) + " " +
         names;
}

}  // namespace

void Comparison::add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double got,
                     double want, double tolerance, double usual) {
  ++count_;
  const std::array<std::int64_t, 4> place = {b, h, i, x};
  for (std::size_t a = 0; a < 4; ++a) {
    if (slices_[a].size() <= std::size_t(place[a])) slices_[a].resize(std::size_t(place[a]) + 1);
    ++slices_[a][std::size_t(place[a])].seen;
  }
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
  if (!right) {
    ++wrong_;
    for (std::size_t a = 0; a < 4; ++a) ++slices_[a][std::size_t(place[a])].wrong;
  }
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
  const std::string where = pattern();
  return where.empty() ? s.str() : s.str() + "\n  " + where;
}

std::string Comparison::reports(const std::vector<Comparison>& results) {
  std::string wrong;
  std::vector<std::string> right;
  for (const Comparison& c : results) {
    if (!c.ok())
      wrong += c.report() + "\n";
    else if (c.count_ > 0)
      right.push_back(c.what_);
  }
  return wrong.empty() || right.empty() ? wrong : wrong + "right: " + enumerate(right) + "\n";
}

// Each index by itself: which of its values have wrong elements. The wrong elements lie where all
// four agree; whether they fill that is said too.
std::string Comparison::pattern() const {
  if (wrong_ == 0) return {};
  const bool keys = what_.rfind("dK", 0) == 0 || what_.rfind("dV", 0) == 0;
  const char* const names[] = {"batch entry", "head", keys ? "key" : "row", "column"};
  std::vector<std::string> parts, every;  // every: of what all are hit, where there are several
  std::int64_t inside = 1;
  for (std::size_t a = 0; a < 4; ++a) {
    Indices seen, wrong;
    for (std::size_t n = 0; n < slices_[a].size(); ++n) {
      if (slices_[a][n].seen) seen.push_back(std::int64_t(n));
      if (slices_[a][n].wrong) wrong.push_back(std::int64_t(n));
    }
    inside *= std::int64_t(wrong.size());
    if (wrong.size() < seen.size())
      parts.push_back(which(names[a], "bhix"[a], seen, wrong));
    else if (seen.size() > 1)
      every.push_back(names[a]);
  }
  std::string where;
  for (const std::string& part : parts) where += (where.empty() ? "" : ", ") + part;
  if (wrong_ == inside) return parts.empty() ? "wrong: every element" : "wrong: all of " + where;
  if (parts.empty()) return "wrong: some of every " + enumerate(every);
  return "wrong: some of " + where;
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
