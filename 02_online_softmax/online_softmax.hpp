// Stage 02: the maximum and the sum of a softmax in one pass, and with them attention that never
// stores a row of scores.
#pragma once
#include <cstdint>
#include <limits>

#include "common/core/tensor.hpp"

namespace fa::online_softmax {

// The maximum and the sum of exponentials of the numbers seen so far:
//   m = max_j x_j,  l = sum_j exp(x_j - m);  m = -infinity, l = 0 for none.
template <class T>
struct Running {
  T m = -std::numeric_limits<T>::infinity();
  T l = 0;

  // One more number. Returns exp(m_before - m), the factor for whatever was summed up before, and
  // sets p to exp(x - m), the weight of the new number. Both are relative to the new m.
  T add(T x, T& p);
};

// p_j = exp(x_j) / sum_j exp(x_j) for j < n, in two passes instead of three. p may be x.
template <class T>
void softmax(const T* x, std::int64_t n, T* p);

// The attention over all keys from the attention over two disjoint parts of them, for one row each:
// O1, L1 and O2, L2 as forward returns them (L = -infinity for an empty part). O may be O1 or O2.
template <class T>
void merge(const T* O1, T L1, const T* O2, T L2, std::int64_t d, T* O, T* L);

enum class Kernel {
  rows,   // the lesson: one row at a time, one key at a time
  lanes,  // the same with one SIMD lane per row; float only
};
struct Options {
  Kernel kernel = Kernel::rows;
};

// O = softmax(scale Q K^T + mask) V and, if asked for, LSE. T: float or double.
// Promises what stage 01 does, and extra memory that depends on d only: none for `rows`, 2 W d
// floats for `lanes` with W lanes. `lanes` counts keys in 32 bits, Nk < 2^31, and multiplies the
// scale by log2(e): the product must be finite in float. A NaN in the value of a hidden key stays
// hidden with `rows`; with `lanes` it may reach a row that shares a vector of W rows with one that
// sees the key, for 0 * NaN is NaN. Padding never does. Throws std::invalid_argument, before any
// write, for arguments outside these promises.
template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options& options = {});

// The lessons: one head. Q, O: [Nq, d]; K, V: [Nk, d]; LSE: [Nq] or null.
template <class T>
void attention(const Rows<const T>& Q, const Rows<const T>& K, const Rows<const T>& V, T scale,
               const Mask& mask, const Rows<T>& O, T* LSE);
void attention_lanes(const Rows<const float>& Q, const Rows<const float>& K,
                     const Rows<const float>& V, float scale, const Mask& mask,
                     const Rows<float>& O, float* LSE);

}  // namespace fa::online_softmax
