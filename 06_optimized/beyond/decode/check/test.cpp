// Tests of decode: parts of a head's keys and their merge, pages, what is appended and refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "06_optimized/beyond/decode/decode.hpp"
#include "06_optimized/check/testing.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
namespace walk = fa::decode;
using walk::Options;
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

Spec sized_as(Int B, Int Hq, Int Hkv, Int Nq, Int Nk, Int d, std::vector<Int> lengths = {}) {
  Spec s;
  s.p.B = B, s.p.Hq = Hq, s.p.Hkv = Hkv, s.p.Nq = Nq, s.p.Nk = Nk, s.p.d = d;
  s.lengths = std::move(lengths);
  return s;
}

// How the cache lies, and who has the last tokens.
struct Kept {
  Int page_size = 0;  // 0: contiguous
  bool shuffled = true;
  bool appended = false;  // the last Nq tokens come with the call
  bool causal = true;
};

// Q, K and V as they are meant to be are those of a ForwardCase, and so is the verdict. The cache
// holds them wherever `Kept` says, and NaN wherever nobody may read.
template <class T>
struct Case {
  ForwardCase<T> meant;
  Kept kept;
  Int pages = 0, table_stride = 0;
  std::vector<std::int32_t> table;
  Buffer<T> K, V, before_K, before_V, new_K, new_V;
  std::string fault;  // of the last run: what was written that must not be

  Case(const Spec& s, const Kept& how, std::uint64_t order = 7)
      : meant(with_mask(s, how), true), kept(how) {
    const Problem& p = meant.p;
    if (paged()) {
      table_stride = (p.Nk + kept.page_size - 1) / kept.page_size + 2;
      pages = p.B * table_stride + 2;  // the first and the last one are nobody's
      table.resize(std::size_t(p.B * table_stride));
      std::iota(table.begin(), table.end(), 1);
      if (kept.shuffled) std::shuffle(table.begin(), table.end(), std::mt19937_64(order));
      for (Int b = 0; b < p.B; ++b)  // what a length does not reach leads nowhere
        for (Int n = 0; n < table_stride; ++n)
          if (n * kept.page_size >= length(b)) entry(b, n) = std::int32_t(-1 - n);
    }
    const Int entries = paged() ? pages : p.B, rows = paged() ? kept.page_size : p.Nk;
    K = Buffer<T>(entries, p.Hkv, rows, p.d, with_gap(s.layout, 1));
    V = Buffer<T>(entries, p.Hkv, rows, p.d, with_gap(s.layout, 2));
    fill();
    if (!kept.appended) return;
    new_K = Buffer<T>(p.B, p.Hkv, p.Nq, p.d, with_gap(s.layout, 4));
    new_V = Buffer<T>(p.B, p.Hkv, p.Nq, p.d, with_gap(s.layout, 3));
    const auto last_of = [this](const Buffer<T>& X) {
      return [this, &X](Int b, Int h, Int i, Int x) {
        const Int j = length(b) - meant.p.Nq + i;
        return j < 0 ? std::nan("") : double(X.at(b, h, j, x));
      };
    };
    new_K.fill(last_of(meant.K));
    new_V.fill(last_of(meant.V));
  }

  bool paged() const { return kept.page_size > 0; }
  Int length(Int b) const {
    const Int n = meant.spec.lengths.empty() ? meant.p.Nk : meant.spec.lengths[std::size_t(b)];
    return std::clamp<Int>(n, 0, meant.p.Nk);
  }
  std::int32_t& entry(Int b, Int n) { return table[std::size_t(b * table_stride + n)]; }

  // The cache as it is before the call.
  void fill() {
    K.poison();
    V.poison();
    const Int there = kept.appended ? meant.p.Nq : 0;
    put(K, meant.K, there);
    put(V, meant.V, there);
    before_K = K;
    before_V = V;
  }

  // One call; returns the number of parts. Its scratch is NaN before, with a strip behind it.
  int run(int splits) {
    K = before_K;
    V = before_V;
    const ForwardCall<T> call = meant.call();
    std::vector<Storage> all = call.storage;
    for (Buffer<T>* x : {&K, &V, &new_K, &new_V}) all.push_back(x->storage());
    all.push_back({table.data(), table.size() * sizeof(std::int32_t)});
    const DeviceCopy copy(all);
    Problem p = call.p;
    p.key_lengths = copy.at(p.key_lengths);
    Options options;
    options.causal = kept.causal;
    options.splits = splits;
    const std::size_t bytes = walk::scratch_bytes<Device<T>>(p, options), strip = 256;
    const DeviceMemory scratch(bytes + strip);
    FA_CUDA_CHECK(cudaMemset(scratch.as<void>(), 0xff, bytes + strip));
    options.scratch = {scratch.as<void>(), bytes};
    const int parts = walk::forward(p, tensors(copy, call.t), options);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back();
    std::vector<unsigned char> behind(strip);
    FA_CUDA_CHECK(
        cudaMemcpy(behind.data(), scratch.as<char>() + bytes, strip, cudaMemcpyDeviceToHost));
    fault = changed("K", K, before_K, meant.K) + changed("V", V, before_V, meant.V);
    if (kept.appended) fault += new_K.changed() + new_V.changed();
    if (std::any_of(behind.begin(), behind.end(), [](unsigned char c) { return c != 0xff; }))
      fault += "wrote behind the scratch\n";
    return parts;
  }
  std::string verdict() { return meant.verdict() + fault; }
  // All of O and LSE, bit by bit.
  std::vector<char> bits() {
    std::vector<char> all;
    for (const Storage& s : {meant.O.storage(), meant.LSE.storage()}) {
      const char* const first = static_cast<const char*>(s.data);
      all.insert(all.end(), first, first + s.bytes);
    }
    return all;
  }

