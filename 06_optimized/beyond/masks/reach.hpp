// The two questions of a mask, for a GPU and for a CPU: which tiles, and does i see j?
#pragma once
#include "06_optimized/beyond/masks/masks.hpp"

namespace fa::masks {

FA_HOST_DEVICE inline int at_most(int a, int b) { return a < b ? a : b; }
FA_HOST_DEVICE inline int at_least(int a, int b) { return a > b ? a : b; }
FA_HOST_DEVICE inline int within(std::int64_t x, std::int64_t low, std::int64_t high) {
  return int(x < low ? low : x > high ? high : x);
}

// How many numbers of an ascending row are less than x, or not greater.
FA_HOST_DEVICE inline int count_below(const std::int32_t* ids, int n, std::int32_t x, bool or_x) {
  int low = 0;
  while (low < n) {
    const int middle = low + (n - low) / 2;
    if (ids[middle] < x || (or_x && ids[middle] == x))
      low = middle + 1;
    else
      n = middle;
  }
  return low;
}

// A causal mask as a window, and no number that an int would overflow with.
inline Pattern as_window(const Problem& p, Pattern m) {
  constexpr std::int64_t far = std::int64_t(1) << 30;  // Nq and Nk are at most 2^29
  if (p.causal != Causal::none) {
    m.right = 0;
    m.top_left = p.causal == Causal::top_left;
  }
  m.left = m.left < far ? m.left : far;
  m.right = m.right < far ? m.right : far;
  m.first = m.first < p.Nk ? m.first : p.Nk;
  return m;
}

// Does its window hide nothing from anybody? The first row sees least on its right, the last one
// on its left.
inline bool all_in_window(const Problem& p, const Pattern& m) {
  const std::int64_t offset = m.top_left ? 0 : p.Nk - p.Nq;
  return m.right >= p.Nk - 1 - offset && m.left >= p.Nq - 1 + offset;
}

// What the rows of one batch entry see. Of a pattern as as_window() leaves it.
struct Reach {
  int Nq, length, offset, left, right, first, prefix;
  const std::int32_t *query_ids, *key_ids;  // null: there are no documents
  bool sorted;

  Reach() = default;
  FA_HOST_DEVICE Reach(const Problem& p, const Pattern& m, std::int64_t b)
      : Nq(int(p.Nq)),
        length(p.key_lengths ? within(p.key_lengths[b], 0, p.Nk) : int(p.Nk)),
        offset(m.top_left ? 0 : int(p.Nk - p.Nq)),
        left(int(m.left)),
        right(int(m.right)),
        first(int(m.first)),
        prefix(m.prefix ? within(m.prefix[b], 0, length) : 0),
        query_ids(m.query_documents ? m.query_documents + b * p.Nq : nullptr),
        key_ids(m.query_documents ? m.key_documents + b * p.Nk : nullptr),
        sorted(m.sorted) {}

  // [quote row]
  // But for documents and lists, row i sees keys [0, head) and [from, to). None of the three ever
  // decreases from row to row.
  struct Row {
    int head, from, to;
    // With | and &: who may see what is not asked for in turn, and nobody branches.
    FA_HOST_DEVICE bool sees(int j) const { return (j < head) | ((j >= from) & (j < to)); }
    FA_HOST_DEVICE Row from_key(int j) const { return {head - j, from - j, to - j}; }
  };
  FA_HOST_DEVICE Row row(int i) const {
    const int to = at_least(0, at_most(length, i + offset + right + 1));
    const int from = at_least(0, i + offset - left);
    return {at_most(length, at_least(prefix, at_most(first, to))), from, to};
  }
  // [end quote]
  FA_HOST_DEVICE bool same_document(int i, int j) const {  // j < Nk
    return !query_ids || query_ids[at_most(i, Nq - 1)] == key_ids[j];
  }
  FA_HOST_DEVICE bool sees(int i, int j) const { return row(i).sees(j) && same_document(i, j); }

