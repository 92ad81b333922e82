// Tests of scores: ALiBi, soft cap, bias and rotary positions, each alone and all together, forward
// and backward, against the oracle with the same scores.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/scores/scores.hpp"
#include "06_optimized/check/nan.hpp"
#include "06_optimized/check/plain.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/edge.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
namespace walk = fa::scores;
using Int = std::int64_t;
using half = Eigen::half;
using bf16 = Eigen::bfloat16;

template <class T>
using Device =
    std::conditional_t<std::is_same_v<T, float>, float,
                       std::conditional_t<std::is_same_v<T, half>, __half, __nv_bfloat16>>;

template <class T>
constexpr std::size_t number = std::is_same_v<T, float>  ? 0
                               : std::is_same_v<T, half> ? 1
                                                         : 2;

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

// What is done to the scores.
struct Given {
  enum class Bias { none, of_T, of_fp32 };
  bool alibi = false, slopes_of_batch = false;
  double cap = 0;  // 0: none
  Bias bias = Bias::none;
  bool bias_of_batch = true, bias_of_head = true, bias_of_row = true;
  Layout bias_layout = {};
  Int turned = 0;  // numbers of a row
  bool interleaved = false;
  std::optional<Int> offset = std::nullopt;

  std::string name() const {
    std::string text = ", with";
    if (alibi) text += slopes_of_batch ? " slopes of batch and head" : " slopes";
    if (cap > 0) text += " cap " + std::to_string(cap);
    if (bias != Bias::none)
      text += std::string(" bias ") + (bias == Bias::of_T ? "of T [" : "of fp32 [") +
              (bias_of_batch ? "B " : "1 ") + (bias_of_head ? "Hq " : "1 ") +
              (bias_of_row ? "Nq Nk]" : "1 Nk]");
    if (turned > 0)
      text += " rotary " + std::to_string(turned) + (interleaved ? " interleaved" : " in halves");
    if (offset) text += " offset " + std::to_string(*offset);
    return text;
  }
};

Given alibi() { return {.alibi = true}; }
Given capped(double cap) { return {.cap = cap}; }
Given biased(Given::Bias bias = Given::Bias::of_T, bool of_batch = true, bool of_head = true,
             bool of_row = true) {
  return {.bias = bias, .bias_of_batch = of_batch, .bias_of_head = of_head, .bias_of_row = of_row};
}
Given rotary(Int dims, bool interleaved = false) {
  return {.turned = dims, .interleaved = interleaved};
}
Given all_of(Int dims, bool interleaved = false) {
  Given g = biased(Given::Bias::of_fp32, false, true, true);
  g.alibi = g.slopes_of_batch = true;
  g.cap = 1.5;
  g.turned = dims;
  g.interleaved = interleaved;
  return g;
}

double random(std::uint64_t seed, Int n, double from, double to) {
  std::mt19937_64 engine(seed * 1000003 + std::uint64_t(n));
  engine.discard(3);
  return from + (to - from) * double(engine() >> 11) * 0x1p-53;
}

// The scores of a problem, in host memory, and as the oracle's hooks.
template <class T>
struct Asked {
  Problem p;
  Given given;
  Int offset;
  std::vector<float> slopes, cos, sin;
  Int positions = 0;
  Buffer<T> bias;
  Buffer<float> bias32;
  std::optional<walk::Rotary> not_read = std::nullopt;  // asked for where nothing turns

  Asked(const Spec& s, const Given& g) : p(s.p), given(g) {
    offset = g.offset ? *g.offset : p.causal == Causal::top_left ? 0 : p.Nk - p.Nq;
    const Int n = g.slopes_of_batch ? p.B * p.Hq : p.Hq;
    for (Int h = 0; g.alibi && h < n; ++h)
      slopes.push_back(float(random(s.seed + 1, h, 0.01, 0.4)));
    if (g.turned > 0) {
      if (offset < 0) offset = *(given.offset = 3);
      positions = std::max(p.Nk, offset + p.Nq) + 2;
      for (Int k = 0; k < positions * (g.turned / 2); ++k) {
        const double angle = random(s.seed + 2, k, -3, 3);
        cos.push_back(float(std::cos(angle)));
        sin.push_back(float(std::sin(angle)));
      }
    }
    const Int B = g.bias_of_batch ? p.B : 1, H = g.bias_of_head ? p.Hq : 1,
              N = g.bias_of_row ? p.Nq : 1;
    const auto value = [&](Int b, Int h, Int i, Int j) {
      return random(s.seed + 3, ((b * H + h) * N + i) * p.Nk + j, -2, 2);
    };
    if (g.bias == Given::Bias::of_T) {
      bias = Buffer<T>(B, H, N, p.Nk, g.bias_layout);
      bias.fill(value);
    } else if (g.bias == Given::Bias::of_fp32) {
      bias32 = Buffer<float>(B, H, N, p.Nk, g.bias_layout);
      bias32.fill(value);
    }
  }

  std::vector<Storage> storages() {
    std::vector<Storage> all;
    for (std::vector<float>* x : {&slopes, &cos, &sin})
      all.push_back({x->data(), x->size() * sizeof(float)});
    all.push_back(bias.storage());
    all.push_back(bias32.storage());
    return all;
  }
  // A stride of 0 where the bias has one entry for all.
  template <class X>
  View<X> repeated(View<X> v) const {
    if (!given.bias_of_batch) v.batch = 0;
    if (!given.bias_of_head) v.head = 0;
    if (!given.bias_of_row) v.row = 0;
    return v;
  }
  walk::Scores<Device<T>> scores(const DeviceCopy& copy) {
    walk::Scores<Device<T>> s;
    if (given.alibi) s.slopes = copy.at(slopes.data());
    s.slopes_of_batch = given.slopes_of_batch;
    if (given.cap != 0) s.cap = given.cap;
    if (given.bias == Given::Bias::of_T)
      s.bias = as_device<const Device<T>>(copy.at(View<const T>(repeated(bias.view()))));
    if (given.bias == Given::Bias::of_fp32) s.bias32 = copy.at(repeated(bias32.view()));
    if (given.turned > 0)
      s.rotary = {copy.at(cos.data()), copy.at(sin.data()), positions, given.turned,
                  given.interleaved};
    if (not_read) s.rotary = *not_read;
    s.offset = given.offset;
    return s;
  }

  double bias_of(Int b, Int h, Int i, Int j) const {
    if (!given.bias_of_batch) b = 0;
    if (!given.bias_of_head) h = 0;
    if (!given.bias_of_row) i = 0;
    switch (given.bias) {
      case Given::Bias::of_T:
        return double(bias.at(b, h, i, j));
      case Given::Bias::of_fp32:
        return double(bias32.at(b, h, i, j));
      default:
        return 0;
    }
  }
  double score(double s, Int b, Int h, Int i, Int j) const {
    if (given.cap > 0) s = given.cap * std::tanh(s / given.cap);
    if (given.alibi) {
      const Int n = given.slopes_of_batch ? b * p.Hq + h : h;
      s -= double(slopes[std::size_t(n)]) * double(std::abs(i + offset - j));
    }
    return s + bias_of(b, h, i, j);
  }
  Hooks hooks() const {
    Hooks all;
    all.score = [this](double s, Int b, Int h, Int i, Int j) { return score(s, b, h, i, j); };
    all.slope = [this](double s, Int, Int, Int, Int) {
      const double t = given.cap > 0 ? std::tanh(s / given.cap) : 0;
      return 1 - t * t;
    };
    return all;
  }

  // f(x, its partner, cos, sin of the pair with its sign) for number x of a row at this position.
  template <class F>
  auto turn(Int x, Int position, double sign, const F& f) const {
    const Int pairs = given.turned / 2;
    if (x >= given.turned) return f(x, 1.0, 0.0);
    const bool second = given.interleaved ? x % 2 == 1 : x >= pairs;
    const Int k = given.interleaved ? x / 2 : x % pairs;
    const Int other = given.interleaved ? (second ? x - 1 : x + 1) : second ? x - pairs : x + pairs;
    const auto n = std::size_t(position * pairs + k);
    return f(other, double(cos[n]), (second ? sign : -sign) * double(sin[n]));
  }
  // X as the kernels turn it: in fp32, rounded once.
  Buffer<T> turned(const Buffer<T>& X, Int first) const {
    Buffer<T> now = X;
    if (given.turned == 0) return now;
    now.fill([&](Int b, Int h, Int i, Int x) {
      return turn(x, first + i, 1, [&](Int other, double c, double s) {
        if (x >= given.turned) return double(X.at(b, h, i, x));
        const float product = float(X.at(b, h, i, x)) * float(c);
        return double(std::fma(float(X.at(b, h, i, other)), float(s), product));
      });
    });
    return now;
  }
  // A gradient by what was turned, as one by what was given.
  Array turned_back(const Array& X, Int first, bool squares = false) const {
    Array now = X;
    now.for_each([&](Int b, Int h, Int i, Int x) {
      now.at(b, h, i, x) = turn(x, first + i, -1, [&](Int other, double c, double s) {
        if (squares) c *= c, s *= s;
        return c * X.at(b, h, i, x) + s * X.at(b, h, i, other);
      });
    });
    return now;
  }
  Array turned_back_most(const Array& X, Int first) const {
    Array now = X;
    now.for_each([&](Int b, Int h, Int i, Int x) {
      now.at(b, h, i, x) = turn(x, first + i, -1, [&](Int other, double c, double s) {
        return std::fabs(c) * X.at(b, h, i, x) + std::fabs(s) * X.at(b, h, i, other);
      });
    });
    return now;
  }
};

template <class T>
std::vector<char> bits(Buffer<T>& x) {
  const Storage s = x.storage();
  const char* const first = static_cast<const char*>(s.data);
  return {first, first + s.bytes};
}

