// The contract in common/core: masks, views, argument checks, memory limits.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
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

template <class Tensors>
std::string refusal(const Problem& p, const Tensors& t) {
  try {
    check_problem("me", p, 8);
    check_tensors("me", p, t);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Check, NamesTheSizeThatIsWrongWithItsValue) {
  const auto words = [](auto change) {
    Problem p = shape(6, 7);
    p.B = 2;
    p.Hq = 4;
    p.Hkv = 2;
    change(p);
    return refusal(p, Forward<float>{});
  };
  EXPECT_EQ(words([](Problem& p) { p.B = -1; }), "me: B must not be negative, got -1");
  EXPECT_EQ(words([](Problem& p) { p.Hq = -2; }), "me: Hq must not be negative, got -2");
  EXPECT_EQ(words([](Problem& p) { p.Hkv = -3; }), "me: Hkv must not be negative, got -3");
  EXPECT_EQ(words([](Problem& p) { p.Nq = -4; }), "me: Nq must not be negative, got -4");
  EXPECT_EQ(words([](Problem& p) { p.Nk = -5; }), "me: Nk must not be negative, got -5");
  EXPECT_EQ(words([](Problem& p) { p.d = 9; }), "me: d must lie in [1, 8], got 9");
  EXPECT_EQ(words([](Problem& p) { p.Hkv = 3; }),
            "me: Hq must be a multiple of Hkv, got Hq = 4, Hkv = 3");
  // Each tensor would fit, but nobody could count the scores.
  EXPECT_EQ(words([](Problem& p) { p.Nq = p.Nk = Int(1) << 32; }),
            "me: B * H * N * d does not fit 64 bits");
  // Nothing to do, but strides that nobody could count.
  EXPECT_EQ(words([](Problem& p) { p.B = 0, p.Hq = p.Hkv = Int(1) << 61; }),
            "me: B * H * N * d does not fit 64 bits");
  EXPECT_EQ(words([](Problem& p) { p.Hq = p.Hkv = Int(1) << 40, p.Nk = Int(1) << 30, p.Nq = 0; }),
            "me: B * H * N * d does not fit 64 bits");
}

TEST(Check, AScaleMustBeFiniteInTheTypeOfTheScores) {
  std::vector<double> m(4096);
  Problem p = shape(6, 6);
  p.scale = 1e39;
  const auto at = [&](Int n) { return contiguous(m.data() + n, 1, 6, 4); };
  EXPECT_EQ(refusal(p, Forward<double>{at(0), at(100), at(200), at(300), nullptr}), "accepted");
  std::vector<float> f(4096);
  const auto of_float = [&](Int n) { return contiguous(f.data() + n, 1, 6, 4); };
  EXPECT_EQ(refusal(p, Forward<float>{of_float(0), of_float(100), of_float(200), of_float(300)}),
            "me: scale must be finite in the type of the scores, got 1e+39");
}

// Every pair of an output and another tensor: side by side they are accepted, in either order; one
// element shared, and the refusal names both. Nq, Nk and the numbers of heads all differ, so a size
// taken for another shows.
struct Placed {
  const char* name;
  Int heads, rows, d;
  bool output;
  Int at = 0;  // where it begins

  Int elements() const { return 2 * heads * rows * d; }  // B = 2
};
template <class Call>
void every_pair(std::vector<Placed> tensors, Call call) {
  const auto spread = [&] {
    Int n = 0;
    for (Placed& x : tensors) {
      x.at = n;
      n += x.elements() + 500;
    }
  };
  spread();
  ASSERT_EQ(call(tensors), "accepted");
  for (std::size_t o = 0; o < tensors.size(); ++o)
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[o].output || i == o || (tensors[i].output && i > o)) continue;
      const std::string both =
          std::string("me: ") + tensors[o].name + " overlaps " + tensors[i].name + ";";
      for (bool behind : {true, false})
        for (Int shared : {0, 1}) {
          spread();
          const Int middle = 20000;  // room on both sides
          tensors[i].at = middle;
          tensors[o].at = behind ? middle + tensors[i].elements() - shared
                                 : middle - tensors[o].elements() + shared;
          const std::string words = call(tensors);
          EXPECT_EQ(words.substr(0, both.size()), shared ? both : std::string("accepted"))
              << tensors[o].name << (behind ? " behind " : " in front of ") << tensors[i].name;
        }
    }
}
TEST(Check, OverlapOfEveryPairIsFoundAndNoOther) {
  std::vector<float> m(40000);
  Problem p = shape(6, 9);
  p.B = 2;
  p.Hq = 4;
  p.Hkv = 2;
  const auto view = [&](const Placed& x) {
    return contiguous(m.data() + x.at, x.heads, x.rows, x.d);
  };
  every_pair({{"Q", 4, 6, 4, false},
              {"K", 2, 9, 4, false},
              {"V", 2, 9, 4, false},
              {"O", 4, 6, 4, true},
              {"LSE", 4, 6, 1, true}},
             [&](const std::vector<Placed>& x) {
               return refusal(p, Forward<float>{view(x[0]), view(x[1]), view(x[2]), view(x[3]),
                                                m.data() + x[4].at});
             });
  every_pair({{"Q", 4, 6, 4, false},
              {"K", 2, 9, 4, false},
              {"V", 2, 9, 4, false},
              {"O", 4, 6, 4, false},
              {"dO", 4, 6, 4, false},
              {"LSE", 4, 6, 1, false},
              {"dQ", 4, 6, 4, true},
              {"dK", 2, 9, 4, true},
              {"dV", 2, 9, 4, true}},
             [&](const std::vector<Placed>& x) {
               return refusal(
                   p, Backward<float>{view(x[0]), view(x[1]), view(x[2]), view(x[3]), view(x[4]),
                                      m.data() + x[5].at, view(x[6]), view(x[7]), view(x[8])});
             });
}

