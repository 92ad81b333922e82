// Tests of packed: whose tile a block takes, in which order, and that no sequence feels another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/beyond/packed/packed.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
namespace walk = fa::packed;
using walk::Options;
using walk::Order;
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

using Offsets = std::vector<std::int32_t>;

Offsets offsets_of(const std::vector<int>& lengths, int first = 0) {
  Offsets all = {first};
  for (int n : lengths) all.push_back(all.back() + n);
  return all;
}

// A batch: where its sequences are, in tensors of so many tokens.
struct Batch {
  Offsets queries, keys;
  Causal causal = Causal::none;
  Int Hq = 1, Hkv = 1, d = 16;
  Int Nq = 0, Nk = 0;  // 0: up to the last offset
  Layout layout = {};
  std::uint64_t seed = 1;
  std::optional<double> scale = {};
  walk::Kernel kernel = walk::Kernel::best;
  bool deterministic = false;
  bool told = false;  // the offsets, on the host, too

  Int B() const { return Int(queries.size()) - 1; }
  // As the oracle sees it: one sequence, in which a token sees some of its own.
  Spec spec() const {
    Spec s;
    s.p.Hq = Hq, s.p.Hkv = Hkv, s.p.d = d;
    s.p.Nq = Nq ? Nq : queries.back();
    s.p.Nk = Nk ? Nk : keys.back();
    s.p.scale = scale;
    s.layout = layout;
    s.seed = seed;
    s.hooks.visible = [q = queries, k = keys, mask = causal](Int, Int, Int i, Int j) {
      for (std::size_t b = 0; b + 1 < q.size(); ++b)
        if (q[b] <= i && i < q[b + 1]) {
          if (j < k[b] || j >= k[b + 1]) return false;
          const Int row = i - q[b], key = j - k[b];
          if (mask == Causal::top_left) return key <= row;
          if (mask == Causal::bottom_right)
            return key - (k[b + 1] - k[b]) <= row - (q[b + 1] - q[b]);
          return true;
        }
      return false;
    };
    return s;
  }
  std::string name() const {
    std::string text =
        spec().name() + " kernel " + std::to_string(static_cast<int>(kernel)) + " offsets";
    for (const Offsets* all : {&queries, &keys}) {
      for (std::int32_t n : *all) text += " " + std::to_string(n);
      text += ";";
    }
    return text;
  }
};

Batch same(const std::vector<int>& lengths, Causal causal = Causal::none, Int Hq = 1, Int Hkv = 1,
           Int d = 16) {
  return {offsets_of(lengths), offsets_of(lengths), causal, Hq, Hkv, d};
}
Batch two(const std::vector<int>& queries, const std::vector<int>& keys,
          Causal causal = Causal::none, Int Hq = 1, Int Hkv = 1, Int d = 16) {
  return {offsets_of(queries), offsets_of(keys), causal, Hq, Hkv, d};
}

// f(problem, sequences, tensors, options) on the device, its scratch NaN before and with a strip
// behind it. Returns what was written there.
template <class T, class Call, class F>
std::string call_walk(const Call& call, const Batch& batch, std::size_t bytes, Order order,
                      const F& f) {
  std::vector<Storage> all = call.storage;
  Offsets q = batch.queries, k = batch.keys;
  for (Offsets* x : {&q, &k}) all.push_back({x->data(), x->size() * sizeof(std::int32_t)});
  const DeviceCopy copy(all);
  const std::size_t strip = 256;
  const DeviceMemory scratch(bytes + strip);
  FA_CUDA_CHECK(cudaMemset(scratch.as<void>(), 0xff, bytes + strip));
  Problem p = call.p;
  p.B = batch.B();
  p.causal = batch.causal;
  Options options;
  options.order = order;
  options.kernel = batch.kernel;
  options.deterministic = batch.deterministic;
  options.scratch = {scratch.as<void>(), bytes};
  walk::Sequences sequences{copy.at(q.data()), copy.at(k.data())};
  if (batch.told) sequences.queries_on_host = q.data(), sequences.keys_on_host = k.data();
  f(p, sequences, as_device<Device<T>>(on_device(copy, call.t)), options);
  FA_CUDA_CHECK(cudaDeviceSynchronize());
  copy.copy_back();
  std::vector<unsigned char> behind(strip);
  FA_CUDA_CHECK(
      cudaMemcpy(behind.data(), scratch.as<char>() + bytes, strip, cudaMemcpyDeviceToHost));
  return std::any_of(behind.begin(), behind.end(), [](unsigned char c) { return c != 0xff; })
             ? "wrote behind the scratch\n"
             : "";
}

Problem problem_of(const Batch& batch) {
  Problem p = batch.spec().p;
  p.B = batch.B();
  p.causal = batch.causal;
  return p;
}

template <class T>
std::string run(ForwardCase<T>& c, const Batch& batch, Order order = Order::automatic) {
  return call_walk<T>(c.call(), batch, walk::scratch_bytes<Device<T>>(problem_of(batch)), order,
                      [](auto&&... all) { walk::forward<Device<T>>(all...); });
}
template <class T>
std::string run(BackwardCase<T>& c, const Batch& batch, Order order = Order::automatic) {
  return call_walk<T>(c.call(), batch, walk::backward_scratch_bytes<Device<T>>(problem_of(batch)),
                      order, [](auto&&... all) { walk::backward<Device<T>>(all...); });
}

// Forward and backward of one batch against the oracle.
template <class T>
std::string verdict_of(const Batch& batch, Order order = Order::automatic) {
  ForwardCase<T> f(batch.spec(), true);
  std::string text = run(f, batch, order);
  text += f.verdict();
  BackwardCase<T> b(batch.spec());
  text += run(b, batch, order);
  return text + b.verdict();
}
// f(batch) by the best kernel and by fa2, where they may differ; on the CPU by one of both in turn.
template <class T, class F>
void by_both(Batch batch, const F& f) {
  static int calls = 0;
  const bool one = sized(0, 1) == 1, second = ++calls % 2 == 1;
  if (sizeof(T) == 4 || !one || !second) f(batch);
  batch.kernel = walk::Kernel::fa2;
  if (sizeof(T) == 2 && (!one || second)) f(batch);
}
// In every type; on the CPU in fp32 and in one of the others, which are the same kernels.
void all_right(const std::vector<Batch>& batches) {
  static int calls = 0;
  for (const Batch& any : batches) {
    const bool one = sized(0, 1) == 1, second = calls++ % 4 % 3 == 0;
    each_type([&]<class T>(T) {
      if (one && sizeof(T) == 2 && std::is_same_v<T, bf16> != second) return;
      by_both<T>(any, [](const Batch& batch) {
        EXPECT_EQ(verdict_of<T>(batch), "") << batch.name() << ", " << sizeof(T) << " bytes";
      });
    });
  }
}

std::vector<char> bits_of(const std::vector<Storage>& all) {
  std::vector<char> bits;
  for (const Storage& s : all) {
    const char* const first = static_cast<const char*>(s.data);
    bits.insert(bits.end(), first, first + s.bytes);
  }
  return bits;
}
template <class T>
std::vector<char> bits(ForwardCase<T>& c) {
  return bits_of({c.O.storage(), c.LSE.storage()});
}
template <class T>
std::vector<char> bits(BackwardCase<T>& c) {
  return bits_of({c.dQ.storage(), c.dK.storage(), c.dV.storage()});
}

