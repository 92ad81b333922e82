// Tests of stage 06's backward on a GPU: every kernel by what it promises, and the choice among
// them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/compare.hpp"
#include "common/judge/conformance.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"
#include "common/judge/stage.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using optimized::BackwardKernel;
using optimized::BackwardOptions;
using optimized::BackwardRung;
using Int = std::int64_t;
using bf16 = Eigen::bfloat16;
using half = Eigen::half;

template <class T>
using Device = std::conditional_t<std::is_same_v<T, half>, __half, __nv_bfloat16>;

const Causal masks[] = {Causal::none, Causal::top_left, Causal::bottom_right};

std::vector<BackwardRung> rungs() {
  std::size_t count = 0;
  const BackwardRung* ladder = optimized::backward_rungs(count);
  return {ladder, ladder + count};
}
// A kernel that is the best for one problem or another.
bool is_final(BackwardKernel kernel) {
  return kernel == BackwardKernel::swizzle || kernel == BackwardKernel::two_kernels ||
         kernel == BackwardKernel::hopper;
}

// A call's scratch: NaN wherever it is read before it is written, and a strip behind it that must
// stay as it is.
class Guarded {
 public:
  Guarded(const Problem& p, const BackwardOptions& options)
      : bytes_(optimized::backward_scratch_bytes(p, options)), memory_(bytes_ + strip) {
    FA_CUDA_CHECK(cudaMemset(memory_.as<void>(), garbage, memory_.bytes()));
  }
  Scratch lent() const { return {memory_.as<void>(), bytes_}; }
  // Waits for the call.
  void check() const {
    std::vector<unsigned char> behind(strip);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    FA_CUDA_CHECK(
        cudaMemcpy(behind.data(), memory_.as<char>() + bytes_, strip, cudaMemcpyDeviceToHost));
    const auto written = std::find_if(behind.begin(), behind.end(),
                                      [](unsigned char byte) { return byte != garbage; });
    if (written != behind.end())
      throw std::runtime_error("wrote byte " + std::to_string(written - behind.begin()) +
                               " behind its " + std::to_string(bytes_) + " bytes of scratch");
  }

 private:
  static constexpr std::size_t strip = 1024;
  static constexpr unsigned char garbage = 0xff;
  std::size_t bytes_;
  DeviceMemory memory_;
};

// On tensors in device memory; returns the kernel that ran.
template <class T>
BackwardKernel run(const Problem& p, const Backward<T>& t, BackwardOptions options) {
  const Guarded scratch(p, options);
  options.scratch = scratch.lent();
  const BackwardKernel ran = optimized::backward(p, as_device<Device<T>>(t), options);
  scratch.check();
  return ran;
}
template <class T>
BackwardKernel run(BackwardCase<T>& c, BackwardOptions options) {
  BackwardKernel ran = BackwardKernel::best;
  on_gpu_backward<T>([&](const Problem& p, const Backward<T>& t) { ran = run(p, t, options); })(
      c.call());
  return ran;
}
template <class T>
BackwardKernel run(BackwardCase<T>& c, BackwardKernel kernel) {
  return run(c, BackwardOptions{kernel});
}

template <class T>
void run_forward(const Problem& p, const Forward<T>& t) {
  const DeviceMemory scratch(optimized::scratch_bytes(p));
  optimized::forward(p, as_device<Device<T>>(t), {optimized::Kernel::best, nullptr, scratch});
  FA_CUDA_CHECK(cudaDeviceSynchronize());
}

// Why this kernel cannot run here at all.
std::string unavailable(BackwardKernel kernel) {
  if (std::string why = no_gpu(); !why.empty()) return why;
  Problem p;
  p.d = 128;
  return optimized::unsupported(p, Backward<__nv_bfloat16>{}, kernel);
}
bool on_hopper() { return unavailable(BackwardKernel::hopper).empty(); }
BackwardKernel best_here(const Problem& p) {
  if (!on_hopper() || p.d % 8 != 0) return BackwardKernel::swizzle;
  const bool few = 2 * p.B * p.Hkv * ((p.Nk + 63) / 64) < 3 * processors();  // blocks of keys
  return p.d > 128 && few ? BackwardKernel::two_kernels : BackwardKernel::hopper;
}

// Long sequences want a forward too: only kernels of the whole contract get one.
template <class T>
Functions<T> on_gpu(const BackwardRung& r, bool deterministic) {
  Functions<T> f;
  const BackwardOptions options{r.kernel, deterministic};
  f.backward =
      on_gpu_backward<T>([options](const Problem& p, const Backward<T>& t) { run(p, t, options); });
  if (r.whole_contract) f.forward = on_gpu_forward<T>(run_forward<T>);
  return f;
}

StageUnderTest stage(const BackwardRung& r, bool deterministic) {
  StageUnderTest s;
  s.name = std::string("backward_") + r.name + (deterministic ? "_in_turns" : "");
  s.promises.causal = true;
  s.promises.large_scores = true;
  s.promises.rejects_lengths = false;
  s.promises.nan_tile = s.promises.nan_keys = 128;  // the largest tiles
  s.promises.host_memory = false;
  s.promises.tests_forward = false;
  s.promises.deterministic_backward = deterministic || r.deterministic;
  s.effort = effort(gpu_effort());
  if (r.whole_contract) {
    s.promises.max_d = optimized::max_d;
    s.promises.key_lengths = true;
#ifndef FA_EMULATED
    s.promises.device_bytes = free_device_bytes;
#endif
  } else {
    s.promises.head_dims = r.d64 ? std::vector<Int>{64, 128} : std::vector<Int>{128};
    s.promises.unaligned = false;
  }
  s.bf16 = on_gpu<bf16>(r, deterministic);
  if (r.fp16) s.f16 = on_gpu<half>(r, deterministic);
  s.unavailable = [kernel = r.kernel] { return unavailable(kernel); };
  return s;
}

