// Shared memory as threads see it and as the asynchronous proxy does, and registers that belong to
// a product: who may touch what when (block.hpp).
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/emulator/block.hpp"
#include "common/emulator/hooks.hpp"

namespace fa::emulator {
namespace {

// What is known of 16 bytes of shared memory.
struct alignas(64) Chunk {
  std::array<std::uint16_t, 8> writer{};  // of 2 bytes: the thread that wrote, + 1, without a fence
  std::uint16_t reader = 0;               // likewise, of all 16
  std::uint16_t coming = 0;               // copies on their way to them
  std::uint16_t to_read = 0;              // products and stores that have yet to read them
  Place wrote = nullptr, read = nullptr, asked = nullptr, reads = nullptr;

  bool written() const {
    std::array<std::uint64_t, 2> all;
    std::memcpy(all.data(), writer.data(), 16);
    return (all[0] | all[1]) != 0;
  }
};
struct Range {
  unsigned at, bytes;
};
struct Known {
  std::uint64_t of_block = 0;
  std::vector<Chunk> chunks;
  std::vector<char> view;                          // what the asynchronous proxy sees
  std::vector<std::vector<Range>> written, read_;  // by each thread since its last fence
  std::uint64_t version = 0;
  // A write to what is needed still. Hooks are called before it; whether it changes anything is
  // seen afterwards: two groups may fill the same padding with the same zeros.
  struct Write {
    unsigned at = 0, bytes = 0, who = 0;
    std::array<char, 64> before{};
    Place place = nullptr;
  };
  std::vector<Write> doubtful, of_warps;  // the latter happen when all lanes have come
} known_;

Known& known() {
  if (known_.of_block != block_number) {
    known_.of_block = block_number;
    known_.chunks.assign(shared_bytes() / 16 + 2, {});
    known_.view.assign(shared_bytes() + 16, char(0xff));
    known_.written.assign(all_threads().size(), {});
    known_.read_.assign(all_threads().size(), {});
    known_.doubtful.clear();
    known_.of_warps.clear();
    ++known_.version;
  }
  return known_;
}
std::string of_thread(unsigned t) { return "thread " + std::to_string(t); }

template <class F>
void each_chunk(unsigned at, unsigned bytes, const F& f) {
  auto& chunks = known().chunks;
  for (unsigned c = at / 16; bytes > 0 && c <= (at + bytes - 1) / 16; ++c) f(chunks[c], c);
}

void note(std::vector<Range>& ranges, unsigned at, unsigned bytes) {
  if (!ranges.empty() && ranges.back().at + ranges.back().bytes == at)
    ranges.back().bytes += bytes;
  else
    ranges.push_back({at, bytes});
}

void look_at(const Known::Write& d) {
  if (std::memcmp(d.before.data(), generic_memory() + d.at, d.bytes) == 0) return;
  const Chunk& c = known_.chunks[d.at / 16];
  if (c.coming)
    finding(of_thread(d.who) + " writes byte " + std::to_string(d.at) + " of shared memory at " +
            text_of(d.place) + ", to which the copy asked for at " + text_of(c.asked) +
            " is on its way (PTX, asynchronous operations: the memory is not to be touched before "
            "they complete)");
  if (c.to_read)
    finding(of_thread(d.who) + " writes byte " + std::to_string(d.at) + " of shared memory at " +
            text_of(d.place) + ", which what was asked for at " + text_of(c.reads) +
            " has yet to read (PTX, asynchronous operations)");
}
void look_at_doubtful() {
  if (known_.doubtful.empty() || known_.of_block != block_number) return;
  for (const Known::Write& d : std::exchange(known_.doubtful, {})) look_at(d);
}

}  // namespace

unsigned shared_offset(const void* p, const char* who, Place place) {
  const auto at = std::size_t(static_cast<const char*>(p) - generic_memory());
  if (at < shared_bytes()) return unsigned(at);
  finding(std::string(who) + " at " + text_of(place) +
          " wants an address in shared memory (PTX, state spaces)");
  return 0;
}
char* async_memory() {
  if (!hooked) return generic_memory();
  look_at_doubtful();
  return known().view.data();
}
std::uint64_t async_version() { return hooked ? known().version : ++known_.version; }

Chunks chunks_of(unsigned at, unsigned bytes) {
  Chunks all;
  for (unsigned byte = at; byte < at + bytes; byte += 16) all.push_back(byte);
  return all;
}

void async_reads(const Chunks& chunks, const char* who, Place place) {
  if (!hooked) return;
  look_at_doubtful();
  const Known& k = known();
  for (const unsigned first : chunks) {
    const Chunk& c = k.chunks[first / 16];
    if (c.coming)
      finding(std::string(who) + " at " + text_of(place) + " reads byte " + std::to_string(first) +
              " of shared memory, to which the copy asked for at " + text_of(c.asked) +
              " is on its way: nobody has waited for it (PTX, asynchronous operations)");
    if (!c.written()) continue;
    for (unsigned e = 0; e < 8; ++e) {
      const unsigned byte = first + 2 * e;
      if (c.writer[e] && std::memcmp(&k.view[byte], generic_memory() + byte, 2) != 0)
        finding(std::string(who) + " at " + text_of(place) + " reads byte " + std::to_string(byte) +
                " of shared memory, which " + of_thread(c.writer[e] - 1u) + " wrote at " +
                text_of(c.wrote) + " without fence_async() since (PTX, async proxy)");
    }
  }
}

void async_will_write(unsigned at, unsigned bytes, const char* who, Place place, Deed deed) {
  if (hooked) {
    look_at_doubtful();
    each_chunk(at, bytes, [&](Chunk& c, unsigned n) {
      const auto overwrites = [&](const std::string& why) {
        finding(std::string(who) + " asked for at " + text_of(place) + " overwrites byte " +
                std::to_string(16 * n) + " of shared memory, " + why +
                " (PTX, asynchronous operations)");
      };
      if (c.to_read)
        overwrites("which what was asked for at " + text_of(c.reads) + " has yet to read");
      if (c.coming)
        overwrites("to which the copy asked for at " + text_of(c.asked) + " is on its way");
      if (c.reader)
        overwrites("which " + of_thread(c.reader - 1u) + " read at " + text_of(c.read) +
                   " without fence_async() since (PTX, async proxy)");
      ++c.coming;
      c.asked = place;
      c.writer = {};
    });
    access(deed, true, at, bytes, place);
    if (timing() != Timing::early) std::memset(async_memory() + at, 0xff, bytes);
    ++known_.version;
  }
  if (timing() != Timing::early) std::memset(generic_memory() + at, 0xff, bytes);
}
void async_has_written(unsigned at, unsigned bytes) {
  if (!hooked) return;
  each_chunk(at, bytes, [&](Chunk& c, unsigned) {
    --c.coming;
    c.writer = {};
  });
  ++known_.version;
}
void async_will_read(const Chunks& chunks, Place place, Deed deed) {
  if (!hooked) return;
  read_access(deed, chunks, place);
  Known& k = known();
  for (const unsigned byte : chunks) {
    Chunk& c = k.chunks[byte / 16];
    ++c.to_read;
    c.reads = place;
  }
}
void async_has_read(const Chunks& chunks) {
  if (!hooked) return;
  look_at_doubtful();
  Known& k = known();
  for (const unsigned byte : chunks) --k.chunks[byte / 16].to_read;
}

void fence_proxy() {
  if (!hooked) return;
  look_at_doubtful();
  Known& k = known();
  const auto me = std::uint16_t(thread() + 1);
  for (const Range& r : k.written[thread()])
    each_chunk(r.at, r.bytes, [&](Chunk& c, unsigned n) {
      for (unsigned e = 0; e < 8; ++e)
        if (c.writer[e] == me) {
          std::memcpy(&k.view[16 * n + 2 * e], generic_memory() + 16 * n + 2 * e, 2);
          c.writer[e] = 0;
        }
    });
  for (const Range& r : k.read_[thread()])
    each_chunk(r.at, r.bytes, [&](Chunk& c, unsigned) {
      if (c.reader == me) c.reader = 0;
    });
  if (!k.written[thread()].empty()) ++k.version;
  k.written[thread()].clear();
  k.read_[thread()].clear();
}

void thread_reads(unsigned at, unsigned bytes, Place place) {
  if (!hooked) return;
  Known& k = known();
  each_chunk(at, bytes, [&](Chunk& c, unsigned n) {
    if (c.coming)
      finding(of_thread(thread()) + " reads byte " + std::to_string(std::max(at, 16 * n)) +
              " of shared memory at " + text_of(place) + ", to which the copy asked for at " +
              text_of(c.asked) +
              " is on its way: it has not waited for it (PTX, asynchronous operations)");
    c.reader = std::uint16_t(thread() + 1);
    c.read = place;
  });
  note(k.read_[thread()], at, bytes);
  thread_accesses(false, at, bytes, place);
}
void warp_has_written(unsigned first) {
  if (!hooked) return;
  auto& all = known().of_warps;
  const auto of_it = [&](const Known::Write& d) { return d.who / 32 == first / 32; };
  for (const Known::Write& d : all)
    if (of_it(d)) known_.doubtful.push_back(d);
  all.erase(std::remove_if(all.begin(), all.end(), of_it), all.end());
  look_at_doubtful();
}
void thread_writes(unsigned at, unsigned bytes, Place place, bool with_its_warp) {
  if (!hooked) return;
  look_at_doubtful();
  Known& k = known();
  bytes = std::min(bytes, unsigned(shared_bytes()) - at);
  each_chunk(at, bytes, [&](Chunk& c, unsigned n) {
    if (c.coming || c.to_read) {
      auto& d = (with_its_warp ? k.of_warps : k.doubtful).emplace_back();
      d.at = at;
      d.bytes = std::min(bytes, unsigned(d.before.size()));
      d.who = thread();
      d.place = place;
      std::memcpy(d.before.data(), generic_memory() + at, d.bytes);
    }
    const unsigned begin = std::max(at, 16 * n), end = std::min(at + bytes, 16 * n + 16);
    for (unsigned byte = begin / 2; byte < (end + 1) / 2; ++byte)
      c.writer[byte % 8] = std::uint16_t(thread() + 1);
    c.wrote = place;
  });
  note(k.written[thread()], at, bytes);
  thread_accesses(true, at, bytes, place);
}

// ---- registers ----

namespace {

// What is known of a stack. Of each 4 bytes: how many fences had come before they were written,
// times 4, and whose they are.
struct Stack {
  enum : std::uint32_t { mine, lent_to_read, lent, whose = 3, fence = 4 };
  struct Free {
    void operator()(std::uint32_t* all) const { std::free(all); }
  };
  // zeros, most of which are never touched
  std::unique_ptr<std::uint32_t[], Free> words{
      static_cast<std::uint32_t*>(std::calloc(stack_bytes / 4, 4))};
  std::uint32_t fences = fence;
  bool fenced = false;  // since its thread began
  struct Loan {
    const char* begin;
    std::size_t bytes;
    Place place;
  };
  std::vector<Loan> loans;
};
[[gnu::noinline]] void new_stack() { self().registers = std::make_shared<Stack>(); }
inline Stack& stack() {  // asked for at every access
  if (!self().registers) new_stack();
  return *static_cast<Stack*>(self().registers.get());
}
template <class F>
void each_word(Stack& s, const void* begin, std::size_t bytes, const F& f) {
  const auto at = std::size_t(static_cast<const char*>(begin) - here.stack);
  if (at >= stack_bytes) return;
  for (std::size_t word = at / 4; word < (at + bytes + 3) / 4; ++word) f(s.words[word]);
}
void now_of(Stack& s, std::uint32_t whom, const void* begin, std::size_t bytes) {
  each_word(s, begin, bytes, [&](std::uint32_t& w) { w = (w & ~Stack::whose) | whom; });
}

}  // namespace

void forget_loans() {
  if (!hooked) return;
  Stack& s = stack();
  for (const Stack::Loan& l : s.loans) now_of(s, Stack::mine, l.begin, l.bytes);
  s.loans.clear();
  s.fenced = false;
}
void lend_registers(const void* begin, std::size_t bytes, bool read_too, Place place) {
  if (!hooked) return;
  Stack& s = stack();
  s.loans.push_back({static_cast<const char*>(begin), bytes, place});
  now_of(s, read_too ? Stack::lent : Stack::lent_to_read, begin, bytes);
}
void return_registers(const void* begin, std::size_t bytes) {
  if (!hooked) return;
  Stack& s = stack();
  s.loans.erase(std::remove_if(s.loans.begin(), s.loans.end(),
                               [&](const Stack::Loan& l) { return l.begin == begin; }),
                s.loans.end());
  now_of(s, Stack::mine, begin, bytes);
}
void fence_registers() {
  if (!hooked) return;
  stack().fences += Stack::fence;
  stack().fenced = true;
}
void need_fenced(const void* begin, std::size_t bytes, Place place) {
  if (!hooked) return;
  Stack& s = stack();
  if (!s.fenced)
    finding("the product at " + text_of(place) + " is the first of " + of_thread(thread()) +
            ", which has not called wgmma_fence() (PTX, wgmma.fence)");
  bool fenced = true;
  each_word(s, begin, bytes,
            [&](const std::uint32_t& w) { fenced &= (w & ~Stack::whose) != s.fences; });
  if (!fenced)
    finding("the product at " + text_of(place) + " takes registers that " + of_thread(thread()) +
            " has written since its last wgmma_fence() (PTX, wgmma.fence)");
}

// ---- what the hooks see ----

namespace {
[[gnu::noinline, gnu::cold]] void touches_lent(std::size_t word, bool writes, Place place) {
  const char* const byte = here.stack + 4 * word;
  Place asked = nullptr;
  for (const Stack::Loan& l : stack().loans)
    if (byte >= l.begin && byte < l.begin + l.bytes) asked = l.place;
  finding(of_thread(thread()) + (writes ? " writes" : " reads") + " at " + text_of(place) +
          " registers of the product asked for at " + text_of(asked) +
          ", which nobody has waited for (PTX, wgmma.mma_async)");
}
inline void touches_registers(std::size_t at, unsigned bytes, bool writes, Place place) {
  Stack& s = stack();
  for (std::size_t word = at / 4; word < (at + bytes + 3) / 4; ++word) {
    const std::uint32_t whose = s.words[word] & Stack::whose;
    if (whose != Stack::mine && (writes || whose == Stack::lent)) touches_lent(word, writes, place);
    if (writes) s.words[word] = s.fences | whose;
  }
}
}  // namespace

void hooked_access(const void* p, unsigned bytes, bool writes, Place place) {
  const auto on_stack = std::size_t(static_cast<const char*>(p) - here.stack);
  if (on_stack < stack_bytes) return touches_registers(on_stack, bytes, writes, place);
  const auto at = std::size_t(static_cast<const char*>(p) - generic_memory());
  if (at < shared_bytes())
    return writes ? thread_writes(unsigned(at), bytes, place)
                  : thread_reads(unsigned(at), bytes, place);
  if (here.stack) touches_device(p, bytes, writes ? Touch::writes : Touch::reads, place);
}

}  // namespace fa::emulator
