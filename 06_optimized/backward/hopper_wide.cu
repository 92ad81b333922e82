// The backward's product for 128 < d <= 256, on 9.0: five products, as for smaller d.
//
// The idea: at d = 256 dK and dV of 64 keys take half of the registers of both groups, so dQ finds
// no room beside scores and operands; rung 3 makes S and dP a second time, in a kernel that owns
// queries. But a warpgroup of 3_two_kernels_wide.cu holds dS, rounded, and may keep it: in memory,
// two bytes a score. What is left of the second kernel is one product, over all keys:
//
//   dQ = scale dS K
//
// N x N numbers in memory are what FlashAttention is there to avoid. Here they are an exchange:
// each is written once and read once, and multiplied with 256 numbers of K; and there are never
// more of them at a time than BackwardOptions allow. If that is not all, the keys come in parts: a
// part's dS, then its product, and the sums of dQ wait in fp32 for the next part.
//
// Who owns a sum keeps it, as in rung 3: no atomics, the same bits in every run.
//
//   who          what it does                                         waits for     says
//   a thread     brings K, and dS of both groups, in four buffers     free          full
//   two groups   dQ of 64 queries each: dS into registers, times K    full          free
//
// Measured, N = 4096: 599 TFLOP/s after 466 of rung 3; with a causal mask 553 after 426.
#include <algorithm>

#include "06_optimized/backward/3_two_kernels.cuh"
#include "06_optimized/backward/kept.cuh"

namespace fa::optimized {
namespace two_kernels {
namespace {

struct ProductTiles {
  static constexpr int D = 256, Br = 64 * groups, Bc = 64, buffers = 4;
};
constexpr int both_done = 3;  // a numbered barrier of the two groups
static_assert(ProductTiles::Bc == KeptBlock::keys);

// Br queries from i0 on. Group g has Br / groups of them, and multiplies with tiles first ...
// end[g] - 1 of the keys: those of this part that any of its queries sees.
struct ProductTask {
  int b, h, i0, first, end[groups], length;