  // What the cache's rows are in device memory.
  walk::Tensors<Device<T>> tensors(const DeviceCopy& copy, const Forward<T>& t) {
    using D = Device<T>;
    walk::Tensors<D> all;
    all.Q = as_device<const D>(copy.at(t.Q));
    all.O = as_device<D>(copy.at(t.O));
    all.LSE = copy.at(t.LSE);
    all.cache.K = as_device<D>(copy.at(K.view()));
    all.cache.V = as_device<D>(copy.at(V.view()));
    if (paged()) {
      all.cache.table = copy.at(table.data());
      all.cache.table_stride = table_stride;
      all.cache.page_size = kept.page_size;
      all.cache.pages = pages;
    }
    if (kept.appended) {
      all.new_K = as_device<const D>(copy.at(new_K.view()));
      all.new_V = as_device<const D>(copy.at(new_V.view()));
    }
    return all;
  }

 private:
  // The queries are the last tokens of their sequences.
  static Spec with_mask(Spec s, const Kept& how) {
    if (how.causal)
      s.hooks.visible = [p = s.p, lengths = s.lengths](Int b, Int, Int i, Int j) {
        const Int n = lengths.empty() ? p.Nk : std::clamp<Int>(lengths[std::size_t(b)], 0, p.Nk);
        return j <= n - p.Nq + i;
      };
    return s;
  }
  static Layout with_gap(Layout layout, Int n) {
    if (layout.gap > 0) layout.gap += n;
    return layout;
  }
  // Rows [0, length - without) of every sequence to their places; to none in a page that is not.
  void put(Buffer<T>& to, const Buffer<T>& from, Int without) {
    from.for_each([&](Int b, Int h, Int j, Int x) {
      if (j >= length(b) - without) return;
      if (!paged()) {
        to.at(b, h, j, x) = from.at(b, h, j, x);
        return;
      }
      const Int n = entry(b, j / kept.page_size);
      if (n >= 0 && n < pages) to.at(n, h, j % kept.page_size, x) = from.at(b, h, j, x);
    });
  }
  // All of it, gaps and pages of nobody too, is as before, but for what was to be appended.
  std::string changed(const char* name, Buffer<T>& now, Buffer<T> want, const Buffer<T>& from) {
    if (kept.appended) put(want, from, 0);
    const Storage a = want.storage(), b = now.storage();
    if (a.bytes == 0 || std::memcmp(a.data, b.data, a.bytes) == 0) return "";
    return std::string(name) + " of the cache is not what it must be after the call\n";
  }
};

// Every type: each of these specs, kept so, in so many parts. On the CPU in fp32 and in one of the
// others, which are the same kernel.
void all_right(const std::vector<Spec>& specs, const std::vector<Kept>& ways,
               const std::vector<int>& splits) {
  static int calls = 0;
  for (const Spec& s : specs)
    for (const Kept& how : ways) {
      const bool one = sized(0, 1) == 1, second = calls++ % 2 == 0;
      each_type([&]<class T>(T) {
        if (one && sizeof(T) == 2 && std::is_same_v<T, bf16> != second) return;
        Case<T> c(s, how);
        for (int parts : splits) {
          c.run(parts);
          EXPECT_EQ(c.verdict(), "") << s.name() << ", " << sizeof(T) << " bytes, pages of "
                                     << how.page_size << ", " << parts << " parts";
        }
      });
    }
}

class decode : public GpuTest {};  // the tests' name is the walk's

// ---- one part, and many ----

// Small, and several of everything: parts, tiles of keys, pages, sequences, heads of a group.
TEST_F(decode, Tiles) {
  all_right({sized_as(2, 4, 2, 3, 150, 64, {150, 83})}, {{16, true, true}}, {1, 3});
}

TEST_F(decode, Sizes) {
  all_right(
      {sized_as(1, 1, 1, 1, 1, 8), sized_as(1, 2, 1, 1, 33, 40), sized_as(1, 1, 1, 2, 64, 64),
       sized_as(2, 1, 1, 8, 65, 13), sized_as(1, 3, 3, 4, 130, 100), sized_as(1, 2, 2, 1, 70, 128)},
      {{}}, {1, 2});
}
#ifndef FA_WITHOUT_HALF
TEST_F(decode, WideHeads) {
  for (Int d : {136, 256}) {
    Case<bf16> c(sized_as(1, 2, 1, 3, 140, d), {32, true, true});
    for (int parts : {1, 2}) {
      c.run(parts);
      EXPECT_EQ(c.verdict(), "") << "d = " << d << ", " << parts << " parts";
    }
  }
}
#endif

// Query heads of a group are rows of one tile, or of several if they are more than 16.
TEST_F(decode, Groups) {
  all_right(
      {sized_as(1, 4, 1, 1, 70, 16), sized_as(1, 6, 2, 5, 40, 16), sized_as(1, 16, 1, 1, 40, 16),
       sized_as(1, 5, 1, 7, 40, 24), sized_as(1, 40, 1, 1, 40, 8)},
      {{}, {16, true, true}}, {2});
}

TEST_F(decode, EveryNumberOfQueries) {
  std::vector<Spec> specs;
  for (Int Nq = 1; Nq <= walk::max_Nq; ++Nq) specs.push_back(sized_as(1, 2, 1, Nq, 37, 16));
  all_right(specs, {{0, true, true}}, {1, 2});
}

// Also of lengths that a part, or all of the queries, find nothing in.
TEST_F(decode, Lengths) {
  all_right({sized_as(6, 2, 1, 3, 140, 16, {140, 0, 1, 2, 3, 65})}, {{}, {32}, {16, true, true}},
            {1, 4});
}

TEST_F(decode, LengthsOutsideAreClamped) {
  all_right({sized_as(3, 1, 1, 2, 70, 16, {-3, 71, std::numeric_limits<Int>::max()})}, {{}, {16}},
            {2});
}

TEST_F(decode, NoKeysAtAll) { all_right({sized_as(2, 2, 1, 2, 0, 16)}, {{}, {16}}, {1, 3}); }

TEST_F(decode, AllSeeAll) {
  all_right({sized_as(2, 2, 1, 8, 70, 16, {70, 5})},
            {{0, true, false, false}, {16, true, true, false}}, {1, 3});
}

