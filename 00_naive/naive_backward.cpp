// Skip this file until stage 05. The gradients of the five lines, by the chain rule, last line
// first; the softmax in two forms that must agree. P is computed again, because nothing was kept.
#include "00_naive/naive.hpp"

namespace fa::naive {

template <class T>
void attention_backward(const MatrixMap<const T>& Q, const MatrixMap<const T>& K,
                        const MatrixMap<const T>& V, const MatrixMap<const T>& dO, T scale,
                        SoftmaxGradient form, MatrixMap<T> dQ, MatrixMap<T> dK, MatrixMap<T> dV) {
  // [blank]
  // (1), (2) once more; S becomes P in place
  Matrix<T> P = scale * Q * K.transpose();
  // [00.a]
  P = P.array().exp();
  P.array().colwise() /= P.rowwise().sum().array();
  // [end]

  // [quote backward]
  Matrix<T> dP(P.rows(), P.cols()), dS(P.rows(), P.cols());

  // (4) from O = P V:  dV = P^T dO,  dP = dO V^T
  // [step 00.4: the two gradients of a matrix product; heads that share V add to one dV (2 lines)]
  dV.noalias() += P.transpose() * dO;
  dP.noalias() = dO * V.transpose();
  // [end]

  // (5) from P = softmax(S), row by row
  if (form == SoftmaxGradient::jacobian) {
    // [00.b]
    // dS_i = J dP_i with J = diag(P_i) - P_i P_i^T
    for (Eigen::Index i = 0; i < P.rows(); ++i) {
      const Vector<T> P_i = P.row(i);
      Matrix<T> J = P_i.asDiagonal();
      J -= P_i * P_i.transpose();
      dS.row(i) = J * dP.row(i).transpose();
    }
    // [end]
  } else {
    // (5) dS_ij = P_ij (dP_ij - D_i), D_i = sum_j P_ij dP_ij: the same without ever building J
    // [step 00.5: the softmax gradient with one number per row (2 lines)]
    const Vector<T> D = (P.array() * dP.array()).rowwise().sum();
    dS = P.array() * (dP.array().colwise() - D.array());
    // [end]
  }

  // (6) from S = scale Q K^T:  dQ = scale dS K,  dK = scale dS^T Q
  // [step 00.6: the scale enters once in each; heads that share K add to one dK (2 lines)]
  dQ.noalias() = scale * dS * K;
  dK.noalias() += scale * dS.transpose() * Q;
  // [end]
  // [end quote]
  // [end blank]
}

template void attention_backward(const MatrixMap<const float>&, const MatrixMap<const float>&,
                                 const MatrixMap<const float>&, const MatrixMap<const float>&,
                                 float, SoftmaxGradient, MatrixMap<float>, MatrixMap<float>,
                                 MatrixMap<float>);
template void attention_backward(const MatrixMap<const double>&, const MatrixMap<const double>&,
                                 const MatrixMap<const double>&, const MatrixMap<const double>&,
                                 double, SoftmaxGradient, MatrixMap<double>, MatrixMap<double>,
                                 MatrixMap<double>);

}  // namespace fa::naive