  __device__ ProductTask(const Problem& p, const Passed& passed, const Order<int>& order) {
    int head, tile;
    order.place(blockIdx.x, head, tile);
    b = head / int(p.Hq);
    h = head % int(p.Hq);
    i0 = tile * ProductTiles::Br;
    first = passed.kept_first;
    const Mask mask(p, b);
    length = int(mask.length);
    for (int g = 0; g < groups; ++g) {
      const int i = i0 + 64 * g, last = min(i + 64, int(p.Nq)) - 1;
      const int seen = i < p.Nq ? int(mask.visible_keys(last)) : 0;
      end[g] = min((seen + ProductTiles::Bc - 1) / ProductTiles::Bc, first + passed.kept_tiles);
    }
  }
  __device__ int last_end() const { return max(end[0], end[1]); }
};

template <class T>
struct ProductShared {
  alignas(1024) T K[ProductTiles::buffers][ProductTiles::Bc * ProductTiles::D];
  alignas(128) T dS[ProductTiles::buffers][groups][KeptBlock::numbers];
  Barrier full[ProductTiles::buffers], free[ProductTiles::buffers];
  ProductTask task;
};

template <class T>
__device__ void load(ProductShared<T>& shared, const Maps& maps, const Problem& p,
                     const Passed& passed) {
  const ProductTask& task = shared.task;
  constexpr int D = ProductTiles::D, Bc = ProductTiles::Bc;
  const int head = task.b * int(p.Hq) + task.h, hk = int(p.key_head(task.h));
  Ring<ProductTiles::buffers> at;
  for (int t = task.first; t < task.last_end(); ++t, at.next()) {
    Barrier* const full = &shared.full[at.at];
    const int blocks = (t < task.end[0]) + (t < task.end[1]);
    wait(&shared.free[at.at], at.phase ^ 1);
    arrive_expecting(full, Bc * D * int(sizeof(T)) + blocks * KeptBlock::bytes);
    bring<D, Bc>(shared.K[at.at], maps.K, full, t * Bc, hk, task.b);
    if (t == task.first) previous_kernel_is_done();  // K may come before dS is made
    for (int g = 0; g < groups; ++g) {
      if (t >= task.end[g]) continue;
      const T* const dS = kept_block<const T>(passed, head, task.i0 + 64 * g, t - task.first);
      bulk_load(shared.dS[at.at][g], dS, KeptBlock::bytes, full);
    }
  }
  if (task.last_end() <= task.first) previous_kernel_is_done();
}

// The sums of a thread between two parts, of 64 rows from number `row` of all heads' on.
template <int n>
__device__ float4* waiting(const Passed& passed, std::int64_t row) {
  return reinterpret_cast<float4*>(passed.dQ + row * 2 * n) + threadIdx.x % 128;
}
template <int n>
__device__ void get_sums(float (&dQ)[n], const Passed& passed, std::int64_t row) {
#pragma unroll
  for (int e = 0; e < n; e += 4) {
    const float4 four = waiting<n>(passed, row)[e / 4 * 128];
    dQ[e] = four.x, dQ[e + 1] = four.y, dQ[e + 2] = four.z, dQ[e + 3] = four.w;
  }
}
template <int n>
__device__ void put_sums(const Passed& passed, std::int64_t row, const float (&dQ)[n]) {
#pragma unroll
  for (int e = 0; e < n; e += 4)
    waiting<n>(passed, row)[e / 4 * 128] = make_float4(dQ[e], dQ[e + 1], dQ[e + 2], dQ[e + 3]);
}

template <class T>
__device__ void compute(ProductShared<T>& shared, const Maps& maps, const Problem& p,
                        const Passed& passed, float scale) {
  const ProductTask& task = shared.task;
  constexpr int D = ProductTiles::D, Bc = ProductTiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = threadIdx.x % 32, i = task.i0 + 64 * group;
  const std::int64_t row = (std::int64_t(task.b) * p.Hq + task.h) * passed.rows + i;

  const bool last_part = task.first + passed.kept_tiles >= (p.Nk + Bc - 1) / Bc;
  if (task.first > 0 && task.last_end() <= task.first && !last_part) return;  // nothing to add

  float dQ[D / 2] = {};
  if (task.first > 0) get_sums(dQ, passed, row);
  std::uint32_t dS[Bc / 16][4];
  Ring<ProductTiles::buffers> at;
#pragma unroll 1
  for (int t = task.first; t < task.last_end(); ++t, at.next()) {
    wait(&shared.full[at.at], at.phase);
    if (t < task.end[group]) {
      // Keys past the length may hold anything, and 0 times NaN is NaN.
      if (const int here = task.length - t * Bc; task.length < p.Nk && here < Bc) {
        for (int e = here * 8 + thread; e < Bc * 8; e += 128)
          for (int x = 0; x < D; x += 64)
            *reinterpret_cast<uint4*>(shared.K[at.at] + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
        fence_async();
        sync(own + group, 128);
      }
      get_kept(dS, shared.dS[at.at][group], warp, lane);
      fence_async();  // dS has been read: the copy engine may write there
      // dQ += dS K, scaled at the end
      wgmma_fence();
      multiply_add<T, Bc>(dQ, dS, shared.K[at.at]);
      wgmma_commit();
      wgmma_wait<0>(dQ);
    } else {
      sync(own + group, 128);  // its last warp, too, has found this phase
    }
    if (thread == 0) arrive(&shared.free[at.at]);
  }

  if (!last_part) {
    put_sums(passed, row, dQ);
    return;
  }
  sync(both_done, 256);  // each leaves through what both have read
  store<Bc>(shared.K[group], dQ, scale, maps.dQ, i, task.h, task.b);
}

template <class T>
__global__ void __launch_bounds__(threads, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                   const __grid_constant__ Passed passed, const __grid_constant__ Order<int> order,
                   float scale) {
  auto& shared = FA_DYNAMIC_SHARED(ProductShared<T>);
  if (threadIdx.x == 0) {
    init(shared.full, shared.free, groups);
    fence_barriers();
    shared.task = ProductTask(p, passed, order);
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<loader_registers>();
    if (threadIdx.x < 32 && elected()) load(shared, maps, p, passed);
  } else {
    take_registers<registers>();
    compute(shared, maps, p, passed, scale);
  }
}

template <class T>
void launch_product(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                    cudaStream_t stream) {
  const Order<int> order = order_of_queries<ProductTiles>(p);
  constexpr std::size_t bytes = sizeof(ProductShared<T>);
  static_assert(bytes <= most_shared);
  allow_shared_memory(product_kernel<T>, bytes);
  // It begins with K, which nobody writes.
  FA_LAUNCH_EARLY(product_kernel<T>, dim3(unsigned(order.tiles) * unsigned(order.heads)),
                  dim3(threads), bytes, stream, maps_of<ProductTiles>(p, t), p, passed, order,
                  scale);
}

}  // namespace
}  // namespace two_kernels

template <class T>
void launch_backward_hopper_wide(const Problem& p, const Backward<T>& t, float scale,
                                 const Passed& passed, cudaStream_t stream) {
  using namespace two_kernels;
  Passed part = passed;
  part.dQ = nullptr;  // no sums to begin with
  launch_before(p, t, part, stream);
  part.dQ = passed.dQ;
  const int all = int((p.Nk + KeptBlock::keys - 1) / KeptBlock::keys);
  for (part.kept_first = 0; part.kept_first < all; part.kept_first += part.kept_tiles) {
    part.kept_tiles = std::min(passed.kept_tiles, all - part.kept_first);
    launch_wide_dkv(p, t, scale, part, stream);
    launch_product(p, t, scale, part, stream);
  }
}

template void launch_backward_hopper_wide(const Problem&, const Backward<__half>&, float,
                                          const Passed&, cudaStream_t);
template void launch_backward_hopper_wide(const Problem&, const Backward<__nv_bfloat16>&, float,
                                          const Passed&, cudaStream_t);

}  // namespace fa::optimized