// A forward: the oracle sees Q and K as they are when they have been turned.
template <class T>
struct ForwardOf {
  Asked<T> asked;
  ForwardCase<T> meant;
  Buffer<T> Q, K;  // as the kernel gets them
  walk::Kernel kernel = walk::Kernel::best;
  bool counted = false;  // has hopper scratch to count its tiles in?

  ForwardOf(const Spec& s, const Given& given) : asked(s, given), meant(s, true) {
    meant.spec.hooks = asked.hooks();
    Q = meant.Q;
    K = meant.K;
    turn();
  }
  void turn() {
    meant.Q = asked.turned(Q, asked.offset);
    meant.K = asked.turned(K, 0);
  }
  ForwardCall<T> call() {
    ForwardCall<T> c = meant.call();
    c.t.Q = Q.view();
    c.t.K = K.view();
    c.storage[0] = Q.storage();
    c.storage[1] = K.storage();
    return c;
  }
  void run() {
    ForwardCall<T> c = call();
    for (const Storage& s : asked.storages()) c.storage.push_back(s);
    const DeviceCopy copy(c.storage);
    Problem p = c.p;
    p.key_lengths = copy.at(p.key_lengths);
    const DeviceMemory counter(sizeof(unsigned));
    FA_CUDA_CHECK(cudaMemset(counter.as<void>(), 0x11, counter.bytes()));
    walk::Options options{nullptr, {}, kernel};
    if (counted) options.scratch = counter;
    walk::forward(p, as_device<Device<T>>(on_device(copy, c.t)), asked.scores(copy), options);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back();
  }
  std::string verdict() {
    return meant.verdict() + Q.changed() + K.changed() + asked.bias.changed() +
           asked.bias32.changed();
  }
  std::vector<char> all_bits() {
    std::vector<char> all = bits(meant.O);
    for (char c : bits(meant.LSE)) all.push_back(c);
    return all;
  }
};

template <class T>
struct BackwardOf {
  Asked<T> asked;
  BackwardCase<T> meant;
  Buffer<T> Q, K;
  Buffer<float> dbias;
  bool wants_dbias;
  std::string fault;
  walk::Kernel kernel = walk::Kernel::best;
  bool deterministic = false;

  BackwardOf(const Spec& s, const Given& given)
      : asked(s, given), meant(s), wants_dbias(given.bias != Given::Bias::none) {
    meant.spec.hooks = asked.hooks();
    Q = meant.Q;
    K = meant.K;
    meant.Q = asked.turned(Q, asked.offset);
    meant.K = asked.turned(K, 0);
    meant.fill_context();
    const Problem& p = s.p;
    if (wants_dbias)
      dbias = Buffer<float>(given.bias_of_batch ? p.B : 1, given.bias_of_head ? p.Hq : 1,
                            given.bias_of_row ? p.Nq : 1, p.Nk, given.bias_layout);
  }
  BackwardCall<T> call() {
    BackwardCall<T> c = meant.call();
    c.t.Q = Q.view();
    c.t.K = K.view();
    c.storage[0] = Q.storage();
    c.storage[1] = K.storage();
    return c;
  }
  void run() {
    BackwardCall<T> c = call();
    dbias.poison();
    for (const Storage& s : asked.storages()) c.storage.push_back(s);
    c.storage.push_back(dbias.storage());
    const DeviceCopy copy(c.storage);
    Problem p = c.p;
    p.key_lengths = copy.at(p.key_lengths);
    const std::size_t bytes = walk::scratch_bytes<Device<T>>(p), strip = 256;
    const DeviceMemory scratch(bytes + strip);
    FA_CUDA_CHECK(cudaMemset(scratch.as<void>(), 0xff, bytes + strip));
    const View<float> gradient =
        wants_dbias ? copy.at(asked.repeated(dbias.view())) : View<float>{};
    walk::backward(p, as_device<Device<T>>(on_device(copy, c.t)), asked.scores(copy), gradient,
                   {nullptr, {scratch.as<void>(), bytes}, kernel, deterministic});
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back();
    std::vector<unsigned char> behind(strip);
    FA_CUDA_CHECK(
        cudaMemcpy(behind.data(), scratch.as<char>() + bytes, strip, cudaMemcpyDeviceToHost));
    fault = Q.changed() + K.changed() + asked.bias.changed() + asked.bias32.changed();
    if (std::any_of(behind.begin(), behind.end(), [](unsigned char x) { return x != 0xff; }))
      fault += "wrote behind the scratch\n";
  }

  Comparison compare(const char* name, const Buffer<T>& got, const BackwardOracle& o, Array want,
                     Spread e, std::optional<Int> first) const {
    if (first && asked.given.turned > 0) {
      want = asked.turned_back(want, *first);
      if (!e.most.data.empty()) {
        e.most = asked.turned_back_most(e.most, *first);
        e.square = asked.turned_back(e.square, *first, true);
      }
    }
    double largest = 0;
    for (double w : want.data) largest = std::max(largest, std::fabs(w));
    const double fp32 = gradient_tolerance<T>(o.A, largest, o.noise);
    Comparison c(name);
    got.for_each([&](Int b, Int h, Int i, Int x) {
      const double w = want.at(b, h, i, x);
      const Tolerance t = tolerance<T>(fp32, e, w, b, h, i, x);
      c.add(b, h, i, x, double(got.at(b, h, i, x)), w, t.element, t.usual);
    });
    return c;
  }
  std::string verdict() {
    const Problem& p = meant.p;
    Hooks hooks = asked.hooks();
    const Given& g = asked.given;
    Array sums(dbias.B(), dbias.H(), dbias.N(), dbias.d()), rounded = sums;
    const Array O = to_array(meant.O), dO = to_array(meant.dO), Q_ = to_array(meant.Q),
                K_ = to_array(meant.K);
    hooks.each = [&](Int b, Int h, Int i, Int j, double dS) {
      if (!wants_dbias) return;
      // D_i is of a rounded O: P_ij times what that may come to.
      double s = 0, most_D = 0;
      for (Int x = 0; x < p.d; ++x) {
        s += p.softmax_scale() * Q_.at(b, h, i, x) * K_.at(b, h / (p.Hq / p.Hkv), j, x);
        most_D += rounding<T>().of(O.at(b, h, i, x)) * std::fabs(dO.at(b, h, i, x));
      }
      const double L = double(meant.LSE.at(b, h, i));
      const double P = L == -INFINITY ? 0 : std::exp(asked.score(s, b, h, i, j) - L);
      const Int n[] = {g.bias_of_batch ? b : 0, g.bias_of_head ? h : 0, g.bias_of_row ? i : 0};
      sums.at(n[0], n[1], n[2], j) += dS;
      rounded.at(n[0], n[1], n[2], j) += P * most_D;
    };
    const BackwardOracle want = oracle_backward(p, to_array(meant.Q), to_array(meant.K),
                                                to_array(meant.V), dO, rounding<T>(), hooks);
    std::vector<Comparison> all = {compare("dQ", meant.dQ, want, want.dQ, want.eQ, asked.offset),
                                   compare("dK", meant.dK, want, want.dK, want.eK, 0),
                                   compare("dV", meant.dV, want, want.dV, want.eV, std::nullopt)};
    if (wants_dbias) {
      double largest = 0;
      for (double w : sums.data) largest = std::max(largest, std::fabs(w));
      Comparison c("dbias");
      const double fp32 = gradient_tolerance<float>(want.A, largest, want.noise);
      dbias.for_each([&](Int b, Int h, Int i, Int j) {
        c.add(b, h, i, j, dbias.at(b, h, i, j), sums.at(b, h, i, j), fp32 + rounded.at(b, h, i, j));
      });
      all.push_back(c);
    }
    return Comparison::reports(all) + meant.check_memory_untouched() + dbias.written_outside() +
           fault;
  }
  std::vector<char> all_bits() {
    std::vector<char> all = bits(dbias);
    for (Buffer<T>* x : {&meant.dQ, &meant.dK, &meant.dV})
      for (char c : bits(*x)) all.push_back(c);
    return all;
  }
};

// As meets() of testing.hpp, of two.
[[maybe_unused]] bool either([[maybe_unused]] std::size_t n, [[maybe_unused]] std::size_t m) {
  return sized(1, 0) == 1 || n % 2 == m % 2;
}

bool has_hopper() { return optimized::device_capability() == 90; }
[[maybe_unused]] constexpr auto without_hopper = "hopper is for 9.0 alone";

// May these be for hopper, so that fa2 has to be asked for by name?
bool may_be_for_hopper(const Given& g) {
  return has_hopper() && g.bias == Given::Bias::none && g.turned == 0;
}

template <class T>
void both(const Spec& s, const Given& given) {
  for (const walk::Kernel kernel : {walk::Kernel::best, walk::Kernel::fa2}) {
    if (kernel == walk::Kernel::fa2 && (sizeof(T) == 4 || !may_be_for_hopper(given))) continue;
    ForwardOf<T> forward(s, given);
    forward.kernel = kernel;
    forward.run();
    EXPECT_EQ(forward.verdict(), "")
        << s.name() << given.name() << ", " << sizeof(T) << " bytes, kernel " << int(kernel);
    BackwardOf<T> backward(s, given);
    backward.kernel = kernel;
    backward.run();
    EXPECT_EQ(backward.verdict(), "")
        << s.name() << given.name() << ", " << sizeof(T) << " bytes, kernel " << int(kernel);
  }
}

class scores : public GpuTest {};  // the tests' name is the walk's

// ---- each change alone, and all ----

// Small, and two of everything: tiles of rows and of keys, heads of a group; one change at a time,
// the forward alone.
TEST_F(scores, Tiles) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(1, 2, 1, 20, 35, 16, Causal::bottom_right);
    for (const Given& given : {capped(1.5), alibi(), biased(), rotary(16), all_of(16)}) {
      ForwardOf<T> c(s, given);
      c.run();
      EXPECT_EQ(c.verdict(), "") << given.name() << ", " << sizeof(T) << " bytes";
    }
  });
}

