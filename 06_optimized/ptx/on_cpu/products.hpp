// ptx/mma.cuh and ptx/wgmma.cuh on the CPU: tensor cores, and the instructions that move blocks of
// 8 x 8 for them; products.cpp says what they do.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "06_optimized/ptx/on_cpu/barrier.hpp"
#include "06_optimized/ptx/on_cpu/half.hpp"

namespace fa::optimized {

enum class Type { fp16, bf16 };
template <class T>
constexpr Type type_of = std::is_same_v<T, __half> ? Type::fp16 : Type::bf16;

// ---- a warp: mma.sync, ldmatrix, stmatrix ----

void mma(float* C, const std::uint32_t* A, std::uint32_t B0, std::uint32_t B1, Type);
template <class T>
__device__ void mma(float (&C)[4], const std::uint32_t (&A)[4], std::uint32_t B0,
                    std::uint32_t B1) {
  mma(C, A, B0, B1, type_of<T>);
}
void load_blocks(std::uint32_t* to, const void* row, bool transposed);
void store_blocks(void* row, const std::uint32_t* from, bool transposed);
template <class T>
__device__ void ldmatrix(std::uint32_t (&to)[4], const T* row) {
  load_blocks(to, row, false);
}
template <class T>
__device__ void ldmatrix_transposed(std::uint32_t (&to)[4], const T* row) {
  load_blocks(to, row, true);
}
__device__ inline void stmatrix(void* row, const std::uint32_t (&fragment)[4]) {
  store_blocks(row, fragment, false);
}
__device__ inline void stmatrix_transposed(void* row, const std::uint32_t (&fragment)[4]) {
  store_blocks(row, fragment, true);
}
float ex2(float x);

// ---- a warpgroup: wgmma ----

struct Product {  // C (+)= A B, 64 x N x 16
  float* C;       // this thread's N / 2 numbers
  int n;
  const std::uint32_t* A;   // in registers, or null
  std::uint64_t a, b;       // descriptors of what is in shared memory
  bool B_transposed, adds;  // B lies as [k][n], not [n][k]
  Type type;
};
void issue(const Product&);
template <class T, int N, bool A_in_registers>
struct Wgmma {
  template <int transposed>
  __device__ static void run(float (&C)[N / 2], std::uint64_t A, std::uint64_t B, int add) {
    issue({C, N / 2, nullptr, A, B, transposed != 0, add != 0, type_of<T>});
  }
};
template <class T, int N>
struct Wgmma<T, N, true> {
  template <int transposed>
  __device__ static void run(float (&C)[N / 2], const std::uint32_t (&A)[4], std::uint64_t B,
                             int add) {
    issue({C, N / 2, A, 0, B, transposed != 0, add != 0, type_of<T>});
  }
};
void wgmma_fence();
void wgmma_commit();
void wait_for_products(int newest);
template <int newest, int n>
__device__ void wgmma_wait(float (&)[n]) {
  wait_for_products(newest);
}
template <int n>
__device__ void settle(float (&)[n]) {}  // for the compiler alone
template <int n>
__device__ void forget(float (&)[n]) {}

}  // namespace fa::optimized