TEST_F(decode, Layouts) {
  std::vector<Spec> specs(5, sized_as(2, 4, 2, 2, 50, 24, {50, 20}));
  specs[0].layout.order = Layout::Order::BNHD;
  specs[1].layout.gap = 3, specs[1].layout.offset = 1;
  specs[2].layout.reversed = true;
  specs[3].layout.order = Layout::Order::BNHD, specs[3].layout.in_16_bytes = true;
  specs[3].layout.gap = 1;
  specs[4].p.d = 13, specs[4].layout.in_16_bytes = true;  // 16 bytes that end behind the row
  all_right(specs, {{}, {16, true, true}}, {2});
}

// One tensor alone whose rows do not begin at multiples of 16 bytes.
TEST_F(decode, OneOfAllIsMisaligned) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(1, 4, 2, 2, 90, 16);
    Layout odd;
    odd.gap = 1;
    for (int which = 0; which < 5; ++which) {
      Case<T> c(s, {16, true, true});
      Buffer<T>* const all[] = {&c.meant.Q, &c.K, &c.V, &c.new_K, &c.new_V};
      Buffer<T>& one = *all[which];
      const Buffer<T> was = one;
      const bool cache = which == 1 || which == 2;
      one =
          cache ? Buffer<T>(c.pages, 2, 16, 16, odd) : Buffer<T>(1, which == 0 ? 4 : 2, 2, 16, odd);
      one.fill([&](Int b, Int h, Int i, Int x) { return double(was.at(b, h, i, x)); });
      if (cache) c.fill();
      c.run(2);
      EXPECT_EQ(c.verdict(), "") << which << ", " << sizeof(T) << " bytes";
    }
  });
}

TEST_F(decode, Fuzz) {
  std::mt19937_64 engine(20260101);
  const auto upto = [&](Int n) { return Int(engine() % std::uint64_t(n + 1)); };
  for (int n = 0; n < int(sized(60, 10)); ++n) {
    const Int Hkv = 1 + upto(1), Nq = 1 + upto(7), Nk = Nq + upto(180);
    Spec s = sized_as(1 + upto(2), Hkv * (1 + upto(4)), Hkv, Nq, Nk, 2 + upto(126));
    s.seed = std::uint64_t(n) + 1;
    if (upto(2) == 0)
      for (Int b = 0; b < s.p.B; ++b) s.lengths.push_back(Nq + upto(Nk - Nq));
    const Int page = upto(1) == 0 ? 0 : Int(16) << upto(3);
    all_right({s}, {{page, upto(1) == 0, upto(1) == 0, upto(3) > 0}}, {int(1 + upto(6))});
  }
}

TEST_F(decode, Scale) {
  std::vector<Spec> specs(3, sized_as(1, 2, 1, 2, 70, 16));
  specs[0].p.scale = 0.7;
  specs[1].data = {Data::Kind::rising, 40};
  specs[2].data = {Data::Kind::falling, 40};
  all_right(specs, {{}}, {1, 2});
  Case<float> negative(sized_as(1, 2, 1, 2, 70, 16), {});
  negative.meant.p.scale = -0.3;
  negative.run(2);
  EXPECT_EQ(negative.verdict(), "");
}

// However the keys are split, the sum is the same; a part more than there are tiles is empty.
// Caches of less than a tile, of fewer tiles than parts and of more, of one length and of several,
// and all parts from 1 to 64, and beyond; on the CPU each cache meets some of them, each in a type.
TEST_F(decode, AnyNumberOfParts) {
  const struct {
    Spec spec;
    Kept kept;
  } caches[] = {{sized_as(1, 1, 1, 1, 1, 16), {}},
                {sized_as(2, 2, 1, 2, 40, 24, {40, 3}), {16}},
                {sized_as(1, 2, 1, 1, 65, 13), {}},
                {sized_as(1, 3, 1, 4, 130, 128, {129}), {32, true, true}},
                {sized_as(2, sized(2, 1), 1, 2, 600, 16, {600, 100}), {16}},
                {sized_as(1, 1, 1, 3, sized(1100, 700), 72), {256, true, true}}};
  std::vector<int> counts = {1, 2, 3, 17, 64, 65};
  if (sized(64, 0) == 64) {
    counts.resize(65);
    std::iota(counts.begin(), counts.end(), 1);
  }
  if (sized(64, 0) == 64) counts.push_back(200);
  std::size_t type = 0, cache = 0;
  each_type([&]<class T>(T) {
    cache = 0;
    for (const auto& [spec, kept] : caches) {
      Case<T> c(spec, kept);
      for (std::size_t n = 0; n < counts.size(); ++n) {
        const int parts = counts[n];
        if (parts > 1 && !meets(cache + n, type)) continue;
        if (parts > 64 && spec.p.Nk != 600) continue;
        EXPECT_EQ(c.run(parts), parts);
        EXPECT_EQ(c.verdict(), "")
            << parts << " parts, " << spec.name() << ", " << sizeof(T) << " bytes";
      }
      ++cache;
    }
    ++type;
  });
}

TEST_F(decode, TakesAsManyPartsAsTheFormulaSays) {
  Case<float> c(sized_as(1, 1, 1, 1, 200, 16), {});
  EXPECT_EQ(c.run(0), walk::splits(c.meant.p, walk::shape<float>(c.meant.p), processors()));
  EXPECT_EQ(c.verdict(), "");
}

