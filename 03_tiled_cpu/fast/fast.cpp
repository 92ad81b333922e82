// Lanes are queries, as in stage 02's lanes.cpp, but `lanes` of them at a time and against tiles of
// keys. The scores are computed transposed, S^T = K Q^T: a row of S^T is one key against all lanes,
// so maximum, sum and rescaling never cross lanes, and K and V are read where they lie.
#include "03_tiled_cpu/fast/fast.hpp"

#include <cmath>
#include <limits>

#include "common/core/simd.hpp"

namespace fa::tiled_cpu::fast {
namespace {

using simd::IntVec, simd::Vec, simd::W;
constexpr float infinity = std::numeric_limits<float>::infinity();

// One group of `lanes` queries: where its part of the scratch lies. Rows of Qt and Ot have one
// element per lane.
struct Group {
  float *Qt, *Ot;  // [d, lanes]: scale log2(e) Q^T, and O^T before the division
  float *m, *l;    // [lanes]
};

// The W x W transpose of a square of floats, in registers: single floats change places, then
// pairs, then fours ...
template <int S>
[[gnu::always_inline]] inline void exchange(Vec* r) {
  IntVec low, high;
  for (int j = 0; j < W; ++j) {
    low[j] = j & S ? j - S + W : j;
    high[j] = j & S ? j + W : j + S;
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (!(i & S)) {
      const Vec x = r[i], y = r[i + S];
#if defined(__clang__)
      Vec u, v;
      for (int j = 0; j < W; ++j) {
        u[j] = j & S ? y[j - S] : x[j];
        v[j] = j & S ? y[j] : x[j + S];
      }
      r[i] = u;
      r[i + S] = v;
#else
      r[i] = __builtin_shuffle(x, y, low);
      r[i + S] = __builtin_shuffle(x, y, high);
#endif
    }
  if constexpr (S * 2 < W) exchange<S * 2>(r);
}

// Qt[x][lane] = factor * Q[i0 + lane][x]; lanes beyond the last row are 0.
template <bool InRegisters>
void load_transposed(const Rows<const float>& Q, std::int64_t i0, float factor, float* Qt) {
  for (std::int64_t lane = 0; lane < lanes; lane += W)
    for (std::int64_t x = 0; x < Q.cols; x += W) {
      if (InRegisters && i0 + lane + W <= Q.rows && x + W <= Q.cols) {
        Vec r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = factor * simd::load(Q[i0 + lane + i] + x);
        exchange<1>(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) simd::store(Qt + (x + i) * lanes + lane, r[i]);
      } else {
        for (std::int64_t e = x; e < std::min(x + W, Q.cols); ++e)
          for (std::int64_t i = lane; i < lane + W; ++i)
            Qt[e * lanes + i] = i0 + i < Q.rows ? factor * Q[i0 + i][e] : 0;
      }
    }
}

// O[i0 + lane][x] = Ot[x][lane] / l[lane], and 0 for a row without weight.
template <bool InRegisters>
void store_transposed(const Group& g, std::int64_t i0, const Rows<float>& O) {
  for (std::int64_t lane = 0; lane < lanes && i0 + lane < O.rows; lane += W) {
    const Vec l = simd::load(g.l + lane);
    const Vec inverse = l == 0.0f ? Vec{} : 1.0f / l;
    for (std::int64_t x = 0; x < O.cols; x += W) {
      if (InRegisters && i0 + lane + W <= O.rows && x + W <= O.cols) {
        Vec r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = simd::load(g.Ot + (x + i) * lanes + lane) * inverse;
        exchange<1>(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) simd::store(O[i0 + lane + i] + x, r[i]);
      } else {
        for (std::int64_t i = lane; i < lane + W && i0 + i < O.rows; ++i)
          for (std::int64_t e = x; e < std::min(x + W, O.cols); ++e)
            O[i0 + i][e] = g.Ot[e * lanes + i] * inverse[i - lane];
      }
    }
  }
}

// One tile of keys [j0, j0 + cols) against one group of `rows` queries that starts at row i0.
// St: [Bc, lanes].
void tile(const Rows<const float>& K, const Rows<const float>& V, const Mask& mask, const Group& g,
          std::int64_t i0, std::int64_t rows, std::int64_t j0, std::int64_t cols, float* St) {
  const std::int64_t d = K.cols;
  const bool diagonal = mask.visible_keys(i0) < j0 + cols;
  IntVec n[N];  // keys of this tile that each lane sees; used on diagonal tiles
  Vec m[N], rescale[N], sum[N] = {};
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) {
    m[v] = simd::load(g.m + v * W);
    if (diagonal)
      for (int lane = 0; lane < W; ++lane) {
        // A lane past the last row has no mask of its own; any will do, for nobody stores it.
        const std::int64_t i = std::min(i0 + v * W + lane, i0 + rows - 1);
        n[v][lane] = int(std::clamp<std::int64_t>(mask.visible_keys(i) - j0, 0, cols));
      }
  }

  // (3) S^T = K_j Q_i^T; masked; (4) and the maximum on the way out of the registers
  const auto zero = [](int, int) { return Vec{}; };
  const auto score = [&](std::int64_t j) {
    return [&, j](int i, int v, Vec s) {
      if (diagonal) s = int(j + i) < n[v] ? s : simd::broadcast(-infinity);
      simd::store(St + (j + i) * lanes + v * W, s);
      m[v] = simd::max(s, m[v]);
    };
  };
  std::int64_t j = 0;
  for (; j + M <= cols; j += M) micro_kernel<M>(K[j0 + j], K.stride, 1, g.Qt, d, zero, score(j));
  for (; j < cols; ++j) micro_kernel<1>(K[j0 + j], K.stride, 1, g.Qt, d, zero, score(j));

    // (5) P^T = exp2(S^T - m_new), l = l rescale + sum over the keys; a lane without weight keeps
    // l = 0. Here and in (6) a tile is summed by itself and then added: a sum of many equal terms
    // loses digits when a small term meets a large sum.
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) {
    const Vec shift = m[v] == -infinity ? Vec{} : m[v];
    rescale[v] = simd::exp2(simd::load(g.m + v * W) - shift);
    simd::store(g.m + v * W, m[v]);
    m[v] = shift;
  }
  for (j = 0; j < cols; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      float* s = St + j * lanes + v * W;
      const Vec p = simd::exp2(simd::load(s) - m[v]);
      sum[v] += p;
      simd::store(s, p);
    }
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v)
    simd::store(g.l + v * W, simd::load(g.l + v * W) * rescale[v] + sum[v]);

