// Which accesses to shared memory are ordered, by clocks ("FastTrack: efficient and precise
// dynamic
// race detection", 2009). Every actor (a thread, the copy engine, the products of a warp) counts its
// steps, and knows of every other the last step that came before its own. Who arrives at a barrier
// leaves there what it knows, who passes it takes what was left; who waits for a product or a store
// takes that. Two accesses to the same bytes, one of them a write, of which the later actor does
// not know the earlier, are a race, in whatever order they happened to come here.
#include <algorithm>
#include <string>
#include <unordered_map>
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

  Step* of(unsigned t) { return known.data() + std::size_t(t) * actors; }
} order_;

Order& order() {
  Order& o = order_;
  if (o.of_block == block_number) return o;
  for (unsigned t = 0; t < o.threads; ++t) o.begin = std::max(o.begin, o.of(t)[t] + 1);
  for (const Step s : o.under_way) o.begin = std::max(o.begin, s + 1);
  o.of_block = block_number;
  o.threads = unsigned(all_threads().size());
  o.actors = o.threads + 2 + (o.threads + 31) / 32;
  o.known.assign(std::size_t(o.threads) * o.actors, o.begin - 1);
  for (unsigned t = 0; t < o.threads; ++t) o.of(t)[t] = o.begin;
  o.under_way.assign(o.actors - o.threads, o.begin);
  o.left_.clear();
  o.words.resize(std::max(o.words.size(), shared_bytes() / 4 + 2));
  return o;
}

std::string told(unsigned actor, bool writes, Place place) {
  const unsigned n = order_.threads;
  const std::string at = text_of(place), does = writes ? " writes" : " reads";
  if (actor < n) return "thread " + std::to_string(actor) + does + " at " + at;
  const char* const who = actor == n ? "the copy" : actor == n + 1 ? "the store" : "the product";
  return std::string(who) + " asked for at " + at + does;
}

}  // namespace

// The bytes [at, at + bytes), by this thread or by what it asks for.
void access(Deed by, bool writes, unsigned at, unsigned bytes, Place place) {
  const auto [actor, step] = by;
  Order& o = order_;
  const Step* const known = o.of(thread());
  const auto ordered = [&](const Access& a) {
    return a.step < o.begin || a.step <= known[a.actor];
  };
  const unsigned end = at + bytes;
  for (unsigned w = at / 4; w < (end + 3) / 4; ++w) {
    Word& word = o.words[w];
    unsigned mask = 15;
    if (4 * w < at) mask &= 15u << (at - 4 * w);
    if (4 * w + 4 > end) mask &= 15u >> (4 * w + 4 - end);
    const auto look = [&](const Access& a, bool wrote) {
      if (!(a.bytes & mask) || ordered(a)) return;
      finding(told(actor, writes, place) + " byte " + std::to_string(std::max(at, 4 * w)) +
              " of shared memory, which " + told(a.actor, wrote, a.place) +
              ", and nothing orders the two (PTX, memory consistency model)");
    };
    look(word.written, true);
    if (writes) {
      look(word.read, false);
      look(word.also_read, false);
    }
    Access& to = writes                                           ? word.written
                 : word.read.actor == actor || ordered(word.read) ? word.read
                                                                  : word.also_read;
    if (to.actor == actor && to.step == step) mask |= to.bytes;
    to = {place, step, std::uint16_t(actor), std::uint8_t(mask)};
  }
}

namespace {
Deed deed_of(unsigned engine) {
  Order& o = order();
  return {o.threads + engine, ++o.under_way[engine]};
}

}  // namespace

void thread_accesses(bool writes, unsigned at, unsigned bytes, Place place) {
  const Step step = order().of(thread())[thread()];
  access({thread(), step}, writes, at, bytes, place);
}
Deed a_copy() { return hooked ? deed_of(0) : Deed{}; }
Deed a_store() { return hooked ? deed_of(1) : Deed{}; }
Deed a_product() { return hooked ? deed_of(2 + thread() / 32) : Deed{}; }

void leave_order(const void* at) {
  if (!hooked) return;
  Order& o = order();
  Step* const mine = o.of(thread());
  auto& left = o.left_[at];
  left.resize(o.actors);
  for (unsigned a = 0; a < o.actors; ++a) left[a] = std::max(left[a], mine[a]);
  ++mine[thread()];
}
void take_order(const void* at) {
  if (!hooked) return;
  Order& o = order();
  const auto left = o.left_.find(at);
  if (left == o.left_.end()) return;
  Step* const mine = o.of(thread());
  for (unsigned a = 0; a < o.actors; ++a) mine[a] = std::max(mine[a], left->second[a]);
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

}  // namespace fa::emulator
