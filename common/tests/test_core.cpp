// The contract in common/core: masks, views, argument checks, memory limits.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "common/core/check.hpp"
#include "common/core/parallel_for.hpp"
#include "common/judge/oracle.hpp"
#include "common/judge/sanitizer.hpp"

namespace {

using namespace fa;
using Int = std::int64_t;

Problem shape(Int Nq, Int Nk, Causal causal = Causal::none) {
  Problem p;
  p.Nq = Nq;
  p.Nk = Nk;
  p.d = 4;
  p.causal = causal;
  return p;
}

TEST(Mask, AgreesWithTheOraclesOwnPredicateForAllSmallSizes) {
  for (Causal c : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (Int Nq = 0; Nq < 8; ++Nq)
      for (Int Nk = 0; Nk < 8; ++Nk)
        for (Int length = -1; length <= Nk; ++length) {
          Problem p = shape(Nq, Nk, c);
          if (length >= 0) p.key_lengths = &length;
          for (Int j = 0; j < Nk; ++j) {
            Int first = 0;
            while (first < Nq && !judge::sees(p, 0, first, j)) ++first;
            ASSERT_EQ(Mask(p, 0).first_row(j), first) << "Nq " << Nq << " Nk " << Nk << " j " << j;
          }
          Int before = 0;
          for (Int i = 0; i < Nq; ++i) {
            const Int n = visible_keys(p, 0, i);
            for (Int j = 0; j < Nk; ++j)
              ASSERT_EQ(j < n, judge::sees(p, 0, i, j)) << "Nq " << Nq << " Nk " << Nk << " length "
                                                        << length << " i " << i << " j " << j;
            ASSERT_GE(n, before) << "visible keys must never decrease with i";
            before = n;
          }
        }
}

TEST(Mask, ClampsLengthsThatAKernelCannotReject) {
  for (auto [given, seen] : {std::pair<Int, Int>{-5, 0}, {9, 6}, {3, 3}}) {
    Problem p = shape(2, 6);
    p.key_lengths = &given;
    EXPECT_EQ(visible_keys(p, 0, 0), seen);
  }
}

TEST(Problem, ScaleAndGroups) {
  Problem p = shape(1, 1);
  EXPECT_DOUBLE_EQ(p.softmax_scale(), 0.5);
  p.scale = -3;
  EXPECT_DOUBLE_EQ(p.softmax_scale(), -3);
  p.Hq = 6;
  p.Hkv = 2;
  EXPECT_EQ(p.key_head(2), 0);
  EXPECT_EQ(p.key_head(3), 1);
}

TEST(View, AddressesRowsOfAnyLayout) {
  std::vector<float> memory(2 * 3 * 4 * 5);
  const View<float> x = contiguous(memory.data(), 3, 4, 5);
  EXPECT_EQ(x.at(1, 2, 3) - memory.data(), ((1 * 3 + 2) * 4 + 3) * 5);
  const View<float> BNHD{memory.data(), 60, 5, 15};
  EXPECT_EQ(BNHD.rows(1, 2, 4, 5)[3] - memory.data(), 60 + 2 * 5 + 3 * 15);
}

std::string refusal(const Problem& p, const Forward<float>& t) {
  try {
    check_problem("me", p, 8);
    check_tensors("me", p, t);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Check, OverlapIsExactNotARange) {
  std::vector<float> m(4096);
  Problem p = shape(6, 6);
  p.Hq = p.Hkv = 2;
  const auto part = [&](Int n) { return View<float>{m.data() + n * 8, 0, 4, 32}; };
  // Packed [N, 4, H, d]: the ranges of Q, K, V and O cross, their elements do not.
  Forward<float> t{part(0), part(1), part(2), part(3), nullptr};
  EXPECT_EQ(refusal(p, t), "accepted");
  t.O.data -= 1;  // now O's rows end in V's place
  EXPECT_EQ(refusal(p, t), "me: O overlaps V; outputs must not share memory with inputs");
  t.O = View<float>{m.data() + 3000, 0, 3, 32};  // heads overlap by one element
  EXPECT_NE(refusal(p, t).find("two rows of O share memory"), std::string::npos);
  t.O = View<float>{m.data() + 3000, 0, 52, 8};  // unusual, but each row has its place
  EXPECT_EQ(refusal(p, t), "accepted");
  t.O = View<float>{m.data() + 3000 + 5 * 8, 0, 52, -8};
  EXPECT_EQ(refusal(p, t), "accepted");
}

TEST(Check, MisalignedPointersAreRefused) {
  std::vector<float> m(4096);
  const auto at = [&](Int n) { return contiguous(m.data() + n, 1, 6, 4); };
  Forward<float> t{at(0), at(100), at(200), at(300), nullptr};
  EXPECT_EQ(refusal(shape(6, 6), t), "accepted");
  t.O.data = reinterpret_cast<float*>(reinterpret_cast<char*>(t.O.data) + 2);
  EXPECT_NE(refusal(shape(6, 6), t).find("O must be aligned"), std::string::npos);
}

[[noreturn, maybe_unused]] void refused_under_a_limit_of_256_mib() {
  const rlim_t MiB = 1 << 20;
  const rlimit limit{256 * MiB, 256 * MiB};
  setrlimit(RLIMIT_AS, &limit);
  try {
    check_memory("me", "a matrix", 300.0 * MiB);
  } catch (const std::invalid_argument& e) {
    std::fputs(e.what(), stderr);
    std::_Exit(available_memory() <= Int(256 * MiB) ? 7 : 8);
  }
  std::_Exit(9);
}

// In a child process, because a limit on the address space cannot be taken back.
TEST(CheckMemory, KnowsAboutUlimitAndSaysBothNumbers) {
#if FA_SANITIZED || !defined(__linux__)
  GTEST_SKIP() << "sanitizers reserve terabytes of address space, and macOS keeps no such limit";
#else
  EXPECT_EXIT(refused_under_a_limit_of_256_mib(), testing::ExitedWithCode(7),
              "me: no memory for a matrix: 300.0 MiB, but only [0-9.]+ MiB are free");
#endif
}

// Of either version; what a group above leaves counts as well, and "max" is no limit.
TEST(CheckMemory, EveryGroupAboveHasASay) {
  namespace fs = std::filesystem;
  const fs::path root = fs::path(testing::TempDir()) / "fa_cgroups";
  const auto file = [&](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  const auto room = [&](const std::string& groups) {
    file("proc/self/cgroup", groups);
    return detail::cgroup_room(root);
  };
  const Int none = std::numeric_limits<Int>::max();
  fs::remove_all(root);
  EXPECT_EQ(detail::cgroup_room(root), none);
  EXPECT_EQ(room("0::/\n"), none);
  file("sys/fs/cgroup/a/b/c/memory.max", "max\n");
  EXPECT_EQ(room("0::/a/b/c\n"), none);
  file("sys/fs/cgroup/a/b/memory.max", "1000\n");
  file("sys/fs/cgroup/a/b/memory.stat", "file 5000\nanon 300\n");
  EXPECT_EQ(room("0::/a/b/c\n"), 700);
  file("sys/fs/cgroup/a/memory.max", "500\n");  // how much of it is used is not told
  EXPECT_EQ(room("0::/a/b/c\n"), 500);
  file("sys/fs/cgroup/a/b/c/memory.max", "200\n");
  file("sys/fs/cgroup/a/b/c/memory.stat", "anon 300\n");
  EXPECT_EQ(room("0::/a/b/c\n"), 0);
  EXPECT_EQ(room("0::/a\n"), 500);
  EXPECT_EQ(room("0::/elsewhere\n"), none);
  file("sys/fs/cgroup/memory.max", "900\n");  // a container sees its own group as the root
  file("sys/fs/cgroup/memory.stat", "anon 100\n");
  EXPECT_EQ(room("0::/elsewhere\n"), 800);
  fs::remove_all(root);

  file("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n");
  file("sys/fs/cgroup/memory/a/memory.stat", "rss 10\ntotal_rss 400\n");
  EXPECT_EQ(room("12:cpuset:/x\n4:hugetlb,memory:/a/b\n0::/\n"), 600);
  EXPECT_EQ(room("4:memory:/x\n"), none);
  EXPECT_EQ(room("not a line of a cgroup\n"), none);
  fs::remove_all(root);
}

// A worker's memory that is not there: the caller's own worker does all the tasks.
TEST(ParallelFor, GoesOnWithoutMemoryForAnotherWorker) {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> done{0};
  parallel_for(40, 4, [&] {
    if (std::this_thread::get_id() != caller) throw std::bad_alloc();
    return [&](Int) { ++done; };
  });
  EXPECT_EQ(done, 40);
  EXPECT_THROW(parallel_for(40, 4,
                            [&] {
                              if (std::this_thread::get_id() == caller) throw std::bad_alloc();
                              return [&](Int) { ++done; };
                            }),
               std::bad_alloc);
  EXPECT_EQ(done, 40);
}

}  // namespace
