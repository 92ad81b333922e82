// The forward's rungs 2 to 4 at once: cp.async, the swizzle, ldmatrix, more rows a warp; and the
// whole contract of this course. The owners and their products are those of 1_mma.cu.
//
//   ldmatrix             reads K's tile by rows for S = Q K^T, and transposed for dQ += dS K; so it
//                        does Q's and dO's for dK and dV. No product needs a second copy of a tile
//   32 rows a warp       where the sums leave room: every fragment of the passing tiles is
//                        multiplied twice. dQ: d <= 128. dK with dV: d <= 64
//   dP before S          then V_j is free while S and dQ are computed, K_j while dP of the next
//                        tile is: with one buffer each, the next tile is always on its way
//   two Q_i              that is not enough where dV too reads dO_i: there Q has a second buffer
//   two loops            tiles that some row sees in part, with the mask; then all others without
//   d > 128              dK and dV of a warp's keys do not fit into its registers together. The
//                        owner runs twice, for one of them at a time: S is computed once more
//
//   owner of dQ        on its way       owner of dK and dV   on its way
//   dP = dO V^T        K_j              dP^T = V dO^T        Q_i+1
//   S = Q K^T          V_j+1            S^T = K Q^T          Q_i+1
//   dQ += dS K         V_j+1            dV += P^T dO         Q_i+1
//                                       dK += dS^T Q         Q_i+1, dO_i+1
//
// What should change: reads of shared memory, from 32,768 cycles for 64 x 64 scores (d = 128) to
// 3584, and waits are hidden by the copies and by the second block of the SM: five to seven times
// the speed. What should limit it: mma.sync, as in the forward, and seven products where five would
// do.
//
// Measured: 219 TFLOP/s after 34; with a causal mask 196 after 31.
#include <type_traits>

