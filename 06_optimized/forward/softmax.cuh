// What rungs 6 to 14, hopper and its walks have in common: which tile of queries a block takes, the
// softmax of a block of scores that a warpgroup holds in its registers, and how O leaves them.
//
// A warpgroup holds S, 64 rows and 2 n columns, as wgmma.cuh says: a thread has n numbers, in two
// rows, r = 0 (lane / 4 of its warp's 16) and r = 1 (8 below). S[i] is in row r = i / 2 % 2, and
// four lanes share a row. O lies likewise.
//
// Scores are before scaling; with c = scale log2 e, exp(scale x) = 2^(c x). m is c times their
// maximum, rounded. All weights of a row, l and O are off by 2^(what that rounding is), one factor,
// which the division by l takes out: as long as alpha has the m that they have, and is 1 where m
// stays.
#pragma once
#include <cfloat>
#include <cstdint>

#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {

// Tile n of all tiles of Br queries: head h of batch b, rows i0 to i0 + rows - 1. Of a head the
// last tile comes first: with a causal mask its rows see most keys.
struct Place {
  int b, h, i0, rows;
  __device__ Place(const Problem& p, int Br, unsigned n) {
    const int tiles = int((p.Nq + Br - 1) / Br), head = n / tiles;
    b = head / int(p.Hq);
    h = head % int(p.Hq);
    i0 = (tiles - 1 - n % tiles) * Br;
    rows = min(Br, int(p.Nq) - i0);
  }
};

// S_ij = -inf where row i does not see key j, in a block that begins with key j0. The thread's row
// r sees keys [0, visible[r]).
template <int n>
__device__ void hide(float (&S)[n], const int (&visible)[2], int j0) {
  const int first = j0 + 2 * (threadIdx.x % 4);
  const int limit[2] = {visible[0] - first, visible[1] - first};
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (8 * (i / 4) + i % 2 >= limit[i / 2 % 2]) S[i] = -INFINITY;
}

// m of a row that has seen no key. It is finite: a score of -inf weighs 2^(-inf - m) = 0, and alpha
// is 2^(m - m) = 1, of l = 0 and O = 0.
constexpr float no_key = -FLT_MAX;

// ---- of one row, r ----

// m = max(m, c max_j S_ij), alpha = 2^(m_before - m).
template <int n>
__device__ void new_maximum_of(int r, const float (&S)[n], float c, float& m, float& alpha) {
  float even = S[2 * r], odd = S[2 * r + 1];
#pragma unroll
  for (int i = 4 + 2 * r; i < n; i += 4) {
    even = fmaxf(even, S[i]);
    odd = fmaxf(odd, S[i + 1]);
  }
  float largest = fmaxf(even, odd);
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
  const float before = m;
  m = fmaxf(m, c * largest);
  alpha = ex2(before - m);
}

// P_ij = 2^(c S_ij - m) in place of S, l = alpha l + sum_j P_ij: of this thread's columns.
template <int n>
__device__ void weights_of(int r, float (&S)[n], float c, float m, float alpha, float& l) {
  float even = l * alpha, odd = 0;
#pragma unroll
  for (int i = 2 * r; i < n; i += 4) {
    S[i] = ex2(fmaf(S[i], c, -m));
    S[i + 1] = ex2(fmaf(S[i + 1], c, -m));
    even += S[i];
    odd += S[i + 1];
  }
  l = even + odd;
}

// ---- of both rows. Rungs 6 to 11: first the maxima, then the weights ----

template <int n>
__device__ void new_maximum(const float (&S)[n], float c, float (&m)[2], float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) new_maximum_of(r, S, c, m[r], alpha[r]);
}

template <int n>
__device__ void weights(float (&S)[n], float c, const float (&m)[2], const float (&alpha)[2],
                        float (&l)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) weights_of(r, S, c, m[r], alpha[r], l[r]);
}

// ---- Rungs 12 to 14: row by row ----

// In which order all this is done is up to ptxas. In rung 11 it takes both maxima first, and no
// exponential runs beside them. But it moves nothing over a branch, even over one that is never
// taken: no factor alpha is negative, which ptxas does not know. With such a branch after the first
// maximum, the second is taken between the exponentials of the first row.
enum class Branch { none, after_first_maximum, predicate_on_alpha_too };

