// Rung 5: dQ is added up by the copy engine.
//
// The idea: in rung 4 each thread adds its part of dQ to global memory with eight instructions, and
// where their way to the L2 cache is full the warp stands there. Here each warpgroup leaves its
// half of dQ in a buffer in shared memory and goes on. Two spare warps beside the loader, one for
// each buffer, ask the copy engine to add it, 16 KB in one piece, and give it back when it has been
// read: that is why dQ lies in global memory in the order of the registers. Two numbered barriers
// for each buffer, "full" and "free", as in a ring of one.
//
// What should change: little, and perhaps for the worse. The bytes that go to the L2 cache are the
// same, and now they pass through shared memory, 512 cycles more a step. Those who compute no
// longer wait for their way; but they still wait, in this step, for everything else.
//
// Measured: 561 TFLOP/s after 572; with a causal mask 483 after 503.
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
  alignas(1024) T dS[2][Br * Bc];
  alignas(128) float dQ[groups][Br * D / groups];
  alignas(128) float LSE2[stages][Br], D_i[stages][Br];
  Barrier KV_full, Q_full[stages], Q_free[stages], dO_full[stages], dO_free[stages];
};
static_assert(sizeof(Shared) <= most_shared);

// The numbered barriers: where the two groups meet, and two for each group's buffer of dQ.
constexpr int meeting = 1, dQ_free = 2, dQ_full = 2 + groups;

// ---- the warps that move data: the loader (bring.cuh), and who pushes ----

// One warp for each group's half of dQ: adds it up in global memory.
__device__ void push(Shared& shared, const Problem& p, const Passed& passed, Place<Br> at,
                     int group) {
  // [blank]
  float* dQ = shared.dQ[group];
#pragma unroll 1
  for (int n = 0; n < at.steps; ++n, at.next()) {
    // [step 06.23: offer the buffer; when it is full, one thread has it added and read (7 lines)]
    arrive(dQ_free + group, 128 + 32);  // the first time at once: nothing is in it yet
    sync(dQ_full + group, 128 + 32);
    if (elected()) {
      bulk_add(passed.dQ + at.row(p, passed) * D + group * Br * 64, dQ, int(sizeof shared.dQ[0]));
      tma_commit();
      tma_wait_read();
    }
    // [end]
    __syncwarp();
  }
  // [end blank]
}

// ---- the warpgroups that compute, 64 keys each ----
// S, P, dP and dS are held transposed, a row for each key: steps.cuh.

__device__ void compute(Shared& shared, const Maps& maps, const Problem& p, float scale,
                        Place<Br> at) {
  // [blank]
  const int group = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const bool leader = thread == 0;
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)
  const int hk = int(p.key_head(at.h));
  T* K = shared.K + group * 64 * 64;  // the group's keys, of each box of 64 columns
  T* V = shared.V + group * 64 * 64;

  const Mask mask(p, at.b);
  const int j = at.j0 + 64 * group;  // the group's first key
  const SeenFrom seen(mask, j, warp, lane);

  float dK[D / 2] = {}, dV[D / 2] = {};
  wait(&shared.KV_full, 0);
  Ring<stages> q;