#ifndef FA_WITHOUT_HALF
// As many heads as two blocks of eight warps an SM take, or half as many and one: eights, of 128
// keys; others have fours. Either way all keys, or parts.
TEST_F(decode, EightWarps) {
  const Int slots = 2 * processors();
  const auto keys = [](const Problem& p) { return walk::shape<__half>(p).keys; };
  for (Int n : {slots / 2 + 1, slots}) {
    Case<half> c(sized_as(1, 2 * n, n, 1, 300, 24), {32, true, true});
    EXPECT_EQ(keys(c.meant.p), 128) << n << " heads";
    for (int parts : {0, 1, 2, 3}) {
      c.run(parts);
      EXPECT_EQ(c.verdict(), "") << n << " heads, " << parts << " parts";
    }
  }
  EXPECT_EQ(keys(sized_as(1, slots + 1, slots + 1, 1, 300, 24).p), 64);
  EXPECT_EQ(keys(sized_as(1, slots / 2, slots / 2, 1, 300, 24).p), 64);
  EXPECT_EQ(keys(sized_as(1, slots, slots, 1, 16384, 64).p), 128);
  EXPECT_EQ(keys(sized_as(1, slots, slots, 1, 16385, 64).p), 64);
  EXPECT_EQ(keys(sized_as(1, slots, slots, 1, 300, 72).p), 64);
  // 17 rows a key head are for a tile of more rows.
  EXPECT_EQ(keys(sized_as(1, 17 * slots, slots, 1, 300, 24).p), 64);
}

// Where one block of sixteen warps an SM leaves no SM idle. Two parts of a head merge themselves,
// also if one of them, or both, have no keys.
TEST_F(decode, SixteenWarps) {
  const Int SMs = processors();
  const auto keys = [](Int heads, Int Nk, Int d) {
    return walk::shape<__half>(sized_as(1, heads, heads, 1, Nk, d).p).keys;
  };
  for (Int d : {64, 128}) {
    EXPECT_EQ(keys(SMs / 2, 512, d), 256);
    EXPECT_EQ(keys(SMs, 512, d), 256);
    EXPECT_EQ(keys(SMs, 511, d), 64);
    EXPECT_EQ(keys(SMs + 1, 1 << 20, d), 64);  // a second wave, nearly empty
  }
  EXPECT_EQ(keys(2 * SMs, 16384, 128), 256);
  EXPECT_EQ(keys(2 * SMs, 16383, 128), 64);
  EXPECT_EQ(keys(SMs, 512, 129), 64);
  struct {
    Int d;
    std::vector<Int> lengths;
  } const cases[] = {{24, {520, 256, 0}}, {72, {300}}, {128, {520}}};
  for (const auto& [d, lengths] : cases) {
    Spec s = sized_as(1, SMs / 2, SMs / 2, 1, 520, d);
    for (Int length : lengths) {
      s.lengths = {length};
      Case<half> c(s, {32, true, true});
      for (int parts : {0, 1, 2, 3}) {
        const int taken = c.run(parts);
        EXPECT_EQ(c.verdict(), "") << s.name() << ", " << taken << " parts";
        EXPECT_EQ(taken, parts == 0 ? 2 : parts);  // two by the formula
      }
    }
  }
}

// More than 16 rows a key head are tiles of 32, which read the keys once.
TEST_F(decode, ThirtyTwoRows) {
  std::size_t n = 0;  // on the CPU each d meets two of four
  for (Int d : {24, 64, 72, 128})
    for (const auto& [heads, queries] : {std::pair<Int, Int>{17, 1}, {4, 8}, {9, 4}, {8, 8}}) {
      const std::size_t place = n++;
      if ((place / 4 + place) % 2 == 1 && sized(0, 1) == 1) continue;
      const Spec s = sized_as(2, heads, 1, queries, 300, d, {300, 45});
      Case<bf16> c(s, {32, true, true});
      EXPECT_EQ(walk::shape<__nv_bfloat16>(c.meant.p).rows, 32) << s.name();
      for (int parts : {0, 1, 3}) {
        if (parts == 1 && place % 4 > 1 && sized(0, 1) == 1) continue;
        c.run(parts);
        EXPECT_EQ(c.verdict(), "") << s.name() << ", " << parts << " parts";
      }
    }
  EXPECT_EQ(walk::shape<__half>(sized_as(1, 2, 1, 8, 300, 128).p).rows, 16);
}

// Where one block an SM of eight pairs of warps leaves no SM idle.
TEST_F(decode, EightPairs) {
  const Int heads = processors() / 2;
  Case<half> c(sized_as(1, 3 * heads, heads, 8, 520, 72, {300}), {32, true, true});
  const walk::Shape shape = walk::shape<__half>(c.meant.p);
  EXPECT_EQ(shape.rows, 32);
  EXPECT_EQ(shape.keys, 128);
  for (int parts : {0, 1, 2, 3}) {
    const int taken = c.run(parts);
    EXPECT_EQ(c.verdict(), "") << taken << " parts";
    EXPECT_EQ(taken, parts == 0 ? 2 : parts);
  }
  EXPECT_EQ(walk::shape<__half>(sized_as(1, 3 * heads, heads, 8, 511, 72).p).keys, 64);
}

// Of these the least, for tools that are slow: two parts, of which the second has few keys.
TEST_F(decode, PairsOfSixteenWarps) {
  const Int heads = processors() / 2;
  for (Int d : {24, 72}) {
    const Spec s = sized_as(1, heads, heads, 1, 520, d, {300});
    Case<half> c(s, {32, true, true}), whole(s, {});
    EXPECT_EQ(walk::shape<__half>(c.meant.p).keys, 256) << d;
    EXPECT_EQ(c.run(2), 2);
    EXPECT_EQ(c.verdict(), "") << d;
    whole.run(2);
    EXPECT_TRUE(c.bits() == whole.bits()) << "pages change bits, d = " << d;
  }
}

// As many heads as five blocks an SM take, and one more: then it may be six. All keys, or parts.
TEST_F(decode, FiveBlocksOrSix) {
  const Int slots = 5 * processors();
  for (Int n : {slots, slots + 1}) {
    Case<half> c(sized_as(1, n, n, 1, 150, 24), {32, true, true});
#ifdef FA_EMULATED
    EXPECT_EQ(walk::shape<__half>(c.meant.p).blocks, n > slots ? 6 : 5) << n << " heads";
#endif
    for (int parts : {0, 1, 2, 3}) {
      if (parts == (n > slots ? 1 : 2) && sized(0, 1) == 1) continue;
      c.run(parts);
      EXPECT_EQ(c.verdict(), "") << n << " heads, " << parts << " parts";
    }
  }
}
#endif

