// Softmax that cannot overflow: subtract the largest score of the row before exponentiating. Three
// passes over each row of S: find the maximum, take and sum the exponentials, divide.
#include "01_safe_softmax/safe_softmax.hpp"

#include <cmath>
#include <limits>

namespace fa::safe_softmax {

template <class T>
void attention(const MatrixMap<const T>& Q, const MatrixMap<const T>& K,
               const MatrixMap<const T>& V, T scale, const Mask& mask, MatrixMap<T> O, T* LSE) {
  // [blank]
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const Eigen::Index length = mask.length;  // keys past it are not even read
  Matrix<T> S(Q.rows(), length), P(Q.rows(), length);

  // (1) S = scale Q K^T                                                                [Nq, Nk]
  S.noalias() = scale * Q * K.topRows(length).transpose();

  // [quote softmax]
  for (Eigen::Index i = 0; i < S.rows(); ++i) {
    Eigen::Index n = mask.visible_keys(i);  // [01.a] this row sees keys [0, n)
    T m = -infinity, l = 0;

    // (2) m_i = max_j S_ij over the visible keys; a row that sees nothing keeps -infinity
    // [step 01.1: first pass, the largest visible score, if any key is visible (1 line)]
    if (n > 0) m = S.row(i).head(n).maxCoeff();
    // [end]

    // [01.b]
    // Scores that are all -infinity leave no weight to give: go on as if the row saw nothing, with
    // P_i = 0 and L_i = -infinity. (3) would give -infinity - -infinity = NaN, which is right
    // only if a score is NaN, and a maximum may pass over one.
    if (m == -infinity && !S.row(i).head(n).hasNaN()) n = 0;
    // [end]

    // (3) P_ij = exp(S_ij - m_i), between 0 and 1;  l_i = sum_j P_ij, at least 1 where n > 0
    // [step 01.2: second pass, exponentials of the difference and their sum (2 lines)]
    P.row(i).head(n) = (S.row(i).head(n).array() - m).exp();
    l = P.row(i).head(n).sum();
    // [end]

    // (4) divide by l_i; hidden keys get weight 0, for (6) multiplies with all of them
    // [step 01.3: third pass, divide by the sum, and clear what is hidden (2 lines)]
    P.row(i).head(n) /= l;
    P.row(i).tail(length - n).setZero();
    // [end]

    // (5) L_i = log sum_j exp(S_ij) = m_i + log l_i: the whole normaliser in one number
    // [step 01.4: the log-sum-exp, if it is wanted (1 line)]
    if (LSE) LSE[i] = m + std::log(l);
    // [end]
  }
  // [end quote]

  // (6) O = P V                                                                         [Nq, d]
  O.noalias() = P * V.topRows(length);
  // [end blank]
}

template void attention(const MatrixMap<const float>&, const MatrixMap<const float>&,
                        const MatrixMap<const float>&, float, const Mask&, MatrixMap<float>,
                        float*);
template void attention(const MatrixMap<const double>&, const MatrixMap<const double>&,
                        const MatrixMap<const double>&, double, const Mask&, MatrixMap<double>,
                        double*);

}  // namespace fa::safe_softmax
