// Tests of dropout: the numbers, which weights they keep in every kernel, O and its gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/dropout/dropout.hpp"
#include "06_optimized/beyond/dropout/philox.hpp"
#include "06_optimized/check/nan.hpp"
#include "06_optimized/check/plain.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
namespace walk = fa::dropout;
using walk::Dropout;
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

Dropout with(double p, std::uint64_t seed = 0x123456789abcdef, std::uint64_t offset = 17) {
  return {p, seed, offset, nullptr};
}

// What the oracle is told: the CPU's word on each weight.
Spec told(Spec s, const Dropout& dropout) {
  s.hooks.keep = [p = s.p, dropout](Int b, Int h, Int i, Int j) {
    return walk::kept(p, dropout, b, h, i, j) ? 1 / walk::kept_probability(dropout.p) : 0.;
  };
  return s;
}

std::vector<char> bytes_of(const std::vector<Storage>& all) {
  std::vector<char> bytes;
  for (const Storage& s : all) {
    const char* const first = static_cast<const char*>(s.data);
    bytes.insert(bytes.end(), first, first + s.bytes);
  }
  return bytes;
}

template <class T>
struct Forwards {
  Dropout dropout;
  ForwardCase<T> c;
  walk::Kernel kernel = walk::Kernel::fa2;
  bool counts = false;  // hopper its tiles

  Forwards(const Spec& s, const Dropout& x) : dropout(x), c(told(s, x), true) {}
  void run(const Dropout* other = nullptr) {
    const DeviceMemory four(sizeof(unsigned));
    FA_CUDA_CHECK(cudaMemset(four.as<void>(), 0xff, four.bytes()));
    walk::Options options{nullptr, {}, kernel};
    if (counts) options.scratch = four;
    on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) {
      walk::forward(p, other ? *other : dropout, as_device<Device<T>>(t), options);
    })(c.call());
  }
  std::string verdict() { return c.verdict(); }
  std::vector<char> bits() { return bytes_of({c.O.storage(), c.LSE.storage()}); }
};

template <class T>
struct Backwards {
  Dropout dropout;
  BackwardCase<T> c;
  walk::Kernel kernel = walk::Kernel::fa2;
  bool deterministic = false;
  std::string fault;

  Backwards(const Spec& s, const Dropout& x) : dropout(x), c(told(s, x)) {}
  void run(const Dropout* other = nullptr) {
    using D = Device<T>;
    constexpr std::size_t strip = 256;
    const std::size_t bytes = walk::scratch_bytes<D>(c.p);
    const DeviceMemory scratch(bytes + strip);
    FA_CUDA_CHECK(cudaMemset(scratch.as<void>(), 0xff, scratch.bytes()));
    on_gpu_backward<T>([&](const Problem& p, const Backward<T>& t) {
      walk::backward(p, other ? *other : dropout, as_device<D>(t),
                     {nullptr, {scratch.as<void>(), bytes}, kernel, deterministic});
    })(c.call());
    std::vector<unsigned char> behind(strip);
    FA_CUDA_CHECK(
        cudaMemcpy(behind.data(), scratch.as<char>() + bytes, strip, cudaMemcpyDeviceToHost));
    fault = std::any_of(behind.begin(), behind.end(), [](auto x) { return x != 0xff; })
                ? "wrote behind the scratch\n"
                : "";
  }
  std::string verdict() { return c.verdict() + fault; }
  std::vector<char> bits() { return bytes_of({c.dQ.storage(), c.dK.storage(), c.dV.storage()}); }
};

template <class T>
void both_right(const Spec& s, const Dropout& x, walk::Kernel kernel = walk::Kernel::fa2) {
  Forwards<T> f(s, x);
  f.kernel = kernel;
  f.run();
  EXPECT_EQ(f.verdict(), "") << "forward, p = " << x.p << ": " << s.name() << ", " << sizeof(T)
                             << " bytes";
  Backwards<T> b(s, x);
  b.kernel = kernel;
  b.run();
  EXPECT_EQ(b.verdict(), "") << "backward, p = " << x.p << ": " << s.name() << ", " << sizeof(T)
                             << " bytes";
}
void all_right(const Spec& s, const Dropout& x) {
  each_type([&]<class T>(T) { both_right<T>(s, x); });
}

class dropout : public GpuTest {};  // the tests' name is the walk's

// fa2, and hopper where there is one for such numbers.
template <class T>
std::vector<walk::Kernel> who_takes() {
  if (sizeof(T) == 4 || optimized::device_capability() != 90) return {walk::Kernel::fa2};
  return {walk::Kernel::fa2, walk::Kernel::hopper};
}

// ---- O and its gradients ----

// Small, and several of everything: tiles, heads of a group, a causal mask.
TEST_F(dropout, Tiles) {
  all_right(sized_as(1, 2, 1, 70, 70, 16, Causal::bottom_right), with(0.3));
}

// On the CPU each problem meets one type: the emulator is too slow for all.
TEST_F(dropout, Problems) {
  std::size_t n = 0;
  for (const Spec& s : walk_specs()) {
    const Dropout x = with(n % 2 ? 0.1 : 0.5, n, 1000 * n);
    if (meets(n, 0)) both_right<float>(s, x);
#ifndef FA_WITHOUT_HALF
    const walk::Kernel kernel = n % 2 ? walk::Kernel::best : walk::Kernel::fa2;
    if (meets(n, 1)) both_right<half>(s, x, kernel);
    if (meets(n, 2)) both_right<bf16>(s, x, kernel);
#endif
    ++n;
  }
}

TEST_F(dropout, WideHeads) {
  both_right<float>(sized_as(1, 1, 1, 40, 70, 100), with(0.3));
#ifndef FA_WITHOUT_HALF
  for (Int d : {100, 136, 256})
    both_right<bf16>(sized_as(1, sized(2, 1), 1, sized(70, 40), sized(100, 70), d), with(0.3));
#endif
}

// The page's row 0 of the tiny problem, and the others: seed 7, p = 0.25.
TEST_F(dropout, ByHand) {
  TinyProblem tiny;
  const Dropout x = with(0.25, 7, 0);
  const bool M[4][4] = {{1, 0, 1, 1}, {1, 1, 0, 1}, {1, 0, 0, 1}, {1, 0, 0, 0}};
  for (Int i = 0; i < 4; ++i)
    for (Int j = 0; j < 4; ++j) EXPECT_EQ(walk::kept(tiny.p, x, 0, 0, i, j), M[i][j]) << i << j;
  const float want[8] = {0.7634f, 1.1451f, 0.1218f, 0.6058f, 0.1495f, 0.1454f, 0.3662f, 0};
  Forwards<float> f(sized_as(1, 1, 1, 4, 4, 2), x);
  f.c.Q.fill([&](Int, Int, Int i, Int e) { return tiny.Q[2 * i + e]; });
  f.c.K.fill([&](Int, Int, Int i, Int e) { return tiny.K[2 * i + e]; });
  f.c.V.fill([&](Int, Int, Int i, Int e) { return tiny.V[2 * i + e]; });
  f.run();
  for (Int i = 0; i < 4; ++i) {
    for (Int e = 0; e < 2; ++e) EXPECT_NEAR(f.c.O.at(0, 0, i, e), want[2 * i + e], 5e-5) << i;
    EXPECT_NEAR(f.c.LSE.at(0, 0, i), tiny.want_LSE[i], 5e-5) << i;
  }
}

