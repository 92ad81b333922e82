// The scheduler: fibers that take turns, and barriers. Never instrumented by a sanitizer (see
// CMakeLists.txt): its own bookkeeping is not what is being tested.
#include "common/emulator/cuda_on_cpu.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/core/check.hpp"
#include "common/emulator/block.hpp"
#include "common/emulator/hooks.hpp"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// ThreadSanitizer: a switch of fibers orders nothing, a barrier orders what came before it
// (release) with what comes after it (acquire).
#ifdef FA_EMULATOR_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
// A program in which threads still run at its end is given a second for them to race. It takes the
// fibers for such threads, which are all at rest by then.
const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }
}
// What the emulator makes in one thread and drops in another, what it fills and copies, is its own
// business and no race: the checks that ThreadSanitizer puts into these functions are left out.
void* operator new(std::size_t bytes) {
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  void* const p = std::malloc(bytes);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  return p ? p : throw std::bad_alloc();
}
void operator delete(void* p) noexcept {
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  std::free(p);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}
void operator delete(void* p, std::size_t) noexcept { operator delete(p); }
extern "C" {
void* memset(void* to, int byte, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) static_cast<volatile char*>(to)[i] = char(byte);
  return to;
}
void* memmove(void* to, const void* from, std::size_t n) {
  const auto a = static_cast<volatile char*>(to);
  const auto b = static_cast<const volatile char*>(from);
  if (to < from)
    for (std::size_t i = 0; i < n; ++i) a[i] = b[i];
  else
    for (std::size_t i = n; i-- > 0;) a[i] = b[i];
  return to;
}
void* memcpy(void* to, const void* from, std::size_t n) { return memmove(to, from, n); }
}
namespace {
constexpr unsigned without_ordering = 1;
void* tsan_this_fiber() { return __tsan_get_current_fiber(); }
void* tsan_new_fiber() { return __tsan_create_fiber(0); }
void tsan_switch(void* fiber) { __tsan_switch_to_fiber(fiber, without_ordering); }
void tsan_join(void* fiber, void* scheduler) {  // there and back, with ordering
  __tsan_switch_to_fiber(fiber, 0);
  __tsan_switch_to_fiber(scheduler, 0);
}
void acquire(char* sync) { __tsan_acquire(sync); }
void release(char* sync) { __tsan_release(sync); }
void tsan_copies(void* to, int size, const void* from, int bytes) {
  __tsan_read_range(const_cast<void*>(from), (unsigned long)bytes);
  __tsan_write_range(to, (unsigned long)size);
}
}  // namespace
#else
namespace {
void* tsan_this_fiber() { return nullptr; }
void* tsan_new_fiber() { return nullptr; }
void tsan_switch(void*) {}
void tsan_join(void*, void*) {}
void acquire(char*) {}
void release(char*) {}
void tsan_copies(void*, int, const void*, int) {}
}  // namespace
#endif

