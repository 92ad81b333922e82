// FlashAttention-2's loop for one to eight new queries a sequence. There are few rows, 16 a warp,
// so the four warps of a block own keys, not rows: of a tile of 64 keys each takes 16, with m, l
// and O of its own. It waits for nobody: it copies its own keys, into its own buffers. At the end
// the warps' results are merged as those of the parts are. Where there are more than 16 rows, and
// d <= 128, two warps share keys: each brings half of them, and takes 16 of 32 rows.
//
// Where one block of sixteen warps an SM, with 256 keys a tile, leaves no SM idle, it is faster:
// the memory is read at a quarter of the places at a time, and there are fewer parts to merge. Two
// parts of a head, as 8 sequences of 8 key heads have on an H200, are a cluster of two blocks, and
// need no second kernel to merge them: 17 % faster at d = 128 with 1024 tokens, 10 % with 4096, 4 %
// with 131072. Clusters of four were 33 to 49 % slower.
//
// At d <= 64 it may be eight warps and 128 keys. An SM holds two such blocks, so that up to 264 key
// heads are one wave on an H200, where blocks of four warps need parts and a merge. 8 sequences of
// 32 heads are 9 % faster so with 4096 tokens, and 2 % with 16384.
//
// A key costs 4 d bytes to read, and 4 d FLOP for each row; with 4 rows, 4 FLOP for a byte, where
// an H200 could make 200. So the kernel is about bytes under way. Little's law asks for bandwidth
// times latency: some 36 bytes a nanosecond and SM, for about 700 ns: 25 KiB. K_j and V_j of a warp
// are 8 KiB at d = 128, and 16 warps share an SM. In development runs these were worth more than a
// second pair of buffers or Q in registers, which would leave room for 12. At d <= 64 a second pair
// costs no block, and pays where a block has few tiles: 4 % for 64 sequences of 1024 tokens. Q in
// registers costs no block of five either, but of six; those are for heads that take several waves.
//
// With 32 rows it is about instructions, too: two warps multiply for each key that is read. Nearly
// all keys are old ones that are there, sixteen in a row, and `load_straight` brings them with two
// instructions a copy, where `load` needs 45 for a row that may be new, or missing.
//
//   Tile        what fits for d <= 64, 128 and 256, and `with_tile`, at the end, which of them
//   at          the place of a chunk; of its neighbours along d, one xor away, for ldmatrix
//   load        rows by cp.async, or number by number if addresses are no multiples of 16 bytes;
//               load_straight: rows of the cache, by one addition each
//   fa2_kernel  Q_i; step for step the keys of the part; the warps' O_i together
//   merge_two   the O_i of two blocks together
#include <algorithm>

#include "06_optimized/beyond/decode/cache.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/rows.cuh"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::decode {
namespace {

using namespace optimized;

// For head dimensions of at most D. blocks: that an SM of 9.0 has room for. stages: of K_j and V_j.
// warps: with keys of their own; or so many times `sharers` that share them, each with 16 rows.
template <int D_, int blocks_, int warps_ = 4, int stages_ = 1, int sharers_ = 1>
struct Tile {
  static constexpr int D = D_, blocks = blocks_, warps = warps_, stages = stages_;
  static constexpr int sharers = sharers_, threads = 32 * warps * sharers;
  static constexpr int Br = 16 * sharers, Bc = 16;  // rows of a block; keys of a tile
  static constexpr bool Q_in_registers = D <= 64 && blocks * threads <= 5 * 128;
  static constexpr bool pairs = blocks == 1;   // may two blocks merge their parts?
  static constexpr int pair = 2 * Bc * D;      // numbers in a K_j and its V_j
  static constexpr int own = stages * pair;    // of a warp, or of those that share keys
  static constexpr std::size_t shared_bytes =  // Q_i, K_j and V_j of each warp, m and l
      (Br * D + warps * own) * 2 + warps * Br * sizeof(float2);
  static_assert(Br * D * sizeof(float) <= own * 2, "a warp's O_i takes the place of its keys");
};

// Where chunk c of row r of a tile lies. From there chunk c + x is at ^ 8 x, if c and x have no bit
// in common: one instruction, where a sum would have to be swizzled anew.
template <int D>
__device__ int at(int r, int c) {
  return r * D + 8 * swizzled(r, c);
}

// By a warp: tile[r][x] = row(r)[x] for r < rows and x < d, 0 beyond, of `tile_rows` rows from
// `first` on: 0 * NaN is NaN, so that P = 0 would not keep out what lies behind the last key. A
// thread starts copies of eight numbers, 16 bytes; where addresses are not multiples of 16 it
// fetches them one by one, and waits.
template <int D, int tile_rows, class T, class Row>
__device__ void load(T* tile, const Row& row, int first, int rows, int d, bool aligned) {
  constexpr int chunks = D / 8, at_once = 32 / chunks;
  const int r0 = first + threadIdx.x % 32 / chunks, chunk = threadIdx.x % chunks;
  const int inside = min(8, max(0, d - 8 * chunk));  // of the eight
  if (aligned) {
#pragma unroll(D == 64 ? 2 : tile_rows)  // with more, D = 64 spills a register
    for (int r = r0; r < r0 + tile_rows; r += at_once) {
      const T* from = r < rows ? row(r) + 8 * chunk : nullptr;
      cp_async(tile + at<D>(r, chunk), from, r < rows ? 2 * inside : 0);
    }
  } else {
#pragma unroll 1
    for (int r = r0; r < r0 + tile_rows; r += at_once) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        tile[at<D>(r, chunk) + e] = r < rows && e < inside ? row(r)[8 * chunk + e] : T(0.f);
    }
  }
}

