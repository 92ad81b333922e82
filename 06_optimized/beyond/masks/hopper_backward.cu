// The backward's hopper with the mask's two questions, of masks whose rows see ranges of keys, in
// all blocks or in those of a list. Of documents and what TMA cannot bring swizzle.cu takes care,
// and of lists in turns.
//
// A block owns 128 keys; the queries that see some of them are a range without a gap (reach.hpp),
// and that range is its walk, or as much of it as is listed: then the loader says with each Q
// where it is, and whether it is the last. Roles, barriers and steps are those of
// backward/hopper.cu; with d = 64 a block stays, as there, and takes one tile of keys after the
// other. If asked, blocks add to dQ in turns, those with the last keys first: the same bits from
// run to run. Whose turn it is, the tiles of keys say that a tile of queries visits; the first one
// stores.
//
//   load, push, compute   as hopper's, but that they walk (hopper_keys.cuh)
//   launch                D and what else a row has, the kernel, dQ rounded
#include <algorithm>
#include <cfloat>
#include <climits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/beyond/masks/hopper_keys.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::masks {
namespace {

using namespace optimized;

template <class Tiles, class T>
struct Here : Shared<Tiles, T, MaskTile<Tiles>> {
  int is_first[Tiles::groups];  // in turns: does a group store, where others will add?
  int i0[Tiles::stages];        // of a list: the first query of each tile; ~i0: it is the last
};

template <class Tiles, bool listed>
__device__ auto walk_of([[maybe_unused]] const Problem& p, [[maybe_unused]] const Pattern& pattern,
                        const MaskTile<Tiles>& tile) {
  if constexpr (listed)
    return ListWalk<Tiles>(p, pattern.queries, tile);
  else
    return optimized::Walk(tile);
}

// ---- the warps that move data ----

template <class Tiles, bool listed, class T>
__device__ void load(Here<Tiles, T>& shared, const Maps& maps, const Problem& p,
                     const Pattern& pattern, const Passed& passed, const KeyTiles& tiles) {
  Ring<Tiles::stages> q;
  Ring<Tiles::keys> kv;
  const auto next = [&](int else_this) {
    return Tiles::stays ? int(atomicAdd(passed.taken, 1u)) : else_this;
  };
  for (int number = next(blockIdx.x);; number = next(0), kv.next()) {
    wait(&shared.KV_free[kv.at], kv.phase ^ 1);
    auto& tile = shared.tile[kv.at];
    if (number >= tiles.count) {
      tile.steps = -1;
      arrive(&shared.tile_full[kv.at]);
      break;
    }
    tile = MaskTile<Tiles>(p, pattern, passed, tiles, number);
    auto walk = walk_of<Tiles, listed>(p, pattern, tile);
    // How many are listed nobody counts.
    if constexpr (listed) tile.steps = walk.i0 < 0 ? 0 : INT_MAX;
    arrive(&shared.tile_full[kv.at]);
    for (int n = 0; n < tile.steps && walk.i0 >= 0; ++n, walk.next(tile.end), q.next()) {
      const struct { int b, h, i0, j0; } at{tile.b, tile.h + walk.h, walk.i0, tile.j0};
      const int row = walk.row(passed);
      const int more = n == 0 ? int(sizeof shared.K[0]) : 0;  // S need not wait for V
      Barrier *const Q_full = &shared.Q_full[q.at], *const dO_full = &shared.dO_full[q.at];
      wait(&shared.Q_free[q.at], q.phase ^ 1);
      shared.row[q.at] = row;
      if constexpr (listed) {
        auto behind = walk;
        behind.next(0);
        shared.i0[q.at] = behind.i0 < 0 ? ~walk.i0 : walk.i0;
      }
      bring(shared.Q[q.at], maps.Q, shared.LSE2[q.at], passed.LSE2 + row, Q_full, at, more);
      if (n == 0) bring_keys<Tiles::Bc>(shared.K[kv.at], maps.K, Q_full, tile.hk, at);
      wait(&shared.dO_free[q.at], q.phase ^ 1);
      bring(shared.dO[q.at], maps.dO, shared.D_i[q.at], passed.D + row, dO_full, at, more);
      if (n == 0) bring_keys<Tiles::Bc>(shared.V[kv.at], maps.V, dO_full, tile.hk, at);
    }
    if (!Tiles::stays) break;
  }
}

// One warp for each group's part of dQ: adds it up in global memory, or sees to it that the group
// does so when it is its turn.
template <class Tiles, bool listed, class T>
__device__ void push(Here<Tiles, T>& shared, const Problem& p, const Pattern& pattern,
                     const Passed& passed, int group) {
  Ring<Tiles::keys> kv;
  for (;; kv.next()) {
    wait(&shared.tile_full[kv.at], kv.phase);
    const MaskTile<Tiles> tile = shared.tile[kv.at];
    if (tile.steps < 0) break;
    auto walk = walk_of<Tiles, listed>(p, pattern, tile);
#pragma unroll 1
    for (int n = 0; n < tile.steps && walk.i0 >= 0; ++n, walk.next(tile.end)) {
      const int block = walk.row(passed) / 64 * (Tiles::D / 64) + group;
      int* const turn = Tiles::in_order ? passed.turn + block : nullptr;
      const int n_before = Tiles::in_order ? tile.turn(walk.i0) : 0;
      if (Tiles::adds_dQ) {
        wait_turn(turn, n_before);
        if (elected()) shared.is_first[group] = n_before == 0;
      }
      arrive(dQ_free + group, with_pusher);  // the first time at once: nothing is in it yet
      sync(dQ_full + group, with_pusher);
      if (elected()) {
        if (!Tiles::adds_dQ) {
          if (Tiles::in_order) wait_turn(turn, n_before);
          float* const sums = passed.dQ + std::int64_t(block) * square;
          if (Tiles::in_order && n_before == 0)
            bulk_store(sums, shared.dQ[group], int(sizeof shared.dQ[0]));
          else
            bulk_add(sums, shared.dQ[group], int(sizeof shared.dQ[0]));
          tma_commit();
          Tiles::in_order ? tma_wait() : tma_wait_read();
        }
        if (Tiles::in_order) pass_turn(turn);
      }
      __syncwarp();
    }
    if (!Tiles::stays) break;
    arrive(&shared.KV_free[kv.at]);
  }
}

// ---- the warpgroups that compute, 64 keys each ----
// S, P, dP and dS are held transposed, a row for each key: steps.cuh.

template <class Tiles, bool listed, class T>
__device__ void compute(Here<Tiles, T>& shared, const Maps& maps, const Problem& p,
                        const Passed& passed, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const bool leader = lane == 0;  // says that a buffer has been read
  // exp(scale x) = 2^(c x). With a factor of 0 a hidden score would be as good as any.
  const float c = scale == 0 ? FLT_MIN : scale * log2_e;
  Ring<Tiles::stages> q;
  Ring<Tiles::keys> kv;

  // S_ij = Q_i K_j^T,  dP_ij = dO_i V_j^T
  const auto issue_pairs = [&](float(&C)[Br / 2], const T* keys, const T* queries) {
    forget(C);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(C, keys, queries);
    wgmma_commit();
  };
  // dV_j += sum_i P_ij dO_i,  dK_j += sum_i dS_ij Q_i
  const auto issue_sum = [&](float(&sum)[D / 2], const std::uint32_t(&A)[Br / 16][4], const T* X) {
    wgmma_fence();
    multiply_add<T, Br>(sum, A, X);
    wgmma_commit();
  };
  // dQ_i = sum_j dS_ij K_j of all keys of the block, 64 x 64: half of the rows or of the columns
  const auto issue_dQ = [&](float(&dQ)[32], int buffer) {
    forget(dQ);
    wgmma_fence();
    const int half = D == 64 ? group * square : group * Bc * 64;
    multiply<T, Bc, Br>(dQ, shared.dS[buffer] + (D == 64 ? half : 0),
                        shared.K[kv.at] + (D == 64 ? 0 : half));
    wgmma_commit();
  };
  // dQ, whose tile begins at this row, into global memory; in order, the first one stores
  const auto add_up = [&](const float(&dQ)[32], std::int64_t first_row) {
    if constexpr (Tiles::adds_dQ) {
      float* const to = passed.dQ + first_row * D + group * square + thread * 4;
      if (Tiles::in_order) sync(dQ_free + group, with_pusher);
      add_dQ(to, dQ, Tiles::in_order && shared.is_first[group]);
      if (Tiles::in_order) arrive(dQ_full + group, with_pusher);
      return;
    }
    sync(dQ_free + group, with_pusher);
    put_dQ(shared.dQ[group], dQ, thread);
    fence_async();
    arrive(dQ_full + group, with_pusher);
  };

  for (;; kv.next()) {
    wait(&shared.tile_full[kv.at], kv.phase);
    const auto& tile = shared.tile[kv.at];
    int steps = tile.steps;
    if (steps < 0) break;
    T* const K = shared.K[kv.at] + group * square;  // the group's keys, of each box
    T* const V = shared.V[kv.at] + group * square;
    const int j = tile.j0 + 64 * group;  // the group's first key
    const int length = tile.reach.length;
    float dK[D / 2] = {}, dV[D / 2] = {};
    settle(dK);
    settle(dV);
    if (steps > 0) {
      wait(&shared.Q_full[q.at], q.phase);
      // Keys past the length may hold NaN. The other group's dQ reads them, too, in the first step.
      if (const int here = length - j; here < Bc - 64 * group && length < p.Nk) {
        wait(&shared.dO_full[q.at], q.phase);
        clear_keys<Bc, D>(K, V, max(here, 0), thread);
        fence_async();
        sync(meeting, both);
      }
      float S[Br / 2];
      issue_pairs(S, K, shared.Q[q.at]);
      int buffer = 0, before = 2;
      // Where the walk is; where the rows of the step before begin; did nobody add to them before?
      const int first = tile.first, end = tile.end;
      const int low = tile.all[group].low, high = tile.all[group].high - Br;
      int i0 = first, row_before = 0;
      // Of a list: where step n is, and the end when it is known.
      const auto hear = [&](int n) {
        i0 = shared.i0[q.at];
        if (i0 < 0) i0 = ~i0, steps = n + 1;
      };
      if (listed) hear(0);
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        static_assert(Tiles::stages == 2);  // the other buffer is now ^ 1
        const int now = q.at;
        float P[Br / 2], dP[Br / 2], dQ[32];
        std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
        wgmma_wait<0>(S);  // and dK of the step before
        __syncwarp();
        if (leader && n > 0) arrive(&shared.Q_free[now ^ 1]);
        if (i0 < low || i0 > high)
          hide(S, tile.reach, j + 16 * warp + lane / 4, i0, lane, c < 0 ? INFINITY : -INFINITY);
        wait(&shared.dO_full[now], q.phase);
        issue_pairs(dP, V, shared.dO[now]);
        exponentials(P, S, c, shared.LSE2[now], lane);
        round_to<T>(rounded_P, P);
        if (!Tiles::late_dV) issue_sum(dV, rounded_P, shared.dO[now]);
        // dS, with d = 128 while dV is under way. Its buffer is free: the other group is done with
        // the step before the last, since it has written dS of the last one.
        if (n > 0) sync(ready(group ^ 1, n - 1), both);
        wgmma_wait<Tiles::late_dV ? 0 : 1>(dP);
        to_dS(dP, P, shared.D_i[now], lane);
        round_to<T>(rounded_dS, dP);
        put_dS(shared.dS[buffer] + group * Br * 64, rounded_dS, warp, lane);
        fence_async();  // and LSE2 and D_i have been read: the copy engine may write there
        arrive(ready(group, n), both);
        if (Tiles::late_dV) issue_sum(dV, rounded_P, shared.dO[now]);
        // dQ of the step before, of which both have written dS; in the first step nobody wants it.
        issue_dQ(dQ, before);
        before = buffer;
        buffer = buffer == 2 ? 0 : buffer + 1;
        issue_sum(dK, rounded_dS, shared.Q[now]);
        wgmma_wait<1>(dQ);  // and dV
        __syncwarp();
        if (leader) arrive(&shared.dO_free[now]);
        if (n > 0) add_up(dQ, row_before);
        row_before = shared.row[now];
        // S of the next step; after the last one the same again, and nobody looks at it.
        q.next();
        const bool more = n + 1 < steps;
        if (more) wait(&shared.Q_full[q.at], q.phase);
        if (listed) {
          if (more) hear(n + 1);
        } else if ((i0 += Br) >= end) {
          i0 = first;
        }
        issue_pairs(S, K, shared.Q[more ? q.at : now]);
      }
      wgmma_wait<0>(S);
      __syncwarp();
      if (leader) arrive(&shared.Q_free[q.at ^ 1]);
      float dQ[32];
      sync(ready(group ^ 1, steps - 1), both);
      issue_dQ(dQ, before);
      wgmma_wait<0>(dQ);
      add_up(dQ, row_before);
    }
    settle(dK);
    settle(dV);
    // dK scaled, and both leave, through what were K and V.
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dK[i] *= scale;
    sync(meeting, both);  // nobody reads K any more
    store_sums<Bc>(maps, K, V, dK, dV, warp, lane, j, tile.hk, tile.b);
    if (!Tiles::stays) break;
    arrive(&shared.KV_free[kv.at]);
    __syncwarp();
  }
}

