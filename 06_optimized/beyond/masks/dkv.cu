// Stage 05's owner of dK and dV, which asks the first question the other way round: which tiles of
// queries does some key of this tile meet? Its rows are keys, and for a key the queries that see it
// are one range, without a gap.
#include "06_optimized/beyond/masks/tile.cuh"

namespace fa::masks {
namespace {

// [quote kernel]
template <class Tile>
__global__ void __launch_bounds__(threads, 2)
    dkv_kernel(Problem p, Pattern pattern, Backward<float> t, float scale, const float* D_rows,
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
  const std::int64_t tiles = (p.Nk + Bc - 1) / Bc, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hkv, hk = head % p.Hkv, group = p.Hq / p.Hkv;
  const std::int64_t j0 = blockIdx.x % tiles * Bc;  // with a causal mask the first keys have most
  const int keys = int(min(std::int64_t(Bc), p.Nk - j0));
  __shared__ Reach reach;  // the same for all threads, and registers are full
  if (threadIdx.x == 0) reach = Reach(p, pattern, b);
  __syncthreads();

  // Padded keys are not even looked at: 0 times what they hold may be NaN.
  const int first = int(j0), last = first + keys - 1, seen = min(keys, reach.length - first);
  load<Tile, Bc>(Kj, t.K.rows(b, hk, p.Nk, d), j0, seen, vectorised);
  load<Tile, Bc>(Vj, t.V.rows(b, hk, p.Nk, d), j0, seen, vectorised);
  float4 dK[TR][Tile::columns], dV[TR][Tile::columns];
  clear<Tile>(dK);
  clear<Tile>(dV);

  for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h) {
    const auto Q = t.Q.rows(b, h, p.Nq, d), dO = t.dO.rows(b, h, p.Nq, d);
    const std::int64_t rows_before = (b * p.Hq + h) * p.Nq;
    // Tiles of queries that see nothing of this tile of keys are skipped.
    Tiles<Br, true> tiles_of_queries(reach.rows_of(first, last));
    tiles_of_queries.start(pattern.queries, b, h, first / int(block));
    for (; tiles_of_queries.tile >= 0; tiles_of_queries.next()) {
      const int i0 = tiles_of_queries.tile * Br, rows = min(Br, int(p.Nq) - i0);
      __syncthreads();  // Q_i, L and D of the tile before are no longer read
      load<Tile, Br>(QdOi, Q, i0, rows, vectorised);
      if (int(threadIdx.x) < rows) {
        L[threadIdx.x] = t.LSE[rows_before + i0 + threadIdx.x];
        D_i[threadIdx.x] = D_rows[rows_before + i0 + threadIdx.x];
      }
      __syncthreads();  // Q_i (at first K_j and V_j too), L and D are complete

      // (2) P^T = exp(scale K_j Q_i^T - L_i), 0 where row i does not see j
      float P[TR][TK], dS[TR][TK];
      product<Tile>(P, Kj, QdOi, r0);
      const bool whole = reach.all_see(i0, i0 + rows - 1, first, last);
#pragma unroll
      for (int c = 0; c < TK; ++c) {
        const int r = tx + 8 * c;
        // Columns are queries: which keys of this tile does this one see?
        const bool none = r >= rows || L[r] == -INFINITY;
        const int query = i0 + min(r, rows - 1);
        const float L_i = none ? 0 : L[r];
#pragma unroll
        for (int i = 0; i < TR; ++i) {
          const int key = min(first + r0 + 4 * i, last);
          bool visible = false;
          // [step 06.34: does this query see this key, if not all pairs are seen anyway? (1 line)]
          visible = !none && (whole || reach.sees(query, key));
          // [end]
          P[i][c] = visible ? __expf(scale * P[i][c] - L_i) : 0;
        }
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
  store<Tile>(t.dK.rows(b, hk, p.Nk, d), j0, keys, r0, scale, dK, vectorised);
  store<Tile>(t.dV.rows(b, hk, p.Nk, d), j0, keys, r0, 1, dV, vectorised);
  // [end blank]
}
// [end quote]

}  // namespace

void launch_dkv(const Problem& p, const Pattern& pattern, const Backward<float>& t, float scale,
                const Statistics& s, cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) {
    using Sizes = decltype(tile);
    const auto dkv = dkv_kernel<Sizes>;
    const std::size_t bytes = Sizes::shared_bytes;
    allow_shared_memory(dkv, bytes);
    const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Sizes::rows - 1) / Sizes::rows);
    FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, pattern, t, scale, s.D,
              aligned(p, t));
  });
}

}  // namespace fa::masks
