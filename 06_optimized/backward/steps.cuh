// What rungs 4 to 10 and hopper have in common: which keys a block of threads has, its steps over
// the queries that see them, how the tiles of a step come, what hides P, and how dK and dV leave.
//
// A block keeps Bc keys; each step brings Br queries. A warpgroup holds S, P, dP and dS transposed,
// a row for each of its 64 keys, as wgmma.cuh says: a thread has n numbers of two keys, r = 0
// (lane / 4 of its warp's 16) and r = 1 (8 below). S[i] belongs to key r = i / 2 % 2 and to query
// 8 (i / 4) + 2 (lane % 4) + i % 2. dK and dV lie likewise, with columns of d in place of queries.
//
// What the rungs differ in is not here: the barriers, who waits for what, and in which order a step
// issues its products.
#pragma once
#include "06_optimized/backward.hpp"
#include "06_optimized/optimized.hpp"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {

// Bytes of shared memory that a block of threads may have on compute capability 9.0.
constexpr std::size_t most_shared = 227 * 1024;

// ---- which keys a block has ----
// Blocks of threads start in the order of their numbers. Each has Bc keys, from first_key() on, of
// one head of all B Hkv.

// Rungs 4 and 5: one head after the other.
template <int Bc>
struct HeadByHead {
  int tiles;  // of a head

  __device__ explicit HeadByHead(const Problem& p) : tiles(int((p.Nk + Bc - 1) / Bc)) {}
  __device__ int head() const { return int(blockIdx.x) / tiles; }
  __device__ int first_key() const { return int(blockIdx.x) % tiles * Bc; }
};

// Rungs 6 to 10 and hopper: in sections of heads. With a causal mask the first keys are seen by the
// most queries, so the shortest blocks come last. Or first, where blocks take turns.
template <int Bc>
struct InSections {
  Order<int> order;

  __device__ InSections(const Problem& p, int section, bool last_first = false)
      : order{int((p.Nk + Bc - 1) / Bc), int(p.B * p.Hkv), section, last_first} {}
  __device__ int head() const {
    int head, tile;
    order.place(blockIdx.x, head, tile);
    return head;
  }
  __device__ int first_key() const {
    int head, tile;
    order.place(blockIdx.x, head, tile);
    return tile * Bc;
  }
};

// On the host: as many heads a section as fit into so much of the L2 cache, where every step reads
// Q and dO and adds to dQ. Of a query Q and dO have 2 bytes for each number, dQ 4. A key head
// counts for one query head: its blocks go through those of its group one after the other.
inline int heads_of_section(const Problem& p, int D, int MiB) {
  return heads_within(of_L2(MiB), p.Nq * D * (2 + 2 + 4), p.B * p.Hkv);
}

// ---- its steps ----

// A walk over the queries that see a block's keys: from the first such tile of Br queries to the
// last, in one head of the group after the other.
template <int Br>
struct Place {
  int b, j0;         // batch, first key
  int first, Nq;     // the queries of each head, first a multiple of Br
  int h, i0, steps;  // where the walk is; how many steps it has

  // Of keys that nobody sees the first row is Nq, and `first` may lie below it: a step of which all
  // is hidden. Hopper, whose keys may hold NaN, and who takes
  // turns must skip it.
  template <class Keys>
  __device__ Place(const Problem& p, const Keys& keys, bool skip_unseen = false) {
    const int head = keys.head(), group = int(p.Hq / p.Hkv);
    b = head / int(p.Hkv);
    j0 = keys.first_key();
    Nq = int(p.Nq);
    const int row = int(Mask(p, b).first_row(j0));
    first = row / Br * Br;
    h = head % int(p.Hkv) * group;
    i0 = first;
    steps = skip_unseen && row == Nq ? 0 : (Nq - first + Br - 1) / Br * group;
  }
  __device__ void next() {
    i0 += Br;
    if (i0 < Nq) return;
    i0 = first;
    ++h;
  }
  // Blocks add to dQ in turns, those with the last keys first. The number of this one: how many add
  // to this step's rows before it.
  template <int Bc>
  __device__ int turn(const Mask& mask) const {
    return int(mask.visible_keys(min(i0 + Br, Nq) - 1) - 1) / Bc - j0 / Bc;
  }
  // The row of LSE2, D and dQ where this step's rows begin.
  __device__ std::int64_t row(const Problem& p, const Passed& passed) const {
    return (b * p.Hq + h) * passed.rows + i0;
  }
};

// ---- tiles that come ----

struct Maps {
  CUtensorMap Q, K, V, dO, dK, dV;
};

// dK and dV leave in pieces of 16 rows, one from each warp.
template <int Br, int Bc, class T>
Maps maps_of(const Problem& p, const Backward<T>& t) {
  return {tensor_map(t.Q, p.B, p.Hq, p.Nq, p.d, Br),   tensor_map(t.K, p.B, p.Hkv, p.Nk, p.d, Bc),
          tensor_map(t.V, p.B, p.Hkv, p.Nk, p.d, Bc),  tensor_map(t.dO, p.B, p.Hq, p.Nq, p.d, Br),
          tensor_map(t.dK, p.B, p.Hkv, p.Nk, p.d, 16), tensor_map(t.dV, p.B, p.Hkv, p.Nk, p.d, 16)};
}

// A step's tile of X, which is Q or dO, Br rows and D columns, and its statistic, LSE2 or D: one
// barrier counts both, so who has waited for the one may read the other; and `more` bytes that come
// by another copy.
template <class T, int size, int Br>
__device__ void bring(T (&X)[size], const CUtensorMap& map, float (&statistic)[Br],
                      const float* from, Barrier* full, const Place<Br>& at, int more = 0) {
  arrive_expecting(full, int(sizeof X + sizeof statistic) + more);
#pragma unroll
  for (int x = 0; x < size / Br; x += 64) tma_load(X + x * Br, map, full, x, at.i0, at.h, at.b);
  bulk_load(statistic, from, int(sizeof statistic), full);
}

// The block's keys or their values, with the first tile that they meet. Hopper alone.
template <int Bc, class T, int size, class At>
__device__ void bring_keys(T (&X)[size], const CUtensorMap& map, Barrier* full, int hk,
                           const At& at) {
#pragma unroll
  for (int x = 0; x < size / Bc; x += 64) tma_load(X + x * Bc, map, full, x, at.j0, hk, at.b);
}

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
