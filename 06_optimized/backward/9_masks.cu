// Rung 9: what a mask costs.
//
// The idea: in every step of the rungs before stands `if (at.i0 < seen.all) hide(P)`, between the
// exponentials and the roundings of P. Without a mask it is never taken, and costs all the same:
// ptxas moves nothing over a branch, so the roundings cannot fill the gaps between exponentials. So
// there are two kernels now.
//   no mask    has no such branch
//   a mask     hides S, before its exponentials, and not P, after them: exponentials and roundings
//              are one piece again. And each warp says for itself that a buffer has been read,
//              where in the rungs before, and without a mask, one thread speaks for four warps
//
// What should change: little. A step without a mask has 404 instructions in place of 409, and an
// exponential and a rounding that take turns. A hidden score costs what a hidden weight did.
//
// Measured: 620 TFLOP/s after 626; with a causal mask 561 after 564.
#include <cfloat>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

using T = __nv_bfloat16;

constexpr int D = 128, groups = 2, Bc = 64 * groups, Br = 64, stages = 2;
constexpr int threads = 128 * (groups + 1);  // a warpgroup that moves data, two that compute

struct Shared {
  alignas(1024) T K[Bc * D], V[Bc * D];
  alignas(1024) T Q[stages][Br * D], dO[stages][Br * D];
  alignas(1024) T dS[3][Br * Bc];
  alignas(128) float dQ[groups][Br * D / groups];
  alignas(128) float LSE2[stages][Br], D_i[stages][Br];
  Barrier KV_full, Q_full[stages], Q_free[stages], dO_full[stages], dO_free[stages];
};
static_assert(sizeof(Shared) <= most_shared);

// The numbered barriers: where the two groups meet, two for each group's buffer of dQ, and two for
// each group's dS, of even steps and of odd ones.
constexpr int meeting = 1, dQ_free = 2, dQ_full = 2 + groups, ready = 2 + 2 * groups;

// ---- the warps that move data: the loader (bring.cuh), and who pushes ----

// One warp for each group's half of dQ: adds it up in global memory.
__device__ void push(Shared& shared, const Problem& p, const Passed& passed, Place<Br> at,
                     int group) {
  float* dQ = shared.dQ[group];
#pragma unroll 1
  for (int n = 0; n < at.steps; ++n, at.next()) {
    arrive(dQ_free + group, 128 + 32);  // the first time at once: nothing is in it yet
    sync(dQ_full + group, 128 + 32);
    if (elected()) {
      bulk_add(passed.dQ + at.row(p, passed) * D + group * Br * 64, dQ, int(sizeof shared.dQ[0]));
      tma_commit();
      tma_wait_read();
    }
    __syncwarp();
  }
}

// ---- the warpgroups that compute, 64 keys each ----
// S, P, dP and dS are held transposed, a row for each key: steps.cuh.

