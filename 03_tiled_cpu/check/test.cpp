// Tests of stage 03: both kernels under the conformance suite; tiles of any size; threads; memory.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "00_naive/naive.hpp"
#include "02_online_softmax/online_softmax.hpp"
#include "03_tiled_cpu/fast/fast.hpp"
#include "03_tiled_cpu/tiled_cpu.hpp"
#include "common/core/parallel_for.hpp"
#include "common/harness/cases.hpp"
#include "common/harness/sanitizer.hpp"
#include "common/harness/stage.hpp"
#include "common/harness/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::harness;
using tiled_cpu::Kernel, tiled_cpu::Options;
using Int = std::int64_t;

template <class T>
Functions<T> functions(Options options) {
  return {on_host_forward<T>([options](const Problem& p, const Forward<T>& t) {
            tiled_cpu::forward(p, t, options);
          }),
          nullptr};
}

StageUnderTest stage(const char* name, Options options) {
  StageUnderTest s;
  s.name = name;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.large_scores = true;
  s.f32 = functions<float>(options);
  if (options.kernel == Kernel::tiled) s.f64 = functions<double>(options);
  return s;
}
// The default tiles, and tiles that are no multiple of anything.
StageUnderTest tiled() {
  StageUnderTest s = stage("tiled", {});
  s.promises.nan_tile = 1;  // hidden columns of a diagonal tile are not used at all
  s.promises.extra_bytes = [](const Problem& p) {
    return 2 * (4.0 * double(tiled_cpu::scratch_elements(64, 64, p.d)) + 4096);
  };
  return s;
}
StageUnderTest odd_tiles() {
  Options options;
  options.Br = 7;
  options.Bc = 5;
  options.threads = 3;
  return stage("odd_tiles", options);
}
StageUnderTest fast() {
  StageUnderTest s = stage("fast", {Kernel::fast});
  s.promises.nan_tile = std::max<Int>(tiled_cpu::fast::Bc, tiled_cpu::fast::lanes);
  s.promises.extra_bytes = [](const Problem& p) {  // malloc rounds what it maps up to pages
    return 2 * (4.0 * double(tiled_cpu::fast::scratch_elements(p.d)) + 4096 + 4096);
  };
  return s;
}
const bool registered = register_conformance(tiled()) && register_conformance(odd_tiles()) &&
                        register_conformance(fast());

TEST(Tiles, EverySizeOfTileGivesTheSame) {
  const Int tiles[] = {1, 2, 3, 16, 17, 64};
  int n = 0;
  for (Int N : {1, 15, 16, 17, 63, 64, 65, 127, 129})
    for (Int Br : tiles)
      for (Int Bc : tiles) {
        Spec spec;
        spec.p.Nq = N;
        spec.p.Nk = N + n % 3;
        spec.p.d = std::vector<Int>{1, 8, 40, 59, 64}[std::size_t(n) % 5];
        spec.p.causal = static_cast<Causal>(n++ % 3);
        Options options;
        options.Br = Br;
        options.Bc = Bc;
        ForwardCase<float> c(spec, true);
        tiled_cpu::forward(c.p, c.call().t, options);
        ASSERT_EQ(c.verdict(), "") << spec.name() << " Br " << Br << " Bc " << Bc;
      }
}

TEST(Threads, AnyNumberOfThemGivesTheSameBits) {
  for (Kernel kernel : {Kernel::tiled, Kernel::fast})
    for (Causal mask : {Causal::none, Causal::top_left}) {
      Spec spec;
      spec.p.B = 2;
      spec.p.Hq = 4;
      spec.p.Hkv = 2;
      spec.p.Nq = spec.p.Nk = 300;
      spec.p.d = 32;
      spec.p.causal = mask;
      Options options{kernel};
      options.threads = 1;
      ForwardCase<float> one(spec, true), many(spec, true);
      tiled_cpu::forward(one.p, one.call().t, options);
      EXPECT_EQ(one.verdict(), "");
      for (int threads : {2, 3, 8, 0}) {
        options.threads = threads;
        tiled_cpu::forward(many.p, many.call().t, options);
        int different = 0;
        one.O.for_each([&](auto b, auto h, auto i, auto x) {
          different += !(one.O.at(b, h, i, x) == many.O.at(b, h, i, x));
        });
        one.LSE.for_each([&](auto b, auto h, auto i, auto) {
          different += !(one.LSE.at(b, h, i) == many.LSE.at(b, h, i));
        });
        EXPECT_EQ(different, 0) << threads << " threads";
      }
    }
}

