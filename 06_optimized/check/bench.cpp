// Both ladders, each above the fp32 kernel of an earlier stage; B N = 16384 and H d = 2048, so that
// every length and head dimension is the same amount of data. compare.py measures the same beside
// PyTorch's.
#include <algorithm>
#include <string>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/measure/gpu_bench.hpp"

namespace {

using namespace fa;
using Int = std::int64_t;

int capability_here() {
  int device = 0, major = 0, minor = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

// Of either ladder: can this rung run here, on this head dimension?
bool runs(const auto& rung, Int d) {
  static const int here = capability_here();
  const bool fits = rung.capability == 90 ? here == 90 : here >= rung.capability;
  return fits && (rung.whole_contract || d == 128 || (d == 64 && rung.d64));
}

auto forward(optimized::Kernel kernel) {
  return [kernel](const Problem& p, const auto& t, const Scratch& scratch, cudaStream_t stream) {
    optimized::forward(p, t, {kernel, stream, scratch});
  };
}
auto backward(optimized::BackwardKernel kernel) {
  return [kernel](const Problem& p, const auto& t, const Scratch& scratch, cudaStream_t stream) {
    optimized::backward(p, t, {kernel, false, stream, scratch});
  };
}

void add_forward(const Problem& p, bool all) {
  using cuda_forward::Kernel;
  if (p.d <= cuda_forward::max_d)
    bench::gpu_forward(
        "stage04/forward/register_tiled", p, 0,
        [](const Problem& q, const Forward<float>& t, const Scratch&, cudaStream_t stream) {
          cuda_forward::forward(q, t, {Kernel::register_tiled, stream});
        });
  std::size_t count = 0;
  const optimized::Rung* const first = optimized::rungs(count);
  for (const optimized::Rung* rung = first; rung != first + count; ++rung) {
    if (!runs(*rung, p.d) || !(all || rung->whole_contract)) continue;
    const std::string name = std::string("stage06/forward/") + rung->name;
    const std::size_t scratch = optimized::scratch_bytes(p, rung->kernel);
    bench::gpu_forward<__nv_bfloat16>(name, p, scratch, forward(rung->kernel));
    if (rung->whole_contract && p.Nk == 4096)
      bench::gpu_forward<__half>(name, p, scratch, forward(rung->kernel));
  }
}

void add_backward(const Problem& p, bool all) {
  if (p.d <= cuda_backward::max_d)
    bench::gpu_backward(
        "stage05/backward/two_kernels", p, {cuda_backward::scratch_bytes(p, {})},
        [](const Problem& q, const Forward<float>& t, const Scratch&, cudaStream_t stream) {
          cuda_forward::forward(q, t, {cuda_forward::Kernel::best, stream});
        },
        [](const Problem& q, const Backward<float>& t, const Scratch& scratch,
           cudaStream_t stream) {
          cuda_backward::Options options;
          options.stream = stream;
          options.scratch = scratch;
          cuda_backward::backward(q, t, options);
        });
  std::size_t count = 0;
  const optimized::BackwardRung* const first = optimized::backward_rungs(count);
  for (const optimized::BackwardRung* rung = first; rung != first + count; ++rung) {
    if (!runs(*rung, p.d) || !(all || rung->whole_contract)) continue;
    const std::string name = std::string("stage06/backward/") + rung->name;
    const bench::BackwardRow row{std::max(optimized::backward_scratch_bytes(p, {rung->kernel}),
                                          optimized::scratch_bytes(p))};
    const auto before = forward(optimized::Kernel::best);
    bench::gpu_backward<__nv_bfloat16>(name, p, row, before, backward(rung->kernel));
    if (rung->whole_contract && p.Nk == 4096)
      bench::gpu_backward<__half>(name, p, row, before, backward(rung->kernel));
  }
}

}  // namespace

void fa::bench::register_benchmarks(Size size) {
  needs_gpu();
  for (Int d : size == Size::full ? std::vector<Int>{128, 64, 256} : std::vector<Int>{128})
    for (Int N : sizes(size, {4096, 1024, 2048}, {512, 8192, 16384}))
      for (Causal causal : {Causal::none, Causal::top_left}) {
        Problem p;
        p.B = 16384 / N;
        p.Hq = p.Hkv = 2048 / d;
        p.Nq = p.Nk = N;
        p.d = d;
        p.causal = causal;
        const bool all =
            size != Size::quick || N == 4096;  // else only what keeps the whole contract
        add_forward(p, all);
        add_backward(p, all);
      }
}
