#include "06_optimized/ring/processes.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/core/check.hpp"

#ifndef MSG_NOSIGNAL  // macOS has it as an option of the socket
#define MSG_NOSIGNAL 0
#endif

namespace fa::ring {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What comes before every text: who speaks is one of us, and how much follows.
struct Head {
  std::uint32_t mark = 0x46415232, kind = 0, rank = 0, size = 0;
  std::uint64_t bytes = 0;
};
constexpr std::uint64_t longest = std::uint64_t(1) << 26;

std::string number(int rank) { return "rank " + std::to_string(rank); }
std::string text_of(milliseconds time) { return std::to_string(time.count()) + " ms"; }

// ---- sockets -----------------------------------------------------------------------------------

bool write_all(int socket, const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= std::size_t(n);
  }
  return true;
}
bool read_all(int socket, void* data, std::size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(socket, at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= std::size_t(n);
  }
  return true;
}
milliseconds until(Clock::time_point end) {
  return std::max(std::chrono::duration_cast<milliseconds>(end - Clock::now()), milliseconds(0));
}
// Is there something to read, or has the line ended, before this time?
bool readable(int socket, Clock::time_point end) {
  for (;;) {
    pollfd one{socket, POLLIN, 0};
    const int n = ::poll(&one, 1, int(until(end).count()));
    if (n >= 0 || errno != EINTR) return n > 0;
  }
}
// Small messages leave at once; and nobody is stopped by another in the middle of a frame.
void prepare(int socket, milliseconds patience) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
#ifdef SO_NOSIGPIPE
  ::setsockopt(socket, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
  timeval time{};
  time.tv_sec = patience.count() / 1000;
  time.tv_usec = patience.count() % 1000 * 1000 + 1;
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
  ::fcntl(socket, F_SETFD, FD_CLOEXEC);
}
// Port 0: any that is free. -1 if that cannot be, and errno says why.
int listen_at(int port, int callers) {
  const int door = ::socket(AF_INET, SOCK_STREAM, 0);
  if (door < 0) return -1;
  const int on = 1;
  ::setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  ::fcntl(door, F_SETFD, FD_CLOEXEC);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_ANY);
  here.sin_port = htons(std::uint16_t(port));
  if (::bind(door, reinterpret_cast<sockaddr*>(&here), sizeof here) == 0 &&
      ::listen(door, std::max(callers, 16)) == 0)
    return door;
  const int why = errno;
  ::close(door);
  errno = why;
  return -1;
}
// Tries until somebody answers. -1 if nobody does; `why` is what was wrong last.
int connect_to(const std::string& host, int port, Clock::time_point end, std::string& why) {
  addrinfo wanted{};
  wanted.ai_family = AF_INET;
  wanted.ai_socktype = SOCK_STREAM;
  do {
    addrinfo* found = nullptr;
    if (const int wrong =
            ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found)) {
      why = ::gai_strerror(wrong);
    } else {
      const int socket = ::socket(found->ai_family, found->ai_socktype, found->ai_protocol);
      if (socket >= 0) prepare(socket, std::max(until(end), milliseconds(1)));  // of connect(), too
      const bool there = socket >= 0 && ::connect(socket, found->ai_addr, found->ai_addrlen) == 0;
      // EINPROGRESS: the time for it was over.
      if (!there) why = std::strerror(errno == EINPROGRESS ? ETIMEDOUT : errno);
      ::freeaddrinfo(found);
      if (there) return socket;
      if (socket >= 0) ::close(socket);
    }
    std::this_thread::sleep_for(milliseconds(50));
  } while (Clock::now() < end);
  return -1;
}

// ---- the environment ---------------------------------------------------------------------------

const char* set_in(const char* variable) {
  const char* const value = std::getenv(variable);
  return value && *value ? value : nullptr;
}
int number_in(const char* variable, int least, int most) {
  const char* const text = std::getenv(variable);
  char* end = nullptr;
  const long value = text ? std::strtol(text, &end, 10) : 0;
  require(text && end != text && *end == 0 && value >= least && value <= most, "ring: ", variable,
          " must be a number from ", least, " to ", most, ", got '", text ? text : "", "'");
  return int(value);
}

}  // namespace

