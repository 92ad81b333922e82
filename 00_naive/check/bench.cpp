// Time and memory of stage 00 against the length of the sequence, and which of its lines the time
// goes to.
#include "common/measure/bench.hpp"
#include "00_naive/naive.hpp"
#include "common/core/eigen.hpp"

namespace fa::bench {
namespace {

// The statements of naive.cpp, with a lap after each; and on request one more, a copy that makes
// the trip of exp without its arithmetic.
enum Done : std::size_t { scores, exponentials, division, values, copy };
void run_lines(const Problem& p, const Forward<float>& t, bool with_copy, const Lap& lap) {
  const float scale = float(p.softmax_scale());
  for (std::int64_t h = 0; h < p.Hq; ++h) {
    const auto Q = as_matrix(t.Q.rows(0, h, p.Nq, p.d));
    const auto K = as_matrix(t.K.rows(0, p.key_head(h), p.Nk, p.d));
    const auto V = as_matrix(t.V.rows(0, p.key_head(h), p.Nk, p.d));
    auto O = as_matrix(t.O.rows(0, h, p.Nq, p.d));
    Matrix<float> S(Q.rows(), K.rows()), P(Q.rows(), K.rows());
    S.noalias() = scale * Q * K.transpose();
    lap(scores);
    if (with_copy) {
      P = S;
      lap(copy);
    }
    P = S.array().exp();
    lap(exponentials);
    P.array().colwise() /= P.rowwise().sum().array();
    lap(division);
    O.noalias() = P * V;
    lap(values);
  }
}

// A product does 2 d FLOP for a score; of the softmax an exp counts as one, like a sum and a
// division.
void time_lines(const Problem& p) {
  const double product = 2.0 * double(p.d);
  lines("stage00", p,
        {{"scores", product}, {"exponentials", 1}, {"division", 2}, {"values", product}},
        [](const Problem& q, const Forward<float>& t, const Lap& lap) {
          run_lines(q, t, false, lap);
        });
  lines("stage00", p, {{"copy", 1}}, [](const Problem& q, const Forward<float>& t, const Lap& lap) {
    run_lines(q, t, true, [&](std::size_t done) { lap(done == copy ? 0 : 1); });
  });
}

}  // namespace

void register_benchmarks(Size size) {
  Problem p;
  p.Hq = p.Hkv = 4;
  for (std::int64_t N : sizes(size, {256, 512, 1024, 2048}, {4096, 8192})) {
    p.Nq = p.Nk = N;
    p.d = 64;
    forward<float>("stage00/forward/naive", p,
                   [](const Problem& q, const Forward<float>& t) { naive::forward(q, t); });
    time_lines(p);
    if (N != 1024) continue;
    p.d = 512;  // products of eight times the work, and all else as before
    time_lines(p);
  }
}

}  // namespace fa::bench
