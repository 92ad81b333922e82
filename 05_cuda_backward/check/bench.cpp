#include "common/harness/gpu_bench.hpp"
void fa::bench::register_benchmarks(Size) { needs_gpu(); }
