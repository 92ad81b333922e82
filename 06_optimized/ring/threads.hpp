// Ranks that are threads of one process: a communicator for tests, and for reading.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// f(communicator) on `ranks` threads at once. A rank that waits for another for longer than
// `patience` ends all. Returns what each rank's f threw, or "" where it came to its end.
std::vector<std::string> on_threads(int ranks, std::chrono::milliseconds patience,
                                    const std::function<void(Communicator&)>& f);

}  // namespace fa::ring