// The gradients of the same.
TEST_F(scores, TilesOfGradients) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(1, 2, 1, 20, 35, 16, Causal::bottom_right);
    for (const Given& given : {capped(1.5), alibi(), biased(), rotary(16), all_of(16)}) {
      BackwardOf<T> c(s, given);
      c.run();
      EXPECT_EQ(c.verdict(), "") << given.name() << ", " << sizeof(T) << " bytes";
    }
  });
}

// Every spec with one change, the next spec with the next.
TEST_F(scores, Sizes) {
  each_type([]<class T>(T) {
    std::size_t n = 0;
    for (const Spec& s : walk_specs()) {
      const Int even = s.p.d / 2 * 2;
      const Given changes[] = {alibi(), capped(2), biased(), rotary(even), all_of(even, true)};
      if (meets(n, number<T>)) both<T>(s, changes[n % 5]);
      ++n;
    }
  });
}

TEST_F(scores, AllTogetherInAllSizes) {
  each_type([]<class T>(T) {
    std::size_t n = 1;  // on the CPU not the type that Sizes has
    for (const Spec& s : walk_specs())
      if (meets(n++, number<T>)) both<T>(s, all_of(s.p.d / 2 * 2));
  });
}

#ifndef FA_WITHOUT_HALF
TEST_F(scores, WideHeads) {
  for (Int d : {136, 256}) {
    const Spec s = sized_as(1, sized(2, 1), 1, 66, 67, d, Causal::top_left);
    both<bf16>(s, all_of(d));
    both<bf16>(s, alibi());
  }
}
#endif

// ---- ALiBi ----

TEST_F(scores, SlopesOfBatchAndHead) {
  each_type([]<class T>(T) {
    Given given = alibi();
    given.slopes_of_batch = true;
    both<T>(sized_as(2, sized(4, 2), sized(2, 1), 20, 40, 16, Causal::none, {40, 17}), given);
  });
}

// Without a mask keys lie on both sides of the query; an offset moves it.
TEST_F(scores, DistancesOnBothSides) {
  each_type([]<class T>(T) {
    for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      if (meets(std::size_t(causal), number<T>))
        both<T>(sized_as(1, 2, 2, 40, 20, 16, causal), alibi());
      Given moved = alibi();
      for (Int offset : {Int(-9), Int(0), Int(1) << 30}) {
        moved.offset = offset;
        if (causal == Causal::none && offset < 100)
          both<T>(sized_as(1, 1, 1, 20, 40, 16, causal), moved);
        ForwardOf<T> far(sized_as(1, 1, 1, 5, 7, 16), moved);
        for (float& slope : far.asked.slopes) slope = 1e-8f;
        far.run();
        EXPECT_EQ(far.verdict(), "") << offset;
      }
    }
  });
}

// By hand: with Q = 0 and V_j = j, slope log 2, one query at position 2 of three keys: weights
// 1/4, 1/2 and 1, so O = (0 + 1/2 + 2) / (7/4).
TEST_F(scores, ThreeKeysByHand) {
  each_type([]<class T>(T) {
    Given given = alibi();
    given.offset = 2;
    ForwardOf<T> c(sized_as(1, 1, 1, 1, 3, 8), given);
    c.asked.slopes[0] = float(std::log(2.));
    c.Q.fill([](Int, Int, Int, Int) { return 0; });
    c.meant.V.fill([](Int, Int, Int j, Int) { return double(j); });
    c.turn();
    c.run();
    EXPECT_EQ(c.verdict(), "");
    EXPECT_NEAR(double(c.meant.O.at(0, 0, 0, 0)), 2.5 / 1.75, sizeof(T) == 4 ? 1e-6 : 1e-2);
    EXPECT_NEAR(double(c.meant.LSE.at(0, 0, 0)), std::log(1.75), 1e-6);
  });
}

// ---- soft cap ----

TEST_F(scores, CapsOfAllSizes) {
  each_type([]<class T>(T) {
    for (double cap : {0.1, 1.0, 30.0, 1e30}) {
      Spec s = sized_as(1, 1, 1, 20, 40, 16);
      s.p.scale = 2;  // scores of a dozen and more
      both<T>(s, capped(cap));
    }
  });
}

TEST_F(scores, ScaleOfAnySignInFp32) {
  for (double scale : {-0.7, 0.0, 3.0}) {
    Spec s = sized_as(1, 1, 1, 20, 40, 16);
    s.p.scale = scale;
    both<float>(s, all_of(16));
  }
}

// ---- bias ----

// Every way to repeat it; dbias is summed over what is repeated.
TEST_F(scores, BroadcastBiases) {
  each_type([]<class T>(T) {
    for (int n = 0; n < 8; ++n)
      if (meets(std::size_t(n), number<T>))
        both<T>(sized_as(2, 2, 1, 35, 37, 16, Causal::bottom_right, {37, 20}),
                biased(n % 2 ? Given::Bias::of_T : Given::Bias::of_fp32, n & 4, n & 2, n & 1));
  });
}

// Rows that do not begin where two numbers can be read at once; one row, several tiles of rows.
TEST_F(scores, BiasesOfAllLayouts) {
  std::vector<Layout> layouts(4);
  layouts[0].gap = 1;
  layouts[1].gap = 2, layouts[1].offset = 1;
  layouts[2].reversed = true;
  layouts[3].order = Layout::Order::BNHD;
  each_type([&]<class T>(T) {
    for (std::size_t n = 0; n < 8; ++n) {
      Given given = biased(n % 2 ? Given::Bias::of_T : Given::Bias::of_fp32);
      given.bias_layout = layouts[n / 2];
      if (meets(n, number<T>)) both<T>(sized_as(2, 2, 1, 17, 38, 16), given);
    }
    if (meets(2, number<T>))
      both<T>(sized_as(1, 2, 1, sized(150, 70), 40, 16, Causal::top_left),
              biased(Given::Bias::of_T, true, false, false));
  });
}

// -infinity hides a pair; a row that sees none is one that the mask has hidden.
TEST_F(scores, ABiasMayHide) {
  each_type([]<class T>(T) {
    for (const bool hides_a_row : {false, true})
      for (const Given::Bias type : {Given::Bias::of_T, Given::Bias::of_fp32}) {
        const Spec s = sized_as(1, 1, 1, 20, 40, 16);
        const auto hide = [&](Asked<T>& asked) {
          const auto value = [&](Int, Int, Int i, Int j) {
            const bool hidden = (hides_a_row && i == 7) || (i + j) % 3 == 0 || (i == 8 && j < 33);
            return hidden ? -INFINITY : 0.25;
          };
          type == Given::Bias::of_T ? asked.bias.fill(value) : asked.bias32.fill(value);
        };
        ForwardOf<T> forward(s, biased(type));
        hide(forward.asked);
        forward.run();
        EXPECT_EQ(forward.verdict(), "") << hides_a_row;
        BackwardOf<T> backward(s, biased(type));
        hide(backward.asked);
        backward.meant.fill_context();
        backward.run();
        EXPECT_EQ(backward.verdict(), "") << hides_a_row;
        if (!hides_a_row) continue;
        EXPECT_EQ(double(forward.meant.LSE.at(0, 0, 7)), -INFINITY);
        for (Int j = 0; j < 40; ++j) EXPECT_EQ(backward.dbias.at(0, 0, 7, j), 0) << j;
        for (Int x = 0; x < 16; ++x) EXPECT_EQ(double(backward.meant.dQ.at(0, 0, 7, x)), 0) << x;
      }
  });
}

// On tensor cores a bias of 16 bits comes in tiles if its rows begin at multiples of 16 bytes.
// Several tiles of rows and of keys, the last ones not full; one row for all; rows with gaps.
TEST_F(scores, BiasesInTiles) {
  Given gaps = biased();
  gaps.bias_layout.gap = 8;
  each_type([&]<class T>(T) {
    if (meets(1, number<T>))
      both<T>(sized_as(1, 2, 1, sized(150, 70), sized(200, 136), 16, Causal::bottom_right),
              biased());
    if (meets(2, number<T>)) both<T>(sized_as(2, 2, 1, 40, 72, 72, Causal::none, {72, 50}), gaps);
    if (meets(1, number<T>))
      both<T>(sized_as(2, 1, 1, 70, 40, 100, Causal::top_left),
              biased(Given::Bias::of_T, false, true, false));
  });
}

// NaN of what the mask hides changes nothing, whether rows come one by one or in tiles.
TEST_F(scores, HiddenBiasesNeverLeak) {
  each_type([]<class T>(T) {
    for (Int Nk : {70, 72}) {
      const Spec s = sized_as(2, 1, 1, 37, Nk, 16, Causal::bottom_right, {Nk, 33});
      const auto poison = [&](Asked<T>& asked) {
        asked.bias.fill([&, old = asked.bias](Int b, Int h, Int i, Int j) {
          const Int length = b == 0 ? Nk : 33;
          return j >= length || j > i + Nk - 37 ? std::nan("") : double(old.at(b, h, i, j));
        });
      };
      ForwardOf<T> forward(s, biased());
      poison(forward.asked);
      forward.run();
      EXPECT_EQ(forward.verdict(), "") << Nk;
      BackwardOf<T> backward(s, biased());
      poison(backward.asked);
      backward.run();
      EXPECT_EQ(backward.verdict(), "") << Nk;
    }
  });
}

TEST_F(scores, NaNOfABiasStaysInItsRow) {
  each_type([]<class T>(T) {
    ForwardOf<T> c(sized_as(1, 1, 1, 40, 40, 16, Causal::top_left), biased());
    c.asked.bias.fill([old = c.asked.bias](Int b, Int h, Int i, Int j) {
      return i == 21 && j == 5 ? std::nan("") : double(old.at(b, h, i, j));
    });
    c.run();
    for (Int i = 0; i < 40; ++i)
      for (Int x = 0; x < 16; ++x)
        EXPECT_EQ(std::isnan(double(c.meant.O.at(0, 0, i, x))), i == 21) << i << " " << x;
  });
}

