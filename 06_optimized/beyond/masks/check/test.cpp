// Tests of masks: what a pattern hides, which tiles it skips, sinks and their gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/masks/reach.hpp"
#include "06_optimized/check/nan.hpp"
#include "06_optimized/check/plain.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
namespace walk = fa::masks;
using walk::no_limit;
using walk::Pattern;
using Int = std::int64_t;
using half = Eigen::half;
using bf16 = Eigen::bfloat16;

template <class T>
using Device =
    std::conditional_t<std::is_same_v<T, float>, float,
                       std::conditional_t<std::is_same_v<T, half>, __half, __nv_bfloat16>>;

// f(T()) for every type that the suite knows here.
template <class F>
void each_type(const F& f) {
  f(float());
#ifndef FA_WITHOUT_HALF
  f(half());
  f(bf16());
#endif
}

Spec sized_as(Int B, Int Hq, Int Hkv, Int Nq, Int Nk, Int d, Causal causal = Causal::none,
              std::vector<Int> lengths = {}) {
  Spec s;
  s.p.B = B, s.p.Hq = Hq, s.p.Hkv = Hkv, s.p.Nq = Nq, s.p.Nk = Nk, s.p.d = d;
  s.p.causal = causal;
  s.lengths = std::move(lengths);
  return s;
}

// A pattern in host memory, with what is said of it in words: the oracle's view.
struct Meant {
  Int left = no_limit, right = no_limit;
  bool top_left = false;
  Int first = 0;
  std::vector<Int> prefix = {};
  std::vector<std::int32_t> query_documents = {}, key_documents = {};
  bool sorted = false;
  walk::Wanted wanted = nullptr;           // blocks of 128 x 128
  bool per_batch = true, per_head = true;  // lists; else those of the first
  std::vector<float> sinks = {};

  bool sees(const Problem& p, Int b, Int h, Int i, Int j) const {
    const bool by_top_left = p.causal == Causal::none ? top_left : p.causal == Causal::top_left;
    const Int place = by_top_left ? i : i + p.Nk - p.Nq, apart = j - place;
    const Int most = p.causal == Causal::none ? right : 0;
    const bool near =
        (left == no_limit || apart >= -left || j < first) && (most == no_limit || apart <= most);
    const bool all = !prefix.empty() && j < prefix[std::size_t(b)];
    if (!near && !all) return false;
    if (!query_documents.empty() &&
        query_documents[std::size_t(b * p.Nq + i)] != key_documents[std::size_t(b * p.Nk + j)])
      return false;
    return !wanted || wanted(per_batch ? b : 0, per_head ? h : 0, i / 128, j / 128);
  }

  // A prefix goes past a causal mask, so the oracle is not told of that; of lengths it is.
  Spec told(Spec s) const {
    Problem p = s.p;
    s.hooks.visible = [*this, p](Int b, Int h, Int i, Int j) { return sees(p, b, h, i, j); };
    if (!sinks.empty())
      s.hooks.sink = [sinks = sinks](Int, Int h) { return double(sinks[std::size_t(h)]); };
    s.p.causal = Causal::none;
    return s;
  }
};

// The same in device memory.
class There {
 public:
  There(const Problem& p, const Meant& m) : meant_(m) {
    if (m.wanted) {
      Problem few = p;
      if (!m.per_batch) few.B = std::min<Int>(p.B, 1);
      if (!m.per_head) few.Hq = few.Hkv = std::min<Int>(p.Hq, 1);
      keys_ = walk::lists_of(few, m.wanted);
      queries_ = walk::transposed(few, m.wanted);
      pattern.keys = blocks(p, keys_, p.Nq);
      pattern.queries = blocks(p, queries_, p.Nk);
    }
    pattern.left = m.left, pattern.right = m.right, pattern.top_left = m.top_left;
    pattern.first = m.first, pattern.sorted = m.sorted;
    pattern.prefix = there(meant_.prefix);
    pattern.query_documents = there(meant_.query_documents);
    pattern.key_documents = there(meant_.key_documents);
    pattern.sinks = there(meant_.sinks);
  }
  Pattern pattern;

 private:
  template <class X>
  const X* there(const std::vector<X>& x) {
    if (x.empty()) return nullptr;
    memory_.emplace_back(x.size() * sizeof(X));
    FA_CUDA_CHECK(cudaMemcpy(memory_.back().template as<void>(), x.data(), x.size() * sizeof(X),
                             cudaMemcpyHostToDevice));
    return memory_.back().template as<const X>();
  }
  walk::Blocks blocks(const Problem& p, walk::BlockLists& lists, Int N) {
    const Int each = (N + 127) / 128, heads = meant_.per_head ? p.Hq : 1;
    walk::Blocks x;
    x.offsets = there(lists.offsets);
    x.entries = Int(lists.numbers.size());
    if (x.entries > 0) x.numbers = there(lists.numbers);
    x.lists = Int(lists.offsets.size()) - 1;
    x.batch = meant_.per_batch ? heads * each : 0;
    x.head = meant_.per_head ? each : 0;
    return x;
  }
  Meant meant_;
  walk::BlockLists keys_, queries_;
  std::vector<DeviceMemory> memory_;
};

// The oracle does not know the mask of the problem (Meant::told), the kernels do.
Problem with_mask(Problem p, const Spec& s) {
  p.causal = s.p.causal;
  return p;
}

template <class T>
struct Forwards {
  Spec spec;
  Meant meant;
  ForwardCase<T> c;
  walk::Kernel kernel = walk::Kernel::best;
  bool counted = false;  // has hopper scratch to count its tiles in?

  Forwards(const Spec& s, const Meant& m) : spec(s), meant(m), c(m.told(s), true) {}
  void run(const Pattern* other = nullptr) {
    const There there(spec.p, meant);
    const Pattern& pattern = other ? *other : there.pattern;
    const DeviceMemory counter(sizeof(unsigned));
    FA_CUDA_CHECK(cudaMemset(counter.as<void>(), 0x11, counter.bytes()));
    walk::Options options{nullptr, {}, kernel};
    if (counted) options.scratch = counter;
    on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) {
      walk::forward(with_mask(p, spec), pattern, as_device<Device<T>>(t), options);
    })(c.call());
  }
  std::string verdict() { return c.verdict(); }
  std::vector<char> bits() { return bytes_of({c.O.storage(), c.LSE.storage()}); }
  static std::vector<char> bytes_of(const std::vector<Storage>& all) {
    std::vector<char> bytes;
    for (const Storage& s : all) {
      const char* const first = static_cast<const char*>(s.data);
      bytes.insert(bytes.end(), first, first + s.bytes);
    }
    return bytes;
  }
};

template <class T>
struct Backwards {
  Spec spec;
  Meant meant;
  BackwardCase<T> c;
  walk::Kernel kernel = walk::Kernel::best;
  bool deterministic = false;
  std::vector<float> dsinks;
  std::string fault;

  Backwards(const Spec& s, const Meant& m) : spec(s), meant(m), c(m.told(s)) {}
  void run(const Pattern* other = nullptr) {
    using D = Device<T>;
    const There there(spec.p, meant);
    const Pattern& pattern = other ? *other : there.pattern;
    constexpr std::size_t strip = 256;
    const std::size_t bytes = walk::scratch_bytes<D>(spec.p);
    const DeviceMemory scratch(bytes + strip), sums((meant.sinks.size() + 2) * sizeof(float));
    FA_CUDA_CHECK(cudaMemset(scratch.as<void>(), 0xff, scratch.bytes()));
    FA_CUDA_CHECK(cudaMemset(sums.as<void>(), 0xff, sums.bytes()));
    on_gpu_backward<T>([&](const Problem& p, const Backward<T>& t) {
      walk::Options options;
      options.scratch = {scratch.as<void>(), bytes};
      options.kernel = kernel;
      options.deterministic = deterministic;
      walk::backward(with_mask(p, spec), pattern, as_device<D>(t),
                     meant.sinks.empty() ? nullptr : sums.as<float>() + 1, options);
    })(c.call());
    std::vector<unsigned char> behind(strip);
    FA_CUDA_CHECK(
        cudaMemcpy(behind.data(), scratch.as<char>() + bytes, strip, cudaMemcpyDeviceToHost));
    dsinks.resize(sums.bytes() / sizeof(float));
    FA_CUDA_CHECK(cudaMemcpy(dsinks.data(), sums.as<void>(), sums.bytes(), cudaMemcpyDeviceToHost));
    fault = std::any_of(behind.begin(), behind.end(), [](auto x) { return x != 0xff; })
                ? "wrote behind the scratch\n"
                : "";
    if (!std::isnan(dsinks.front()) || !std::isnan(dsinks.back())) fault += "wrote around dsinks\n";
    dsinks = {dsinks.begin() + 1, dsinks.end() - 1};
  }
  std::string verdict() { return c.verdict() + sinks_verdict() + fault; }
  std::string sinks_verdict() {
    if (meant.sinks.empty()) return "";
    const BackwardOracle want = oracle_backward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V),
                                                to_array(c.dO), {}, c.spec.hooks);
    Comparison comparison("dsinks");
    for (Int h = 0; h < spec.p.Hq; ++h) {
      double terms = 0;  // that rounding acts on
      for (Int b = 0; b < spec.p.B; ++b)
        for (Int i = 0; i < spec.p.Nq; ++i)
          for (Int x = 0; x < spec.p.d; ++x)
            terms += std::fabs(double(c.dO.at(b, h, i, x)) * double(c.O.at(b, h, i, x)));
      const double unit = std::is_same_v<T, float> ? 1e-5 : std::is_same_v<T, half> ? 1e-3 : 8e-3;
      comparison.add(0, h, 0, 0, dsinks[std::size_t(h)], want.dsink.at(0, h, 0),
                     unit * terms + 1e-6);
    }
    return comparison.ok() ? "" : comparison.report();
  }
  std::vector<char> bits() {
    std::vector<char> all = Forwards<T>::bytes_of({c.dQ.storage(), c.dK.storage(), c.dV.storage()});
    const char* const first = reinterpret_cast<const char*>(dsinks.data());
    all.insert(all.end(), first, first + dsinks.size() * sizeof(float));
    return all;
  }
};

