// hopper with the mask's two questions, of masks whose rows see ranges of keys, in all blocks or in
// those of a list: windows, what stays, prefixes, sinks. Documents and what TMA cannot bring are
// fa2's.
//
// Roles, barriers and the two steps are those of forward/hopper.cu. The loader and the groups walk
// through the same tiles of keys, from the last one down, each for itself: a few numbers that
// nobody has to be told. Through a list the loader walks, and says with each K which tile comes
// next. Which tiles need the second question, each group knows of its own 64 rows.
//
//   load, compute  as hopper's, but that they walk (hopper.cuh)
//   finish         and with a sink
//   launch_hopper  which Tiles: for d <= 64 and a narrow window 128 rows, since the rows of a
//                  taller tile have more edges
#include <algorithm>

#include "06_optimized/beyond/masks/hopper.cuh"
#include "06_optimized/forward/bring.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/shapes.cuh"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/order.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::masks {
namespace {

using namespace optimized;

// The numbered barriers: whose turn it is to issue products, one for each group; a group's own,
// when it has filled V with zeros.
constexpr int turn = 1, zeros = 5;

// As hopper's, with tiles of 64 keys in place of 80: the walk wants registers, too.
struct D256 : optimized::Tiles<256, 2, 64> {
  static constexpr int Q_buffers = 1;
  static constexpr Through O = Through::V;
  static constexpr Branch branch = Branch::none;
};

// As optimized::finish(), and with a sink: L = log(exp(L_i) + exp(sink)), O_i = exp(L_i - L) O_i.
template <int n>
__device__ void finish(float (&O)[n], const float (&m)[2], float (&l)[2], float sink, float* LSE,
                       std::int64_t first, int row, int rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = row_sum(l[r]);
    float L = log_sum(m[r], l[r]);
    if (sink != -INFINITY) {
      const float with_sink = fmaxf(L, sink) + log1pf(expf(-fabsf(L - sink)));
      if (l[r] > 0) l[r] *= expf(with_sink - L);
      L = with_sink;
    }
    if (LSE && threadIdx.x % 4 == 0 && row + 8 * r < rows) LSE[first + row + 8 * r] = L;
    divide(r, O, l[r]);
  }
}

template <class Tiles, bool listed, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D], V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::O == Through::own ? Tiles::Br * Tiles::D : 64];
  Barrier Q_full[Tiles::Q_buffers], Q_free[Tiles::Q_buffers];
  Barrier K_full[Tiles::stages], K_free[Tiles::stages], V_full[Tiles::stages],
      V_free[Tiles::stages], O_left;
  Task<Tiles::Bc> task[Tiles::Q_buffers];
  int next[listed ? Tiles::stages : 1];  // of a list: the tile behind that of K; below 0: none
};

// ---- the loader ----

// Brings tiles as long as there is room for them. K runs one block ahead of V.
template <class Tiles, bool listed, class T>
__device__ void load(Shared<Tiles, listed, T>& shared, const ForwardMaps& maps, const Problem& p,
                     const Pattern& pattern, const Order<int>& order, unsigned* taken) {
  constexpr int Br = Tiles::Br, Bc = Tiles::Bc;
  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> k, v;
  Ring<1> o;
  // Counted, or in rounds, each turned by a third against the one before: else some blocks would
  // always have the longest tiles of a section, and others the shortest.
  const int blocks = int(gridDim.x);
  int round = 0;
  const auto next = [&] {
    if (taken) return blocks + int(atomicAdd(taken, 1u));
    ++round;
    return round * blocks + (int(blockIdx.x) + round * (blocks / 3)) % blocks;
  };
  for (int n = int(blockIdx.x);;) {
    Task<Bc> task(p, pattern, listed ? pattern.keys : Blocks{}, Br, order, n);
    const int hk = int(p.key_head(max(task.h, 0)));
    auto& tiles = task.tiles;
    const auto bring_K = [&](int j) {
      [[maybe_unused]] auto behind = tiles;
      if (listed) behind.next();
      wait(&shared.K_free[k.at], k.phase ^ 1);
      if (listed) shared.next[k.at] = behind.tile;
      bring<Tiles, Bc>(shared.K[k.at], maps.K, &shared.K_full[k.at], j * Bc, hk, task.b);
      k.next();
    };
    const auto bring_V = [&](int j, bool first) {
      if (Tiles::O == Through::V && first) {
        wait(&shared.O_left, o.phase ^ 1);
        o.next();
      }
      wait(&shared.V_free[v.at], v.phase ^ 1);
      bring<Tiles, Bc>(shared.V[v.at], maps.V, &shared.V_full[v.at], j * Bc, hk, task.b);
      v.next();
    };
    constexpr bool K_first = Tiles::Q_buffers == 1;  // its buffer is free before that of Q
    int j = tiles.tile;
    if (K_first && task.h >= 0) bring_K(j);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    shared.task[q.at] = task;
    if (task.h < 0) break;
    bring<Tiles, Br>(shared.Q[q.at], maps.Q, &shared.Q_full[q.at], task.i0, task.h, task.b);
    q.next();
    if (!K_first) bring_K(j);
    for (bool first = true; j >= 0; first = false) {
      tiles.next();
      if (tiles.tile >= 0) bring_K(tiles.tile);
      if (tiles.tile < 0) n = next();  // as late as can be
      bring_V(j, first);
      j = tiles.tile;
    }
  }
  arrive(&shared.Q_full[q.at]);  // the task that ends it all
}