const bool registered = [] {
  for (const BackwardRung& r : rungs()) {
    register_conformance(stage(r, false));
    if (r.kernel == BackwardKernel::hopper) register_conformance(stage(r, true));
  }
  return true;
}();

class GpuBackward : public GpuTest {};

// ---- the choice ----

constexpr int SMs = 132;
BackwardKernel chosen(const Problem& p, int here, const BackwardOptions& options) {
  return optimized::chosen(p, options, here, SMs);
}

TEST(BackwardCapability, OfTheBestKernel) {
  Problem p;
  p.Hq = p.Hkv = 200;
  p.Nq = p.Nk = 64;
  for (Int d : {64, 128, 200}) {
    p.d = d;
    for (int here : {80, 86, 100}) EXPECT_EQ(chosen(p, here, {}), BackwardKernel::swizzle);
    EXPECT_EQ(chosen(p, 90, {}), BackwardKernel::hopper);
  }
}

// For d > 128, where a part of the keys makes few blocks, fewer than 198 on 132 SMs, or has fewer
// than 16 tiles.
TEST(BackwardCapability, OfTheBestKernelWithFewBlocks) {
  struct Case {
    Int B, Hq, Hkv, N;
    std::size_t GiB;
    BackwardKernel best;
  };
  for (const Case& c : {Case{197, 1, 1, 64, 2, BackwardKernel::two_kernels},
                        Case{198, 1, 1, 64, 2, BackwardKernel::hopper},
                        Case{1, 8, 8, 16384, 2, BackwardKernel::hopper},            // 1024 blocks
                        Case{1, 8, 2, 16384, 2, BackwardKernel::hopper},            // 256
                        Case{1, 8, 2, 16384, 1, BackwardKernel::two_kernels},       // 128
                        Case{1, 8, 1, 16384, 2, BackwardKernel::two_kernels},       // 128
                        Case{1, 8, 1, 16384, 4, BackwardKernel::hopper},            // 256
                        Case{8, 32, 32, 4096, 2, BackwardKernel::hopper},           // 16 tiles
                        Case{16, 32, 32, 4096, 2, BackwardKernel::two_kernels}}) {  // 8
    Problem p;
    p.B = c.B, p.Hq = c.Hq, p.Hkv = c.Hkv, p.Nq = p.Nk = c.N, p.d = 256;
    BackwardOptions options;
    options.most_kept = c.GiB << 30;
    for (const bool deterministic : {false, true}) {
      options.deterministic = deterministic;
      EXPECT_EQ(chosen(p, 90, options), c.best)
          << c.B << " x " << c.Hq << ", " << c.Hkv << " x " << c.N << ", " << c.GiB << " GiB";
    }
    options.kernel = BackwardKernel::hopper;
    EXPECT_EQ(chosen(p, 90, options), BackwardKernel::hopper);
    p.d = 128;
    options.kernel = BackwardKernel::best;
    EXPECT_EQ(chosen(p, 90, options), BackwardKernel::hopper);
  }
}