// Are rows [first, first + n) of every head of x, bit by bit, rows [from, from + n) of y?
template <class T>
bool same_rows(const Buffer<T>& x, Int first, const Buffer<T>& y, Int from, Int n) {
  for (Int h = 0; h < x.H(); ++h)
    for (Int i = 0; i < n; ++i)
      for (Int e = 0; e < x.d(); ++e)
        if (std::memcmp(&x.at(0, h, first + i, e), &y.at(0, h, from + i, e), sizeof(T)) != 0)
          return false;
  return true;
}

// The same, but for the last digits in fp32: stages 04 and 05 are other files, and a compiler may
// contract their sums in another way.
template <class T, class Row>
bool as_plain(const Buffer<Row>& x, Int first, const Buffer<Row>& y, Int from, Int n) {
  if (sizeof(T) == 2) return same_rows(x, first, y, from, n);
  double most = 0;
  for (Int h = 0; h < x.H(); ++h)
    for (Int i = 0; i < n; ++i)
      for (Int e = 0; e < x.d(); ++e) {
        const double a = double(x.at(0, h, first + i, e)), b = double(y.at(0, h, from + i, e));
        const double off = std::fabs(a - b) / (1 + std::fabs(b));
        most = a == b ? most : std::isnan(off) ? INFINITY : std::max(most, off);
      }
  return most < 1e-5;
}

class packed : public GpuTest {};  // the tests' name is the walk's

// ---- whose tile, and where it lies ----

// Small, and several of everything: sequences, tiles of each, heads of a group.
TEST_F(packed, Tiles) {
  Batch batch = same({20, 3, 37}, Causal::bottom_right, 2, 1, 8);
  for (walk::Kernel kernel : {walk::Kernel::fa2, walk::Kernel::best}) {
    batch.kernel = kernel;
    each_type([&]<class T>(T) {
      ForwardCase<T> c(batch.spec(), true);
      EXPECT_EQ(run(c, batch), "");
      EXPECT_EQ(c.verdict(), "") << batch.name() << ", " << sizeof(T) << " bytes";
    });
  }
}

TEST_F(packed, Gradients) { all_right({same({20, 3, 37}, Causal::bottom_right, 2, 1, 8)}); }

TEST_F(packed, EmptyAndOneToken) {
  all_right({same({0, 1, 0, 33, 1, 1, 0}, Causal::bottom_right), same({1}), same({0, 0, 5})});
}

// A sequence without keys sees nothing; one without queries gets gradients of 0.
TEST_F(packed, QueriesWithoutKeysAndKeysWithoutQueries) {
  all_right({two({7, 0, 20}, {0, 30, 20}), two({7, 0, 20}, {0, 30, 20}, Causal::top_left),
             two({3, 4}, {0, 0}), two({40, 2}, {33, 0}, Causal::bottom_right)});
}

// More keys than queries, and fewer: the first rows of bottom_right see nothing then.
TEST_F(packed, BothAlignments) {
  for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
    all_right({two({20, 50, 5}, {45, 17, 5}, causal)});
}

TEST_F(packed, Groups) {
  all_right({same({17, 30}, Causal::top_left, 4, 2, 8), same({9, 18}, Causal::none, 3, 1, 24)});
}

// Several tiles of the tensor cores' kernels in one sequence, and a short one on each side.
TEST_F(packed, LongSequences) {
  all_right({two({5, 140, 3}, {9, 150, 70}, Causal::bottom_right, 1, 1, 40)});
}

#ifndef FA_WITHOUT_HALF
// Several tiles of everything, of every width; a sequence that ends in the middle of a warp's rows
// is followed by another, whose keys are NaN. And what it does not take it says.
constexpr auto without_hopper = "hopper is for 9.0 alone";

Batch for_hopper(Batch batch) {
  batch.kernel = walk::Kernel::hopper;
  return batch;
}
template <class Case>
void hopper_is_right(std::initializer_list<Int> dimensions) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << without_hopper;
  std::size_t n = 0;  // on the CPU each d meets every second mask
  for (Int d : dimensions)
    for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      if (++n % 2 == 0 && sized(0, 1) == 1) continue;
      const int q = int(sized(200, 140)), k = int(sized(310, 260));
      const Batch batch = for_hopper(two({150, 0, 37, q, 5}, {k, 20, 0, 140, 9}, causal, 2, 1, d));
      Case c = [&] {
        if constexpr (std::is_same_v<Case, ForwardCase<bf16>>)
          return Case(batch.spec(), true);
        else
          return Case(batch.spec());
      }();
      EXPECT_EQ(run(c, batch), "");
      EXPECT_EQ(c.verdict(), "") << batch.name();
    }
}
TEST_F(packed, HopperForward) { hopper_is_right<ForwardCase<bf16>>({64, 96, 128, 256}); }
TEST_F(packed, HopperBackward) { hopper_is_right<BackwardCase<bf16>>({64, 128}); }

// Long sequences in tall tiles, and others among them; by the mean, and by the offsets.
TEST_F(packed, HopperWithTallTiles) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << without_hopper;
  const Batch by_mean = two({1100, 1300}, {150, 90}, Causal::top_left, 2, 1, 40);
  Batch by_offsets =
      two({5, 1100, 0, 200, 37}, {9, 310, 20, 140, 0}, Causal::bottom_right, 1, 1, 64);
  by_offsets.told = true;
  for (const Batch& batch : {by_mean, by_offsets}) {
    ForwardCase<bf16> c(for_hopper(batch).spec(), true);
    EXPECT_EQ(run(c, for_hopper(batch)), "");
    EXPECT_EQ(c.verdict(), "") << batch.name();
  }
}

// What a tile brings of the sequence behind leaves no trace, even if it is NaN.
TEST_F(packed, HopperHidesTheNextSequence) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << without_hopper;
  const Batch pair = for_hopper(same({70, 90}, Causal::none, 1, 1, 64));
  const auto spoil = [](Buffer<bf16>& x) {
    for (Int i = 70; i < 160; ++i)
      for (Int e = 0; e < 64; ++e) x.at(0, 0, i, e) = bf16(std::nanf(""));
  };
  ForwardCase<bf16> before(pair.spec(), true), after(pair.spec(), true);
  for (Buffer<bf16>* x : {&after.Q, &after.K, &after.V}) spoil(*x);
  EXPECT_EQ(run(before, pair) + run(after, pair), "");
  EXPECT_TRUE(same_rows(before.O, 0, after.O, 0, 70)) << "NaN came from the next sequence";
  BackwardCase<bf16> before_it(pair.spec()), with_it(pair.spec());
  for (Buffer<bf16>* x : {&with_it.Q, &with_it.K, &with_it.V, &with_it.dO}) spoil(*x);
  EXPECT_EQ(run(before_it, pair) + run(with_it, pair), "");
  for (auto x : {&BackwardCase<bf16>::dQ, &BackwardCase<bf16>::dK, &BackwardCase<bf16>::dV})
    EXPECT_TRUE(same_rows(before_it.*x, 0, with_it.*x, 0, 70)) << "NaN came into a gradient";
}