// ---- rotary ----

TEST_F(scores, RotaryOfPartsOfARow) {
  each_type([]<class T>(T) {
    for (Int dims : {2, 6, 16, 32, 40})
      for (bool interleaved : {false, true})
        if (meets(std::size_t(dims / 2 + interleaved), number<T>))
          both<T>(sized_as(1, 2, 1, 17, 33, 40, Causal::bottom_right), rotary(dims, interleaved));
    Given moved = rotary(16);
    moved.offset = 11;
    both<T>(sized_as(1, 1, 1, 20, 5, 16), moved);
  });
}

TEST_F(scores, RotaryInAnyLayout) {
  std::vector<Layout> layouts(3);
  layouts[0].order = Layout::Order::BNHD;
  layouts[1].gap = 3, layouts[1].offset = 1;
  layouts[2].reversed = true;
  each_type([&]<class T>(T) {
    for (std::size_t n = 0; n < 3; ++n) {
      Spec s = sized_as(2, 4, 2, 20, 33, 32);
      s.layout = layouts[n];
      if (meets(n, number<T>)) both<T>(s, rotary(32));
    }
  });
}

// Turned in the kernel or turned before: the same numbers, so the same bits.
TEST_F(scores, TurnedBeforehandIsTheSame) {
  each_type([]<class T>(T) {
    for (bool interleaved : {false, true}) {
      const Spec s = sized_as(1, 2, 1, 70, 66, 32, Causal::top_left);
      ForwardOf<T> in_kernel(s, rotary(32, interleaved)), before(s, Given{});
      before.kernel = walk::Kernel::fa2;
      in_kernel.run();
      before.Q = in_kernel.meant.Q;
      before.K = in_kernel.meant.K;
      before.run();
      EXPECT_TRUE(in_kernel.all_bits() == before.all_bits()) << sizeof(T);
    }
  });
}

// Without queries or without keys nobody reads the tables, whatever the positions: here they have
// no rows, and lie in a page of addresses without memory. Who reads them is ended.
TEST_F(scores, RotaryOfNobodyReadsNoTable) {
  const Edge page(0);
  const float* const table = static_cast<float*>(page.data()) + 512;  // the page's middle
  std::size_t n = 0;
  each_type([&]<class T>(T) {
    for (const bool queries : {true, false})
      for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
        for (const Given& given : {Given{}, all_of(0)}) {
          const Spec s = sized_as(1, 2, 1, queries ? 20 : 0, queries ? 0 : 40, 16, causal);
          const walk::Rotary rotary{table, table, 0, n % 4 < 2 ? 16 : 6, n % 2 == 1};
          ++n;
          ForwardOf<T> forward(s, given);
          forward.asked.not_read = rotary;
          forward.run();
          EXPECT_EQ(forward.verdict(), "") << s.name() << given.name();
          BackwardOf<T> backward(s, given);
          backward.asked.not_read = rotary;
          backward.run();
          EXPECT_EQ(backward.verdict(), "") << s.name() << given.name();
        }
  });
}

// ---- what changes nothing ----

template <class T>
std::vector<char> forward_bits(const Spec& s, const Given& given,
                               const std::function<void(Asked<T>&)>& change,
                               walk::Kernel kernel = walk::Kernel::fa2) {
  ForwardOf<T> c(s, given);
  c.kernel = kernel;
  change(c.asked);
  c.run();
  return c.all_bits();
}
template <class T>
std::vector<char> gradient_bits(const Spec& s, const Given& given,
                                const std::function<void(Asked<T>&)>& change,
                                walk::Kernel kernel = walk::Kernel::fa2) {
  BackwardOf<T> c(s, Given{});  // O and LSE of a plain forward
  c.kernel = kernel;
  c.asked = Asked<T>(s, given);
  change(c.asked);
  c.run();
  return c.all_bits();
}

TEST_F(scores, WhatChangesNothingChangesNoBit) {
  each_type([]<class T>(T) {
    for (Int d : {32, 72}) {
      if (!meets(d == 32 ? 0 : 1, number<T> % 2)) continue;
      const Spec s = sized_as(1, sized(2, 1), 1, 40, 36, d, Causal::bottom_right);
      const auto as_it_is = [](Asked<T>&) {};
      const std::vector<char> plain = forward_bits<T>(s, Given{}, as_it_is),
                              gradients = gradient_bits<T>(s, Given{}, as_it_is);
      const auto same = [&](const Given& given, const std::function<void(Asked<T>&)>& change) {
        EXPECT_TRUE(forward_bits<T>(s, given, change) == plain) << d << given.name();
        EXPECT_TRUE(gradient_bits<T>(s, given, change) == gradients) << d << given.name();
      };
      same(alibi(), [](Asked<T>& a) { std::fill(a.slopes.begin(), a.slopes.end(), 0.f); });
      const auto zeros = [](Int, Int, Int, Int) { return 0.; };
      same(biased(), [&](Asked<T>& a) { a.bias.fill(zeros); });
      same(biased(Given::Bias::of_fp32), [&](Asked<T>& a) { a.bias32.fill(zeros); });
      const auto no_angle = [](Asked<T>& a) {
        std::fill(a.cos.begin(), a.cos.end(), 1.f);
        std::fill(a.sin.begin(), a.sin.end(), 0.f);
      };
      same(rotary(32), no_angle);
      same(rotary(32, true), no_angle);
    }
  });
}

#ifndef FA_WITHOUT_HALF
// Nothing asked for: the bits of the kernels that this walk started from.
TEST_F(scores, PlainIsTheCoursesOwn) {
  for (Int d : {64, 100}) {
    const Spec s = sized_as(1, 2, 1, 70, 66, d, Causal::bottom_right);
    ForwardOf<bf16> walked(s, Given{});
    walked.kernel = walk::Kernel::fa2;
    walked.run();
    ForwardCase<bf16> course(s, true);
    on_gpu_forward<bf16>([](const Problem& p, const Forward<bf16>& t) {
      optimized::Options options;
      options.kernel = optimized::Kernel::fa2;
      optimized::forward(p, as_device<__nv_bfloat16>(t), options);
    })(course.call());
    std::vector<char> want = bits(course.O);
    for (char c : bits(course.LSE)) want.push_back(c);
    EXPECT_TRUE(walked.all_bits() == want) << d;

    BackwardOf<bf16> back(s, Given{});
    back.kernel = walk::Kernel::fa2;
    back.run();
    BackwardCase<bf16> gradients(s);
    on_gpu_backward<bf16>([](const Problem& p, const Backward<bf16>& t) {
      optimized::BackwardOptions options;
      options.kernel = optimized::BackwardKernel::swizzle;
      const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
      options.scratch = scratch;
      optimized::backward(p, as_device<__nv_bfloat16>(t), options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(gradients.call());
    EXPECT_TRUE(bits(back.meant.dQ) == bits(gradients.dQ)) << d;
    EXPECT_TRUE(bits(back.meant.dK) == bits(gradients.dK)) << d;
    EXPECT_TRUE(bits(back.meant.dV) == bits(gradients.dV)) << d;
  }
}
#endif

// ---- hopper ----

#ifndef FA_WITHOUT_HALF
template <class T>
void by_hopper(const Spec& s, const Given& given) {
  ForwardOf<T> f(s, given);
  f.kernel = walk::Kernel::hopper;
  f.run();
  EXPECT_EQ(f.verdict(), "") << s.name() << given.name();
}

// In turns and not; on the CPU each call one of the two.
template <class T>
void back_by_hopper(const Spec& s, const Given& given, const std::vector<float>& slopes = {}) {
  static unsigned calls = 0;
  const auto now = std::size_t(std::popcount(calls++));  // 0, 1, 1, 2, ...: in step with nothing
  for (const bool deterministic : {false, true}) {
    if (!either(now, deterministic)) continue;
    BackwardOf<T> f(s, given);
    if (!slopes.empty()) {
      f.asked.slopes = slopes;
      f.meant.fill_context();
    }
    f.kernel = walk::Kernel::hopper;
    f.deterministic = deterministic;
    f.run();
    EXPECT_EQ(f.verdict(), "") << s.name() << given.name() << (deterministic ? ", in turns" : "");
  }
}

// Several tiles of everything: masks and lengths, groups, types, dimensions (on the CPU in turn).
void hopper_forward(std::initializer_list<Int> dimensions) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  const Int N = sized(900, 300);
  std::size_t n = 0;
  for (Int d : dimensions)
    for (const Given& given : {alibi(), capped(2)})
      for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
        const bool now = either(n % 6 / 2, n / 6);
        Spec s = sized_as(1, 2, 1, N - 50, N, d, causal);
        if (n++ % 2) s = sized_as(2, 2, 1, N / 2, N - 7, d, causal, {N - 30, 3});
        if (!now) continue;
        n % 3 ? by_hopper<bf16>(s, given) : by_hopper<half>(s, given);
      }
}
TEST_F(scores, HopperForward) { hopper_forward({64, 128}); }
TEST_F(scores, HopperForwardOddAndWide) { hopper_forward({40, 256}); }

void hopper_backward(std::initializer_list<Int> dimensions) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  const Int N = sized(700, 200);
  std::size_t n = 0;
  for (Int d : dimensions)
    for (const Given& given : {alibi(), capped(2)})
      for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
        const bool now = either(n % 6 / 2, n / 6);
        Spec s = sized_as(1, 2, 1, N - 50, N, d, causal);
        if (n++ % 2) s = sized_as(2, 2, 1, N / 2, N - 7, d, causal, {N - 30, 3});
        if (!now) continue;
        n % 3 ? back_by_hopper<bf16>(s, given) : back_by_hopper<half>(s, given);
      }
  for (const Given& given : {alibi(), capped(2)})  // no mask, whole tiles
    back_by_hopper<bf16>(sized_as(1, sized(4, 2), sized(2, 1), 150, 256, *dimensions.begin()),
                         given);
}
TEST_F(scores, HopperBackward) { hopper_backward({64, 128}); }
TEST_F(scores, HopperBackwardOdd) { hopper_backward({40, 96}); }