// Parts of keys by the wrong tile would see keys twice, or not at all: equal weights count them.
TEST_F(decode, EveryKeyIsSeenOnce) {
  Spec s = sized_as(1, 1, 1, 1, 517, 16);
  s.data = {Data::Kind::equal, 1};
  all_right({s}, {{}}, {1, 2, 3, 7, 17});
}

// ---- pages ----

TEST_F(decode, PagesInAnyOrderGiveTheSameBits) {
  std::size_t type = 0;  // on the CPU each size of pages meets one
  each_type([&]<class T>(T) {
    std::size_t n = type++;
    const Spec s = sized_as(2, 2, 1, 2, 280, 40, {280, 100});
    Case<T> whole(s, {});
    for (int parts : {1, 3}) {
      whole.run(parts);
      ASSERT_EQ(whole.verdict(), "");
      for (Int size = 16; size <= 256; size *= 2) {
        if (!meets(n++, 0)) continue;
        Case<T> pages(s, {size, true}, std::uint64_t(size));
        pages.run(parts);
        EXPECT_EQ(pages.verdict(), "") << "pages of " << size;
        EXPECT_TRUE(pages.bits() == whole.bits())
            << "pages of " << size << ", " << parts << " parts";
      }
    }
  });
}

// Two sequences that begin alike need the beginning once.
TEST_F(decode, SharedPages) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(2, 2, 1, 2, 70, 16, {70, 61}), {16, true, true});
    for (Buffer<T>* x : {&c.meant.K, &c.meant.V}) {
      const Buffer<T> from = *x;
      x->fill([&](Int, Int h, Int j, Int e) { return double(from.at(j < 32 ? 0 : 1, h, j, e)); });
    }
    for (Int n : {0, 1}) c.entry(1, n) = c.entry(0, n);
    const auto last_of = [&c](const Buffer<T>& X) {
      return [&](Int b, Int h, Int i, Int x) { return double(X.at(b, h, c.length(b) - 2 + i, x)); };
    };
    c.new_K.fill(last_of(c.meant.K));
    c.new_V.fill(last_of(c.meant.V));
    c.fill();
    c.run(2);
    EXPECT_EQ(c.verdict(), "");
  });
}

// The host does not see the numbers of pages, so the kernel must not believe them.
TEST_F(decode, NumbersOfPagesAreClamped) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 1, 1, 1, 60, 16), {16});
    c.entry(0, 1) = 0;
    c.entry(0, 2) = std::int32_t(c.pages - 1);
    c.fill();
    c.run(1);
    ASSERT_EQ(c.verdict(), "");
    const std::vector<char> want = c.bits();
    for (auto [low, high] : {std::pair<Int, Int>{-1, c.pages}, {INT32_MIN, INT32_MAX}}) {
      c.entry(0, 1) = std::int32_t(low);
      c.entry(0, 2) = std::int32_t(high);
      c.run(1);
      EXPECT_TRUE(c.bits() == want) << low << " and " << high;
    }
  });
}

TEST_F(decode, NothingIsAppendedToAPageThatIsNot) {
  each_type([]<class T>(T) {
    for (Int number : {Int(-1), Int(1) << 30}) {
      Case<T> c(sized_as(1, 1, 1, 2, 34, 16), {16, true, true});
      c.entry(0, 2) = std::int32_t(number);
      c.fill();
      c.run(2);
      EXPECT_EQ(c.verdict(), "") << number;  // what is new is read where it is
    }
  });
}

// ---- appending ----

// All else stays as it is: verdict() compares the whole cache, gaps and free pages too.
TEST_F(decode, AppendedRowsLand) {
  std::vector<Spec> specs = {sized_as(4, 4, 2, 5, 70, 24, {70, 3, 5, 64})};
  specs.push_back(specs[0]);
  specs[1].layout.order = Layout::Order::BNHD;
  specs[1].layout.gap = 1;
  all_right(specs, {{0, true, true}, {16, true, true}, {64, true, true}}, {1, 3});
}

TEST_F(decode, AppendedOrGivenBeforeIsTheSame) {
  int type = 0;  // on the CPU each meets one way to keep keys
  each_type([&]<class T>(T) {
    ++type;
    const Spec s = sized_as(3, 4, 2, 3, 100, 40, {100, 66, 2});
    for (Int page : {0, 16}) {
      if ((page == 0) == (type == 2) && sized(0, 1) == 1) continue;
      Case<T> before(s, {page, true, false}), now(s, {page, true, true});
      for (int parts : {1, 2}) {
        before.run(parts);
        now.run(parts);
        EXPECT_EQ(now.verdict(), "");
        EXPECT_TRUE(before.bits() == now.bits()) << parts << " parts, pages of " << page;
        EXPECT_TRUE(page > 0 || std::memcmp(before.K.storage().data, now.K.storage().data,
                                            now.K.storage().bytes) == 0);
      }
    }
  });
}

// ---- what is promised besides ----

// K and V as a contiguous cache; all queries see all keys. The scratch lives on.
template <class Host>
void call_plain(const Problem& p, const Forward<Host>& t, int splits, cudaStream_t stream) {
  using D = Device<Host>;
  static const DeviceMemory scratch(1 << 20);
  const auto writable = [](const View<const Host>& X) {
    return as_device<D>(View<Host>{const_cast<Host*>(X.data), X.batch, X.head, X.row});
  };
  walk::forward<D>(
      p,
      {as_device<const D>(t.Q), {writable(t.K), writable(t.V)}, {}, {}, as_device<D>(t.O), t.LSE},
      {false, splits, stream, scratch});
}

TEST_F(decode, TheSameBitsInEveryRun) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(2, 4, 2, 2, 140, 40), {16, true, true});
    c.run(5);
    const std::vector<char> first = c.bits();
    c.run(5);
    EXPECT_TRUE(c.bits() == first);
  });
}

