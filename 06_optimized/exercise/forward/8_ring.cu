// Practice 06, level 1, of forward/8_ring.cu. Keep the marks; ./learn practice 06
// Rung 8: a ring of buffers. A barrier for each buffer says "full", another "free", and a warp of
// its own does nothing but bring tiles.
//
// The idea: rung 7 asks for a tile when it needs it. Here the loader runs ahead: it waits until a
// buffer is free, asks TMA to fill it, goes on to the next. The warpgroup that
// computes waits until a buffer is full, uses it, says that it is free. The loop has no
// __syncthreads any more, and K and V have barriers of their own: K_j is free again while V_j is
// still to be used.
//
// What should change: the time of a copy disappears behind the work on the tile before. The softmax
// still stands between two products.
//
// Measured: 589 TFLOP/s after 476.
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::optimized {
namespace {

using T = __nv_bfloat16;

constexpr int D = 128, Br = 64, Bc = 128;
constexpr int K_stages = 2, V_stages = 1;  // 112 KiB: two blocks share an SM
constexpr int threads = 128 + 32;          // a warpgroup that computes, a warp that loads

struct Shared {
  alignas(1024) T Q[Br * D], K[K_stages][Bc * D], V[V_stages][Bc * D];
  Barrier Q_full, K_full[K_stages], K_free[K_stages], V_full[V_stages], V_free[V_stages];
};
static_assert(sizeof(Shared) <= most_shared);

// Asks for a tile of `rows` rows, from row `first` of head h on.
template <int rows>
__device__ void bring(T* tile, const CUtensorMap& map, Barrier* full, int first, int h, int b) {
  arrive_expecting(full, rows * D * int(sizeof(T)));
#pragma unroll
  for (int x = 0; x < D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
}

__device__ void load(Shared& shared, const ForwardMaps& maps, const Problem& p, const Place& at,
                     int blocks) {
  const int hk = int(p.key_head(at.h));
  bring<Br>(shared.Q, maps.Q, &shared.Q_full, at.i0, at.h, at.b);
  Ring<K_stages> k;
  Ring<V_stages> v;
  for (int j = 0; j < blocks; ++j, k.next(), v.next()) {
    // [step 06.10: bring K_j and V_j; what must each wait for? (4 lines)]
    // TODO
    // [end]
  }
}

__device__ void compute(Shared& shared, const ForwardMaps& maps, const Problem& p,
                        const Forward<T>& t, const Place& at, float scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = 16 * warp + lane / 4;  // of the tile; the other is 8 below
  const Mask mask(p, at.b);
  const int visible[2] = {int(mask.visible_keys(at.i0 + min(row, at.rows - 1))),
                          int(mask.visible_keys(at.i0 + min(row + 8, at.rows - 1)))};
  const int blocks = max(1, (int(mask.visible_keys(at.i0 + at.rows - 1)) + Bc - 1) / Bc);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  float O[D / 2] = {}, m[2] = {no_key, no_key}, l[2] = {0, 0}, alpha[2];
  std::uint32_t P[Bc / 16][4];
  wait(&shared.Q_full, 0);
  Ring<K_stages> k;
  Ring<V_stages> v;
  for (int j = 0; j < blocks; ++j, k.next(), v.next()) {
    // S_ij = Q_i K_j^T
    float S[Bc / 2];
    // [step 06.11: when K_j is there, multiply; when S is there, K_j is free (6 lines)]
    // TODO
    // [end]

    // P_ij, m, l as ever (softmax.cuh); O = alpha O
    if (visible[0] < (j + 1) * Bc) hide(S, visible, j * Bc);
    new_maximum(S, c, m, alpha);
    weights(S, c, m, alpha, l);
    round_to<T>(P, S);
    scale_rows(O, alpha);

    // O += P_ij V_j
    // [step 06.12: the same with V_j (6 lines)]
    // TODO
    // [end]
  }

  // O_i = O / l, L_i = (m + log2 l) log 2
  finish(O, m, l, t.LSE, (at.b * p.Hq + at.h) * p.Nq + at.i0, row, at.rows);

  // A warp's 16 rows leave by themselves, through what was the tile of Q.
  T* Oi = shared.Q + 16 * warp * 64;
  store_rows<Br>(maps.O, Oi, O, lane, at.i0, 16 * warp, at.h, at.b);
  if (lane == 0) tma_wait_read();
}

__global__ void __launch_bounds__(threads)
    ring_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                const __grid_constant__ Forward<T> t, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&shared.Q_full, 1);
    init(shared.K_full, shared.K_free, 128);  // every thread says so
    init(shared.V_full, shared.V_free, 128);
    fence_barriers();
  }
  __syncthreads();
  const Place at(p, Br, blockIdx.x);
  if (threadIdx.x < 128) {
    compute(shared, maps, p, t, at, scale);
  } else if (elected()) {
    const int seen = int(Mask(p, at.b).visible_keys(at.i0 + at.rows - 1));
    load(shared, maps, p, at, max(1, (seen + Bc - 1) / Bc));
  }
}

}  // namespace

template <class T>
void launch_ring(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream) {
  const ForwardMaps maps = maps_of(p, t, Br, Bc);
  allow_shared_memory(ring_kernel, sizeof(Shared));
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(ring_kernel, dim3(unsigned(blocks)), dim3(threads), sizeof(Shared), stream, maps, p, t,
            scale);
}
template void launch_ring(const Problem&, const Forward<__nv_bfloat16>&, float, cudaStream_t);

}  // namespace fa::optimized
