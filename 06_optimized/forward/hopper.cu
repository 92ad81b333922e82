// hopper: the forward for everybody. The kernel of rung 14, and the whole contract: d up to 256,
// fp16 and bf16, key lengths. What the copy engine cannot read is fa2's (entry.cu).
//
// Roles     warpgroup 0 loads: one thread asks the copy engine. Groups 1, 2 and, for d = 64, 3 own
//           64 rows of a tile each and compute; most of the registers are theirs. Two blocks may be
//           a pair: each loads half of all K and V, for both, and what is marked * arrives in both.
// Barriers          who waits    who arrives                               how many
//   Q, K, V full    groups       the loader, with the bytes                1
//   Q free          loader       a group's threads, once Q is read         128 a group
//   K, V free *     loader       a thread of each group                    1 a group
//   V free          groups       the same, before O goes through V         as above
//   O left *        loader       a lane of each warp, if O goes through V  4 a group
//   turn            a group      the group before, once it has issued      256 threads
//   own             a group      its threads                               128 threads
//   the cluster     both blocks  everybody, when it begins and ends        all threads
// A step    group 1   S P V | softmax         | S P V | softmax         |
//           group 2          | S P V | softmax         | S P V | ...
//           S of block j and O += P V of the block before are issued together, in turns.
// Measured: 714 TFLOP/s after 704; with a causal mask 673 after 644.
#include <algorithm>

#include "06_optimized/forward/bring.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/shapes.cuh"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

// Numbered: for each group its turn, and its own, behind zeros in V or if it only looks on
constexpr int turn = 1, own = 5;

template <class Tiles, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D], V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::O == Through::own ? Tiles::Br * Tiles::D : 64];
  Barrier Q_full[Tiles::Q_buffers], Q_free[Tiles::Q_buffers];
  Barrier K_full[Tiles::stages], K_free[Tiles::stages], V_full[Tiles::stages],
      V_free[Tiles::stages], O_left;
  Task task[Tiles::Q_buffers];
};

// ---- the loader ----

// Brings tiles as long as there is room for them. K runs one block ahead of V.
template <class Tiles, class T>
__device__ void load(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                     const Order<int>& order, unsigned* taken) {
  constexpr int Br = Tiles::Br, Bc = Tiles::Bc;
  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> k, v;
  Ring<1> o;
  for (int n = blockIdx.x;;) {
    const Task task(p, Br, Bc, order, n);
    const int hk = int(p.key_head(max(task.h, 0)));
    const auto bring_K = [&](int j) {
      wait(&shared.K_free[k.at], k.phase ^ 1);
      bring_keys<Tiles>(shared.K[k.at], maps.K, &shared.K_full[k.at], j * Bc, hk, task.b);
      k.next();
    };
    const auto bring_V = [&](int j) {
      if (Tiles::O == Through::V && j == task.blocks - 1) {
        wait(&shared.O_left, o.phase ^ 1);
        o.next();
      }
      wait(&shared.V_free[v.at], v.phase ^ 1);
      bring_keys<Tiles>(shared.V[v.at], maps.V, &shared.V_full[v.at], j * Bc, hk, task.b);
      v.next();
    };
    constexpr bool K_first = Tiles::Q_buffers == 1;  // its buffer is free before that of Q
    if (K_first && task.h >= 0) bring_K(task.blocks - 1);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    shared.task[q.at] = task;
    if (task.h < 0) break;
    bring<Tiles, Br>(shared.Q[q.at], maps.Q, &shared.Q_full[q.at], task.i0, task.h, task.b);
    q.next();
    if (!K_first) bring_K(task.blocks - 1);
    for (int j = task.blocks - 1; j > 0; --j) {
      bring_K(j - 1);
      bring_V(j);
    }
    n = int(gridDim.x) + (taken ? int(atomicAdd(taken, 1u)) : n);  // as late as can be
    bring_V(0);
  }
  arrive(&shared.Q_full[q.at]);  // the task that ends it all
}

// ---- the warpgroups that compute, 64 rows each ----