// NaN in a row of Q reaches this row, NaN in a key those that see it, and nobody else a bit of it.
TEST_F(decode, NaNReachesWhoSeesIt) {
  each_type([]<class T>(T) {
    const Int queries = 3, keys = 70;
    Case<T> c(sized_as(1, 2, 1, queries, keys, 16), {16, true, true});
    const auto run = [&c](int parts) {
      c.fill();
      c.run(parts);
      return c.meant.O;
    };
    const auto compare = [&](const Buffer<T>& now, const Buffer<T>& before, const auto& hit) {
      before.for_each([&](Int b, Int h, Int i, Int x) {
        const double got = double(now.at(b, h, i, x)), was = double(before.at(b, h, i, x));
        EXPECT_TRUE(hit(h, i) ? std::isnan(got) : got == was) << h << " " << i << " " << x;
      });
    };
    for (int parts : {1, 3}) {
      const Buffer<T> before = run(parts);
      T& q = c.meant.Q.at(0, 1, 1, 5);
      const T q_was = q;
      q = T(NAN);
      compare(run(parts), before, [](Int h, Int i) { return h == 1 && i == 1; });
      q = q_was;
      for (Int j : {Int(20), keys - 2, keys - 1}) {  // the last ones are appended
        T& k = j < keys - queries ? c.meant.K.at(0, 0, j, 3)
                                  : c.new_K.at(0, 0, j - (keys - queries), 3);
        const T k_was = k;
        k = T(NAN);
        compare(run(parts), before, [&](Int, Int i) { return j <= keys - queries + i; });
        k = k_was;
      }
    }
  });
}

TEST_F(decode, LSEMayBeNull) {
  ForwardCase<float> c(sized_as(1, 2, 1, 2, 70, 16), false);
  for (int parts : {1, 3}) {
    on_gpu_forward<float>([&](const Problem& p, const Forward<float>& t) {
      call_plain(p, t, parts, nullptr);
    })(c.call());
    EXPECT_EQ(c.verdict(), "");
  }
}

TEST_F(decode, WorkIsPutOnTheStreamAndNobodyWaits) {
  ForwardCase<float> c(sized_as(1, 2, 1, 2, 70, 16), true);
  const auto on_stream = [](const Problem& p, const Forward<float>& t, cudaStream_t stream) {
    call_plain(p, t, 3, stream);
  };
  EXPECT_EQ(on_its_stream(c.call(), on_stream), "");
  EXPECT_EQ(c.verdict(), "");
}

// ---- the merge by itself ----

TEST_F(decode, MergeOfParts) {
  const float none = -INFINITY;
  const std::vector<std::vector<float>> rows = {{0, 0, 0, 0, 0},
                                                {none, 1, none, 2, none},
                                                {none, none, none, none, none},
                                                {1000, 999, -1000, 998, 1000},
                                                {-500, none, -501, -700, -500.5f}};
  Problem p;
  p.B = 1, p.Hq = Int(rows.size()), p.Nq = 1, p.d = 19;
  const int parts = int(rows[0].size()), d = int(p.d), n = int(rows.size());
  Buffer<float> O(parts, p.Hq, 1, d), L(parts, p.Hq, 1, 1), out(1, p.Hq, 1, d), LSE(1, p.Hq, 1, 1);
  L.fill([&](Int s, Int h, Int, Int) { return rows[std::size_t(h)][std::size_t(s)]; });
  // What saw nothing has O = 0, as every kernel leaves it.
  O.fill([&](Int s, Int h, Int, Int x) {
    return L.at(s, h, 0) == none ? 0 : double(s + 1) + 0.25 * double(x) - double(h);
  });
  const DeviceCopy copy({O.storage(), L.storage(), out.storage(), LSE.storage()});
  walk::launch_merge(p, {parts, copy.at(O.view()).data, copy.at(L.view()).data},
                     copy.at(out.view()), copy.at(LSE.view()).data, nullptr);
  FA_CUDA_CHECK(cudaDeviceSynchronize());
  copy.copy_back();
  for (int h = 0; h < n; ++h) {
    double m = none, l = 0;
    for (int s = 0; s < parts; ++s) m = std::max(m, double(rows[std::size_t(h)][std::size_t(s)]));
    for (int s = 0; s < parts && m > none; ++s)
      l += std::exp(rows[std::size_t(h)][std::size_t(s)] - m);
    const double want_L = m + std::log(l);
    if (l == 0)
      EXPECT_EQ(LSE.at(0, h, 0), none);
    else
      EXPECT_NEAR(LSE.at(0, h, 0), want_L, 1e-6 * std::max(1.0, std::fabs(want_L)));
    for (int x = 0; x < d; ++x) {
      double want = 0;
      for (int s = 0; s < parts && l > 0; ++s)
        want += std::exp(rows[std::size_t(h)][std::size_t(s)] - m) / l * O.at(s, h, 0, x);
      EXPECT_NEAR(out.at(0, h, 0, x), want, 1e-5) << "row " << h << ", column " << x;
    }
  }
  EXPECT_EQ(out.written_outside() + LSE.written_outside(), "");
}

// ---- the formula: by numbers alone ----

int formula(Int B, Int Hq, Int Hkv, Int Nq, Int Nk, walk::Shape shape, int processors) {
  return walk::splits(sized_as(B, Hq, Hkv, Nq, Nk, 128).p, shape, processors);
}

