// Tests of stage 06 on a GPU: every kernel by what it promises, and the choice among them.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/conformance.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"
#include "common/judge/stage.hpp"
#include "common/judge/tiny.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using optimized::Kernel;
using Int = std::int64_t;
using bf16 = Eigen::bfloat16;

// What a call needs from the caller beside tensors. The scratch of all calls is one piece: work on
// one stream uses it in turn, and it holds garbage on purpose.
Scratch scratch() {
  static const DeviceMemory memory = [] {
    DeviceMemory m(256);
    FA_CUDA_CHECK(cudaMemset(m.as<void>(), 0x7b, m.bytes()));
    return m;
  }();
  return memory;
}
template <class Device, class Host>
Kernel run(const Problem& p, const Forward<Host>& t, Kernel kernel) {
  return optimized::forward(p, as_device<Device>(t), {kernel, nullptr, scratch()});
}
Kernel run(const Problem& p, const Forward<bf16>& t, Kernel kernel) {
  return run<__nv_bfloat16>(p, t, kernel);
}
Kernel run(const Problem& p, const Forward<Eigen::half>& t, Kernel kernel) {
  return run<__half>(p, t, kernel);
}
template <class T>
Kernel run(ForwardCase<T>& c, Kernel kernel) {
  Kernel ran = Kernel::best;
  on_gpu_forward<T>([&](const Problem& p, const Forward<T>& t) { ran = run(p, t, kernel); })(
      c.call());
  return ran;
}

// Why this kernel cannot run here at all.
std::string unavailable(Kernel kernel) {
  if (std::string why = no_gpu(); !why.empty()) return why;
  Problem p;
  p.d = 128;
  return optimized::unsupported(p, Forward<__nv_bfloat16>{}, kernel);
}

template <class T>
Functions<T> on_gpu(Kernel kernel) {
  return {on_gpu_forward<T>([kernel](const Problem& p, const Forward<T>& t) { run(p, t, kernel); }),
          nullptr};
}

StageUnderTest stage(const optimized::Rung& r) {
  StageUnderTest s;
  s.name = r.name;
  s.promises.lse = true;
  s.promises.causal = true;
  s.promises.large_scores = true;
  s.promises.positive_scale_only = true;
  s.promises.nan_tile = s.promises.nan_keys = 192;  // the tallest tile; tiles of keys are smaller
  s.promises.rejects_lengths = false;
  s.promises.host_memory = false;
  s.effort = effort(StageUnderTest::Effort::normal);
  if (r.whole_contract) {
    s.promises.max_d = optimized::max_d;
    s.promises.key_lengths = true;
#ifndef FA_EMULATED
    s.promises.device_bytes = free_device_bytes;
#endif
    s.effort = effort(gpu_effort());
  } else {
    s.promises.head_dims = r.d64 ? std::vector<Int>{64, 128} : std::vector<Int>{128};
    s.promises.unaligned = false;
  }
  s.bf16 = on_gpu<bf16>(r.kernel);
  if (r.fp16) s.f16 = on_gpu<Eigen::half>(r.kernel);
  s.unavailable = [kernel = r.kernel] { return unavailable(kernel); };
  return s;
}

const bool registered = [] {
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n) register_conformance(stage(ladder[n]));
  return true;
}();

class Gpu : public GpuTest {};

#ifdef FA_EMULATED
// A barrier knows the parity of its phase alone, so who looks two phases late waits for ever. Rung
// 7 once had one barrier for Q and for the first K and V, which nothing held back until all had
// seen Q.
TEST_F(Gpu, RungsWithOneBufferWaitForKAndVAtABarrierOfTheirOwn) {
  ForwardCase<bf16> c(spec(70, 130, 128), true);
  for (Kernel kernel : {Kernel::tma, Kernel::wgmma})
    for (const emulator::Schedule& s : {emulator::Schedule{emulator::Timing::early, 0},
                                        {emulator::Timing::random, 1},
                                        {emulator::Timing::random, 3}}) {
      const emulator::WithSchedule schedule(s);
      c.O.poison();
      c.LSE.poison();
      run(c, kernel);
      EXPECT_EQ(c.verdict(), "") << optimized::name(kernel);
    }
}
#endif

bool on_hopper() { return unavailable(Kernel::hopper).empty(); }

// ---- the choice ----