#pragma unroll 1
  for (int n = 0; n < at.steps; ++n, at.next(), q.next()) {
    // S_ij = Q_i K_j^T and dP_ij = dO_i V_j^T
    float S[Br / 2], dP[Br / 2];
    wait(&shared.Q_full[q.at], q.phase);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(S, K, shared.Q[q.at]);
    wgmma_commit();
    wait(&shared.dO_full[q.at], q.phase);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(dP, V, shared.dO[q.at]);
    wgmma_commit();
    wgmma_wait<1>(S);

    // P_ij = exp(scale S_ij - LSE_i)
    float P[Br / 2];
    std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
    const auto LSE2 = reinterpret_cast<const float2*>(shared.LSE2[q.at]) + lane % 4;
    const auto D_i = reinterpret_cast<const float2*>(shared.D_i[q.at]) + lane % 4;
#pragma unroll
    for (int i = 0; i < Br / 2; i += 2) {
      const float2 L = LSE2[i / 4 * 4];
      P[i] = ex2(fmaf(S[i], c, -L.x));
      P[i + 1] = ex2(fmaf(S[i + 1], c, -L.y));
    }
    if (at.i0 < seen.all) hide(P, seen.hidden(at.i0, lane).of_key);
    round_to<T>(rounded_P, P);

    // dS_ij = P_ij (dP_ij - D_i); into shared memory as rows of queries, for dQ
    wgmma_wait<0>(dP);
#pragma unroll
    for (int i = 0; i < Br / 2; i += 2) {
      const float2 d = D_i[i / 4 * 4];
      dP[i] = P[i] * (dP[i] - d.x);
      dP[i + 1] = P[i + 1] * (dP[i + 1] - d.y);
    }
    round_to<T>(rounded_dS, dP);
    const RowChunk to = ldmatrix_by_columns(lane);
    T* dS = shared.dS[n % 2];  // the other group may still be reading the one before
#pragma unroll
    for (int x = 0; x < Br / 16; ++x)
      stmatrix_transposed(
          dS + group * Br * 64 + swizzled_chunk(16 * x + to.row, 2 * warp + to.chunk),
          rounded_dS[x]);
    // [step 06.24: what stands between a thread's stores and reads by the tensor cores (1 line)]
    fence_async();  // and LSE2 and D_i have been read: the copy engine may write there
    // [end]

    // dV_j += sum_i P_ij dO_i
    wgmma_fence();
    multiply_add<T, Br>(dV, rounded_P, shared.dO[q.at]);
    wgmma_commit();

    // dQ_i += sum_j dS_ij K_j: of all keys of the block, half of the columns
    float dQ[Br / 2];
    // [step 06.25: what must be there before dQ is issued, and what after? (4 lines)]
    sync(meeting, 256);
    wgmma_fence();
    multiply<T, Bc, Br>(dQ, dS, shared.K + group * Bc * 64);
    wgmma_commit();
    // [end]

    // dK_j += sum_i dS_ij Q_i
    wgmma_fence();
    multiply_add<T, Br>(dK, rounded_dS, shared.Q[q.at]);
    wgmma_commit();

    wgmma_wait<1>(dQ);  // and dV
    if (leader) arrive(&shared.dO_free[q.at]);
    // [step 06.26: when the buffer is offered, write dQ and hand it to the other warp (7 lines)]
    sync(dQ_free + group, 128 + 32);
#pragma unroll
    for (int i = 0; i < Br / 2; i += 4)
      reinterpret_cast<float4*>(shared.dQ[group])[i / 4 * 128 + thread] =
          make_float4(dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
    fence_async();
    arrive(dQ_full + group, 128 + 32);
    // [end]

    // [06.l]
    wgmma_wait<0>(dK);
    if (leader) arrive(&shared.Q_free[q.at]);
    // [end]
  }
  wgmma_wait<0>(dV);  // long ended; but the compiler may read dV only now

  // dK scaled, and both leave, through what were K and V.
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dK[i] *= scale;
  sync(meeting, 256);  // [06.m] nobody reads K any more
  store_sums<Bc>(maps, K, V, dK, dV, warp, lane, j, hk, at.b);
  // [end blank]
}

__global__ void __launch_bounds__(threads, 1)
    bulk_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                const __grid_constant__ Passed passed, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) init_barriers(shared, groups);  // a thread of each says what is free
  __syncthreads();
  const Place<Br> at(p, HeadByHead<Bc>(p));
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp < groups)
      push(shared, p, passed, at, warp);
    else if (warp == groups && elected())
      load<D, Bc, stages>(shared, maps, p, passed, at);
  } else {
    take_registers<240>();
    compute(shared, maps, p, scale, at);
  }
}

}  // namespace

template <class T>
void launch_backward_bulk(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                          cudaStream_t stream) {
  launch_before(p, t, passed, stream);
  const Maps maps = maps_of<Br, Bc>(p, t);
  allow_shared_memory(bulk_kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Bc - 1) / Bc);
  FA_LAUNCH(bulk_kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p,
            passed, scale);
  launch_after(p, t, scale, passed, stream);
}
template void launch_backward_bulk(const Problem&, const Backward<__nv_bfloat16>&, float,
                                   const Passed&, cudaStream_t);

}  // namespace fa::optimized
