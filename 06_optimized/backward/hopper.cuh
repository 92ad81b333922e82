// Of hopper: its shared memory, its numbered barriers, and the warps that move data.
#pragma once
#include <climits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/backward/shapes.cuh"
#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {

constexpr int square = 64 * 64;  // numbers of 64 rows in a box, which has 64 columns

template <class Tiles, class T>
struct Shared {
  alignas(1024) T K[Tiles::keys][Tiles::Bc * Tiles::D], V[Tiles::keys][Tiles::Bc * Tiles::D];
  alignas(1024) T Q[Tiles::stages][Tiles::Br * Tiles::D], dO[Tiles::stages][Tiles::Br * Tiles::D];
  alignas(1024) T dS[3][Tiles::Br * Tiles::Bc];
  alignas(128) float dQ[Tiles::groups][Tiles::adds_dQ ? 4 : square];
  alignas(128) float LSE2[Tiles::stages][Tiles::Br], D_i[Tiles::stages][Tiles::Br];
  Barrier Q_full[Tiles::stages], Q_free[Tiles::stages];
  Barrier dO_full[Tiles::stages], dO_free[Tiles::stages];
  Barrier tile_full[Tiles::keys], KV_free[Tiles::keys];
  KeyTile<Tiles> tile[Tiles::keys];
  int row[Tiles::stages];  // where the rows of what lies in Q begin
};

// The numbered barriers: all but `meeting` once for each group, `ready` for even and for odd steps
constexpr int meeting = 1, dQ_free = 2, dQ_full = 4, alone = 6;
__device__ constexpr int ready(int group, int n) { return 8 + 2 * group + n % 2; }
constexpr int both = 256, with_pusher = 128 + 32;  // threads that take part

// Says what comes, and brings it: of each tile the keys, with the first queries that meet them.
template <class Tiles, class T>
__device__ void load(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
                     const Passed& passed, const KeyTiles& tiles) {
  Ring<Tiles::stages> q;
  Ring<Tiles::keys> kv;
  // In the order in which blocks begin, or none may wait for another: taken as late as can be.
  const auto next = [&](int else_this) {
    return Tiles::stays && passed.taken ? int(atomicAdd(passed.taken, 1u)) : else_this;
  };
  for (int number = next(blockIdx.x);; kv.next()) {
    wait(&shared.KV_free[kv.at], kv.phase ^ 1);
    KeyTile<Tiles>& tile = shared.tile[kv.at];
    if (number >= tiles.count) {
      tile.steps = -1;
      arrive(&shared.tile_full[kv.at]);
      break;
    }
    tile = KeyTile<Tiles>(p, passed, tiles, number);
    arrive(&shared.tile_full[kv.at]);
    Walk walk(tile);
    for (int n = 0; n < tile.steps; ++n, walk.next(int(p.Nq)), q.next()) {
      const struct { int b, h, i0, j0; } at{tile.b, tile.h + walk.h, walk.i0, tile.j0};
      const int row = walk.row(passed);
      const int more = n == 0 ? int(sizeof shared.K[0]) : 0;  // S need not wait for V
      Barrier *const Q_full = &shared.Q_full[q.at], *const dO_full = &shared.dO_full[q.at];
      wait(&shared.Q_free[q.at], q.phase ^ 1);
      shared.row[q.at] = row;
      bring(shared.Q[q.at], maps.Q, shared.LSE2[q.at], passed.LSE2 + row, Q_full, at, more);
      if (n == 0) bring_keys<Tiles::Bc>(shared.K[kv.at], maps.K, Q_full, tile.hk, at);
      wait(&shared.dO_free[q.at], q.phase ^ 1);
      bring(shared.dO[q.at], maps.dO, shared.D_i[q.at], passed.D + row, dO_full, at, more);
      if (n == 0) bring_keys<Tiles::Bc>(shared.V[kv.at], maps.V, dO_full, tile.hk, at);
    }
    if (!Tiles::stays) break;
    number = next(INT_MAX);
  }
}

// One warp for each group's part of dQ: adds it up in global memory, or sees to it that the group
// does so when it is its turn.
template <class Tiles, class T>
__device__ void push(Shared<Tiles, T>& shared, const Problem& p, const Passed& passed,
                     const KeyTiles& tiles, int group) {
  const int Nq = int(p.Nq);
  Ring<Tiles::keys> kv;
  for (;; kv.next()) {
    wait(&shared.tile_full[kv.at], kv.phase);
    const KeyTile<Tiles> tile = shared.tile[kv.at];
    if (tile.steps < 0) break;
    Walk walk(tile);
    const int length = int(Mask(p, tile.b).length);
#pragma unroll 1
    for (int n = 0; n < tile.steps; ++n, walk.next(Nq)) {
      const int block = walk.row(passed) / 64 * (Tiles::D / 64) + group;
      int* const turn = Tiles::in_order ? passed.turn + block : nullptr;
      const int n_before = walk.turn(tiles, length, Nq);
      if (Tiles::adds_dQ) wait_turn(turn, n_before);
      arrive(dQ_free + group, with_pusher);  // the first time at once: nothing is in it yet
      sync(dQ_full + group, with_pusher);
      if (elected()) {
        if (!Tiles::adds_dQ) {
          if (Tiles::in_order) wait_turn(turn, n_before);
          float* const sums = passed.dQ + std::int64_t(block) * square;
          if (Tiles::in_order && n_before == 0)
            bulk_store(sums, shared.dQ[group], int(sizeof shared.dQ[0]));
          else
            bulk_add(sums, shared.dQ[group], int(sizeof shared.dQ[0]));
          tma_commit();
          Tiles::in_order ? tma_wait() : tma_wait_read();
        }
        if (Tiles::in_order) pass_turn(turn);
      }
      __syncwarp();
    }
    if (!Tiles::stays) break;
    __syncwarp();
    if (elected()) arrive(&shared.KV_free[kv.at]);
  }
}

}  // namespace fa::optimized
