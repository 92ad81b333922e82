// Rung 12, the last: who computes what, and when. And the whole contract.
//
// The idea: with a causal mask a tile of queries costs from one block of keys to all of them.
// Blocks of threads that take every 132nd tile are done early or late by luck. Here the longest
// tiles come first, and who is done takes the next one: the last to be taken are short. Heads come
// in sections whose K and V together fit into the L2 cache; if they are long, all at once.
//
// What should change: nothing without a mask, where all tiles are alike; with a causal mask the SMs
// finish together, and not up to one long tile apart.
//
// Measured: 724 TFLOP/s after 716; with a causal mask 672 after 593.
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/optimized.hpp"
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

struct Maps {
  CUtensorMap Q, K, V, O;
};

// The tiles of all heads, in the order in which they are taken: in each section of heads first the
// last tile of every head, then the one before ...
struct Order {
  int tiles, heads, section;  // tiles of a head, all heads, heads of a section
  unsigned* taken;            // how many have been taken beyond the first of each block; or null
};

// What a block of threads has to do for one tile of queries.
struct Task {
  int b, h;           // batch, head; h < 0: nothing more to do
  int i0, rows;       // its rows of Q
  int length, shift;  // of the mask: row i sees keys [0, i + shift), and none past the length
  int blocks;         // of keys that its last row sees, at least one
  __device__ int visible_keys(int i) const { return max(0, min(i + shift, length)); }
};

template <class Tiles, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::own_O ? Tiles::Br * Tiles::D : 64];
  Barrier Q_full[Tiles::Q_buffers], Q_free[Tiles::Q_buffers];
  Barrier K_full[Tiles::stages], K_free[Tiles::stages];
  Barrier V_full[Tiles::stages], V_free[Tiles::stages];
  Task task[Tiles::Q_buffers];
};

// ---- the loader ----

// A tile of `tile_rows` rows, from row `first` of head h on. By TMA one thread asks; where that
// cannot go (addresses that are no multiples of 16 bytes) the loader's 128 threads carry.
template <bool tma, class Tiles, int tile_rows, class T>
__device__ void bring(T* tile, const CUtensorMap& map, const View<const T>& X, Barrier* full,
                      std::int64_t end, std::int64_t d, int first, int h, int b) {
  if constexpr (tma) {
    arrive_expecting(full, tile_rows * Tiles::D * int(sizeof(T)));
#pragma unroll
    for (int x = 0; x < Tiles::D; x += 64)
      tma_load(tile + x * tile_rows, map, full, x, first, h, b);
  } else {
#pragma unroll 1
    for (int e = threadIdx.x; e < tile_rows * Tiles::D; e += 128) {
      const int r = e / Tiles::D, x = e % Tiles::D;
      tile[x / 64 * tile_rows * 64 + swizzled_chunk(r, x % 64 / 8) + x % 8] =
          first + r < end && x < d ? X.at(b, h, first + r)[x] : T(0.0f);
    }
    fence_async();
    sync(8, 128);
    if (threadIdx.x == 0) arrive(full);
  }
}

__device__ inline Task task_of(const Problem& p, const Order& order, int Br, int Bc, int n) {
  Task task{0, -1};
  if (n >= order.tiles * order.heads) return task;
  // The section's first head, how many heads it has, and which of its tiles this is.
  const int first = n / (order.section * order.tiles) * order.section;
  const int here = min(order.section, order.heads - first), rest = n - first * order.tiles;
  const int head = first + rest % here, tile = order.tiles - 1 - rest / here;
  const int Hq = int(p.Hq), Nq = int(p.Nq), Nk = int(p.Nk);
  task.b = head / Hq;
  task.h = head % Hq;
  task.i0 = tile * Br;
  task.rows = min(Br, Nq - task.i0);
  task.length = int(Mask(p, task.b).length);
  task.shift = p.causal == Causal::none ? Nk : p.causal == Causal::top_left ? 1 : 1 + Nk - Nq;
  task.blocks = max(1, (task.visible_keys(task.i0 + task.rows - 1) + Bc - 1) / Bc);
  return task;
}

// Brings tiles as long as there is room for them. K runs one block ahead of V: it is needed
// earlier.
template <bool tma, class Tiles, class T>
__device__ void load(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
                     const Forward<T>& t, const Order& order) {
  constexpr int Br = Tiles::Br, Bc = Tiles::Bc;
  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> k, v;
  for (int n = blockIdx.x;;) {
    const Task task = task_of(p, order, Br, Bc, n);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    if (tma || threadIdx.x == 0) shared.task[q.at] = task;
    if (task.h < 0) {
      if (tma || threadIdx.x == 0) arrive(&shared.Q_full[q.at]);
      return;
    }
    bring<tma, Tiles, Br>(shared.Q[q.at], maps.Q, t.Q, &shared.Q_full[q.at], p.Nq, p.d, task.i0,
                          task.h, task.b);
    q.next();
    n = int(gridDim.x) + (tma && order.taken ? int(atomicAdd(order.taken, 1u)) : n);

    const int hk = int(p.key_head(task.h));
    const auto bring_K = [&](int j) {
      wait(&shared.K_free[k.at], k.phase ^ 1);
      bring<tma, Tiles, Bc>(shared.K[k.at], maps.K, t.K, &shared.K_full[k.at], task.length, p.d,
                            j * Bc, hk, task.b);
      k.next();
    };
    const auto bring_V = [&](int j) {
      wait(&shared.V_free[v.at], v.phase ^ 1);
      bring<tma, Tiles, Bc>(shared.V[v.at], maps.V, t.V, &shared.V_full[v.at], task.length, p.d,
                            j * Bc, hk, task.b);
      v.next();
    };
    bring_K(task.blocks - 1);
    for (int j = task.blocks - 1; j > 0; --j) {
      bring_K(j - 1);
      bring_V(j);
    }
    bring_V(0);
  }
}

