// The backward's hopper with changed scores: ALiBi or a soft cap, d up to 128. What else there is,
// and what TMA cannot bring, is swizzle.cu's; what changes nothing is backward/hopper.cu's.
//
// Roles, barriers and steps are those of backward/hopper.cu. ALiBi changes P alone: on one side of
// the positions what it adds is a line across queries, which goes into their LSE, and a number for
// each key. A capped score is kept as tanh t: P is 2^(c cap t - LSE2), and when it has been rounded
// for dV it is multiplied by the derivative 1 - t^2, as dS wants it.
//
//   compute         as hopper's, with the change between product and exponentials (hopper.cuh)
//   not_for_hopper  what is left to swizzle
#include <algorithm>
#include <cfloat>
#include <climits>
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/backward/shapes.cuh"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/beyond/scores/hopper.cuh"
#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::scores {
namespace {

using namespace optimized;

template <class Tiles, class T>
struct Shared : optimized::Shared<Tiles, T> {
  float slope[Tiles::stages];  // of the head whose queries lie in Q, where heads walk together
};

// ---- the warps that move data ----

// Says what comes, and brings it: of each tile the keys, with the first queries that meet them.
template <int built, class Tiles, class T>
__device__ void load(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
                     const Change<T>& change, const Passed& passed, const KeyTiles& tiles) {
  Ring<Tiles::stages> q;
  Ring<Tiles::keys> kv;
  // In the order in which blocks begin, or none may wait for another: taken as late as can be.
  const auto next = [&](int else_this) {
    return Tiles::stays && passed.taken ? int(atomicAdd(passed.taken, 1u)) : else_this;
  };
  for (int number = next(blockIdx.x);; kv.next()) {
    wait(&shared.KV_free[kv.at], kv.phase ^ 1);
    KeyTile<Tiles>& tile = shared.tile[kv.at];
    if (number >= tiles.count) {
      tile.steps = -1;
      arrive(&shared.tile_full[kv.at]);
      break;
    }
    tile = KeyTile<Tiles>(p, passed, tiles, number);
    arrive(&shared.tile_full[kv.at]);
    auto walk = walk_of(tile, p, tiles);
    for (int n = 0; n < tile.steps; ++n, walk.next(int(p.Nq)), q.next()) {
      const struct { int b, h, i0, j0; } at{tile.b, tile.h + walk.h, walk.i0, tile.j0};
      const int row = walk.row(passed);
      const int more = n == 0 ? int(sizeof shared.K[0]) : 0;  // S need not wait for V
      Barrier *const Q_full = &shared.Q_full[q.at], *const dO_full = &shared.dO_full[q.at];
      wait(&shared.Q_free[q.at], q.phase ^ 1);
      shared.row[q.at] = row;
      if (Tiles::together) shared.i0[q.at] = walk.i0;
      if (Tiles::together && has<built>(change, with_alibi))
        shared.slope[q.at] = Head<with_alibi, T>(change, at.b, at.h).slope;
      optimized::bring(shared.Q[q.at], maps.Q, shared.LSE2[q.at], passed.LSE2 + row, Q_full, at,
                       more);
      if (n == 0) bring_keys<Tiles::Bc>(shared.K[kv.at], maps.K, Q_full, tile.hk, at);
      wait(&shared.dO_free[q.at], q.phase ^ 1);
      optimized::bring(shared.dO[q.at], maps.dO, shared.D_i[q.at], passed.D + row, dO_full, at,
                       more);
      if (n == 0) bring_keys<Tiles::Bc>(shared.V[kv.at], maps.V, dO_full, tile.hk, at);
    }
    if (!Tiles::stays) break;
    number = next(INT_MAX);
  }
}

// One warp for each group's part of dQ: adds it up in global memory, or sees to it that the group
// does so when it is its turn.
template <class Tiles, class T>
__device__ void push(Shared<Tiles, T>& shared, const Problem& p, const Passed& passed,
                     const KeyTiles& tiles, int group) {
  Ring<Tiles::keys> kv;
  for (;; kv.next()) {
    wait(&shared.tile_full[kv.at], kv.phase);
    const KeyTile<Tiles> tile = shared.tile[kv.at];
    if (tile.steps < 0) break;
    auto walk = walk_of(tile, p, tiles);
    const int length = int(Mask(p, tile.b).length);
#pragma unroll 1
    for (int n = 0; n < tile.steps; ++n, walk.next(int(p.Nq))) {
      const int block = walk.row(passed) / 64 * (Tiles::D / 64) + group;
      int* const turn = Tiles::in_order ? passed.turn + block : nullptr;
      const int n_before = walk.turn(tiles, length, int(p.Nq));
      if (Tiles::adds_dQ) wait_turn(turn, n_before);
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

// P_ij = 2^(c S_ij + first[r] + line place - LSE2_i), with what ALiBi lacks as yet, in base 2; and
// P rounded. With a cap S is t = tanh, and P then times 1 - t^2; hidden ones are -inf, and 0.
template <int built, bool masked, class T, int n, int Br>
__device__ void exponentials(float (&P)[n], std::uint32_t (&rounded)[n / 8][4], const float (&S)[n],
                             float c, bool capped, const float (&first)[2], float line,
                             const float (&LSE2)[Br], int lane) {
  const auto of_lane = reinterpret_cast<const float2*>(LSE2) + lane % 4;
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    float2 L = of_lane[i / 4 * 4];
    if (built & with_alibi) {
      L.x = fmaf(-line, place(i), L.x) - first[i / 2 % 2];
      L.y = fmaf(-line, place(i + 1), L.y) - first[i / 2 % 2];
    }
    P[i] = ex2(fmaf(S[i], c, -L.x));
    P[i + 1] = ex2(fmaf(S[i + 1], c, -L.y));
    rounded[i / 8][i / 2 % 4] = rounded_pair<T>(P[i], P[i + 1]);
    if (!capped) continue;
    const float x = fmaf(-S[i], S[i], 1), y = fmaf(-S[i + 1], S[i + 1], 1);
    P[i] *= masked ? fmaxf(x, 0) : x;
    P[i + 1] *= masked ? fmaxf(y, 0) : y;
  }
}

template <int built, bool masked, class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const Maps& maps, const Problem& p,
                        const Change<T>& change, const Passed& passed, const KeyTiles& tiles,
                        float scale, float c, float k) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int group = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const bool leader = masked ? lane == 0 : thread == 0;  // says that a buffer has been read
  const bool has_alibi = has<built>(change, with_alibi), has_cap = has<built>(change, with_cap);
  const Tanh tanh{1, k};
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
  const auto add_up = [&](const float(&dQ)[32], std::int64_t first_row, bool is_first) {
    if constexpr (Tiles::adds_dQ) {
      float* const to = passed.dQ + first_row * D + group * square + thread * 4;
      if (Tiles::in_order) sync(dQ_free + group, with_pusher);
      add_dQ(to, dQ, Tiles::in_order && is_first);
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
    const KeyTile<Tiles>& tile = shared.tile[kv.at];
    const int steps = tile.steps;
    if (steps < 0) break;
    T* const K = shared.K[kv.at] + group * square;  // the group's keys, of each box
    T* const V = shared.V[kv.at] + group * square;
    const int j = tile.j0 + 64 * group;  // the group's first key
    const Mask mask(p, tile.b);
    const SeenFrom seen(mask, j, warp, lane);
    float dK[D / 2] = {}, dV[D / 2] = {};
    settle(dK);
    settle(dV);
    if (steps > 0) {
      wait(&shared.Q_full[q.at], q.phase);
      // Keys past the length may hold NaN. The other group's dQ reads them, too, in the first step.
      if (const int here = int(mask.length) - j; here < Bc - 64 * group && mask.length < p.Nk) {
        wait(&shared.dO_full[q.at], q.phase);
        clear_keys<Bc, D>(K, V, max(here, 0), thread);
        fence_async();
        sync(meeting, both);
      }
      float S[Br / 2];
      issue_pairs(S, K, shared.Q[q.at]);
      int buffer = 0, before = 2;
      // Where the walk is; where the rows of the step before begin; did nobody add to them before?
      const int until = tile.until(tiles, int(mask.length), int(p.Nq));
      int i0 = Tiles::together ? shared.i0[q.at] : tile.first, row_before = 0, h = tile.h;
      const auto slope_of = [&] {
        return has_alibi ? Head<with_alibi, T>(change, tile.b, h).slope : 0;
      };
      float slope = slope_of();
      bool first_before = false;
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        static_assert(Tiles::stages == 2);  // the other buffer is now ^ 1
        const int now = q.at;
        float P[Br / 2], dP[Br / 2], dQ[32];
        std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
        wgmma_wait<0>(S);  // and dK of the step before
        if (masked) __syncwarp();
        if (leader && n > 0) arrive(&shared.Q_free[now ^ 1]);
        // ALiBi: all positions of this tile of queries lie on one side of the group's keys, or some
        // lie among them.
        float first_of[2] = {}, line = 0;
        if (has_alibi) {
          const int position = i0 + change.offset, from_key = position - j;
          const int nearest = from_key + 2 * (lane % 4) - 16 * warp - lane / 4;
          const bool edge = from_key < 63 && from_key > 1 - Br;
          line = edge ? slope : from_key > 0 ? -slope * c : slope * c;
          first_of[0] = line * float(nearest);
          first_of[1] = line * float(nearest - 8);
          if (edge) {
            add_edge(S, slope, first_of);
            line = first_of[0] = first_of[1] = 0;
          }
        }
        wait(&shared.dO_full[now], q.phase);
        issue_pairs(dP, V, shared.dO[now]);
        if (has_cap) tanh.template of<2>(S);
        if (masked && i0 < seen.all) hide(S, seen.hidden(i0, lane).of_key, -INFINITY);
        exponentials<built, masked, T>(P, rounded_P, S, c, has_cap, first_of, line,
                                       shared.LSE2[now], lane);
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
        if (masked) __syncwarp();
        if (leader) arrive(&shared.dO_free[now]);
        if (n > 0) add_up(dQ, row_before, first_before);
        row_before = shared.row[now];
        if (Tiles::in_order) first_before = i0 < until;
        // S of the next step; after the last one the same again, and nobody looks at it.
        q.next();
        const bool more = n + 1 < steps;
        if (more) wait(&shared.Q_full[q.at], q.phase);
        if (Tiles::together) {
          i0 = shared.i0[more ? q.at : now];
          if (has_alibi) slope = shared.slope[more ? q.at : now];
        } else if ((masked || has_alibi || Tiles::in_order) && (i0 += Br) >= p.Nq) {
          i0 = tile.first;
          if (has_alibi && more) ++h, slope = slope_of();
        }
        issue_pairs(S, K, shared.Q[more ? q.at : now]);
      }
      wgmma_wait<0>(S);
      if (masked) __syncwarp();
      if (leader) arrive(&shared.Q_free[q.at ^ 1]);
      float dQ[32];
      sync(ready(group ^ 1, steps - 1), both);
      issue_dQ(dQ, before);
      wgmma_wait<0>(dQ);
      add_up(dQ, row_before, first_before);
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

template <int built, bool masked, class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Change<T> change, const __grid_constant__ Passed passed,
                  float scale, float c, float k, const __grid_constant__ KeyTiles tiles) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<Tiles, T>);
  if (threadIdx.x == 0) {
    constexpr int readers = masked ? 4 * Tiles::groups : Tiles::groups;  // warps, or groups
    init(shared.Q_full, shared.Q_free, readers);
    init(shared.dO_full, shared.dO_free, readers);
    init(shared.tile_full, shared.KV_free, (Tiles::in_order ? 160 : 128) * Tiles::groups);
    fence_barriers();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp < Tiles::groups && (Tiles::in_order || !Tiles::adds_dQ))
      push(shared, p, passed, tiles, warp);
    else if (warp == Tiles::groups && elected())
      load<built>(shared, maps, p, change, passed, tiles);
  } else {
    take_registers<240>();
    compute<built, masked>(shared, maps, p, change, passed, tiles, scale, c, k);
  }
}

