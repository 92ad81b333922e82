// Tests of stage 05. The same file is built twice: for the GPU, and with FA_EMULATED for the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "03_tiled_cpu/tiled_cpu.hpp"
#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/edge.hpp"
#include "common/judge/function_ref.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/threads.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using namespace fa::cuda_backward;
using Int = std::int64_t;

// What a call needs from the caller beside tensors: scratch, for as long as the work runs.
void run_on_gpu(const Problem& p, const Backward<float>& t, Options options) {
#ifdef FA_EMULATED
  const Edge scratch(scratch_bytes(p, options));
  options.scratch = {scratch.data(), scratch_bytes(p, options)};
#else
  const DeviceMemory scratch(scratch_bytes(p, options));
  options.scratch = scratch;
#endif
  backward(p, t, options);
  FA_CUDA_CHECK(cudaDeviceSynchronize());
}

StageUnderTest on_gpu(const std::string& name, const Options& options) {
  StageUnderTest s;
  s.name = name;
  s.promises.max_d = max_d;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.rejects_lengths = false;
  s.promises.large_scores = true;
  s.promises.nan_tile = s.promises.nan_keys = 64;  // the largest tiles
  s.promises.hidden_V_is_harmless = true;
#ifndef FA_EMULATED
  s.promises.host_memory = false;
  s.promises.device_bytes = free_device_bytes;
#endif
  // A GPU with little shared memory refuses some head dimensions, in words.
  s.promises.takes = [options](const Problem& p) {
    return unsupported(p, Backward<float>{}, options).empty();
  };
  s.promises.deterministic_backward = options.kernel == Kernel::two_kernels;
  s.f32.backward = on_gpu_backward<float>(
      [options](const Problem& p, const Backward<float>& t) { run_on_gpu(p, t, options); });
  s.effort = gpu_effort();
  s.take_kernels = take_kernels();
  s.unavailable = no_gpu;
  return s;
}

#ifdef FA_EMULATED
template <class T>
Functions<T> on_cpu(CpuOptions options) {
  return {
      on_host_forward<T>([](const Problem& p, const Forward<T>& t) { tiled_cpu::forward(p, t); }),
      on_host_backward<T>(
          [options](const Problem& p, const Backward<T>& t) { backward_on_cpu(p, t, options); })};
}
StageUnderTest plain(const char* name, CpuOptions options) {
  StageUnderTest s;
  s.name = name;
  s.promises.causal = true;
  s.promises.key_lengths = true;
  s.promises.large_scores = true;
  s.promises.tests_forward = false;
  s.promises.extra_bytes_backward = [](const Problem& p) {
    return 4.0 * double(p.Nq) * 64 + 65536;  // D, for each thread; no scores
  };
  s.f32 = on_cpu<float>(options);
  s.f64 = on_cpu<double>(options);
  return s;
}
const bool registered_on_cpu =
    register_conformance(plain("plain", {})) && register_conformance(plain("odd_tiles", {3, 7, 5}));
#endif

const bool registered =
    register_conformance(on_gpu("two_kernels", {.tiles = Tiles::lesson})) &&
    register_conformance(on_gpu("with_dq", {.delta = Delta::with_dq, .tiles = Tiles::lesson})) &&
    register_conformance(on_gpu("in_loop", {.delta = Delta::in_loop, .tiles = Tiles::lesson})) &&
    register_conformance(on_gpu("atomic", {.kernel = Kernel::atomic, .tiles = Tiles::lesson})) &&
    register_conformance(on_gpu("small_tiles", {.tiles = Tiles::small})) &&
    register_conformance(on_gpu("fast", {})) &&
    register_conformance(on_gpu("fast_in_loop", {.delta = Delta::in_loop})) &&
    register_conformance(on_gpu("fast_atomic", {.kernel = Kernel::atomic}));

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

class Gpu : public GpuTest {};

std::function<void(const BackwardCall<float>&)> runs_on_gpu(const Options& options) {
  return on_gpu_backward<float>(
      [options](const Problem& p, const Backward<float>& t) { run_on_gpu(p, t, options); });
}