TEST_F(packed, HopperRefusesInWords) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << without_hopper;
  for (auto [d, words] : {std::pair{20, "d a multiple of 8"}, {13, "packed: hopper wants"}}) {
    const Batch odd = for_hopper(same({5, 9}, Causal::none, 1, 1, d));
    ForwardCase<bf16> c(odd.spec(), true);
    expect_words(refusal([&] { run(c, odd); }), {words});
  }
  for (auto [d, words] : {std::pair{136, "hopper's backward takes d up to 128, got 136"},
                          {64, "packed: hopper's backward is not deterministic"}}) {
    Batch odd = for_hopper(same({5, 9}, Causal::none, 1, 1, d));
    odd.deterministic = d == 64;
    BackwardCase<bf16> c(odd.spec());
    expect_words(refusal([&] { run(c, odd); }), {words});
  }
}
#endif

TEST_F(packed, Layouts) {
  std::vector<Batch> batches(5, same({11, 25, 4}, Causal::bottom_right, 2, 1, 16));
  batches[0].layout.order = Layout::Order::BNHD;  // [tokens, heads, d]
  batches[1].layout.gap = 3, batches[1].layout.offset = 1;
  batches[2].layout.reversed = true;
  batches[3].layout.order = Layout::Order::BNHD, batches[3].layout.in_16_bytes = true;
  batches[3].layout.gap = 1;
  batches[4].d = 13, batches[4].layout.in_16_bytes = true;  // 16 bytes that end behind the row
  all_right(batches);
}

TEST_F(packed, HeadDimensions) {
  all_right({same({10, 21}, Causal::bottom_right, 1, 1, 5),
             same({10, 21}, Causal::bottom_right, 1, 1, 72),
             same({10, 21}, Causal::none, 1, 1, 128)});
#ifndef FA_WITHOUT_HALF
  for (Int d : {136, 256})
    EXPECT_EQ(verdict_of<bf16>(same({10, 71}, Causal::bottom_right, 1, 1, d)), "") << d;
#endif
}

TEST_F(packed, Scale) {
  Batch batch = same({11, 25}, Causal::bottom_right);
  batch.scale = 0.7;
  all_right({batch});
  batch.scale = -0.3;
  EXPECT_EQ(verdict_of<float>(batch), "");
}

// ---- tokens of nobody ----

// Before the first offset and behind the last one nothing is read, and nothing written.
TEST_F(packed, TokensOfNobodyAreLeftAlone) {
  each_type([&]<class T>(T) {
    Batch batch{{6, 16, 41}, {9, 40, 50}, Causal::bottom_right, 2, 1, 16, 60, 57};
    const auto nobody = [&](const Offsets& o, Int i) { return i < o.front() || i >= o.back(); };
    const auto put_nan = [&](Buffer<T>& x, const Offsets& o) {
      const Buffer<T> before = x;
      x.fill([&](Int b, Int h, Int i, Int e) {
        return nobody(o, i) ? std::nan("") : double(before.at(b, h, i, e));
      });
    };
    const auto left = [&](auto& x, const Offsets& o, double want) {
      x.for_each([&](Int b, Int h, Int i, Int e) {
        if (!nobody(o, i)) return;
        EXPECT_TRUE(std::isnan(double(x.at(b, h, i, e)))) << "token " << i << " was written";
        x.at(b, h, i, e) = std::remove_reference_t<decltype(x.at(b, h, i, e))>(want);
      });
    };
    ForwardCase<T> f(batch.spec(), true);
    BackwardCase<T> g(batch.spec());
    put_nan(f.Q, batch.queries), put_nan(f.K, batch.keys), put_nan(f.V, batch.keys);
    put_nan(g.Q, batch.queries), put_nan(g.O, batch.queries), put_nan(g.dO, batch.queries);
    put_nan(g.K, batch.keys), put_nan(g.V, batch.keys);
    EXPECT_EQ(run(f, batch) + run(g, batch), "");
    left(f.O, batch.queries, 0), left(f.LSE, batch.queries, -INFINITY);
    left(g.dQ, batch.queries, 0), left(g.dK, batch.keys, 0), left(g.dV, batch.keys, 0);
    for (Buffer<T>* x : {&f.K, &f.V, &g.K, &g.V, &f.Q, &g.Q, &g.O, &g.dO}) {
      const Buffer<T> before = *x;  // the oracle multiplies what nobody sees by 0
      x->fill([&](Int b, Int h, Int i, Int e) {
        const double was = double(before.at(b, h, i, e));
        return std::isnan(was) ? 0 : was;
      });
    }
    EXPECT_EQ(f.verdict() + g.verdict(), "") << sizeof(T) << " bytes";
  });
}

// The host does not see the offsets, so the kernels must not believe them.
TEST_F(packed, OffsetsAreClamped) {
  const std::int32_t low = std::numeric_limits<std::int32_t>::min(),
                     high = std::numeric_limits<std::int32_t>::max();
  const std::vector<std::pair<Offsets, Offsets>> cases = {
      {{0, 20, 10, 40}, {0, 20, 20, 40}},  {{-5, 12, 12, 40}, {0, 12, 12, 40}},
      {{low, 7, high, 3}, {0, 7, 40, 40}}, {{0, 41, 60, 20}, {0, 40, 40, 40}},
      {{0, 40, 0, 40}, {0, 40, 40, 40}},   {{30, 20, 10, 0}, {30, 30, 30, 30}},
  };
  // By both kernels; on the CPU each case meets one type, and each type half of them by fa2.
  std::size_t type = 0;
  each_type([&]<class T>(T) {
    std::size_t n = 0;
    for (const auto& [given, meant] : cases)
      for (bool keys : {false, true}) {
        if (!meets(n++, type)) continue;
        for (const walk::Kernel kernel : {walk::Kernel::best, walk::Kernel::fa2}) {
          const bool fa2 = kernel == walk::Kernel::fa2;
          if (sizeof(T) == 4 ? fa2 : sized(0, 1) == 1 && fa2 != (n / 3 % 2 == 1)) continue;
          Batch good = same({10, 10, 20}, Causal::top_left), bad = good;
          good.kernel = bad.kernel = kernel;
          good.Nq = good.Nk = bad.Nq = bad.Nk = 40;
          (keys ? good.keys : good.queries) = meant;
          (keys ? bad.keys : bad.queries) = given;
          ForwardCase<T> x(good.spec(), true), y(good.spec(), true);
          BackwardCase<T> g(good.spec()), h(good.spec());
          EXPECT_EQ(run(x, good) + run(y, bad) + run(g, good) + run(h, bad), "");
          EXPECT_EQ(y.check_memory_untouched() + h.check_memory_untouched(), "");
          EXPECT_TRUE(bits(x) == bits(y) && bits(g) == bits(h)) << bad.name();
        }
      }
    ++type;
  });
}

// ---- the list of tiles ----

struct Listed {
  std::vector<walk::Work> work;
  std::vector<std::int32_t> offsets;
};
Listed list_of(const Batch& batch, const walk::Side& side, Order order) {
  const Problem p = problem_of(batch);
  Offsets q = batch.queries, k = batch.keys, clean(2 * q.size() + 1, -1);
  std::vector<walk::Work> work(std::size_t(side.most(p)), walk::Work{{-7, -7, -7, -7}, -7, -7});
  std::vector<Storage> all;
  for (Offsets* x : {&q, &k, &clean}) all.push_back({x->data(), x->size() * 4});
  all.push_back({work.data(), work.size() * sizeof(walk::Work)});
  const DeviceCopy copy(all);
  walk::launch_offsets(p, {copy.at(q.data()), copy.at(k.data())}, copy.at(clean.data()), nullptr);
  const walk::List list{copy.at(work.data()), int(work.size())};
  walk::launch_lists(p, copy.at(clean.data()), {{{side, order, list}}, 1}, nullptr);
  FA_CUDA_CHECK(cudaDeviceSynchronize());
  copy.copy_back();
  const auto behind =
      std::find_if(work.begin(), work.end(), [](const walk::Work& w) { return w.tile < 0; });
  for (auto w = behind; w != work.end(); ++w) EXPECT_EQ(w->tile, -1);
  work.erase(behind, work.end());
  return {work, clean};
}

