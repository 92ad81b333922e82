// Rung 9, the last: a shape for each head dimension, no work that only a mask needs, and the whole
// contract.
//
// The idea: what remains is in the details.
//   d = 64     a tile has 128 queries, so that a step is as much work as with d = 128; dQ is added
//              up from registers (rung 4), which spares shared memory; dV comes behind dS (rung 6)
//   no mask    a kernel of its own: the branch that hides scores may cost even where it is not
//              taken, because ptxas moves nothing over it
//   a mask     hides S, before its exponentials, and not P, after them: then exponentials and
//              rounding are one piece between two branches
//   who says   that a buffer has been read: each warp, where there is a mask
//   sections   of heads whose Q, dO and dQ need 20 MiB, not 40: more of it is still in the L2 cache
//              when it is asked for
//
// What should change: 1 to 3 % at d = 128. And d, types, strides and key lengths as promised.
//
// Measured: 637 TFLOP/s after 628; with a causal mask 569 after 564.
#include <cfloat>

#include "06_optimized/backward.hpp"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

// A block of threads has Bc keys, 64 a warpgroup; a tile has Br queries. Measured, not derived.
template <int D_>
struct Sizes {
  static constexpr int D = D_, groups = 2, Bc = 64 * groups, Br = D == 64 ? 128 : 64;
  static constexpr int stages = 2, threads = 128 * (groups + 1);
  static constexpr bool adds_dQ = D == 64;  // from its registers; else a spare warp does
  static constexpr bool late_dV = D == 64;  // issued behind dS, not as soon as P is there
};

template <class Tiles, class T>
struct Shared {
  alignas(1024) T K[Tiles::Bc * Tiles::D], V[Tiles::Bc * Tiles::D];
  alignas(1024) T Q[Tiles::stages][Tiles::Br * Tiles::D], dO[Tiles::stages][Tiles::Br * Tiles::D];
  alignas(1024) T dS[3][Tiles::Br * Tiles::Bc];
  alignas(128) float dQ[Tiles::groups][64 * 64];
  alignas(128) float LSE2[Tiles::stages][Tiles::Br], D_i[Tiles::stages][Tiles::Br];
  Barrier KV_full, Q_full[Tiles::stages], Q_free[Tiles::stages];
  Barrier dO_full[Tiles::stages], dO_free[Tiles::stages];
};

// The numbered barriers: where the two groups meet, two for each group's buffer of dQ, one for a
// group alone, and two for each group's dS, of even steps and of odd ones.
constexpr int meeting = 1, dQ_free = 2, dQ_full = 4, alone = 6, ready = 8;

// ---- the warps that move data ----

template <class Tiles, class T, class At>
__device__ void load(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
                     const Passed& passed, At at) {
  const int hk = int(p.key_head(at.h));
  arrive_expecting(&shared.KV_full, 2 * Tiles::Bc * Tiles::D * int(sizeof(T)));
#pragma unroll
  for (int x = 0; x < Tiles::D; x += 64) {
    tma_load(shared.K + x * Tiles::Bc, maps.K, &shared.KV_full, x, at.j0, hk, at.b);
    tma_load(shared.V + x * Tiles::Bc, maps.V, &shared.KV_full, x, at.j0, hk, at.b);
  }
  Ring<Tiles::stages> q;
  for (int n = 0; n < at.steps; ++n, at.next(), q.next()) {
    const std::int64_t row = at.row(p, passed);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    bring(shared.Q[q.at], maps.Q, shared.LSE2[q.at], passed.LSE2 + row, &shared.Q_full[q.at], at);
    wait(&shared.dO_free[q.at], q.phase ^ 1);
    bring(shared.dO[q.at], maps.dO, shared.D_i[q.at], passed.D + row, &shared.dO_full[q.at], at);
  }
}