// ---- which weights ----

// The counters and keys, and what comes of them, are published with Random123 (kat_vectors).
TEST_F(dropout, KnownAnswers) {
  struct {
    walk::Words counter;
    std::uint32_t key0, key1;
    walk::Words want;
  } const answers[] = {
      {{0, 0, 0, 0}, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{~0u, ~0u, ~0u, ~0u}, ~0u, ~0u, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0xa4093822,
       0x299f31d0,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const auto& a : answers) {
    const walk::Words got = walk::philox(a.counter, a.key0, a.key1);
    for (int n = 0; n < 4; ++n) EXPECT_EQ(got[n], a.want[n]) << n;
  }
}

// What a kernel keeps, weight by weight: all scores are 0, so that P is 1 / Nk, and V has a 1 in
// column j - j0 of row j for d keys at a time.
template <class T>
void same_as_on_the_CPU(Int d, Int Nq, Int Nk, walk::Kernel kernel) {
  const Spec s = sized_as(1, 2, 1, Nq, Nk, d);
  const Dropout x = with(0.4);
  for (Int j0 = 0; j0 < Nk; j0 += d) {
    Forwards<T> f(s, x);
    f.kernel = kernel;
    f.c.Q.fill([](Int, Int, Int, Int) { return 0.; });
    f.c.V.fill([&](Int, Int, Int j, Int e) { return j - j0 == e ? 1. : 0.; });
    f.run();
    Int wrong = 0;
    for (Int h = 0; h < 2; ++h)
      for (Int i = 0; i < Nq; ++i)
        for (Int j = j0; j < std::min(j0 + d, Nk); ++j)
          wrong += (float(f.c.O.at(0, h, i, j - j0)) != 0) != walk::kept(s.p, x, 0, h, i, j);
    EXPECT_EQ(wrong, 0) << "d = " << d << ", keys from " << j0;
  }
}
// The owner of dK and dV shows it by dV: with a 1 in column i - i0 of row i of dO, element (j, i -
// i0) of dV is weight (i, j). A head at a time, for dV is a sum over the group.
template <class T>
void same_in_the_owner_of_keys(Int d, Int Nq, Int Nk, walk::Kernel kernel) {
  const Spec s = sized_as(1, 1, 1, Nq, Nk, d);
  const Dropout x = with(0.4);
  for (Int i0 = 0; i0 < Nq; i0 += d) {
    Backwards<T> b(s, x);
    b.kernel = kernel;
    b.c.Q.fill([](Int, Int, Int, Int) { return 0.; });
    b.c.LSE.fill([&](Int, Int, Int, Int) { return std::log(double(Nk)); });
    b.c.dO.fill([&](Int, Int, Int i, Int e) { return i - i0 == e ? 1. : 0.; });
    b.run();
    Int wrong = 0;
    for (Int j = 0; j < Nk; ++j)
      for (Int i = i0; i < std::min(i0 + d, Nq); ++i)
        wrong += (float(b.c.dV.at(0, 0, j, i - i0)) != 0) != walk::kept(s.p, x, 0, 0, i, j);
    EXPECT_EQ(wrong, 0) << "d = " << d << ", queries from " << i0;
  }
}
// That of dQ: O = 0 makes D = 0, so dS = P dP if the weight is kept; V and dO of ones make dP = d
// everywhere, and K has a 1 in column j - j0 of row j.
template <class T>
void same_in_the_owner_of_queries(Int d, Int Nq, Int Nk, walk::Kernel kernel) {
  const Spec s = sized_as(1, 1, 1, Nq, Nk, d);
  const Dropout x = with(0.4);
  for (Int j0 = 0; j0 < Nk; j0 += d) {
    Backwards<T> b(s, x);
    b.kernel = kernel;
    const auto all = [](double value) { return [=](Int, Int, Int, Int) { return value; }; };
    b.c.Q.fill(all(0));
    b.c.O.fill(all(0));
    b.c.V.fill(all(1));
    b.c.dO.fill(all(1));
    b.c.LSE.fill([&](Int, Int, Int, Int) { return std::log(double(Nk)); });
    b.c.K.fill([&](Int, Int, Int j, Int e) { return j - j0 == e ? 1. : 0.; });
    b.run();
    Int wrong = 0;
    for (Int i = 0; i < Nq; ++i)
      for (Int j = j0; j < std::min(j0 + d, Nk); ++j)
        wrong += (float(b.c.dQ.at(0, 0, i, j - j0)) != 0) != walk::kept(s.p, x, 0, 0, i, j);
    EXPECT_EQ(wrong, 0) << "d = " << d << ", keys from " << j0;
  }
}
template <class T>
void same_everywhere(Int d, Int Nq, Int Nk, walk::Kernel kernel = walk::Kernel::fa2) {
  same_as_on_the_CPU<T>(d, Nq, Nk, kernel);
  if (kernel == walk::Kernel::hopper && d > 128) return;
  same_in_the_owner_of_keys<T>(d, Nq, Nk, kernel);
  same_in_the_owner_of_queries<T>(d, Nq, Nk, kernel);
}

// Every shape of a tile: by head dimension, and in the forward by the mask (none here).
TEST_F(dropout, EveryKernelKeepsTheSame) {
  same_everywhere<float>(32, 70, 75);
  same_everywhere<float>(128, 40, 50);
#ifndef FA_WITHOUT_HALF
  same_everywhere<bf16>(64, sized(140, 70), sized(150, 75));
  same_everywhere<half>(128, 140, 75);
  same_everywhere<bf16>(256, sized(70, 40), 75);
#endif
}

#ifndef FA_WITHOUT_HALF

// ---- by hopper ----

// Skipped where there is none.
class HopperDropout {
 public:
  static bool missing() { return optimized::device_capability() != 90; }
};
#define FA_NEEDS_HOPPER() \
  if (HopperDropout::missing()) GTEST_SKIP() << "hopper needs compute capability 9.0"

// With its counter and without, in turns and not; on the CPU each call one of the two.
template <class T>
void right_by_hopper(const Spec& s, const Dropout& x) {
  static unsigned calls = 0;
  const bool once = std::popcount(calls++) % 2, both = sized(1, 0) == 1;
  const bool masked = s.p.causal != Causal::none || !s.lengths.empty();
  for (const bool counts : {false, true}) {
    if (counts && !masked) continue;
    if (!both && masked && counts != once) continue;
    Forwards<T> f(s, x);
    f.kernel = walk::Kernel::hopper;
    f.counts = counts;
    f.run();
    EXPECT_EQ(f.verdict(), "") << "forward, p = " << x.p << ": " << s.name() << ", counts "
                               << counts;
  }
  if (s.p.d > 128) return;
  for (const bool in_turns : {false, true}) {
    if (!both && in_turns != once) continue;
    Backwards<T> b(s, x);
    b.kernel = walk::Kernel::hopper;
    b.deterministic = in_turns;
    b.run();
    EXPECT_EQ(b.verdict(), "") << "backward, p = " << x.p << ": " << s.name() << ", in turns "
                               << in_turns;
  }
}

// Each shape of a tile, with tiles that are not full, masks, lengths, groups of heads.
TEST_F(dropout, HopperShapes) {
  FA_NEEDS_HOPPER();
  const Int heads = sized(2, 1);
  right_by_hopper<bf16>(sized_as(1, 2, 1, 150, 140, 64), with(0.3));
  right_by_hopper<half>(sized_as(1, heads, 1, 70, sized(260, 200), 128), with(0.3));
  right_by_hopper<bf16>(sized_as(1, 1, 1, sized(140, 70), sized(200, 140), 256), with(0.3));
  right_by_hopper<bf16>(sized_as(1, 2, 1, 140, sized(200, 150), 64, Causal::bottom_right),
                        with(0.1));
  right_by_hopper<bf16>(sized_as(2, 2, 1, 70, 140, 72, Causal::top_left, {140, 33}), with(0.5));
  right_by_hopper<half>(sized_as(2, 2, 2, 130, 90, 24, Causal::none, {0, 65}), with(0.2));
}
// Two tiles a block and more, and a group without rows: 192 rows a tile, or 128.
TEST_F(dropout, HopperStays) {
  FA_NEEDS_HOPPER();
  const Int B = sized(70, 1);  // 132 SMs, or the emulator's two
  right_by_hopper<bf16>(sized_as(B, 2, 1, 260, 70, 64), with(0.2));
  right_by_hopper<bf16>(sized_as(B, 4, 2, 200, 70, 128, Causal::bottom_right), with(0.2));
  // With a mask three groups run from 1,025 keys on.
  Forwards<bf16> f(sized_as(1, 1, 1, 140, 1060, 64, Causal::bottom_right), with(0.2));
  f.kernel = walk::Kernel::hopper;
  f.run();
  EXPECT_EQ(f.verdict(), "");
}
TEST_F(dropout, HopperKeepsTheSame) {
  FA_NEEDS_HOPPER();
  same_everywhere<bf16>(64, 200, 150, walk::Kernel::hopper);
  same_everywhere<half>(128, 140, 150, walk::Kernel::hopper);
  same_everywhere<bf16>(256, 140, 75, walk::Kernel::hopper);
}
// Seed and offset from memory.
TEST_F(dropout, HopperFromMemory) {
  FA_NEEDS_HOPPER();
  const Spec s = sized_as(1, 2, 1, 130, 140, 64, Causal::bottom_right);
  std::uint64_t two[2] = {0xfedcba9876543210, (std::uint64_t(3) << 32) - 5};
  const DeviceCopy copy({{two, sizeof two}});
  const Dropout by_value = with(0.3, two[0], two[1] + 9), there{0.3, 0, 9, copy.at(two)};
  Forwards<bf16> f(s, by_value);
  f.kernel = walk::Kernel::hopper;
  f.run(&there);
  EXPECT_EQ(f.verdict(), "");
  Backwards<bf16> b(s, by_value);
  b.kernel = walk::Kernel::hopper;
  b.run(&there);
  EXPECT_EQ(b.verdict(), "");
}
// hopper is what the best is, wherever it can run; nothing dropped is the stage's own kernel.
TEST_F(dropout, HopperIsTheBestOfItsCalls) {
  FA_NEEDS_HOPPER();
  for (Int d : {64, 128}) {
    const Spec s = sized_as(1, sized(2, 1), 1, sized(200, 140), sized(150, 70), d);
    for (const double dropped : {0., 0.25}) {
      Forwards<bf16> f(s, with(dropped));
      f.kernel = walk::Kernel::hopper;
      f.run();
      const std::vector<char> O = f.bits();
      f.c.O.poison();
      if (dropped == 0) {
        on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
          optimized::Options options;
          options.kernel = optimized::Kernel::hopper;
          optimized::forward(p, as_device<__nv_bfloat16>(t), options);
        })(f.c.call());
      } else {
        f.kernel = walk::Kernel::best;
        f.run();
      }
      EXPECT_TRUE(f.bits() == O) << d << ", p = " << dropped;
    }
    // Behind a mask, where it may not count, the walk's own kernel runs, and drops nothing.
    Spec masked = s;
    masked.p.causal = Causal::bottom_right;
    Forwards<bf16> m(masked, with(0));
    m.kernel = walk::Kernel::hopper;
    m.run();
    const std::vector<char> uncounted = m.bits();
    m.counts = true;
    m.run();
    EXPECT_TRUE(m.bits() == uncounted) << d;

    Backwards<bf16> b(s, with(0.25));
    b.kernel = walk::Kernel::hopper;
    b.deterministic = true;
    b.run();
    const std::vector<char> gradients = b.bits();
    b.kernel = walk::Kernel::best;
    b.run();
    EXPECT_TRUE(b.bits() == gradients) << d;

    Backwards<bf16> kept(s, with(0));
    kept.kernel = walk::Kernel::hopper;
    kept.deterministic = true;
    kept.run();
    EXPECT_EQ(kept.verdict(), "");
    const std::vector<char> of_walk = kept.bits();
    for (Buffer<bf16>* x : {&kept.c.dQ, &kept.c.dK, &kept.c.dV}) x->poison();
    hopper_in_turns(kept.c.call());
    EXPECT_TRUE(kept.bits() == of_walk) << d << ", nothing dropped, backward";
  }
}
TEST_F(dropout, HopperRefusesInWords) {
  FA_NEEDS_HOPPER();
  const auto why = [](Int d, bool back) {
    const Spec s = sized_as(1, 1, 1, 20, 20, d);
    Forwards<bf16> f(s, with(0.1));
    Backwards<bf16> b(s, with(0.1));
    f.kernel = b.kernel = walk::Kernel::hopper;
    return refusal([&] { back ? b.run() : f.run(); });
  };
  expect_words(why(20, false), {"dropout: hopper wants keys, d a multiple of 8"});
  expect_words(why(20, true), {"dropout: hopper wants queries and keys, d a multiple of 8"});
  expect_words(why(136, true), {"dropout: hopper's backward takes d up to 128, got 136"});

  using D = Device<bf16>;
  const Spec s = sized_as(1, 1, 1, 20, 20, 16);
  ForwardCase<bf16> c(s, true);
  BackwardCase<bf16> g(s);
  alignas(4) char counter[8] = {};
  const auto forward = [&](auto change, Scratch scratch) {
    Problem p = c.call().p;
    Forward<D> t = as_device<D>(c.call().t);
    change(p, t);
    return refusal([&] {
      walk::forward(p, with(0.1), t, {nullptr, scratch, walk::Kernel::hopper});
    });
  };
  const auto as_it_is = [](Problem&, Forward<D>&) {};
  expect_words(forward([](Problem&, Forward<D>& t) { t.K.data += 4; }, {}),
               {"dropout: hopper wants keys, d a multiple of 8"});
  expect_words(forward([](Problem&, Forward<D>& t) { t.V.row += 1; }, {}),
               {"dropout: hopper wants keys, d a multiple of 8"});
  expect_words(forward([](Problem& p, Forward<D>&) { p.scale = -1; }, {}),
               {"dropout: hopper: scale must be > 0"});
  expect_words(forward(as_it_is, {counter, 3}),
               {"dropout needs sizeof(unsigned) = 4 bytes of scratch, got 3"});
  expect_words(forward(as_it_is, {counter + 2, 4}), {"aligned"});
  expect_words(refusal([&] {
                 Backward<D> t = as_device<D>(g.call().t);
                 t.LSE = nullptr;
                 walk::backward(g.call().p, with(0.1), t, {nullptr, {}, walk::Kernel::hopper});
               }),
               {"dropout: LSE must not be null"});

  Forwards<bf16> f(s, with(0.1));
  f.kernel = walk::Kernel(7);
  expect_words(refusal([&] { f.run(); }), {"dropout: kernel has the unknown value 7"});
}
#endif

