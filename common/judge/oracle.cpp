#include "common/judge/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace fa::judge {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

double scale_of(const Problem& p) { return p.scale ? *p.scale : 1.0 / std::sqrt(double(p.d)); }

// Scores and probabilities of one query: P_j = exp(s_j - LSE), 0 where masked.
struct Row {
  std::vector<double> P, slope;
  double LSE = -infinity, A = 0, l = 1;  // l = sum_j exp(s_j - max)
  double sink = 0;                       // the weight of the sink
};

struct Query {
  std::int64_t b, h, i;
};

void resize(Spread& e, const Array& like) {
  e.most = e.square = Array(like.B, like.H, like.N, like.d);
}
void add(Spread& e, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double most,
         double square) {
  e.most.at(b, h, i, x) += most;
  e.square.at(b, h, i, x) += square;
}
void add(Spread& e, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x, double error) {
  add(e, b, h, i, x, std::fabs(error), error * error);
}

// The score of a pair: of a hook, or as it is.
double scored(const Hooks& hooks, double s, const Query& q, std::int64_t j) {
  return hooks.score ? hooks.score(s, q.b, q.h, q.i, j) : s;
}
double slope_of(const Hooks& hooks, double s, const Query& q, std::int64_t j) {
  return hooks.slope ? hooks.slope(s, q.b, q.h, q.i, j) : 1;
}
double kept(const Hooks& hooks, const Query& q, std::int64_t j) {
  return hooks.keep ? hooks.keep(q.b, q.h, q.i, j) : 1;
}

Row row_of(const Problem& p, const Hooks& hooks, const Array& Q, const Array& K, const Query& q) {
  const auto [b, h, i] = q;
  const std::int64_t g = h / (p.Hq / p.Hkv);
  const double scale = scale_of(p);
  Row row;
  std::vector<double> s(static_cast<std::size_t>(p.Nk), -infinity);
  row.slope.assign(s.size(), 1.0);
  double m = -infinity;
  bool nan = false;
  for (std::int64_t j = 0; j < p.Nk; ++j) {
    if (!sees(p, hooks, b, h, i, j)) continue;
    double dot = 0, abs = 0;
    for (std::int64_t x = 0; x < p.d; ++x) {
      dot += Q.at(b, h, i, x) * K.at(b, g, j, x);
      abs += std::fabs(Q.at(b, h, i, x) * K.at(b, g, j, x));
    }
    const double score = scored(hooks, scale * dot, q, j);
    s[static_cast<std::size_t>(j)] = score;
    row.slope[static_cast<std::size_t>(j)] = slope_of(hooks, scale * dot, q, j);
    nan = nan || std::isnan(score);
    m = std::max(m, score);
    const double A = std::fabs(scale) * abs + std::fabs(score - scale * dot);
    if (std::isfinite(A)) row.A = std::max(row.A, A);
  }
  row.P.assign(s.size(), 0.0);
  if (nan) m = std::numeric_limits<double>::quiet_NaN();
  if (hooks.sink) m = std::isnan(m) ? m : std::max(m, hooks.sink(b, h));
  if (m == -infinity) return row;
  double l = hooks.sink ? std::exp(hooks.sink(b, h) - m) : 0;
  if (hooks.sink) row.sink = l;
  for (double score : s) l += std::exp(score - m);
  row.sink /= l;
  for (std::size_t j = 0; j < s.size(); ++j) row.P[j] = std::exp(s[j] - m) / l;
  row.LSE = m + std::log(l);
  row.l = l;
  return row;
}

}  // namespace

double Rounding::of(double x) const { return std::max(unit * std::fabs(x), tiny); }

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
bool sees(const Problem& p, const Hooks& hooks, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j) {
  return sees(p, b, i, j) && (!hooks.visible || hooks.visible(b, h, i, j));
}

