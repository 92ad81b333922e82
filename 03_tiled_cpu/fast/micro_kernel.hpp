// The one loop in which a fast product spends its time: a tile of C held in registers while the sum
// over k runs. It serves both products of attention, because A may be walked with any two strides.
#pragma once
#include <cstdint>

#include "common/core/simd.hpp"

namespace fa::tiled_cpu::fast {

// Register tile: M rows of C by N vectors. 4 x 4 leaves 16 of 32 registers (AVX-512, NEON) for the
// vectors of B and a broadcast of A; with 16 registers (AVX2, SSE) N is 2.
#if defined(__AVX512F__) || defined(__ARM_NEON)
inline constexpr int N = 4;
#else
inline constexpr int N = 2;
#endif
inline constexpr int M = 4;
inline constexpr int lanes = N * simd::W;  // columns of C: queries that are worked on together

// C[i][lane] = init(i, v) + sum over k < K of A[i * a_row + k * a_k] * B[k * lanes + lane], for i <
// Rows and the `lanes` lanes as N vectors v; done(i, v, C) receives each vector. Per k: Rows * N
// multiply- adds for N loads of B and Rows broadcasts of A.
template <int Rows, class Init, class Done>
[[gnu::always_inline]] inline void micro_kernel(const float* A, std::int64_t a_row,
                                                std::int64_t a_k, const float* B, std::int64_t K,
                                                Init init, Done done) {
  simd::Vec C[Rows][N];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) C[i][v] = init(i, v);
#pragma GCC unroll 2
  // [quote core]
  for (std::int64_t k = 0; k < K; ++k) {
    simd::Vec b[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) b[v] = simd::load(B + k * lanes + v * simd::W);
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const simd::Vec a = simd::broadcast(A[i * a_row + k * a_k]);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) C[i][v] += a * b[v];
    }
  }
  // [end quote]
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) done(i, v, C[i][v]);
}

}  // namespace fa::tiled_cpu::fast
