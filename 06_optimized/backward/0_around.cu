// What happens around every kernel of the backward: before it, two numbers for each row of queries;
// after it, where dQ was added up in fp32, the rounding.
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/mma.cuh"

namespace fa::optimized {
namespace {

constexpr int threads = 256;

// D_i = sum_x dO_ix O_ix;  LSE2_i = log2(e) LSE_i, so that P_ij = 2^(c S_ij - LSE2_i).
// Eight columns a thread, D / 8 threads a row. The last rows first: what the next kernel begins
// with has then just been written, and is in the L2 cache. The padding gets LSE2 = +inf, so that
// P = 2^-inf = 0. So do rows that saw no key, whose LSE is -inf.
template <int D, class T>
__global__ void __launch_bounds__(threads)
    before_kernel(Problem p, Backward<T> t, Passed passed, bool aligned) {
  constexpr int lanes = D / 8;
  const std::int64_t row =
      (std::int64_t(gridDim.x - 1 - blockIdx.x) * threads + threadIdx.x) / lanes;
  const int x = threadIdx.x % lanes * 8;
  if (row >= p.B * p.Hq * passed.rows) return;  // lanes of a row leave together
  const std::int64_t head = row / passed.rows, i = row % passed.rows;
  float sum = 0;
  if (i < p.Nq && x < p.d) {
    const T* O = t.O.at(head / p.Hq, head % p.Hq, i) + x;
    const T* dO = t.dO.at(head / p.Hq, head % p.Hq, i) + x;
    if (aligned && x + 8 <= p.d) {
      const uint4 O8 = *reinterpret_cast<const uint4*>(O),
                  dO8 = *reinterpret_cast<const uint4*>(dO);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        sum +=
            float(reinterpret_cast<const T*>(&O8)[e]) * float(reinterpret_cast<const T*>(&dO8)[e]);
    } else {
      for (int e = 0; e < 8 && x + e < p.d; ++e) sum += float(O[e]) * float(dO[e]);
    }
  }
#pragma unroll
  for (int other = lanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
  if (x == 0) {
    const float L = i < p.Nq ? t.LSE[head * p.Nq + i] : -INFINITY;
    passed.D[row] = sum;
    passed.LSE2[row] = L == -INFINITY ? INFINITY : L * log2_e;
  }
  if (passed.taken && x == 0 && row == 0) *passed.taken = 0;
  if (passed.turn && x == 0 && row % 64 == 0)
    for (int n = 0; n < D / 64; ++n) passed.turn[row / 64 * (D / 64) + n] = 0;
  // Of a block of 64 rows; in which order its numbers lie does not matter here.
  const std::int64_t last = (i | 63) < p.Nq ? i | 63 : p.Nq - 1;
  const bool nobody_stores = !passed.turn || visible_keys(p, head / p.Hq, last) == 0;
  if (passed.dQ && nobody_stores) {
    auto* zero = reinterpret_cast<float4*>(passed.dQ + row * D + x);
    zero[0] = zero[1] = make_float4(0, 0, 0, 0);
  }
}

// dQ = T(scale dQ), a block of 64 x 64 as struct Passed describes it, by 128 threads. The last
// first, which have been written last.
template <class T>
__global__ void __launch_bounds__(128)
    after_kernel(Problem p, View<T> dQ, float scale, Passed passed, int blocks_wide, bool aligned) {
  constexpr int stride = 64 + 8;  // of a row in shared memory: 8 rows lie in different banks
  __shared__ __align__(16) T rows[64 * stride];
  const std::int64_t block = gridDim.x - 1 - blockIdx.x, tiles = passed.rows / 64;
  const std::int64_t head = block / blocks_wide / tiles;
  const std::int64_t i0 = block / blocks_wide % tiles * 64;
  const int x0 = int(block % blocks_wide) * 64, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i0 >= p.Nq || x0 >= p.d) return;
  const auto* from = reinterpret_cast<const float4*>(passed.dQ + block * 4096) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // columns 8 j ...: two in this row, two in the row 8 below
    const float4 sums = from[j * 128];
    T* to = rows + (16 * warp + lane / 4) * stride + 8 * j + lane % 4 * 2;
    *reinterpret_cast<std::uint32_t*>(to) = rounded_pair<T>(scale * sums.x, scale * sums.y);
    *reinterpret_cast<std::uint32_t*>(to + 8 * stride) =
        rounded_pair<T>(scale * sums.z, scale * sums.w);
  }
  __syncthreads();
  for (int piece = threadIdx.x; piece < 64 * 8; piece += 128) {
    const int r = piece / 8, x = x0 + piece % 8 * 8;
    if (i0 + r >= p.Nq) break;
    T* to = dQ.at(head / p.Hq, head % p.Hq, i0 + r) + x;
    const T* eight = rows + r * stride + piece % 8 * 8;
    if (aligned && x + 8 <= p.d)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(eight);
    else
      for (int e = 0; e < 8 && x + e < p.d; ++e) to[e] = eight[e];
  }
}

}  // namespace

template <class T>
void launch_before(const Problem& p, const Backward<T>& t, const Passed& passed,
                   cudaStream_t stream) {
  const std::int64_t D = Passed::padded(p.d);
  const std::int64_t blocks = (p.B * p.Hq * passed.rows * (D / 8) + threads - 1) / threads;
  const auto kernel = D == 64    ? before_kernel<64, T>
                      : D == 128 ? before_kernel<128, T>
                                 : before_kernel<256, T>;
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), 0, stream, p, t, passed,
            in_16_bytes(t.O) && in_16_bytes(t.dO));
}

template <class T>
void launch_after(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                  cudaStream_t stream) {
  const std::int64_t wide = Passed::padded(p.d) / 64;
  const std::int64_t blocks = p.B * p.Hq * (passed.rows / 64) * wide;
  FA_LAUNCH(after_kernel<T>, dim3(unsigned(blocks)), dim3(128), 0, stream, p, t.dQ, scale, passed,
            int(wide), in_16_bytes(t.dQ));
}

#define FA_FOR(T)                                                                               \
  template void launch_before(const Problem&, const Backward<T>&, const Passed&, cudaStream_t); \
  template void launch_after(const Problem&, const Backward<T>&, float, const Passed&,          \
                             cudaStream_t);
FA_FOR(__half)
FA_FOR(__nv_bfloat16)
#undef FA_FOR

}  // namespace fa::optimized