// Positions before all keys, among them and behind them all; with slopes that add as they go, too.
TEST_F(scores, HopperDistancesOnBothSides) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  const Int heads = sized(2, 1), Nq = sized(230, 140);
  std::size_t n = 0;
  for (Int offset : {-500, -120, 0, 77, 1000}) {
    Given moved = alibi();
    moved.offset = offset;
    for (Int d : {64, 128}) {
      if (d == 64 || either(n, 0))
        by_hopper<bf16>(sized_as(1, heads, 1, Nq, sized(450, 330), d), moved);
      if (offset > -500 && either(n, d == 128))
        back_by_hopper<bf16>(sized_as(1, heads, 1, Nq, sized(350, 260), d), moved);
    }
    ++n;
  }
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    const Spec s = sized_as(1, 2, 1, sized(200, 140), sized(300, 200), 64, causal);
    ForwardOf<bf16> f(s, alibi());
    f.asked.slopes = {-0.02f, 0.03f};
    f.kernel = walk::Kernel::hopper;
    f.run();
    EXPECT_EQ(f.verdict(), "") << int(causal);
    back_by_hopper<bf16>(s, alibi(), {-0.02f, 0.03f});
  }
}

// Far away O is what it is near by: behind a mask, and without one, on either side.
TEST_F(scores, HopperFarAway) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (const double sign : {1., -1.}) {
      if (causal != Causal::none && sign < 0) continue;
      std::vector<double> O[2];
      for (const bool far : {false, true}) {
        Given moved = alibi();
        moved.offset = Int(sign) * (far ? Int(1) << 20 : 1000);
        ForwardOf<bf16> f(sized_as(1, 1, 1, 70, 300, 64, causal), moved);
        f.asked.slopes = {0.03f};
        f.kernel = walk::Kernel::hopper;
        f.run();
        f.meant.O.for_each([&](Int b, Int h, Int i, Int x) {
          O[far].push_back(double(f.meant.O.at(b, h, i, x)));
        });
      }
      for (std::size_t n = 0; n < O[0].size(); ++n)
        EXPECT_NEAR(O[0][n], O[1][n], 1e-6) << n << " " << sign;
    }
}

TEST_F(scores, HopperSlopesOfBatchAndHead) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  Given given = alibi();
  given.slopes_of_batch = true;
  const Spec s = sized_as(2, 4, 2, 140, 200, 64, Causal::none, {200, 17});
  by_hopper<bf16>(s, given);
  back_by_hopper<bf16>(s, given);
  // Behind a mask, with d > 64 and many heads a key head, each step is another head's.
  BackwardOf<bf16> b(sized_as(2, 6, 1, 140, 200, 72, Causal::bottom_right, {200, 17}), given);
  b.kernel = walk::Kernel::hopper;
  b.run();
  EXPECT_EQ(b.verdict(), "");
}

// Tiny ones make every score the cap; at the largest one an error of 2^-22 is the cap's own.
TEST_F(scores, HopperCapsOfAllSizes) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  const Spec s = sized_as(1, 1, 1, 70, 140, 64);
  for (double cap : {1e-37, 1e-3, 0.3, 5., 50., 100.}) by_hopper<bf16>(s, capped(cap));
  for (double cap : {0.3, 5., 50., 100.}) back_by_hopper<bf16>(s, capped(cap));
  by_hopper<bf16>(sized_as(1, 1, 1, 20, 40, 128), capped(100));
  const auto bits_by = [&](walk::Kernel kernel, double cap) {
    return forward_bits<bf16>(
        s, capped(cap), [](Asked<bf16>&) {}, kernel);
  };
  EXPECT_TRUE(bits_by(walk::Kernel::best, 101) == bits_by(walk::Kernel::fa2, 101));
  EXPECT_FALSE(bits_by(walk::Kernel::best, 3) == bits_by(walk::Kernel::fa2, 3));
}

// Tiles of 192 rows, whose last group has none; and short sequences behind a mask.
TEST_F(scores, HopperWithTallTiles) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (const Given& given : {alibi(), capped(2)})
      by_hopper<bf16>(
          sized_as(1, sized(2, 1), 1, 300, causal == Causal::none ? 300 : 1100, 64, causal), given);
}

// Long rows without a mask, and positions far behind.
TEST_F(scores, HopperOnLongRows) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  Given moved = alibi();
  moved.offset = 4000;
  for (const Given& given : {moved, capped(2)})
    by_hopper<bf16>(sized_as(1, 1, 1, sized(200, 40), 8200, 72), given);
}

TEST_F(scores, HopperWhereNobodyLooks) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  std::size_t n = 0;
  for (const Given& given : {alibi(), capped(2)})
    for (Int d : {64, 128}) {
      if (!either(n++, given.alibi)) continue;
      by_hopper<bf16>(sized_as(1, 2, 1, 300, 40, d, Causal::bottom_right), given);
      by_hopper<bf16>(sized_as(2, 1, 1, 150, 140, d, Causal::none, {0, 139}), given);
      back_by_hopper<bf16>(sized_as(1, 2, 1, 300, 40, d, Causal::bottom_right), given);
      back_by_hopper<bf16>(sized_as(2, 1, 1, 150, 140, d, Causal::none, {0, 139}), given);
    }
}

TEST_F(scores, HopperCountsItsTilesWhereItHasScratch) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  const Int N = sized(900, 200), B = sized(2, 1);
  for (const Given& given : {Given{}, alibi(), capped(2)}) {
    std::vector<char> all[2];
    for (const bool counted : {false, true}) {
      ForwardOf<bf16> f(sized_as(B, 4, 2, N, N - 20, 128, Causal::bottom_right), given);
      f.kernel = walk::Kernel::hopper;
      f.counted = counted;
      f.run();
      EXPECT_EQ(f.verdict(), "") << given.name();
      all[counted] = f.all_bits();
    }
    EXPECT_TRUE(all[0] == all[1]) << given.name();
  }
}

// A NaN of a key reaches the rows that see it, and no other; with a cap its neighbour must not
// bring it to them. What is padded holds NaN, too.
TEST_F(scores, HopperKeepsNaNWhereItIs) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  for (const Given& given : {alibi(), capped(2)})
    for (Int key : {64, 65, 129, 170, 171}) {
      ForwardOf<bf16> f(sized_as(1, 1, 1, 200, 200, 64, Causal::top_left, {170}), given);
      f.K.at(0, 0, key, 5) = bf16(std::nanf(""));
      f.kernel = walk::Kernel::hopper;
      f.run();
      f.meant.O.for_each([&](Int b, Int h, Int i, Int x) {
        EXPECT_EQ(std::isnan(float(f.meant.O.at(b, h, i, x))), key < 170 && i >= key)
            << key << ", row " << i << given.name();
      });
    }
}

// The bits of the stage's own hopper: where nothing is asked for, and where slopes are 0.
TEST_F(scores, HopperPlainIsTheStagesOwn) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (Int d : {64, 128, 256}) {
      const Int Nq = sized(200, 140), Nk = sized(330, 200);
      const Spec s = sized_as(1, sized(2, 1), 1, Nq, Nk, d, causal, {Nk - 20});
      ForwardCase<bf16> stage(s, true);
      on_gpu_forward<bf16>([](const Problem& p, const Forward<bf16>& t) {
        const DeviceMemory scratch(sizeof(unsigned));
        optimized::Options options;
        options.kernel = optimized::Kernel::hopper;
        options.scratch = scratch;
        optimized::forward(p, as_device<__nv_bfloat16>(t), options);
        FA_CUDA_CHECK(cudaDeviceSynchronize());
      })(stage.call());
      std::vector<char> want = bits(stage.O);
      for (char c : bits(stage.LSE)) want.push_back(c);
      const auto no_slope = [](Asked<bf16>& a) {
        std::fill(a.slopes.begin(), a.slopes.end(), 0.f);
      };
      const auto as_it_is = [](Asked<bf16>&) {};
      EXPECT_TRUE(forward_bits<bf16>(s, Given{}, as_it_is, walk::Kernel::hopper) == want) << d;
      EXPECT_TRUE(forward_bits<bf16>(s, alibi(), no_slope, walk::Kernel::hopper) == want) << d;
      if (d > 128) continue;
      BackwardCase<bf16> gradients(s);
      hopper_in_turns(gradients.call());
      for (const Given& given : {Given{}, alibi()}) {
        BackwardOf<bf16> ours(s, Given{});  // O and LSE of a plain forward
        ours.asked = Asked<bf16>(s, given);
        no_slope(ours.asked);
        ours.kernel = walk::Kernel::hopper;
        ours.deterministic = true;
        ours.run();
        EXPECT_TRUE(bits(ours.meant.dQ) == bits(gradients.dQ)) << d << given.name();
        EXPECT_TRUE(bits(ours.meant.dK) == bits(gradients.dK)) << d << given.name();
        EXPECT_TRUE(bits(ours.meant.dV) == bits(gradients.dV)) << d << given.name();
      }
    }
}

TEST_F(scores, HopperRefusesInWords) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  const auto why_not = [](Int d, const Given& given, bool forward) {
    const Spec s = sized_as(1, 1, 1, 20, 130, d);
    ForwardOf<bf16> f(s, given);
    BackwardOf<bf16> b(s, given);
    f.kernel = b.kernel = walk::Kernel::hopper;
    return refusal([&] { forward ? f.run() : b.run(); });
  };
  Given both_of = alibi();
  both_of.cap = 2;
  for (const bool forward : {true, false}) {
    for (const Given& given : {biased(), rotary(16), both_of})
      expect_words(why_not(64, given, forward),
                   {"scores: hopper takes ALiBi alone or a soft cap alone"});
    expect_words(why_not(64, capped(101), forward),
                 {"scores: hopper takes a cap up to 100, got 101"});
    expect_words(why_not(20, alibi(), forward), {"scores: hopper wants", "d a multiple of 8"});
  }
  expect_words(why_not(136, alibi(), false),
               {"scores: hopper's backward takes d up to 128, got 136"});
}
#endif