ForwardOracle oracle_rows(const Problem& p, const Array& Q, const Array& K, const Array& V,
                          std::vector<std::int64_t> rows, const Rounding& rounding,
                          const Hooks& hooks) {
  const auto n = static_cast<std::int64_t>(rows.size());
  ForwardOracle out{std::move(rows),          Array(p.B, p.Hq, n, p.d), Array(p.B, p.Hq, n, 1),
                    Array(p.B, p.Hq, n, p.d), Array(p.B, p.Hq, n, 1),   {}};
  const bool rounds = rounding.unit > 0;
  if (rounds) resize(out.eO, out.O);
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h)
      for (std::int64_t r = 0; r < n; ++r) {
        const std::int64_t i = out.rows[static_cast<std::size_t>(r)];
        const Row row = row_of(p, hooks, Q, K, {b, h, i});
        out.LSE.at(b, h, r) = row.LSE;
        out.A.at(b, h, r) = row.A;
        for (std::int64_t j = 0; j < p.Nk; ++j) {
          if (!sees(p, hooks, b, h, i, j)) continue;
          const double keep = kept(hooks, {b, h, i}, j);
          for (std::int64_t x = 0; x < p.d; ++x) {
            const double v = keep * V.at(b, h / (p.Hq / p.Hkv), j, x);
            const double P = row.P[static_cast<std::size_t>(j)];
            out.O.at(b, h, r, x) += P * v;
            out.PV.at(b, h, r, x) += P * std::fabs(v);
            if (rounds) add(out.eO, b, h, r, x, rounding.of(P * row.l) / row.l * v);
          }
        }
      }
  return out;
}

ForwardOracle oracle_forward(const Problem& p, const Array& Q, const Array& K, const Array& V,
                             const Rounding& rounding, const Hooks& hooks) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(p.Nq));
  std::iota(rows.begin(), rows.end(), 0);
  return oracle_rows(p, Q, K, V, std::move(rows), rounding, hooks);
}

namespace {

// What rounding adds to the gradients through query i of one head.
void add_spread(const Problem& p, const Hooks& hooks, const Array& Q, const Array& K,
                const Array& V, const Array& dO, const Rounding& rounding, const Query& q,
                const Row& row, const std::vector<double>& dP, double D, BackwardOracle& out) {
  const auto [b, h, i] = q;
  const std::int64_t g = h / (p.Hq / p.Hkv);
  const double scale = scale_of(p);
  // D_i = sum_x dO_ix O_ix with a rounded O is off by one error that all keys share.
  double most_D = 0, square_D = 0;
  for (std::int64_t x = 0; x < p.d; ++x) {
    double O = 0;
    for (std::int64_t j = 0; j < p.Nk; ++j)
      if (sees(p, hooks, b, h, i, j))
        O += kept(hooks, q, j) * row.P[static_cast<std::size_t>(j)] * V.at(b, g, j, x);
    const double error = rounding.of(O) * std::fabs(dO.at(b, h, i, x));
    most_D += error;
    square_D += error * error;
  }
  std::vector<double> PK(static_cast<std::size_t>(p.d), 0.0);  // scale sum_j P_ij K_jx
  for (std::int64_t j = 0; j < p.Nk; ++j) {
    if (!sees(p, hooks, b, h, i, j)) continue;
    const auto k = static_cast<std::size_t>(j);
    const double P = row.P[k], dS = rounding.of(row.slope[k] * P * (dP[k] - D));
    const double keep = kept(hooks, q, j);
    for (std::int64_t x = 0; x < p.d; ++x) {
      PK[static_cast<std::size_t>(x)] += scale * row.slope[k] * P * K.at(b, g, j, x);
      const double PQ = scale * row.slope[k] * P * Q.at(b, h, i, x);
      add(out.eQ, b, h, i, x, scale * dS * K.at(b, g, j, x));
      add(out.eK, b, g, j, x, scale * dS * Q.at(b, h, i, x));
      add(out.eK, b, g, j, x, most_D * std::fabs(PQ), square_D * PQ * PQ);
      add(out.eV, b, g, j, x, keep * rounding.of(P) * dO.at(b, h, i, x));
    }
  }
  for (std::int64_t x = 0; x < p.d; ++x) {
    const double sum = PK[static_cast<std::size_t>(x)];
    add(out.eQ, b, h, i, x, most_D * std::fabs(sum), square_D * sum * sum);
  }
}

}  // namespace

