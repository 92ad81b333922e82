// One rung of a ladder by itself, for timeline.py: its speed and, if it was instrumented, what
// block 66 did when. FA_RUNG: the file; FA_LAUNCH_RUNG: its launch function; FA_BACKWARD: of the
// backward ladder; FA_IN_TURNS: whose blocks take turns.
#include FA_RUNG

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace fa;
using T = __nv_bfloat16;

// Normal numbers, the same in every run.
__global__ void fill(T* to, unsigned seed) {
  const std::int64_t e = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  unsigned bits[2] = {unsigned(e) * 2654435761u + seed, unsigned(e) * 2246822519u + 3 * seed};
  for (unsigned& x : bits) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
  }
  const float u = (float(bits[0]) + 1) / 4294967808.0f, v = float(bits[1]) / 4294967296.0f;
  to[e] = __float2bfloat16(sqrtf(-2 * logf(u)) * cosf(6.2831853f * v));
}

#ifdef FA_BACKWARD
__global__ void set(float* to, float x) {
  to[std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x] = x;
}
#endif

// Tensors of one problem, and what a call of the kernel is.
struct Case {
  Problem p;
  std::vector<DeviceMemory> memory;

  template <class X>
  X* room(std::int64_t count) {
    memory.emplace_back(sizeof(X) * std::size_t(count));
    return memory.back().as<X>();
  }
  View<T> tensor(unsigned seed) {
    const std::int64_t count = p.B * p.Hq * p.Nq * p.d;
    T* const x = room<T>(count);
    FA_LAUNCH(fill, dim3(unsigned(count / 256)), dim3(256), 0, nullptr, x, seed);
    return contiguous(x, p.Hq, p.Nq, p.d);
  }
#ifdef FA_BACKWARD
  // Scores are normal numbers, so L = log(Nk e^(1/2)), nearly; O and dO may be any.
  const float* LSE() {
    const std::int64_t count = p.B * p.Hq * p.Nq;
    float* const x = room<float>(count);
    FA_LAUNCH(set, dim3(unsigned(count / 256)), dim3(256), 0, nullptr, x,
              std::log(float(p.Nk)) + 0.5f);
    return x;
  }
  const std::int64_t rows = optimized::Passed::padded_rows(p.Nq), all_rows = p.B * p.Hq * rows;
  const Backward<T> t{tensor(1), tensor(2), tensor(3), tensor(4), tensor(5),
                      LSE(),     tensor(6), tensor(7), tensor(8)};
#ifdef FA_IN_TURNS
  int* const turn = room<int>(all_rows / 64 * (optimized::Passed::padded(p.d) / 64));
#else
  int* const turn = nullptr;
#endif
  const optimized::Passed passed{room<float>(all_rows), room<float>(all_rows),
                                 room<float>(all_rows* optimized::Passed::padded(p.d)), rows, turn};
  void launch() { optimized::FA_LAUNCH_RUNG(p, t, float(p.softmax_scale()), passed, nullptr); }
#else
  const Forward<T> t{tensor(1), tensor(2), tensor(3), tensor(4), nullptr};
  void launch() {
#ifdef FA_WITH_COUNTER
    optimized::FA_LAUNCH_RUNG(p, t, float(p.softmax_scale()), nullptr, nullptr);
#else
    optimized::FA_LAUNCH_RUNG(p, t, float(p.softmax_scale()), nullptr);
#endif
  }
#endif
};

int run() {
  Problem p;
  p.B = 4;
  p.Hq = p.Hkv = 16;
  p.Nq = p.Nk = 4096;
  p.d = 128;
  Case c{p};
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int n = 0; n < 30; ++n) {
    FA_CUDA_CHECK(cudaEventRecord(begin));
    c.launch();
    FA_CUDA_CHECK(cudaEventRecord(end));
    FA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    FA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (n >= 10) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  std::printf("ms %.5f\n", double(times[times.size() / 2]));
#ifdef FA_STAMPS
  static uint2 stamps[FA_WHO][FA_STAMPS];
  FA_CUDA_CHECK(cudaMemcpyToSymbol(fa_stamps, stamps, sizeof stamps));  // of one launch alone
  c.launch();
  FA_CUDA_CHECK(cudaMemcpyFromSymbol(stamps, fa_stamps, sizeof stamps));
  for (int who = 0; who < FA_WHO; ++who)
    for (const uint2& s : stamps[who])
      if (s.x) std::printf("%d %u %u\n", who, s.x, s.y);
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