Place place_of_this_process() {
  Place place;
  const bool torchrun = set_in("RANK") || set_in("WORLD_SIZE");
  const bool mpirun = !torchrun && set_in("OMPI_COMM_WORLD_SIZE");
  if (torchrun || mpirun) {
    place.size = number_in(torchrun ? "WORLD_SIZE" : "OMPI_COMM_WORLD_SIZE", 1, 1 << 16);
    place.rank = number_in(torchrun ? "RANK" : "OMPI_COMM_WORLD_RANK", 0, place.size - 1);
    const char* const local = torchrun ? "LOCAL_RANK" : "OMPI_COMM_WORLD_LOCAL_RANK";
    place.local = set_in(local) ? number_in(local, 0, 1 << 16) : place.rank;
  }
  if (const char* host = set_in("MASTER_ADDR")) place.host = host;
  if (set_in("MASTER_PORT")) place.port = number_in("MASTER_PORT", 1, 65535);
  // torchrun itself listens at MASTER_PORT, and says so.
  const char* const taken = set_in("TORCHELASTIC_USE_AGENT_STORE");
  if (taken && std::strcmp(taken, "True") == 0) place.port = place.port % 65535 + 1;
  if (set_in("FA_RING_PORT")) place.port = number_in("FA_RING_PORT", 1, 65535);
  return place;
}

// ---- the assembly ------------------------------------------------------------------------------

Assembly::Assembly(const Place& place, Duration patience)
    : place_(place), patience_(patience), lines_(std::size_t(std::max(place.size, 1))) {
  require(place.size >= 1 && place.rank >= 0 && place.rank < place.size,
          "ring: rank must lie in [0, ", place.size, "), got ", place.rank);
  try {
    if (size() > 1) rank() == 0 ? meet() : call();
  } catch (...) {
    close_all();
    throw;
  }
  for (Line& line : lines_) line.heard = line.moved = Clock::now();
  moved_ = Clock::now();
  if (size() > 1) listener_ = std::thread([this] { listen(); });
}

void Assembly::end() noexcept {
  {
    const std::lock_guard lock(losing_);
    say_goodbye();
  }
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  if (listener_.joinable()) listener_.join();
  close_all();
}

// A socket that is closed while something in it was not read may take with it what was sent last.
// So the lines stay open until the others have said goodbye too, for a moment.
void Assembly::say_goodbye() noexcept {
  for (int r = 0; r < size(); ++r)
    if (lines_[std::size_t(r)].socket >= 0) {
      send(r, Kind::bye, nullptr, 0);
      ::shutdown(lines_[std::size_t(r)].socket, SHUT_WR);
    }
  std::unique_lock lock(mutex_);
  if (listener_.joinable())
    changed_.wait_for(lock, milliseconds(300), [&] {
      return std::all_of(lines_.begin(), lines_.end(),
                         [](const Line& line) { return line.socket < 0 || line.ended; });
    });
}

void Assembly::close_all() noexcept {
  for (Line& line : lines_) {
    if (line.socket >= 0) ::close(line.socket);
    line.socket = -1;
  }
}

// Rank 0: until everybody has called.
void Assembly::meet() {
  const auto end = Clock::now() + patience_;
  const int door = listen_at(place_.port, size());
  if (door < 0)
    throw RankLost("ring: rank 0 cannot listen at port " + std::to_string(place_.port) + " (" +
                   std::strerror(errno) + "); set MASTER_PORT to a free one");
  int missing = size() - 1;
  std::string wrong;
  while (missing > 0 && wrong.empty() && readable(door, end)) {
    const int socket = ::accept(door, nullptr, nullptr);
    if (socket < 0) continue;
    prepare(socket, patience_);
    Head head;
    // Who connects and says nothing, or something else, is a stranger.
    const bool one_of_us = readable(socket, std::min(end, Clock::now() + milliseconds(500))) &&
                           read_all(socket, &head, sizeof head) && head.mark == Head().mark;
    if (!one_of_us) {
      ::close(socket);
      continue;
    }
    if (int(head.size) != size())
      wrong = number(int(head.rank)) + " was started as one of " + std::to_string(head.size) +
              " ranks, rank 0 as one of " + std::to_string(size());
    else if (head.rank == 0 || int(head.rank) >= size() || lines_[head.rank].socket >= 0)
      wrong = "two processes say that they are " + number(int(head.rank));
    if (!wrong.empty()) {
      Head answer;
      answer.kind = unsigned(Kind::lost), answer.bytes = wrong.size();
      write_all(socket, &answer, sizeof answer) && write_all(socket, wrong.data(), wrong.size());
      ::close(socket);
      break;
    }
    lines_[head.rank].socket = socket;
    --missing;
  }
  ::close(door);
  if (missing == 0) return;
  if (wrong.empty()) {
    for (int r = 1; r < size(); ++r)
      if (lines_[std::size_t(r)].socket < 0)
        wrong += (wrong.empty() ? "rank " : ", ") + std::to_string(r);
    wrong += " did not come within " + text_of(patience_) + "; it was never seen";
  }
  for (int r = 1; r < size(); ++r) send(r, Kind::lost, wrong.data(), wrong.size());
  throw RankLost("ring: rank 0 gave up at 'its start': " + wrong);
}