template <class T>
void right_by(walk::Kernel kernel, const Spec& s, const Meant& m, const std::string& what) {
  const std::string who = what + ": " + s.name() + ", " + std::to_string(sizeof(T)) +
                          " bytes, kernel " + std::to_string(int(kernel));
  Forwards<T> f(s, m);
  f.kernel = kernel;
  f.run();
  EXPECT_EQ(f.verdict(), "") << "forward, " << who;
  // The best one may add in turns or not; on the CPU it does one of both.
  const bool one_way = sizeof(T) == 4 || kernel == walk::Kernel::fa2 ||
                       (kernel == walk::Kernel::hopper && m.wanted);  // it takes no list in turns
  static int calls = 0;
  const bool second = ++calls % 2 == 1;
  for (const bool deterministic : {false, true}) {
    if (one_way ? deterministic : sized(0, 1) == 1 && deterministic != second) continue;
    Backwards<T> b(s, m);
    b.kernel = kernel;
    b.deterministic = deterministic;
    b.run();
    EXPECT_EQ(b.verdict(), "") << "backward, " << who << (deterministic ? ", in turns" : "");
  }
}
// By the best kernels and by those for every pattern; on the CPU by one of both in turn.
template <class T>
void both_right(const Spec& s, const Meant& m, const std::string& what) {
  static int calls = 0;
  const bool two_bytes = sizeof(T) == 2, one = sized(0, 1) == 1, second = ++calls % 2 == 1;
  if (!two_bytes || !one || !second) right_by<T>(walk::Kernel::best, s, m, what);
  if (two_bytes && (!one || second)) right_by<T>(walk::Kernel::fa2, s, m, what);
}
// In every type; on the CPU in fp32 and in one of the others, which are the same kernels.
void all_right(const Spec& s, const Meant& m, const std::string& what) {
  both_right<float>(s, m, what);
#ifndef FA_WITHOUT_HALF
  static int calls = 0;
  const bool one = sized(0, 1) == 1, second = calls++ % 4 % 3 == 0;
  if (!one || !second) both_right<half>(s, m, what);
  if (!one || second) both_right<bf16>(s, m, what);
#endif
}
// In every type; on the CPU in one, that of the n-th in turn.
void right_in_turn(std::size_t n, const Spec& s, const Meant& m, const std::string& what) {
  if (meets(n, 0)) both_right<float>(s, m, what);
#ifndef FA_WITHOUT_HALF
  if (meets(n, 1)) both_right<half>(s, m, what);
  if (meets(n, 2)) both_right<bf16>(s, m, what);
#endif
}

// All kernels of a type, by name; fp32 has one, and on the CPU fp16 has hopper if there is one.
template <class T>
std::vector<walk::Kernel> kernels() {
  std::vector<walk::Kernel> all = {walk::Kernel::fa2};
  if (sizeof(T) == 2 && optimized::device_capability() == 90) all.push_back(walk::Kernel::hopper);
  if (std::is_same_v<T, half> && sized(0, 1) == 1) all = {all.back()};
  return all;
}

Meant window(Int left, Int right, bool top_left = false, Int first = 0) {
  Meant m;
  m.left = left, m.right = right, m.top_left = top_left, m.first = first;
  return m;
}
std::string said(const Meant& m) {
  const auto limit = [](Int n) { return n == no_limit ? "none" : std::to_string(n); };
  return "left " + limit(m.left) + ", right " + limit(m.right) + ", first " +
         std::to_string(m.first) + (m.top_left ? ", top left" : "");
}
// Ascending numbers for B rows of N, of documents of about so many tokens.
std::vector<std::int32_t> documents(Int B, Int N, Int about, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> ids;
  for (Int b = 0; b < B; ++b) {
    std::int32_t id = std::int32_t(random() % 3);
    for (Int i = 0; i < N; ++i) {
      if (i > 0 && Int(random() % std::uint64_t(about)) == 0) id += 1 + std::int32_t(random() % 2);
      ids.push_back(id);
    }
  }
  return ids;
}

class masks : public GpuTest {};  // the tests' name is the walk's

// ---- windows ----

// Small, and several of everything: tiles, heads of a group, a window, a key that stays, sinks.
TEST_F(masks, Tiles) {
  Meant m = window(20, 3, false, 2);
  m.sinks = {0.5f, 2.f};
  all_right(sized_as(1, 2, 1, 70, 70, 16), m, "tiles");
}

// On the CPU each problem meets two windows, each in one type: the emulator is slow.
TEST_F(masks, Windows) {
  std::size_t n = 0;
  for (const Spec& s : walk_specs()) {
    const bool causal = s.p.causal != Causal::none;
    std::size_t k = n++;
    for (const Meant& m : {window(5, causal ? 0 : 9), window(33, causal ? no_limit : 0, !causal, 3),
                           window(no_limit, causal ? 0 : 17), window(0, 0)})
      if (++k % 2 == 0 || sized(1, 0) == 1) right_in_turn(k, s, m, said(m));
  }
}

// As wide as a tile, a little less and a little more; and tiles that all rows see in full.
TEST_F(masks, WindowsAboutATile) {
  std::size_t n = 2;  // on the CPU the second one is for fp32, whose tiles its edges cross
  for (const Meant& m : {window(63, 0), window(130, 64), window(64, 0), window(127, 127, true, 70)})
    right_in_turn(n++, sized_as(1, 1, 1, 200, 210, 8), m, said(m));
}

TEST_F(masks, WideHeads) {
  both_right<float>(sized_as(1, 1, 1, 40, 70, 100), window(30, 2, false, 3), "d = 100");
#ifndef FA_WITHOUT_HALF
  for (Int d : {100, 136, 256})
    both_right<bf16>(sized_as(1, sized(2, 1), 1, 70, 100, d), window(30, 2, false, 3),
                     "d = " + std::to_string(d));
#endif
}

TEST_F(masks, FirstTokensStay) {
  std::size_t n = 0;
  for (Int first : {1, 4, 40, 100})
    right_in_turn(n++, sized_as(1, 1, 1, 150, 150, 8, Causal::bottom_right),
                  window(20, no_limit, false, first), "first " + std::to_string(first));
}

// Rows above the diagonal see nothing, and leave nothing: O = 0, LSE = -infinity, no gradient.
TEST_F(masks, RowsThatSeeNothing) {
  all_right(sized_as(2, 1, 1, 100, 40, 8, Causal::none, {40, 12}), window(7, 3), "bottom right");
  all_right(sized_as(2, 1, 1, 100, 40, 8, Causal::none, {40, 0}), window(7, 3, true), "top left");
}

#ifndef FA_WITHOUT_HALF
// Several tiles of everything. d = 256 has no backward there, and one buffer for Q and the task.
template <class Right>
void hopper_by_name(Int d, const Right& right) {
  const Int N = sized(900, 270);
  for (Meant m : {window(150, 40, false, 3), window(100, 0), window(70, 200, true)}) {
    if (m.first > 0) m.sinks = {0.5f, -1.f}, m.prefix = {N / 2};
    right(sized_as(1, 2, 1, N - 50, N, d, Causal::none, {N - 30}), m);
  }
}
TEST_F(masks, HopperByName) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  std::size_t n = 0;  // on the CPU each mask meets one d
  for (Int d : {64, 128})
    hopper_by_name(d, [&](const Spec& s, const Meant& m) {
      if (++n % 2 == 1 || sized(1, 0) == 1) right_by<bf16>(walk::Kernel::hopper, s, m, said(m));
    });
}
TEST_F(masks, HopperByNameWide) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  hopper_by_name(256, [](const Spec& s, const Meant& m) {
    Forwards<bf16> f(s, m);
    f.kernel = walk::Kernel::hopper;
    f.run();
    EXPECT_EQ(f.verdict(), "") << said(m);
  });
}

TEST_F(masks, HopperCountsItsTilesWhereItHasScratch) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  const Int N = sized(900, 200), B = sized(2, 1);
  std::size_t n = 0;  // on the CPU each d meets one mask
  for (Int d : {64, 128, 256})
    for (const Meant& m : {window(150, 0), window(70, 200, true)}) {
      if (++n / 2 % 2 == 1 && sized(0, 1) == 1) continue;
      std::vector<char> bits[2];
      for (const bool counted : {false, true}) {
        Forwards<bf16> f(sized_as(B, 4, 2, N, N - 20, d), m);
        f.kernel = walk::Kernel::hopper;
        f.counted = counted;
        f.run();
        EXPECT_EQ(f.verdict(), "") << said(m) << ", d = " << d;
        bits[counted] = f.bits();
      }
      EXPECT_EQ(bits[0], bits[1]) << said(m) << ", d = " << d;
    }
}

// What an edge may cut, where it has many: tiles of 192 rows, which wide windows get.
TEST_F(masks, HopperWithTallTiles) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  Meant m = window(1000, 30, false, 3);
  m.sinks = {0.5f}, m.prefix = {70};
  for (const Spec& s :
       {sized_as(1, 2, 1, 1100, 250, 64), sized_as(1, 1, 1, 1300, sized(1300, 400), 40),
        sized_as(1, 2, 1, 1250, 400, 64, Causal::none, {330})}) {
    m.sinks.resize(s.p.Hq, -1.f);
    Forwards<bf16> f(s, m);
    f.kernel = walk::Kernel::hopper;
    f.run();
    EXPECT_EQ(f.verdict(), "") << said(m) << ", " << s.name();
  }
}