// ---- the saved context
// ----------------------------------------------------------------------------

// A training step: a forward, what it leaves in the context, a backward.
TEST_F(Gpu, TheForwardsContextIsAllThatTheBackwardNeeds) {
  for (Causal mask : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    Spec s = spec(70, 90, 32, mask);
    s.p.B = s.p.Hkv = 2;
    s.p.Hq = 4;
    s.layout = {Layout::Order::BNHD, 4};  // K's strides are not V's
    s.lengths = {90, 41};
    BackwardCase<float> c(s);
    // The oracle's O and LSE are thrown away: stage 04 has to provide them.
    c.O.poison();
    c.LSE.poison();
    const DeviceCopy copy(c.call().storage);
    const Backward<float> t = on_device(copy, c.call().t);
    const View<float> O{const_cast<float*>(t.O.data), t.O.batch, t.O.head, t.O.row};
    const Forward<float> forward{t.Q, t.K, t.V, O, const_cast<float*>(t.LSE)};
    Problem p = c.p;
    p.key_lengths = copy.at(p.key_lengths);
    cuda_forward::forward(p, forward);
    const Context<float> context(p, forward);
    run_on_gpu(context.p, context.with(t.dO, t.dQ, t.dK, t.dV), {});
    copy.copy_back();
    const Array O_there = to_array(c.O), LSE_there = to_array(c.LSE);
    c.O.fill([&](auto b, auto h, auto i, auto x) { return O_there.at(b, h, i, x); });
    c.LSE.fill([&](auto b, auto h, auto i, auto) { return LSE_there.at(b, h, i); });
    EXPECT_EQ(c.verdict(), "") << s.name();
  }
}

TEST(Context, WantsTheLogSumExp) {
  ForwardCase<float> c(spec(2, 2, 2), false);
  EXPECT_NE(refusal([&] { Context<float>(c.p, c.call().t); }).find("not asked for LSE"),
            std::string::npos);
  c.p.Nq = 0;  // no row, no LSE
  EXPECT_EQ(refusal([&] { Context<float>(c.p, c.call().t); }), "accepted");
}

// ---- delta, and the choice of who computes it
// -----------------------------------------------------

// The small kernel, by itself: D_i = dO_i . O_i.
TEST_F(Gpu, DeltaIsTheRowSum) {
  Spec s = spec(37, 5, 59);
  s.p.B = 2;
  s.p.Hq = 2;
  s.p.Hkv = 2;
  BackwardCase<float> c(s);
  const DeviceCopy copy(c.call().storage);
  const DeviceMemory D(sizeof(float) * 2 * 2 * 37);
  launch_delta(c.p, on_device(copy, c.call().t), D.as<float>(), nullptr);
  std::vector<float> got(2 * 2 * 37);
  FA_CUDA_CHECK(cudaMemcpy(got.data(), D.as<void>(), D.bytes(), cudaMemcpyDeviceToHost));
  for (Int row = 0; row < 2 * 2 * 37; ++row) {
    double want = 0, size = 0;
    for (Int x = 0; x < 59; ++x) {
      const double term = double(c.dO.at(row / 74, row / 37 % 2, row % 37, x)) *
                          double(c.O.at(row / 74, row / 37 % 2, row % 37, x));
      want += term;
      size += std::fabs(term);
    }
    EXPECT_NEAR(got[std::size_t(row)], want, 1e-6 * size) << "row " << row;
  }
}

TEST_F(Gpu, ScratchIsWhatTheMethodNeeds) {
  Problem p = spec(100, 80, 8).p;
  p.B = 3;
  p.Hq = 4;
  p.Hkv = 4;
  EXPECT_EQ(scratch_bytes(p, {}), 4u * 3 * 4 * 100);
  EXPECT_EQ(scratch_bytes(p, {Kernel::two_kernels, Delta::with_dq}), 4u * 3 * 4 * 100);
  EXPECT_EQ(scratch_bytes(p, {Kernel::two_kernels, Delta::in_loop}), 0u);
  EXPECT_EQ(scratch_bytes(p, {Kernel::atomic}), 4u * 3 * 4 * 100);
  EXPECT_EQ(scratch_bytes(p, {Kernel::stored}), 2u * 4 * 3 * 4 * 100 * 80);
  BackwardCase<float> c(spec(4, 4, 4));
  EXPECT_NE(refusal([&] { backward(c.p, c.call().t); }).find("scratch_bytes() = 16"),
            std::string::npos);
}

