// Stage 05's owner of dQ, with changed scores: P is made of the changed score, and dS is multiplied
// by the derivative of the change. Before it, the small kernel for D.
#include "06_optimized/beyond/scores/tile.cuh"

namespace fa::scores {
namespace {

using namespace fp32;

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
    dq_kernel(Problem p, Backward<float> t, Change<float> change, float scale, const float* D_rows,
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
  const auto K = t.K.rows(b, hk, p.Nk, d), V = t.V.rows(b, hk, p.Nk, d);

  const Rotary& rotary = change.rotary;
  const Head<with_all, float> of_head(change, b, h);

  load_turned<Tile, Br>(Qi, t.Q.rows(b, h, p.Nq, d), i0, rows, rotary, change.offset);
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
    load_turned<Tile, Bc>(KVj, K, j0, cols, rotary, 0);
    __syncthreads();  // K_j is complete

    // (2) P_ij = exp(s - L_i), 0 where row i does not see j, with s = changed(scale Q_i K_j^T);
    // (4) dS = P (dP - D) times the derivative of changed, 1 - tanh^2 (scale Q_i K_j^T / cap)
    product<Tile>(S, Qi, KVj, r0);
    const bool full = mask.visible_keys(i0) >= j0 + Bc;
#pragma unroll
    for (int i = 0; i < TR; ++i) {
      const int n = L[i] == -INFINITY ? 0  // a row without any weight
                    : full            ? Bc
                                      : int(mask.visible_keys(i0 + min(r0 + 4 * i, rows - 1)) - j0);
      const int query = int(i0) + min(r0 + 4 * i, rows - 1);
      const Line<with_all, float> line(change, of_head, query, int(j0));
      for (int j = 0; j < TK; ++j) {
        const int x = tx + 8 * j;
        const float s = line.changed(scale * S[i][j], x, line.bias_at(x, n));
        const float P = x < n ? __expf(s - L[i]) : 0;
        float derivative = 1;
        // [step 06.38 (4): how much the capped score grows with the one before (1 line)]
        if (change.cap > 0) derivative -= powf(tanhf(scale * S[i][j] / change.cap), 2);
        // [end]
        S[i][j] = P == 0 ? 0 : P * (dP[i][j] - D_i[i]) * derivative;
      }
    }

    // (5) dQ_i += dS_ij K_j
    share<Tile>(dSij, S, r0);
    accumulate<Tile>(dQ, dSij, KVj, r0);
  }
  store_turned_back<Tile>(t.dQ.rows(b, h, p.Nq, d), i0, rows, r0, scale, dQ, Qi, rotary,
                          change.offset);
  // [end blank]
}
// [end quote]

template <class Tile>
void launch(const Problem& p, const Backward<float>& t, const Change<float>& change, float scale,
            const float* D_rows, cudaStream_t stream) {
  const auto dq = dq_kernel<Tile>;
  const std::size_t bytes = Tile::shared_bytes;
  allow_shared_memory(dq, bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Tile::rows - 1) / Tile::rows);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, change, scale, D_rows,
            aligned(p, t));
}

}  // namespace

void launch_delta(const Problem& p, const Backward<float>& t, float* D, cudaStream_t stream) {
  const std::int64_t blocks = (p.B * p.Hq * p.Nq + warps - 1) / warps;
  FA_LAUNCH(delta_kernel, dim3(unsigned(blocks)), dim3(threads), 0, stream, p, t, D);
}

void launch_dq(const Problem& p, const Backward<float>& t, const Change<float>& change, float scale,
               const float* D, cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) { launch<decltype(tile)>(p, t, change, scale, D, stream); });
}

}  // namespace fa::scores