// fa_switch_stack(&mine, other): saves what a function must preserve on this stack and its pointer
// in `mine`; goes on where `other` was saved. Between two fibers nothing else has to be kept.
// Called by its name as it is written, also where C's names get an underscore (macOS).
extern "C" void fa_switch_stack(void** mine, void* other) asm("fa_switch_stack");
#if defined(__x86_64__)
asm(R"(
.text
.globl fa_switch_stack
fa_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl fa_switch_stack
fa_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulation of CUDA on the CPU knows x86-64 and arm64"
#endif

// Bounds of the section that `__shared__` names; null, or equal, if no kernel has static shared
// memory.
#ifdef __APPLE__
extern char shared_begin[] asm("section$start$__DATA$fa_shared");
extern char shared_end[] asm("section$end$__DATA$fa_shared");
#else
extern char shared_begin[] asm("__start_fa_shared") __attribute__((weak));
extern char shared_end[] asm("__stop_fa_shared") __attribute__((weak));
#endif

namespace fa::emulator {
namespace {

constexpr unsigned warp_size = 32;
constexpr std::size_t shared_without_asking = 48 * 1024;
bool first_block_only = false;
// Bytes behind a block's shared memory that must stay as they are. AddressSanitizer sees more, even
// a read, if there are none.
#ifdef FA_EMULATOR_ASAN
constexpr std::size_t fence = 0;
#else
constexpr std::size_t fence = 4096;
#endif

// A barrier's object for the sanitizer: two, because a fast thread may arrive at the next barrier
// before a slow one has left this one.
struct Sync {
  char phase[2];
};

// What FA_DYNAMIC_SHARED promises.
constexpr std::align_val_t shared_alignment{1024};
struct FreeShared {
  void operator()(char* memory) const { ::operator delete(memory, shared_alignment); }
};

struct Launch {
  const char* kernel;
  void (*thread)(const void* what);
  const void* what;
  unsigned cluster, block_threads;
  std::vector<Fiber> fibers;  // of the blocks of a cluster, one block after the other
  void* scheduler = nullptr;  // the scheduler's stack pointer while a fiber runs
  void* scheduler_tsan = nullptr;
  std::vector<Sync> blocks, warps;
  char begin = 0, end = 0;
  std::unique_ptr<char, FreeShared> shared;
  std::size_t shared_bytes = 0, from_block_to_block = 0;
  std::uint64_t first_block = 0;  // of the cluster that runs
  bool inside = false;            // a fiber runs, not the scheduler
  std::string finding;
  std::list<std::unique_ptr<Pending>> pending;
  std::map<const void*, std::shared_ptr<void>> states;  // see block_state()
  std::vector<unsigned> order;                          // of the warps
};

std::mutex one_launch_at_a_time;
Launch* running = nullptr;
std::uint64_t phase = 0;  // see Position
thread_local cudaError_t last_error = cudaSuccess;
std::map<const void*, int> allowed_shared;  // by kernel; guarded by the same mutex
std::set<cudaStream_t> streams;             // guarded by the same mutex
std::set<std::string> kernels;              // guarded by the same mutex
// Of launches that came to their end, for the next, since ThreadSanitizer takes as long to make a
// fiber as for much of what it does. Guarded by the same mutex.
std::vector<Fiber> rested;
Schedule schedule = Schedule::asked_for();
std::mt19937 randomness;

void note(cudaStream_t stream) {
  something_between(stream);
  const std::lock_guard lock(one_launch_at_a_time);
  streams.insert(stream);
}

void yield(State state) {
  Fiber& fiber = self();
  fiber.state = state;
  if (state == State::waits_for_warp || state == State::waits_for_block) ++fiber.waits;
  running->inside = false;
  tsan_switch(running->scheduler_tsan);
  fa_switch_stack(&fiber.at, running->scheduler);
}

void wait_for_warp(unsigned mask, Place place) {
  self().mask = mask;
  self().place = place;
  yield(State::waits_for_warp);
}

void fiber_main() {
  acquire(&running->begin);
  running->thread(running->what);
  release(&running->end);
  yield(State::done);
}

// A stack on which fa_switch_stack finds zeros for all registers and fiber_main to return to.
void* fresh_stack(char* stack) {
  const auto top = (reinterpret_cast<std::uintptr_t>(stack) + stack_bytes) / 16 * 16;
#if defined(__x86_64__)
  constexpr std::size_t frame = 8 * 8, return_address = 6 * 8;
#else
  constexpr std::size_t frame = 160, return_address = 88;
#endif
  // NOLINTNEXTLINE(performance-no-int-to-ptr): rounded down, inside of the stack
  char* const at = reinterpret_cast<char*>(top - frame);
  std::memset(at, 0, frame);
  void (*const start)() = fiber_main;
  std::memcpy(at + return_address, &start, sizeof start);
  return at;
}

// Ends the launch. Its fibers never end: what comes next must not count as a race with what they
// did.
[[noreturn]] void give_up(const std::string& why) {
  for (const Fiber& f : running->fibers) tsan_join(f.tsan, running->scheduler_tsan);
  const unsigned first = blockIdx.x / running->cluster * running->cluster;
  throw std::logic_error(
      std::string(running->kernel) + ": block" +
      (running->cluster == 1
           ? " " + std::to_string(first)
           : "s " + std::to_string(first) + "-" + std::to_string(first + running->cluster - 1)) +
      why);
}

void resume(unsigned index) {
  Fiber& fiber = running->fibers[index];
  here.fiber = &fiber;
  here.thread = index;
  here.stack = fiber.stack.get();
  const dim3 &b = blockDim, &g = gridDim;
  const unsigned t = index % running->block_threads;
  threadIdx = {t % b.x, t / b.x % b.y, t / b.x / b.y};
  const std::uint64_t n = running->first_block + rank();
  blockIdx = {unsigned(n % g.x), unsigned(n / g.x % g.y), unsigned(n / g.x / g.y)};
  if (fiber.state == State::fresh) {
    fiber.at = fresh_stack(fiber.stack.get());
    fiber.copies = {};
    forget_loans();
  }
  fiber.state = State::ready;
  running->inside = true;
  tsan_switch(fiber.tsan);
  fa_switch_stack(&running->scheduler, fiber.at);
  if (!running->finding.empty()) give_up(running->finding);
}

bool runnable(State s) { return s == State::fresh || s == State::ready; }

// "threads 0-31, 33, 35 and 14 more": three runs of neighbours, then how many are left.
std::string list(State state) {
  const auto& fibers = running->fibers;
  std::string text;
  unsigned runs = 0, more = 0;
  for (unsigned t = 0; t < fibers.size(); ++t) {
    if (fibers[t].state != state) continue;
    const unsigned first = t;
    while (t + 1 < fibers.size() && fibers[t + 1].state == state) ++t;
    if (++runs > 3) {
      more += t - first + 1;
      continue;
    }
    text += (runs == 1 ? "threads " : ", ") + std::to_string(first);
    if (t > first) text.append("-").append(std::to_string(t));
  }
  return more ? text + " and " + std::to_string(more) + " more" : text;
}

// Opens those barriers within a warp, of threads [first, end), whose lanes have all arrived. A
// thread that has returned keeps nobody waiting.
bool open_warp_barriers(unsigned first, unsigned end) {
  auto& fibers = running->fibers;
  bool opened = false;
  for (unsigned t = first; t < end; ++t) {
    if (fibers[t].state != State::waits_for_warp) continue;
    const unsigned mask = fibers[t].mask;
    const auto of_mask = [&](unsigned u) { return (mask >> (u - first) & 1) != 0; };
    bool all = true;
    for (unsigned u = first; u < end; ++u)
      if (of_mask(u) && fibers[u].state != State::done &&
          !(fibers[u].state == State::waits_for_warp && fibers[u].mask == mask &&
            fibers[u].together == fibers[t].together))
        all = false;
    if (all && fibers[t].together) fibers[t].together(first);
    for (unsigned u = first; all && u < end; ++u)
      if (of_mask(u) && fibers[u].state == State::waits_for_warp) fibers[u].state = State::ready;
    opened |= all;
  }
  return opened;
}

// What the threads of a block wait for, beside their warp and their block: each thing once.
std::string other_waits() {
  std::map<std::string, std::vector<unsigned>> waits;
  for (unsigned t = 0; t < running->fibers.size(); ++t)
    if (const Fiber& f = running->fibers[t]; f.state == State::waits)
      waits[f.what(f.wait) + " at " + text_of(f.place)].push_back(t);
  std::string text;
  for (const auto& [what, threads] : waits) {
    if (!text.empty()) text += "; ";
    text += "threads ";
    for (std::size_t i = 0, end; i < threads.size(); i = end) {
      for (end = i + 1; end < threads.size() && threads[end] == threads[end - 1] + 1;) ++end;
      if (i) text += ", ";
      text += std::to_string(threads[i]);
      if (end - i > 1) text.append("-").append(std::to_string(threads[end - 1]));
    }
    text += " wait " + what;
  }
  return text;
}

// One of the things that somebody waits for happens. Which kind comes last changes from block to
// block.
bool something_happens() {
  std::vector<std::list<std::unique_ptr<Pending>>::iterator> now;
  for (auto p = running->pending.begin(); p != running->pending.end(); ++p)
    if ((*p)->wanted() && (*p)->possible()) now.push_back(p);
  if (now.empty()) return false;
  std::size_t choice = 0;
  if (schedule.timing == Timing::random)
    choice = randomness() % now.size();
  else
    while (choice + 1 < now.size() && (*now[choice])->kind() == int(blockIdx.x % 2)) ++choice;
  const std::unique_ptr<Pending> one = std::move(*now[choice]);
  running->pending.erase(now[choice]);
  one->happen();
  return true;
}

// Those that may happen although nobody waits: all of them if times are early.
bool some_happen() {
  bool any = false;
  auto& pending = running->pending;
  for (auto p = pending.begin(); p != pending.end();) {
    const bool now = schedule.timing == Timing::early || chance(16);
    if (!now || !(*p)->possible()) {
      ++p;
      continue;
    }
    const std::unique_ptr<Pending> one = std::move(*p);
    p = pending.erase(p);
    one->happen();
    any = true;
  }
  return any;
}

// Runs the threads of a warp until all wait. Those that wait for the same pass together.
bool run_warp(unsigned first, unsigned end) {
  auto& fibers = running->fibers;
  bool ran = false;
  do {
    for (unsigned t = first; t < end; ++t)
      if (Fiber& f = fibers[t]; f.state == State::waits && f.ends(f.wait)) f.state = State::ready;
    for (unsigned t = first; t < end; ++t)
      if (runnable(fibers[t].state)) {
        resume(t);
        ran = true;
      }
  } while (open_warp_barriers(first, end));
  return ran;
}

// Opens __syncthreads of those blocks whose threads have all arrived, or returned.
bool open_block_barriers() {
  auto& fibers = running->fibers;
  bool opened = false;
  for (auto block = fibers.begin(); block != fibers.end(); block += running->block_threads) {
    const auto end = block + running->block_threads;
    if (std::any_of(block, end, [](const Fiber& f) {
          return f.state != State::waits_for_block && f.state != State::done;
        }))
      continue;
    for (auto f = block; f != end; ++f)
      if (f->state == State::waits_for_block) {
        f->state = State::ready;
        opened = true;
      }
  }
  return opened;
}

// Runs every warp until its threads wait at __syncthreads or have returned, then opens that
// barrier. If times are random, warps have priorities that change now and then, and the first that
// can run does: so one may starve for long (as in PCT, "A randomized scheduler with probabilistic
// guarantees of finding bugs", 2010).
void run_block() {
  auto& fibers = running->fibers;
  const unsigned n = unsigned(fibers.size()), warps = (n + warp_size - 1) / warp_size;
  const bool random = schedule.timing == Timing::random;
  const auto has = [&](State s) {
    return std::any_of(fibers.begin(), fibers.end(), [&](auto& f) { return f.state == s; });
  };
  auto& order = running->order;
  order.resize(warps);
  for (unsigned w = 0; w < warps; ++w) order[w] = blockIdx.x % 2 ? warps - 1 - w : w;
  if (random) std::shuffle(order.begin(), order.end(), randomness);
  do {
    ++phase;
    for (bool ran = true; ran;) {
      ran = false;
      for (const unsigned w : order) {
        ran |= run_warp(w * warp_size, std::min((w + 1) * warp_size, n));
        if (random && ran) break;
      }
      ran |= some_happen();
      if (chance(48)) std::shuffle(order.begin(), order.end(), randomness);
      ran = ran || something_happens();
    }
  } while (open_block_barriers());
  if (has(State::waits_for_warp) || has(State::waits)) {
    std::string why;
    const auto say = [&](const std::string& more) {
      why.append(why.empty() ? "" : "; ").append(more);
    };
    if (has(State::waits_for_warp))
      say(list(State::waits_for_warp) +
          " wait for their warp (__syncwarp or a shuffle), but not all lanes of the mask come");
    if (has(State::waits)) say(other_waits());
    if (has(State::waits_for_block)) say(list(State::waits_for_block) + " wait in __syncthreads");
    give_up(" hangs: " + why);
  }
  while (!running->pending.empty()) {
    const std::unique_ptr<Pending> one = std::move(running->pending.front());
    running->pending.pop_front();
    if (const std::string why = one->at_the_end(); !why.empty()) finding(why);
    one->happen();
  }
}

}  // namespace

Device device;
bool hooked = false;
Here here;
std::uint64_t block_number = 0;

Schedule Schedule::asked_for() {
  const char* const text = std::getenv("FA_TIMING");
  const std::string word = text ? text : "late";
  if (word == "late") return {Timing::late, 0};
  if (word == "early") return {Timing::early, 0};
  char* end = nullptr;
  const unsigned long seed = std::strtoul(word.c_str(), &end, 10);
  require(!word.empty() && *end == 0, "FA_TIMING is late, early or a number, got '", word, "'");
  return {Timing::random, unsigned(seed)};
}
WithSchedule::WithSchedule(Schedule now) : before_(std::exchange(schedule, now)) {}
WithSchedule::~WithSchedule() { schedule = before_; }

std::vector<Fiber>& all_threads() { return running->fibers; }
void wait(bool (*ends)(const void*), std::string (*what)(const void*), const void* of, Place at) {
  Fiber& fiber = self();
  fiber.ends = ends;
  fiber.what = what;
  fiber.wait = of;
  fiber.place = at;
  yield(State::waits);
}
void together(void (*f)(unsigned), const void* given, Place at) {
  self().given = given;
  self().together = f;
  wait_for_warp(0xffffffff, at);
  self().together = nullptr;
}
void maybe_others_first() {
  if (chance(8)) yield(State::ready);
}
Timing timing() { return schedule.timing; }
bool chance(unsigned one_in) {
  return schedule.timing == Timing::random && randomness() % one_in == 0;
}
void ask(std::unique_ptr<Pending> what) {
  if (schedule.timing == Timing::early && what->possible())
    what->happen();
  else
    running->pending.push_back(std::move(what));
}
void finding(const std::string& sentence) {
  const std::string text = std::string(": ").append(sentence);
  if (!running->inside) give_up(text);
  running->finding = text;
  yield(State::done);
}
std::shared_ptr<void>& block_state(const void* key) { return running->states[key]; }
void release([[maybe_unused]] const void* x) {
  ::release(static_cast<char*>(const_cast<void*>(x)));
  leave_order(x);
}
void acquire([[maybe_unused]] const void* x) {
  ::acquire(static_cast<char*>(const_cast<void*>(x)));
  take_order(x);
}

bool alike(const void* a, const void* b, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (static_cast<const char*>(a)[i] != static_cast<const char*>(b)[i]) return false;
  return true;
}
void misaligned() { last_error = cudaErrorMisalignedAddress; }
unsigned lane() { return here.thread % warp_size; }
unsigned blocks_of_cluster() { return running->cluster; }
unsigned rank() { return here.thread / running->block_threads; }
unsigned threads_of_block() { return running->block_threads; }
bool has_ended(unsigned rank) {
  const auto block = running->fibers.begin() + rank * running->block_threads;
  return std::all_of(block, block + running->block_threads,
                     [](const Fiber& f) { return f.state == State::done; });
}
unsigned shared_begin_of(unsigned rank) { return unsigned(rank * running->from_block_to_block); }
std::size_t shared_bytes_of_block() { return running->shared_bytes; }
void* dynamic_shared_memory() { return running->shared.get() + shared_begin_of(rank()); }
Copies& copies() { return self().copies; }
void wait_for_copies(int newest) {
  auto& all = copies().under_way;
  const int arrived = copies().group - newest;
  const auto end =
      std::find_if(all.begin(), all.end(), [&](const Copy& c) { return c.group >= arrived; });
  std::for_each(all.begin(), end, [](const Copy& c) {
    tsan_copies(c.to, c.size, c.from, c.bytes);
    if (c.bytes > 0) std::memcpy(c.to, c.from, std::size_t(c.bytes));
    std::memset(c.to + c.bytes, 0, std::size_t(c.size - c.bytes));
  });
  all.erase(all.begin(), end);
}
Position position() {
  if (!running) return {};
  const char* const shared = running->shared.get();
  return {running->kernel, here.thread, self().waits, phase, shared, shared + here.shared_bytes};
}

// A shuffle: it brings the lanes together, but orders no memory. That is what __syncwarp is for.
std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source) {
  self().value = value;
  wait_for_warp(mask, FA_HERE);
  const unsigned first = here.thread / warp_size * warp_size;
  const bool inside = source < warp_size && first + source < running->fibers.size();
  const std::uint64_t result = inside ? running->fibers[first + source].value : value;
  wait_for_warp(mask, FA_HERE);
  return result;
}

bool any(unsigned mask, bool x) {
  self().value = x;
  wait_for_warp(mask, FA_HERE);
  const unsigned first = here.thread / warp_size * warp_size;
  bool result = false;
  for (unsigned l = 0; l < warp_size && first + l < running->fibers.size(); ++l)
    result |= (mask >> l & 1) && running->fibers[first + l].value;
  wait_for_warp(mask, FA_HERE);
  return result;
}

void launch(const char* kernel, const void* function, How how, dim3 grid, dim3 block,
            std::size_t shared_bytes, cudaStream_t stream, void (*thread)(const void* what),
            const void* what) {
  const std::lock_guard lock(one_launch_at_a_time);
  streams.insert(stream);
  kernels.insert(kernel);
  const std::uint64_t threads = std::uint64_t(block.x) * block.y * block.z;
  std::size_t limit = shared_without_asking;
  if (const auto asked = allowed_shared.find(function); asked != allowed_shared.end())
    limit = std::max(limit, std::size_t(asked->second));
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.x > 0x7fffffff || grid.y == 0 ||
      grid.y > 65535 || grid.z == 0 || grid.z > 65535 || how.cluster < 1 || how.cluster > 8 ||
      grid.x % how.cluster || (how.cluster > 1 && threads % warp_size)) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (shared_bytes > limit) {
    last_error = cudaErrorInvalidValue;
    return;
  }
  Launch launch{};
  launch.kernel = kernel;
  launch.thread = thread;
  launch.what = what;
  launch.cluster = how.cluster;
  launch.block_threads = unsigned(threads);
  launch.blocks.resize(how.cluster);
  launch.warps.resize((how.cluster * threads + warp_size - 1) / warp_size);
  launch.scheduler_tsan = tsan_this_fiber();
  while (launch.fibers.size() < how.cluster * threads) {
    Fiber f;
    if (rested.empty()) {
      f.stack.reset(new char[stack_bytes]);
      f.tsan = tsan_new_fiber();
    } else {
      f.stack = std::move(rested.back().stack);
      f.tsan = rested.back().tsan;
      f.registers = std::move(rested.back().registers);
      rested.pop_back();
    }
    launch.fibers.push_back(std::move(f));
  }
  constexpr auto aligned = std::size_t(shared_alignment);
  launch.shared_bytes = shared_bytes;
  launch.from_block_to_block = (shared_bytes + fence + aligned - 1) / aligned * aligned;
  const std::size_t of_cluster =
      (how.cluster - 1) * launch.from_block_to_block + shared_bytes + fence;
  launch.shared.reset(static_cast<char*>(::operator new(of_cluster, shared_alignment)));
  const struct Running {
    explicit Running(Launch* launch) {
      running = launch;
      here = {nullptr, 0, nullptr, launch->shared.get(),
              (launch->cluster - 1) * launch->from_block_to_block + launch->shared_bytes};
    }
    ~Running() {  // also where a block hangs
      running = nullptr;
      here = {};
    }
  } for_now(&launch);
  const std::uint64_t clusters =
      first_block_only ? 1 : std::uint64_t(grid.x) * grid.y * grid.z / how.cluster;
  const unsigned n = unsigned(std::min(std::uint64_t(cores()), clusters));
  kernel_begins(stream, how.early && n == 1);  // on several cores nobody notes what it waited for
  gridDim = grid;
  blockDim = block;
  randomness.seed(schedule.seed);
  const auto run = [&](std::uint64_t first, std::uint64_t step) {
    for (std::uint64_t c = first; c < clusters; c += step) {
      const std::uint64_t b = launch.first_block = c * how.cluster;
      blockIdx = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y),
                  unsigned(b / grid.x / grid.y)};
      for (Fiber& f : launch.fibers) {
        f.state = State::fresh;
        f.warp_phase = f.block_phase = 0;
        f.together = nullptr;
      }
      std::memset(launch.shared.get(), 0xff, of_cluster);  // NaN
      if (char* const begin = shared_begin)
        std::memset(begin, 0xff, std::size_t(shared_end - begin));
      launch.states.clear();
      ++block_number;
      ::release(&launch.begin);
      run_block();
      ::acquire(&launch.end);
      for (unsigned r = 0; r < how.cluster; ++r) {
        const char* const behind = launch.shared.get() + shared_begin_of(r) + shared_bytes;
        if (std::any_of(behind, behind + fence, [](char x) { return x != char(0xff); }))
          last_error = cudaErrorIllegalAddress;
      }
    }
    return last_error;
  };
  if (n > 1)
    last_error = on_cores(n, kernel, [&](unsigned core) { return run(core, n); });
  else
    run(0, 1);
  std::move(launch.fibers.begin(), launch.fibers.end(), std::back_inserter(rested));
  if (!first_block_only) kernel_ends(stream, kernel);
}

