// FlashAttention-2's S, and then not its softmax but the weights themselves: L is known. Two
// kernels:
//
//   Tile            what fits for d <= 64, 128 and 256: the rows of a warp, the keys of a tile
//   at, load        fa2's: where chunks lie, and how they come there
//   product         S = A B^T, of a warp's rows of A and all rows of B
//   fa2_kernel      Q_i stays, K_j comes; the weights go, by way of shared memory, row for row to
//                   P, or into the row's list
//   columns_kernel  Q and K exchanged: K_j stays, Q_i comes, and what was fa2's l, the sum over
//                   all that comes, is the column's sum
#include "06_optimized/beyond/weights/list.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/rows.cuh"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::weights {
namespace {

using namespace optimized;

constexpr int warps = 4, threads = 32 * warps;

// For head dimensions of at most D, tiles of Bc keys
template <int D_, int Bc_>
struct Tile {
  static constexpr int D = D_, Bc = Bc_;
  static constexpr int groups = D <= 128 ? 2 : 1;  // of 16 rows that a warp owns
  static constexpr int Br = 16 * groups * warps;
  static constexpr int pitch = Bc + 8;                            // of P_ij: 8 rows in other banks
  static constexpr std::size_t operands = (Br + Bc) * D * 2;      // bytes: what stays, what comes
  static constexpr std::size_t P_bytes = 16 * warps * pitch * 4;  // a group at a time
  static constexpr std::size_t tile_bytes = operands + P_bytes;
  static constexpr std::size_t lists_bytes = tile_bytes + Br * max_k * sizeof(Rank);
  static constexpr std::size_t columns_bytes = operands + 2 * Bc * (sizeof(float) + sizeof(int));
};

// Where chunk c of row r of a tile lies. From there chunk c + x is at ^ 8 x, if c and x have no bit
// in common: one instruction, where a sum would have to be swizzled anew.
template <int D>
__device__ int at(int r, int c) {
  return r * D + 8 * swizzled(r, c);
}

// tile[r][x] = X[first + r][x] for r < rows and x < d, 0 beyond: what lies there is not read. A
// thread starts copies of eight numbers, 16 bytes; where addresses are not multiples of 16 it
// fetches them one by one, and waits.
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

// S = A B^T. B's rows are the columns of the operand, so its pairs lie in memory.
template <class Sizes, class T>
__device__ void product(float (&S)[Sizes::groups][Sizes::Bc / 8][4], const T* A, const T* B) {
  constexpr int D = Sizes::D, groups = Sizes::groups, Bc = Sizes::Bc;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  const int a_at = at<D>(warp_row + by_rows.row, by_rows.chunk);
  const int b_at = at<D>(by_columns.row, by_columns.chunk);
#pragma unroll 2
  for (int x = 0; x < D / 16; ++x) {
    std::uint32_t A16[groups][4];
#pragma unroll
    for (int g = 0; g < groups; ++g) ldmatrix(A16[g], A + 16 * g * D + (a_at ^ 16 * x));
#pragma unroll
    for (int j = 0; j < Bc / 8; j += 2) {
      std::uint32_t B16[4];
      ldmatrix(B16, B + 8 * j * D + (b_at ^ 16 * x));
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        mma<T>(S[g][j], A16[g], B16[0], B16[1]);
        mma<T>(S[g][j + 1], A16[g], B16[2], B16[3]);
      }
    }
  }
}

__device__ int clamped(std::int64_t x, int top) {
  return int(max(std::int64_t(0), min(std::int64_t(top), x)));
}

