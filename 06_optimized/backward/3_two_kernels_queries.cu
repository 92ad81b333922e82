// Rung 3 of the backward, dQ: the owner of Br queries goes through blocks of Bc keys. What it is
// about stands in 3_two_kernels.cu.
//
// Measured, both kernels: 509 TFLOP/s; with a causal mask 474.
#include "06_optimized/backward/3_two_kernels.cuh"

namespace fa::optimized::two_kernels {
namespace {

template <int D_, int Bc_, int K_buffers_, int V_buffers_>
struct QuerySizes {
  static constexpr int D = D_, Br = 64 * groups, Bc = Bc_;
  static constexpr int K_buffers = K_buffers_, V_buffers = V_buffers_;
};

// Br queries from i0 on; they see, together, `blocks` blocks of keys.
struct QueryTask {
  Mask mask;
  int b, h, i0, blocks;

  template <class Tiles>
  __device__ static QueryTask of(const Problem& p, const Order<int>& order) {
    int head, tile;
    order.place(blockIdx.x, head, tile);
    const int b = head / int(p.Hq);
    QueryTask task{Mask(p, b), b, head % int(p.Hq), tile * Tiles::Br};
    const int last = min(task.i0 + Tiles::Br, int(p.Nq)) - 1;
    task.blocks = (task.visible_keys(last) + Tiles::Bc - 1) / Tiles::Bc;
    return task;
  }
  __device__ int visible_keys(int i) const { return int(mask.visible_keys(i)); }
};

template <class Tiles, class T>
struct QueryShared {
  alignas(1024) T Q[Tiles::Br * Tiles::D], dO[Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::K_buffers][Tiles::Bc * Tiles::D];
  alignas(1024) T V[Tiles::V_buffers][Tiles::Bc * Tiles::D];
  Barrier Q_full, K_full[Tiles::K_buffers], K_free[Tiles::K_buffers];  // dO comes with Q
  Barrier V_full[Tiles::V_buffers], V_free[Tiles::V_buffers];
  QueryTask task;
};

// The last block first, since it is the one with a mask.
template <class Tiles, class T>
__device__ void load(QueryShared<Tiles, T>& shared, const Maps& maps, int h_keys) {
  const QueryTask& task = shared.task;
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  constexpr int bytes = Bc * D * int(sizeof(T));
  arrive_expecting(&shared.Q_full, 2 * Br * D * int(sizeof(T)));
  bring<D, Br>(shared.Q, maps.Q, &shared.Q_full, task.i0, task.h, task.b);
  bring<D, Br>(shared.dO, maps.dO, &shared.Q_full, task.i0, task.h, task.b);
  Ring<Tiles::K_buffers> k;
  Ring<Tiles::V_buffers> v;
  for (int j = task.blocks - 1; j >= 0; --j) {
    wait(&shared.K_free[k.at], k.phase ^ 1);
    arrive_expecting(&shared.K_full[k.at], bytes);
    bring<D, Bc>(shared.K[k.at], maps.K, &shared.K_full[k.at], j * Bc, h_keys, task.b);
    wait(&shared.V_free[v.at], v.phase ^ 1);
    arrive_expecting(&shared.V_full[v.at], bytes);
    bring<D, Bc>(shared.V[v.at], maps.V, &shared.V_full[v.at], j * Bc, h_keys, task.b);
    k.next();
    v.next();
  }
}

template <bool masked, class Tiles, class T>
__device__ void compute_dq(QueryShared<Tiles, T>& shared, const Maps& maps, const Passed& passed,
                           int Hq, float scale) {
  const QueryTask& task = shared.task;
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, x0 = 2 * (lane % 4);
  const bool leader = threadIdx.x % 128 == 0;
  const float c = scale * log2_e;
  const int first = task.i0 + 64 * group, i = first + 16 * warp + lane / 4;
  const int visible[2] = {task.visible_keys(i), task.visible_keys(i + 8)};
  const int full = task.visible_keys(first) / Bc;  // blocks of which nothing is hidden
  const std::int64_t row = (std::int64_t(task.b) * Hq + task.h) * passed.rows + i;
  const float LSE2[2] = {passed.LSE2[row], passed.LSE2[row + 8]};
  const float Di[2] = {passed.D[row], passed.D[row + 8]};
  T *Qi = shared.Q + 64 * group * 64, *dOi = shared.dO + 64 * group * 64;

  float dQ[D / 2];
#pragma unroll
  for (int e = 0; e < D / 2; ++e) dQ[e] = 0;
  std::uint32_t dS[Bc / 16][4];
  wait(&shared.Q_full, 0);
  Ring<Tiles::K_buffers> k, before;
  Ring<Tiles::V_buffers> v;

  // Keys past the length may hold anything, and 0 times NaN is NaN.
  const int length = int(task.mask.length), seen = length - (task.blocks - 1) * Bc;
  if (length < task.mask.Nk && task.blocks > 0 && seen < Bc) {
    wait(&shared.K_full[0], 0);
    for (int e = seen * 8 + threadIdx.x % 128; e < Bc * 8; e += 128)
      for (int x = 0; x < D; x += 64)
        *reinterpret_cast<uint4*>(shared.K[0] + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
    fence_async();
    sync(own + group, 128);
  }

#pragma unroll 1
  for (int j = task.blocks - 1; j >= 0; --j) {
    // S = Q K^T and dP = dO V^T; dQ of the block before is still under way
    float S[Bc / 2], dP[Bc / 2];
    wait(&shared.K_full[k.at], k.phase);
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[k.at]);
    wgmma_commit();
    wait(&shared.V_full[v.at], v.phase);
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(dP, dOi, shared.V[v.at]);
    wgmma_commit();
    wgmma_wait<1>(S);
    if (leader && j < task.blocks - 1) arrive(&shared.K_free[before.at]);

    // P while dP comes, then dS
    const int end[2] = {visible[0] - j * Bc - x0, visible[1] - j * Bc - x0};
    weights(S, c, LSE2);
    // Never taken. Without it ptxas moves the wait up, before half of the exponentials: that
    // costs at d = 64 and gains at d = 256.
    if (D <= 128 && S[0] < 0) stop();
    wgmma_wait<0>(dP);
    if (leader) arrive(&shared.V_free[v.at]);
    differences(S, dP, Di);
    if (masked && j >= full) hide_from(end, S);
    round_to<T>(dS, S);

    // dQ += dS K, scaled at the end
    wgmma_fence();
    multiply_add<T, Bc>(dQ, dS, shared.K[k.at]);
    wgmma_commit();
    before = k;
    k.next();
    v.next();
  }
  wgmma_wait<0>(dQ);
  store<Br>(Qi, dQ, scale, maps.dQ, first, task.h, task.b);
  // Before anything that comes later in the stream. One block is enough: who waits keeps an SM.
  if (blockIdx.x == gridDim.x - 1) previous_kernel_is_done();
}

template <bool masked, class Tiles, class T>
__global__ void __launch_bounds__(threads, 1)
    dq_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
              const __grid_constant__ Passed passed, const __grid_constant__ Order<int> order,
              float scale) {
  auto& shared = FA_DYNAMIC_SHARED(QueryShared<Tiles, T>);
  if (threadIdx.x == 0) {
    init(&shared.Q_full, 1);
    init(shared.K_full, shared.K_free, groups);
    init(shared.V_full, shared.V_free, groups);
    fence_barriers();
    shared.task = QueryTask::of<Tiles>(p, order);
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<loader_registers>();
    if (threadIdx.x < 32 && elected()) load(shared, maps, int(p.key_head(shared.task.h)));
  } else {
    take_registers<registers>();
    compute_dq<masked>(shared, maps, passed, int(p.Hq), scale);
  }
}

template <class Tiles, class T>
void launch(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
            cudaStream_t stream) {
  const bool masked = p.causal != Causal::none || p.key_lengths || p.Nk % Tiles::Bc != 0;
  const auto kernel = masked ? dq_kernel<true, Tiles, T> : dq_kernel<false, Tiles, T>;
  const Order<int> order = order_of_queries<Tiles>(p);
  constexpr std::size_t bytes = sizeof(QueryShared<Tiles, T>);
  static_assert(bytes <= most_shared);
  allow_shared_memory(kernel, bytes);
  // It does not need what the kernel before it writes.
  FA_LAUNCH_EARLY(kernel, dim3(unsigned(order.tiles) * unsigned(order.heads)), dim3(threads), bytes,
                  stream, maps_of<Tiles>(p, t), p, passed, order, scale);
}

}  // namespace

template <class T>
void launch_wgmma_dq(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                     cudaStream_t stream) {
  const auto run = [&](auto launch) { launch(p, t, scale, passed, stream); };
  if (p.d <= 64) return run(launch<QuerySizes<64, 128, 3, 3>, T>);
  if (p.d <= 128) return run(launch<QuerySizes<128, 96, 3, 3>, T>);
  run(launch<QuerySizes<256, 64, 2, 1>, T>);
}

template void launch_wgmma_dq(const Problem&, const Backward<__half>&, float, const Passed&,
                              cudaStream_t);
template void launch_wgmma_dq(const Problem&, const Backward<__nv_bfloat16>&, float, const Passed&,
                              cudaStream_t);

}  // namespace fa::optimized::two_kernels