TEST_F(masks, HopperWhereNobodyLooks) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  // Whole tiles of queries that see nothing, before all others and behind them.
  for (const bool top_left : {true, false})
    for (Int d : {64, 128})
      right_by<bf16>(walk::Kernel::hopper, sized_as(1, sized(2, 1), 1, sized(300, 200), 40, d),
                     window(9, 3, top_left), "blind");
  // Between the key that stays and the window lie tiles that nobody visits.
  right_by<bf16>(walk::Kernel::hopper, sized_as(1, 1, 1, 450, 450, 64), window(20, 0, false, 1),
                 "apart");
}

TEST_F(masks, HopperRefusesInWords) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  const auto why_not = [](Int d, const Meant& m, bool forward, bool deterministic = false) {
    const Spec s = sized_as(1, 1, 1, 20, 130, d);
    Forwards<bf16> f(s, m);
    Backwards<bf16> b(s, m);
    f.kernel = b.kernel = walk::Kernel::hopper;
    b.deterministic = deterministic;
    return refusal([&] { forward ? f.run() : b.run(); });
  };
  Meant listed, mixed;
  listed.wanted = [](Int, Int, Int, Int) { return true; };
  mixed.query_documents.assign(20, 0), mixed.key_documents.assign(130, 0);
  for (const bool forward : {true, false}) {
    expect_words(why_not(64, mixed, forward), {"masks: hopper takes no documents"});
    expect_words(why_not(20, window(5, 5), forward), {"masks: hopper wants", "d a multiple of 8"});
  }
  expect_words(why_not(136, window(5, 5), false), {"masks: hopper takes d up to 128, got 136"});
  expect_words(why_not(64, listed, false, true),
               {"masks: hopper takes no lists of blocks in turns"});
}

// Through lists, of each head and of all; with what a mask has besides; of rows and of keys that
// have no block; with one block, which is the first and the last.
TEST_F(masks, HopperByList) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  const auto right = [](const Spec& s, const Meant& m, const std::string& what) {
    Forwards<bf16> f(s, m);
    f.kernel = walk::Kernel::hopper;
    f.counted = s.p.d != 64;
    f.run();
    EXPECT_EQ(f.verdict(), "") << "forward, " << what << ", " << s.name();
    if (s.p.d > 128) return;
    Backwards<bf16> b(s, m);
    b.kernel = walk::Kernel::hopper;
    b.run();
    EXPECT_EQ(b.verdict(), "") << "backward, " << what << ", " << s.name();
  };
  Meant thirds;
  thirds.wanted = [](Int b, Int h, Int i, Int j) { return (i + 2 * j + b + h) % 3 != 0; };
  const Int N = sized(400, 270);
  right(sized_as(2, 2, 1, sized(270, 150), N, 64, Causal::none, {N, 250}), thirds, "a list each");
  thirds.per_head = false;
  right(sized_as(1, 2, 1, N, N - 10, 128, Causal::bottom_right), thirds, "shared by heads");
  right(sized_as(1, 1, 1, 150, N - 10, 136), thirds, "d = 136");
  Meant windowed = window(sized(300, 180), 40, false, 5);
  windowed.wanted = thirds.wanted;
  windowed.sinks.assign(std::size_t(sized(2, 1)), -0.5f);
  right(sized_as(1, sized(2, 1), sized(2, 1), N, N, 40), windowed, "with a window");
  Meant few;
  few.wanted = [](Int, Int, Int i, Int j) { return i == 1 && j == 1; };
  for (Int d : {64, 128})
    if (d == 64 || sized(1, 0) == 1) right(sized_as(1, 1, 1, 300, 300, d), few, "one block");
  few.wanted = [](Int, Int, Int, Int) { return false; };
  few.sinks = {0.5f};
  for (Int d : {64, 128})
    if (d == 128 || sized(1, 0) == 1) right(sized_as(1, 1, 1, 150, 300, d), few, "none, a sink");
}
#endif

// ---- sinks, prefixes, documents, lists ----

TEST_F(masks, Sinks) {
  Meant m = window(20, 0);
  m.sinks = {0.5f, -3.f, 40.f, -INFINITY};
  all_right(sized_as(2, 4, 2, 50, 60, 16, Causal::none, {60, 0}), m, "sinks");
  Meant alone;
  alone.sinks = {1.f, 100.f, -100.f, 2.f};
  Spec s = sized_as(1, 4, 4, 33, 40, 8, Causal::top_left);
  s.data = {Data::Kind::level, 90.};
  each_type([&]<class T>(T) {
    Forwards<T> f(s, alone);
    f.run();
    EXPECT_EQ(f.verdict(), "") << sizeof(T);
  });
}

TEST_F(masks, Prefixes) {
  Meant m = window(15, 0);
  m.prefix = {0, 33, 70};
  all_right(sized_as(3, sized(2, 1), 1, 70, 70, 8, Causal::none, {70, 70, 50}), m, "with a window");
  Meant alone;
  alone.prefix = {70, 5, 40};
  all_right(sized_as(3, 1, 1, 66, 80, 8, Causal::bottom_right), alone, "with a causal mask");
}

TEST_F(masks, Documents) {
  const Int N = sized(150, 100), all = sized(200, 140);
  for (const bool sorted : {true, false}) {
    Meant m;
    m.query_documents = documents(2, N, 30, 1);
    m.key_documents = documents(2, N + 10, 32, 2);
    m.sorted = sorted;
    if (!sorted) std::shuffle(m.key_documents.begin(), m.key_documents.end(), std::mt19937_64(3));
    all_right(sized_as(2, 1, 1, N, N + 10, 8, sorted ? Causal::none : Causal::top_left), m,
              sorted ? "sorted" : "in any order");
  }
  Meant same = window(40, no_limit);
  same.query_documents = same.key_documents = documents(1, all, 70, 5);
  same.sorted = true;
  all_right(sized_as(1, sized(2, 1), 1, all, all, 8, Causal::bottom_right), same, "with a window");
}

TEST_F(masks, BlockLists) {
  Meant m;
  m.wanted = [](Int b, Int h, Int i, Int j) { return (i + 2 * j + b + h) % 3 != 0; };
  const Int Nk = sized(270, 140);
  all_right(sized_as(2, 2, 1, 140, Nk, 8, Causal::none, {Nk, sized(150, 100)}), m, "a list each");
  m.per_head = false;
  both_right<float>(sized_as(2, 2, 1, 140, Nk, 8, Causal::bottom_right), m, "shared by heads");
  m.per_batch = false;
#ifndef FA_WITHOUT_HALF
  both_right<half>(sized_as(2, 1, 1, 140, Nk, 72, Causal::bottom_right), m, "shared by all");
#endif
  m.wanted = [](Int, Int, Int i, Int) { return i == 1; };
  all_right(sized_as(1, 1, 1, 150, 140, 8), m, "rows without a block");
  m.wanted = [](Int, Int, Int, Int) { return false; };
  m.sinks = {0.5f};
  all_right(sized_as(1, 1, 1, 150, 140, 8), m, "no block, and a sink");
}

// Everything at once, as it comes.
TEST_F(masks, AnyPattern) {
  std::mt19937_64 random(11);
  const auto below = [&](Int n) { return Int(random() % std::uint64_t(n)); };
  for (int n = 0; n < int(sized(60, 9)); ++n) {
    const Int B = 1 + below(2), Hkv = 1 + below(2), most = sized(220, 160);
    const Int Nq = 1 + below(most), Nk = 1 + below(most);
    const Causal causal = below(3) == 0 ? Causal::bottom_right : Causal::none;
    Spec s = sized_as(B, Hkv * (1 + below(2)), Hkv, Nq, Nk, 1 + below(24), causal);
    s.seed = std::uint64_t(n);
    for (Int b = 0; b < B; ++b) s.lengths.push_back(below(Nk + 1));
    Meant m;
    if (below(3)) m.left = below(150);
    if (below(3) && causal == Causal::none) m.right = below(150);
    m.top_left = causal == Causal::none && below(2) != 0;
    if (below(2)) m.first = below(50);
    for (Int b = 0; b < B && n % 3 == 0; ++b) m.prefix.push_back(below(Nk + 1));
    if (n % 3 == 1) {
      m.query_documents = documents(B, Nq, 40, random());
      m.key_documents = documents(B, Nk, 40, random());
      m.sorted = true;
    }
    for (Int h = 0; h < s.p.Hq && below(2); ++h) m.sinks.push_back(float(below(9)) - 4);
    if (Int(m.sinks.size()) < s.p.Hq) m.sinks.clear();
    if (n % 2) {
      const Int salt = below(1000);
      m.wanted = [salt](Int b, Int h, Int i, Int j) {
        return (salt + 7 * b + 5 * h + 3 * i + j) % 4 != 0;
      };
    }
    const std::string what = "pattern " + std::to_string(n) + ", " + said(m);
    if (n % 3 == 0) both_right<float>(s, m, what);
#ifndef FA_WITHOUT_HALF
    if (n % 3 == 1) both_right<half>(s, m, what);
    if (n % 3 == 2) both_right<bf16>(s, m, what);
#endif
  }
}

#ifndef FA_WITHOUT_HALF
// By hopper, which takes no documents, and d and strides in eights.
TEST_F(masks, AnyPatternByHopper) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  std::mt19937_64 random(17);
  const auto below = [&](Int n) { return Int(random() % std::uint64_t(n)); };
  for (int n = 0; n < int(sized(60, 8)); ++n) {
    const Int B = 1 + below(2), Hkv = 1 + below(2), most = sized(500, 150);
    const Int Nq = 1 + below(most), Nk = 1 + below(most), d = 8 * (1 + below(n % 2 ? 8 : 16));
    const Causal causal = below(3) == 0 ? Causal::bottom_right : Causal::none;
    Spec s = sized_as(B, Hkv * (1 + below(2)), Hkv, Nq, Nk, d, causal);
    s.seed = std::uint64_t(n);
    s.layout.order = below(2) ? Layout::Order::BNHD : Layout::Order::BHND;
    s.layout.in_16_bytes = true, s.layout.gap = below(3);
    for (Int b = 0; b < B && n % 4 != 0; ++b) s.lengths.push_back(below(Nk + 1));
    Meant m;
    if (below(3)) m.left = below(150);
    if (below(3) && causal == Causal::none) m.right = below(150);
    m.top_left = causal == Causal::none && below(2) != 0;
    if (below(2)) m.first = below(50);
    for (Int b = 0; b < B && n % 3 == 0; ++b) m.prefix.push_back(below(Nk + 1));
    for (Int h = 0; h < s.p.Hq && n % 5 < 2; ++h) m.sinks.push_back(float(below(9)) - 4);
    if (n % 4 > 1) {
      const Int salt = below(1000);
      m.wanted = [salt](Int b, Int h, Int i, Int j) {
        return (salt + 7 * b + 5 * h + 3 * i + j) % 4 != 0;
      };
    }
    const std::string what = "pattern " + std::to_string(n) + ", " + said(m);
    if (below(2))
      right_by<bf16>(walk::Kernel::hopper, s, m, what);
    else
      right_by<half>(walk::Kernel::hopper, s, m, what);
  }
}
#endif

