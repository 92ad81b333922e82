// hopper with dropout. What TMA cannot bring is fa2's; what drops nothing is forward/hopper.cu's,
// but for masked calls that have no counter.
//
// Roles, barriers and steps are those of forward/hopper.cu. Just before its turn to issue products,
// or just after it, a group draws: a call of Philox serves 32 rows, and a warp has 16. So of two
// warps one makes the calls of all even columns, the other those of all odd ones, and they tell
// each other (keep.cuh). What is dropped becomes 0 between softmax and rounding, when l has all
// weights.
//
// Barriers          who waits    who arrives                               how many
//   those of hopper, and
//   told            two warps    both: the other's answers are there       64 threads
#include <algorithm>
#include <string>

#include "06_optimized/beyond/dropout/keep.cuh"
#include "06_optimized/forward/bring.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/shapes.cuh"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::dropout {
namespace {

using namespace optimized;

// Numbered: for each group its turn, its own, behind zeros in V or if it only looks on; for each
// two warps, when each has said what it drew for the other.
constexpr int turn = 1, own = 5, told = 9;

// As hopper's, with tiles of 64 keys in place of 80, since who draws wants registers, too, and with
// a branch.
struct D256 : optimized::Tiles<256, 2, 64> {
  static constexpr int Q_buffers = 1;
  static constexpr Through O = Through::V;
  static constexpr Branch branch = Branch::after_first_maximum;
};

bool is_masked(const Problem& p) { return p.causal != Causal::none || p.key_lengths; }

template <class Tiles, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D], V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::O == Through::own ? Tiles::Br * Tiles::D : 64];
  Barrier Q_full[Tiles::Q_buffers], Q_free[Tiles::Q_buffers];
  Barrier K_full[Tiles::stages], K_free[Tiles::stages], V_full[Tiles::stages],
      V_free[Tiles::stages], O_left;
  Task task[Tiles::Q_buffers];
  std::uint32_t drawn[2][4 * Tiles::groups][32];  // for a warp by its neighbour, of two tiles
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
  // Counted, or in rounds, with a mask each turned by a third against the one before: else some
  // blocks would always have the longest tiles of a section, and others the shortest.
  const bool turned = p.causal != Causal::none;
  const int blocks = int(gridDim.x);
  int round = 0;
  const auto next = [&] {
    if (taken) return blocks + int(atomicAdd(taken, 1u));
    ++round;
    return round * blocks + (int(blockIdx.x) + (turned ? round * (blocks / 3) : 0)) % blocks;
  };
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
    optimized::bring<Tiles, Br>(shared.Q[q.at], maps.Q, &shared.Q_full[q.at], task.i0, task.h,
                                task.b);
    q.next();
    if (!K_first) bring_K(task.blocks - 1);
    for (int j = task.blocks - 1; j > 0; --j) {
      bring_K(j - 1);
      bring_V(j);
    }
    n = next();  // as late as can be
    bring_V(0);
  }
  arrive(&shared.Q_full[q.at]);  // the task that ends it all
}

// ---- the warpgroups that compute, 64 rows each ----

// Ones where the sign bit of a byte is set: in the lower half that of byte n of `lower`, in the
// upper one that of byte n of `upper`. One instruction.
__device__ inline std::uint32_t ones(std::uint32_t lower, std::uint32_t upper, int n) {
#ifdef FA_EMULATED
  return (lower >> (8 * n + 7) & 1) * 0xffffu | (upper >> (8 * n + 7) & 1) * 0xffff0000u;
#else
  std::uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(lower), "r"(upper), "r"(0xcc88 + n * 0x1111));
  return mask;
#endif
}

// P_ij = 0 where it is dropped. Bit i of kept[0] is about the lower number of pair i, that of
// kept[1] about the upper one.
template <int n>
__device__ void drop(std::uint32_t (&P)[n][4], const std::uint32_t (&kept)[2]) {
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    const std::uint32_t lower = kept[0] << (7 - bit), upper = kept[1] << (7 - bit);
#pragma unroll
    for (int i = bit; i < 4 * n; i += 8) P[i / 4][i % 4] &= ones(lower, upper, i / 8);
  }
}

