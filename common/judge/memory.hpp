// How much memory a call takes beyond its arguments: every malloc of the process is counted.
#pragma once
#include <cstdint>
#include <functional>

namespace fa::judge {

// Largest number of heap bytes alive at once during f, above what was alive before it; all threads
// counted. -1 where malloc cannot be counted (sanitizers, systems without glibc).
std::int64_t peak_heap_bytes(const std::function<void()>& f);

}  // namespace fa::judge
