// How a sequence is dealt out to ranks, and what the mask leaves of one rank's queries and
// another's keys.
#include <algorithm>

#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

using Int = std::int64_t;

const char* name(Method method) {
  return method == Method::ring ? "ring" : method == Method::gather ? "gather" : "heads";
}

std::vector<Block> blocks_of(Int N, int ranks, int rank, Order order) {
  const Int parts = order == Order::zigzag ? 2 * ranks : ranks;
  std::vector<Block> blocks;
  const auto hold = [&](Int part) {
    // Lengths that do not divide: parts differ by at most one row, and for queries and keys of the
    // same length they are the same.
    const Int first = part * N / parts, rows = (part + 1) * N / parts - first;
    if (rows == 0) return;
    if (!blocks.empty() && blocks.back().first + blocks.back().rows == first)
      blocks.back().rows += rows;
    else
      blocks.push_back({first, rows});
  };
  hold(rank);
  if (order == Order::zigzag) hold(parts - 1 - rank);
  return blocks;
}

Int rows_of(Int N, int ranks, int rank, Order order) {
  Int rows = 0;
  for (const Block& block : blocks_of(N, ranks, rank, order)) rows += block.rows;
  return rows;
}

namespace {

// Rows one after the other that see the same number of keys, or each one more than the row before.
struct Run {
  Int row, rows;
  Int seen;  // by its first row
  bool grows;
  Int seen_after() const { return grows ? seen + rows : seen; }  // by a row that goes on like this
};

Int seen_before(Int position, const std::vector<Block>& keys) {
  Int seen = 0;
  for (const Block& k : keys) seen += std::clamp<Int>(position - k.first, 0, k.rows);
  return seen;
}

std::vector<Run> runs_of(Int shift, const std::vector<Block>& queries,
                         const std::vector<Block>& keys) {
  std::vector<Run> runs;
  Int row = 0;
  for (const Block& q : queries)
    for (Int i = q.first; i < q.first + q.rows;) {
      // (1) query i sees the keys before position i + 1 + shift
      const Int end = i + 1 + shift, seen = seen_before(end, keys);
      const bool grows = seen > seen_before(end - 1, keys);
      // It goes on like this until the next block of keys begins or ends.
      Int rows = q.first + q.rows - i;
      for (const Block& k : keys)
        for (const Int edge : {k.first, k.first + k.rows})
          if (edge >= end) rows = std::min(rows, edge - end + 1);
      Run* last = runs.empty() ? nullptr : &runs.back();
      if (last && last->grows == grows && last->seen_after() == seen)
        last->rows += rows;
      else
        runs.push_back({row, rows, seen, grows});
      i += rows, row += rows;
    }
  return runs;
}

}  // namespace

std::vector<Piece> pieces_of(const Problem& p, const std::vector<Block>& queries,
                             const std::vector<Block>& keys) {
  Int rows = 0, all = 0;
  for (const Block& q : queries) rows += q.rows;
  for (const Block& k : keys) all += k.rows;
  if (rows == 0 || all == 0) return {};
  if (p.causal == Causal::none) return {{0, rows, all, Causal::none}};

  const Int shift = p.causal == Causal::bottom_right ? p.Nk - p.Nq : 0;
  std::vector<Piece> pieces;
  Int blind = 0;  // rows just before this run that see nothing
  for (const Run& run : runs_of(shift, queries, keys)) {
    if (run.grows) {
      // Aligned at the bottom right, as many keys as the last row sees are that mask; rows that see
      // none may come before.
      const Int before = run.seen == 1 ? blind : 0;
      pieces.push_back(
          {run.row - before, run.rows + before, run.seen_after() - 1, Causal::bottom_right});
    } else if (run.seen > 0) {
      // Rows behind a whole triangle are its mask aligned at the top left.
      Piece* last = pieces.empty() ? nullptr : &pieces.back();
      if (last && last->rows == last->keys && last->keys == run.seen)
        last->rows += run.rows, last->causal = Causal::top_left;
      else
        pieces.push_back({run.row, run.rows, run.seen, Causal::none});
    }
    blind = !run.grows && run.seen == 0 ? run.rows : 0;
  }
  return pieces;
}

void each_piece(const Problem& p, const std::vector<Block>& queries, const std::vector<Block>& keys,
                const std::function<void(const Problem&, Int)>& f) {
  for (const Piece& piece : pieces_of(p, queries, keys)) {
    Problem pair = p;
    pair.Nq = piece.rows, pair.Nk = piece.keys, pair.causal = piece.causal;
    pair.scale = p.softmax_scale();
    std::vector<Int> lengths;  // of these keys alone
    Int longest = piece.keys;
    if (p.key_lengths) {
      for (Int b = 0; b < p.B; ++b)
        lengths.push_back(std::min(seen_before(p.key_lengths[b], keys), piece.keys));
      pair.key_lengths = lengths.data();
      longest = p.B ? *std::max_element(lengths.begin(), lengths.end()) : 0;
    }
    if (longest > 0) f(pair, piece.row);
  }
}

}  // namespace fa::ring
