// Rung 3 of the backward: two kernels by wgmma and TMA. And the whole contract, on 9.0.
//
// The idea: who owns a sum keeps it in registers. A block of threads that owns 128 keys goes
// through the queries and adds up dK and dV; another kernel's block owns 128 queries, goes through
// the keys and adds up dQ. Nobody adds to what is another's: no atomics, the same bits in every
// run. The price: S and dP are computed twice, seven products where five would do.
//
// The first kernel makes S^T = K Q^T, whose rows are keys, and not S: what a warpgroup holds of P^T
// is then A of dV += P^T dO without any exchange, as P was A of P V in the forward. Both kernels
// have the forward's shape: one thread loads, two warpgroups compute.
//
// Here is the first kernel, for d <= 128. For d > 128 it is another one, in 3_two_kernels_wide.cu;
// the second is in 3_two_kernels_queries.cu.
//
// What should change: the products of rung 2 at the speed of the forward's. For d = 128 seven
// products at 660 to 720 TFLOP/s; the FLOP are counted as five, so 470 to 510.
//
// Measured: 509 TFLOP/s after 217; with a causal mask 474 after 195.
#include "06_optimized/backward/3_two_kernels.cuh"

namespace fa::optimized {
namespace two_kernels {
namespace {

template <int D_, int Br_, int Bc_>
struct KeySizes {
  static constexpr int D = D_, Br = Br_, Bc = Bc_;
};

// Each warpgroup has 64 of the keys and does everything for them.
template <class Tiles, class T>
__device__ void compute_dkv(KeyShared<Tiles, T>& shared, const Maps& maps, float scale) {
  const KeyTask& task = shared.task;
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, x0 = 2 * (lane % 4);
  const bool leader = threadIdx.x % 128 == 0;
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)
  const int j0 = task.j0 + 64 * group, j = j0 + 16 * warp + lane / 4;
  const int first_row[2] = {task.first_row(j), task.first_row(j + 8)};
  const int all_seen = task.first_row(j0 + 63);  // from this row on nothing is hidden
  T *Kj = shared.K + 64 * group * 64, *Vj = shared.V + 64 * group * 64;

  float dK[D / 2] = {}, dV[D / 2] = {}, S[Br / 2];
  settle(dK);
  settle(dV);
  Ring<stages> at;
  int i = task.first;
  const int tiles = task.tiles();

  // S^T = K Q^T
  const auto issue_S = [&] {
    forget(S);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(S, Kj, shared.Q[at.at]);
    wgmma_commit();
  };
  wait(&shared.KV_full, 0);
  // Keys past the length may hold anything. Their P is 0, and so is dS = 0 (dP - D) if dP is
  // finite.
  if (const int here = int(task.mask.length) - j0; task.mask.length < task.mask.Nk && here < 64) {
    for (int e = max(here, 0) * 8 + threadIdx.x % 128; e < 64 * 8; e += 128)
      for (int x = 0; x < D; x += 64)
        *reinterpret_cast<uint4*>(Vj + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
    fence_async();
    sync(own + group, 128);
  }
  if (tiles > 0) wait(&shared.Q_full[0], 0);
  issue_S();
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    static_assert(stages == 2);  // the other buffer is now ^ 1
    const int now = at.at;
    float P[Br / 2], dP[Br / 2];
    std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
    // And dK of the tile before, which is done with. The hardware multiplies for four warps
    // together, which libraries count on, too: one thread may speak for them.
    wgmma_wait<0>(S);
    if (leader && n > 0) arrive(&shared.free[now ^ 1]);

    // dP^T = V dO^T, and P^T meanwhile
    wait(&shared.dO_full[now], at.phase);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(dP, Vj, shared.dO[now]);
    wgmma_commit();
    weights_transposed(P, S, c, shared.LSE2[now] + x0);
    if (i * Br < all_seen) {
      const int begin[2] = {first_row[0] - i * Br - x0, first_row[1] - i * Br - x0};
      hide(P, begin);
    }

    round_to<T>(rounded_P, P);
    wgmma_wait<0>(dP);
    differences_transposed(P, dP, shared.D[now] + x0);
    fence_async();  // LSE2 and D have been read: the copy engine may write there
    round_to<T>(rounded_dS, P);

    wgmma_fence();
    multiply_add<T, Br>(dV, rounded_P, shared.dO[now]);
    wgmma_commit();
    // dK += dS^T Q, scaled at the end
    wgmma_fence();
    multiply_add<T, Br>(dK, rounded_dS, shared.Q[now]);
    wgmma_commit();
    if (++i == task.end) i = task.first;  // of the next head

    // S^T of the next tile; after the last one of what lies there, and nobody looks at it.
    at.next();
    if (n + 1 < tiles) wait(&shared.Q_full[at.at], at.phase);
    issue_S();
  }
  wgmma_wait<0>(S);
  settle(dK);
  settle(dV);
  store<Bc>(Vj, dV, 1, maps.dV, j0, task.h, task.b);
  store<Bc>(Kj, dK, scale, maps.dK, j0, task.h, task.b);
}

template <class Tiles, class T>
__global__ void __launch_bounds__(threads, 1)
    dkv_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
               const __grid_constant__ Passed passed, const __grid_constant__ Order<int> order,
               float scale) {
  auto& shared = FA_DYNAMIC_SHARED(KeyShared<Tiles, T>);
  if (threadIdx.x == 0) {
    shared.start(KeyTask::of<Tiles>(p, order));
    fence_barriers();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<loader_registers>();
    if (threadIdx.x < 32 && elected()) load(shared, maps, passed, int(p.Hq));
  } else {
    take_registers<registers>();
    compute_dkv(shared, maps, scale);
  }
}

template <class Tiles, class T>
void launch_dkv(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(KeyShared<Tiles, T>);
  static_assert(bytes <= most_shared);
  launch_keys<Tiles>(dkv_kernel<Tiles, T>, bytes, p, t, scale, passed, stream);
}

}  // namespace
}  // namespace two_kernels

template <class T>
void launch_backward_two_kernels(const Problem& p, const Backward<T>& t, float scale,
                                 const Passed& passed, cudaStream_t stream) {
  using namespace two_kernels;
  launch_before(p, t, passed, stream);
  const auto run = [&](auto launch) { launch(p, t, scale, passed, stream); };
  if (p.d <= 64)
    run(launch_dkv<KeySizes<64, 128, 128>, T>);
  else if (p.d <= 128)
    run(launch_dkv<KeySizes<128, 64, 128>, T>);
  else
    run(launch_wide_dkv<T>);
  run(launch_wgmma_dq<T>);
}

template void launch_backward_two_kernels(const Problem&, const Backward<__half>&, float,
                                          const Passed&, cudaStream_t);
template void launch_backward_two_kernels(const Problem&, const Backward<__nv_bfloat16>&, float,
                                          const Passed&, cudaStream_t);

}  // namespace fa::optimized
