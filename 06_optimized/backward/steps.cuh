// What rungs 4 to 10 and hopper have in common, the second half: what hides P, the numbers of a
// step, and how dK and dV leave. The first: bring.cuh.
//
// A warpgroup holds S, P, dP and dS transposed, a row for each of its 64 keys, as wgmma.cuh says: a
// thread has n numbers of two keys, r = 0 (lane / 4 of its warp's 16) and r = 1 (8 below). S[i]
// belongs to key r = i / 2 % 2 and to query 8 (i / 4) + 2 (lane % 4) + i % 2. dK and dV lie
// likewise, with columns of d in place of queries.
//
// What the rungs differ in is not here: what the groups wait for and when they say so, and in which
// order a step issues its products.
#pragma once
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {

// ---- the mask ----

// P_ij = 0 where query i does not see key j; hidden[r] counts hidden queries from the thread's
// first. Rung 3 has this, too. Rung 9 and hopper hide S, before the exponentials, and say with
// which value.
template <int n>
__device__ void hide(float (&P)[n], const int (&hidden)[2], float value = 0) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (8 * (i / 4) + i % 2 < hidden[i / 2 % 2]) P[i] = value;
}

// Key r of a thread is seen from query key[r] on; all 64 keys of its group, which begin with key j,
// from query `all` on.
struct SeenFrom {
  int key[2], all;

  template <class Mask>
  __device__ SeenFrom(const Mask& mask, int j, int warp, int lane) {
    const int row = 16 * warp + lane / 4;
    key[0] = int(mask.first_row(j + row));
    key[1] = int(mask.first_row(j + row + 8));
    all = int(mask.first_row(j + 63));
  }
  // What hide() takes, in a step that begins with query i0
  struct Hidden {
    int of_key[2];
  };
  __device__ Hidden hidden(int i0, int lane) const {
    const int first = i0 + 2 * (lane % 4);
    return {{key[0] - first, key[1] - first}};
  }
};

// ---- a step's numbers: what rungs 4 to 7 spell out ----

// P_ij = exp(scale S_ij - LSE_i) = 2^(c S_ij - LSE2_i)
template <int n, int Br>
__device__ void exponentials(float (&P)[n], const float (&S)[n], float c, const float (&LSE2)[Br],
                             int lane) {
  const auto of_lane = reinterpret_cast<const float2*>(LSE2) + lane % 4;
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const float2 L = of_lane[i / 4 * 4];
    P[i] = ex2(fmaf(S[i], c, -L.x));
    P[i + 1] = ex2(fmaf(S[i + 1], c, -L.y));
  }
}

// dS_ij = P_ij (dP_ij - D_i), in place of dP
template <int n, int Br>
__device__ void to_dS(float (&dP)[n], const float (&P)[n], const float (&D_i)[Br], int lane) {
  const auto of_lane = reinterpret_cast<const float2*>(D_i) + lane % 4;
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const float2 minus = of_lane[i / 4 * 4];
    dP[i] = P[i] * (dP[i] - minus.x);
    dP[i + 1] = P[i + 1] * (dP[i + 1] - minus.y);
  }
}

// dS of a group's 64 keys into shared memory, as rows of queries, for dQ
template <class T, int n>
__device__ void put_dS(T* to, const std::uint32_t (&rounded)[n][4], int warp, int lane) {
  const RowChunk row = ldmatrix_by_columns(lane);
#pragma unroll
  for (int x = 0; x < n; ++x)
    stmatrix_transposed(to + swizzled_chunk(16 * x + row.row, 2 * warp + row.chunk), rounded[x]);
}

// dQ of a group into its buffer, for the warp that adds it up, as rungs 5 to 7 do it: in the order
// of the registers, which is that of global memory, too.
template <int n>
__device__ void put_dQ(float* to, const float (&dQ)[n], int thread) {
#pragma unroll
  for (int i = 0; i < n; i += 4)
    reinterpret_cast<float4*>(to)[i / 4 * 128 + thread] =
        make_float4(dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
}

// The same, into global memory by the group itself, `to` the thread's first number: added to what
// is there, or in its place.
template <int n>
__device__ void add_dQ(float* to, const float (&dQ)[n], bool in_its_place) {
  if (in_its_place) {
#pragma unroll
    for (int i = 0; i < n; i += 4)
      *reinterpret_cast<float4*>(to + i * 128) =
          make_float4(dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 4) add(to + i * 128, dQ + i);
  }
}

// Zeros in place of a group's keys and values from row `begin` on: 64 rows of tiles of Bc.
template <int Bc, int D, class T>
__device__ void clear_keys(T* K, T* V, int begin, int thread) {
  for (int e = begin * 8 + thread; e < 64 * 8; e += 128)
    for (int x = 0; x < D; x += 64) {
      *reinterpret_cast<uint4*>(K + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(V + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
    }
}

// ---- the end ----

// dK and dV leave, a warp's 16 rows by themselves, through what were K and V of its group: 64 rows
// of tiles of Bc rows, the first of them key j.
template <int Bc, class T, int n>
__device__ void store_sums(const Maps& maps, T* K, T* V, const float (&dK)[n], const float (&dV)[n],
                           int warp, int lane, int j, int h, int b) {
  K += 16 * warp * 64;
  V += 16 * warp * 64;
  put<Bc>(K, dK, lane);
  put<Bc>(V, dV, lane);
  fence_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int x = 0; x < 2 * n; x += 64) {
      tma_store(maps.dK, K + x * Bc, x, j + 16 * warp, h, b);
      tma_store(maps.dV, V + x * Bc, x, j + 16 * warp, h, b);
    }
    tma_commit();
    tma_wait_read();
  }
}

}  // namespace fa::optimized