BackwardOracle oracle_backward(const Problem& p, const Array& Q, const Array& K, const Array& V,
                               const Array& dO, const Rounding& rounding, const Hooks& hooks) {
  const double scale = scale_of(p);
  BackwardOracle out;
  out.dsink = Array(1, p.Hq, 1, 1);
  out.dQ = Array(p.B, p.Hq, p.Nq, p.d);
  out.dK = out.dV = Array(p.B, p.Hkv, p.Nk, p.d);
  const bool rounds = rounding.unit > 0;
  if (rounds) {
    resize(out.eQ, out.dQ);
    resize(out.eK, out.dK);
    resize(out.eV, out.dV);
  }
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h) {
      const std::int64_t g = h / (p.Hq / p.Hkv);
      for (std::int64_t i = 0; i < p.Nq; ++i) {
        const Row row = row_of(p, hooks, Q, K, {b, h, i});
        out.A = std::max(out.A, row.A);
        std::vector<double> dP(row.P.size(), 0.0);
        double D = 0;  // sum_j P_ij dP_ij
        for (std::int64_t j = 0; j < p.Nk; ++j) {
          if (!sees(p, hooks, b, h, i, j)) continue;
          const auto k = static_cast<std::size_t>(j);
          const double keep = kept(hooks, {b, h, i}, j);
          for (std::int64_t x = 0; x < p.d; ++x)
            dP[k] += keep * dO.at(b, h, i, x) * V.at(b, g, j, x);
          D += row.P[k] * dP[k];
        }
        out.dsink.at(0, h, 0) -= row.sink * D;
        for (std::int64_t j = 0; j < p.Nk; ++j) {
          if (!sees(p, hooks, b, h, i, j)) continue;
          const auto k = static_cast<std::size_t>(j);
          const double keep = kept(hooks, {b, h, i}, j);
          if (hooks.each) hooks.each(b, h, i, j, row.P[k] * (dP[k] - D));
          const double dS = row.slope[k] * row.P[k] * (dP[k] - D);
          const double terms =
              std::fabs(scale * row.slope[k]) * row.P[k] * (std::fabs(dP[k]) + std::fabs(D));
          for (std::int64_t x = 0; x < p.d; ++x) {
            out.dQ.at(b, h, i, x) += scale * dS * K.at(b, g, j, x);
            out.dK.at(b, g, j, x) += scale * dS * Q.at(b, h, i, x);
            out.dV.at(b, g, j, x) += keep * row.P[k] * dO.at(b, h, i, x);
            out.noise = std::max({out.noise, terms * std::fabs(K.at(b, g, j, x)),
                                  terms * std::fabs(Q.at(b, h, i, x))});
          }
        }
        if (rounds) add_spread(p, hooks, Q, K, V, dO, rounding, {b, h, i}, row, dP, D, out);
      }
    }
  return out;
}