// One warp for each group's block of dQ: adds it up in global memory.
template <class Tiles, class T, class At>
__device__ void push(Shared<Tiles, T>& shared, const Problem& p, const Passed& passed, At at,
                     int group) {
  float* dQ = shared.dQ[group];
#pragma unroll 1
  for (int n = 0; n < at.steps; ++n, at.next()) {
    arrive(dQ_free + group, 128 + 32);  // the first time at once: nothing is in it yet
    sync(dQ_full + group, 128 + 32);
    if (elected()) {
      bulk_add(passed.dQ + at.row(p, passed) * Tiles::D + group * 4096, dQ,
               int(sizeof shared.dQ[0]));
      tma_commit();
      tma_wait_read();
    }
    __syncwarp();
  }
}

// ---- the warpgroups that compute, 64 keys each ----
// S, P, dP and dS are held transposed, a row for each key: steps.cuh.

template <bool masked, class Tiles, class T, class At>
__device__ void compute(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
                        const Passed& passed, float scale, At at) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  // Says that a buffer has been read: with a mask a lane of each warp, else a thread of the group.
  // Measured, not derived.
  const bool leader = masked ? lane == 0 : thread == 0;
  // exp(scale x) = 2^(c x). With a factor of 0 a hidden score would be as good as any.
  const float c = scale == 0 ? FLT_MIN : scale * 1.4426950408889634f;
  const int hk = int(p.key_head(at.h));
  T* const K = shared.K + group * 64 * 64;  // the group's keys, of each box of 64 columns
  T* const V = shared.V + group * 64 * 64;

  // The first query that sees the thread's key r, and the first that sees all keys of the group
  const Mask mask(p, at.b);
  const int j = at.j0 + 64 * group, row = 16 * warp + lane / 4;
  const int seen[2] = {int(mask.first_row(j + row)), int(mask.first_row(j + row + 8))};
  const int seen_all = int(mask.first_row(j + 63));

  float dK[D / 2] = {}, dV[D / 2] = {};
  settle(dK);
  settle(dV);
  Ring<Tiles::stages> q;

  // S_ij = Q_i K_j^T,  dP_ij = dO_i V_j^T
  const auto issue_S = [&](float(&S)[Br / 2], int at) {
    forget(S);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(S, K, shared.Q[at]);
    wgmma_commit();
  };
  const auto issue_dP = [&](float(&dP)[Br / 2], int at) {
    forget(dP);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(dP, V, shared.dO[at]);
    wgmma_commit();
  };
  // P_ij = exp(scale S_ij - LSE_i)
  const auto exponentials = [&](float(&P)[Br / 2], const float(&S)[Br / 2], int at) {
    const auto LSE2 = reinterpret_cast<const float2*>(shared.LSE2[at]) + lane % 4;
#pragma unroll
    for (int i = 0; i < Br / 2; i += 2) {
      const float2 L = LSE2[i / 4 * 4];
      P[i] = ex2(fmaf(S[i], c, -L.x));
      P[i + 1] = ex2(fmaf(S[i + 1], c, -L.y));
    }
  };
  // dV_j += sum_i P_ij dO_i,  dK_j += sum_i dS_ij Q_i
  const auto issue_sum = [&](float(&sum)[D / 2], const std::uint32_t(&A)[Br / 16][4], const T* X) {
    wgmma_fence();
    multiply_add<T, Br>(sum, A, X);
    wgmma_commit();
  };
  // dS_ij = P_ij (dP_ij - D_i), in place of dP; into shared memory as rows of queries, for dQ
  const auto make_dS = [&](std::uint32_t(&rounded)[Br / 16][4], float(&dP)[Br / 2],
                           const float(&P)[Br / 2], int at, T* dS) {
    const auto D_i = reinterpret_cast<const float2*>(shared.D_i[at]) + lane % 4;
#pragma unroll
    for (int i = 0; i < Br / 2; i += 2) {
      const float2 d = D_i[i / 4 * 4];
      dP[i] = P[i] * (dP[i] - d.x);
      dP[i + 1] = P[i + 1] * (dP[i + 1] - d.y);
    }
    round_to<T>(rounded, dP);
    const RowChunk to = ldmatrix_by_columns(lane);
#pragma unroll
    for (int j = 0; j < Br / 16; ++j)
      stmatrix_transposed(
          dS + group * Br * 64 + swizzled_chunk(16 * j + to.row, 2 * warp + to.chunk), rounded[j]);
    fence_async();  // and LSE2 and D_i have been read: the copy engine may write there
  };
  // dQ_i = sum_j dS_ij K_j of all keys of the block, 64 x 64: half of the columns or of the rows
  const auto issue_dQ = [&](float(&dQ)[32], int buffer) {
    forget(dQ);
    wgmma_fence();
    if constexpr (D == 64)
      multiply<T, Bc, Br>(dQ, shared.dS[buffer] + group * 64 * 64, shared.K);
    else
      multiply<T, Bc, Br>(dQ, shared.dS[buffer], shared.K + group * Bc * 64);
    wgmma_commit();
  };
  // dQ, whose tile begins at this row, into global memory
  const auto add_up = [&](const float(&dQ)[32], std::int64_t row) {
    if constexpr (Tiles::adds_dQ) {
      float* sum = passed.dQ + row * D + group * 4096 + thread * 4;
#pragma unroll
      for (int i = 0; i < 32; i += 4) add(sum + i / 4 * 512, dQ + i);
      return;
    }
    sync(dQ_free + group, 128 + 32);
#pragma unroll
    for (int i = 0; i < 32; i += 4)
      reinterpret_cast<float4*>(shared.dQ[group])[i / 4 * 128 + thread] =
          make_float4(dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
    fence_async();
    arrive(dQ_full + group, 128 + 32);
  };

  wait(&shared.KV_full, 0);
  // Keys past the length may hold anything, and 0 times NaN is NaN.
  if (const int here = int(mask.length) - j; mask.length < p.Nk && here < 64) {
    for (int e = max(here, 0) * 8 + thread; e < 64 * 8; e += 128)
      for (int x = 0; x < D; x += 64) {
        *reinterpret_cast<uint4*>(K + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(V + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
      }
    fence_async();
    sync(alone + group, 128);
  }

  float S[Br / 2];
  if (at.steps > 0) wait(&shared.Q_full[0], 0);
  issue_S(S, 0);
  int buffer = 0, before = 2;
  std::int64_t row_before = 0;  // where the rows of the step before begin
#pragma unroll 1
  for (int n = 0; n < at.steps; ++n, at.next()) {
    const int now = q.at;
    float P[Br / 2], dP[Br / 2], dQ[32];
    std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
    wgmma_wait<0>(S);  // and dK of the step before
    if (masked) __syncwarp();
    if (leader && n > 0) arrive(&shared.Q_free[now ^ 1]);
    if (masked && at.i0 < seen_all) {
      const int first = at.i0 + 2 * (lane % 4), hidden[2] = {seen[0] - first, seen[1] - first};
      hide(S, hidden, c < 0 ? INFINITY : -INFINITY);
    }
    wait(&shared.dO_full[now], q.phase);
    issue_dP(dP, now);
    exponentials(P, S, now);
    round_to<T>(rounded_P, P);
    if (!Tiles::late_dV) issue_sum(dV, rounded_P, shared.dO[now]);
    // dS, with d = 128 while dV is under way. Its buffer is free: the other group is done with the
    // step before the last, since it has written dS of the last one.
    if (n > 0) sync(ready + 2 * (group ^ 1) + (n - 1) % 2, 256);
    wgmma_wait<Tiles::late_dV ? 0 : 1>(dP);
    make_dS(rounded_dS, dP, P, now, shared.dS[buffer]);
    arrive(ready + 2 * group + n % 2, 256);
    if (Tiles::late_dV) issue_sum(dV, rounded_P, shared.dO[now]);

    // dQ of the step before, for which both have written; in the first step nobody wants it.
    issue_dQ(dQ, before);
    before = buffer;
    buffer = buffer == 2 ? 0 : buffer + 1;
    issue_sum(dK, rounded_dS, shared.Q[now]);
    wgmma_wait<1>(dQ);  // and dV
    if (masked) __syncwarp();
    if (leader) arrive(&shared.dO_free[now]);
    if (n > 0) add_up(dQ, row_before);
    row_before = at.row(p, passed);

    // S of the next step; after the last one of what lies there, and nobody looks at it.
    q.next();
    if (n + 1 < at.steps) wait(&shared.Q_full[q.at], q.phase);
    issue_S(S, q.at);
  }
  wgmma_wait<0>(S);
  if (at.steps > 0) {
    float dQ[32];
    sync(ready + 2 * (group ^ 1) + (at.steps - 1) % 2, 256);
    issue_dQ(dQ, before);
    wgmma_wait<0>(dQ);
    add_up(dQ, row_before);
  }
  settle(dK);
  settle(dV);

  // dK scaled, and both leave, through what were K and V.
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dK[i] *= scale;
  sync(meeting, 256);  // nobody reads K any more
  store_sums<Bc>(maps, K, V, dK, dV, warp, lane, j, hk, at.b);
}

template <bool masked, class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Passed passed, float scale, int section) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<Tiles, T>);
  if (threadIdx.x == 0) {
    init(&shared.KV_full, 1);
    constexpr int readers = masked ? 4 * Tiles::groups : Tiles::groups;  // warps, or groups
    init(shared.Q_full, shared.Q_free, readers);
    init(shared.dO_full, shared.dO_free, readers);
    fence_barriers();
  }
  __syncthreads();
  constexpr bool skip_unseen = true;  // such keys may hold NaN
  const Place<Tiles::Br> at(p, InSections<Tiles::Bc>(p, section), skip_unseen);
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp < Tiles::groups && !Tiles::adds_dQ)
      push(shared, p, passed, at, warp);
    else if (warp == Tiles::groups && elected())
      load(shared, maps, p, passed, at);
  } else {
    take_registers<240>();
    compute<masked>(shared, maps, p, passed, scale, at);
  }
}

