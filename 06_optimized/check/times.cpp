// Every kernel when what it asks for happens as early as it may, and at random times. In late
// order, the emulator's own, all other tests run. On the CPU alone: a GPU takes the time it takes.
//   FA_SEEDS=200 stage06_on_cpu_tests --gtest_filter='Times.*'
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <ostream>
#include <string>
#include <vector>

#include "06_optimized/check/testing.hpp"
#include "common/core/cuda.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/half.hpp"
#include "common/judge/sanitizer.hpp"
#include "common/judge/stage.hpp"

namespace fa::judge {
// Its name in those of tests.
static void PrintTo(const StageUnderTest& s, std::ostream* out) { *out << s.name; }
}  // namespace fa::judge

namespace {

using namespace fa;
using namespace fa::judge;
using emulator::Timing;
using Int = std::int64_t;

unsigned seeds() {
  const char* const text = std::getenv("FA_SEEDS");
  if (text) return unsigned(std::strtoul(text, nullptr, 10));
  return FA_SANITIZED ? 2 : 4;
}

// Small, but with more tiles of what is walked over, keys or in the backward queries, than a kernel
// holds at once: without a mask; with one, and heads in groups; with the other, and the narrower
// tiles; with lengths.
std::vector<Spec> cases(const Promises& promises, bool backward) {
  const Int widest = promises.head_dims.empty() ? 128 : promises.head_dims.back();
  const Int narrow = promises.head_dims.empty() ? 64 : promises.head_dims.front();
  std::vector<Spec> all = {backward ? spec(270, 70, widest) : spec(70, 400, widest),
                           backward ? spec(140, 70, widest, Causal::bottom_right)
                                    : spec(130, 270, widest, Causal::bottom_right),
                           spec(140, 150, narrow, Causal::top_left)};
  all[1].p.Hq = 2;
  if (promises.key_lengths) {
    all.push_back(spec(70, backward ? 70 : 200, 72, Causal::top_left));
    all.back().p.B = 2;
    all.back().lengths = {0, backward ? 33 : 131};
  }
  return all;
}

class Times : public testing::TestWithParam<StageUnderTest> {
 protected:
  // Every case early, and of the seeds each `of`-th from `mine` on: the cases take turns.
  template <class T>
  void run(const Functions<T>& functions, std::size_t mine, std::size_t of) {
    run(functions, cases(GetParam().promises, bool(functions.backward)), mine, of);
  }
  template <class T>
  void run(const Functions<T>& functions, const std::vector<Spec>& all, std::size_t mine,
           std::size_t of) {
    const bool backward = bool(functions.backward);
    for (std::size_t n = 0; n < all.size(); ++n) {
      std::vector<emulator::Schedule> times = {{Timing::early, 0}};
      for (std::size_t seed = mine + of * n; seed < seeds(); seed += of * all.size())
        times.push_back({Timing::random, unsigned(seed)});
      if (backward) {
        BackwardCase<T> c(all[n]);
        at_each(times, c, functions.backward);
      } else {
        ForwardCase<T> c(all[n], GetParam().promises.lse);
        at_each(times, c, functions.forward);
      }
    }
  }

 private:
  template <class Case, class F>
  void at_each(const std::vector<emulator::Schedule>& times, Case& c, const F& f) {
    for (const emulator::Schedule& now : times) {
      std::string wrong;
      try {
        const emulator::WithSchedule until_the_end(now);
        f(c.call());
        wrong = c.verdict();
      } catch (const std::exception& e) {
        wrong = std::string("threw: ") + e.what();
      }
      const bool early = now.timing == Timing::early;
      if (!wrong.empty())
        ADD_FAILURE() << c.spec.name()
                      << ", FA_TIMING=" << (early ? "early" : std::to_string(now.seed)) << "\n"
                      << wrong;
    }
  }
};

TEST_P(Times, EarlyAndAtRandom) {
  const StageUnderTest& s = GetParam();
  const bool both = s.f16.forward || s.f16.backward;
  run(s.bf16, 0, both ? 2 : 1);
  if (both) run(s.f16, 1, 2);
  // Where d = 256 has kernels of its own. Of 64 queries a group of the product has none, and looks
  // on.
  if (s.name == "backward_two_kernels" || s.name == "backward_hopper")
    run(s.bf16, {spec(140, 270, 256, Causal::bottom_right), spec(270, 70, 256), spec(64, 700, 256)},
        0, 1);
  if (s.name != "hopper") return;
  // Of its three groups two have no rows in a head's last tile. They look on; and before they give
  // back what they have not read, the last of their warps must have seen that it came.
  Spec tall = spec(200, 200, 64);
  tall.p.Hq = 5;
  run(s.bf16, {tall}, 0, 1);
}

// Asked for when main() has begun: the ladders have registered then.
INSTANTIATE_TEST_SUITE_P(, Times, testing::ValuesIn(registered()),
                         [](const auto& stage) { return stage.param.name; });

}  // namespace
