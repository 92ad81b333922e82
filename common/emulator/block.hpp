// A block of threads under way on the emulator: its fibers, its shared memory, and what has been
// asked of the hardware and is not done yet. For those who write down what an instruction means
// (06_optimized/ptx/on_cpu); a kernel never sees it.
//
// What is asynchronous happens when the schedule says so: as late as the rules allow, as early, or
// at random. A copy under way leaves NaN where it will write, a product under way where its sums
// will be; so what comes too early reads NaN, and what comes too late is overwritten.
//
// Tensor cores and the copy engine see shared memory through a proxy of their own: what a thread
// has stored reaches it at that thread's fence. Here the proxy has a copy of shared memory. Where
// the compiler calls a function of ours for every access to memory (hooks.cpp), each 16 bytes know
// who wrote and read them without a fence, and which copy or product still needs them; a rule that
// is broken ends the launch with a sentence that names both lines. Without the hooks, as under a
// sanitizer, the copy is shared memory itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/emulator/cuda_on_cpu.hpp"

namespace fa::emulator {

// A place in a program, by the address that a call returns to; for people as file:line of the
// kernel. Found with addr2line, so only when there is something to tell.
using Place = const void*;
#define FA_HERE __builtin_return_address(0)
std::string text_of(Place);

// ---- threads ----

inline constexpr std::size_t stack_bytes = 256 * 1024;
enum class State { fresh, ready, waits_for_warp, waits_for_block, waits, done };

struct Fiber {
  std::unique_ptr<char[]> stack;  // of stack_bytes
  void* at = nullptr;             // its stack pointer while it waits
  void* tsan = nullptr;
  State state = State::fresh;
  // waits_for_warp: for these lanes; the last one to come does what is to be done together
  unsigned mask = 0;
  void (*together)(unsigned first) = nullptr;
  std::uint64_t value = 0;  // handed to the others of its warp
  const void* given = nullptr;
  // waits: until this is true
  bool (*ends)(const void*) = nullptr;
  std::string (*what)(const void*) = nullptr;
  const void* wait = nullptr;
  Place place = nullptr;  // where it waits
  unsigned warp_phase = 0, block_phase = 0, waits = 0;
  Copies copies;                    // of cp.async
  std::shared_ptr<void> registers;  // what is known of its stack (proxies.cpp)
};
// Of the thread that runs, and of its block: asked for at every access.
struct Here {
  Fiber* fiber = nullptr;
  unsigned thread = 0;
  const char* stack = nullptr;
  char* shared = nullptr;
  std::size_t shared_bytes = 0;
};
extern Here here;
inline Fiber& self() { return *here.fiber; }
inline unsigned thread() { return here.thread; }
std::vector<Fiber>& all_threads();  // of the block that runs, or of all blocks of its cluster

void wait(bool (*ends)(const void*), std::string (*what)(const void*), const void* of, Place);
// Until ends() is true. what() says for people what is waited for.
template <class Ends, class What>
void wait_until(const Ends& ends, const What& what, Place at) {
  struct Wait {
    const Ends& ends;
    const What& what;
  } const both{ends, what};
  wait([](const void* w) { return static_cast<const Wait*>(w)->ends(); },
       [](const void* w) { return std::string(static_cast<const Wait*>(w)->what()); }, &both, at);
}
// A warp does something together: each lane hands over `given`; the last to come calls f(first),
// where threads first to first + 31 are the warp, and finds theirs in all_threads()[t].given.
void together(void (*f)(unsigned first), const void* given, Place);
// All lanes of the warp come here. So the x-ray knows again who belongs together.
inline void meet() { ++self().waits; }
// Here another warp may get its turn, if times are random.
void maybe_others_first();

// For ThreadSanitizer: what came before a release of x happens before what follows its acquire.
void release(const void* x);
void acquire(const void* x);

// ---- clusters ----
// The blocks of a cluster are under way together, as one: threads are numbered through, those of
// one block after the other, and so lie their shared memories. A block alone is a cluster of one.

unsigned blocks_of_cluster();
unsigned rank();  // of this thread's block in its cluster
unsigned threads_of_block();
bool has_ended(unsigned rank);            // the block of this rank
unsigned shared_begin_of(unsigned rank);  // where its shared memory begins
std::size_t shared_bytes_of_block();

// ---- what is under way ----

// Something that the hardware has been asked for. It happens at once if times are early, else when
// nothing can run and somebody waits for it, or at random.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual bool wanted() const = 0;    // does somebody wait for it?
  virtual bool possible() const = 0;  // may it happen now?
  virtual void happen() = 0;
  virtual std::string at_the_end() const = 0;  // what to say if the block ends without it, or ""
  // A number that copies have alike, and products: which kind comes last changes from block to
  // block.
  virtual int kind() const = 0;
};
Timing timing();
bool chance(unsigned one_in);  // true once in so many; never unless times are random
void ask(std::unique_ptr<Pending>);

// ---- shared memory, as threads see it and as the asynchronous proxy does ----

inline std::size_t shared_bytes() { return here.shared_bytes; }
// Where p lies in the block's shared memory; a finding if it lies elsewhere.
unsigned shared_offset(const void* p, const char* who, Place);
inline char* generic_memory() { return here.shared; }  // what threads see
char* async_memory();                                  // what tensor cores and the copy engine see
// Places of 16 bytes each.
using Chunks = std::vector<unsigned>;
Chunks chunks_of(unsigned at, unsigned bytes);

