// Stage 05's owner of dQ: a block per tile of queries, now of any sequence's. Before it, the small
// kernel for D.
#include "06_optimized/beyond/packed/tile.cuh"

namespace fa::packed {
namespace {

// (1) D_i = dO_i . O_i, a warp per row. A row needs not know whose it is.
__global__ void delta_kernel(Problem p, Backward<float> t, float* D) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= p.Hq * p.Nq) return;
  const std::int64_t h = row / p.Nq, i = row % p.Nq, b = 0;
  float sum = 0;
  for (int x = lane; x < p.d; x += 32) sum += t.dO.at(b, h, i)[x] * t.O.at(b, h, i)[x];
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
  if (lane == 0) D[row] = sum;
}

// [quote kernel]
template <class Tile>
__global__ void __launch_bounds__(threads, Tile::D <= 64 ? 3 : 2)
    dq_kernel(Problem p, Backward<float> t, List list, float scale, const float* D_rows,
              bool vectorised) {
  // [blank]
  constexpr int TR = Tile::TR, TK = Tile::TK, Br = Tile::rows, Bc = Tile::cols;
  float* Qi = dynamic_shared<float>();   // [Br, pitch]
  float* dOi = Qi + Br * Tile::pitch;    // [Br, pitch]
  float* KVj = dOi + Br * Tile::pitch;   // [Bc, pitch]: first V_j, then K_j
  float* dSij = KVj + Bc * Tile::pitch;  // [Br, score_pitch]

  const int tx = threadIdx.x % 8, r0 = threadIdx.x / 32 * 4 * TR + threadIdx.x % 32 / 8;
  const int d = int(p.d);
  const int n_th = int(blockIdx.x / unsigned(p.Hq));
  const Work& work = list.work[n_th];
  if (work.tile < 0) return;  // the host counts tiles that may be needed
  const std::int64_t b = 0, h = blockIdx.x % unsigned(p.Hq), hk = p.key_head(h), all_queries = p.Nq;
  enter(work, p, t);
  const int i0 = work.tile * Br;
  const int rows = min(Br, work.Nq - i0);
  const SequenceMask mask(work, p.causal);
  const auto K = t.K.rows(b, hk, p.Nk, d), V = t.V.rows(b, hk, p.Nk, d);

  load<Tile, Br>(Qi, t.Q.rows(b, h, p.Nq, d), i0, rows, vectorised);
  load<Tile, Br>(dOi, t.dO.rows(b, h, p.Nq, d), i0, rows, vectorised);
  __syncthreads();  // both tiles are complete
  float L[TR], D_i[TR];
  for (int i = 0; i < TR; ++i) {
    const int r = min(r0 + 4 * i, rows - 1);
    L[i] = t.LSE[h * all_queries + i0 + r];
    D_i[i] = D_rows[h * all_queries + work.q0 + i0 + r];
  }

  float4 dQ[TR][Tile::columns];
  clear<Tile>(dQ);
  const int end = mask.visible_keys(i0 + rows - 1);
  for (int j0 = 0; j0 < end; j0 += Bc) {
    const int cols = min(Bc, end - j0);
    __syncthreads();  // K_j of the tile before is no longer read
    load<Tile, Bc>(KVj, V, j0, cols, vectorised);
    __syncthreads();  // V_j is complete

    // (3) dP_ij = dO_i V_j^T
    float dP[TR][TK], S[TR][TK];
    product<Tile>(dP, dOi, KVj, r0);

    __syncthreads();  // V_j is no longer read
    load<Tile, Bc>(KVj, K, j0, cols, vectorised);
    __syncthreads();  // K_j is complete

    // (2) P_ij = exp(scale Q_i K_j^T - L_i), 0 where row i does not see j;  (4) dS = P (dP - D)
    product<Tile>(S, Qi, KVj, r0);
    const bool full = mask.visible_keys(i0) >= j0 + Bc;
#pragma unroll
    for (int i = 0; i < TR; ++i) {
      const int n = L[i] == -INFINITY ? 0  // a row without any weight
                    : full            ? Bc
                                      : mask.visible_keys(i0 + min(r0 + 4 * i, rows - 1)) - j0;
      for (int j = 0; j < TK; ++j) {
        const float P = tx + 8 * j < n ? __expf(scale * S[i][j] - L[i]) : 0;
        S[i][j] = P == 0 ? 0 : P * (dP[i][j] - D_i[i]);
      }
    }

    // (5) dQ_i += dS_ij K_j
    share<Tile>(dSij, S, r0);
    accumulate<Tile>(dQ, dSij, KVj, r0);
  }
  store<Tile>(t.dQ.rows(b, h, p.Nq, d), work.q0 + i0, rows, r0, scale, dQ, vectorised);
  // [end blank]
}
// [end quote]

template <class Tile>
void launch(const Problem& p, const Backward<float>& t, const List& list, float scale,
            const float* D_rows, cudaStream_t stream) {
  const auto dq = dq_kernel<Tile>;
  const std::size_t bytes = Tile::shared_bytes;
  allow_shared_memory(dq, bytes);
  const std::int64_t blocks = Side{false, Tile::rows}.most(p) * p.Hq;
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, list, scale, D_rows,
            aligned(p, t));
}

}  // namespace

template <>
int dq_tile<float>(std::int64_t d) {
  return with_tile(d, [](auto tile) { return decltype(tile)::rows; });
}

void launch_delta(const Problem& p, const Backward<float>& t, float* D, cudaStream_t stream) {
  const std::int64_t blocks = (p.Hq * p.Nq + warps - 1) / warps;
  FA_LAUNCH(delta_kernel, dim3(unsigned(blocks)), dim3(threads), 0, stream, p, t, D);
}

void launch_dq(const Problem& p, const Backward<float>& t, const List& list, float scale,
               const float* D, cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) { launch<decltype(tile)>(p, t, list, scale, D, stream); });
}

}  // namespace fa::packed
