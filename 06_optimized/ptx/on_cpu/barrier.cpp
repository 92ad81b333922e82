// What the instructions of ptx/barrier.cuh do.
#include "06_optimized/ptx/on_cpu/barrier.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "06_optimized/ptx/on_cpu/phases.hpp"

namespace fa::optimized {
using namespace fa::emulator;

namespace {
// Whoever links these instructions has a small Hopper GPU.
const Device before = std::exchange(device, {227 * 1024, 90, 2});

std::string number(long n) { return std::to_string(n); }
std::string of_thread_here() { return "thread " + number(thread()); }
}  // namespace

// Within the block: a descriptor has no bits for more.
std::uint32_t shared_address(const void* p) {
  return shared_offset(p, "an instruction", FA_HERE) - shared_begin_of(rank());
}

// ---- barriers in shared memory: "mbarrier" in PTX ----

// The 64 bits in shared memory are not looked at: what they would hold stands beside them.
Phases& phases_of(const Barrier* b, Place at) {
  Phases& p = of_block<AllPhases>()[shared_offset(b, "a barrier", at)];
  if (p.count == 0)
    finding("the barrier at " + text_of(at) + " was never initialised (PTX, mbarrier.init)");
  if (!p.fenced && p.initialised_by != thread())
    finding("the barrier at " + text_of(at) + " is used before the thread that initialised it at " +
            text_of(p.initialised_at) + " has called fence_barriers() (PTX, fence.mbarrier_init)");
  if (!knows_end_of(p.initialised))
    finding(of_thread_here() + " uses a barrier at " + text_of(at) + ", and nothing orders that " +
            "behind its initialisation at " + text_of(p.initialised_at) + " (PTX, mbarrier.init)");
  return p;
}

namespace {
std::string not_waited_for(unsigned rank, unsigned who, Place at) {
  return "the block of rank " + number(rank) +
         " ends, and none of its threads has waited for the " + "arrival of thread " + number(who) +
         " at " + text_of(at) + " (PTX, shared memory of a cluster)";
}
// What is to be said of barriers when their block has ended.
struct End : Pending {
  AllPhases* all = &of_block<AllPhases>();
  bool wanted() const override { return false; }
  bool possible() const override { return false; }
  int kind() const override { return 0; }
  void happen() override {}
  std::string at_the_end() const override {
    for (const auto& [at, p] : *all) {
      if (p.bytes < 0)
        return "the block ends, and in phase " + number(p.ended) +
               " of the barrier initialised at " + text_of(p.initialised_at) + " " +
               number(-p.bytes) +
               " bytes have come that nobody announced (PTX, mbarrier.expect_tx)";
      if (p.missing < p.count && p.missing > 0)
        return "the block ends in the middle of phase " + number(p.ended) +
               " of the barrier initialised at " + text_of(p.initialised_at) + ": " +
               number(p.missing) + " of " + number(p.count) +
               " arrivals are missing (PTX, mbarrier)";
      const unsigned first = p.initialised_by / threads_of_block() * threads_of_block();
      for (const auto& [who, arrival] : p.from_afar) {
        bool known = false;
        for (unsigned t = first; t < first + threads_of_block(); ++t)
          known |= knows_end_of(arrival.deed, t);
        if (!known) return not_waited_for(first / threads_of_block(), who, arrival.place);
      }
    }
    return {};
  }
};
}  // namespace
void init(Barrier* b, int count) {
  const unsigned at = shared_offset(b, "a barrier", FA_HERE);
  if (at % 8)
    finding("the barrier at " + text_of(FA_HERE) + " is not aligned to 8 bytes (PTX, mbarrier)");
  if (count < 1 || count >= 1 << 20)
    finding("the barrier at " + text_of(FA_HERE) + " is to count " + number(count) +
            " arrivals, 1 to 2^20 - 1 are possible (PTX, mbarrier)");
  Phases p;
  p.count = p.missing = count;
  p.initialised_by = thread();
  p.initialised_at = FA_HERE;
  p.initialised = a_step();
  if (of_block<AllPhases>().empty()) ask(std::make_unique<End>());
  of_block<AllPhases>()[at] = p;
}
void fence_barriers() {
  for (auto& [at, p] : of_block<AllPhases>())
    if (p.initialised_by == thread()) p.fenced = true;
}

// The phase ends when nobody and no byte is missing; then the next one begins.
// [quote look]
void Phases::look() {
  if (missing > 0 || bytes != 0) return;
  ++ended;
  missing = count;
}
// [end quote]
namespace {
void arrives(Barrier* b, int bytes, Place at) {
  Phases& p = phases_of(b, at);
  if (p.missing == 0)
    finding(
        of_thread_here() + " arrives at " + text_of(at) +
        ", but all arrivals of this phase have come, and only bytes are missing (PTX, mbarrier: "
        "one arrival too many)");
  if (bytes < 0 || bytes >= 1 << 20)
    finding("at " + text_of(at) + " a barrier is to expect " + number(bytes) +
            " bytes, less than 2^20 are possible (PTX, mbarrier.expect_tx)");
  release(p.order_of(p.ended));
  p.bytes += bytes;
  --p.missing;
  p.look();
  maybe_others_first();
}
}  // namespace

void arrive(Barrier* b) { arrives(b, 0, FA_HERE); }
void arrive_expecting(Barrier* b, int bytes) { arrives(b, bytes, FA_HERE); }

// ---- clusters ----

unsigned rank_in_cluster() { return rank(); }
namespace {
void* in_block(void* p, unsigned r, Place at) {
  if (r >= blocks_of_cluster())
    finding("at " + text_of(at) + " a thread names the block of rank " + number(r) +
            " of a cluster of " + number(blocks_of_cluster()) + " (PTX, mapa)");
  return static_cast<char*>(p) + shared_begin_of(r) - shared_begin_of(rank());
}
}  // namespace
void* in_block(void* p, unsigned r) { return in_block(p, r, FA_HERE); }
void arrive_at(Barrier* b, unsigned r) {
  const auto there = static_cast<Barrier*>(in_block(b, r, FA_HERE));
  if (has_ended(r)) finding(not_waited_for(r, thread(), FA_HERE));
  if (r != rank()) phases_of(there, FA_HERE).from_afar[thread()] = {a_step(), FA_HERE};
  arrives(there, 0, FA_HERE);
}
namespace {
struct OfCluster {
  unsigned arrived = 0, rounds = 0;
  char orders[2] = {};
};
}  // namespace
// A thread that has returned keeps nobody waiting.
void sync_cluster() {
  meet();
  OfCluster& c = of_block<OfCluster>();
  const unsigned round = c.rounds;
  release(&c.orders[round & 1]);
  ++c.arrived;
  const auto all_there = [&] {
    const auto& fibers = all_threads();
    return c.arrived +
               std::size_t(std::count_if(fibers.begin(), fibers.end(),
                                         [](const Fiber& f) { return f.state == State::done; })) >=
           fibers.size();
  };
  wait_until(
      [&] {
        if (c.rounds == round && all_there()) {
          c.arrived = 0;
          ++c.rounds;
        }
        return c.rounds != round;
      },
      [&] { return "in sync_cluster(), " + number(c.arrived) + " threads are there"; }, FA_HERE);
  acquire(&c.orders[round & 1]);
}

// try_wait.parity, again and again: true while the phase under way has another parity. So who looks
// two phases late waits for the wrong one. Which one is meant? The one behind the last that this
// thread has waited for; but whoever knows, from others, that the phase before this one has ended
// may mean this one.
void wait(Barrier* b, std::uint32_t phase) {
  Phases& p = phases_of(b, FA_HERE);
  long& passed = p.passed.try_emplace(thread(), -1).first->second;
  const long meant = passed + ((passed & 1) == long(phase & 1) ? 0 : 1);
  const bool told = p.ended > 0 && knows_order(p.order_of(p.ended - 1));
  const Place at = FA_HERE;
  const std::string me = of_thread_here();
  const auto late = [&] { return meant <= p.ended - 2 && (p.ended & 1) == long(phase & 1); };
  const auto of_another_phase = [&] {
    return "for phase " + number(meant) + " of a barrier whose phase " + number(p.ended) +
           " is under way: it looks two phases late, and by its parity waits for another one (PTX, "
           "mbarrier.try_wait)";
  };
  ++p.waiters;
  wait_until(
      [&] {
        if (hooked && late() && !told)
          finding(me + " waits at " + text_of(at) + " " + of_another_phase());
        return (p.ended & 1) != long(phase & 1);
      },
      [&] {
        if (late()) return of_another_phase();
        return "for the end of a phase of parity " + number(phase) + " of the barrier at byte " +
               number(shared_address(b)) + " (phase " + number(p.ended) + " is under way, " +
               number(p.missing) + " of " + number(p.count) + " arrivals and " + number(p.bytes) +
               " bytes missing)";
      },
      at);
  --p.waiters;
  passed = p.ended - 1;
  acquire(p.order_of(passed));
}

// ---- numbered barriers: "bar.sync" and "bar.arrive" ----

namespace {
struct Numbered {
  int arrived = 0, wanted = 0;
  unsigned rounds = 0;
  Place first = nullptr;
  char orders[2] = {};  // of rounds, by their parity
};
using AllNumbered = std::map<unsigned, std::array<Numbered, 16>>;  // by rank

Numbered& arrives(int number_, int threads, Place at) {
  if (number_ < 0 || number_ > 15 || threads < 32 || threads % 32)
    finding("at " + text_of(at) + ": barrier " + number(number_) + " of " + number(threads) +
            " threads; there are barriers 0 to 15, of a multiple of 32 threads (PTX, bar)");
  Numbered& n = of_block<AllNumbered>()[rank()][std::size_t(number_)];
  if (n.arrived == 0) {
    n.wanted = threads;
    n.first = at;
  }
  if (n.wanted != threads)
    finding("barrier " + number(number_) + " has " + number(threads) + " threads at " +
            text_of(at) + " and " + number(n.wanted) + " at " + text_of(n.first) + " (PTX, bar)");
  release(&n.orders[n.rounds & 1]);
  if (++n.arrived == n.wanted) {
    n.arrived = 0;
    ++n.rounds;
  }
  return n;
}
}  // namespace

void sync(int number_, int threads) {
  meet();
  Numbered& n = arrives(number_, threads, FA_HERE);
  const unsigned round = n.arrived == 0 ? n.rounds - 1 : n.rounds;
  wait_until([&] { return n.rounds != round; },
             [&] {
               return "in barrier " + number(number_) + ", " + number(n.arrived) + " of " +
                      number(threads) + " threads are there";
             },
             FA_HERE);
  acquire(&n.orders[round & 1]);
}
void arrive(int number_, int threads) {
  arrives(number_, threads, FA_HERE);
  maybe_others_first();
}

// ---- roles ----

// setmaxnreg: the registers of a warp's threads, and what is left of the SM's 65536. A block begins
// with as many as its number of threads allows.
namespace {
struct Change {  // that the threads of a warpgroup ask for together
  int to;
  bool more;
  Place at;
};
struct Registers {
  std::map<unsigned, int> of_warp;
  std::map<unsigned, std::vector<Change>> changes;  // by warpgroup
  std::map<unsigned, std::size_t> asked, changed;   // how many, by thread and by warp
  std::vector<int> left_of;                         // by rank
  Registers() {
    const unsigned threads = threads_of_block(), all = unsigned(all_threads().size());
    const int each = std::min(65536 / int(threads) / 8 * 8, 248);
    left_of.assign(blocks_of_cluster(), 65536 - each * int(threads));
    for (unsigned w = 0; w < (all + 31) / 32; ++w) of_warp[w] = each;
  }
};
void change_registers(int to, bool more, Place at) {
  auto& r = of_block<Registers>();
  if (to < 24 || to > 256 || to % 8)
    finding("setmaxnreg at " + text_of(at) + ": " + number(to) +
            " registers; 24 to 256 are possible, a multiple of 8 (PTX, setmaxnreg)");
  auto& changes = r.changes[thread() / 128];
  const std::size_t mine = r.asked[thread()]++;
  if (mine == changes.size()) changes.push_back({to, more, at});
  if (const Change& c = changes[mine]; c.to != to || c.more != more)
    finding("the threads of a warpgroup ask for " + number(c.to) + " registers at " +
            text_of(c.at) + " and for " + number(to) + " at " + text_of(at) +
            " (PTX, setmaxnreg: .sync.aligned)");
  int& now = r.of_warp[thread() / 32];
  std::size_t& changed = r.changed[thread() / 32];
  int& left = r.left_of[rank()];
  if (changed == mine && (more ? to < now : to > now))
    finding("setmaxnreg at " + text_of(at) + (more ? " takes " : " gives back, and keeps ") +
            number(to) + " registers where the warp has " + number(now) + " (PTX, setmaxnreg)");
  if (more)
    wait_until([&] { return changed > mine || left >= (to - now) * 32; },
               [&] {
                 return "for " + number((to - now) * 32) + " registers, of which " + number(left) +
                        " are free";
               },
               at);
  if (changed == mine) {  // for all lanes, when the first comes
    left -= (to - now) * 32;
    now = to;
    ++changed;
  }
}
}  // namespace
void give_registers_to(int registers) { change_registers(registers, false, FA_HERE); }
void take_registers_to(int registers) { change_registers(registers, true, FA_HERE); }

// elect.sync names any lane, always the same.
bool elected() { return lane() == (timing() == Timing::random ? 13 : 0); }

// brkpt
void stop() { finding("the branch at " + text_of(FA_HERE) + ", which is never to be taken, was"); }

// ---- kernels that overlap ----
void next_kernel_may_start() { let_next_kernel_start(); }
void previous_kernel_is_done() { wait_for_kernel_before(); }

}  // namespace fa::optimized