// By numbers alone: these two run without a GPU.
TEST(Capability, OfTheBestKernel) {
  for (int here : {80, 86, 100}) EXPECT_EQ(optimized::chosen(Kernel::best, here), Kernel::fa2);
  EXPECT_EQ(optimized::chosen(Kernel::best, 90), Kernel::hopper);
  for (int here : {80, 86, 90, 100}) {  // who is named is taken, even where it cannot run
    EXPECT_EQ(optimized::chosen(Kernel::mma, here), Kernel::mma);
    EXPECT_EQ(optimized::chosen(Kernel::hopper, here), Kernel::hopper);
  }
}

TEST(Capability, ThatARungWants) {
  const auto why_not = [](Kernel kernel, int here) {
    std::size_t count = 0;
    const optimized::Rung* r = optimized::rungs(count);
    while (r->kernel != kernel) ++r;
    return optimized::wrong_capability(r->name, r->capability, here);
  };
  for (int here : {80, 86, 90, 100}) EXPECT_EQ(why_not(Kernel::mma, here), "");
  EXPECT_EQ(why_not(Kernel::mma, 75),
            "mma is built for compute capability 8.0 and later, this GPU is 7.5");
  EXPECT_EQ(why_not(Kernel::hopper, 90), "");
  EXPECT_EQ(why_not(Kernel::hopper, 80),
            "hopper is built for compute capability 9.0 alone, this GPU is 8.0");
  EXPECT_EQ(why_not(Kernel::hopper, 86),
            "hopper is built for compute capability 9.0 alone, this GPU is 8.6");
  EXPECT_EQ(why_not(Kernel::hopper, 100),
            "hopper is built for compute capability 9.0 alone, this GPU is 10.0");
}

TEST_F(Gpu, ForwardSaysWhichKernelItChose) {
  for (Int d : {8, 64, 128, 200}) {
    ForwardCase<bf16> c(spec(65, 130, d, Causal::top_left), true);
    EXPECT_EQ(run(c, Kernel::best), on_hopper() ? Kernel::hopper : Kernel::fa2);
    EXPECT_EQ(c.verdict(), "") << "best, d = " << d;
    EXPECT_EQ(run(c, Kernel::fa2), Kernel::fa2);
    EXPECT_EQ(c.verdict(), "") << "fa2, d = " << d;
  }
}

// The copy engine knows no empty tensor: without keys its rungs hand over, and say so.
TEST_F(Gpu, ForwardSaysWhoStoodInWithoutKeys) {
  ForwardCase<bf16> c(spec(70, 0, 128), true);
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n) {
    const optimized::Rung& r = ladder[n];
    if (!unavailable(r.kernel).empty()) continue;
    c.O.poison();
    c.LSE.poison();
    EXPECT_EQ(run(c, r.kernel), r.kernel == Kernel::hopper ? Kernel::fa2
                                : r.capability == 90       ? Kernel::swizzle
                                                           : r.kernel)
        << r.name;
    EXPECT_EQ(c.verdict(), "") << r.name;
  }
}

// One tensor that TMA cannot read is enough.
TEST_F(Gpu, TakesFa2WhereTheTensorsAreNotForHopper) {
  for (const Spec& s : not_for_the_copy_engine()) {
    ForwardCase<bf16> c(s, true);
    for (Kernel kernel : {Kernel::best, Kernel::hopper}) {
      if (kernel != Kernel::best && !on_hopper()) continue;
      EXPECT_EQ(run(c, kernel), Kernel::fa2) << s.name();
      EXPECT_EQ(c.verdict(), "") << s.name();
    }
  }
  Spec s = spec(20, 30, 64);
  s.p.Hq = s.p.Hkv = 2;
  for (int moved = 0; moved < 4; ++moved) {
    ForwardCase<bf16> c(s, true);
    Buffer<bf16>* const all[] = {&c.Q, &c.K, &c.V, &c.O};
    all[moved]->move_to({Layout::Order::BHND, 0, 3});
    EXPECT_EQ(run(c, Kernel::best), Kernel::fa2) << "tensor " << moved;
    EXPECT_EQ(c.verdict(), "") << "tensor " << moved;
  }
}

// Many more blocks of keys than buffers, of 128 keys, and of 192 from 6144 on. And with tiles odd
// in number no blocks share them. Behind a mask a tile's last block is cut in the middle.
TEST_F(Gpu, HopperWithManyKeys) {
  if (!on_hopper()) GTEST_SKIP() << unavailable(Kernel::hopper);
  for (const Int Nk : {4100, 6143, 6144, 8200}) {
    ForwardCase<bf16> c(spec(270, Nk, 128), true);
    run(c, Kernel::hopper);
    EXPECT_EQ(c.verdict(), "") << "Nk = " << Nk;
  }
  for (const Int d : {72, 128}) {
    Spec s = spec(300, 6200, d, Causal::bottom_right);
    s.p.B = 3;
    s.lengths = {6200, 190, 0};
    ForwardCase<bf16> c(s, true);
    run(c, Kernel::hopper);
    EXPECT_EQ(c.verdict(), "") << "d = " << d;
  }
}