// ---- gradients, without the oracle ----

// The loss sum dO o O in double, written out once more, and its central differences.
TEST_F(scores, GradientsByCentralDifferences) {
  const Spec s = sized_as(2, 2, 1, 4, 5, 6, Causal::bottom_right);
  for (const Given& given : {alibi(), capped(0.8), biased(Given::Bias::of_T, false, true, false),
                             rotary(4), rotary(6, true), all_of(6)}) {
    BackwardOf<float> c(s, given);
    c.run();
    const Problem& p = s.p;
    Array Q = to_array(c.Q), K = to_array(c.K), V = to_array(c.meant.V);
    const Array dO = to_array(c.meant.dO);
    const bool of_T = given.bias == Given::Bias::of_T;
    Array bias = to_array(of_T ? c.asked.bias : c.asked.bias32);
    const auto turned = [&](const Array& X, Int b, Int h, Int i, Int x, Int first) {
      return c.asked.turn(x, first + i, 1, [&](Int other, double cos, double sin) {
        return X.at(b, h, i, x) * cos + (sin == 0 ? 0 : X.at(b, h, i, other) * sin);
      });
    };
    const auto loss = [&] {
      double sum = 0;
      for (Int b = 0; b < p.B; ++b)
        for (Int h = 0; h < p.Hq; ++h)
          for (Int i = 0; i < p.Nq; ++i) {
            double l = 0, o = 0;
            for (Int j = 0; j <= i + 1; ++j) {
              double score = 0, of_V = 0;
              for (Int x = 0; x < p.d; ++x) {
                score += turned(Q, b, h, i, x, c.asked.offset) * turned(K, b, 0, j, x, 0) /
                         std::sqrt(6.);
                of_V += dO.at(b, h, i, x) * V.at(b, 0, j, x);
              }
              if (given.cap > 0) score = given.cap * std::tanh(score / given.cap);
              if (given.alibi)
                score -=
                    double(c.asked.slopes[std::size_t(given.slopes_of_batch ? 2 * b + h : h)]) *
                    std::fabs(double(i + c.asked.offset - j));
              if (given.bias != Given::Bias::none)
                score += bias.at(given.bias_of_batch ? b : 0, given.bias_of_head ? h : 0,
                                 given.bias_of_row ? i : 0, j);
              l += std::exp(score);
              o += std::exp(score) * of_V;
            }
            sum += o / l;
          }
      return sum;
    };
    const auto check = [&](const char* name, Array& X, const Buffer<float>& got) {
      std::vector<double*> all;
      for (double& x : X.data) all.push_back(&x);
      const std::vector<double> want = central_differences(all, loss);
      std::size_t n = 0;
      got.for_each([&](Int b, Int h, Int i, Int x) {
        EXPECT_NEAR(got.at(b, h, i, x), want[n], 2e-5) << name << given.name() << " " << n;
        ++n;
      });
    };
    check("dQ", Q, c.meant.dQ);
    check("dK", K, c.meant.dK);
    check("dV", V, c.meant.dV);
    if (given.bias != Given::Bias::none) check("dbias", bias, c.dbias);
  }
}

// ---- fuzz ----

TEST_F(scores, Fuzz) {
  std::mt19937_64 engine(20260101);
  const auto upto = [&](Int n) { return Int(engine() % std::uint64_t(n + 1)); };
  for (int n = 0; n < int(sized(60, 6)); ++n) {
    const Int Hkv = 1 + upto(1), group = 1 + upto(2);
    Spec s = sized_as(1 + upto(1), Hkv * group, Hkv, 1 + upto(80), 1 + upto(80), 2 + upto(70),
                      Causal(upto(2)));
    s.seed = std::uint64_t(n) + 1;
    if (upto(2) == 0)
      for (Int b = 0; b < s.p.B; ++b) s.lengths.push_back(upto(s.p.Nk));
    Given given = biased(Given::Bias(upto(2)), upto(1), upto(1), upto(1));
    given.alibi = upto(1);
    given.slopes_of_batch = given.alibi && upto(1);
    given.cap = upto(1) ? 0.5 + double(upto(4)) : 0;
    given.turned = upto(1) ? 2 * (1 + upto(s.p.d / 2 - 1)) : 0;
    given.interleaved = upto(1);
    if (upto(3) == 0) given.offset = upto(9);
    given.bias_layout.gap = upto(2);
    each_type([&]<class T>(T) {
      if (meets(std::size_t(n), number<T>)) both<T>(s, given);
    });
  }
}

#ifndef FA_WITHOUT_HALF
// What hopper takes, which is little of what Fuzz asks for: d a multiple of 8, rows at multiples of
// 16 bytes, one change or none. By name, so that nothing is left to fa2.
TEST_F(scores, FuzzOfHopper) {
  if (!has_hopper()) GTEST_SKIP() << without_hopper;
  std::mt19937_64 engine(20260102);
  const auto upto = [&](Int n) { return Int(engine() % std::uint64_t(n + 1)); };
  for (int n = 0; n < int(sized(60, 8)); ++n) {
    const Int Hkv = 1 + upto(1), group = 1 + upto(5), N = sized(250, 160);
    Spec s = sized_as(1 + upto(1), Hkv * group, Hkv, 1 + upto(N), 1 + upto(N), 8 * (1 + upto(15)),
                      Causal(upto(2)));
    s.seed = std::uint64_t(n) + 1;
    if (upto(1) == 0)
      for (Int b = 0; b < s.p.B; ++b) s.lengths.push_back(upto(s.p.Nk));
    if (upto(2) == 0) s.p.scale = 0.05 + double(upto(20)) / 20;
    s.layout.order = upto(1) ? Layout::Order::BNHD : Layout::Order::BHND;
    s.layout.in_16_bytes = true;
    s.layout.gap = upto(2);
    const Int change = upto(2);
    // The LSE of a single key is right to 2^-22 of the cap.
    Given given = change == 0 ? Given{} : change == 1 ? alibi() : capped(0.5 + double(upto(19)));
    given.slopes_of_batch = given.alibi && upto(1);
    if (upto(2) == 0) given.offset = upto(400) - 200;
    const bool flag = upto(1);
    const auto run = [&]<class T>(T) {
      ForwardOf<T> forward(s, given);
      forward.kernel = walk::Kernel::hopper;
      forward.counted = flag;
      forward.run();
      EXPECT_EQ(forward.verdict(), "") << s.name() << given.name() << ", counted " << flag;
      BackwardOf<T> backward(s, given);
      backward.kernel = walk::Kernel::hopper;
      backward.deterministic = flag;
      backward.run();
      EXPECT_EQ(backward.verdict(), "") << s.name() << given.name() << ", in turns " << flag;
    };
    n % 2 ? run(half()) : run(bf16());
  }
}
#endif

// ---- what is promised besides ----

// Each change alone, by every kernel that takes it. On the CPU a change meets one of the two types
// of 16 bits.
template <class T>
std::vector<std::pair<Given, walk::Kernel>> changes_by_kernel() {
  std::vector<std::pair<Given, walk::Kernel>> all;
  std::size_t n = 0;
  for (const Given& given : {alibi(), capped(2), biased(), rotary(8)}) {
    if (sizeof(T) == 2 && n++ % 2 != number<T> - 1 && sized(0, 1) == 1) continue;
    all.push_back({given, walk::Kernel::fa2});
    if (sizeof(T) == 2 && may_be_for_hopper(given)) all.push_back({given, walk::Kernel::hopper});
  }
  return all;
}

// NaN where it may be, and the same bits where it may not: what each element of `now` must be is
// NaN in a query reaches its row, in a key exactly the rows that see it, and nobody else a bit.
TEST_F(scores, NaNStaysWhereItIsSeen) {
  each_type([]<class T>(T) {
    for (const auto& [given, kernel] : changes_by_kernel<T>()) {
      ForwardOf<T> c(sized_as(1, 2, 1, 80, 80, 16, Causal::top_left), given);
      c.kernel = kernel;
      c.run();
      const Buffer<T> O = c.meant.O, Q = c.Q;
      const Buffer<float> LSE = c.meant.LSE;
      for (const bool in_key : {false, true}) {
        in_key ? c.K.at(0, 0, 37, 3) = T(NAN) : c.Q.at(0, 1, 37, 3) = T(NAN);
        c.run();
        const auto hit = [&](Int, Int h, Int i, Int) -> std::optional<bool> {
          return in_key ? i >= 37 : h == 1 && i == 37;
        };
        const std::string what = given.name() + (in_key ? ", in a key" : ", in a query");
        expect_hit("O", c.meant.O, O, hit, what);
        expect_hit("LSE", c.meant.LSE, LSE, hit, what);
        c.Q = Q;
      }
    }
  });
}
// In gradients it may reach what shares a tile with it: rows that see it are NaN, and those of
// other tiles have no bit changed.
TEST_F(scores, NaNOfGradientsStaysInItsTiles) {
  each_type([]<class T>(T) {
    constexpr Int tile = sizeof(T) == 4 ? 64 : 128, N = tile + 12, query = 10, key = tile + 5;
    for (const auto& [given, kernel] : changes_by_kernel<T>()) {
      BackwardOf<T> c(sized_as(1, 1, 1, N, N, 8, Causal::top_left), given);
      c.kernel = kernel;
      c.deterministic = true;
      c.run();
      const Buffer<T> Q = c.Q, dQ = c.meant.dQ, dK = c.meant.dK, dV = c.meant.dV;
      const Buffer<float> dbias = c.dbias;
      for (const bool in_key : {false, true}) {
        in_key ? c.K.at(0, 0, key, 3) = T(NAN) : c.Q.at(0, 0, query, 3) = T(NAN);
        c.run();
        const auto sure = [&](bool nan, bool same) {
          return nan ? std::optional(true) : same ? std::optional(false) : std::nullopt;
        };
        const auto of_query = [&](Int, Int, Int i, Int) {
          return in_key ? sure(i >= key, i < tile) : sure(i == query, i >= tile);
        };
        const auto of_key = [&](Int, Int, Int j, Int) {
          return in_key ? sure(j == key, j < tile) : sure(j <= query, j >= tile);
        };
        const auto of_pair = [&](Int, Int, Int i, Int j) {
          return in_key ? sure(i >= key && j == key, i < tile || j < tile)
                        : sure(i == query && j <= query, i != query);
        };
        const std::string what = given.name() + (in_key ? ", in a key" : ", in a query");
        expect_hit("dQ", c.meant.dQ, dQ, of_query, what);
        expect_hit("dK", c.meant.dK, dK, of_key, what);
        expect_hit("dV", c.meant.dV, dV, of_key, what);
        expect_hit("dbias", c.dbias, dbias, of_pair, what);
        c.Q = Q;
      }
    }
  });
}

