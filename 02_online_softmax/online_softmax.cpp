// Softmax while the numbers are still arriving: keep a maximum and a sum, and when the maximum
// grows, rescale the sum. What rescales a sum of weights rescales a weighted sum of values just as
// well, and so attention needs no row of scores.
#include "02_online_softmax/online_softmax.hpp"

#include <algorithm>
#include <cmath>

namespace fa::online_softmax {

// [quote step]
template <class T>
T Running<T>::add(T x, T& p) {
  T rescale = 1;
  p = 0;
  // [blank]
  constexpr T infinity = std::numeric_limits<T>::infinity();
  // A score of -infinity has weight 0. As the first one it would meet m = -infinity below.
  if (x == -infinity) return rescale;

  // (1) m_new = max(m, x)
  const T m_new = std::max(m, x);  // [02.a]
  // (2) everything so far was measured from m: exp(x_j - m) exp(m - m_new) = exp(x_j - m_new)
  // [step 02.1: factor from the old maximum to the new one, and the new number's weight (2 lines)]
  rescale = std::exp(m - m_new);
  p = std::exp(x - m_new);
  // [end]
  // (3) l_new = l exp(m - m_new) + exp(x - m_new)
  // [step 02.2: rescale the old sum, add the new weight, keep the new maximum (2 lines)]
  l = l * rescale + p;
  m = m_new;
  // [end]
  // [end blank]
  return rescale;
}
// [end quote]

template <class T>
void softmax(const T* x, std::int64_t n, T* p) {
  // [blank]
  Running<T> r;
  T weight;
  // Invariant: after j numbers, r.l = sum of exp(x_i - r.m) over i < j.
  for (std::int64_t j = 0; j < n; ++j) r.add(x[j], weight);
  // [02.b]
  const T m = r.l == 0 ? T(0) : r.m;  // nothing but -infinity: no weight at all
  for (std::int64_t j = 0; j < n; ++j) p[j] = r.l == 0 ? T(0) : std::exp(x[j] - m) / r.l;
  // [end]
  // [end blank]
}

template <class T>
void attention(const Rows<const T>& Q, const Rows<const T>& K, const Rows<const T>& V, T scale,
               const Mask& mask, const Rows<T>& O, T* LSE) {
  // [blank]
  const std::int64_t d = Q.cols;
  // [quote attention]
  for (std::int64_t i = 0; i < Q.rows; ++i) {
    // o = sum of exp(s_j - m) v_j over the keys seen so far: not yet divided by l
    T* o = O[i];
    std::fill_n(o, d, T(0));
    Running<T> r;
    for (std::int64_t j = 0; j < mask.visible_keys(i); ++j) {
      // (4) s = scale q_i . k_j
      T s = 0, p = 0;
      for (std::int64_t x = 0; x < d; ++x) s += Q[i][x] * K[j][x];  // [02.c]
      // (5) o_new = o exp(m - m_new) + exp(s - m_new) v_j: the same step as for l
      const T rescale = r.add(scale * s, p);
      // [step 02.3: rescale the output so far and add the new value with its weight (1 line)]
      for (std::int64_t x = 0; x < d; ++x) o[x] = o[x] * rescale + p * V[j][x];
      // [end]
    }
    // (6) O_i = o / l,  L_i = m + log l; a row without weight keeps 0 and gets -infinity
    // [step 02.4: divide once, at the end; then the log-sum-exp if it is wanted (2 lines)]
    for (std::int64_t x = 0; x < d; ++x) o[x] = r.l == 0 ? T(0) : o[x] / r.l;
    if (LSE) LSE[i] = r.m + std::log(r.l);
    // [end]
  }
  // [end quote]
  // [end blank]
}

template <class T>
void merge(const T* O1, T L1, const T* O2, T L2, std::int64_t d, T* O, T* L) {
  // [blank]
  // [quote merge]
  // (7) a part weighs exp(L_part): softmax over two numbers, with the usual subtraction
  // [step 02.5: the weights of both parts by two calls of add; O and L from them (6 lines)]
  Running<T> r;
  T w1, w2;
  r.add(L1, w1);
  w1 *= r.add(L2, w2);
  for (std::int64_t x = 0; x < d; ++x) O[x] = r.l == 0 ? T(0) : (w1 * O1[x] + w2 * O2[x]) / r.l;
  *L = r.m + std::log(r.l);
  // [end]
  // [end quote]
  // [end blank]
}

template struct Running<float>;
template struct Running<double>;
template void softmax(const float*, std::int64_t, float*);
template void softmax(const double*, std::int64_t, double*);
template void merge(const float*, float, const float*, float, std::int64_t, float*, float*);
template void merge(const double*, double, const double*, double, std::int64_t, double*, double*);
template void attention(const Rows<const float>&, const Rows<const float>&,
                        const Rows<const float>&, float, const Mask&, const Rows<float>&, float*);
template void attention(const Rows<const double>&, const Rows<const double>&,
                        const Rows<const double>&, double, const Mask&, const Rows<double>&,
                        double*);

}  // namespace fa::online_softmax