// Two blocks share the keys of a head: where its tiles are even in number, and keys many. The last
// tile has 116 rows, the last block of keys 97, or 33.
TEST_F(Gpu, HopperInPairs) {
  if (!on_hopper()) GTEST_SKIP() << unavailable(Kernel::hopper);
  for (const Int d : {128, 256}) {
    Spec s = spec(244, 8193, d);
    s.p.Hq = 2;
    s.p.Hkv = 1;
    ForwardCase<bf16> c(s, true);
    run(c, Kernel::hopper);
    EXPECT_EQ(c.verdict(), "") << "d = " << d;
  }
}

// Whoever takes a tile, it is the same tile: at each d, with and without a mask.
TEST_F(Gpu, ABlockATileHasTheSameBits) {
  for (const Int d : {40, 64, 128, 256}) {
    Spec s = spec(sized(3000, 300), 200, d, d == 64 || d == 256 ? Causal::top_left : Causal::none);
    s.p.Hq = s.p.Hkv = sized(16, 2);
    ForwardCase<bf16> c(s, true), each(s, true);
    run(c, Kernel::best);
    on_gpu_forward<bf16>([](const Problem& p, const Forward<bf16>& t) {
      optimized::forward(p, as_device<__nv_bfloat16>(t), {Kernel::best, nullptr, scratch(), true});
    })(each.call());
    EXPECT_EQ(each.verdict(), "") << "d = " << d;
    EXPECT_EQ(same_bits("O", c.O, each.O), "") << "d = " << d;
  }
}

TEST_F(Gpu, EveryRungHasANameOfItsOwn) {
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n) {
    EXPECT_STREQ(optimized::name(ladder[n].kernel), ladder[n].name);
    for (std::size_t m = 0; m < n; ++m) EXPECT_STRNE(ladder[m].name, ladder[n].name);
  }
  EXPECT_STREQ(optimized::name(Kernel::best), "best");
}

// The kernels of a ladder compute the same thing.
TEST_F(Gpu, TheRungsAgree) {
  ForwardCase<bf16> c(spec(sized(300, 150), sized(420, 200), 128, Causal::bottom_right), true);
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n) {
    if (!unavailable(ladder[n].kernel).empty()) continue;
    c.O.poison();
    c.LSE.poison();
    EXPECT_EQ(run(c, ladder[n].kernel), ladder[n].kernel);
    EXPECT_EQ(c.verdict(), "") << ladder[n].name;
  }
}

TEST_F(Gpu, AgreesWithTheStageBefore) {
  ForwardCase<bf16> c(spec(200, 333, 64, Causal::top_left), true);
  ForwardCase<float> f(spec(200, 333, 64, Causal::top_left), true);
  const auto copy = [](Buffer<float>& to, const Buffer<bf16>& from) {
    to.fill([&](auto b, auto h, auto i, auto x) { return double(from.at(b, h, i, x)); });
  };
  copy(f.Q, c.Q);
  copy(f.K, c.K);
  copy(f.V, c.V);
  run(c, Kernel::best);
  on_gpu_forward<float>(
      [](const Problem& p, const Forward<float>& t) { cuda_forward::forward(p, t); })(f.call());
  Comparison same("O");
  c.O.for_each([&](auto b, auto h, auto i, auto x) {
    same.add(b, h, i, x, double(c.O.at(b, h, i, x)), double(f.O.at(b, h, i, x)), 2e-2);
  });
  EXPECT_EQ(same.report(), "");
}

TEST_F(Gpu, MoreHeadsThanAGridHasAlongY) {
  Spec s = spec(2, 3, 8);
  s.p.Hq = s.p.Hkv = sized(65537, 50);  // a block costs a millisecond on the CPU
  for (Kernel kernel : {Kernel::fa2, Kernel::best}) {
    ForwardCase<bf16> c(s, true);
    run(c, kernel);
    EXPECT_EQ(c.verdict(), "") << optimized::name(kernel);
  }
}