TEST(ParallelFor, RunsEveryTaskOnceAndPassesExceptionsOn) {
  for (int threads : {0, 1, 2, 9}) {
    std::vector<std::atomic<int>> runs(100);
    std::atomic<int> workers{0};
    parallel_for(100, threads, [&] {
      ++workers;
      return [&](Int task) { ++runs[std::size_t(task)]; };
    });
    for (const auto& n : runs) EXPECT_EQ(n, 1);
    if (threads) {
      EXPECT_EQ(workers, threads);
    }
  }
  parallel_for(0, 4, [] { return [](Int) { ADD_FAILURE() << "there is no task"; }; });
  EXPECT_THROW(parallel_for(50, 3,
                            [] {
                              return [](Int task) {
                                if (task == 7) throw std::runtime_error("seven");
                              };
                            }),
               std::runtime_error);
}

TEST(Memory, FastTakesAtMostOneMiBAThreadUpToD256) {
  EXPECT_LE(4 * tiled_cpu::fast::scratch_elements(256), std::size_t(1) << 20);
}

// 00 needs 488 MiB for its scores, this stage next to nothing. In a child process, because a limit
// on the address space cannot be taken back.
[[noreturn]] void eight_thousand_keys_in_128_mib() {
  const rlim_t MiB = 1 << 20;
  const rlimit limit{128 * MiB, 128 * MiB};
  setrlimit(RLIMIT_AS, &limit);
  Problem p;
  p.Nq = p.Nk = 8000;
  p.d = 64;
  std::vector<float> Q(8000 * 64, 0.01f), K(Q), V(8000 * 64, 3.0f), O(Q.size());
  const auto view = [](auto& x) { return contiguous(x.data(), 1, 8000, 64); };
  const Forward<float> t{view(std::as_const(Q)), view(std::as_const(K)), view(std::as_const(V)),
                         view(O), nullptr};
  for (Kernel kernel : {Kernel::tiled, Kernel::fast}) {
    O.assign(O.size(), std::nanf(""));
    p.causal = kernel == Kernel::tiled ? Causal::top_left : Causal::none;
    tiled_cpu::forward(p, t, {kernel, 2});
    for (float o : O)
      if (!(std::fabs(o - 3.0f) <= 1e-4f)) std::_Exit(8);
  }
  p.causal = Causal::none;
  try {
    naive::forward(p, t);
  } catch (const std::invalid_argument& e) {
    std::fputs(e.what(), stderr);
    std::_Exit(7);
  }
  std::_Exit(9);
}
TEST(Memory, EightThousandKeysFitWhere00Refuses) {
#if FA_SANITIZED
  GTEST_SKIP() << "sanitizers reserve terabytes of address space";
#else
  EXPECT_EXIT(
      eight_thousand_keys_in_128_mib(), testing::ExitedWithCode(7),
      "naive: no memory for 2 matrices of Nq x Nk: 488.3 MiB, but only [0-9.]+ MiB are free");
#endif
}

TEST(PreviousStage, AgreesWithStage02) {
  for (Causal mask : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    Spec spec;
    spec.p.Nq = 70;
    spec.p.Nk = 90;
    spec.p.d = 16;
    spec.p.causal = mask;
    ForwardCase<double> x(spec, true), y(spec, true);
    online_softmax::forward(x.p, x.call().t);
    tiled_cpu::forward(y.p, y.call().t);
    Comparison c("O of stages 02 and 03");
    x.O.for_each([&](auto b, auto h, auto i, auto e) {
      c.add(b, h, i, e, y.O.at(b, h, i, e), x.O.at(b, h, i, e), 1e-12);
    });
    EXPECT_EQ(c.report(), "");
  }
}

TEST(Options, BadOnesAreRefusedInWords) {
  Spec spec;
  spec.p.Nq = spec.p.Nk = spec.p.d = 2;
  ForwardCase<double> c(spec, false);
  const auto refuses = [&](Options options, const char* words) {
    const auto call = c.call();
    try {
      tiled_cpu::forward(call.p, call.t, options);
    } catch (const std::invalid_argument& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
      return;
    }
    ADD_FAILURE() << "accepted; wanted: " << words;
  };
  Options options;
  options.threads = -1;
  refuses(options, "threads must not be negative, got -1");
  options = {};
  options.Br = 0;
  refuses(options, "got 0 and 64");
  refuses({Kernel::fast}, "'fast' is for float");
}

TEST(TinyProblem, MatchesTheChapterInTilesOfTwo) {
  for (Kernel kernel : {Kernel::tiled, Kernel::fast}) {
    TinyProblem tiny;
    tiled_cpu::forward(tiny.p, tiny.tensors(true), {kernel, 1, 2, 2});
    EXPECT_TRUE(tiny.matches(true));
  }
}

}  // namespace
