// What charts rest on: FLOP and byte formulas, memory counting, the name of the machine.
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <cctype>
#include <cstdlib>
#include <thread>
#include <vector>

#include "common/judge/memory.hpp"
#include "common/judge/oracle.hpp"
#include "common/measure/flops.hpp"
#include "common/measure/machine.hpp"
#include "common/measure/roof.hpp"
#include "common/practice/steps.hpp"

namespace {

using namespace fa;
using namespace fa::bench;
using namespace fa::judge;
using Int = std::int64_t;

TEST(Flops, CountsExactlyThePairsThatTheOracleSees) {
  const Int lengths[] = {0, 5, 3};
  for (Causal c : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (auto [Nq, Nk] : {std::pair<Int, Int>{4, 6}, {7, 5}, {5, 5}, {1, 5}})
      for (bool padded : {false, true}) {
        Problem p;
        p.B = 3;
        p.Hq = 2;
        p.Hkv = 1;
        p.Nq = Nq;
        p.Nk = Nk;
        p.d = 8;
        p.causal = c;
        if (padded) p.key_lengths = lengths;
        double pairs = 0;
        for (Int b = 0; b < 3; ++b)
          for (Int i = 0; i < Nq; ++i)
            for (Int j = 0; j < Nk; ++j) pairs += sees(p, b, i, j) ? p.Hq : 0;
        EXPECT_EQ(visible_pairs(p), pairs);
        EXPECT_EQ(forward_flops(p), 4 * 8 * pairs);
        EXPECT_EQ(backward_flops(p), 10 * 8 * pairs);
      }
}

TEST(Flops, ACausalMaskLeavesHalfPlusTheDiagonal) {
  Problem p;
  p.Nq = p.Nk = 1000;
  p.d = 1;
  p.causal = Causal::top_left;
  EXPECT_EQ(visible_pairs(p), 1000 * 1001 / 2);
  p.Nq = 500;  // top left: the later keys are never seen
  EXPECT_EQ(visible_pairs(p), 500 * 501 / 2);
}

TEST(Bytes, EveryTensorOnce) {
  Problem p;
  p.B = 2;
  p.Hq = 4;
  p.Hkv = 2;
  p.Nq = 10;
  p.Nk = 30;
  p.d = 8;
  const double q = 2 * 4 * 10 * 8, k = 2 * 2 * 30 * 8, rows = 2 * 4 * 10;
  EXPECT_EQ(forward_bytes(p, 4), 4 * (2 * q + 2 * k) + 4 * rows);
  EXPECT_EQ(forward_bytes(p, 2), 2 * (2 * q + 2 * k) + 4 * rows);
  EXPECT_EQ(backward_bytes(p, 8), 8 * (4 * q + 4 * k) + 8 * rows);
}

// Clang leaves out an allocation that nobody looks at.
void look_at(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

TEST(Memory, CountsThePeakOfAllThreads) {
  constexpr Int MiB = 1 << 20;
  const Int none = peak_heap_bytes([] {});
  if (none < 0) GTEST_SKIP() << "malloc cannot be counted here";
  EXPECT_LT(none, 1024);
  // Twice one after the other is one at a time; a vector in another thread counts as well.
  const Int peak = peak_heap_bytes([] {
    for (int n = 0; n < 2; ++n) look_at(std::vector<char>(3 * MiB, 'x').data());
    std::thread([] { look_at(std::vector<char>(2 * MiB, 'y').data()); }).join();
  });
  EXPECT_GE(peak, 3 * MiB);
  EXPECT_LT(peak, 3 * MiB + 64 * 1024);
  const Int aligned = peak_heap_bytes([] {
    void* p = nullptr;
    ASSERT_EQ(posix_memalign(&p, 4096, 5 * MiB), 0);
    std::free(p);
    std::free(std::realloc(std::calloc(MiB, 1), 2 * MiB));
  });
  EXPECT_GE(aligned, 5 * MiB);
  EXPECT_LT(aligned, 5 * MiB + 64 * 1024);
}

TEST(Machine, NameIsAFileNameWithoutAHost) {
  const std::string name = machine_name();
  for (char c : name)
    EXPECT_TRUE(std::isdigit(static_cast<unsigned char>(c)) ||
                std::islower(static_cast<unsigned char>(c)) || c == '-')
        << name;
  EXPECT_NE(name.find(isa()), std::string::npos);
  EXPECT_NE(commit(), "");
}

#ifdef __linux__
// As many as the affinity mask leaves, wherever the system has them.
TEST(Machine, CountsTheCoresItMayUse) {
  cpu_set_t before, one;
  if (sched_getaffinity(0, sizeof before, &before) != 0) GTEST_SKIP() << "no affinity mask";
  EXPECT_EQ(cores(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(cores(), 1);
  const std::string name = machine_name();
  EXPECT_EQ(name.substr(name.size() - 3), "-1c");
  // A thread beside this one on that core is seen; what the core could do is the most.
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
    }
  });
  const double busy = busy_cores(0.2);
  stop = true;
  other.join();
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_GT(busy, 0.5);
  EXPECT_LT(busy, 1.3);
}
#endif

TEST(Machine, SaysThatItWasBusy) {
  EXPECT_EQ(busy_machine(0.4, 2, 1.04, "row"), "");
  EXPECT_EQ(busy_machine(1.94, 2, 0.5, "row"),
            "this machine was busy (load 1.9 on 2 cores): shares of the peak may be wrong; "
            "measure again");
  EXPECT_EQ(busy_machine(0.4, 2, 1.902, "stage03/forward/fast/N:64"),
            "this machine was busy (stage03/forward/fast/N:64 at 190 % of the peak): shares of the "
            "peak may be wrong; measure again");
}

TEST(Roof, IsAPlausibleRateForAnyNumberOfThreads) {
  // Wide limits: the machine may be busy, and a sanitizer slows everything.
  for (int threads : {1, 2, 5}) {
    const double flops = fma_peak(threads, 0.01);
    EXPECT_GT(flops, 1e7);
    EXPECT_LT(flops, threads * 1e12);
  }
}

// What practice counts for the pads of stage 04.
TEST(Turns, OfSharedMemoryForAWarp) {
  const auto stride = [](int words) { return [words](int lane) { return lane * words; }; };
  for (auto [words, turns] :
       {std::pair{0, 1}, {1, 1}, {2, 2}, {4, 4}, {32, 32}, {33, 1}, {128, 32}, {129, 1}, {136, 8}})
    EXPECT_EQ(practice::turns(stride(words)), turns) << "one number a lane, stride " << words;
  for (auto [words, turns] :
       {std::pair{0, 4}, {4, 4}, {8, 8}, {64, 32}, {68, 4}, {128, 32}, {132, 4}})
    EXPECT_EQ(practice::turns(stride(words), 4), turns) << "four numbers a lane, stride " << words;
}

}  // namespace
