// Rung 14, the last: who computes what, and when. And the whole contract.
//
// The idea: with a causal mask a tile of queries costs from one block of keys to all of them.
// Blocks of threads that take every 132nd tile are done early or late by luck. Here the longest
// tiles come first, and who is done takes the next one: the last to be taken are short. Heads come
// in sections, so that tiles under way at the same time share K and V in the L2 cache (order.cuh).
//
// What should change: nothing without a mask, where all tiles are alike; with a causal mask the SMs
// finish together, and not up to one long tile apart.
//
// Measured: 709 TFLOP/s after 698; with a causal mask 663 after 587.
#include <algorithm>

#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/optimized.hpp"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

constexpr bool clamp = true;  // a row that has seen nothing: see new_maximum_of()

// What fits: `groups` warpgroups of 64 rows each share tiles of Bc keys. Measured, not derived.
template <int D_, int groups_, int Bc_, int Q_buffers_, bool own_O_, Branch branch_>
struct Sizes {
  static constexpr int D = D_, groups = groups_, Br = 64 * groups, Bc = Bc_, stages = 2;
  static constexpr int Q_buffers = Q_buffers_;
  static constexpr bool own_O = own_O_;  // else O leaves through the buffer of Q
  static constexpr Branch branch = branch_;
  static constexpr int threads = 128 * (groups + 1);
  static constexpr int loader_registers = groups == 3 ? 32 : 24;
  static constexpr int registers = groups == 3 ? 160 : 240;
};

// What a block of threads has to do for one tile of queries, number n in the order of order.cuh.
struct Task {
  int b = 0, h = -1;          // batch, head; h < 0: nothing more to do
  int i0 = 0, rows = 0;       // its rows of Q
  int length = 0, shift = 0;  // of the mask: row i sees keys [0, i + shift), none past the length
  int blocks = 0;             // of keys that its last row sees, at least one

  __device__ Task(const Problem& p, int Br, int Bc, const Order<int>& order, int n) {
    const int Hq = int(p.Hq), Nq = int(p.Nq), Nk = int(p.Nk);
    if (n >= order.tiles * order.heads) return;
    int head, tile;
    order.place(n, head, tile);
    b = head / Hq;
    h = head % Hq;
    i0 = tile * Br;
    rows = min(Br, Nq - i0);
    length = int(Mask(p, b).length);
    shift = p.causal == Causal::none ? Nk : p.causal == Causal::top_left ? 1 : 1 + Nk - Nq;
    blocks = max(1, (visible_keys(rows - 1) + Bc - 1) / Bc);
  }
  // What a row of the tile sees; one past the end counts as the last.
  __device__ int visible_keys(int row) const {
    return max(0, min(i0 + min(row, rows - 1) + shift, length));
  }
};

template <class Tiles, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D], V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::own_O ? Tiles::Br * Tiles::D : 64];
  Barrier Q_full[Tiles::Q_buffers], Q_free[Tiles::Q_buffers];
  Barrier K_full[Tiles::stages], K_free[Tiles::stages];
  Barrier V_full[Tiles::stages], V_free[Tiles::stages];
  Task task[Tiles::Q_buffers];
};

// ---- the loader ----

// A tile of `rows` rows, from row `first` of head h on. By TMA one thread asks; where that cannot
// go (see launch_hopper) the loader's 128 threads carry.
template <bool tma, int D, int rows, class T>
__device__ void bring(T* tile, const CUtensorMap& map, const View<const T>& X, Barrier* full,
                      std::int64_t end, std::int64_t d, int first, int h, int b) {
  if constexpr (tma) {
    arrive_expecting(full, rows * D * int(sizeof(T)));
#pragma unroll
    for (int x = 0; x < D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
  } else {
#pragma unroll 1
    for (int e = threadIdx.x; e < rows * D; e += 128) {
      const int r = e / D, x = e % D;
      tile[x / 64 * rows * 64 + swizzled_chunk(r, x % 64 / 8) + x % 8] =
          first + r < end && x < d ? X.at(b, h, first + r)[x] : T(0.0f);
    }
    fence_async();
    sync(8, 128);
    if (threadIdx.x == 0) arrive(full);
  }
}

// Brings tiles as long as there is room for them. K runs one block ahead of V: it is needed
// earlier.
template <bool tma, class Tiles, class T>
__device__ void load(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                     const Forward<T>& t, const Order<int>& order, unsigned* taken) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> k, v;
  for (int n = blockIdx.x;;) {
    const Task task(p, Br, Bc, order, n);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    if (tma || threadIdx.x == 0) shared.task[q.at] = task;
    if (task.h < 0) break;
    bring<tma, D, Br>(shared.Q[q.at], maps.Q, t.Q, &shared.Q_full[q.at], p.Nq, p.d, task.i0, task.h,
                      task.b);
    q.next();
    n = int(gridDim.x) + (tma && taken ? int(atomicAdd(taken, 1u)) : n);

    const int hk = int(p.key_head(task.h));
    const auto bring_K = [&](int j) {
      wait(&shared.K_free[k.at], k.phase ^ 1);
      bring<tma, D, Bc>(shared.K[k.at], maps.K, t.K, &shared.K_full[k.at], task.length, p.d, j * Bc,
                        hk, task.b);
      k.next();
    };
    const auto bring_V = [&](int j) {
      wait(&shared.V_free[v.at], v.phase ^ 1);
      bring<tma, D, Bc>(shared.V[v.at], maps.V, t.V, &shared.V_full[v.at], task.length, p.d, j * Bc,
                        hk, task.b);
      v.next();
    };
    bring_K(task.blocks - 1);
    for (int j = task.blocks - 1; j > 0; --j) {
      bring_K(j - 1);
      bring_V(j);
    }
    bring_V(0);
  }
  if (tma || threadIdx.x == 0) arrive(&shared.Q_full[q.at]);  // the task that ends it all
}

