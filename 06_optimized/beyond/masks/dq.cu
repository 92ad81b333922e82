// Stage 05's owner of dQ with the forward's two questions: the same tiles of keys are visited, the
// same pairs are seen. Before it the small kernel for D; after it the one for the sinks.
#include "06_optimized/beyond/masks/tile.cuh"

namespace fa::masks {
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
    dq_kernel(Problem p, Pattern pattern, Backward<float> t, float scale, const float* D_rows,
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
  const Reach reach(p, pattern, b);
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
  const int first = int(i0), last = first + rows - 1;
  Tiles<Bc, true> tiles_of_keys(reach.keys_of(first, last));
  tiles_of_keys.start(pattern.keys, b, h, first / int(block));
  for (; tiles_of_keys.tile >= 0; tiles_of_keys.next()) {
    const int j0 = tiles_of_keys.tile * Bc, cols = min(Bc, reach.length - j0);
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
    const bool whole = reach.all_see(first, last, j0, j0 + Bc - 1);
#pragma unroll
    for (int i = 0; i < TR; ++i) {
      const int query = first + min(r0 + 4 * i, rows - 1);
      for (int j = 0; j < TK; ++j) {
        const bool hidden =
            L[i] == -INFINITY || (!whole && !reach.sees(query, j0 + tx + 8 * j));  // no weight
        const float P = hidden ? 0 : __expf(scale * S[i][j] - L[i]);
        S[i][j] = P == 0 ? 0 : P * (dP[i][j] - D_i[i]);
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

// (6) dsink_h = - sum_bi exp(sink_h - L_i) D_i: a sink has no value, so its dP is 0. A block for
// each head, in an order that is always the same; a large one, since it waits for memory.
constexpr int many = 1024;
__global__ void __launch_bounds__(many)
    dsinks_kernel(Problem p, const float* sinks, const float* LSE, Statistics s, float* dsinks) {
  // [blank]
  __shared__ float sums[many];
  const std::int64_t h = blockIdx.x;
  const float sink = sinks[h];
  float sum = 0;
  for (std::int64_t head = h; head < p.B * p.Hq; head += p.Hq)
    for (std::int64_t i = threadIdx.x; i < p.Nq; i += many) {
      // [step 06.35 (6): what row i adds to the sink's gradient; L may be -infinity (2 lines)]
      const float L = LSE[head * p.Nq + i];
      if (L != -INFINITY) sum -= expf(sink - L) * s.D[head * s.rows + i];
      // [end]
    }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = many / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) dsinks[h] = sums[0];
  // [end blank]
}

}  // namespace

void launch_dq(const Problem& p, const Pattern& pattern, const Backward<float>& t, float scale,
               const Statistics& s, cudaStream_t stream) {
  const std::int64_t rows = p.B * p.Hq * p.Nq;
  FA_LAUNCH(delta_kernel, dim3(unsigned((rows + warps - 1) / warps)), dim3(threads), 0, stream, p,
            t, s.D);
  with_tile(p.d, [&](auto tile) {
    using Sizes = decltype(tile);
    const auto dq = dq_kernel<Sizes>;
    const std::size_t bytes = Sizes::shared_bytes;
    allow_shared_memory(dq, bytes);
    const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Sizes::rows - 1) / Sizes::rows);
    FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, pattern, t, scale, s.D,
              aligned(p, t));
  });
}

void launch_dsinks(const Problem& p, const Pattern& pattern, const float* LSE, const Statistics& s,
                   float* dsinks, cudaStream_t stream) {
  FA_LAUNCH(dsinks_kernel, dim3(unsigned(p.Hq)), dim3(many), 0, stream, p, pattern.sinks, LSE, s,
            dsinks);
}

}  // namespace fa::masks
