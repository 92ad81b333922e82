// The side trail and the multiply-add peak as C functions, for pytorch.py: both sides are timed in
// one process, on the same tensors and the same cores.
#include "common/measure/peers/peer.hpp"

#include <chrono>
#include <thread>
#include <vector>

#include "03_tiled_cpu/tiled_cpu.hpp"
#include "common/measure/flops.hpp"
#include "common/measure/roof.hpp"

// Null, or what is wrong. Tensors are fp32.
extern "C" const char* fa_peer_forward(const fa_peer_call* call, int threads) {
  using namespace fa;
  return bench::as_c([&] {
    tiled_cpu::forward(bench::problem_of(*call), bench::forward_of<float>(*call),
                       {tiled_cpu::Kernel::fast, threads});
  });
}

// FLOP/s of `threads` threads that do nothing but multiply and add, in registers.
extern "C" double fa_peer_peak(int threads, double seconds) {
  return fa::bench::fma_peak(threads, seconds);
}

// FLOP/s of `threads` threads that share nothing: each computes one head of its own, again and again
// for about `seconds`, on itself alone.
extern "C" double fa_peer_apart(const fa_peer_call* call, int threads, double seconds) {
  using namespace fa;
  std::vector<double> flops(static_cast<std::size_t>(threads));
  const auto work = [&](int thread) {
    using Clock = std::chrono::steady_clock;
    Problem p = bench::problem_of(*call);
    const std::int64_t head = thread % p.Hq;
    Forward<float> t = bench::forward_of<float>(*call);
    t.Q.data += head * t.Q.head, t.K.data += head * t.K.head, t.V.data += head * t.V.head;
    t.O.data += head * t.O.head;
    p.Hq = p.Hkv = 1;
    double done = 0;
    const auto start = Clock::now();
    std::chrono::duration<double> taken{};
    do {
      tiled_cpu::forward(p, t, {tiled_cpu::Kernel::fast, 1});
      done += bench::forward_flops(p);
      taken = Clock::now() - start;
    } while (taken.count() < seconds);
    flops[static_cast<std::size_t>(thread)] = done / taken.count();
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& thread : others) thread.join();
  double sum = 0;
  for (double f : flops) sum += f;
  return sum;
}
