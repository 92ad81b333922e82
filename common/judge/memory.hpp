// How much memory a call takes beyond its arguments: every malloc of the process is counted.
#pragma once
#include <cstdint>
#include <string>

#include "common/judge/function_ref.hpp"

namespace fa::judge {

// Largest number of heap bytes alive at once during f, above what was alive before it; all threads
// counted. -1 where malloc cannot be counted (sanitizers, systems without glibc).
std::int64_t peak_heap_bytes(FunctionRef<void()> f);

// Runs f in a child process that may take `bytes` more address space, for such a limit cannot be
// taken back. Empty if f came to its end or threw std::invalid_argument; otherwise what it did. Not
// under sanitizers, which reserve terabytes.
std::string under_limit(std::int64_t bytes, FunctionRef<void()> f);

}  // namespace fa::judge
