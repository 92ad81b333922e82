// What hopper's backward asks of a mask whose rows see ranges of keys.
//
//   MaskTile  a tile of keys, and which queries see them: the first question
//   ListWalk  through those queries if there is a list; else optimized::Walk
//   hide      the second, for the numbers that a thread has after wgmma
#pragma once
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/shapes.cuh"
#include "06_optimized/beyond/masks/hopper.cuh"

namespace fa::masks {

using optimized::KeyTiles;
using optimized::Passed;

// Of tiles of keys, those that visit a tile of queries.
template <class Shape>
__device__ masks::Tiles<Shape::Bc, false> visitors(const Reach& reach, int i0) {
  return masks::Tiles<Shape::Bc, false>(reach.keys_of(i0, min(i0 + Shape::Br, reach.Nq) - 1));
}

// All 64 keys from j on are seen by these rows: the last one is met last, and of those that do not
// stay the first one leaves first.
__device__ inline Reach::Rows all_meeting(const Reach& reach, int j) {
  const int leaves = at_most(at_least(j, at_least(reach.prefix, reach.first)), j + 63);
  const Reach::Rows of_first = reach.rows_meeting(leaves, leaves),
                    of_last = reach.rows_meeting(j + 63, j + 63);
  return {of_last.low, at_most(of_first.high, of_last.high)};
}

// Tile number n of the keys, and which queries see them.
template <class Shape>
struct MaskTile : optimized::KeyTile<Shape> {
  using Tile = optimized::KeyTile<Shape>;
  using Tile::steps, Tile::b, Tile::hk, Tile::j0, Tile::first, Tile::h, Tile::row;
  Reach reach;
  int end;                         // of each head, the first query that sees none of them any more
  Reach::Rows all[Shape::groups];  // the queries that see all of a group's

  __device__ MaskTile(const Problem& p, const Pattern& pattern, const Passed& passed,
                      const KeyTiles& tiles, int n) {
    const int Hkv = int(p.Hkv), group = int(p.Hq) / Hkv;
    int head, tile;
    tiles.place(n, head, tile);
    b = head / Hkv;
    hk = head % Hkv;
    j0 = tile * Shape::Bc;
    reach = Reach(p, pattern, b);
    const Reach::Rows rows = reach.rows_meeting(j0, j0 + Shape::Bc - 1);
    first = rows.low / Shape::Br * Shape::Br;
    end = rows.high;
    steps = rows.low < end ? (end - first + Shape::Br - 1) / Shape::Br * group : 0;
    h = hk * group;
    row = (b * int(p.Hq) + h) * int(passed.rows);
    for (int g = 0; g < Shape::groups; ++g) all[g] = all_meeting(reach, j0 + 64 * g);
  }
  // How many blocks add to the rows from i0 on before this one: with keys further on.
  __device__ int turn(int i0) const {
    const masks::Tiles<Shape::Bc, false> of_keys = visitors<Shape>(reach, i0);
    const int own = j0 / Shape::Bc, behind = of_keys.rest1 - 1 - own;
    return own >= of_keys.rest0 ? behind : behind - (of_keys.rest0 - of_keys.head1);
  }
};

// The walk through the queries of a list, as far as they see these keys, tile by tile of each head.
template <class Shape>
struct ListWalk {
  const Blocks& list;
  const MaskTile<Shape>& tile;
  masks::Tiles<Shape::Br, true> queries;
  int group, h, i0;  // heads of the group, the one it is at; i0 < 0: none is left

  __device__ ListWalk(const Problem& p, const Blocks& list, const MaskTile<Shape>& tile)
      : list(list),
        tile(tile),
        queries(tile.reach.rows_of(tile.j0, tile.j0 + Shape::Bc - 1)),
        group(int(p.Hq) / int(p.Hkv)),
        h(-1) {
    queries.tile = -1;
    find();
  }
  __device__ void next(int) {
    queries.next();
    find();
  }
  __device__ int row(const Passed& passed) const { return tile.row + h * int(passed.rows) + i0; }

 private:
  __device__ void find() {
    while (queries.tile < 0 && ++h < group)
      queries.start(list, tile.b, tile.h + h, tile.j0 / int(block));
    i0 = queries.tile < 0 ? -1 : queries.tile * Shape::Br;
  }
};

// Where the first to visit a tile of queries stores: 0 in the sums of tiles that nobody visits,
// each by a warp.
template <class Shape>
__device__ void zeros_if_unseen(const Problem& p, const Pattern& pattern, const Passed& passed) {
  constexpr int Br = Shape::Br, warps = Shape::threads / 32;
  const int tiles = (int(p.Nq) + Br - 1) / Br, Hq = int(p.Hq), count = int(p.B) * Hq * tiles;
  for (int n = int(blockIdx.x) * warps + int(threadIdx.x) / 32; n < count;
       n += int(gridDim.x) * warps) {
    const int head = n / tiles, i0 = n % tiles * Br;
    const auto of_keys = visitors<Shape>(Reach(p, pattern, head / Hq), i0);
    if (of_keys.head0 < of_keys.head1 || of_keys.rest0 < of_keys.rest1) continue;
    auto* const sums =
        reinterpret_cast<float4*>(passed.dQ + (std::int64_t(head) * passed.rows + i0) * Shape::D);
    for (int e = threadIdx.x % 32; e < Br * Shape::D / 4; e += 32)
      sums[e] = make_float4(0, 0, 0, 0);
  }
}

// S_ij = value where query i does not see key j, in a step that begins with query i0. Of the thread
// the keys are j and j + 8.
template <int n>
__device__ void hide(float (&S)[n], const Reach& reach, int j, int i0, int lane, float value) {
  const int first = i0 + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Reach::Rows seen = reach.rows_meeting(j + 8 * r, j + 8 * r);
    const std::uint32_t bits = columns_below(seen.high - first) & ~columns_below(seen.low - first);
#pragma unroll
    for (int k = 0; k < n / 2; ++k)
      if (!(bits & (1u << k))) S[4 * (k / 2) + 2 * r + k % 2] = value;
  }
}

}  // namespace fa::masks
