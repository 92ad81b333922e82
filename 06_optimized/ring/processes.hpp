// Ranks that are processes, on one host or on several: how they find each other, what they tell
// each other in words, and how all of them hear that one is gone. On GPUs tensors take another way
// (nccl.hpp); over_sockets() carries those in host memory, simply and slowly.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// Which of how many processes this is, which on its host, and where rank 0 listens.
struct Place {
  int rank = 0, size = 1, local = 0;
  std::string host = "127.0.0.1";
  int port = 29555;
};
// From the environment, as torchrun sets it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
// MASTER_PORT), or mpirun (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; MASTER_ADDR and MASTER_PORT by
// hand where the ranks are on several hosts). One rank if neither has. Throws
// std::invalid_argument, which names the variable.
Place place_of_this_process();

// A line from every rank to rank 0, and a thread that listens to it: a line that breaks, or on
// which not even a heartbeat has come for as long as `patience`, is a rank that is lost. Then all
// get to know, and whatever they do next with the assembly throws RankLost.
//
// A rank that lives but does not come is waited for until nobody has moved for that long. So
// `patience` must be longer than the longest step.
class Assembly {
 public:
  using Duration = std::chrono::milliseconds;

  // Returns when all have come. Throws RankLost, which names who is missing.
  Assembly(const Place& place, Duration patience);
  ~Assembly() { end(); }
  Assembly(const Assembly&) = delete;
  Assembly& operator=(const Assembly&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  Duration patience() const { return patience_; }

  // Says goodbye: this rank needs nothing more of the others.
  void end() noexcept;

  // Where this rank is now: what others say of it should it be lost.
  void at(const std::string& where);
  // As Communicator's.
  void tell_all(const std::string& where, const void* mine, void* all, std::size_t bytes);
  // The texts of all ranks, of any length.
  std::vector<std::string> tell_texts(const std::string& where, const std::string& mine);

  // It is over for all, because of this rank or for another reason.
  void leave(const std::string& why) noexcept;
  void lose(const std::string& why) noexcept;
  bool over() const { return is_lost_; }
  std::string why() const;  // and why
  void check();             // throws if it is over
  // Throws. If others may know more, they have a moment to say so first.
  [[noreturn]] void give_up(const std::string& why) { give_up(why, rank() > 0); }
  [[noreturn]] void give_up(const std::string& why, bool others_may_know);
  // This rank has waited for another for a while, so that it is not the one who keeps all waiting.
  void waits();
  // Who does, as far as this rank knows: rank 0 has seen all, the others say what they wait for.
  std::string late(int waited_for) const;

  // Called once when it is over, by the thread that listens. No call is under way any more when
  // this returns.
  void on_lost(std::function<void()> act);
  // The last time that any rank was seen to move, as far as this one knows.
  std::chrono::steady_clock::time_point last_move() const;
  // This host's address for the others.
  std::string address() const;

 private:
  enum class Kind : std::uint32_t { hello, at, waits, told, all, beat, lost, bye };
  using Clock = std::chrono::steady_clock;
  struct Line {  // rank 0 has one to each other rank, the others have one to rank 0
    int socket = -1;
    bool ended = false, said_bye = false, waits = false;
    std::string where = "its start";
    Clock::time_point heard = Clock::now(), moved = Clock::now();
    std::deque<std::vector<char>> told;  // and not read yet
  };

  void meet();
  void call();
  void listen();
  void beat();
  void read(int from);
  bool send(int to, Kind kind, const void* data, std::size_t bytes);
  void close_all() noexcept;
  void say_goodbye() noexcept;
  void act_once();
  void judge();
  std::string slowest(int of) const;  // under the lock
  bool wait_for(std::unique_lock<std::mutex>& lock, Duration patience,
                const std::function<bool()>& condition);

  const Place place_;
  const Duration patience_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mutex writing_;  // one frame at a time
  std::mutex losing_;   // what is lost is told before goodbye is said
  std::vector<Line> lines_;
  std::uint64_t moves_ = 0;  // of all ranks, as counted by rank 0
  Clock::time_point moved_ = Clock::now(), beaten_ = Clock::now();
  std::string lost_;
  std::atomic<bool> is_lost_ = false;
  bool done_ = false;
  std::mutex acting_;
  std::function<void()> act_;
  std::thread listener_;
};

// A communicator for host memory: each rank has a socket to every other. What begin() was given
// travels while the rank waits, not before.
std::unique_ptr<Communicator> over_sockets(Assembly& assembly);

}  // namespace fa::ring