void Assembly::call() {
  const auto end = Clock::now() + patience_;
  std::string why;
  const int socket = connect_to(place_.host, place_.port, end, why);
  if (socket < 0)
    throw RankLost("ring: " + number(rank()) +
                   " gave up at 'its start': rank 0 did not answer at " + place_.host + ":" +
                   std::to_string(place_.port) + " within " + text_of(patience_) + " (" + why +
                   ")");
  prepare(socket, patience_);
  lines_[0].socket = socket;
  send(0, Kind::hello, nullptr, 0);
}

bool Assembly::send(int to, Kind kind, const void* data, std::size_t bytes) {
  const int socket = lines_[std::size_t(to)].socket;
  if (socket < 0) return false;
  const std::lock_guard lock(writing_);
  Head head;
  head.kind = unsigned(kind), head.rank = unsigned(rank()), head.size = unsigned(size());
  head.bytes = bytes;
  return write_all(socket, &head, sizeof head) && write_all(socket, data, bytes);
}

void Assembly::listen() {
  for (;;) {
    std::vector<pollfd> sockets;
    std::vector<int> whose;
    std::string gone;
    {
      const std::lock_guard lock(mutex_);
      if (done_) return;
      for (int r = 0; r < size(); ++r) {
        const Line& line = lines_[std::size_t(r)];
        if (line.socket < 0 || line.ended) continue;
        sockets.push_back({line.socket, POLLIN, 0});
        whose.push_back(r);
        if (Clock::now() - line.heard > patience_)
          gone = number(r) + " has not been heard of for " + text_of(patience_) +
                 "; it was last seen at '" + line.where + "'";
      }
    }
    if (!gone.empty()) lose(gone);
    judge();
    beat();
    // A short wait: nobody wakes this thread when it is over.
    if (::poll(sockets.data(), nfds_t(sockets.size()), 20) > 0)
      for (std::size_t k = 0; k < sockets.size(); ++k)
        if (sockets[k].revents) read(whose[k]);
    act_once();
  }
}

// Rank 0 hears from all, so that its thread says who is late, wherever rank 0 itself is.
void Assembly::judge() {
  if (rank() > 0) return;
  std::string late;
  {
    const std::lock_guard lock(mutex_);
    const bool waited_for = std::any_of(lines_.begin(), lines_.end(),
                                        [](const Line& line) { return line.waits && !line.ended; });
    if (!waited_for || Clock::now() - moved_ <= patience_) return;
    late = slowest(0);
  }
  lose(late);
}

// Says that this process lives; rank 0 says too how often any rank has moved.
void Assembly::beat() {
  const auto now = Clock::now();
  if (now - beaten_ < std::min<Duration>(patience_ / 5, milliseconds(1000))) return;
  beaten_ = now;
  std::uint64_t moves = 0;
  std::vector<int> others;
  {
    const std::lock_guard lock(mutex_);
    moves = moves_;
    for (int r = 0; r < size(); ++r)
      if (lines_[std::size_t(r)].socket >= 0 && !lines_[std::size_t(r)].ended) others.push_back(r);
  }
  for (const int r : others) send(r, Kind::beat, &moves, sizeof moves);
}

