// see 04: the tiny problem in one block: what the lanes of a warp hold, and every shuffle.
//
//   ./learn see 04       row 3
//   ./learn see 04 2     another row, 0 to 3
//
// Every number comes from the lesson, which runs on the emulator and knows nothing of this file:
// its shuffles, exponentials and logarithms are those below, which note what they are given.
#define FA_EMULATED
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "common/core/check.cpp"
#include "common/core/cuda.hpp"
#include "common/emulator/cores.cpp"
#include "common/emulator/cuda_on_cpu.cpp"
#include "common/emulator/overlap.cpp"
#include "common/emulator/places.cpp"
#include "common/emulator/proxies.cpp"
#include "common/emulator/races.cpp"
#include "common/practice/see.hpp"

using namespace see;

constexpr unsigned lanes = 32, steps = 5;  // 2^5 lanes

// What the lanes of warp 0 do, in their order.
struct Shuffle {
  float mine, got;
  unsigned from;
};
std::array<std::vector<Shuffle>, lanes> shuffles;
std::array<std::vector<std::pair<float, float>>, lanes> exps, logs;  // x and its function

float noted_shuffle(unsigned mask, float x, int bits) {
  const float got = __shfl_xor_sync(mask, x, bits);
  if (threadIdx.x < lanes) shuffles[threadIdx.x].push_back({x, got, threadIdx.x ^ unsigned(bits)});
  return got;
}
template <float function(float)>
float noted(std::array<std::vector<std::pair<float, float>>, lanes>& all, float x) {
  if (threadIdx.x < lanes) all[threadIdx.x].push_back({x, function(x)});
  return function(x);
}
float noted_exp(float x) { return noted<expf>(exps, x); }
float noted_log(float x) { return noted<logf>(logs, x); }

#define __shfl_xor_sync noted_shuffle
#define expf noted_exp
#define logf noted_log
#include "04_cuda_forward/tiled.cu"
#undef __shfl_xor_sync
#undef expf
#undef logf

Matrix O;
std::array<float, N> L;

void run_the_lesson() {
  Matrix q = Q, k = K, v = V;
  fa::Problem p;
  p.Nq = p.Nk = N, p.d = D;
  const auto view = [](Matrix& m) { return fa::contiguous(m[0].data(), 1, N, D); };
  fa::cuda_forward::launch_tiled(p, {view(q), view(k), view(v), view(O), L.data()},
                                 float(p.softmax_scale()), nullptr);
}

// There is one tile of keys. For each row a lane calls warp_max and warp_sum, five shuffles each,
// and expf twice.
enum Reduction { maximum, sum };
const Shuffle& shuffle(unsigned lane, std::size_t row, Reduction which, unsigned step) {
  return shuffles[lane].at((2 * row + which) * steps + step);
}
float score(unsigned lane, std::size_t row) { return shuffle(lane, row, maximum, 0).mine; }
std::pair<float, float> rescale(std::size_t row) { return exps[0].at(2 * row); }
float weight(unsigned lane, std::size_t row) { return exps[lane].at(2 * row + 1).second; }

// What a lane holds after so many shuffles: what it hands on in the next.
float held(unsigned lane, std::size_t row, Reduction which, unsigned after) {
  if (after < steps) return shuffle(lane, row, which, after).mine;
  const auto [mine, got, from] = shuffle(lane, row, which, steps - 1);
  return which == maximum ? std::fmax(mine, got) : mine + got;
}

std::string span(const char* one, unsigned first, unsigned end) {
  return one + (" " + std::to_string(first)) + " to " + std::to_string(end - 1);
}
std::vector<Cell> head(const std::string& first) {
  std::vector<Cell> cells = {first};
  for (unsigned lane = 0; lane < N; ++lane) cells.push_back("lane " + std::to_string(lane));
  return cells;
}
void who_has_what() {
  title("One block",
        "4 warps of 32 lanes, for 16 queries and 32 keys. The problem fills a corner.");
  std::printf(
      "  warp 0        queries 0 to 3; lanes 0 to 3 have keys 0 to 3, lanes 4 to 31 none\n");
  std::printf("  warps 1 to 3  no query: they compute, and store nothing\n");
}

