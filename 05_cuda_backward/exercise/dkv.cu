// Practice 05, level 1, of dkv.cu. Keep the marks; ./learn practice 05
// The owner of dK and dV: a block per tile of keys, a loop over the tiles of queries that see it,
// in all query heads of the group. Everything is transposed: rows of a tile of scores are keys now.
//
// With atomic_dq the same kernel also adds what it knows of dQ: dS is there, and one product more
// replaces the three of the other kernel. But the rows of dQ belong to nobody then: every block
// adds to them, in an order that changes from run to run, and so do the last bits of the sum.
#include "05_cuda_backward/tile.cuh"

namespace fa::cuda_backward {
namespace {

// dQ_i += scale dS_ij K_j, into memory that all blocks add to.
template <class Tile>
__device__ void add_dq(const Rows<float>& dQ, std::int64_t i0, int rows, const float* dS_t,
                       const float* Kj, float scale) {
  constexpr int TQ = Tile::cols / (4 * warps);  // queries of a thread
  const int tx = threadIdx.x % 8, q0 = threadIdx.x / 32 * 4 * TQ + threadIdx.x % 32 / 8;
  float4 sum[TQ][Tile::columns];
#pragma unroll
  for (int i = 0; i < TQ; ++i)
#pragma unroll
    for (int y = 0; y < Tile::columns; ++y) sum[i][y] = make_float4(0, 0, 0, 0);
#pragma unroll 2
  for (int c = 0; c < Tile::rows; ++c) {
    float w[TQ];
#pragma unroll
    for (int i = 0; i < TQ; ++i) w[i] = dS_t[c * Tile::score_pitch + q0 + 4 * i];
#pragma unroll
    for (int y = 0; y < Tile::columns; ++y) {
      const float4 k = load4(Kj + c * Tile::pitch + 4 * tx + 32 * y);
#pragma unroll
      for (int i = 0; i < TQ; ++i)
        sum[i][y] = make_float4(sum[i][y].x + w[i] * k.x, sum[i][y].y + w[i] * k.y,
                                sum[i][y].z + w[i] * k.z, sum[i][y].w + w[i] * k.w);
    }
  }
#pragma unroll
  for (int i = 0; i < TQ; ++i) {
    if (q0 + 4 * i >= rows) continue;
#pragma unroll
    for (int y = 0; y < Tile::columns; ++y) {
      const int x = 4 * tx + 32 * y;
      float* to = dQ[i0 + q0 + 4 * i] + x;
      if (x < dQ.cols) atomicAdd(to, scale * sum[i][y].x);
      if (x + 1 < dQ.cols) atomicAdd(to + 1, scale * sum[i][y].y);
      if (x + 2 < dQ.cols) atomicAdd(to + 2, scale * sum[i][y].z);
      if (x + 3 < dQ.cols) atomicAdd(to + 3, scale * sum[i][y].w);
    }
  }
}

// What the atomics add to.
__global__ void clear_dq_kernel(Problem p, View<float> dQ) {
  const std::int64_t row = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= p.B * p.Hq * p.Nq) return;
  const std::int64_t head = row / p.Nq;
  for (int x = threadIdx.x % 32; x < p.d; x += 32)
    dQ.at(head / p.Hq, head % p.Hq, row % p.Nq)[x] = 0;
}

template <class Tile, bool atomic_dq>
__global__ void __launch_bounds__(threads, Tile::D <= 64 ? 3 : 2)
    dkv_kernel(Problem p, Backward<float> t, float scale, Delta delta, const float* D_rows,
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
  load<Tile, Bc>(Kj, t.K.rows(b, hk, p.Nk, d), j0, seen, vectorised);
  load<Tile, Bc>(Vj, t.V.rows(b, hk, p.Nk, d), j0, seen, vectorised);
  float4 dK[TR][Tile::columns], dV[TR][Tile::columns];
  clear<Tile>(dK);
  clear<Tile>(dV);

  for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h) {
    const auto Q = t.Q.rows(b, h, p.Nq, d), dO = t.dO.rows(b, h, p.Nq, d);
    const std::int64_t rows_before = (b * p.Hq + h) * p.Nq;
    // Rows before the first that sees key j0 see nothing of this tile.
    for (std::int64_t i0 = mask.first_row(j0); i0 < p.Nq; i0 += Br) {
      const int rows = int(min(std::int64_t(Br), p.Nq - i0));
      __syncthreads();  // Q_i, L and D of the tile before are no longer read
      load<Tile, Br>(QdOi, Q, i0, rows, vectorised);
      if (int(threadIdx.x) < rows) {
        L[threadIdx.x] = t.LSE[rows_before + i0 + threadIdx.x];
        if (delta != Delta::in_loop) D_i[threadIdx.x] = D_rows[rows_before + i0 + threadIdx.x];
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
        const std::int64_t seen_by_r = mask.visible_keys(i0 + min(r, rows - 1)) - j0;
        const int n = none   ? 0
                      : full ? Bc
                             : int(min(max(seen_by_r, std::int64_t(0)), std::int64_t(Bc)));
        const float L_i = n > 0 ? L[r] : 0;
#pragma unroll
        for (int i = 0; i < TR; ++i) P[i][c] = r0 + 4 * i < n ? __expf(scale * P[i][c] - L_i) : 0;
      }
      share<Tile>(Wij, P, r0);

      __syncthreads();  // Q_i is no longer read
      load<Tile, Br>(QdOi, dO, i0, rows, vectorised);
      __syncthreads();  // dO_i is complete
      if (delta == Delta::in_loop) {
        row_deltas<Tile>(D_i, QdOi, t.O.rows(b, h, p.Nq, d), i0, rows);
        __syncthreads();  // the deltas are there, for all warps
      }

      // (5) dV_j += P_ij^T dO_i;  (3) dP^T = V_j dO_i^T;  (4) dS = P (dP - D)
      // [step 05.6: the product for dV, and, in dS, the one that gives dP (2 lines)]
      // TODO
      // [end]
#pragma unroll
      for (int c = 0; c < TK; ++c) {
        const float delta_i = tx + 8 * c < rows ? D_i[tx + 8 * c] : 0;
        // [step 05.7: from dP to dS, for the TR keys of this column (2 lines)]
        // TODO
        // [end]
      }
      share<Tile>(Wij, dS, r0);

      __syncthreads();  // dO_i is no longer read
      load<Tile, Br>(QdOi, Q, i0, rows, vectorised);
      __syncthreads();  // Q_i is complete, for the second time
      // (5) dK_j += dS_ij^T Q_i
      accumulate<Tile>(dK, Wij, QdOi, r0);
      if constexpr (atomic_dq) add_dq<Tile>(t.dQ.rows(b, h, p.Nq, d), i0, rows, Wij, Kj, scale);
    }
  }
  store<Tile>(t.dK.rows(b, hk, p.Nk, d), j0, keys, r0, scale, dK, vectorised);
  store<Tile>(t.dV.rows(b, hk, p.Nk, d), j0, keys, r0, 1, dV, vectorised);
}

