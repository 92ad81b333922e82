// The side trail and the multiply-add peak as C functions, for pytorch.py: both sides are timed in
// one process, on the same tensors and the same cores.
#include "common/measure/peers/peer.hpp"

#include "03_tiled_cpu/tiled_cpu.hpp"
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