TEST_F(decode, FormulaByHand) {
  const walk::Shape shape{16, 64, 3};
  // 8 blocks without parts, 396 at once, 1024 tiles: with 49 parts one wave of 21 + 2.
  EXPECT_EQ(formula(1, 32, 8, 1, 65536, shape, 132), 49);
  // 16 tiles: each a part of its own, 1 + 2 instead of 16.
  EXPECT_EQ(formula(1, 32, 8, 1, 1024, shape, 132), 16);
  // 792 blocks are two full waves: nothing to gain.
  EXPECT_EQ(formula(99, 32, 8, 1, 65536, shape, 132), 1);
  // A key or none: no parts.
  EXPECT_EQ(formula(1, 32, 8, 1, 1, shape, 132), 1);
  EXPECT_EQ(formula(1, 32, 8, 1, 0, shape, 132), 1);
  EXPECT_EQ(formula(0, 32, 8, 1, 100, shape, 132), 1);
  // 64 blocks, 132 at once, of 256 keys each: two parts of 512 + 128 keys instead of 1024.
  EXPECT_EQ(formula(8, 32, 8, 1, 1024, {16, 256, 1}, 132), 2);
  EXPECT_EQ(formula(16, 32, 8, 1, 1024, {16, 256, 1}, 132), 1);
  // More rows than a tile has are more blocks: of 32 rows 2 tiles, as for twice the key heads.
  EXPECT_EQ(formula(1, 32, 8, 8, 65536, shape, 132), formula(1, 64, 16, 4, 65536, shape, 132));
}

TEST_F(decode, FormulaCostsLeast) {
  const walk::Shape shape{16, 64, 2};
  const auto up = [](Int a, Int b) { return (a + b - 1) / b; };
  for (Int B : {1, 3, 8, 64})
    for (Int Nk : {100, 1000, 5000, 100000}) {
      const int s = formula(B, 8, 2, 1, Nk, shape, 7);
      const auto cost = [&](Int n) {
        return up(B * 2 * n, 14) * (up(up(Nk, 64), n) + (n > 1 ? 2 : 0));
      };
      for (Int n = 1; n <= std::min<Int>(up(Nk, 64), walk::max_splits); ++n)
        EXPECT_TRUE(cost(n) > cost(s) || (cost(n) == cost(s) && n >= s))
            << B << " " << Nk << " " << n;
      EXPECT_TRUE(s >= 1 && s <= walk::max_splits);
    }
}

// ---- errors ----

TEST_F(decode, RefusesInWords) {
  Case<float> c(sized_as(2, 4, 2, 2, 40, 16), {16, true, true});
  const ForwardCall<float> call = c.meant.call();
  const DeviceCopy copy({c.K.storage(), c.V.storage()});
  const auto why = [&](const auto& change) {
    Problem p = call.p;
    walk::Tensors<float> t = c.tensors(copy, call.t);
    Options options;
    options.splits = 1;
    change(p, t, options);
    return refusal([&] { walk::forward<float>(p, t, options); });
  };
  using P = Problem&;
  using T = walk::Tensors<float>&;
  using O = Options&;
  expect_words(why([](P p, T, O) { p.Nq = 9; }), {"decode: Nq must lie in [0, 8], got 9"});
  expect_words(why([](P p, T, O) { p.d = 129; }), {"decode: d must lie in [1, 128], got 129"});
  expect_words(why([](P p, T, O) { p.Hq = 3; }),
               {"decode: Hq must be a multiple of Hkv", "Hq = 3"});
  expect_words(why([](P p, T, O) { p.causal = Causal::top_left; }),
               {"decode: causal must be none", "Options::causal"});
  expect_words(why([](P p, T, O) { p.Nk = (1 << 30) + 1; }),
               {"decode: Nk must be at most 2^30, got 1073741825"});
  expect_words(why([](P p, T, O) { p.B = 0, p.Hq = p.Hkv = Int(1) << 61; }),
               {"decode: B * H * N * d does not fit 64 bits"});
  for (Int size : {8, 24, 512, -16, 0})
    expect_words(
        why([&](P, T t, O) { t.cache.page_size = size; }),
        {"decode: page_size must be a power of two in [16, 256], got " + std::to_string(size)});
  expect_words(why([](P, T t, O) { t.cache.table = nullptr; }),
               {"decode: table is a null pointer, but page_size is 16"});
  expect_words(
      why([](P, T t, O) { t.cache.table = nullptr, t.cache.page_size = t.cache.pages = 0; }),
      {"page_size is 0, pages is 0 and table_stride is 5"});
  expect_words(why([](P, T t, O) { t.cache.pages = 0; }),
               {"decode: pages must lie in [1, 2^30], got 0"});
  expect_words(why([](P, T t, O) { t.cache.table_stride = 2; }),
               {"decode: table_stride must be at least ceil(Nk / page_size) = 3, got 2"});
  expect_words(why([](P, T t, O) { t.cache.table_stride = Int(1) << 62; }),
               {"decode: the table, B * table_stride * 4 bytes, must fit 64 bits signed",
                "got B = 2 and table_stride = 4611686018427387904"});
  expect_words(why([](P, T t, O) { t.cache.table_stride = Int(1) << 60; }),
               {"got B = 2 and table_stride = 1152921504606846976"});
  expect_words(why([](P, T t, O) {
                 t.cache.table_stride = (Int(1) << 60) - 1;  // that fits
                 t.Q.data = nullptr;
               }),
               {"decode: Q is a null pointer"});
  expect_words(why([](P, T, O o) { o.splits = 257; }),
               {"decode: splits must lie in [0, 256], got 257"});
  expect_words(why([](P, T, O o) { o.splits = -1; }),
               {"decode: splits must lie in [0, 256], got -1"});
  expect_words(why([](P, T t, O) { t.Q.data = nullptr; }), {"decode: Q is a null pointer"});
  expect_words(why([](P, T t, O) { t.new_V.data = nullptr; }), {"decode: new_V is a null pointer"});
  expect_words(why([](P, T t, O) { t.O.data = const_cast<float*>(t.Q.data); }),
               {"decode: O overlaps Q"});
  expect_words(why([](P, T t, O) { t.new_K.data = t.cache.K.data; }), {"decode: K overlaps new_K"});
  expect_words(why([](P, T t, O) { t.cache.V = t.cache.K; }), {"decode: V overlaps K"});
  expect_words(why([](P, T t, O) { t.cache.K.head = 0; }), {"decode: two rows of K share memory"});
  expect_words(why([](P p, T, O) { p.scale = INFINITY; }), {"decode: scale must be finite"});
  // 3 parts of 2 x 4 x 2 rows of 16 + 1 numbers
  expect_words(why([](P, T, O o) { o.splits = 3; }),
               {"decode needs scratch_bytes() = 3264 bytes of scratch, got null"});
  float there[4];
  expect_words(why([&](P, T, O o) {
                 o.splits = 3, o.scratch = {there, 3263};
               }),
               {"scratch_bytes() = 3264 bytes of scratch, got 3263"});
  expect_words(why([&](P, T, O o) {
                 o.splits = 3, o.scratch = {reinterpret_cast<char*>(there) + 1, 3264};
               }),
               {"scratch must be aligned to 4 bytes"});
  // K and V may be one where nothing is appended.
  EXPECT_EQ(why([](P p, T t, O) { t.new_K = t.new_V = {}, t.cache.V = t.cache.K, p.Nq = 0; }),
            "accepted");
}
#ifndef FA_WITHOUT_HALF
TEST_F(decode, TensorCoresWantAPositiveScale) {
  Case<bf16> c(sized_as(1, 1, 1, 1, 20, 16), {});
  c.meant.p.scale = -0.125;
  expect_words(
      refusal([&] { c.run(1); }),
      {"decode: fa2: scale must be > 0 in fp32, got -0.125; the maximum is taken before scaling"});
}
#endif

