// The kernels against each other and against the baseline that stores the scores; B = 4, H = 8. All
// rungs of the ladder at two lengths, its ends at all. The side trail of stage 03 runs on all cores
// of the same machine, with B = 1.
#include <iterator>
#include <thread>
#include "03_tiled_cpu/tiled_cpu.hpp"
#include "04_cuda_forward/cuda_forward.hpp"
#include "common/measure/gpu_bench.hpp"

void fa::bench::register_benchmarks(Size size) {
  using cuda_forward::Kernel;
  needs_gpu();
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
        std::vector<Kernel> kernels = {Kernel::baseline, Kernel::tiled, Kernel::register_tiled,
                                       Kernel::longest_first};
        if (size == Size::full && (N == 1024 || N == 4096)) {
          kernels.assign(std::begin(cuda_forward::ladder), std::end(cuda_forward::ladder));
          kernels.push_back(Kernel::baseline);
        }
        for (Kernel kernel : kernels)
          gpu_forward(std::string("stage04/forward/") + cuda_forward::name(kernel), p,
                      cuda_forward::scratch_bytes(p, kernel),
                      [kernel](const Problem& q, const Forward<float>& t, const Scratch& scratch,
                               cudaStream_t stream) {
                        cuda_forward::forward(q, t, {kernel, stream, scratch});
                      });
        if (N > 4096) continue;
        p.B = 1;
        forward<float>(
            "stage03/forward/fast", p,
            [](const Problem& q, const Forward<float>& t) {
              tiled_cpu::forward(q, t, {tiled_cpu::Kernel::fast});
            },
            int(std::thread::hardware_concurrency()));
      }
}
