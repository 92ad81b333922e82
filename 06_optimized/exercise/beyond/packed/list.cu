// Practice 06, level 1, of beyond/packed/list.cu. Keep the marks; ./learn practice 06
// Which tiles there are, and in which order blocks take them.
//
//   offsets_kernel   a warp for the queries' offsets, one for the keys': their running maximum
//   list_kernel      a warp for each place where a tile could be. It finds its tile, counts those
//                    that come before it, and writes it there: nobody waits for another warp
//
// A sequence of n tokens, cut into tiles of `size`, may take one tile more than n / size. So let
// the places of sequence b begin at offset_b / size + b: they reach up to those of the next one,
// and all of them are at most N / size + B, which the host knows. Some stay empty; in sequences
// with tall tiles more do.
#include <algorithm>

#include "06_optimized/beyond/packed/sequence.cuh"

namespace fa::packed {
namespace {

constexpr int lanes = 32, warps = 4;

// An offset counts as the largest up to it, in [0, total]. A lane has a stretch of them.
__global__ void offsets_kernel(Problem p, Sequences s, std::int32_t* to) {
  next_may_start();
  const int lane = threadIdx.x % lanes, n = int(p.B) + 1, stretch = (n + lanes - 1) / lanes;
  const bool keys = threadIdx.x >= lanes;
  if (threadIdx.x == 0) to[2 * n] = 0;
  const std::int32_t* from = keys ? s.keys : s.queries;
  const int total = int(keys ? p.Nk : p.Nq), end = min((lane + 1) * stretch, n);
  if (keys) to += n;
  int largest = 0;
#pragma unroll 8
  for (int b = lane * stretch; b < end; ++b) largest = max(largest, min(from[b], total));
  for (int by = 1; by < lanes; by *= 2) {
    const int of_earlier = __shfl_sync(0xffffffff, largest, max(lane - by, 0));
    if (lane >= by) largest = max(largest, of_earlier);
  }
  const int of_earlier = __shfl_sync(0xffffffff, largest, max(lane - 1, 0));
  int now = lane == 0 ? 0 : of_earlier;
#pragma unroll 8
  for (int b = lane * stretch; b < end; ++b) {
    now = max(now, min(from[b], total));
    to[b] = now;
  }
}

__device__ Sequence sequence(const std::int32_t* offsets, int B, int b) {
  const std::int32_t *q = offsets + b, *k = offsets + B + 1 + b;
  return {q[0], q[1] - q[0], k[0], k[1] - k[0]};
}

// A sequence cut into tiles, of its queries or of its keys.
struct Cut {
  SequenceMask mask;
  bool keys;
  int size;

  __device__ Cut(const Problem& p, const Sequence& s, const Side& side)
      : mask(s, p.causal), keys(side.keys), size(side.size_in(keys ? s.Nk : s.Nq)) {}
  __device__ int tiles() const {
    const int rows = keys ? mask.Nk : mask.Nq;
    return (rows + size - 1) / size;
  }
  // What a tile passes over: the keys that its last query sees, or the queries that see its first
  // key.
  __device__ int work(int tile) const {
    const int first = tile * size;
    return keys ? mask.Nq - mask.first_row(first)
                : mask.visible_keys(min(first + size, mask.Nq) - 1);
  }
  __device__ int most_work() const { return tiles() == 0 ? 0 : work(keys ? 0 : tiles() - 1); }
  // How many tiles have more work than w. Along a sequence work never grows, or never falls.
  __device__ int with_more(int w) const {
    if (keys) {  // those whose first key is seen by the (w + 1)th query from the end
      const int row = mask.Nq - 1 - w;
      return row < 0 ? 0 : (mask.visible_keys(row) + size - 1) / size;
    }
    const int row = mask.first_row(w);  // the first one that sees key w
    return row >= mask.Nq ? 0 : tiles() - row / size;
  }
};

__global__ void list_kernel(Problem p, const std::int32_t* offsets,
                            const __grid_constant__ Lists lists) {
  const auto& [side, order, list] = lists.of[blockIdx.y];
  next_may_start();
  offsets_or_list_are_done();
  const int lane = threadIdx.x % lanes, B = int(p.B);
  const int place = int(blockIdx.x) * warps + int(threadIdx.x) / lanes;
  if (place >= list.most) return;  // a warp as a whole

  // The last sequence whose places do not begin behind this one.
  const std::int32_t* begin = offsets + (side.keys ? B + 1 : 0);
  int mine = 0, behind = B;
  for (int step = 0; step < 31 && behind - mine > 1; ++step) {
    const int middle = (mine + behind) / 2;
    // [step 06.40: on which side of `middle` is it? (1 line)]
    // TODO
    // [end]
  }
  const int tile = place - (begin[mine] / side.size + mine);
  const Sequence s = sequence(offsets, B, mine);
  const Cut cut(p, s, side);
  const bool there = tile >= 0 && tile < cut.tiles();  // below 0: before the first offset
  const int work = there ? cut.work(tile) : 0, most_work = cut.most_work();

  // Of every other sequence all tiles that come before this one; of its own, those with more work.
  // And places before this one that stay empty: they are listed behind all tiles.
  int before = 0, all = 0, empty = lane == 0 ? place : 0;
  for (int b = lane; b < B; b += lanes) {
    const Cut other(p, sequence(offsets, B, b), side);
    const int tiles = other.tiles(), most_there = other.most_work();
    const bool first_of_equals = b < mine;
    int earlier = 0;
    if (b == mine) {
      earlier = side.keys ? tile : tiles - 1 - tile;
    } else if (order == Order::given) {
      earlier = b < mine ? tiles : 0;
    } else if (order == Order::sequences) {
      // [step 06.41: its tiles, if its longest has more work, or as much and comes first (2 lines)]
      // TODO
      // [end]
    } else if (work > 0 || !first_of_equals) {
      earlier = other.with_more(first_of_equals ? work - 1 : work);
    } else {
      earlier = tiles;
    }
    before += earlier;
    all += tiles;
    empty -= b < mine ? tiles : b == mine ? max(0, min(tile, tiles)) : 0;
  }
  for (int bits = lanes / 2; bits > 0; bits /= 2) {
    before += __shfl_xor_sync(0xffffffff, before, bits);
    all += __shfl_xor_sync(0xffffffff, all, bits);
    empty += __shfl_xor_sync(0xffffffff, empty, bits);
  }
  if (lane == 0) list.work[there ? before : all + empty] = {s, mine, there ? tile : -1};
}

}  // namespace

void launch_offsets(const Problem& p, const Sequences& s, std::int32_t* to, cudaStream_t stream) {
  FA_LAUNCH(offsets_kernel, dim3(1), dim3(2 * lanes), 0, stream, p, s, to);
}

void launch_lists(const Problem& p, const std::int32_t* offsets, const Lists& lists,
                  cudaStream_t stream) {
  int most = 0;
  for (int i = 0; i < lists.count; ++i) most = std::max(most, lists.of[i].list.most);
  const dim3 blocks(unsigned((most + warps - 1) / warps), unsigned(lists.count));
  const dim3 threads(lanes * warps);
  if (optimized::built_for_9_0(list_kernel))  // then it waits itself
    FA_LAUNCH_EARLY(list_kernel, blocks, threads, 0, stream, p, offsets, lists);
  else
    FA_LAUNCH(list_kernel, blocks, threads, 0, stream, p, offsets, lists);
}

}  // namespace fa::packed
