// The forward's rungs 2 to 4 at once: cp.async, the swizzle, ldmatrix, more rows a warp; and the
// whole contract of this course. The owners and their products are those of 1_mma.cu.
//
//   ldmatrix             reads K's tile by rows for S = Q K^T, and transposed for dQ += dS K; so it
//                        does Q's and dO's for dK and dV. No product needs a second copy of a tile
//   32 rows a warp       where the sums leave room: every fragment of the passing tiles is
//                        multiplied twice. dQ: d <= 128. dK with dV: d <= 64
//   dP before S          then V_j is free while S and dQ are computed, K_j while dP of the next
//                        tile is: with one buffer each, the next tile is always on its way
//   two Q_i              that is not enough where dV too reads dO_i: there Q has a second buffer
//   two loops            tiles that some row sees in part, with the mask; then all others without
//   d > 128              dK and dV of a warp's keys do not fit into its registers together. The
//                        owner runs twice, for one of them at a time: S is computed once more
//
//   owner of dQ        on its way       owner of dK and dV   on its way
//   dP = dO V^T        K_j              dP^T = V dO^T        Q_i+1
//   S = Q K^T          V_j+1            S^T = K Q^T          Q_i+1
//   dQ += dS K         V_j+1            dV += P^T dO         Q_i+1
//                                       dK += dS^T Q         Q_i+1, dO_i+1
//
// Here is the owner of dQ; that of dK and dV is in 2_swizzle_keys.cu.
//
// What should change: reads of shared memory, from 32,768 cycles for 64 x 64 scores (d = 128) to
// 3584, and waits are hidden by the copies and by the second block of the SM: five to seven times
// the speed. What should limit it: mma.sync, as in the forward, and seven products where five would
// do.
//
// Measured: 217 TFLOP/s after 34; with a causal mask 195 after 32.
#include "06_optimized/backward/2_swizzle.cuh"

namespace fa::optimized {
namespace swizzle_backward {
namespace {

// For head dimensions of at most D. groups: of 16 rows that a warp owns.
template <int D>
struct DqTile {
  static constexpr int groups = D <= 128 ? 2 : 1;
  static constexpr int Br = 16 * groups * warps, Bc = D <= 64 ? 64 : 32;
  static constexpr std::size_t shared_bytes = (2 * Br + 2 * Bc) * D * 2;  // Q_i, dO_i, K_j, V_j
};

// The owner of dQ_i: it passes over the keys that its rows see.
template <int D, class T>
__global__ void __launch_bounds__(threads, 2)
    swizzle_dq_kernel(Problem p, Backward<T> t, float scale, Passed passed, bool aligned) {
  using Sizes = DqTile<D>;
  constexpr int groups = Sizes::groups, Br = Sizes::Br, Bc = Sizes::Bc;
  T* const Qi = dynamic_shared<T>();  // [Br, D]; at the end, dQ_i
  T* const dOi = Qi + Br * D;         // [Br, D]
  T* const Kj = dOi + Br * D;         // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, p.d), V = t.V.rows(b, hk, p.Nk, p.d);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  float LSE2[2 * groups], D_i[2 * groups];  // rows beyond the last have theirs too: padding
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const std::int64_t row = head * passed.rows + i0 + r0 + 8 * i;
    LSE2[i] = passed.LSE2[row];
    D_i[i] = passed.D[row];
  }

  // The last row of the tile sees most, the first one least: no row sees keys from `end` on, all
  // rows see those below `full`.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  const std::int64_t full = mask.visible_keys(i0) / Bc * Bc;
  std::int64_t j0 = (end + Bc - 1) / Bc * Bc - Bc;  // the last tile's first key; none: negative
  if (end > 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Br>(dOi, t.dO.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Bc>(Vj, V, j0, int(end - j0), aligned);
    cp_async_commit();
  }

  float dQ[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // V_j (at first Q_i and dO_i too) is complete, K before it no longer read
    load<D, Bc>(Kj, K, j0, masked ? int(min(std::int64_t(Bc), end - j0)) : Bc, aligned);
    cp_async_commit();

    // dP_ij = dO_i V_j^T
    float S[groups][Bc / 8][4], dP[groups][Bc / 8][4];
    product<D, groups, Bc>(dP, dOi + warp_row * D, Vj);

    cp_async_wait<0>();
    __syncthreads();  // K_j is complete, and V_j no longer read
    if (j0 > 0) load<D, Bc>(Vj, V, j0 - Bc, Bc, aligned);
    cp_async_commit();

    // P_ij = 2^(c Q_i K_j^T - LSE2_i);  dS_ij = P_ij (dP_ij - D_i), 0 where row i does not see j
    product<D, groups, Bc>(S, Qi + warp_row * D, Kj);
#pragma unroll
    for (int i = 0; i < 2 * groups; ++i) {
      // Of this tile the row sees keys below n.
      int n = Bc;
      if constexpr (masked) {
        const std::int64_t visible = mask.visible_keys(i0 + r0 + 8 * i) - j0;
        n = int(max(std::int64_t(0), min(std::int64_t(Bc), visible)));
      }
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = S[i / 2][j][i % 2 * 2 + e];
          const float P = ex2(fmaf(c, s, -LSE2[i]));
          s = P * (dP[i / 2][j][i % 2 * 2 + e] - D_i[i]);
          if (masked && 8 * j + x0 + e >= n) s = 0;
        }
    }

    // dQ_i += dS_ij K_j
    std::uint32_t dS[Bc / 16][groups][4];
    round<T>(dS, S);
    accumulate<D>(dQ, dS, Kj);
  };
  for (; j0 >= full; j0 -= Bc) step(std::true_type());
  for (; j0 >= 0; j0 -= Bc) step(std::false_type());

  store<D>(t.dQ.rows(b, h, p.Nq, p.d), i0, rows, scale, dQ, Qi, aligned);
}

template <int D, class T>
void launch_dq(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
               cudaStream_t stream) {
  const auto dq = swizzle_dq_kernel<D, T>;
  constexpr std::size_t bytes = DqTile<D>::shared_bytes;
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + DqTile<D>::Br - 1) / DqTile<D>::Br);
  if (blocks == 0) return;
  allow_shared_memory(dq, bytes);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, scale, passed,
            all_in_16_bytes(t));
}

}  // namespace
}  // namespace swizzle_backward

template <class T>
void launch_backward_swizzle(const Problem& p, const Backward<T>& t, float scale,
                             const Passed& passed, cudaStream_t stream) {
  using namespace swizzle_backward;
  if (p.B * p.Hq * p.Nq > 0) launch_before(p, t, passed, stream);
  (p.d <= 64    ? launch_dq<64, T>
   : p.d <= 128 ? launch_dq<128, T>
                : launch_dq<256, T>)(p, t, scale, passed, stream);
  launch_swizzle_dkv(p, t, scale, passed, stream);
}
template void launch_backward_swizzle(const Problem&, const Backward<__half>&, float, const Passed&,
                                      cudaStream_t);
template void launch_backward_swizzle(const Problem&, const Backward<__nv_bfloat16>&, float,
                                      const Passed&, cudaStream_t);

}  // namespace fa::optimized
