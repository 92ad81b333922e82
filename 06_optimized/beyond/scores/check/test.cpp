// Tests of scores: ALiBi, soft cap, bias and rotary positions, each alone and all together, forward
// and backward, against the oracle with the same scores.
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

#include "06_optimized/backward.hpp"
#include "06_optimized/beyond/scores/scores.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/optimized.hpp"
#include "common/judge/cases.hpp"
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
    walk::forward(p, as_device<Device<T>>(on_device(copy, c.t)), asked.scores(copy));
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
                   {nullptr, {scratch.as<void>(), bytes}});
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
      const double P = std::exp(asked.score(s, b, h, i, j) - double(meant.LSE.at(b, h, i)));
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

template <class T>
void both(const Spec& s, const Given& given) {
  ForwardOf<T> forward(s, given);
  forward.run();
  EXPECT_EQ(forward.verdict(), "") << s.name() << given.name() << ", " << sizeof(T) << " bytes";
  BackwardOf<T> backward(s, given);
  backward.run();
  EXPECT_EQ(backward.verdict(), "") << s.name() << given.name() << ", " << sizeof(T) << " bytes";
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
      both<T>(s, changes[n++ % 5]);
    }
  });
}

TEST_F(scores, AllTogetherInAllSizes) {
  each_type([]<class T>(T) {
    for (const Spec& s : walk_specs()) both<T>(s, all_of(s.p.d / 2 * 2));
  });
}

}  // namespace