// With the same bits, a mask and large groups, hopper's turns are too long: 512 columns of Q, all
// heads of a group counted. Only the best is chosen, and only on 9.0.
TEST(BackwardCapability, OfTheBestKernelWithTheSameBits) {
  Problem p;
  p.Hkv = 2;
  for (Causal mask : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (auto [d, group, long_turns] : {std::tuple{64, 4, false},
                                        {64, 8, true},
                                        {40, 8, true},
                                        {128, 2, false},
                                        {128, 4, true},
                                        {128, 8, true}}) {
      p.causal = mask, p.d = d, p.Hq = 2 * group;
      EXPECT_EQ(chosen(p, 90, {BackwardKernel::best, true}), mask != Causal::none && long_turns
                                                                 ? BackwardKernel::two_kernels
                                                                 : BackwardKernel::hopper)
          << "d = " << d << ", " << group << " heads";
      EXPECT_EQ(chosen(p, 90, {}), BackwardKernel::hopper);
      EXPECT_EQ(chosen(p, 90, {BackwardKernel::hopper, true}), BackwardKernel::hopper);
      EXPECT_EQ(chosen(p, 80, {BackwardKernel::best, true}), BackwardKernel::swizzle);
    }
}

// Who is named is taken, even where it cannot run.
TEST(BackwardCapability, OfAKernelThatIsNamed) {
  Problem p;
  for (Int d : {64, 128, 200})
    for (int here : {80, 86, 90, 100})
      for (const BackwardRung& r : rungs()) {
        p.d = d;
        EXPECT_EQ(chosen(p, here, {r.kernel}), r.kernel) << r.name << ", d = " << d;
      }
}

TEST(BackwardCapability, ThatARungWants) {
  for (const BackwardRung& r : rungs())
    for (int here : {75, 80, 86, 90, 100}) {
      const bool takes = r.capability == 90 ? here == 90 : here >= 80;
      EXPECT_EQ(optimized::wrong_capability(r.name, r.capability, here).empty(), takes)
          << r.name << " on " << here;
    }
}

TEST_F(GpuBackward, SaysWhichKernelItChose) {
  for (Int d : {8, 64, 128, 200, 250}) {
    BackwardCase<bf16> c(spec(65, 130, d, Causal::top_left));
    for (bool deterministic : {false, true}) {
      EXPECT_EQ(run(c, {BackwardKernel::best, deterministic}), best_here(c.p));
      EXPECT_EQ(c.verdict(), "") << "d = " << d;
    }
    EXPECT_EQ(run(c, BackwardKernel::swizzle), BackwardKernel::swizzle);
    EXPECT_EQ(c.verdict(), "") << "d = " << d;
  }
}

TEST_F(GpuBackward, TakesSwizzleWhereTheTensorsAreNotForHopper) {
  for (const Spec& s : not_for_the_copy_engine()) {
    BackwardCase<bf16> c(s);
    for (BackwardKernel kernel :
         {BackwardKernel::best, BackwardKernel::two_kernels, BackwardKernel::hopper}) {
      if (kernel != BackwardKernel::best && !on_hopper()) continue;
      for (bool deterministic : {false, true}) {
        EXPECT_EQ(run(c, {kernel, deterministic}), BackwardKernel::swizzle) << s.name();
        EXPECT_EQ(c.verdict(), "") << s.name();
      }
    }
  }
}

// Whoever takes a tile of keys, it is the same tile. More of them than blocks that stay; some that
// no query sees, and some that a length cuts or leaves out.
TEST_F(GpuBackward, ABlockATileHasTheSameBits) {
  if (!on_hopper()) GTEST_SKIP() << unavailable(BackwardKernel::hopper);
  for (const auto& [d, causal] : {std::pair<Int, Causal>{64, Causal::none},
                                  {64, Causal::top_left},
                                  {64, Causal::bottom_right},
                                  {40, Causal::top_left}}) {
    Spec s = spec(140, sized(1100, 300), d, causal);
    s.p.B = 2;
    s.p.Hq = sized(16, 4);
    s.p.Hkv = sized(8, 2);
    s.lengths = {250, 0};
    for (const bool deterministic : {false, true}) {
      BackwardCase<bf16> before(s), stay(s), each(s);
      BackwardOptions options{BackwardKernel::hopper, deterministic};
      const Guarded scratch(s.p, options);  // holds what the call before has left there
      options.scratch = scratch.lent();
      for (BackwardCase<bf16>* c : {&before, &stay})
        on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
          optimized::backward(p, as_device<__nv_bfloat16>(t), options);
        })(c->call());
      scratch.check();
      options.block_a_tile = true;
      run(each, options);
      EXPECT_EQ(stay.verdict(), "") << s.name();
      EXPECT_EQ(same_bits("dK", stay.dK, each.dK), "") << s.name();
      EXPECT_EQ(same_bits("dV", stay.dV, each.dV), "") << s.name();
      EXPECT_EQ(deterministic ? same_bits("dQ", stay.dQ, each.dQ) : each.verdict(), "") << s.name();
    }
  }
}

// Query heads that share keys, head by head of each tile of queries; of every other section of key
// heads from the last tile to the first.
TEST_F(GpuBackward, HeadsThatShareKeysAreWalkedToAndFro) {
  if (!on_hopper()) GTEST_SKIP() << unavailable(BackwardKernel::hopper);
  for (const Causal causal : masks) {
    Spec s = spec(sized(100, 200), sized(4300, 300), 128, causal);
    s.p.B = 2;
    s.p.Hq = 4;
    s.p.Hkv = 2;
    s.lengths = {s.p.Nk - 60, s.p.Nk / 2 - 20};
    BackwardCase<bf16> c(s);
    run(c, BackwardKernel::hopper);
    EXPECT_EQ(c.verdict(), "") << s.name();
  }
}

// Where turns would be too long.
TEST_F(GpuBackward, TakesTwoKernelsForLargeGroupsInTheSameBits) {
  Spec s = spec(65, 130, 64, Causal::bottom_right);
  s.p.Hq = 8;
  s.p.Hkv = 1;
  BackwardCase<bf16> c(s);
  EXPECT_EQ(run(c, {BackwardKernel::best, true}),
            on_hopper() ? BackwardKernel::two_kernels : BackwardKernel::swizzle);
  EXPECT_EQ(c.verdict(), "");
  EXPECT_EQ(run(c, {BackwardKernel::best, false}), best_here(c.p));
  EXPECT_EQ(c.verdict(), "");
}

// One tensor is enough, of those that the copy engine reads or writes: O is read by an ordinary
// kernel, and sums of dQ, up to d = 128, are written by one.
TEST_F(GpuBackward, LooksAtEveryTensorBeforeItChooses) {
  for (Int d : {64, 256}) {
    Spec s = spec(20, 30, d);
    s.p.Hq = s.p.Hkv = 2;
    for (int moved = 0; moved < 8; ++moved) {
      BackwardCase<bf16> c(s);
      Buffer<bf16>* const all[] = {&c.Q, &c.K, &c.V, &c.O, &c.dO, &c.dQ, &c.dK, &c.dV};
      Buffer<bf16>& x = *all[moved];
      x.move_to({Layout::Order::BHND, 0, 3});
      for (bool deterministic : {false, true}) {
        const bool any = &x == &c.O || (&x == &c.dQ && d <= 128);
        EXPECT_EQ(run(c, {BackwardKernel::best, deterministic}),
                  any ? best_here(c.p) : BackwardKernel::swizzle)
            << "tensor " << moved << ", d = " << d;
        EXPECT_EQ(c.verdict(), "") << "tensor " << moved << ", d = " << d;
      }
    }
  }
}