// The same of rows that lie `distance` apart and are all there: an addition for each copy.
template <int D, int tile_rows, class T>
__device__ void load_straight(T* tile, const T* from, std::int64_t distance, int first, int d) {
  constexpr int chunks = D / 8, at_once = 32 / chunks;
  static_assert(at_once <= 8 && tile_rows % at_once == 0);
  const int r0 = first + threadIdx.x % 32 / chunks, chunk = threadIdx.x % chunks;
  const int to = at<D>(r0, chunk), bytes = 2 * min(8, max(0, d - 8 * chunk));
  from += r0 * distance + 8 * chunk;
#pragma unroll
  for (int r = 0; r < tile_rows; r += at_once, from += at_once * distance)
    cp_async(tile + r * D + (to ^ 8 * (r % 8)), from, bytes);
}

// By two blocks, a cluster, each half of it: what merge.cu does with the parts, O_s [rows, d] and L
// where this block has its own. D is the distance of O_s's rows.
template <int D, class T>
__device__ void merge_two([[maybe_unused]] const Problem& p, [[maybe_unused]] const Tensors<T>& t,
                          [[maybe_unused]] const Work& work, [[maybe_unused]] float* own_O,
                          [[maybe_unused]] float2* own_L) {
#if defined(FA_EMULATED) || __CUDA_ARCH__ >= 900
  // [quote pair]
  sync_cluster();  // both parts are there
  const float* const O[] = {in_block(own_O, 0), in_block(own_O, 1)};
  const float2* const L[] = {in_block(own_L, 0), in_block(own_L, 1)};  // in x
  const int d = int(p.d), all = work.rows * d, half = (all + 1) / 2, begin = work.split * half;
  for (int i = begin + threadIdx.x; i < min(begin + half, all); i += blockDim.x) {
    const int r = i / d, x = i % d;
    const float L_0 = L[0][r].x, L_1 = L[1][r].x, m = fmaxf(L_0, L_1);
    const float shift = m == -INFINITY ? 0 : m;  // no part has seen a key: any finite number
    const float w_0 = expf(L_0 - shift), w_1 = expf(L_1 - shift), l = w_0 + w_1;
    const float O_x = w_0 * O[0][r * D + x] + w_1 * O[1][r * D + x];
    t.O.at(work.b, work.head(p, r), work.query(p, r))[x] = T(l == 0 ? 0 : O_x / l);
    if (t.LSE && x == 0) t.LSE[work.row(p, r)] = m + logf(l);
  }
  sync_cluster();  // both have been read: a block may end
  // [end quote]
#endif
}

