// Stage 05's owner of dK and dV, with changed scores. Rows of a tile are keys and columns are
// queries, so each column is a line of S of its own.
#include "06_optimized/beyond/scores/tile.cuh"

namespace fa::scores {
namespace {

using namespace fp32;

template <class Tile>
__global__ void __launch_bounds__(threads, 2)
    dkv_kernel(Problem p, Backward<float> t, Change<float> change, float scale, const float* D_rows,
               bool vectorised) {
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
  const Mask mask(p, b);

  // Padded keys are not even looked at: 0 times what they hold may be NaN.
  const int seen = int(max(min(mask.length - j0, std::int64_t(keys)), std::int64_t(0)));
  const Rotary& rotary = change.rotary;
  load_turned<Tile, Bc>(Kj, t.K.rows(b, hk, p.Nk, d), j0, seen, rotary, 0);
  load<Tile, Bc>(Vj, t.V.rows(b, hk, p.Nk, d), j0, seen, vectorised);
  float4 dK[TR][Tile::columns], dV[TR][Tile::columns];
  clear<Tile>(dK);
  clear<Tile>(dV);

  for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h) {
    const auto Q = t.Q.rows(b, h, p.Nq, d), dO = t.dO.rows(b, h, p.Nq, d);
    const std::int64_t rows_before = (b * p.Hq + h) * p.Nq;
    const Head<with_all, float> of_head(change, b, h);
    // Rows before the first that sees key j0 see nothing of this tile.
    for (std::int64_t i0 = mask.first_row(j0); i0 < p.Nq; i0 += Br) {
      const int rows = int(min(std::int64_t(Br), p.Nq - i0));
      __syncthreads();  // Q_i, L and D of the tile before are no longer read
      load_turned<Tile, Br>(QdOi, Q, i0, rows, rotary, change.offset);
      if (int(threadIdx.x) < rows) {
        L[threadIdx.x] = t.LSE[rows_before + i0 + threadIdx.x];
        D_i[threadIdx.x] = D_rows[rows_before + i0 + threadIdx.x];
      }
      __syncthreads();  // Q_i (at first K_j and V_j too), L and D are complete

      // (2) P^T = exp(changed(scale K_j Q_i^T) - L_i), 0 where row i does not see j
      float P[TR][TK], dS[TR][TK], derivative[TR][TK];
      product<Tile>(P, Kj, QdOi, r0);
      const bool full = mask.visible_keys(i0) >= j0 + Bc;
#pragma unroll
      for (int c = 0; c < TK; ++c) {
        const int r = tx + 8 * c;
        // Columns are queries: how many keys of this tile does this one see?
        const bool none = r >= rows || L[r] == -INFINITY;
        const std::int64_t seen_by_r = mask.visible_keys(i0 + min(r, rows - 1)) - j0;
        const int n = none   ? 0
                      : full ? Bc
                             : int(min(max(seen_by_r, std::int64_t(0)), std::int64_t(Bc)));
        const float L_i = n > 0 ? L[r] : 0;
        const Line<with_all, float> line(change, of_head, int(i0) + min(r, rows - 1), int(j0));
#pragma unroll
        for (int i = 0; i < TR; ++i) {
          const int x = r0 + 4 * i;
          derivative[i][c] = line.derivative(scale * P[i][c]);
          const float s = line.changed(scale * P[i][c], x, line.bias_at(x, n));
          P[i][c] = x < n ? __expf(s - L_i) : 0;
        }
      }
      share<Tile>(Wij, P, r0);

      __syncthreads();  // Q_i is no longer read
      load<Tile, Br>(QdOi, dO, i0, rows, vectorised);
      __syncthreads();  // dO_i is complete

      // (5) dV_j += P_ij^T dO_i;  (3) dP^T = V_j dO_i^T;  (4) dS = P (dP - D) changed'
      accumulate<Tile>(dV, Wij, QdOi, r0);
      product<Tile>(dS, Vj, QdOi, r0);
#pragma unroll
      for (int c = 0; c < TK; ++c) {
        const float delta_i = tx + 8 * c < rows ? D_i[tx + 8 * c] : 0;
#pragma unroll
        for (int i = 0; i < TR; ++i)
          dS[i][c] = P[i][c] == 0 ? 0 : P[i][c] * (dS[i][c] - delta_i) * derivative[i][c];
      }
      share<Tile>(Wij, dS, r0);

      __syncthreads();  // dO_i is no longer read
      load_turned<Tile, Br>(QdOi, Q, i0, rows, rotary, change.offset);
      __syncthreads();  // Q_i is complete, for the second time
      // (5) dK_j += dS_ij^T Q_i
      accumulate<Tile>(dK, Wij, QdOi, r0);
    }
  }
  store_turned_back<Tile>(t.dK.rows(b, hk, p.Nk, d), j0, keys, r0, scale, dK, Kj, rotary, 0);
  store<Tile>(t.dV.rows(b, hk, p.Nk, d), j0, keys, r0, 1, dV, vectorised);
}

template <class Tile>
void launch(const Problem& p, const Backward<float>& t, const Change<float>& change, float scale,
            const float* D_rows, cudaStream_t stream) {
  const auto dkv = dkv_kernel<Tile>;
  const std::size_t bytes = Tile::shared_bytes;
  allow_shared_memory(dkv, bytes);
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Tile::rows - 1) / Tile::rows);
  FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, change, scale, D_rows,
            aligned(p, t));
}

}  // namespace

void launch_dkv(const Problem& p, const Backward<float>& t, const Change<float>& change,
                float scale, const float* D, cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) { launch<decltype(tile)>(p, t, change, scale, D, stream); });
}

}  // namespace fa::scores
