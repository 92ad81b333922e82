// hopper with changed scores: ALiBi or a soft cap. A bias, rotary positions, several changes at
// once and what TMA cannot bring are fa2's; what changes nothing is forward/hopper.cu's.
//
// Roles, barriers and steps are those of forward/hopper.cu. Of a group's tiles, from the last one
// down, a slow step takes those that the mask cuts and, with ALiBi, those where its positions lie;
// a fast one all that lie right of its positions, and left of them.
//
//   compute         as hopper's, with the change between product and softmax (hopper.cuh)
//   not_for_hopper  what is left to fa2
#include <algorithm>
#include <string>

#include "06_optimized/beyond/scores/hopper.cuh"
#include "06_optimized/forward/bring.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/shapes.cuh"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::scores {
namespace {

using namespace optimized;

// The numbered barriers: whose turn it is to issue products, one for each group; a group's own,
// when it has filled V with zeros or only looked on.
constexpr int turn = 1, own = 5;

// As hopper's; with the branch 2 to 6 % faster where scores change, by cap or line.
struct D64 : optimized::D64 {
  static constexpr Branch branch = Branch::after_first_maximum;
};
// As hopper's, with tiles of 64 keys in place of 80: the cap wants registers, too.
struct D256Cap : optimized::Tiles<256, 2, 64> {
  static constexpr int Q_buffers = 1;
  static constexpr Through O = Through::V;
  static constexpr Branch branch = Branch::after_first_maximum;  // without it two registers spill
};

// Is ALiBi's line a product? At d = 128 it costs as much as an addition for each score.
template <class Tiles>
constexpr bool line_is_product = Tiles::D <= 64;

bool is_masked(const Problem& p) { return p.causal != Causal::none || p.key_lengths; }

template <class Tiles, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D], V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::O == Through::own ? Tiles::Br * Tiles::D : 64];
  alignas(1024)
      __nv_bfloat16 columns[line_is_product<Tiles> ? 16 * Tiles::Bc : 64];  // of LineProduct
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

// Where a row of a tile of queries stands; of the keys that it sees, where the nearest one does,
// and how far that is. Counted from there distances are small numbers, wherever the queries stand.
__device__ int position(const Task& task, int row, int offset) {
  return task.i0 + min(row, task.rows - 1) + offset;
}
__device__ int nearest_key(const Task& task, int row, int offset) {
  return max(0, min(position(task, row, offset), task.visible_keys(row) - 1));
}
__device__ float to_nearest(const Task& task, int row, int offset) {
  return fabsf(float(position(task, row, offset) - nearest_key(task, row, offset)));
}

// fast_softmax() of scores that lack first[r]: this thread's of row r. The maxima have it.
template <Branch branch, int n>
__device__ void softmax_of_line(float (&S)[n], float c, const float (&first)[2], Maxima& maxima,
                                float (&l)[2], float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = fmaxf(S[2 * r], S[2 * r + 1]);
#pragma unroll
    for (int i = 4 + 2 * r; i < n; i += 4) largest = fmaxf(fmaxf(largest, S[i]), S[i + 1]);
    largest += first[r];  // a thread's own, where its first column is not the tile's
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const float before = maxima.m[r];
    maxima.S[r] = fmaxf(maxima.S[r], largest);
    const float m = maxima.m[r] = __fmul_rn(c, maxima.S[r]);
    alpha[r] = ex2(before - m);
    if (branch != Branch::none && r == 0 && alpha[r] < 0) stop();
    const float here = fmaf(first[r], -c, m);
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) {
      S[i] = ex2(fmaf(S[i], c, -here));
      S[i + 1] = ex2(fmaf(S[i + 1], c, -here));
    }
    float even = l[r] * alpha[r], odd = 0;
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) {
      even += S[i];
      odd += S[i + 1];
    }
    l[r] = even + odd;
  }
}

