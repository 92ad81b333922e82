// How a sequence is dealt out to ranks, and what the mask leaves of a pair of blocks.
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

std::vector<Piece> pieces_of(const Problem& p, const Block& q, const Block& k) {
  const Piece all{0, q.rows, k.rows, Causal::none};
  if (p.causal == Causal::none) return {all};
  // (1) query a of its block sees the keys c <= a + shift of theirs
  const Int shift = q.first - k.first + (p.causal == Causal::bottom_right ? p.Nk - p.Nq : 0);
  if (shift >= k.rows - 1) return {all};
  if (q.rows + shift <= 0) return {};
  if (shift == 0) return {{0, q.rows, k.rows, Causal::top_left}};
  // Aligned at the bottom right, `rows` queries and rows + shift keys are that mask. Rows after
  // them, if there are any, see all keys.
  const Int rows = std::min(q.rows, k.rows - shift);
  std::vector<Piece> pieces{{0, rows, rows + shift, Causal::bottom_right}};
  if (rows < q.rows) pieces.push_back({rows, q.rows - rows, k.rows, Causal::none});
  return pieces;
}

void each_piece(const Problem& p, const std::vector<Block>& queries, const std::vector<Block>& keys,
                const std::function<void(const Problem&, Int, Int)>& f) {
  Int row = 0;
  for (const Block& q : queries) {
    Int key = 0;
    for (const Block& k : keys) {
      for (const Piece& piece : pieces_of(p, q, k)) {
        Problem pair = p;
        pair.Nq = piece.rows, pair.Nk = piece.keys, pair.causal = piece.causal;
        pair.scale = p.softmax_scale();
        std::vector<Int> lengths;  // of these keys alone
        Int longest = piece.keys;
        if (p.key_lengths) {
          for (Int b = 0; b < p.B; ++b)
            lengths.push_back(std::clamp<Int>(p.key_lengths[b] - k.first, 0, piece.keys));
          pair.key_lengths = lengths.data();
          longest = p.B ? *std::max_element(lengths.begin(), lengths.end()) : 0;
        }
        if (longest > 0) f(pair, row + piece.row, key);
      }
      key += k.rows;
    }
    row += q.rows;
  }
}

}  // namespace fa::ring
