// dq.cu with all that stage 04's ladder has found. V_j and K_j have a buffer each: V_j comes while
// K of the tile before is used, and K_j while V_j is.
#include "05_cuda_backward/fast/tile.cuh"

namespace fa::cuda_backward {
namespace {

// (2) P_ij = exp(scale Q_i K_j^T - L_i), 0 where row i does not see j;  (4) dS = P (dP - D), to s.
// Row i sees the first seen(i) columns of this thread, or `all`.
template <bool all, class Seen>
__device__ __forceinline__ void scores_to_gradients(float (&s)[8][4], const float (&dP)[8][4],
                                                    const float (&L)[8], const float (&D)[8],
                                                    float scale, const Seen& seen) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int n = all ? 4 : seen(i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float P = j < n ? exp2_of((scale * s[i][j] - L[i]) * log2_e) : 0;
      s[i][j] = all || P != 0 ? P * (dP[i][j] - D[i]) : 0;
    }
  }
}

template <int D, bool vectorised>
__global__ void __launch_bounds__(Fast<D>::threads, Fast<D>::blocks)
    fast_dq_kernel(Problem p, Backward<float> t, float scale, Delta delta, float* D_rows) {
  using F = Fast<D>;
  const Place<F> at;
  float* const Qi = dynamic_shared<float>();
  float* const dOi = Qi + F::own_size;
  float* const Vj = dOi + F::own_size;
  float* const Kj = Vj + F::tile_size;
  float* const all_dS = Kj + F::tile_size;
  float* const dSij = all_dS + at.warp * F::W_size;

  // The longest rows of all heads first.
  const int heads = int(p.B * p.Hq), tiles = int((p.Nq + F::rows - 1) / F::rows), d = int(p.d);
  const int head = int(blockIdx.x) % heads, b = head / int(p.Hq), h = head % int(p.Hq);
  const std::int64_t i0 = std::int64_t(tiles - 1 - int(blockIdx.x) / heads) * F::rows;
  const int rows = int(min(std::int64_t(F::rows), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), dO = t.dO.rows(b, h, p.Nq, d),
             K = t.K.rows(b, p.key_head(h), p.Nk, d), V = t.V.rows(b, p.key_head(h), p.Nk, d);
  const auto visible = [&](int r) { return int(mask.visible_keys(i0 + min(r, rows - 1))); };
  const int most = visible(at.warp * F::WR + F::WR - 1);  // keys that a row of this warp sees
  const int end = visible(rows - 1);

  ask_for<F, F::rows, vectorised>(Qi, Q, i0, rows);
  ask_for<F, F::rows, vectorised>(dOi, dO, i0, rows);
  if (end > 0) ask_for<F, F::cols, vectorised>(Vj, V, 0, end);

  // (1) D_i = dO_i . O_i
  const std::int64_t rows_before = head * p.Nq + i0;
  const float* deltas = D_rows + rows_before;
  if (delta != Delta::own_kernel) {
    row_deltas<F>(all_dS, dO, t.O.rows(b, h, p.Nq, d), i0, rows);
    __syncthreads();  // the deltas are there, for all warps
    if (delta == Delta::with_dq)
      for (int r = threadIdx.x; r < rows; r += F::threads) D_rows[rows_before + r] = all_dS[r];
    deltas = all_dS;
  }
  float L[8], D_i[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = min(at.row(i), rows - 1);
    L[i] = log_sum(t.LSE[rows_before + r]);
    D_i[i] = deltas[r];
  }

  float dQ[8][8];
  clear(dQ);
  for (int j0 = 0; j0 < end; j0 += F::cols) {
    const bool used = j0 < most;  // a warp whose rows see nothing here only waits and copies
    float dP[8][4], S[8][4];

    // (3) dP_ij = dO_i V_j^T
    cp_async_wait();
    __syncthreads();  // V_j is complete, and K of the tile before is no longer read
    ask_for<F, F::cols, vectorised>(Kj, K, j0, end - j0);
    if (used) product<F>(dP, dOi, Vj, at);

    cp_async_wait();
    __syncthreads();  // K_j is complete, and V_j is no longer read
    if (j0 + F::cols < end)
      ask_for<F, F::cols, vectorised>(Vj, V, j0 + F::cols, end - j0 - F::cols);
    if (!used) continue;

    // (2) P_ij = exp(scale Q_i K_j^T - L_i);  (4) dS_ij = P_ij (dP_ij - D_i)
    product<F>(S, Qi, Kj, at);
    const auto seen = [&](int i) { return visible(at.row(i)) - j0 - 4 * at.tx; };
    if (visible(at.warp * F::WR) >= j0 + F::cols)
      scores_to_gradients<true>(S, dP, L, D_i, scale, seen);
    else
      scores_to_gradients<false>(S, dP, L, D_i, scale, seen);

    // (5) dQ_i += dS_ij K_j
    share<F>(dSij, S, at);
    accumulate<F>(dQ, dSij, Kj, at);
  }
  store<F, vectorised>(t.dQ.rows(b, h, p.Nq, d), i0, rows, scale, dQ, at);
}

template <int D>
void launch(const Problem& p, const Backward<float>& t, float scale, const Options& options,
            float* D_rows) {
  using F = Fast<D>;
  const auto dq = aligned(p, t) ? fast_dq_kernel<D, true> : fast_dq_kernel<D, false>;
  allow_shared_memory(dq, F::bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + F::rows - 1) / F::rows);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(F::threads), F::bytes, options.stream, p, t, scale,
            options.delta, D_rows);
}

}  // namespace

std::size_t fast_shared_bytes(std::int64_t d) {
  return d <= 32 ? Fast<32>::bytes : d <= 64 ? Fast<64>::bytes : Fast<128>::bytes;
}

void launch_fast_dq(const Problem& p, const Backward<float>& t, float scale, const Options& options,
                    float* D_rows) {
  const auto dq = p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>;
  dq(p, t, scale, options, D_rows);
}

}  // namespace fa::cuda_backward