// ---- which tiles: by numbers alone ----

// The numbers of the tiles, in the order in which they are visited.
template <int size, bool up>
std::vector<int> visited(const walk::Reach::Range& range, const walk::Blocks& list = {}, Int b = 0,
                         Int h = 0, int x = 0) {
  walk::Tiles<size, up> tiles(range);
  std::vector<int> numbers;
  for (tiles.start(list, b, h, x); tiles.tile >= 0; tiles.next()) numbers.push_back(tiles.tile);
  if (!up) std::reverse(numbers.begin(), numbers.end());
  return numbers;
}

Meant random_pattern(const Problem& p, std::mt19937_64& random) {
  const auto below = [&](Int n) { return Int(random() % std::uint64_t(n)); };
  Meant m;
  if (below(4)) m.left = below(200);
  if (below(4)) m.right = below(200);
  m.top_left = below(2) != 0;
  if (below(2)) m.first = below(100);
  if (below(3) == 0) m.prefix = {below(p.Nk + 1)};
  return m;
}

// The tiles in which some pair is seen, no other, and the whole ones are those with no hidden pair.
TEST_F(masks, VisitsWhatIsSeen) {
  std::mt19937_64 random(5);
  for (int n = 0; n < 120; ++n) {
    Problem p = sized_as(1, 1, 1, 1 + Int(random() % 400), 1 + Int(random() % 400), 8).p;
    const Meant m = random_pattern(p, random);
    Pattern pattern;
    pattern.left = m.left, pattern.right = m.right, pattern.top_left = m.top_left;
    pattern.first = m.first, pattern.prefix = m.prefix.empty() ? nullptr : m.prefix.data();
    const Int length = Int(random() % std::uint64_t(p.Nk + 1));
    p.key_lengths = &length;
    const walk::Reach reach(p, walk::as_window(p, pattern), 0);
    const auto seen = [&](Int i, Int j) { return j < length && m.sees(p, 0, 0, i, j); };
    constexpr int Br = 64, Bc = 32;
    std::vector<std::vector<int>> by_query((std::size_t(p.Nq) + Br - 1) / Br),
        by_key((std::size_t(p.Nk) + Bc - 1) / Bc);
    for (int x = 0; x < int(by_query.size()); ++x)
      for (int y = 0; y < int(by_key.size()); ++y) {
        const Int i1 = std::min<Int>(p.Nq, (x + 1) * Br) - 1,
                  j1 = std::min<Int>(p.Nk, (y + 1) * Bc) - 1;
        bool some = false, all = true;
        for (Int i = x * Br; i <= i1; ++i)
          for (Int j = y * Bc; j <= j1; ++j) seen(i, j) ? void(some = true) : void(all = false);
        if (some) by_query[std::size_t(x)].push_back(y), by_key[std::size_t(y)].push_back(x);
        // A tile that a window and first tokens cover together counts as one with hidden pairs.
        const bool whole = reach.all_see(x * Br, int(i1), y * Bc, int(j1));
        EXPECT_TRUE(whole == all || (!whole && (m.first > 0 || !m.prefix.empty())))
            << n << ": " << said(m);
      }
    for (int x = 0; x < int(by_query.size()); ++x) {
      const auto range = reach.keys_of(x * Br, int(std::min<Int>(p.Nq, (x + 1) * Br)) - 1);
      EXPECT_EQ((visited<Bc, true>(range)), by_query[std::size_t(x)]) << n << ": " << said(m);
      EXPECT_EQ((visited<Bc, false>(range)), by_query[std::size_t(x)]) << n << ": " << said(m);
    }
    for (int y = 0; y < int(by_key.size()); ++y) {
      const auto range = reach.rows_of(y * Bc, int(std::min<Int>(p.Nk, (y + 1) * Bc)) - 1);
      EXPECT_EQ((visited<Br, true>(range)), by_key[std::size_t(y)]) << n << ": " << said(m);
    }
  }
}

// Of documents, and of lists, with a window besides.
TEST_F(masks, VisitsDocumentsAndLists) {
  std::mt19937_64 random(9);
  for (int n = 0; n < 60; ++n) {
    const Problem p = sized_as(1, 1, 1, 300, 350, 8).p;
    Meant m = random_pattern(p, random);
    m.prefix.clear();
    m.query_documents = documents(1, p.Nq, 60, random());
    m.key_documents = documents(1, p.Nk, 60, random());
    Pattern pattern;
    pattern.left = m.left, pattern.right = m.right, pattern.top_left = m.top_left;
    pattern.first = m.first, pattern.sorted = true;
    pattern.query_documents = m.query_documents.data();
    pattern.key_documents = m.key_documents.data();
    m.wanted = [n](Int, Int, Int i, Int j) { return (n + i + j) % 2 == 0; };
    const walk::BlockLists lists = walk::lists_of(p, m.wanted),
                           back = walk::transposed(p, m.wanted);
    const walk::Blocks keys{
        lists.offsets.data(), lists.numbers.data(), 3, Int(lists.numbers.size()), 0, 0},
        queries{back.offsets.data(), back.numbers.data(), 3, Int(back.numbers.size()), 0, 0};
    const walk::Reach reach(p, walk::as_window(p, pattern), 0);
    for (int x = 0; x < 300; x += 32) {
      std::vector<int> want;
      for (int y = 0; y < 350; y += 32) {
        bool some = false;
        for (Int i = x; i < std::min(x + 32, 300); ++i)
          for (Int j = y; j < std::min(y + 32, 350); ++j) some = some || m.sees(p, 0, 0, i, j);
        if (some) want.push_back(y / 32);
      }
      const auto got =
          visited<32, false>(reach.keys_of(x, std::min(x + 32, 300) - 1), keys, 0, 0, x / 128);
      EXPECT_TRUE(std::includes(got.begin(), got.end(), want.begin(), want.end())) << n;
      for (int tile : got) EXPECT_TRUE(m.wanted(0, 0, x / 128, tile / 4)) << n;
      for (int tile : want) {
        const auto rows = visited<32, true>(
            reach.rows_of(32 * tile, std::min(32 * tile + 32, 350) - 1), queries, 0, 0, tile / 4);
        EXPECT_TRUE(std::binary_search(rows.begin(), rows.end(), x / 32)) << n;
      }
    }
  }
}

// What is not visited is not read: NaN there reaches nobody.
TEST_F(masks, SkippedTilesAreNotRead) {
  each_type([]<class T>(T) {
    // The last 16 rows, with 40 keys before them and 8 that stay. Tiles have at most 128 keys.
    const Spec s = sized_as(1, 1, 1, 16, 600, 16, Causal::bottom_right);
    const Meant m = window(40, no_limit, false, 8);
    Forwards<T> f(s, m);
    Backwards<T> b(s, m);
    for (Buffer<T>* x : {&f.c.K, &f.c.V, &b.c.K, &b.c.V}) {
      const Buffer<T> before = *x;
      x->fill([&](Int, Int, Int j, Int e) {
        return j >= 128 && j < 512 ? std::nan("") : double(before.at(0, 0, j, e));
      });
    }
    f.run();
    EXPECT_EQ(f.verdict(), "");
    b.run();
    EXPECT_EQ(b.verdict(), "");
    // The other way round: of 600 rows only the first 50 meet the 40 keys that there are.
    Backwards<T> keys(sized_as(1, 1, 1, 600, 40, 16), window(10, 0, true));
    const Buffer<T> Q = keys.c.Q;
    keys.c.Q.fill(
        [&](Int, Int, Int i, Int e) { return i >= 128 ? std::nan("") : double(Q.at(0, 0, i, e)); });
    keys.run();
    EXPECT_EQ(keys.verdict(), "");
  });
}

// ---- identities ----

// The same bits; on the CPU fp32 only nearly, for there the plain kernels are compiled with other
// flags than these.
template <class T>
std::string differs(const Buffer<T>& x, const Buffer<T>& y) {
  double most = 0;
  bool same = true;
  x.for_each([&](Int b, Int h, Int i, Int e) {
    const T one = x.at(b, h, i, e), other = y.at(b, h, i, e);
    if (std::memcmp(&one, &other, sizeof(T)) == 0) return;
    same = false;
    most = std::max(most, std::fabs(double(one) - double(other)));
  });
#ifdef FA_EMULATED
  if (std::is_same_v<T, float> && most < 1e-5) return "";
#endif
  return same ? "" : "they differ by up to " + std::to_string(most);
}

