// Inside of the benchmark main: how rows and facts about the machine are added.
#pragma once
#include <benchmark/benchmark.h>

#include <functional>
#include <string>

namespace fa::bench {

// The least time of a sample, by the size that was asked for.
double sample_seconds();

// A pointer to a registered benchmark, whose type has another name from version 1.9.5 on.
using Row = decltype(benchmark::RegisterBenchmark("", (void (*)(benchmark::State&)) nullptr));

// A row in milliseconds; an exception of body becomes the row's error.
Row add_row(const std::string& name, const std::function<void(benchmark::State&)>& body);

// The results are those of this device, not of the CPU.
void describe_machine(const std::string& machine, const std::string& device, const std::string& isa,
                      int cores);
void add_context(const std::string& key, const std::string& value);

}  // namespace fa::bench
