// What the instructions of ptx/tma.cuh do.
#include "06_optimized/ptx/on_cpu/copies.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "06_optimized/ptx/on_cpu/phases.hpp"

namespace fa::optimized {
using namespace fa::emulator;

namespace {

constexpr int box_columns = 64, row_bytes = 128;  // of 16-bit numbers

// [quote swizzle]
// The 128-byte swizzle: bits 7 to 9 of an address in shared memory go into bits 4 to 6.
unsigned swizzled_byte(unsigned at) { return at ^ (at >> 7 & 7) << 4; }
// [end quote]

// f(byte in shared memory, the 8 numbers in the tensor, how many of them are inside it), for all
// chunks of 16 bytes of a box.
template <class F>
void each_chunk(const CUtensorMap& m, unsigned at, int x, int i, int h, int b, const F& f) {
  for (int r = 0; r < m.rows; ++r)
    for (int c = 0; c < box_columns; c += 8) {
      const bool row_inside =
          i + r >= 0 && i + r < m.size[1] && h >= 0 && h < m.size[2] && b >= 0 && b < m.size[3];
      const std::int64_t inside =
          row_inside && x + c >= 0 ? std::clamp<std::int64_t>(m.size[0] - (x + c), 0, 8) : 0;
      char* const eight = inside ? m.data + (x + c) * m.stride[0] + (i + r) * m.stride[1] +
                                       h * m.stride[2] + b * m.stride[3]
                                 : nullptr;
      f(swizzled_byte(at + unsigned(r * row_bytes + c * 2)), eight, std::size_t(inside) * 2);
    }
}

// For the x-ray: a box moves all its bytes in shared memory, and of the tensor those inside.
template <class Copy>
void count_box(Op op, const Copy& c, const void* shared) {
  if (!counted) return;
  std::size_t inside = 0;
  each_chunk(c.map, 0, c.x, c.i, c.h, c.b, [&](unsigned, char*, std::size_t n) { inside += n; });
  count(op, c.map.data, unsigned(inside), c.at);
  count(op, shared, c.bytes, c.at);
}

// Shared memory that an instruction names, and that it may.
unsigned place_of(const void* p, int bytes, unsigned aligned, const char* who, Place at) {
  const unsigned offset = shared_offset(p, who, at);
  if (offset % aligned)
    finding(std::string(who) + " at " + text_of(at) + ": byte " + std::to_string(offset) +
            " of shared memory is no multiple of " + std::to_string(aligned) +
            " (PTX, cp.async.bulk)");
  if (offset + unsigned(bytes) > shared_begin_of(rank()) + shared_bytes_of_block())
    finding(std::string(who) + " at " + text_of(at) +
            " goes beyond the end of shared memory (PTX, cp.async.bulk)");
  return offset;
}

// A copy to shared memory. Its bytes count for the barrier when they are there.
struct Load : Pending {
  unsigned to = 0, bytes = 0;
  Phases* full = nullptr;
  Place at = nullptr;
  Deed deed;

