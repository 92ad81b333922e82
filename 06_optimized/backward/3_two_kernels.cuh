// What the files of rung 3 share: the order of tiles, P and dS, tiles that come and go, and the
// part of the owner of keys that does not depend on d.
#pragma once
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/backward/steps.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized::two_kernels {

constexpr int groups = 2, threads = 128 * (groups + 1);  // a warpgroup that loads, two that compute
constexpr int stages = 2;                                // buffers of the tiles of queries
constexpr int loader_registers = 24, registers = 240;

// dK and dV for 128 < d <= 256, in 3_two_kernels_wide.cu. Where passed.kept is not null it keeps
// dS, and has the tiles of keys of a part.
template <class T>
void launch_wide_dkv(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                     cudaStream_t stream);
// dQ, in 3_two_kernels_queries.cu.
template <class T>
void launch_wgmma_dq(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                     cudaStream_t stream);

struct Maps {
  CUtensorMap Q, K, V, dO, dQ, dK, dV;
};

constexpr int own = 1;  // numbered barriers, for each group its own

// ---- P and dS of a tile; c = scale log2 e ----
// With S, row r = 0 or 1 of a thread is a query and its columns are keys. With S^T it is the other
// way round, and LSE2 and D belong to columns: they are read from the thread's first column on.

// P_ij = 2^(c S_ij - LSE2_i)
template <int n>
__device__ void weights(float (&S)[n], float c, const float (&LSE2)[2]) {
#pragma unroll
  for (int e = 0; e < n; ++e) S[e] = ex2(fmaf(S[e], c, -LSE2[e / 2 % 2]));
}
template <int n>
__device__ void weights_transposed(float (&P)[n], const float (&S)[n], float c, const float* LSE2) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    const float2 L = *reinterpret_cast<const float2*>(LSE2 + 8 * j);
#pragma unroll
    for (int k = 0; k < 4; ++k) P[4 * j + k] = ex2(fmaf(S[4 * j + k], c, k % 2 ? -L.y : -L.x));
  }
}

// dS_ij = P_ij (dP_ij - D_i) in place of P
template <int n>
__device__ void differences(float (&P)[n], const float (&dP)[n], const float (&D)[2]) {
#pragma unroll
  for (int e = 0; e < n; ++e) P[e] *= dP[e] - D[e / 2 % 2];
}
template <int n>
__device__ void differences_transposed(float (&P)[n], const float (&dP)[n], const float* D) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    const float2 Di = *reinterpret_cast<const float2*>(D + 8 * j);
#pragma unroll
    for (int k = 0; k < 4; ++k) P[4 * j + k] *= dP[4 * j + k] - (k % 2 ? Di.y : Di.x);
  }
}

// 0 where query i does not see key j, as hide() of steps.cuh does it with S^T. Where dP of a hidden
// key may be NaN, dS is hidden too: 0 * NaN is NaN. end[r] counts from the thread's first column.
template <int n>
__device__ void hide_from(const int (&end)[2], float (&X)[n]) {
#pragma unroll
  for (int e = 0; e < n; ++e)
    if (8 * (e / 4) + e % 2 >= end[e / 2 % 2]) X[e] = 0;
}

// ---- tiles that come and go ----

template <int D, int rows, class T>
__device__ void bring(T* tile, const CUtensorMap& map, Barrier* full, int first, int h, int b) {
#pragma unroll
  for (int x = 0; x < D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
}

// factor C, the sums of a warpgroup, to rows first ... first + 63 of a gradient. They leave
// through 64 rows of a tile (of `rows` rows) that only this warpgroup has read, 16 rows a warp.
template <int rows, class T, int n>
__device__ void store(T* through, float (&C)[n], float factor, const CUtensorMap& map, int first,
                      int h, int b) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  sync(uniform(threadIdx.x / 128), 128);  // all four warps have read it
  through += 16 * warp * 64;
#pragma unroll
  for (int e = 0; e < n; ++e) C[e] *= factor;
  put<rows>(through, C, lane);
  fence_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int x = 0; x < 2 * n; x += 64)
      tma_store(map, through + x * rows, x, first + 16 * warp, h, b);
    tma_commit();
    tma_wait_read();
  }
}

// ---- the owner of Bc keys: it goes through tiles of Br queries, in two buffers ----

// What a block of threads has to do: Bc keys from j0 on, and for each query head of the group the
// tiles of queries first ... end - 1.
struct KeyTask {
  Mask mask;
  int b, h, j0;  // h: of the keys
  int first, end, heads;

  template <class Tiles>
  __device__ static KeyTask of(const Problem& p, const Order<int>& order, int first_tile = 0) {
    int head, tile;
    order.place(blockIdx.x, head, tile);
    const int b = head / int(p.Hkv);
    KeyTask task{Mask(p, b), b, head % int(p.Hkv), (first_tile + tile) * Tiles::Bc};
    task.end = (int(p.Nq) + Tiles::Br - 1) / Tiles::Br;
    task.first = min(task.first_row(task.j0) / Tiles::Br, task.end);
    task.heads = int(p.Hq / p.Hkv);
    return task;
  }
  // Of a key that nobody sees all rows are hidden, also those past Nq.
  __device__ int first_row(int j) const {
    const int row = int(mask.first_row(j));
    return row < mask.Nq ? row : 1 << 30;
  }
  __device__ int tiles() const { return heads * (end - first); }
};

