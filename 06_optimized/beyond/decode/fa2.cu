// FlashAttention-2's loop for one to eight new queries a sequence. There are few rows, 16 in a
// tile, so the four warps of a block own keys, not rows: of a tile of 64 keys each takes 16, with
// m, l and O of its own. It waits for nobody: it copies its own keys, into its own buffers. At the
// end the warps' results are merged as those of the parts are.
//
// A key costs 4 d bytes to read, and 4 d FLOP for each row; with 4 rows, 4 FLOP for a byte, where
// an H200 could make 200. So the kernel is about bytes under way: at d = 128 two stages of K and V,
// 64 KiB a block, 192 KiB an SM, from which a warp takes 4 KiB at a time. Little's law asks for
// bandwidth times latency: some 36 bytes a nanosecond and SM, for about 700 ns: 25 KiB.
//
//   Tile        what fits for d <= 64, 128 and 256
//   at          the place of a chunk; of its neighbours along d, one xor away, for ldmatrix
//   load        rows by cp.async, or number by number if addresses are no multiples of 16 bytes
//   fa2_kernel  Q_i; step for step the keys of the part; the warps' O_i together
#include "06_optimized/beyond/decode/cache.cuh"
#include "06_optimized/optimized.hpp"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::decode {
namespace {

using namespace optimized;

constexpr int warps = 4, threads = 32 * warps;
constexpr int Br = 16, own = 16, Bc = warps * own;  // rows; keys of a warp, of a tile

// For head dimensions of at most D, K and V in so many stages, so many blocks on an SM
template <int D_, int stages_, int blocks_>
struct Tile {
  static constexpr int D = D_, stages = stages_, blocks = blocks_;
  static constexpr bool Q_in_registers = D <= 128;
  // Q_i, K_j and V_j, m and l
  static constexpr std::size_t shared_bytes = (Br + 2 * stages * Bc) * D * 2 + warps * Br * 8;
};

// Where chunk c of row r of a tile lies. From there chunk c + x is at ^ 8 x, if c and x have no bit
// in common: one instruction, where a sum would have to be swizzled anew.
template <int D>
__device__ int at(int r, int c) {
  return r * D + 8 * swizzled(r, c);
}

// By a warp: tile[r][x] = row(r)[x] for r < rows and x < d, 0 beyond, of `count` rows from `first`
// on: 0 * NaN is NaN, so that P = 0 would not keep out what lies behind the last key. A thread
// starts copies of eight numbers, 16 bytes; where addresses are not multiples of 16 it fetches them
// one by one, and waits.
template <int D, int count, class T, class Row>
__device__ void load(T* tile, const Row& row, int first, int rows, int d, bool aligned) {
  constexpr int chunks = D / 8, at_once = 32 / chunks;
  const int r0 = first + threadIdx.x % 32 / chunks, chunk = threadIdx.x % chunks;
  const int inside = min(8, max(0, d - 8 * chunk));  // of the eight
  if (aligned) {
#pragma unroll
    for (int r = r0; r < r0 + count; r += at_once)
      cp_async(tile + at<D>(r, chunk), r < rows ? row(r) + 8 * chunk : nullptr,
               r < rows ? 2 * inside : 0);
  } else {
#pragma unroll 1
    for (int r = r0; r < r0 + count; r += at_once)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        tile[at<D>(r, chunk) + e] = r < rows && e < inside ? row(r)[8 * chunk + e] : T(0.f);
  }
}

// Combines the 4 lanes that share a row.
__device__ float row_max(float x) {
  for (int bits = 2; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ float row_sum(float x) {
  for (int bits = 2; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}

// [quote kernel]
template <class Sizes, class T>
__global__ void __launch_bounds__(threads, Sizes::blocks)
    fa2_kernel(Problem p, Tensors<T> t, Parts parts, float scale, bool causal, bool aligned) {
  constexpr int D = Sizes::D, stages = Sizes::stages;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T* const Qi = dynamic_shared<T>();                        // [Br, D]
  T* const ring = Qi + (Br + warp * 2 * stages * own) * D;  // the warp's: [stages][K, V][own, D]
  float* const own_O = reinterpret_cast<float*>(ring);      // at the end [Br, D]
  float2* const ml = reinterpret_cast<float2*>(Qi + (Br + 2 * stages * Bc) * D);  // [warps, Br]

  const int r0 = lane / 4;      // this thread's rows of the tile: r0 + 8 i, i < 2
  const int x0 = lane % 4 * 2;  // and its columns of a block: x0, x0 + 1
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  const int q_at = at<D>(by_rows.row, by_rows.chunk);        // what this lane names to
  const int k_at = at<D>(by_columns.row, by_columns.chunk);  // ldmatrix: of the first block,
  const int v_at = at<D>(by_rows.row, by_rows.chunk);        // and what others differ from it
  const Work work(p, Br, parts.splits, blockIdx.x);
  const int d = int(p.d);
  const Mask mask = mask_of(p, work.b, causal);
  const Keys<T> K(p, t, t.cache.K, t.new_K, work, mask), V(p, t, t.cache.V, t.new_V, work, mask);
  const float c = scale * 1.44269504f;  // log2 e

  // (1) O_i = 0, l_i = 0, m_i = -infinity, of 2 rows
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, O[D / 8][4] = {};

  // The part's tiles of keys, of all that the sequence has
  const std::int64_t tiles = (mask.length + Bc - 1) / Bc;
  const int end = int(tiles * (work.split + 1) / parts.splits);
  int j = int(tiles * work.split / parts.splits);
  // (2) load K_j or V_j: of tile j the warp's own keys
  const auto bring = [&](const Keys<T>& X, T* to, int tile) {
    const int first = tile * Bc + warp * own;
    if (tile < end) load<D, own>(to, X.sixteen(first), 0, int(mask.length) - first, d, aligned);
    cp_async_commit();
  };
  const auto Q = [&](int r) { return t.Q.at(work.b, work.head(p, r), work.query(p, r)); };
  load<D, Br / warps>(Qi, Q, warp * (Br / warps), work.rows, d, aligned);
  cp_async_commit();
#pragma unroll
  for (int n = 0; n < stages; ++n) {
    bring(K, ring + (j + n) % stages * (2 * own * D), j + n);
    bring(V, ring + ((j + n) % stages * 2 + 1) * (own * D), j + n);
  }
  // One block of all that share a key head. Nobody waits for it: new keys are read where they are.
  if (work.split == 0 && work.first == 0) {
    K.append(p);
    V.append(p);
  }
  cp_async_wait<2 * stages>();
  __syncthreads();  // Q_i is complete

  std::uint32_t Q16[Sizes::Q_in_registers ? D / 16 : 1][4];
  if constexpr (Sizes::Q_in_registers)
#pragma unroll
    for (int x = 0; x < D / 16; ++x) ldmatrix(Q16[x], Qi + (q_at ^ 16 * x));
  int visible[2];  // keys that the rows see
  for (int i = 0; i < 2; ++i)
    visible[i] = int(mask.visible_keys(work.query(p, min(r0 + 8 * i, work.rows - 1))));

  for (; j < end; ++j) {
    T* const Kj = ring + j % stages * (2 * own * D);
    T* const Vj = Kj + own * D;
    cp_async_wait<2 * stages - 1>();
    __syncwarp();  // K_j is complete

    // (3) S_ij = Q_i K_j^T. K's rows are the columns of the operand, so its pairs lie in memory.
    float S[own / 8][4] = {};
#pragma unroll
    for (int x = 0; x < D / 16; ++x) {
      auto& Q_x = Q16[Sizes::Q_in_registers ? x : 0];
      if constexpr (!Sizes::Q_in_registers) ldmatrix(Q_x, Qi + (q_at ^ 16 * x));
      std::uint32_t K16[4];
      ldmatrix(K16, Kj + (k_at ^ 16 * x));
      mma<T>(S[0], Q_x, K16[0], K16[1]);
      mma<T>(S[1], Q_x, K16[2], K16[3]);
    }
    __syncwarp();  // K_j is no longer read
    bring(K, Kj, j + stages);

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e0 = i % 2 * 2;
      // Of the warp's keys the row sees those below n.
      const int n = visible[i] - (j * Bc + warp * own);

      // (4) m_new = max(m, rowmax S_ij). Scaled later: m and S are Q K^T as it is (scale > 0).
      float m_new = m[i];
#pragma unroll
      for (int k = 0; k < own / 8; ++k)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          if (8 * k + x0 + e % 2 >= n) S[k][e] = -INFINITY;
          m_new = fmaxf(m_new, S[k][e]);
        }
      m_new = row_max(m_new);
      const float mc = m_new == -INFINITY ? 0 : c * m_new;  // no weight yet: any finite number

      // (5) P_ij = 2^(c S_ij - c m_new);  l = 2^(c m - c m_new) l + rowsum P_ij
      const float rescale = ex2(fmaf(c, m[i], -mc));
      l[i] *= rescale;
#pragma unroll
      for (int k = 0; k < own / 8; ++k)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          S[k][e] = ex2(fmaf(c, S[k][e], -mc));
          l[i] += S[k][e];
        }
      m[i] = m_new;

      // (6) O_i = 2^(c (m - m_new)) O_i ...
#pragma unroll
      for (int y = 0; y < D / 8; ++y) {
        O[y][e0] *= rescale;
        O[y][e0 + 1] *= rescale;
      }
    }

    // The warp's keys of P are two blocks of S, already where they must be.
    std::uint32_t P[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      P[i] = rounded_pair<T>(S[i / 2][i % 2 * 2], S[i / 2][i % 2 * 2 + 1]);
    cp_async_wait<2 * stages - 1>();
    __syncwarp();  // V_j is complete

    // ... + P_ij V_j
#pragma unroll
    for (int y = 0; y < D / 8; y += 2) {
      std::uint32_t V16[4];
      ldmatrix_transposed(V16, Vj + (v_at ^ 8 * y));
      mma<T>(O[y], P, V16[0], V16[1]);
      mma<T>(O[y + 1], P, V16[2], V16[3]);
    }
    __syncwarp();  // V_j is no longer read
    bring(V, Vj, j + stages);
  }

  // (7) the warps' m, l and O_i, where their keys were
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = r0 + 8 * i;
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
#pragma unroll
      for (int e = 0; e < 2; ++e) own_O[r * D + 8 * y + x0 + e] = O[y][2 * i + e];
    const float sum = row_sum(l[i]);
    if (x0 == 0) {
      ml[warp * Br + r].x = m[i];
      ml[warp * Br + r].y = sum;
    }
  }
  __syncthreads();  // all four are there

  // (8) merged: m = max m_w, l = sum_w 2^(c (m_w - m)) l_w, O_i = sum_w 2^(c (m_w - m)) O_w / l,
  // L_i = scale m + log l: of the part, or of all if it is the only one
  const float* const all_O = reinterpret_cast<float*>(Qi + Br * D);
  constexpr int next = stages * own * D;  // from one warp's O_i to the next one's, in floats
  for (int r = warp; r < work.rows; r += warps) {
    float m_all = -INFINITY, l_all = 0, weight[warps];
    for (int w = 0; w < warps; ++w) m_all = fmaxf(m_all, ml[w * Br + r].x);
    const float mc = m_all == -INFINITY ? 0 : c * m_all;
    for (int w = 0; w < warps; ++w) {
      weight[w] = ex2(fmaf(c, ml[w * Br + r].x, -mc));
      l_all += weight[w] * ml[w * Br + r].y;
    }
    const float inverse = l_all == 0 ? 0 : 1 / l_all;
    const std::int64_t row = work.row(p, r), before = work.split * (p.B * p.Hq * p.Nq);
    const bool whole = parts.splits == 1;
    T* const to = t.O.at(work.b, work.head(p, r), work.query(p, r));
    for (int x = lane; x < d; x += 32) {
      float sum = 0;
      for (int w = 0; w < warps; ++w) sum += weight[w] * all_O[w * next + r * D + x];
      if (whole)
        to[x] = T(sum * inverse);
      else
        parts.O[(before + row) * d + x] = sum * inverse;
    }
    float* const L = whole ? t.LSE : parts.L + before;
    if (L && lane == 0) L[row] = scale * m_all + logf(l_all);
  }
}
// [end quote]

template <class Sizes, class T>
void launch(const Problem& p, const Tensors<T>& t, const Parts& parts, float scale, bool causal,
            cudaStream_t stream) {
  const auto fa2 = fa2_kernel<Sizes, T>;
  const std::size_t bytes = Sizes::shared_bytes;
  allow_shared_memory(fa2, bytes);
  const std::int64_t tiles = (p.Hq / p.Hkv * p.Nq + Br - 1) / Br;
  FA_LAUNCH(fa2, dim3(unsigned(p.B * p.Hkv * parts.splits * tiles)), dim3(threads), bytes, stream,
            p, t, parts, scale, causal,
            in_16_bytes(t.Q) && in_16_bytes(t.cache.K) && in_16_bytes(t.cache.V) &&
                in_16_bytes(t.new_K) && in_16_bytes(t.new_V));
}

// run(Tile), of the one that d wants
template <class Run>
auto with_tile(std::int64_t d, const Run& run) {
  if (d > 128) return run(Tile<256, 1, 2>());
  if (d > 64) return run(Tile<128, 2, 3>());
  return run(Tile<64, 2, 4>());
}

}  // namespace

template <class T>
Shape shape(std::int64_t d) {
  return with_tile(d, [](auto tile) { return Shape{Br, Bc, tile.blocks}; });
}
template Shape shape<__half>(std::int64_t);
template Shape shape<__nv_bfloat16>(std::int64_t);

template <class T>
void launch_fa2(const Problem& p, const Tensors<T>& t, const Parts& parts, float scale, bool causal,
                cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) { launch<decltype(tile), T>(p, t, parts, scale, causal, stream); });
}
template void launch_fa2(const Problem&, const Tensors<__half>&, const Parts&, float, bool,
                         cudaStream_t);
template void launch_fa2(const Problem&, const Tensors<__nv_bfloat16>&, const Parts&, float, bool,
                         cudaStream_t);

}  // namespace fa::decode