  bool wanted() const override { return full->waiters > 0 && full->missing == 0; }
  bool possible() const override { return true; }
  int kind() const override { return 0; }
  std::string at_the_end() const override {
    return "the block ends while the copy asked for at " + text_of(at) +
           " is on its way (PTX, asynchronous operations)";
  }
  void put(unsigned byte, const void* from, std::size_t count, std::size_t of) const {
    for (char* memory : {generic_memory(), async_memory()}) {
      if (count) std::memcpy(memory + byte, from, count);
      std::memset(memory + byte + count, 0, of - count);
    }
  }
  virtual void bring() const = 0;
  // [quote load]
  void happen() override {
    bring();
    async_has_written(to, bytes);
    leave_end_of(deed, full->order_of(full->ended));
    full->bytes -= bytes;
    full->look();
  }
  // [end quote]
};
struct LoadOfBox : Load {
  CUtensorMap map;
  int x = 0, i = 0, h = 0, b = 0;
  unsigned rank = emulator::rank();  // of the block where it goes
  void bring() const override {
    if (has_ended(rank))
      finding("the copy asked for at " + text_of(at) + " comes to the block of rank " +
              std::to_string(rank) + ", which has ended (PTX, shared memory of a cluster)");
    each_chunk(map, to, x, i, h, b, [&](unsigned byte, const char* from, std::size_t inside) {
      put(byte, from, inside, 16);  // zeros beyond the tensor
    });
  }
};
struct LoadOfPiece : Load {
  const char* from = nullptr;
  void bring() const override { put(to, from, bytes, bytes); }
};

// A copy from shared memory, and what the thread that asked for it knows of it.
struct Progress {
  bool committed = false, has_read = false;
  Deed deed;
  Place at = nullptr;
};
struct Stores {
  std::vector<std::shared_ptr<Progress>> all;
  bool waiting = false;
  Place has_only_read = nullptr;  // of one whose writes nobody has waited for
};
using AllStores = std::map<unsigned, Stores>;  // by thread
Stores& stores_of_thread() { return of_block<AllStores>()[thread()]; }

struct Store : Pending {
  unsigned from = 0, bytes = 0, by = 0;
  Chunks chunks;
  Place at = nullptr;
  Stores* of_thread = nullptr;
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();