// What lies behind the length leaves no bit, whatever it holds.
TEST_F(scores, PaddedKeysNeverLeak) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(2, 1, 1, 20, 90, 16, Causal::none, {33, 0});
    const auto poison = [&](Buffer<T>& x) {
      x.fill([&, old = x](Int b, Int h, Int j, Int e) {
        return j >= s.lengths[std::size_t(b)] ? std::nan("") : double(old.at(b, h, j, e));
      });
    };
    for (const auto& [given, kernel] : changes_by_kernel<T>()) {
      ForwardOf<T> forward(s, given);
      BackwardOf<T> backward(s, given);
      forward.kernel = backward.kernel = kernel;
      backward.deterministic = true;
      forward.run(), backward.run();
      EXPECT_EQ(forward.verdict(), "") << given.name();
      EXPECT_EQ(backward.verdict(), "") << given.name();
      const std::vector<char> O = forward.all_bits(), gradients = backward.all_bits();
      poison(forward.K), poison(forward.meant.V), poison(backward.K), poison(backward.meant.V);
      forward.run(), backward.run();
      EXPECT_TRUE(forward.all_bits() == O) << given.name() << ", kernel " << int(kernel);
      EXPECT_TRUE(backward.all_bits() == gradients) << given.name() << ", kernel " << int(kernel);
    }
  });
}

TEST_F(scores, LengthsOutsideAreClamped) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(3, 1, 1, 5, 40, 16, Causal::none, {0, 40, 40});
    auto all = changes_by_kernel<T>();
    if (sizeof(T) == 4) all.clear();  // it has one kernel for all
    all.push_back({all_of(16), walk::Kernel::fa2});
    for (const auto& [given, kernel] : all) {
      const auto same_bits = [&, &given = given, kernel = kernel](auto& c) {
        c.kernel = kernel;
        c.run();
        const std::vector<char> want = c.all_bits();
        c.meant.spec.lengths = {-3, 41, std::numeric_limits<Int>::max()};
        c.run();
        EXPECT_TRUE(c.all_bits() == want) << given.name() << ", kernel " << int(kernel);
      };
      ForwardOf<T> forward(s, given);
      same_bits(forward);
      BackwardOf<T> backward(s, given);
      backward.deterministic = true;
      same_bits(backward);
    }
  });
}

TEST_F(scores, TheSameBitsInEveryRun) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(sized(2, 1), 2, 1, sized(70, 40), sized(70, 40), 24, Causal::top_left);
    ForwardOf<T> forward(s, all_of(24));
    forward.run();
    const std::vector<char> first = forward.all_bits();
    forward.run();
    EXPECT_TRUE(forward.all_bits() == first);
    BackwardOf<T> backward(s, all_of(24));
    backward.run();
    const std::vector<char> gradients = backward.all_bits();
    backward.run();
    EXPECT_TRUE(backward.all_bits() == gradients);
  });
}

TEST_F(scores, LSEMayBeNull) {
  each_type([]<class T>(T) {
    ForwardCase<T> c(sized_as(1, 2, 1, 20, 40, 16), false);
    on_gpu_forward<T>([](const Problem& p, const Forward<T>& t) {
      walk::Scores<Device<T>> plain;
      walk::forward(p, as_device<Device<T>>(t), plain);
    })(c.call());
    EXPECT_EQ(c.verdict(), "");
  });
}

// A cap alone: it is all that needs no memory of its own.
TEST_F(scores, WorkIsPutOnTheStreamAndNobodyWaits) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(1, 2, 1, 20, 40, 16);
    walk::Scores<Device<T>> cap;
    cap.cap = 1.5;
    ForwardOf<T> forward(s, capped(1.5));
    EXPECT_EQ(on_its_stream(forward.call(),
                            [&](const Problem& p, const Forward<T>& t, cudaStream_t stream) {
                              walk::forward(p, as_device<Device<T>>(t), cap, {stream, {}});
                            }),
              "");
    EXPECT_EQ(forward.verdict(), "");
    BackwardOf<T> backward(s, capped(1.5));
    const DeviceMemory scratch(walk::scratch_bytes<Device<T>>(s.p));
    EXPECT_EQ(
        on_its_stream(backward.call(),
                      [&](const Problem& p, const Backward<T>& t, cudaStream_t stream) {
                        walk::backward(p, as_device<Device<T>>(t), cap, {}, {stream, scratch});
                      }),
        "");
    EXPECT_EQ(backward.verdict(), "");
  });
}

TEST_F(scores, NothingToDo) {
  each_type([]<class T>(T) {
    for (int what = 0; what < 4; ++what)
      both<T>(sized_as(what == 0 ? 0 : 2, what == 1 ? 0 : 2, what == 1 ? 0 : 1, what == 2 ? 0 : 3,
                       what == 3 ? 0 : 5, 16),
              what == 1 ? Given{} : all_of(16));
  });
}

// ---- errors ----

TEST_F(scores, RefusesInWords) {
  Problem p = sized_as(2, 4, 2, 20, 40, 16).p;
  std::vector<float> Q(2 * 4 * 20 * 16), K(2 * 2 * 40 * 16), V(K), O(Q), L(2 * 4 * 20), dO(Q),
      dQ(Q), dK(K), dV(K), bias(2 * 4 * 20 * 40), table(60 * 8), scratch(2 * 4 * 20);
  const auto of = [](std::vector<float>& x, Int H, Int N) {
    return contiguous(x.data(), H, N, 16);
  };
  const Forward<float> forward_of{of(Q, 4, 20), of(K, 2, 40), of(V, 2, 40), of(O, 4, 20), L.data()};
  const View<float> whole = contiguous(bias.data(), 4, 20, 40);
  using S = walk::Scores<float>&;
  const auto why = [&](const auto& change) {
    walk::Scores<float> s;
    change(s);
    return refusal([&] { walk::forward(p, forward_of, s); });
  };
  for (double cap : {0., -1., std::nan(""), double(INFINITY), 1e-60})
    expect_words(why([&](S s) { s.cap = cap; }),
                 {"scores: cap must be > 0 and finite in fp32, got "});
  expect_words(why([](S s) { s.slopes_of_batch = true; }),
               {"scores: slopes_of_batch is set, but slopes is null"});
  expect_words(why([&](S s) { s.bias = s.bias32 = whole; }),
               {"scores: bias and bias32 are both given"});
  expect_words(why([](S s) {
                 s.bias = {nullptr, 0, 0, 40};
               }),
               {"scores: bias is a null pointer, but has strides"});
  expect_words(why([](S s) {
                 s.bias32 = {nullptr, 0, 800, 0};
               }),
               {"scores: bias32 is a null pointer, but has strides"});
  expect_words(why([&](S s) {
                 s.bias = {whole.data, Int(1) << 61, 0, 0};
               }),
               {"scores: a stride of bias reaches beyond 64 bits"});
  expect_words(why([&](S s) { s.bias = {O.data(), 0, 0, 0}; }), {"scores: O overlaps bias"});
  expect_words(why([&](S s) { s.slopes = L.data(); }), {"scores: LSE overlaps slopes"});
  const auto tables = [&](S s, Int dims, Int positions) {
    s.rotary = {table.data(), table.data(), positions, dims, false};
  };
  for (Int dims : {3, -2})
    expect_words(why([&](S s) { tables(s, dims, 60); }),
                 {"scores: rotary.dims must be even and >= 0, got " + std::to_string(dims)});
  expect_words(why([&](S s) { tables(s, 18, 60); }),
               {"scores: rotary.dims must be at most d = 16, got 18"});
  expect_words(why([&](S s) { tables(s, 0, 60); }),
               {"scores: rotary.dims is 0, but there are tables"});
  expect_words(why([&](S s) {
                 tables(s, 16, 60);
                 s.rotary.sin = nullptr;
               }),
               {"scores: rotary.sin is a null pointer"});
  expect_words(why([&](S s) { tables(s, 16, 39); }),
               {"rotary.positions must be at least max(Nk, offset + Nq) = 40, got 39"});
  expect_words(why([&](S s) {
                 tables(s, 16, 60);
                 s.offset = 41;
               }),
               {"max(Nk, offset + Nq) = 61, got 60"});
  expect_words(why([&](S s) {
                 tables(s, 16, 60);
                 s.offset = -1;
               }),
               {"scores: rotary wants positions >= 0, but query 0 has offset -1"});
  expect_words(why([](S s) { s.offset = (Int(1) << 30) + 1; }),
               {"scores: offset must lie in [-2^30, 2^30], got 1073741825"});
  Problem nothing = p;
  nothing.Nq = 0;
  EXPECT_EQ(refusal([&] { walk::forward(nothing, forward_of, {}); }), "accepted");
  const auto sized = [&](const auto& change) {
    Problem q = p;
    change(q);
    return refusal([&] { walk::forward(q, forward_of, {}); });
  };
  expect_words(sized([](Problem& q) { q.d = 129; }), {"scores: d must lie in [1, 128], got 129"});
  expect_words(sized([](Problem& q) { q.Hq = 3; }), {"scores: Hq must be a multiple of Hkv"});
  expect_words(sized([](Problem& q) { q.scale = INFINITY; }), {"scores: scale must be finite"});
  expect_words(sized([](Problem& q) { q.Nk = (Int(1) << 30) + 1; }),
               {"scores: Nq and Nk must be at most 2^30, got 20 and 1073741825"});

  // of the backward alone
  std::vector<float> gradient(bias.size());
  const View<float> of_bias = contiguous(gradient.data(), 4, 20, 40);
  const auto back = [&](const auto& change) {
    Backward<float> t{of(Q, 4, 20), of(K, 2, 40),  of(V, 2, 40),  of(O, 4, 20), of(dO, 4, 20),
                      L.data(),     of(dQ, 4, 20), of(dK, 2, 40), of(dV, 2, 40)};
    walk::Scores<float> s;
    s.bias = whole;
    View<float> dbias = of_bias;
    walk::Options options;
    options.scratch = {scratch.data(), scratch.size() * sizeof(float)};
    change(t, s, dbias, options);
    return refusal([&] { walk::backward(p, t, s, dbias, options); });
  };
  using B = Backward<float>&;
  using D = View<float>&;
  using Opt = walk::Options&;
  expect_words(back([](B, S s, D, Opt) { s.bias = {}; }),
               {"scores: dbias is given, but there is no bias"});
  expect_words(back([](B, S, D dbias, Opt) { dbias.head = 0; }),
               {"scores: dbias must have a head stride of 0 where the bias has one, got 0"});
  expect_words(back([](B, S s, D, Opt) { s.bias.row = 0; }),
               {"scores: dbias must have a row stride of 0 where the bias has one, got 40"});
  std::vector<float> large(bias.size());  // as dbias, so that it meets nobody else
  expect_words(back([&](B t, S, D dbias, Opt) { dbias.data = t.dQ.data = large.data(); }),
               {"scores: dbias overlaps dQ"});
  expect_words(back([&](B, S, D dbias, Opt) { dbias.data = bias.data(); }),
               {"scores: dbias overlaps bias"});
  expect_words(back([&](B t, S, D dbias, Opt) { t.Q.data = dbias.data = large.data(); }),
               {"scores: dbias overlaps Q"});
  expect_words(back([](B, S, D dbias, Opt) { dbias.row = 39; }),
               {"scores: two rows of dbias share memory"});
  expect_words(back([](B t, S, D, Opt) { t.LSE = nullptr; }), {"scores: LSE must not be null"});
  expect_words(back([](B t, S, D, Opt) { t.O.data = nullptr; }), {"scores: O must not be null"});
  expect_words(back([](B, S, D, Opt o) { o.scratch = {}; }),
               {"scores needs scratch_bytes() = 640 bytes of scratch, got null"});
  expect_words(back([](B, S, D, Opt o) { o.scratch.bytes = 639; }),
               {"scratch_bytes() = 640 bytes of scratch, got 639"});
}

