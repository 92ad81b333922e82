// How many pairs of fp32 numbers does an SM round in a cycle, to bf16 and to fp16?
//
//   nvcc -O3 -arch=native 06_optimized/check/conversions.cu -o conversions && ./conversions
#include <cstdio>

#define CHECK(call)                                                    \
  if (const cudaError_t code = (call); code != cudaSuccess) {          \
    std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code)); \
    return 1;                                                          \
  }

constexpr int threads = 1024, chains = 8, rounds = 512;

// Each result is the next operand, and a thread has several such chains: with 32 warps the unit is
// never without work.
template <bool fp16>
__global__ void convert(float seed, long long* cycles, unsigned* results) {
  float x[chains];
  for (int n = 0; n < chains; ++n) x[n] = seed + n + threadIdx.x;
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 4
  for (int i = 0; i < rounds; ++i)
#pragma unroll
    for (float& operand : x) {
      unsigned pair;
      if (fp16)
        asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(operand), "f"(seed));
      else
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(operand), "f"(seed));
      operand = __uint_as_float(pair);
    }
  __syncthreads();
  if (threadIdx.x == 0) *cycles = clock64() - begin;
  unsigned all = 0;
  for (float operand : x) all ^= __float_as_uint(operand);
  results[threadIdx.x] = all;
}

int main() {
  long long* cycles;
  unsigned* results;
  CHECK(cudaMalloc(&cycles, sizeof *cycles));
  CHECK(cudaMalloc(&results, threads * sizeof *results));
  for (const bool fp16 : {false, true}) {
    for (int again = 0; again < 2; ++again) {  // the first time warms up
      (fp16 ? convert<true> : convert<false>)<<<1, threads>>>(1.5f, cycles, results);
      CHECK(cudaGetLastError());
      CHECK(cudaDeviceSynchronize());
    }
    long long taken = 0;
    CHECK(cudaMemcpy(&taken, cycles, sizeof taken, cudaMemcpyDeviceToHost));
    std::printf("%s: %.1f pairs a cycle\n", fp16 ? "fp16" : "bf16",
                double(threads) * chains * rounds / double(taken));
  }
  CHECK(cudaFree(results));
  CHECK(cudaFree(cycles));
}