// What a tile passes over, by core's mask.
Int work_of(const Batch& batch, const walk::Side& side, const walk::Work& w) {
  Problem p;
  p.Nq = w.Nq, p.Nk = w.Nk, p.causal = batch.causal;
  const Mask mask(p, 0);
  const Int size = side.size_in(side.keys ? w.Nk : w.Nq), first = Int(w.tile) * size;
  return side.keys ? p.Nq - mask.first_row(first)
                   : mask.visible_keys(std::min(first + size, p.Nq) - 1);
}

void expect_list(const Batch& batch, const walk::Side& side, Order order) {
  const auto [list, clean] = list_of(batch, side, order);
  const Offsets &q = batch.queries, &k = batch.keys;
  Offsets both = q;
  both.insert(both.end(), k.begin(), k.end());
  both.push_back(0);  // for who counts
  EXPECT_EQ(clean, both);
  // Each tile once, with what its block must know.
  std::vector<std::pair<int, int>> want, got;
  std::vector<Int> longest(q.size());
  for (std::size_t b = 0; b + 1 < q.size(); ++b) {
    const int n = side.keys ? k[b + 1] - k[b] : q[b + 1] - q[b];
    for (int tile = 0; tile * side.size_in(n) < n; ++tile) want.emplace_back(int(b), tile);
  }
  for (const walk::Work& w : list) {
    got.emplace_back(w.number, w.tile);
    const auto b = std::size_t(w.number);
    ASSERT_LT(b + 1, q.size());
    EXPECT_TRUE(w.q0 == q[b] && w.Nq == q[b + 1] - q[b] && w.k0 == k[b] && w.Nk == k[b + 1] - k[b]);
    longest[b] = std::max(longest[b], work_of(batch, side, w));
  }
  std::sort(got.begin(), got.end());
  EXPECT_EQ(got, want) << batch.name();
  // By work.
  const auto key = [&](const walk::Work& w) {
    const Int work = work_of(batch, side, w), top = longest[std::size_t(w.number)];
    if (order == Order::sequences) return std::tuple(-top, w.number, -work);
    if (order == Order::tiles) return std::tuple(-work, w.number, Int(0));
    return std::tuple(Int(0), w.number, -work);
  };
  for (std::size_t n = 1; n < list.size(); ++n)
    EXPECT_LE(key(list[n - 1]), key(list[n])) << n << " of " << batch.name();
}

TEST_F(packed, EveryTileOnceAndByWork) {
  std::mt19937_64 random(3);
  const auto lengths = [&](int n) {
    std::vector<int> all;
    all.reserve(std::size_t(n));
    for (int b = 0; b < n; ++b) all.push_back(random() % 5 == 0 ? 0 : int(random() % 90));
    return all;
  };
  for (int n : {1, 2, 7, 40, 70})
    for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      const std::vector<int> q = lengths(n), k = n % 2 ? q : lengths(n);
      const Batch batch = two(q, k, causal);
      for (bool keys : {false, true})
        for (Order order : {Order::sequences, Order::tiles, Order::given})
          expect_list(batch, {keys, n > 7 ? 64 : 16}, order);
    }
}

// In a long sequence tiles are taller.
TEST_F(packed, EveryTallTileOnceAndByWork) {
  for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (Order order : {Order::sequences, Order::tiles, Order::given})
      for (bool keys : {false, true})
        expect_list(two({2000, 20, 1025, 1024, 0, 1300}, {1900, 20, 1100, 1024, 5, 1200}, causal),
                    {keys, 128, 192}, order);
}

TEST_F(packed, OrderByHand) {
  const Batch batch = same({20, 50, 33}, Causal::bottom_right);
  const auto order = [&](Order o) {
    std::vector<std::pair<int, int>> all;
    for (const walk::Work& w : list_of(batch, {false, 16}, o).work)
      all.emplace_back(w.number, w.tile);
    return all;
  };
  using All = std::vector<std::pair<int, int>>;
  // Sequence 1 has tiles that see 16, 32, 48 and 50 keys; 2 has 16, 32 and 33; 0 has 16 and 20.
  EXPECT_EQ(order(Order::sequences),
            (All{{1, 3}, {1, 2}, {1, 1}, {1, 0}, {2, 2}, {2, 1}, {2, 0}, {0, 1}, {0, 0}}));
  EXPECT_EQ(order(Order::tiles),
            (All{{1, 3}, {1, 2}, {2, 2}, {1, 1}, {2, 1}, {0, 1}, {0, 0}, {1, 0}, {2, 0}}));
  EXPECT_EQ(order(Order::given),
            (All{{0, 1}, {0, 0}, {1, 3}, {1, 2}, {1, 1}, {1, 0}, {2, 2}, {2, 1}, {2, 0}}));
}

// ---- no sequence feels another: bit by bit ----

// A tensor's rows of one sequence, in a buffer of their own.
template <class T>
Buffer<T> part_of(const Buffer<T>& x, Int first, Int n) {
  Buffer<T> part(1, x.H(), n, x.d());
  part.fill([&](Int, Int h, Int i, Int e) { return double(x.at(0, h, first + i, e)); });
  return part;
}