TEST(Check, TensorsOfNothingMayBeNull) {
  float m[64] = {};
  const View<float> x = contiguous(m, 1, 5, 4), y = contiguous(m + 32, 1, 5, 4), none{};
  const auto nothing = [&](Int Nq, Int Nk) {
    return refusal(shape(Nq, Nk), Forward<float>{Nq ? x : none, Nk ? x : none, Nk ? x : none,
                                                 Nq ? y : none, nullptr});
  };
  EXPECT_EQ(nothing(0, 5), "accepted");
  EXPECT_EQ(nothing(5, 0), "accepted");
  EXPECT_EQ(nothing(0, 0), "accepted");
  EXPECT_EQ(nothing(5, 5), "accepted");
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

TEST(Check, OverlapWhateverTheStrides) {
  std::vector<float> m(4096);
  const auto far = [&](Int n) { return contiguous<const float>(m.data() + 1000 * n, 1, 6, 4); };
  // Row for row beside Q, and strides differ only where there is one head in one batch entry.
  Forward<float> t{{m.data(), 0, 0, 8}, far(1), far(2), {m.data() + 4, 99, 24, 8}, nullptr};
  EXPECT_EQ(refusal(shape(6, 6), t), "accepted");
  t.O.data -= 1;
  EXPECT_EQ(refusal(shape(6, 6), t).substr(0, 17), "me: O overlaps Q;");
  t.O.data += 2;  // into Q's next row
  EXPECT_EQ(refusal(shape(6, 6), t).substr(0, 17), "me: O overlaps Q;");
  // Rows that run backwards lie in front of where they begin.
  t.Q = contiguous<const float>(m.data() + 90, 1, 6, 4);
  t.O = {m.data() + 100 + 5 * 4, 0, 0, -4};
  EXPECT_EQ(refusal(shape(6, 6), t).substr(0, 17), "me: O overlaps Q;");
  t.O.data += 14;
  EXPECT_EQ(refusal(shape(6, 6), t), "accepted");
  // One row: strides that nobody uses may be equal where lengths are not.
  t = {{m.data(), 1, 1, 1}, far(1), far(2), contiguous(m.data() + 3000, 1, 1, 4), m.data() + 2};
  EXPECT_EQ(refusal(shape(1, 1), t),
            "me: LSE overlaps Q; outputs must not share memory with inputs");
  t.LSE = m.data() + 4;
  EXPECT_EQ(refusal(shape(1, 1), t), "accepted");
}

TEST(Check, EveryStrideMustFit64Bits) {
  std::vector<float> m(4096);
  const auto at = [&](Int n) { return contiguous(m.data() + n, 1, 6, 4); };
  for (Int View<float>::*stride : {&View<float>::batch, &View<float>::head, &View<float>::row}) {
    Forward<float> t{at(0), at(100), at(200), at(300), nullptr};
    t.O.*stride = -(Int(1) << 62);
    EXPECT_EQ(refusal(shape(6, 6), t),
              "me: a stride of O reaches beyond 64 bits: -4611686018427387904");
  }
}

TEST(Check, MisalignedPointersAreRefused) {
  std::vector<float> m(4096);
  const auto at = [&](Int n) { return contiguous(m.data() + n, 1, 6, 4); };
  Forward<float> t{at(0), at(100), at(200), at(300), nullptr};
  EXPECT_EQ(refusal(shape(6, 6), t), "accepted");
  t.O.data = reinterpret_cast<float*>(reinterpret_cast<char*>(t.O.data) + 2);
  EXPECT_NE(refusal(shape(6, 6), t).find("O must be aligned"), std::string::npos);
  // Where a float may begin, a double may not.
  const auto of_doubles = [&](Int n) {
    return contiguous(reinterpret_cast<double*>(m.data() + n), 1, 6, 4);
  };
  EXPECT_NE(refusal(shape(6, 6), Forward<double>{of_doubles(0), of_doubles(101), of_doubles(200),
                                                 of_doubles(300), nullptr})
                .find("K must be aligned to its element, 8 bytes"),
            std::string::npos);
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

// Half a GiB of the whole one is taken.
[[noreturn, maybe_unused]] void half_of_the_limit_is_used() {
  const rlim_t MiB = 1 << 20;
  const rlimit limit{1024 * MiB, 1024 * MiB};
  setrlimit(RLIMIT_AS, &limit);
  void* const taken =
      mmap(nullptr, 512 * MiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const Int free = available_memory();
  std::_Exit(taken == MAP_FAILED ? 6 : free > Int(512 * MiB) ? 8 : 7);
}
TEST(CheckMemory, WhatIsInUseIsNotFree) {
#if FA_SANITIZED || !defined(__linux__)
  GTEST_SKIP() << "sanitizers reserve terabytes of address space, and macOS keeps no such limit";
#else
  EXPECT_EXIT(half_of_the_limit_is_used(), testing::ExitedWithCode(7), "");
#endif
}

TEST(CheckMemory, IsWhatTheSystemHasAtMost) {
  std::ifstream file("/proc/meminfo");
  std::string word;
  Int kib = 0;
  while (file >> word && word != "MemTotal:") {
  }
  if (!(file >> kib)) GTEST_SKIP() << "the system does not say what it has";
  EXPECT_LE(available_memory(), 1024 * kib);
  EXPECT_GE(available_memory(), Int(64) << 20);  // or no test would run
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
