// The backward's owner of dQ, of 2_swizzle.cu, with changed scores: P is made of the changed score,
// and dS is multiplied by the change's derivative, which is 1 but for a soft cap. A slope and a
// bias have none by q and k. Q and K are turned as they come, dQ is turned back as it goes.
#include "06_optimized/backward/2_swizzle.cuh"
#include "06_optimized/beyond/scores/change.cuh"

namespace fa::scores {
namespace {

using namespace optimized;
using namespace optimized::swizzle_backward;

// For head dimensions of at most D. groups: of 16 rows that a warp owns.
template <int D>
struct DqTile {
  static constexpr int groups = D <= 128 ? 2 : 1;
  static constexpr int Br = 16 * groups * warps, Bc = D <= 64 ? 64 : 32;
  // Q_i, dO_i, K_j, V_j, and a tile of the bias
  static constexpr std::size_t shared_bytes = (2 * Br + 2 * Bc) * D * 2, bias_bytes = Br * Bc * 2;
};

// The owner of dQ_i: it passes over the keys that its rows see.
template <int D, int built, class T>
__global__ void __launch_bounds__(threads, 2)
    swizzle_dq_kernel(Problem p, Backward<T> t, Change<T> change, float scale, Passed passed,
                      bool aligned) {
  using Sizes = DqTile<D>;
  constexpr int groups = Sizes::groups, Br = Sizes::Br, Bc = Sizes::Bc;
  T* const Qi = dynamic_shared<T>();  // [Br, D]; at the end, dQ_i
  T* const dOi = Qi + Br * D;         // [Br, D]
  T* const Kj = dOi + Br * D;         // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]
  T* const Bij = Vj + Bc * D;         // [Br, Bc], if biases come in tiles
  constexpr bool tiles_of_bias = built & in_tiles;

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
  const Head<built, T> of_head(change, b, h);

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
    bring<built, D, Br>(Qi, t.Q.rows(b, h, p.Nq, p.d), i0, rows, change, change.offset, aligned);
    load<D, Br>(dOi, t.dO.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Bc>(Vj, V, j0, int(end - j0), aligned);
    cp_async_commit();
  }

  float dQ[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // V_j (at first Q_i and dO_i too) is complete, K before it no longer read
    bring<built, D, Bc>(Kj, K, j0, masked ? int(min(std::int64_t(Bc), end - j0)) : Bc, change, 0,
                        aligned);
    if constexpr (tiles_of_bias)
      load_bias<Br, Bc>(Bij, change.bias.rows(b, h, p.Nq, p.Nk), int(i0), int(j0));
    cp_async_commit();

    // dP_ij = dO_i V_j^T
    float S[groups][Bc / 8][4], dP[groups][Bc / 8][4];
    product<D, groups, Bc>(dP, dOi + warp_row * D, Vj);

    cp_async_wait<0>();
    __syncthreads();  // K_j and B_ij are complete, and V_j no longer read
    if (j0 > 0) load<D, Bc>(Vj, V, j0 - Bc, Bc, aligned);
    cp_async_commit();

    // P_ij = 2^(c Q_i K_j^T - LSE2_i);  dS_ij = P_ij (dP_ij - D_i), 0 where row i does not see j
    start_sums(S, of_head, float(int(i0) + r0 + change.offset - int(j0) - x0));
    add_product<D, groups, Bc>(S, Qi + warp_row * D, Kj);
    if constexpr (tiles_of_bias) add_bias<Bc>(S, Bij, warp_row, change.unit);
#pragma unroll
    for (int i = 0; i < 2 * groups; ++i) {
      // Of this tile the row sees keys below n.
      int n = Bc;
      if constexpr (masked) {
        const std::int64_t visible = mask.visible_keys(i0 + r0 + 8 * i) - j0;
        n = int(max(std::int64_t(0), min(std::int64_t(Bc), visible)));
      }
      const int query = min(int(i0) + r0 + 8 * i, int(p.Nq) - 1);
      const Line<built, T> line(change, of_head, query, int(j0) + x0);
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        const float2 bias = line.two_biases(8 * j, n - x0);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = S[i / 2][j][i % 2 * 2 + e];
          const float changed = line.changed(s, 8 * j + e, e ? bias.y : bias.x);
          const float P = ex2(fmaf(c, changed, -LSE2[i])), derivative = line.derivative(s);
          s = P * (dP[i / 2][j][i % 2 * 2 + e] - D_i[i]) * derivative;
          if (masked && 8 * j + x0 + e >= n) s = 0;
        }
      }
    }

    // dQ_i += dS_ij K_j
    std::uint32_t dS[Bc / 16][groups][4];
    round<T>(dS, S);
    accumulate<D>(dQ, dS, Kj);
  };
  for (; j0 >= full; j0 -= Bc) step(std::true_type());
  for (; j0 >= 0; j0 -= Bc) step(std::false_type());

  const auto dQ_rows = t.dQ.rows(b, h, p.Nq, p.d);
  if (has<built>(change, with_rotary))
    store_turned_back<D>(dQ_rows, i0, rows, scale, dQ, reinterpret_cast<float*>(Qi), change.rotary,
                         change.offset);
  else
    store<D>(dQ_rows, i0, rows, scale, dQ, Qi, aligned);
}

template <int D, int built, class T>
void launch_dq(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
               const Passed& passed, cudaStream_t stream) {
  const auto dq = swizzle_dq_kernel<D, built, T>;
  constexpr std::size_t bytes =
      DqTile<D>::shared_bytes + (built & in_tiles ? DqTile<D>::bias_bytes : 0);
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + DqTile<D>::Br - 1) / DqTile<D>::Br);
  if (blocks == 0) return;
  allow_shared_memory(dq, bytes);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, change, scale, passed,
            all_in_16_bytes(t));
}

}  // namespace

template <class T>
void launch_swizzle_dq(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
                       const Passed& passed, cudaStream_t stream) {
  with_built(change, p.d, [&](auto built, auto D) {
    launch_dq<decltype(D)::value, decltype(built)::value>(p, t, change, scale, passed, stream);
  });
}
template void launch_swizzle_dq(const Problem&, const Backward<__half>&, const Change<__half>&,
                                float, const Passed&, cudaStream_t);
template void launch_swizzle_dq(const Problem&, const Backward<__nv_bfloat16>&,
                                const Change<__nv_bfloat16>&, float, const Passed&, cudaStream_t);

}  // namespace fa::scores