// Times log2 e this scale would be no float any more; with Q = 0 no score knows of it, nor dV.
TEST_F(Gpu, TheLargestScaleIsTakenToo) {
  Spec s = spec(40, 50, 16);
  s.p.scale = 1;
  BackwardCase<float> usual(s);
  s.p.scale = 3e38;
  BackwardCase<float> large(s);
  const auto run = runs_on_gpu({});
  for (BackwardCase<float>* c : {&usual, &large}) {
    c->Q.for_each([&](auto b, auto h, auto i, auto x) { c->Q.at(b, h, i, x) = 0; });
    c->fill_context();
    run(c->call());
  }
  large.dV.for_each([&](auto b, auto h, auto j, auto x) {
    EXPECT_NEAR(large.dV.at(b, h, j, x), usual.dV.at(b, h, j, x), 1e-5) << j << ", " << x;
  });
}

// The kernel with atomics differs from run to run, if at all, by rounding.
TEST_F(Gpu, AtomicSpreadIsRoundingOnly) {
  BackwardCase<float> first(spec(130, 300, 32)), again(spec(130, 300, 32));
  const auto f = runs_on_gpu({.kernel = Kernel::atomic});
  f(first.call());
  double largest = 0, spread = 0;
  for (int n = 0; n < 10; ++n) {
    f(again.call());
    first.dQ.for_each([&](auto b, auto h, auto i, auto x) {
      const double u = double(first.dQ.at(b, h, i, x)), v = double(again.dQ.at(b, h, i, x));
      largest = std::max(largest, std::fabs(u));
      spread = std::max(spread, std::fabs(u - v));
    });
  }
  EXPECT_LE(spread, 1e-5 * largest);
  std::printf("largest difference of dQ between runs: %.1e of the largest element\n",
              spread / largest);
}

// ---- against others
// -------------------------------------------------------------------------------

TEST_F(Gpu, AgreesWithTheCpu) {
  for (const auto& [mask, tiles] : {std::pair{Causal::none, Tiles::fast},
                                    {Causal::top_left, Tiles::fast},
                                    {Causal::bottom_right, Tiles::fast},
                                    {Causal::none, Tiles::lesson},
                                    {Causal::top_left, Tiles::lesson},
                                    {Causal::bottom_right, Tiles::lesson}}) {
    BackwardCase<float> x(spec(70, 90, 32, mask)), y(spec(70, 90, 32, mask));
    backward_on_cpu(x.p, x.call().t);
    runs_on_gpu({.tiles = tiles})(y.call());
    const auto check = [&](const char* name, Buffer<float>& u, Buffer<float>& v) {
      Comparison same(name);
      u.for_each([&](auto b, auto h, auto i, auto e) {
        same.add(b, h, i, e, double(v.at(b, h, i, e)), double(u.at(b, h, i, e)), 1e-4);
      });
      EXPECT_EQ(same.report(), "") << x.spec.name();
    };
    check("dQ", x.dQ, y.dQ);
    check("dK", x.dK, y.dK);
    check("dV", x.dV, y.dV);
  }
}