template <bool masked>
__device__ void compute(Shared& shared, const Maps& maps, const Problem& p, float scale,
                        Place<Br> at) {
  const int group = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  // Says that a buffer has been read: with a mask a lane of each warp, else a thread of the group.
  const bool leader = masked ? lane == 0 : thread == 0;
  // exp(scale x) = 2^(c x). With a factor of 0 a hidden score would be as good as any.
  const float c = scale == 0 ? FLT_MIN : scale * log2_e;
  const int hk = int(p.key_head(at.h));
  T* K = shared.K + group * 64 * 64;  // the group's keys, of each box of 64 columns
  T* V = shared.V + group * 64 * 64;

  const Mask mask(p, at.b);
  const int j = at.j0 + 64 * group;  // the group's first key
  const SeenFrom seen(mask, j, warp, lane);

  float dK[D / 2] = {}, dV[D / 2] = {}, S[Br / 2];
  settle(dK);
  settle(dV);
  Ring<stages> q;

  // S_ij = Q_i K_j^T
  const auto issue_S = [&] {
    forget(S);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(S, K, shared.Q[q.at]);
    wgmma_commit();
  };
  // dQ_i += sum_j dS_ij K_j: of all keys of the block, half of the columns
  const auto issue_dQ = [&](float(&dQ)[Br / 2], int buffer) {
    wgmma_fence();
    multiply<T, Bc, Br>(dQ, shared.dS[buffer], shared.K + group * Bc * 64);
    wgmma_commit();
  };
  const auto hand_over = [&](const float(&dQ)[Br / 2]) {
    sync(dQ_free + group, 128 + 32);
    put_dQ(shared.dQ[group], dQ, thread);
    fence_async();
    arrive(dQ_full + group, 128 + 32);
  };
  wait(&shared.KV_full, 0);
  if (at.steps > 0) wait(&shared.Q_full[0], 0);
  issue_S();
  int buffer = 0, before = 2;  // of dS

#pragma unroll 1
  for (int n = 0; n < at.steps; ++n, at.next()) {
    static_assert(stages == 2);  // the other buffer is now ^ 1
    const int now = q.at;
    wgmma_wait<0>(S);  // and dK of the step before
    if (masked) __syncwarp();
    if (leader && n > 0) arrive(&shared.Q_free[now ^ 1]);
    if (masked && at.i0 < seen.all)
      hide(S, seen.hidden(at.i0, lane).of_key, c < 0 ? INFINITY : -INFINITY);

    // dP_ij = dO_i V_j^T
    float dP[Br / 2];
    wait(&shared.dO_full[now], q.phase);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(dP, V, shared.dO[now]);
    wgmma_commit();

    // P_ij = exp(scale S_ij - LSE_i)
    float P[Br / 2];
    std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
    exponentials(P, S, c, shared.LSE2[now], lane);

    // dV_j += sum_i P_ij dO_i, which needs no dP: it runs under what follows
    round_to<T>(rounded_P, P);
    wgmma_fence();
    multiply_add<T, Br>(dV, rounded_P, shared.dO[now]);
    wgmma_commit();

    // dS_ij = P_ij (dP_ij - D_i); into shared memory as rows of queries, for dQ. The buffer is
    // free: the other group has written dS of the last step, so it is done with the step before.
    if (n > 0) sync(ready + 2 * (group ^ 1) + (n - 1) % 2, 256);
    wgmma_wait<1>(dP);
    to_dS(dP, P, shared.D_i[now], lane);
    round_to<T>(rounded_dS, dP);
    put_dS(shared.dS[buffer] + group * Br * 64, rounded_dS, warp, lane);
    fence_async();  // and LSE2 and D_i have been read: the copy engine may write there
    arrive(ready + 2 * group + n % 2, 256);

    // dQ of the step before; in the first step of what happens to lie there, and nobody wants it.
    float dQ[Br / 2];
    issue_dQ(dQ, before);
    before = buffer;
    buffer = buffer == 2 ? 0 : buffer + 1;

    // dK_j += sum_i dS_ij Q_i
    wgmma_fence();
    multiply_add<T, Br>(dK, rounded_dS, shared.Q[now]);
    wgmma_commit();

    // And dV. The hardware multiplies for four warps together, as libraries count on, too, and they
    // have read D_i before: one thread may speak for them, without a meeting.
    wgmma_wait<1>(dQ);
    if (masked) __syncwarp();
    if (leader) arrive(&shared.dO_free[now]);
    if (n > 0) hand_over(dQ);

    // S of the next step; after the last one of what happens to lie there, and nobody looks at it.
    q.next();
    if (n + 1 < at.steps) wait(&shared.Q_full[q.at], q.phase);
    issue_S();
  }
  wgmma_wait<0>(dK);
  wgmma_wait<0>(dV);

  // dQ of the last step
  if (at.steps > 0) {
    float dQ[Br / 2];
    sync(ready + 2 * (group ^ 1) + (at.steps - 1) % 2, 256);
    issue_dQ(dQ, before);
    wgmma_wait<0>(dQ);
    hand_over(dQ);
  }

  // dK scaled, and both leave, through what were K and V.
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dK[i] *= scale;
  sync(meeting, 256);  // nobody reads K any more
  store_sums<Bc>(maps, K, V, dK, dV, warp, lane, j, hk, at.b);
}

template <bool masked>
__global__ void __launch_bounds__(threads, 1)
    masks_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                 const __grid_constant__ Passed passed, float scale, int section) {
  auto& shared = FA_DYNAMIC_SHARED(Shared);
  constexpr int readers = masked ? 4 * groups : groups;  // warps, or groups
  if (threadIdx.x == 0) init_barriers(shared, readers);
  __syncthreads();
  const Place<Br> at(p, InSections<Bc>(p, section));
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp < groups)
      push(shared, p, passed, at, warp);
    else if (warp == groups && elected())
      load<D, Bc, stages>(shared, maps, p, passed, at);
  } else {
    take_registers<240>();
    compute<masked>(shared, maps, p, scale, at);
  }
}

}  // namespace

template <class T>
void launch_backward_masks(const Problem& p, const Backward<T>& t, float scale,
                           const Passed& passed, cudaStream_t stream) {
  launch_before(p, t, passed, stream);
  const Maps maps = maps_of<Br, Bc>(p, t);
  const int section = heads_of_section(p, D, 40);  // MiB of L2
  const bool masked = p.causal != Causal::none || p.Nk % Bc != 0;
  const auto kernel = masked ? masks_kernel<true> : masks_kernel<false>;
  allow_shared_memory(kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Bc - 1) / Bc);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p, passed,
            scale, section);
  launch_after(p, t, scale, passed, stream);
}
template void launch_backward_masks(const Problem&, const Backward<__nv_bfloat16>&, float,
                                    const Passed&, cudaStream_t);

}  // namespace fa::optimized
