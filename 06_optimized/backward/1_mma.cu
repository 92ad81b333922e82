// Tensor cores, for the gradients. The two owners of stage 05 stay: one kernel has the rows of dQ,
// the other those of dK and dV, nobody else adds to them, and no atomics are needed. New are the
// instructions: all seven products are mma.sync, of operands in fp16 or bf16, summed in fp32.
//
//   a block     64 rows that it owns, 4 warps; 64 rows of the other side at a time come by
//   a warp      16 of the owned rows: its share of S and dP is 16 x 64, of each gradient 16 x d
//
// The owner of dK and dV computes S^T = K Q^T and dP^T = V dO^T: its rows are keys. So P^T and dS^T
// come out of a product just as the next one wants its left operand, as P does in forward/1_mma.cu,
// and never leave their thread. Stage 05 had to put both into shared memory.
//
// Here are the two kernels; the tiles and the products that both are made of are in 1_mma.cuh.
//
// What should change: the arithmetic, by more than ten: for 64 x 64 scores at d = 128 the tensor
// cores need 1792 cycles. What should limit it: shared memory, since rows of a power of two put 8
// of the lanes' reads into one bank: 32,768 cycles for the same, 39 TFLOP/s. Stage 05 reaches 22 in
// fp32. And each owner makes S and dP for itself, so that seven products do the work of five.
//
// Measured: 34 TFLOP/s, 32 with a causal mask.
#include "06_optimized/backward/1_mma.cuh"

namespace fa::optimized {
namespace {

using namespace mma_backward;

// The owner of dQ_i: it passes over the keys that its rows see.
template <int D, class T>
__global__ void __launch_bounds__(threads)
    mma_dq_kernel(Problem p, Backward<T> t, float scale, Passed passed) {
  T* Qi = dynamic_shared<T>();  // [Br, D]
  T* dOi = Qi + Br * D;         // [Br, D]
  T* Kj = dOi + Br * D;         // [Bc, D]
  T* Vj = Kj + Bc * D;          // [Bc, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0, r0 + 8
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, D), V = t.V.rows(b, hk, p.Nk, D);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  load<D>(Qi, t.Q.rows(b, h, p.Nq, D), i0, rows);
  load<D>(dOi, t.dO.rows(b, h, p.Nq, D), i0, rows);
  float LSE2[2], D_i[2];  // rows beyond the last have theirs too: they are padded
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    LSE2[i] = passed.LSE2[head * passed.rows + i0 + r0 + 8 * i];
    D_i[i] = passed.D[head * passed.rows + i0 + r0 + 8 * i];
  }

  float dQ[D / 8][4] = {};
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);  // the last row sees most
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const int cols = int(min(std::int64_t(Bc), end - j0));
    __syncthreads();  // K and V of the tile before are no longer read
    load<D>(Kj, K, j0, cols);
    load<D>(Vj, V, j0, cols);
    __syncthreads();  // both, and before the first tile Q_i and dO_i, are complete

    // S_ij = Q_i K_j^T;  dP_ij = dO_i V_j^T
    float S[8][4], dP[8][4];
    product<D>(S, Qi + warp_row * D, Kj);
    product<D>(dP, dOi + warp_row * D, Vj);

    // P_ij = 2^(c S_ij - LSE2_i), 0 where row i does not see key j;  dS_ij = P_ij (dP_ij - D_i)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t n = mask.visible_keys(i0 + r0 + 8 * i) - j0;  // keys from n on are hidden
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          const float P = ex2(fmaf(c, S[j][e], -LSE2[i]));
          dP[j][e] = 8 * j + x0 + e % 2 < n ? P * (dP[j][e] - D_i[i]) : 0;
        }
    }

    // dQ_i += dS_ij K_j
    accumulate<D>(dQ, dP, Kj);
  }
  store<D>(t.dQ.rows(b, h, p.Nq, D), i0, rows, r0, scale, dQ);
}

