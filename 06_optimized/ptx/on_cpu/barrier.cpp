// What the instructions of ptx/barrier.cuh do.
#include "06_optimized/ptx/on_cpu/barrier.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>

#include "06_optimized/ptx/on_cpu/phases.hpp"

namespace fa::optimized {
using namespace fa::emulator;

namespace {
// Whoever links these instructions has a small Hopper GPU.
const Device before = std::exchange(device, {227 * 1024, 90, 2});

std::string number(long n) { return std::to_string(n); }
std::string of_thread_here() { return "thread " + number(thread()); }
}  // namespace

std::uint32_t shared_address(const void* p) { return shared_offset(p, "an instruction", FA_HERE); }

// ---- barriers in shared memory: "mbarrier" in PTX ----

// The 64 bits in shared memory are not looked at: what they would hold stands beside them.
Phases& phases_of(const Barrier* b, Place at) {
  Phases& p = of_block<AllPhases>()[shared_offset(b, "a barrier", at)];
  if (p.count == 0) finding("the barrier at " + text_of(at) + " was never initialised");
  if (!p.fenced && p.initialised_by != thread())
    finding("the barrier at " + text_of(at) + " is used before the thread that initialised it at " +
            text_of(p.initialised_at) + " has called fence_barriers() (PTX, fence.mbarrier_init)");
  return p;
}

void init(Barrier* b, int count) {
  const unsigned at = shared_offset(b, "a barrier", FA_HERE);
  if (at % 8) finding("the barrier at " + text_of(FA_HERE) + " is not aligned to 8 bytes");
  if (count < 1 || count >= 1 << 20)
    finding("the barrier at " + text_of(FA_HERE) + " is to count " + number(count) +
            " arrivals, 1 to 2^20 - 1 are possible");
  Phases p;
  p.count = p.missing = count;
  p.initialised_by = thread();
  p.initialised_at = FA_HERE;
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
            " bytes, less than 2^20 are possible");
  release(b);
  p.bytes += bytes;
  --p.missing;
  p.look();
  maybe_others_first();
}
}  // namespace

void arrive(Barrier* b) { arrives(b, 0, FA_HERE); }
void arrive_expecting(Barrier* b, int bytes) { arrives(b, bytes, FA_HERE); }

// try_wait.parity, again and again: true while the phase under way has another parity. So who looks
// two phases late waits for the wrong one.
void wait(Barrier* b, std::uint32_t phase) {
  Phases& p = phases_of(b, FA_HERE);
  long& passed = p.passed.try_emplace(thread(), -1).first->second;
  const long meant = passed + ((passed & 1) == long(phase & 1) ? 0 : 1);
  const Place at = FA_HERE;
  const std::string me = of_thread_here();
  ++p.waiters;
  wait_until(
      [&] {
        if (meant <= p.ended - 2 && (p.ended & 1) == long(phase & 1))
          finding(
              me + " waits at " + text_of(at) + " for phase " + number(meant) +
              " of a barrier whose phase " + number(p.ended) +
              " is under way: it looks two phases late, and by its parity waits for another one "
              "(PTX, mbarrier.try_wait)");
        return (p.ended & 1) != long(phase & 1);
      },
      [&] {
        return "for the end of a phase of parity " + number(phase) + " of the barrier at byte " +
               number(shared_offset(b, "", nullptr)) + " (phase " + number(p.ended) +
               " is under way, " + number(p.missing) + " of " + number(p.count) + " arrivals and " +
               number(p.bytes) + " bytes missing)";
      },
      at);
  --p.waiters;
  passed = p.ended - 1;
  acquire(b);
}

// ---- numbered barriers: "bar.sync" and "bar.arrive" ----

namespace {
struct Numbered {
  int arrived = 0, wanted = 0;
  unsigned rounds = 0;
  Place first = nullptr;
};
using AllNumbered = std::array<Numbered, 16>;

Numbered& arrives(int number_, int threads, Place at) {
  if (number_ < 0 || number_ > 15 || threads < 32 || threads % 32)
    finding("at " + text_of(at) + ": barrier " + number(number_) + " of " + number(threads) +
            " threads; there are barriers 0 to 15, of a multiple of 32 threads (PTX, bar)");
  Numbered& n = of_block<AllNumbered>()[std::size_t(number_)];
  if (n.arrived == 0) {
    n.wanted = threads;
    n.first = at;
  }
  if (n.wanted != threads)
    finding("barrier " + number(number_) + " has " + number(threads) + " threads at " +
            text_of(at) + " and " + number(n.wanted) + " at " + text_of(n.first) + " (PTX, bar)");
  release(&n);
  if (++n.arrived == n.wanted) {
    n.arrived = 0;
    ++n.rounds;
  }
  return n;
}
}  // namespace

void sync(int number_, int threads) {
  Numbered& n = arrives(number_, threads, FA_HERE);
  const unsigned round = n.arrived == 0 ? n.rounds - 1 : n.rounds;
  wait_until([&] { return n.rounds != round; },
             [&] {
               return "in barrier " + number(number_) + ", " + number(n.arrived) + " of " +
                      number(threads) + " threads are there";
             },
             FA_HERE);
  acquire(&n);
}
void arrive(int number_, int threads) {
  arrives(number_, threads, FA_HERE);
  maybe_others_first();
}

// ---- roles ----

// setmaxnreg: the registers of a warp's threads, and what is left of the SM's 65536. A block begins
// with as many as its number of threads allows.
namespace {
struct Registers {
  std::map<unsigned, int> of_warp, lanes;
  int left = 0;
  Registers() {
    const int threads = int(all_threads().size());
    const int each = std::min(65536 / threads / 8 * 8, 255);
    left = 65536 - each / 8 * 8 * threads;
    for (unsigned w = 0; w < unsigned(threads + 31) / 32; ++w) of_warp[w] = each / 8 * 8;
  }
};
void change_registers(int to, bool more, Place at) {
  auto& r = of_block<Registers>();
  int& now = r.of_warp[thread() / 32];
  if (to < 24 || to > 256 || to % 8)
    finding("setmaxnreg at " + text_of(at) + ": " + number(to) +
            " registers; 24 to 256 are possible, a multiple of 8");
  if (r.lanes[thread() / 32]++ % 32 == 0) {  // for all lanes, when the first comes
    if (more ? to < now : to > now)
      finding("setmaxnreg at " + text_of(at) + (more ? " takes " : " gives back, and keeps ") +
              number(to) + " registers where the warp has " + number(now));
    if (more)
      wait_until([&] { return r.left >= (to - now) * 32; },
                 [&] {
                   return "for " + number((to - now) * 32) + " registers, of which " +
                          number(r.left) + " are free";
                 },
                 at);
    r.left -= (to - now) * 32;
    now = to;
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
void next_kernel_may_start() {}
void previous_kernel_is_done() {}

}  // namespace fa::optimized