#include "06_optimized/backward.hpp"
#include "06_optimized/optimized.hpp"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::optimized {
namespace {

constexpr int warps = 4, threads = 32 * warps;
constexpr std::size_t most_shared = 99 * 1024;  // of a block on 8.6 and 8.9; 8.0 and 9.0 have more

// For head dimensions of at most D. groups: of 16 rows that a warp owns.
template <int D>
struct DqTile {
  static constexpr int groups = D <= 128 ? 2 : 1;
  static constexpr int Br = 16 * groups * warps, Bc = D <= 64 ? 64 : 32;
  static constexpr std::size_t shared_bytes = (2 * Br + 2 * Bc) * D * 2;  // Q_i, dO_i, K_j, V_j
};
template <int D, bool with_dK>
struct DkvTile {
  static constexpr int groups = D <= 64 ? 2 : 1;
  static constexpr int Bc = 16 * groups * warps, Br = D == 128 ? 64 : 32;
  static constexpr bool two_Q = D <= 128 || !with_dK;  // else one buffer is all that fits
  // K_j, V_j, Q_i, dO_i, and LSE2 and D of the rows i. At most 97 KiB.
  static constexpr std::size_t shared_bytes =
      ((with_dK ? 2 : 1) * Bc + (two_Q ? 3 : 2) * Br) * D * 2 + 2 * Br * sizeof(float);
};

// Where chunk c of row r of a tile lies. From there chunk c + x is at ^ 8 x, if c and x have no bit
// in common: one instruction, where a sum would have to be swizzled anew.
template <int D>
__device__ int at(int r, int c) {
  return r * D + 8 * swizzled(r, c);
}

// tile[r][x] = X[first + r][x] for r < rows and x < d, 0 beyond: 0 * NaN is NaN, so that P = 0
// would not keep out what lies behind the last row. A thread starts copies of eight numbers, 16
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

// S = A B^T: the warp's rows of A, all `cols` rows of B. B's rows are the columns of the operand,
// so its pairs lie in memory.
template <int D, int groups, int cols, class T>
__device__ void product(float (&S)[groups][cols / 8][4], const T* A, const T* B) {
  const RowChunk by_rows = ldmatrix_by_rows(threadIdx.x % 32);
  const RowChunk by_columns = ldmatrix_by_columns(threadIdx.x % 32);
  const int a_at = at<D>(by_rows.row, by_rows.chunk);  // what this lane names to ldmatrix: of the
  const int b_at = at<D>(by_columns.row, by_columns.chunk);  // first block, others differ from it
#pragma unroll
  for (auto& of_group : S)
    for (auto& block : of_group)
      for (float& s : block) s = 0;
#pragma unroll 4
  for (int x = 0; x < D / 16; ++x) {
    std::uint32_t A16[groups][4];
#pragma unroll
    for (int g = 0; g < groups; ++g) ldmatrix(A16[g], A + 16 * g * D + (a_at ^ 16 * x));
#pragma unroll
    for (int j = 0; j < cols / 8; j += 2) {
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

// W16 = W rounded to T, as the left operand of a product: columns 16 k to 16 k + 15 are two blocks
// of W, already where they must be.
template <class T, int steps, int groups>
__device__ void round(std::uint32_t (&W16)[steps][groups][4],
                      const float (&W)[groups][2 * steps][4]) {
#pragma unroll
  for (int k = 0; k < steps; ++k)
#pragma unroll
    for (int i = 0; i < 4 * groups; ++i) {
      const float* two = W[i / 4][2 * k + i / 2 % 2] + i % 2 * 2;
      W16[k][i / 4][i % 4] = rounded_pair<T>(two[0], two[1]);
    }
}

// G += W X: the rows of the tile X are the columns of W.
template <int D, int steps, int groups, class T>
__device__ void accumulate(float (&G)[groups][D / 8][4],
                           const std::uint32_t (&W16)[steps][groups][4], const T* X) {
  const RowChunk by_rows = ldmatrix_by_rows(threadIdx.x % 32);
  const int x_at = at<D>(by_rows.row, by_rows.chunk);
#pragma unroll
  for (int k = 0; k < steps; ++k)
#pragma unroll
    for (int y = 0; y < D / 8; y += 2) {
      std::uint32_t X16[4];
      ldmatrix_transposed(X16, X + 16 * k * D + (x_at ^ 8 * y));
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        mma<T>(G[g][y], W16[k][g], X16[0], X16[1]);
        mma<T>(G[g][y + 1], W16[k][g], X16[2], X16[3]);
      }
    }
}

// X[first + r] = factor G, of the warp's rows those that exist. They pass through `tile`, of which
// a warp reads and writes its own rows only, so that memory is written in chunks of 16 bytes.
template <int D, int groups, class T>
__device__ void store(const Rows<T>& X, std::int64_t first, int rows, float factor,
                      const float (&G)[groups][D / 8][4], T* tile, bool aligned) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4, x0 = lane % 4 * 2, d = int(X.cols);
  __syncwarp();  // what was there is no longer read
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i)
#pragma unroll
    for (int y = 0; y < D / 8; ++y) {
      const float* two = G[i / 2][y] + i % 2 * 2;
      *reinterpret_cast<std::uint32_t*>(tile + at<D>(r0 + 8 * i, y) + x0) =
          rounded_pair<T>(factor * two[0], factor * two[1]);
    }
  __syncwarp();  // the warp's rows are complete
  for (int chunk = lane; chunk < 16 * groups * (D / 8); chunk += 32) {
    const int r = warp_row + chunk / (D / 8), x = chunk % (D / 8) * 8;
    if (r >= rows || x >= d) continue;
    const T* from = tile + at<D>(r, x / 8);
    T* to = X[first + r] + x;
    if (aligned && x + 8 <= d)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int e = 0; e < 8 && x + e < d; ++e) to[e] = from[e];
  }
}

