// Rung 7: Hopper's tensor cores read their operands from shared memory themselves, and do not wait.
//
// The idea: with mma.sync a warp loads fragments, multiplies 16 x 8, loads ... For two products of
// rung 6 it issues one ldmatrix and more, and each of four warps reads all of K and V. With wgmma
// the four together multiply 64 x 128, by one instruction for every 16 of d; K and V are never in
// registers. A descriptor says where a tile lies: in the boxes that TMA writes.
//
// What should change: no ldmatrix, no addresses of fragments. What should limit it: nothing
// overlaps yet. The tensor cores wait for the softmax, the softmax for the tensor cores, both for
// the copies.
//
// Measured: 476 TFLOP/s after 316; with a causal mask 433 after 282.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

using T = __nv_bfloat16;

constexpr int D = 128, Br = 64, Bc = 128, threads = 128;

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

__global__ void __launch_bounds__(threads)
    wgmma_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
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
    float S[Bc / 2];
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(S, shared.Q, shared.K);
    wgmma_commit();
    wgmma_wait<0>(S);

    // P_ij, m, l as ever (softmax.cuh); O = alpha O
    if (visible[0] < (j + 1) * Bc) hide(S, visible, j * Bc);
    new_maximum(S, c, m, alpha);
    weights(S, c, m, alpha, l);
    round_to<T>(P, S);
    scale_rows(O, alpha);

    // O += P_ij V_j
    wgmma_fence();
    multiply_add<T, Bc>(O, P, shared.V);
    wgmma_commit();
    wgmma_wait<0>(O);
    __syncthreads();  // K_j and V_j are no longer read
  }

  // O_i = O / l, L_i = (m + log2 l) log 2
  finish(O, m, l, t.LSE, (at.b * p.Hq + at.h) * p.Nq + at.i0, row, at.rows);

  // A warp's 16 rows leave by themselves, through what was the tile of Q.
  T* Oi = shared.Q + 16 * warp * 64;
  store_rows<Br>(maps.O, Oi, O, lane, at.i0, 16 * warp, at.h, at.b);
  if (lane == 0) tma_wait_read();
}

}  // namespace

template <class T>
void launch_wgmma(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const ForwardMaps maps = maps_of(p, t, Br, Bc);
  allow_shared_memory(wgmma_kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(wgmma_kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p, t,
            scale);
}
template void launch_wgmma(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
