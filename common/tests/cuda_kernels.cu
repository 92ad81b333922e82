#include "common/tests/cuda_kernels.hpp"

#include <cstdlib>

#include "common/core/cp_async.cuh"

namespace fa::test_kernels {
namespace {

__global__ void nothing() {}
__global__ void reverse_kernel(const float* in, float* out, bool with_barrier) {
  __shared__ float s[256];
  s[threadIdx.x] = in[threadIdx.x];
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = s[255 - threadIdx.x];
}
__global__ void uninitialised_kernel(float* out) {
  out[threadIdx.x] = dynamic_shared<float>()[threadIdx.x];
}
__global__ void uninitialised_static_kernel(float* out) {
  __shared__ float s[32];
  out[threadIdx.x] = s[threadIdx.x];
  s[threadIdx.x] = 1;
}
__global__ void write_shared_kernel() { dynamic_shared<float>()[threadIdx.x] = 1; }
__global__ void where_tiles_begin_kernel(std::uintptr_t* address) {
  *address = reinterpret_cast<std::uintptr_t>(&FA_DYNAMIC_SHARED(float));
}
__global__ void copies_kernel(const float* from, float* seen) {
  float* const to = dynamic_shared<float>();
  const auto look = [&] {
    for (int e = 0; e < 12; ++e) *seen++ = to[e];
  };
  for (int c = 0; c < 3; ++c) {
    cp_async(to + 4 * c, from + 4 * c, 4 * (c + 1));
    if (c < 2) cp_async_commit();
  }
  cp_async_wait<1>();
  look();
  cp_async_wait<0>();
  look();
  cp_async_wait();
  look();
}
__global__ void at_once_kernel(const short* from, short* to, unsigned* steps) {
  __shared__ __align__(16) short eight[8];
  *reinterpret_cast<uint4*>(eight) = *reinterpret_cast<const uint4*>(from);
  const float2 four = *reinterpret_cast<const float2*>(eight + 4);
  *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  *reinterpret_cast<float2*>(to) = four;
  atomicAdd(steps, 2u);
}
__global__ void four_kernel(const float* from, float* to) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}
__global__ void shuffles_kernel(int* out) {
  const int lane = int(threadIdx.x) % 32;
  int sum = lane;
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
  out[threadIdx.x] = sum;
  out[64 + threadIdx.x] = __shfl_down_sync(0xffffffff, lane, 1);
}
__global__ void count_kernel(float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  atomicAdd(out, 1.0f);
}
__global__ void diverge_kernel(bool odd) {
  if (odd ? threadIdx.x % 2 : threadIdx.x < 16)
    __shfl_sync(0xffffffff, 0, 0);
  else
    __syncthreads();
}
__global__ void blocks_kernel(float* out, InBlockThree what) {
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) out[1 + block] = float(block);
  atomicAdd(out, 1.0f);
  if (block != 3) return;
  if (what == InBlockThree::hangs && threadIdx.x < 16) __syncwarp();
#ifdef FA_EMULATED
  if (what == InBlockThree::ends) std::abort();
#endif
  if (what == InBlockThree::writes_behind) dynamic_shared<float>()[32 + threadIdx.x] = 1;
  __syncthreads();
}
__global__ void one_key_kernel(Forward<float> t, int d, long long Nq, float scale) {
  const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= Nq) return;
  float score = 0;
  for (int x = 0; x < d; ++x) {
    score += t.Q.at(0, 0, i)[x] * t.K.at(0, 0, 0)[x];
    t.O.at(0, 0, i)[x] = t.V.at(0, 0, 0)[x];
  }
  t.LSE[i] = scale * score;
}
__global__ void read_kernel(const float* address, float* out) { *out = *address; }

}  // namespace

void one_key(const Problem& p, const Forward<float>& t, cudaStream_t stream) {
  FA_LAUNCH(one_key_kernel, dim3(unsigned((p.Nq + 255) / 256)), dim3(256), 0, stream, t, int(p.d),
            (long long)(p.Nq), float(p.softmax_scale()));
}
void launch_with(unsigned threads, std::size_t shared_bytes) {
  FA_LAUNCH(nothing, dim3(1), dim3(threads), shared_bytes, nullptr);
}
void launch_early_with(unsigned threads, std::size_t shared_bytes) {
  FA_LAUNCH_EARLY(nothing, dim3(1), dim3(threads), shared_bytes, nullptr);
}
void launch_clusters_with(unsigned size, unsigned blocks, unsigned threads) {
  FA_LAUNCH_CLUSTERS(size, nothing, dim3(blocks), dim3(threads), 0, nullptr);
}
void reverse(const float* in, float* out, bool with_barrier) {
  FA_LAUNCH(reverse_kernel, dim3(1), dim3(256), 0, nullptr, in, out, with_barrier);
}
void read_uninitialised(float* out) {
  FA_LAUNCH(uninitialised_kernel, dim3(1), dim3(32), 128, nullptr, out);
}
void read_uninitialised_static(float* out) {
  FA_LAUNCH(uninitialised_static_kernel, dim3(2), dim3(32), 0, nullptr, out);
}
void write_shared(unsigned threads, std::size_t shared_bytes) {
  FA_LAUNCH(write_shared_kernel, dim3(1), dim3(threads), shared_bytes, nullptr);
}
void where_tiles_begin(std::uintptr_t* address) {
  FA_LAUNCH(where_tiles_begin_kernel, dim3(1), dim3(1), 4096, nullptr, address);
}
void copies(const float* from, float* seen) {
  FA_LAUNCH(copies_kernel, dim3(1), dim3(1), 48, nullptr, from, seen);
}
void at_once(const short* from, short* to, unsigned* steps) {
  FA_LAUNCH(at_once_kernel, dim3(1), dim3(1), 0, nullptr, from, to, steps);
}
void four(const float* from, float* to) {
  FA_LAUNCH(four_kernel, dim3(1), dim3(1), 0, nullptr, from, to);
}
void shuffles(int* out) { FA_LAUNCH(shuffles_kernel, dim3(1), dim3(64), 0, nullptr, out); }
void count(float* out) { FA_LAUNCH(count_kernel, dim3(4), dim3(64), 0, nullptr, out); }
void diverge(bool odd) { FA_LAUNCH(diverge_kernel, dim3(1), dim3(32), 0, nullptr, odd); }
void blocks(float* out, InBlockThree what) {
  FA_LAUNCH(blocks_kernel, dim3(2, 3), dim3(32), 128, nullptr, out, what);
}
void read(const float* address, float* out) {
  FA_LAUNCH(read_kernel, dim3(1), dim3(1), 0, nullptr, address, out);
}

}  // namespace fa::test_kernels