// ---- without dropout ----

// Stage 04's and 05's kernels are translated for the CPU with other switches than 06's, so that the
// last bits of fp32 differ there.
template <class T>
bool same_bits(const std::vector<char>& a, const std::vector<char>& b) {
#ifdef FA_EMULATED
  if constexpr (std::is_same_v<T, float>) {
    for (std::size_t n = 0; n + sizeof(T) <= a.size(); n += sizeof(T)) {
      T x, y;
      std::memcpy(&x, &a[n], sizeof x);
      std::memcpy(&y, &b[n], sizeof y);
      if (!(std::fabs(x - y) <= 1e-5f) && x != y && !(std::isnan(x) && std::isnan(y))) return false;
    }
    return a.size() == b.size();
  }
#endif
  return a == b;
}

// p = 0 is the plain kernel, bit by bit.
template <class T>
void plain(const Spec& s) {
  using D = Device<T>;
  const Dropout none{};
  Forwards<T> f(s, none);
  f.run();
  const std::vector<char> bits = f.bits();
  f.c.O.poison();
  on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) {
    if constexpr (std::is_same_v<T, float>) {
      cuda_forward::Options options;
      options.kernel = cuda_forward::Kernel::tiled;
      cuda_forward::forward(p, t, options);
    } else {
      optimized::Options options;
      options.kernel = optimized::Kernel::fa2;
      optimized::forward(p, as_device<D>(t), options);
    }
  })(f.c.call());
  EXPECT_TRUE(same_bits<T>(bits, f.bits()))
      << "forward: " << s.name() << ", " << sizeof(T) << " bytes";

  Backwards<T> b(s, none);
  b.run();
  const std::vector<char> gradients = b.bits();
  on_gpu_backward<T>([&](const Problem& p, const Backward<T>& t) {
    if constexpr (std::is_same_v<T, float>) {
      cuda_backward::Options options;
      options.tiles = cuda_backward::Tiles::lesson;
      const DeviceMemory scratch(cuda_backward::scratch_bytes(p, options));
      options.scratch = {scratch.as<void>(), scratch.bytes()};
      cuda_backward::backward(p, t, options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    } else {
      optimized::BackwardOptions options;
      options.kernel = optimized::BackwardKernel::swizzle;
      const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
      options.scratch = {scratch.as<void>(), scratch.bytes()};
      optimized::backward(p, as_device<D>(t), options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    }
  })(b.c.call());
  EXPECT_TRUE(same_bits<T>(gradients, b.bits()))
      << "backward: " << s.name() << ", " << sizeof(T) << " bytes";
}
TEST_F(dropout, NothingDroppedIsThePlainKernel) {
  each_type([]<class T>(T) {
    plain<T>(sized_as(1, sized(2, 1), 1, 70, 75, 24, Causal::bottom_right));
    plain<T>(sized_as(2, 1, 1, 33, sized(70, 40), 72, Causal::none, {sized(70, 40), 20}));
  });
}

// ---- what is promised of the numbers ----

// Kept weights of a square: how many, and how many agree with those `apart` from them.
struct Counts {
  Int n = 0, kept = 0, equal = 0;
};
Counts counted(const Dropout& x, Int N, Int down, Int right) {
  const Problem p = sized_as(1, 1, 1, N, N, 8).p;
  std::vector<char> M(std::size_t(N * N));
  for (Int i = 0; i < N; ++i)
    for (Int j = 0; j < N; ++j) M[std::size_t(i * N + j)] = walk::kept(p, x, 0, 0, i, j);
  Counts c;
  for (Int i = 0; i < N - down; ++i)
    for (Int j = 0; j < N - right; ++j) {
      const char here = M[std::size_t(i * N + j)];
      ++c.n, c.kept += here;
      c.equal += here == M[std::size_t((i + down) * N + j + right)];
    }
  return c;
}

// A sum of n zeros and ones with probability q lies within five of its standard deviations.
void expect_binomial(Int ones, Int n, double q, const std::string& what) {
  EXPECT_LE(std::fabs(double(ones) - double(n) * q), 5 * std::sqrt(double(n) * q * (1 - q)))
      << what << ": " << ones << " of " << n << ", expected " << double(n) * q;
}

TEST_F(dropout, AsManyAreKeptAsShouldBe) {
  std::uint64_t seed = 0;
  for (double dropped : {0.05, 0.1, 0.5, 0.9, 0.999}) {
    ++seed;
    const Counts c = counted(with(dropped, seed, seed << 33), 512, 0, 0);
    expect_binomial(c.kept, c.n, walk::kept_probability(dropped), "p = " + std::to_string(dropped));
  }
}

// Two weights with no bit in common agree with probability q^2 + (1 - q)^2; also those of one call
// of Philox (8 apart), of one word (8 columns apart), of neighbouring calls.
TEST_F(dropout, NeighboursKnowNothingOfEachOther) {
  for (const auto& [down, right] : {std::pair<Int, Int>{0, 1},
                                    {1, 0},
                                    {1, 1},
                                    {0, 8},
                                    {8, 0},
                                    {8, 8},
                                    {24, 0},
                                    {0, 16},
                                    {32, 16}})
    for (double dropped : {0.5, 0.1}) {
      const double q = walk::kept_probability(dropped);
      const Counts c = counted(with(dropped, 5), sized(384, 256), down, right);
      expect_binomial(c.equal, c.n, q * q + (1 - q) * (1 - q),
                      std::to_string(down) + " down, " + std::to_string(right) + " right");
    }
}

// Rows of 64 weights: the number that is kept spreads as a binomial's, so none is evened out.
TEST_F(dropout, RowsSpread) {
  const Problem p = sized_as(1, 1, 1, 2048, 64, 8).p;
  const double q = walk::kept_probability(0.3), mean = 64 * q, variance = 64 * q * (1 - q);
  double squares = 0;
  for (Int i = 0; i < 2048; ++i) {
    Int kept = 0;
    for (Int j = 0; j < 64; ++j) kept += walk::kept(p, with(0.3, 9), 0, 0, i, j);
    squares += (double(kept) - mean) * (double(kept) - mean);
  }
  EXPECT_NEAR(squares / 2048, variance, 5 * variance * std::sqrt(2. / 2048));
}

// Every part of a weight's place, and of seed and offset, counts.
TEST_F(dropout, EveryPlaceHasItsOwnNumbers) {
  Problem p = sized_as(4, 8, 8, 1 << 20, 1 << 20, 8).p;
  const auto bits = [&](const Dropout& x, Int b, Int h, Int i0, Int j0) {
    std::vector<bool> all;
    for (Int i = i0; i < i0 + 32; ++i)
      for (Int j = j0; j < j0 + 16; ++j) all.push_back(walk::kept(p, x, b, h, i, j));
    return all;
  };
  const std::uint64_t one = 1, high = one << 32;
  const std::vector<std::vector<bool>> all{bits(with(0.5, 7, 9), 0, 0, 0, 0),
                                           bits(with(0.5, 8, 9), 0, 0, 0, 0),
                                           bits(with(0.5, 7 + high, 9), 0, 0, 0, 0),
                                           bits(with(0.5, 7, 10), 0, 0, 0, 0),
                                           bits(with(0.5, 7, 9 + 2 * high), 0, 0, 0, 0),
                                           bits(with(0.5, 7, 9), 1, 0, 0, 0),
                                           bits(with(0.5, 7, 9), 0, 1, 0, 0),
                                           bits(with(0.5, 7, 9), 0, 0, 32, 0),
                                           bits(with(0.5, 7, 9), 0, 0, 0, 16),
                                           bits(with(0.5, 7, 9), 0, 0, 1 << 19, 0),
                                           bits(with(0.5, 7, 9), 0, 0, 0, 1 << 19)};
  for (std::size_t a = 0; a < all.size(); ++a)
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      Int equal = 0;
      for (std::size_t n = 0; n < 512; ++n) equal += all[a][n] == all[b][n];
      expect_binomial(equal, 512, 0.5, std::to_string(a) + " and " + std::to_string(b));
    }
  // Not the sizes of the problem, nor p: who is kept at 0.5 is kept at 0.4.
  Problem other = p;
  other.Nq = other.Nk = 64;
  for (Int i = 0; i < 32; ++i)
    for (Int j = 0; j < 32; ++j) {
      const bool kept = walk::kept(p, with(0.5), 0, 3, i, j);
      EXPECT_EQ(walk::kept(other, with(0.5), 0, 3, i, j), kept);
      EXPECT_TRUE(!kept || walk::kept(p, with(0.4), 0, 3, i, j));
    }
}

