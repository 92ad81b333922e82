// The rival: a backward with everything stored. The forward has kept P; dP is stored as well. Four
// products by the vendor's library, and a small kernel that turns dP into dS where it stands.
#include "05_cuda_backward/tile.cuh"

#ifdef FA_EMULATED

namespace fa::cuda_backward {
void launch_stored(const Problem&, const Backward<float>&, float, const float*, float*,
                   cudaStream_t) {
  throw std::logic_error("stored: unsupported() says no here");
}
}  // namespace fa::cuda_backward

#else

#include <cublas_v2.h>
#include <map>

namespace fa::cuda_backward {
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

// dS = P (dP - D) with D = dO . O, a warp per row, in the place of dP.
__global__ void softmax_gradient_kernel(Problem p, Backward<float> t, const float* P, float* dP) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= p.B * p.Hq * p.Nq) return;
  const std::int64_t head = row / p.Nq, i = row % p.Nq, b = head / p.Hq, h = head % p.Hq;
  float D = 0;
  for (int x = lane; x < p.d; x += 32) D += t.dO.at(b, h, i)[x] * t.O.at(b, h, i)[x];
  for (int bits = 16; bits > 0; bits /= 2) D += __shfl_xor_sync(0xffffffff, D, bits);
  for (std::int64_t j = lane; j < p.Nk; j += 32)
    dP[row * p.Nk + j] = P[row * p.Nk + j] * (dP[row * p.Nk + j] - D);
}

}  // namespace

void launch_stored(const Problem& p, const Backward<float>& t, float scale, const float* P,
                   float* dP, cudaStream_t stream) {
  const cublasHandle_t cublas = handle_of_this_device();
  FA_CUBLAS_CHECK(cublasSetStream(cublas, stream));
  const int Nq = int(p.Nq), Nk = int(p.Nk), d = int(p.d), H = int(p.Hq);
  const float one = 1, zero = 0;
  const std::int64_t square = p.Nq * p.Nk;
  // One batched product for all heads of a batch entry; cuBLAS sees every matrix transposed.
  const auto product = [&](cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k,
                           float alpha, const float* A, std::int64_t lda, std::int64_t a_head,
                           const float* B, std::int64_t ldb, std::int64_t b_head, float* C,
                           std::int64_t ldc, std::int64_t c_head) {
    FA_CUBLAS_CHECK(cublasSgemmStridedBatched(cublas, a_op, b_op, m, n, k, &alpha, A, int(lda),
                                              a_head, B, int(ldb), b_head, &zero, C, int(ldc),
                                              c_head, H));
  };
  constexpr auto N = CUBLAS_OP_N, T = CUBLAS_OP_T;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const float* Pb = P + b * p.Hq * square;
    float* dPb = dP + b * p.Hq * square;
    product(N, T, d, Nk, Nq, one, t.dO.at(b, 0), t.dO.row, t.dO.head, Pb, Nk, square, t.dV.at(b, 0),
            t.dV.row, t.dV.head);  // dV = P^T dO
    product(T, N, Nk, Nq, d, one, t.V.at(b, 0), t.V.row, t.V.head, t.dO.at(b, 0), t.dO.row,
            t.dO.head, dPb, Nk, square);  // dP = dO V^T
  }
  const std::int64_t blocks = (p.B * p.Hq * p.Nq + warps - 1) / warps;
  FA_LAUNCH(softmax_gradient_kernel, dim3(unsigned(blocks)), dim3(threads), 0, stream, p, t, P, dP);
  for (std::int64_t b = 0; b < p.B; ++b) {
    const float* dS = dP + b * p.Hq * square;
    product(N, N, d, Nq, Nk, scale, t.K.at(b, 0), t.K.row, t.K.head, dS, Nk, square, t.dQ.at(b, 0),
            t.dQ.row, t.dQ.head);  // dQ = scale dS K
    product(N, T, d, Nk, Nq, scale, t.Q.at(b, 0), t.Q.row, t.Q.head, dS, Nk, square, t.dK.at(b, 0),
            t.dK.row, t.dK.head);  // dK = scale dS^T Q
  }
}

}  // namespace fa::cuda_backward

#endif
