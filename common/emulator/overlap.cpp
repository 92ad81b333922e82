// Kernels that overlap: one that is launched early may start while the one before it runs. Here it
// runs after it, but is judged as if both ran at once. Of a kernel that lets the next one start,
// each 16 bytes of device memory keep which of its lines wrote them, added to them, or read them
// after its block had let the next kernel start. What a thread of the next one touches before it
// knows of that kernel's end must not meet these notes.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/emulator/block.hpp"
#include "common/emulator/hooks.hpp"

namespace fa::emulator {
namespace {

struct Notes {  // of 16 bytes; for each Touch
  std::array<Place, 3> places{};
  std::array<std::uint16_t, 3> bytes{};  // a bit each
};
using Page = std::array<Notes, 256>;
struct Kernel {
  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages;
  bool lets_next_start = false, waited = false;
};
using Kernels = std::vector<std::shared_ptr<Kernel>>;

std::mutex mutex;                                         // guards these two
std::map<const char*, std::size_t> all_memory;            // of the device
std::map<fa_emulated_stream*, Kernels> may_run;           // still, though its launch is over
std::vector<std::pair<const char*, const char*>> memory;  // at the launch of the kernel that runs
Kernels before;                                           // that may run beside it
std::shared_ptr<Kernel> mine;
std::uint64_t let_by_block = 0;  // the last block that has let the next kernel start

bool of_device(const char* p) {
  static std::size_t last = 0;
  const auto holds = [&](const auto& range) { return p >= range.first && p < range.second; };
  if (last < memory.size() && holds(memory[last])) return true;
  last = std::size_t(std::find_if(memory.begin(), memory.end(), holds) - memory.begin());
  return last < memory.size();
}

const char* word_for(Touch touch) {
  return touch == Touch::reads ? "reads" : touch == Touch::writes ? "writes" : "adds to";
}

void must_be_apart(const Notes& n, unsigned bytes, Touch touch, Place place) {
  for (const Touch other : {Touch::reads, Touch::writes, Touch::adds}) {
    if (!(n.bytes[std::size_t(other)] & bytes) || (other == touch && touch != Touch::writes))
      continue;
    finding("thread " + std::to_string(thread()) + " " + word_for(touch) + " device memory at " +
            text_of(place) + " that the kernel before " + word_for(other) + " at " +
            text_of(n.places[std::size_t(other)]) +
            ": that one may run still, and no previous_kernel_is_done() comes before "
            "(PTX, griddepcontrol)");
  }
}

}  // namespace

void allocated(const void* p, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  all_memory[static_cast<const char*>(p)] = bytes;
}
void freed(const void* p) {
  const std::lock_guard lock(mutex);
  all_memory.erase(static_cast<const char*>(p));
  may_run.clear();  // as on a GPU, it waits
}
void all_kernels_have_ended() {
  const std::lock_guard lock(mutex);
  may_run.clear();
}
void something_between(fa_emulated_stream* stream) {
  const std::lock_guard lock(mutex);
  may_run.erase(stream);
}

void kernel_begins(fa_emulated_stream* stream, bool early) {
  if (!hooked) return;
  const std::lock_guard lock(mutex);
  before.clear();
  if (const auto found = may_run.find(stream); found != may_run.end()) {
    if (early) before = std::move(found->second);
    may_run.erase(found);
  }
  memory.clear();
  for (const auto& [begin, bytes] : all_memory) memory.emplace_back(begin, begin + bytes);
  mine = std::make_shared<Kernel>();
}
void kernel_ends(fa_emulated_stream* stream, const char* name) {
  if (!hooked) return;
  const bool leaves = !before.empty() && !mine->waited;
  if (mine->lets_next_start) {
    before.push_back(std::move(mine));
    const std::lock_guard lock(mutex);
    may_run[stream] = std::move(before);
  }
  before.clear();
  if (leaves)
    throw std::logic_error(
        std::string(name) +
        ": it was launched early and has ended, and no thread of it has called "
        "previous_kernel_is_done(): what comes later in the stream waits for this kernel, and the "
        "one before it may run still (PTX, griddepcontrol)");
}

void let_next_kernel_start() {
  if (!hooked) return;
  mine->lets_next_start = true;
  let_by_block = block_number;
}
void wait_for_kernel_before() {
  if (!hooked) return;
  mine->waited = true;
  take_end_of(the_kernel_before());
}

bool notes_reads() { return hooked && (let_by_block == block_number || !before.empty()); }
void touches_device(const void* p, std::size_t bytes, Touch touch, Place place) {
  if (touch == Touch::reads ? !notes_reads() : !hooked) return;
  const bool judged = !before.empty() && !knows_end_of(the_kernel_before());
  const bool noted = touch != Touch::reads || let_by_block == block_number;
  if ((!judged && !noted) || !of_device(static_cast<const char*>(p))) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(p), end = begin + bytes;
  for (std::uintptr_t at = begin; at < end; at = (at / 16 + 1) * 16) {
    const unsigned last = unsigned(std::min(end - at / 16 * 16, std::uintptr_t(16)));
    const unsigned mask = (1u << last) - (1u << at % 16);
    const std::size_t chunk = at / 16 % 256;
    if (judged)
      for (const auto& kernel : before)
        if (const auto page = kernel->pages.find(at / 4096); page != kernel->pages.end())
          must_be_apart((*page->second)[chunk], mask, touch, place);
    if (!noted) continue;
    std::unique_ptr<Page>& page = mine->pages[at / 4096];
    if (!page) page = std::make_unique<Page>();
    Notes& n = (*page)[chunk];
    n.places[std::size_t(touch)] = place;
    n.bytes[std::size_t(touch)] = std::uint16_t(n.bytes[std::size_t(touch)] | mask);
  }
}
void hooked_addition(const volatile void* p, unsigned bytes, Place place) {
  if (here.stack) touches_device(const_cast<const void*>(p), bytes, Touch::adds, place);
}

}  // namespace fa::emulator
