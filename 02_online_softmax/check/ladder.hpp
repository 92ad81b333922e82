// From `rows` to `lanes` one change at a time, for the benchmark. Beside the ladder stand two
// rows that tell what a step gained by. No masks, one batch entry.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/core/simd.hpp"
#include "common/core/tensor.hpp"

namespace ladder {

using fa::simd::Vec, fa::simd::W;

inline float sum_across_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int c = 0; c < W; ++c) sum += v[c];
  return sum;
#endif
}

// q . k with W components on the lanes: W partial sums at once, and at the end one across lanes.
inline float dot(const float* q, const float* k, std::int64_t d) {
  Vec s{};
  std::int64_t x = 0;
  for (; x + W <= d; x += W) s += fa::simd::load(q + x) * fa::simd::load(k + x);
  float rest = 0;
  for (; x < d; ++x) rest += q[x] * k[x];
  return sum_across_lanes(s) + rest;
}

// Equation (5), as it stands in `rows`: here the compiler finds vectors by itself.
inline void add(float* o, float rescale, float weight, const float* v, std::int64_t d) {
  for (std::int64_t x = 0; x < d; ++x) o[x] = o[x] * rescale + weight * v[x];
}

// What `vector_dot` changes besides: nothing; one exponential a key, for the other one of equation
// (2) is exp(0); or o waits in registers for the next key, not in memory (d = 64 only).
enum class Also { nothing, one_exp, o_in_registers };

// `rows` with that dot product.
template <Also also>
void vector_dot(const fa::Problem& p, const fa::Forward<float>& t) {
  constexpr bool local = also == Also::o_in_registers;
  const float scale = float(p.softmax_scale());
  for (std::int64_t h = 0; h < p.Hq; ++h)
    for (std::int64_t i = 0; i < p.Nq; ++i) {
      const float* q = t.Q.at(0, h, i);
      float* o = t.O.at(0, h, i);
      if constexpr (!local) std::fill_n(o, p.d, 0.0f);
      Vec vectors[64 / W] = {};
      float m = -std::numeric_limits<float>::infinity(), l = 0;
      for (std::int64_t j = 0; j < p.Nk; ++j) {
        const float s = scale * dot(q, t.K.at(0, h, j), p.d);
        const float m_new = std::max(m, s);
        float rescale, weight;
        if constexpr (also == Also::one_exp) {
          const float e = std::exp(-std::fabs(s - m));
          rescale = s > m ? e : 1, weight = s > m ? 1 : e;
        } else {
          rescale = std::exp(m - m_new), weight = std::exp(s - m_new);
        }
        l = l * rescale + weight;
        m = m_new;
        const float* v = t.V.at(0, h, j);
        if constexpr (local)
          for (int c = 0; c < 64 / W; ++c)
            vectors[c] = vectors[c] * rescale + weight * fa::simd::load(v + c * W);
        else
          add(o, rescale, weight, v, p.d);
      }
      if constexpr (local)
        for (int c = 0; c < 64 / W; ++c) fa::simd::store(o + c * W, vectors[c]);
      for (std::int64_t x = 0; x < p.d; ++x) o[x] /= l;
    }
}

// The exponentials of W rows: one number after the other, or all of them in one vector.
enum class Rows { together, in_one_vector };

// W rows take a key before the next one comes, so its K and V are fetched once for all of them.
// Dot products and outputs are still each row's own, with components on the lanes.
template <Rows exps>
void row_block(const fa::Problem& p, const fa::Forward<float>& t) {
  constexpr bool vectors = exps == Rows::in_one_vector;
  const float scale = float(p.softmax_scale()) * (vectors ? fa::log2_e : 1.0f);
  for (std::int64_t h = 0; h < p.Hq; ++h)
    for (std::int64_t i0 = 0; i0 < p.Nq; i0 += W) {
      const int rows = int(std::min<std::int64_t>(W, p.Nq - i0));
      for (int r = 0; r < rows; ++r) std::fill_n(t.O.at(0, h, i0 + r), p.d, 0.0f);
      Vec m = fa::simd::broadcast(-std::numeric_limits<float>::infinity()), l{};
      for (std::int64_t j = 0; j < p.Nk; ++j) {
        const float *k = t.K.at(0, h, j), *v = t.V.at(0, h, j);
        Vec s{}, rescale{}, weight{};
        for (int r = 0; r < rows; ++r) s[r] = scale * dot(t.Q.at(0, h, i0 + r), k, p.d);
        const Vec m_new = fa::simd::max(s, m);
        if constexpr (vectors)
          rescale = fa::simd::exp2(m - m_new), weight = fa::simd::exp2(s - m_new);
        else
          for (int r = 0; r < rows; ++r)
            rescale[r] = std::exp(m[r] - m_new[r]), weight[r] = std::exp(s[r] - m_new[r]);
        l = l * rescale + weight;
        m = m_new;
        for (int r = 0; r < rows; ++r) add(t.O.at(0, h, i0 + r), rescale[r], weight[r], v, p.d);
      }
      for (int r = 0; r < rows; ++r)
        for (std::int64_t x = 0; x < p.d; ++x) t.O.at(0, h, i0 + r)[x] /= l[r];
    }
}

}  // namespace ladder