TEST_F(Gpu, WorkIsPutOnTheStreamAndNobodyWaits) {
  for (Options options : {Options{},
                          {.delta = Delta::with_dq},
                          {.delta = Delta::in_loop},
                          {.kernel = Kernel::atomic},
                          {.tiles = Tiles::lesson},
                          {.delta = Delta::with_dq, .tiles = Tiles::lesson},
                          {.delta = Delta::in_loop, .tiles = Tiles::lesson},
                          {.kernel = Kernel::atomic, .tiles = Tiles::lesson}}) {
    BackwardCase<float> c(spec(64, 64, 64));
    const DeviceMemory scratch(scratch_bytes(c.p, options));
    options.scratch = scratch;
    const auto on_stream = [&](const Problem& p, const Backward<float>& t, cudaStream_t stream) {
      options.stream = stream;
      backward(p, t, options);
    };
    const std::string who = std::string(name(options.kernel)) + ", " + name(options.delta);
    EXPECT_EQ(on_its_stream(c.call(), on_stream), "") << who;
    EXPECT_EQ(c.verdict(), "") << who;
  }
}

#ifndef FA_EMULATED
// The lengths, too, are read when the graph runs, and sums start at zero again.
TEST_F(Gpu, ARecordedCallReplaysWithOtherInputs) {
  for (Options options :
       {Options{}, Options{.delta = Delta::with_dq}, Options{.kernel = Kernel::atomic}}) {
    BackwardCase<float> first(with_lengths({300, 17}, 1)), second(with_lengths({128, 299}, 2));
    const DeviceMemory scratch(scratch_bytes(first.p, options));
    options.scratch = scratch;
    const auto call = [&](const Problem& p, const Backward<float>& t, cudaStream_t stream) {
      options.stream = stream;
      backward(p, t, options);
    };
    EXPECT_EQ(replayed_as_graph(first, second, call), "") << name(options.kernel);
  }
}

TEST_F(Gpu, OnASecondGpu) {
  const SecondGpu gpu;
  if (!gpu.there()) GTEST_SKIP() << "one GPU";
  for (Options options : {Options{}, Options{.kernel = Kernel::atomic}}) {
    BackwardCase<float> c(with_lengths({300, 17}, 1));
    const DeviceMemory scratch(scratch_bytes(c.p, options));
    options.scratch = scratch;
    on_gpu_backward<float>(
        [&](const Problem& p, const Backward<float>& t) { backward(p, t, options); })(c.call());
    EXPECT_EQ(c.verdict(), "") << name(options.kernel);
  }
}
#endif

TEST_F(Gpu, MoreHeadsThanAGridHasAlongY) {
#ifdef FA_EMULATED
  constexpr Int many = 100;
#else
  constexpr Int many = 65537;
#endif
  Spec s = spec(2, 3, 8);
  s.p.Hq = s.p.Hkv = many;
  for (Tiles tiles : {Tiles::fast, Tiles::lesson}) {
    BackwardCase<float> c(s);
    runs_on_gpu({.tiles = tiles})(c.call());
    EXPECT_EQ(c.verdict(), "");
  }
}

// Forward and backward on the GPU, the derivative along a direction by differences. Loose, because
// it is taken in fp32; every element is checked in double on the CPU (plain.GradientCheck).
TEST_F(Gpu, TheBackwardIsTheDerivativeOfTheForward) {
  BackwardCase<float> c(spec(40, 50, 32, Causal::top_left));
  runs_on_gpu({})(c.call());
  const auto loss = [&](double step) {
    ForwardCase<float> f(spec(40, 50, 32, Causal::top_left), false);
    const auto move = [&](Buffer<float>& to, const Buffer<float>& from, const Buffer<float>& way) {
      to.fill([&](auto b, auto h, auto i, auto x) {
        return double(from.at(b, h, i, x)) + step * double(way.at(b, h, i, x));
      });
    };
    move(f.Q, c.Q, c.dQ);
    move(f.K, c.K, c.dK);
    move(f.V, c.V, c.dV);
    on_gpu_forward<float>(
        [](const Problem& p, const Forward<float>& t) { cuda_forward::forward(p, t); })(f.call());
    double sum = 0;
    f.O.for_each([&](auto b, auto h, auto i, auto x) {
      sum += double(f.O.at(b, h, i, x)) * double(c.dO.at(b, h, i, x));
    });
    return sum;
  };
  double squared = 0;  // along the gradient, the derivative is its squared length
  for (Buffer<float>* g : {&c.dQ, &c.dK, &c.dV})
    g->for_each([&](auto b, auto h, auto i, auto x) {
      squared += double(g->at(b, h, i, x)) * double(g->at(b, h, i, x));
    });
  const double h = 1e-3;
  EXPECT_NEAR((loss(h) - loss(-h)) / (2 * h), squared, 1e-2 * squared);
}