// For d > 128 dS of some keys at a time: of 64 at least, of all where that is allowed. A sum that
// waits in between goes on where it was, so the bits are the same. Tiles of keys and of queries
// that a mask or a length leaves out, and groups.
TEST_F(GpuBackward, KeepsAsMuchAsItMay) {
  if (!on_hopper()) GTEST_SKIP() << unavailable(BackwardKernel::hopper);
  for (const Causal causal : masks) {
    Spec s = spec(200, 330, 200, causal);
    s.p.B = 2;
    s.p.Hq = 2;
    s.lengths = {330, causal == Causal::none ? 70 : 0};
    const std::size_t tile = 2 * 2 * 256 * 64 * 2;  // bytes of dS of 64 keys
    const std::size_t statistics = 2 * 2 * 256 * 8, sums = 2 * 2 * 256 * 256 * 4;
    BackwardCase<bf16> all(s);
    EXPECT_EQ(run(all, BackwardKernel::hopper), BackwardKernel::hopper);
    EXPECT_EQ(all.verdict(), "") << s.name();
    EXPECT_EQ(optimized::backward_scratch_bytes(s.p, {BackwardKernel::hopper}),
              statistics + 6 * tile);
    BackwardCase<bf16> seven(s);  // products: dK and dV are made alike
    run(seven, BackwardKernel::two_kernels);
    EXPECT_EQ(same_bits("dK", seven.dK, all.dK), "") << s.name();
    EXPECT_EQ(same_bits("dV", seven.dV, all.dV), "") << s.name();
    // Of six tiles of keys: one at a time; one, since two do not fit; three and three, where four
    // would fit; all.
    for (const auto& [most, tiles] : {std::pair<std::size_t, std::size_t>{0, 1},
                                      {2 * tile - 1, 1},
                                      {4 * tile, 3},
                                      {6 * tile, 6}}) {
      BackwardOptions options{BackwardKernel::hopper};
      options.most_kept = most;
      EXPECT_EQ(optimized::backward_scratch_bytes(s.p, options),
                statistics + tiles * tile + (tiles < 6 ? sums : 0));
      BackwardCase<bf16> c(s);
      run(c, options);
      EXPECT_EQ(c.verdict(), "") << s.name() << ", " << most;
      EXPECT_EQ(same_bits("dQ", c.dQ, all.dQ), "") << s.name() << ", " << most;
      EXPECT_EQ(same_bits("dK", c.dK, all.dK), "") << s.name() << ", " << most;
      EXPECT_EQ(same_bits("dV", c.dV, all.dV), "") << s.name() << ", " << most;
    }
  }
}

TEST_F(GpuBackward, EveryRungHasANameOfItsOwn) {
  const std::vector<BackwardRung> ladder = rungs();
  for (std::size_t n = 0; n < ladder.size(); ++n) {
    EXPECT_STREQ(optimized::name(ladder[n].kernel), ladder[n].name);
    EXPECT_EQ(ladder[n].whole_contract, is_final(ladder[n].kernel)) << ladder[n].name;
    for (std::size_t m = 0; m < n; ++m) EXPECT_STRNE(ladder[m].name, ladder[n].name);
  }
  EXPECT_STREQ(optimized::name(BackwardKernel::best), "best");
}

// What `deterministic` may choose promises the same bits.
TEST_F(GpuBackward, TheSameBitsAreWhatTheirRungsPromise) {
  for (const BackwardRung& r : rungs()) {
    const bool chosen = is_final(r.kernel) && r.kernel != BackwardKernel::hopper;
    EXPECT_TRUE(r.deterministic || !chosen) << r.name;  // hopper: backward_hopper_in_turns.*
  }
}

// The kernels of a ladder compute the same thing: several tiles, groups, both alignments.
TEST_F(GpuBackward, TheRungsAgree) {
  for (Causal mask : masks) {
    if (!meets(std::size_t(mask), 2)) continue;
    Spec s = spec(sized(300, 130), sized(420, 200), 128, mask);
    s.p.Hq = sized(4, 2);
    s.p.Hkv = sized(2, 1);
    BackwardCase<bf16> c(s);
    for (const BackwardRung& r : rungs()) {
      if (!unavailable(r.kernel).empty()) continue;
      EXPECT_EQ(run(c, r.kernel), r.kernel);
      EXPECT_EQ(c.verdict(), "") << r.name;
    }
  }
}

std::vector<BackwardRung> who_takes(Int d) {
  std::vector<BackwardRung> found = rungs();
  std::erase_if(found, [&](const BackwardRung& r) {
    const bool takes = r.whole_contract || d == 128 || (d == 64 && r.d64);
    return !takes || !unavailable(r.kernel).empty();
  });
  return found;
}

