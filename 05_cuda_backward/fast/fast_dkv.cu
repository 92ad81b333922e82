// dkv.cu with all that stage 04's ladder has found. Q_i and dO_i have a buffer each, and change
// places after every tile: dO_i comes while S is computed, Q_{i+1} over dO_i while dK is.
//
// With atomic_dq the same kernel adds what it knows of dQ, as in dkv.cu.
#include "05_cuda_backward/fast/tile.cuh"

namespace fa::cuda_backward {
namespace {

// (2) P^T = exp(scale K_j Q_i^T - L_i), 0 where row i does not see j. Query j of this thread
// sees the first seen(j) keys of the tile, or `all`.
template <bool all, class F, class Seen>
__device__ __forceinline__ void scores_to_weights(float (&s)[8][4], const float (&L)[4],
                                                  float scale, const Seen& seen,
                                                  const Place<F>& at) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int n = all ? F::rows : seen(j);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      s[i][j] = all || at.row(i) < n ? exp2_of((scale * s[i][j] - L[j]) * log2_e) : 0;
  }
}

// (4) dS^T = P (dP - D), from dP to dS in place; this thread's P is where share() has put it.
template <bool all, class F>
__device__ __forceinline__ void weights_to_gradients(float (&s)[8][4], float* W,
                                                     const float (&D)[4], const Place<F>& at) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* const from = weights_at<F>(W, at, j);
    const float4 upper = load4(from), lower = load4(from + F::WR / 2);
    const float P[] = {upper.x, upper.y, upper.z, upper.w, lower.x, lower.y, lower.z, lower.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i][j] = all || P[i] != 0 ? P[i] * (s[i][j] - D[j]) : 0;
  }
}

// dQ_i += scale dS_ij K_j for the first `keys` keys of the block, in whole warps' parts, into
// memory that all blocks add to. A thread: TQ neighbouring queries, `pieces` times four columns.
template <class F, bool vectorised>
__device__ __forceinline__ void add_dq(const Rows<float>& dQ, std::int64_t i0, int rows,
                                       const float* all_dS, int keys, const float* Kj,
                                       float scale) {
  constexpr int TQ = F::D <= 32 ? 1 : 4, pieces = F::cols * F::D / F::threads / TQ / 4;
  constexpr int along = F::D / (4 * pieces);  // threads along a row
  const int q = int(threadIdx.x) / along * TQ, x0 = int(threadIdx.x) % along * 4;
  float sum[TQ][4 * pieces];
  clear(sum);
  const float *dS = all_dS + q / 4 * F::W_pitch + q % 4 * F::WR, *k = Kj + x0;
#pragma unroll 1
  for (int j = 0; j < keys; j += F::WR, dS += F::W_size) {
#pragma unroll 2
    for (int r = 0; r < F::WR; r += 4, k += F::pitch) {
      float4 four[TQ];
#pragma unroll
      for (int i = 0; i < TQ; ++i) four[i] = load4(dS + i * F::WR + r);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int y = 0; y < pieces; ++y) {
          const float4 kx = load4(k + e * F::D + y * (F::D / pieces));
#pragma unroll
          for (int i = 0; i < TQ; ++i) {
            const float w = e == 0   ? four[i].x
                            : e == 1 ? four[i].y
                            : e == 2 ? four[i].z
                                     : four[i].w;
            sum[i][4 * y] += w * kx.x;
            sum[i][4 * y + 1] += w * kx.y;
            sum[i][4 * y + 2] += w * kx.z;
            sum[i][4 * y + 3] += w * kx.w;
          }
        }
    }
  }
#pragma unroll
  for (int i = 0; i < TQ; ++i) {
    if (q + i >= rows) continue;
    float* const to = dQ[i0 + q + i];
#pragma unroll
    for (int y = 0; y < pieces; ++y)
      add_columns<vectorised>(to, x0 + y * (F::D / pieces), int(dQ.cols),
                              make_float4(scale * sum[i][4 * y], scale * sum[i][4 * y + 1],
                                          scale * sum[i][4 * y + 2], scale * sum[i][4 * y + 3]));
  }
}

