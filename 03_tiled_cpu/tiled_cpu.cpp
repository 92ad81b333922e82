// Algorithm 1 of FlashAttention-2, line by line. One call is one turn of its outer loop: one tile
// of queries, which owns its rows of O. Stage 04 turns this very loop nest into a CUDA kernel.
#include "03_tiled_cpu/tiled_cpu.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa::tiled_cpu {

template <class T>
void attention_tile(const Rows<const T>& Q, const Rows<const T>& K, const Rows<const T>& V, T scale,
                    const Mask& mask, std::int64_t i0, std::int64_t Br, std::int64_t Bc, T* scratch,
                    const Rows<T>& O, T* LSE) {
  // [blank]
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const std::int64_t d = Q.cols;
  const std::int64_t rows = std::min(Br, Q.rows - i0);  // [03.a]
  // [Br, Bc]: scores of this pair of tiles, then their weights. Here one row would do, for each is
  // used up before the next begins; the warps of stage 04 work on all rows at the same time.
  T* S = scratch;
  // [d, Bc]: the tile of K, transposed, so that neighbours in a row of S are neighbours here
  T* Kt = S + Br * Bc;
  T* m = Kt + d * Bc;  // [Br]
  T* l = m + Br;       // [Br]

  // [quote tile]
  // (1) O_i = 0, l_i = 0, m_i = -infinity
  std::fill_n(m, rows, -infinity);
  std::fill_n(l, rows, T(0));
  for (std::int64_t r = 0; r < rows; ++r) std::fill_n(O[i0 + r], d, T(0));

  // [03.b]
  // The last row of the tile sees most: tiles of keys beyond that are skipped, not masked.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  // [end]
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const std::int64_t cols = std::min(Bc, end - j0);  // [03.c]

    // (2) load K_j; V_j is read where it lies
    // [03.d]
    for (std::int64_t c = 0; c < cols; ++c)
      for (std::int64_t x = 0; x < d; ++x) Kt[x * Bc + c] = K[j0 + c][x];
    // [end]

    for (std::int64_t r = 0; r < rows; ++r) {
      // (3) S_ij = scale Q_i K_j^T
      T* s = S + r * Bc;
      std::fill_n(s, cols, T(0));
      // [step 03.1: one row of the product of two tiles (2 lines)]
      for (std::int64_t x = 0; x < d; ++x)
        for (std::int64_t c = 0; c < cols; ++c) s[c] += Q[i0 + r][x] * Kt[x * Bc + c];
      // [end]
      for (std::int64_t c = 0; c < cols; ++c) s[c] *= scale;

      // [03.e]
      // Only a tile on the diagonal has rows that see a part of it; a full tile takes all columns.
      const std::int64_t n = std::clamp<std::int64_t>(mask.visible_keys(i0 + r) - j0, 0, cols);
      // [end]

      // (4) m_new = max(m, rowmax S_ij)
      T m_new = m[r];
      for (std::int64_t c = 0; c < n; ++c) m_new = std::max(m_new, s[c]);  // [03.f]
      // [03.g]
      // No weight yet: any finite number will do.
      const T shift = m_new == -infinity ? T(0) : m_new;
      // [end]

      // (5) P_ij = exp(S_ij - m_new);  l = exp(m - m_new) l + rowsum P_ij
      const T rescale = std::exp(m[r] - shift);  // [03.h]
      // [step 03.2: rescale the sum, then add this tile's weights to it (2 lines)]
      l[r] *= rescale;
      for (std::int64_t c = 0; c < n; ++c) l[r] += s[c] = std::exp(s[c] - shift);
      // [end]
      m[r] = m_new;

      // (6) O_i = exp(m - m_new) O_i + P_ij V_j
      T* o = O[i0 + r];
      for (std::int64_t x = 0; x < d; ++x) o[x] *= rescale;
      // [step 03.3: add the values of this tile, each with its weight (2 lines)]
      for (std::int64_t c = 0; c < n; ++c)
        for (std::int64_t x = 0; x < d; ++x) o[x] += s[c] * V[j0 + c][x];
      // [end]
    }
  }

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i
  for (std::int64_t r = 0; r < rows; ++r) {
    // [step 03.4: divide once, and write the log-sum-exp if it is wanted (2 lines)]
    for (std::int64_t x = 0; x < d; ++x) O[i0 + r][x] = l[r] == 0 ? T(0) : O[i0 + r][x] / l[r];
    if (LSE) LSE[i0 + r] = m[r] + std::log(l[r]);
    // [end]
  }
  // [end quote]
  // [end blank]
}

template void attention_tile(const Rows<const float>&, const Rows<const float>&,
                             const Rows<const float>&, float, const Mask&, std::int64_t,
                             std::int64_t, std::int64_t, float*, const Rows<float>&, float*);
template void attention_tile(const Rows<const double>&, const Rows<const double>&,
                             const Rows<const double>&, double, const Mask&, std::int64_t,
                             std::int64_t, std::int64_t, double*, const Rows<double>&, double*);

}  // namespace fa::tiled_cpu
