// What a woven exercise calls (see weave.py): which holes the reader's code fills, and a record of
// what is computed on the way.
#pragma once
#include <algorithm>
#include <cstdint>
#include <set>
#include <type_traits>

namespace fa::practice {

extern const unsigned long long readers;  // bit k: hole k is the reader's; FA_STEPS, else all
extern bool recording;

// Does the reader's code fill this hole, or the lesson's?
inline bool step(int hole) { return readers >> hole & 1; }

void record(const char* name, double x);

// Notes what a step has computed: a number, n numbers, or a matrix, row by row.
template <class T>
requires std::is_arithmetic_v<T>
void see(const char* name, T x) {
  if (recording) record(name, double(x));
}
template <class T>
void see(const char* name, const T* x, std::int64_t n) {
  for (std::int64_t e = 0; recording && e < n; ++e) record(name, double(x[e]));
}
template <class M>
requires requires(const M& x) { x(0, 0), x.rows(), x.cols(); }
void see(const char* name, const M& x) {
  for (std::int64_t i = 0; recording && i < x.rows(); ++i)
    for (std::int64_t j = 0; j < x.cols(); ++j) record(name, double(x(i, j)));
}

// How many turns shared memory takes for one access of a warp: lane i touches `width` numbers of 4
// bytes from word(i) on. A turn serves 32 numbers, one of each bank; who wants the same, shares it.
template <class F>
int turns(F word, int width = 1) {
  int sum = 0;
  for (int first = 0; first < 32; first += 32 / width) {
    int most = 0;
    for (int bank = 0; bank < 32; ++bank) {
      std::set<long> wanted;
      for (int lane = first; lane < first + 32 / width; ++lane)
        for (int e = 0; e < width; ++e)
          if (const long w = long(word(lane)) + e; w % 32 == bank) wanted.insert(w);
      most = std::max(most, int(wanted.size()));
    }
    sum += most;
  }
  return sum;
}

}  // namespace fa::practice