// What the kernel that the walk comes from makes of one problem.
template <class T>
void plain(const Problem& p, const Forward<T>& t, walk::Kernel kernel) {
  const float scale = float(p.softmax_scale());
  if constexpr (std::is_same_v<T, float>)
    cuda_forward::launch_tiled(p, t, scale, nullptr);
  else if (kernel == walk::Kernel::fa2)
    optimized::launch_fa2(p, as_device<Device<T>>(t), scale, nullptr);
  else
    optimized::launch_hopper(p, as_device<Device<T>>(t), scale, nullptr, nullptr, false);
}
template <class T>
void plain(const Problem& p, const Backward<T>& t, walk::Kernel kernel) {
  if constexpr (sizeof(T) == 2)
    if (kernel == walk::Kernel::hopper) {
      optimized::BackwardOptions options;
      options.kernel = optimized::BackwardKernel::hopper;
      const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
      options.scratch = scratch;
      optimized::backward(p, as_device<Device<T>>(t), options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
      return;
    }
  const Int rows = walk::Passed::padded_rows(p.Nq);
  const DeviceMemory scratch(std::size_t(2 * p.B * p.Hq * rows) * sizeof(float));
  float* const D = scratch.as<float>();
  if constexpr (std::is_same_v<T, float>) {
    cuda_backward::Options options;
    options.tiles = cuda_backward::Tiles::lesson;
    options.scratch = scratch;
    cuda_backward::backward<float>(p, t, options);
  } else {
    walk::Passed passed{};
    passed.rows = rows;
    passed.LSE2 = D, passed.D = D + p.B * p.Hq * rows;
    optimized::launch_backward_swizzle(p, as_device<Device<T>>(t), float(p.softmax_scale()), passed,
                                       nullptr);
  }
  FA_CUDA_CHECK(cudaDeviceSynchronize());
}

template <class T>
void expect_one_by_one(const Batch& batch) {
  ForwardCase<T> f(batch.spec(), true);
  BackwardCase<T> g(batch.spec());
  ASSERT_EQ(run(f, batch) + run(g, batch), "");
  for (Int b = 0; b < batch.B(); ++b) {
    const auto at = std::size_t(b);
    const Int q0 = batch.queries[at], k0 = batch.keys[at];
    const Int Nq = batch.queries[at + 1] - q0, Nk = batch.keys[at + 1] - k0;
    const std::string name = "sequence " + std::to_string(b) + " of " + batch.name() + ", " +
                             std::to_string(sizeof(T)) + " bytes";
    if (Nq == 0 || Nk == 0) continue;
    const Batch alone = two({int(Nq)}, {int(Nk)}, batch.causal, batch.Hq, batch.Hkv, batch.d);
    Spec s = alone.spec();
    s.p.causal = batch.causal;
    s.hooks = {};
    ForwardCase<T> one(s, true);
    one.Q = part_of(f.Q, q0, Nq);
    one.K = part_of(f.K, k0, Nk), one.V = part_of(f.V, k0, Nk);
    on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) { plain(p, t, batch.kernel); })(
        one.call());
    EXPECT_TRUE(as_plain<T>(one.O, 0, f.O, q0, Nq)) << name;
    BackwardCase<T> back(s);
    back.Q = part_of(g.Q, q0, Nq), back.O = part_of(g.O, q0, Nq), back.dO = part_of(g.dO, q0, Nq);
    back.K = part_of(g.K, k0, Nk), back.V = part_of(g.V, k0, Nk);
    back.LSE = part_of(g.LSE, q0, Nq);
    EXPECT_TRUE(as_plain<T>(one.LSE, 0, f.LSE, q0, Nq)) << name;
    on_gpu_backward<T>([&](const Problem& p, const Backward<T>& t) { plain(p, t, batch.kernel); })(
        back.call());
    EXPECT_TRUE(as_plain<T>(back.dQ, 0, g.dQ, q0, Nq) && as_plain<T>(back.dK, 0, g.dK, k0, Nk) &&
                as_plain<T>(back.dV, 0, g.dV, k0, Nk))
        << "backward, " << name;
    if constexpr (sizeof(T) == 4) {
      ASSERT_EQ(run(one, alone) + run(back, alone), "");
      EXPECT_TRUE(same_rows(one.O, 0, f.O, q0, Nq) && same_rows(one.LSE, 0, f.LSE, q0, Nq)) << name;
      EXPECT_TRUE(same_rows(back.dQ, 0, g.dQ, q0, Nq) && same_rows(back.dK, 0, g.dK, k0, Nk) &&
                  same_rows(back.dV, 0, g.dV, k0, Nk))
          << "backward, " << name;
    }
  }
}

// fp32 has one kernel; on the CPU each kernel meets a batch in fp16 and another one in bf16.
TEST_F(packed, PackedIsOneByOne) {
  std::vector<walk::Kernel> kernels = {walk::Kernel::fa2};
  if (optimized::device_capability() == 90) kernels.push_back(walk::Kernel::hopper);
  for (const walk::Kernel kernel : kernels)
    each_type([&]<class T>(T) {
      const bool fa2 = kernel == walk::Kernel::fa2, all = sized(1, 0) == 1;
      if (sizeof(T) == 4 && !fa2) return;
      const int q = all ? 150 : fa2 ? 70 : 135, k = all || !fa2 ? 131 : 80;
      Batch many = two({30, 1, q}, {30, 40, k}, Causal::bottom_right, 2, 1, 24);
      Batch few = same({int(sized(70, 40)), 9}, Causal::none, 1, 1, 72);
      many.kernel = few.kernel = kernel;
      const bool takes_many = std::is_same_v<T, half> == fa2;
      if (sizeof(T) == 4 || all || takes_many) expect_one_by_one<T>(many);
      if (sizeof(T) == 4 || all || !takes_many) expect_one_by_one<T>(few);
    });
}

TEST_F(packed, EqualLengthsAreTheBatch) {
  each_type([]<class T>(T) {
    const Int B = 3, N = 35;
    Batch batch = same({35, 35, 35}, Causal::top_left, 2, 1, 16);
    batch.kernel = walk::Kernel::fa2;
    ForwardCase<T> f(batch.spec(), true);
    ASSERT_EQ(run(f, batch), "");
    Spec s = batch.spec();
    s.p.B = B, s.p.Nq = s.p.Nk = N, s.p.causal = batch.causal;
    s.hooks = {};
    ForwardCase<T> whole(s, true);
    for (auto [to, from] : {std::pair{&whole.Q, &f.Q}, {&whole.K, &f.K}, {&whole.V, &f.V}})
      to->fill(
          [&, &x = *from](Int b, Int h, Int i, Int e) { return double(x.at(0, h, b * N + i, e)); });
    on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) { plain(p, t, batch.kernel); })(
        whole.call());
    Buffer<T> O(1, 2, B * N, 16);
    O.fill([&](Int, Int h, Int i, Int e) { return double(whole.O.at(i / N, h, i % N, e)); });
    EXPECT_TRUE(as_plain<T>(O, 0, f.O, 0, B * N));
    Buffer<float> LSE(1, 2, B * N, 1);
    LSE.fill([&](Int, Int h, Int i, Int) { return double(whole.LSE.at(i / N, h, i % N)); });
    EXPECT_TRUE(as_plain<T>(LSE, 0, f.LSE, 0, B * N));
  });
}

TEST_F(packed, AnotherOrderOfSequencesGivesTheSameBits) {
  each_type([]<class T>(T) {
    const std::vector<int> lengths = {33, 2, 0, 20, 47}, order = {3, 4, 0, 2, 1};
    std::vector<int> shuffled;
    shuffled.reserve(order.size());
    for (int b : order) shuffled.push_back(lengths[std::size_t(b)]);
    const Int heads = sized(2, 1);
    const Batch a = same(lengths, Causal::bottom_right, heads, heads, 8),
                b = same(shuffled, a.causal, heads, heads, 8);
    ForwardCase<T> f(a.spec(), true), f2(b.spec(), true);
    BackwardCase<T> g(a.spec()), g2(b.spec());
    // each(first in b, first in a, length)
    const auto each = [&](const auto& what) {
      for (std::size_t n = 0; n < order.size(); ++n)
        what(b.queries[n], a.queries[std::size_t(order[n])], shuffled[n]);
    };
    const auto move = [&](auto& to, const auto& from) {
      const auto before = to;
      to.fill([&](Int, Int h, Int i, Int e) {
        double value = double(before.at(0, h, i, e));
        each([&](Int there, Int here, Int n) {
          if (i >= there && i < there + n) value = double(from.at(0, h, here + i - there, e));
        });
        return value;
      });
    };
    move(f2.Q, f.Q), move(f2.K, f.K), move(f2.V, f.V);
    move(g2.Q, g.Q), move(g2.K, g.K), move(g2.V, g.V), move(g2.O, g.O), move(g2.dO, g.dO);
    move(g2.LSE, g.LSE);
    ASSERT_EQ(run(f, a) + run(f2, b) + run(g, a) + run(g2, b), "");
    each([&](Int there, Int here, Int n) {
      EXPECT_TRUE(same_rows(f2.O, there, f.O, here, n) && same_rows(f2.LSE, there, f.LSE, here, n));
      EXPECT_TRUE(same_rows(g2.dQ, there, g.dQ, here, n) &&
                  same_rows(g2.dK, there, g.dK, here, n) && same_rows(g2.dV, there, g.dV, here, n));
    });
  });
}