TEST_F(dropout, TheThresholdIsExact) {
  EXPECT_EQ(walk::threshold(0), 65536u);
  EXPECT_EQ(walk::threshold(0.5), 32768u);
  EXPECT_EQ(walk::threshold(0.1), 58982u);          // 58982.4
  EXPECT_EQ(walk::threshold(1. / 131073), 65536u);  // too little for 16 bits: nothing is dropped
  EXPECT_EQ(walk::threshold(0.9999999), 1u);
  EXPECT_EQ(walk::kept_probability(0.1), 58982. / 65536);
}

// ---- O in the mean ----

// Over 256 seeds O comes close to that without dropout: as close as its spread allows. Exactly
// so, for the factor is that of the true probability.
TEST_F(dropout, InTheMeanOStaysWhatItWas) {
  const Spec s = sized_as(1, 1, 1, 4, 40, 8);
  const Dropout x = with(0.4);
  const int seeds = int(sized(256, 128));
  const double q = walk::kept_probability(x.p);
  Forwards<float> f(s, {});
  f.run();
  const Array want = to_array(f.c.O);
  const ForwardOracle oracle =
      oracle_forward(s.p, to_array(f.c.Q), to_array(f.c.K), to_array(f.c.V));
  Array mean(1, 1, 4, 8);
  for (int n = 0; n < seeds; ++n) {
    const Dropout now = with(x.p, std::uint64_t(n));
    f.run(&now);
    mean.for_each([&](Int b, Int h, Int i, Int e) {
      mean.at(b, h, i, e) += double(f.c.O.at(b, h, i, e)) / seeds;
    });
  }
  mean.for_each([&](Int b, Int h, Int i, Int e) {
    double squares = 0;  // of P V: the variance is that times (1 - q) / q
    for (Int j = 0; j < 40; ++j) {
      double score = 0;
      for (Int y = 0; y < 8; ++y)
        score += double(f.c.Q.at(b, h, i, y)) * double(f.c.K.at(b, h, j, y));
      const double PV = std::exp(s.p.softmax_scale() * score - oracle.LSE.at(b, h, i)) *
                        double(f.c.V.at(b, h, j, e));
      squares += PV * PV;
    }
    EXPECT_NEAR(mean.at(b, h, i, e), want.at(b, h, i, e),
                5 * std::sqrt(squares * (1 - q) / q / seeds));
  });
}

