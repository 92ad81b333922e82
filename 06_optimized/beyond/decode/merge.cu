// Stage 02's merge for any number of parts: a part weighs exp(L_s), where L_s is the logarithm of
// the sum of its weights.
//
//   L = log sum_s exp(L_s),   O = sum_s exp(L_s - L) O_s
//
// A block has a row. It reads splits (d + 1) numbers of 4 bytes and writes d: little beside the
// keys, 2 d numbers each, if a part has some tens of them. But few rows mean few blocks, so their
// loads must be under way together: warp w takes parts w, w + 4, ..., and adds up what it has in
// registers; then the four sums are added in order. So the bits are the same in every run.
#include "06_optimized/beyond/decode/decode.hpp"

namespace fa::decode {
namespace {

constexpr int lanes = 32, warps = 4, columns = widest<__half> / lanes;  // of O that a lane owns

// [quote kernel]
template <class T>
__global__ void merge_kernel(Problem p, Parts parts, View<T> to, float* LSE) {
  // [blank]
  float* const sums = dynamic_shared<float>();  // [warps, d]
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const std::int64_t row = blockIdx.x, rows = gridDim.x;

  // (1) m = max L_s,  l = sum_s exp(L_s - m),  L = m + log l: every warp by itself
  float m = -INFINITY, l = 0;
  for (int s = lane; s < parts.splits; s += lanes) m = fmaxf(m, parts.L[s * rows + row]);
  for (int bits = lanes / 2; bits > 0; bits /= 2)
    m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, bits));
  const float shift = m == -INFINITY ? 0 : m;  // no part has seen a key: any finite number
  for (int s = lane; s < parts.splits; s += lanes) l += expf(parts.L[s * rows + row] - shift);
  for (int bits = lanes / 2; bits > 0; bits /= 2) l += __shfl_xor_sync(0xffffffff, l, bits);

  // (2) O = sum_s exp(L_s - m) / l O_s, of this warp's parts
  float o[columns] = {};
#pragma unroll 8
  for (int s = warp; s < parts.splits; s += warps) {
    const float* O = parts.O + (s * rows + row) * d;
    float weight = 0;
    // [step 06.29: what the part weighs, which is nothing if no part has seen a key (1 line)]
    if (l != 0) weight = expf(parts.L[s * rows + row] - shift) / l;
      // [end]
#pragma unroll
    for (int y = 0; y < columns; ++y)
      if (const int x = lane + lanes * y; x < d) o[y] += weight * O[x];
  }
  for (int y = 0; y < columns; ++y)
    if (const int x = lane + lanes * y; x < d) sums[warp * d + x] = o[y];
  __syncthreads();

  const std::int64_t i = row % p.Nq, h = row / p.Nq % p.Hq, b = row / p.Nq / p.Hq;
  for (int x = threadIdx.x; x < d; x += lanes * warps) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += sums[w * d + x];
    to.at(b, h, i)[x] = T(sum);
  }
  if (LSE && threadIdx.x == 0) LSE[row] = m + logf(l);
  // [end blank]
}
// [end quote]

}  // namespace

template <class T>
void launch_merge(const Problem& p, const Parts& parts, const View<T>& O, float* LSE,
                  cudaStream_t stream) {
  const auto merge = merge_kernel<T>;
  FA_LAUNCH(merge, dim3(unsigned(p.B * p.Hq * p.Nq)), dim3(lanes * warps),
            sizeof(float) * warps * std::size_t(p.d), stream, p, parts, O, LSE);
}
template void launch_merge(const Problem&, const Parts&, const View<float>&, float*, cudaStream_t);
template void launch_merge(const Problem&, const Parts&, const View<__half>&, float*, cudaStream_t);
template void launch_merge(const Problem&, const Parts&, const View<__nv_bfloat16>&, float*,
                           cudaStream_t);

}  // namespace fa::decode
