// What tune.py asks of a GPU: which one it is; random tensors; whether a launch is right; how long
// it takes. A library with C functions, so that no Python package is needed. Each returns null, or
// what went wrong.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <vector>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"
#include "common/core/tuned.hpp"

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace fa;

struct Case {
  Problem p;
  TunedCall::Type type;
  DeviceMemory Q, K, V, O, LSE, first_O, first_LSE, worst, taken;
  std::int64_t rows() const { return p.B * p.Hq * p.Nq; }
  std::size_t bytes() const { return rows() * p.d * (type == TunedCall::fp32 ? 4 : 2); }
};
Case now;

template <class F>
const char* as_c(F f) {
  static std::string text;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    text = e.what();
    return text.c_str();
  }
}

__device__ std::uint32_t hash(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
// Normal numbers, by Box and Muller.
template <class T>
__global__ void fill(T* X, std::int64_t n, std::uint32_t seed) {
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const std::uint32_t a = hash(std::uint32_t(i) * 2 + seed), b = hash(a ^ 0x9e3779b9u);
    const float radius = sqrtf(-2 * logf((a + 1.f) * 2.3283064e-10f + 1e-20f));
    X[i] = T(radius * cospif(b * 4.6566129e-10f));
  }
}

// Rows of O in double precision, a block each, in place of what is there.
template <class T>
__global__ void expect(Problem p, const T* Q, const T* K, const T* V, T* O, float* LSE) {
  extern __shared__ double P[];  // [Nk]
  __shared__ double sum;
  const std::int64_t row = blockIdx.x, head = row / p.Nq, i = row % p.Nq;
  const int seen = int(visible_keys(p, 0, i)), d = int(p.d);
  const T *q = Q + row * d, *k = K + head * p.Nk * d, *v = V + head * p.Nk * d;
  const double scale = 1 / sqrt(double(d));
  for (int j = threadIdx.x; j < seen; j += 128) {
    double s = 0;
    for (int x = 0; x < d; ++x) s += double(float(q[x])) * double(float(k[j * d + x]));
    P[j] = exp(scale * s);  // of normal numbers: no score is large
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (int j = 0; j < seen; ++j) sum += P[j];
    LSE[row] = float(log(sum));
  }
  __syncthreads();
  for (int x = threadIdx.x; x < d; x += 128) {
    double o = 0;
    for (int j = 0; j < seen; ++j) o += P[j] * double(float(v[j * d + x]));
    O[row * d + x] = T(float(o / sum));
  }
}

// worst[0] = max over rows of |a - b| / |b|, worst[1] = max |LSE - its LSE|; NaN counts as infinite
template <class T>
__global__ void compare(const T* A, const T* B, const float* L, const float* M, int d, int* worst) {
  const std::int64_t row = blockIdx.x;
  float off = 0, size = 0;
  for (int x = threadIdx.x; x < d; x += 32) {
    const float a = float(A[row * d + x]), b = float(B[row * d + x]);
    off += (a - b) * (a - b);
    size += b * b;
  }
  for (int bits = 16; bits > 0; bits /= 2) {
    off += __shfl_xor_sync(0xffffffff, off, bits);
    size += __shfl_xor_sync(0xffffffff, size, bits);
  }
  if (threadIdx.x) return;
  float ratio = sqrtf(off / size), apart = fabsf(L[row] - M[row]);
  if (!(ratio < INFINITY)) ratio = INFINITY;
  if (!(apart < INFINITY)) apart = INFINITY;
  atomicMax(worst, __float_as_int(ratio));  // of numbers >= 0 the bits have the same order
  atomicMax(worst + 1, __float_as_int(apart));
}

template <class F>
void with_type(F f) {
  if (now.type == TunedCall::fp32) return f(float());
  if (now.type == TunedCall::fp16) return f(__half());
  f(__nv_bfloat16());
}

void launch(TunedLaunch* candidate) {
  with_type([&](auto element) {
    using T = decltype(element);
    const Problem& p = now.p;
    const auto view = [&](const DeviceMemory& m) { return contiguous(m.as<T>(), p.Hq, p.Nq, p.d); };
    const Forward<T> t{view(now.Q), view(now.K), view(now.V), view(now.O), now.LSE.as<float>()};
    const TunedCall call{&p,
                         &t,
                         now.type,
                         float(p.softmax_scale()),
                         p.causal == Causal::none ? nullptr : now.taken.as<unsigned>(),
                         nullptr};
    const char* error = "takes no such problem";
    if (candidate(&call, &error) != 1) throw std::runtime_error(error);
  });
}

