// The sizes of hopper's tiles, what a block of threads has to do for one tile of keys, and what it
// has in shared memory.
#pragma once
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/order.cuh"

namespace fa::optimized {

// A block of threads has Bc keys, 64 a group; a step brings Br queries. D is the head dimension,
// padded; the statistic that is called D elsewhere is D_i here. Measured, not derived:
//            D = 64                                        D = 128
//   Br       128: then a step has as much work as there    64: more, and registers would not do
//   adds_dQ  yes: a buffer would be 512 of 3328 cycles     no: a pusher does it
//   late_dV  behind dS, beside which exponentials may lie  as soon as P is there: it runs under dS
//   stays    for the next keys, which have a buffer        no: K and V twice would not fit
template <int D_, bool in_order_>
struct Sizes {
  static constexpr int D = D_, groups = 2, Bc = 64 * groups, Br = D == 64 ? 128 : 64;
  static constexpr int stages = 2, threads = 128 * (groups + 1);
  static constexpr bool adds_dQ = D == 64, late_dV = D == 64, in_order = in_order_;
  static constexpr bool stays = D == 64;
  static constexpr bool together = false;
  static constexpr int keys = stays ? 2 : 1;  // buffers of K, and of V
};
// For heads that share keys, behind a mask: see WalkTogether. With d = 64 it gained nothing.
struct Together : Sizes<128, false> {
  static constexpr bool together = true;
};

// All tiles of keys: how many, the order in which they are taken, and what their masks share.
struct KeyTiles : Order<int> {
  int count;
  int shift;  // query i sees keys [0, i + shift), none past the length
};

// Tile number n of the keys, and which queries see them.
template <class Tiles>
struct KeyTile {
  int steps;      // tiles of queries; below 0: nothing more to do
  int b, hk, j0;  // batch, key head, first key
  int first;      // of each head, the first query: a multiple of Br
  int h, row;     // the first query head; where its rows of LSE2, D and dQ begin
                  // (each has 264 bytes of scratch, so an int can count them)

  __device__ KeyTile() {}
  __device__ KeyTile(const Problem& p, const Passed& passed, const KeyTiles& all, int n) {
    const int Hkv = int(p.Hkv), group = int(p.Hq) / Hkv, Nq = int(p.Nq);
    int head, tile;
    all.place(n, head, tile);
    b = head / Hkv;
    hk = head % Hkv;
    j0 = tile * Tiles::Bc;
    const Mask mask(p, b);
    // Of keys that nobody sees the first row is Nq. They may hold NaN: no step for them.
    const int seen_from = int(mask.first_row(j0));
    first = seen_from / Tiles::Br * Tiles::Br;
    steps = seen_from == Nq ? 0 : (Nq - first + Tiles::Br - 1) / Tiles::Br * group;
    h = hk * group;
    row = (b * int(p.Hq) + h) * int(passed.rows);
  }
  // The first of a head's queries to which this block is not the first to add
  __device__ int until(const KeyTiles& all, int length, int Nq) const {
    const int next_keys = j0 + Tiles::Bc;
    const bool to_the_end = min(Nq - 1 + all.shift, length) <= next_keys;
    return to_the_end ? Nq : next_keys + 2 - Tiles::Br - all.shift;
  }
};

// The walk over those queries, tile by tile of each head.
template <class Tiles>
struct Walk {
  const KeyTile<Tiles>& tile;
  int h, i0;  // the head, of the group, and the tile's first query

