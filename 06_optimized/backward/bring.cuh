// What rungs 4 to 10 have in common, the first half (hopper: shapes.cuh): which keys a block has,
// its walk over the queries that see them, and how the tiles of a step come. The second: steps.cuh.
//
// A block keeps Bc keys; each step of its walk brings Br queries.
#pragma once
#include <cstdint>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/barrier.cuh"
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {

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

// Rungs 6 to 10 and masks: in sections of heads. With a causal mask the first keys are seen by the
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
// counts for one query head: its blocks go through those of its group one after the other
// (hopper's tile by tile, behind a mask: Together).
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
  // is hidden. Who takes turns must skip it.
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
template <class T, int size, int Br, class At>
__device__ void bring(T (&X)[size], const CUtensorMap& map, float (&statistic)[Br],
                      const float* from, Barrier* full, const At& at, int more = 0) {
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

// ---- who brings them: one thread, in rungs 4 to 10 alike ----
// It fills the rung's own buffers, which have the same names in all of them.

// A buffer is full when its bytes are there, free when `readers` threads have said so.
template <class Shared>
__device__ void init_barriers(Shared& shared, int readers) {
  init(&shared.KV_full, 1);
  init(shared.Q_full, shared.Q_free, readers);
  init(shared.dO_full, shared.dO_free, readers);
  fence_barriers();
}

// K and V of the block, and then Q and dO of each step, as soon as there is a free buffer.
template <int D, int Bc, int stages, class Shared, int Br>
__device__ void load(Shared& shared, const Maps& maps, const Problem& p, const Passed& passed,
                     Place<Br> at) {
  const int hk = int(p.key_head(at.h));
  arrive_expecting(&shared.KV_full, int(sizeof shared.K + sizeof shared.V));
#pragma unroll
  for (int x = 0; x < D; x += 64) {
    tma_load(shared.K + x * Bc, maps.K, &shared.KV_full, x, at.j0, hk, at.b);
    tma_load(shared.V + x * Bc, maps.V, &shared.KV_full, x, at.j0, hk, at.b);
  }
  Ring<stages> q;
  for (int n = 0; n < at.steps; ++n, at.next(), q.next()) {
    const std::int64_t row = at.row(p, passed);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    bring(shared.Q[q.at], maps.Q, shared.LSE2[q.at], passed.LSE2 + row, &shared.Q_full[q.at], at);
    wait(&shared.dO_free[q.at], q.phase ^ 1);
    bring(shared.dO[q.at], maps.dO, shared.D_i[q.at], passed.D + row, &shared.dO_full[q.at], at);
  }
}

}  // namespace fa::optimized