// The owner of dQ_i: it passes over the keys that its rows see.
template <int D, class T>
__global__ void __launch_bounds__(threads, 2)
    swizzle_dq_kernel(Problem p, Backward<T> t, float scale, Passed passed, bool aligned) {
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
  const Mask mask(p, b);
  const auto K = t.K.rows(b, hk, p.Nk, p.d), V = t.V.rows(b, hk, p.Nk, p.d);
  const float c = scale * 1.44269504f;  // log2 e: exp(scale x) = 2^(c x)

  float LSE2[2 * groups], D_i[2 * groups];  // rows beyond the last have theirs too: padding
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i) {
    const std::int64_t row = head * passed.rows + i0 + r0 + 8 * i;
    LSE2[i] = passed.LSE2[row];
    D_i[i] = passed.D[row];
  }

  // The last row of the tile sees most, the first one least: no row sees keys from `end` on, all
  // rows see those below `full`.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  const std::int64_t full = mask.visible_keys(i0) / Bc * Bc;
  std::int64_t j0 = (end + Bc - 1) / Bc * Bc - Bc;  // the last tile's first key; none: negative
  if (end > 0) {
    load<D, Br>(Qi, t.Q.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Br>(dOi, t.dO.rows(b, h, p.Nq, p.d), i0, rows, aligned);
    load<D, Bc>(Vj, V, j0, int(end - j0), aligned);
    cp_async_commit();
  }

  float dQ[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    cp_async_wait<0>();
    __syncthreads();  // V_j (at first Q_i and dO_i too) is complete, K before it no longer read
    load<D, Bc>(Kj, K, j0, masked ? int(min(std::int64_t(Bc), end - j0)) : Bc, aligned);
    cp_async_commit();

    // dP_ij = dO_i V_j^T
    float S[groups][Bc / 8][4], dP[groups][Bc / 8][4];
    product<D, groups, Bc>(dP, dOi + warp_row * D, Vj);

    cp_async_wait<0>();
    __syncthreads();  // K_j is complete, and V_j no longer read
    if (j0 > 0) load<D, Bc>(Vj, V, j0 - Bc, Bc, aligned);
    cp_async_commit();

    // P_ij = 2^(c Q_i K_j^T - LSE2_i);  dS_ij = P_ij (dP_ij - D_i), 0 where row i does not see j
    product<D, groups, Bc>(S, Qi + warp_row * D, Kj);
#pragma unroll
    for (int i = 0; i < 2 * groups; ++i) {
      // Of this tile the row sees keys below n.
      int n = Bc;
      if constexpr (masked) {
        const std::int64_t visible = mask.visible_keys(i0 + r0 + 8 * i) - j0;
        n = int(max(std::int64_t(0), min(std::int64_t(Bc), visible)));
      }
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = S[i / 2][j][i % 2 * 2 + e];
          const float P = ex2(fmaf(c, s, -LSE2[i]));
          s = P * (dP[i / 2][j][i % 2 * 2 + e] - D_i[i]);
          if (masked && 8 * j + x0 + e >= n) s = 0;
        }
    }

    // dQ_i += dS_ij K_j
    std::uint32_t dS[Bc / 16][groups][4];
    round<T>(dS, S);
    accumulate<D>(dQ, dS, Kj);
  };
  for (; j0 >= full; j0 -= Bc) step(std::true_type());
  for (; j0 >= 0; j0 -= Bc) step(std::false_type());

  store<D>(t.dQ.rows(b, h, p.Nq, p.d), i0, rows, scale, dQ, Qi, aligned);
}

