// Rung 3 of the backward, dK and dV for 128 < d <= 256: each warpgroup makes one of the two.
//
// The idea: for d = 256, dK and dV of 64 keys fill half of the registers of both warpgroups, and 64
// rows are the least that a warpgroup multiplies. If the two shared the queries or the columns, all
// of P and dS would go through shared memory, and both would stop at each tile. So one warpgroup
// makes P^T and adds up dV, the other makes dS^T and adds up dK; each feeds its sum from its own
// registers. All that passes between them is P, in one direction.
//
//   first     S^T = K Q^T     P^T = 2^(c S^T - LSE2)     dV += P^T dO
//   second    dP^T = V dO^T             dS^T = P^T o (dP^T - D)     dK += dS^T Q
//
// They need not wait for each other twice: the second is half a tile behind, and while one computes
// exponentials or differences the tensor cores work for the other.
//
// What should change: nothing for d <= 128. Above, a tile of 64 queries costs the tensor cores 2048
// cycles and shared memory 2304: 192 KB of operands, 64 KB that arrive, 32 KB of P. If the seven
// products of both kernels reach 600 TFLOP/s, 430 are counted.
//
// Measured, both kernels, d = 256, N = 4096: 466 TFLOP/s, 1.27 of cuDNN.
//
// hopper_wide.cu has it keep dS for its own second kernel.
#include "06_optimized/backward/3_two_kernels.cuh"
#include "06_optimized/backward/kept.cuh"

namespace fa::optimized::two_kernels {
namespace {

struct Tiles {
  static constexpr int D = 256, Br = 64, Bc = 64;
};

template <class T>
struct WideShared : KeyShared<Tiles, T> {
  alignas(128) float P[stages][Tiles::Br * Tiles::Bc];  // from one warpgroup to the other
};

// Two numbered barriers for each of those buffers; 1 and 2 are each group's own.
constexpr int P_full = 3, P_free = 5;
static_assert(stages == 2);  // so is the other buffer at.at ^ 1

// The first warpgroup: makes P, sends it to the second, and adds up dV.
template <class T>
__device__ void compute_dv(WideShared<T>& shared, const Maps& maps, float scale) {
  const KeyTask& task = shared.task;
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, x0 = 2 * (lane % 4);
  const float c = scale * log2_e;
  const int j = task.j0 + thread / 32 * 16 + lane / 4;
  const int first_row[2] = {task.first_row(j), task.first_row(j + 8)};
  const int all_seen = task.first_row(task.j0 + Bc - 1);  // from this row on nothing is hidden
  const int tiles = task.tiles();

  float dV[D / 2];
#pragma unroll
  for (int e = 0; e < D / 2; ++e) dV[e] = 0;
  std::uint32_t P[Br / 16][4];
  wait(&shared.KV_full, 0);
  Ring<stages> at;
  int i = task.first;
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    // S^T = K Q^T is issued while dV of the tile before is under way; then that tile may go.
    float S[Br / 2];
    wait(&shared.Q_full[at.at], at.phase);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(S, shared.K, shared.Q[at.at]);
    wgmma_commit();
    wgmma_wait<1>(dV);
    if (thread == 0 && n > 0) arrive(&shared.free[at.at ^ 1]);
    wgmma_wait<0>(S);

    // P^T
    weights_transposed(S, S, c, shared.LSE2[at.at] + x0);
    fence_async();  // LSE2 has been read: the copy engine may write there
    if (i * Br < all_seen) {
      const int begin[2] = {first_row[0] - i * Br - x0, first_row[1] - i * Br - x0};
      hide(S, begin);
    }
    round_to<T>(P, S);

    // dV += P^T dO. Meanwhile P goes, in fp32, to the same thread of the other warpgroup.
    wait(&shared.dO_full[at.at], at.phase);
    wgmma_fence();
    multiply_add<T, Br>(dV, P, shared.dO[at.at]);
    wgmma_commit();
    if (n > 1) sync(P_free + at.at, 256);
    float4* to = reinterpret_cast<float4*>(shared.P[at.at]) + thread;
#pragma unroll
    for (int e = 0; e < Br / 2; e += 4)
      to[e / 4 * 128] = make_float4(S[e], S[e + 1], S[e + 2], S[e + 3]);
    arrive(P_full + at.at, 256);
    at.next();
    if (++i == task.end) i = task.first;  // of the next head
  }
  wgmma_wait<0>(dV);
  store<Bc>(shared.K, dV, 1, maps.dV, task.j0, task.h, task.b);
}

// The second: takes P, makes dS, and adds up dK.
template <bool keeps, class T>
__device__ void compute_dk(WideShared<T>& shared, const Maps& maps, const Passed& passed, int Hq,
                           float scale) {
  const KeyTask& task = shared.task;
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, x0 = 2 * (lane % 4);
  const int j = task.j0 + thread / 32 * 16 + lane / 4;
  const int first_row[2] = {task.first_row(j), task.first_row(j + 8)};
  const int all_seen = task.first_row(task.j0 + Bc - 1);  // from this row on nothing is hidden
  const int tiles = task.tiles();

  float dK[D / 2];
#pragma unroll
  for (int e = 0; e < D / 2; ++e) dK[e] = 0;
  std::uint32_t dS[Br / 16][4];
  wait(&shared.KV_full, 0);
  Ring<stages> at;
  int i = task.first, head = task.b * Hq + task.h * task.heads;
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    // dP^T = V dO^T, while dK of the tile before is under way
    float dP[Br / 2], P[Br / 2];
    wait(&shared.dO_full[at.at], at.phase);
    wgmma_fence();
    multiply_transposed<T, D, Bc, Br>(dP, shared.V, shared.dO[at.at]);
    wgmma_commit();
    wgmma_wait<1>(dK);
    if (thread == 0 && n > 0) arrive(&shared.free[at.at ^ 1]);
    wgmma_wait<0>(dP);

    // dS^T
    sync(P_full + at.at, 256);
    const float4* from = reinterpret_cast<const float4*>(shared.P[at.at]) + thread;
#pragma unroll
    for (int e = 0; e < Br / 2; e += 4) {
      const float4 four = from[e / 4 * 128];
      P[e] = four.x, P[e + 1] = four.y, P[e + 2] = four.z, P[e + 3] = four.w;
    }
    if (n + 2 < tiles) arrive(P_free + at.at, 256);
    wait(&shared.Q_full[at.at], at.phase);
    differences_transposed(P, dP, shared.D[at.at] + x0);
    fence_async();  // so has D
    if (i * Br < all_seen) {
      const int begin[2] = {first_row[0] - i * Br - x0, first_row[1] - i * Br - x0};
      hide(P, begin);
    }
    round_to<T>(dS, P);
    if constexpr (keeps)  // before the product, whose registers they are until it has ended
      keep(kept_block<T>(passed, head, i * Br, task.j0 / Bc - passed.kept_first), dS, thread / 32,
           lane);

    // dK += dS^T Q
    wgmma_fence();
    multiply_add<T, Br>(dK, dS, shared.Q[at.at]);
    wgmma_commit();
    at.next();
    if (++i == task.end) i = task.first, ++head;  // the next head
  }
  wgmma_wait<0>(dK);
  store<Bc>(shared.V, dK, scale, maps.dK, task.j0, task.h, task.b);
}

