// Practice 00, level 1, of naive.cpp. Keep the marks; ./learn practice 00
// Attention in five lines: two matrices, then the three equations of the chapter.
#include "00_naive/naive.hpp"

namespace fa::naive {

template <class T>
void attention(const MatrixMap<const T>& Q, const MatrixMap<const T>& K,
               const MatrixMap<const T>& V, T scale, MatrixMap<T> O) {
  Matrix<T> S(Q.rows(), K.rows()), P(Q.rows(), K.rows());  // [Nq, Nk] each: the cost of the stage

  // (1) S = scale Q K^T: how well query i matches key j
  // [step 00.1: the score of every query against every key (1 line)]
  // TODO
  // [end]

  // (2) P_ij = exp(S_ij) / l_i, l_i = sum_j exp(S_ij): each row becomes weights that sum to 1
  // [step 00.2: exponentials, then divide each row by its sum (2 lines)]
  // TODO
  // [end]

  // (3) O = P V: each output row is an average of the rows of V with those weights   [Nq, d]
  // [step 00.3: average the values (1 line)]
  // TODO
  // [end]
}

template void attention(const MatrixMap<const float>&, const MatrixMap<const float>&,
                        const MatrixMap<const float>&, float, MatrixMap<float>);
template void attention(const MatrixMap<const double>&, const MatrixMap<const double>&,
                        const MatrixMap<const double>&, double, MatrixMap<double>);

}  // namespace fa::naive