// Gives the forward, and with the same O and LSE the backward, of a plain kernel.
template <class T>
void as_plain(const Spec& s, const Meant& m, const std::string& what) {
  using D = Device<T>;
  Forwards<T> ours(s, m);
  ours.kernel = walk::Kernel::fa2;
  ours.run();
  ForwardCase<T> plain(s, true);
  on_gpu_forward<T>([](const Problem& p, const Forward<T>& t) {
    if constexpr (std::is_same_v<T, float>) {
      cuda_forward::Options options;
      options.kernel = cuda_forward::Kernel::tiled;
      cuda_forward::forward(p, t, options);
    } else {
      optimized::Options options;
      options.kernel = optimized::Kernel::fa2;
      optimized::forward(p, as_device<D>(t), options);
    }
  })(plain.call());
  EXPECT_EQ(differs(ours.c.O, plain.O), "") << what << ", O, " << s.name();
  EXPECT_EQ(differs(ours.c.LSE, plain.LSE), "") << what << ", LSE, " << s.name();

  BackwardCase<T> theirs(s);
  on_gpu_backward<T>([](const Problem& p, const Backward<T>& t) {
    const DeviceMemory scratch(1 << 20);
    if constexpr (std::is_same_v<T, float>) {
      cuda_backward::Options options;
      options.tiles = cuda_backward::Tiles::lesson;
      options.scratch = scratch;
      cuda_backward::backward(p, t, options);
    } else {
      optimized::BackwardOptions options;
      options.kernel = optimized::BackwardKernel::swizzle;
      options.scratch = scratch;
      optimized::backward(p, as_device<D>(t), options);
    }
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  })(theirs.call());
  Backwards<T> mine(s, m);
  mine.kernel = walk::Kernel::fa2;
  mine.run();
  EXPECT_EQ(differs(mine.c.dQ, theirs.dQ), "") << what << ", dQ, " << s.name();
  EXPECT_EQ(differs(mine.c.dK, theirs.dK), "") << what << ", dK, " << s.name();
  EXPECT_EQ(differs(mine.c.dV, theirs.dV), "") << what << ", dV, " << s.name();
  for (const float dsink : mine.dsinks) EXPECT_EQ(dsink, 0) << what << ", " << s.name();
}

// On the CPU each pattern meets two types.
TEST_F(masks, WhatHidesNothingIsThePlainKernel) {
  std::size_t type = 0;
  const Int Nk = sized(140, 100);
  each_type([&]<class T>(T) {
    std::size_t n = type++;
    const auto plain = [&](const Spec& s, const Meant& m, const std::string& what) {
      if (++n % 3 != 0 || sized(1, 0) == 1) as_plain<T>(s, m, what);
    };
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      const Spec s = sized_as(1, 2, 1, 70, Nk, 24, causal, {Nk - 10});
      plain(s, window(Nk, causal == Causal::none ? Nk : 0), "a window as wide as N");
    }
    const Spec s = sized_as(1, 1, 1, 70, Nk, 72, Causal::top_left);
    Meant all;
    all.sinks = {-INFINITY};
    all.wanted = [](Int, Int, Int, Int) { return true; };
    all.query_documents.assign(70, 3);
    all.key_documents.assign(std::size_t(Nk), 3);
    all.sorted = true;
    all.first = 1000;
    plain(s, all, "a sink of -infinity, all blocks, one document");
    Meant none;
    none.sinks = {-INFINITY};
    const Spec narrow = sized_as(1, 1, 1, 70, Nk, sized(72, 24), Causal::top_left);
    plain(narrow, none, "a sink of -infinity");
    plain(narrow, {}, "no pattern");
  });
}

#ifndef FA_WITHOUT_HALF
// And by hopper, where both add to dQ in turns: any other order of sums is another rounding. So is
// another width of tiles, as at d = 256.
template <class T>
void as_plain_hopper(const Spec& s, const Meant& m, const std::string& what) {
  using D = Device<T>;
  Forwards<T> ours(s, m);
  ours.kernel = walk::Kernel::hopper;
  ours.run();
  ForwardCase<T> plain(s, true);
  on_gpu_forward<T>([](const Problem& p, const Forward<T>& t) {
    const DeviceMemory scratch(sizeof(unsigned));
    optimized::Options options;
    options.kernel = optimized::Kernel::hopper;
    options.scratch = scratch;
    optimized::forward(p, as_device<D>(t), options);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  })(plain.call());
  EXPECT_EQ(differs(ours.c.O, plain.O), "") << what << ", O, " << s.name();
  EXPECT_EQ(differs(ours.c.LSE, plain.LSE), "") << what << ", LSE, " << s.name();

  BackwardCase<T> theirs(s);
  hopper_in_turns<T>(theirs.call());
  Backwards<T> mine(s, m);
  mine.kernel = walk::Kernel::hopper;
  mine.deterministic = true;
  mine.run();
  EXPECT_EQ(differs(mine.c.dQ, theirs.dQ), "") << what << ", dQ, " << s.name();
  EXPECT_EQ(differs(mine.c.dK, theirs.dK), "") << what << ", dK, " << s.name();
  EXPECT_EQ(differs(mine.c.dV, theirs.dV), "") << what << ", dV, " << s.name();
  for (const float dsink : mine.dsinks) EXPECT_EQ(dsink, 0) << what << ", " << s.name();
}

TEST_F(masks, WhatHidesNothingIsThePlainHopper) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << "hopper is for 9.0 alone";
  const Int Nq = sized(200, 140), Nk = sized(330, 250);
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (const Int d : {64, 128}) {
      const Spec s = sized_as(1, 2, 1, Nq, Nk, d, causal, {Nk - 20});
      const Meant wide = window(Nk, causal == Causal::none ? Nk : 0);
      Meant none;
      none.sinks = {-INFINITY, -INFINITY};
      // On the CPU each mask and d meet one pattern, in one type.
      const bool all = sized(1, 0) == 1, one = (causal == Causal::none) == (d == 64);
      if (all || (one && d == 64)) as_plain_hopper<bf16>(s, wide, "a window as wide as N");
      if (all || (one && d != 64)) as_plain_hopper<half>(s, wide, "a window as wide as N");
      if (all || (!one && d != 64)) as_plain_hopper<bf16>(s, none, "a sink of -infinity");
      if (all || (!one && d == 64)) as_plain_hopper<half>(s, none, "a sink of -infinity");
    }
}
#endif