// [quote kernel]
template <class Sizes, class T>
__global__ void __launch_bounds__(threads, 2)
    fa2_kernel(Problem p, Inputs<T> t, Wanted wanted, float scale, bool aligned) {
  constexpr int D = Sizes::D, groups = Sizes::groups, Br = Sizes::Br, Bc = Sizes::Bc;
  constexpr int pitch = Sizes::pitch;
  T* const Qi = dynamic_shared<T>();                                     // [Br, D]
  T* const Kj = Qi + Br * D;                                             // [Bc, D]
  float* const Pij = reinterpret_cast<float*>(Kj + Bc * D);              // [16 warps, pitch]
  Rank* const best = reinterpret_cast<Rank*>(Pij + 16 * warps * pitch);  // [Br, max_k], if k > 0

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  const Box box = wanted.box;
  const std::int64_t part = blockIdx.x % wanted.parts(), tile = blockIdx.x / wanted.parts();
  const std::int64_t tiles = (box.rows + Br - 1) / Br, head = tile / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = box.i0 + (tiles - 1 - tile % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), box.i0 + box.rows - i0)), d = int(p.d);
  const Mask mask(p, b);
  const auto K = t.K.rows(b, p.key_head(h), p.Nk, d);

  // (1) L_i, and how many keys the row sees
  float L[2 * groups];
  std::int64_t sees[2 * groups];
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const int r = min(r0 + 8 * i, rows - 1);
    L[i] = t.LSE[head * p.Nq + i0 + r];
    sees[i] = L[i] == -INFINITY ? 0 : mask.visible_keys(i0 + r);
  }
  for (int n = lane; wanted.k && lane < max_k && n < 16 * groups * max_k; n += max_k)
    best[warp_row * max_k + n] = 0;  // by the lane that reads and writes it later

  // No row sees keys from `end` on: they are not read.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  const std::int64_t first = box.j0 + part * wanted.keys_of_a_block();
  const std::int64_t behind = min(first + wanted.keys_of_a_block(), box.j0 + box.cols);
  const std::int64_t last = wanted.k ? min(behind, end) : behind;
  load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, d), i0, rows, aligned);
  if (first < last) load<D, Bc>(Kj, K, first, clamped(end - first, Bc), aligned);
  cp_async_commit();

  for (std::int64_t j0 = first; j0 < last; j0 += Bc) {
    cp_async_wait<0>();
    __syncthreads();  // K_j is complete, at first Q_i too

    // (3) S_ij = Q_i K_j^T
    float S[groups][Bc / 8][4] = {};
    product<Sizes>(S, Qi, Kj);

    __syncthreads();  // K_j is no longer read
    // (2) load K of the next tile
    if (j0 + Bc < last) load<D, Bc>(Kj, K, j0 + Bc, clamped(end - j0 - Bc, Bc), aligned);
    cp_async_commit();

#pragma unroll
    for (int g = 0; g < groups; ++g) {
      // (4) P_ij = exp(scale S_ij - L_i); -1 where row i does not see j
      // The difference first: it is small where P is not, and then its error is small, too.
      float* const P = Pij + warp * 16 * pitch;
#pragma unroll
      for (int i = 2 * g; i < 2 * g + 2; ++i) {
        const int e0 = i % 2 * 2;
        const int n = clamped(sees[i] - j0, Bc);  // of this tile the row sees keys below n
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float weight = ex2(log2_e * fmaf(scale, S[g][j][e0 + e], -L[i]));
            float& to = P[(lane / 4 + i % 2 * 8) * pitch + 8 * j + x0 + e];
            to = 8 * j + x0 + e < n ? weight : -1;
          }
      }
      __syncwarp();  // the group's rows are complete; a warp writes and reads its own only

      // (5) a row at a time, neighbouring lanes for neighbouring keys: written, or offered to its
      // list
      const int r_first = warp_row + 16 * g;
      for (int r = r_first; r < min(r_first + 16, rows); ++r) {
        const float* const weights = P + (r - r_first) * pitch;
        if (wanted.k) {
          Rank here = lane < max_k ? best[r * max_k + lane] : 0;
          for (int c = lane; c < Bc; c += 32)
            here = with_offers(here, weights[c] < 0 ? 0 : rank_of(weights[c], j0 + c), wanted.k);
          if (lane < max_k) best[r * max_k + lane] = here;
        } else {
          float* const to = wanted.P.at(b, h, i0 - box.i0 + r) + (j0 - box.j0);
          for (int c = lane; c < min(std::int64_t(Bc), last - j0); c += 32)
            to[c] = weights[c] < 0 ? 0 : weights[c];
        }
      }
      __syncwarp();  // P is no longer read
    }
  }
  cp_async_wait<0>();  // a block without keys has Q_i on its way

  // (6) the lists: lane n has the n-th. It has written that place itself.
  for (int r = warp_row; r < min(warp_row + 16 * groups, rows); ++r)
    if (lane < wanted.k) {
      const Rank nth = best[r * max_k + lane];
      wanted.P.at(b, h, i0 - box.i0 + r)[lane] = weight_of(nth);
      wanted.keys.at(b, h, i0 - box.i0 + r)[lane] = key_of(nth);
    }
}
// [end quote]

