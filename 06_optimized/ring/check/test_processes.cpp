// Tests of ranks that are processes: they find each other, come to the result of one rank, and end
// in words when one of them does not.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "06_optimized/ring/check/cpu.hpp"
#include "06_optimized/ring/check/parts.hpp"
#include "06_optimized/ring/processes.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using namespace fa::ring;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds patience(5000), little(1000);

int free_port() {
  const int door = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t room = sizeof here;
  EXPECT_EQ(::bind(door, reinterpret_cast<sockaddr*>(&here), room), 0);
  EXPECT_EQ(::getsockname(door, reinterpret_cast<sockaddr*>(&here), &room), 0);
  ::close(door);
  return ntohs(here.sin_port);
}

// Memory that a process and those that it forks have in common.
class Common {
 public:
  explicit Common(std::size_t bytes) : bytes_(bytes) {
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("no memory to share");
  }
  ~Common() { ::munmap(data_, bytes_); }
  Common(const Common&) = delete;
  Common& operator=(const Common&) = delete;
  char* at(std::size_t byte) const { return static_cast<char*>(data_) + byte; }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

struct End {
  int killed_by = 0;
  std::string words;  // what f threw
  double seconds = 0;
};

// f(place) in so many processes at once; how each of them ended. Who is not done after ten seconds
// is killed, and so is who has stopped itself, once all others are done.
std::vector<End> in_processes(int ranks, const std::function<void(const Place&)>& f) {
  constexpr std::size_t room = 4096;
  const Common words(room * std::size_t(ranks));
  Place place;
  place.size = ranks, place.port = free_port();
  const auto begun = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begun).count(); };
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    place.rank = place.local = r;
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        f(place);
      } catch (const std::exception& error) {
        std::strncpy(words.at(room * std::size_t(r)), error.what(), room - 1);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  std::vector<End> ends(std::size_t(ranks), End{});
  std::vector<bool> done(std::size_t(ranks), false);
  int left = ranks, stopped = 0;
  while (left > 0) {
    stopped = 0;
    for (std::size_t r = 0; r < children.size(); ++r) {
      if (done[r]) continue;
      int status = 0;
      const pid_t came = ::waitpid(children[r], &status, WNOHANG | WUNTRACED);
      if (came != children[r]) continue;
      if (WIFSTOPPED(status)) {
        ends[r].killed_by = SIGSTOP;
        continue;
      }
      done[r] = true, --left;
      if (WIFSIGNALED(status) && ends[r].killed_by == 0) ends[r].killed_by = WTERMSIG(status);
      ends[r].words = words.at(room * r);
      ends[r].seconds = seconds();
    }
    for (std::size_t r = 0; r < children.size(); ++r)
      stopped += !done[r] && ends[r].killed_by == SIGSTOP;
    if (left > 0 && (left == stopped || seconds() > 10))
      for (std::size_t r = 0; r < children.size(); ++r)
        if (!done[r]) ::kill(children[r], SIGKILL);
    std::this_thread::sleep_for(milliseconds(5));
  }
  return ends;
}

std::string said(const std::vector<End>& ends) {
  std::string text;
  for (std::size_t r = 0; r < ends.size(); ++r)
    text += "rank " + std::to_string(r) + ", " + std::to_string(ends[r].seconds) + " s" +
            (ends[r].killed_by ? ", signal " + std::to_string(ends[r].killed_by) : "") + ": " +
            ends[r].words + "\n";
  return text;
}
#define EXPECT_SAYS(end, part) EXPECT_NE((end).words.find(part), std::string::npos) << said(ends)

// ---- the result --------------------------------------------------------------------------------

template <class X>
void put(const Common& to, std::size_t& at, const std::vector<X>& data) {
  std::memcpy(to.at(at), data.data(), data.size() * sizeof(X));
  at += data.size() * sizeof(X);
}
template <class X>
void get(const Common& from, std::size_t& at, std::vector<X>& data) {
  std::memcpy(data.data(), from.at(at), data.size() * sizeof(X));
  at += data.size() * sizeof(X);
}
constexpr std::size_t room_of_a_rank = 1 << 20;

