#include "common/harness/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace fa::harness {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

double scale_of(const Problem& p) { return p.scale ? *p.scale : 1.0 / std::sqrt(double(p.d)); }

// Scores and probabilities of one query: P_j = exp(s_j - LSE), 0 where masked.
struct Row {
  std::vector<double> P;
  double LSE = -infinity, A = 0;
};

Row row_of(const Problem& p, const Array& Q, const Array& K, std::int64_t b, std::int64_t h,
           std::int64_t i) {
  const std::int64_t g = h / (p.Hq / p.Hkv);
  const double scale = scale_of(p);
  Row row;
  std::vector<double> s(static_cast<std::size_t>(p.Nk), -infinity);
  double m = -infinity;
  bool nan = false;
  for (std::int64_t j = 0; j < p.Nk; ++j) {
    if (!sees(p, b, i, j)) continue;
    double dot = 0, abs = 0;
    for (std::int64_t x = 0; x < p.d; ++x) {
      dot += Q.at(b, h, i, x) * K.at(b, g, j, x);
      abs += std::fabs(Q.at(b, h, i, x) * K.at(b, g, j, x));
    }
    s[static_cast<std::size_t>(j)] = scale * dot;
    nan = nan || std::isnan(scale * dot);
    m = std::max(m, scale * dot);
    if (std::isfinite(abs)) row.A = std::max(row.A, std::fabs(scale) * abs);
  }
  row.P.assign(s.size(), 0.0);
  if (nan) m = std::numeric_limits<double>::quiet_NaN();
  if (m == -infinity) return row;
  double l = 0;
  for (double score : s) l += std::exp(score - m);
  for (std::size_t j = 0; j < s.size(); ++j) row.P[j] = std::exp(s[j] - m) / l;
  row.LSE = m + std::log(l);
  return row;
}

}  // namespace

bool sees(const Problem& p, std::int64_t b, std::int64_t i, std::int64_t j) {
  if (p.key_lengths && j >= p.key_lengths[b]) return false;
  switch (p.causal) {
    case Causal::none:
      return true;
    case Causal::top_left:
      return i >= j;
    case Causal::bottom_right:
      return p.Nq - 1 - i <= p.Nk - 1 - j;
  }
  return false;
}

ForwardOracle oracle_rows(const Problem& p, const Array& Q, const Array& K, const Array& V,
                          std::vector<std::int64_t> rows) {
  const auto n = static_cast<std::int64_t>(rows.size());
  ForwardOracle out{std::move(rows), Array(p.B, p.Hq, n, p.d), Array(p.B, p.Hq, n, 1),
                    Array(p.B, p.Hq, n, p.d), Array(p.B, p.Hq, n, 1)};
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h)
      for (std::int64_t r = 0; r < n; ++r) {
        const std::int64_t i = out.rows[static_cast<std::size_t>(r)];
        const Row row = row_of(p, Q, K, b, h, i);
        out.LSE.at(b, h, r) = row.LSE;
        out.A.at(b, h, r) = row.A;
        for (std::int64_t j = 0; j < p.Nk; ++j) {
          if (!sees(p, b, i, j)) continue;
          for (std::int64_t x = 0; x < p.d; ++x) {
            const double v = V.at(b, h / (p.Hq / p.Hkv), j, x);
            const double P = row.P[static_cast<std::size_t>(j)];
            out.O.at(b, h, r, x) += P * v;
            out.PV.at(b, h, r, x) += P * std::fabs(v);
          }
        }
      }
  return out;
}

ForwardOracle oracle_forward(const Problem& p, const Array& Q, const Array& K, const Array& V) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(p.Nq));
  std::iota(rows.begin(), rows.end(), 0);
  return oracle_rows(p, Q, K, V, std::move(rows));
}

BackwardOracle oracle_backward(const Problem& p, const Array& Q, const Array& K, const Array& V,
                               const Array& dO) {
  const double scale = scale_of(p);
  BackwardOracle out{Array(p.B, p.Hq, p.Nq, p.d), Array(p.B, p.Hkv, p.Nk, p.d),
                     Array(p.B, p.Hkv, p.Nk, p.d)};
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h) {
      const std::int64_t g = h / (p.Hq / p.Hkv);
      for (std::int64_t i = 0; i < p.Nq; ++i) {
        const Row row = row_of(p, Q, K, b, h, i);
        out.A = std::max(out.A, row.A);
        std::vector<double> dP(row.P.size(), 0.0);
        double D = 0;  // sum_j P_ij dP_ij
        for (std::int64_t j = 0; j < p.Nk; ++j) {
          if (!sees(p, b, i, j)) continue;
          const auto k = static_cast<std::size_t>(j);
          for (std::int64_t x = 0; x < p.d; ++x) dP[k] += dO.at(b, h, i, x) * V.at(b, g, j, x);
          D += row.P[k] * dP[k];
        }
        for (std::int64_t j = 0; j < p.Nk; ++j) {
          if (!sees(p, b, i, j)) continue;
          const auto k = static_cast<std::size_t>(j);
          const double dS = row.P[k] * (dP[k] - D);
          const double terms = std::fabs(scale) * row.P[k] * (std::fabs(dP[k]) + std::fabs(D));
          for (std::int64_t x = 0; x < p.d; ++x) {
            out.dQ.at(b, h, i, x) += scale * dS * K.at(b, g, j, x);
            out.dK.at(b, g, j, x) += scale * dS * Q.at(b, h, i, x);
            out.dV.at(b, g, j, x) += row.P[k] * dO.at(b, h, i, x);
            out.noise = std::max({out.noise, terms * std::fabs(K.at(b, g, j, x)),
                                  terms * std::fabs(Q.at(b, h, i, x))});
          }
        }
      }
    }
  return out;
}

}  // namespace fa::harness
