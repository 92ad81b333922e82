// The backward by recomputation, for one query head. P_ij = exp(scale q_i . k_j - L_i) needs no
// running maximum and no second pass: L holds both of the forward's statistics.
#include <algorithm>
#include <cmath>

#include "05_cuda_backward/cuda_backward.hpp"

namespace fa::cuda_backward {
namespace {

// [blank]
template <class T>
T dot(const T* x, const T* y, std::int64_t d) {
  T sum = 0;
  for (std::int64_t e = 0; e < d; ++e) sum += x[e] * y[e];
  return sum;
}
// y += a x
template <class T>
void add(T* y, T a, const T* x, std::int64_t d) {
  for (std::int64_t e = 0; e < d; ++e) y[e] += a * x[e];
}
// [end blank]

}  // namespace

template <class T>
void attention_backward(const Rows<const T>& Q, const Rows<const T>& K, const Rows<const T>& V,
                        const Rows<const T>& O, const Rows<const T>& dO, const T* LSE, T scale,
                        const Mask& mask, std::int64_t Br, std::int64_t Bc, T* D, const Rows<T>& dQ,
                        const Rows<T>& dK, const Rows<T>& dV) {
  // [blank]
  const std::int64_t Nq = Q.rows, Nk = K.rows, d = Q.cols;
  // [quote backward]
  // (1) D_i = dO_i . O_i: all that the softmax's Jacobian needs to know about the rest of the row
  for (std::int64_t i = 0; i < Nq; ++i) {
    std::fill_n(dQ[i], d, T(0));
    // [step 05.1: one number for row i (1 line)]
    D[i] = dot(dO[i], O[i], d);
    // [end]
  }

  for (std::int64_t j0 = 0; j0 < Nk; j0 += Bc) {
    const std::int64_t cols = std::min(Bc, Nk - j0);  // [05.a]
    // [05.b]
    const std::int64_t first = mask.first_row(j0);  // those before it see no key of this tile
    // [end]
    for (std::int64_t i0 = first; i0 < Nq; i0 += Br)
      for (std::int64_t i = i0; i < std::min(i0 + Br, Nq); ++i) {
        if (std::isinf(LSE[i])) continue;  // a row without any weight
        // [05.c]
        // A key that row i does not see has P = 0. It is left out, not multiplied by 0: its score
        // may lie above L_i, and exp could overflow.
        const std::int64_t n = std::clamp<std::int64_t>(mask.visible_keys(i) - j0, 0, cols);
        // [end]
        for (std::int64_t j = j0; j < j0 + n; ++j) {
          // (2) P_ij = exp(scale q_i . k_j - L_i), already normalised
          const T P = std::exp(scale * dot(Q[i], K[j], d) - LSE[i]);  // [05.d]
          // (3) dP_ij = dO_i . v_j
          const T dP = dot(dO[i], V[j], d);  // [05.e]
          // (4) dS_ij = P_ij (dP_ij - D_i)
          T dS = 0;
          // [step 05.2: the gradient of one score (1 line)]
          dS = P * (dP - D[i]);
          // [end]
          // (5) dV_j += P_ij dO_i;  dK_j += scale dS_ij q_i;  dQ_i += scale dS_ij k_j
          // [step 05.3: what this pair adds to the three gradients (3 lines)]
          add(dV[j], P, dO[i], d);
          add(dK[j], scale * dS, Q[i], d);
          add(dQ[i], scale * dS, K[j], d);
          // [end]
        }
      }
  }
  // [end quote]
  // [end blank]
}

template void attention_backward(const Rows<const float>&, const Rows<const float>&,
                                 const Rows<const float>&, const Rows<const float>&,
                                 const Rows<const float>&, const float*, float, const Mask&,
                                 std::int64_t, std::int64_t, float*, const Rows<float>&,
                                 const Rows<float>&, const Rows<float>&);
template void attention_backward(const Rows<const double>&, const Rows<const double>&,
                                 const Rows<const double>&, const Rows<const double>&,
                                 const Rows<const double>&, const double*, double, const Mask&,
                                 std::int64_t, std::int64_t, double*, const Rows<double>&,
                                 const Rows<double>&, const Rows<double>&);

}  // namespace fa::cuda_backward
