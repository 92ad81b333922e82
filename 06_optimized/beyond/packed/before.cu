// Two numbers for each row of queries, before the kernels of the backward: backward/0_around.cu
// for sequences of different lengths. A block takes the rows of a tile.
#include "06_optimized/beyond/packed/sequence.cuh"
#include "06_optimized/forward/forward.hpp"

namespace fa::packed {
namespace {

constexpr int threads = 256;

// D_i = sum_x dO_ix O_ix;  LSE2_i = log2(e) LSE_i, so that P_ij = 2^(c S_ij - LSE2_i).
// Eight columns a thread, D / 8 threads a row. The rows of a tile behind the sequence's last get
// LSE2 = +inf, so that P = 2^-inf = 0. So do rows that saw no key, whose LSE is -inf. Where dQ is
// added up, its sums begin with 0. The list's last tile comes first: what the next kernel begins
// with has then just been written, and is in the L2 cache.
template <int D, class T>
__global__ void __launch_bounds__(threads)
    before_kernel(Problem p, Backward<T> t, List list, int rows, Passed passed, bool aligned) {
  constexpr int lanes = D / 8;
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const Work work = list.work[block / unsigned(p.Hq)];
  if (work.tile < 0) return;
  const std::int64_t h = block % unsigned(p.Hq), all_queries = p.Nq;
  enter(work, p, t);
  const int x = threadIdx.x % lanes * 8;
  for (int r = threadIdx.x / lanes; r < rows; r += threads / lanes) {
    const std::int64_t i = work.tile * rows + r, row = h * passed.rows + work.padded_row() + i;
    float sum = 0;
    if (i < p.Nq && x < p.d) {
      const T* O = t.O.at(0, h, i) + x;
      const T* dO = t.dO.at(0, h, i) + x;
      if (aligned && x + 8 <= p.d) {
        const uint4 O8 = *reinterpret_cast<const uint4*>(O),
                    dO8 = *reinterpret_cast<const uint4*>(dO);
#pragma unroll
        for (int e = 0; e < 8; ++e)
          sum += float(reinterpret_cast<const T*>(&O8)[e]) *
                 float(reinterpret_cast<const T*>(&dO8)[e]);
      } else {
        for (int e = 0; e < 8 && x + e < p.d; ++e) sum += float(O[e]) * float(dO[e]);
      }
    }
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, other);
    if (passed.dQ) {  // in which order the numbers of a tile lie does not matter here
      auto* const zero = reinterpret_cast<float4*>(passed.dQ + row * D + x);
      zero[0] = zero[1] = make_float4(0, 0, 0, 0);
    }
    if (x == 0) {
      const float L = i < p.Nq ? t.LSE[h * all_queries + i] : -INFINITY;
      passed.D[row] = sum;
      passed.LSE2[row] = L == -INFINITY ? INFINITY : L * log2_e;
    }
  }
}

}  // namespace

template <class T>
void launch_before(const Problem& p, const Backward<T>& t, const List& list, int rows,
                   const Passed& passed, cudaStream_t stream) {
  const auto kernel = p.d <= 64    ? before_kernel<64, T>
                      : p.d <= 128 ? before_kernel<128, T>
                                   : before_kernel<256, T>;
  FA_LAUNCH(kernel, dim3(unsigned(list.most * p.Hq)), dim3(threads), 0, stream, p, t, list, rows,
            passed, optimized::in_16_bytes(t.O) && optimized::in_16_bytes(t.dO));
}
template void launch_before(const Problem&, const Backward<__half>&, const List&, int,
                            const Passed&, cudaStream_t);
template void launch_before(const Problem&, const Backward<__nv_bfloat16>&, const List&, int,
                            const Passed&, cudaStream_t);

}  // namespace fa::packed