// A step of a thread, or something that the copy engine or the tensor cores do (races.cpp).
using Step = std::uint32_t;
struct Deed {
  unsigned actor = 0;
  Step step = 0;
};
Deed a_copy();     // to shared memory
Deed a_store();    // from there
Deed a_product();  // of this thread's warp
Deed a_step();     // of this thread: what it does now
// Orders what this thread has done with what follows where others take it.
void leave_order(const void* at);
void take_order(const void* at);
bool knows_order(const void* at);          // this thread, all that has been left there
void leave_end_of(Deed, const void* at);   // who takes the order there has waited for it
void take_end_of(Deed);                    // this thread has waited for it
bool knows_end_of(Deed);                   // it has, or one who has left it where this took it
bool knows_end_of(Deed, unsigned thread);  // that thread has
// A finding if a deed touches what another has touched that nothing orders before it.
void access(Deed by, bool writes, unsigned at, unsigned bytes, Place);
void read_access(Deed by, const Chunks&, Place);
void thread_accesses(bool writes, unsigned at, unsigned bytes, Place);

// The asynchronous proxy reads: a finding if a thread wrote there without a fence since, or a copy
// is on its way.
void async_reads(const Chunks&, const char* who, Place);
// It is going to write: what is there is gone. A finding if a thread read or wrote it without a
// fence, or a product or store has yet to read it.
void async_will_write(unsigned at, unsigned bytes, const char* who, Place, Deed);
void async_has_written(unsigned at, unsigned bytes);  // both memories hold it now
// A product or store that has yet to read these bytes, and has read them.
void async_will_read(const Chunks&, Place, Deed);
void async_has_read(const Chunks&);
// Counts what changes in async_memory().
std::uint64_t async_version();
// This thread's stores reach the asynchronous proxy, and its reads are over.
void fence_proxy();
// What a thread does to shared memory by an instruction that no hook sees.
void thread_reads(unsigned at, unsigned bytes, Place);
void thread_writes(unsigned at, unsigned bytes, Place, bool with_its_warp = false);
// What threads first to first + 31 were to write with their warp is written.
void warp_has_written(unsigned first);

// ---- kernels that overlap (overlap.cpp) ----

Deed the_kernel_before();
void let_next_kernel_start();   // as far as this block is concerned
void wait_for_kernel_before();  // by this thread
// What a thread does to device memory, or an engine for it; nothing of other memory.
enum class Touch { reads, writes, adds };
void touches_device(const void*, std::size_t bytes, Touch, Place);
bool notes_reads();  // else a read need not be told
void kernel_begins(fa_emulated_stream*, bool early);
void kernel_ends(fa_emulated_stream*, const char* name);
void something_between(fa_emulated_stream*);  // no kernel, or somebody has waited for it
void all_kernels_have_ended();
void allocated(const void*, std::size_t bytes);
void freed(const void*);

// ---- blocks on several cores (cores.cpp) ----

unsigned cores();  // FA_CORES, else 1
// Memory that processes forked later share, or null; free_memory_of_all: whether it was such.
void* memory_of_all(std::size_t bytes);
bool free_memory_of_all(void*);
// Calls run(core) in a process each; the last error that one returns. Throws what the first one
// throws (std::logic_error).
cudaError_t on_cores(unsigned n, const char* kernel, const std::function<cudaError_t(unsigned)>&);

// ---- registers that belong to a product under way ----

// A thread's registers, [begin, begin + bytes) of its stack: until they are given back, touching
// them is a finding. `written`: reading is, too.
void lend_registers(const void* begin, std::size_t bytes, bool read_too, Place);
void forget_loans();  // of a thread that ended with its block
void return_registers(const void* begin, std::size_t bytes);
// wgmma.fence orders ordinary writes to registers before products; a finding if these registers
// were written since the last one.
void fence_registers();
void need_fenced(const void* begin, std::size_t bytes, Place);

// ---- findings ----

extern bool hooked;  // is hooks.cpp linked? Else nobody knows of single accesses.
// A rule that this kernel breaks: one sentence. The launch ends with it (std::logic_error). If
// called by a thread it does not return.
void finding(const std::string& sentence);

// ---- the x-ray ----

// What a kernel asks of an SM, as xray.cpp counts it. Everywhere else nobody does, and an
// instruction says it to no one.
enum class Op {
  read,
  write,
  add,
  copy,  // by cp.async, from global to shared memory
  ldmatrix,
  stmatrix,
  load,  // by the copy engine: to shared memory, from there, added up from there
  store,
  reduce,
  operands,     // that wgmma reads in shared memory
  mma,          // 16 x 8 x 16
  wgmma,        // 64 x N x 16
  exponential,  // 2^x
};
// `of`: an address, or null; `amount`: bytes, or columns of a product, or numbers.
#ifdef FA_XRAY
inline constexpr bool counted = true;
void count(Op, const void* of, unsigned amount, Place);
#else
inline constexpr bool counted = false;
inline void count(Op, const void*, unsigned, Place) {}
#endif

// Counts the blocks, or clusters, that ran, from 1.
extern std::uint64_t block_number;

// State of the block, or cluster, that instructions need, one object of each kind; gone with it.
std::shared_ptr<void>& block_state(const void* key);
template <class T>
T& of_block() {
  static T* mine = nullptr;
  static std::uint64_t of = 0;
  if (of != block_number) {
    std::shared_ptr<void>& state = block_state(&of);
    state = std::make_shared<T>();
    mine = static_cast<T*>(state.get());
    of = block_number;
  }
  return *mine;
}

}  // namespace fa::emulator