  bool wanted() const override { return of_thread->waiting && progress->committed; }
  bool possible() const override { return true; }
  int kind() const override { return 1; }
  std::string at_the_end() const override {
    return "thread " + std::to_string(by) + " has ended while the store asked for at " +
           text_of(at) +
           " may still read shared memory: it has not called tma_wait_read() (PTX, "
           "cp.async.bulk.wait_group.read)";
  }
  virtual void bring() const = 0;
  // [quote store]
  void happen() override {
    async_has_read(chunks);
    async_reads(chunks, "the store asked for", at);
    bring();
    progress->has_read = true;
  }
  // [end quote]
};
struct StoreOfBox : Store {
  CUtensorMap map;
  int x = 0, i = 0, h = 0, b = 0;
  void bring() const override {
    each_chunk(map, from, x, i, h, b, [](unsigned byte, char* to, std::size_t inside) {
      if (inside) std::memcpy(to, async_memory() + byte, inside);
    });
  }
};
struct StoreOfPiece : Store {
  float* to = nullptr;
  void bring() const override { std::memcpy(to, async_memory() + from, bytes); }
};
struct AddOfPiece : Store {
  float* to = nullptr;
  void bring() const override {
    for (unsigned e = 0; e < bytes / 4; ++e) {
      float x;
      std::memcpy(&x, async_memory() + from + 4 * e, 4);
      emulator::add(to + e, x);
    }
  }
};

void begin(std::unique_ptr<Load> load, Barrier* full, const char* who) {
  load->full = &phases_of(full, load->at);
  load->deed = a_copy();
  async_will_write(load->to, load->bytes, who, load->at, load->deed);
  ask(std::move(load));
}
void begin(std::unique_ptr<Store> store) {
  store->by = thread();
  store->of_thread = &stores_of_thread();
  store->of_thread->all.push_back(store->progress);
  store->progress->deed = a_store();
  store->progress->at = store->at;
  store->chunks = chunks_of(store->from, store->bytes);
  async_will_read(store->chunks, store->at, store->progress->deed);
  ask(std::move(store));
}
void must_be_multiples_of_16(const void* p, int bytes, const char* who, Place at) {
  if (reinterpret_cast<std::uintptr_t>(p) % 16 || bytes % 16 || bytes <= 0)
    finding(std::string(who) + " at " + text_of(at) +
            ": address and bytes must be multiples of 16 (PTX, cp.async.bulk)");
}
void must_be_possible(const CUtensorMap& map, const char* who, Place at) {
  if (map.rows < 1 || map.rows > 256)
    finding(std::string(who) + " at " + text_of(at) + " wants a box of " +
            std::to_string(map.rows) +
            " rows; 1 to 256 are possible (CUDA, cuTensorMapEncodeTiled)");
}

}  // namespace

namespace {
std::unique_ptr<LoadOfBox> load_of(void* to, const CUtensorMap& map, int x, int i, int h, int b,
                                   Place at) {
  auto load = std::make_unique<LoadOfBox>();
  load->at = at;
  must_be_possible(map, "the copy", load->at);
  load->bytes = unsigned(map.rows * row_bytes);
  load->to = place_of(to, int(load->bytes), 1024, "the copy", load->at);
  load->map = map;
  load->x = x, load->i = i, load->h = h, load->b = b;
  if (notes_reads())
    each_chunk(map, load->to, x, i, h, b, [&](unsigned, const char* eight, std::size_t inside) {
      touches_device(eight, inside, Touch::reads, load->at);
    });
  count_box(Op::load, *load, to);
  return load;
}
}  // namespace
void tma_load(void* to, const CUtensorMap& map, Barrier* full, int x, int i, int h, int b) {
  begin(load_of(to, map, x, i, h, b, FA_HERE), full, "the copy");
}
// A copy for each block, whose bytes may come at different times.
void tma_load_to_all(void* to, const CUtensorMap& map, Barrier* full, int x, int i, int h, int b,
                     std::uint16_t ranks) {
  const Place at = FA_HERE;
  if (ranks == 0 || ranks >> blocks_of_cluster())
    finding("the copy at " + text_of(at) + " names blocks " + std::to_string(ranks) +
            " of a cluster of " + std::to_string(blocks_of_cluster()) +
            " (PTX, cp.async.bulk.tensor, ctaMask)");
  const auto load = load_of(to, map, x, i, h, b, at);
  for (unsigned r = 0; r < blocks_of_cluster(); ++r) {
    if ((ranks >> r & 1) == 0) continue;
    auto copy = std::make_unique<LoadOfBox>(*load);
    copy->rank = r;
    copy->to = load->to - shared_begin_of(rank()) + shared_begin_of(r);
    copy->full = &phases_of(in_block(full, r), at);
    copy->deed = a_copy();
    async_will_write(copy->to, copy->bytes, "the copy", at, copy->deed);
    ask(std::move(copy));
  }
}
void bulk_load(void* to, const void* from, int bytes, Barrier* full) {
  auto load = std::make_unique<LoadOfPiece>();
  load->at = FA_HERE;
  must_be_multiples_of_16(from, bytes, "the copy", load->at);
  load->bytes = unsigned(bytes);
  load->to = place_of(to, bytes, 16, "the copy", load->at);
  load->from = static_cast<const char*>(from);
  touches_device(from, load->bytes, Touch::reads, load->at);
  count(Op::load, from, load->bytes, load->at);
  count(Op::load, to, load->bytes, load->at);
  begin(std::move(load), full, "the copy");
}

void tma_store(const CUtensorMap& map, const void* from, int x, int i, int h, int b) {
  auto store = std::make_unique<StoreOfBox>();
  store->at = FA_HERE;
  must_be_possible(map, "the store", store->at);
  store->bytes = unsigned(map.rows * row_bytes);
  store->from = place_of(from, int(store->bytes), 128, "the store", store->at);
  if (const auto columns = map.size[0]; columns % 8 && x + box_columns > columns)
    finding("the store at " + text_of(store->at) + ": of " + std::to_string(columns) +
            " columns, no multiple of 8; what lies behind the last one may be written, too");
  store->map = map;
  store->x = x, store->i = i, store->h = h, store->b = b;
  each_chunk(map, store->from, x, i, h, b, [&](unsigned, const char* eight, std::size_t inside) {
    touches_device(eight, inside, Touch::writes, store->at);
  });
  count_box(Op::store, *store, from);
  begin(std::move(store));
}
namespace {
template <class Piece>
void begin_piece(float* to, const float* from, int bytes, const char* who, Touch touch, Op op,
                 Place at) {
  auto store = std::make_unique<Piece>();
  store->at = at;
  must_be_multiples_of_16(to, bytes, who, at);
  store->bytes = unsigned(bytes);
  store->from = place_of(from, bytes, 16, who, at);
  store->to = to;
  touches_device(to, store->bytes, touch, at);
  count(op, from, store->bytes, at);
  count(op, to, store->bytes, at);
  begin(std::move(store));
}
}  // namespace
void bulk_store(float* to, const float* from, int bytes) {
  begin_piece<StoreOfPiece>(to, from, bytes, "the store", Touch::writes, Op::store, FA_HERE);
}
void bulk_add(float* to, const float* from, int bytes) {
  begin_piece<AddOfPiece>(to, from, bytes, "the addition", Touch::adds, Op::reduce, FA_HERE);
}

void tma_commit() {
  for (const auto& store : stores_of_thread().all) store->committed = true;
}
namespace {
void wait_for_stores(Stores& mine, const char* what, Place at) {
  const auto under_way = [&] {
    return std::any_of(mine.all.begin(), mine.all.end(),
                       [](const auto& s) { return s->committed && !s->has_read; });
  };
  mine.waiting = true;
  wait_until([&] { return !under_way(); }, [&] { return what; }, at);
  mine.waiting = false;
  for (const auto& s : mine.all)
    if (s->has_read) {
      take_end_of(s->deed);
      mine.has_only_read = s->at;
    }
  mine.all.erase(
      std::remove_if(mine.all.begin(), mine.all.end(), [](const auto& s) { return s->has_read; }),
      mine.all.end());
}
}  // namespace
void tma_wait_read() { wait_for_stores(stores_of_thread(), "until its stores have read", FA_HERE); }
void tma_wait() {
  Stores& mine = stores_of_thread();
  wait_for_stores(mine, "until its stores are done", FA_HERE);
  mine.has_only_read = nullptr;
}

// Blocks run one after the other here, in their order: what a turn waits for has happened, or never
// will. With several cores it may come yet.
using Turns = std::set<std::pair<const int*, unsigned>>;  // that a warp has waited for
void wait_turn(const int* turn, int n) {
  const auto now = [&] { return __atomic_load_n(turn, __ATOMIC_ACQUIRE); };
  touches_device(turn, sizeof *turn, Touch::reads, FA_HERE);
  for (int patience = 100'000; cores() > 1 && now() != n && patience > 0; --patience) usleep(100);
  wait_until([&] { return now() == n; },
             [&] {
               return "for its turn to add, when " + std::to_string(n) + " have added; so far " +
                      std::to_string(now()) + " have";
             },
             FA_HERE);
  of_block<Turns>().insert({turn, thread() / 32});
}
void pass_turn(int* turn) {
  const Place at = FA_HERE;
  const Stores& mine = stores_of_thread();
  const Place open = mine.all.empty() ? mine.has_only_read : mine.all.front()->at;
  if (open)
    finding("the turn is passed on at " + text_of(at) + " while what was asked for at " +
            text_of(open) +
            " may not have been added yet: nobody has called tma_wait() (PTX, "
            "cp.async.bulk.wait_group)");
  if (of_block<Turns>().erase({turn, thread() / 32}) == 0)
    finding("the turn is passed on at " + text_of(at) +
            ", and no thread of this warp has waited for it: blocks add in any order");
  touches_device(turn, sizeof *turn, Touch::adds, at);
  __atomic_fetch_add(turn, 1, __ATOMIC_RELEASE);
}
// What the thread has stored reaches the copy engine and the tensor cores; what it has read they
// may overwrite.
void fence_async() { fence_proxy(); }

}  // namespace fa::optimized
