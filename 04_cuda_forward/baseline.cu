// What FlashAttention is measured against: two products by the vendor's library, and between them a
// kernel for the softmax. Every score makes four trips through memory: S is written, read, P is
// written, read.
#include "04_cuda_forward/cuda_forward.hpp"

#ifdef FA_EMULATED

#include <stdexcept>

namespace fa::cuda_forward {
void launch_baseline(const Problem&, const Forward<float>&, float, float*, cudaStream_t) {
  throw std::logic_error("baseline: unsupported() says no here");
}
}  // namespace fa::cuda_forward

#else

#include <cublas_v2.h>
#include <map>

namespace fa::cuda_forward {
namespace {

void check(cublasStatus_t status, const char* call, int line) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(call) + " failed at " + __FILE__ + ":" +
                             std::to_string(line) + ": " + cublasGetStatusString(status));
}
#define FA_CUBLAS_CHECK(call) check(call, #call, __LINE__)

struct Handle {
  cublasHandle_t handle = nullptr;
  Handle() { FA_CUBLAS_CHECK(cublasCreate(&handle)); }
  ~Handle() { cublasDestroy(handle); }
};
// cuBLAS keeps its workspace with a handle, and a handle belongs to a device: a thread makes one
// for each, and keeps it.
cublasHandle_t handle_of_this_device() {
  thread_local std::map<int, Handle> handles;
  int device = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  return handles[device].handle;
}

constexpr int warps = 4;

__device__ float warp_max(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}

// A warp per row of S: the three passes of stage 01. P takes the place of S.
__global__ void softmax_kernel(Problem p, float* S, float* LSE) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= p.B * p.Hq * p.Nq) return;
  float* s = S + row * p.Nk;
  const std::int64_t n = visible_keys(p, row / p.Nq / p.Hq, row % p.Nq);
  float m = -INFINITY, l = 0;
  for (std::int64_t j = lane; j < n; j += 32) m = fmaxf(m, s[j]);
  m = warp_max(m);
  for (std::int64_t j = lane; j < n; j += 32) l += __expf(s[j] - m);
  l = warp_sum(l);
  for (std::int64_t j = lane; j < p.Nk; j += 32) s[j] = j < n ? __expf(s[j] - m) / l : 0;
  if (LSE && lane == 0) LSE[row] = m + logf(l);
}

}  // namespace

void launch_baseline(const Problem& p, const Forward<float>& t, float scale, float* S,
                     cudaStream_t stream) {
  const cublasHandle_t cublas = handle_of_this_device();
  FA_CUBLAS_CHECK(cublasSetStream(cublas, stream));
  const int Nq = int(p.Nq), Nk = int(p.Nk), d = int(p.d), group = int(p.Hq / p.Hkv);
  const float one = 1, zero = 0;
  // The query heads that share a key head are one batched product: their K has stride 0. Without
  // groups all heads of a batch entry are. cuBLAS thinks in columns: it sees every matrix
  // transposed.
  const int batch = group == 1 ? int(p.Hq) : group;
  const auto products = [&](auto product) {
    for (std::int64_t b = 0; b < p.B; ++b)
      for (std::int64_t h = 0; h < p.Hq; h += batch)
        product(b, h, p.key_head(h), S + (b * p.Hq + h) * p.Nq * p.Nk);
  };
  const std::int64_t S_stride = p.Nq * p.Nk;
  if (Nk > 0)
    products([&](std::int64_t b, std::int64_t h, std::int64_t hk, float* s) {
      FA_CUBLAS_CHECK(cublasSgemmStridedBatched(
          cublas, CUBLAS_OP_T, CUBLAS_OP_N, Nk, Nq, d, &scale, t.K.at(b, hk), int(t.K.row),
          group == 1 ? t.K.head : 0, t.Q.at(b, h), int(t.Q.row), t.Q.head, &zero, s, Nk, S_stride,
          batch));
    });
  const std::int64_t blocks = (p.B * p.Hq * p.Nq + warps - 1) / warps;
  FA_LAUNCH(softmax_kernel, dim3(unsigned(blocks)), dim3(32 * warps), 0, stream, p, S, t.LSE);
  products([&](std::int64_t b, std::int64_t h, std::int64_t hk, float* s) {
    FA_CUBLAS_CHECK(cublasSgemmStridedBatched(cublas, CUBLAS_OP_N, CUBLAS_OP_N, d, Nq, Nk, &one,
                                              t.V.at(b, hk), int(t.V.row),
                                              group == 1 ? t.V.head : 0, s, max(Nk, 1), S_stride,
                                              &zero, t.O.at(b, h), int(t.O.row), t.O.head, batch));
  });
}

}  // namespace fa::cuda_forward

#endif
