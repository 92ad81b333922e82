// see 05: the gradient of one row, then that of key 0, pair by pair.
//
//   ./learn see 05       row 3
//   ./learn see 05 2     another row, 0 to 3
//
// Every number comes from the lessons, which know nothing of this file: stage 03's for O and L, and
// for the gradients the one on the CPU. L_i and O_i given, a pair of a query and a key needs no
// other, so what a pair adds is what the lesson finds when there is nothing else.
#define FA_EMULATED  // the header also has the kernels' launches
#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "03_tiled_cpu/tiled_cpu.cpp"
#include "05_cuda_backward/tiled_backward.cpp"
#include "common/practice/see.hpp"

using namespace see;

// The gradient of O, as in the chapter.
constexpr Matrix dO = {{{1, 0}, {0, 1}, {1, 1}, {1, -1}}};

fa::Problem problem(std::size_t queries, std::size_t keys) {
  fa::Problem p;
  p.Nq = std::int64_t(queries), p.Nk = std::int64_t(keys), p.d = D;
  return p;
}
fa::Rows<const float> view(const Matrix& m, std::size_t first = 0, std::size_t rows = N) {
  return {m[first].data(), std::int64_t(rows), D, D};
}
fa::Rows<float> view(Matrix& m) { return {m[0].data(), N, D, D}; }

struct Forward {
  Matrix O{};
  std::array<float, N> L{};
};

// Of all queries over keys first ... first + keys - 1.
Forward forward(std::size_t first = 0, std::size_t keys = N) {
  const fa::Problem p = problem(N, keys);
  std::vector<float> scratch(fa::tiled_cpu::scratch_elements(N, N, D));
  Forward f;
  fa::tiled_cpu::attention_tile<float>(view(Q), view(K, first, keys), view(V, first, keys),
                                       float(p.softmax_scale()), fa::Mask(p, 0), 0, N, N,
                                       scratch.data(), view(f.O), f.L.data());
  return f;
}
float score(std::size_t i, std::size_t j) { return forward(j, 1).L[i]; }  // of one key

struct Backward {
  std::array<float, N> D{};
  Matrix dQ{}, dK{}, dV{};
};

// Of `queries` queries from i on and `keys` keys from j on.
Backward backward(const Matrix& O, const std::array<float, N>& L, std::size_t i = 0,
                  std::size_t queries = N, std::size_t j = 0, std::size_t keys = N) {
  const fa::Problem p = problem(queries, keys);
  Backward b;
  fa::cuda_backward::attention_backward<float>(
      view(Q, i, queries), view(K, j, keys), view(V, j, keys), view(O, i, queries),
      view(dO, i, queries), &L[i], float(p.softmax_scale()), fa::Mask(p, 0), N, N, b.D.data(),
      view(b.dQ), view(b.dK), view(b.dV));
  return b;
}

// What all queries and keys together have.
const Forward& all_forward() {
  static const Forward f = forward();
  return f;
}
const Backward& all_backward() {
  static const Backward b = backward(all_forward().O, all_forward().L);
  return b;
}

// How many times `of` a multiple of it is.
float factor(const Token& multiple, const Token& of) {
  return (multiple[0] * of[0] + multiple[1] * of[1]) / (of[0] * of[0] + of[1] * of[1]);
}

struct Pair {
  float P, dP, dS;
  Token dQ, dK, dV;
};
Pair pair_of(std::size_t i, std::size_t j) {
  const float scale = float(problem(N, N).softmax_scale());
  const auto alone = [&](const Matrix& O) { return backward(O, all_forward().L, i, 1, j, 1); };
  const Backward b = alone(all_forward().O), without_D = alone({});  // O = 0 gives D = 0
  const float P = factor(b.dV[0], dO[i]);
  const auto dS = [&](const Backward& of) { return factor(of.dQ[0], K[j]) / scale; };
  return {P, dS(without_D) / P, dS(b), b.dQ[0], b.dK[0], b.dV[0]};
}

// A sum of numbers of this size is 0 but for rounding.
float rounded(float x) { return std::fabs(x) < 1e-6f ? 0 : x; }
void add(Token& to, const Token& more) {
  for (std::size_t c = 0; c < D; ++c) to[c] += more[c];
}

void given() {
  title("Given",
        "dO from the layer above, O and L from the forward; (1) D = dO . O, a number a row.");
  Table table({"row", "dO", "O", "L", "(1) D"});
  for (std::size_t i = 0; i < N; ++i)
    table.row({std::to_string(i), pair(dO[i].data()), pair(all_forward().O[i].data()),
               num(all_forward().L[i]), num(all_backward().D[i])});
  table.print();
}

void one_row(std::size_t i) {
  const std::string row = std::to_string(i), L = num(all_forward().L[i]),
                    D_i = num(all_backward().D[i]);
  title("Row " + row,
        "P = exp(s - " + L + "), dP = dO_" + row + " . v, dS = P (dP - D), key by key.");
  Table table({"key", "s", "(2) P", "(3) dP", "P dP", "(4) dS", "(5) adds to dQ_" + row});
  Pair sum{};
  float sum_P_dP = 0;
  for (std::size_t j = 0; j < N; ++j) {
    const Pair x = pair_of(i, j);
    table.row({std::to_string(j), num(score(i, j)), num(x.P), num(x.dP), num(x.P * x.dP), num(x.dS),
               pair(x.dQ.data())});
    sum.P += x.P, sum.dS += x.dS, sum_P_dP += x.P * x.dP;
    add(sum.dQ, x.dQ);
  }
  table.row({"sum",
             "",
             num(sum.P),
             "",
             {num(sum_P_dP), GREEN},
             num(rounded(sum.dS)),
             {pair(sum.dQ.data()), GREEN}});
  table.print();
  std::printf("  All keys at once: D = %s    dQ_%zu = %s\n", D_i.c_str(), i,
              pair(all_backward().dQ[i].data()).c_str());
}

void one_column(std::size_t j) {
  const std::string key = std::to_string(j);
  title("Column " + key, "Key " + key + " meets the same P and dS, one of each query.");
  Table table({"query", "P", "dS", "(5) adds P dO to dV_" + key, "adds scale dS q to dK_" + key});
  Pair sum{};
  for (std::size_t i = 0; i < N; ++i) {
    const Pair x = pair_of(i, j);
    table.row({std::to_string(i), num(x.P), num(x.dS), pair(x.dV.data()), pair(x.dK.data())});
    add(sum.dV, x.dV), add(sum.dK, x.dK);
  }
  table.row({"sum", "", "", {pair(sum.dV.data()), GREEN}, {pair(sum.dK.data()), GREEN}});
  table.print();
  std::printf("  All queries at once: dV_%zu = %s    dK_%zu = %s\n", j,
              pair(all_backward().dV[j].data()).c_str(), j,
              pair(all_backward().dK[j].data()).c_str());
}

int main(int argc, char** argv) {
  const std::size_t row = std::size_t(argument(argc, argv, "the row", 0, int(N) - 1, int(N) - 1));
  std::printf("%s\n",
              paint(BOLD, "The gradient of attention on four tokens of d = 2 numbers").c_str());
  given();
  one_row(row);
  one_column(0);
}