// [quote kernel]
template <class Sizes, class T>
__global__ void __launch_bounds__(Sizes::threads, Sizes::blocks)
    fa2_kernel(Problem p, Tensors<T> t, Parts parts, float scale, bool causal, bool aligned,
               bool two_merge) {
  constexpr int D = Sizes::D, groups = 1, Br = Sizes::Br, Bc = Sizes::Bc;     // a group: 16 rows
  constexpr int warps = Sizes::warps, sharers = Sizes::sharers, loaders = 4;  // that load Q_i
  const int lane = threadIdx.x % 32, any_warp = threadIdx.x / 32;
  const int warp = any_warp / sharers, sharer = any_warp % sharers;  // whose keys; whose rows
  T* const Qi = dynamic_shared<T>();                                 // [Br, D]
  T* const all = Qi + Br * D;                                        // [warps][stages][K, V][Bc, D]
  T* const mine = all + warp * Sizes::own;           // this warp's [stages][K, V][Bc, D]
  float* const Oi = reinterpret_cast<float*>(mine);  // at the end, in their place: [Br, D]
  float2* const ml = reinterpret_cast<float2*>(all + warps * Sizes::own);  // [warps, Br]

  const int r0 = 16 * sharer + lane / 4;  // this thread's rows of the tile: r0, r0 + 8
  const int x0 = lane % 4 * 2;            // and its columns of a block: x0, x0 + 1
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  // What this lane names to ldmatrix, of the first block; of the others one xor away.
  const int q_at = at<D>(by_rows.row, by_rows.chunk), v_at = q_at;
  const int k_at = at<D>(by_columns.row, by_columns.chunk);
  merge_may_start();
  const Work work(p, Br, parts.splits, blockIdx.x);
  const int rows = work.rows, d = int(p.d);
  const Mask mask = mask_of(p, work.b, causal);
  const Keys<T> K(p, t, t.cache.K, t.new_K, work, mask), V(p, t, t.cache.V, t.new_V, work, mask);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  // (1) O_i = 0, l_i = 0, m_i = -infinity, of 2 rows a group
  float m[groups][2], l[groups][2] = {}, O[groups][D / 8][4] = {};
  for (auto& of_group : m) of_group[0] = of_group[1] = -INFINITY;

  const auto read_Q = [&](std::uint32_t(&to)[groups][4], int x) {
#pragma unroll
    for (int g = 0; g < groups; ++g) ldmatrix(to[g], Qi + 16 * (sharer + g) * D + (q_at ^ 16 * x));
  };
  std::uint32_t Q16[Sizes::Q_in_registers ? D / 16 : 1][groups][4];
  const auto sync_sharers = [&] {  // who share keys
    if constexpr (sharers == 1)
      __syncwarp();
    else
      sync(1 + warp, 32 * sharers);
  };

  // Of all tiles of the warps' keys this part takes some, and each warp 16 keys of each of them.
  const std::int64_t tiles = (mask.length + warps * Bc - 1) / (warps * Bc);
  int tile = int(tiles * work.split / parts.splits);
  const int end = int(tiles * (work.split + 1) / parts.splits);
  const auto bring = [&](const Keys<T>& X, T* to, int n) {
    const int first = (n * warps + warp) * Bc, there = int(mask.length) - first;
    constexpr int each = Bc / sharers;
    const auto sixteen = X.sixteen(first);
    if (n < end && aligned && first + Bc <= X.first_new)
      load_straight<D, each>(to, sixteen.old, X.row, each * sharer, d);
    else if (n < end)
      load<D, each>(to, sixteen, each * sharer, there, d, aligned);
    cp_async_commit();
  };
  const auto row_of_Q = [&](int r) { return t.Q.at(work.b, work.head(p, r), work.query(p, r)); };
  if (any_warp < loaders)
    load<D, Br / loaders>(Qi, row_of_Q, any_warp * (Br / loaders), rows, d, aligned);
  cp_async_commit();
#pragma unroll
  for (int n = 0; n < Sizes::stages; ++n) {
    bring(K, mine + n * Sizes::pair, tile + n);
    bring(V, mine + n * Sizes::pair + Bc * D, tile + n);
  }
  // One block of all that share a key head. Nobody waits for it: new keys are read where they are.
  if (work.split == 0 && work.first == 0) append(p, K, V);
  cp_async_wait<2 * Sizes::stages>();
  __syncthreads();  // Q_i is complete
  if constexpr (Sizes::Q_in_registers)
#pragma unroll
    for (int x = 0; x < D / 16; ++x) read_Q(Q16[x], x);
  int visible[2 * groups];  // keys that the rows see
  for (int i = 0; i < 2 * groups; ++i)
    visible[i] = int(mask.visible_keys(work.query(p, min(r0 + 8 * i, rows - 1))));

  for (int stage = 0; tile < end; ++tile, stage = (stage + 1) % Sizes::stages) {
    T* const Kj = mine + stage * Sizes::pair;   // [Bc, D]
    T* const Vj = Kj + Bc * D;                  // [Bc, D]
    const int j0 = (tile * warps + warp) * Bc;  // its first key
    cp_async_wait<2 * Sizes::stages - 1>();
    sync_sharers();  // K_j is complete

    // (3) S_ij = Q_i K_j^T. K's rows are the columns of the operand, so its pairs lie in memory.
    float S[groups][Bc / 8][4] = {};
#pragma unroll
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

    sync_sharers();  // K_j is no longer read
    // (2) load K_j of the next tile, and soon V_j
    bring(K, Kj, tile + Sizes::stages);

#pragma unroll
    for (int i = 0; i < 2 * groups; ++i) {
      const int g = i / 2, e0 = i % 2 * 2;
      // Of this tile the row sees keys below n.
      const int n = visible[i] - j0;

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
    cp_async_wait<2 * Sizes::stages - 1>();
    sync_sharers();  // V_j is complete

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
    sync_sharers();  // V_j is no longer read
    bring(V, Vj, tile + Sizes::stages);
  }

  // (7) the warps' m, l and O_i, where their keys were
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const int g = i / 2, e0 = i % 2 * 2, r = r0 + 8 * i;
    const float sum = row_sum(l[g][i % 2]);
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
#pragma unroll
      for (int e = 0; e < 2; ++e) Oi[r * D + 8 * y + x0 + e] = O[g][y][e0 + e];
    if (x0 == 0) {
      ml[warp * Br + r].x = m[g][i % 2];
      ml[warp * Br + r].y = sum;
    }
  }
  __syncthreads();  // all of them are there

  // (8) merged: m = max m_w, l = sum_w 2^(c (m_w - m)) l_w, O_i = sum_w 2^(c (m_w - m)) O_w / l,
  // L_i = scale m + log l: of the part, or of all if it is the only one. Where two blocks merge
  // their parts, they stay here, in the place of warp 0's.
  float* const O_part = reinterpret_cast<float*>(all);  // [Br, D]
  const bool two = Sizes::pairs && two_merge;
  for (int r = any_warp; r < rows; r += warps * sharers) {
    float m_all = -INFINITY, l_all = 0, weight[warps];
    for (int w = 0; w < warps; ++w) m_all = fmaxf(m_all, ml[w * Br + r].x);
    const float mc = m_all == -INFINITY ? 0 : c * m_all;
    for (int w = 0; w < warps; ++w) {
      weight[w] = ex2(__fmul_rn(c, ml[w * Br + r].x) - mc);
      l_all += weight[w] * ml[w * Br + r].y;
    }
    const float inverse = l_all == 0 ? 0 : 1 / l_all;
    const std::int64_t row = work.row(p, r), before = work.split * (p.B * p.Hq * p.Nq);
    const bool whole = parts.splits == 1;
    T* const to = t.O.at(work.b, work.head(p, r), work.query(p, r));
    for (int x = lane; x < d; x += 32) {
      float sum = 0;
      for (int w = 0; w < warps; ++w)
        sum += weight[w] * reinterpret_cast<float*>(all + w * Sizes::own)[r * D + x];
      const float O_x = l_all == 0 ? 0 : sum * inverse;  // not 0 * NaN where no key is seen
      if (two)
        O_part[r * D + x] = O_x;
      else if (whole)
        to[x] = T(O_x);
      else
        parts.O[(before + row) * d + x] = O_x;
    }
    float* const L = whole ? t.LSE : parts.L + before;
    const float L_r = scale * m_all + logf(l_all);
    __syncwarp();  // m and l are no longer read
    if (two && lane == 0)
      ml[r].x = L_r;
    else if (L && lane == 0)
      L[row] = L_r;
  }
  if (two) merge_two<D>(p, t, work, O_part, ml);
}
// [end quote]