#ifndef FA_WITHOUT_HALF
TEST_F(scores, TensorCoresWantAPositiveScale) {
  for (double scale : {-0.125, 0.0, 1e-39}) {
    Spec s = sized_as(1, 1, 1, 5, 20, 16);
    s.p.scale = scale;
    ForwardOf<bf16> c(s, Given{});
    expect_words(refusal([&] { c.run(); }), {"scores: fa2: scale and 1 / scale must be > 0"});
  }
  Spec s = sized_as(1, 1, 1, 5, 20, 16);
  s.p.scale = 1e-5;
  ForwardOf<bf16> c(s, capped(1e38));
  expect_words(refusal([&] { c.run(); }), {"scores: cap / scale and scale / cap must be > 0"});
}
#endif

TEST_F(scores, ScratchIsCounted) {
  const Problem p = sized_as(2, 4, 2, 130, 40, 16).p;
  EXPECT_EQ(walk::scratch_bytes<float>(p), 4u * 2 * 4 * 130);
  EXPECT_EQ(walk::scratch_bytes<__half>(p), 2u * 4 * 256 * (8 + (has_hopper() ? 64 * 4 : 0)) +
                                                (has_hopper() ? 2u * 4 * 4 * 4 + 4 : 0));
  // However large its groups are, whatever its mask.
  Problem grouped = sized_as(1, 8, 1, 130, 40, 128).p;
  const std::size_t bytes = walk::scratch_bytes<__half>(grouped);
  grouped.causal = Causal::bottom_right;
  EXPECT_EQ(walk::scratch_bytes<__half>(grouped), bytes);
}

// ---- what only the CPU can do, or only a GPU ----

#ifdef FA_EMULATED
// Each head dimension's tile fits, in fp32 forward and backward.
TEST_F(scores, WithTheSharedMemoryOfAT4) {
  const emulator::WithSharedMemory until_the_end(64 << 10);
  for (Int d : {32, 64, 128}) both<float>(sized_as(1, 1, 1, 20, 40, d), all_of(d, true));
}
#ifndef FA_WITHOUT_HALF
// What is copied comes as early as it may, and at random times; late in all other tests. In fp32
// nothing is on its way.
TEST_F(scores, EarlyAndAtRandom) {
  using emulator::Timing;
  const auto at = [](const emulator::Schedule& now, auto type) {
    using T = decltype(type);
    const emulator::WithSchedule until_the_end(now);
    both<T>(sized_as(1, 1, 1, 40, 70, 72), all_of(72));
    both<T>(sized_as(1, 1, 1, 40, 70, 72), biased());
    if (!has_hopper()) return;
    for (const Given& given : {alibi(), capped(2)}) {
      by_hopper<T>(sized_as(1, 2, 1, 210, 200, 64), given);
      back_by_hopper<T>(sized_as(1, 1, 1, 140, 150, 64), given);
    }
  };
  at({Timing::early, 0}, half());
  at({Timing::random, 1}, bf16());
}
#endif
#else
TEST_F(scores, ARecordedCallReplaysWithOtherLengths) {
  walk::Scores<__nv_bfloat16> cap;
  cap.cap = 1.5;
  const auto with = [](std::vector<Int> lengths, std::uint64_t seed) {
    Spec s = with_lengths(std::move(lengths), seed);
    s.hooks = Asked<bf16>(s, Given{}).hooks();
    s.hooks.score = [](double x, Int, Int, Int, Int) { return 1.5 * std::tanh(x / 1.5); };
    s.hooks.slope = [](double x, Int, Int, Int, Int) {
      return 1 - std::pow(std::tanh(x / 1.5), 2);
    };
    return s;
  };
  const Spec one = with({300, 17, 64}, 1), two = with({1, 250, 299}, 2);
  ForwardCase<bf16> first(one, true), second(two, true);
  EXPECT_EQ(replayed_as_graph(first, second,
                              [&](const Problem& p, const Forward<bf16>& t, cudaStream_t stream) {
                                walk::forward(p, as_device<__nv_bfloat16>(t), cap, {stream, {}});
                              }),
            "");
  BackwardCase<bf16> third(one), fourth(two);
  const DeviceMemory scratch(walk::scratch_bytes<__nv_bfloat16>(one.p));
  EXPECT_EQ(replayed_as_graph(
                third, fourth,
                [&](const Problem& p, const Backward<bf16>& t, cudaStream_t stream) {
                  walk::backward(p, as_device<__nv_bfloat16>(t), cap, {}, {stream, scratch});
                }),
            "");
}

// Rows of a bias 2^22 numbers apart, so that the last ones lie beyond 2^31; and of its gradient.
TEST_F(scores, ABiasOfMoreThanTwoToThe31) {
  using D = __nv_bfloat16;
  constexpr Int apart = Int(1) << 22, rows = 600, keys = 70;
  const std::size_t bytes = std::size_t(rows * apart) * (sizeof(D) + sizeof(float));
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  BackwardOf<bf16> c(sized_as(1, 2, 1, rows, keys, 64),
                     biased(Given::Bias::of_T, true, false, true));
  const DeviceMemory far(std::size_t(rows * apart) * sizeof(D)),
      gradient(std::size_t(rows * apart) * sizeof(float));
  for (Int i = 0; i < rows; ++i)
    FA_CUDA_CHECK(cudaMemcpy(far.as<D>() + i * apart, &c.asked.bias.at(0, 0, i, 0),
                             keys * sizeof(D), cudaMemcpyHostToDevice));
  walk::Scores<D> s;
  s.bias = {far.as<D>(), 0, 0, apart};

  ForwardOf<bf16> forward(sized_as(1, 2, 1, rows, keys, 64),
                          biased(Given::Bias::of_T, true, false, true));
  on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
    walk::forward(p, as_device<D>(t), s);
  })(forward.call());
  EXPECT_EQ(forward.verdict(), "");

  const DeviceMemory scratch(walk::scratch_bytes<D>(c.meant.p));
  on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
    walk::backward(p, as_device<D>(t), s, {gradient.as<float>(), 0, 0, apart}, {nullptr, scratch});
  })(c.call());
  for (Int i = 0; i < rows; ++i)
    FA_CUDA_CHECK(cudaMemcpy(&c.dbias.at(0, 0, i, 0), gradient.as<float>() + i * apart,
                             keys * sizeof(float), cudaMemcpyDeviceToHost));
  EXPECT_EQ(c.verdict(), "");
}
#endif

}  // namespace
