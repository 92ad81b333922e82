// Copies that do not wait. In 1_mma.cu a block loads, then multiplies, and while it does the one it
// does not do the other. Here K and V have two buffers: cp.async fills one, past the registers and
// without anybody waiting, while the tile in the other is multiplied.
//
//   tile      0        1        2        3
//   load      buf 0  | buf 1  | buf 0  | buf 1  |
//   multiply         | buf 0  | buf 1  | buf 0  | buf 1
//                    ^ a barrier, the only one: the loads have arrived, and no warp still reads the
//                      buffer that the next loads overwrite
//
// What should change: the time of the loads disappears behind the products, and one barrier a tile
// instead of two. What it costs: 2 x 64 more rows of shared memory, so fewer blocks on an SM. What
// should not change: the bank conflicts, which are most of the time.
//
// Measured: 48 TFLOP/s after 46, cool 51 after 49. Little gained yet: shared memory is the limit,
// not the copies.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/rows.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::optimized {
namespace {

constexpr int warps = 4, threads = 32 * warps;
constexpr int Br = 16 * warps;  // 64 queries in a tile
constexpr int Bc = 64;          // 64 keys in a tile

// Q_i, and K_j and V_j twice
template <int D>
constexpr std::size_t shared_bytes = (Br + 4 * Bc) * D * 2;

// tile[r][x] = X[first + r][x] for r < rows, 0 beyond: 0 * NaN is NaN, so that P = 0 would not
// keep out what lies behind the last key. A thread starts copies of eight numbers, 16 bytes.
template <int D, class T>
__device__ void load(T* tile, const Rows<const T>& X, std::int64_t first, int rows) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const T* from = X[first + r0] + 8 * chunk;
#pragma unroll
  for (int r = r0; r < r0 + 64; r += at_once) {
    cp_async(tile + r * D + 8 * chunk, from, r < rows ? 16 : 0);
    from += at_once * X.stride;
  }
}

// [quote kernel]
template <int D, class T>
__global__ void __launch_bounds__(threads) cp_async_kernel(Problem p, Forward<T> t, float scale) {
  T* Qi = dynamic_shared<T>();     // [Br, D]
  T* const buffers = Qi + Br * D;  // [2, 2, Bc, D]: K_j and V_j of even tiles, then of odd ones

  const int lane = threadIdx.x % 32;
  const int r0 = threadIdx.x / 32 * 16 + lane / 4;  // this thread's rows of the tile: r0, r0 + 8
  const int x0 = lane % 4 * 2;                      // and its columns of a block: x0, x0 + 1
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq, hk = p.key_head(h);
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, D), V = t.V.rows(b, hk, p.Nk, D);

  // (1) O_i = 0, l_i = 0, m_i = -infinity, of two rows
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, O[D / 8][4] = {};

  // (2) load K_j and V_j of the tile that begins with key j0
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);  // beyond, no row sees anything
  const auto load_tile = [&](std::int64_t j0) {
    T* Kj = buffers + j0 / Bc % 2 * (2 * Bc * D);
    const int cols = int(min(std::int64_t(Bc), end - j0));
    load<D>(Kj, K, j0, cols);
    load<D>(Kj + Bc * D, V, j0, cols);
    cp_async_commit();
  };
  if (end > 0) {
    load<D>(Qi, t.Q.rows(b, h, p.Nq, D), i0, rows);
    load_tile(0);
  }

  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    cp_async_wait<0>();
    __syncthreads();  // K_j, V_j (and Q_i) are complete; those of the tile before no longer read
    if (j0 + Bc < end) load_tile(j0 + Bc);
    const T* Kj = buffers + j0 / Bc % 2 * (2 * Bc * D);
    const T* Vj = Kj + Bc * D;

    // (3) S_ij = Q_i K_j^T. K's rows are the columns of the operand, so its pairs lie in memory.
    float S[Bc / 8][4] = {};
