// Tests of ranks that are processes: they find each other, come to the result of one rank, and end
// in words when one of them does not.
#include <fcntl.h>

#include <cstdlib>

#include "06_optimized/ring/check/forked.hpp"

std::unique_ptr<fa::ring::Communicator> fa::ring::carrier(Assembly& assembly) {
  return over_sockets(assembly);
}

namespace {

using namespace fa;
using namespace fa::ring;

// ---- the result --------------------------------------------------------------------------------

// A rank's messages are larger than what a socket takes at once.
Spec large(Causal causal) { return sized(1, 4, 4, 300, 300, 64, causal); }

TEST(Result, Forward) {
  for (const int ranks : {2, 3, 4})
    for (const Method method : {Method::ring, Method::gather, Method::heads})
      EXPECT_EQ(forward_verdict(large(Causal::top_left), ranks, {method}), "")
          << ranks << " ranks, " << name(method);
  EXPECT_EQ(forward_verdict(sized(2, 4, 2, 37, 41, 8, Causal::bottom_right), 3, {}), "");
}
TEST(Result, Backward) {
  for (const int ranks : {2, 4})
    for (const Method method : {Method::ring, Method::gather, Method::heads})
      EXPECT_EQ(backward_verdict(large(Causal::top_left), ranks, {method}), "")
          << ranks << " ranks, " << name(method);
  EXPECT_EQ(backward_verdict(sized(2, 4, 2, 37, 41, 8, Causal::bottom_right), 3, {}), "");
}

// ---- a rank that does not come to its end ------------------------------------------------------

TEST(Lost, Killed) {
  for (const int who : {0, 1, 2}) {
    const auto ends = ring_of(3, patience, who, "step 2 of 3", [] { ::raise(SIGKILL); });
    for (int r = 0; r < 3; ++r) {
      const End& end = ends[std::size_t(r)];
      if (r == who) {
        EXPECT_EQ(end.killed_by, SIGKILL) << said(ends);
        continue;
      }
      EXPECT_EQ(end.killed_by, 0) << said(ends);
      EXPECT_SAYS(end, "rank " + std::to_string(who) + " ended without a word");
      // Rank 0 hears from all where they are.
      if (who > 0) {
        EXPECT_SAYS(end, "last seen at 'forward, step 2 of 3'");
      }
      EXPECT_LT(end.seconds, 3) << said(ends);
    }
  }
}

TEST(Lost, Stopped) {
  const auto ends = ring_of(3, little, 1, "step 1 of 3", [] { ::raise(SIGSTOP); });
  for (const int r : {0, 2}) {
    EXPECT_EQ(ends[std::size_t(r)].killed_by, 0) << said(ends);
    EXPECT_SAYS(ends[std::size_t(r)], "rank 1 ");
    EXPECT_SAYS(ends[std::size_t(r)], "it was last seen at 'forward, step 1 of 3'");
    EXPECT_LT(ends[std::size_t(r)].seconds, 4) << said(ends);
  }
}

TEST(Lost, LivesAndDoesNotCome) {
  const auto ends = ring_of(3, little, 2, "step 2 of 3",
                            [] { std::this_thread::sleep_for(std::chrono::seconds(3)); });
  for (const int r : {0, 1}) {
    EXPECT_SAYS(ends[std::size_t(r)], "rank 2 did not come within 1000 ms");
    EXPECT_LT(ends[std::size_t(r)].seconds, 2.9) << said(ends);
  }
  EXPECT_SAYS(ends[2], "rank 2 did not come") << "it too is told";
}

TEST(Lost, Throws) {
  const auto ends = ring_of(4, patience, 1, "step 3 of 4",
                            [] { throw std::runtime_error("out of memory: wanted 12 bytes"); });
  EXPECT_EQ(ends[1].words, "out of memory: wanted 12 bytes");
  for (const int r : {0, 2, 3}) {
    EXPECT_SAYS(ends[std::size_t(r)],
                "rank 1 ended at 'forward, step 3 of 4': out of memory: wanted 12 bytes");
    EXPECT_LT(ends[std::size_t(r)].seconds, 3) << said(ends);
  }
}

TEST(Lost, NeverComes) {
  auto ends = in_processes(3, [](const Place& place) {
    if (place.rank != 2) Assembly(place, little).at("its work");
  });
  EXPECT_SAYS(ends[0], "rank 2 did not come within 1000 ms; it was never seen");
  ends = in_processes(3, [](const Place& place) {
    if (place.rank == 2) return;
    Assembly assembly(place, little);
    int told[3];
    assembly.tell_all("its work", &place.rank, told, sizeof place.rank);
  });
  for (const int r : {0, 1}) {
    EXPECT_SAYS(ends[std::size_t(r)], "rank 2 did not come within 1000 ms; it was never seen");
    EXPECT_LT(ends[std::size_t(r)].seconds, 3) << said(ends);
  }
  ends = in_processes(2, [](const Place& place) {
    if (place.rank == 1) Assembly(place, little).at("its work");
  });
  EXPECT_SAYS(ends[1], "rank 0 did not answer at 127.0.0.1:");
  EXPECT_SAYS(ends[1], "Connection refused");
}

// A host that is not there answers nothing at all, and connect() by itself gives up after minutes.
// So it does where a queue of callers is full.
TEST(Lost, NobodyAnswers) {
  const Door door;
  ASSERT_EQ(::listen(door.socket, 0), 0);
  std::vector<int> callers;
  for (int k = 0; k < 8; ++k) {
    callers.push_back(::socket(AF_INET, SOCK_STREAM, 0));
    ::fcntl(callers.back(), F_SETFL, O_NONBLOCK);
    ::connect(callers.back(), door.address(), sizeof(sockaddr_in));
  }
  Place place;
  place.rank = 1, place.size = 2, place.port = door.port();
  const auto began = std::chrono::steady_clock::now();
  std::string words;
  try {
    const Assembly assembly(place, little);
  } catch (const RankLost& lost) {
    words = lost.what();
  }
  EXPECT_NE(words.find("rank 0 did not answer at 127.0.0.1:"), std::string::npos) << words;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  EXPECT_LT(took.count(), 3);
  for (const int caller : callers) ::close(caller);
}

TEST(Lost, LeavesBeforeTheOthers) {
  const auto ends = in_processes(3, [](const Place& place) {
    Assembly assembly(place, patience);
    if (place.rank == 1) return;
    int told[3];
    assembly.tell_all("its work", &place.rank, told, sizeof place.rank);
  });
  for (const int r : {0, 2}) {
    EXPECT_SAYS(ends[std::size_t(r)], "rank 1 came to its end at 'its start' while others had not");
    EXPECT_LT(ends[std::size_t(r)].seconds, 3) << said(ends);
  }
}

// ---- ranks that were not called alike ----------------------------------------------------------

TEST(Refused, OtherLength) {
  const auto ends = in_processes(3, [&](const Place& place) {
    const Int N = place.rank == 2 ? 80 : 64;
    const Problem p = sized(1, 1, 1, N, N, 8).p;
    Assembly assembly(place, patience);
    const auto comm = over_sockets(assembly);
    const auto engine = cpu_engine<float>();
    ForwardParts<float> x(p, 3, place.rank, Order::zigzag);
    ring::forward(*comm, *engine, p, x.tensors());
  });
  for (const End& end : ends) {
    EXPECT_SAYS(end, "rank 0 has 'ring forward zigzag B1 Hq1 Hkv1 Nq64 Nk64 d8");
    EXPECT_SAYS(end, "rank 2 has 'ring forward zigzag B1 Hq1 Hkv1 Nq80 Nk80 d8");
    EXPECT_LT(end.seconds, 3) << said(ends);
  }
}

TEST(Refused, OtherNumberOfRanks) {
  auto ends = in_processes(2, [](Place place) {
    if (place.rank == 1) place.size = 4;
    Assembly assembly(place, patience);
    int told[4];
    assembly.tell_all("its work", &place.rank, told, sizeof place.rank);
  });
  for (const End& end : ends)
    EXPECT_SAYS(end, "rank 1 was started as one of 4 ranks, rank 0 as one of 2");
  ends = in_processes(3, [](Place place) {
    if (place.rank == 2) place.rank = 1;
    Assembly assembly(place, patience);
    int told[3];
    assembly.tell_all("its work", &place.rank, told, sizeof place.rank);
  });
  for (const End& end : ends) EXPECT_SAYS(end, "two processes say that they are rank 1");
}

// ---- how they meet -----------------------------------------------------------------------------

TEST(Meeting, Strangers) {
  // Who scans ports is not a rank; and a rank that comes late is waited for.
  const auto ends = in_processes(2, [](const Place& place) {
    if (place.rank == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      sockaddr_in there{};
      there.sin_family = AF_INET;
      there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      there.sin_port = htons(std::uint16_t(place.port));
      const int silent = ::socket(AF_INET, SOCK_STREAM, 0);
      const int chatty = ::socket(AF_INET, SOCK_STREAM, 0);
      for (const int one : {silent, chatty})
        if (::connect(one, reinterpret_cast<sockaddr*>(&there), sizeof there) != 0)
          throw std::runtime_error("nobody listens");
      const std::string text = "GET / HTTP/1.1\r\nHost: somebody.else\r\n\r\n";
      if (::send(chatty, text.data(), text.size(), MSG_NOSIGNAL) < 0)
        throw std::runtime_error("nobody listens");
    }
    Assembly assembly(place, patience);
    int told[2];
    assembly.tell_all("its work", &place.rank, told, sizeof place.rank);
    if (told[0] != 0 || told[1] != 1) throw std::runtime_error("told something else");
  });
  EXPECT_EQ(ends[0].words + ends[1].words, "") << said(ends);
}

TEST(Meeting, TextsOfAnyLength) {
  const auto ends = in_processes(3, [](const Place& place) {
    Assembly assembly(place, patience);
    const auto texts = assembly.tell_texts("a text", std::string(std::size_t(place.rank) * 7, 'x'));
    for (std::size_t r = 0; r < 3; ++r)
      if (texts[r] != std::string(r * 7, 'x')) throw std::runtime_error("another text");
  });
  EXPECT_EQ(ends[0].words + ends[1].words + ends[2].words, "") << said(ends);
}

class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* variable : all) ::unsetenv(variable);
  }
  void TearDown() override { SetUp(); }
  static std::string words() {
    try {
      place_of_this_process();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  }
  static constexpr const char* all[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "FA_RING_PORT",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "TORCHELASTIC_USE_AGENT_STORE"};
};

