#include "common/measure/peers/peer.hpp"

#include <cstring>

#include "04_cuda_forward/cuda_forward.hpp"

extern "C" const char* fa_peer_forward(const char* kernel, const fa_peer_call* call) {
  using namespace fa;
  return bench::as_c([&] {
    auto chosen = cuda_forward::Kernel::best;
    for (auto k : cuda_forward::ladder)
      if (std::strcmp(cuda_forward::name(k), kernel) == 0) chosen = k;
    cuda_forward::forward(bench::problem_of(*call), bench::forward_of<float>(*call),
                          {chosen, static_cast<cudaStream_t>(call->stream)});
  });
}