template <int built, class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                        const Change<T>& change, const Forward<T>& t, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int warp_row = 64 * group + 16 * warp;  // of the tile: where the warp's 16 rows begin
  const int row = warp_row + lane / 4;          // the thread's; the other is 8 below
  const float c = scale * log2_e;               // exp(scale x) = 2^(c x)
  const Maxima nothing(c);                      // seen yet, when a tile begins
  const Tanh tanh{change.cap, per_tanh(change)};

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
    // ALiBi: how much a score grows from key to key, on the side where the tile lies. Of its keys a
    // row's nearest, seen from the thread's column; what all lack then, L gets at the end.
    float slope = 0, line = 0;
    int nearest[2] = {}, right = 0, left = 0;
    const auto changed = [&](float(&S)[Bc / 2]) {  // in a slow step
      if (has<built>(change, with_cap)) {
        hide(S, visible, j * Bc);  // it may be NaN
        tanh.template of<1>(S);
      }
      if (has<built>(change, with_alibi)) {
        const float first[2] = {slope * float(j * Bc - nearest[0]),
                                slope * float(j * Bc - nearest[1])};
        add_edge(S, slope, first);
      }
      hide(S, visible, j * Bc);
    };
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
      if (has<built>(change, with_alibi)) {
        slope = change.slopes ? Head<with_alibi, T>(change, task.b, task.h).slope : 0;
        line = -slope;
        for (int r = 0; r < 2; ++r)
          nearest[r] = nearest_key(task, row + 8 * r, change.offset) - 2 * (lane % 4);
        right = (nearest_key(task, 64 * group + 63, change.offset) + Bc - 1) / Bc;
        left = (nearest_key(task, 64 * group, change.offset) + 1) / Bc;
      }
      wgmma_wait<0>(S);
      give_back<Tiles>(&shared.K_free[kv.at]);
      changed(S);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      round_to<T>(P, S);
    }
    if (const int seen = task.length - j * Bc; task.length < p.Nk && seen < Bc) {
      wait(&shared.V_full[kv.at], kv.phase);
      clear<Tiles>(shared.V[kv.at], seen, own + group);
    }

    // A step: S of block j and O += P V of the block before are under way together, and the softmax
    // of block j begins when S is there.
    const auto step = [&](auto slow, [[maybe_unused]] const LineProduct& in_product) {
      constexpr bool fast_line = !decltype(slow)::value && (built & with_alibi);
      float S[Bc / 2];
      const Ring<Tiles::stages> before = kv;
      kv.next();
      my_turn();
      wait(&shared.K_full[kv.at], kv.phase);
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      if constexpr (fast_line && line_is_product<Tiles>)
        multiply_add<__nv_bfloat16, 16>(S, in_product.A, shared.columns);
      wgmma_commit();
      if (Tiles::scale_under_S) scale_rows(O, alpha);
      wait(&shared.V_full[before.at], before.phase);
      wgmma_fence();  // again, behind a wait: else ptxas puts one in and says so (C7519)
      multiply_add<T, Bc>(O, P, shared.V[before.at]);
      wgmma_commit();
      next_turn();
      wgmma_wait<1>(S);
      give_back<Tiles>(&shared.K_free[kv.at]);
      if constexpr (decltype(slow)::value) {
        changed(S);
        fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      } else {
        if (has<built>(change, with_cap)) tanh.template of<1>(S);
        if constexpr (fast_line) {
          const int j0 = j * Bc - (line_is_product<Tiles> ? 2 * (lane % 4) : 0);
          const float first[2] = {line * float(j0 - nearest[0]), line * float(j0 - nearest[1])};
          if (!line_is_product<Tiles>) add_line(S, line);
          softmax_of_line<Tiles::branch>(S, c, first, maxima, l, alpha);
        } else {
          fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
        }
      }
      wgmma_wait<0>(O);
      give_back<Tiles>(&shared.V_free[before.at]);
      if (!Tiles::scale_under_S) scale_rows(O, alpha);
      round_to<T>(P, S);
    };
    --j;
    int slow_until = max(full, 0), fast_until = right;
#pragma unroll 1
    for (int part = 0; part < (built & with_alibi ? 2 : 1); ++part) {
#pragma unroll 1
      for (; j >= slow_until; --j) step(std::true_type(), LineProduct(0));
      const LineProduct in_product(line);
#pragma unroll 1
      for (; j >= fast_until; --j) step(std::false_type(), in_product);
      slow_until = left, fast_until = 0, line = slope;
    }

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
    if (has<built>(change, with_alibi))
      for (int r = 0; r < 2; ++r)
        maxima.m[r] -= c * slope * to_nearest(task, row + 8 * r, change.offset);
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