template <bool keeps, class T>
__global__ void __launch_bounds__(threads, 1)
    wide_dkv_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                    const __grid_constant__ Passed passed, const __grid_constant__ Order<int> order,
                    float scale) {
  auto& shared = FA_DYNAMIC_SHARED(WideShared<T>);
  if (threadIdx.x == 0) {
    shared.start(KeyTask::of<Tiles>(p, order, keeps ? passed.kept_first : 0));
    fence_barriers();
  }
  __syncthreads();
  const int group = uniform(threadIdx.x / 128);
  if (group == 0) {
    give_registers<loader_registers>();
    if (threadIdx.x < 32 && elected()) load(shared, maps, passed, int(p.Hq));
  } else {
    take_registers<registers>();
    if (group == 1)
      compute_dv(shared, maps, scale);
    else
      compute_dk<keeps>(shared, maps, passed, int(p.Hq), scale);
  }
}

}  // namespace

template <class T>
void launch_wide_dkv(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                     cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(WideShared<T>);
  static_assert(bytes <= most_shared);
  const auto kernel = passed.kept ? wide_dkv_kernel<true, T> : wide_dkv_kernel<false, T>;
  launch_keys<Tiles>(kernel, bytes, p, t, scale, passed, stream);
}

template void launch_wide_dkv(const Problem&, const Backward<__half>&, float, const Passed&,
                              cudaStream_t);
template void launch_wide_dkv(const Problem&, const Backward<__nv_bfloat16>&, float, const Passed&,
                              cudaStream_t);

}  // namespace fa::optimized::two_kernels
