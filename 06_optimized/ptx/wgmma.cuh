// Tensor cores of Hopper: a warpgroup (four warps) multiplies 64 rows together and does not wait.
// A comes from shared memory or from registers, B from shared memory, C stays in registers.
//
// Thread t of the warpgroup holds of C, 64 x N (warp w = t / 32, lane = t % 32):
//   C[i]  row 16 w + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2
// Of A in registers, 64 x 16: the four registers of C[8 j .. 8 j + 7], packed in pairs, are A of
// columns 16 j .. 16 j + 15. So the weights of one product feed the next without any exchange.
//
// Between commit and wait the registers of a product belong to the tensor cores.
#pragma once
#include <cstdint>

#include "06_optimized/ptx/barrier.cuh"
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/products.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "06_optimized/ptx/wgmma_shapes.inc"
#endif

namespace fa::optimized {

#ifndef FA_EMULATED
// Before the first product after ordinary code has touched C or A in registers.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
// The products since the last commit are a group; groups end in order.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
// Until at most the `newest` latest groups are still under way. The registers named are theirs: the
// compiler, which knows nothing of what the tensor cores write, must not read them earlier.
template <int newest, int n>
__device__ void wgmma_wait(float (&C)[n]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(newest) : "memory");
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(C[i]) : : "memory");
}
#endif  // not FA_EMULATED

// ---- matrices in shared memory, as tiles of tma.cuh: boxes of 64 columns, swizzled ----
// A descriptor is an address in units of 16 bytes, two distances, and the kind of swizzle. Adding n
// to it moves the address by 16 n bytes.

__device__ inline std::uint64_t descriptor(const void* tile, int leading_bytes, int stride_bytes) {
  constexpr std::uint64_t swizzle_128 = 1;
  return (shared_address(tile) & 0x3ffff) >> 4 | std::uint64_t(leading_bytes >> 4) << 16 |
         std::uint64_t(stride_bytes >> 4) << 32 | swizzle_128 << 62;
}

// C = A B^T: A is 64 rows of a tile of Q, B a tile of K; both have D columns, which are summed
// over. rows_A, rows_B: of the tiles.
template <class T, int D, int rows_A, int rows_B, int n>
__device__ void multiply_transposed(float (&C)[n], const T* A, const T* B) {
  const std::uint64_t a = descriptor(A, 16, 1024), b = descriptor(B, 16, 1024);
#pragma unroll
  for (int x = 0; x < D; x += 16) {
    const int box = x / 64, within = x % 64 * 2 / 16;  // 16 columns are 32 bytes of a row of 128
    Wgmma<T, 2 * n, false>::template run<0>(C, a + box * rows_A * 8 + within,
                                            b + box * rows_B * 8 + within, x > 0);
  }
}

// C += A B: A is in registers, 64 x `rows`; B is a tile of V, `rows` x D, of D = 2 n columns.
template <class T, int rows, int n>
__device__ void multiply_add(float (&C)[n], const std::uint32_t (&A)[rows / 16][4], const T* B) {
  const std::uint64_t b = descriptor(B, rows * 128, 1024);  // the next 64 columns are the next box
#pragma unroll
  for (int j = 0; j < rows / 16; ++j)
    Wgmma<T, 2 * n, true>::template run<1>(C, A[j], b + j * 16 * 128 / 16, 1);
}

// C = A B: A is 64 rows of a tile of `rows_A` rows and `sum` columns; B is a tile of `sum` rows and
// 2 n columns.
template <class T, int sum, int rows_A, int n>
__device__ void multiply(float (&C)[n], const T* A, const T* B) {
  const std::uint64_t a = descriptor(A, 16, 1024), b = descriptor(B, sum * 128, 1024);
#pragma unroll
  for (int x = 0; x < sum; x += 16)
    Wgmma<T, 2 * n, false>::template run<1>(C, a + x / 64 * rows_A * 8 + x % 64 * 2 / 16,
                                            b + x * 128 / 16, x > 0);
}

#ifndef FA_EMULATED
// For products that are under way from one step of a loop to the next. The compiler is told that C
// has its value here and nowhere later; or that its value is no longer needed, although the next
// product, which will overwrite it, is written as one that adds.
template <int n>
__device__ void settle(float (&C)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(C[i]) : : "memory");
}
template <int n>
__device__ void forget(float (&C)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "=f"(C[i]));
}
#endif  // not FA_EMULATED

}  // namespace fa::optimized
