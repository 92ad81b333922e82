// Which accesses to shared memory are ordered, told by clocks as in "FastTrack: efficient and
// precise dynamic race detection" (2009). Every actor (a thread, the copy engine, the products of a
// warp, the kernel before this one) counts its steps, and knows of every other the last step that
// came before its own. Who arrives at a barrier leaves there what it knows, who passes it takes
// what was left; who waits for a product or a store takes that. Two accesses to the same bytes, one
// of them a write, of which the later actor does not know the earlier, are a race, in whatever
// order they came here.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/emulator/block.hpp"
#include "common/emulator/hooks.hpp"

namespace fa::emulator {
namespace {

struct Access {
  Place place = nullptr;
  Step step = 0;
  std::uint16_t actor = 0;
  std::uint8_t bytes = 0;  // a bit for each of four
};
// Of 4 bytes. Of many that read them without knowing of each other two are kept.
struct Word {
  Access written, read, also_read;
};
struct Order {
  std::uint64_t of_block = 0;
  unsigned threads = 0, actors = 0;
  Step begin = 1;               // of this block: all that came before is ordered
  std::vector<Step> known;      // [threads][actors]; of a thread itself the step under way
  std::vector<Step> under_way;  // of the other actors, from `threads` on
  std::unordered_map<const void*, std::vector<Step>> left_;  // at barriers
  std::vector<Word> words;
  std::vector<char> alike;  // of 16 bytes: are the first of four words all there is to know?

  Step* of(unsigned t) { return known.data() + std::size_t(t) * actors; }
} order_;

Order& order() {
  Order& o = order_;
  if (o.of_block == block_number) return o;
  for (unsigned t = 0; t < o.threads; ++t) o.begin = std::max(o.begin, o.of(t)[t] + 1);
  for (const Step s : o.under_way) o.begin = std::max(o.begin, s + 1);
  o.of_block = block_number;
  o.threads = unsigned(all_threads().size());
  o.actors = o.threads + 3 + (o.threads + 31) / 32;
  o.known.assign(std::size_t(o.threads) * o.actors, o.begin - 1);
  for (unsigned t = 0; t < o.threads; ++t) o.of(t)[t] = o.begin;
  o.under_way.assign(o.actors - o.threads, o.begin);
  o.left_.clear();
  const std::size_t chunks = std::max(o.alike.size(), shared_bytes() / 16 + 2);
  o.words.resize(4 * chunks);
  o.alike.resize(chunks, true);
  return o;
}

std::string told(unsigned actor, bool writes, Place place) {
  const unsigned n = order_.threads;
  const std::string at = text_of(place), does = writes ? " writes" : " reads";
  if (actor < n) return "thread " + std::to_string(actor) + does + " at " + at;
  const char* const who = actor == n ? "the copy" : actor == n + 1 ? "the store" : "the product";
  return std::string(who) + " asked for at " + at + does;
}

[[gnu::noinline, gnu::cold]] void race(Deed by, bool writes, unsigned at, Place place,
                                       const Access& with, bool wrote) {
  finding(told(by.actor, writes, place) + " byte " + std::to_string(at) +
          " of shared memory, which " + told(with.actor, wrote, with.place) +
          ", and nothing orders the two (PTX, memory consistency model)");
}

// Of the bytes of `word` those of `mask`.
inline void access(Word& word, unsigned mask, Deed by, const Step* known, bool writes, unsigned at,
                   Place place) {
  const auto ordered = [&](const Access& a) {
    return a.step < order_.begin || a.step <= known[a.actor];
  };
  const auto races = [&](const Access& a) { return (a.bytes & mask) && !ordered(a); };
  // Not told: two threads that write, or a thread that writes and a product that reads, for it may
  // write what is there, as groups that fill a tile up with the same zeros do, and nobody may want
  // the sums. If bytes change under a product that is to come, proxies.cpp tells it.
  const auto pair = [&](const Access& a, unsigned lowest) {
    const unsigned n = order_.threads;
    return (by.actor < n && a.actor >= lowest) || (a.actor < n && by.actor >= lowest);
  };
  const unsigned products = order_.threads + 2;
  const auto harmless = [&](const Access& a) {
    return pair(a, products) ||
           (writes && by.actor < order_.threads && &a == &word.written && a.actor < order_.threads);
  };
  for (const Access* a : {&word.written, &word.read, &word.also_read}) {
    if (a != &word.written && !writes) break;
    if (races(*a) && !harmless(*a)) race(by, writes, at, place, *a, a == &word.written);
  }
  const bool first = word.read.actor == by.actor || ordered(word.read);
  Access& to = writes ? word.written : first ? word.read : word.also_read;
  if (to.actor == by.actor && to.step == by.step) mask |= to.bytes;
  to = {place, by.step, std::uint16_t(by.actor), std::uint8_t(mask)};
}

}  // namespace

// The bytes [at, at + bytes), by this thread or by what it asks for.
void access(Deed by, bool writes, unsigned at, unsigned bytes, Place place) {
  Order& o = order_;
  const Step* const known = o.of(thread());
  const unsigned end = at + bytes;
  for (unsigned c = at / 16; c < (end + 15) / 16; ++c) {
    Word* const words = &o.words[std::size_t(c) * 4];
    const bool all = at <= 16 * c && end >= 16 * c + 16;
    if (o.alike[c] && all) {
      access(words[0], 15, by, known, writes, 16 * c, place);
      continue;
    }
    if (o.alike[c]) std::fill(words + 1, words + 4, words[0]);
    o.alike[c] = false;
    for (unsigned w = std::max(at, 16 * c) / 4; w < (std::min(end, 16 * c + 16) + 3) / 4; ++w) {
      unsigned mask = 15;
      if (4 * w < at) mask &= 15u << (at - 4 * w);
      if (4 * w + 4 > end) mask &= 15u >> (4 * w + 4 - end);
      access(words[w % 4], mask, by, known, writes, std::max(at, 4 * w), place);
    }
    if (all && writes) {  // what came before is ordered before this
      words[0].read = words[0].also_read = {};
      o.alike[c] = true;
    }
  }
}

void read_access(Deed by, const Chunks& chunks, Place place) {
  Order& o = order_;
  const Step* const known = o.of(thread());
  for (const unsigned byte : chunks)
    if (Word* const words = &o.words[std::size_t(byte) / 4]; o.alike[byte / 16])
      access(words[0], 15, by, known, false, byte, place);
    else
      for (unsigned w = 0; w < 4; ++w) access(words[w], 15, by, known, false, byte + 4 * w, place);
}

namespace {
Deed deed_of(unsigned engine) {
  Order& o = order();
  return {o.threads + engine, ++o.under_way[engine]};
}

// Where threads of other blocks of the cluster touch a block's shared memory, the last time each:
// before the block ends, a thread of it must have waited for that.
struct FromAfar : Pending {
  struct Last {
    Deed deed;
    Place place = nullptr;
  };
  std::map<std::pair<unsigned, unsigned>, Last> all;  // by block and thread