// Rows at multiples of 16 bytes whose last chunk of 16 is not full: what is behind d is not ours.
TEST_F(Gpu, WritesNothingBehindTheLastColumn) {
  for (Int d : {1, 7, 59, 100, 129, 250})
    for (Kernel kernel : {Kernel::fa2, Kernel::best}) {
      Spec s = spec(70, 90, d, Causal::top_left);
      s.layout.in_16_bytes = true;
      s.layout.gap = 1;
      ForwardCase<bf16> c(s, true);
      run(c, kernel);
      EXPECT_EQ(c.verdict(), "") << "d = " << d;  // with the canaries in the gaps
    }
}

// ---- scores at the ends of what fp32 holds ----

std::vector<optimized::Rung> who_takes(Int d) {
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  std::vector<optimized::Rung> found(ladder, ladder + count);
  std::erase_if(found, [&](const optimized::Rung& r) {
    const bool takes = r.whole_contract || d == 128 || (d == 64 && r.d64);
    return !takes || !unavailable(r.kernel).empty();
  });
  return found;
}

// The largest scale that is not refused has to do with small products: together, scores up to 69.
TEST_F(Gpu, AHugeScaleOfSmallProducts) {
  for (Int d : {64, 128, 256}) {
    Spec s = spec(70, 150, d, Causal::bottom_right);
    s.p.scale = 2.3e38;
    ForwardCase<bf16> c(s, true);
    c.Q.fill([](auto, auto, auto i, auto x) { return x == 0 ? 2e-19 * double(1 + i % 5) : 0; });
    c.K.fill([](auto, auto, auto j, auto x) { return x == 0 ? 1e-19 * double(j % 7 - 3) : 0; });
    for (const optimized::Rung& r : who_takes(d)) {
      run(c, r.kernel);
      EXPECT_EQ(c.verdict(), "") << r.name << ", d = " << d;
    }
  }
}

// Almost as large as forward.hpp allows: times log2 e they are up to 2^27, and rounding c m is
// worth up to 2^4. They differ by 16, so a key has as much weight as any other or none. Three tiles
// of keys and more: a kernel whose alpha is not 1 where the maximum stays is off by a factor.
template <class T>
void scores_at_the_bound(Int d) {
  ForwardCase<T> c(spec(70, 600, d), true);
  c.p.scale = c.spec.p.scale = 1;
  c.Q.fill([](auto, auto, auto i, auto x) {
    return x == 0 ? 8192 * (1 + double(i % 4) / 8) : x == 1 ? 1 : 0;
  });
  c.K.fill([](auto, auto, auto j, auto x) {
    return x == 0 ? 8192 : x == 1 ? 16 * double(j % 7) : 0;
  });
  for (const optimized::Rung& r : who_takes(d)) {
    if (!r.fp16 && !std::is_same_v<T, bf16>) continue;
    run(c, r.kernel);
    Comparison same("O");
    c.O.for_each([&](auto b, auto h, auto i, auto x) {
      double mean = 0;
      int keys = 0;
      for (Int j = 6; j < c.p.Nk; j += 7, ++keys) mean += double(c.V.at(b, h, j, x));
      same.add(b, h, i, x, double(c.O.at(b, h, i, x)), mean / keys, 2e-2);
    });
    EXPECT_EQ(same.report(), "") << r.name << ", d = " << d;
  }
}
TEST_F(Gpu, ScoresAtTheBound) {
  for (Int d : {64, 128, 256}) {
    scores_at_the_bound<bf16>(d);
    scores_at_the_bound<Eigen::half>(d);
  }
}

// Beyond 2^28 a row is lost, whether fp32 holds its scores (row 37) or not, and no other row is.
TEST_F(Gpu, ARowOfScoresBeyondAllBoundsIsLostAlone) {
  for (Int d : {64, 128, 256}) {
    Spec s = spec(70, 150, d, Causal::bottom_right);
    s.p.scale = 1e10;
    ForwardCase<bf16> clean(s, true), c(s, true);
    const auto bad = [](Int i) { return i == 0 || i == 37 || i == 69; };
    const Array Q = to_array(c.Q);
    clean.Q.fill([&](auto b, auto h, auto i, auto x) { return 1e-10 * Q.at(b, h, i, x); });
    c.Q.fill([&](auto b, auto h, auto i, auto x) {
      return (!bad(i) ? 1e-10 : i == 37 ? 1 : 1e30) * Q.at(b, h, i, x);
    });
    for (const optimized::Rung& r : who_takes(d)) {
      run(clean, r.kernel);
      EXPECT_EQ(clean.verdict(), "") << r.name << ", d = " << d;
      run(c, r.kernel);
      Comparison O("O"), LSE("LSE");
      clean.O.for_each([&](auto b, auto h, auto i, auto x) {
        if (!bad(i))
          O.add(b, h, i, x, double(c.O.at(b, h, i, x)), double(clean.O.at(b, h, i, x)), 0);
      });
      clean.LSE.for_each([&](auto b, auto h, auto i, auto x) {
        if (!bad(i)) LSE.add(b, h, i, x, c.LSE.at(b, h, i, x), clean.LSE.at(b, h, i, x), 0);
      });
      EXPECT_EQ(O.report() + LSE.report() + c.check_memory_untouched(), "")
          << r.name << ", d = " << d;
    }
  }
}

