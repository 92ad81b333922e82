// Practice 02, level 1, of lanes.cpp. Keep the marks; ./learn practice 02
// The lesson again, W rows at a time: one SIMD lane is one row. Each lane has its own m, l and o,
// all lanes look at the same key, and no lane ever needs to know of another. This is what a CUDA
// thread will be in stage 04.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "02_online_softmax/online_softmax.hpp"
#include "common/core/simd.hpp"

namespace fa::online_softmax {

using simd::IntVec, simd::Vec, simd::W;

void attention_lanes(const Rows<const float>& Q, const Rows<const float>& K,
                     const Rows<const float>& V, float scale, const Mask& mask,
                     const Rows<float>& O, float* LSE) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const std::int64_t d = Q.cols;
  // [d][W] each: component x of all rows lies in one vector
  const auto q = std::make_unique<Vec[]>(std::size_t(d)),
             o = std::make_unique<Vec[]>(std::size_t(d));

  for (std::int64_t i0 = 0; i0 < Q.rows; i0 += W) {
    // Lane r is row i0 + r and sees n[r] keys; lanes beyond the last row see none. A lane has 32
    // bits: entry.cpp refuses more keys than they can count.
    IntVec n{};
    for (int r = 0; r < W && i0 + r < Q.rows; ++r) {
      n[r] = int(mask.visible_keys(i0 + r));
      // exp(s) = 2^(s log2 e): the factor goes into q, so that each weight costs one exp2
      for (std::int64_t x = 0; x < d; ++x) q[x][r] = scale * log2_e * Q[i0 + r][x];
    }
    for (std::int64_t x = 0; x < d; ++x) o[x] = Vec{};
    Vec m = simd::broadcast(-infinity), l{};

    // visible_keys never decreases, so the last row sees most
    const std::int64_t last = std::min(i0 + W, Q.rows) - 1;
    for (std::int64_t j = 0; j < mask.visible_keys(last); ++j) {
      // (4) s = q . k_j for W rows: k_j[x] is the same for all of them. Four sums, because one
      // addition must wait for the one before it.
      Vec s[4] = {};
      std::int64_t x = 0;
      // [step 02.6: add to s[0] ... s[3] in turn, any d (3 lines)]
      // TODO
      // [end]
      Vec score = (s[0] + s[1]) + (s[2] + s[3]);
      score = int(j) < n ? score : simd::broadcast(-infinity);

      // (1) to (3), (5), with a finite stand-in for m as long as a lane has seen no weight
      const Vec m_new = simd::max(score, m);
      const Vec shift = m_new == -infinity ? Vec{} : m_new;
      // [step 02.7: factor and weight of every lane; with them l and o (3 lines)]
      // TODO
      // [end]
      m = m_new;
    }

    // (6) O_i = o / l; back from log2 to the natural logarithm
    for (int r = 0; r < W && i0 + r < Q.rows; ++r) {
      // [step 02.8: what belongs to row i0 + r; the log-sum-exp if it is wanted (2 lines)]
      // TODO
      // [end]
    }
  }
}

}  // namespace fa::online_softmax
