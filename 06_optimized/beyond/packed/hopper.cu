// hopper, forward/hopper.cu, for sequences of different lengths, one behind the other in a tensor.
//
// A block takes tile after tile from the list, longest first, and enters its sequence. Roles,
// barriers and the two steps are those of forward/hopper.cu; what TMA cannot bring is fa2's. TMA
// knows where the tensor ends, not the sequence: a last tile of keys comes with the next sequence's
// first ones, hidden, and their V is cleared; of a last tile of queries, rows of the next sequence
// are computed, and not stored.
//
//   Task           which tile of which sequence
//   load, compute  as hopper's, from the sequence's first row on
//   launch         as many blocks as there are SMs; whose turn it is, they count
#include <algorithm>

#include "06_optimized/beyond/packed/sequence.cuh"
#include "06_optimized/forward/bring.cuh"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/forward/shapes.cuh"
#include "06_optimized/forward/softmax.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"

namespace fa::packed {
namespace {

using namespace optimized;

// The numbered barriers: whose turn it is to issue products, one for each group; a group's own,
// when it has filled V with zeros or only looked on.
constexpr int turn = 1, own = 5;

// What a block of threads has to do for one tile of queries: number n / Hq of the list, a head.
struct Task {
  int h = -1;                // head; h < 0: nothing more to do
  int first = 0, rows = 0;   // its rows of Q, in the tensor
  int k0 = 0;                // where the sequence's keys begin
  int length = 0, seen = 0;  // of the mask: row r sees keys [0, r + seen), none past the length
  int blocks = 0;            // of keys that its last row sees, at least one

  __device__ Task(const Problem& p, const Side& side, int Bc, const List& list, int n) {
    const int Hq = int(p.Hq);
    if (n / Hq >= list.most) return;
    const Work& work = list.work[n / Hq];
    if (work.tile < 0) return;
    const int size = side.size_in(work.Nq), i0 = work.tile * size;
    h = n % Hq;
    first = work.q0 + i0;
    rows = min(size, work.Nq - i0);
    k0 = work.k0;
    length = work.Nk;
    seen = i0 + SequenceMask(work, p.causal).ahead;
    blocks = max(1, (visible_keys(rows - 1) + Bc - 1) / Bc);
  }
  // What a row of the tile sees; one past the end counts as the last.
  __device__ int visible_keys(int row) const {
    return max(0, min(min(row, rows - 1) + seen, length));
  }
};

template <class Tiles, class T>
struct Shared {
  alignas(1024) T Q[Tiles::Q_buffers][Tiles::Br * Tiles::D];
  alignas(1024) T K[Tiles::stages][Tiles::Bc * Tiles::D], V[Tiles::stages][Tiles::Bc * Tiles::D];
  alignas(1024) T O[Tiles::O == Through::own ? Tiles::Br * Tiles::D : 64];
  Barrier Q_full[Tiles::Q_buffers], Q_free[Tiles::Q_buffers];
  Barrier K_full[Tiles::stages], K_free[Tiles::stages], V_full[Tiles::stages],
      V_free[Tiles::stages], O_left;
  Task task[Tiles::Q_buffers], next;  // the next one is the loader's own
};

// ---- the loader ----

// Brings tiles as long as there is room for them. K runs one block ahead of V.
template <class Tiles, class T>
__device__ void load(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                     const List& list, int* taken) {
  constexpr int Br = Tiles::Br, Bc = Tiles::Bc;
  Ring<Tiles::Q_buffers> q;
  Ring<Tiles::stages> k, v;
  Ring<1> o;
  constexpr Side side{false, hopper_tile, Br};
  shared.next = Task(p, side, Bc, list, blockIdx.x);
  for (;;) {
    const Task task = shared.next;
    const int hk = int(p.key_head(max(task.h, 0))), last = task.blocks - 1;
    const auto bring_K = [&](int j) {
      wait(&shared.K_free[k.at], k.phase ^ 1);
      bring<Tiles, Bc>(shared.K[k.at], maps.K, &shared.K_full[k.at], task.k0 + j * Bc, hk, 0);
      k.next();
    };
    const auto bring_V = [&](int j) {
      if (Tiles::O == Through::V && j == last) {
        wait(&shared.O_left, o.phase ^ 1);
        o.next();
      }
      wait(&shared.V_free[v.at], v.phase ^ 1);
      bring<Tiles, Bc>(shared.V[v.at], maps.V, &shared.V_full[v.at], task.k0 + j * Bc, hk, 0);
      v.next();
    };
    constexpr bool K_first = Tiles::Q_buffers == 1;  // its buffer is free before that of Q
    if (K_first && task.h >= 0) bring_K(last);
    wait(&shared.Q_free[q.at], q.phase ^ 1);
    shared.task[q.at] = task;
    if (task.h < 0) break;
    bring<Tiles, Br>(shared.Q[q.at], maps.Q, &shared.Q_full[q.at], task.first, task.h, 0);
    q.next();
    if (!K_first) bring_K(last);
    for (int j = last; j > 0; --j) {
      bring_K(j - 1);
      bring_V(j);
    }
    // As late as can be, and early enough to come out of memory while V's buffer is awaited.
    shared.next = Task(p, side, Bc, list, int(gridDim.x) + atomicAdd(taken, 1));
    bring_V(0);
  }
  arrive(&shared.Q_full[q.at]);  // the task that ends it all
}

// ---- the warpgroups that compute, 64 rows each ----

// The warp's 16 rows of O, from row `first` of the tile on, leave as store_rows() does it. Of a
// sequence's last ones, behind which others begin, the lanes carry those that are its own.
template <int Br, int n, class T>
__device__ void leave(const CUtensorMap& map, const View<T>& to, T* from, const float (&O)[n],
                      int d, int lane, const Task& task, int first) {
  put<Br>(from, O, lane);
  fence_async();
  __syncwarp();
  // Said to be uniform. Else, because of the __syncwarp() behind it, ptxas holds that a warp may
  // part here, and the products' addresses leave the uniform registers: the loop has 548
  // instructions, not 473.
  if (const int rows = uniform(task.rows - first); rows < 16) {
#pragma unroll 1
    for (int k = lane; k < rows * (n / 4); k += 32) {
      const int r = k / (n / 4), x = k % (n / 4) * 8;
      if (x < d)
        *reinterpret_cast<uint4*>(to.at(0, task.h, task.first + first + r) + x) =
            *reinterpret_cast<const uint4*>(from + x / 64 * 64 * Br +
                                            swizzled_chunk(r, x % 64 / 8));
    }
    fence_async();
    __syncwarp();
  } else if (lane == 0) {
#pragma unroll
    for (int x = 0; x < 2 * n; x += 64)
      tma_store(map, from + x * Br, x, task.first + first, task.h, 0);
    tma_commit();
  }
}

template <class Tiles, class T>
__device__ void compute(Shared<Tiles, T>& shared, const ForwardMaps& maps, const Problem& p,
                        const Forward<T>& t, float scale) {
  constexpr int D = Tiles::D, Br = Tiles::Br, Bc = Tiles::Bc;
  constexpr bool few_registers = Tiles::groups == 3;  // so that what is known is read again
  const int group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int warp_row = 64 * group + 16 * warp;  // of the tile: where the warp's 16 rows begin
  const int row = warp_row + lane / 4;          // the thread's; the other is 8 below
  const bool leader = threadIdx.x % 128 == 0;
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)
  const Maxima nothing(c);         // seen yet, when a tile begins