template <class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                        const Forward<T>& t, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int warp_row = 64 * group + 16 * warp;  // of the tile: where the warp's 16 rows begin
  const int row = warp_row + lane / 4;          // the thread's; the other is 8 below
  const float c = scale * log2_e;               // exp(scale x) = 2^(c x)
  const Maxima nothing(c);                      // seen yet, when a tile begins

  // The groups issue their products in turn: one's softmax runs under the other's products.
  const auto my_turn = [&] { sync(turn + group, 256); };
  const auto next_turn = [&] { arrive(turn + (group + 1) % Tiles::groups, 256); };
  if (group == 0) arrive(turn, 256);  // opens its own: the first turn

  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> kv;
  const auto release_Q = [&] { arrive(&shared.Q_free[q.at]); };
  bool leaving = false;  // through V: O of the tile before is on its way
  for (;; q.next()) {
    wait(&shared.Q_full[q.at], q.phase);
    const Task task = shared.task[q.at];
    if (task.h < 0) break;
    if (Tiles::groups == 3 && 64 * group >= task.rows) {  // no rows: says what others wait for
      for (int n = 0; n < task.blocks; ++n, kv.next()) {
        wait(&shared.K_full[kv.at], kv.phase);
        if (n > 0) my_turn(), next_turn();
        wait(&shared.V_full[kv.at], kv.phase);
        sync(own + group, 128);  // its last warp, too, has found these phases
        give_back<Tiles>(&shared.K_free[kv.at]), give_back<Tiles>(&shared.V_free[kv.at]);
      }
      release_Q();
      continue;
    }
    const T* Qi = shared.Q[q.at] + group * 64 * 64;  // the group's rows, of each box of 64 columns
    int j = task.blocks - 1;

    // S_ij = Q_i K_j^T of the last block; what a tile needs is computed meanwhile
    Maxima maxima = nothing;
    float O[D / 2], l[2] = {0, 0}, alpha[2];
    std::uint32_t P[Bc / 16][4];
    const int visible[2] = {task.visible_keys(row), task.visible_keys(row + 8)};
    const int full = task.visible_keys(64 * group) / Bc;
    {
      float S[Bc / 2];
      wait(&shared.K_full[kv.at], kv.phase);
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      wgmma_commit();
      if (Tiles::O == Through::V && leaving && lane == 0) {
        tma_wait_read();
        arrive_at_all<Tiles>(&shared.O_left);
      }
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O[i] = 0;
      wgmma_wait<0>(S);
      give_back<Tiles>(&shared.K_free[kv.at]);
      hide(S, visible, j * Bc);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      round_to<T>(P, S);
    }
    if (const int seen = task.length - j * Bc; task.length < p.Nk && seen < Bc) {
      wait(&shared.V_full[kv.at], kv.phase);
      clear<Tiles>(shared.V[kv.at], seen, own + group);
    }

    // A step: S of block j and O += P V of the block before are under way together, and the softmax
    // of block j begins when S is there.
    const auto step = [&](auto masked) {
      float S[Bc / 2];
      const Ring<Tiles::stages> before = kv;
      kv.next();
      my_turn();
      wait(&shared.K_full[kv.at], kv.phase);
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      wgmma_commit();
      if (Tiles::scale_under_S) scale_rows(O, alpha);
      wait(&shared.V_full[before.at], before.phase);
      wgmma_fence();  // again, behind a wait: else ptxas puts one in and says so (C7519)
      multiply_add<T, Bc>(O, P, shared.V[before.at]);
      wgmma_commit();
      next_turn();
      wgmma_wait<1>(S);
      give_back<Tiles>(&shared.K_free[kv.at]);
      if constexpr (decltype(masked)::value) hide(S, visible, j * Bc);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      wgmma_wait<0>(O);
      give_back<Tiles>(&shared.V_free[before.at]);
      if (!Tiles::scale_under_S) scale_rows(O, alpha);
      round_to<T>(P, S);
    };
    --j;
#pragma unroll 1
    for (; j >= full && j >= 0; --j) step(std::true_type());
#pragma unroll 1
    for (; j >= 0; --j) step(std::false_type());

    // The last O += P V. Q is no longer needed: the next one may come.
    release_Q();
    const Ring<Tiles::stages> last = kv;
    if (Tiles::scale_under_S) scale_rows(O, alpha);
    wait(&shared.V_full[last.at], last.phase);
    wgmma_fence();
    multiply_add<T, Bc>(O, P, shared.V[last.at]);
    wgmma_commit();
    wgmma_wait<0>(O);
    give_back<Tiles>(&shared.V_free[last.at]);
    kv.next();

    // O_i = O / l, L_i = (m + log2 l) log 2
    finish(O, maxima.m, l, t.LSE, (task.b * p.Hq + task.h) * p.Nq + task.i0, row, task.rows);

    // A warp's 16 rows leave by themselves, through shared memory.
    if constexpr (Tiles::O == Through::V) {
      // The second group's through the last V, when both have read it; the first one's through the
      // V before it, which both have read long ago. Nobody fills them until O has left.
      static_assert(Tiles::groups == 2 && Tiles::stages == 2);
      const int at = group == 0 ? last.at ^ 1 : last.at;
      wait(&shared.V_free[at], group == 0 && last.at == 0 ? last.phase ^ 1 : last.phase);
      store_rows<64>(maps.O, shared.V[at] + 16 * warp * 64, O, lane, task.i0, warp_row, task.h,
                     task.b);
      leaving = true;
    } else {
      if (lane == 0) tma_wait_read();
      __syncwarp();  // what was there has left
      store_rows<Br>(maps.O, shared.O + warp_row * 64, O, lane, task.i0, warp_row, task.h, task.b);
    }
  }
  if (lane == 0) tma_wait_read();  // before the block ends
}

