// Stage 02's merge for any number of parts: a part weighs exp(L_s), where L_s is the logarithm of
// the sum of its weights.
//
//   L = log sum_s exp(L_s),   O = sum_s exp(L_s - L) O_s
//
// A block has a row. It reads splits (d + 1) numbers of 4 bytes and writes d: little beside the
// keys, 2 d numbers each, if a part has some tens of them. But few rows mean few blocks, and what
// counts is how often one waits for memory: once, for L, of which each thread has one, and for O,
// of which a warp has eight parts under way. So a block has a warp for eight parts, at most 8.
// The sums are made in a fixed order: the same bits in every run.
#include <algorithm>

#include "06_optimized/beyond/decode/cache.cuh"

namespace fa::decode {
namespace {

constexpr int lanes = 32, most_warps = 8;
constexpr int columns = widest<__half> / lanes;   // of O that a lane owns
constexpr int at_once = 8;                        // parts of O that a warp has under way
static_assert(max_splits <= lanes * most_warps);  // a thread has the L of one part

// [blank]
// What f makes of all threads' x; every thread gets it. `of_warp` has a place for each warp.
template <class F>
__device__ float of_block(float x, float* of_warp, const F& f) {
  for (int bits = lanes / 2; bits > 0; bits /= 2) x = f(x, __shfl_xor_sync(0xffffffff, x, bits));
  if (threadIdx.x % lanes == 0) of_warp[threadIdx.x / lanes] = x;
  __syncthreads();
  x = of_warp[0];
  for (int w = 1; w < int(blockDim.x) / lanes; ++w) x = f(x, of_warp[w]);
  return x;
}
// [end blank]

// [quote kernel]
template <class T>
__global__ void merge_kernel(Problem p, Parts parts, View<T> to, float* LSE) {
  // [blank]
  __shared__ float weights[lanes * most_warps], largest[most_warps], added[most_warps];
  float* const sums = dynamic_shared<float>();  // [warps, d]
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const int threads = blockDim.x, warps = threads / lanes;
  const std::int64_t row = blockIdx.x, rows = gridDim.x;
  const int s = threadIdx.x;  // this thread's part
  parts_are_done();

  // O_s of eight of this warp's parts; the first ones are on their way while L is summed up.
  float o[columns] = {}, O[at_once][columns];
  const auto bring = [&](int first) {
#pragma unroll
    for (int n = 0; n < at_once; ++n)
#pragma unroll
      for (int y = 0; y < columns; ++y) {
        const int part = first + n * warps, x = lane + lanes * y;
        const bool there = part < parts.splits && x < d;
        O[n][y] = there ? parts.O[(part * rows + row) * d + x] : 0;
      }
  };
  bring(warp);

  // (1) m = max L_s,  l = sum_s exp(L_s - m),  L = m + log l
  const float L = s < parts.splits ? parts.L[s * rows + row] : -INFINITY;
  const float m = of_block(L, largest, [](float x, float y) { return fmaxf(x, y); });
  const float shift = m == -INFINITY ? 0 : m;  // no part has seen a key: any finite number
  const float e = expf(L - shift);
  const float l = of_block(e, added, [](float x, float y) { return x + y; });
  weights[s] = 0;
  // [step 06.29: what the part weighs, which is nothing if no part has seen a key (1 line)]
  if (l != 0) weights[s] = e / l;
  // [end]
  __syncthreads();

  // (2) O = sum_s exp(L_s - m) / l O_s, of this warp's parts
  for (int first = warp; first < parts.splits; first += at_once * warps) {
    if (first != warp) bring(first);
#pragma unroll
    for (int n = 0; n < at_once; ++n)
#pragma unroll
      for (int y = 0; y < columns; ++y)
        if (const int part = first + n * warps; part < parts.splits)
          o[y] += weights[part] * O[n][y];
  }
  for (int y = 0; y < columns; ++y)
    if (const int x = lane + lanes * y; x < d) sums[warp * d + x] = o[y];
  __syncthreads();

  const std::int64_t i = row % p.Nq, h = row / p.Nq % p.Hq, b = row / p.Nq / p.Hq;
  for (int x = threadIdx.x; x < d; x += threads) {
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
  const dim3 blocks(unsigned(p.B * p.Hq * p.Nq));
  const int warps = std::min(most_warps, (parts.splits + at_once - 1) / at_once);
  const std::size_t bytes = sizeof(float) * std::size_t(warps * p.d);
  if (optimized::built_for_9_0(merge))  // then it waits for the parts itself
    FA_LAUNCH_EARLY(merge, blocks, dim3(lanes * warps), bytes, stream, p, parts, O, LSE);
  else
    FA_LAUNCH(merge, blocks, dim3(lanes * warps), bytes, stream, p, parts, O, LSE);
}
template void launch_merge(const Problem&, const Parts&, const View<float>&, float*, cudaStream_t);
template void launch_merge(const Problem&, const Parts&, const View<__half>&, float*, cudaStream_t);
template void launch_merge(const Problem&, const Parts&, const View<__nv_bfloat16>&, float*,
                           cudaStream_t);

}  // namespace fa::decode