  // The groups issue their products in turn: one's softmax runs under the other's products.
  const auto my_turn = [&] { sync(turn + group, 256); };
  const auto next_turn = [&] { arrive(turn + (group + 1) % Tiles::groups, 256); };
  if (group == 0) arrive(turn, 256);  // opens its own: the first turn

  Ring<Tiles::stages> kv;
  Ring<Tiles::Q_buffers> q;
  int tile = 0;  // of those that the block takes: tells where the ring is, in one register
  const auto Q_at = [&] { return few_registers ? tile % Tiles::Q_buffers : q.at; };
  const auto release_Q = [&] { arrive(&shared.Q_free[Q_at()]); };
  bool leaving = false;  // through V: O of the tile before is on its way
  for (;; ++tile, q.next()) {
    wait(&shared.Q_full[Q_at()], few_registers ? tile / Tiles::Q_buffers % 2 : q.phase);
    std::conditional_t<few_registers, const Task&, const Task> task = shared.task[Q_at()];
    if (task.h < 0) break;
    if (Tiles::groups == 3 && 64 * group >= task.rows) {  // no rows: says what others wait for
      for (int n = 0; n < task.blocks; ++n, kv.next()) {
        wait(&shared.K_full[kv.at], kv.phase);
        if (n > 0) my_turn(), next_turn();
        wait(&shared.V_full[kv.at], kv.phase);
        sync(own + group, 128);  // its last warp, too, has found these phases
        if (leader) arrive(&shared.K_free[kv.at]), arrive(&shared.V_free[kv.at]);
      }
      release_Q();
      continue;
    }
    // The group's rows, of each box of 64 columns.
    const T* Qi = shared.Q[Q_at()] + group * 64 * 64;
    int j = task.blocks - 1;

    // S_ij = Q_i K_j^T of the last block; what a tile needs is computed meanwhile
    Maxima maxima = nothing;
    float O[D / 2], l[2] = {0, 0}, alpha[2];
    std::uint32_t P[Bc / 16][4];
    const int full = task.visible_keys(64 * group) / Bc;
    const int visible[2] = {task.visible_keys(row), task.visible_keys(row + 8)};
    const auto hide_unseen = [&](float(&S)[Bc / 2], int block) {
      if constexpr (few_registers) {
        const int again[2] = {task.visible_keys(row), task.visible_keys(row + 8)};
        hide(S, again, block * Bc);
      } else {
        hide(S, visible, block * Bc);
      }
    };
    {
      float S[Bc / 2];
      wait(&shared.K_full[kv.at], kv.phase);
      wgmma_fence();
      multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K[kv.at]);
      wgmma_commit();
      if (Tiles::O == Through::V && leaving && lane == 0) {
        tma_wait_read();
        arrive(&shared.O_left);
      }
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O[i] = 0;
      wgmma_wait<0>(S);
      if (leader) arrive(&shared.K_free[kv.at]);
      hide_unseen(S, j);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      round_to<T>(P, S);
    }
    if (const int seen = task.length - j * Bc; seen < Bc) {
      wait(&shared.V_full[kv.at], kv.phase);
      clear<Tiles>(shared.V[kv.at], seen, own + group);
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
      wgmma_wait<1>(S);
      if (leader) arrive(&shared.K_free[kv.at]);
      if constexpr (decltype(masked)::value) hide_unseen(S, j);
      fast_softmax<Tiles::branch>(S, c, maxima, l, alpha);
      wgmma_wait<0>(O);
      if (leader) arrive(&shared.V_free[before.at]);
      if (!Tiles::scale_under_S) scale_rows(O, alpha);
      round_to<T>(P, S);
    };
    --j;
#pragma unroll 1
    for (; j >= full && j >= 0; --j) step(std::true_type());
#pragma unroll 1
    for (; j >= 0; --j) step(std::false_type());

