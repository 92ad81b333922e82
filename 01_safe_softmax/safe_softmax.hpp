// Stage 01: the same attention for scores of any size, with masks and the log-sum-exp of each row.
#pragma once
#include "common/core/eigen.hpp"
#include "common/core/tensor.hpp"

namespace fa::safe_softmax {

struct Options {};  // nothing to choose; later stages have threads, tiles, kernels

// O = softmax(scale Q K^T + mask) V and, if asked for, LSE. T: float or double.
// Promises what stage 00 does and: scores of any finite size, both causal alignments, key lengths
// in [0, Nk], rows that see no key (O = 0, LSE = -infinity). Limit: O = P V is one product with
// zeros for hidden keys, so a NaN in V spreads to every row of the head unless it is padding.
// Extra memory: 2 Nq Nk elements and what Eigen packs for a product. Throws std::invalid_argument,
// before any write, for arguments outside these promises or more memory than is free.
template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options& options = {});

// The lesson: one head. Q, O: [Nq, d]; K, V: [Nk, d]; LSE: [Nq] or null.
template <class T>
void attention(const MatrixMap<const T>& Q, const MatrixMap<const T>& K,
               const MatrixMap<const T>& V, T scale, const Mask& mask, MatrixMap<T> O, T* LSE);

}  // namespace fa::safe_softmax
