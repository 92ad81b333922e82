// Rung 2 of the backward, backward/2_swizzle.cu, for sequences of different lengths: a block takes
// its tile from a list and enters the tile's sequence. dK and dV: swizzle_keys.cu.
#include "06_optimized/backward/2_swizzle.cuh"
#include "06_optimized/beyond/packed/sequence.cuh"

namespace fa::packed {
namespace {

using namespace optimized;
using namespace optimized::swizzle_backward;

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
    swizzle_dq_kernel(Problem p, Backward<T> t, List list, float scale, Passed passed,
                      bool aligned) {
  using Sizes = DqTile<D>;
  constexpr int groups = Sizes::groups, Br = Sizes::Br, Bc = Sizes::Bc;
  T* const Qi = dynamic_shared<T>();  // [Br, D]; at the end, dQ_i
  T* const dOi = Qi + Br * D;         // [Br, D]
  T* const Kj = dOi + Br * D;         // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const int n_th = int(blockIdx.x / unsigned(p.Hq));
  const Work& work = list.work[n_th];
  if (work.tile < 0) return;  // the host counts tiles that may be needed
  const std::int64_t b = 0, h = blockIdx.x % unsigned(p.Hq), hk = p.key_head(h);
  enter(work, p, t);
  const int i0 = work.tile * Br;
  const int rows = min(Br, work.Nq - i0);
  const SequenceMask mask(work, p.causal);
  const auto K = t.K.rows(b, hk, p.Nk, p.d), V = t.V.rows(b, hk, p.Nk, p.d);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  float LSE2[2 * groups], D_i[2 * groups];  // rows beyond the last have theirs too: padding
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const std::int64_t row = h * passed.rows + work.padded_row() + i0 + r0 + 8 * i;
    LSE2[i] = passed.LSE2[row];
    D_i[i] = passed.D[row];
  }

  // The last row of the tile sees most, the first one least: no row sees keys from `end` on, all
  // rows see those below `full`.
  const int end = mask.visible_keys(i0 + rows - 1);
  const int full = mask.visible_keys(i0) / Bc * Bc;
  int j0 = (end + Bc - 1) / Bc * Bc - Bc;  // the last tile's first key; none: negative
  if (end > 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Br>(dOi, t.dO.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Bc>(Vj, V, j0, end - j0, aligned);
    cp_async_commit();
  }

  float dQ[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // V_j (at first Q_i and dO_i too) is complete, K before it no longer read
    load<D, Bc>(Kj, K, j0, masked ? min(Bc, end - j0) : Bc, aligned);
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
        n = max(0, min(Bc, mask.visible_keys(i0 + r0 + 8 * i) - j0));
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

  store<D>(t.dQ.rows(b, h, p.Nq, p.d), work.q0 + i0, rows, scale, dQ, Qi, aligned);
}

template <int D, class T>
void launch_dq(const Problem& p, const Backward<T>& t, const List& list, float scale,
               const Passed& passed, cudaStream_t stream) {
  const auto dq = swizzle_dq_kernel<D, T>;
  constexpr std::size_t bytes = DqTile<D>::shared_bytes;
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = Side{false, DqTile<D>::Br}.most(p) * p.Hq;
  allow_shared_memory(dq, bytes);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, list, scale, passed,
            all_in_16_bytes(t));
}

}  // namespace

template <class T>
int dq_tile(std::int64_t d) {
  return d > 128 ? DqTile<256>::Br : DqTile<128>::Br;
}
template int dq_tile<__half>(std::int64_t);
template int dq_tile<__nv_bfloat16>(std::int64_t);

template <class T>
void launch_swizzle_dq(const Problem& p, const Backward<T>& t, const List& list, float scale,
                       const Passed& passed, cudaStream_t stream) {
  (p.d <= 64    ? launch_dq<64, T>
   : p.d <= 128 ? launch_dq<128, T>
                : launch_dq<256, T>)(p, t, list, scale, passed, stream);
}
template void launch_swizzle_dq(const Problem&, const Backward<__half>&, const List&, float,
                                const Passed&, cudaStream_t);
template void launch_swizzle_dq(const Problem&, const Backward<__nv_bfloat16>&, const List&, float,
                                const Passed&, cudaStream_t);

}  // namespace fa::packed