  // Do rows i0 to i1 all see keys j0 to j1, both with the last one?
  FA_HOST_DEVICE bool all_see(int i0, int i1, int j0, int j1) const {
    const Row top = row(i0), bottom = row(i1);
    if (j1 >= top.head && (j0 < bottom.from || j1 >= top.to)) return false;
    return !query_ids || (sorted && query_ids[i0] == query_ids[i1] &&
                          query_ids[i0] == key_ids[j0] && key_ids[j0] == key_ids[j1]);
  }

  // Keys [low, high) are all that a row of [i0, i1] may see, and [low, head) and [from, high) all
  // but those between. The same of rows, for keys: there is no gap.
  struct Range {
    int low, head, from, high;
  };
  FA_HOST_DEVICE Range keys_of(int i0, int i1) const {
    int low = 0, high = length;
    if (query_ids && sorted) {
      low = count_below(key_ids, high, query_ids[i0], false);
      high = count_below(key_ids, high, query_ids[i1], true);
    }
    const Row top = row(i0), bottom = row(i1);
    return {low, at_most(bottom.head, high), at_least(top.from, low), at_most(bottom.to, high)};
  }
  // [quote rows]
  // The other way round, key j is seen by rows [low, high), without a gap: of a window the last row
  // is where j leaves it, and what stays or all see never leaves. Of keys j0 to j1, by some row.
  struct Rows {
    int low, high;
    FA_HOST_DEVICE bool meet(int i) const { return (i >= low) & (i < high); }
  };
  FA_HOST_DEVICE Rows rows_meeting(int j0, int j1) const {
    j1 = at_most(j1, length - 1);
    if (j0 > j1) return {0, 0};
    const bool stays = j0 < at_least(prefix, first);
    return {j0 < prefix ? 0 : at_least(0, j0 - right - offset),
            stays ? Nq : at_most(Nq, j1 + left - offset + 1)};
  }
  // [end quote]
  FA_HOST_DEVICE Range rows_of(int j0, int j1) const {
    Rows rows = rows_meeting(j0, j1);
    if (rows.low < rows.high && query_ids && sorted) {
      j1 = at_most(j1, length - 1);
      rows.low = at_least(rows.low, count_below(query_ids, Nq, key_ids[j0], false));
      rows.high = at_most(rows.high, count_below(query_ids, Nq, key_ids[j1], true));
    }
    return {rows.low, rows.low, rows.low, rows.high};
  }
};

// The tiles of `size` keys, or queries, that one tile of the others visits: of the ranges
// [low, head) and [from, high), and of the list, if there is one; up, or from the last one down.
template <int size, bool up>
struct Tiles {
  int tile;                        // the one to visit now; negative: none is left
  int head0, head1, rest0, rest1;  // the ranges, in tiles
  int entry, behind;               // of the list, what is left
  const std::int32_t* numbers;     // null: there is no list

  Tiles() = default;
  FA_HOST_DEVICE explicit Tiles(const Reach::Range& r) {
    head0 = r.low / size;
    head1 = at_least(head0, (r.head + size - 1) / size);
    rest0 = at_least(head0, r.from / size);
    rest1 = (r.high + size - 1) / size;
    if (r.head <= r.low) head1 = head0 = rest0;
    if (r.high <= r.from) rest0 = rest1 = head1;
    if (head1 >= rest0) {  // they touch: one range, and nothing before it
      rest0 = at_most(head0, rest0);
      rest1 = at_least(head1, rest1);
      head0 = head1 = rest0;
    }
  }

  FA_HOST_DEVICE void start(const Blocks& list, std::int64_t b, std::int64_t h, int x) {
    numbers = nullptr;
    tile = up ? head0 - 1 : rest1;
    if (list.offsets) {
      const std::int32_t* at = list.offsets + (b * list.batch + h * list.head + x);
      numbers = list.numbers;
      entry = within(at[0], 0, list.entries);
      behind = within(at[1], entry, list.entries);
      tile = up ? -1 : 0;
      if (!numbers) {  // a list without entries
        tile = -1;
        return;
      }
    }
    next();
  }