// One frame, or the end of the line.
void Assembly::read(int from) {
  Line& line = lines_[std::size_t(from)];
  Head head;
  std::vector<char> data;
  bool came = read_all(line.socket, &head, sizeof head) && head.mark == Head().mark &&
              head.bytes <= longest;
  if (came) {
    data.resize(head.bytes);
    came = read_all(line.socket, data.data(), data.size());
  }
  std::string over;
  {
    const std::lock_guard lock(mutex_);
    line.heard = Clock::now();
    const auto moves = [&] {
      line.moved = moved_ = line.heard;
      line.waits = false;
      ++moves_;
    };
    if (!came) {
      line.ended = true;
      over = number(from) + " ended without a word; it was last seen at '" + line.where + "'";
    } else if (head.kind == unsigned(Kind::at)) {
      line.where.assign(data.begin(), data.end());
      moves();
    } else if (head.kind == unsigned(Kind::waits)) {
      line.waits = true;
    } else if (head.kind == unsigned(Kind::told) || head.kind == unsigned(Kind::all)) {
      line.told.push_back(std::move(data));
      moves();
    } else if (head.kind == unsigned(Kind::beat) && data.size() == sizeof moves_ && rank() > 0) {
      std::uint64_t seen = 0;
      std::memcpy(&seen, data.data(), sizeof seen);
      if (seen != moves_) moved_ = line.heard;
      moves_ = seen;
    } else if (head.kind == unsigned(Kind::lost)) {
      over.assign(data.begin(), data.end());
    } else if (head.kind == unsigned(Kind::bye)) {
      line.ended = line.said_bye = true;
    }
    changed_.notify_all();
  }
  if (!over.empty()) lose(over);
}

void Assembly::at(const std::string& where) {
  {
    const std::lock_guard lock(mutex_);
    Line& own = lines_[std::size_t(rank())];
    own.where = where;
    own.waits = false;
    own.moved = moved_ = Clock::now();
    if (rank() == 0) ++moves_;
  }
  if (rank() > 0) send(0, Kind::at, where.data(), where.size());
}

void Assembly::waits() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(lines_[std::size_t(rank())].waits, true)) return;
  }
  if (rank() > 0) send(0, Kind::waits, nullptr, 0);
}

std::chrono::steady_clock::time_point Assembly::last_move() const {
  const std::lock_guard lock(mutex_);
  return moved_;
}

// As long as somebody moves, nobody is given up.
bool Assembly::wait_for(std::unique_lock<std::mutex>& lock, Duration patience,
                        const std::function<bool()>& condition) {
  const auto begun = Clock::now();
  while (!condition() && !is_lost_) {
    if (Clock::now() - moved_ > patience) return false;
    changed_.wait_for(lock, milliseconds(20));
    if (Clock::now() - begun > patience_ / 4) {
      lock.unlock();
      waits();
      lock.lock();
    }
  }
  return condition();
}

void Assembly::tell_all(const std::string& where, const void* mine, void* all, std::size_t bytes) {
  at(where);
  char* const out = static_cast<char*>(all);
  if (size() == 1) {
    if (bytes) std::memcpy(out, mine, bytes);
    return;
  }
  if (rank() > 0) {
    send(0, Kind::told, mine, bytes);
    std::unique_lock lock(mutex_);
    std::deque<std::vector<char>>& answers = lines_[0].told;
    // Rank 0 loses patience first: it knows who is missing.
    const bool came = wait_for(lock, patience_ + patience_ / 4,
                               [&] { return !answers.empty() || lines_[0].said_bye; });
    if (came && !answers.empty() && answers.front().size() == bytes * std::size_t(size())) {
      if (bytes) std::memcpy(out, answers.front().data(), answers.front().size());
      answers.pop_front();
      return;
    }
    const bool odd = !answers.empty();
    lock.unlock();
    give_up(odd ? "rank 0 is at another place of the program"
                : "rank 0 did not answer within " + text_of(patience_));
  }
  std::unique_lock lock(mutex_);
  const auto told = [&](int r) { return r == 0 || !lines_[std::size_t(r)].told.empty(); };
  const auto first_missing = [&] {
    int r = 0;
    while (r < size() && told(r)) ++r;
    return r;
  };
  const auto one_left = [&] {
    return std::any_of(lines_.begin() + 1, lines_.end(),
                       [](const Line& line) { return line.said_bye && line.told.empty(); });
  };
  const bool came =
      wait_for(lock, patience_, [&] { return first_missing() == size() || one_left(); });
  if (const int late = first_missing(); late < size()) {
    const std::string last = lines_[std::size_t(late)].where;
    const std::string slow = slowest(late);
    lock.unlock();
    give_up(came ? number(late) + " came to its end at '" + last + "' while others had not" : slow);
  }
  for (int r = 0; r < size(); ++r) {
    const char* from = static_cast<const char*>(mine);
    std::deque<std::vector<char>>& words = lines_[std::size_t(r)].told;
    if (r > 0 && words.front().size() != bytes) {
      lock.unlock();
      give_up(number(r) + " is at another place of the program than rank 0");
    }
    if (r > 0) from = words.front().data();
    if (bytes) std::memcpy(out + std::size_t(r) * bytes, from, bytes);
    if (r > 0) words.pop_front();
  }
  lock.unlock();
  for (int r = 1; r < size(); ++r) send(r, Kind::all, all, bytes * std::size_t(size()));
}