  __device__ explicit Walk(const KeyTile<Tiles>& tile) : tile(tile), h(0), i0(tile.first) {}
  __device__ void next(int Nq) {
    i0 += Tiles::Br;
    if (i0 < Nq) return;
    i0 = tile.first;
    ++h;
  }
  // The row of LSE2, D and dQ where this step's rows begin
  __device__ int row(const Passed& passed) const { return tile.row + h * int(passed.rows) + i0; }
  // Blocks add to dQ in turns, those with the last keys first. The number of this one: how many add
  // to this step's rows before it.
  __device__ int turn(const KeyTiles& all, int length, int Nq) const {
    const int seen = min(min(i0 + Tiles::Br, Nq) - 1 + all.shift, length);
    return (seen - 1) / Tiles::Bc - tile.j0 / Tiles::Bc;
  }
};

// Head by head of each tile of queries, where heads share keys and nobody waits for a turn: then
// the blocks of a key head are at the same queries at the same time, and what they read and add to
// is in the L2 cache. With a causal mask each begins at others (without one they are in step in any
// case). The first section's blocks begin together, so they go back, from the last query that all
// have. One with fewer queries is done sooner, and a block of the next section begins, of those
// that have the most first: they go forward, and each begins where its key head's earlier blocks
// have just arrived. And so on, to and fro.
template <class Tiles>
struct WalkTogether : Walk<Tiles> {
  int group;  // heads
  bool back;

  __device__ WalkTogether(const KeyTile<Tiles>& tile, const Problem& p, const KeyTiles& all)
      : Walk<Tiles>(tile), group(int(p.Hq / p.Hkv)) {
    back = (tile.b * int(p.Hkv) + tile.hk) / all.section % 2 == 0;
    if (back) this->i0 = (int(p.Nq) - 1) / Tiles::Br * Tiles::Br;
  }
  __device__ void next(int) {
    if (++this->h == group) this->h = 0, this->i0 += back ? -Tiles::Br : Tiles::Br;
  }
};

template <class Tiles>
__device__ auto walk_of(const KeyTile<Tiles>& tile, const Problem& p, const KeyTiles& all) {
  if constexpr (Tiles::together)
    return WalkTogether<Tiles>(tile, p, all);
  else
    return Walk<Tiles>(tile);
}

// In sections of heads. With a causal mask the first keys are seen by the most queries, so the
// shortest walks come last. Or first, where blocks take turns.
template <class Tiles>
KeyTiles key_tiles_of(const Problem& p) {
  const int MiB_of_L2 = 20, tiles = int((p.Nk + Tiles::Bc - 1) / Tiles::Bc);
  int section = heads_of_section(p, Tiles::D, MiB_of_L2);
  if (Tiles::together)  // a section's blocks run at the same time
    section = std::min(section, std::max(1, processors() / tiles));
  const Order<int> order{tiles, int(p.B * p.Hkv), section, Tiles::in_order};
  const std::int64_t shift = p.causal == Causal::none       ? p.Nk
                             : p.causal == Causal::top_left ? 1
                                                            : 1 + p.Nk - p.Nq;
  return {order, order.tiles * order.heads, int(shift)};
}

constexpr int square = 64 * 64;  // numbers of 64 rows in a box, which has 64 columns

template <class Tiles, class T, class Tile = KeyTile<Tiles>>
struct Shared {
  alignas(1024) T K[Tiles::keys][Tiles::Bc * Tiles::D], V[Tiles::keys][Tiles::Bc * Tiles::D];
  alignas(1024) T Q[Tiles::stages][Tiles::Br * Tiles::D], dO[Tiles::stages][Tiles::Br * Tiles::D];
  alignas(1024) T dS[3][Tiles::Br * Tiles::Bc];
  alignas(128) float dQ[Tiles::groups][Tiles::adds_dQ ? 4 : square];
  alignas(128) float LSE2[Tiles::stages][Tiles::Br], D_i[Tiles::stages][Tiles::Br];
  Barrier Q_full[Tiles::stages], Q_free[Tiles::stages];
  Barrier dO_full[Tiles::stages], dO_free[Tiles::stages];
  Barrier tile_full[Tiles::keys], KV_free[Tiles::keys];
  Tile tile[Tiles::keys];
  int row[Tiles::stages];  // where the rows of what lies in Q begin
  int i0[Tiles::stages];   // its first query, where heads walk together
};

// The numbered barriers: all but `meeting` once for each group, `ready` for even and for odd steps
constexpr int meeting = 1, dQ_free = 2, dQ_full = 4, alone = 6;
__device__ constexpr int ready(int group, int n) { return 8 + 2 * group + n % 2; }
constexpr int both = 256, with_pusher = 128 + 32;  // threads that take part

}  // namespace fa::optimized
