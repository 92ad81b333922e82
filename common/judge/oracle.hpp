// The judge: attention in double precision, three plain loops, with a mask predicate of its own. It
// shares no code with any stage and is never timed.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "common/core/problem.hpp"

namespace fa::judge {

// A tensor [B, H, N, d] in double, contiguous.
struct Array {
  std::int64_t B = 0, H = 0, N = 0, d = 0;
  std::vector<double> data;

  Array() = default;
  Array(std::int64_t B_, std::int64_t H_, std::int64_t N_, std::int64_t d_)
      : B(B_), H(H_), N(N_), d(d_), data(static_cast<std::size_t>(B_ * H_ * N_ * d_)) {}
  double& at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x = 0) {
    return data[static_cast<std::size_t>(((b * H + h) * N + i) * d + x)];
  }
  double at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x = 0) const {
    return const_cast<Array*>(this)->at(b, h, i, x);
  }
  const double* row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return data.data() + ((b * H + h) * N + i) * d;
  }
  // f(b, h, i, x) for every element.
  template <class F>
  void for_each(F f) const {
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t h = 0; h < H; ++h)
        for (std::int64_t i = 0; i < N; ++i)
          for (std::int64_t x = 0; x < d; ++x) f(b, h, i, x);
  }
};

// How a type with few digits rounds: what may be lost of a number.
struct Rounding {
  double unit = 0;  // at most this part of it,
  double tiny = 0;  // or this much, where numbers are too small to have all digits
  double of(double x) const;
};

// What the rounding of one factor of every term may add to a sum: at most; and the square of it, if
// the terms' errors are independent. Empty for a type that rounds no factor (Rounding{}).
struct Spread {
  Array most, square;
};

// What a kernel of 06_optimized/beyond adds to plain attention; what is left out is plain. Each is
// asked for batch b, query head h, query i and key j.
struct Hooks {
  using Index = std::int64_t;
  template <class R>
  using OfPair = std::function<R(Index b, Index h, Index i, Index j)>;
  using OfScore = std::function<double(double s, Index b, Index h, Index i, Index j)>;

  OfPair<bool> visible;                          // besides the problem's own mask
  OfScore score;                                 // instead of s = scale q . k
  OfScore slope;                                 // the derivative of score by s; left out: 1
  OfPair<double> keep;                           // O = sum_j keep P_ij V_j: 0, or 1 / (1 - p)
  std::function<double(Index b, Index h)> sink;  // one more logit in the denominator, with no value

  // What oracle_backward finds on its way: dS_ij, the gradient by what score() returns.
  std::function<void(Index b, Index h, Index i, Index j, double dS)> each;
};

// Row r of every array below is query rows[r].
struct ForwardOracle {
  std::vector<std::int64_t> rows;
  Array O;    // [B, Hq, rows, d]
  Array LSE;  // [B, Hq, rows, 1]; -infinity where a row sees no key
  Array PV;   // [B, Hq, rows, d]: sum_j P_ij |V_jx|, what the tolerance of O_ix is made of
  Array A;    // [B, Hq, rows, 1]: max over visible j of |scale| sum_x |q_ix k_jx|
  Spread eO;  // from rounding every exp(s_ij - m_i)
};

struct BackwardOracle {
  Array dQ, dK, dV;
  Array dsink;        // [1, Hq, 1, 1], summed over the batch
  double A = 0;       // the largest A of all rows
  double noise = 0;   // largest term that cancels in dS = P (dP - D): what rounding acts on
  Spread eQ, eK, eV;  // from rounding every P_ij, dS_ij and, in D = dO . O, O_ix
};

// What a backward is given, as it is given: O and LSE may be rounded.
struct BackwardInputs {
  Array Q, K, V, O, dO, LSE;
};

// Some rows of a gradient, the same ones in every head: row r of the arrays is rows[r].
struct GradientRows {
  std::vector<std::int64_t> rows;
  Array value;
  Array noise;  // [B, H, rows, 1]: a row's largest term, of both parts of dS = P dP - P D
  Spread e;     // from rounding every P_ij and dS_ij

  double largest() const;  // |value|
};
struct BackwardRowsOracle {
  GradientRows dQ, dK, dV;
  double A = 0;  // the largest A of the pairs that were looked at
};

// May query i of batch b see key j? Written from the definitions, not from fa::Mask.
bool sees(const Problem& p, std::int64_t b, std::int64_t i, std::int64_t j);
bool sees(const Problem& p, const Hooks& hooks, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j);

// `rounding` is that of the type under test: it says nothing of the result, only of its tolerance.
ForwardOracle oracle_forward(const Problem& p, const Array& Q, const Array& K, const Array& V,
                             const Rounding& rounding = {}, const Hooks& hooks = {});

// Only some queries (the same ones in every head), so that long sequences stay cheap.
ForwardOracle oracle_rows(const Problem& p, const Array& Q, const Array& K, const Array& V,
                          std::vector<std::int64_t> rows, const Rounding& rounding = {},
                          const Hooks& hooks = {});

BackwardOracle oracle_backward(const Problem& p, const Array& Q, const Array& K, const Array& V,
                               const Array& dO, const Rounding& rounding = {},
                               const Hooks& hooks = {});

// Only some queries' dQ and some keys' dK and dV, so that long sequences stay cheap. With O and LSE
// given, D_i = dO_i . O_i and P_ij = exp(s_ij - LSE_i) need no other pair's scores.
BackwardRowsOracle oracle_backward_rows(const Problem& p, const BackwardInputs& in,
                                        std::vector<std::int64_t> queries,
                                        std::vector<std::int64_t> keys,
                                        const Rounding& rounding = {}, const Hooks& hooks = {});

}  // namespace fa::judge