  FA_HOST_DEVICE void next() {
    if (numbers) return next_in_list();
    // [quote next]
    if constexpr (up) {
      ++tile;
      if (tile >= head1 && tile < rest0) tile = rest0;
      if (tile >= rest1) tile = -1;
    } else {
      --tile;
      if (tile >= head1 && tile < rest0) tile = head1 - 1;
      if (tile < head0) tile = -1;
    }
    // [end quote]
  }

 private:
  FA_HOST_DEVICE void next_in_list() {
    constexpr int in_block = int(block) / size;
    static_assert(in_block * size == block);
    for (;;) {
      if ((up ? tile + 1 : tile) % in_block != 0) {
        tile += up ? 1 : -1;
      } else if (entry == behind) {
        tile = -1;
        return;
      } else {
        const unsigned n = unsigned(numbers[up ? entry++ : --behind]);
        if (n > 1 << 22) continue;  // no such block, nor a tile that an int could number
        tile = int(n) * in_block + (up ? 0 : in_block - 1);
      }
      if ((tile >= head0 && tile < head1) || (tile >= rest0 && tile < rest1)) return;
    }
  }
};

// The walk of one tile of queries through the keys: in shared memory, for registers are full.
// [quote walk]
template <int size>
struct Walk {
  Reach reach;
  Tiles<size, false> tiles;
  int i0, i1;  // the first and the last query of the tile
  bool whole;  // do all of them see all of the tile of keys that is next?

  __device__ void start(const Problem& p, const Pattern& m, std::int64_t b, std::int64_t h,
                        std::int64_t first, int rows) {
    reach = Reach(p, m, b);
    i0 = int(first);
    i1 = i0 + rows - 1;
    tiles = Tiles<size, false>(reach.keys_of(i0, i1));
    tiles.start(m.keys, b, h, i0 / int(block));
    look();
  }
  __device__ void next() {
    tiles.next();
    look();
  }
  __device__ int key() const { return tiles.tile * size; }  // the next tile's first; none: negative

 private:
  __device__ void look() { whole = key() >= 0 && reach.all_see(i0, i1, key(), key() + size - 1); }
};
// [end quote]

// The same for the owner of keys: through the queries, in all heads of a group. It is one visit
// ahead, for what comes next is asked for before what is there has been computed.
template <int size>
struct WalkOfKeys {
  struct Visit {
    int h, i0;   // i0 < 0: none is left
    bool whole;  // do all queries of the tile see all keys?
  };
  Reach reach;
  Tiles<size, true> tiles;
  int b, h, h_end, j0, j1;  // j1: the last key
  Visit at[2];              // this one and the next, in turns

  __device__ void start(const Problem& p, const Pattern& m, int b_, int h_, int h_end_, int first,
                        int keys) {
    reach = Reach(p, m, b_);
    b = b_, h = h_, h_end = h_end_, j0 = first, j1 = first + keys - 1;
    tiles = Tiles<size, true>(reach.rows_of(j0, j1));
    if (h < h_end) tiles.start(m.queries, b, h, j0 / int(block));
    look(m, 0);
    next(m, 1);
  }
  __device__ void next(const Pattern& m, int turn) {
    if (h < h_end) tiles.next();
    look(m, turn);
  }

 private:
  __device__ void look(const Pattern& m, int turn) {
    while (h < h_end && tiles.tile < 0)
      if (++h < h_end) tiles.start(m.queries, b, h, j0 / int(block));
    const int i0 = h < h_end ? tiles.tile * size : -1;
    const int i1 = at_most(i0 + size, reach.Nq) - 1;
    at[turn] = {h, i0, i0 >= 0 && reach.all_see(i0, i1, j0, j1)};
  }
};

}  // namespace fa::masks