// The judge's own gradients with the mask held fixed, by central differences of its forward.
TEST_F(dropout, GradientsByDifferences) {
  const Spec s = told(sized_as(1, 2, 1, 5, 7, 3), with(0.4));
  const BackwardCase<double> c(s);
  Array Q = to_array(c.Q), K = to_array(c.K), V = to_array(c.V);
  const Array dO = to_array(c.dO);
  const auto loss = [&] {
    const Array O = oracle_forward(s.p, Q, K, V, {}, s.hooks).O;
    double sum = 0;
    for (std::size_t n = 0; n < O.data.size(); ++n) sum += O.data[n] * dO.data[n];
    return sum;
  };
  const BackwardOracle want = oracle_backward(s.p, Q, K, V, dO, {}, s.hooks);
  const auto check = [&](std::vector<double>& x, const std::vector<double>& gradient) {
    std::vector<double*> all(x.size());
    for (std::size_t n = 0; n < x.size(); ++n) all[n] = &x[n];
    const std::vector<double> got = central_differences(all, loss);
    for (std::size_t n = 0; n < got.size(); ++n) EXPECT_NEAR(got[n], gradient[n], 1e-8);
  };
  check(Q.data, want.dQ.data);
  check(K.data, want.dK.data);
  check(V.data, want.dV.data);
}

// ---- seed and offset ----

// From device memory, and what the call adds to it; the same bits as by value.
TEST_F(dropout, SeedAndOffsetFromMemory) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(1, sized(2, 1), 1, 40, 70, 16, Causal::bottom_right);
    std::uint64_t two[2] = {0xfedcba9876543210, (std::uint64_t(3) << 32) - 5};
    const DeviceCopy copy({{two, sizeof two}});
    const Dropout by_value = with(0.3, two[0], two[1] + 9), there{0.3, 0, 9, copy.at(two)};
    Forwards<T> f(s, by_value);
    f.run();
    EXPECT_EQ(f.verdict(), "");
    const std::vector<char> O = f.bits();
    f.c.O.poison();
    f.run(&there);
    EXPECT_TRUE(f.bits() == O);
    Backwards<T> b(s, by_value);
    b.run();
    EXPECT_EQ(b.verdict(), "");
    const std::vector<char> gradients = b.bits();
    b.c.dQ.poison();
    b.run(&there);
    EXPECT_TRUE(b.bits() == gradients);
  });
}