std::string forward_verdict(const Spec& spec, int ranks, const ring::Options& options) {
  ForwardCase<float> c(spec, true);
  const Problem p = c.call().p;
  const Common results(room_of_a_rank * std::size_t(ranks));
  const auto ends = in_processes(ranks, [&](const Place& place) {
    Assembly assembly(place, patience);
    const auto comm = over_sockets(assembly);
    const auto engine = cpu_engine<float>();
    ForwardParts<float> x(p, ranks, place.rank, options.order);
    x.Q.take(c.Q), x.K.take(c.K), x.V.take(c.V);
    ring::forward(*comm, *engine, p, x.tensors(), options);
    std::size_t at = room_of_a_rank * std::size_t(place.rank);
    put(results, at, x.O.data), put(results, at, x.L.data);
  });
  std::string wrong;
  for (int r = 0; r < ranks; ++r) {
    ForwardParts<float> x(p, ranks, r, options.order);
    std::size_t at = room_of_a_rank * std::size_t(r);
    get(results, at, x.O.data), get(results, at, x.L.data);
    x.O.give(c.O), x.L.give(c.LSE);
    if (!ends[std::size_t(r)].words.empty() || ends[std::size_t(r)].killed_by) wrong = said(ends);
  }
  return wrong.empty() ? c.verdict() : wrong;
}

std::string backward_verdict(const Spec& spec, int ranks, const ring::Options& options) {
  BackwardCase<float> c(spec);
  const Problem p = c.call().p;
  const Common results(room_of_a_rank * std::size_t(ranks));
  const auto ends = in_processes(ranks, [&](const Place& place) {
    Assembly assembly(place, patience);
    const auto comm = over_sockets(assembly);
    const auto engine = cpu_engine<float>();
    ForwardParts<float> x(p, ranks, place.rank, options.order),
        y(p, ranks, place.rank, options.order);
    x.Q.take(c.Q), x.K.take(c.K), x.V.take(c.V), x.O.take(c.O), x.L.take(c.LSE), y.O.take(c.dO);
    ring::backward(*comm, *engine, p,
                   {x.Q.view, x.K.view, x.V.view, x.O.view, y.O.view, x.L.data.data(), y.Q.view,
                    y.K.view, y.V.view},
                   options);
    std::size_t at = room_of_a_rank * std::size_t(place.rank);
    put(results, at, y.Q.data), put(results, at, y.K.data), put(results, at, y.V.data);
  });
  std::string wrong;
  for (int r = 0; r < ranks; ++r) {
    ForwardParts<float> y(p, ranks, r, options.order);
    std::size_t at = room_of_a_rank * std::size_t(r);
    get(results, at, y.Q.data), get(results, at, y.K.data), get(results, at, y.V.data);
    y.Q.give(c.dQ), y.K.give(c.dK), y.V.give(c.dV);
    if (!ends[std::size_t(r)].words.empty() || ends[std::size_t(r)].killed_by) wrong = said(ends);
  }
  return wrong.empty() ? c.verdict() : wrong;
}

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

// Does something when it has put the messages of a step under way.
class AtStep : public Communicator {
 public:
  AtStep(Communicator& real, const std::string& step, const std::function<void()>& act)
      : real_(real), step_(step), act_(act) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    real_.begin(at, sent, received);
    if (at.find(step_) != std::string::npos) act_();
  }
  void wait() override { real_.wait(); }
  void tell_all(const std::string& at, const void* mine, void* all, std::size_t n) override {
    real_.tell_all(at, mine, all, n);
  }
  void leave(const std::string& why) noexcept override { real_.leave(why); }

 private:
  Communicator& real_;
  const std::string step_;
  const std::function<void()> act_;
};

// Three ranks in a ring; rank `who` does something at a step.
std::vector<End> ring_of(int ranks, milliseconds wait, int who, const std::string& step,
                         const std::function<void()>& act) {
  return in_processes(ranks, [&](const Place& place) {
    const Problem p = sized(1, 2, 2, 96, 96, 8, Causal::top_left).p;
    Assembly assembly(place, wait);
    const auto real = over_sockets(assembly);
    AtStep comm(
        *real, step, place.rank == who ? act : [] {});
    const auto engine = cpu_engine<float>();
    ForwardParts<float> x(p, ranks, place.rank, Order::zigzag);
    for (Part<float>* part : {&x.Q, &x.K, &x.V})
      std::fill(part->data.begin(), part->data.end(), 1.0f);
    for (int call = 0; call < 3; ++call) ring::forward(comm, *engine, p, x.tensors());
  });
}

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
                            [] { std::this_thread::sleep_for(std::chrono::seconds(4)); });
  for (const int r : {0, 1}) {
    EXPECT_SAYS(ends[std::size_t(r)], "rank 2 did not come within 1000 ms");
    EXPECT_LT(ends[std::size_t(r)].seconds, 3.5) << said(ends);
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
