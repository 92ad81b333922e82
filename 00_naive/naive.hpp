// Stage 00: attention exactly as it is written, N x N matrices and all.
#pragma once
#include "common/core/eigen.hpp"
#include "common/core/tensor.hpp"

namespace fa::naive {

// The backward of softmax can be written in two ways that agree; `row_sum` is the one that lasts.
enum class SoftmaxGradient { jacobian, row_sum };

struct Options {
  SoftmaxGradient gradient = SoftmaxGradient::row_sum;  // used by backward only
};

// O = softmax(scale Q K^T) V for every batch entry and head. T: float or double.
// Promises sizes, groups of heads, strides, any finite scale. No mask, no LSE. exp is not guarded:
// in float a row breaks when an exp or their sum overflows (a score above 88; 85 with 64 keys), and
// when all its scores lie below -87 (the exps are 0, or all alike). Stage 01 mends both.
// Extra memory: 2 Nq Nk elements and what Eigen packs for a product. Throws std::invalid_argument,
// before any write, for arguments outside these promises or more memory than is free.
template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options& options = {});

// dQ, dK, dV from Q, K, V and dO; P is recomputed, O and LSE are not read and may be null.
// Extra memory: 4 Nq Nk elements (with the Jacobian Nk Nk more). Errors as above.
template <class T>
void backward(const Problem& p, const Backward<T>& t, const Options& options = {});

// The lessons: one head. Q, O: [Nq, d]; K, V: [Nk, d].
template <class T>
void attention(const MatrixMap<const T>& Q, const MatrixMap<const T>& K,
               const MatrixMap<const T>& V, T scale, MatrixMap<T> O);

// Adds to dK and dV, because several query heads may share a key head.
template <class T>
void attention_backward(const MatrixMap<const T>& Q, const MatrixMap<const T>& K,
                        const MatrixMap<const T>& V, const MatrixMap<const T>& dO, T scale,
                        SoftmaxGradient form, MatrixMap<T> dQ, MatrixMap<T> dK, MatrixMap<T> dV);

}  // namespace fa::naive