// A stride of 0 repeats a row, for the copy engine too.
TEST_F(Gpu, OneKeyAsManyTimesAsWanted) {
  ForwardCase<bf16> c(spec(70, 200, 64, Causal::bottom_right), true);
  const Buffer<bf16> K = c.K;
  c.K.fill([&](auto b, auto h, auto, auto x) { return double(K.at(b, h, 0, x)); });
  for (Kernel kernel : {Kernel::fa2, Kernel::best}) {
    on_gpu_forward<bf16>([&](const Problem& p, Forward<bf16> t) {
      t.K.row = 0;
      run(p, t, kernel);
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << optimized::name(kernel);
  }
}

// With a mask and more tiles than SMs: they are then taken by a counter in the scratch, which each
// call has to reset, on its own stream.
TEST_F(Gpu, WorkIsPutOnTheStreamAndNobodyWaits) {
  for (Kernel kernel : {Kernel::fa2, Kernel::best}) {
    const Int N = sized(300, 150);
    Spec many = spec(N, N, 64, Causal::top_left);
    many.p.B = sized(4, 1);
    many.p.Hq = many.p.Hkv = sized(32, 3);
    ForwardCase<bf16> c(many, true);
    const auto on_stream = [&](const Problem& p, const Forward<bf16>& t, cudaStream_t stream) {
      optimized::forward(p, as_device<__nv_bfloat16>(t), {kernel, stream, scratch()});
    };
    EXPECT_EQ(on_its_stream(c.call(), on_stream), "") << optimized::name(kernel);
    EXPECT_EQ(c.verdict(), "") << optimized::name(kernel);
  }
}

// Two calls at once, on two streams, each with a scratch of its own.
TEST_F(Gpu, UsesTheStreamThatItIsGiven) {
  const Int N = sized(1000, 150);
  ForwardCase<bf16> c(spec(N, N, 64, Causal::top_left), true);
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams)
    FA_CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  const DeviceMemory scratch[2] = {DeviceMemory(4), DeviceMemory(4)};
  on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
    const DeviceMemory other(sizeof(bf16) * N * 64);
    Forward<bf16> second = t;
    second.O = contiguous(other.as<bf16>(), 1, N, 64);
    second.LSE = nullptr;
    for (Int n = 0; n < sized(20, 2); ++n) {
      optimized::forward(p, as_device<__nv_bfloat16>(t), {Kernel::best, streams[0], scratch[0]});
      optimized::forward(p, as_device<__nv_bfloat16>(second),
                         {Kernel::best, streams[1], scratch[1]});
    }
    for (cudaStream_t s : streams) FA_CUDA_CHECK(cudaStreamSynchronize(s));
  })(c.call());
  for (cudaStream_t s : streams) FA_CUDA_CHECK(cudaStreamDestroy(s));
  EXPECT_EQ(c.verdict(), "");
}

#ifndef FA_EMULATED
// Of a rung what all take; of the whole contract lengths too. Who counts tiles gets more than there
// are SMs: then they are taken by the counter in the scratch, which each run of a graph has to
// reset.
Spec recorded(const optimized::Rung& r, std::vector<Int> lengths, std::uint64_t seed) {
  Spec s = spec(150, 150, 128, Causal::bottom_right);
  s.p.B = Int(lengths.size());
  s.p.Hq = s.p.Hkv = optimized::scratch_bytes(s.p, r.kernel) > 0 ? 40 : 2;
  if (r.whole_contract) s.lengths = std::move(lengths);
  s.seed = seed;
  return s;
}

