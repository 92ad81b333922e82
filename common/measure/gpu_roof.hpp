// What this GPU can do at most, measured.
#pragma once
namespace fa::bench {
// Multiply-adds in fp32, as FLOP per second, over about 5 ms; 0 where the launch fails.
double gpu_fma_peak();
// A product of two 8192 x 8192 matrices of T by cuBLAS, sums in fp32, over about 5 ms.
template <class T>
double gpu_matmul_peak();
// data[i] = a normal random number, N(0, 1), that depends on seed and i only. Enqueued.
template <class T>
void gpu_fill(T* data, long long n, unsigned long long seed);
}  // namespace fa::bench
