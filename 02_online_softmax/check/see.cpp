// see 02: a row of the tiny problem key by key, then its keys in two halves, then all rows at once.
//
//   ./learn see 02       row 3
//   ./learn see 02 0     another row, 0 to 3
//
// Every number comes from the lessons, which know nothing of this file: what attention has after
// some keys is what it finds for these keys alone.
#include <cmath>
#include <cstdio>
#include <string>

#include "02_online_softmax/lanes.cpp"
#include "02_online_softmax/online_softmax.cpp"
#include "common/practice/see.hpp"

using namespace see;
using namespace fa::online_softmax;

struct Result {
  Matrix O{};
  std::array<float, N> L{};
};

fa::Rows<const float> view(const Matrix& m, std::size_t first, std::size_t end) {
  return {m[first].data(), std::int64_t(end - first), D, D};
}

// Attention of all rows over keys first ... end - 1.
Result over(std::size_t first, std::size_t end,
            decltype(attention<float>)* method = attention<float>,
            fa::Causal causal = fa::Causal::none) {
  fa::Problem p;
  p.Nq = N, p.Nk = std::int64_t(end - first), p.d = D, p.causal = causal;
  Result r;
  method(view(Q, 0, N), view(K, first, end), view(V, first, end), float(p.softmax_scale()),
         fa::Mask(p, 0), {r.O[0].data(), N, D, D}, r.L.data());
  return r;
}

float score(std::size_t i, std::size_t j) { return over(j, j + 1).L[i]; }  // one key: L = s

void key_by_key(std::size_t i) {
  title("One row, key by key",
        "Row " + std::to_string(i) + " keeps a maximum m, a sum l, and o, a sum of values.");
  Table table({"key", "score s", "m", "rescale", "p", "l", "o"});
  Running<float> r;
  for (std::size_t j = 0; j < N; ++j) {
    const float s = score(i, j), before = r.m;
    float p = 0;
    const float rescale = r.add(s, p);
    Token o = over(0, j + 1).O[i];  // already divided by l
    for (float& x : o) x *= r.l;
    const bool grown = r.m != before;
    table.row({std::to_string(j),
               num(s),
               {num(r.m), grown ? YELLOW : nullptr},
               {num(rescale), rescale != 1 ? YELLOW : nullptr},
               num(p),
               num(r.l),
               pair(o.data())});
    if (j == 0)
      table.note("the first key is the largest so far: its weight is exp(0) = 1");
    else if (grown)
      table.note("larger than " + num(before) + ": l and o shrink by exp(" + num(before) + " - " +
                 num(r.m) + ") = " + num(rescale) + ", then key " + std::to_string(j) +
                 " adds weight 1");
    else
      table.note("not larger: l and o stay, key " + std::to_string(j) + " adds weight exp(" +
                 num(s) + " - " + num(r.m) + ") = " + num(p));
  }
  table.print();
  const Result all = over(0, N);
  std::printf("  O = o / l = %s    L = m + log l = %s\n", pair(all.O[i].data()).c_str(),
              num(all.L[i]).c_str());
}

void two_halves(std::size_t i) {
  title("merge", "The same row by two workers, who had two keys each.");
  const Result a = over(0, N / 2), b = over(N / 2, N), all = over(0, N);
  Token O;
  float L;
  merge(a.O[i].data(), a.L[i], b.O[i].data(), b.L[i], D, O.data(), &L);
  Table table({"keys", "O", "L", "weight exp(L - L of all)"});
  table.row({"0, 1", pair(a.O[i].data()), num(a.L[i]), num(std::exp(a.L[i] - L))});
  table.row({"2, 3", pair(b.O[i].data()), num(b.L[i]), num(std::exp(b.L[i] - L))});
  table.row({"merged", {pair(O.data()), GREEN}, {num(L), GREEN}, ""});
  table.row({"all", pair(all.O[i].data()), num(all.L[i]), ""});
  table.print();
}

void all_rows() {
  title("lanes", "All rows at once under a causal mask: lane r is row r and sees keys 0 to r.");
  std::printf(
      "  The vector here has %d lanes; each gets a score, -inf where its row does not see\n", W);
  std::printf("  the key. What a lane has after the key, as L = m + log l, stands on the right.\n");
  Table table({"key", "s: 0", "1", "2", "3", "   L: 0", "1", "2", "3"});
  for (std::size_t j = 0; j < N; ++j) {
    const Result lanes = over(0, j + 1, attention_lanes, fa::Causal::top_left);
    std::vector<Cell> row = {std::to_string(j)};
    for (std::size_t i = 0; i < N; ++i)
      row.push_back(j <= i ? Cell(num(score(i, j))) : Cell("-inf", DIM));
    for (std::size_t i = 0; i < N; ++i) row.push_back({num(lanes.L[i]), j <= i ? GREEN : DIM});
    table.row(row);
  }
  table.print();
  const Result lanes = over(0, N, attention_lanes, fa::Causal::top_left),
               rows = over(0, N, attention<float>, fa::Causal::top_left);
  Table outputs({"row", "O by lanes", "O by rows, one after the other"});
  for (std::size_t i = 0; i < N; ++i)
    outputs.row({std::to_string(i), pair(lanes.O[i].data()), pair(rows.O[i].data())});
  outputs.print();
}

int main(int argc, char** argv) {
  const std::size_t row = std::size_t(argument(argc, argv, "the row", 0, int(N) - 1, int(N) - 1));
  std::printf("%s\n",
              paint(BOLD, "Attention in one pass, on four tokens of d = 2 numbers").c_str());
  key_by_key(row);
  two_halves(row);
  all_rows();
}