// The largest scale that is not refused has to do with small products: together, scores up to 69.
TEST_F(GpuBackward, AHugeScaleOfSmallProducts) {
  for (Int d : {64, 128, 256}) {
    Spec s = spec(70, 150, d, Causal::bottom_right);
    s.p.scale = 2.3e38;
    BackwardCase<bf16> c(s);
    c.Q.fill([](auto, auto, auto i, auto x) { return x == 0 ? 2e-19 * double(1 + i % 5) : 0; });
    c.K.fill([](auto, auto, auto j, auto x) { return x == 0 ? 1e-19 * double(j % 7 - 3) : 0; });
    c.fill_context();
    for (const BackwardRung& r : who_takes(d)) {
      run(c, r.kernel);
      EXPECT_EQ(c.verdict(), "") << r.name << ", d = " << d;
    }
  }
}

// Of rows whose scores fp32 cannot hold neither O nor L is right. Their gradients are lost, and
// those of the keys that they see; dQ of the other rows is not.
TEST_F(GpuBackward, ARowOfScoresBeyondFp32SpoilsNoOtherRow) {
  for (Int d : {64, 128, 256}) {
    Spec s = spec(70, 150, d, Causal::bottom_right);
    s.p.scale = 1e10;
    BackwardCase<bf16> clean(s), c(s);
    const auto bad = [](Int i) { return i == 0 || i == 37 || i == 69; };
    const Array Q = to_array(c.Q);
    clean.Q.fill([&](auto b, auto h, auto i, auto x) { return 1e-10 * Q.at(b, h, i, x); });
    c.Q.fill(
        [&](auto b, auto h, auto i, auto x) { return (bad(i) ? 1e30 : 1e-10) * Q.at(b, h, i, x); });
    clean.fill_context();
    c.fill_context();
    for (const BackwardRung& r : who_takes(d)) {
      run(clean, r.kernel);
      EXPECT_EQ(clean.verdict(), "") << r.name << ", d = " << d;
      run(c, r.kernel);
      Comparison same("dQ");
      double largest = 0;
      clean.dQ.for_each([&](auto b, auto h, auto i, auto x) {
        largest = std::max(largest, std::abs(double(clean.dQ.at(b, h, i, x))));
      });
      clean.dQ.for_each([&](auto b, auto h, auto i, auto x) {
        const double got = double(c.dQ.at(b, h, i, x)), want = double(clean.dQ.at(b, h, i, x));
        if (!bad(i)) same.add(b, h, i, x, got, want, 1e-2 * largest);
      });
      EXPECT_EQ(same.report() + c.check_memory_untouched(), "") << r.name << ", d = " << d;
    }
  }
}

// Small, for compute-sanitizer: a few steps over ragged tiles, with every kind of mask. Of each
// kernel all head dimensions for which it is compiled.
TEST_F(GpuBackward, EveryRungOnRaggedTiles) {
  for (Causal mask : masks)
    for (Int d : {64, 128, 200}) {
      if (!meets(std::size_t(mask), std::size_t(d) / 100)) continue;
      const Int Nq = mask == Causal::bottom_right ? 200 : 70;  // rows that see nothing, or keys
      Spec s = spec(Nq, 270 - Nq, d, mask);
      s.p.Hq = 2;
      BackwardCase<bf16> c(s);
      for (const BackwardRung& r : rungs()) {
        const bool takes = d == 128 || (d == 64 ? r.d64 : r.whole_contract);
        if (!takes || !unavailable(r.kernel).empty()) continue;
        run(c, r.kernel);
        EXPECT_EQ(c.verdict(), "") << r.name << ", " << s.name();
      }
    }
}

// Where blocks take turns the first one stores, and nobody has written zeros before. Nobody comes
// to the tiles of queries that see no key: here the first 128, or the last tile, of 6, too.
TEST_F(GpuBackward, TilesThatNobodyAddsToAreZero) {
  if (!on_hopper()) GTEST_SKIP() << unavailable(BackwardKernel::hopper);
  Spec without_keys = spec(70, 70, 128);
  without_keys.lengths = {0};
  for (Spec s : {spec(200, 70, 128, Causal::bottom_right), without_keys}) {
    BackwardCase<bf16> c(s);
    EXPECT_EQ(run(c, {BackwardKernel::hopper, true}), BackwardKernel::hopper);
    EXPECT_EQ(c.verdict(), "") << s.name();
    s.p.d = 64;
    BackwardCase<bf16> narrow(s);
    run(narrow, {BackwardKernel::hopper, true});
    EXPECT_EQ(narrow.verdict(), "") << s.name();
    if (s.lengths.empty()) {
      run(c, BackwardKernel::in_order);
      EXPECT_EQ(c.verdict(), "") << "in_order, " << s.name();
    }
  }
}

// ---- against others ----