template <class Tile, bool atomic_dq>
void launch(const Problem& p, const Backward<float>& t, float scale, Delta delta,
            const float* D_rows, cudaStream_t stream) {
  const auto dkv = dkv_kernel<Tile, atomic_dq>;
  const std::size_t bytes = Tile::shared_bytes;
  allow_shared_memory(dkv, bytes);
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Tile::rows - 1) / Tile::rows);
  FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, scale, delta, D_rows,
            aligned(p, t));
}

}  // namespace

void launch_dkv(const Problem& p, const Backward<float>& t, float scale, const Options& options,
                const float* D) {
  with_tile(p.d, options.tiles == Tiles::small, [&](auto tile) {
    launch<decltype(tile), false>(p, t, scale, options.delta, D, options.stream);
  });
}

void launch_atomic(const Problem& p, const Backward<float>& t, float scale, const Options& options,
                   const float* D) {
  const std::int64_t blocks = (p.B * p.Hq * p.Nq + warps - 1) / warps;
  if (blocks > 0)
    FA_LAUNCH(clear_dq_kernel, dim3(unsigned(blocks)), dim3(threads), 0, options.stream, p, t.dQ);
  if (p.Nk == 0) return;
  if (options.tiles == Tiles::fast) return launch_fast_atomic(p, t, scale, options, D);
  with_tile(p.d, options.tiles == Tiles::small, [&](auto tile) {
    launch<decltype(tile), true>(p, t, scale, Delta::own_kernel, D, options.stream);
  });
}

}  // namespace fa::cuda_backward
