// Two loops. In 4_wide_warps.cu every score of every tile is compared with the mask, though only
// the tiles at the end and on the diagonal hide anything. Here a row of tiles is visited from its
// right end: first a loop with the mask, until all rows see all keys; then a loop without a trace
// of one.
//
// The online softmax takes tiles in any order. Three smaller things come along, all of them about
// what stands around the products:
//   2^x                       exp(scale x) = 2^(c x), c = scale log2 e, in one multiply-add
//   the longest tiles first   in sections of heads whose K and V stay in the L2 cache (order.cuh)
//   O through shared memory   so that it is written in chunks of 16 bytes, down the rows
//
// What should change: between the products a score costs 4 instructions instead of 10 or 11, and O
// is written once instead of in halves of sectors. With a causal mask short tiles are left for the
// end. Tensor cores and shared memory have as much to do as before.
//
// Measured: 323 TFLOP/s after 265; with a causal mask 311 after 218.
#include <type_traits>

#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/rows.cuh"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::optimized {
namespace {

constexpr int warps = 4, threads = 32 * warps;
constexpr int groups = 2;                // of 16 rows that a warp owns
constexpr int Br = 16 * groups * warps;  // 128 queries in a tile
constexpr int Bc = 64;                   // 64 keys in a tile

// Q_i, K_j, V_j
template <int D>
constexpr std::size_t shared_bytes = (Br + 2 * Bc) * D * 2;

// Where chunk c of row r of a tile lies
template <int D, class T>
__device__ T* at(T* tile, int r, int c) {
  return tile + r * D + 8 * swizzled(r, c);
}

// tile[r][x] = X[first + r][x] for r < rows, 0 beyond: 0 * NaN is NaN, so that P = 0 would not
// keep out what lies behind the last key. A thread starts copies of eight numbers, 16 bytes.
template <int D, int tile_rows, class T>
__device__ void load(T* tile, const Rows<const T>& X, std::int64_t first, int rows) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const T* from = X[first + r0] + 8 * chunk;
#pragma unroll
  for (int r = r0; r < r0 + tile_rows; r += at_once) {
    cp_async(at<D>(tile, r, chunk), from, r < rows ? 16 : 0);
    from += at_once * X.stride;
  }
}

// [quote kernel]
template <int D, class T>
__global__ void __launch_bounds__(threads, 2)
    two_loops_kernel(Problem p, Forward<T> t, std::int64_t section, float scale) {
  T* const Qi = dynamic_shared<T>();  // [Br, D]; at the end, O_i
  T* const Kj = Qi + Br * D;          // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  const Order<std::int64_t> order{(p.Nq + Br - 1) / Br, p.B * p.Hq, section, true};
  std::int64_t head, tile;
  order.place(blockIdx.x, head, tile);
  const std::int64_t i0 = tile * Br;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, D), V = t.V.rows(b, hk, p.Nk, D);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  // (1) O_i = 0, l_i = 0, m_i = -infinity, of 2 rows a group
  float m[groups][2], l[groups][2] = {}, O[groups][D / 8][4] = {};
  for (auto& of_group : m) of_group[0] = of_group[1] = -INFINITY;

  // The last row of the tile sees most, the first one least: no row sees keys from `end` on, all
  // rows see those below `full`.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  const std::int64_t full = mask.visible_keys(i0) / Bc * Bc;
  std::int64_t j0 = (end + Bc - 1) / Bc * Bc - Bc;  // the last tile's first key; none: negative
  if (end > 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, D), i0, rows);
    load<D, Bc>(Kj, K, j0, int(end - j0));
    cp_async_commit();
  }

  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // K_j (and Q_i) is complete, and V of the tile before no longer read
    // (2) load V_j, and soon K of the next tile
    load<D, Bc>(Vj, V, j0, masked ? int(min(std::int64_t(Bc), end - j0)) : Bc);
    cp_async_commit();

    // (3) S_ij = Q_i K_j^T. K's rows are the columns of the operand, so its pairs lie in memory.
    float S[groups][Bc / 8][4] = {};
