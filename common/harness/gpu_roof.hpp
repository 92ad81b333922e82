// What this GPU can do at most, measured.
#pragma once
namespace fa::bench {
// Multiply-adds in fp32, as FLOP per second, over about 5 ms; 0 where the launch fails.
double gpu_fma_peak();
// data[i] = a normal random number, N(0, 1), that depends on seed and i only. Enqueued.
void gpu_fill(float* data, long long n, unsigned long long seed);
}  // namespace fa::bench