// The owner of dK_j and dV_j: it passes over the queries that see its keys, in all query heads of
// the group. In S^T and dP^T the rows are keys and the columns queries.
template <int D, class T>
__global__ void __launch_bounds__(threads)
    mma_dkv_kernel(Problem p, Backward<T> t, float scale, Passed passed) {
  // [blank]
  T* Kj = dynamic_shared<T>();  // [Bc, D]
  T* Vj = Kj + Bc * D;          // [Bc, D]
  T* Qi = Vj + Bc * D;          // [Br, D]
  T* dOi = Qi + Br * D;         // [Br, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0, r0 + 8
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const std::int64_t tiles = (p.Nk + Bc - 1) / Bc, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hkv, hk = head % p.Hkv, group = p.Hq / p.Hkv;
  const std::int64_t j0 = blockIdx.x % tiles * Bc;  // with a causal mask the first keys have most
  const int keys = int(min(std::int64_t(Bc), p.Nk - j0));
  const Mask mask(p, b);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  load<D>(Kj, t.K.rows(b, hk, p.Nk, D), j0, keys);
  load<D>(Vj, t.V.rows(b, hk, p.Nk, D), j0, keys);

  float dK[D / 8][4] = {}, dV[D / 8][4] = {};
  for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h) {
    const auto Q = t.Q.rows(b, h, p.Nq, D), dO = t.dO.rows(b, h, p.Nq, D);
    // No row before the first that sees key j0 sees any other key of the tile.
    for (std::int64_t i0 = mask.first_row(j0) / Br * Br; i0 < p.Nq; i0 += Br) {
      const int rows = int(min(std::int64_t(Br), p.Nq - i0));
      __syncthreads();  // [06.g] Q and dO of the tile before are no longer read
      load<D>(Qi, Q, i0, rows);
      load<D>(dOi, dO, i0, rows);
      __syncthreads();  // [06.h] both, and before the first tile K_j and V_j, are complete
      const float* LSE2 = passed.LSE2 + (b * p.Hq + h) * passed.rows + i0 + x0;
      const float* D_i = passed.D + (b * p.Hq + h) * passed.rows + i0 + x0;
      // Of the tile's queries, those before `from` do not see this thread's two keys.
      const std::int64_t from[2] = {mask.first_row(j0 + r0) - i0, mask.first_row(j0 + r0 + 8) - i0};

      // P_ij^T = 2^(c K_j Q_i^T - LSE2_i), 0 where row i does not see key j
      float P[8][4], dP[8][4];
      product<D>(P, Kj + warp_row * D, Qi);
      // [step 06.13: P^T in place of K Q^T, 0 where the query does not see the key (7 lines)]
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool visible = 8 * i + x0 + e % 2 >= from[e / 2];
          P[i][e] = visible ? ex2(fmaf(c, P[i][e], -LSE2[8 * i + e % 2])) : 0;
        }
      // [end]

      // dV_j += P_ij^T dO_i;  dP_ij^T = V_j dO_i^T
      // [step 06.14: the sum that P^T goes into, and the product that dS^T needs (2 lines)]
      accumulate<D>(dV, P, dOi);
      product<D>(dP, Vj + warp_row * D, dOi);
      // [end]

      // dS_ij = P_ij (dP_ij - D_i), and for a hidden pair 0, whatever dP is
      // [step 06.15: dS^T in place of dP^T (5 lines)]
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          dP[i][e] = P[i][e] == 0 ? 0 : P[i][e] * (dP[i][e] - D_i[8 * i + e % 2]);
      // [end]

      // dK_j += dS_ij^T Q_i
      // [step 06.16: the sum that dS^T goes into (1 line)]
      accumulate<D>(dK, dP, Qi);
      // [end]
    }
  }
  store<D>(t.dK.rows(b, hk, p.Nk, D), j0, keys, r0, scale, dK);
  store<D>(t.dV.rows(b, hk, p.Nk, D), j0, keys, r0, 1, dV);
  // [end blank]
}

template <int D, class T>
void launch(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
            cudaStream_t stream) {
  static_assert(shared_bytes<D> <= 99 * 1024);  // what 8.6 and 8.9 have; 8.0 and 9.0 have more
  const auto dq = mma_dq_kernel<D, T>;
  const auto dkv = mma_dkv_kernel<D, T>;
  const std::int64_t dq_blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  const std::int64_t dkv_blocks = p.B * p.Hkv * ((p.Nk + Bc - 1) / Bc);
  const dim3 block(threads);
  if (dq_blocks > 0) {
    launch_before(p, t, passed, stream);
    allow_shared_memory(dq, shared_bytes<D>);
    FA_LAUNCH(dq, dim3(unsigned(dq_blocks)), block, shared_bytes<D>, stream, p, t, scale, passed);
  }
  if (dkv_blocks > 0) {
    allow_shared_memory(dkv, shared_bytes<D>);
    FA_LAUNCH(dkv, dim3(unsigned(dkv_blocks)), block, shared_bytes<D>, stream, p, t, scale, passed);
  }
}

}  // namespace

template <class T>
void launch_backward_mma(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                         cudaStream_t stream) {
  (p.d == 64 ? launch<64, T> : launch<128, T>)(p, t, scale, passed, stream);
}
template void launch_backward_mma(const Problem&, const Backward<__half>&, float, const Passed&,
                                  cudaStream_t);
template void launch_backward_mma(const Problem&, const Backward<__nv_bfloat16>&, float,
                                  const Passed&, cudaStream_t);

}  // namespace fa::optimized
