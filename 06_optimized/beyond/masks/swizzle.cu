// The backward on tensor cores, rung 2's owner of dQ: it visits the tiles of keys that fa2.cu does.
// The owner of dK and dV is in swizzle_keys.cu.
#include "06_optimized/backward/2_swizzle.cuh"
#include "06_optimized/beyond/masks/reach.hpp"

namespace fa::masks {
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
    swizzle_dq_kernel(Problem p, Pattern pattern, Backward<T> t, float scale, Statistics passed,
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
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const auto K = t.K.rows(b, hk, p.Nk, p.d), V = t.V.rows(b, hk, p.Nk, p.d);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  float LSE2[2 * groups], D_i[2 * groups];  // rows beyond the last have theirs too: padding
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const std::int64_t row = head * passed.rows + i0 + r0 + 8 * i;
    LSE2[i] = passed.LSE2[row];
    D_i[i] = passed.D[row];
  }

  // Tiles of keys that no row of the tile sees are skipped, not masked. Which is next, and whether
  // all rows see all of it, one thread finds out for all: their registers are full.
  __shared__ Walk<Bc> walk;
  if (threadIdx.x == 0) walk.start(p, pattern, b, h, i0, rows);
  __syncthreads();
  int j0 = walk.key();  // the last tile's first key; none: negative
  if (j0 >= 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Br>(dOi, t.dO.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Bc>(Vj, V, j0, walk.reach.length - j0, aligned);
    cp_async_commit();
  }

  float dQ[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // V_j (at first Q_i and dO_i too) is complete, K before it no longer read
    load<D, Bc>(Kj, K, j0, masked ? walk.reach.length - j0 : Bc, aligned);
    cp_async_commit();
    if (threadIdx.x == 0) walk.next();

    // dP_ij = dO_i V_j^T
    float S[groups][Bc / 8][4], dP[groups][Bc / 8][4];
    product<D, groups, Bc>(dP, dOi + warp_row * D, Vj);

    cp_async_wait<0>();
    __syncthreads();  // K_j is complete, and V_j no longer read
    const int next_j0 = walk.key();
    if (next_j0 >= 0) load<D, Bc>(Vj, V, next_j0, walk.reach.length - next_j0, aligned);
    cp_async_commit();

    // P_ij = 2^(c Q_i K_j^T - LSE2_i);  dS_ij = P_ij (dP_ij - D_i), 0 where row i does not see j
    product<D, groups, Bc>(S, Qi + warp_row * D, Kj);
#pragma unroll
    for (int i = 0; i < 2 * groups; ++i) {
      const int query = walk.i0 + r0 + 8 * i;
      const Reach::Row row = walk.reach.row(query).from_key(j0 + x0);
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = S[i / 2][j][i % 2 * 2 + e];
          const float P = ex2(fmaf(c, s, -LSE2[i]));
          s = P * (dP[i / 2][j][i % 2 * 2 + e] - D_i[i]);
          if (masked && !row.sees(8 * j + e)) s = 0;
          if (masked && s != 0 && !walk.reach.same_document(query, j0 + x0 + 8 * j + e)) s = 0;
        }
    }

    // dQ_i += dS_ij K_j
    std::uint32_t dS[Bc / 16][groups][4];
    round<T>(dS, S);
    accumulate<D>(dQ, dS, Kj);
  };
  while (j0 >= 0) {
    if (walk.whole)
      step(std::false_type());
    else
      step(std::true_type());
    j0 = walk.key();
  }

  store<D>(t.dQ.rows(b, h, p.Nq, p.d), i0, rows, scale, dQ, Qi, aligned);
}

template <int D, class T>
void launch_dq(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
               const Statistics& passed, cudaStream_t stream) {
  const auto dq = swizzle_dq_kernel<D, T>;
  constexpr std::size_t bytes = DqTile<D>::shared_bytes;
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + DqTile<D>::Br - 1) / DqTile<D>::Br);
  allow_shared_memory(dq, bytes);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, pattern, t, scale, passed,
            all_in_16_bytes(t));
}

}  // namespace

template <class T>
void launch_swizzle(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
                    const Statistics& s, cudaStream_t stream) {
  launch_before(p, t, Passed{s.LSE2, s.D, nullptr, s.rows}, stream);
  (p.d <= 64    ? launch_dq<64, T>
   : p.d <= 128 ? launch_dq<128, T>
                : launch_dq<256, T>)(p, pattern, t, scale, s, stream);
}
#define FA_FOR(T)                                                                         \
  template void launch_swizzle(const Problem&, const Pattern&, const Backward<T>&, float, \
                               const Statistics&, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::masks
