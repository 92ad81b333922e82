// What hopper asks of a mask whose rows see ranges of keys; its backward: hopper_keys.cuh.
//
//   Task  a tile of queries, and its walk through the keys that they see
//   hide  the second question, for the numbers that a thread has after wgmma
#pragma once
#include <algorithm>
#include <cstdint>

#include "06_optimized/beyond/masks/reach.hpp"
#include "06_optimized/order.cuh"

namespace fa::masks {

using optimized::Order;

// Of the numbers of a row that a thread holds after wgmma, number k is in column 8 (k / 2) + k % 2,
// from the thread's first one on. Bit k: is that before column x?
FA_HOST_DEVICE inline std::uint32_t columns_below(int x) {
  const int n = 2 * (x >> 3) + at_most(x & 7, 2);
  return n <= 0 ? 0 : n >= 32 ? 0xffffffff : (1u << n) - 1;
}

// What a block of threads has to do for one tile of queries, number n of the order.
template <int Bc>
struct Task {
  int b = 0, h = -1;     // batch, head; h < 0: nothing more to do
  int i0 = 0, rows = 0;  // its rows of Q
  Reach reach;
  masks::Tiles<Bc, false> tiles;  // of keys, at the first to be visited

  Task() = default;
  __device__ Task(const Problem& p, const Pattern& pattern, const Blocks& list, int Br,
                  const Order<int>& order, int n) {
    if (n >= order.tiles * order.heads) return;
    int head, tile;
    order.place(n, head, tile);
    b = head / int(p.Hq);
    h = head % int(p.Hq);
    i0 = tile * Br;
    rows = min(Br, int(p.Nq) - i0);
    reach = Reach(p, pattern, b);
    tiles = masks::Tiles<Bc, false>(reach.keys_of(i0, i0 + rows - 1));
    tiles.start(list, b, h, i0 / int(block));
    // If no row sees anything it visits the tile behind the last key: TMA brings zeros.
    if (tiles.tile < 0) {
      tiles.tile = tiles.head0 = tiles.head1 = tiles.rest0 = (int(p.Nk) + Bc - 1) / Bc;
      tiles.numbers = nullptr;
    }
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

}  // namespace fa::masks