// ---- errors
// ---------------------------------------------------------------------------------------

TEST_F(Gpu, RefusesOtherTypesThanFloat) {
  BackwardCase<double> c(spec(2, 2, 2));
  EXPECT_NE(refusal([&] { backward(c.p, c.call().t); }).find("float, got elements of 8"),
            std::string::npos);
}

// Many queries, then many keys, in views over so many addresses that nobody owns: one runs up, one
// down, and what is used lies between them. No row is read, nor any length.
TEST_F(Gpu, RefusesMoreBlocksThanAGridHolds) {
  constexpr Int many = Int(1) << 45;
  float memory[8] = {};
  const Int none[] = {0};
  const View<const float> in{memory + 1, 0, 0, 0};
  const View<float> down{memory, 0, 0, -1}, up{memory + 7, 0, 0, 1};
  const auto one = [&](Int n) { return View<float>{memory + n, 0, 0, 1}; };
  Options options;
  options.scratch = {memory + 4, std::size_t(-1)};
  EXPECT_EQ(refusal([&] {
              backward(spec(many, 1, 1).p,
                       Backward<float>{in, in, in, in, in, up.data, down, one(2), one(3)}, options);
            }),
            "cuda_backward: B Hq max(Nq, Nk) / 4 must be below 2^31, got B = 1, Hq = 1, "
            "Nq = 35184372088832, Nk = 1");
  Problem p = spec(1, many, 1).p;
  p.key_lengths = none;
  EXPECT_EQ(
      refusal([&] {
        backward(p, Backward<float>{in, in, in, in, in, memory + 2, one(3), up, down}, options);
      }),
      "cuda_backward: B Hq max(Nq, Nk) / 4 must be below 2^31, got B = 1, Hq = 1, Nq = 1, "
      "Nk = 35184372088832");
}

TEST_F(Gpu, SaysHowMuchSharedMemoryIsMissing) {
  BackwardCase<float> c(spec(2, 2, 128));
  const std::string why = unsupported(c.p, c.call().t, {});
  EXPECT_EQ(why.empty(), shared_bytes(128, true) <= shared_memory_limit()) << why;
}

#ifdef FA_EMULATED
// A T4 has 64 KiB; no GPU that the Toolkit knows has less than 48.
TEST_F(Gpu, TakesWhatSharedMemoryThereIs) {
  for (Int d : {32, 64, 128}) EXPECT_LE(shared_bytes(d, true), 64u * 1024);
  for (Int d : {32, 64}) EXPECT_LE(fast_shared_bytes(d), 99u * 1024);
  BackwardCase<float> c(spec(70, 90, 128, Causal::bottom_right));
  const auto run = runs_on_gpu({});
  for (std::size_t kibibytes : {99, 64}) {  // an RTX 4090, whose fast tiles end at d = 64; a T4
    emulator::LessSharedMemory less(kibibytes * 1024);
    run(c.call());
    EXPECT_EQ(c.verdict(), "") << kibibytes;
  }
  emulator::LessSharedMemory none(48 * 1024);
  const std::string why = refusal([&] { run(c.call()); });
  EXPECT_NE(why.find("needs " + std::to_string(shared_bytes(128, true)) + " bytes"),
            std::string::npos)
      << why;
  EXPECT_NE(why.find("49152"), std::string::npos) << why;
}