// ---- the warpgroups that compute, 64 rows each ----

template <bool tma, class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                        const Forward<T>& t, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int row = 64 * group + 16 * warp + lane / 4;  // of the tile; the other is 8 below
  const bool leader = threadIdx.x % 128 == 0;
  const float c = scale * 1.4426950408889634f;  // exp(scale x) = 2^(c x)

  // The groups issue their products in turn: one's softmax runs under the other's products.
  const auto my_turn = [&] { sync(1 + group, 256); };
  const auto next_turn = [&] { arrive(1 + (group + 1) % Tiles::groups, 256); };
  if (group == 0) arrive(1, 256);  // the first turn is its own

  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> kv;
  while (true) {
    wait(&shared.Q_full[q.at], q.phase);
    const Task task = shared.task[q.at];
    if (task.h < 0) break;
    const T* Qi = shared.Q[q.at] + group * 64 * 64;
    int j = task.blocks - 1;

    // S_ij = Q_i K_j^T of the last block; what a tile needs is computed meanwhile
    float O[D / 2], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, alpha[2];
    std::uint32_t P[Bc / 16][4];
    const int visible[2] = {task.visible_keys(row), task.visible_keys(row + 8)};
    const int full = task.visible_keys(64 * group) / Bc;
    {
      float S[Bc / 2];
      wait(&shared.K_full[kv.at], kv.phase);
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      wgmma_commit();
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O[i] = 0;
      wgmma_wait<0>(S);
      if (leader) arrive(&shared.K_free[kv.at]);
      hide(S, visible, j * Bc);
      softmax<Tiles::branch, clamp>(S, c, m, l, alpha);
      round_to<T>(P, S);
    }
    // Keys past the length may hold anything, and 0 times NaN is NaN.
    if (const int seen = task.length - j * Bc; tma && task.length < p.Nk && seen < Bc) {
      wait(&shared.V_full[kv.at], kv.phase);
      for (int e = max(seen, 0) * 8 + threadIdx.x % 128; e < Bc * 8; e += 128)
        for (int x = 0; x < D; x += 64)
          *reinterpret_cast<uint4*>(shared.V[kv.at] + x * Bc + e * 8) = make_uint4(0, 0, 0, 0);
      fence_async();
      sync(5 + group, 128);
    }

    // A step: S of block j and O += P V of the block before are under way together, and the softmax
    // of block j begins when S is there.
    const auto step = [&](auto masked) {
      float S[Bc / 2];
      const Ring<Tiles::stages> before = kv;
      kv.next();
      wait(&shared.K_full[kv.at], kv.phase);
      my_turn();
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      wgmma_commit();
      wait(&shared.V_full[before.at], before.phase);
      wgmma_fence();  // again, behind a wait: else ptxas orders all products (C7519)
      multiply_add<T, Bc>(O, P, shared.V[before.at]);
      wgmma_commit();
      next_turn();
      wgmma_wait<1>(S);
      if (leader) arrive(&shared.K_free[kv.at]);
      if constexpr (decltype(masked)::value) hide(S, visible, j * Bc);
      softmax<Tiles::branch, clamp>(S, c, m, l, alpha);
      // ptxas moves this wait up between the exponentials, unless a branch is in the way.
      if (Tiles::branch == Branch::after_weights && l[0] + l[1] < 0) stop();
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

    // The last O += P V. Q is no longer needed: the next one may come.
    const auto release_Q = [&] {
      __syncwarp();
      if (lane == 0) arrive(&shared.Q_free[q.at]);
    };
    if (Tiles::own_O) release_Q();
    wait(&shared.V_full[kv.at], kv.phase);
    wgmma_fence();
    multiply_add<T, Bc>(O, P, shared.V[kv.at]);
    wgmma_commit();
    wgmma_wait<0>(O);
    if (leader) arrive(&shared.V_free[kv.at]);
    kv.next();

    // O_i = O / l, L_i = scale m + log l
    finish(O, m, l, scale, t.LSE, (task.b * p.Hq + task.h) * p.Nq + task.i0, row, task.rows);

    if constexpr (tma) {
      // A warp's 16 rows leave by themselves, through shared memory.
      T* Oi = (Tiles::own_O ? shared.O : shared.Q[q.at]) + (64 * group + 16 * warp) * 64;
      if (Tiles::own_O && lane == 0) tma_wait_read();
      __syncwarp();  // what was there has left
      store_rows<Br>(maps.O, Oi, O, lane, task.i0, 64 * group + 16 * warp, task.h, task.b);
      if (!Tiles::own_O && lane == 0) tma_wait_read();
    } else {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) {
        const int r = row + 8 * (i / 2 % 2), x = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (r < task.rows && x < p.d) t.O.at(task.b, task.h, task.i0 + r)[x] = T(O[i]);
      }
    }
    if (!Tiles::own_O) release_Q();
    q.next();
  }
  if (tma && Tiles::own_O && lane == 0) tma_wait_read();
}