// [quote columns]
template <class Sizes, class T>
__global__ void __launch_bounds__(threads, 2)
    columns_kernel(Problem p, Inputs<T> t, float* sums, float scale, bool aligned) {
  constexpr int D = Sizes::D, groups = Sizes::groups, Br = Sizes::Bc, Bc = Sizes::Br;
  T* const Kj = dynamic_shared<T>();                        // [Bc, D]
  T* const Qi = Kj + Bc * D;                                // [Br, D]
  float* const Li = reinterpret_cast<float*>(Qi + Br * D);  // [2, Br]
  int* const seen = reinterpret_cast<int*>(Li + 2 * Br);    // [2, Br]: keys of the tile

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int c0 = warp_row + lane / 4;  // this thread's keys of the tile: c0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its queries of a block: x0, x0 + 1
  const std::int64_t tiles = (p.Nk + Bc - 1) / Bc, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t j0 = blockIdx.x % tiles * Bc;  // with a causal mask the first keys have most
  const int d = int(p.d);
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d);
  const std::int64_t first = mask.first_row(j0);  // rows before see nothing of this tile

  // Q_i, L_i and what the rows see, for the n-th tile of rows
  const auto bring = [&](std::int64_t i0, int n) {
    const int rows = clamped(p.Nq - i0, Br), r = threadIdx.x;
    load<D, Br>(Qi, Q, i0, rows, aligned);
    cp_async_commit();
    if (r >= Br) return;
    const float L = r < rows ? t.LSE[head * p.Nq + i0 + r] : -INFINITY;
    Li[n % 2 * Br + r] = L;
    seen[n % 2 * Br + r] = L == -INFINITY ? 0 : clamped(mask.visible_keys(i0 + r) - j0, Bc);
  };
  load<D, Bc>(Kj, K, j0, clamped(mask.length - j0, Bc), aligned);
  cp_async_commit();  // waited for at the end if no row comes along
  if (first < p.Nq) bring(first, 0);

  float sum[2 * groups] = {};
  int n = 0;
  for (std::int64_t i0 = first; i0 < p.Nq; i0 += Br, ++n) {
    cp_async_wait<0>();
    __syncthreads();  // Q_i and its rows' L are complete, at first K_j too
    float S[groups][Br / 8][4] = {};
    product<Sizes>(S, Kj, Qi);
    __syncthreads();  // Q_i is no longer read
    if (i0 + Br < p.Nq) bring(i0 + Br, n + 1);

#pragma unroll
    for (int j = 0; j < Br / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = n % 2 * Br + 8 * j + x0 + e;
        const float L = Li[row];
#pragma unroll
        for (int i = 0; i < 2 * groups; ++i)
          if (c0 + 8 * i < seen[row])
            sum[i] += ex2(log2_e * fmaf(scale, S[i / 2][j][i % 2 * 2 + e], -L));
      }
  }
  cp_async_wait<0>();  // a block without rows has K_j on its way
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const float of_key = row_sum(sum[i]);
    const std::int64_t key = j0 + c0 + 8 * i;
    if (x0 == 0 && key < p.Nk) sums[head * p.Nk + key] = of_key;
  }
}
// [end quote]

// run(Tile), of the one that d wants
template <class Run>
void with_tile(std::int64_t d, const Run& run) {
  if (d > 128) return run(Tile<256, 64>());
  if (d > 64) return run(Tile<128, 64>());
  run(Tile<64, 64>());
}

}  // namespace

template <class T>
void launch_fa2(const Problem& p, const Inputs<T>& t, const Wanted& wanted, float scale,
                cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) {
    using Sizes = decltype(tile);
    const auto fa2 = fa2_kernel<Sizes, T>;
    const std::size_t bytes = wanted.k ? Sizes::lists_bytes : Sizes::tile_bytes;
    allow_shared_memory(fa2, bytes);
    const std::int64_t tiles = (wanted.box.rows + Sizes::Br - 1) / Sizes::Br;
    FA_LAUNCH(fa2, dim3(unsigned(p.B * p.Hq * tiles * wanted.parts())), dim3(threads), bytes,
              stream, p, t, wanted, scale, in_16_bytes(t.Q) && in_16_bytes(t.K));
  });
}

template <class T>
void launch_fa2_columns(const Problem& p, const Inputs<T>& t, float* sums, float scale,
                        cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) {
    using Sizes = decltype(tile);
    const auto columns = columns_kernel<Sizes, T>;
    const std::size_t bytes = Sizes::columns_bytes;
    allow_shared_memory(columns, bytes);
    const std::int64_t tiles = (p.Nk + Sizes::Br - 1) / Sizes::Br;
    FA_LAUNCH(columns, dim3(unsigned(p.B * p.Hq * tiles)), dim3(threads), bytes, stream, p, t, sums,
              scale, in_16_bytes(t.Q) && in_16_bytes(t.K));
  });
}

#define FA_FOR(T)                                                                                 \
  template void launch_fa2(const Problem&, const Inputs<T>&, const Wanted&, float, cudaStream_t); \
  template void launch_fa2_columns(const Problem&, const Inputs<T>&, float*, float, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::weights