// The owner of dK_j and dV_j, or of one of them: it passes over the queries that see its keys, in
// all query heads of the group. In S^T and dP^T the rows are keys and the columns queries.
template <int D, bool with_dK, bool with_dV, class T>
__global__ void __launch_bounds__(threads, 2)
    swizzle_dkv_kernel(Problem p, Backward<T> t, float scale, Passed passed, bool aligned) {
  using Sizes = DkvTile<D, with_dK>;
  constexpr int groups = Sizes::groups, Bc = Sizes::Bc, Br = Sizes::Br;
  constexpr bool two_Q = Sizes::two_Q;
  T* const Kj = dynamic_shared<T>();           // [Bc, D]; at the end dK_j, then dV_j
  T* const Vj = Kj + Bc * D;                   // [Bc, D], only for dK
  T* const dOi = Vj + (with_dK ? Bc * D : 0);  // [Br, D]
  T* const Qs = dOi + Br * D;                  // [1 or 2][Br, D]
  float* const LSE2 = reinterpret_cast<float*>(Qs + (two_Q ? 2 : 1) * Br * D);  // [Br]
  float* const D_i = LSE2 + Br;                                                 // [Br]

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  // Counted in int, for the sums need the registers: Nq and Nk are at most 2^30.
  const int tiles = int((p.Nk + Bc - 1) / Bc), head = int(blockIdx.x) / tiles;
  const int b = head / int(p.Hkv), hk = head % int(p.Hkv), group = int(p.Hq) / int(p.Hkv);
  const int j0 = int(blockIdx.x) % tiles * Bc;  // with a causal mask the first keys have most
  const int keys = min(Bc, int(p.Nk) - j0), Nq = int(p.Nq);
  const Mask mask(p, b);
  const float c = scale * 1.44269504f;  // log2 e: exp(scale x) = 2^(c x)

  const auto load_Q = [&](T* to, int h, int i0) {
    load<D, Br>(to, t.Q.rows(b, h, Nq, p.d), i0, min(Br, Nq - i0), aligned);
  };
  const auto load_dO = [&](int h, int i0) {  // and LSE2 and D, which are padded
    const int four = 4 * threadIdx.x;
    load<D, Br>(dOi, t.dO.rows(b, h, Nq, p.d), i0, min(Br, Nq - i0), aligned);
    const std::int64_t row = (b * p.Hq + h) * passed.rows + i0 + four;
    if (four < Br) {
      cp_async(LSE2 + four, passed.LSE2 + row, 16);
      cp_async(D_i + four, passed.D + row, 16);
    }
  };

  // The first key of the tile is seen by most rows, the last one by least: no row before `begin`
  // sees any, all rows from `full` on see all.
  int begin = int(mask.first_row(j0));
  if (begin < Nq) begin = begin / Br * Br;
  const int full = int(mask.first_row(j0 + keys - 1));
  const int h_end = (hk + 1) * group;
  int h = hk * group, i0 = begin, buffer = 0;  // of Q
  if (h < h_end && begin < Nq) {
    // Padded keys are not even looked at: 0 times what they hold may be NaN.
    const int seen = min(keys, int(mask.length) - j0);
    load<D, Bc>(Kj, t.K.rows(b, hk, p.Nk, p.d), j0, seen, aligned);
    if constexpr (with_dK) load<D, Bc>(Vj, t.V.rows(b, hk, p.Nk, p.d), j0, seen, aligned);
    if constexpr (two_Q) load_Q(Qs, h, i0);
    load_dO(h, i0);
    cp_async_commit();
  }

  int first[2 * groups];  // the first row that sees this thread's keys
#pragma unroll
  for (int r = 0; r < 2 * groups; ++r) first[r] = int(mask.first_row(j0 + r0 + 8 * r));

  float dK[groups][D / 8][4] = {}, dV[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    const bool same_head = i0 + Br < Nq;
    const int next_h = same_head ? h : h + 1, next_i0 = same_head ? i0 + Br : begin;
    const bool more = next_h < h_end;
    T* const Qi = Qs + buffer;
    if constexpr (two_Q) buffer ^= Br * D;

    cp_async_wait<0>();
    __syncthreads();  // dO_i and, of two, Q_i are complete, and Q before it is no longer read
    if constexpr (!two_Q)
      load_Q(Qi, h, i0);
    else if (more)
      load_Q(Qs + buffer, next_h, next_i0);
    cp_async_commit();

    // dP_ij^T = V_j dO_i^T
    float S[groups][Br / 8][4];
    [[maybe_unused]] float dP[groups][Br / 8][4];
    [[maybe_unused]] std::uint32_t P16[Br / 16][groups][4], dS16[Br / 16][groups][4];
    if constexpr (with_dK) product<D, groups, Br>(dP, Vj + warp_row * D, dOi);

    if constexpr (!two_Q) {
      cp_async_wait<0>();
      __syncthreads();  // Q_i is complete
    }

    // P_ij^T = 2^(c K_j Q_i^T - LSE2_i);  dS_ij = P_ij (dP_ij - D_i); 0 where row i does not see j
    product<D, groups, Br>(S, Kj + warp_row * D, Qi);
#pragma unroll
    for (int i = 0; i < Br / 8; ++i) {
      const float2 LSE2_i = *reinterpret_cast<const float2*>(LSE2 + 8 * i + x0);
      [[maybe_unused]] const float2 delta = *reinterpret_cast<const float2*>(D_i + 8 * i + x0);
#pragma unroll
      for (int g = 0; g < groups; ++g)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool hidden = masked && i0 + 8 * i + x0 + e % 2 < first[2 * g + e / 2];
          float& P = S[g][i][e];
          P = hidden ? 0 : ex2(fmaf(c, P, -(e % 2 ? LSE2_i.y : LSE2_i.x)));
          if constexpr (with_dK) {
            float& dS = dP[g][i][e];
            dS = hidden ? 0 : P * (dS - (e % 2 ? delta.y : delta.x));
          }
        }
    }

    // dV_j += P_ij^T dO_i;  dK_j += dS_ij^T Q_i. P and dS are rounded both at once: from here on
    // they need half the registers.
    if constexpr (with_dV) round<T>(P16, S);
    if constexpr (with_dK) round<T>(dS16, dP);
    if constexpr (with_dV) accumulate<D>(dV, P16, dOi);
    __syncthreads();  // dO_i, LSE2 and D are no longer read
    if (more) load_dO(next_h, next_i0);
    cp_async_commit();
    if constexpr (with_dK) accumulate<D>(dK, dS16, Qi);
  };
  for (; h < h_end; ++h) {
    for (i0 = begin; i0 < full; i0 += Br) step(std::true_type());
    for (; i0 < Nq; i0 += Br) step(std::false_type());
  }

  if constexpr (with_dK) store<D>(t.dK.rows(b, hk, p.Nk, p.d), j0, keys, scale, dK, Kj, aligned);
  if constexpr (with_dV) store<D>(t.dV.rows(b, hk, p.Nk, p.d), j0, keys, 1, dV, Kj, aligned);
}

