// Tensor cores by mma.sync, from compute capability 8.0 on. A warp multiplies together: what a
// thread passes and gets is its share of the blocks, a "fragment"; fragments.hpp says which one.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/products.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/core/cuda.hpp"

namespace fa::optimized {

#ifndef FA_EMULATED
// C += A B: A is 16 x 16, B is 16 x 8, both of T; C is 16 x 8 in fp32.
template <class T>
__device__ void mma(float (&C)[4], const std::uint32_t (&A)[4], std::uint32_t B0,
                    std::uint32_t B1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(C[0]), "+f"(C[1]), "+f"(C[2]), "+f"(C[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B0), "r"(B1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(C[0]), "+f"(C[1]), "+f"(C[2]), "+f"(C[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B0), "r"(B1));
}
#endif  // not FA_EMULATED

// Two neighbours of 16 bits fill a register, the one with the smaller index in the lower half:
// as they lie in memory, from two places, or rounded from fp32.
template <class T>
__device__ std::uint32_t pair(const T* two) {
  return *reinterpret_cast<const std::uint32_t*>(two);
}
template <class T>
__device__ std::uint32_t pair(T low, T high) {
  const T two[] = {low, high};
  std::uint32_t bits;
  std::memcpy(&bits, two, sizeof bits);
  return bits;
}
template <class T>
__device__ std::uint32_t rounded_pair(float low, float high) {
#ifdef FA_EMULATED
  return pair(T(low), T(high));
#else
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 two = __floats2half2_rn(low, high);
    std::memcpy(&bits, &two, sizeof bits);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    std::memcpy(&bits, &two, sizeof bits);
  }
  return bits;
#endif
}

// The result of a product of wgmma.cuh, rounded, as A of the next one: the numbers stay where they
// are. A[j] is of columns 16 j to 16 j + 15.
template <class T, int n>
__device__ void round_to(std::uint32_t (&A)[n / 8][4], const float (&X)[n]) {
#pragma unroll
  for (int j = 0; j < n / 8; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) A[j][k] = rounded_pair<T>(X[8 * j + 2 * k], X[8 * j + 2 * k + 1]);
}

#ifndef FA_EMULATED
// Four blocks of 8 x 8 from shared memory. Lane 8 i + r passes where row r of block i begins (16
// bytes, aligned to 16). to[i] is the lane's pair of block i: row lane / 4, columns 2 (lane % 4)
// and the next; transposed, it is column lane / 4, rows 2 (lane % 4) and the next.
template <class T>
__device__ void ldmatrix(std::uint32_t (&to)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(std::uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}
template <class T>
__device__ void ldmatrix_transposed(std::uint32_t (&to)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(std::uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// 2^x, one instruction. Exact where it matters: 2^0 = 1, 2^-inf = 0, 2^NaN = NaN.
__device__ inline float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif  // not FA_EMULATED

}  // namespace fa::optimized
