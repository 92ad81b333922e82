// The ladder, and stage 04's fp32 kernel below it; B N = 16384 and H d = 2048, so that every length
// and head dimension is the same amount of data. compare.py measures the same beside PyTorch's.
#include "04_cuda_forward/cuda_forward.hpp"
#include "06_optimized/optimized.hpp"
#include "common/harness/gpu_bench.hpp"

void fa::bench::register_benchmarks(Size size) {
  needs_gpu();
  int device = 0, major = 0, minor = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const int here = 10 * major + minor;
  std::size_t count = 0;
  const optimized::Rung* const all = optimized::rungs(count);
  const auto forward = [](optimized::Kernel kernel) {
    return [kernel](const Problem& p, const auto& t, void* scratch, cudaStream_t stream) {
      optimized::forward(p, t, {kernel, stream, scratch});
    };
  };

  for (std::int64_t d : size == Size::full ? std::vector<std::int64_t>{128, 64, 256}
                                           : std::vector<std::int64_t>{128})
    for (std::int64_t N : sizes(size, {4096, 1024}, {512, 2048, 8192, 16384}))
      for (Causal causal : {Causal::none, Causal::top_left}) {
        Problem p;
        p.B = 16384 / N;
        p.Hq = p.Hkv = 2048 / d;
        p.Nq = p.Nk = N;
        p.d = d;
        p.causal = causal;
        if (d <= cuda_forward::max_d)
          gpu_forward("stage04/forward/register_tiled", p, 0,
                      [](const Problem& q, const Forward<float>& t, void*, cudaStream_t stream) {
                        cuda_forward::forward(q, t, {cuda_forward::Kernel::register_tiled, stream});
                      });
        for (const optimized::Rung* rung = all; rung != all + count; ++rung) {
          const bool fits = rung->capability == 90 ? here == 90 : here >= rung->capability;
          if (!fits || !(rung->whole_contract || d == 128 || (d == 64 && rung->d64))) continue;
          const std::string name = std::string("stage06/forward/") + rung->name;
          const std::size_t scratch = optimized::scratch_bytes(p, rung->kernel);
          gpu_forward<__nv_bfloat16>(name, p, scratch, forward(rung->kernel));
          if (rung->whole_contract && N == 4096)
            gpu_forward<__half>(name, p, scratch, forward(rung->kernel));
        }
      }
}
