// The backward kernels against each other, against one that stores P, and beside the forward of
// stage 04; B = 4, H = 8.
#include "05_cuda_backward/cuda_backward.hpp"

#include "04_cuda_forward/cuda_forward.hpp"
#include "common/measure/gpu_bench.hpp"

void fa::bench::register_benchmarks(Size size) {
  using cuda_backward::Delta, cuda_backward::Kernel, cuda_backward::Options, cuda_backward::Tiles;
  using ForwardKernel = cuda_forward::Kernel;
  needs_gpu();
  const auto forward = [](ForwardKernel kernel) {
    return [kernel](const Problem& p, const Forward<float>& t, const Scratch& scratch,
                    cudaStream_t stream) {
      cuda_forward::forward(p, t, {kernel, stream, scratch});
    };
  };
  const auto backward = [](Options options) {
    return [options](const Problem& p, const Backward<float>& t, const Scratch& scratch,
                     cudaStream_t stream) {
      Options o = options;
      o.stream = stream;
      o.scratch = scratch;
      cuda_backward::backward(p, t, o);
    };
  };
  for (std::int64_t d :
       size == Size::full ? std::vector<std::int64_t>{64, 128} : std::vector<std::int64_t>{64})
    for (std::int64_t N : sizes(size, {512, 1024, 2048, 4096}, {8192, 16384}))
      for (Causal causal : {Causal::none, Causal::top_left}) {
        Problem p;
        p.B = 4;
        p.Hq = p.Hkv = 8;
        p.Nq = p.Nk = N;
        p.d = d;
        p.causal = causal;
        gpu_forward("stage04/forward/best", p, 0, forward(ForwardKernel::best));
        const auto add = [&](const std::string& name, const Options& options, bool both) {
          const bool stored = options.kernel == Kernel::stored;
          gpu_backward(name, p, {cuda_backward::scratch_bytes(p, options), both, stored},
                       forward(stored ? ForwardKernel::baseline : ForwardKernel::best),
                       backward(options));
        };
        add("stage05/backward/stored", {Kernel::stored}, false);
        add("stage05/backward/two_kernels", {.tiles = Tiles::lesson}, false);
        if (causal == Causal::none) {
          add("stage05/backward/with_dq", {.delta = Delta::with_dq, .tiles = Tiles::lesson}, false);
          add("stage05/backward/in_loop", {.delta = Delta::in_loop, .tiles = Tiles::lesson}, false);
        }
        add("stage05/backward/atomic", {.kernel = Kernel::atomic, .tiles = Tiles::lesson}, false);
        add("stage05/backward/fast", {}, false);
        add("stage05/backward/fast_atomic", {.kernel = Kernel::atomic}, false);
        add("stage05/both/stored", {Kernel::stored}, true);
        add("stage05/both/fast", {}, true);
      }
}
