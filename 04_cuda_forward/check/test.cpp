// Tests of stage 04. The same file is built twice: for the GPU, and with FA_EMULATED for the CPU.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <tuple>

#include "03_tiled_cpu/tiled_cpu.hpp"
#include "04_cuda_forward/cuda_forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/function_ref.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using cuda_forward::Kernel;
using Int = std::int64_t;

StageUnderTest stage(Kernel kernel, Int nan_tile, Int nan_keys = 1) {
  StageUnderTest s;
  s.name = cuda_forward::name(kernel);
  s.promises.max_d = cuda_forward::max_d;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.rejects_lengths = false;
  s.promises.large_scores = true;
  s.promises.nan_tile = nan_tile;
  s.promises.nan_keys = nan_keys;
#ifndef FA_EMULATED
  s.promises.host_memory = false;
  s.promises.device_bytes = free_device_bytes;
#endif
  // A GPU with little shared memory refuses some head dimensions, in words.
  s.promises.takes = [kernel](const Problem& p) {
    return cuda_forward::unsupported(p, Forward<float>{}, kernel).empty();
  };
  s.f32.forward = on_gpu_forward<float>([kernel](const Problem& p, const Forward<float>& t) {
    cuda_forward::forward(p, t, {kernel});
  });
  s.effort = gpu_effort();
  s.take_kernels = take_kernels();
  s.unavailable = no_gpu;
  return s;
}
// A NaN in a hidden key's value reaches rows of the same tile: up to weights_by_key as far as the
// tile of keys is loaded at all, then within eight keys.
const bool registered = register_conformance(stage(Kernel::tiled, 32)) &&
                        register_conformance(stage(Kernel::thread_tile, 64)) &&
                        register_conformance(stage(Kernel::fixed_width, 64)) &&
                        register_conformance(stage(Kernel::one_buffer, 64)) &&
                        register_conformance(stage(Kernel::register_tiled, 64)) &&
                        register_conformance(stage(Kernel::neighbours, 64)) &&
                        register_conformance(stage(Kernel::eight_rows, 128)) &&
                        register_conformance(stage(Kernel::weights_by_key, 128)) &&
                        register_conformance(stage(Kernel::eight_by_eight, 64, 8)) &&
                        register_conformance(stage(Kernel::copies_ahead, 64, 8)) &&
                        register_conformance(stage(Kernel::fragments_ahead, 64, 8)) &&
                        register_conformance(stage(Kernel::lazy_maximum, 64, 8)) &&
                        register_conformance(stage(Kernel::longest_first, 64, 8));

class Gpu : public GpuTest {};