// Left to itself, the walk then takes the stage's kernel, which asks nobody who sees whom. With
// d = 136 its tiles have other widths than the walk's own, so that its sums differ.
TEST_F(masks, WhatHidesNothingTakesThePlainKernel) {
  struct {
    const char* what;
    Causal causal;
    Meant m;
  } const cases[] = {
      {"no pattern", Causal::bottom_right, {}},
      {"a window as wide as N", Causal::none, window(169, 169)},
      {"a window that looks back", Causal::none, window(169, 0)},
      {"a window that looks back, and a mask", Causal::top_left, window(169, no_limit)},
      {"all first tokens stay", Causal::bottom_right, window(3, no_limit, false, 170)}};
  for (const auto& [what, causal, m] : cases) {
    const bool looks_back = m.right == 0 && causal == Causal::none;
    const Spec s = sized_as(1, sized(2, 1), 1, 70, 170, 136, causal, {160});
    const Spec of_plain = sized_as(1, sized(2, 1), 1, 70, 170, 136,
                                   looks_back ? Causal::bottom_right : causal, {160});
    Forwards<bf16> ours(s, m), by_name(s, m);
    ours.counted = true;
    ours.run();
    ForwardCase<bf16> plain(of_plain, true);
    on_gpu_forward<bf16>([](const Problem& p, const Forward<bf16>& t) {
      const DeviceMemory scratch(sizeof(unsigned));
      optimized::Options options;
      options.scratch = scratch;
      optimized::forward(p, as_device<__nv_bfloat16>(t), options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(plain.call());
    EXPECT_EQ(differs(ours.c.O, plain.O), "") << what << ", O";
    EXPECT_EQ(differs(ours.c.LSE, plain.LSE), "") << what << ", LSE";
    if (optimized::device_capability() == 90) {
      by_name.kernel = walk::Kernel::hopper;
      by_name.run();
      EXPECT_NE(differs(by_name.c.O, plain.O), "") << what << ", by name";
    }

    BackwardCase<bf16> theirs(of_plain);
    on_gpu_backward<bf16>([](const Problem& p, const Backward<bf16>& t) {
      optimized::BackwardOptions options;
      options.deterministic = true;
      const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
      options.scratch = scratch;
      optimized::backward(p, as_device<__nv_bfloat16>(t), options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(theirs.call());
    Backwards<bf16> mine(s, m);
    mine.deterministic = true;
    mine.run();
    EXPECT_EQ(differs(mine.c.dQ, theirs.dQ), "") << what << ", dQ";
    EXPECT_EQ(differs(mine.c.dK, theirs.dK), "") << what << ", dK";
    EXPECT_EQ(differs(mine.c.dV, theirs.dV), "") << what << ", dV";
  }
}

// One key less hides a fifth of a row.
TEST_F(masks, WhatHidesOneKeyIsNotPlain) {
  for (const Meant& m : {window(3, 4), window(4, 3), window(0, 4, false, 4), window(3, 0)}) {
    Forwards<bf16> f(sized_as(1, 1, 1, 5, 5, 24), m);
    f.counted = true;
    f.run();
    EXPECT_EQ(f.verdict(), "") << said(m);
    Backwards<bf16> b(sized_as(1, 1, 1, 5, 5, 24), m);
    b.run();
    EXPECT_EQ(b.verdict(), "") << said(m);
  }
}

// A document alone gives what it gives among others.
TEST_F(masks, ADocumentIsAProblemOfItsOwn) {
  each_type([]<class T>(T) {
    Meant m;
    m.query_documents.assign(160, 0);
    std::fill(m.query_documents.begin() + 128, m.query_documents.end(), 1);
    m.key_documents = m.query_documents;
    m.sorted = true;
    Forwards<T> both(sized_as(1, 1, 1, 160, 160, 16, Causal::top_left), m);
    Forwards<T> last(sized_as(1, 1, 1, 32, 32, 16, Causal::top_left), {});
    for (auto member : {&ForwardCase<T>::Q, &ForwardCase<T>::K, &ForwardCase<T>::V})
      (last.c.*member).fill([&](Int, Int, Int i, Int x) {
        return double((both.c.*member).at(0, 0, 128 + i, x));
      });
    last.kernel = walk::Kernel::fa2;  // as that of a pattern with documents
    both.run();
    last.run();
    last.c.O.for_each([&](Int, Int, Int i, Int x) {
      EXPECT_EQ(last.c.O.at(0, 0, i, x), both.c.O.at(0, 0, 128 + i, x)) << i;
    });
  });
}

// The judge's own gradients, by central differences of its forward.
TEST_F(masks, GradientsByDifferences) {
  Meant m = window(3, 1, false, 2);
  m.sinks = {0.3f, -0.8f};
  const Spec s = m.told(sized_as(1, 2, 1, 5, 7, 3));
  const BackwardCase<double> c(s);
  Array Q = to_array(c.Q), K = to_array(c.K), V = to_array(c.V);
  const Array dO = to_array(c.dO);
  std::vector<double> sinks{0.3f, -0.8f};
  Hooks hooks = s.hooks;
  hooks.sink = [&](Int, Int h) { return sinks[std::size_t(h)]; };
  const auto loss = [&] {
    const Array O = oracle_forward(s.p, Q, K, V, {}, hooks).O;
    double sum = 0;
    for (std::size_t n = 0; n < O.data.size(); ++n) sum += O.data[n] * dO.data[n];
    return sum;
  };
  const BackwardOracle want = oracle_backward(s.p, Q, K, V, dO, {}, hooks);
  const auto check = [&](std::vector<double>& x, const std::vector<double>& gradient) {
    std::vector<double*> all(x.size());
    for (std::size_t n = 0; n < x.size(); ++n) all[n] = &x[n];
    const std::vector<double> got = central_differences(all, loss);
    for (std::size_t n = 0; n < got.size(); ++n) EXPECT_NEAR(got[n], gradient[n], 1e-8);
  };
  check(Q.data, want.dQ.data);
  check(K.data, want.dK.data);
  check(V.data, want.dV.data);
  check(sinks, want.dsink.data);
}

// ---- what is promised besides ----

// NaN in a key reaches exactly the rows that see it; in a query, its own. Others keep their bits.
TEST_F(masks, NaNStaysWhereItIsSeen) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(1, 1, 1, 80, 80, 16);
    const Meant m = window(9, 2, false, 1);
    for (const walk::Kernel kernel : kernels<T>()) {
      Forwards<T> clean(s, m);
      clean.kernel = kernel;
      clean.run();
      for (const bool in_key : {true, false}) {
        Forwards<T> f(s, m);
        f.kernel = kernel;
        (in_key ? f.c.K : f.c.Q).at(0, 0, 37, 3) = T(std::nanf(""));
        f.run();
        const auto compare = [&](const auto& now, const auto& before) {
          before.for_each([&](Int, Int, Int i, Int e) {
            const auto got = now.at(0, 0, i, e), was = before.at(0, 0, i, e);
            const bool hit = in_key ? m.sees(s.p, 0, 0, i, 37) : i == 37;
            EXPECT_TRUE(hit ? std::isnan(float(got)) : std::memcmp(&got, &was, sizeof got) == 0)
                << "kernel " << int(kernel) << ", NaN in a " << (in_key ? "key" : "query")
                << ", row " << i << ", column " << e;
          });
        };
        compare(f.c.O, clean.c.O);
        compare(f.c.LSE, clean.c.LSE);
      }
    }
  });
}

TEST_F(masks, NaNOfGradientsStaysInItsTiles) {
  each_type([]<class T>(T) {
    const Int N = sizeof(T) == 4 ? 76 : 140;
    const Spec s = sized_as(1, 1, 1, N, N, 16, Causal::top_left);
    const Meant m = window(9, 0, false, 1);
    for (const walk::Kernel kernel : kernels<T>()) {
      Backwards<T> b(s, m);
      b.kernel = kernel;
      b.deterministic = true;
      const auto sees = [&](Int i, Int j) { return m.sees(s.p, 0, 0, i, j); };
      expect_nan_in_its_tiles(
          b.c, [&] { b.run(); }, sees, sees, "kernel " + std::to_string(int(kernel)));
    }
  });
}

TEST_F(masks, PaddedKeysNeverLeak) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(2, 1, 1, 50, 90, 16, Causal::none, {33, 0});
    Meant m = window(30, 20, true, 4);
    m.prefix = {90, 90};
    Forwards<T> f(s, m);
    Backwards<T> b(s, m);
    for (Buffer<T>* x : {&f.c.K, &f.c.V, &b.c.K, &b.c.V}) {
      const Buffer<T> before = *x;
      x->fill([&](Int n, Int, Int j, Int e) {
        return j >= s.lengths[std::size_t(n)] ? std::nan("") : double(before.at(n, 0, j, e));
      });
    }
    f.run();
    EXPECT_EQ(f.verdict(), "");
    b.run();
    EXPECT_EQ(b.verdict(), "");
  });
}

TEST_F(masks, TheSameBitsInEveryRun) {
  each_type([]<class T>(T) {
    Meant m = window(50, 0, false, 3);
    const Int heads = sized(2, 1);
    m.sinks.assign(std::size_t(heads), 0.5f);
    Forwards<T> f(sized_as(1, heads, 1, 140, 140, 24), m);
    Backwards<T> b(sized_as(1, heads, 1, 140, 140, 24), m);
    b.deterministic = true;
    f.run(), b.run();
    const std::vector<char> O = f.bits(), gradients = b.bits();
    f.run(), b.run();
    EXPECT_TRUE(f.bits() == O && b.bits() == gradients);
  });
}

TEST_F(masks, WorkIsPutOnTheStreamAndNobodyWaits) {
  each_type([]<class T>(T) {
    using D = Device<T>;
    const Spec s = sized_as(1, 2, 1, 40, 70, 16);
    Meant m = window(20, 4);
    m.sinks = {0.5f, 1.f};
    const There there(s.p, m);
    Forwards<T> f(s, m);
    EXPECT_EQ(on_its_stream(f.c.call(),
                            [&](const Problem& p, const Forward<T>& t, cudaStream_t stream) {
                              walk::forward(p, there.pattern, as_device<D>(t), {stream, {}});
                            }),
              "");
    EXPECT_EQ(f.verdict(), "");
    const DeviceMemory scratch(walk::scratch_bytes<D>(s.p)), sums(2 * sizeof(float));
    Backwards<T> b(s, m);
    EXPECT_EQ(on_its_stream(b.c.call(),
                            [&](const Problem& p, const Backward<T>& t, cudaStream_t stream) {
                              walk::backward(p, there.pattern, as_device<D>(t), sums.as<float>(),
                                             {stream, scratch});
                            }),
              "");
    EXPECT_EQ(b.c.verdict(), "");
  });
}

// ---- what the host cannot see ----

TEST_F(masks, LengthsAndPrefixesAreClamped) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(3, 1, 1, 20, 40, 16, Causal::none, {0, 40, 40});
    Meant m = window(5, 5);
    m.prefix = {0, 0, 40};
    const std::vector<Int> lengths = {-3, 41, std::numeric_limits<Int>::max()};
    Meant far = m;
    far.prefix = {7, -5, std::numeric_limits<Int>::max()};
    const There there(s.p, far);
    const auto right = [&](auto& c, walk::Kernel kernel) {
      c.kernel = kernel;
      c.c.spec.lengths = lengths;
      c.run(&there.pattern);
      c.c.spec.lengths = s.lengths;
      EXPECT_EQ(c.verdict(), "") << sizeof(T) << " bytes, kernel " << int(kernel);
    };
    for (const walk::Kernel kernel : kernels<T>()) {
      Forwards<T> f(s, m);
      right(f, kernel);
      for (const bool deterministic : {false, true}) {
        Backwards<T> b(s, m);
        b.deterministic = deterministic;
        if (!deterministic || kernel == walk::Kernel::hopper) right(b, kernel);
      }
    }
  });
}

// Block 1 of the keys is seen, block 0 is not; numbers of other blocks are passed over.
TEST_F(masks, ListsAreClamped) {
  each_type([]<class T>(T) {
    Meant m;
    m.wanted = [](Int, Int, Int, Int j) { return j == 1; };
    const std::vector<std::int32_t> keys{-1, 1, 2, 1 << 30, INT32_MIN, INT32_MAX},
        queries{-1, 1, 1 << 30, INT32_MIN, INT32_MAX, -1, 0, 1, 1 << 30, INT32_MIN, INT32_MAX};
    // Of the last ones block 0 of the keys has a list that ends before it begins.
    for (const auto& [of_keys, of_queries] :
         {std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>{{0, 6}, {0, 5, 11}},
          {{-7, INT32_MAX}, {-7, 5, INT32_MAX}},
          {{INT32_MIN, 7}, {9, 5, 12}}}) {
      const DeviceCopy copy(
          {{const_cast<std::int32_t*>(keys.data()), keys.size() * 4},
           {const_cast<std::int32_t*>(queries.data()), queries.size() * 4},
           {const_cast<std::int32_t*>(of_keys.data()), of_keys.size() * 4},
           {const_cast<std::int32_t*>(of_queries.data()), of_queries.size() * 4}});
      Pattern pattern;
      pattern.keys = {copy.at(of_keys.data()), copy.at(keys.data()), 1, 6, 0, 0};
      pattern.queries = {copy.at(of_queries.data()), copy.at(queries.data()), 2, 11, 0, 0};
      for (const walk::Kernel kernel : kernels<T>()) {
        // With d > 64 a block of the list is two of hopper's tiles.
        const Spec s = sized_as(1, 1, 1, 20, 200, kernel == walk::Kernel::hopper ? 72 : 16);
        Forwards<T> f(s, m);
        Backwards<T> b(s, m);
        f.kernel = b.kernel = kernel;
        f.run(&pattern), b.run(&pattern);
        EXPECT_EQ(f.verdict() + b.verdict(), "")
            << of_keys[0] << ", " << sizeof(T) << " bytes, kernel " << int(kernel);
      }
    }
  });
}

