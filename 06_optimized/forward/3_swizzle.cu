// No bank conflicts. In 2_cp_async.cu the rows of a tile are 128 or 256 bytes, all banks or twice
// all: 8 lanes that read the same column of 8 rows want the same bank and wait for each other. Here
// chunk c of row r (8 numbers, 16 bytes) lies at place c ^ (r % 8) of its row:
//
//           place   0 1 2 3 4 5 6 7        a chunk is 4 banks, 8 chunks are all 32
//   row 0           0 1 2 3 4 5 6 7        chunk 0 of 8 rows: 8 different places, no two of them
//   row 1           1 0 3 2 5 4 7 6        in the same banks; and a row is still a whole row, so
//   row 2           2 3 0 1 6 7 4 5        that writing it has no conflicts either
//   ...
//
// And ldmatrix reads four 8 x 8 blocks at once, 8 rows of a chunk each, which is just what now is
// free of conflicts. Its .trans form gives a pair of V from two rows: no more reads of 16 bits.
// What should change: reads of shared memory, to an eighth of the time; and a quarter of their
// instructions, for V an eighth. It is the largest step of the mma.sync rungs.
//
// Measured: 243 TFLOP/s after 48.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/rows.cuh"
#include "06_optimized/ptx/fragments.hpp"
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

// Where chunk c of row r of a tile lies
template <int D, class T>
__device__ T* at(T* tile, int r, int c) {
  return tile + r * D + 8 * swizzled(r, c);
}

// tile[r][x] = X[first + r][x] for r < rows, 0 beyond: 0 * NaN is NaN, so that P = 0 would not
// keep out what lies behind the last key. A thread starts copies of eight numbers, 16 bytes.
template <int D, class T>
__device__ void load(T* tile, const Rows<const T>& X, std::int64_t first, int rows) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const T* from = X[first + r0] + 8 * chunk;
#pragma unroll
  for (int r = r0; r < r0 + 64; r += at_once) {
    cp_async(at<D>(tile, r, chunk), from, r < rows ? 16 : 0);
    from += at_once * X.stride;
  }
}

// [quote kernel]
template <int D, class T>
__global__ void __launch_bounds__(threads) swizzle_kernel(Problem p, Forward<T> t, float scale) {
  T* Qi = dynamic_shared<T>();     // [Br, D]
  T* const buffers = Qi + Br * D;  // [2, 2, Bc, D]: K_j and V_j of even tiles, then of odd ones

  const int lane = threadIdx.x % 32;
  const int r0 = threadIdx.x / 32 * 16 + lane / 4;  // this thread's rows of the tile: r0, r0 + 8
  const int x0 = lane % 4 * 2;                      // and its columns of a block: x0, x0 + 1
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
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
    for (int x = 0; x < D / 8; x += 2) {
      std::uint32_t Q16[4], K16[4];
      ldmatrix(Q16, at<D>(Qi, r0 - lane / 4 + by_rows.row, x + by_rows.chunk));
#pragma unroll
      for (int j = 0; j < Bc / 8; j += 2) {
        ldmatrix(K16, at<D>(Kj, 8 * j + by_columns.row, x + by_columns.chunk));
        mma<T>(S[j], Q16, K16[0], K16[1]);
        mma<T>(S[j + 1], Q16, K16[2], K16[3]);
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
      for (int y = 0; y < D / 8; y += 2) {
        std::uint32_t V16[4];
        ldmatrix_transposed(V16, at<D>(Vj, 16 * c + by_rows.row, y + by_rows.chunk));
        mma<T>(O[y], P, V16[0], V16[1]);
        mma<T>(O[y + 1], P, V16[2], V16[3]);
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
  const auto swizzle = swizzle_kernel<D, T>;
  allow_shared_memory(swizzle, shared_bytes<D>);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(swizzle, dim3(unsigned(blocks)), dim3(threads), shared_bytes<D>, stream, p, t, scale);
}

}  // namespace

template <class T>
void launch_swizzle(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  (p.d == 64 ? launch<64, T> : launch<128, T>)(p, t, scale, stream);
}
template void launch_swizzle(const Problem&, const Forward<__half>&, float, cudaStream_t);
template void launch_swizzle(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