// ---- the warpgroups that compute, 64 rows each ----

template <bool tma, class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
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
    const int visible[2] = {task.visible_keys(task.i0 + min(row, task.rows - 1)),
                            task.visible_keys(task.i0 + min(row + 8, task.rows - 1))};
    const int full = task.visible_keys(task.i0 + min(64 * group, task.rows - 1)) / Bc;
    const auto hide_in_block = [&](float(&S)[Bc / 2], int j) {
      const int first = j * Bc + 2 * (lane % 4);
      const int limit[2] = {visible[0] - first, visible[1] - first};
      hide(S, limit);
    };
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
      hide_in_block(S, j);
      softmax<Tiles::branch, clamp>(S, c, m, l, alpha);
      round_to<T>(P, S);
    }
    // Keys past the length may hold anything, and 0 times NaN is NaN.
    if (const int seen = task.length - j * Bc; task.length < p.Nk && seen < Bc) {
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
      if constexpr (decltype(masked)::value) hide_in_block(S, j);
      softmax<Tiles::branch, clamp>(S, c, m, l, alpha);
      // ptxas moves this wait up between the exponentials, unless a branch is in the way.
      if (Tiles::branch == Branch::after_weights && l[0] + l[1] < 0) asm volatile("brkpt;");
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

    // O_i = O / l, L_i = m + log l. A row without keys has l = 0: O = 0 and L = -inf.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] = row_sum(l[r]);
      if (t.LSE && lane % 4 == 0 && row + 8 * r < task.rows)
        t.LSE[(task.b * p.Hq + task.h) * p.Nq + task.i0 + row + 8 * r] =
            l[r] == 0 ? -INFINITY : m[r] * scale + __logf(l[r]);
      divide(r, O, l[r]);
    }

    if constexpr (tma) {
      // A warp's 16 rows leave by themselves, through shared memory.
      T* Oi = (Tiles::own_O ? shared.O : shared.Q[q.at]) + (64 * group + 16 * warp) * 64;
      if (Tiles::own_O && lane == 0) tma_wait_read();
      __syncwarp();  // what was there has left
      put<Br>(Oi, O, lane);
      fence_async();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int x = 0; x < D; x += 64)
          tma_store(maps.O, Oi + x * Br, x, task.i0 + 64 * group + 16 * warp, task.h, task.b);
        tma_commit();
        if (!Tiles::own_O) tma_wait_read();
      }
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
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Forward<T> t, const __grid_constant__ Order order,
                  float scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Tiles, T>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tiles::Q_buffers; ++i) {
      init(&shared.Q_full[i], 1);
      init(&shared.Q_free[i], 4 * Tiles::groups);  // a lane of each warp says so
    }
    for (int i = 0; i < Tiles::stages; ++i) {
      init(&shared.K_full[i], 1);
      init(&shared.K_free[i], Tiles::groups);
      init(&shared.V_full[i], 1);
      init(&shared.V_free[i], Tiles::groups);
    }
    fence_barriers();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<Tiles::loader_registers>();
    if (!tma || (threadIdx.x < 32 && elected())) load<tma, Tiles>(shared, maps, p, t, order);
  } else {
    take_registers<Tiles::registers>();
    compute<tma, Tiles>(shared, maps, p, t, scale);
  }
}

template <bool tma, class Tiles, class T>
void launch(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
            cudaStream_t stream) {
  Maps maps{};
  if constexpr (tma)
    maps = {tensor_map(t.Q, p.B, p.Hq, p.Nq, p.d, Tiles::Br),
            tensor_map(t.K, p.B, p.Hkv, p.Nk, p.d, Tiles::Bc),
            tensor_map(t.V, p.B, p.Hkv, p.Nk, p.d, Tiles::Bc),
            tensor_map(t.O, p.B, p.Hq, p.Nq, p.d, 16)};
  const std::int64_t heads = p.B * p.Hq, tiles = (p.Nq + Tiles::Br - 1) / Tiles::Br;
  Order order{int(tiles), int(heads), 1, taken};
  if (taken) {
    // Tiles of many sizes: as many heads a section as fit into 32 MiB of L2. But from 8192 keys on
    // all of them: 1.3 % faster with a causal mask. That is measured, not derived.
    std::int64_t section = 1;
    while ((p.Nk >= 8192 || 2 * section * (2 * p.Nk * Tiles::D * 2) <= 32 << 20) && section < heads)
      section *= 2;
    order.section = int(std::min(section * (p.Hq / p.Hkv), heads));
    FA_CUDA_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream));
  }
  int device = 0, processors = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const auto kernel = hopper_kernel<tma, Tiles, T>;
  constexpr std::size_t bytes = sizeof(Shared<Tiles, T>);
  allow_shared_memory(kernel, bytes);
  FA_LAUNCH(kernel, dim3(unsigned(std::min<std::int64_t>(processors, tiles * heads))),
            dim3(Tiles::threads), bytes, stream, maps, p, t, order, scale);
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