// ---- the warpgroups that compute, 64 rows each ----

template <class Tiles, bool listed, class T>
__device__ void compute(Shared<Tiles, listed, T>& shared, const ForwardMaps& maps, const Problem& p,
                        const Pattern& pattern, const Forward<T>& t, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int warp_row = 64 * group + 16 * warp;  // of the tile: where the warp's 16 rows begin
  const int row = warp_row + lane / 4;          // the thread's; the other is 8 below
  const bool leader = threadIdx.x % 128 == 0;
  // Of a list, lane 0 of each warp reads what comes behind K's tile, and so gives K back.
  const bool reads_K = listed ? lane == 0 : leader;
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)
  const Maxima nothing(c);         // seen yet, when a tile begins

  // The groups issue their products in turn: one's softmax runs under the other's products.
  const auto my_turn = [&] { sync(turn + group, 256); };
  const auto next_turn = [&] { arrive(turn + (group + 1) % Tiles::groups, 256); };
  if (group == 0) arrive(turn, 256);  // opens its own: the first turn

  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> kv;
  // Each thread for itself: it reads the task up to the end.
  const auto release_Q = [&] { arrive(&shared.Q_free[q.at]); };
  bool leaving = false;  // through V: O of the tile before is on its way
  for (;; q.next()) {
    wait(&shared.Q_full[q.at], q.phase);
    const Task<Bc>& shared_task = shared.task[q.at];  // as long as Q is ours
    const struct {
      int b, h, i0, rows;
    } task{shared_task.b, shared_task.h, shared_task.i0, shared_task.rows};
    if (task.h < 0) break;
    const T* Qi = shared.Q[q.at] + group * 64 * 64;  // the group's rows, of each box of 64 columns
    const auto& tiles = shared_task.tiles;
    int j = tiles.tile;

    // S_ij = Q_i K_j^T of the last block; what a tile needs is computed meanwhile
    Maxima maxima = nothing;
    float O[D / 2], l[2] = {0, 0}, alpha[2];
    std::uint32_t P[Bc / 16][4];
    int length, whole, behind, stays;
    [[maybe_unused]] int next = -1;  // of a list: the tile behind this one
    const auto hear = [&] {
      if (listed) next = uniform(lane == 0 ? shared.next[kv.at] : 0);
    };
    {
      float S[Bc / 2];
      wait(&shared.K_full[kv.at], kv.phase);
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      wgmma_commit();
      hear();
      if (Tiles::O == Through::V && leaving && lane == 0) {
        tma_wait_read();
        arrive(&shared.O_left);
      }
      length = shared_task.reach.length;
      // All rows of the group see all keys of tiles [whole, behind), and of those below `stays`.
      const Reach::Row top = shared_task.seen(64 * group),
                       bottom = shared_task.seen(64 * group + 63);
      const bool from_0 = bottom.from <= top.head;
      whole = from_0 ? tiles.rest0 : max(tiles.rest0, (bottom.from + Bc - 1) / Bc);
      behind = max(whole, (from_0 ? max(top.head, top.to) : top.to) / Bc);
      stays = top.head / Bc;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O[i] = 0;
      wgmma_wait<0>(S);
      if (reads_K) arrive(&shared.K_free[kv.at]);
      hide(S, shared_task, row, j * Bc);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      round_to<T>(P, S);
    }
    if (const int here = length - j * Bc; length < p.Nk && here < Bc) {
      wait(&shared.V_full[kv.at], kv.phase);
      clear<Tiles>(shared.V[kv.at], here, zeros + group);
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
      hear();
      wgmma_wait<1>(S);
      if (reads_K) arrive(&shared.K_free[kv.at]);
      if constexpr (decltype(masked)::value) hide(S, shared_task, row, j * Bc);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      wgmma_wait<0>(O);
      if (leader) arrive(&shared.V_free[before.at]);
      if (!Tiles::scale_under_S) scale_rows(O, alpha);
      round_to<T>(P, S);
    };
    if constexpr (listed) {
#pragma unroll 1
      while (next >= 0) {
        j = next;
        if ((j >= whole && j < behind) || j < stays)
          step(std::false_type());
        else
          step(std::true_type());
      }
    }
    // From the last tile down to the first of the window, and then what stays.
    --j;
#pragma unroll 1
    for (int part = 0; !listed && part < 3; ++part) {
#pragma unroll 1
      for (; j >= behind; --j) step(std::true_type());
#pragma unroll 1
      for (; j >= whole; --j) step(std::false_type());
      whole = behind = tiles.rest0;
      if (part == 1) {
        j = tiles.head1 - 1;
        whole = tiles.head0;
        behind = max(whole, stays);
      }
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
    if (leader) arrive(&shared.V_free[last.at]);
    kv.next();

    // O_i = O / l, L_i = (m + log2 l) log 2
    const float sink = pattern.sinks ? pattern.sinks[task.h] : -INFINITY;
    finish(O, maxima.m, l, sink, t.LSE, (task.b * p.Hq + task.h) * p.Nq + task.i0, row, task.rows);

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
  if (lane == 0) tma_wait_read();
}

template <class Tiles, bool listed, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Pattern pattern, const __grid_constant__ Forward<T> t,
                  const __grid_constant__ Order<int> order, unsigned* taken, float scale) {
  using Here = Shared<Tiles, listed, T>;
  auto& shared = FA_DYNAMIC_SHARED(Here);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 128 * Tiles::groups);
    init(shared.K_full, shared.K_free, (listed ? 4 : 1) * Tiles::groups);
    init(shared.V_full, shared.V_free, Tiles::groups);
    init(&shared.O_left, 4 * Tiles::groups);
    fence_barriers();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<Tiles::loader_registers>();
    if (threadIdx.x < 32 && elected()) load<Tiles, listed>(shared, maps, p, pattern, order, taken);
  } else {
    take_registers<Tiles::registers>();
    compute<Tiles, listed>(shared, maps, p, pattern, t, scale);
  }
}

