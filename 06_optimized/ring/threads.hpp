// Ranks that are threads of one process: a communicator for tests, and for reading.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// f(communicator) on `ranks` threads at once. A rank that waits for another for longer than
// `patience` ends all. Returns what each rank's f threw, or "" where it came to its end. `copy`
// (to, from, bytes) carries messages where they are not in host memory.
using Copy = std::function<void(void*, const void*, std::size_t)>;
std::vector<std::string> on_threads(int ranks, std::chrono::milliseconds patience,
                                    const std::function<void(Communicator&)>& f,
                                    const Copy& copy = nullptr);

}  // namespace fa::ring
