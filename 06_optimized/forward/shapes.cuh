// The sizes of hopper's tiles, and what a block of threads has to do for one of them.
#pragma once
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/order.cuh"
#include "common/core/problem.hpp"

namespace fa::optimized {

// What O leaves through: a buffer of its own, or the two of V.
enum class Through { own, V };

// `groups` warpgroups of 64 rows each share tiles of Bc keys. All that follows is measured.
template <int D_, int groups_, int Bc_>
struct Tiles {
  static constexpr int D = D_, groups = groups_, Br = 64 * groups, Bc = Bc_;
  static constexpr int stages = 2;   // buffers of K, and of V
  static constexpr int cluster = 1;  // blocks that share what they read of K and V
  static constexpr int threads = 128 * (groups + 1);
  static constexpr int loader_registers = groups == 3 ? 32 : 24;
  static constexpr int registers = groups == 3 ? 160 : 240;
  static constexpr bool scale_under_S = D > 128;  // else when O += P V is done
};
// O is small: three groups have room, and three rows use each key that arrives.
struct D64 : Tiles<64, 3, 128> {
  static constexpr int Q_buffers = 2;
  static constexpr Through O = Through::own;
  static constexpr Branch branch = Branch::none;
};
// With a mask, Nk <= 1024: at 1024 three groups have 0.97 of its speed (docs/tuning.md).
struct D64Short : Tiles<64, 2, 128> {
  static constexpr int Q_buffers = 2;
  static constexpr Through O = Through::own;
  static constexpr Branch branch = Branch::after_first_maximum;
};
struct D128 : Tiles<128, 2, 128> {
  static constexpr int Q_buffers = 2;
  static constexpr Through O = Through::own;
  static constexpr Branch branch = Branch::after_first_maximum;
};
// Q is 64 KiB, K and V twice 80 keys 160: nothing is left for a second Q or for O. O leaves through
// V's two buffers, a group through each, so that Q is free for the next tile before O is complete.
struct D256 : Tiles<256, 2, 80> {
  static constexpr int Q_buffers = 1;
  static constexpr Through O = Through::V;
  static constexpr Branch branch = Branch::none;
};
// From 6144 keys on, where no pair runs: barriers, maxima and the scaling of O come once for 192
// keys. In shorter rows the first and the last tile, which nothing overlaps, weigh more.
struct D128Long : Tiles<128, 2, 192> {
  static constexpr int Q_buffers = 1;
  static constexpr Through O = Through::V;
  static constexpr Branch branch = Branch::predicate_on_alpha_too;
};
// Two blocks that share the keys of a head: each asks for half of a tile, for both. In short runs
// up to 3 % slower than a block alone, in long ones, where power is short, 2 to 3 % faster
// (hopper.md).
struct D128Pair : Tiles<128, 2, 176> {
  static constexpr int cluster = 2, loader_registers = 40, registers = 232, Q_buffers = 1;
  static constexpr Through O = Through::V;
  static constexpr Branch branch = Branch::predicate_on_alpha_too;
};
struct D256Pair : D256 {
  static constexpr int cluster = 2, loader_registers = 40, registers = 232;
};

// What a block of threads has to do for one tile of queries, number n in the order of order.cuh.
struct Task {
  int b = 0, h = -1;          // batch, head; h < 0: nothing more to do
  int i0 = 0, rows = 0;       // its rows of Q
  int length = 0, shift = 0;  // of the mask: row i sees keys [0, i + shift), none past the length
  int blocks = 0;             // of keys that its last row sees, at least one

  __device__ Task(const Problem& p, int Br, int Bc, const Order<int>& order, int n) {
    const int Hq = int(p.Hq), Nq = int(p.Nq), Nk = int(p.Nk);
    if (n >= order.tiles * order.heads) return;
    int head, tile;
    order.place(n, head, tile);
    b = head / Hq;
    h = head % Hq;
    i0 = tile * Br;
    rows = min(Br, Nq - i0);
    length = int(Mask(p, b).length);
    shift = p.causal == Causal::none ? Nk : p.causal == Causal::top_left ? 1 : 1 + Nk - Nq;
    blocks = max(1, (visible_keys(rows - 1) + Bc - 1) / Bc);
  }
  // What a row of the tile sees; one past the end counts as the last.
  __device__ int visible_keys(int row) const {
    return max(0, min(i0 + min(row, rows - 1) + shift, length));
  }
};

// In which order tiles are taken. With a mask they cost from one block of keys to all of them: the
// longest first, in sections of as many heads as have K and V in 32 MiB of the L2 cache. Without
// one they are alike but for the last of each head: with three groups, which have less to do there,
// those come last. Measured, not derived.
template <class Tiles>
Order<int> order_of(const Problem& p, bool masked) {
  Order<int> order{int((p.Nq + Tiles::Br - 1) / Tiles::Br), int(p.B * p.Hq), 1, true};
  const bool small_ones = Tiles::groups == 3 && p.Nq % Tiles::Br;
  if (masked || small_ones)
    order.section =
        heads_within(of_L2(32), 2 * p.Nk * Tiles::D * 2, p.B * p.Hkv) * int(p.Hq / p.Hkv);
  order.last_first = masked || !small_ones;
  return order;
}

}  // namespace fa::optimized
