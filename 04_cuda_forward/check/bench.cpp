#include "common/harness/bench.hpp"
void fa::bench::register_benchmarks(Size) {}