template <class Tiles, bool listed, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Pattern pattern, const __grid_constant__ Passed passed,
                  float scale, const __grid_constant__ KeyTiles tiles) {
  auto& shared = FA_DYNAMIC_SHARED(Here<Tiles, T>);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 4 * Tiles::groups);
    init(shared.dO_full, shared.dO_free, 4 * Tiles::groups);
    init(shared.tile_full, shared.KV_free, (Tiles::in_order ? 160 : 128) * Tiles::groups);
    fence_barriers();
  }
  if (Tiles::in_order) zeros_if_unseen<Tiles>(p, pattern, passed);
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp < Tiles::groups && (Tiles::in_order || !Tiles::adds_dQ))
      push<Tiles, listed>(shared, p, pattern, passed, warp);
    else if (warp == Tiles::groups && elected())
      load<Tiles, listed>(shared, maps, p, pattern, passed, tiles);
  } else {
    take_registers<240>();
    compute<Tiles, listed>(shared, maps, p, passed, scale);
  }
}

template <class Tiles, bool listed = false, class T>
void launch(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
            const Passed& passed, cudaStream_t stream) {
  const Maps maps = maps_of<Tiles::Br, Tiles::Bc>(p, t);
  // Of as many queries as see the keys under way.
  Problem near = p;
  near.Nq = std::min(p.Nq, pattern.left + pattern.right + 2048);
  KeyTiles tiles = key_tiles_of<Tiles>(p);
  tiles.section = key_tiles_of<Tiles>(near).section;
  static_assert(Tiles::Bc == block && !(listed && Tiles::in_order));
  const auto kernel = hopper_kernel<Tiles, listed, T>;
  constexpr std::size_t shared_bytes = sizeof(Here<Tiles, T>);
  static_assert(shared_bytes <= most_shared);
  allow_shared_memory(kernel, shared_bytes);
  const int blocks = Tiles::stays ? std::min(processors(), tiles.count) : tiles.count;
  // It leaves 0 in the sums of rows that nobody stores: without turns of all. In turns it would ask
  // the problem's own mask, and the kernel knows better.
  Problem all_seen = p;
  all_seen.causal = Causal::none;
  all_seen.key_lengths = nullptr;
  launch_before(all_seen, t, passed, stream);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), shared_bytes, stream, maps, p,
            pattern, passed, scale, tiles);
  launch_after(p, t, scale, passed, stream);
}

}  // namespace

