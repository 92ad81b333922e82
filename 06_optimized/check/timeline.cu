// One rung of the ladder by itself, for timeline.py: its speed and, if it was instrumented, what
// block 66 did when. FA_RUNG: the file; FA_LAUNCH_RUNG: its launch function.
#include FA_RUNG

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace fa;

// Normal numbers, the same in every run.
__global__ void fill(__nv_bfloat16* to, std::int64_t count, unsigned seed) {
  const std::int64_t e = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= count) return;
  unsigned bits[2] = {unsigned(e) * 2654435761u + seed, unsigned(e) * 2246822519u + 3 * seed};
  for (unsigned& x : bits) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
  }
  const float u = (float(bits[0]) + 1) / 4294967808.0f, v = float(bits[1]) / 4294967296.0f;
  to[e] = __float2bfloat16(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v));
}

void launch(const Problem& p, const Forward<__nv_bfloat16>& t) {
  const float scale = float(p.softmax_scale());
#ifdef FA_WITH_COUNTER
  optimized::FA_LAUNCH_RUNG(p, t, scale, nullptr, nullptr);
#else
  optimized::FA_LAUNCH_RUNG(p, t, scale, nullptr);
#endif
}

int run() {
  Problem p;
  p.B = 4;
  p.Hq = p.Hkv = 16;
  p.Nq = p.Nk = 4096;
  p.d = 128;
  const std::int64_t count = p.B * p.Hq * p.Nq * p.d;
  std::vector<DeviceMemory> memory;
  std::vector<View<__nv_bfloat16>> views;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    memory.emplace_back(sizeof(__nv_bfloat16) * std::size_t(count));
    views.push_back(contiguous(memory.back().as<__nv_bfloat16>(), p.Hq, p.Nq, p.d));
    FA_LAUNCH(fill, dim3(unsigned(count / 256)), dim3(256), 0, nullptr, views.back().data, count,
              seed);
  }
  const Forward<__nv_bfloat16> t{views[0], views[1], views[2], views[3], nullptr};
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int n = 0; n < 30; ++n) {
    FA_CUDA_CHECK(cudaEventRecord(begin));
    launch(p, t);
    FA_CUDA_CHECK(cudaEventRecord(end));
    FA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    FA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (n >= 10) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  std::printf("ms %.5f\n", double(times[times.size() / 2]));
#ifdef FA_STAMPS
  static uint2 stamps[2][FA_STAMPS];
  FA_CUDA_CHECK(cudaMemcpyFromSymbol(stamps, fa_stamps, sizeof stamps));
  for (int group = 0; group < 2; ++group)
    for (const uint2& s : stamps[group])
      if (s.x) std::printf("%d %u %u\n", group, s.x, s.y);
#endif
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "timeline: %s\n", e.what());
    return 1;
  }
}