TEST_F(GpuBackward, AgreesWithTheStageBefore) {
  for (Causal mask : masks) {
    BackwardCase<bf16> c(spec(200, 333, 64, mask));
    BackwardCase<float> f(spec(200, 333, 64, mask));
    const auto copy = [](Buffer<float>& to, const Buffer<bf16>& from) {
      to.fill([&](auto b, auto h, auto i, auto x) { return double(from.at(b, h, i, x)); });
    };
    copy(f.Q, c.Q);
    copy(f.K, c.K);
    copy(f.V, c.V);
    copy(f.O, c.O);
    copy(f.dO, c.dO);
    f.LSE = c.LSE;
    run(c, BackwardKernel::best);
    on_gpu_backward<float>([](const Problem& p, const Backward<float>& t) {
      const DeviceMemory D(cuda_backward::scratch_bytes(p, {}));
      cuda_backward::Options options;
      options.scratch = D;
      cuda_backward::backward(p, t, options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(f.call());
    const auto check = [&](const char* name, Buffer<bf16>& got, Buffer<float>& want) {
      double largest = 0;
      want.for_each([&](auto b, auto h, auto i, auto x) {
        largest = std::max(largest, std::fabs(double(want.at(b, h, i, x))));
      });
      Comparison same(name);
      want.for_each([&](auto b, auto h, auto i, auto x) {
        same.add(b, h, i, x, double(got.at(b, h, i, x)), double(want.at(b, h, i, x)),
                 2e-2 * largest);
      });
      EXPECT_EQ(same.report(), "") << c.spec.name();
    };
    check("dQ", c.dQ, f.dQ);
    check("dK", c.dK, f.dK);
    check("dV", c.dV, f.dV);
  }
}

std::vector<Int> all(Int N) {
  std::vector<Int> rows(static_cast<std::size_t>(N));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}
// What the GPU has left there is an input from now on.
template <class X>
void keep(Buffer<X>& x) {
  const Array now = to_array(x);
  x.fill([&](auto b, auto h, auto i, auto e) { return now.at(b, h, i, e); });
}

// Forward and backward, one after the other on the device: the backward gets the O and LSE that the
// forward has left there.
template <class T>
void training_step(const Spec& s, bool deterministic) {
  BackwardCase<T> c(s);
  c.O.poison();
  c.LSE.poison();
  const BackwardCall<T> call = c.call();
  const DeviceCopy copy(call.storage);
  const Backward<T> t = on_device(copy, call.t);
  const View<T> O{const_cast<T*>(t.O.data), t.O.batch, t.O.head, t.O.row};
  run_forward<T>(c.p, {t.Q, t.K, t.V, O, const_cast<float*>(t.LSE)});
  EXPECT_EQ(run(c.p, t, {BackwardKernel::best, deterministic}), best_here(c.p));
  copy.copy_back();
  keep(c.O);
  keep(c.LSE);
  EXPECT_EQ(c.verdict(all(s.p.Nq), all(s.p.Nk)), "") << s.name();
}
TEST_F(GpuBackward, ATrainingStep) {
  for (Causal mask : masks)
    for (Int d : {64, 128, 256}) {
      if (!meets(std::size_t(mask), std::size_t(d) / 100)) continue;
      // bottom_right: rows that see nothing
      Spec s = spec(sized(200, 140), sized(170, 130), d, mask);
      s.p.B = sized(2, 1);
      s.p.Hq = sized(4, 2);
      s.p.Hkv = sized(2, 1);
      training_step<bf16>(s, false);
      training_step<half>(s, true);
    }
}

// ---- sizes and addresses ----

TEST_F(GpuBackward, MoreHeadsThanAGridHasAlongY) {
  Spec s = spec(2, 3, 8);
  s.p.Hq = s.p.Hkv = sized(65537, 20);  // a block costs milliseconds on the CPU
  BackwardCase<bf16> c(s);
  for (const BackwardRung& r : rungs()) {
    if (!r.whole_contract || !unavailable(r.kernel).empty()) continue;
    EXPECT_EQ(run(c, r.kernel), r.kernel);
    EXPECT_EQ(c.verdict(), "") << r.name;
  }
}

// Heads of one row each, but the sums of dQ have whole tiles: there are more than 2^31 numbers. By
// another way for d <= 64 than above.
TEST_F(GpuBackward, SumsOfDqBeyond32Bits) {
#ifdef FA_EMULATED
  GTEST_SKIP() << "the CPU would take hours for so many heads";
#endif
  for (auto [d, heads] : {std::pair<Int, Int>{8, 1 << 18}, {72, 1 << 17}}) {
    Spec s = spec(1, 2, d);
    s.p.Hq = s.p.Hkv = heads + 3;
    const std::size_t bytes = optimized::backward_scratch_bytes(s.p);
    if (double(bytes) > free_device_bytes())
      GTEST_SKIP() << "the device has no room for " << bytes << " bytes";
    BackwardCase<bf16> c(s);
    EXPECT_EQ(run(c, BackwardKernel::best), best_here(c.p));
    EXPECT_EQ(c.verdict(), "") << "d = " << d;
  }
}

// Rows at multiples of 16 bytes whose last 16 are not full: what is behind d is not ours.
TEST_F(GpuBackward, WritesNothingBehindTheLastColumn) {
  for (Int d : {1, 7, 59, 100, 129, 250}) {
    Spec s = spec(70, 90, d, Causal::top_left);
    s.layout.in_16_bytes = true;
    s.layout.gap = 1;
    BackwardCase<bf16> c(s);
    for (const BackwardRung& r : rungs()) {
      if (!r.whole_contract || !unavailable(r.kernel).empty()) continue;
      run(c, r.kernel);
      EXPECT_EQ(c.verdict(), "") << r.name << ", d = " << d;  // with the canaries in the gaps
    }
  }
}

TEST_F(GpuBackward, WorkIsPutOnTheStreamAndNobodyWaits) {
  for (const BackwardRung& r : rungs()) {
    if (!r.whole_contract || !unavailable(r.kernel).empty()) continue;
    const Int N = sized(500, 150);
    BackwardCase<bf16> c(spec(N, N, 64, Causal::top_left));
    BackwardOptions options{r.kernel};
    const Guarded scratch(c.p, options);
    options.scratch = scratch.lent();
    const auto on_stream = [&](const Problem& p, const Backward<bf16>& t, cudaStream_t stream) {
      options.stream = stream;
      optimized::backward(p, as_device<__nv_bfloat16>(t), options);
    };
    EXPECT_EQ(on_its_stream(c.call(), on_stream), "") << r.name;
    EXPECT_EQ(c.verdict(), "") << r.name;
  }
}

// Two calls at once, on two streams, each with a scratch of its own.
TEST_F(GpuBackward, UsesTheStreamThatItIsGiven) {
  const Int N = sized(1000, 150), d = 64;
  BackwardCase<bf16> c(spec(N, N, d, Causal::top_left));
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams)
    FA_CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  const Guarded scratch[2] = {{c.p, {}}, {c.p, {}}};
  std::vector<bf16> first(N * d), second(N * d);
  on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
    const DeviceMemory dQ(sizeof(bf16) * N * d), dK(dQ.bytes()), dV(dQ.bytes());
    Backward<bf16> other = t;
    other.dQ = contiguous(dQ.as<bf16>(), 1, N, d);
    other.dK = contiguous(dK.as<bf16>(), 1, N, d);
    other.dV = contiguous(dV.as<bf16>(), 1, N, d);
    FA_CUDA_CHECK(cudaDeviceSynchronize());  // the copies and the garbage are on another stream
    for (Int n = 0; n < sized(20, 2); ++n)
      for (int k : {0, 1})
        optimized::backward(p, as_device<__nv_bfloat16>(k ? other : t),
                            {BackwardKernel::best, false, streams[k], scratch[k].lent()});
    for (cudaStream_t s : streams) FA_CUDA_CHECK(cudaStreamSynchronize(s));
    FA_CUDA_CHECK(cudaMemcpy(first.data(), t.dK.data, dK.bytes(), cudaMemcpyDeviceToHost));
    FA_CUDA_CHECK(cudaMemcpy(second.data(), dK.as<void>(), dK.bytes(), cudaMemcpyDeviceToHost));
  })(c.call());
  for (cudaStream_t s : streams) FA_CUDA_CHECK(cudaStreamDestroy(s));
  for (const Guarded& s : scratch) EXPECT_NO_THROW(s.check());
  EXPECT_EQ(c.verdict(), "");
  EXPECT_EQ(std::memcmp(first.data(), second.data(), first.size() * sizeof(bf16)), 0);
}