// ---- what is promised besides ----

TEST_F(dropout, NearlyAllAndNearlyNone) {
  const Spec s = sized_as(1, 1, 1, 40, 70, 16, Causal::top_left);
  for (double dropped : {1e-9, 1e-5, 0.9, 0.99999}) {
    const Dropout x = with(dropped);
    both_right<float>(s, x);
  }
#ifndef FA_WITHOUT_HALF
  both_right<bf16>(s, with(0.9));
#endif
}

// Sizes, p, seeds as they come.
TEST_F(dropout, AnyProblem) {
  std::mt19937_64 random(11);
  const auto up_to = [&](Int n) { return Int(random() % std::uint64_t(n)); };
  for (int n = 0; n < sized(60, 9); ++n) {
    const Int Hkv = 1 + up_to(2), Nk = 1 + up_to(sized(150, 100));
    Spec s = sized_as(1 + up_to(2), Hkv * (1 + up_to(2)), Hkv, 1 + up_to(100), Nk, 1 + up_to(40),
                      Causal(up_to(3)));
    if (up_to(2)) s.lengths = std::vector<Int>(std::size_t(s.p.B), up_to(Nk + 1));
    const bool for_hopper = n % 4 < 2;
    if (for_hopper) s.p.d = (s.p.d + 7) / 8 * 8;
    s.seed = random();
    const Dropout x = with(double(up_to(900)) / 1000, random(), random());
    if (n % 3 == 0) both_right<float>(s, x);
#ifndef FA_WITHOUT_HALF
    const walk::Kernel kernel = for_hopper ? walk::Kernel::best : walk::Kernel::fa2;
    if (n % 3 == 1) both_right<half>(s, x, kernel);
    if (n % 3 == 2) both_right<bf16>(s, x, kernel);
#endif
  }
}

#ifndef FA_WITHOUT_HALF
// What hopper takes: d a multiple of 8 and rows at multiples of 16 bytes. By name, so that nothing
// is left to fa2; with and without what it counts or takes turns by.
TEST_F(dropout, AnyProblemOfHopper) {
  FA_NEEDS_HOPPER();
  std::mt19937_64 random(12);
  const auto up_to = [&](Int n) { return Int(random() % std::uint64_t(n)); };
  for (int n = 0; n < sized(60, 8); ++n) {
    const Int Hkv = 1 + up_to(2), Nk = 1 + up_to(sized(250, 140));
    Spec s = sized_as(1 + up_to(2), Hkv * (1 + up_to(3)), Hkv, 1 + up_to(sized(250, 140)), Nk,
                      8 * (1 + up_to(16)), Causal(up_to(3)));
    if (up_to(2))
      for (Int b = 0; b < s.p.B; ++b) s.lengths.push_back(up_to(Nk + 1));
    if (up_to(3) == 0) s.p.scale = 0.05 + double(up_to(20)) / 20;
    s.layout.order = up_to(2) ? Layout::Order::BNHD : Layout::Order::BHND;
    s.layout.in_16_bytes = true;
    s.layout.gap = up_to(3);
    s.seed = random();
    const Dropout x = with(double(up_to(900)) / 1000, random(), random());
    const bool flag = up_to(2);
    const auto run = [&]<class T>(T) {
      Forwards<T> f(s, x);
      f.kernel = walk::Kernel::hopper;
      f.counts = flag;
      f.run();
      EXPECT_EQ(f.verdict(), "") << "p = " << x.p << ": " << s.name() << ", counts " << flag;
      Backwards<T> b(s, x);
      b.kernel = walk::Kernel::hopper;
      b.deterministic = flag;
      b.run();
      EXPECT_EQ(b.verdict(), "") << "p = " << x.p << ": " << s.name() << ", in turns " << flag;
    };
    n % 2 ? run(half()) : run(bf16());
  }
}
#endif

// NaN in a key reaches exactly the rows that see it, whether they keep it or not: l has it. In a
// query it reaches its row. No other row has a bit changed.
TEST_F(dropout, NaNStaysWhereItIsSeen) {
  each_type([]<class T>(T) {
    for (const walk::Kernel kernel : who_takes<T>()) {
      Forwards<T> f(sized_as(1, 2, 1, 80, 80, 16, Causal::top_left), with(0.5));
      f.kernel = kernel;
      f.run();
      const Buffer<T> O = f.c.O, Q = f.c.Q;
      const Buffer<float> LSE = f.c.LSE;
      for (const bool in_key : {false, true}) {
        in_key ? f.c.K.at(0, 0, 37, 3) = T(NAN) : f.c.Q.at(0, 1, 37, 3) = T(NAN);
        f.run();
        const auto nan = [&](Int, Int h, Int i, Int) -> std::optional<bool> {
          return in_key ? i >= 37 : h == 1 && i == 37;
        };
        const std::string what =
            (in_key ? " of NaN in a key, kernel " : " of NaN in a query, kernel ") +
            std::to_string(int(kernel));
        expect_hit("O", f.c.O, O, nan, what);
        expect_hit("LSE", f.c.LSE, LSE, nan, what);
        f.c.Q = Q;
      }
    }
  });
}

// Of gradients as well, but for V's where the weight is dropped.
TEST_F(dropout, NaNOfGradientsStaysInItsTiles) {
  each_type([]<class T>(T) {
    const Int N = sizeof(T) == 4 ? 76 : 140;
    for (const walk::Kernel kernel : who_takes<T>()) {
      Backwards<T> b(sized_as(1, 1, 1, N, N, 16, Causal::top_left), with(0.5));
      b.kernel = kernel;
      b.deterministic = true;
      expect_nan_in_its_tiles(
          b.c, [&] { b.run(); }, [](Int i, Int j) { return j <= i; },
          [&](Int i, Int j) { return walk::kept(b.c.p, b.dropout, 0, 0, i, j); },
          "kernel " + std::to_string(int(kernel)));
    }
  });
}

TEST_F(dropout, PaddedKeysNeverLeak) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(2, 1, 1, 50, 90, 16, Causal::none, {33, 0});
    for (const walk::Kernel kernel : who_takes<T>()) {
      Forwards<T> f(s, with(0.3));
      Backwards<T> b(s, with(0.3));
      f.kernel = b.kernel = kernel;
      b.deterministic = true;
      f.run(), b.run();
      EXPECT_EQ(f.verdict(), "");
      EXPECT_EQ(b.verdict(), "");
      const std::vector<char> O = f.bits(), gradients = b.bits();
      for (Buffer<T>* x : {&f.c.K, &f.c.V, &b.c.K, &b.c.V}) {
        const Buffer<T> before = *x;
        x->fill([&](Int n, Int, Int j, Int e) {
          return j >= s.lengths[std::size_t(n)] ? std::nan("") : double(before.at(n, 0, j, e));
        });
      }
      f.run(), b.run();
      EXPECT_TRUE(f.bits() == O) << "kernel " << int(kernel) << ", " << sizeof(T) << " bytes";
      EXPECT_TRUE(b.bits() == gradients) << "kernel " << int(kernel);
    }
  });
}

