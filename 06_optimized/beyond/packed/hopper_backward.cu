// The backward's hopper, backward/hopper.cu, for sequences of different lengths, one behind the
// other in a tensor. Not in turns: dQ is added up in an order that varies. Whoever wants the same
// bits in every run, and what TMA cannot bring, swizzle.cu takes care of.
//
// A block takes 128 keys of a sequence from the list, and with d = 64 the next such tile when it is
// done; roles, barriers and steps are those of backward/hopper.cu. TMA knows where the tensor ends,
// not the sequence: so a last tile comes with rows of the next one. Keys there are hidden, and dK
// and dV of them not stored; K, V, Q and dO there become 0, since 0 times NaN is NaN.
//
//   SequenceTile          whose keys, and which queries see them
//   load, push, compute   as hopper's, from the sequence's first row on
//   after_kernel          dQ, rounded, into a sequence's rows
//   launch_hopper         two numbers a row and zeros, the kernel, dQ rounded
#include <algorithm>
#include <cfloat>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/bring.cuh"
#include "06_optimized/backward/shapes.cuh"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/beyond/packed/sequence.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::packed {
namespace {

using namespace optimized;

// Tile number n of the keys, and where its sequence lies. Rows and keys count from the sequence's
// first one.
template <class Tiles>
struct SequenceTile : KeyTile<Tiles> {
  using Tile = KeyTile<Tiles>;
  using Tile::steps, Tile::b, Tile::hk, Tile::j0, Tile::first, Tile::h, Tile::row;
  SequenceMask mask;
  int q0, k0;  // where the sequence begins

