// The engine in host memory: stage 03's forward and stage 05's plain backward.
#pragma once
#include <memory>

#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// T: float or double. threads: of this rank.
template <class T>
std::unique_ptr<Engine<T>> cpu_engine(int threads = 1);

}  // namespace fa::ring