    // The last O += P V. Q and the task are no longer needed: the next ones may come.
    const Task left = task;
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
    finish(O, maxima.m, l, t.LSE, left.h * p.Nq + left.first, row, left.rows);

    // A warp's 16 rows leave by themselves, through shared memory.
    if constexpr (Tiles::O == Through::V) {
      // The second group's through the last V, when both have read it; the first one's through the
      // V before it, which both have read long ago. Nobody fills them until O has left.
      static_assert(Tiles::groups == 2 && Tiles::stages == 2);
      const int at = group == 0 ? last.at ^ 1 : last.at;
      wait(&shared.V_free[at], group == 0 && last.at == 0 ? last.phase ^ 1 : last.phase);
      leave<64>(maps.O, t.O, shared.V[at] + 16 * warp * 64, O, int(p.d), lane, left, warp_row);
      leaving = true;
    } else {
      if (lane == 0) tma_wait_read();
      __syncwarp();  // what was there has left
      leave<Br>(maps.O, t.O, shared.O + warp_row * 64, O, int(p.d), lane, left, warp_row);
    }
  }
  if (lane == 0) tma_wait_read();
}

template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::threads, 1)
    hopper_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                  const __grid_constant__ Forward<T> t, const __grid_constant__ List list,
                  int* taken, float scale) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<Tiles, T>);
  if (threadIdx.x == 0) {
    init(shared.Q_full, shared.Q_free, 128 * Tiles::groups);
    init(shared.K_full, shared.K_free, Tiles::groups);
    init(shared.V_full, shared.V_free, Tiles::groups);
    init(&shared.O_left, 4 * Tiles::groups);
    fence_barriers();
  }
  __syncthreads();
  offsets_or_list_are_done();
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<Tiles::loader_registers>();
    if (threadIdx.x < 32 && elected()) load<Tiles>(shared, maps, p, list, taken);
  } else {
    take_registers<Tiles::registers>();
    compute<Tiles>(shared, maps, p, t, scale);
  }
}

template <class Tiles, class T>
void launch(const Problem& p, const Forward<T>& t, const List& list, int* taken, float scale,
            cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(Shared<Tiles, T>);
  static_assert(bytes <= most_shared);
  Problem one = p;  // the tensors have no batch
  one.B = 1;
  const ForwardMaps maps = maps_of(one, t, Tiles::Br, Tiles::Bc);
  const auto kernel = hopper_kernel<Tiles, T>;
  allow_shared_memory(kernel, bytes);
  const std::int64_t tiles = list.most * p.Hq;
  const int blocks = int(std::min<std::int64_t>(processors(), tiles));
  FA_LAUNCH_EARLY(kernel, dim3(unsigned(blocks)), dim3(Tiles::threads), bytes, stream, maps, p, t,
                  list, taken, scale);
}

}  // namespace

// Why this kernel does not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Forward<T>& t) {
  const bool maps = p.Nk > 0 && p.d % 8 == 0 && has_tensor_map(t.Q, 1, p.Hq, p.Nq) &&
                    has_tensor_map(t.K, 1, p.Hkv, p.Nk) && has_tensor_map(t.V, 1, p.Hkv, p.Nk) &&
                    has_tensor_map(t.O, 1, p.Hq, p.Nq);
  return maps ? "" : "hopper wants keys, d a multiple of 8, and rows at multiples of 16 bytes";
}

template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, const Side& queries, const List& list,
                   int* taken, float scale, cudaStream_t stream) {
  if (p.d > 128) return launch<D256>(p, t, list, taken, scale, stream);
  if (p.d > 64) return launch<D128>(p, t, list, taken, scale, stream);
  if (queries.tall == D64::Br) return launch<D64>(p, t, list, taken, scale, stream);
  launch<D64Short>(p, t, list, taken, scale, stream);
}

#define FA_FOR(T)                                                                                \
  template std::string not_for_hopper(const Problem&, const Forward<T>&);                        \
  template void launch_hopper(const Problem&, const Forward<T>&, const Side&, const List&, int*, \
                              float, cudaStream_t)
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::packed