// m = max(m, c max_j S_ij), alpha = 2^(m_before - m), P_ij = 2^(c S_ij - m) in place of S,
// l = alpha l + sum_j P_ij.
// [quote softmax]
template <Branch branch = Branch::none, int n>
__device__ void softmax(float (&S)[n], float c, float (&m)[2], float (&l)[2], float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_maximum_of(r, S, c, m[r], alpha[r]);
    if (branch == Branch::after_first_maximum && r == 0 && alpha[r] < 0) stop();
    weights_of(r, S, c, m[r], alpha[r], l[r]);
  }
}
// [end quote]

// ---- hopper, and the walks made from it ----

// The largest score that each of a thread's two rows has seen, and m, c times that.
struct Maxima {
  float S[2], m[2];
  __device__ explicit Maxima(float c) {
    S[0] = S[1] = no_key / fmaxf(1, c);  // c times it is finite, too
    m[0] = m[1] = c * S[0];
  }
};

// The same, written so that ptxas makes more of it: one chain of maxima, which begins with the
// largest score so far; alpha, if asked for under a predicate, and the sums behind the exponentials
// (hopper.md says what that is worth, and how it was found).
template <Branch branch, int n>
__device__ void fast_softmax(float (&S)[n], float c, Maxima& maxima, float (&l)[2],
                             float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Maxima before = maxima;
    float& largest = maxima.S[r];
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) largest = fmaxf(fmaxf(largest, S[i]), S[i + 1]);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const float m = maxima.m[r] = __fmul_rn(c, largest);
    const float e = before.m[r] - m;
    if (branch != Branch::none && r == 0 && e > 1) stop();  // e <= 0, which ptxas does not know
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) {
      S[i] = ex2(fmaf(S[i], c, -m));
      S[i + 1] = ex2(fmaf(S[i + 1], c, -m));
    }
    const bool stays = branch == Branch::predicate_on_alpha_too && largest == before.S[r];
    alpha[r] = stays ? 1.f : ex2(e);
    float even = l[r] * alpha[r], odd = 0;
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) {
      even += S[i];
      odd += S[i + 1];
    }
    l[r] = even + odd;
  }
}

// ---- O, and the end ----

// O = alpha O.
template <int n>
__device__ void scale_rows(float (&O)[n], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < n; ++i) O[i] *= factor[i / 2 % 2];
}

// l of a row: the sum of what its four lanes have added up.
__device__ inline float row_sum(float l) {
  l += __shfl_xor_sync(0xffffffff, l, 1);
  return l + __shfl_xor_sync(0xffffffff, l, 2);
}

// Row r: O = O / l. A row without keys has l = 0: O = 0.
template <int n>
__device__ void divide(int r, float (&O)[n], float l) {
  const float inverse = 1 / l;
#pragma unroll
  for (int i = 2 * r; i < n; i += 4) {
    O[i] = l == 0 ? 0 : O[i] * inverse;
    O[i + 1] = l == 0 ? 0 : O[i + 1] * inverse;
  }
}

// ---- the end, which rung 6 spells out: two calls from rung 7 on ----

// L_i = (m + log2 l) log 2. A row without keys has l = 0: L = -inf.
__device__ inline float log_sum(float m, float l) {
  return l == 0 ? -INFINITY : (m + __log2f(l)) * (1 / log2_e);
}

// O_i = O / l, and L_i unless LSE is null. `row` is the thread's upper one in a tile of `rows`,
// whose LSE begins at LSE[first].
template <int n>
__device__ void finish(float (&O)[n], const float (&m)[2], float (&l)[2], float* LSE,
                       std::int64_t first, int row, int rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = row_sum(l[r]);
    if (LSE && threadIdx.x % 4 == 0 && row + 8 * r < rows)
      LSE[first + row + 8 * r] = log_sum(m[r], l[r]);
    divide(r, O, l[r]);
  }
}

// A warp's 16 rows leave by themselves, through what begins at `from` in a tile of Br rows. They
// are those from row `first` on of the tile of queries that begins at i0.
template <int Br, class T, int n>
__device__ void store_rows(const CUtensorMap& map, T* from, const float (&O)[n], int lane, int i0,
                           int first, int h, int b) {
  put<Br>(from, O, lane);
  fence_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int x = 0; x < 2 * n; x += 64) tma_store(map, from + x * Br, x, i0 + first, h, b);
    tma_commit();
  }
}

}  // namespace fa::optimized
