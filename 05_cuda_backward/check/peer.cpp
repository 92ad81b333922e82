#include "common/measure/peers/peer.hpp"

#include <cstring>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"

// O and LSE must be there: the other function writes them.
extern "C" const char* fa_peer_backward(const char* kernel, const fa_peer_call* call) {
  using namespace fa;
  return bench::as_c([&] {
    cuda_backward::Options options;
    if (std::strstr(kernel, "atomic")) options.kernel = cuda_backward::Kernel::atomic;
    if (!std::strstr(kernel, "fast")) options.tiles = cuda_backward::Tiles::lesson;
    options.stream = static_cast<cudaStream_t>(call->stream);
    const Problem p = bench::problem_of(*call);
    options.scratch = {call->scratch,
                       cuda_backward::scratch_bytes(p, options)};  // the caller asked
    cuda_backward::backward(p, bench::backward_of<float>(*call), options);
  });
}
extern "C" const char* fa_peer_forward(const char*, const fa_peer_call* call) {
  using namespace fa;
  return bench::as_c([&] {
    cuda_forward::forward(bench::problem_of(*call), bench::forward_of<float>(*call),
                          {cuda_forward::Kernel::best, static_cast<cudaStream_t>(call->stream)});
  });
}