TEST(Plain, AnyNumberOfThreadsGivesTheSameBits) {
  Spec s = spec(50, 60, 16, Causal::top_left);
  s.p.B = 2;
  s.p.Hq = 6;
  s.p.Hkv = 3;
  BackwardCase<double> one(s), many(s);
  backward_on_cpu(one.p, one.call().t, {1});
  for (int threads : {2, 5, 0}) {
    backward_on_cpu(many.p, many.call().t, {threads});
    int different = 0;
    for (auto [x, y] : {std::pair{&one.dQ, &many.dQ}, {&one.dK, &many.dK}, {&one.dV, &many.dV}})
      x->for_each([&, u = x, v = y](auto b, auto h, auto i, auto e) {
        different += !(u->at(b, h, i, e) == v->at(b, h, i, e));
      });
    EXPECT_EQ(different, 0) << threads << " threads";
  }
}
TEST(Plain, WithOneKeyDvIsDoUpToTheRoundingOfAScore) {
  const auto forward = [](const auto& call) { tiled_cpu::forward(call.p, call.t); };
  const auto check = [&](auto type, std::uint64_t seed) {
    using T = decltype(type);
    Spec s = spec(1, 1, 32, Causal::none);
    s.seed = seed;
    BackwardCase<T> c(s, forward);
    backward_on_cpu(c.p, c.call().t);
    double score = 0;
    for (Int x = 0; x < 32; ++x)
      score += c.p.softmax_scale() * std::fabs(double(c.Q.at(0, 0, 0, x) * c.K.at(0, 0, 0, x)));
    const double most = (32 + 8) * double(std::numeric_limits<T>::epsilon()) * (1 + score);
    for (Int x = 0; x < 32; ++x) {
      const double dO = double(c.dO.at(0, 0, 0, x));
      EXPECT_LE(std::fabs(double(c.dV.at(0, 0, 0, x)) - dO), most * std::fabs(dO)) << seed;
    }
  };
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    check(float(), seed);
    check(double(), seed);
  }
}
TEST(Plain, StartsAsManyThreadsAsItIsTold) {
  Spec s = spec(300, 300, 32);
  s.p.Hq = s.p.Hkv = 4;
  BackwardCase<float> c(s);
  const auto share = [&](int threads) {
    const auto call = c.call();
    return share_of_other_threads([&] { backward_on_cpu(call.p, call.t, {threads}); });
  };
  EXPECT_LE(share(1), 0.05);
  EXPECT_GE(share(3), 0.05);
}
TEST(Plain, BadOptionsAreRefusedInWords) {
  BackwardCase<double> c(spec(2, 2, 2));
  const auto words = [&](CpuOptions options) {
    return refusal([&] { backward_on_cpu(c.p, c.call().t, options); });
  };
  EXPECT_EQ(words({-1}), "backward_on_cpu: threads must not be negative, got -1");
  EXPECT_EQ(words({1, 0, 5}), "backward_on_cpu: Br and Bc must be positive, got 0 and 5");
  EXPECT_EQ(words({1, 7, 0}), "backward_on_cpu: Br and Bc must be positive, got 7 and 0");
}

TEST(Stored, IsRefusedWhereThereIsNoCublas) {
  BackwardCase<float> c(spec(2, 2, 2));
  EXPECT_NE(refusal([&] { backward(c.p, c.call().t, {Kernel::stored}); }).find("needs cuBLAS"),
            std::string::npos);
}
#else
class Stored : public GpuTest {};

TEST_F(Stored, AgreesWithTheOracle) {
  for (Causal mask : {Causal::none, Causal::top_left}) {
    Spec s = spec(65, 65, 40, mask);
    s.p.B = s.p.Hq = s.p.Hkv = 2;
    BackwardCase<float> c(s);
    on_gpu_backward<float>([](const Problem& p, const Backward<float>& t) {
      const DeviceMemory scratch(scratch_bytes(p, {Kernel::stored}));
      // P, as the forward of stage 04's baseline leaves it.
      const DeviceMemory O(sizeof(float) * 2 * 2 * 65 * 40);
      cuda_forward::forward(p, Forward<float>{t.Q, t.K, t.V, contiguous(O.as<float>(), 2, 65, 40)},
                            {cuda_forward::Kernel::baseline, nullptr, scratch});
      Options options{Kernel::stored};
      options.scratch = scratch;
      backward(p, t, options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << s.name();
  }
}
#endif

}  // namespace
