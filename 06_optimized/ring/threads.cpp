// A message is a note in the receiver's box that says where the sender's bytes are. The receiver
// takes them when it waits; until then they stay where they are, as with a copy that is under way.
#include "06_optimized/ring/threads.hpp"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace fa::ring {
namespace {

// What all ranks share; everything is read and written under the lock.
struct Meeting {
  struct Note {
    const void* data;
    std::size_t bytes;
    std::shared_ptr<std::vector<char>> kept;  // the bytes, if the sender does not wait for them
  };
  using Box = std::deque<Note>;

  Meeting(int ranks, std::chrono::milliseconds patience_)
      : patience(patience_),
        boxes(std::size_t(ranks), std::vector<Box>(std::size_t(ranks))),
        at(std::size_t(ranks), "its first call"),
        waits_for(std::size_t(ranks), -1) {}

  const std::chrono::milliseconds patience;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<Box>> boxes;  // [from][to]
  std::vector<std::string> at;          // where each rank is, or was last
  std::vector<int> waits_for;           // another rank; or -1
  std::string lost;                     // what ended it all, once something has

  // Who keeps this rank waiting: the one that is waited for may itself wait.
  int behind(int rank) const {
    std::size_t steps = 0;
    while (waits_for[std::size_t(rank)] >= 0 && steps++ < at.size())
      rank = waits_for[std::size_t(rank)];
    return rank;
  }
};

class Thread : public Communicator {
 public:
  Thread(Meeting& meeting, int rank, const Copy& copy)
      : meeting_(meeting), rank_(rank), copy_(copy) {}

  int rank() const override { return rank_; }
  int size() const override { return int(meeting_.at.size()); }

  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    const std::lock_guard lock(meeting_.mutex);
    meeting_.at[std::size_t(rank_)] = at;
    received_ = received;
    for (const Message& message : sent) {
      box(rank_, message.peer).push_back({message.data, message.bytes, nullptr});
      bytes_sent += std::int64_t(message.bytes);
    }
    sent_ = sent;
    meeting_.changed.notify_all();
  }

  void wait() override {
    std::unique_lock lock(meeting_.mutex);
    for (const Message& message : received_) take(lock, message);
    for (const Message& message : sent_)
      until(lock, message.peer, [&] { return box(rank_, message.peer).empty(); });
    received_.clear(), sent_.clear();
  }

  // Who is done may leave at once, with an exception perhaps: what it told stays in the boxes, so
  // that all come to the same end.
  void tell_all(const std::string& at, const void* mine, void* all, std::size_t bytes) override {
    std::unique_lock lock(meeting_.mutex);
    meeting_.at[std::size_t(rank_)] = at;
    const char* const first = static_cast<const char*>(mine);
    const auto kept = std::make_shared<std::vector<char>>(first, first + bytes);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) box(rank_, r).push_back({kept->data(), bytes, kept});
    meeting_.changed.notify_all();
    for (int r = 0; r < size(); ++r) {
      char* const place = static_cast<char*>(all) + std::size_t(r) * bytes;
      if (r == rank_) std::memcpy(place, mine, bytes);
      if (r != rank_) take(lock, {r, place, bytes});
    }
  }

  void leave(const std::string& why) noexcept override {
    const std::lock_guard lock(meeting_.mutex);
    end("rank " + std::to_string(rank_) + " ended at '" + here() + "': " + why);
  }

 private:
  Meeting::Box& box(int from, int to) { return meeting_.boxes[std::size_t(from)][std::size_t(to)]; }
  const std::string& here() const { return meeting_.at[std::size_t(rank_)]; }

  void take(std::unique_lock<std::mutex>& lock, const Message& message) {
    Meeting::Box& from = box(message.peer, rank_);
    until(lock, message.peer, [&] { return !from.empty(); });
    const Meeting::Note note = from.front();
    if (note.bytes != message.bytes)
      fail("rank " + std::to_string(message.peer) + " sent " + std::to_string(note.bytes) +
           " bytes where " + std::to_string(message.bytes) + " were expected");
    if (note.bytes && copy_ && !note.kept)
      copy_(message.data, note.data, note.bytes);
    else if (note.bytes)
      std::memcpy(message.data, note.data, note.bytes);
    from.pop_front();
    meeting_.changed.notify_all();
  }

  template <class Condition>
  void until(std::unique_lock<std::mutex>& lock, int peer, const Condition& condition) {
    int& waits_for = meeting_.waits_for[std::size_t(rank_)];
    waits_for = peer;
    const bool came = meeting_.changed.wait_for(
        lock, meeting_.patience, [&] { return condition() || !meeting_.lost.empty(); });
    if (!came) {
      const int late = meeting_.behind(peer);
      fail("rank " + std::to_string(late) + " did not come within " +
           std::to_string(meeting_.patience.count()) + " ms; it was last seen at '" +
           meeting_.at[std::size_t(late)] + "'");
    }
    waits_for = -1;
    if (!condition()) fail(std::string(meeting_.lost));
  }

  void end(const std::string& why) {
    // Nobody may read from memory that this rank is about to give back.
    for (Meeting::Box& to : meeting_.boxes[std::size_t(rank_)])
      std::erase_if(to, [](const Meeting::Note& note) { return !note.kept; });
    if (meeting_.lost.empty()) meeting_.lost = why;
    meeting_.changed.notify_all();
  }
  [[noreturn]] void fail(const std::string& why) {
    end(why);
    throw RankLost("ring: rank " + std::to_string(rank_) + " gave up at '" + here() + "': " + why);
  }

  Meeting& meeting_;
  const int rank_;
  const Copy& copy_;
  std::vector<Message> sent_, received_;
};

}  // namespace

std::vector<std::string> on_threads(int ranks, std::chrono::milliseconds patience,
                                    const std::function<void(Communicator&)>& f, const Copy& copy) {
  Meeting meeting(ranks, patience);
  std::vector<std::string> ends(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  threads.reserve(ends.size());
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Thread comm(meeting, rank, copy);
      try {
        f(comm);
      } catch (const std::exception& error) {
        ends[std::size_t(rank)] = error.what();
        comm.leave(error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return ends;
}

}  // namespace fa::ring