TEST_F(Environment, None) {
  const Place place = place_of_this_process();
  EXPECT_EQ(place.rank, 0);
  EXPECT_EQ(place.size, 1);
}
TEST_F(Environment, Torchrun) {
  ::setenv("RANK", "5", 1), ::setenv("WORLD_SIZE", "8", 1), ::setenv("LOCAL_RANK", "1", 1);
  ::setenv("MASTER_ADDR", "there", 1), ::setenv("MASTER_PORT", "1234", 1);
  Place place = place_of_this_process();
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.size, 8);
  EXPECT_EQ(place.local, 1);
  EXPECT_EQ(place.host, "there");
  EXPECT_EQ(place.port, 1234);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  EXPECT_EQ(place_of_this_process().port, 1235) << "torchrun has the other one";
}
TEST_F(Environment, Mpirun) {
  ::setenv("OMPI_COMM_WORLD_RANK", "3", 1), ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  ::setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
  const Place place = place_of_this_process();
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.size, 4);
  EXPECT_EQ(place.local, 1);
}
TEST_F(Environment, Wrong) {
  ::setenv("WORLD_SIZE", "2", 1);
  EXPECT_EQ(words(), "ring: RANK must be a number from 0 to 1, got ''");
  ::setenv("RANK", "2", 1);
  EXPECT_EQ(words(), "ring: RANK must be a number from 0 to 1, got '2'");
  ::setenv("RANK", "1", 1), ::setenv("MASTER_PORT", "http", 1);
  EXPECT_EQ(words(), "ring: MASTER_PORT must be a number from 1 to 65535, got 'http'");
}

}  // namespace