template <class T>
bool all_in_16_bytes(const Backward<T>& t) {
  return in_16_bytes(t.Q) && in_16_bytes(t.K) && in_16_bytes(t.V) && in_16_bytes(t.dO) &&
         in_16_bytes(t.dQ) && in_16_bytes(t.dK) && in_16_bytes(t.dV);
}

template <int D, class T>
void launch_dq(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
               cudaStream_t stream) {
  const auto dq = swizzle_dq_kernel<D, T>;
  constexpr std::size_t bytes = DqTile<D>::shared_bytes;
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + DqTile<D>::Br - 1) / DqTile<D>::Br);
  if (blocks == 0) return;
  allow_shared_memory(dq, bytes);
  FA_LAUNCH(dq, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, scale, passed,
            all_in_16_bytes(t));
}

template <int D, bool with_dK, bool with_dV, class T>
void launch_dkv(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                cudaStream_t stream) {
  using Sizes = DkvTile<D, with_dK>;
  const auto dkv = swizzle_dkv_kernel<D, with_dK, with_dV, T>;
  constexpr std::size_t bytes = Sizes::shared_bytes;
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Sizes::Bc - 1) / Sizes::Bc);
  if (blocks == 0) return;
  allow_shared_memory(dkv, bytes);
  FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, scale, passed,
            all_in_16_bytes(t));
}

template <int D, class T>
void launch(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
            cudaStream_t stream) {
  launch_dq<D>(p, t, scale, passed, stream);
  if constexpr (D <= 128) {
    launch_dkv<D, true, true>(p, t, scale, passed, stream);
  } else {
    launch_dkv<D, true, false>(p, t, scale, passed, stream);
    launch_dkv<D, false, true>(p, t, scale, passed, stream);
  }
}

}  // namespace

template <class T>
void launch_backward_swizzle(const Problem& p, const Backward<T>& t, float scale,
                             const Passed& passed, cudaStream_t stream) {
  if (p.B * p.Hq * p.Nq > 0) launch_before(p, t, passed, stream);
  (p.d <= 64    ? launch<64, T>
   : p.d <= 128 ? launch<128, T>
                : launch<256, T>)(p, t, scale, passed, stream);
}
template void launch_backward_swizzle(const Problem&, const Backward<__half>&, float, const Passed&,
                                      cudaStream_t);
template void launch_backward_swizzle(const Problem&, const Backward<__nv_bfloat16>&, float,
                                      const Passed&, cudaStream_t);

}  // namespace fa::optimized
