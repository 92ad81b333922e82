// Tests of stage 03: both kernels under the conformance suite; tiles of any size; threads; memory.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "00_naive/naive.hpp"
#include "02_online_softmax/online_softmax.hpp"
#include "03_tiled_cpu/check/ablation.hpp"
#include "03_tiled_cpu/fast/fast.hpp"
#include "03_tiled_cpu/tiled_cpu.hpp"
#include "common/core/parallel_for.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/memory.hpp"
#include "common/judge/sanitizer.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/threads.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
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
// Scratch of this many elements for each thread that can run when all cores may. malloc rounds what
// it maps up to pages; a thread and the checks take a little.
double scratch_bytes(const Problem& p, Int rows_in_a_task, std::size_t elements) {
  const Int tasks = p.B * p.Hq * ((p.Nq + rows_in_a_task - 1) / rows_in_a_task);
  return threads_for(tasks, 0) * (4.0 * double(elements) + 4096) + 4096;
}
// The default tiles, and tiles that are no multiple of anything.
StageUnderTest tiled() {
  StageUnderTest s = stage("tiled", {});
  s.promises.nan_tile = 1;  // hidden columns of a diagonal tile are not used at all
  s.promises.extra_bytes = [](const Problem& p) {
    return scratch_bytes(p, 64, tiled_cpu::scratch_elements(64, 64, p.d));
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
  s.promises.extra_bytes = [](const Problem& p) {
    using namespace tiled_cpu::fast;
    return scratch_bytes(p, block_rows, scratch_elements(p.d));
  };
  return s;
}
const bool registered = register_conformance(tiled()) && register_conformance(odd_tiles()) &&
                        register_conformance(fast());

TEST(Tiles, EverySizeOfTileGivesTheSame) {
  const Int tiles[] = {1, 3, 16, 17, 64, 100, 128};
  int n = 0;
  for (Int N : {1, 15, 17, 64, 65, 129, 257})
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

template <tiled_cpu::ablation::Change change>
void is_attention_as_it_says(const char* name) {
  for (Causal causal : {Causal::none, Causal::top_left})
    for (Int N : {64, 100, 150}) {
      Spec spec;
      spec.p.Nq = spec.p.Nk = N;
      spec.p.d = 72;
      spec.p.causal = causal;
      ForwardCase<float> c(spec, false);
      const auto call = c.call();
      std::vector<float> scratch(tiled_cpu::scratch_elements(64, 64, spec.p.d));
      for (Int i0 = 0; i0 < N; i0 += 64)
        tiled_cpu::ablation::attention_tile<change>(
            call.t.Q.rows(0, 0, N, 72), call.t.K.rows(0, 0, N, 72), call.t.V.rows(0, 0, N, 72),
            float(spec.p.softmax_scale()), Mask(call.p, 0), i0, 64, 64, scratch.data(),
            call.t.O.rows(0, 0, N, 72), nullptr);
      EXPECT_EQ(c.verdict().empty(), change.is_attention()) << name << ", " << spec.name();
    }
}
TEST(Ablation, IsAttentionOnlyWithAllItsParts) {
  using tiled_cpu::ablation::Change;
  is_attention_as_it_says<Change{}>("as written");
  is_attention_as_it_says<Change{.vector_exp = true}>("vector_exp");
  is_attention_as_it_says<Change{.register_sums = true}>("register_sums");
  is_attention_as_it_says<Change{.no_exp = true}>("no_exp");
  is_attention_as_it_says<Change{.no_QK = true}>("no_QK");
  is_attention_as_it_says<Change{.no_PV = true}>("no_PV");
}

TEST(Heads, EveryBatchEntryHasItsOwn) {
  for (Kernel kernel : {Kernel::tiled, Kernel::fast}) {
    Spec spec;
    spec.p.B = 6;
    spec.p.Hq = 2;
    spec.p.Nq = spec.p.Nk = 70;
    spec.p.d = 8;
    spec.lengths = {70, 1, 69, 64, 35, 50};
    ForwardCase<float> c(spec, true);
    tiled_cpu::forward(c.p, c.call().t, {kernel});
    EXPECT_EQ(c.verdict(), "") << spec.name() << " fast: " << (kernel == Kernel::fast);
  }
}

// The same for the lesson, with tiles that the problem does not fill.
TEST(Tiles, StayInsideTheirScratch) {
  Spec spec;
  spec.p.Nq = 10;
  spec.p.Nk = 19;
  spec.p.d = 5;
  ForwardCase<float> c(spec, true);
  const auto call = c.call();
  const std::size_t inside = tiled_cpu::scratch_elements(7, 8, 5);
  std::vector<float> scratch(2 * inside, 77.0f);
  for (Int i0 : {0, 7})
    tiled_cpu::attention_tile<float>(call.t.Q.rows(0, 0, 10, 5), call.t.K.rows(0, 0, 19, 5),
                                     call.t.V.rows(0, 0, 19, 5), float(call.p.softmax_scale()),
                                     Mask(call.p, 0), i0, 7, 8, scratch.data(),
                                     call.t.O.rows(0, 0, 10, 5), call.t.LSE);
  EXPECT_EQ(c.verdict(), "");
  for (std::size_t n = inside; n < scratch.size(); ++n) ASSERT_EQ(scratch[n], 77.0f) << n - inside;
}

// Four full groups of lanes and a part of a second block, with more components than a tile has
// lanes; the scratch lies in front of canaries.
TEST(Fast, StaysInsideItsScratch) {
  namespace fast = tiled_cpu::fast;
  Spec spec;
  spec.p.Nq = spec.p.Nk = 330;
  spec.p.d = 200;
  spec.p.causal = Causal::top_left;
  ForwardCase<float> c(spec, true);
  const auto call = c.call();
  const std::size_t inside = fast::scratch_elements(200);
  std::vector<float> scratch(2 * inside, 77.0f);
  for (Int i0 = 0; i0 < 330; i0 += fast::block_rows)
    fast::attention_block(call.t.Q.rows(0, 0, 330, 200), call.t.K.rows(0, 0, 330, 200),
                          call.t.V.rows(0, 0, 330, 200), float(call.p.softmax_scale()),
                          Mask(call.p, 0), i0, scratch.data(), call.t.O.rows(0, 0, 330, 200),
                          call.t.LSE);
  EXPECT_EQ(c.verdict(), "");
  for (std::size_t n = inside; n < scratch.size(); ++n) ASSERT_EQ(scratch[n], 77.0f) << n - inside;
}

// The groups of a block share its tiles, but a tile that a group does not see must not touch it:
// 0 * NaN is NaN.
TEST(Fast, HiddenNaNDoesNotCrossGroups) {
  Spec spec;
  spec.p.Nq = spec.p.Nk = 330;
  spec.p.d = 8;
  spec.p.causal = Causal::top_left;
  ForwardCase<float> clean(spec, true);
  tiled_cpu::forward(clean.p, clean.call().t, {Kernel::fast});
  for (Int bad : {70, 200, 255, 256, 329})
    for (char tensor : {'K', 'V'}) {
      ForwardCase<float> dirty(spec, true);
      auto& x = tensor == 'K' ? dirty.K : dirty.V;
      const Array old = to_array(x);
      x.fill(
          [&](auto, auto, auto j, auto e) { return j == bad ? std::nan("") : old.at(0, 0, j, e); });
      tiled_cpu::forward(dirty.p, dirty.call().t, {Kernel::fast});
      for (Int i = 0; i < bad / 64 * 64; ++i)
        for (Int e = 0; e < 8; ++e)
          ASSERT_EQ(dirty.O.at(0, 0, i, e), clean.O.at(0, 0, i, e))
              << "NaN in row " << bad << " of " << tensor << ", O row " << i;
      for (Int i = bad; i < 330; ++i) ASSERT_TRUE(std::isnan(dirty.O.at(0, 0, i, 0)));
    }
}

// Equal weights and values: the terms of a sum are all of one size, and a running sum would round
// each of them to the digits that the sum so far has left for it.
TEST(Fast, LongSumsKeepTheirDigits) {
  Spec spec;
  spec.p.Nq = 70;
  spec.p.Nk = 8192;
  spec.p.d = 5;
  ForwardCase<float> c(spec, true);
  c.Q.fill([](auto...) { return 0.0; });
  c.V.fill([](auto...) { return 0.1; });
  tiled_cpu::forward(c.p, c.call().t, {Kernel::fast});
  double worst = 0;
  c.O.for_each([&](auto b, auto h, auto i, auto x) {
    worst = std::max(worst, std::fabs(double(c.O.at(b, h, i, x)) / double(0.1f) - 1));
  });
  EXPECT_LE(worst, 2e-6);
}

TEST(Threads, AnyNumberOfThemGivesTheSameBits) {
  for (Kernel kernel : {Kernel::tiled, Kernel::fast})
    for (Causal mask : {Causal::none, Causal::top_left}) {
      Spec spec;
      spec.p.B = 2;
      spec.p.Hq = 4;
      spec.p.Hkv = 2;
      spec.p.Nq = spec.p.Nk = 150;
      spec.p.d = 32;
      spec.p.causal = mask;
      Options options{kernel};
      options.threads = 1;
      ForwardCase<float> one(spec, true), many(spec, true);
      tiled_cpu::forward(one.p, one.call().t, options);
      EXPECT_EQ(one.verdict(), "") << spec.name();
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
        EXPECT_EQ(different, 0) << spec.name() << ", " << threads << " threads";
      }
    }
}

TEST(Threads, AsManyAreStartedAsAreTold) {
  for (Kernel kernel : {Kernel::tiled, Kernel::fast}) {
    Spec spec;
    spec.p.Nq = spec.p.Nk = kernel == Kernel::fast ? 2000 : 700;
    spec.p.d = 64;
    ForwardCase<float> c(spec, false);
    const auto share = [&](int threads) {
      const auto call = c.call();
      return share_of_other_threads([&] { tiled_cpu::forward(call.p, call.t, {kernel, threads}); });
    };
    EXPECT_LE(share(1), 0.05) << "fast: " << (kernel == Kernel::fast);
    // On a busy machine a call may be over before the others had a core.
    double most = 0;
    for (int n = 0; n < 20 && most < 0.05; ++n) most = std::max(most, share(3));
    EXPECT_GE(most, 0.05) << "fast: " << (kernel == Kernel::fast);
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

TEST(ParallelFor, StartsNoMoreThreadsThanThereAreTasks) {
  std::atomic<int> workers{0};
  parallel_for(2, 9, [&] {
    ++workers;
    return [](Int) {};
  });
  EXPECT_LE(workers, 2);
}

// As when there is no memory for what a worker owns. In a child, for the other way to end it is
// std::terminate.
[[noreturn]] void no_worker_can_be_made() {
  std::atomic<int> tasks{0};
  try {
    parallel_for(50, 3, [&] {
      if (tasks >= 0) throw std::bad_alloc();
      return [&](Int) { ++tasks; };
    });
  } catch (const std::bad_alloc&) {
    std::_Exit(tasks == 0 ? 7 : 8);
  }
  std::_Exit(9);
}
TEST(ParallelFor, PassesOnWhatTheMakingOfAWorkerThrows) {
  EXPECT_EXIT(no_worker_can_be_made(), testing::ExitedWithCode(7), "");
}

TEST(ParallelFor, NoTaskBeginsAfterAnException) {
  std::atomic<bool> throwing{false};
  std::atomic<int> begun{0};
  EXPECT_THROW(parallel_for(5000, 2,
                            [&] {
                              return [&](Int task) {
                                ++begun;
                                if (task == 0) {
                                  throwing = true;
                                  throw std::runtime_error("zero");
                                }
                                while (!throwing) std::this_thread::yield();
                                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                              };
                            }),
               std::runtime_error);
  EXPECT_LT(begun, 5000);
}

// A sanitizer reserves terabytes of address space, and macOS keeps no such limit.
#if defined(__linux__) && !FA_SANITIZED
// For a child process, because such a limit cannot be taken back.
void limit_address_space(rlim_t MiB) {
  const rlimit limit{MiB << 20, MiB << 20};
  setrlimit(RLIMIT_AS, &limit);
}

// 128 MiB have no place for the stacks of 1000 threads.
[[noreturn]] void a_thousand_threads_in_128_mib() {
  static std::atomic<int> runs[2000];
  std::atomic<int> workers{0};
  limit_address_space(128);
  parallel_for(2000, 1000, [&] {
    ++workers;
    return [](Int task) { ++runs[task]; };
  });
  for (const auto& n : runs)
    if (n != 1) std::_Exit(8);
  std::_Exit(workers < 1000 ? 7 : 9);
}
TEST(ParallelFor, GoesOnWithTheThreadsThatStart) {
  EXPECT_EXIT(a_thousand_threads_in_128_mib(), testing::ExitedWithCode(7), "");
}

// One row of Q, K and V for all: only O is long.
[[noreturn]] void tiles_of_16_gib_in_128_mib() {
  const float one[1] = {1};
  std::vector<float> O(65536);
  Problem p;
  p.Nq = p.Nk = 65536;
  p.d = 1;
  const View<const float> x{one, 1, 1, 0};
  limit_address_space(128);
  try {
    const Forward<float> t{x, x, x, contiguous(O.data(), 1, 65536, 1), nullptr};
    tiled_cpu::forward(p, t, {Kernel::tiled, 2, 65536, 65536});
  } catch (const std::invalid_argument& e) {
    std::fputs(e.what(), stderr);
    std::_Exit(7);
  }
  std::_Exit(9);
}
TEST(Memory, TilesThatDoNotFitAreRefusedInWords) {
  EXPECT_EXIT(tiles_of_16_gib_in_128_mib(), testing::ExitedWithCode(7),
              "tiled_cpu: no memory for 1 x 4295163904 elements of scratch: 16384.8 MiB, but only "
              "[0-9.]+ MiB "
              "are free; use smaller tiles or fewer threads");
}
#endif

// Around what 30 MiB hold: a tile of 2800 x 2800 floats is 30 MiB.
TEST(Memory, TilesThatDoNotQuiteFitAreRefused) {
  if (peak_heap_bytes([] {}) < 0) GTEST_SKIP() << "a sanitizer reserves terabytes of address space";
  for (Int N : {2000, 2790, 2900, 3500})
    for (int threads : {1, 2}) {
      Spec spec;
      spec.p.B = 2;
      spec.p.Nq = spec.p.Nk = N;
      spec.p.d = 1;
      ForwardCase<float> c(spec, true);
      const auto call = c.call();
      EXPECT_EQ(under_limit(30 << 20,
                            [&] {
                              tiled_cpu::forward(call.p, call.t, {Kernel::tiled, threads, N, N});
                            }),
                "")
          << "N " << N << ", " << threads << " threads";
    }
}

#if defined(__linux__) && !FA_SANITIZED
// One thread's tile of 4096 x 4096 would fit.
[[noreturn]] void tiles_of_64_threads_in_one_gib() {
  const double one[1] = {1};
  std::vector<double> O(64 * 4096);
  Problem p;
  p.Hq = 64;
  p.Nq = p.Nk = 4096;
  p.d = 1;
  const View<const double> x{one, 1, 1, 0};
  limit_address_space(1024);
  try {
    const Forward<double> t{x, x, x, contiguous(O.data(), 64, 4096, 1), nullptr};
    tiled_cpu::forward(p, t, {Kernel::tiled, 64, 4096, 4096});
  } catch (const std::invalid_argument& e) {
    std::fputs(e.what(), stderr);
    std::_Exit(7);
  }
  std::_Exit(9);
}
TEST(Memory, EveryThreadNeedsItsTiles) {
  EXPECT_EXIT(tiles_of_64_threads_in_one_gib(), testing::ExitedWithCode(7),
              "no memory for 64 x 16789504 elements of scratch: 8198.0 MiB");
}
#endif

// Tiles larger than the problem are clipped to it, and so is their memory.
TEST(Memory, LargeTilesOfASmallProblemTakeLittle) {
  if (peak_heap_bytes([] {}) < 0) GTEST_SKIP() << "malloc cannot be counted in this build";
  Spec spec;
  spec.p.Nq = spec.p.Nk = 64;
  spec.p.d = 8;
  ForwardCase<float> c(spec, true);
  const auto call = c.call();
  const auto bytes = peak_heap_bytes([&] {
    tiled_cpu::forward(call.p, call.t, {Kernel::tiled, 1, 65536, 65536});
  });
  EXPECT_LE(bytes, Int(4 * tiled_cpu::scratch_elements(64, 64, 8) + 4096));
  EXPECT_EQ(c.verdict(), "");
}

TEST(Memory, FastTakesAtMostOneMiBAThreadUpToD256) {
  EXPECT_LE(4 * tiled_cpu::fast::scratch_elements(256), std::size_t(1) << 20);
}

#if !FA_SANITIZED
// 00 needs 488 MiB for its scores, this stage next to nothing.
[[noreturn]] void eight_thousand_keys_in_128_mib() {
  limit_address_space(128);
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
  EXPECT_EXIT(
      eight_thousand_keys_in_128_mib(), testing::ExitedWithCode(7),
      "naive: no memory for 2 matrices of Nq x Nk: 488.3 MiB, but only [0-9.]+ MiB are free");
}
#endif

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
    EXPECT_EQ(c.report(), "") << spec.name();
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
  options.Br = 65537;
  refuses(options, "must lie in [1, 65536], got 65537 and 64");
  for (Int Bc : {0, -1, 65537}) {
    options = {};
    options.Bc = Bc;
    const std::string words = "got 64 and " + std::to_string(Bc);
    refuses(options, words.c_str());
  }
  refuses({Kernel::fast}, "'fast' is for float");
}

// With Q = 0 every score is 0, unless the factor of the scores has become infinite: 0 * inf is NaN.
TEST(Scale, ThatOverflowsOnlyInBase2IsTakenByTiledAndRefusedByFast) {
  Spec spec;
  spec.p.Nq = 3;
  spec.p.Nk = 5;
  spec.p.d = 4;
  spec.p.scale = 3e38;
  ForwardCase<float> c(spec, true);
  c.Q.fill([](auto...) { return 0.0; });
  const auto call = c.call();
  tiled_cpu::forward(call.p, call.t);
  EXPECT_EQ(c.verdict(), "");
  try {
    tiled_cpu::forward(call.p, call.t, {Kernel::fast});
    ADD_FAILURE() << "accepted";
  } catch (const std::invalid_argument& e) {
    EXPECT_NE(std::string(e.what()).find("scale * log2(e)"), std::string::npos) << e.what();
  }
}

TEST(TinyProblem, MatchesTheChapterInTilesOfTwo) {
  for (Kernel kernel : {Kernel::tiled, Kernel::fast}) {
    TinyProblem tiny;
    tiled_cpu::forward(tiny.p, tiny.tensors(true), {kernel, 1, 2, 2});
    EXPECT_TRUE(tiny.matches(true));
  }
}

}  // namespace