template <int built, class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Change<T> change, const __grid_constant__ Forward<T> t,
                  const __grid_constant__ Order<int> order, unsigned* taken, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<Tiles, T>);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 128 * Tiles::groups);
    init(shared.K_full, shared.K_free, Tiles::cluster * Tiles::groups);
    init(shared.V_full, shared.V_free, Tiles::cluster * Tiles::groups);
    init(&shared.O_left, Tiles::cluster * 4 * Tiles::groups);
    fence_barriers();
  }
  if constexpr ((built & with_alibi) && line_is_product<Tiles>)
    LineProduct::columns<Tiles::Bc>(shared.columns);
  Tiles::cluster > 1 ? sync_cluster() : __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<Tiles::loader_registers>();
    if (threadIdx.x < 32 && elected()) load<Tiles>(shared, maps, p, order, taken);
  } else {
    take_registers<Tiles::registers>();
    compute<built>(shared, maps, p, change, t, scale);
  }
  if (Tiles::cluster > 1) sync_cluster();  // others may still arrive here
}

template <int built, class Tiles, class T>
void launch(const Problem& p, const Forward<T>& t, const Change<T>& change, float scale,
            unsigned* taken, cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(Shared<Tiles, T>);
  static_assert(bytes <= most_shared);
  const ForwardMaps maps = maps_of(p, t, Tiles::Br, Tiles::Bc / Tiles::cluster);
  const Order<int> order = order_of<Tiles>(p, is_masked(p));
  if (taken) FA_CUDA_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream));
  const auto kernel = hopper_kernel<built, Tiles, T>;
  allow_shared_memory(kernel, bytes);
  const int blocks = std::min(processors(), order.tiles * order.heads);
  FA_LAUNCH_CLUSTERS(Tiles::cluster, kernel,
                     dim3(unsigned(blocks / Tiles::cluster * Tiles::cluster)), dim3(Tiles::threads),
                     bytes, stream, maps, p, change, t, order, taken, scale);
}

}  // namespace

// Why this kernel does not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Forward<T>& t, const Change<T>& change,
                           float scale) {
  if (const std::string why = not_for_hopper(change, scale); !why.empty()) return why;
  const bool maps = p.Nk > 0 && p.d % 8 == 0 && has_tensor_map(t.Q, p.B, p.Hq, p.Nq) &&
                    has_tensor_map(t.K, p.B, p.Hkv, p.Nk) &&
                    has_tensor_map(t.V, p.B, p.Hkv, p.Nk) && has_tensor_map(t.O, p.B, p.Hq, p.Nq);
  return maps ? "" : "hopper wants keys, d a multiple of 8, and rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, const Change<T>& change, float scale,
                   unsigned* taken, cudaStream_t stream) {
  const bool masked = is_masked(p);
  if (!masked) taken = nullptr;
  // With a mask the stage's own counts. Where it cannot, slopes of 0 give the same.
  if (change.parts == 0 && (taken || !masked))
    return optimized::launch_hopper(p, t, scale, taken, stream, false);
  with_changes(change, [&](auto of) {
    constexpr int built = decltype(of)::value;
    using Wide = std::conditional_t<(built & with_cap) != 0, D256Cap, D256>;
    const auto run = [&](auto with) { with(p, t, change, scale, taken, stream); };
    if (p.d > 128) return run(launch<built, Wide, T>);
    if (p.d > 64) return run(launch<built, D128, T>);  // in pairs 10 % slower
    run(masked && p.Nk <= 1024 ? launch<built, D64Short, T> : launch<built, D64, T>);
  });
}

#define FA_FOR(T)                                                                                  \
  template std::string not_for_hopper(const Problem&, const Forward<T>&, const Change<T>&, float); \
  template void launch_hopper(const Problem&, const Forward<T>&, const Change<T>&, float,          \
                              unsigned*, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::scores
