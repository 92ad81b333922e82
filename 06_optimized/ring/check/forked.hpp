// Ranks that are processes, forked by a test: what becomes of each of them, and a ring to run in
// them.
#pragma once
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "06_optimized/ring/check/cpu.hpp"
#include "06_optimized/ring/check/parts.hpp"
#include "06_optimized/ring/processes.hpp"

namespace fa::ring {

using namespace judge;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds patience(5000), little(1000);

// What carries messages: the test says.
std::unique_ptr<Communicator> carrier(Assembly& assembly);

// A socket at a port that nobody has, of this machine alone.
class Door {
 public:
  Door() {
    at_.sin_family = AF_INET;
    at_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t room = sizeof at_;
    EXPECT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&at_), room), 0);
    EXPECT_EQ(::getsockname(socket, reinterpret_cast<sockaddr*>(&at_), &room), 0);
  }
  ~Door() { ::close(socket); }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  int port() const { return ntohs(at_.sin_port); }
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&at_); }
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);

 private:
  sockaddr_in at_{};
};
inline int free_port() { return Door().port(); }

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
inline std::vector<End> in_processes(int ranks, const std::function<void(const Place&)>& f) {
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

inline std::string said(const std::vector<End>& ends) {
  std::string text;
  for (std::size_t r = 0; r < ends.size(); ++r)
    text += "rank " + std::to_string(r) + ", " + std::to_string(ends[r].seconds) + " s" +
            (ends[r].killed_by ? ", signal " + std::to_string(ends[r].killed_by) : "") + ": " +
            ends[r].words + "\n";
  return text;
}
#define EXPECT_SAYS(end, part) EXPECT_NE((end).words.find(part), std::string::npos) << said(ends)

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

inline std::string forward_verdict(const Spec& spec, int ranks, const Options& options) {
  ForwardCase<float> c(spec, true);
  const Problem p = c.call().p;
  const Common results(room_of_a_rank * std::size_t(ranks));
  const auto ends = in_processes(ranks, [&](const Place& place) {
    Assembly assembly(place, patience);
    const auto comm = carrier(assembly);
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

inline std::string backward_verdict(const Spec& spec, int ranks, const Options& options) {
  BackwardCase<float> c(spec);
  const Problem p = c.call().p;
  const Common results(room_of_a_rank * std::size_t(ranks));
  const auto ends = in_processes(ranks, [&](const Place& place) {
    Assembly assembly(place, patience);
    const auto comm = carrier(assembly);
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
inline std::vector<End> ring_of(int ranks, milliseconds wait, int who, const std::string& step,
                                const std::function<void()>& act) {
  return in_processes(ranks, [&](const Place& place) {
    const Problem p = sized(1, 2, 2, 96, 96, 8, Causal::top_left).p;
    Assembly assembly(place, wait);
    const auto real = carrier(assembly);
    AtStep comm(
        *real, step, place.rank == who ? act : [] {});
    const auto engine = cpu_engine<float>();
    ForwardParts<float> x(p, ranks, place.rank, Order::zigzag);
    for (Part<float>* part : {&x.Q, &x.K, &x.V})
      std::fill(part->data.begin(), part->data.end(), 1.0f);
    for (int call = 0; call < 3; ++call) ring::forward(comm, *engine, p, x.tensors());
  });
}

}  // namespace fa::ring