#pragma unroll
    for (int x = 0; x < D; x += 16) {
      const T* q = Qi + r0 * D + x + x0;
      const std::uint32_t Q16[4] = {pair(q), pair(q + 8 * D), pair(q + 8), pair(q + 8 * D + 8)};
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        const T* k = Kj + (8 * j + lane / 4) * D + x + x0;
        mma<T>(S[j], Q16, pair(k), pair(k + 8));
      }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of this tile the row sees keys below n: all Bc of them before the diagonal and the end.
      const std::int64_t visible = mask.visible_keys(i0 + r0 + 8 * i) - j0;
      const int n = int(max(std::int64_t(0), min(std::int64_t(Bc), visible)));

      // (4) m_new = max(m, rowmax S_ij). Scaled later: m and S are Q K^T as it is (scale > 0).
      float m_new = m[i];
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          if (8 * j + x0 + e % 2 >= n) S[j][e] = -INFINITY;
          m_new = fmaxf(m_new, S[j][e]);
        }
      m_new = row_max(m_new);
      const float shift = m_new == -INFINITY ? 0 : m_new;  // no weight yet: any finite number

      // (5) P_ij = exp(scale (S_ij - m_new));  l = exp(scale (m - m_new)) l + rowsum P_ij
      // Each lane keeps the sum of its own columns; the four are added once, at the end.
      const float rescale = __expf(scale * (m[i] - shift));
      l[i] *= rescale;
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          S[j][e] = __expf(scale * (S[j][e] - shift));
          l[i] += S[j][e];
        }
      m[i] = m_new;

      // (6) O_i = exp(scale (m - m_new)) O_i ...
#pragma unroll
      for (int y = 0; y < D / 8; ++y) {
        O[y][2 * i] *= rescale;
        O[y][2 * i + 1] *= rescale;
      }
    }

    // ... + P_ij V_j. Keys 16 c to 16 c + 15 of P are two blocks of S, already where they must be.
#pragma unroll
    for (int c = 0; c < Bc / 16; ++c) {
      const float(&left)[4] = S[2 * c], (&right)[4] = S[2 * c + 1];
      const std::uint32_t P[4] = {
          rounded_pair<T>(left[0], left[1]), rounded_pair<T>(left[2], left[3]),
          rounded_pair<T>(right[0], right[1]), rounded_pair<T>(right[2], right[3])};
#pragma unroll
      for (int y = 0; y < D / 8; ++y) {
        // A pair of V is one column of two rows: two reads of 16 bits.
        const T* v = Vj + (16 * c + x0) * D + 8 * y + lane / 4;
        mma<T>(O[y], P, pair(v[0], v[D]), pair(v[8 * D], v[9 * D]));
      }
    }
  }

  // (7) O_i = O_i / l_i;  L_i = scale m_i + log l_i
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = r0 + 8 * i;
    l[i] = row_sum(l[i]);
    if (r >= rows) continue;
    const float inverse = l[i] == 0 ? 0 : 1 / l[i];
    T* o = t.O.at(b, h, i0 + r) + x0;
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
      *reinterpret_cast<std::uint32_t*>(o + 8 * y) =
          rounded_pair<T>(O[y][2 * i] * inverse, O[y][2 * i + 1] * inverse);
    if (t.LSE && x0 == 0) t.LSE[head * p.Nq + i0 + r] = scale * m[i] + logf(l[i]);
  }
}
// [end quote]

template <int D, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const auto cp_async = cp_async_kernel<D, T>;
  allow_shared_memory(cp_async, shared_bytes<D>);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(cp_async, dim3(unsigned(blocks)), dim3(threads), shared_bytes<D>, stream, p, t, scale);
}

}  // namespace

template <class T>
void launch_cp_async(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  (p.d == 64 ? launch<64, T> : launch<128, T>)(p, t, scale, stream);
}
template void launch_cp_async(const Problem&, const Forward<__half>&, float, cudaStream_t);
template void launch_cp_async(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
