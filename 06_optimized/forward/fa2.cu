// FlashAttention-2: the loops of 5_two_loops.cu, and the whole contract of this course. d up to
// 256, key lengths, any address and any stride; from compute capability 8.0 on.
//
//   Tile        what fits for d <= 64, 128 and 256: how many rows a warp owns, how many keys a tile
//               has, whether Q_i stays in registers, how far the product over d is unrolled
//   at          the place of a chunk; of its neighbours along d, one xor away, for ldmatrix
//   load        a tile by cp.async, or number by number if addresses are no multiples of 16 bytes
//   fa2_kernel  Q_i and the first K_j; step() for each tile of keys, first with the mask, then
//               without; O_i by way of Q_i's tile, chunk by chunk or number by number
//   launch      how many heads a section has (order.cuh)
//   launch_fa2  which Tile: 128 keys for d <= 64 without a causal mask, else 64
//
// What should limit it: by mma.sync an SM reaches not much over half of its peak; the rungs after
// this one leave mma.sync behind.
//
// Measured: 333 TFLOP/s, and 328 with a causal mask; round by round 1.00 and 1.18 of PyTorch's
// FlashAttention-2.
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

// For head dimensions of at most D, tiles of Bc keys
template <int D_, int Bc_>
struct Tile {
  static constexpr int D = D_, Bc = Bc_;
  static constexpr int groups = D <= 128 ? 2 : 1;  // of 16 rows that a warp owns
  static constexpr int Br = 16 * groups * warps;
  static constexpr bool Q_in_registers = D <= 64 && Bc <= 64;
  // How many times the product over d is unrolled. Measured: further, and more registers spill.
  static constexpr int unrolled = Q_in_registers ? D / 16 : D == 256 ? 8 : Bc > 64 ? 1 : 2;
  static constexpr std::size_t shared_bytes = (Br + 2 * Bc) * D * 2;  // Q_i, K_j, V_j
  static_assert(shared_bytes <= 99 * 1024);  // of a block on 8.6 and 8.9; 8.0 and 9.0 have more
};

// Where chunk c of row r of a tile lies. From there chunk c + x is at ^ 8 x, if c and x have no bit
// in common: one instruction, where a sum would have to be swizzled anew.
template <int D>
__device__ int at(int r, int c) {
  return r * D + 8 * swizzled(r, c);
}

// tile[r][x] = X[first + r][x] for r < rows and x < d, 0 beyond: 0 * NaN is NaN, so that P = 0
// would not keep out what lies behind the last key. A thread starts copies of eight numbers, 16
// bytes; where addresses are not multiples of 16 it fetches them one by one, and waits.
template <int D, int tile_rows, class T>
__device__ void load(T* tile, const Rows<const T>& X, std::int64_t first, int rows, bool aligned) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const int inside = min(8, max(0, int(X.cols) - 8 * chunk));  // of the eight
  const T* from = X[first + r0] + 8 * chunk;
  if (aligned) {
#pragma unroll
    for (int r = r0; r < r0 + tile_rows; r += at_once) {
      cp_async(tile + at<D>(r, chunk), from, r < rows ? 2 * inside : 0);
      from += at_once * X.stride;
    }
  } else {
#pragma unroll 1
    for (int r = r0; r < r0 + tile_rows; r += at_once) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        tile[at<D>(r, chunk) + e] = r < rows && e < inside ? from[e] : T(0.f);
      from += at_once * X.stride;
    }
  }
}

// [quote kernel]
template <class Sizes, class T>
__global__ void __launch_bounds__(threads, 2)
    fa2_kernel(Problem p, Forward<T> t, std::int64_t section, float scale, bool aligned) {
  constexpr int D = Sizes::D, groups = Sizes::groups, Br = Sizes::Br, Bc = Sizes::Bc;
  T* const Qi = dynamic_shared<T>();  // [Br, D]; at the end, O_i
  T* const Kj = Qi + Br * D;          // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  const int q_at = at<D>(warp_row + by_rows.row, by_rows.chunk);  // what this lane names to
  const int k_at = at<D>(by_columns.row, by_columns.chunk);       // ldmatrix: of the first block,
  const int v_at = at<D>(by_rows.row, by_rows.chunk);             // and what others differ from it
  const Order<std::int64_t> order{(p.Nq + Br - 1) / Br, p.B * p.Hq, section, true};
  std::int64_t head, tile;
  order.place(blockIdx.x, head, tile);
  const std::int64_t i0 = tile * Br;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const int rows = int(min(std::int64_t(Br), p.Nq - i0)), d = int(p.d);
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, d), V = t.V.rows(b, hk, p.Nk, d);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  // (1) O_i = 0, l_i = 0, m_i = -infinity, of 2 rows a group
  float m[groups][2], l[groups][2] = {}, O[groups][D / 8][4] = {};
  for (auto& of_group : m) of_group[0] = of_group[1] = -INFINITY;

  const auto read_Q = [&](std::uint32_t(&to)[groups][4], int x) {
#pragma unroll
    for (int g = 0; g < groups; ++g) ldmatrix(to[g], Qi + 16 * g * D + (q_at ^ 16 * x));
  };
  std::uint32_t Q16[Sizes::Q_in_registers ? D / 16 : 1][groups][4];

  // The last row of the tile sees most, the first one least: no row sees keys from `end` on, all
  // rows see those below `full`.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  const std::int64_t full = mask.visible_keys(i0) / Bc * Bc;
  std::int64_t j0 = (end + Bc - 1) / Bc * Bc - Bc;  // the last tile's first key; none: negative
  if (end > 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, d), i0, rows, aligned);
    cp_async_commit();
    load<D, Bc>(Kj, K, j0, int(end - j0), aligned);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // Q_i is complete
    if constexpr (Sizes::Q_in_registers)