template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Forward<T> t, const __grid_constant__ Order<int> order,
                  unsigned* taken, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<Tiles, T>);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 128 * Tiles::groups);
    init(shared.K_full, shared.K_free, Tiles::cluster * Tiles::groups);
    init(shared.V_full, shared.V_free, Tiles::cluster * Tiles::groups);
    init(&shared.O_left, Tiles::cluster * 4 * Tiles::groups);
    fence_barriers();
  }
  Tiles::cluster > 1 ? sync_cluster() : __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<Tiles::loader_registers>();
    if (threadIdx.x < 32 && elected()) load<Tiles>(shared, maps, p, order, taken);
  } else {
    take_registers<Tiles::registers>();
    compute<Tiles>(shared, maps, p, t, scale);
  }
  if (Tiles::cluster > 1) sync_cluster();  // others may still arrive here
}

template <class Tiles, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
            cudaStream_t stream, bool by_tile) {
  constexpr std::size_t bytes = sizeof(Shared<Tiles, T>);
  static_assert(bytes <= most_shared);
  const ForwardMaps maps = maps_of(p, t, Tiles::Br, Tiles::Bc / Tiles::cluster);
  const Order<int> order = order_of<Tiles>(p, taken);
  if (taken) FA_CUDA_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream));
  const auto kernel = hopper_kernel<Tiles, T>;
  allow_shared_memory(kernel, bytes);
  const int tiles = order.tiles * order.heads;
  const int clusters = (by_tile ? tiles : std::min(processors(), tiles)) / Tiles::cluster;
  FA_LAUNCH_CLUSTERS(Tiles::cluster, kernel, dim3(unsigned(clusters * Tiles::cluster)),
                     dim3(Tiles::threads), bytes, stream, maps, p, t, order, taken, scale);
}

}  // namespace

template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
                   cudaStream_t stream, bool by_tile) {
  const auto run = [&](auto with) { with(p, t, scale, taken, stream, by_tile); };
  // Without a mask neighbouring tiles of a head, of 128 rows, see the same keys.
  const bool pairs = !taken && p.Nk >= 8192 && (p.Nq + 127) / 128 % 2 == 0;
  if (p.d > 128) return run(pairs ? launch<D256Pair, T> : launch<D256, T>);
  if (p.d > 64 && pairs) return run(launch<D128Pair, T>);
  if (p.d > 64) return run(p.Nk >= 6144 ? launch<D128Long, T> : launch<D128, T>);
  run(taken && p.Nk <= 1024 ? launch<D64Short, T> : launch<D64, T>);
}

template void launch_hopper(const Problem&, const Forward<__half>&, float, unsigned*, cudaStream_t,
                            bool);
template void launch_hopper(const Problem&, const Forward<__nv_bfloat16>&, float, unsigned*,
                            cudaStream_t, bool);

}  // namespace fa::optimized