  __device__ SequenceTile(const Problem& p, const Passed& passed, const Work& work, int head)
      : mask(work, p.causal), q0(work.q0), k0(work.k0) {
    const int group = int(p.Hq / p.Hkv);
    b = 0;  // the tensors have no batch
    hk = head;
    j0 = work.tile * Tiles::Bc;
    const int seen_from = mask.first_row(j0);
    first = seen_from / Tiles::Br * Tiles::Br;
    steps = seen_from >= mask.Nq ? 0 : (mask.Nq - first + Tiles::Br - 1) / Tiles::Br * group;
    h = hk * group;
    row = h * int(passed.rows) + int(work.padded_row());
  }
};
template <class Tiles, class T>
using Here = Shared<Tiles, T, SequenceTile<Tiles>>;

// ---- the warps that move data ----

template <class Tiles, class T>
__device__ void load(Here<Tiles, T>& shared, const Maps& maps, const Problem& p,
                     const Passed& passed, const List& list) {
  Ring<Tiles::stages> q;
  Ring<Tiles::keys> kv;
  const auto next = [&](unsigned else_this) {
    return Tiles::stays ? atomicAdd(passed.taken, 1u) : else_this;
  };
  const unsigned heads = unsigned(p.Hkv);
  for (unsigned number = next(blockIdx.x);; number = next(0), kv.next()) {
    wait(&shared.KV_free[kv.at], kv.phase ^ 1);
    auto& tile = shared.tile[kv.at];
    const int n = int(number / heads);
    if (n >= list.most || list.work[n].tile < 0) {  // the host counts tiles that may be needed
      tile.steps = -1;
      arrive(&shared.tile_full[kv.at]);
      break;
    }
    tile = SequenceTile<Tiles>(p, passed, list.work[n], int(number % heads));
    arrive(&shared.tile_full[kv.at]);
    Walk walk(tile);
    for (int m = 0; m < tile.steps; ++m, walk.next(tile.mask.Nq), q.next()) {
      const struct {
        int b, h, i0, j0;
      } at{0, tile.h + walk.h, tile.q0 + walk.i0, tile.k0 + tile.j0};
      const int row = walk.row(passed);
      const int more = m == 0 ? int(sizeof shared.K[0]) : 0;  // S need not wait for V
      Barrier *const Q_full = &shared.Q_full[q.at], *const dO_full = &shared.dO_full[q.at];
      wait(&shared.Q_free[q.at], q.phase ^ 1);
      shared.row[q.at] = row;
      bring(shared.Q[q.at], maps.Q, shared.LSE2[q.at], passed.LSE2 + row, Q_full, at, more);
      if (m == 0) bring_keys<Tiles::Bc>(shared.K[kv.at], maps.K, Q_full, tile.hk, at);
      wait(&shared.dO_free[q.at], q.phase ^ 1);
      bring(shared.dO[q.at], maps.dO, shared.D_i[q.at], passed.D + row, dO_full, at, more);
      if (m == 0) bring_keys<Tiles::Bc>(shared.V[kv.at], maps.V, dO_full, tile.hk, at);
    }
    if (!Tiles::stays) break;
  }
}

// One warp for each group's part of dQ: adds it up in global memory.
template <class Tiles, class T>
__device__ void push(Here<Tiles, T>& shared, const Passed& passed, int group) {
  static_assert(!Tiles::stays);  // one tile
  wait(&shared.tile_full[0], 0);
  const SequenceTile<Tiles> tile = shared.tile[0];
  Walk walk(tile);
#pragma unroll 1
  for (int n = 0; n < tile.steps; ++n, walk.next(tile.mask.Nq)) {
    arrive(dQ_free + group, with_pusher);  // the first time at once: nothing is in it yet
    sync(dQ_full + group, with_pusher);
    if (elected()) {
      bulk_add(passed.dQ + std::int64_t(walk.row(passed)) * Tiles::D + group * square,
               shared.dQ[group], int(sizeof shared.dQ[0]));
      tma_commit();
      tma_wait_read();
    }
    __syncwarp();
  }
}

// ---- the warpgroups that compute, 64 keys each ----
// S, P, dP and dS are held transposed, a row for each key: steps.cuh.

// Rows of a tile of `all` rows, from row `from` on, become 0, by the 128 threads of a group.
template <int D, int all, class T>
__device__ void clear_rows(T* tile, int from, int thread) {
  for (int e = max(from, 0) * 8 + thread; e < all * 8; e += 128)
    for (int x = 0; x < D; x += 64)
      *reinterpret_cast<uint4*>(tile + x * all + e * 8) = make_uint4(0, 0, 0, 0);
}

// dK or dV of a warp's 16 keys leaves through `from`; of the last ones, behind which another
// sequence begins, the lanes carry those that are its own.
template <int Bc, int n, class T>
__device__ void leave(const CUtensorMap& map, const View<T>& to, T* from, const float (&sums)[n],
                      int d, int lane, int first, int keys, int hk) {
  put<Bc>(from, sums, lane);
  fence_async();
  __syncwarp();
  if (keys >= 16) {
    if (lane == 0)
      for (int x = 0; x < 2 * n; x += 64) tma_store(map, from + x * Bc, x, first, hk, 0);
    return;
  }
#pragma unroll 1
  for (int k = lane; k < keys * (n / 4); k += 32) {
    const int r = k / (n / 4), x = k % (n / 4) * 8;
    if (x < d)
      *reinterpret_cast<uint4*>(to.at(0, hk, first + r) + x) =
          *reinterpret_cast<const uint4*>(from + x / 64 * 64 * Bc + swizzled_chunk(r, x % 64 / 8));
  }
}

template <class Tiles, class T>
__device__ void compute(Here<Tiles, T>& shared, const Maps& maps, const Problem& p,
                        const Backward<T>& t, const Passed& passed, float scale) {
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
  // dQ, whose tile begins at this row, into global memory
  const auto add_up = [&](const float(&dQ)[32], std::int64_t first_row) {
    if constexpr (Tiles::adds_dQ)
      return add_dQ(passed.dQ + first_row * D + group * square + thread * 4, dQ, false);
    sync(dQ_free + group, with_pusher);
    put_dQ(shared.dQ[group], dQ, thread);
    fence_async();
    arrive(dQ_full + group, with_pusher);
  };
  // A tile of queries has come, and with it perhaps the next sequence's first rows.
  const auto came = [&](Barrier* full, int phase, T* tile, int from) {
    wait(full, phase);
    if (from >= Br) return;
    clear_rows<D, Br>(tile, from, thread);
    fence_async();
    sync(alone + group, 128);
  };

  for (;; kv.next()) {
    wait(&shared.tile_full[kv.at], kv.phase);
    const auto& tile = shared.tile[kv.at];
    const int steps = tile.steps;
    if (steps < 0) break;
    T* const K = shared.K[kv.at] + group * square;  // the group's keys, of each box
    T* const V = shared.V[kv.at] + group * square;
    const int Nq = tile.mask.Nq, j = tile.j0 + 64 * group;  // the group's first key
    const int keys = tile.mask.Nk - j;                      // from there on
    const SeenFrom seen(tile.mask, j, warp, lane);
    float dK[D / 2] = {}, dV[D / 2] = {};
    settle(dK);
    settle(dV);
    if (steps > 0) {
      const int first = tile.first;
      int i0 = first;  // where the walk is
      came(&shared.Q_full[q.at], q.phase, shared.Q[q.at], Nq - i0);
      if (keys < Bc - 64 * group) {  // of the block, fewer than it has room for
        wait(&shared.dO_full[q.at], q.phase);
        clear_keys<Bc, D>(K, V, max(keys, 0), thread);
        fence_async();
        sync(meeting, both);  // the other group's dQ reads them, too, even in the first step
      }
      float S[Br / 2];
      issue_pairs(S, K, shared.Q[q.at]);
      int buffer = 0, before = 2, row_before = 0;  // where the rows of the step before begin
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        static_assert(Tiles::stages == 2);  // the other buffer is now ^ 1
        const int now = q.at;
        float P[Br / 2], dP[Br / 2], dQ[32];
        std::uint32_t rounded_P[Br / 16][4], rounded_dS[Br / 16][4];
        wgmma_wait<0>(S);  // and dK of the step before
        __syncwarp();
        if (leader && n > 0) arrive(&shared.Q_free[now ^ 1]);
        if (i0 < seen.all) hide(S, seen.hidden(i0, lane).of_key, c < 0 ? INFINITY : -INFINITY);
        came(&shared.dO_full[now], q.phase, shared.dO[now], Nq - i0);
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
        if ((i0 += Br) >= Nq) i0 = first;
        const bool more = n + 1 < steps;
        if (more) came(&shared.Q_full[q.at], q.phase, shared.Q[q.at], Nq - i0);
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
    const int first = 16 * warp, key = tile.k0 + j + first;
    leave<Bc>(maps.dK, t.dK, K + first * 64, dK, int(p.d), lane, key, keys - first, tile.hk);
    leave<Bc>(maps.dV, t.dV, V + first * 64, dV, int(p.d), lane, key, keys - first, tile.hk);
    if (lane == 0) {
      tma_commit();
      tma_wait_read();
    }
    if (!Tiles::stays) break;
    fence_async();  // what lanes have read there themselves, too
    __syncwarp();
    arrive(&shared.KV_free[kv.at]);
  }
}

template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Backward<T> t, const __grid_constant__ List list,
                  const __grid_constant__ Passed passed, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Here<Tiles, T>);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 4 * Tiles::groups);
    init(shared.dO_full, shared.dO_free, 4 * Tiles::groups);
    init(shared.tile_full, shared.KV_free, 128 * Tiles::groups);
    fence_barriers();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == Tiles::groups) {
      if (elected()) load(shared, maps, p, passed, list);
    } else if constexpr (!Tiles::adds_dQ) {
      if (warp < Tiles::groups) push(shared, passed, warp);
    }
  } else {
    take_registers<240>();
    compute(shared, maps, p, t, passed, scale);
  }
}

