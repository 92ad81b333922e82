#include "common/measure/roof.hpp"

#include <chrono>
#include <thread>
#include <vector>

namespace fa::bench {
namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
typedef float Floats __attribute__((vector_size(vector_bytes)));

// As many chains as hide the latency of all multiply-add units: two of 4 or 5 cycles, or up to four
// on wide arm64 cores, which have 32 registers to hold them.
#if defined(__ARM_NEON)
constexpr int chains = 20;
#else
constexpr int chains = 12;
#endif
constexpr int steps = 1000;

double flops_of_thread(double seconds) {
  using Clock = std::chrono::steady_clock;
  Floats x[chains] = {}, a = {}, b = {};
  a += 0.999f;
  b += 0.001f;
  long rounds = 0;
  const auto start = Clock::now();
  std::chrono::duration<double> taken{};
  do {
    for (int s = 0; s < steps; ++s)
      for (int c = 0; c < chains; ++c) x[c] = x[c] * a + b;
    // The loop above must not be folded away.
    for (int c = 0; c < chains; ++c) asm volatile("" : "+m"(x[c]));
    ++rounds;
    taken = Clock::now() - start;
  } while (taken.count() < seconds);
  constexpr double lanes = double(vector_bytes) / sizeof(float);
  return 2.0 * lanes * chains * steps * double(rounds) / taken.count();
}

}  // namespace

double fma_peak(int threads, double seconds) {
  std::vector<double> flops(static_cast<std::size_t>(threads));
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t)
    others.emplace_back([&, t] { flops[static_cast<std::size_t>(t)] = flops_of_thread(seconds); });
  flops[0] = flops_of_thread(seconds);
  for (auto& thread : others) thread.join();
  double sum = 0;
  for (double f : flops) sum += f;
  return sum;
}

}  // namespace fa::bench