// Why these kernels do not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Pattern& pattern, const Backward<T>& t,
                           bool deterministic) {
  if (pattern.query_documents) return "hopper takes no documents";
  if (pattern.keys.offsets && deterministic) return "hopper takes no lists of blocks in turns";
  if (p.d > 128) return "hopper takes d up to 128, got " + std::to_string(p.d);
  const auto queries = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hq, p.Nq); };
  const auto keys = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hkv, p.Nk); };
  const bool maps = p.Hq > 0 && p.Nq > 0 && p.Nk > 0 && p.d % 8 == 0 && queries(t.Q) &&
                    queries(t.dO) && keys(t.K) && keys(t.V) && keys(t.dK) && keys(t.dV);
  return maps ? ""
              : "hopper wants queries and keys, d a multiple of 8, rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
                   const Passed& passed, cudaStream_t stream) {
  if (pattern.keys.offsets) {
    if (p.d <= 64) return launch<Sizes<64, false>, true>(p, pattern, t, scale, passed, stream);
    return launch<Sizes<128, false>, true>(p, pattern, t, scale, passed, stream);
  }
  const auto run = [&](auto sizes) {
    launch<decltype(sizes)>(p, pattern, t, scale, passed, stream);
  };
  if (p.d <= 64) return passed.turn ? run(Sizes<64, true>()) : run(Sizes<64, false>());
  passed.turn ? run(Sizes<128, true>()) : run(Sizes<128, false>());
}

#define FA_FOR(T)                                                                                \
  template std::string not_for_hopper(const Problem&, const Pattern&, const Backward<T>&, bool); \
  template void launch_hopper(const Problem&, const Pattern&, const Backward<T>&, float,         \
                              const Passed&, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::masks
