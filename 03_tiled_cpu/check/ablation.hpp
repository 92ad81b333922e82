// The lesson once more, line for line, with switches: what would it cost without one of its parts,
// or with the part done better? Only the latter is attention still.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/core/simd.hpp"
#include "common/core/tensor.hpp"

namespace fa::tiled_cpu::ablation {

struct Change {
  // Done better; the result is attention.
  bool vector_exp = false;     // exp2 of a whole vector at a time, and a vector of sums
  bool register_sums = false;  // a row of scores, or of O, stays in registers until it is complete
  // Left out; the result is not attention.
  bool no_exp = false;  // one multiply-add in its place
  bool no_QK = false;   // one of the d terms of each score
  bool no_PV = false;

  constexpr bool is_attention() const { return !no_exp && !no_QK && !no_PV; }
};

// y[0, n) += sum over k < K of a(k) * B[k][0, n), where row k of B starts at b(k).
template <bool InRegisters, class A, class B>
[[gnu::always_inline]] inline void add_rows(float* y, std::int64_t n, std::int64_t K, A a, B b) {
  constexpr int vectors = 4, width = vectors * simd::W;
  std::int64_t first = 0;
  for (; InRegisters && first + width <= n; first += width) {
    simd::Vec sum[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[v] = simd::load(y + first + v * simd::W);
    for (std::int64_t k = 0; k < K; ++k)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[v] += a(k) * simd::load(b(k) + first + v * simd::W);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) simd::store(y + first + v * simd::W, sum[v]);
  }
  for (std::int64_t k = 0; k < K; ++k)
    for (std::int64_t e = first; e < n; ++e) y[e] += a(k) * b(k)[e];
}

// s[0, n) = exp(s - shift); returns their sum, added to `sum`.
template <Change change>
float weights(float* s, std::int64_t n, float shift, float sum) {
  std::int64_t c = 0;
  if constexpr (change.vector_exp) {
    simd::Vec sums = {};
    for (; c + simd::W <= n; c += simd::W) {
      const simd::Vec p = simd::exp2(log2_e * (simd::load(s + c) - shift));
      simd::store(s + c, p);
      sums += p;
    }
    for (int lane = 0; lane < simd::W; ++lane) sum += sums[lane];
  }
  for (; c < n; ++c)
    sum += s[c] = change.no_exp ? 0.5f * (s[c] - shift) + 1.0f : std::exp(s[c] - shift);
  return sum;
}

// As attention_tile<float>.
template <Change change>
[[gnu::noinline]] void attention_tile(const Rows<const float>& Q, const Rows<const float>& K,
                                      const Rows<const float>& V, float scale, const Mask& mask,
                                      std::int64_t i0, std::int64_t Br, std::int64_t Bc,
                                      float* scratch, const Rows<float>& O, float* LSE) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const std::int64_t d = Q.cols, rows = std::min(Br, Q.rows - i0);
  float *S = scratch, *Kt = S + Br * Bc, *m = Kt + d * Bc, *l = m + Br;

  std::fill_n(m, rows, -infinity);
  std::fill_n(l, rows, 0.0f);
  for (std::int64_t r = 0; r < rows; ++r) std::fill_n(O[i0 + r], d, 0.0f);

  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const std::int64_t cols = std::min(Bc, end - j0);
    for (std::int64_t c = 0; c < cols; ++c)
      for (std::int64_t x = 0; x < d; ++x) Kt[x * Bc + c] = K[j0 + c][x];

    for (std::int64_t r = 0; r < rows; ++r) {
      float* s = S + r * Bc;
      std::fill_n(s, cols, 0.0f);
      add_rows<change.register_sums>(
          s, cols, change.no_QK ? 1 : d, [&](std::int64_t x) { return Q[i0 + r][x]; },
          [&](std::int64_t x) { return Kt + x * Bc; });
      for (std::int64_t c = 0; c < cols; ++c) s[c] *= scale;

      const std::int64_t n = std::clamp<std::int64_t>(mask.visible_keys(i0 + r) - j0, 0, cols);
      float m_new = m[r];
      for (std::int64_t c = 0; c < n; ++c) m_new = std::max(m_new, s[c]);
      const float shift = m_new == -infinity ? 0.0f : m_new;
      const float rescale = std::exp(m[r] - shift);
      l[r] = weights<change>(s, n, shift, l[r] * rescale);
      m[r] = m_new;

      float* o = O[i0 + r];
      for (std::int64_t x = 0; x < d; ++x) o[x] *= rescale;
      if constexpr (!change.no_PV)
        add_rows<change.register_sums>(
            o, d, n, [&](std::int64_t c) { return s[c]; },
            [&](std::int64_t c) { return V[j0 + c]; });
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t x = 0; x < d; ++x) O[i0 + r][x] = l[r] == 0 ? 0 : O[i0 + r][x] / l[r];
    if (LSE) LSE[i0 + r] = m[r] + std::log(l[r]);
  }
}

}  // namespace fa::tiled_cpu::ablation