  // (6) O^T = O^T rescale + V_j^T P^T: the rescaling is folded into storing the accumulators. The
  // number of rows of O^T sets the size of a register tile, so it must be known when this is
  // compiled: a template parameter, which a lambda takes by .operator()<Rows>(x) (C++20).
  const auto multiply_add = [&]<int Rows>(std::int64_t x) {
    float* o = g.Ot + x * lanes;
    micro_kernel<Rows>(V[j0] + x, 1, V.stride, St, cols, zero, [&](int i, int v, Vec c) {
      float* out = o + i * lanes + v * W;
      simd::store(out, simd::load(out) * rescale[v] + c);
    });
  };
  std::int64_t x = 0;
  for (; x + M <= d; x += M) multiply_add.operator()<M>(x);
  for (; x < d; ++x) multiply_add.operator()<1>(x);
}

}  // namespace

template <int Groups, bool InRegisters>
void attention_block(const Rows<const float>& Q, const Rows<const float>& K,
                     const Rows<const float>& V, float scale, const Mask& mask, std::int64_t i0,
                     float* scratch, const Rows<float>& O, float* LSE) {
  const std::int64_t d = Q.cols, end_row = std::min(i0 + Groups * lanes, Q.rows);
  const std::int64_t used = (end_row - i0 + lanes - 1) / lanes;
  // [Bc, lanes], on a vector's boundary: an access that crosses two cache lines costs two
  constexpr std::uintptr_t vector_bytes = sizeof(Vec);
  const auto address = reinterpret_cast<std::uintptr_t>(scratch);
  float* St = scratch + (vector_bytes - address % vector_bytes) % vector_bytes / sizeof(float);
  Group group[Groups];
  for (std::int64_t g = 0; g < used; ++g) {
    float* base = St + Bc * lanes + g * (2 * d + 2) * lanes;
    group[g] = {base, base + d * lanes, base + 2 * d * lanes, base + (2 * d + 1) * lanes};
    // (1) and the factor that lets exp(scale s) be 2^s
    load_transposed<InRegisters>(Q, i0 + g * lanes, scale * log2_e, group[g].Qt);
    std::fill_n(group[g].Ot, d * lanes, 0.0f);
    std::fill_n(group[g].m, lanes, -infinity);
    std::fill_n(group[g].l, lanes, 0.0f);
  }

  // A tile of K and V is used by all groups before the next one comes.
  for (std::int64_t j0 = 0; j0 < mask.visible_keys(end_row - 1); j0 += Bc)
    for (std::int64_t g = 0; g < used; ++g) {
      const std::int64_t first = i0 + g * lanes,
                         rows = std::min<std::int64_t>(lanes, end_row - first);
      const std::int64_t cols = std::min(Bc, mask.visible_keys(first + rows - 1) - j0);
      if (cols > 0) tile(K, V, mask, group[g], first, rows, j0, cols, St);
    }

  // (7) divide, transpose back, and return to the natural logarithm
  for (std::int64_t g = 0; g < used; ++g) {
    store_transposed<InRegisters>(group[g], i0 + g * lanes, O);
    for (std::int64_t i = 0; LSE && i < lanes && i0 + g * lanes + i < end_row; ++i)
      LSE[i0 + g * lanes + i] = (group[g].m[i] + std::log2(group[g].l[i])) * ln_2;
  }
}

#define FA_INSTANTIATE(Groups, InRegisters)                                                \
  template void attention_block<Groups, InRegisters>(                                      \
      const Rows<const float>&, const Rows<const float>&, const Rows<const float>&, float, \
      const Mask&, std::int64_t, float*, const Rows<float>&, float*)
FA_INSTANTIATE(1, false);
FA_INSTANTIATE(groups, false);
FA_INSTANTIATE(groups, true);
#undef FA_INSTANTIATE

}  // namespace fa::tiled_cpu::fast
