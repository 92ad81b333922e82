// A kernel or a variant of it as a C function for ab.py: bf16, and no choice among kernels.
// FA_KERNEL: the file; FA_LAUNCHER: its host function; FA_BACKWARD: of the backward ladder.
// FA_COUNTS, FA_ADDS_DQ: it counts tiles, or adds up dQ, in the scratch.
// FA_K_TRANSPOSED: it wants K with a row for each dimension, which is made here, at each call.
#include FA_KERNEL

#include "common/measure/peers/peer.hpp"

using namespace fa;
using T = __nv_bfloat16;

#ifdef FA_BACKWARD

static optimized::Passed passed(const Problem& p, void* scratch) {
  optimized::Passed x{};
  x.rows = optimized::Passed::padded_rows(p.Nq);
  const std::int64_t rows = p.B * p.Hq * x.rows;
  x.LSE2 = static_cast<float*>(scratch);
  x.D = x.LSE2 + rows;
#ifdef FA_ADDS_DQ
  x.dQ = x.D + rows;
  x.taken = reinterpret_cast<unsigned*>(x.dQ + rows * optimized::Passed::padded(p.d));
#endif
  return x;
}

static void launch(const Problem& p, const fa_peer_call& c) {
  optimized::FA_LAUNCHER(p, bench::backward_of<T>(c), float(p.softmax_scale()),
                         passed(p, c.scratch), static_cast<cudaStream_t>(c.stream));
}

#elif defined(FA_COUNTS)

#ifdef FA_K_TRANSPOSED
// X^T of a head a block along z, 32 x 32 numbers at a time.
__global__ void transpose(T* to, View<const T> K, int heads, int N, int d, int row) {
  __shared__ T tile[32][33];
  const int h = blockIdx.z % heads, b = blockIdx.z / heads;
  const int i = blockIdx.x * 32, x = blockIdx.y * 32;
  for (int r = threadIdx.y; r < 32; r += 8)
    if (i + r < N) tile[r][threadIdx.x] = K.at(b, h, i + r)[x + threadIdx.x];
  __syncthreads();
  for (int r = threadIdx.y; r < 32; r += 8)
    if (i + int(threadIdx.x) < N)
      to[(std::int64_t(blockIdx.z) * d + x + r) * row + i + threadIdx.x] = tile[threadIdx.x][r];
}
static Forward<T> with_transposed_K(const Problem& p, Forward<T> t, cudaStream_t stream) {
  static T* memory = nullptr;
  static std::int64_t size = 0;
  const std::int64_t row = (p.Nk + 7) / 8 * 8, wanted = p.B * p.Hkv * p.d * row;
  if (size < wanted) {
    FA_CUDA_CHECK(cudaFree(memory));
    FA_CUDA_CHECK(cudaMalloc(&memory, std::size_t(size = wanted) * sizeof(T)));
  }
  const dim3 grid(unsigned((p.Nk + 31) / 32), unsigned(p.d / 32), unsigned(p.B * p.Hkv));
  FA_LAUNCH(transpose, grid, dim3(32, 8), 0, stream, memory, t.K, int(p.Hkv), int(p.Nk), int(p.d),
            int(row));
  t.K = {memory, p.Hkv * p.d * row, p.d * row, row};
  return t;
}
#endif

static void launch(const Problem& p, const fa_peer_call& c) {
  Forward<T> t = bench::forward_of<T>(c);
#ifdef FA_K_TRANSPOSED
  t = with_transposed_K(p, t, static_cast<cudaStream_t>(c.stream));
#endif
#ifdef FA_COUNT_ALWAYS
  const bool count = true;
#else
  const bool count = p.causal != Causal::none;
#endif
  optimized::FA_LAUNCHER(p, t, float(p.softmax_scale()),
                         count ? static_cast<unsigned*>(c.scratch) : nullptr,
                         static_cast<cudaStream_t>(c.stream));
}

#else

static void launch(const Problem& p, const fa_peer_call& c) {
  optimized::FA_LAUNCHER(p, bench::forward_of<T>(c), float(p.softmax_scale()),
                         static_cast<cudaStream_t>(c.stream));
}

#endif

// Null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fa_ab_launch(const fa_peer_call* c) {
  return bench::as_c([&] { launch(bench::problem_of(*c), *c); });
}