template <class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                        const Draw& draw, const Forward<T>& t, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int warp_row = 64 * group + 16 * warp;  // of the tile: where the warp's 16 rows begin
  const int row = warp_row + lane / 4;          // the thread's; the other is 8 below
  const float c = scale * log2_e;               // exp(scale x) = 2^(c x)
  const Maxima nothing(c);                      // seen yet, when a tile begins

  // Before its turn, or when its products are under way: then they hide it, and at d = 128 the
  // forward takes 8 % less time. With three groups, and at d = 256, registers would not do.
  constexpr bool draws_late = D == 128;

  // The groups issue their products in turn: one's softmax runs under the other's products.
  const auto my_turn = [&] { sync(turn + group, 256); };
  const auto next_turn = [&] { arrive(turn + (group + 1) % Tiles::groups, 256); };
  if (group == 0) arrive(turn, 256);  // opens its own: the first turn

  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> kv;
  const auto release_Q = [&] { arrive(&shared.Q_free[q.at]); };
  bool leaving = false;  // through V: O of the tile before is on its way
  int parity = 0;        // of the tiles that the warp has drawn
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
    // Which weights of the thread in a tile of keys are kept
    const Keep keep(draw, std::int64_t(task.b) * p.Hq + task.h);
    const auto drawn = [&](std::uint32_t(&kept)[2]) {
      std::uint32_t of_rows[2];  // of the upper one of the two warps, and of the lower one
      const int odd = warp % 2;  // which one this is, and which columns it draws
      keep.of_two_warps<Bc / 16>(of_rows, task.i0 + row, j * Bc + 2 * (lane % 4) + odd);
      shared.drawn[parity][4 * group + (warp ^ 1)][lane] = odd ? of_rows[0] : of_rows[1];
      sync(told + 2 * group + warp / 2, 64);
      const std::uint32_t other = shared.drawn[parity][4 * group + warp][lane];
      kept[0] = odd ? other : of_rows[0];
      kept[1] = odd ? of_rows[1] : other;
      parity ^= 1;
    };
    {
      std::uint32_t kept[2];
      drawn(kept);
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
      drop(P, kept);
    }
    if (const int seen = task.length - j * Bc; task.length < p.Nk && seen < Bc) {
      wait(&shared.V_full[kv.at], kv.phase);
      clear<Tiles>(shared.V[kv.at], seen, own + group);
    }

    // A step: S of block j and O += P V of the block before are under way together, and the softmax
    // of block j begins when S is there.
    const auto step = [&](auto masked) {
      std::uint32_t kept[2];
      if (!draws_late) drawn(kept);
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
      if (draws_late) drawn(kept);
      wgmma_wait<1>(S);
      give_back<Tiles>(&shared.K_free[kv.at]);
      if constexpr (decltype(masked)::value) hide(S, visible, j * Bc);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      wgmma_wait<0>(O);
      give_back<Tiles>(&shared.V_free[before.at]);
      if (!Tiles::scale_under_S) scale_rows(O, alpha);
      round_to<T>(P, S);
      drop(P, kept);
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

    // O_i = O / ((1 - p) l), L_i = (m + log2 l) log 2
    alpha[0] = alpha[1] = draw.factor;
    scale_rows(O, alpha);
    finish(O, maxima.m, l, t.LSE, (task.b * p.Hq + task.h) * p.Nq + task.i0, row, task.rows);

    // A warp's 16 rows leave by themselves, through shared memory.
    if constexpr (Tiles::O == Through::V) {
      // The second group's through the last V, when both have read it; the first one's through the
      // V before it, which both have read long ago. Nobody fills them until O has left.
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
  if (lane == 0) tma_wait_read();
}

template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Draw draw, const __grid_constant__ Forward<T> t,
                  const __grid_constant__ Order<int> order, unsigned* taken, float scale) {
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
    compute(shared, maps, p, draw, t, scale);
  }
  if (Tiles::cluster > 1) sync_cluster();  // others may still arrive here
}

template <class Tiles, class T>
void launch(const Problem& p, const Draw& draw, const Forward<T>& t, float scale, unsigned* taken,
            cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(Shared<Tiles, T>);
  static_assert(bytes <= most_shared);
  static_assert(bytes <= 227 * 1024);
  const ForwardMaps maps = maps_of(p, t, Tiles::Br, Tiles::Bc / Tiles::cluster);
  const Order<int> order = order_of<Tiles>(p, is_masked(p));
  if (taken) FA_CUDA_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream));
  const auto kernel = hopper_kernel<Tiles, T>;
  allow_shared_memory(kernel, bytes);
  const int blocks = std::min(processors(), order.tiles * order.heads);
  FA_LAUNCH_CLUSTERS(Tiles::cluster, kernel,
                     dim3(unsigned(blocks / Tiles::cluster * Tiles::cluster)), dim3(Tiles::threads),
                     bytes, stream, maps, p, draw, t, order, taken, scale);
}

}  // namespace

// Why this kernel does not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Forward<T>& t) {
  const bool maps = p.Nk > 0 && p.d % 8 == 0 && has_tensor_map(t.Q, p.B, p.Hq, p.Nq) &&
                    has_tensor_map(t.K, p.B, p.Hkv, p.Nk) &&
                    has_tensor_map(t.V, p.B, p.Hkv, p.Nk) && has_tensor_map(t.O, p.B, p.Hq, p.Nq);
  return maps ? "" : "hopper wants keys, d a multiple of 8, and rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Draw& draw, const Forward<T>& t, float scale,
                   unsigned* taken, cudaStream_t stream) {
  const bool masked = is_masked(p);
  if (!masked) taken = nullptr;
  // With a mask the stage's own counts. Where it cannot, this one drops nothing.
  if (draw.threshold == 0x10000 && (taken || !masked))
    return optimized::launch_hopper(p, t, scale, taken, stream, false);
  const auto run = [&](auto with) { with(p, draw, t, scale, taken, stream); };
  if (p.d > 128) return run(launch<D256, T>);
  if (p.d > 64) return run(launch<D128, T>);
  run(masked && p.Nk <= 1024 ? launch<D64Short, T> : launch<D64, T>);
}

#define FA_FOR(T)                                                                               \
  template std::string not_for_hopper(const Problem&, const Forward<T>&);                       \
  template void launch_hopper(const Problem&, const Draw&, const Forward<T>&, float, unsigned*, \
                              cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::dropout