TEST_F(decode, NothingToDo) {
  for (int what = 0; what < 3; ++what) {
    Spec s = sized_as(what == 0 ? 0 : 2, what == 1 ? 0 : 2, what == 1 ? 0 : 1, what == 2 ? 0 : 2,
                      20, 16);
    Case<float> c(s, {0, true, what != 2});
    c.run(2);
    EXPECT_EQ(c.fault, "");
  }
}

TEST_F(decode, ScratchIsCounted) {
  Problem p = sized_as(2, 4, 2, 3, 1000, 16).p;
  Options options;
  options.splits = 1;
  EXPECT_EQ(walk::scratch_bytes<float>(p, options), 0u);
  options.splits = 5;
  EXPECT_EQ(walk::scratch_bytes<float>(p, options), 5u * (2 * 4 * 3) * (16 + 1) * 4);
}

// ---- what only the CPU can do, or only a GPU ----

#ifdef FA_EMULATED
// What is copied comes as early as it may, and at random times; late in all other tests.
TEST_F(decode, EarlyAndAtRandom) {
  using emulator::Timing;
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 2, 1, 2, 400, 72), {16, true, true});
    for (const emulator::Schedule& now : {emulator::Schedule{Timing::early, 0},
                                          {Timing::random, 1},
                                          {Timing::random, 2},
                                          {Timing::random, 3}}) {
      const emulator::WithSchedule until_the_end(now);
      c.run(2);
      EXPECT_EQ(c.verdict(), "") << sizeof(T) << " bytes, seed " << now.seed;
    }
  });
}
#else
TEST_F(decode, ARecordedCallReplaysWithOtherLengths) {
  const auto with = [](std::vector<Int> lengths, std::uint64_t seed) {
    Spec s = sized_as(3, 4, 2, 2, 300, 64, std::move(lengths));
    s.seed = seed;
    return s;
  };
  ForwardCase<bf16> first(with({300, 17, 64}, 1), true), second(with({1, 250, 299}, 2), true);
  const auto call = [](const Problem& p, const Forward<bf16>& t, cudaStream_t stream) {
    call_plain(p, t, 4, stream);
  };
  EXPECT_EQ(replayed_as_graph(first, second, call), "");
}

// Rows 2^22 numbers apart, so that the last ones lie beyond 2^31; in pages, from the last to the
// first.
TEST_F(decode, ACacheOfMoreThanTwoToThe31) {
  using D = __nv_bfloat16;
  constexpr Int d = 64, apart = Int(1) << 22, keys = 600, page = 16, pages = 38;
  const std::size_t bytes = std::size_t(pages * page * apart) * sizeof(D);
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  const DeviceMemory memory(bytes), numbers(pages * sizeof(std::int32_t));
  D* const base = memory.as<D>();
  ForwardCase<bf16> c(sized_as(1, 4, 1, 2, keys, d), true);
  std::vector<std::int32_t> table(pages);
  for (Int n = 0; n < pages; ++n) table[std::size_t(n)] = std::int32_t(pages - 1 - n);
  FA_CUDA_CHECK(
      cudaMemcpy(numbers.as<void>(), table.data(), numbers.bytes(), cudaMemcpyHostToDevice));
  for (const bool paged : {false, true}) {
    for (Int j = 0; j < keys; ++j) {
      D* const row = base + (paged ? (pages - 1 - j / page) * page + j % page : j) * apart;
      FA_CUDA_CHECK(cudaMemcpy(row, &c.K.at(0, 0, j), d * sizeof(D), cudaMemcpyHostToDevice));
      FA_CUDA_CHECK(cudaMemcpy(row + d, &c.V.at(0, 0, j), d * sizeof(D), cudaMemcpyHostToDevice));
    }
    for (int parts : {1, 5}) {
      on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
        const Int entry = (paged ? page : keys) * apart;
        walk::Tensors<D> all{as_device<const D>(t.Q),
                             {{base, entry, d, apart}, {base + d, entry, d, apart}},
                             {},
                             {},
                             as_device<D>(t.O),
                             t.LSE};
        if (paged) {
          all.cache.table = numbers.as<std::int32_t>();
          all.cache.table_stride = all.cache.pages = pages;
          all.cache.page_size = page;
        }
        const DeviceMemory scratch(1 << 20);
        walk::forward(p, all, {false, parts, nullptr, scratch});
        FA_CUDA_CHECK(cudaDeviceSynchronize());
      })(c.call());
      EXPECT_EQ(c.verdict(), "") << parts << " parts" << (paged ? ", in pages" : "");
    }
  }
}
#endif

}  // namespace