// Out of order, twice, promised to be sorted and not so: wrong, and nothing outside is read.
TEST_F(masks, BrokenPromisesReadNothingElse) {
  each_type([]<class T>(T) {
    const Int Nq = sized(150, 130), Nk = sized(200, 140);
    const Spec s = sized_as(1, 1, 1, Nq, Nk, 16, Causal::none, {130});
    const std::vector<std::int32_t> numbers{1, 0, 1, 1}, offsets{0, 3, 4};
    const DeviceCopy copy({{const_cast<std::int32_t*>(numbers.data()), 16},
                           {const_cast<std::int32_t*>(offsets.data()), 12}});
    Pattern pattern;
    pattern.keys = {copy.at(offsets.data()), copy.at(numbers.data()), 2, 4, 0, 0};
    pattern.queries = pattern.keys;
    // The same, where neither numbers nor offsets are any that there are.
    const std::vector<std::int32_t> wild{1 << 30, 1, -1, 1, 0, INT32_MAX},
        wild_offsets{-7, 4, INT32_MAX};
    const DeviceCopy wild_copy({{const_cast<std::int32_t*>(wild.data()), 24},
                                {const_cast<std::int32_t*>(wild_offsets.data()), 12}});
    Pattern nowhere;
    nowhere.keys = {wild_copy.at(wild_offsets.data()), wild_copy.at(wild.data()), 2, 6, 0, 0};
    nowhere.queries = nowhere.keys;
    Meant m;
    m.query_documents = documents(1, Nq, 9, 1);
    m.key_documents = documents(1, Nk, 9, 2);
    std::shuffle(m.key_documents.begin(), m.key_documents.end(), std::mt19937_64(3));
    std::shuffle(m.query_documents.begin(), m.query_documents.end(), std::mt19937_64(4));
    m.sorted = true;
    const There there(s.p, m);
    for (const Pattern* broken : {&std::as_const(pattern), &std::as_const(nowhere), &there.pattern})
      for (const walk::Kernel kernel : kernels<T>()) {
        if (kernel == walk::Kernel::hopper && broken->query_documents) continue;
        Forwards<T> f(s, {});
        Backwards<T> b(s, {});
        f.kernel = b.kernel = kernel;
        f.run(broken), b.run(broken);
        EXPECT_EQ(f.c.check_memory_untouched() + b.c.check_memory_untouched() + b.fault, "");
      }
  });
}

// ---- errors ----

TEST_F(masks, RefusesInWords) {
  const Spec s = sized_as(2, 4, 2, 20, 40, 16);
  ForwardCase<float> c(s, true);
  BackwardCase<float> g(s);
  const ForwardCall<float> call = c.call();
  const BackwardCall<float> back = g.call();
  std::int32_t some[4] = {};
  float sinks[4] = {}, scratch[2 * 4 * 20];
  const auto why = [&](auto change) {
    Problem p = call.p;
    Pattern m;
    change(p, m);
    return refusal([&] { walk::forward<float>(p, m, call.t); });
  };
  using P = Problem&;
  using M = Pattern&;
  expect_words(why([](P, M m) { m.left = -1; }),
               {"masks: left must be at least 0; no_limit is none, got -1"});
  expect_words(why([](P, M m) { m.right = -7; }), {"masks: right must be at least 0", "got -7"});
  expect_words(why([](P, M m) { m.first = -1; }), {"masks: first must be at least 0, got -1"});
  expect_words(why([](P p, M m) { p.causal = Causal::top_left, m.right = 2; }),
               {"masks: right must be no_limit or 0 with a causal mask, got 2"});
  expect_words(why([](P p, M m) { p.causal = Causal::bottom_right, m.top_left = true; }),
               {"masks: top_left must be false"});
  expect_words(why([&](P, M m) { m.key_documents = some; }),
               {"must both be given or both be null, got key_documents alone"});
  expect_words(why([](P, M m) { m.sorted = true; }), {"masks: sorted is about documents"});
  expect_words(why([&](P, M m) { m.keys.entries = 3; }),
               {"masks: keys.offsets is a null pointer, but there are 0 lists and 3 entries"});
  expect_words(why([&](P, M m) { m.keys = {some, nullptr, 1, 3, 0, 0}; }),
               {"masks: keys.numbers is a null pointer, but there are 3 entries"});
  expect_words(why([&](P, M m) { m.keys = {some, some, 7, 3, 4, 1}; }),
               {"masks: keys.lists must be at least", "= 8, got 7"});
  expect_words(why([&](P, M m) { m.keys = {some, some, 7, -1, 0, 0}; }),
               {"masks: keys.entries must lie in [0, 2^31), got -1"});
  expect_words(why([&](P, M m) { m.keys = {some, some, 7, 1, -4, 0}; }),
               {"masks: keys.batch and head must be at least 0, got -4 and 0"});
  expect_words(why([](P p, M) { p.d = 129; }), {"masks: d must lie in [1, 128], got 129"});
  expect_words(why([](P p, M) { p.Hq = 3; }), {"masks: Hq must be a multiple of Hkv"});
  expect_words(why([](P p, M) { p.scale = INFINITY; }), {"masks: scale must be finite"});
  expect_words(why([](P p, M) { p.Nk = (1 << 29) + 1; }),
               {"masks: Nq and Nk must be at most 2^29, got 20 and 536870913"});
  expect_words(why([](P p, M) { p.B = 0, p.Hq = p.Hkv = Int(1) << 60; }),
               {"masks: B * H * N * d does not fit 64 bits"});
  expect_words(refusal([&] {
                 Forward<float> t = call.t;
                 t.O.data = const_cast<float*>(t.Q.data);
                 walk::forward<float>(call.p, {}, t);
               }),
               {"masks: O overlaps Q"});

  expect_words(refusal([&] {
                 walk::forward<float>(call.p, {}, call.t, {nullptr, {scratch, 2}});
               }),
               {"masks needs sizeof(unsigned) = 4 bytes of scratch, got 2"});

  const auto why_back = [&](auto change) {
    Problem p = back.p;
    Pattern m;
    Backward<float> t = back.t;
    float* dsinks = nullptr;
    walk::Options options;
    options.scratch = {scratch, sizeof scratch};
    change(m, t, dsinks, options);
    return refusal([&] { walk::backward<float>(p, m, t, dsinks, options); });
  };
  using B = Backward<float>&;
  using D = float*&;
  using O = walk::Options&;
  expect_words(why_back([&](M m, B, D, O) { m.keys = {some, some, 8, 3, 4, 1}; }),
               {"masks: the backward wants", "got keys alone"});
  expect_words(why_back([](M, B t, D, O) { t.LSE = nullptr; }), {"masks: LSE must not be null"});
  expect_words(why_back([](M, B t, D, O) { t.O.data = nullptr; }), {"masks: O must not be null"});
  expect_words(why_back([&](M, B, D d, O) { d = sinks; }),
               {"masks: dsinks is given, but there are no sinks"});
  expect_words(why_back([&](M m, B, D d, O) { m.sinks = d = sinks; }),
               {"masks: dsinks overlaps sinks"});
  expect_words(why_back([&](M m, B t, D d, O) { m.sinks = sinks, d = t.dQ.data; }),
               {"masks: dQ overlaps dsinks"});
  expect_words(
      why_back([&](M m, B t, D d, O) { m.sinks = sinks, d = const_cast<float*>(t.dO.data); }),
      {"masks: dsinks overlaps dO"});
  expect_words(why_back([](M, B, D, O o) { o.kernel = walk::Kernel(7); }),
               {"masks: kernel has the unknown value 7"});
  expect_words(why_back([](M, B, D, O o) { o.scratch = {}; }),
               {"masks needs scratch_bytes() = 640 bytes of scratch, got null"});
}
// Each array of a pattern is aligned, and apart from each output.
TEST_F(masks, RefusesArraysInWords) {
  const Spec s = sized_as(2, 4, 2, 20, 40, 16);
  ForwardCase<float> c(s, true);
  BackwardCase<float> g(s);
  const ForwardCall<float> call = c.call();
  const BackwardCall<float> back = g.call();
  struct Array {
    const char* name;
    Int element, n;
    void (*put)(Problem& p, Pattern& m, const void* there);
  };
  const Array arrays[] = {
      {"key_lengths", 8, 2,
       [](Problem& p, Pattern&, const void* x) { p.key_lengths = static_cast<const Int*>(x); }},
      {"prefix", 8, 2,
       [](Problem&, Pattern& m, const void* x) { m.prefix = static_cast<const Int*>(x); }},
      {"query_documents", 4, 2 * 20,
       [](Problem&, Pattern& m, const void* x) {
         m.query_documents = static_cast<const std::int32_t*>(x);
       }},
      {"key_documents", 4, 2 * 40,
       [](Problem&, Pattern& m, const void* x) {
         m.key_documents = static_cast<const std::int32_t*>(x);
       }},
      {"keys.offsets", 4, 2,
       [](Problem&, Pattern& m, const void* x) {
         m.keys.offsets = static_cast<const std::int32_t*>(x);
       }},
      {"keys.numbers", 4, 3,
       [](Problem&, Pattern& m, const void* x) {
         m.keys.numbers = static_cast<const std::int32_t*>(x);
       }},
      {"queries.offsets", 4, 2,
       [](Problem&, Pattern& m, const void* x) {
         m.queries.offsets = static_cast<const std::int32_t*>(x);
       }},
      {"queries.numbers", 4, 3,
       [](Problem&, Pattern& m, const void* x) {
         m.queries.numbers = static_cast<const std::int32_t*>(x);
       }},
      {"sinks", 4, 4,
       [](Problem&, Pattern& m, const void* x) { m.sinks = static_cast<const float*>(x); }}};
  constexpr Int bytes_of_one = 512;
  std::vector<Int> memory(std::size(arrays) * bytes_of_one / 8), scratch(2 * 4 * 20);
  const auto place = [&](std::size_t n) {
    return reinterpret_cast<char*>(memory.data()) + Int(n) * bytes_of_one;
  };
  alignas(8) float sums[4] = {};
  // All arrays at their places, but one of them there, in a call whose output is `dsinks`, or none.
  const auto why = [&](const Array& one, const void* there, bool forward, float* dsinks) {
    Problem p = call.p;
    Pattern m;
    m.keys.lists = m.queries.lists = 1;
    m.keys.entries = m.queries.entries = 3;
    for (std::size_t n = 0; n < std::size(arrays); ++n)
      arrays[n].put(p, m, &arrays[n] == &one ? there : place(n));
    walk::Options options;
    options.scratch = {scratch.data(), scratch.size() * 8};
    return refusal([&] {
      if (forward)
        walk::forward<float>(p, m, call.t, options);
      else
        walk::backward<float>(p, m, back.t, dsinks, options);
    });
  };
  for (std::size_t n = 0; n < std::size(arrays); ++n) {
    const Array& one = arrays[n];
    const std::string name = one.name;
    for (const bool forward : {true, false})
      expect_words(why(one, place(n) + 1, forward, nullptr),
                   {"masks: " + name + " must be aligned to its element, " +
                    std::to_string(one.element) + " bytes"});
    // Its last byte is the output's first ones.
    const auto before = [&](const void* output) {
      return static_cast<const char*>(output) - (one.n - 1) * one.element;
    };
    for (const auto& [output, data] :
         {std::pair<const char*, const void*>{"O", call.t.O.data}, {"LSE", call.t.LSE}})
      expect_words(why(one, before(data), true, nullptr),
                   {"masks: " + std::string(output) + " overlaps " + name});
    for (const auto& [output, data] : {std::pair<const char*, float*>{"dQ", back.t.dQ.data},
                                       {"dK", back.t.dK.data},
                                       {"dV", back.t.dV.data},
                                       {"dsinks", sums}})
      expect_words(why(one, before(data), false, data == sums ? sums : nullptr),
                   {"masks: " + std::string(output) + " overlaps " + name});
  }
}
#ifndef FA_WITHOUT_HALF
TEST_F(masks, TensorCoresWantAPositiveScale) {
  Spec s = sized_as(1, 1, 1, 20, 20, 16);
  s.p.scale = -0.125;
  Forwards<bf16> f(s, {});
  expect_words(refusal([&] { f.run(); }), {"masks: scale must be > 0 in fp32, got -0.125"});
  both_right<float>(s, window(5, 5), "fp32 takes any");
}
#endif