template <class Sizes, class T>
bool launch(const Problem& p, const Tensors<T>& t, const Parts& parts, float scale, bool causal,
            cudaStream_t stream) {
  const auto fa2 = fa2_kernel<Sizes, T>;
  const std::size_t bytes = Sizes::shared_bytes;
  allow_shared_memory(fa2, bytes);
  const std::int64_t blocks = p.B * p.Hkv * parts.splits * row_tiles(p, Sizes::Br);
  const bool aligned = in_16_bytes(t.Q) && in_16_bytes(t.cache.K) && in_16_bytes(t.cache.V) &&
                       in_16_bytes(t.new_K) && in_16_bytes(t.new_V);
  const dim3 grid = unsigned(blocks), block = Sizes::threads;
  const bool two =
      Sizes::pairs && parts.splits == 2 && device_capability() >= 90 && built_for_9_0(fa2);
  if (two)
    FA_LAUNCH_CLUSTERS(2, fa2, grid, block, bytes, stream, p, t, parts, scale, causal, aligned,
                       true);
  else
    FA_LAUNCH(fa2, grid, block, bytes, stream, p, t, parts, scale, causal, aligned, false);
  return two || parts.splits == 1;
}

// Does one block an SM leave at most a twentieth of them idle? With as many parts of a head as
// fit, or, if there are more heads than SMs, in several waves. If nobody merges, or two blocks do,
// it pays from 512 keys on. Another kernel's merge, or the beginnings of waves, want more.
template <class Sizes>
bool fills_all_SMs(const Problem& p) {
  const std::int64_t SMs = processors();
  const std::int64_t heads = std::max<std::int64_t>(1, p.B * p.Hkv * row_tiles(p, Sizes::Br));
  const std::int64_t blocks = heads * std::max<std::int64_t>(1, SMs / heads);
  const std::int64_t slots = (blocks + SMs - 1) / SMs * SMs;
  const bool short_ones = blocks <= SMs && blocks <= 2 * heads;
  return 20 * blocks >= 19 * slots && p.Nk >= (short_ones ? 512 : 16384) &&
         Sizes::shared_bytes <= shared_memory_limit();
}