// Runs the case on the GPU and returns the kernel that was chosen.
Kernel run(ForwardCase<float>& c, Kernel wanted) {
  Kernel chosen{};
  on_gpu_forward<float>([&](const Problem& p, const Forward<float>& t) {
    chosen = cuda_forward::forward(p, t, {wanted});
  })(c.call());
  return chosen;
}
Spec spec(Int Nq, Int Nk, Int d, Causal causal = Causal::none) {
  Spec s;
  s.p.Nq = Nq;
  s.p.Nk = Nk;
  s.p.d = d;
  s.p.causal = causal;
  return s;
}
std::string refusal(FunctionRef<void()> f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

TEST_F(Gpu, ForwardSaysWhichKernelItChose) {
  ForwardCase<float> c(spec(33, 65, 40), true);
  Kernel highest{};
  for (Kernel kernel : cuda_forward::ladder)
    if (cuda_forward::unsupported(c.p, c.call().t, kernel).empty()) highest = kernel;
  EXPECT_EQ(run(c, Kernel::best), highest);
  EXPECT_EQ(c.verdict(), "");
  EXPECT_EQ(run(c, Kernel::tiled), Kernel::tiled);
  EXPECT_EQ(c.verdict(), "");
}

// The grid's y and z end at 65535, and x at 2^31 - 1: heads must lie along x.
TEST_F(Gpu, MoreHeadsThanAGridHasAlongY) {
#ifdef FA_EMULATED
  constexpr Int many = 100;  // each block costs a quarter of a millisecond here
#else
  constexpr Int many = 65537;
#endif
  for (Kernel kernel : cuda_forward::ladder)
    for (bool many_batches : {false, true}) {
      Spec s = spec(2, 3, 8);
      (many_batches ? s.p.B : s.p.Hq) = many;
      s.p.Hkv = s.p.Hq;
      ForwardCase<float> c(s, true);
      run(c, kernel);
      EXPECT_EQ(c.verdict(), "") << name(kernel) << " B " << s.p.B;
    }
}

TEST_F(Gpu, WorkIsPutOnTheStreamAndNobodyWaits) {
  for (Kernel kernel : cuda_forward::ladder) {
    ForwardCase<float> c(spec(64, 64, 64), true);
    const auto on_stream = [&](const Problem& p, const Forward<float>& t, cudaStream_t stream) {
      cuda_forward::forward(p, t, {kernel, stream});
    };
    EXPECT_EQ(on_its_stream(c.call(), on_stream), "") << name(kernel);
    EXPECT_EQ(c.verdict(), "") << name(kernel);
  }
}

#ifndef FA_EMULATED
// The lengths, too, are read when the graph runs.
TEST_F(Gpu, ARecordedCallReplaysWithOtherInputs) {
  for (const Kernel kernel : {Kernel::best, Kernel::tiled}) {
    ForwardCase<float> first(with_lengths({300, 17}, 1), true);
    ForwardCase<float> second(with_lengths({128, 299}, 2), true);
    const auto call = [&](const Problem& p, const Forward<float>& t, cudaStream_t stream) {
      cuda_forward::forward(p, t, {kernel, stream});
    };
    EXPECT_EQ(replayed_as_graph(first, second, call), "") << cuda_forward::name(kernel);
  }
}

TEST_F(Gpu, OnASecondGpu) {
  const SecondGpu gpu;
  if (!gpu.there()) GTEST_SKIP() << "one GPU";
  ForwardCase<float> c(with_lengths({300, 17}, 1), true);
  on_gpu_forward<float>(
      [](const Problem& p, const Forward<float>& t) { cuda_forward::forward(p, t); })(c.call());
  EXPECT_EQ(c.verdict(), "");
}
#endif

TEST_F(Gpu, AgreesWithStage03) {
  for (Kernel kernel : cuda_forward::ladder)
    for (Causal mask : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      ForwardCase<float> x(spec(70, 90, 64, mask), true), y(spec(70, 90, 64, mask), true);
      tiled_cpu::forward(x.p, x.call().t);
      run(y, kernel);
      Comparison c("O of stages 03 and 04");
      x.O.for_each([&](auto b, auto h, auto i, auto e) {
        c.add(b, h, i, e, double(y.O.at(b, h, i, e)), double(x.O.at(b, h, i, e)), 2e-5);
      });
      EXPECT_EQ(c.report(), "") << name(kernel);
    }
}

TEST_F(Gpu, TinyProblemMatchesTheChapter) {
  for (Kernel kernel : cuda_forward::ladder) {
    TinyProblem tiny;
    on_gpu_forward<float>([&](const Problem& p, const Forward<float>& t) {
      cuda_forward::forward(p, t, {kernel});
    })({tiny.p,
        tiny.tensors(true),
        {{tiny.Q, sizeof tiny.Q},
         {tiny.K, sizeof tiny.K},
         {tiny.V, sizeof tiny.V},
         {tiny.O, sizeof tiny.O},
         {tiny.LSE, sizeof tiny.LSE}}});
    EXPECT_TRUE(tiny.matches(true)) << name(kernel);
  }
}

// ---- errors
// ---------------------------------------------------------------------------------------

TEST_F(Gpu, RefusesOtherTypesThanFloat) {
  ForwardCase<double> c(spec(2, 2, 2), false);
  EXPECT_NE(
      refusal([&] { cuda_forward::forward(c.p, c.call().t); }).find("float, got elements of 8"),
      std::string::npos);
}

TEST_F(Gpu, RefusesAnUnsupportedHeadDimensionWithBothNumbers) {
  ForwardCase<float> c(spec(2, 2, 129), false);
  const std::string words = refusal([&] { run(c, Kernel::best); });
  EXPECT_NE(words.find("128"), std::string::npos) << words;
  EXPECT_NE(words.find("129"), std::string::npos) << words;
}

TEST_F(Gpu, RefusesMoreBlocksThanAGridHolds) {
  Problem p = spec(Int(1) << 36, 1, 1).p;
  float memory[8] = {};
  const View<float> v{memory, 0, 0, 0}, o{memory + 4, 0, 0, 1};
  const Forward<float> t{v, v, v, o, nullptr};
  EXPECT_EQ(refusal([&] { cuda_forward::forward(p, t, {Kernel::tiled}); }),
            "cuda_forward: B Hq ceil(Nq / 16) must be below 2^31, got B = 1, Hq = 1, "
            "Nq = 68719476736");
  p.Nq = 17;  // two tiles for each head; nobody reads or writes that far
  p.Hq = p.Hkv = Int(1) << 30;
  const Forward<float> many{v, v, v, {memory + 4, 0, 17, 1}, nullptr};
  EXPECT_EQ(refusal([&] { cuda_forward::forward(p, many, {Kernel::tiled}); }),
            "cuda_forward: B Hq ceil(Nq / 16) must be below 2^31, got B = 1, Hq = 1073741824, "
            "Nq = 17");
}

#ifdef FA_EMULATED
// The table in docs/manual.md.
TEST_F(Gpu, BestIsTheHighestRungThatFitsTheGpu) {
  const Kernel last = Kernel::longest_first;
  const struct {
    std::size_t kib;
    std::array<Kernel, 3> best;  // at d = 32, 64, 128
  } gpus[] = {{64, {Kernel::eight_rows, Kernel::neighbours, Kernel::tiled}},
              {96, {last, Kernel::eight_by_eight, Kernel::weights_by_key}},
              {99, {last, last, last}},
              {163, {last, last, last}}};
  for (const auto& gpu : gpus) {
    emulator::LessSharedMemory limit(gpu.kib * 1024);
    for (std::size_t i = 0; i < 3; ++i) {
      ForwardCase<float> c(spec(2, 2, Int(32) << i), false);
      EXPECT_EQ(run(c, Kernel::best), gpu.best[i]) << gpu.kib << " KiB, d = " << (32 << i);
    }
  }
}
#endif

TEST_F(Gpu, SaysHowMuchSharedMemoryIsMissing) {
  EXPECT_EQ(too_little_shared_memory("register_tiled", 86016, 65536),
            "register_tiled needs 86016 bytes of shared memory per block, this GPU has 65536");
  EXPECT_EQ(too_little_shared_memory("register_tiled", 65536, 65536), "");
  ForwardCase<float> c(spec(2, 2, 128), false);
  const std::string why = cuda_forward::unsupported(c.p, c.call().t, Kernel::register_tiled);
  const std::size_t needs = cuda_forward::register_tiled_shared_bytes(128);
  EXPECT_EQ(why.empty(), needs <= shared_memory_limit()) << why;
#ifdef FA_EMULATED
  // A T4 has 64 KiB: register_tiled does not fit, and tiled steps in.
  emulator::LessSharedMemory t4(64 * 1024);
  EXPECT_NE(refusal([&] { run(c, Kernel::register_tiled); }).find(std::to_string(needs)),
            std::string::npos);
  EXPECT_EQ(run(c, Kernel::best), Kernel::tiled);
  EXPECT_EQ(c.verdict(), "");
#endif
}

// Powers of 2 need scale log2(e), which may overflow where the scale does not.
TEST_F(Gpu, AScaleThatIsTooLargeForPowersOfTwoTakesALowerRung) {
  Spec s = spec(20, 40, 16);
  s.p.scale = 3e38;
  ForwardCase<float> c(s, true);
  c.Q.fill([](auto, auto, auto i, auto x) { return x == 0 ? 1e-38 * double(i) : 0; });
  c.K.fill([](auto, auto, auto j, auto x) { return x == 0 ? double(j % 7) - 3 : 0; });
  EXPECT_NE(refusal([&] { run(c, Kernel::longest_first); }).find("scale * log2(e)"),
            std::string::npos);
  const Kernel chosen = run(c, Kernel::best);
  EXPECT_LT(chosen, Kernel::lazy_maximum);
  EXPECT_GE(chosen, Kernel::register_tiled);
  EXPECT_EQ(c.verdict(), "") << name(chosen);
}

TEST_F(Gpu, RefusesMoreKeysThanThirtyTwoBitsCount) {
  const Problem p = spec(1, Int(1) << 31, 1).p;
  for (Kernel kernel : cuda_forward::ladder)
    EXPECT_EQ(cuda_forward::unsupported(p, Forward<float>{}, kernel).find("Nk must be below") !=
                  std::string::npos,
              kernel >= Kernel::neighbours)
        << name(kernel);
}

#ifdef FA_EMULATED
// No result tells in which order blocks take their rows, only how long the last of them takes.
TEST_F(Gpu, TheFirstBlockTakesTheLongestRows) {
  const emulator::FirstBlockOnly first;
  for (Kernel kernel : cuda_forward::ladder) {
    ForwardCase<float> c(spec(300, 300, 8, Causal::top_left), false);
    run(c, kernel);
    if (std::isnan(c.O.at(0, 0, 299, 0)) || !std::isnan(c.O.at(0, 0, 0, 0)))
      ADD_FAILURE() << name(kernel) << ": block 0 does not take the last rows, which see most keys";
  }
}

TEST(Baseline, IsRefusedWhereThereIsNoCublas) {
  ForwardCase<float> c(spec(2, 2, 2), false);
  EXPECT_NE(refusal([&] { run(c, Kernel::baseline); }).find("needs cuBLAS"), std::string::npos);
}
#else
class Baseline : public GpuTest {};

TEST_F(Baseline, AgreesWithTheOracle) {
  for (Causal mask : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (auto [Nq, Nk, d] : {std::tuple{33, 65, 40}, {65, 33, 128}, {1, 300, 64}, {5, 0, 8}}) {
      Spec s = spec(Nq, Nk, d, mask);
      s.p.B = 2;
      s.p.Hq = 6;
      s.p.Hkv = Nk == 65 ? 2 : 6;
      s.layout.order = Layout::Order::BNHD;
      if (Nk > 0) s.lengths = {Nk / 2, Nk};
      ForwardCase<float> c(s, true);
      on_gpu_forward<float>([&](const Problem& p, const Forward<float>& t) {
        const DeviceMemory S(cuda_forward::scratch_bytes(p, Kernel::baseline));
        cuda_forward::forward(p, t, {Kernel::baseline, nullptr, S});
        FA_CUDA_CHECK(cudaDeviceSynchronize());  // before S is freed
      })(c.call());
      EXPECT_EQ(c.verdict(), "") << s.name();
    }
}

TEST_F(Baseline, AsksForItsScratch) {
  ForwardCase<float> c(spec(4, 8, 2), false);
  EXPECT_NE(refusal([&] { run(c, Kernel::baseline); }).find("scratch_bytes() = 128"),
            std::string::npos);
  c.spec.layout.reversed = true;
  auto call = c.call();
  call.t.Q.row = -2;
  EXPECT_NE(cuda_forward::unsupported(call.p, call.t, Kernel::baseline).find("rows of Q"),
            std::string::npos);
}
#endif

}  // namespace