#ifndef FA_EMULATED
// Of a rung what all take; of the whole contract lengths too. What is summed up starts at zero in
// each run of a graph, and so do turns.
Spec recorded(const BackwardRung& r, Int d, std::vector<Int> lengths, std::uint64_t seed) {
  Spec s = spec(150, 150, d, Causal::bottom_right);
  s.p.B = Int(lengths.size());
  s.p.Hq = s.p.Hkv = 2;
  if (r.whole_contract) s.lengths = std::move(lengths);
  s.seed = seed;
  return s;
}

TEST_F(GpuBackward, ARecordedCallReplaysWithOtherInputs) {
  for (const BackwardRung& r : rungs())
    for (const auto& [d, deterministic] :
         {std::pair<Int, bool>{128, false}, {128, true}, {64, false}, {64, true}, {256, false}}) {
      if (!unavailable(r.kernel).empty() || (d != 128 && !r.whole_contract)) continue;
      const bool in_turns = r.kernel == BackwardKernel::hopper;
      if (deterministic && !r.deterministic && !in_turns) continue;
      BackwardCase<bf16> first(recorded(r, d, {150, 17}, 1)), second(recorded(r, d, {128, 149}, 2));
      BackwardOptions options{r.kernel, deterministic};
      const Guarded scratch(first.p, options);
      options.scratch = scratch.lent();
      const auto call = [&](const Problem& p, const Backward<bf16>& t, cudaStream_t stream) {
        options.stream = stream;
        optimized::backward(p, as_device<__nv_bfloat16>(t), options);
      };
      EXPECT_EQ(replayed_as_graph(first, second, call), "")
          << r.name << ", d = " << d << ", " << deterministic;
      EXPECT_NO_THROW(scratch.check()) << r.name;
    }
}

TEST_F(GpuBackward, TheFirstCallOfAThread) {
  for (const BackwardRung& r : rungs()) {
    if (!unavailable(r.kernel).empty()) continue;
    BackwardCase<bf16> c(spec(150, 150, 128, Causal::top_left));
    BackwardOptions options{r.kernel};
    const Guarded scratch(c.p, options);
    options.scratch = scratch.lent();
    on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
      EXPECT_EQ(
          in_a_new_thread([&] { optimized::backward(p, as_device<__nv_bfloat16>(t), options); }),
          "")
          << r.name;
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << r.name;
  }
}

