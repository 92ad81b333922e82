// Wide warps. In 3_swizzle.cu a warp has 16 rows, and multiplies every fragment of K and V that it
// reads once. Here it has 32 rows, and multiplies every fragment twice: a tile has 128 queries.
//
// At d = 128 with two buffers each for K and V, a block would now need 96 KiB of shared memory, and
// an SM of compute capability 8.0 would hold one. So they get one buffer each: V_j arrives under
// Q K_j^T and the softmax, K of the next tile under P V_j. That is 64 KiB, less than before, for a
// second barrier in each turn. Two blocks share an SM: while one takes exponentials, the other
// multiplies.
//
// What should change: at d = 128 fragments take 80 reads for a warp's product of 32 rows and 64
// keys, where two times 72 were needed; and K and V are fetched from the L2 cache half as often.
//
// Measured: 265 TFLOP/s after 243; with a causal mask 218 after 218.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/rows.cuh"
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
    wide_warps_kernel(Problem p, Forward<T> t, float scale) {
  T* const Qi = dynamic_shared<T>();  // [Br, D]
  T* const Kj = Qi + Br * D;          // [Bc, D]
  T* const Vj = Kj + Bc * D;          // [Bc, D]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, D), V = t.V.rows(b, hk, p.Nk, D);

  // (1) O_i = 0, l_i = 0, m_i = -infinity, of 2 rows a group
  float m[groups][2], l[groups][2] = {}, O[groups][D / 8][4] = {};
  for (auto& of_group : m) of_group[0] = of_group[1] = -INFINITY;

  // (2) load the tile of K or of V that begins with key j0
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);  // beyond, no row sees anything
  const auto load_tile = [&](T* tile, const Rows<const T>& X, std::int64_t j0) {
    load<D, Bc>(tile, X, j0, int(min(std::int64_t(Bc), end - j0)));
  };
  if (end > 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, D), i0, rows);
    load_tile(Kj, K, 0);
    cp_async_commit();
  }

  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    cp_async_wait<0>();
    __syncthreads();  // K_j (and Q_i) is complete, and V of the tile before no longer read
    load_tile(Vj, V, j0);
    cp_async_commit();

    // (3) S_ij = Q_i K_j^T. K's rows are the columns of the operand, so its pairs lie in memory.
    float S[groups][Bc / 8][4] = {};
#pragma unroll 2  // further, and registers spill
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
      // Of this tile the row sees keys below n: all Bc of them before the diagonal and the end.
      const std::int64_t visible = mask.visible_keys(i0 + r0 + 8 * i) - j0;
      const int n = int(max(std::int64_t(0), min(std::int64_t(Bc), visible)));

      // (4) m_new = max(m, rowmax S_ij). Scaled later: m and S are Q K^T as it is (scale > 0).
      float& m_i = m[g][i % 2];
      float m_new = m_i;
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          if (8 * j + x0 + e % 2 >= n) S[g][j][e] = -INFINITY;
          m_new = fmaxf(m_new, S[g][j][e]);
        }
      m_new = row_max(m_new);
      const float shift = m_new == -INFINITY ? 0 : m_new;  // no weight yet: any finite number

      // (5) P_ij = exp(scale (S_ij - m_new));  l = exp(scale (m - m_new)) l + rowsum P_ij
      // Each lane keeps the sum of its own columns; the four are added once, at the end.
      const float rescale = __expf(scale * (m_i - shift));
      float& l_i = l[g][i % 2];
      l_i *= rescale;
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          S[g][j][e] = __expf(scale * (S[g][j][e] - shift));
          l_i += S[g][j][e];
        }
      m_i = m_new;

      // (6) O_i = exp(scale (m - m_new)) O_i ...
#pragma unroll
      for (int y = 0; y < D / 8; ++y) {
        O[g][y][e0] *= rescale;
        O[g][y][e0 + 1] *= rescale;
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V_j is complete, and K_j no longer read
    if (j0 + Bc < end) load_tile(Kj, K, j0 + Bc);
    cp_async_commit();

    // ... + P_ij V_j. Keys 16 c to 16 c + 15 of P are two blocks of S, already where they must be.
#pragma unroll
    for (int c = 0; c < Bc / 16; ++c) {
      std::uint32_t P[groups][4];
#pragma unroll
      for (int i = 0; i < 4 * groups; ++i) {
        const float* two = S[i / 4][2 * c + i / 2 % 2] + i % 2 * 2;
        P[i / 4][i % 4] = rounded_pair<T>(two[0], two[1]);
      }
#pragma unroll
      for (int y = 0; y < D / 8; y += 2) {
        std::uint32_t V16[4];
        ldmatrix_transposed(V16, at<D>(Vj, 16 * c + by_rows.row, y + by_rows.chunk));
#pragma unroll
        for (int g = 0; g < groups; ++g) {
          mma<T>(O[g][y], P[g], V16[0], V16[1]);
          mma<T>(O[g][y + 1], P[g], V16[2], V16[3]);
        }
      }
    }
  }

  // (7) O_i = O_i / l_i;  L_i = scale m_i + log l_i
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const int g = i / 2, e0 = i % 2 * 2, r = r0 + 8 * i;
    const float sum = row_sum(l[g][i % 2]), inverse = sum == 0 ? 0 : 1 / sum;
    if (r >= rows) continue;
    T* o = t.O.at(b, h, i0 + r) + x0;
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
      *reinterpret_cast<std::uint32_t*>(o + 8 * y) =
          rounded_pair<T>(O[g][y][e0] * inverse, O[g][y][e0 + 1] * inverse);
    if (t.LSE && x0 == 0) t.LSE[head * p.Nq + i0 + r] = scale * m[g][i % 2] + logf(sum);
  }
}
// [end quote]

template <int D, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const auto wide_warps = wide_warps_kernel<D, T>;
  allow_shared_memory(wide_warps, shared_bytes<D>);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(wide_warps, dim3(unsigned(blocks)), dim3(threads), shared_bytes<D>, stream, p, t,
            scale);
}

}  // namespace

template <class T>
void launch_wide_warps(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  (p.d == 64 ? launch<64, T> : launch<128, T>)(p, t, scale, stream);
}
template void launch_wide_warps(const Problem&, const Forward<__half>&, float, cudaStream_t);
template void launch_wide_warps(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
