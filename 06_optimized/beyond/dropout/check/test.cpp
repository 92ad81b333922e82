// Tests of dropout: the numbers, which weights they keep in every kernel, O and its gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/backward.hpp"
#include "06_optimized/beyond/dropout/dropout.hpp"
#include "06_optimized/beyond/dropout/philox.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/optimized.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

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

  Forwards(const Spec& s, const Dropout& x) : dropout(x), c(told(s, x), true) {}
  void run(const Dropout* other = nullptr) {
    on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) {
      walk::forward(p, other ? *other : dropout, as_device<Device<T>>(t));
    })(c.call());
  }
  std::string verdict() { return c.verdict(); }
  std::vector<char> bits() { return bytes_of({c.O.storage(), c.LSE.storage()}); }
};

template <class T>
struct Backwards {
  Dropout dropout;
  BackwardCase<T> c;
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
                     {nullptr, {scratch.as<void>(), bytes}});
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
void both_right(const Spec& s, const Dropout& x) {
  Forwards<T> f(s, x);
  f.run();
  EXPECT_EQ(f.verdict(), "") << "forward, p = " << x.p << ": " << s.name() << ", " << sizeof(T)
                             << " bytes";
  Backwards<T> b(s, x);
  b.run();
  EXPECT_EQ(b.verdict(), "") << "backward, p = " << x.p << ": " << s.name() << ", " << sizeof(T)
                             << " bytes";
}
void all_right(const Spec& s, const Dropout& x) {
  each_type([&]<class T>(T) { both_right<T>(s, x); });
}

class dropout : public GpuTest {};  // the tests' name is the walk's

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
    if (meets(n, 1)) both_right<half>(s, x);
    if (meets(n, 2)) both_right<bf16>(s, x);
#endif
    ++n;
  }
}

TEST_F(dropout, WideHeads) {
  both_right<float>(sized_as(1, 1, 1, 40, 70, 100), with(0.3));
#ifndef FA_WITHOUT_HALF
  for (Int d : {100, 136, 256}) both_right<bf16>(sized_as(1, 2, 1, 70, 100, d), with(0.3));
#endif
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
void same_as_on_the_CPU(Int d, Int Nq, Int Nk) {
  const Spec s = sized_as(1, 2, 1, Nq, Nk, d);
  const Dropout x = with(0.4);
  for (Int j0 = 0; j0 < Nk; j0 += d) {
    Forwards<T> f(s, x);
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
void same_in_the_owner_of_keys(Int d, Int Nq, Int Nk) {
  const Spec s = sized_as(1, 1, 1, Nq, Nk, d);
  const Dropout x = with(0.4);
  for (Int i0 = 0; i0 < Nq; i0 += d) {
    Backwards<T> b(s, x);
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
void same_in_the_owner_of_queries(Int d, Int Nq, Int Nk) {
  const Spec s = sized_as(1, 1, 1, Nq, Nk, d);
  const Dropout x = with(0.4);
  for (Int j0 = 0; j0 < Nk; j0 += d) {
    Backwards<T> b(s, x);
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
void same_everywhere(Int d, Int Nq, Int Nk) {
  same_as_on_the_CPU<T>(d, Nq, Nk);
  same_in_the_owner_of_keys<T>(d, Nq, Nk);
  same_in_the_owner_of_queries<T>(d, Nq, Nk);
}

// Every shape of a tile: by head dimension, and in the forward by the mask (none here).
TEST_F(dropout, EveryKernelKeepsTheSame) {
  same_everywhere<float>(32, 70, 75);
  same_everywhere<float>(128, 40, 50);
#ifndef FA_WITHOUT_HALF
  same_everywhere<bf16>(64, 140, 150);
  same_everywhere<half>(128, 140, 75);
  same_everywhere<bf16>(256, 70, 75);
#endif
}

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
    plain<T>(sized_as(1, 2, 1, 70, 75, 24, Causal::bottom_right));
    plain<T>(sized_as(2, 1, 1, 33, 70, 72, Causal::none, {70, 20}));
  });
}

}  // namespace