std::vector<std::string> Assembly::tell_texts(const std::string& where, const std::string& mine) {
  const std::uint64_t own = mine.size();
  std::vector<std::uint64_t> lengths(std::size_t(size()), 0);
  tell_all(where, &own, lengths.data(), sizeof own);
  const std::size_t room = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = mine, all(room * lengths.size(), ' ');
  padded.resize(room, ' ');
  tell_all(where, padded.data(), all.data(), room);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < lengths.size(); ++r)
    texts.push_back(all.substr(r * room, lengths[r]));
  return texts;
}

// Of those that wait for nobody, who has not moved for the longest time keeps the others waiting.
// Rank 0 alone has seen all.
std::string Assembly::slowest(int of) const {
  int late = of;
  const auto order = [&](int r) {
    const Line& line = lines_[std::size_t(r)];
    return std::pair(line.waits, line.moved);
  };
  for (int r = 0; r < size() && rank() == 0; ++r)
    if (order(r) < order(late)) late = r;
  const std::string text = number(late) + " did not come within " + text_of(patience_);
  return rank() > 0 ? text
                    : text + "; it was last seen at '" + lines_[std::size_t(late)].where + "'";
}

void Assembly::lose(const std::string& why) noexcept {
  const std::lock_guard first(losing_);
  {
    const std::lock_guard lock(mutex_);
    if (is_lost_) return;
    lost_ = why;
    is_lost_ = true;
    changed_.notify_all();
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank()) send(r, Kind::lost, why.data(), why.size());
}

void Assembly::leave(const std::string& why) noexcept {
  std::string where;
  {
    const std::lock_guard lock(mutex_);
    where = lines_[std::size_t(rank())].where;
  }
  lose(number(rank()) + " ended at '" + where + "': " + why);
}

void Assembly::check() {
  if (is_lost_) give_up("");
}

std::string Assembly::late(int waited_for) const {
  const std::lock_guard lock(mutex_);
  return slowest(waited_for);
}

void Assembly::give_up(const std::string& why, bool others_may_know) {
  // A line that breaks is seen by those at both its ends: what is said of it first may still be on
  // its way, and says more.
  {
    std::unique_lock lock(mutex_);
    if (!is_lost_ && others_may_know)
      changed_.wait_for(lock, std::min<Duration>(patience_ / 2, milliseconds(1000)),
                        [&] { return is_lost_.load(); });
  }
  if (!why.empty()) lose(why);
  const std::lock_guard lock(mutex_);
  throw RankLost("ring: " + number(rank()) + " gave up at '" + lines_[std::size_t(rank())].where +
                 "': " + lost_);
}

void Assembly::on_lost(std::function<void()> act) {
  const std::lock_guard lock(acting_);
  act_ = std::move(act);
}

void Assembly::act_once() {
  if (!is_lost_) return;
  const std::lock_guard lock(acting_);
  if (act_) std::exchange(act_, nullptr)();
}

std::string Assembly::why() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

std::string Assembly::address() const {
  if (rank() == 0) return place_.host;
  sockaddr_in here{};
  socklen_t room = sizeof here;
  char text[INET_ADDRSTRLEN] = "127.0.0.1";
  if (::getsockname(lines_[0].socket, reinterpret_cast<sockaddr*>(&here), &room) == 0)
    ::inet_ntop(AF_INET, &here.sin_addr, text, sizeof text);
  return text;
}

// ---- host memory -------------------------------------------------------------------------------

namespace {

class Sockets : public Communicator {
 public:
  explicit Sockets(Assembly& assembly)
      : assembly_(assembly), sockets_(std::size_t(assembly.size()), -1) {
    try {
      connect();
    } catch (...) {
      close_all();
      throw;
    }
  }
  ~Sockets() override { close_all(); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  int rank() const override { return assembly_.rank(); }
  int size() const override { return assembly_.size(); }

  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    assembly_.at(at);
    assembly_.check();
    sent_ = sent, received_ = received;
    for (const Message& message : sent) bytes_sent += std::int64_t(message.bytes);
  }

