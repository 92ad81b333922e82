// The communicator over NCCL, without NCCL and without a GPU: what it calls is a library that has
// the manners of NCCL (fake_nccl.cpp), and a CUDA in host memory (fake_cuda.cpp). With the real
// ones, the check of the program is the test.
#include <cstdlib>

#include "06_optimized/ring/check/forked.hpp"
#include "06_optimized/ring/nccl.hpp"

std::unique_ptr<fa::ring::Communicator> fa::ring::carrier(Assembly& assembly) {
  ::setenv("FA_NCCL", FA_FAKE_NCCL, 0);
  return over_nccl(assembly, nullptr);
}

namespace {

using namespace fa;
using namespace fa::ring;

Spec large(Causal causal) { return sized(1, 4, 4, 300, 300, 64, causal); }

TEST(OverNccl, Forward) {
  for (const int ranks : {2, 3, 4})
    for (const Method method : {Method::ring, Method::gather, Method::heads})
      EXPECT_EQ(forward_verdict(large(Causal::top_left), ranks, {method}), "")
          << ranks << " ranks, " << name(method);
  EXPECT_EQ(forward_verdict(sized(2, 4, 2, 37, 41, 8, Causal::bottom_right), 3, {}), "");
  EXPECT_EQ(forward_verdict(sized(1, 1, 1, 3, 2, 8, Causal::top_left), 4, {}), "") << "no rows";
}
TEST(OverNccl, Backward) {
  for (const int ranks : {2, 3})
    for (const Method method : {Method::ring, Method::gather, Method::heads})
      EXPECT_EQ(backward_verdict(large(Causal::top_left), ranks, {method}), "")
          << ranks << " ranks, " << name(method);
}

TEST(OverNccl, TimesOfMessages) {
  const auto ends = in_processes(2, [](const Place& place) {
    Assembly assembly(place, patience);
    const auto comm = carrier(assembly);
    auto& nccl = dynamic_cast<NcclCommunicator&>(*comm);
    int mine = place.rank, other = -1;
    nccl.record(true);
    for (int step = 0; step < 3; ++step) {
      comm->begin("step " + std::to_string(step), {{1 - place.rank, &mine, sizeof mine}},
                  {{1 - place.rank, &other, sizeof other}});
      std::this_thread::sleep_for(milliseconds(20));
      comm->wait();
      if (other != 1 - place.rank) throw std::runtime_error("something else came");
    }
    const std::vector<Span> spans = nccl.spans();
    if (spans.size() != 4 || spans[1].at != "step 1" || spans[3].at != "the rest")
      throw std::runtime_error("other spans");
    for (int step = 0; step < 3; ++step) {
      const Span& span = spans[std::size_t(step)];
      if (span.compute_to - span.compute_from < 19 || span.copy_from < span.compute_from ||
          span.copy_to < span.copy_from || span.copy_to > span.compute_to)
        throw std::runtime_error("the copy was not beside what was computed");
    }
  });
  EXPECT_EQ(ends[0].words + ends[1].words, "") << said(ends);
}

// NCCL itself would wait for ever, and its messages are not even begun by the host.
TEST(LostOverNccl, Killed) {
  for (const int who : {0, 1}) {
    const auto ends = ring_of(3, patience, who, "step 2 of 3", [] { ::raise(SIGKILL); });
    for (int r = 0; r < 3; ++r) {
      if (r == who) continue;
      EXPECT_EQ(ends[std::size_t(r)].killed_by, 0) << said(ends);
      EXPECT_SAYS(ends[std::size_t(r)], "rank " + std::to_string(who) + " ended without a word");
      EXPECT_LT(ends[std::size_t(r)].seconds, 4) << said(ends);
    }
  }
}
TEST(LostOverNccl, Throws) {
  const auto ends = ring_of(3, patience, 1, "step 1 of 3",
                            [] { throw std::runtime_error("out of memory: wanted 12 bytes"); });
  for (const int r : {0, 2})
    EXPECT_SAYS(ends[std::size_t(r)],
                "rank 1 ended at 'forward, step 1 of 3': out of memory: wanted 12 bytes");
}
TEST(LostOverNccl, LivesAndDoesNotCome) {
  const auto ends = ring_of(3, little, 2, "step 1 of 3",
                            [] { std::this_thread::sleep_for(std::chrono::seconds(3)); });
  for (const int r : {0, 1}) {
    EXPECT_EQ(ends[std::size_t(r)].killed_by, 0) << said(ends);
    EXPECT_SAYS(ends[std::size_t(r)], "rank 2 did not come within 1000 ms");
    EXPECT_LT(ends[std::size_t(r)].seconds, 2.9) << said(ends);
  }
}

TEST(OverNccl, DoesNotStart) {
  ::setenv("FAKE_NCCL_FAILS", "1", 1);
  auto ends = ring_of(2, patience, -1, "", [] {});
  ::unsetenv("FAKE_NCCL_FAILS");
  EXPECT_SAYS(ends[1], "ring: ncclCommInitRankConfig failed: invalid argument");
  EXPECT_SAYS(ends[0], "rank 1 ended at 'NCCL's start': ring: ncclCommInitRankConfig failed");
  EXPECT_LT(ends[0].seconds, 4);
}
TEST(OverNccl, IsNotThere) {
  ::setenv("FA_NCCL", "/nowhere/libnccl.so.2", 1);
  const auto ends = ring_of(2, patience, -1, "", [] {});
  ::unsetenv("FA_NCCL");
  for (const End& end : ends)
    EXPECT_SAYS(end, "rank 0: ring: FA_NCCL names no library that can be loaded");
}

}  // namespace