TEST_F(packed, AnyOrderOfTilesGivesTheSameBitsAndSoDoesAnyRun) {
  each_type([]<class T>(T) {
    const Batch batch = same({9, 40, 17}, Causal::bottom_right, sized(2, 1), 1, 8);
    ForwardCase<T> f(batch.spec(), true);
    BackwardCase<T> g(batch.spec());
    ASSERT_EQ(run(f, batch) + run(g, batch), "");
    const std::vector<char> O = bits(f), dQ = bits(g);
    for (Order order : {Order::sequences, Order::tiles, Order::given}) {
      ASSERT_EQ(run(f, batch, order) + run(g, batch, order), "");
      EXPECT_TRUE(bits(f) == O && bits(g) == dQ) << int(order);
    }
  });
}

// A sequence full of NaN leaves its neighbours as they are.
TEST_F(packed, NaNStaysInItsSequence) {
  each_type([]<class T>(T) {
    const Batch batch = same({9, 20, 13}, Causal::bottom_right, 1, 1, 8);
    const auto inside = [](Int i) { return i >= 9 && i < 29; };
    const auto put_nan = [&](Buffer<T>& x) {
      const Buffer<T> before = x;
      x.fill([&](Int b, Int h, Int i, Int e) {
        return inside(i) ? std::nan("") : double(before.at(b, h, i, e));
      });
    };
    ForwardCase<T> f(batch.spec(), true), f2(batch.spec(), true);
    BackwardCase<T> g(batch.spec()), g2(batch.spec());
    put_nan(f2.Q), put_nan(f2.K), put_nan(f2.V);
    put_nan(g2.Q), put_nan(g2.K), put_nan(g2.V), put_nan(g2.dO);
    ASSERT_EQ(run(f, batch) + run(f2, batch) + run(g, batch) + run(g2, batch), "");
    for (auto [first, n] : {std::pair<Int, Int>{0, 9}, {29, 13}}) {
      EXPECT_TRUE(same_rows(f.O, first, f2.O, first, n) &&
                  same_rows(f.LSE, first, f2.LSE, first, n));
      EXPECT_TRUE(same_rows(g.dQ, first, g2.dQ, first, n) &&
                  same_rows(g.dK, first, g2.dK, first, n) &&
                  same_rows(g.dV, first, g2.dV, first, n));
    }
    for (Int i = 9; i < 29; ++i)
      for (Int e = 0; e < 8; ++e)
        EXPECT_TRUE(std::isnan(double(f2.O.at(0, 0, i, e)))) << i << " " << e;
  });
}

// ---- at random, and by another way ----

// At random, with d up to so much; every `unit` a size of heads and strides, as hopper wants it.
Batch any_batch(std::mt19937_64& random, Int most, Int most_d, Int unit) {
  const auto up_to = [&](Int n) { return Int(random() % std::uint64_t(n + 1)); };
  Batch batch;
  const Int B = 1 + up_to(5);
  std::vector<int> q, k;
  for (Int b = 0; b < B; ++b) {
    q.push_back(int(up_to(most)));
    k.push_back(up_to(1) ? q.back() : int(up_to(most)));
  }
  batch.queries = offsets_of(q, int(up_to(3)));
  batch.keys = offsets_of(k, int(up_to(3)));
  batch.causal = Causal(up_to(2));
  batch.Hkv = 1 + up_to(1);
  batch.Hq = batch.Hkv * (1 + up_to(1));
  batch.d = unit * (1 + up_to(most_d / unit - 1));
  batch.seed = random();
  batch.layout.order = up_to(1) ? Layout::Order::BNHD : Layout::Order::BHND;
  batch.layout.gap = up_to(1);
  batch.layout.in_16_bytes = unit > 1;
  batch.told = up_to(1) != 0;
  batch.deterministic = unit == 1 && up_to(1) != 0;
  return batch;
}

// The first offsets leave out tokens, of which nothing is written: the oracle has 0 there.
template <class T>
void expect_any_right(const Batch& batch) {
  ForwardCase<T> f(batch.spec(), true);
  BackwardCase<T> g(batch.spec());
  std::string text = run(f, batch) + run(g, batch);
  for (Int h = 0; h < batch.Hq; ++h)
    for (Int i = 0; i < batch.queries[0]; ++i) {
      for (Int e = 0; e < batch.d; ++e) f.O.at(0, h, i, e) = g.dQ.at(0, h, i, e) = T(0);
      f.LSE.at(0, h, i) = -INFINITY;
    }
  for (Int h = 0; h < batch.Hkv; ++h)
    for (Int j = 0; j < batch.keys[0]; ++j)
      for (Int e = 0; e < batch.d; ++e) g.dK.at(0, h, j, e) = g.dV.at(0, h, j, e) = T(0);
  text += f.verdict() + g.verdict();
  EXPECT_EQ(text, "") << batch.name() << ", " << sizeof(T) << " bytes";
}

// On the CPU each batch meets one type.
TEST_F(packed, Fuzz) {
  std::mt19937_64 random(11);
  for (std::size_t n = 0; n < std::size_t(sized(60, 8)); ++n) {
    const Batch batch = any_batch(random, sized(100, 32), 48, 1);
    if (meets(n, 0)) expect_any_right<float>(batch);
#ifndef FA_WITHOUT_HALF
    if (meets(n, 1)) expect_any_right<half>(batch);
    if (meets(n, 2)) expect_any_right<bf16>(batch);
#endif
  }
}
#ifndef FA_WITHOUT_HALF
TEST_F(packed, FuzzByHopper) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << without_hopper;
  std::mt19937_64 random(12);
  for (int n = 0; n < int(sized(60, 8)); ++n) {
    const Batch batch = for_hopper(any_batch(random, sized(200, 70), n % 2 ? 64 : 128, 8));
    n % 4 < 2 ? expect_any_right<bf16>(batch) : expect_any_right<half>(batch);
  }
}
#endif

// The gradient by its definition: how the loss sum dO O changes with each number, in double.
TEST_F(packed, GradientsAreDifferences) {
  const Batch batch = two({3, 1, 4}, {4, 2, 3}, Causal::bottom_right, 1, 1, 4);
  BackwardCase<float> c(batch.spec());
  ASSERT_EQ(run(c, batch), "");
  const Spec s = batch.spec();
  Array Q = to_array(c.Q), K = to_array(c.K), V = to_array(c.V);
  const Array dO = to_array(c.dO);
  const auto loss = [&] {
    const ForwardOracle f = oracle_forward(s.p, Q, K, V, {}, s.hooks);
    return std::inner_product(f.O.data.begin(), f.O.data.end(), dO.data.begin(), 0.0);
  };
  for (auto [x, got] : {std::pair{&Q, &c.dQ}, {&K, &c.dK}, {&V, &c.dV}}) {
    std::vector<double*> all;
    for (double& number : x->data) all.push_back(&number);
    const std::vector<double> want = central_differences(all, loss);
    const Array is = to_array(*got);
    for (std::size_t n = 0; n < want.size(); ++n) EXPECT_NEAR(is.data[n], want[n], 2e-5) << n;
  }
}

