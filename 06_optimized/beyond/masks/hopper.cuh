// What hopper's two passes ask of a mask whose rows see ranges of keys.
//
//   Task      forward: a tile of queries, and its walk through the keys that they see
//   Place     backward: a block of keys, and its walk through the queries that see them
//   hide      the second question, for the numbers that a thread has after wgmma
#pragma once
#include <algorithm>
#include <cstdint>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/masks/reach.hpp"
#include "06_optimized/order.cuh"

namespace fa::masks {

using optimized::Order;
using optimized::Passed;

// Of the numbers of a row that a thread holds after wgmma, number k is in column 8 (k / 2) + k % 2,
// from the thread's first one on. Bit k: is that before column x?
FA_HOST_DEVICE inline std::uint32_t columns_below(int x) {
  const int n = 2 * (x >> 3) + at_most(x & 7, 2);
  return n <= 0 ? 0 : n >= 32 ? 0xffffffff : (1u << n) - 1;
}

// ---- forward ----

// What a block of threads has to do for one tile of queries, number n of the order.
template <int Bc>
struct Task {
  int b = 0, h = -1;     // batch, head; h < 0: nothing more to do
  int i0 = 0, rows = 0;  // its rows of Q
  Reach reach;
  masks::Tiles<Bc, false> tiles;  // of keys, at the first to be visited

  Task() = default;
  __device__ Task(const Problem& p, const Pattern& pattern, int Br, const Order<int>& order,
                  int n) {
    if (n >= order.tiles * order.heads) return;
    int head, tile;
    order.place(n, head, tile);
    b = head / int(p.Hq);
    h = head % int(p.Hq);
    i0 = tile * Br;
    rows = min(Br, int(p.Nq) - i0);
    reach = Reach(p, pattern, b);
    tiles = masks::Tiles<Bc, false>(reach.keys_of(i0, i0 + rows - 1));
    tiles.start(Blocks{}, b, h, 0);
    // If no row sees anything it visits the tile behind the last key: TMA brings zeros.
    if (tiles.tile < 0)
      tiles.tile = tiles.head0 = tiles.head1 = tiles.rest0 = (int(p.Nk) + Bc - 1) / Bc;
  }
  // What row r of the tile sees; one past the end counts as the last.
  __device__ Reach::Row seen(int r) const { return reach.row(i0 + min(r, rows - 1)); }
};

// S_ij = -inf where row i does not see key j, in a tile that begins with key j0.
template <int n, class Task>
__device__ void hide(float (&S)[n], const Task& task, int row, int j0) {
  const int first = j0 + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Reach::Row seen = task.seen(row + 8 * r).from_key(first);
    // A bit for each number: ptxas makes predicates of seven of them at once.
    const std::uint32_t bits =
        (columns_below(seen.to) & ~columns_below(seen.from)) | columns_below(seen.head);
#pragma unroll
    for (int k = 0; k < n / 2; ++k)
      if (!(bits & (1u << k))) S[4 * (k / 2) + 2 * r + k % 2] = -INFINITY;
  }
}

// ---- backward ----

// Which keys a block has, and its walk through the queries that see them, in one head of the group
// after the other.
template <int Br, int Bc>
struct Place {
  int b, j0;         // batch, first key
  int first, end;    // the queries of each head, `first` a multiple of Br
  int h, i0, steps;  // where the walk is; how many steps it has

  template <class Keys>
  __device__ Place(const Problem& p, const Reach& reach, const Keys& keys) {
    const int head = keys.head(), group = int(p.Hq / p.Hkv);
    b = head / int(p.Hkv);
    j0 = keys.first_key();
    const Reach::Rows rows = reach.rows_meeting(j0, j0 + Bc - 1);
    first = rows.low / Br * Br;
    end = rows.high;
    h = head % int(p.Hkv) * group;
    i0 = first;
    steps = rows.low < end ? (end - first + Br - 1) / Br * group : 0;
  }
  __device__ void next() {
    i0 += Br;
    if (i0 < end) return;
    i0 = first;
    ++h;
  }
  // Of keys, those that visit a tile of queries.
  __device__ static masks::Tiles<Bc, false> visitors(const Reach& reach, int i0) {
    return masks::Tiles<Bc, false>(reach.keys_of(i0, min(i0 + Br, reach.Nq) - 1));
  }
  // How many blocks add to this step's rows before this one: with keys further on.
  __device__ int turn(const Reach& reach) const {
    const masks::Tiles<Bc, false> tiles = visitors(reach, i0);
    const int own = j0 / Bc, behind = tiles.rest1 - 1 - own;
    return own >= tiles.rest0 ? behind : behind - (tiles.rest0 - tiles.head1);
  }
  // The row of LSE2, D and dQ where this step's rows begin.
  __device__ std::int64_t row(const Problem& p, const Passed& passed) const {
    return (b * p.Hq + h) * passed.rows + i0;
  }
};

// Where the first to visit a tile of queries stores: 0 in the sums of tiles that nobody visits,
// each by one block.
template <int D, int threads, int Br, int Bc>
__device__ void zeros_if_unseen(Place<Br, Bc> at, const Problem& p, const Reach& reach,
                                const Passed& passed) {
  const int blocks = (int(p.Nk) + Bc - 1) / Bc, group = int(p.Hq / p.Hkv), h = at.h;
  for (at.i0 = at.j0 / Bc * Br; at.i0 < reach.Nq; at.i0 += blocks * Br) {
    const masks::Tiles<Bc, false> tiles = at.visitors(reach, at.i0);
    if (tiles.head0 < tiles.head1 || tiles.rest0 < tiles.rest1) continue;
    for (at.h = h; at.h < h + group; ++at.h) {
      auto* const sums = reinterpret_cast<float4*>(passed.dQ + at.row(p, passed) * D);
      for (int e = threadIdx.x; e < Br * D / 4; e += threads) sums[e] = make_float4(0, 0, 0, 0);
    }
  }
}

// All 64 keys from j on are seen by these rows: the last one is met last, and of those that do not
// stay the first one leaves first.
__device__ inline Reach::Rows all_meeting(const Reach& reach, int j) {
  const int leaves = at_most(at_least(j, at_least(reach.prefix, reach.first)), j + 63);
  const Reach::Rows of_first = reach.rows_meeting(leaves, leaves),
                    of_last = reach.rows_meeting(j + 63, j + 63);
  return {of_last.low, at_most(of_first.high, of_last.high)};
}

// S_ij = value where query i does not see key j, in a step that begins with query i0. Of the thread
// the keys are seen[0] and seen[8].
template <int n>
__device__ void hide(float (&S)[n], const Reach::Rows* seen, int i0, int lane, float value) {
  const int first = i0 + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::uint32_t bits =
        columns_below(seen[8 * r].high - first) & ~columns_below(seen[8 * r].low - first);
#pragma unroll
    for (int k = 0; k < n / 2; ++k)
      if (!(bits & (1u << k))) S[4 * (k / 2) + 2 * r + k % 2] = value;
  }
}

}  // namespace fa::masks