TEST_F(masks, NothingToDo) {
  for (int what = 0; what < 4; ++what)
    all_right(sized_as(what == 0 ? 0 : 2, what == 1 ? 0 : 2, what == 1 ? 0 : 1, what == 2 ? 0 : 3,
                       what == 3 ? 0 : 5, 16),
              window(2, 2), std::to_string(what));
  Meant m = window(2, 2);
  m.sinks = {0.5f, -1.f};  // their gradient is a sum over nothing
  all_right(sized_as(0, 2, 1, 3, 5, 16), m, "no batch entries");
  all_right(sized_as(2, 2, 1, 0, 5, 16), m, "no queries");
}

TEST_F(masks, ListsByHand) {
  const Problem p = sized_as(1, 1, 1, 300, 200, 8).p;  // 3 x 2 blocks
  const auto wanted = [](Int, Int, Int i, Int j) { return j <= i && i != 1; };
  const walk::BlockLists keys = walk::lists_of(p, wanted), queries = walk::transposed(p, wanted);
  EXPECT_EQ(keys.offsets, (std::vector<std::int32_t>{0, 1, 1, 3}));
  EXPECT_EQ(keys.numbers, (std::vector<std::int32_t>{0, 0, 1}));
  EXPECT_EQ(queries.offsets, (std::vector<std::int32_t>{0, 2, 3}));
  EXPECT_EQ(queries.numbers, (std::vector<std::int32_t>{0, 2, 2}));
}

TEST_F(masks, ScratchIsCounted) {
  const Problem p = sized_as(2, 4, 2, 130, 50, 16).p;
  EXPECT_EQ(walk::scratch_bytes<float>(p), 2u * 4 * 130 * 4);
  const bool hopper = optimized::device_capability() == 90;
  EXPECT_EQ(walk::scratch_bytes<__half>(p),
            2u * 4 * 256 * (8 + (hopper ? 64 * 4 : 0)) + (hopper ? 2u * 4 * 4 * 4 + 4 : 0));
  // However large its groups are, whatever its mask.
  Problem grouped = sized_as(1, 8, 1, 130, 40, 128).p;
  const std::size_t bytes = walk::scratch_bytes<__half>(grouped);
  grouped.causal = Causal::bottom_right;
  EXPECT_EQ(walk::scratch_bytes<__half>(grouped), bytes);
}

// ---- what only the CPU can do, or only a GPU ----

#ifdef FA_EMULATED
// Each head dimension's tile fits, in fp32 forward and backward.
TEST_F(masks, WithTheSharedMemoryOfAT4) {
  const emulator::WithSharedMemory until_the_end(64 << 10);
  for (Int d : {32, 64, 128})
    both_right<float>(sized_as(1, 1, 1, 70, 90, d), window(40, 5), "d " + std::to_string(d));
}
// What is copied comes as early as it may, and at random times; late in all other tests.
TEST_F(masks, EarlyAndAtRandom) {
  using emulator::Timing;
  for (const emulator::Schedule& now :
       {emulator::Schedule{Timing::early, 0}, {Timing::random, 1}, {Timing::random, 2}}) {
    const emulator::WithSchedule until_the_end(now);
    all_right(sized_as(1, 2, 1, 70, 150, 8), window(40, 0, false, 3),
              "seed " + std::to_string(now.seed));
#ifndef FA_WITHOUT_HALF
    if (optimized::device_capability() != 90) continue;
    if (now.seed < 2) {
      const Meant wide = window(1100, 0, false, 3);
      Forwards<bf16> f(sized_as(1, 1, 1, 1200, 200, 64), wide);  // in tiles of 192 rows
      f.kernel = walk::Kernel::hopper;
      f.run();
      EXPECT_EQ(f.verdict(), "") << now.seed;
      if (now.seed == 1) continue;
    }
    Meant listed;
    listed.wanted = [](Int, Int, Int i, Int j) { return (i + j) % 3 != 0; };
    right_by<bf16>(walk::Kernel::best, sized_as(1, 1, 1, 270, 270, 64), listed, "listed");
#endif
  }
}
#else
TEST_F(masks, ARecordedCallReplaysWithOtherLengths) {
  Meant m = window(100, no_limit, false, 4);
  m.sinks = {0.5f, 1.f, -1.f, 0.f};
  const auto with = [](std::vector<Int> lengths, std::uint64_t seed) {
    Spec s = sized_as(3, 4, 2, 300, 300, 64, Causal::bottom_right, std::move(lengths));
    s.seed = seed;
    return s;
  };
  const Spec one = with({300, 17, 64}, 1), two = with({1, 250, 299}, 2);
  const There there(one.p, m);
  ForwardCase<bf16> first(m.told(one), true), second(m.told(two), true);
  EXPECT_EQ(replayed_as_graph(first, second,
                              [&](const Problem& p, const Forward<bf16>& t, cudaStream_t stream) {
                                walk::forward(with_mask(p, one), there.pattern,
                                              as_device<__nv_bfloat16>(t), {stream, {}});
                              }),
            "");
  const DeviceMemory scratch(walk::scratch_bytes<__nv_bfloat16>(one.p)), sums(4 * sizeof(float));
  BackwardCase<bf16> a(m.told(one)), b(m.told(two));
  EXPECT_EQ(replayed_as_graph(a, b,
                              [&](const Problem& p, const Backward<bf16>& t, cudaStream_t stream) {
                                walk::backward(with_mask(p, one), there.pattern,
                                               as_device<__nv_bfloat16>(t), sums.as<float>(),
                                               {stream, scratch});
                              }),
            "");
}

// Rows of K and V 2^22 numbers apart, so that the last ones lie beyond 2^31.
TEST_F(masks, KeysBeyondTwoToThe31) {
  using D = __nv_bfloat16;
  constexpr Int d = 64, apart = Int(1) << 22, keys = 600;
  const std::size_t bytes = std::size_t(keys * apart) * sizeof(D);
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  const DeviceMemory memory(bytes);
  D* const base = memory.as<D>();
  const Spec s = sized_as(1, 2, 1, 130, keys, d, Causal::bottom_right);
  const Meant m = window(70, no_limit, false, 5);
  const auto put = [&](const Buffer<bf16>& K, const Buffer<bf16>& V) {
    for (Int j = 0; j < keys; ++j) {
      FA_CUDA_CHECK(
          cudaMemcpy(base + j * apart, &K.at(0, 0, j), d * sizeof(D), cudaMemcpyHostToDevice));
      FA_CUDA_CHECK(
          cudaMemcpy(base + j * apart + d, &V.at(0, 0, j), d * sizeof(D), cudaMemcpyHostToDevice));
    }
  };
  const There there(s.p, m);
  Forwards<bf16> f(s, m);
  put(f.c.K, f.c.V);
  on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
    Forward<D> far = as_device<D>(t);
    far.K = {base, 0, 0, apart};
    far.V = {base + d, 0, 0, apart};
    walk::forward(with_mask(p, s), there.pattern, far);
  })(f.c.call());
  EXPECT_EQ(f.verdict(), "");
  Backwards<bf16> b(s, m);
  put(b.c.K, b.c.V);
  const DeviceMemory scratch(walk::scratch_bytes<D>(s.p));
  on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
    Backward<D> far = as_device<D>(t);
    far.K = {base, 0, 0, apart};
    far.V = {base + d, 0, 0, apart};
    walk::backward(with_mask(p, s), there.pattern, far, nullptr, {nullptr, scratch});
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  })(b.c.call());
  EXPECT_EQ(b.c.verdict(), "");
}
#endif

}  // namespace
