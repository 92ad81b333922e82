// see 03: which tiles of the tiny problem are visited, and what a row has after each of them.
//
//   ./learn see 03       row 3
//   ./learn see 03 2     another row, 0 to 3
//
// Every number comes from the lesson, which knows nothing of this file: what a row has after some
// tiles is what the lesson leaves in its scratch when these are all the keys there are.
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "03_tiled_cpu/tiled_cpu.cpp"
#include "common/practice/see.hpp"

using namespace see;
using fa::Causal, fa::Mask;

fa::Rows<const float> view(const Matrix& m, std::size_t first, std::size_t end) {
  return {m[first].data(), std::int64_t(end - first), D, D};
}

fa::Problem problem(std::size_t keys, Causal causal) {
  fa::Problem p;
  p.Nq = N, p.Nk = std::int64_t(keys), p.d = D, p.causal = causal;
  return p;
}

struct State {
  float m = -std::numeric_limits<float>::infinity(), l = 0;
  Token O{};
  float L = 0;
  std::vector<float> P;  // of the last tile
};

// Row i in tiles of B x B, after keys first ... end - 1.
State after(std::size_t i, std::size_t first, std::size_t end, Causal causal, std::size_t B) {
  const fa::Problem p = problem(end - first, causal);
  const std::size_t i0 = i / B * B, r = i - i0;
  const auto size = std::int64_t(B);
  std::vector<float> scratch(fa::tiled_cpu::scratch_elements(size, size, D));
  Matrix O{};
  std::array<float, N> L{};
  fa::tiled_cpu::attention_tile<float>(view(Q, 0, N), view(K, first, end), view(V, first, end),
                                       float(p.softmax_scale()), Mask(p, 0), std::int64_t(i0), size,
                                       size, scratch.data(), {O[0].data(), N, D, D}, L.data());
  const float *S = scratch.data(), *m = S + B * B + B * D, *l = m + B;
  return {m[r], l[r], O[i], L[i], {S + r * B, S + (r + 1) * B}};
}

float score(std::size_t i, std::size_t j) {
  return after(i, j, j + 1, Causal::none, 1).m;  // of one key
}

std::string range(const char* one, const char* many, std::size_t first, std::size_t end) {
  if (end - first == 1) return one + (" " + std::to_string(first));
  return many + (" " + std::to_string(first)) + (end - first == 2 ? ", " : " to ") +
         std::to_string(end - 1);
}

// What the lesson's loop bound and its n come to, in words.
Cell tile_class(const Mask& mask, std::size_t i0, std::size_t j0, std::size_t B) {
  const std::size_t rows = std::min(B, N - i0), cols = std::min(B, N - j0);
  const auto sees = [&](std::size_t i) { return std::size_t(mask.visible_keys(std::int64_t(i))); };
  if (sees(i0 + rows - 1) <= j0) return {"skipped", DIM};
  const bool full = sees(i0) >= j0 + cols;
  return {std::string(full ? "full" : "diagonal") + (rows < B || cols < B ? ", a tail" : ""),
          full ? GREEN : YELLOW};
}

void classes(const std::string& name, Causal causal, std::size_t B) {
  const Mask mask(problem(N, causal), 0);
  std::vector<Cell> head = {name};
  for (std::size_t j0 = 0; j0 < N; j0 += B)
    head.push_back(range("key", "keys", j0, std::min(j0 + B, N)));
  Table table(head);
  for (std::size_t i0 = 0; i0 < N; i0 += B) {
    std::vector<Cell> row = {range("query", "queries", i0, std::min(i0 + B, N))};
    for (std::size_t j0 = 0; j0 < N; j0 += B) row.push_back(tile_class(mask, i0, j0, B));
    table.row(row);
  }
  table.print();
}

void tile_by_tile(std::size_t i, Causal causal) {
  const Mask mask(problem(N, causal), 0);
  Table table({"keys", "n", "scores S", "m", "rescale", "weights P", "l", "o"});
  State s;
  for (std::size_t j0 = 0; j0 < N; j0 += 2) {
    const std::size_t seen = std::size_t(mask.visible_keys(std::int64_t(i)));
    if (seen <= j0) {
      table.note(range("key", "keys", j0, j0 + 2) + ": not one of them is seen");
      break;
    }
    const float before = s.m;
    s = after(i, 0, j0 + 2, causal, 2);
    const std::size_t n = std::min<std::size_t>(seen - j0, 2);
    std::string scores, weights;
    for (std::size_t c = 0; c < 2; ++c) {
      scores += c < n ? num(score(i, j0 + c), 9) : "   hidden";
      weights += c < n ? num(s.P[c], 8) : "       -";
    }
    const float rescale = std::exp(before - s.m);
    const Token o = {s.O[0] * s.l, s.O[1] * s.l};  // as it was before the division
    table.row({std::to_string(j0) + ", " + std::to_string(j0 + 1),
               std::to_string(n),
               scores,
               {num(s.m), s.m != before ? YELLOW : nullptr},
               {num(rescale), rescale != 1 ? YELLOW : nullptr},
               weights,
               num(s.l),
               pair(o.data())});
  }
  table.print();
  std::printf("  O = o / l = %s    L = m + log l = %s\n", pair(s.O.data()).c_str(),
              num(s.L).c_str());
}

int main(int argc, char** argv) {
  const std::size_t row = std::size_t(argument(argc, argv, "the row", 0, int(N) - 1, int(N) - 1));
  std::printf("%s\n",
              paint(BOLD, "Attention in tiles of 2 x 2, on four tokens of d = 2 numbers").c_str());
  title("Tiles", "What is done with each pair of a tile of queries and a tile of keys.");
  classes("no mask", Causal::none, 2);
  classes("causal mask", Causal::top_left, 2);
  classes("causal, tiles of 3 x 3", Causal::top_left, 3);
  const std::string name = "Row " + std::to_string(row);
  title(name + ", no mask", "m, l and o after each tile; n is how many of its keys the row sees.");
  tile_by_tile(row, Causal::none);
  title(name + ", causal mask", "It sees keys 0 to " + std::to_string(row) + ".");
  tile_by_tile(row, Causal::top_left);
}
