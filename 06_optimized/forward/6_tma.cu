// Rung 6: Hopper's copy engine fills shared memory, and one thread is enough to ask it.
//
// The idea: in rung 5 every thread carries. It computes addresses, starts copies of 16 bytes, finds
// the swizzled place of each chunk, and says where the tensor ends. The copy engine ("TMA") does
// all of that: one thread names a tensor and where a tile begins in it, and the tile comes,
// swizzled, with zeros beyond the end; a barrier in shared memory counts its bytes. Products stay
// mma.sync. But a warp has 16 rows again, as in rung 3, and K_j and V_j are asked for when they are
// needed: a frame to which the next rungs add.
//
// What should change: no address, no copy and no test for the end is left in the loop. What should
// limit it: the fragments. With 16 rows a warp reads K and V from shared memory for half as many
// products as in rung 5, and nothing but a second block on the SM hides the copies.
//
// Measured: 316 TFLOP/s after 333 of fa2. A loss: see the page.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {
namespace {

using T = __nv_bfloat16;

constexpr int D = 128, Br = 64, Bc = 128, threads = 128;  // 4 warps of 16 rows each

struct Shared {
  alignas(1024) T Q[Br * D], K[Bc * D], V[Bc * D];
  Barrier Q_full, KV_full;
};
static_assert(sizeof(Shared) <= most_shared);

// Asks for a tile of `rows` rows, from row `first` of head h on.
template <int rows>
__device__ void bring(T* tile, const CUtensorMap& map, Barrier* full, int first, int h, int b) {
  arrive_expecting(full, rows * D * int(sizeof(T)));
#pragma unroll
  for (int x = 0; x < D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
}

// Where chunk c of row r begins in a tile of `rows` rows that TMA has brought: boxes of 64 columns,
// swizzled.
template <int rows>
__device__ const T* chunk(const T* tile, int r, int c) {
  return tile + c / 8 * rows * 64 + swizzled_chunk(r, c % 8);
}

// Columns 8 j to 8 j + 7 of S or O: a fragment C of mma.sync.
template <int n>
__device__ auto columns(float (&X)[n], int j) -> float (&)[4] {
  return reinterpret_cast<float(&)[4]>(X[4 * j]);
}

__global__ void __launch_bounds__(threads)
    tma_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
               const __grid_constant__ Forward<T> t, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&shared.Q_full, 1);
    init(&shared.KV_full, 1);
    fence_barriers();
  }
  __syncthreads();

  const Place at(p, Br, blockIdx.x);
  const int hk = int(p.key_head(at.h)), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = 16 * warp + lane / 4;  // of the tile; the other is 8 below
  const RowChunk by_rows = ldmatrix_by_rows(lane), by_columns = ldmatrix_by_columns(lane);
  const Mask mask(p, at.b);
  const int visible[2] = {int(mask.visible_keys(at.i0 + min(row, at.rows - 1))),
                          int(mask.visible_keys(at.i0 + min(row + 8, at.rows - 1)))};
  const int blocks = max(1, (int(mask.visible_keys(at.i0 + at.rows - 1)) + Bc - 1) / Bc);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  if (threadIdx.x == 0) bring<Br>(shared.Q, maps.Q, &shared.Q_full, at.i0, at.h, at.b);
  wait(&shared.Q_full, 0);

  float O[D / 2] = {}, m[2] = {no_key, no_key}, l[2] = {0, 0}, alpha[2];
  std::uint32_t P[Bc / 16][4];
  for (int j = 0, phase = 0; j < blocks; ++j, phase ^= 1) {
    // K_j and V_j: one barrier, two copies
    if (threadIdx.x == 0) {
      arrive_expecting(&shared.KV_full, 2 * Bc * D * int(sizeof(T)));
      for (int x = 0; x < D; x += 64) {
        tma_load(shared.K + x * Bc, maps.K, &shared.KV_full, x, j * Bc, hk, at.b);
        tma_load(shared.V + x * Bc, maps.V, &shared.KV_full, x, j * Bc, hk, at.b);
      }
    }
    wait(&shared.KV_full, phase);

    // S_ij = Q_i K_j^T
    float S[Bc / 2] = {};
#pragma unroll
    for (int x = 0; x < D / 8; x += 2) {
      std::uint32_t Q16[4], K16[4];
      ldmatrix(Q16, chunk<Br>(shared.Q, 16 * warp + by_rows.row, x + by_rows.chunk));
#pragma unroll
      for (int y = 0; y < Bc / 8; y += 2) {
        ldmatrix(K16, chunk<Bc>(shared.K, 8 * y + by_columns.row, x + by_columns.chunk));
        mma<T>(columns(S, y), Q16, K16[0], K16[1]);
        mma<T>(columns(S, y + 1), Q16, K16[2], K16[3]);
      }
    }

    // P_ij, m, l as ever (softmax.cuh); O = alpha O
    if (visible[0] < (j + 1) * Bc) hide(S, visible, j * Bc);
    new_maximum(S, c, m, alpha);
    weights(S, c, m, alpha, l);
    round_to<T>(P, S);
    scale_rows(O, alpha);

    // O += P_ij V_j
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
#pragma unroll
      for (int y = 0; y < D / 8; y += 2) {
        std::uint32_t V16[4];
        ldmatrix_transposed(V16, chunk<Bc>(shared.V, 16 * k + by_rows.row, y + by_rows.chunk));
        mma<T>(columns(O, y), P[k], V16[0], V16[1]);
        mma<T>(columns(O, y + 1), P[k], V16[2], V16[3]);
      }
    fence_async();    // ordinary reads, and then the copy engine's writes
    __syncthreads();  // K_j and V_j are no longer read
  }

  // O_i = O / l, L_i = (m + log2 l) log 2. A row without keys has l = 0: O = 0 and L = -inf.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = row_sum(l[r]);
    if (t.LSE && lane % 4 == 0 && row + 8 * r < at.rows)
      t.LSE[(at.b * p.Hq + at.h) * p.Nq + at.i0 + row + 8 * r] =
          l[r] == 0 ? -INFINITY : (m[r] + __log2f(l[r])) * (1 / log2_e);
    divide(r, O, l[r]);
  }

  // A warp's 16 rows leave by themselves, through what was the tile of Q.
  T* Oi = shared.Q + 16 * warp * 64;
  put<Br>(Oi, O, lane);
  fence_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int x = 0; x < D; x += 64)
      tma_store(maps.O, Oi + x * Br, x, at.i0 + 16 * warp, at.h, at.b);
    tma_commit();
    tma_wait_read();
  }
}

}  // namespace

template <class T>
void launch_tma(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const ForwardMaps maps = maps_of(p, t, Br, Bc);
  allow_shared_memory(tma_kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(tma_kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p, t,
            scale);
}
template void launch_tma(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