  bool wanted() const override { return false; }
  bool possible() const override { return false; }
  int kind() const override { return 0; }
  void happen() override {}
  std::string at_the_end() const override {
    for (const auto& [who, last] : all) {
      bool known = false;
      for (unsigned t = 0; t < threads_of_block(); ++t)
        known |= knows_end_of(last.deed, who.first * threads_of_block() + t);
      if (!known)
        return "the block of rank " + std::to_string(who.first) +
               " ends, and none of its threads has waited for thread " +
               std::to_string(who.second) + ", which is in its shared memory at " +
               text_of(last.place) + " (PTX, shared memory of a cluster)";
    }
    return {};
  }
};

}  // namespace

void thread_accesses(bool writes, unsigned at, unsigned bytes, Place place) {
  const Deed deed{thread(), order().of(thread())[thread()]};
  access(deed, writes, at, bytes, place);
  if (blocks_of_cluster() == 1 || at / shared_begin_of(1) == rank()) return;
  FromAfar*& mine = of_block<FromAfar*>();
  if (!mine) {
    auto one = std::make_unique<FromAfar>();
    mine = one.get();
    ask(std::move(one));
  }
  mine->all[{at / shared_begin_of(1), thread()}] = {deed, place};
}
Deed a_copy() { return hooked ? deed_of(0) : Deed{}; }
Deed a_store() { return hooked ? deed_of(1) : Deed{}; }
Deed a_step() { return hooked ? Deed{thread(), order().of(thread())[thread()]} : Deed{}; }
Deed the_kernel_before() { return {order().actors - 1, order_.begin}; }
Deed a_product() { return hooked ? deed_of(2 + thread() / 32) : Deed{}; }

void leave_order(const void* at) {
  if (!hooked) return;
  Order& o = order();
  Step* const mine = o.of(thread());
  auto& left = o.left_[at];
  left.resize(o.actors);
  Step* const there = left.data();
  for (unsigned a = 0, n = o.actors; a < n; ++a) there[a] = std::max(there[a], mine[a]);
  ++mine[thread()];
}
void take_order(const void* at) {
  if (!hooked) return;
  Order& o = order();
  const auto left = o.left_.find(at);
  if (left == o.left_.end()) return;
  Step* const mine = o.of(thread());
  const Step* const there = left->second.data();
  for (unsigned a = 0, n = o.actors; a < n; ++a) mine[a] = std::max(mine[a], there[a]);
}
bool knows_order(const void* at) {
  if (!hooked) return false;
  Order& o = order();
  const auto left = o.left_.find(at);
  if (left == o.left_.end()) return false;
  return std::equal(left->second.begin(), left->second.end(), o.of(thread()),
                    [](Step there, Step mine) { return there <= mine; });
}
void leave_end_of(Deed d, const void* at) {
  if (!hooked) return;
  auto& left = order().left_[at];
  left.resize(order_.actors);
  left[d.actor] = std::max(left[d.actor], d.step);
}
void take_end_of(Deed d) {
  if (!hooked) return;
  Step& known = order().of(thread())[d.actor];
  known = std::max(known, d.step);
}
bool knows_end_of(Deed d) { return knows_end_of(d, thread()); }
bool knows_end_of(Deed d, unsigned t) { return !hooked || order().of(t)[d.actor] >= d.step; }

}  // namespace fa::emulator
