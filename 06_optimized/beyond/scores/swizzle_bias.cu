// The gradient by the bias: dbias_ij = sum of P_ij (dP_ij - D_i) over all that share it, batch
// entries, heads and, if it has one row, rows. A block owns a tile of dbias and goes through them,
// always in the same order: no atomics. The two products are those of the owner of dQ.
#include "06_optimized/backward/2_swizzle.cuh"
#include "06_optimized/beyond/scores/change.cuh"

namespace fa::scores {
namespace {

using namespace optimized;
using namespace optimized::swizzle_backward;

template <int D>
struct BiasTile {
  static constexpr int Br = 16 * warps, Bc = D <= 128 ? 64 : 32;
  // Q_i, dO_i, K_j, V_j, and a tile of the bias
  static constexpr std::size_t shared_bytes = (2 * Br + 2 * Bc) * D * 2, bias_bytes = Br * Bc * 2;
};

template <int D, int built, class T>
__global__ void __launch_bounds__(threads, 2)
    swizzle_dbias_kernel(Problem p, Backward<T> t, Change<T> change, View<float> dbias, float scale,
                         Passed passed, bool aligned) {
  using Sizes = BiasTile<D>;
  constexpr int Br = Sizes::Br, Bc = Sizes::Bc;
  T* const Qi = dynamic_shared<T>();  // [Br, D]; at the end, the warps' sums of columns
  T* const dOi = Qi + Br * D;         // [Br, D]
  T* const Kj = dOi + Br * D;         // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]
  T* const Bij = Vj + Bc * D;         // [Br, Bc], if biases come in tiles
  constexpr bool tiles_of_bias = built & in_tiles;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = 16 * warp;
  const int r0 = warp_row + lane / 4, x0 = lane % 4 * 2;
  const Shared share(p, dbias, Br, Bc, blockIdx.x);
  const int j0 = int(share.j0), keys = int(min(std::int64_t(Bc), p.Nk - j0));
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  float sum[Bc / 8][4] = {};
  for (std::int64_t b = share.b; b < share.b_end; ++b)
    for (std::int64_t h = share.h; h < share.h_end; ++h) {
      const Mask mask(p, b);
      const std::int64_t head = b * p.Hq + h, hk = p.key_head(h);
      const Head<built, T> of_head(change, b, h);
      for (std::int64_t i0 = share.i; i0 < share.i_end; i0 += Br) {
        const int rows = int(min(std::int64_t(Br), p.Nq - i0));
        const int seen = int(min(std::int64_t(keys), mask.visible_keys(i0 + rows - 1) - j0));
        if (seen <= 0) continue;  // by no row of the tile
        __syncthreads();          // the tiles before are no longer read
        bring<built, D, Br>(Qi, t.Q.rows(b, h, p.Nq, p.d), i0, rows, change, change.offset,
                            aligned);
        load<D, Br>(dOi, t.dO.rows(b, h, p.Nq, p.d), i0, rows, aligned);
        bring<built, D, Bc>(Kj, t.K.rows(b, hk, p.Nk, p.d), j0, seen, change, 0, aligned);
        load<D, Bc>(Vj, t.V.rows(b, hk, p.Nk, p.d), j0, seen, aligned);
        if constexpr (tiles_of_bias)
          load_bias<Br, Bc>(Bij, change.bias.rows(b, h, p.Nq, p.Nk), int(i0), j0);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // all are complete

        float S[1][Bc / 8][4], dP[1][Bc / 8][4];
        product<D, 1, Bc>(dP, dOi + warp_row * D, Vj);
        product<D, 1, Bc>(S, Qi + warp_row * D, Kj);
        if constexpr (tiles_of_bias) add_bias<Bc>(S, Bij, warp_row, change.unit);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = r0 + 8 * i, query = int(i0) + min(r, rows - 1);
          const std::int64_t row = head * passed.rows + i0 + r;
          const float LSE2 = passed.LSE2[row], D_i = passed.D[row];
          const int n = r < rows ? int(min(std::int64_t(seen), mask.visible_keys(query) - j0)) : 0;
          const Line<built, T> line(change, of_head, query, j0 + x0);
#pragma unroll
          for (int j = 0; j < Bc / 8; ++j) {
            const float2 bias = line.two_biases(8 * j, n - x0);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float s = line.changed(S[0][j][2 * i + e], 8 * j + e, e ? bias.y : bias.x);
              // dbias_ij += P_ij (dP_ij - D_i), 0 where row i does not see j
              const float dS = ex2(fmaf(c, s, -LSE2)) * (dP[0][j][2 * i + e] - D_i);
              if (8 * j + x0 + e < n) sum[j][2 * i + e] += dS;
            }
          }
        }
      }
    }

