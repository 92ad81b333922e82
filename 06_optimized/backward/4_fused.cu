// Rung 4: one kernel, five products.
//
// The idea: rung 3 multiplies seven times where five would do: both its kernels compute S and dP,
// one by rows and one by columns. Here a block of threads keeps 128 keys, walks over the queries
// that see them, and computes all: S and dP, from them dV and dK, which stay in its registers, and
// dQ. But of dQ every block has only what its own keys give. So dQ is added up in global memory, in
// fp32, with atomic additions of four numbers. P and dS go from the registers of one product to the
// next; only dS goes through shared memory too, transposed, because dQ sums over its other index:
// over the keys of both warpgroups, which must meet there once a step.
//
// What should change: 5 / 7 of the products and half of the exponentials. It costs that meeting,
// which also brings both warpgroups into step; for each block of keys all of dQ once more into the
// L2 cache, 32 KB a step; and dQ is zeroed before and rounded after, 5 % of the time. So much less
// than 7 / 5 is gained: 10 to 20 %. And the last bits of dQ now depend on who comes first.
//
// Measured: 572 TFLOP/s after 509; with a causal mask 503 after 474.
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

using T = __nv_bfloat16;

constexpr int D = 128, groups = 2, Bc = 64 * groups, Br = 64, stages = 2;
constexpr int threads = 128 * (groups + 1);  // a warpgroup that loads, two that compute

struct Shared {
  alignas(1024) T K[Bc * D], V[Bc * D];
  alignas(1024) T Q[stages][Br * D], dO[stages][Br * D];
  alignas(1024) T dS[2][Br * Bc];
  alignas(128) float LSE2[stages][Br], D_i[stages][Br];
  Barrier KV_full, Q_full[stages], Q_free[stages], dO_full[stages], dO_free[stages];
};
static_assert(sizeof(Shared) <= most_shared);

constexpr int meeting = 1;  // the numbered barrier of the two groups

// ---- the loader: load() in bring.cuh ----

// ---- the warpgroups that compute, 64 keys each ----
// S, P, dP and dS are held transposed, a row for each key: steps.cuh.

__device__ void compute(Shared& shared, const Maps& maps, const Problem& p, const Passed& passed,
                        float scale, Place<Br> at) {
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
    fence_async();  // and LSE2 and D_i have been read: the copy engine may write there

    // dV_j += sum_i P_ij dO_i
    wgmma_fence();
    multiply_add<T, Br>(dV, rounded_P, shared.dO[q.at]);
    wgmma_commit();

    // dQ_i += sum_j dS_ij K_j: of all keys of the block, half of the columns
    float dQ[Br / 2];
    sync(meeting, 256);
    wgmma_fence();
    multiply<T, Bc, Br>(dQ, dS, shared.K + group * Bc * 64);
    wgmma_commit();

    // dK_j += sum_i dS_ij Q_i
    wgmma_fence();
    multiply_add<T, Br>(dK, rounded_dS, shared.Q[q.at]);
    wgmma_commit();

    wgmma_wait<1>(dQ);  // and dV
    if (leader) arrive(&shared.dO_free[q.at]);
    float* sum = passed.dQ + at.row(p, passed) * D + group * Br * 64 + thread * 4;
#pragma unroll
    for (int i = 0; i < Br / 2; i += 4) add(sum + i / 4 * 512, dQ + i);
    wgmma_wait<0>(dK);
    if (leader) arrive(&shared.Q_free[q.at]);
  }
  wgmma_wait<0>(dV);  // long ended; but the compiler may read dV only now

  // dK scaled, and both leave, through what were K and V.
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dK[i] *= scale;
  sync(meeting, 256);  // nobody reads K any more
  store_sums<Bc>(maps, K, V, dK, dV, warp, lane, j, hk, at.b);
}

__global__ void __launch_bounds__(threads, 1)
    fused_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                 const __grid_constant__ Passed passed, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) init_barriers(shared, groups);  // a thread of each says what is free
  __syncthreads();
  const Place<Br> at(p, HeadByHead<Bc>(p));
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    if (threadIdx.x < 32 && elected()) load<D, Bc, stages>(shared, maps, p, passed, at);
  } else {
    take_registers<240>();
    compute(shared, maps, p, passed, scale, at);
  }
}

}  // namespace

template <class T>
void launch_backward_fused(const Problem& p, const Backward<T>& t, float scale,
                           const Passed& passed, cudaStream_t stream) {
  launch_before(p, t, passed, stream);
  const Maps maps = maps_of<Br, Bc>(p, t);
  allow_shared_memory(fused_kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Bc - 1) / Bc);
  FA_LAUNCH(fused_kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p,
            passed, scale);
  launch_after(p, t, scale, passed, stream);
}
template void launch_backward_fused(const Problem&, const Backward<__nv_bfloat16>&, float,
                                    const Passed&, cudaStream_t);

}  // namespace fa::optimized