template <int D, bool vectorised, bool atomic_dq>
__global__ void __launch_bounds__(Fast<D>::threads, Fast<D>::blocks)
    fast_dkv_kernel(Problem p, Backward<float> t, float scale, Delta delta, const float* D_rows) {
  using F = Fast<D>;
  const Place<F> at;
  float* const Kj = dynamic_shared<float>();
  float* const Vj = Kj + F::own_size;
  float* Qi = Vj + F::own_size;
  float* dOi = Qi + F::tile_size;
  float* const all_W = dOi + F::tile_size;
  float* const Wij = all_W + at.warp * F::W_size;  // P^T, then dS^T
  float* const deltas = all_W + F::warps * F::W_size;

  // With a causal mask the first keys have most: of all heads.
  const int heads = int(p.B * p.Hkv), d = int(p.d), group = int(p.Hq / p.Hkv);
  const int head = int(blockIdx.x) % heads, b = head / int(p.Hkv), hk = head % int(p.Hkv);
  const std::int64_t j0 = std::int64_t(int(blockIdx.x) / heads) * F::rows;
  const int keys = int(min(std::int64_t(F::rows), p.Nk - j0));
  const Mask mask(p, b);

  // Padded keys are not even looked at: 0 times what they hold may be NaN.
  const int seen = int(max(min(mask.length - j0, std::int64_t(keys)), std::int64_t(0)));
  ask_for<F, F::rows, vectorised>(Kj, t.K.rows(b, hk, p.Nk, d), j0, seen);
  ask_for<F, F::rows, vectorised>(Vj, t.V.rows(b, hk, p.Nk, d), j0, seen);
  const auto rows_at = [&](std::int64_t i0) { return int(min(std::int64_t(F::cols), p.Nq - i0)); };
  const auto ask_for_Q = [&](float* to, int h, std::int64_t i0) {
    ask_for<F, F::cols, vectorised>(to, t.Q.rows(b, h, p.Nq, d), i0, rows_at(i0));
  };
  const std::int64_t first = mask.first_row(j0);  // rows before it see nothing of this tile
  const int h0 = hk * group, end = h0 + group;
  if (first < p.Nq) ask_for_Q(Qi, h0, first);

  float dK[8][8], dV[8][8];
  clear(dK);
  clear(dV);
#pragma unroll 1
  for (int h = h0; h < end; ++h) {
    const auto dO = t.dO.rows(b, h, p.Nq, d);
#pragma unroll 1
    for (std::int64_t i0 = first; i0 < p.Nq; i0 += F::cols) {
      const int rows = rows_at(i0);
      const bool full = mask.visible_keys(i0) >= j0 + F::rows;  // all rows see all keys
      // Warps with a key that a row here sees; the others only wait and copy.
      const int most = int(min(mask.visible_keys(i0 + rows - 1) - j0, std::int64_t(F::rows)));
      const bool used = at.warp * F::WR < most;
      const std::int64_t row0 = (b * p.Hq + h) * p.Nq + i0;
      if (delta == Delta::in_loop) {
        row_deltas<F>(deltas, dO, t.O.rows(b, h, p.Nq, d), i0, rows);
        __syncthreads();  // the deltas are there, for all warps
      }
      float L[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        L[j] = 4 * at.tx + j < rows ? log_sum(t.LSE[row0 + 4 * at.tx + j]) : INFINITY;

      // (2) P^T = exp(scale K_j Q_i^T - L_i)
      cp_async_wait();
      __syncthreads();  // Q_i is complete (at first K_j and V_j too), and the place of dO_i is free
      ask_for<F, F::cols, vectorised>(dOi, dO, i0, rows);
      float s[8][4];
      if (used) {
        product<F>(s, Kj, Qi, at);
        const auto seen_by = [&](int j) {  // columns are queries: how many keys does this one see?
          return int(min(mask.visible_keys(i0 + 4 * at.tx + j) - j0, std::int64_t(F::rows)));
        };
        if (full)
          scores_to_weights<true>(s, L, scale, seen_by, at);
        else
          scores_to_weights<false>(s, L, scale, seen_by, at);
        share<F>(Wij, s, at);
      }
      // (5) dV_j += P_ij^T dO_i;  (3) dP^T = V_j dO_i^T;  (4) dS = P (dP - D)
      cp_async_wait();
      __syncthreads();  // dO_i is complete
      if (used) {
        float D_i[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = min(4 * at.tx + j, rows - 1);
          D_i[j] = delta == Delta::in_loop ? deltas[r] : D_rows[row0 + r];
        }
        accumulate<F>(dV, Wij, dOi, at);
        product<F>(s, Vj, dOi, at);
        if (full)
          weights_to_gradients<true>(s, Wij, D_i, at);
        else
          weights_to_gradients<false>(s, Wij, D_i, at);
        share<F>(Wij, s, at);
      }
      // (5) dK_j += dS_ij^T Q_i
      __syncthreads();  // dO_i is no longer read
      if (i0 + F::cols < p.Nq)
        ask_for_Q(dOi, h, i0 + F::cols);
      else if (h + 1 < end)
        ask_for_Q(dOi, h + 1, first);
      if (used) accumulate<F>(dK, Wij, Qi, at);
      if constexpr (atomic_dq)
        add_dq<F, vectorised>(t.dQ.rows(b, h, p.Nq, d), i0, rows, all_W, most, Kj, scale);
      // [quote places]
      float* const now = Qi;
      Qi = dOi;
      dOi = now;
      // [end quote]
    }
  }
  store<F, vectorised>(t.dK.rows(b, hk, p.Nk, d), j0, keys, scale, dK, at);
  store<F, vectorised>(t.dV.rows(b, hk, p.Nk, d), j0, keys, 1, dV, at);
}

template <int D, bool atomic_dq>
void launch(const Problem& p, const Backward<float>& t, float scale, const Options& options,
            const float* D_rows) {
  using F = Fast<D>;
  const auto dkv =
      aligned(p, t) ? fast_dkv_kernel<D, true, atomic_dq> : fast_dkv_kernel<D, false, atomic_dq>;
  allow_shared_memory(dkv, F::bytes);
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + F::rows - 1) / F::rows);
  FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(F::threads), F::bytes, options.stream, p, t, scale,
            atomic_dq ? Delta::own_kernel : options.delta, D_rows);
}

}  // namespace

void launch_fast_dkv(const Problem& p, const Backward<float>& t, float scale,
                     const Options& options, const float* D_rows) {
  const auto dkv = p.d <= 32   ? launch<32, false>
                   : p.d <= 64 ? launch<64, false>
                               : launch<128, false>;
  dkv(p, t, scale, options, D_rows);
}

void launch_fast_atomic(const Problem& p, const Backward<float>& t, float scale,
                        const Options& options, const float* D_rows) {
  const auto dkv = p.d <= 32 ? launch<32, true> : p.d <= 64 ? launch<64, true> : launch<128, true>;
  dkv(p, t, scale, options, D_rows);
}

}  // namespace fa::cuda_backward