namespace {

// One visible pair: what it adds to row i of dQ and to row j of dK and dV.
struct Pair {
  double A, P, keep, slope, dP, D;
};

Pair pair_of(const Problem& p, const Hooks& hooks, const BackwardInputs& in, double D,
             const Query& q, std::int64_t j) {
  const auto [b, h, i] = q;
  const std::int64_t g = h / (p.Hq / p.Hkv);
  const double scale = scale_of(p);
  double s = 0, abs = 0, dP = 0;
  const double *Q = in.Q.row(b, h, i), *K = in.K.row(b, g, j);
  const double *dO = in.dO.row(b, h, i), *V = in.V.row(b, g, j);
  for (std::int64_t x = 0; x < p.d; ++x) {
    s += scale * Q[x] * K[x];
    abs += std::fabs(scale * Q[x] * K[x]);
    dP += dO[x] * V[x];
  }
  const double score = scored(hooks, s, q, j), keep = kept(hooks, q, j);
  return {abs + std::fabs(score - s),
          std::exp(score - in.LSE.at(b, h, i)),
          keep,
          slope_of(hooks, s, q, j),
          keep * dP,
          D};
}

GradientRows gradient_rows(const Problem& p, std::int64_t H, const std::vector<std::int64_t>& rows,
                           bool rounds) {
  const auto n = static_cast<std::int64_t>(rows.size());
  GradientRows g{rows, Array(p.B, H, n, p.d), Array(p.B, H, n, 1), {}};
  if (rounds) resize(g.e, g.value);
  return g;
}

// Row r of a gradient += factor * other. `size` is what the parts of the factor come to before they
// cancel, `error` what rounding it may add to or take from it.
void add_term(const Problem& p, GradientRows& g, std::int64_t b, std::int64_t h, std::int64_t r,
              double factor, double size, double error, const double* other) {
  double& noise = g.noise.at(b, h, r);
  for (std::int64_t x = 0; x < p.d; ++x) {
    g.value.at(b, h, r, x) += factor * other[x];
    noise = std::max(noise, size * std::fabs(other[x]));
    if (error > 0) add(g.e, b, h, r, x, error * other[x]);
  }
}

}  // namespace

double GradientRows::largest() const {
  double most = 0;
  for (double x : value.data) most = std::max(most, std::fabs(x));
  return most;
}

BackwardRowsOracle oracle_backward_rows(const Problem& p, const BackwardInputs& in,
                                        std::vector<std::int64_t> queries,
                                        std::vector<std::int64_t> keys, const Rounding& rounding,
                                        const Hooks& hooks) {
  const double scale = scale_of(p);
  const bool rounds = rounding.unit > 0;
  BackwardRowsOracle out{gradient_rows(p, p.Hq, queries, rounds),
                         gradient_rows(p, p.Hkv, keys, rounds),
                         gradient_rows(p, p.Hkv, keys, rounds)};
  const auto error = [&](double x) { return rounds ? rounding.of(x) : 0; };
  std::vector<double> D(static_cast<std::size_t>(p.Nq));
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h) {
      const std::int64_t g = h / (p.Hq / p.Hkv);
      for (std::int64_t i = 0; i < p.Nq; ++i)
        D[static_cast<std::size_t>(i)] = std::inner_product(
            in.dO.row(b, h, i), in.dO.row(b, h, i) + p.d, in.O.row(b, h, i), 0.0);
      // f(dS_ij, the size of its parts, the pair) if i sees j.
      const auto with = [&](std::int64_t i, std::int64_t j, auto f) {
        if (!sees(p, hooks, b, h, i, j)) return;
        const Pair pair = pair_of(p, hooks, in, D[static_cast<std::size_t>(i)], {b, h, i}, j);
        out.A = std::max(out.A, pair.A);
        f(pair.slope * pair.P * (pair.dP - pair.D),
          std::fabs(pair.slope) * pair.P * (std::fabs(pair.dP) + std::fabs(pair.D)), pair);
      };
      for (std::size_t r = 0; r < queries.size(); ++r)
        for (std::int64_t j = 0; j < p.Nk; ++j)
          with(queries[r], j, [&](double dS, double size, const Pair&) {
            add_term(p, out.dQ, b, h, static_cast<std::int64_t>(r), scale * dS,
                     std::fabs(scale) * size, std::fabs(scale) * error(dS), in.K.row(b, g, j));
          });
      for (std::size_t r = 0; r < keys.size(); ++r)
        for (std::int64_t i = 0; i < p.Nq; ++i)
          with(i, keys[r], [&](double dS, double size, const Pair& pair) {
            add_term(p, out.dK, b, g, static_cast<std::int64_t>(r), scale * dS,
                     std::fabs(scale) * size, std::fabs(scale) * error(dS), in.Q.row(b, h, i));
            add_term(p, out.dV, b, g, static_cast<std::int64_t>(r), pair.keep * pair.P,
                     pair.keep * pair.P, pair.keep * error(pair.P), in.dO.row(b, h, i));
          });
    }
  return out;
}

}  // namespace fa::judge
