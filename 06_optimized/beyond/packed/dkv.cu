// Stage 05's owner of dK and dV: a block per tile of keys, now of any sequence's, and a loop over
// the tiles of its queries, in all query heads of the group.
#include "06_optimized/beyond/packed/tile.cuh"

namespace fa::packed {
namespace {

// [quote kernel]
template <class Tile>
__global__ void __launch_bounds__(threads, Tile::D <= 64 ? 3 : 2)
    dkv_kernel(Problem p, Backward<float> t, List list, float scale, const float* D_rows,
               bool vectorised) {
  // [blank]
  constexpr int TR = Tile::TR, TK = Tile::TK, Bc = Tile::rows, Br = Tile::cols;
  float* Kj = dynamic_shared<float>();      // [Bc, pitch]
  float* Vj = Kj + Bc * Tile::pitch;        // [Bc, pitch]
  float* QdOi = Vj + Bc * Tile::pitch;      // [Br, pitch]: Q_i, then dO_i, then Q_i again
  float* Wij = QdOi + Br * Tile::pitch;     // [Bc, score_pitch]: P^T, then dS^T
  float* L = Wij + Bc * Tile::score_pitch;  // [Br]
  float* D_i = L + Br;                      // [Br]

  const int tx = threadIdx.x % 8, r0 = threadIdx.x / 32 * 4 * TR + threadIdx.x % 32 / 8;
  const int d = int(p.d);
  const int n_th = int(blockIdx.x / unsigned(p.Hkv));
  const Work& work = list.work[n_th];
  if (work.tile < 0) return;  // the host counts tiles that may be needed
  const std::int64_t b = 0, hk = blockIdx.x % unsigned(p.Hkv), group = p.Hq / p.Hkv;
  const std::int64_t all_queries = p.Nq;
  enter(work, p, t);
  const int j0 = work.tile * Bc;
  const int keys = min(Bc, work.Nk - j0);
  const SequenceMask mask(work, p.causal);

  load<Tile, Bc>(Kj, t.K.rows(b, hk, p.Nk, d), j0, keys, vectorised);
  load<Tile, Bc>(Vj, t.V.rows(b, hk, p.Nk, d), j0, keys, vectorised);
  float4 dK[TR][Tile::columns], dV[TR][Tile::columns];
  clear<Tile>(dK);
  clear<Tile>(dV);

  for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h) {
    const auto Q = t.Q.rows(b, h, p.Nq, d), dO = t.dO.rows(b, h, p.Nq, d);
    const std::int64_t rows_before = h * all_queries;
    // Rows before the first that sees key j0 see nothing of this tile.
    for (int i0 = mask.first_row(j0); i0 < work.Nq; i0 += Br) {
      const int rows = min(Br, work.Nq - i0);
      __syncthreads();  // Q_i, L and D of the tile before are no longer read
      load<Tile, Br>(QdOi, Q, i0, rows, vectorised);
      if (int(threadIdx.x) < rows) {
        L[threadIdx.x] = t.LSE[rows_before + i0 + threadIdx.x];
        D_i[threadIdx.x] = D_rows[rows_before + work.q0 + i0 + threadIdx.x];
      }
      __syncthreads();  // Q_i (at first K_j and V_j too), L and D are complete

      // (2) P^T = exp(scale K_j Q_i^T - L_i), 0 where row i does not see j
      float P[TR][TK], dS[TR][TK];
      product<Tile>(P, Kj, QdOi, r0);
      const bool full = mask.visible_keys(i0) >= j0 + Bc;
#pragma unroll
      for (int c = 0; c < TK; ++c) {
        const int r = tx + 8 * c;
        // Columns are queries: how many keys of this tile does this one see?
        const bool none = r >= rows || L[r] == -INFINITY;
        const int seen_by_r = mask.visible_keys(i0 + min(r, rows - 1)) - j0;
        const int n = none ? 0 : full ? Bc : min(max(seen_by_r, 0), Bc);
        const float L_i = n > 0 ? L[r] : 0;
#pragma unroll
        for (int i = 0; i < TR; ++i) P[i][c] = r0 + 4 * i < n ? __expf(scale * P[i][c] - L_i) : 0;
      }
      share<Tile>(Wij, P, r0);

      __syncthreads();  // Q_i is no longer read
      load<Tile, Br>(QdOi, dO, i0, rows, vectorised);
      __syncthreads();  // dO_i is complete

      // (5) dV_j += P_ij^T dO_i;  (3) dP^T = V_j dO_i^T;  (4) dS = P (dP - D)
      accumulate<Tile>(dV, Wij, QdOi, r0);
      product<Tile>(dS, Vj, QdOi, r0);
#pragma unroll
      for (int c = 0; c < TK; ++c) {
        const float delta_i = tx + 8 * c < rows ? D_i[tx + 8 * c] : 0;
#pragma unroll
        for (int i = 0; i < TR; ++i) dS[i][c] = P[i][c] == 0 ? 0 : P[i][c] * (dS[i][c] - delta_i);
      }
      share<Tile>(Wij, dS, r0);

      __syncthreads();  // dO_i is no longer read
      load<Tile, Br>(QdOi, Q, i0, rows, vectorised);
      __syncthreads();  // Q_i is complete, for the second time
      // (5) dK_j += dS_ij^T Q_i
      accumulate<Tile>(dK, Wij, QdOi, r0);
    }
  }
  store<Tile>(t.dK.rows(b, hk, p.Nk, d), work.k0 + j0, keys, r0, scale, dK, vectorised);
  store<Tile>(t.dV.rows(b, hk, p.Nk, d), work.k0 + j0, keys, r0, 1, dV, vectorised);
  // [end blank]
}
// [end quote]

template <class Tile>
void launch(const Problem& p, const Backward<float>& t, const List& list, float scale,
            const float* D_rows, cudaStream_t stream) {
  const auto dkv = dkv_kernel<Tile>;
  const std::size_t bytes = Tile::shared_bytes;
  allow_shared_memory(dkv, bytes);
  const std::int64_t blocks = Side{true, Tile::rows}.most(p) * p.Hkv;
  FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, list, scale, D_rows,
            aligned(p, t));
}

}  // namespace

template <>
int dkv_tile<float>(std::int64_t d) {
  return with_tile(d, [](auto tile) { return decltype(tile)::rows; });
}

void launch_dkv(const Problem& p, const Backward<float>& t, const List& list, float scale,
                const float* D, cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) { launch<decltype(tile)>(p, t, list, scale, D, stream); });
}

}  // namespace fa::packed