std::set<cudaStream_t> take_streams() {
  const std::lock_guard lock(one_launch_at_a_time);
  return std::exchange(streams, {});
}
std::set<std::string> take_kernels() {
  const std::lock_guard lock(one_launch_at_a_time);
  return std::exchange(kernels, {});
}

cudaError_t allow_dynamic_shared_memory(const void* kernel, int bytes) {
  const std::lock_guard lock(one_launch_at_a_time);
  if (bytes < 0 || std::size_t(bytes) > device.shared_bytes)
    return last_error = cudaErrorInvalidValue;
  allowed_shared[kernel] = bytes;
  return cudaSuccess;
}

LessSharedMemory::LessSharedMemory(std::size_t bytes) : before_(device.shared_bytes) {
  device.shared_bytes = bytes;
}
LessSharedMemory::~LessSharedMemory() { device.shared_bytes = before_; }
FirstBlockOnly::FirstBlockOnly() { first_block_only = true; }
FirstBlockOnly::~FirstBlockOnly() { first_block_only = false; }

}  // namespace fa::emulator

using fa::emulator::last_error;

void __syncthreads() {
  auto& r = *fa::emulator::running;
  char* sync = &r.blocks[fa::emulator::rank()].phase[fa::emulator::self().block_phase++ % 2];
  fa::emulator::release(sync);
  fa::emulator::yield(fa::emulator::State::waits_for_block);
  fa::emulator::acquire(sync);
}
void __nanosleep(unsigned) { fa::emulator::yield(fa::emulator::State::ready); }
void __syncwarp(unsigned mask) {
  auto& r = *fa::emulator::running;
  auto& fiber = fa::emulator::self();
  char* sync = &r.warps[fa::emulator::thread() / 32].phase[fiber.warp_phase++ % 2];
  fa::emulator::release(sync);
  fa::emulator::wait_for_warp(mask, FA_HERE);
  fa::emulator::acquire(sync);
}

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorMisalignedAddress:
      return "misaligned address";
    default:
      return "an error that the emulator never returns";
  }
}
const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorMisalignedAddress:
      return "cudaErrorMisalignedAddress";
    default:
      return "cudaErrorUnknown";
  }
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = fa::emulator::device.capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = fa::emulator::device.capability % 10;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = fa::emulator::device.processors;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 60 << 20;  // an H200's
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(fa::emulator::device.shared_bytes);
      return cudaSuccess;
  }
  return last_error = cudaErrorInvalidValue;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = nullptr;
  if (bytes > std::size_t(fa::available_memory())) return last_error = cudaErrorMemoryAllocation;
  // Exactly as long as asked for, so that AddressSanitizer sees an access beyond it.
  if (fa::emulator::cores() > 1)
    *memory = fa::emulator::memory_of_all(bytes);
  else if (posix_memalign(memory, 256, bytes) != 0)
    *memory = nullptr;
  if (!*memory) return last_error = cudaErrorMemoryAllocation;
  std::memset(*memory, 0xff, bytes);
  fa::emulator::allocated(*memory, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  fa::emulator::freed(memory);
  if (!fa::emulator::free_memory_of_all(memory)) std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t(fa::available_memory());
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  fa::emulator::all_kernels_have_ended();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  fa::emulator::note(stream);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int byte, std::size_t bytes) {
  fa::emulator::all_kernels_have_ended();
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int byte, std::size_t bytes, cudaStream_t stream) {
  fa::emulator::note(stream);
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  fa::emulator::all_kernels_have_ended();
  return cudaSuccess;
}

struct fa_emulated_stream {};
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new fa_emulated_stream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fa::emulator::something_between(stream);
  return cudaSuccess;
}

struct fa_emulated_event {
  std::chrono::steady_clock::time_point time;
};
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new fa_emulated_event;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  fa::emulator::note(stream);
  event->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}