TEST_F(GpuBackward, OnASecondGpu) {
  const SecondGpu gpu;
  if (!gpu.there()) GTEST_SKIP() << "one GPU";
  for (const bool deterministic : {false, true}) {
    BackwardCase<bf16> c(spec(300, 300, 128, Causal::top_left));
    BackwardOptions options{BackwardKernel::best, deterministic};
    const Guarded scratch(c.p, options);
    options.scratch = scratch.lent();
    on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
      optimized::backward(p, as_device<__nv_bfloat16>(t), options);
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << deterministic;
  }
}
#endif

// ---- errors ----

TEST_F(GpuBackward, RefusesOtherTypesThanHalves) {
  BackwardCase<float> c(spec(2, 2, 2));
  expect_words(refusal([&] { optimized::backward(c.p, c.call().t); }),
               {"__half or __nv_bfloat16", "elements of 4 bytes"});
}

TEST_F(GpuBackward, SaysWhatARungTakes) {
  const auto why = [](BackwardKernel kernel, Int d, auto type) {
    BackwardCase<decltype(type)> c(spec(4, 4, d));
    return refusal([&] { run(c, kernel); });
  };
  for (const BackwardRung& r : rungs()) {
    if (!unavailable(r.kernel).empty()) continue;
    expect_words(why(r.kernel, 257, bf16()), {"d must", "256", "257"});
    BackwardCase<bf16> huge(spec(4, 4, 64));
    huge.p.scale = -2.4e38f;
    expect_words(refusal([&] { run(huge, r.kernel); }),
                 {r.name, ": scale log2 e must be finite in fp32, got a scale of -2.4e+38"});
    if (r.whole_contract) continue;
    expect_words(why(r.kernel, 32, bf16()), {r.name, "d = ", "128", "got d = 32"});
    if (!r.d64) expect_words(why(r.kernel, 64, bf16()), {r.name, "got d = 64"});
    if (!r.fp16) expect_words(why(r.kernel, 128, half()), {r.name, "bf16", "fp16"});
  }
}

TEST_F(GpuBackward, ScratchIsAskedFor) {
  Spec s = spec(100, 80, 8, Causal::top_left);
  s.p.B = 3;
  s.p.Hq = 4;
  s.p.Hkv = 2;
  // 8 bytes for each row of Q, padded to 128; where dQ is added up, 4 for each of its numbers too.
  const std::size_t rows = 3 * 4 * 128;
  EXPECT_GE(optimized::backward_scratch_bytes(s.p, {BackwardKernel::swizzle}), 8 * rows);
  EXPECT_LT(optimized::backward_scratch_bytes(s.p, {BackwardKernel::swizzle}), 16 * rows);
  if (on_hopper()) {
    const std::size_t bytes = optimized::backward_scratch_bytes(s.p, {BackwardKernel::hopper});
    EXPECT_GE(bytes, 8 * rows + 4 * 64 * rows);
    // A turn for each 64 x 64 numbers
    EXPECT_EQ(optimized::backward_scratch_bytes(s.p, {BackwardKernel::hopper, true}),
              bytes + 4 * rows / 64);
  }
  // `best` may turn out to be swizzle.
  for (bool deterministic : {false, true})
    EXPECT_GE(optimized::backward_scratch_bytes(s.p, {BackwardKernel::best, deterministic}),
              optimized::backward_scratch_bytes(s.p, {BackwardKernel::swizzle}));
  BackwardCase<bf16> c(s);
  const auto why = [&](const Scratch& scratch) {
    return refusal([&] {
      on_gpu_backward<bf16>([&](const Problem& p, const Backward<bf16>& t) {
        optimized::backward(p, as_device<__nv_bfloat16>(t),
                            {BackwardKernel::best, false, nullptr, scratch});
      })(c.call());
    });
  };
  const std::string bytes = std::to_string(optimized::backward_scratch_bytes(s.p));
  expect_words(why({}), {"backward_scratch_bytes() = " + bytes, "scratch", "null"});
  const Guarded guarded(s.p, {});
  Scratch lent = guarded.lent();
  EXPECT_EQ(why(lent), "accepted");
  --lent.bytes;
  expect_words(why(lent), {"= " + bytes, "got " + std::to_string(lent.bytes)});
  expect_words(why({static_cast<char*>(lent.data) + 8, lent.bytes + 1}), {"scratch", "16 bytes"});
}

// The forward may be asked for no LSE; the backward cannot do without.
TEST_F(GpuBackward, WantsWhatTheForwardReturned) {
  const auto why = [](auto change) {
    BackwardCase<bf16> c(spec(4, 4, 64));
    BackwardCall<bf16> call = c.call();
    change(call.t);
    return refusal([&] {
      on_gpu_backward<bf16>([](const Problem& p, const Backward<bf16>& t) { run(p, t, {}); })(call);
    });
  };
  expect_words(why([](auto& t) { t.LSE = nullptr; }), {"LSE", "null"});
  expect_words(why([](auto& t) { t.O.data = nullptr; }), {"O", "null"});
  expect_words(why([](auto& t) { t.dK = t.dV; }), {"overlap"});
}

TEST_F(GpuBackward, RefusesAKernelThatAddsWhereTheSameBitsAreWanted) {
  if (!on_hopper()) return;
  BackwardCase<bf16> c(spec(4, 4, 128));
  expect_words(refusal([&] {
                 run(c, {BackwardKernel::masks, true});
               }),
               {"masks", "order that varies", "deterministic"});
}

}  // namespace