// ---- what comes behind it ----

// dQ = T(scale dQ), blocks of 64 x 64 of a tile: backward/0_around.cu for sequences. The last ones
// first, which have been written last.
template <class T>
__global__ void __launch_bounds__(128)
    after_kernel(Problem p, View<T> dQ, List list, float scale, Passed passed, int wide) {
  constexpr int stride = 64 + 8;  // of a row in shared memory: 8 rows lie in different banks
  __shared__ __align__(16) T rows[64 * stride];
  const int block = int(gridDim.x - 1 - blockIdx.x), parts = hopper_tile / 64 * wide;
  const int part = block % parts, h = block / parts % int(p.Hq);
  const Work work = list.work[block / parts / int(p.Hq)];
  const int i0 = work.tile * hopper_tile + part / wide * 64, x0 = part % wide * 64;
  if (work.tile < 0 || i0 >= work.Nq || x0 >= p.d) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t row = h * passed.rows + work.padded_row() + work.tile * hopper_tile;
  const auto* from = reinterpret_cast<const float4*>(passed.dQ + row * wide * 64 + part * square);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // columns 8 j ...: two in this row, two in the row 8 below
    const float4 sums = from[j * 128 + threadIdx.x];
    T* to = rows + (16 * warp + lane / 4) * stride + 8 * j + lane % 4 * 2;
    *reinterpret_cast<std::uint32_t*>(to) = rounded_pair<T>(scale * sums.x, scale * sums.y);
    *reinterpret_cast<std::uint32_t*>(to + 8 * stride) =
        rounded_pair<T>(scale * sums.z, scale * sums.w);
  }
  __syncthreads();
  for (int piece = threadIdx.x; piece < 64 * 8; piece += 128) {
    const int r = piece / 8, x = x0 + piece % 8 * 8;
    if (i0 + r < work.Nq && x < p.d)
      *reinterpret_cast<uint4*>(dQ.at(0, h, work.q0 + i0 + r) + x) =
          *reinterpret_cast<const uint4*>(rows + r * stride + piece % 8 * 8);
  }
}