template <class Tiles, bool listed = false, class T>
void launch(const Problem& p, const Pattern& pattern, const Forward<T>& t, float scale,
            unsigned* taken, cudaStream_t stream) {
  static_assert(!listed || Tiles::Br == block);
  constexpr std::size_t bytes = sizeof(Shared<Tiles, listed, T>);
  static_assert(bytes <= most_shared);
  const ForwardMaps maps = maps_of(p, t, Tiles::Br, Tiles::Bc);
  // In sections of as many heads as have the keys of the tiles under way in 32 MiB of the L2 cache.
  // The first tiles see least, and come last.
  const std::int64_t keys = std::min(p.Nk, pattern.left + pattern.right + 2048);
  const int section = heads_within(of_L2(32), 2 * keys * Tiles::D * 2, p.B * p.Hkv);
  const Order<int> order{int((p.Nq + Tiles::Br - 1) / Tiles::Br), int(p.B * p.Hq),
                         section * int(p.Hq / p.Hkv), true};
  const auto kernel = hopper_kernel<Tiles, listed, T>;
  allow_shared_memory(kernel, bytes);
  const int blocks = std::min(processors(), order.tiles * order.heads);
  if (taken) FA_CUDA_CHECK(cudaMemsetAsync(taken, 0, sizeof *taken, stream));
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), bytes, stream, maps, p, pattern,
            t, order, taken, scale);
}

}  // namespace

// Why this kernel does not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Pattern& pattern, const Forward<T>& t) {
  if (pattern.query_documents) return "hopper takes no documents";
  const bool maps = p.Nk > 0 && p.d % 8 == 0 && has_tensor_map(t.Q, p.B, p.Hq, p.Nq) &&
                    has_tensor_map(t.K, p.B, p.Hkv, p.Nk) &&
                    has_tensor_map(t.V, p.B, p.Hkv, p.Nk) && has_tensor_map(t.O, p.B, p.Hq, p.Nq);
  return maps ? "" : "hopper wants keys, d a multiple of 8, and rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Pattern& pattern, const Forward<T>& t, float scale,
                   unsigned* taken, cudaStream_t stream) {
  if (pattern.keys.offsets) {
    if (p.d > 128) return launch<D256, true>(p, pattern, t, scale, taken, stream);
    if (p.d > 64) return launch<D128, true>(p, pattern, t, scale, taken, stream);
    return launch<D64Short, true>(p, pattern, t, scale, taken, stream);
  }
  if (p.d > 128) return launch<D256>(p, pattern, t, scale, taken, stream);
  if (p.d > 64) return launch<D128>(p, pattern, t, scale, taken, stream);
  if (p.Nq > 1024 && pattern.left + pattern.right >= 1024)
    return launch<D64>(p, pattern, t, scale, taken, stream);
  launch<D64Short>(p, pattern, t, scale, taken, stream);
}

#define FA_FOR(T)                                                                                  \
  template std::string not_for_hopper(const Problem&, const Pattern&, const Forward<T>&);          \
  template void launch_hopper(const Problem&, const Pattern&, const Forward<T>&, float, unsigned*, \
                              cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::masks