void scores(std::size_t row) {
  title("(3) Scores", "A lane multiplies its key with the warp's four queries, into s[0] to s[3].");
  std::vector<Cell> cells = head("");
  cells.push_back(span("lanes", N, lanes));
  Table table(cells);
  for (std::size_t i = 0; i < N; ++i) {
    cells = {"s[" + std::to_string(i) + "]"};
    for (unsigned lane = 0; lane < N; ++lane)
      cells.push_back({num(score(lane, i)), i == row ? GREEN : nullptr});
    bool same = true;
    for (unsigned lane = N; lane < lanes; ++lane) same = same && score(lane, i) == score(N, i);
    cells.push_back({same ? num(score(N, i)) : "various", DIM});
    table.row(cells);
  }
  table.print();
}

// Who gets what from whom in a shuffle.
std::string exchanged(std::size_t row, Reduction which, unsigned step) {
  const auto of = [&](unsigned lane) { return shuffle(lane, row, which, step); };
  bool same = true;  // neighbours get the same number from neighbours
  for (unsigned lane = 0; lane < N; ++lane)
    same = same && of(lane).got == of(0).got && of(lane).from == of(0).from + lane;
  if (same)
    return span("lanes", 0, N) + " get " + num(of(0).got) + " from " +
           span("lanes", of(0).from, of(0).from + N);
  std::string text;
  for (unsigned lane = 0; lane < N; ++lane)
    text += (lane ? "; " : "lane ") + std::to_string(lane) + " gets " + num(of(lane).got) +
            " from " + std::to_string(of(lane).from);
  return text;
}

void reduce(std::size_t row, Reduction which) {
  const float result = held(0, row, which, steps);
  std::vector<Cell> cells = head("");
  cells.push_back(which == maximum ? "lanes with the largest" : "lanes with the whole sum");
  Table table(cells);
  for (unsigned after = 0; after <= steps; ++after) {
    if (after) table.note(exchanged(row, which, after - 1));
    cells = {after ? "xor " + std::to_string(lanes >> after) : which == maximum ? "s" : "weight"};
    for (unsigned lane = 0; lane < N; ++lane) {
      const float x = held(lane, row, which, after);
      const bool changed = after && x != held(lane, row, which, after - 1);
      cells.push_back({num(x), after == steps ? GREEN : changed ? YELLOW : nullptr});
    }
    int have = 0;
    for (unsigned lane = 0; lane < lanes; ++lane) have += held(lane, row, which, after) == result;
    cells.push_back(std::to_string(have));
    table.row(cells);
  }
  table.print();
}

void output(std::size_t row) {
  title("(6) o",
        "Now a lane is a column of V: lane 0 has column 0, lane 1 column 1, the others none.");
  const float l = logs[0].at(row).first;
  Table table({"key", "P", "lane 0: V", "lane 1: V"});
  for (unsigned j = 0; j < N; ++j)
    table.row({std::to_string(j), num(weight(j, row)), num(V[j][0], 0, 0), num(V[j][1], 0, 0)});
  table.row({"o", "", {num(O[row][0] * l), GREEN}, {num(O[row][1] * l), GREEN}});  // before (7)
  table.print();
  std::printf("  (7) O = o / l = %s    L = m + log l = %s\n", pair(O[row].data()).c_str(),
              num(L[row]).c_str());
}

int main(int argc, char** argv) {
  const std::size_t row = std::size_t(argument(argc, argv, "the row", 0, int(N) - 1, int(N) - 1));
  run_the_lesson();
  std::printf("%s\n", paint(BOLD, "Attention in a warp, on four tokens of d = 2 numbers").c_str());
  who_has_what();
  scores(row);
  title("(4) warp_max",
        "Of s[" + std::to_string(row) +
            "]: five times a lane gets the number of another, and keeps the larger.");
  reduce(row, maximum);
  std::printf("  m = %s in every lane; what was there before shrinks by exp(%s) = %s\n",
              num(held(0, row, maximum, steps)).c_str(), num(rescale(row).first).c_str(),
              num(rescale(row).second).c_str());
  title("(5) warp_sum",
        "A lane's weight is exp(s - m), 0 for a lane without a key. The same exchange, and add.");
  reduce(row, sum);
  std::printf("  l = %s in every lane\n", num(logs[0].at(row).first).c_str());
  output(row);
}