template <class Tiles, class T>
void launch(const Problem& p, const Backward<T>& t, const List& of_queries, const List& of_keys,
            float scale, const Passed& passed, cudaStream_t stream) {
  static_assert(Tiles::Bc == hopper_tile && hopper_tile % Tiles::Br == 0);
  Problem one = p;  // the tensors have no batch
  one.B = 1;
  const Maps maps = maps_of<Tiles::Br, Tiles::Bc>(one, t);
  const auto kernel = hopper_kernel<Tiles, T>;
  constexpr std::size_t shared_bytes = sizeof(Here<Tiles, T>);
  static_assert(shared_bytes <= most_shared);
  allow_shared_memory(kernel, shared_bytes);
  constexpr int wide = Tiles::D / 64, parts = hopper_tile / 64 * wide;
  if (p.Nq > 0) launch_before(p, t, of_queries, hopper_tile, passed, stream);
  const std::int64_t tiles = of_keys.most * p.Hkv,
                     blocks = Tiles::stays ? std::min<std::int64_t>(processors(), tiles) : tiles;
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), shared_bytes, stream, maps, p, t,
            of_keys, passed, scale);
  if (p.Nq > 0)
    FA_LAUNCH(after_kernel<T>, dim3(unsigned(of_queries.most * p.Hq * parts)), dim3(128), 0, stream,
              p, t.dQ, of_queries, scale, passed, wide);
}

}  // namespace

// Why these kernels do not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Backward<T>& t) {
  if (p.d > 128) return "hopper's backward takes d up to 128, got " + std::to_string(p.d);
  const auto queries = [&](const auto& X) { return has_tensor_map(X, 1, p.Hq, p.Nq); };
  const auto keys = [&](const auto& X) { return has_tensor_map(X, 1, p.Hkv, p.Nk); };
  const bool maps = p.Nq > 0 && p.Nk > 0 && p.d % 8 == 0 && queries(t.Q) && queries(t.O) &&
                    queries(t.dO) && queries(t.dQ) && keys(t.K) && keys(t.V) && keys(t.dK) &&
                    keys(t.dV);
  return maps ? ""
              : "hopper wants queries and keys, d a multiple of 8, rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Backward<T>& t, const List& of_queries,
                   const List& of_keys, float scale, const Passed& passed, cudaStream_t stream) {
  if (p.d <= 64) return launch<Sizes<64, false>>(p, t, of_queries, of_keys, scale, passed, stream);
  launch<Sizes<128, false>>(p, t, of_queries, of_keys, scale, passed, stream);
}

#define FA_FOR(T)                                                                                  \
  template std::string not_for_hopper(const Problem&, const Backward<T>&);                         \
  template void launch_hopper(const Problem&, const Backward<T>&, const List&, const List&, float, \
                              const Passed&, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::packed