// Blocks that this GPU has room for at once. An SM has as much shared memory as a block can have
// and 1 KiB more, and each block takes 1 KiB more than it asks for.
template <class Sizes>
std::int64_t room_for() {
  const std::size_t blocks = (shared_memory_limit() + 1024) / (Sizes::shared_bytes + 1024);
  return std::int64_t(processors()) * std::min(Sizes::blocks, int(blocks));
}

// run(Tile), of the one that p wants
template <class Run>
auto with_tile(const Problem& p, const Run& run) {
  if (p.d > 128) return run(Tile<256, 2>());
  // More rows than one group has, as of 8 queries of 4 heads: else their keys would be read twice.
  const bool two_groups = row_tiles(p, 16) > 1;
  if (two_groups && p.d > 64) {
    using EightPairs = Tile<128, 1, 8, 2, 2>;
    if (fills_all_SMs<EightPairs>(p)) return run(EightPairs());
    return run(Tile<128, 2, 4, 2, 2>());
  }
  if (two_groups) return run(Tile<64, 2, 4, 2, 2>());
  if (p.d > 64) {
    using SixteenWarps = Tile<128, 1, 16>;
    if (fills_all_SMs<SixteenWarps>(p)) return run(SixteenWarps());
    return run(Tile<128, 4>());
  }
  using SixteenWarps = Tile<64, 1, 16, 2>;
  using EightWarps = Tile<64, 2, 8, 2>;
  using FiveBlocks = Tile<64, 5, 4, 2>;
  using SixBlocks = Tile<64, 6, 4, 2>;
  // Blocks if keys have no parts, and how many of each kind fit at once.
  const std::int64_t heads = p.B * p.Hkv * row_tiles(p, FiveBlocks::Br);
  const std::int64_t eights = room_for<EightWarps>(), fives = room_for<FiveBlocks>();
  if (heads <= processors() && fills_all_SMs<SixteenWarps>(p)) return run(SixteenWarps());
  // Eight: one wave, and half of it at least. With more than 16384 keys a merge costs next to
  // nothing, and parts are faster.
  if (eights < 2 * heads && heads <= eights && p.Nk <= 16384) return run(EightWarps());
  if (heads <= fives) return run(FiveBlocks());
  return run(SixBlocks());
}

}  // namespace

template <class T>
Shape shape(const Problem& p) {
  return with_tile(p, [](auto tile) {
    const int blocks = blocks_of_an_sm(fa2_kernel<decltype(tile), T>, tile.threads,
                                       tile.shared_bytes, tile.blocks);
    return Shape{tile.Br, tile.warps * tile.Bc, blocks};
  });
}
template Shape shape<__half>(const Problem&);
template Shape shape<__nv_bfloat16>(const Problem&);

template <class T>
bool launch_fa2(const Problem& p, const Tensors<T>& t, const Parts& parts, float scale, bool causal,
                cudaStream_t stream) {
  return with_tile(
      p, [&](auto tile) { return launch<decltype(tile), T>(p, t, parts, scale, causal, stream); });
}
template bool launch_fa2(const Problem&, const Tensors<__half>&, const Parts&, float, bool,
                         cudaStream_t);
template bool launch_fa2(const Problem&, const Tensors<__nv_bfloat16>&, const Parts&, float, bool,
                         cudaStream_t);

}  // namespace fa::decode