void compared(float* off) {
  FA_CUDA_CHECK(cudaMemset(now.worst.as<int>(), 0, 8));
  with_type([&](auto element) {
    using T = decltype(element);
    compare<<<unsigned(now.rows()), 32>>>(now.O.as<T>(), now.first_O.as<T>(), now.LSE.as<float>(),
                                          now.first_LSE.as<float>(), int(now.p.d),
                                          now.worst.as<int>());
  });
  FA_CUDA_CHECK(cudaGetLastError());
  FA_CUDA_CHECK(cudaMemcpy(off, now.worst.as<int>(), 8, cudaMemcpyDeviceToHost));
}

}  // namespace

FA_EXPORT const char* fa_tune_gpu(char* name, int bytes, std::int64_t* numbers) {
  return as_c([&] {
    cudaDeviceProp gpu{};
    FA_CUDA_CHECK(cudaGetDeviceProperties(&gpu, 0));
    std::strncpy(name, gpu.name, std::size_t(bytes) - 1);
    numbers[0] = 10 * gpu.major + gpu.minor;
    numbers[1] = std::int64_t(gpu.sharedMemPerBlockOptin);
    numbers[2] = std::int64_t(gpu.sharedMemPerMultiprocessor);
  });
}

FA_EXPORT const char* fa_tune_case(std::int64_t B, std::int64_t H, std::int64_t N, std::int64_t d,
                                   int causal, int type) {
  return as_c([&] {
    now = Case();
    now.p.B = B, now.p.Hq = now.p.Hkv = H, now.p.Nq = now.p.Nk = N, now.p.d = d;
    now.p.causal = causal ? Causal::top_left : Causal::none;
    now.type = TunedCall::Type(type);
    for (DeviceMemory* m : {&now.Q, &now.K, &now.V, &now.O, &now.first_O})
      *m = DeviceMemory(now.bytes());
    now.LSE = DeviceMemory(4 * now.rows()), now.first_LSE = DeviceMemory(4 * now.rows());
    now.worst = DeviceMemory(8), now.taken = DeviceMemory(4);
    with_type([&](auto element) {
      using T = decltype(element);
      unsigned seed = 1;
      for (DeviceMemory* m : {&now.Q, &now.K, &now.V})
        fill<<<1024, 256>>>(m->as<T>(), now.rows() * d, seed++ * 0x51ed270bu);
    });
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  });
}

// From here on results are compared with double precision: of short problems only.
FA_EXPORT const char* fa_tune_expect() {
  return as_c([&] {
    with_type([&](auto element) {
      using T = decltype(element);
      expect<<<unsigned(now.rows()), 128, std::size_t(now.p.Nk) * 8>>>(
          now.p, now.Q.as<T>(), now.K.as<T>(), now.V.as<T>(), now.first_O.as<T>(),
          now.first_LSE.as<float>());
    });
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  });
}

// From here on results are compared with this candidate's.
FA_EXPORT const char* fa_tune_first(TunedLaunch* candidate) {
  return as_c([&] {
    launch(candidate);
    FA_CUDA_CHECK(cudaMemcpy(now.first_O.as<char>(), now.O.as<char>(), now.bytes(),
                             cudaMemcpyDeviceToDevice));
    FA_CUDA_CHECK(cudaMemcpy(now.first_LSE.as<char>(), now.LSE.as<char>(), 4 * now.rows(),
                             cudaMemcpyDeviceToDevice));
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  });
}

// off[0]: of O, the worst row, relative; off[1]: of LSE
FA_EXPORT const char* fa_tune_check(TunedLaunch* candidate, float* off) {
  return as_c([&] {
    FA_CUDA_CHECK(cudaMemset(now.O.as<char>(), 0xff, now.bytes()));  // NaN
    FA_CUDA_CHECK(cudaMemset(now.LSE.as<char>(), 0xff, 4 * now.rows()));
    launch(candidate);
    compared(off);
  });
}

// Milliseconds of a launch, the mean of `count`, after one that is not timed.
FA_EXPORT const char* fa_tune_time(TunedLaunch* candidate, int count, float* ms) {
  return as_c([&] {
    static cudaEvent_t begin = nullptr, end = nullptr;
    if (!begin) {
      FA_CUDA_CHECK(cudaEventCreate(&begin));
      FA_CUDA_CHECK(cudaEventCreate(&end));
    }
    launch(candidate);
    FA_CUDA_CHECK(cudaEventRecord(begin));
    for (int i = 0; i < count; ++i) launch(candidate);
    FA_CUDA_CHECK(cudaEventRecord(end));
    FA_CUDA_CHECK(cudaEventSynchronize(end));
    FA_CUDA_CHECK(cudaEventElapsedTime(ms, begin, end));
    *ms /= float(count);
  });
}