TEST_F(dropout, LengthsOutsideAreClamped) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(3, 1, 1, 20, 40, 16, Causal::none, {0, 40, 40});
    for (const walk::Kernel kernel : who_takes<T>()) {
      const auto right = [&](auto&& x) {
        x.kernel = kernel;
        x.c.spec.lengths = {-3, 41, std::numeric_limits<Int>::max()};
        x.run();
        x.c.spec.lengths = s.lengths;
        EXPECT_EQ(x.verdict(), "") << "kernel " << int(kernel) << ", " << sizeof(T) << " bytes";
      };
      right(Forwards<T>(s, with(0.3)));
      right(Backwards<T>(s, with(0.3)));
    }
  });
}

TEST_F(dropout, TheSameBitsInEveryRun) {
  each_type([]<class T>(T) {
    for (const walk::Kernel kernel : who_takes<T>()) {
      const Spec s = sized_as(1, sized(2, 1), 1, sized(140, 70), sized(140, 70), 24);
      Forwards<T> f(s, with(0.2));
      Backwards<T> b(s, with(0.2));
      f.kernel = b.kernel = kernel;
      b.deterministic = true;
      f.run(), b.run();
      const std::vector<char> O = f.bits(), gradients = b.bits();
      f.run(), b.run();
      EXPECT_TRUE(f.bits() == O && b.bits() == gradients);
    }
  });
}

TEST_F(dropout, WorkIsPutOnTheStreamAndNobodyWaits) {
  each_type([]<class T>(T) {
    using D = Device<T>;
    const Spec s = sized_as(1, sized(2, 1), 1, 40, 70, 16);
    const Dropout x = with(0.2);
    for (const walk::Kernel kernel : who_takes<T>()) {
      Forwards<T> f(s, x);
      EXPECT_EQ(on_its_stream(f.c.call(),
                              [&](const Problem& p, const Forward<T>& t, cudaStream_t stream) {
                                walk::forward(p, x, as_device<D>(t), {stream, {}, kernel});
                              }),
                "");
      EXPECT_EQ(f.verdict(), "");
      const DeviceMemory scratch(walk::scratch_bytes<D>(s.p));
      Backwards<T> b(s, x);
      EXPECT_EQ(on_its_stream(b.c.call(),
                              [&](const Problem& p, const Backward<T>& t, cudaStream_t stream) {
                                walk::backward(p, x, as_device<D>(t), {stream, scratch, kernel});
                              }),
                "");
      EXPECT_EQ(b.verdict(), "");
    }
  });
}

// ---- errors ----

TEST_F(dropout, RefusesInWords) {
  const Spec s = sized_as(2, 4, 2, 20, 40, 16);
  ForwardCase<float> c(s, true);
  BackwardCase<float> g(s);
  const ForwardCall<float> call = c.call();
  const BackwardCall<float> back = g.call();
  std::uint64_t two[3] = {};
  float scratch[2 * 4 * 20];
  const auto why = [&](auto change) {
    Problem p = call.p;
    Dropout x = with(0.1);
    change(p, x);
    return refusal([&] { walk::forward<float>(p, x, call.t); });
  };
  using P = Problem&;
  using X = Dropout&;
  expect_words(why([](P, X x) { x.p = 1; }), {"dropout: p must lie in [0, 1), got 1"});
  expect_words(why([](P, X x) { x.p = -0.1; }), {"dropout: p must lie in [0, 1), got -0.1"});
  expect_words(why([](P, X x) { x.p = std::nan(""); }), {"dropout: p must lie in [0, 1), got nan"});
  expect_words(why([&](P, X x) { x.in_memory = two; }),
               {"dropout: seed must be 0 if in_memory is given", "got 81985529216486895"});
  expect_words(why([&](P, X x) {
                 x.seed = 0;
                 x.in_memory =
                     reinterpret_cast<const std::uint64_t*>(reinterpret_cast<const char*>(two) + 4);
               }),
               {"dropout: in_memory must be aligned to its element, 8 bytes"});
  const auto at = [](const void* data) { return static_cast<const std::uint64_t*>(data); };
  expect_words(why([&](P, X x) { x.seed = 0, x.in_memory = at(call.t.O.data); }),
               {"dropout: O overlaps in_memory"});
  expect_words(why([&](P, X x) { x.seed = 0, x.in_memory = at(call.t.LSE + 158); }),
               {"dropout: LSE overlaps in_memory"});
  expect_words(why([](P p, X) { p.d = 129; }), {"dropout: d must lie in [1, 128], got 129"});
  expect_words(why([](P p, X) { p.Hq = 3; }), {"dropout: Hq must be a multiple of Hkv"});
  expect_words(why([](P p, X) { p.scale = INFINITY; }), {"dropout: scale must be finite"});
  expect_words(why([](P p, X) { p.Nk = (1 << 30) + 1; }),
               {"dropout: Nq and Nk must be at most 2^30, got 20 and 1073741825"});
  expect_words(refusal([&] {
                 Forward<float> t = call.t;
                 t.O.data = const_cast<float*>(t.Q.data);
                 walk::forward<float>(call.p, with(0.1), t);
               }),
               {"dropout: O overlaps Q"});
  expect_words(refusal([&] {
                 walk::kept(call.p, {0.1, 0, 0, two}, 0, 0, 0, 0);
               }),
               {"dropout: kept() does not read in_memory"});

  const auto why_back = [&](auto change) {
    Backward<float> t = back.t;
    Dropout x = with(0.1);
    walk::Options options;
    options.scratch = {scratch, sizeof scratch};
    change(x, t, options);
    return refusal([&] { walk::backward<float>(back.p, x, t, options); });
  };
  using B = Backward<float>&;
  using O = walk::Options&;
  expect_words(why_back([](X x, B, O) { x.p = 1.5; }), {"dropout: p must lie in [0, 1), got 1.5"});
  for (const float* data : {back.t.dQ.data, back.t.dK.data, back.t.dV.data})
    expect_words(why_back([&](X x, B, O) { x.seed = 0, x.in_memory = at(data + 2); }),
                 {"dropout: d", " overlaps in_memory"});
  expect_words(why_back([](X, B t, O) { t.LSE = nullptr; }), {"dropout: LSE must not be null"});
  expect_words(why_back([](X, B t, O) { t.O.data = nullptr; }), {"dropout: O must not be null"});
  expect_words(why_back([](X, B t, O) { t.dK.data = t.dV.data; }), {"dropout: d", "overlaps d"});
  expect_words(why_back([](X, B, O o) { o.scratch = {}; }),
               {"dropout needs scratch_bytes() = 640 bytes of scratch, got null"});
}
#ifndef FA_WITHOUT_HALF
TEST_F(dropout, TensorCoresWantAPositiveScale) {
  Spec s = sized_as(1, 1, 1, 20, 20, 16);
  s.p.scale = -0.125;
  Forwards<bf16> f(s, with(0.1));
  expect_words(refusal([&] { f.run(); }), {"dropout: fa2: scale must be > 0 in fp32, got -0.125"});
  both_right<float>(s, with(0.1));
}
#endif