template <bool masked, class Tiles, class T>
void launch(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
            cudaStream_t stream) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const Maps maps = maps_of<Br, Bc>(p, t);
  const int section = heads_of_section(p, D, 20);  // MiB of L2
  const auto kernel = hopper_kernel<masked, Tiles, T>;
  constexpr std::size_t shared_bytes = sizeof(Shared<Tiles, T>);
  allow_shared_memory(kernel, shared_bytes);
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Bc - 1) / Bc);
  launch_before(p, t, passed, stream);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), shared_bytes, stream, maps, p,
            passed, scale, section);
  launch_after(p, t, scale, passed, stream);
}

}  // namespace

template <class T>
void launch_backward_hopper(const Problem& p, const Backward<T>& t, float scale,
                            const Passed& passed, cudaStream_t stream) {
  const bool masked = p.causal != Causal::none || p.key_lengths || p.Nk % 128 != 0;
  const auto run = [&](auto launch) { launch(p, t, scale, passed, stream); };
  if (p.d <= 64) return run(masked ? launch<true, Sizes<64>, T> : launch<false, Sizes<64>, T>);
  run(masked ? launch<true, Sizes<128>, T> : launch<false, Sizes<128>, T>);
}
template void launch_backward_hopper(const Problem&, const Backward<__half>&, float, const Passed&,
                                     cudaStream_t);
template void launch_backward_hopper(const Problem&, const Backward<__nv_bfloat16>&, float,
                                     const Passed&, cudaStream_t);

}  // namespace fa::optimized