#pragma unroll
      for (int x = 0; x < D / 16; ++x) read_Q(Q16[x], x);
  }

  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // K_j is complete, and V of the tile before no longer read
    // (2) load V_j, and soon K of the next tile
    load<D, Bc>(Vj, V, j0, masked ? int(min(std::int64_t(Bc), end - j0)) : Bc, aligned);
    cp_async_commit();

    // (3) S_ij = Q_i K_j^T. K's rows are the columns of the operand, so its pairs lie in memory.
    float S[groups][Bc / 8][4] = {};
#pragma unroll(Sizes::unrolled)
    for (int x = 0; x < D / 16; ++x) {
      auto& Q = Q16[Sizes::Q_in_registers ? x : 0];
      if constexpr (!Sizes::Q_in_registers) read_Q(Q, x);
#pragma unroll
      for (int j = 0; j < Bc / 8; j += 2) {
        std::uint32_t K16[4];
        ldmatrix(K16, Kj + 8 * j * D + (k_at ^ 16 * x));
#pragma unroll
        for (int g = 0; g < groups; ++g) {
          mma<T>(S[g][j], Q[g], K16[0], K16[1]);
          mma<T>(S[g][j + 1], Q[g], K16[2], K16[3]);
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
    if (j0 > 0) load<D, Bc>(Kj, K, j0 - Bc, Bc, aligned);
    cp_async_commit();

    // ... + P_ij V_j
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
#pragma unroll
      for (int y = 0; y < D / 8; y += 2) {
        std::uint32_t V16[4];
        ldmatrix_transposed(V16, Vj + 16 * k * D + (v_at ^ 8 * y));
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
      *reinterpret_cast<std::uint32_t*>(Qi + at<D>(r, y) + x0) =
          rounded_pair<T>(O[g][y][e0] * inverse, O[g][y][e0 + 1] * inverse);
    if (t.LSE && x0 == 0 && r < rows) t.LSE[head * p.Nq + i0 + r] = scale * m[g][i % 2] + logf(sum);
  }
  __syncwarp();  // the warp's rows of O_i are complete
  // A lane stays in its eight columns and goes down the rows.
  constexpr int at_once = 32 / (D / 8);
  const int first = warp_row + lane / (D / 8), x = lane % (D / 8) * 8;
  T* to = t.O.at(b, h, i0 + first) + x;
  if (aligned && x + 8 <= d) {
#pragma unroll 4
    for (int r = first; r < first + 16 * groups; r += at_once, to += at_once * t.O.row)
      if (r < rows)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(Qi + at<D>(r, x / 8));
  } else {
#pragma unroll 1
    for (int r = first; r < min(first + 16 * groups, rows); r += at_once, to += at_once * t.O.row)
      for (int e = 0; e < min(8, d - x); ++e) to[e] = Qi[at<D>(r, x / 8) + e];
  }
}
// [end quote]

template <class Sizes, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const auto fa2 = fa2_kernel<Sizes, T>;
  const std::size_t bytes = Sizes::shared_bytes;
  allow_shared_memory(fa2, bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Sizes::Br - 1) / Sizes::Br);
  // Key heads whose K and V fit into this part of the L2 cache, with all query heads that read
  // them. Measured, not derived.
  constexpr int MiB = Sizes::D == 64 ? 8 : 16;
  const int key_heads = heads_within(of_L2(MiB), 2 * p.Nk * Sizes::D * 2, p.B * p.Hkv);
  FA_LAUNCH(fa2, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t,
            std::int64_t(key_heads) * (p.Hq / p.Hkv), scale,
            in_16_bytes(t.Q) && in_16_bytes(t.K) && in_16_bytes(t.V) && in_16_bytes(t.O));
}

}  // namespace

template <class T>
void launch_fa2(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const auto run = [&](auto launch) { launch(p, t, scale, stream); };
  if (p.d > 128) return run(launch<Tile<256, 64>, T>);
  if (p.d > 64) return run(launch<Tile<128, 64>, T>);
  // Longer tiles are faster, but on the diagonal half of a tile is hidden.
  if (p.causal == Causal::none) return run(launch<Tile<64, 128>, T>);
  run(launch<Tile<64, 64>, T>);
}
template void launch_fa2(const Problem&, const Forward<__half>&, float, cudaStream_t);
template void launch_fa2(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