TEST_F(dropout, NothingToDo) {
  for (int what = 0; what < 4; ++what)
    all_right(sized_as(what == 0 ? 0 : 2, what == 1 ? 0 : 2, what == 1 ? 0 : 1, what == 2 ? 0 : 3,
                       what == 3 ? 0 : 5, 16),
              with(0.1));
}

TEST_F(dropout, ScratchIsCounted) {
  const Problem p = sized_as(2, 4, 2, 130, 50, 16).p;
  EXPECT_EQ(walk::scratch_bytes<float>(p), 2u * 4 * 130 * 4);
  // LSE2 and D; on 9.0 hopper's sums, turns and counter as well.
  EXPECT_EQ(walk::scratch_bytes<__half>(p),
            optimized::device_capability() == 90
                ? optimized::backward_scratch_bytes(p, {optimized::BackwardKernel::hopper, true})
                : 2u * 4 * 256 * 8);
}

// ---- what only the CPU can do, or only a GPU ----

#ifdef FA_EMULATED
// Each head dimension's tile fits, in fp32 forward and backward.
TEST_F(dropout, WithTheSharedMemoryOfAT4) {
  const emulator::WithSharedMemory until_the_end(64 << 10);
  for (Int d : {32, 64, 128}) both_right<float>(sized_as(1, 1, 1, 20, 40, d), with(0.3));
}
#ifndef FA_WITHOUT_HALF
// What is copied comes as early as it may, and at random times; late in all other tests. In fp32
// nothing is on its way.
TEST_F(dropout, EarlyAndAtRandom) {
  using emulator::Timing;
  for (const emulator::Schedule& now :
       {emulator::Schedule{Timing::early, 0}, {Timing::random, 1}, {Timing::random, 2}}) {
    const emulator::WithSchedule until_the_end(now);
    for (const walk::Kernel kernel : who_takes<bf16>()) {
      both_right<half>(sized_as(1, 1, 1, 40, 140, 8), with(0.3), kernel);
      both_right<bf16>(sized_as(1, 1, 1, 40, 140, 8), with(0.3), kernel);
    }
  }
}
#endif
#else
// Seed and offset are in memory, so each replay draws with what is there then.
TEST_F(dropout, ARecordedCallReplaysWithOtherNumbers) {
  using D = __nv_bfloat16;
  const Spec one = with_lengths({300, 17, 64}, 1), two = with_lengths({1, 250, 299}, 2);
  std::uint64_t numbers[2] = {77, 5};
  const DeviceCopy copy({{numbers, sizeof numbers}});
  const Dropout there{0.25, 0, 3, copy.at(numbers)}, same = with(0.25, 77, 8);
  const DeviceMemory scratch(walk::scratch_bytes<D>(one.p));
  for (const walk::Kernel kernel : who_takes<bf16>()) {
    ForwardCase<bf16> first(told(one, same), true), second(told(two, same), true);
    EXPECT_EQ(replayed_as_graph(first, second,
                                [&](const Problem& p, const Forward<bf16>& t, cudaStream_t stream) {
                                  walk::forward(p, there, as_device<D>(t), {stream, {}, kernel});
                                }),
              "");
    BackwardCase<bf16> a(told(one, same)), b(told(two, same));
    const auto launch = [&](const Problem& p, const Backward<bf16>& t, cudaStream_t stream) {
      walk::backward(p, there, as_device<D>(t), {stream, scratch, kernel});
    };
    EXPECT_EQ(replayed_as_graph(a, b, launch), "");
  }

  // Replayed after the numbers have changed.
  const Spec s = sized_as(1, 2, 1, 100, 130, 64);
  Forwards<bf16> f(s, with(0.25, 77, 8)), g(s, with(0.25, 78, 1003));
  g.kernel = walk::Kernel::best;
  cudaStream_t stream = nullptr;
  FA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const ForwardCall<bf16> call = f.c.call();
  const DeviceCopy tensors(call.storage);
  const Forward<D> t = as_device<D>(on_device(tensors, call.t));
  walk::forward(s.p, there, t, {stream, {}});
  FA_CUDA_CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  FA_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  walk::forward(s.p, there, t, {stream, {}});
  FA_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  FA_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  FA_CUDA_CHECK(cudaGraphLaunch(replay, stream));
  tensors.copy_back(stream);
  EXPECT_EQ(f.verdict(), "");
  numbers[0] = 78, numbers[1] = 1000;
  copy.copy_there();
  FA_CUDA_CHECK(cudaGraphLaunch(replay, stream));
  tensors.copy_back(stream);
  const std::vector<char> got = f.bits();
  g.run();
  EXPECT_EQ(g.verdict(), "");
  EXPECT_TRUE(g.bits() == got);
  FA_CUDA_CHECK(cudaGraphExecDestroy(replay));
  FA_CUDA_CHECK(cudaGraphDestroy(graph));
  FA_CUDA_CHECK(cudaStreamDestroy(stream));
}

// Rows of K and V 2^22 numbers apart, so that the last ones lie beyond 2^31.
TEST_F(dropout, KeysBeyondTwoToThe31) {
  using D = __nv_bfloat16;
  constexpr Int d = 64, apart = Int(1) << 22, keys = 600;
  const std::size_t bytes = std::size_t(keys * apart) * sizeof(D);
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  const DeviceMemory memory(bytes);
  D* const base = memory.as<D>();
  const Spec s = sized_as(1, 2, 1, 130, keys, d, Causal::bottom_right);
  const Dropout x = with(0.2);
  const auto put = [&](const Buffer<bf16>& K, const Buffer<bf16>& V) {
    for (Int j = 0; j < keys; ++j) {
      FA_CUDA_CHECK(
          cudaMemcpy(base + j * apart, &K.at(0, 0, j), d * sizeof(D), cudaMemcpyHostToDevice));
      FA_CUDA_CHECK(
          cudaMemcpy(base + j * apart + d, &V.at(0, 0, j), d * sizeof(D), cudaMemcpyHostToDevice));
    }
  };
  for (const walk::Kernel kernel : who_takes<bf16>()) {
    Forwards<bf16> f(s, x);
    put(f.c.K, f.c.V);
    on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
      Forward<D> far = as_device<D>(t);
      far.K = {base, 0, 0, apart};
      far.V = {base + d, 0, 0, apart};
      walk::forward(p, x, far, {nullptr, {}, kernel});
    })(f.c.call());
    EXPECT_EQ(f.verdict(), "");
    Backwards<bf16> b(s, x);
    put(b.c.K, b.c.V);
    const DeviceMemory scratch(walk::scratch_bytes<D>(s.p));
    on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
      Backward<D> far = as_device<D>(t);
      far.K = {base, 0, 0, apart};
      far.V = {base + d, 0, 0, apart};
      walk::backward(p, x, far, {nullptr, scratch, kernel});
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(b.c.call());
    EXPECT_EQ(b.verdict(), "");
  }
}
#endif

}  // namespace
