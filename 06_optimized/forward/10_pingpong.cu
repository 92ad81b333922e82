// Rung 10: ping-pong. One warpgroup's softmax under the other's products.
//
// The idea: if both groups multiply together and take exponentials together, the tensor cores rest
// during each softmax. A lock around the softmax lets one group in at a time; the other, which must
// wait, has nothing better to do than to multiply. O += P V is left under way: who comes to the
// next softmax has waited for it on the way, behind its next Q K^T. Beside it the same kernel
// without the lock, `no_lock`: then it is luck who runs under whom. Tiles with a mask have a loop
// of their own, so that the other one is free of it.
//
// What should change: the exponentials of one group cost nothing as long as they take less time
// than the products of the other. A lock has a price too: it is passed on twice for each tile.
//
// Measured: 599 TFLOP/s with the lock and 659 without, after 570.
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
  Ring<stages> kv;
  for (int j = blocks - 1; j >= 0; --j, kv.next()) {
    wait(&shared.K_free[kv.at], kv.phase ^ 1);
    bring<Bc>(shared.K[kv.at], maps.K, &shared.K_full[kv.at], j * Bc, hk, at.b);
    wait(&shared.V_free[kv.at], kv.phase ^ 1);
    bring<Bc>(shared.V[kv.at], maps.V, &shared.V_full[kv.at], j * Bc, hk, at.b);
  }
}

template <bool locked>
__device__ void compute(Shared& shared, const ForwardMaps& maps, const Problem& p,
                        const Forward<T>& t, const Place& at, float scale) {
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % 128 == 0;
  const T* Qi = shared.Q + group * 64 * 64;           // the group's rows, of each box of 64 columns
  const int row = 64 * group + 16 * warp + lane / 4;  // of the tile; the other is 8 below
  const Mask mask(p, at.b);
  const int visible[2] = {int(mask.visible_keys(at.i0 + min(row, at.rows - 1))),
                          int(mask.visible_keys(at.i0 + min(row + 8, at.rows - 1)))};
  const int blocks = max(1, (int(mask.visible_keys(at.i0 + at.rows - 1)) + Bc - 1) / Bc);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)
  float O[D / 2] = {}, m[2] = {no_key, no_key}, l[2] = {0, 0}, alpha[2] = {};
  std::uint32_t P[Bc / 16][4];
  const int full = int(mask.visible_keys(at.i0 + min(64 * group, at.rows - 1))) / Bc;

  // With the lock only one group is in the exponentials; the tensor cores belong to the other.
  // ptxas moves exponentials out of it, but nothing over a branch, even one that is never taken: no
  // factor and no sum is negative.
  const auto border = [](float x) {
    if (locked && x < 0) stop();
  };
  constexpr int turn = 1;  // numbered barriers, for each group its turn
  const auto enter = [&] {
    border(alpha[0] + alpha[1]);
    if (locked) sync(turn + group, 256);
    border(alpha[0]);
  };
  const auto leave = [&] {
    border(l[0] + l[1]);
    if (locked) arrive(turn + 1 - group, 256);
  };
  if (locked && group == 0) arrive(turn, 256);  // it may enter first

  wait(&shared.Q_full, 0);
  Ring<stages> kv;
  int before = -1;  // the buffer of V that a product under way reads
  const auto step = [&](int j, auto masked) {
    // S_ij = Q_i K_j^T, and the end of O += P V of the tile before
    float S[Bc / 2];
    wait(&shared.K_full[kv.at], kv.phase);
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
    wgmma_commit();
    wgmma_wait<0>(S);
    wgmma_wait<0>(O);
    if (leader) {
      arrive(&shared.K_free[kv.at]);
      if (before >= 0) arrive(&shared.V_free[before]);
    }
    before = kv.at;

    // P_ij, m, l as ever (softmax.cuh); O = alpha O
    if constexpr (decltype(masked)::value) hide(S, visible, j * Bc);
    new_maximum(S, c, m, alpha);
    enter();
    weights(S, c, m, alpha, l);
    round_to<T>(P, S);
    scale_rows(O, alpha);
    leave();

    // O += P_ij V_j, and on without waiting
    wait(&shared.V_full[kv.at], kv.phase);
    wgmma_fence();
    multiply_add<T, Bc>(O, P, shared.V[kv.at]);
    wgmma_commit();
    kv.next();
  };
  int j = blocks - 1;
#pragma unroll 1
  for (; j >= full && j >= 0; --j) step(j, std::true_type());
#pragma unroll 1
  for (; j >= 0; --j) step(j, std::false_type());
  wgmma_wait<0>(O);

  // O_i = O / l, L_i = (m + log2 l) log 2
  finish(O, m, l, t.LSE, (at.b * p.Hq + at.h) * p.Nq + at.i0, row, at.rows);

  // A warp's 16 rows leave by themselves, through what was the tile of Q.
  T* Oi = shared.Q + (64 * group + 16 * warp) * 64;
  store_rows<Br>(maps.O, Oi, O, lane, at.i0, 64 * group + 16 * warp, at.h, at.b);
  if (lane == 0) tma_wait_read();
}

template <bool locked>
__global__ void __launch_bounds__(threads, 1)
    pingpong_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
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
    compute<locked>(shared, maps, p, t, at, scale);
  }
}

template <bool locked>
void launch(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const ForwardMaps maps = maps_of(p, t, Br, Bc);
  const auto pingpong = pingpong_kernel<locked>;
  allow_shared_memory(pingpong, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(pingpong, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p, t,
            scale);
}

}  // namespace

template <class T>
void launch_lock(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  launch<true>(p, t, scale, stream);
}
template <class T>
void launch_no_lock(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  launch<false>(p, t, scale, stream);
}
template void launch_lock(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);
template void launch_no_lock(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
