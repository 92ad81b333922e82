// Benchmarks that a chart may trust: verified before and after timing on the very buffers, measured
// in rounds (every row once a round, in an order drawn anew), each sample with the machine's own
// multiply-add peak beside it.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/judge/cases.hpp"

namespace fa::bench {

enum class Size { smoke, quick, full };

// The list for the size asked for: quick ones are a part of the full ones; smoke is the first
// alone.
std::vector<std::int64_t> sizes(Size size, std::vector<std::int64_t> quick,
                                std::vector<std::int64_t> more);

// Defined by each stage's check/bench.cpp; main() calls it once.
void register_benchmarks(Size size);

// One row "PREFIX/N:1024/d:64/causal:0/f32", PREFIX like "stage01/forward/safe_softmax". f runs one
// forward on the views it is given; `threads` says against how many cores' peak it is held.
template <class T>
void forward(const std::string& prefix, const Problem& p,
             const std::function<void(const Problem&, const Forward<T>&)>& f, int threads = 1);

// The same for a method with a part left out: what it computes is no attention, so there is nothing
// to verify and no FLOP to credit. The row has a time alone, and says `unverified`.
void part(const std::string& prefix, const Problem& p,
          const std::function<void(const Problem&, const Forward<float>&)>& f);

// Where the time of a forward goes: a row "PREFIX/line/NAME/N:1024/d:64/causal:0/f32" for each of
// its lines, verified as above. f runs the whole and calls the Lap with 0, 1, 2 ... when that line
// is done, once for each head. `flops`: how many the line does for a visible pair.
struct Line {
  std::string name;
  double flops;
};
using Lap = std::function<void(std::size_t done)>;
void lines(const std::string& prefix, const Problem& p, const std::vector<Line>& lines,
           const std::function<void(const Problem&, const Forward<float>&, const Lap&)>& f);

// One row "roof/bandwidth/LEVEL/threads:T/f32": bytes per second of a[i] = b[i] + s c[i], over and
// over, on three arrays of so many bytes together. The other roof: what a level of memory delivers.
void bandwidth(const std::string& level, int threads, std::int64_t bytes);

// One row "PREFIX/scores:100/f32": the largest error against the oracle, relative to the largest
// output, and the number of outputs that are not finite, for scores of about that size.
void error(const std::string& prefix, double scores,
           const std::function<void(const Problem&, const Forward<float>&)>& f);

}  // namespace fa::bench
