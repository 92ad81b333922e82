// Stage 05's owner of dQ with dropout: what the forward has dropped has no gradient from O, but its
// score still changes l. Before it, the small kernel for D, which is dO . O as ever.
#include "06_optimized/beyond/dropout/tile.cuh"

namespace fa::dropout {
namespace {

// (1) D_i = dO_i . O_i, a warp per row
__global__ void delta_kernel(Problem p, Backward<float> t, float* D) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= p.B * p.Hq * p.Nq) return;
  const std::int64_t head = row / p.Nq, i = row % p.Nq, b = head / p.Hq, h = head % p.Hq;
  float sum = 0;
  for (int x = lane; x < p.d; x += 32) sum += t.dO.at(b, h, i)[x] * t.O.at(b, h, i)[x];
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
  if (lane == 0) D[row] = sum;
}

// [quote kernel]
template <class Tile>
__global__ void __launch_bounds__(threads, 2)
    dq_kernel(Problem p, Draw draw, Backward<float> t, float scale, const float* D_rows,
              bool vectorised) {
  // [blank]
  constexpr int TR = Tile::TR, TK = Tile::TK, Br = Tile::rows, Bc = Tile::cols;
  float* Qi = dynamic_shared<float>();   // [Br, pitch]
  float* dOi = Qi + Br * Tile::pitch;    // [Br, pitch]
  float* KVj = dOi + Br * Tile::pitch;   // [Bc, pitch]: first V_j, then K_j
  float* dSij = KVj + Bc * Tile::pitch;  // [Br, score_pitch]

  const int tx = threadIdx.x % 8, r0 = threadIdx.x / 32 * 4 * TR + threadIdx.x % 32 / 8;
  const int d = int(p.d);
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const Keep keep(draw, head);
  const auto K = t.K.rows(b, hk, p.Nk, d), V = t.V.rows(b, hk, p.Nk, d);

  load<Tile, Br>(Qi, t.Q.rows(b, h, p.Nq, d), i0, rows, vectorised);
  load<Tile, Br>(dOi, t.dO.rows(b, h, p.Nq, d), i0, rows, vectorised);
  __syncthreads();  // both tiles are complete
  float L[TR], D_i[TR];
  for (int i = 0; i < TR; ++i) {
    const int r = min(r0 + 4 * i, rows - 1);
    L[i] = t.LSE[head * p.Nq + i0 + r];
    D_i[i] = D_rows[head * p.Nq + i0 + r];
  }

  float4 dQ[TR][Tile::columns];
  clear<Tile>(dQ);
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const int cols = int(min(std::int64_t(Bc), end - j0));
    __syncthreads();  // K_j of the tile before is no longer read
    load<Tile, Bc>(KVj, V, j0, cols, vectorised);
    __syncthreads();  // V_j is complete

    // (3) dP_ij = dO_i V_j^T
    float dP[TR][TK], S[TR][TK];
    product<Tile>(dP, dOi, KVj, r0);

    __syncthreads();  // V_j is no longer read
    load<Tile, Bc>(KVj, K, j0, cols, vectorised);
    __syncthreads();  // K_j is complete

    // (2) P_ij = exp(scale Q_i K_j^T - L_i), 0 where row i does not see j
    // (4) dS = P (M dP / (1 - p) - D)
    product<Tile>(S, Qi, KVj, r0);
    const bool full = mask.visible_keys(i0) >= j0 + Bc;
#pragma unroll
    for (int i = 0; i < TR; ++i) {
      const int n = L[i] == -INFINITY ? 0  // a row without any weight
                    : full            ? Bc
                                      : int(mask.visible_keys(i0 + min(r0 + 4 * i, rows - 1)) - j0);
      for (int j = 0; j < TK; ++j) {
        const float P = tx + 8 * j < n ? __expf(scale * S[i][j] - L[i]) : 0;
        // [step 06.43 (4): dP is that of the kept weight, and of the factor before it (2 lines)]
        const bool kept = P != 0 && keep(i0 + r0 + 4 * i, j0 + tx + 8 * j);
        S[i][j] = P == 0 ? 0 : P * ((kept ? keep.factor * dP[i][j] : 0) - D_i[i]);
        // [end]
      }
    }

    // (5) dQ_i += dS_ij K_j
    share<Tile>(dSij, S, r0);
    accumulate<Tile>(dQ, dSij, KVj, r0);
  }
  store<Tile>(t.dQ.rows(b, h, p.Nq, d), i0, rows, r0, scale, dQ, vectorised);
  // [end blank]
}
// [end quote]

}  // namespace

void launch_dq(const Problem& p, const Draw& draw, const Backward<float>& t, float scale, float* D,
               cudaStream_t stream) {
  const std::int64_t rows = p.B * p.Hq * p.Nq;
  FA_LAUNCH(delta_kernel, dim3(unsigned((rows + warps - 1) / warps)), dim3(threads), 0, stream, p,
            t, D);
  with_tile(p.d, [&](auto tile) {
    using Sizes = decltype(tile);
    const auto dq = dq_kernel<Sizes>;
    const std::size_t bytes = Sizes::shared_bytes;
    allow_shared_memory(dq, bytes);
    const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Sizes::rows - 1) / Sizes::rows);
    FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, draw, t, scale, D,
              aligned(p, t));
  });
}

}  // namespace fa::dropout
