// What safety buys (error against the size of the scores) and what it costs (time against stage
// 00, of the whole and of the softmax alone).
#include <cmath>
#include <limits>

#include "00_naive/naive.hpp"
#include "01_safe_softmax/safe_softmax.hpp"
#include "common/measure/bench.hpp"

namespace fa::bench {
namespace {

// Softmax as naive.cpp has it: each of its steps for all rows.
void two_passes(const Matrix<float>& S, Matrix<float>& P, const Mask&) {
  P = S.array().exp();
  P.array().colwise() /= P.rowwise().sum().array();
}

// The same steps in the order of 01: all of them for a row, then the next row.
void two_passes_by_rows(const Matrix<float>& S, Matrix<float>& P, const Mask&) {
  for (Eigen::Index i = 0; i < S.rows(); ++i) {
    P.row(i) = S.row(i).array().exp();
    P.row(i) /= P.row(i).sum();
  }
}

// Softmax as safe_softmax.cpp has it.
void three_passes(const Matrix<float>& S, Matrix<float>& P, const Mask& mask) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (Eigen::Index i = 0; i < S.rows(); ++i) {
    Eigen::Index n = mask.visible_keys(i);
    float m = -infinity, l = 0;
    if (n > 0) m = S.row(i).head(n).maxCoeff();
    if (m == -infinity && !S.row(i).head(n).hasNaN()) n = 0;
    P.row(i).head(n) = (S.row(i).head(n).array() - m).exp();
    l = P.row(i).head(n).sum();
    P.row(i).head(n) /= l;
    P.row(i).tail(S.cols() - n).setZero();
  }
}

// A row "NAME/..." with the time of the softmax alone, between the products that show it is right.
// An exp counts as one FLOP, like a maximum, a difference, a sum and a division.
void softmax(const std::string& stage, const std::string& name, double flops, const Problem& p,
             void (*f)(const Matrix<float>&, Matrix<float>&, const Mask&)) {
  enum : std::size_t { alone, products };
  lines(stage, p, {{name, flops}}, [f](const Problem& q, const Forward<float>& t, const Lap& lap) {
    for (std::int64_t h = 0; h < q.Hq; ++h) {
      const auto Q = as_matrix(t.Q.rows(0, h, q.Nq, q.d));
      const auto K = as_matrix(t.K.rows(0, q.key_head(h), q.Nk, q.d));
      const auto V = as_matrix(t.V.rows(0, q.key_head(h), q.Nk, q.d));
      auto O = as_matrix(t.O.rows(0, h, q.Nq, q.d));
      Matrix<float> S(Q.rows(), K.rows()), P(Q.rows(), K.rows());
      S.noalias() = float(q.softmax_scale()) * Q * K.transpose();
      lap(products);
      f(S, P, Mask(q, 0));
      lap(alone);
      O.noalias() = P * V;
    }
  });
}

}  // namespace

void register_benchmarks(Size size) {
  const auto stage00 = [](const Problem& q, const Forward<float>& t) { naive::forward(q, t); };
  const auto stage01 = [](const Problem& q, const Forward<float>& t) {
    safe_softmax::forward(q, t);
  };
  for (std::int64_t N : sizes(size, {256, 512, 1024, 2048}, {4096, 8192})) {
    Problem p;
    p.Hq = p.Hkv = 4;
    p.Nq = p.Nk = N;
    p.d = 64;
    forward<float>("stage00/forward/naive", p, stage00);
    forward<float>("stage01/forward/safe_softmax", p, stage01);
    softmax("stage00", "two_passes", 3, p, two_passes);
    softmax("stage00", "two_passes_by_rows", 3, p, two_passes_by_rows);
    softmax("stage01", "three_passes", 5, p, three_passes);
    p.causal = Causal::top_left;
    forward<float>("stage01/forward/safe_softmax", p, stage01);
  }
  for (double scores : {1., 10., 30., 60., 80., 88., 89., 100., 300., 1000., 10000.}) {
    error("stage00/error/naive", scores, stage00);
    error("stage01/error/safe_softmax", scores, stage01);
  }
}

}  // namespace fa::bench