template <bool tma, class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Forward<T> t, const __grid_constant__ Order<int> order,
                  unsigned* taken, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<Tiles, T>);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 4 * Tiles::groups);  // a lane of each warp says so
    init(shared.K_full, shared.K_free, Tiles::groups);      // a thread of each group
    init(shared.V_full, shared.V_free, Tiles::groups);
    fence_barriers();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<Tiles::loader_registers>();
    if (!tma || (threadIdx.x < 32 && elected())) load<tma, Tiles>(shared, maps, p, t, order, taken);
  } else {
    take_registers<Tiles::registers>();
    compute<tma, Tiles>(shared, maps, p, t, scale);
  }
}

template <bool tma, class Tiles, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
            cudaStream_t stream) {
  const ForwardMaps maps = tma ? maps_of(p, t, Tiles::Br, Tiles::Bc) : ForwardMaps{};
  const std::int64_t heads = p.B * p.Hkv, group = p.Hq / p.Hkv;
  const std::int64_t KV_bytes = 2 * p.Nk * Tiles::D * 2;
  Order<int> order{int((p.Nq + Tiles::Br - 1) / Tiles::Br), int(p.B * p.Hq), 1, true};
  if (taken) {
    // Tiles of many sizes: as many heads a section as have K and V in 32 MiB of L2, or in 128 MiB
    // if a head has 4 MiB or more. Measured, not derived.
    const int section = heads_within(KV_bytes < 4 << 20 ? 32 : 128, KV_bytes, heads);
    order.section = section * int(group);
    FA_CUDA_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream));
  }
  const auto kernel = hopper_kernel<tma, Tiles, T>;
  constexpr std::size_t bytes = sizeof(Shared<Tiles, T>);
  allow_shared_memory(kernel, bytes);
  const int blocks = std::min(processors(), order.tiles * order.heads);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), bytes, stream, maps, p, t, order,
            taken, scale);
}

}  // namespace

template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
                   cudaStream_t stream) {
  const bool maps = p.Nk > 0 && p.d % 8 == 0 && has_tensor_map(t.Q, p.B, p.Hq, p.Nq) &&
                    has_tensor_map(t.K, p.B, p.Hkv, p.Nk) &&
                    has_tensor_map(t.V, p.B, p.Hkv, p.Nk) && has_tensor_map(t.O, p.B, p.Hq, p.Nq);
  const auto run = [&](auto launch) { launch(p, t, scale, taken, stream); };
  constexpr auto none = Branch::none, first = Branch::after_first_maximum;
  if (!maps) {
    taken = nullptr;
    if (p.d <= 64) return run(launch<false, Sizes<64, 2, 64, 1, false, none>, T>);
    if (p.d <= 128) return run(launch<false, Sizes<128, 2, 64, 1, false, none>, T>);
    return run(launch<false, Sizes<256, 2, 64, 1, false, none>, T>);
  }
  if (p.d > 128) return run(launch<true, Sizes<256, 2, 80, 1, false, Branch::after_weights>, T>);
  // Short tiles: a buffer of its own for O, so that it leaves while the next tile has begun.
  if (p.d > 64 && p.Nk < 2048) return run(launch<true, Sizes<128, 2, 128, 2, true, first>, T>);
  if (p.d > 64) return run(launch<true, Sizes<128, 2, 128, 2, false, first>, T>);
  if (taken && p.Nk <= 1024) return run(launch<true, Sizes<64, 2, 128, 2, true, first>, T>);
  run(launch<true, Sizes<64, 3, 128, 2, true, none>, T>);
}

template void launch_hopper(const Problem&, const Forward<__half>&, float, unsigned*, cudaStream_t);
template void launch_hopper(const Problem&, const Forward<__nv_bfloat16>&, float, unsigned*,
                            cudaStream_t);

}  // namespace fa::optimized