template <class Tiles, class T>
struct KeyShared {
  alignas(1024) T K[Tiles::Bc * Tiles::D], V[Tiles::Bc * Tiles::D];
  alignas(1024) T Q[stages][Tiles::Br * Tiles::D], dO[stages][Tiles::Br * Tiles::D];
  alignas(16) float LSE2[stages][Tiles::Br], D[stages][Tiles::Br];
  Barrier KV_full, Q_full[stages], dO_full[stages], free[stages];  // LSE2 and D come with Q
  KeyTask task;  // here, since registers are scarce

  // By one thread.
  __device__ void start(const KeyTask& what) {
    init(&KV_full, 1);
    for (int i = 0; i < stages; ++i) {
      init(&Q_full[i], 1);
      init(&dO_full[i], 1);
      init(&free[i], groups);
    }
    task = what;
  }
};

template <class Tiles, class T>
__device__ void load(KeyShared<Tiles, T>& shared, const Maps& maps, const Passed& passed, int Hq) {
  next_kernel_may_start();
  const KeyTask& task = shared.task;
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  arrive_expecting(&shared.KV_full, 2 * Bc * D * int(sizeof(T)));
  bring<D, Bc>(shared.K, maps.K, &shared.KV_full, task.j0, task.h, task.b);
  bring<D, Bc>(shared.V, maps.V, &shared.KV_full, task.j0, task.h, task.b);
  Ring<stages> at;
  for (int h = task.h * task.heads; h < (task.h + 1) * task.heads; ++h)
    for (int i = task.first; i < task.end; ++i) {
      const std::int64_t row = (std::int64_t(task.b) * Hq + h) * passed.rows + i * Br;
      Barrier *Q_full = &shared.Q_full[at.at], *dO_full = &shared.dO_full[at.at];
      wait(&shared.free[at.at], at.phase ^ 1);
      arrive_expecting(Q_full, Br * (D * int(sizeof(T)) + 2 * int(sizeof(float))));
      bring<D, Br>(shared.Q[at.at], maps.Q, Q_full, i * Br, h, task.b);
      bulk_load(shared.LSE2[at.at], passed.LSE2 + row, Br * sizeof(float), Q_full);
      bulk_load(shared.D[at.at], passed.D + row, Br * sizeof(float), Q_full);
      arrive_expecting(dO_full, Br * D * int(sizeof(T)));
      bring<D, Br>(shared.dO[at.at], maps.dO, dO_full, i * Br, h, task.b);
      at.next();
    }
}

// ---- host ----

template <class Tiles, class T>
Maps maps_of(const Problem& p, const Backward<T>& t) {
  return {tensor_map(t.Q, p.B, p.Hq, p.Nq, p.d, Tiles::Br),
          tensor_map(t.K, p.B, p.Hkv, p.Nk, p.d, Tiles::Bc),
          tensor_map(t.V, p.B, p.Hkv, p.Nk, p.d, Tiles::Bc),
          tensor_map(t.dO, p.B, p.Hq, p.Nq, p.d, Tiles::Br),
          tensor_map(t.dQ, p.B, p.Hq, p.Nq, p.d, 16),
          tensor_map(t.dK, p.B, p.Hkv, p.Nk, p.d, 16),
          tensor_map(t.dV, p.B, p.Hkv, p.Nk, p.d, 16)};
}

// With a causal mask: as many heads a section as have what they read in 32 MiB of L2. Else one key
// head, with all query heads that read its K and V. (Counting one query head of them, as bring.cuh
// does, was no faster here: a development run.)
template <class Tiles>
Order<int> order_of_keys(const Problem& p, const Passed& passed) {
  const std::int64_t heads = p.B * p.Hkv, bytes = p.Hq / p.Hkv * p.Nq * Tiles::D * 4;  // Q and dO
  const bool masked = p.causal != Causal::none;
  const int all = int((p.Nk + Tiles::Bc - 1) / Tiles::Bc);
  Order<int> order{passed.kept ? passed.kept_tiles : all, int(heads),
                   masked ? heads_within(of_L2(32), bytes, heads) : 1, false};
  // The product waits for all of these blocks, and nothing fills the SMs that are done. So the
  // longest of the last section must not begin late: a section has three blocks for two SMs, or
  // more. Measured, not derived; without it eight heads a key head would lose a quarter.
  while (masked && passed.kept && order.section < order.heads &&
         2 * order.section * order.tiles < 3 * processors())
    order.section = std::min(2 * order.section, order.heads);
  return order;
}
template <class Tiles>
Order<int> order_of_queries(const Problem& p) {
  const std::int64_t heads = p.B * p.Hkv, group = p.Hq / p.Hkv;
  const std::int64_t bytes = p.Nk * Tiles::D * 4;  // K and V
  const int section = p.causal == Causal::none ? 1 : heads_within(of_L2(32), bytes, heads);
  return {int((p.Nq + Tiles::Br - 1) / Tiles::Br), int(p.B * p.Hq), section * int(group), true};
}

template <class Tiles, class T, class Kernel>
void launch_keys(Kernel kernel, std::size_t bytes, const Problem& p, const Backward<T>& t,
                 float scale, const Passed& passed, cudaStream_t stream) {
  const Order<int> order = order_of_keys<Tiles>(p, passed);
  allow_shared_memory(kernel, bytes);
  FA_LAUNCH(kernel, dim3(unsigned(order.tiles) * unsigned(order.heads)), dim3(threads), bytes,
            stream, maps_of<Tiles>(p, t), p, passed, order, scale);
}

}  // namespace fa::optimized::two_kernels
