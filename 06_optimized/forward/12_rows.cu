// Rung 12: one row's maximum under the other row's exponentials.
//
// The idea: a thread has two rows. The maximum of a row runs in the ALU, its exponentials in the
// special function unit: two units that could work at the same time, on different rows. ptxas,
// which orders the instructions, takes both maxima of rung 11 first and all exponentials then. It
// moves nothing over a branch, though, even over one that is never taken. One such branch after the
// first maximum, and the second is spread between the exponentials of the first row. It is in
// softmax() of softmax.cuh, which here takes the place of new_maximum() and weights().
//
// What should change: a softmax that is shorter by about one maximum, some 250 of 1900 cycles. The
// same instructions, and one branch.
//
// Measured: 669 TFLOP/s after 637 (round by round 5 % more), cool 690 after 679; in
// the last kernel 8 %.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

using T = __nv_bfloat16;

constexpr int D = 128, groups = 2, Br = 64 * groups, Bc = 128, stages = 2;
constexpr int threads = 128 * (groups + 1);  // a warpgroup that loads, two that compute

struct Shared {
  alignas(1024) T Q[Br * D], K[stages][Bc * D], V[stages][Bc * D];
  Barrier Q_full, K_full[stages], K_free[stages], V_full[stages], V_free[stages];
};
static_assert(sizeof(Shared) <= most_shared);

// Asks for a tile of `rows` rows, from row `first` of head h on.
template <int rows>
__device__ void bring(T* tile, const CUtensorMap& map, Barrier* full, int first, int h, int b) {
  arrive_expecting(full, rows * D * int(sizeof(T)));
#pragma unroll
  for (int x = 0; x < D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
}

__device__ void load(Shared& shared, const ForwardMaps& maps, const Problem& p, const Place& at) {
  const int seen = int(Mask(p, at.b).visible_keys(at.i0 + at.rows - 1));
  const int blocks = max(1, (seen + Bc - 1) / Bc), hk = int(p.key_head(at.h));
  bring<Br>(shared.Q, maps.Q, &shared.Q_full, at.i0, at.h, at.b);
  Ring<stages> k, v;
  const auto bring_K = [&](int j) {
    wait(&shared.K_free[k.at], k.phase ^ 1);
    bring<Bc>(shared.K[k.at], maps.K, &shared.K_full[k.at], j * Bc, hk, at.b);
    k.next();
  };
  const auto bring_V = [&](int j) {
    wait(&shared.V_free[v.at], v.phase ^ 1);
    bring<Bc>(shared.V[v.at], maps.V, &shared.V_full[v.at], j * Bc, hk, at.b);
    v.next();
  };
  bring_K(blocks - 1);
  for (int j = blocks - 1; j > 0; --j) {
    bring_K(j - 1);  // K is needed earlier than V
    bring_V(j);
  }
  bring_V(0);
}

__device__ void compute(Shared& shared, const ForwardMaps& maps, const Problem& p,
                        const Forward<T>& t, const Place& at, float scale) {
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % 128 == 0;
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  // The groups issue their products in turn.
  constexpr int turn = 1;  // numbered barriers, for each group its turn
  const auto my_turn = [&] { sync(turn + group, 256); };
  const auto next_turn = [&] { arrive(turn + 1 - group, 256); };
  if (group == 0) arrive(turn, 256);  // the first turn is its own

  const int row = 64 * group + 16 * warp + lane / 4;  // of the tile; the other is 8 below
  const Mask mask(p, at.b);
  const int visible[2] = {int(mask.visible_keys(at.i0 + min(row, at.rows - 1))),
                          int(mask.visible_keys(at.i0 + min(row + 8, at.rows - 1)))};
  const int blocks = max(1, (int(mask.visible_keys(at.i0 + at.rows - 1)) + Bc - 1) / Bc);
  const int full = int(mask.visible_keys(at.i0 + min(64 * group, at.rows - 1))) / Bc;
  const T* Qi = shared.Q + group * 64 * 64;  // the group's rows, of each box of 64 columns
  float O[D / 2] = {}, m[2] = {no_key, no_key}, l[2] = {0, 0}, alpha[2];
  std::uint32_t P[Bc / 16][4];
  wait(&shared.Q_full, 0);
  Ring<stages> kv;

  // S of the last tile by itself
  int j = blocks - 1;
  {
    float S[Bc / 2];
    wait(&shared.K_full[kv.at], kv.phase);
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
    wgmma_commit();
    wgmma_wait<0>(S);
    if (leader) arrive(&shared.K_free[kv.at]);
    hide(S, visible, j * Bc);
    softmax<Branch::after_first_maximum>(S, c, m, l, alpha);
    round_to<T>(P, S);
  }
  // A step: S of tile j and O += P V of the tile before are under way together, and the softmax of
  // tile j begins when S is there.
  const auto step = [&](auto masked) {
    float S[Bc / 2];
    const Ring<stages> before = kv;
    kv.next();
    wait(&shared.K_full[kv.at], kv.phase);
    my_turn();
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
    wgmma_commit();
    wait(&shared.V_full[before.at], before.phase);
    wgmma_fence();
    multiply_add<T, Bc>(O, P, shared.V[before.at]);
    wgmma_commit();
    next_turn();
    wgmma_wait<1>(S);
    if (leader) arrive(&shared.K_free[kv.at]);
    if constexpr (decltype(masked)::value) hide(S, visible, j * Bc);
    softmax<Branch::after_first_maximum>(S, c, m, l, alpha);
    wgmma_wait<0>(O);
    if (leader) arrive(&shared.V_free[before.at]);
    round_to<T>(P, S);
    scale_rows(O, alpha);
  };
  --j;
#pragma unroll 1
  for (; j >= full && j >= 0; --j) step(std::true_type());
#pragma unroll 1
  for (; j >= 0; --j) step(std::false_type());

  // The last O += P V
  wait(&shared.V_full[kv.at], kv.phase);
  wgmma_fence();
  multiply_add<T, Bc>(O, P, shared.V[kv.at]);
  wgmma_commit();
  wgmma_wait<0>(O);

  // O_i = O / l, L_i = (m + log2 l) log 2
  finish(O, m, l, t.LSE, (at.b * p.Hq + at.h) * p.Nq + at.i0, row, at.rows);

  // A warp's 16 rows leave by themselves, through what was the tile of Q.
  T* Oi = shared.Q + (64 * group + 16 * warp) * 64;
  store_rows<Br>(maps.O, Oi, O, lane, at.i0, 64 * group + 16 * warp, at.h, at.b);
  if (lane == 0) tma_wait_read();
}

__global__ void __launch_bounds__(threads, 1)
    rows_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                const __grid_constant__ Forward<T> t, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&shared.Q_full, 1);
    init(shared.K_full, shared.K_free, groups);  // a thread of each group says so
    init(shared.V_full, shared.V_free, groups);
    fence_barriers();
  }
  __syncthreads();
  const Place at(p, Br, blockIdx.x);
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    if (threadIdx.x < 32 && elected()) load(shared, maps, p, at);
  } else {
    take_registers<240>();
    compute(shared, maps, p, t, at, scale);
  }
}

}  // namespace

template <class T>
void launch_rows(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const ForwardMaps maps = maps_of(p, t, Br, Bc);
  allow_shared_memory(rows_kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(rows_kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p, t,
            scale);
}
template void launch_rows(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