TEST_F(Gpu, ARecordedCallReplaysWithOtherInputs) {
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  for (const optimized::Rung& r : std::vector<optimized::Rung>(ladder, ladder + count)) {
    if (!unavailable(r.kernel).empty()) continue;
    ForwardCase<bf16> first(recorded(r, {150, 17}, 1), true);
    ForwardCase<bf16> second(recorded(r, {128, 149}, 2), true);
    const auto call = [&](const Problem& p, const Forward<bf16>& t, cudaStream_t stream) {
      optimized::forward(p, as_device<__nv_bfloat16>(t), {r.kernel, stream, scratch()});
    };
    EXPECT_EQ(replayed_as_graph(first, second, call), "") << r.name;
  }
}

TEST_F(Gpu, TheFirstCallOfAThread) {
  std::size_t count = 0;
  const optimized::Rung* ladder = optimized::rungs(count);
  for (const optimized::Rung& r : std::vector<optimized::Rung>(ladder, ladder + count)) {
    if (!unavailable(r.kernel).empty()) continue;
    ForwardCase<bf16> c(spec(150, 150, 128, Causal::top_left), true);
    on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
      const Scratch lent = scratch();
      EXPECT_EQ(in_a_new_thread([&] {
                  optimized::forward(p, as_device<__nv_bfloat16>(t), {r.kernel, nullptr, lent});
                }),
                "")
          << r.name;
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << r.name;
  }
}

TEST_F(Gpu, OnASecondGpu) {
  const SecondGpu gpu;
  if (!gpu.there()) GTEST_SKIP() << "one GPU";
  const DeviceMemory own(4);
  for (Kernel kernel : {Kernel::fa2, Kernel::best}) {
    ForwardCase<bf16> c(spec(300, 300, 128, Causal::top_left), true);
    on_gpu_forward<bf16>([&](const Problem& p, const Forward<bf16>& t) {
      optimized::forward(p, as_device<__nv_bfloat16>(t), {kernel, nullptr, own});
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << optimized::name(kernel);
  }
}
#endif

// ---- errors ----

TEST_F(Gpu, RefusesOtherTypesThanHalves) {
  ForwardCase<float> c(spec(2, 2, 2), true);
  expect_words(refusal([&] { optimized::forward(c.p, c.call().t); }),
               {"__half or __nv_bfloat16", "elements of 4 bytes"});
}

TEST_F(Gpu, SaysWhatARungTakes) {
  const auto why = [](Kernel kernel, Int d, auto type) {
    ForwardCase<decltype(type)> c(spec(4, 4, d), true);
    return refusal([&] { run(c, kernel); });
  };
  expect_words(why(Kernel::mma, 32, bf16()), {"mma takes d = 64 or 128, got d = 32"});
  expect_words(why(Kernel::fa2, 257, bf16()), {"d must", "256", "257"});
  ForwardCase<bf16> c(spec(4, 4, 64), true);
  for (const float scale : {2.3e38f, 2.4e38f}) {
    c.p.scale = scale;
    const std::string said = refusal([&] { run(c, Kernel::fa2); });
    if (scale < 2.358e38f)
      EXPECT_EQ(said, "accepted");
    else
      expect_words(said, {"fa2: scale log2 e must be finite in fp32, got a scale of 2.4e+38"});
  }
  if (!on_hopper()) return;
  expect_words(why(Kernel::ring, 64, bf16()), {"ring takes d = 128, got d = 64"});
  expect_words(why(Kernel::ring, 128, Eigen::half()), {"ring is for bf16 only, got fp16"});
}

TEST_F(Gpu, ScratchIsAskedFor) {
  Problem p = spec(100, 80, 8, Causal::top_left).p;
  EXPECT_EQ(optimized::scratch_bytes(p, Kernel::fa2), 0u);
  EXPECT_EQ(optimized::scratch_bytes(p), on_hopper() ? 4u : 0u);
  p.causal = Causal::none;
  EXPECT_EQ(optimized::scratch_bytes(p), 0u);
  if (!on_hopper()) return;
  ForwardCase<bf16> c(spec(4, 4, 64, Causal::top_left), true);
  const auto why = [&](const Scratch& scratch) {
    return refusal([&] {
      optimized::forward(c.p, as_device<__nv_bfloat16>(c.call().t),
                         {Kernel::hopper, nullptr, scratch});
    });
  };
  expect_words(why({}), {"hopper needs scratch_bytes() = 4 bytes of scratch, got null"});
  expect_words(why({scratch().data, 3}), {"needs scratch_bytes() = 4 bytes of scratch, got 3"});
  expect_words(why({static_cast<char*>(scratch().data) + 2, 4}),
               {"scratch must be aligned to 4 bytes"});
}

}  // namespace