  if (dbias.row != 0) {
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = r0 + e / 2 * 8, x = 8 * j + x0 + e % 2;
        if (share.i + r < p.Nq && x < keys)
          dbias.at(share.b, share.h, share.i + r)[j0 + x] = sum[j][e];
      }
    return;
  }
  // One row for all: the sums of columns, first in a warp, then of the four warps.
  float* const of_warp = reinterpret_cast<float*>(Qi);  // [warps, Bc]
  __syncthreads();                                      // Q_i is no longer read
#pragma unroll
  for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float column = sum[j][e] + sum[j][2 + e];
      for (int bits = 4; bits < 32; bits *= 2) column += __shfl_xor_sync(0xffffffff, column, bits);
      if (lane < 4) of_warp[warp * Bc + 8 * j + x0 + e] = column;
    }
  __syncthreads();  // all four are there
  const int x = threadIdx.x;
  if (x >= keys) return;
  float column = 0;
  for (int w = 0; w < warps; ++w) column += of_warp[w * Bc + x];
  dbias.at(share.b, share.h)[j0 + x] = column;
}

template <int D, int built, class T>
void launch(const Problem& p, const Backward<T>& t, const Change<T>& change,
            const View<float>& dbias, float scale, const Passed& passed, cudaStream_t stream) {
  using Sizes = BiasTile<D>;
  const auto kernel = swizzle_dbias_kernel<D, built, T>;
  constexpr std::size_t bytes = Sizes::shared_bytes + (built & in_tiles ? Sizes::bias_bytes : 0);
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = Shared::blocks(p, dbias, Sizes::Br, Sizes::Bc);
  if (blocks == 0) return;
  allow_shared_memory(kernel, bytes);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, change, dbias,
            scale, passed, all_in_16_bytes(t));
}

}  // namespace

template <class T>
void launch_swizzle_dbias(const Problem& p, const Backward<T>& t, const Change<T>& change,
                          const View<float>& dbias, float scale, const Passed& passed,
                          cudaStream_t stream) {
  const auto run = [&](auto launch) { launch(p, t, change, dbias, scale, passed, stream); };
  const auto with_width = [&](auto D) {
    constexpr int d = decltype(D)::value;
    if (change.parts == with_bias) return run(launch<d, with_bias, T>);
    if (change.parts == (with_bias | in_tiles)) return run(launch<d, with_bias | in_tiles, T>);
    run(launch<d, with_all, T>);
  };
  if (p.d > 128) return run(launch<256, with_all, T>);
  if (p.d > 64) return with_width(std::integral_constant<int, 128>());
  with_width(std::integral_constant<int, 64>());
}
template void launch_swizzle_dbias(const Problem&, const Backward<__half>&, const Change<__half>&,
                                   const View<float>&, float, const Passed&, cudaStream_t);
template void launch_swizzle_dbias(const Problem&, const Backward<__nv_bfloat16>&,
                                   const Change<__nv_bfloat16>&, const View<float>&, float,
                                   const Passed&, cudaStream_t);

}  // namespace fa::scores