// ---- what is promised besides ----

TEST_F(packed, LSEMayBeNull) {
  each_type([]<class T>(T) {
    const Batch batch = same({9, 20}, Causal::bottom_right);
    ForwardCase<T> c(batch.spec(), false);
    EXPECT_EQ(run(c, batch), "");
    EXPECT_EQ(c.verdict(), "");
  });
}

TEST_F(packed, WorkIsPutOnTheStreamAndNobodyWaits) {
  each_type([]<class T>(T) {
    const Batch batch = same({9, 20}, Causal::bottom_right);
    Offsets q = batch.queries;
    const DeviceCopy offsets({{q.data(), q.size() * sizeof(std::int32_t)}});
    const walk::Sequences s{offsets.at(q.data()), offsets.at(q.data())};
    const DeviceMemory scratch(1 << 18);
    const auto on_stream = [&](Problem p, const auto& t, cudaStream_t stream) {
      p.B = batch.B(), p.causal = batch.causal;
      const Options options{Order::automatic, stream, scratch};
      if constexpr (requires { t.dQ; })
        walk::backward(p, s, as_device<Device<T>>(t), options);
      else
        walk::forward(p, s, as_device<Device<T>>(t), options);
    };
    ForwardCase<T> f(batch.spec(), true);
    EXPECT_EQ(on_its_stream(f.call(), on_stream), "");
    EXPECT_EQ(f.verdict(), "");
    BackwardCase<T> g(batch.spec());
    EXPECT_EQ(on_its_stream(g.call(), on_stream), "");
    EXPECT_EQ(g.verdict(), "");
  });
}

TEST_F(packed, NothingToDo) {
  each_type([]<class T>(T) {
    Batch none = same({}), no_heads = same({5}), no_queries = two({0, 0}, {3, 4}),
          nothing = two({0}, {0});
    no_heads.Hq = no_heads.Hkv = 0;
    Batch only_keys = same({5, 20});
    only_keys.Hq = 0;
    for (const Batch& batch : {none, no_heads, no_queries, nothing, only_keys}) {
      ForwardCase<T> f(batch.spec(), true);
      BackwardCase<T> g(batch.spec());
      EXPECT_EQ(run(f, batch) + run(g, batch), "");
      EXPECT_EQ(f.verdict() + g.verdict(), "") << batch.name();
    }
  });
}

TEST_F(packed, ScratchIsCounted) {
  Problem p = problem_of(same({1000, 600, 0}, Causal::none, 4, 2, 64));
  // Offsets of queries and keys; 16 rows a tile: 1600 / 16 + 3 tiles. Multiples of 16.
  EXPECT_EQ(walk::scratch_bytes<float>(p), 48u + (100u + 3u) * 24u + 8u);
  EXPECT_EQ(walk::scratch_bytes<__half>(p), 48u + (12u + 3u) * 24u + 8u);
  p.B = 0;
  EXPECT_EQ(walk::scratch_bytes<float>(p), 0u);
}

TEST_F(packed, RefusesInWords) {
  const Batch batch = same({9, 20}, Causal::bottom_right, 2, 1, 16);
  ForwardCase<float> c(batch.spec(), true);
  BackwardCase<float> g(batch.spec());
  const ForwardCall<float> call = c.call();
  const BackwardCall<float> back = g.call();
  Offsets q = batch.queries;
  std::vector<std::int64_t> memory(1 << 12);
  const auto why = [&](const auto& change) {
    Problem p = problem_of(batch);
    Forward<float> t = call.t;
    walk::Sequences s{q.data(), q.data()};
    Options options;
    options.scratch = {memory.data(), memory.size() * 8};
    change(p, s, t, options);
    return refusal([&] { walk::forward<float>(p, s, t, options); });
  };
  using P = Problem&;
  using S = walk::Sequences&;
  using T = Forward<float>&;
  using O = Options&;
  expect_words(why([](P p, S, T, O) { p.B = -1; }), {"packed: B, the number of sequences", "-1"});
  expect_words(why([](P p, S, T, O) { p.d = 129; }), {"packed: d must lie in [1, 128], got 129"});
  expect_words(why([](P p, S, T, O) { p.Hkv = 3; }), {"Hq must be a multiple of Hkv"});
  const Int length = 5;
  expect_words(why([&](P p, S, T, O) { p.key_lengths = &length; }),
               {"packed: key_lengths must be null; the offsets say where sequences end"});
  expect_words(why([](P p, S, T, O) { p.Nk = (1 << 29) + 1; }),
               {"must be at most 2^29, got 29 and 536870913"});
  expect_words(why([](P p, S, T, O) { p.B = (1 << 29) + 1; }),
               {"packed: B, the number of sequences, must lie in [0, 2^29], got 536870913"});
  expect_words(why([](P p, S, T, O) { p.B = 1 << 29; }),
               {"Hq (max(Nq, Nk) / 16 + B) must be at most 2^30", "B = 536870912"});
  expect_words(why([](P, S s, T, O) { s.queries = nullptr; }),
               {"packed: queries is a null pointer; it needs B + 1 = 3 offsets"});
  expect_words(why([](P, S s, T, O) { s.keys = nullptr; }), {"packed: keys is a null pointer"});
  expect_words(why([&](P, S s, T, O) {
                 s.keys = reinterpret_cast<std::int32_t*>(reinterpret_cast<char*>(q.data()) + 1);
               }),
               {"packed: keys must be aligned to its element, 4 bytes"});
  const Offsets negative = {-1, 9, 29}, falling = {0, 9, 8}, far = {0, 9, 30};
  expect_words(why([&](P, S s, T, O) { s.queries_on_host = negative.data(); }),
               {"packed: queries[0] must not be negative, got -1"});
  expect_words(why([&](P, S s, T, O) { s.queries_on_host = falling.data(); }),
               {"packed: queries[2] must be at least queries[1] = 9, got 8"});
  expect_words(why([&](P, S s, T, O) { s.keys_on_host = far.data(); }),
               {"packed: keys[2] must be at most Nk = 29, got 30"});
  expect_words(why([](P, S, T t, O) { t.Q.data = nullptr; }), {"packed: Q is a null pointer"});
  expect_words(why([](P, S, T t, O) { t.O.data = const_cast<float*>(t.Q.data); }),
               {"packed: O overlaps Q"});
  expect_words(why([](P, S, T t, O) { t.O.head = 0; }), {"packed: two rows of O share memory"});
  expect_words(why([](P p, S, T, O) { p.scale = INFINITY; }), {"packed: scale must be finite"});
  expect_words(why([](P, S, T, O o) { o.scratch = {}; }),
               {"packed needs scratch_bytes() = ", " bytes of scratch, got null"});
  expect_words(why([](P, S, T, O o) { o.scratch.bytes = 5; }), {" bytes of scratch, got 5"});
  expect_words(why([](P, S, T, O o) { o.order = Order(7); }),
               {"packed: order has the unknown value 7"});
  expect_words(why([](P, S, T, O o) { o.kernel = walk::Kernel(7); }),
               {"packed: kernel has the unknown value 7"});
  const auto why_back = [&](const auto& change) {
    Problem p = problem_of(batch);
    Backward<float> t = back.t;
    Options options;
    options.scratch = {memory.data(), memory.size() * 8};
    change(t, options);
    return refusal([&] { walk::backward<float>(p, {q.data(), q.data()}, t, options); });
  };
  using G = Backward<float>&;
  expect_words(why_back([](G t, O) { t.LSE = nullptr; }), {"packed: LSE must not be null"});
  expect_words(why_back([](G t, O) { t.O.data = nullptr; }), {"packed: O must not be null"});
  expect_words(why_back([](G t, O) { t.dV = t.dK; }), {"packed: dV overlaps dK"});
  expect_words(why_back([](G, O o) { o.scratch.bytes = 5; }),
               {"packed needs backward_scratch_bytes() = "});
}
#ifndef FA_WITHOUT_HALF
TEST_F(packed, TensorCoresWantAPositiveScale) {
  Batch batch = same({5});
  batch.scale = -0.125;
  ForwardCase<bf16> c(batch.spec(), true);
  expect_words(refusal([&] { run(c, batch); }), {"packed: scale must be > 0 in fp32, got -0.125"});
}
#endif

