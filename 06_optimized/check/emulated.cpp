// How long the emulator takes for one head through a kernel: bf16, d = 128, the best of 5 runs, on
// one core. `FA_TIMING=early stage06_emulated`: at other times than late.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/on_cpu/half.hpp"

namespace {

using namespace fa;
using namespace fa::optimized;
using T = __nv_bfloat16;

double milliseconds(const std::function<void()>& f) {
  double best = 1e9;
  for (int run = 0; run < 5; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

struct Head {
  Problem p;
  std::vector<DeviceMemory> memory;

  explicit Head(std::int64_t N) {
    p.B = p.Hq = p.Hkv = 1;
    p.Nq = p.Nk = N;
    p.d = 128;
  }
  View<T> tensor() {
    memory.emplace_back(std::size_t(p.Nq * p.d) * sizeof(T));
    T* const data = memory.back().as<T>();
    std::mt19937 bits(unsigned(memory.size()));
    std::normal_distribution<float> normal;
    for (std::int64_t e = 0; e < p.Nq * p.d; ++e) data[e] = T(normal(bits));
    return contiguous(data, 1, p.Nq, p.d);
  }
  void* bytes(std::size_t count) { return memory.emplace_back(count).as<char>(); }
};

void measure(std::int64_t N) {
  Head head(N);
  const Problem& p = head.p;
  const View<T> Q = head.tensor(), K = head.tensor(), V = head.tensor(), O = head.tensor();
  const View<T> dO = head.tensor(), dQ = head.tensor(), dK = head.tensor(), dV = head.tensor();
  auto* const LSE = static_cast<float*>(head.bytes(std::size_t(N) * sizeof(float)));
  const DeviceMemory counter(scratch_bytes(p, Kernel::hopper));
  const DeviceMemory scratch(backward_scratch_bytes(p, {BackwardKernel::hopper}));
  const double forwards = milliseconds([&] {
    forward(p, Forward<T>{Q, K, V, O, LSE}, Options{Kernel::hopper, nullptr, counter});
  });
  const double backwards = milliseconds([&] {
    backward(p, Backward<T>{Q, K, V, O, dO, LSE, dQ, dK, dV},
             BackwardOptions{BackwardKernel::hopper, false, nullptr, scratch});
  });
  std::printf("N = %4ld: forward %6.1f ms, backward %6.1f ms\n", long(N), forwards, backwards);
}

}  // namespace

int main() {
  measure(256);
  measure(1024);
}