#pragma unroll 1  // further, and registers spill
    for (int x = 0; x < D / 8; x += 2) {
      std::uint32_t Q16[groups][4], K16[4];
#pragma unroll
      for (int g = 0; g < groups; ++g)
        ldmatrix(Q16[g], at<D>(Qi, warp_row + 16 * g + by_rows.row, x + by_rows.chunk));
#pragma unroll
      for (int j = 0; j < Bc / 8; j += 2) {
        ldmatrix(K16, at<D>(Kj, 8 * j + by_columns.row, x + by_columns.chunk));
#pragma unroll
        for (int g = 0; g < groups; ++g) {
          mma<T>(S[g][j], Q16[g], K16[0], K16[1]);
          mma<T>(S[g][j + 1], Q16[g], K16[2], K16[3]);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < 2 * groups; ++i) {
      const int g = i / 2, e0 = i % 2 * 2;
      // Of this tile the row sees keys below n.
      int n = Bc;
      if constexpr (masked) {
        const std::int64_t visible = mask.visible_keys(i0 + r0 + 8 * i) - j0;
        n = int(max(std::int64_t(0), min(std::int64_t(Bc), visible)));
      }

      // (4) m_new = max(m, rowmax S_ij). Scaled later: m and S are Q K^T as it is (scale > 0).
      float& m_i = m[g][i % 2];
      float m_new = m_i;
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          if (masked && 8 * j + x0 + e % 2 >= n) S[g][j][e] = -INFINITY;
          m_new = fmaxf(m_new, S[g][j][e]);
        }
      m_new = row_max(m_new);
      const float mc = m_new == -INFINITY ? 0 : c * m_new;  // no weight yet: any finite number

      // (5) P_ij = 2^(c S_ij - c m_new);  l = 2^(c m - c m_new) l + rowsum P_ij
      // One instruction for c S - c m. c m is rounded, c S is not: all P of a tile, and with them
      // l, are off by one factor close to 1. With c m rounded in 2^(c m - c m_new), too, it is the
      // same for all tiles, and the division by l takes it out again.
      const float rescale = ex2(__fmul_rn(c, m_i) - mc);
      float& l_i = l[g][i % 2];
      l_i *= rescale;
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          S[g][j][e] = ex2(fmaf(c, S[g][j][e], -mc));
          l_i += S[g][j][e];
        }
      m_i = m_new;

      // (6) O_i = 2^(c (m - m_new)) O_i ...
#pragma unroll
      for (int y = 0; y < D / 8; ++y) {
        O[g][y][e0] *= rescale;
        O[g][y][e0 + 1] *= rescale;
      }
    }

    // Keys 16 k to 16 k + 15 of P are two blocks of S, already where they must be. Rounded all at
    // once: half as many registers are live from here on.
    std::uint32_t P[Bc / 16][groups][4];
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4 * groups; ++i) {
        const float* two = S[i / 4][2 * k + i / 2 % 2] + i % 2 * 2;
        P[k][i / 4][i % 4] = rounded_pair<T>(two[0], two[1]);
      }
    cp_async_wait<0>();
    __syncthreads();  // V_j is complete, and K_j no longer read
    if (j0 > 0) load<D, Bc>(Kj, K, j0 - Bc, Bc);
    cp_async_commit();

    // ... + P_ij V_j
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
#pragma unroll
      for (int y = 0; y < D / 8; y += 2) {
        std::uint32_t V16[4];
        ldmatrix_transposed(V16, at<D>(Vj, 16 * k + by_rows.row, y + by_rows.chunk));
#pragma unroll
        for (int g = 0; g < groups; ++g) {
          mma<T>(O[g][y], P[k][g], V16[0], V16[1]);
          mma<T>(O[g][y + 1], P[k][g], V16[2], V16[3]);
        }
      }
  };
  for (; j0 >= full; j0 -= Bc) step(std::true_type());
  for (; j0 >= 0; j0 -= Bc) step(std::false_type());

  // (7) O_i = O_i / l_i;  L_i = scale m_i + log l_i
  __syncwarp();  // Q_i is no longer read; a warp writes and reads its own rows only
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const int g = i / 2, e0 = i % 2 * 2, r = r0 + 8 * i;
    const float sum = row_sum(l[g][i % 2]), inverse = sum == 0 ? 0 : 1 / sum;
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
      *reinterpret_cast<std::uint32_t*>(at<D>(Qi, r, y) + x0) =
          rounded_pair<T>(O[g][y][e0] * inverse, O[g][y][e0 + 1] * inverse);
    if (t.LSE && x0 == 0 && r < rows) t.LSE[head * p.Nq + i0 + r] = scale * m[g][i % 2] + logf(sum);
  }
  __syncwarp();  // the warp's rows of O_i are complete
  // A lane stays in its eight columns and goes down the rows.
  constexpr int at_once = 32 / (D / 8);
  const int first = warp_row + lane / (D / 8), x = lane % (D / 8) * 8;
  T* to = t.O.at(b, h, i0 + first) + x;
#pragma unroll 4
  for (int r = first; r < first + 16 * groups; r += at_once, to += at_once * t.O.row)
    if (r < rows)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(at<D>(Qi, r, x / 8));
}
// [end quote]

template <int D, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const auto two_loops = two_loops_kernel<D, T>;
  allow_shared_memory(two_loops, shared_bytes<D>);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  // Key heads whose K and V fit into this part of the L2 cache, with all query heads that read
  // them. Measured, not derived.
  constexpr int MiB = D == 64 ? 8 : 16;
  const int key_heads = heads_within(of_L2(MiB), 2 * p.Nk * D * 2, p.B * p.Hkv);
  FA_LAUNCH(two_loops, dim3(unsigned(blocks)), dim3(threads), shared_bytes<D>, stream, p, t,
            std::int64_t(key_heads) * (p.Hq / p.Hkv), scale);
}

}  // namespace

template <class T>
void launch_two_loops(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  (p.d == 64 ? launch<64, T> : launch<128, T>)(p, t, scale, stream);
}
template void launch_two_loops(const Problem&, const Forward<__half>&, float, cudaStream_t);
template void launch_two_loops(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