template <int built, bool masked, class Tiles, class T>
void launch(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
            const Passed& passed, cudaStream_t stream) {
  const Maps maps = maps_of<Tiles::Br, Tiles::Bc>(p, t);
  const KeyTiles tiles = key_tiles_of<Tiles>(p);
  // exp(scale x) = 2^(c x), or, of x = cap t, 2^(c t); scale > 0
  const float c = scale * log2_e * (change.parts & with_cap ? change.cap : 1);
  const auto kernel = hopper_kernel<built, masked, Tiles, T>;
  constexpr std::size_t shared_bytes = sizeof(Shared<Tiles, T>);
  static_assert(shared_bytes <= most_shared);
  allow_shared_memory(kernel, shared_bytes);
  const bool stay = Tiles::stays && passed.taken;
  const int blocks = stay ? std::min(processors(), tiles.count) : tiles.count;
  launch_before(p, t, passed, stream);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), shared_bytes, stream, maps, p,
            change, passed, scale, c, per_tanh(change), tiles);
  launch_after(p, t, scale, passed, stream);
}

}  // namespace

// Why these kernels do not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Backward<T>& t, const Change<T>& change,
                           float scale) {
  if (const std::string why = not_for_hopper(change, scale); !why.empty()) return why;
  if (p.d > 128) return "hopper's backward takes d up to 128, got " + std::to_string(p.d);
  const auto queries = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hq, p.Nq); };
  const auto keys = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hkv, p.Nk); };
  const bool maps = p.Hq > 0 && p.Nq > 0 && p.Nk > 0 && p.d % 8 == 0 && queries(t.Q) &&
                    queries(t.dO) && keys(t.K) && keys(t.V) && keys(t.dK) && keys(t.dV);
  return maps ? ""
              : "hopper wants queries and keys, d a multiple of 8, rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
                   const Passed& passed, cudaStream_t stream) {
  if (change.parts == 0) return launch_backward_hopper(p, t, scale, passed, stream);
  const bool masked = p.causal != Causal::none || p.key_lengths || p.Nk % 128 != 0;
  with_changes(change, [&](auto of) {
    constexpr int built = decltype(of)::value;
    const auto run = [&](auto with) { with(p, t, change, scale, passed, stream); };
    // In turns there is one kernel, with the work that a mask makes: it finds the registers.
    if (p.d <= 64 && passed.turn) return run(launch<built, true, Sizes<64, true>, T>);
    if (passed.turn) return run(launch<built, true, Sizes<128, true>, T>);
    if (p.d <= 64)
      return run(masked ? launch<built, true, Sizes<64, false>, T>
                        : launch<built, false, Sizes<64, false>, T>);
    // With four heads a key head this kernel loses up to 2.5 % by it.
    if (masked && p.Hq > 4 * p.Hkv) return run(launch<built, true, Together, T>);
    run(masked ? launch<built, true, Sizes<128, false>, T>
               : launch<built, false, Sizes<128, false>, T>);
  });
}

#define FA_FOR(T)                                                                           \
  template std::string not_for_hopper(const Problem&, const Backward<T>&, const Change<T>&, \
                                      float);                                               \
  template void launch_hopper(const Problem&, const Backward<T>&, const Change<T>&, float,  \
                              const Passed&, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::scores