// ---- what only the CPU can do, or only a GPU ----

#ifdef FA_EMULATED
// Each head dimension's tile fits, in fp32 forward and backward.
TEST_F(packed, WithTheSharedMemoryOfAT4) {
  const emulator::WithSharedMemory until_the_end(64 << 10);
  for (Int d : {32, 64, 128})
    EXPECT_EQ(verdict_of<float>(same({70, 9}, Causal::none, 1, 1, d)), "");
}
// What is copied comes as early as it may, and at random times; late in all other tests.
TEST_F(packed, EarlyAndAtRandom) {
  using emulator::Timing;
  each_type([]<class T>(T) {
    for (const emulator::Schedule& now :
         {emulator::Schedule{Timing::early, 0}, {Timing::random, 1}, {Timing::random, 2}}) {
      const emulator::WithSchedule until_the_end(now);
      EXPECT_EQ(verdict_of<T>(same({9, 70}, Causal::bottom_right, 1, 1, 16)), "") << now.seed;
    }
  });
}
#ifndef FA_WITHOUT_HALF
// The tall tiles of a long sequence, and short ones, in which two groups of three have no rows.
TEST_F(packed, HopperWithShortOnesBehindALongOne) {
  if (optimized::device_capability() != 90) GTEST_SKIP() << without_hopper;
  using emulator::Timing;
  Batch batch =
      for_hopper(two({1100, 6, 29, 70, 6}, {200, 6, 29, 200, 150}, Causal::bottom_right, 1, 1, 64));
  batch.told = true;
  for (unsigned seed = 0; seed <= 8; ++seed) {
    const emulator::Schedule now{seed ? Timing::random : Timing::late, seed};
    const emulator::WithSchedule until_the_end(now);
    ForwardCase<bf16> c(batch.spec(), true);
    EXPECT_EQ(run(c, batch), "");
    EXPECT_EQ(c.verdict(), "") << now.seed;
  }
}
#endif
#else
// Recorded once, and replayed with other lengths: no number of the host's depends on them.
TEST_F(packed, ARecordedCallReplaysWithOtherLengths) {
  const Batch first = same({300, 17, 64, 0}, Causal::bottom_right, 4, 2, 64),
              second = same({1, 250, 0, 130}, Causal::bottom_right, 4, 2, 64);
  ForwardCase<bf16> a(first.spec(), true), b(second.spec(), true);
  const ForwardCall<bf16> call = a.call();
  Offsets q = first.queries;
  std::vector<Storage> all = call.storage;
  all.push_back({q.data(), q.size() * sizeof(std::int32_t)});
  const DeviceCopy copy(all);
  const DeviceMemory scratch(1 << 24);
  cudaStream_t stream = nullptr;
  FA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto f = [&] {
    const std::int32_t* const at = copy.at(q.data());
    walk::forward(problem_of(first), {at, at}, as_device<__nv_bfloat16>(on_device(copy, call.t)),
                  {Order::automatic, stream, scratch});
  };
  f();  // modules are loaded at the first call, which a recording does not allow
  FA_CUDA_CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  FA_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  f();
  FA_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t replay = nullptr;
  FA_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  for (const Batch* batch : {&first, &second}) {
    q = batch->queries;
    copy.copy_there();
    FA_CUDA_CHECK(cudaGraphLaunch(replay, stream));
    copy.copy_back(stream);
    a.spec.hooks = batch->spec().hooks;  // the numbers are the same, the sequences are not
    EXPECT_EQ(a.verdict(), "") << batch->name();
  }
  FA_CUDA_CHECK(cudaGraphExecDestroy(replay));
  FA_CUDA_CHECK(cudaGraphDestroy(graph));
  FA_CUDA_CHECK(cudaStreamDestroy(stream));
}

// Rows 2^22 numbers apart, so that the last ones lie beyond 2^31.
TEST_F(packed, MoreThanTwoToThe31Numbers) {
  using D = __nv_bfloat16;
  constexpr Int d = 64, apart = Int(1) << 22, tokens = 600;
  const std::size_t bytes = std::size_t(tokens * apart) * sizeof(D);
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  const DeviceMemory memory(bytes);
  Batch batch = same({70, 0, 300, 230}, Causal::bottom_right, 1, 1, d);
  ForwardCase<bf16> f(batch.spec(), true);
  BackwardCase<bf16> g(batch.spec());
  // The tensors lie side by side in every row.
  const auto there = [&](Int n) { return View<D>{memory.as<D>() + n * d, 0, d, apart}; };
  const auto carry = [&](Buffer<bf16>& x, Int n, cudaMemcpyKind kind) {
    for (Int i = 0; i < tokens; ++i) {
      void *const host = &x.at(0, 0, i), *const device = there(n).at(0, 0, i);
      const bool to = kind == cudaMemcpyHostToDevice;
      FA_CUDA_CHECK(cudaMemcpy(to ? device : host, to ? host : device, d * sizeof(D), kind));
    }
  };
  const auto to = cudaMemcpyHostToDevice, from = cudaMemcpyDeviceToHost;
  f.call(), g.call();  // poisons
  Offsets q = batch.queries;
  const DeviceCopy copy({{q.data(), q.size() * 4}, f.LSE.storage(), g.LSE.storage()});
  const walk::Sequences s{copy.at(q.data()), copy.at(q.data())};
  const DeviceMemory scratch(1 << 24);
  const Options options{Order::automatic, nullptr, scratch};
  carry(f.Q, 0, to), carry(f.K, 1, to), carry(f.V, 2, to);
  walk::forward<D>(problem_of(batch), s,
                   {there(0), there(1), there(2), there(3), copy.at(f.LSE.view()).data}, options);
  FA_CUDA_CHECK(cudaDeviceSynchronize());
  copy.copy_back();
  carry(f.O, 3, from);
  EXPECT_EQ(f.verdict(), "");
  carry(g.Q, 0, to), carry(g.K, 1, to), carry(g.V, 2, to), carry(g.O, 3, to), carry(g.dO, 4, to);
  walk::backward<D>(problem_of(batch), s,
                    {there(0), there(1), there(2), there(3), there(4), copy.at(g.LSE.view()).data,
                     there(5), there(6), there(7)},
                    options);
  FA_CUDA_CHECK(cudaDeviceSynchronize());
  carry(g.dQ, 5, from), carry(g.dK, 6, from), carry(g.dV, 7, from);
  EXPECT_EQ(g.verdict(), "");
}
#endif

}  // namespace