  // All sends and receives at once, each socket in the order of its messages: were one to be done
  // after the other, two ranks that both send first could wait for each other for ever.
  void wait() override {
    last_ = Clock::now();
    for (;;) {
      bool left = false;
      std::vector<pollfd> polled;
      for (int r = 0; r < size(); ++r) {
        const short events =
            short((next(sent_, r) ? POLLOUT : 0) | (next(received_, r) ? POLLIN : 0));
        left = left || events;
        if (events) polled.push_back({sockets_[std::size_t(r)], events, 0});
      }
      if (!left) break;
      ::poll(polled.data(), nfds_t(polled.size()), 20);
      assembly_.check();
      bool moved = false;
      for (int r = 0; r < size(); ++r) {
        if (Message* message = next(sent_, r)) moved |= send_some(r, *message);
        if (Message* message = next(received_, r)) moved |= receive_some(r, *message);
      }
      if (moved) last_ = Clock::now();
      if (Clock::now() - last_ > assembly_.patience() / 4) assembly_.waits();
      const auto still = Clock::now() - std::max(last_, assembly_.last_move());
      // Rank 0 has seen all others and says who is late; the others leave it the time to do so.
      if (still > assembly_.patience() + (rank() ? assembly_.patience() / 4 : milliseconds(0)))
        assembly_.give_up(assembly_.late(late()));
    }
    sent_.clear(), received_.clear();
  }

  void tell_all(const std::string& at, const void* mine, void* all, std::size_t bytes) override {
    assembly_.tell_all(at, mine, all, bytes);
  }
  void leave(const std::string& why) noexcept override { assembly_.leave(why); }

 private:
  struct Where {
    char host[64];
    int port;
  };

  void connect() {
    const auto end = Clock::now() + assembly_.patience();
    const int door = size() > 1 ? listen_at(0, size()) : -1;
    Where own{};
    sockaddr_in here{};
    socklen_t room = sizeof here;
    if (door >= 0 && ::getsockname(door, reinterpret_cast<sockaddr*>(&here), &room) == 0)
      own.port = ntohs(here.sin_port);
    std::strncpy(own.host, assembly_.address().c_str(), sizeof own.host - 1);
    std::vector<Where> all(std::size_t(size()), Where{});
    assembly_.tell_all("where each rank listens", &own, all.data(), sizeof own);
    std::string why;
    for (int r = 0; r < rank(); ++r) {
      const int socket = connect_to(all[std::size_t(r)].host, all[std::size_t(r)].port, end, why);
      sockets_[std::size_t(r)] = socket;
      const int me = rank();
      if (socket < 0 || !write_all(socket, &me, sizeof me))
        assembly_.give_up(number(r) + " did not answer at its own port (" + why + ")");
    }
    for (int left = size() - 1 - rank(); left > 0; --left) {
      int who = -1, socket = -1;
      if (readable(door, end)) socket = ::accept(door, nullptr, nullptr);
      if (socket >= 0) prepare(socket, assembly_.patience());
      if (socket < 0 || !read_all(socket, &who, sizeof who) || who <= rank() || who >= size())
        assembly_.give_up("a rank after this one did not call");
      sockets_[std::size_t(who)] = socket;
    }
    if (door >= 0) ::close(door);
    for (const int socket : sockets_)
      if (socket >= 0) {
        prepare(socket, assembly_.patience());
        ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
      }
  }
  void close_all() noexcept {
    for (const int socket : sockets_)
      if (socket >= 0) ::close(socket);
  }

  // The first message to or from this rank that is not done.
  static Message* next(std::vector<Message>& messages, int rank) {
    for (Message& message : messages)
      if (message.peer == rank && message.bytes > 0) return &message;
    return nullptr;
  }
  int late() {
    for (int r = 0; r < size(); ++r)
      if (next(received_, r)) return r;
    for (int r = 0; r < size(); ++r)
      if (next(sent_, r)) return r;
    return rank();
  }
  bool send_some(int r, Message& message) {
    return some(r, message,
                ::send(sockets_[std::size_t(r)], message.data, message.bytes, MSG_NOSIGNAL));
  }
  bool receive_some(int r, Message& message) {
    return some(r, message, ::recv(sockets_[std::size_t(r)], message.data, message.bytes, 0));
  }
  bool some(int r, Message& message, ssize_t n) {
    if (n > 0) {
      message.data = static_cast<char*>(message.data) + n;
      message.bytes -= std::size_t(n);
      return true;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
    assembly_.give_up(number(r) + " ended without a word", true);
  }

  Assembly& assembly_;
  std::vector<int> sockets_;
  std::vector<Message> sent_, received_;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

std::unique_ptr<Communicator> over_sockets(Assembly& assembly) {
  return std::make_unique<Sockets>(assembly);
}

}  // namespace fa::ring
