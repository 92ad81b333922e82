// Tiles between global and shared memory by the copy engine of Hopper ("TMA"): one thread asks, no
// register holds the data. The engine knows the tensor from a map that the host makes; what lies
// outside the tensor is read as 0 and not written.
//
// A tile of R rows and D columns of 16 bits comes as D / 64 boxes of 64 columns, one after the
// other; a row of a box has 128 bytes, eight chunks of 16. swizzled_chunk() says where they lie.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/copies.hpp"
#else
#include <cuda.h>
#endif

#include <string>

#include "06_optimized/ptx/barrier.cuh"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::optimized {

// Bytes of shared memory that a block of threads may have on compute capability 9.0.
constexpr std::size_t most_shared = 227 * 1024;

// ---- host ----

// Can the copy engine read this view? Addresses and strides are multiples of 16 bytes, and no
// stride is negative.
template <class T>
bool has_tensor_map(const View<T>& v, std::int64_t B, std::int64_t H, std::int64_t N) {
  const auto fits = [](std::int64_t stride, std::int64_t count) {
    return count <= 1 || (stride >= 0 && stride % 8 == 0 && stride < (std::int64_t(1) << 38));
  };
  return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && fits(v.batch, B) &&
         fits(v.head, H) && fits(v.row, N);
}

// The map of a tensor [B, H, N, d] of 16-bit elements, read in boxes of 64 columns and `rows` rows.
template <class T>
CUtensorMap tensor_map(const View<T>& v, std::int64_t B, std::int64_t H, std::int64_t N,
                       std::int64_t d, int rows) {
#ifdef FA_EMULATED
  return {reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(v.data)),
          {d, N, H, B},
          {2, v.row * 2, v.head * 2, v.batch * 2},
          rows};
#else
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    FA_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                   cudaEnableDefault, &found));
    if (!f) throw CudaError(cudaErrorNotSupported, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(f);
  }();
  const auto bytes = [&](std::int64_t stride, std::int64_t count) {
    return cuuint64_t(count > 1 ? stride * 2 : 16);  // of a single row the stride does not matter
  };
  const cuuint64_t sizes[] = {cuuint64_t(d), cuuint64_t(N), cuuint64_t(H), cuuint64_t(B)};
  const cuuint64_t strides[] = {bytes(v.row, N), bytes(v.head, H), bytes(v.batch, B)};
  const cuuint32_t box[] = {64, cuuint32_t(rows), 1, 1}, steps[] = {1, 1, 1, 1};
  constexpr auto type = std::is_same_v<std::remove_const_t<T>, __half>
                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  void* const data = const_cast<void*>(static_cast<const void*>(v.data));
  CUtensorMap map;
  const auto encoded = [&] {
    return encode(&map, type, 4, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult code = encoded();
  if (code == CUDA_ERROR_INVALID_CONTEXT) {
    // This is the driver's function: unlike the runtime's it does not make a context current, and
    // nothing has in a thread that calls us first, as autograd's may.
    int device = 0;
    FA_CUDA_CHECK(cudaGetDevice(&device));
    FA_CUDA_CHECK(cudaSetDevice(device));
    code = encoded();
  }
  if (code != CUDA_SUCCESS)
    throw CudaError(cudaErrorInvalidValue,
                    "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(int(code)));
  return map;
#endif
}

// Of all tensors of a forward pass, for tiles of Br queries and Bc keys. O leaves by 16 rows, those
// of a warp.
struct ForwardMaps {
  CUtensorMap Q, K, V, O;
};
template <class T>
ForwardMaps maps_of(const Problem& p, const Forward<T>& t, int Br, int Bc) {
  return {tensor_map(t.Q, p.B, p.Hq, p.Nq, p.d, Br), tensor_map(t.K, p.B, p.Hkv, p.Nk, p.d, Bc),
          tensor_map(t.V, p.B, p.Hkv, p.Nk, p.d, Bc), tensor_map(t.O, p.B, p.Hq, p.Nq, p.d, 16)};
}

// ---- device ----

#ifndef FA_EMULATED
// Asks for the box at column x, row i of head h and batch b; its bytes (all of them, also those
// outside the tensor) are counted by the barrier.
__device__ inline void tma_load(void* to, const CUtensorMap& map, Barrier* full, int x, int i,
                                int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(full)), "r"(x), "r"(i), "r"(h),
        "r"(b)
      : "memory");
}
// The same box for several blocks of a cluster: bit r of `ranks` says that it comes to the block of
// rank r, too, to the same place as here, and is counted by the barrier at the same place there.
__device__ inline void tma_load_to_all(void* to, const CUtensorMap& map, Barrier* full, int x,
                                       int i, int h, int b, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(full)), "r"(x), "r"(i), "r"(h),
        "r"(b), "h"(ranks)
      : "memory");
}
// What lies outside the tensor is not written, if d is a multiple of 8: with d = 1 the neighbour of
// the last column was seen to be written too.
__device__ inline void tma_store(const CUtensorMap& map, const void* from, int x, int i, int h,
                                 int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(x), "r"(i), "r"(h), "r"(b)
      : "memory");
}
// The stores of this thread since the last commit are a group.
__device__ inline void tma_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
// Until all groups of this thread have read their shared memory: it may be written again.
__device__ inline void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}
// Until all groups of this thread are done: what they write is there.
__device__ inline void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }
// Between ordinary stores to shared memory and a copy engine or tensor core that reads them, and
// between ordinary reads and the copy engine's next write there: by each thread that stored or
// read, before the barrier that tells the others.
__device__ inline void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Four blocks of 8 x 8 to shared memory: lane 8 i + r passes where row r of block i begins; block i
// is fragment[i] of all lanes.
__device__ inline void stmatrix(void* row, const std::uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]),
                 "r"(fragment[3])
               : "memory");
}

// As stmatrix, each block transposed: fragment[i] is a lane's pair of a column of block i.
__device__ inline void stmatrix_transposed(void* row, const std::uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]),
                 "r"(fragment[3])
               : "memory");
}

// Without a map, what lies in one piece; addresses and bytes are multiples of 16.
__device__ inline void bulk_load(void* to, const void* from, int bytes, Barrier* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full))
      : "memory");
}
// to[i] = from[i]; belongs to a group as a store of a tile does.
__device__ inline void bulk_store(float* to, const float* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// to[i] += from[i], added where the L2 cache is; belongs to a group likewise.
__device__ inline void bulk_add(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
#endif  // not FA_EMULATED

// A warp's 16 rows of a result, held as wgmma.cuh says, rounded, to where they begin in a tile of
// `rows` rows that TMA will store.
template <int rows, class T, int n>
__device__ void put(T* to, const float (&X)[n], int lane) {
#pragma unroll
  for (int x = 0; x < n / 8; ++x) {
    std::uint32_t fragment[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      fragment[k] = rounded_pair<T>(X[8 * x + 2 * k], X[8 * x + 2 * k + 1]);
    stmatrix(to + x / 4 * rows * 64 + swizzled_chunk(lane % 16, 2 * (x % 4) + lane / 16), fragment);
  }
}

}  // namespace fa::optimized
