// Sequences of different lengths, one behind the other in the same tensor: nothing is padded, so
// nothing padded is read, computed or stored.
//
// The sequences' offsets are in device memory, so the host does not know how many tiles there are,
// nor whose. Small kernels write a list of them before the others run: a block looks up its tile,
// enters that sequence, and works as if it were alone. Tiles that have most to do come first.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstddef>
#include <cstdint>
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::packed {

template <class T>
inline constexpr int widest = sizeof(T) == 4 ? 128 : 256;  // d, at most

// Where the sequences are. Sequence b has queries [queries[b], queries[b + 1]) and keys
// [keys[b], keys[b + 1]); it may have none of either. On the GPU an offset counts as at least 0, at
// most the tensor's length, and at least as much as any before it. What lies before the first or
// behind the last offset belongs to no sequence: it does not matter, and is not written.
struct Sequences {
  const std::int32_t *queries = nullptr, *keys = nullptr;  // [B + 1], in device memory
  // The same in host memory, or null. If they are there, what is wrong with them is said in words,
  // and hopper's forward has the tiles that suit the longest sequence; else those for the mean.
  const std::int32_t *queries_on_host = nullptr, *keys_on_host = nullptr;
};

// In which order blocks take the tiles. In a sequence it is always the tile with most work first.
enum class Order {
  automatic,  // fa2, swizzle: few tiles, and d > 64: `tiles`, so that the last ones are short;
              // else `sequences`
  sequences,  // the sequence with the longest tile first; of equal ones the one before
  tiles,      // the longest tile of all sequences first
  given,      // as the sequences lie in memory
};

// In 16 bits; fp32 has one kernel, whatever this says. hopper is for 9.0 alone, d a multiple of 8
// (in the backward at most 128), tensors whose addresses and strides are multiples of 16 bytes. Its
// backward adds dQ up in any order.
enum class Kernel {
  best,  // hopper if it can run, and need not be deterministic; else fa2
  fa2,   // and for the backward swizzle: compute capability 8.0 and later
  hopper
};

struct Options {
  Order order = Order::automatic;
  cudaStream_t stream = nullptr;
  // scratch_bytes(), backward_scratch_bytes() of device memory, aligned to 16
  Scratch scratch = {};
  Kernel kernel = Kernel::best;
  bool deterministic = false;  // dQ, too, has the same bits in every run
};

// Bytes of scratch: the list of tiles, 24 bytes for each; in the backward two of them, and one
// number (fp32) or two (fp16, bf16; rows padded to 128 in every sequence) for each row of Q. For
// hopper's backward also one in fp32 for each number of Q.
template <class T>
std::size_t scratch_bytes(const Problem& p);
template <class T>
std::size_t backward_scratch_bytes(const Problem& p);

// O = softmax(scale Q K^T + mask) V in every sequence. T is float (kernel `tiled`, d <= 128), or
// __half or __nv_bfloat16 (tensor cores, compute capability 8.0 and later, d <= 256, scale > 0, and
// every score times scale log2 e must be finite in fp32).
//
// p.B is the number of sequences, p.Nq that of all queries, p.Nk that of all keys. The tensors have
// no batch (View::batch is not used): Q is [Hq, Nq, d] by its strides, so that memory [Nq, Hq, d]
// has head = d and row = Hq d. LSE is [Hq, Nq] without gaps. p.causal holds in each sequence for
// itself: bottom_right ends at its own last key. p.key_lengths must be null: the offsets say it.
//
// A sequence gets the same bits whatever else is in the batch, in every order and run, but for dQ
// of hopper; in fp16 and bf16 they are those that `fa2` or `hopper` (with 64 < d <= 128 under 6144
// keys, since it has taller tiles beyond) and the backward's `swizzle` give it alone.
//
// Throw std::invalid_argument, before any write, for arguments outside of this, and fa::CudaError
// where CUDA fails. They do not see whether scratch or offsets overlap another tensor. They put
// their work on the stream and return at once.
template <class T>
void forward(const Problem& p, const Sequences& s, const Forward<T>& t,
             const Options& options = {});

// dQ, dK, dV from O, LSE and dO. Any finite scale. A key that no query sees gets 0. dK and dV have
// the same bits in every run, dQ with all but hopper.
template <class T>
void backward(const Problem& p, const Sequences& s, const Backward<T>& t,
              const Options& options = {});

// ---- what the files of this walk give each other ----------------------------------------------

// One sequence of the batch: where it begins, and how much it has.
struct Sequence {
  int q0, Nq, k0, Nk;
};
struct Work : Sequence {
  int number, tile;  // of the sequence; of its tiles

  // Its first row in Passed: rows of every sequence are padded to a multiple of 128.
  FA_HOST_DEVICE std::int64_t padded_row() const { return padded_row(q0, number); }
  FA_HOST_DEVICE static std::int64_t padded_row(std::int64_t q0, std::int64_t number) {
    return (q0 / 128 + number) * 128;
  }
};
// Of queries, or of keys: tiles of `size`, or `tall` in long sequences; at most `most` of all
// sequences.
inline constexpr int long_sequence = 1024;  // are those of more
struct Side {
  bool keys;
  int size, tall = 0;  // 0: there are none
  FA_HOST_DEVICE int size_in(int sequence) const {
    return tall > 0 && sequence > long_sequence ? tall : size;
  }
  std::int64_t most(const Problem& p) const { return (keys ? p.Nk : p.Nq) / size + p.B; }
};
// Each tile once, in its order. Behind the last one tile = -1.
struct List {
  Work* work;  // [most]
  int most;    // Side::most
};

// to[0 ... B] and to[B + 1 ... 2 B + 1]: the offsets as they count. to[2 B + 2]: 0, for who counts.
void launch_offsets(const Problem& p, const Sequences& s, std::int32_t* to, cudaStream_t stream);
// What to list: not Order::automatic. One launch lists up to two, and each has a row of its grid.
struct ToList {
  Side side;
  Order order;
  List list;
};
struct Lists {
  ToList of[2];
  int count;
};
// Launched while the kernel before it is at work, where that is possible.
void launch_lists(const Problem& p, const std::int32_t* offsets, const Lists& lists,
                  cudaStream_t stream);

using optimized::Passed;

// What a block takes: queries in the forward, for dQ; keys for dK and dV.
template <class T>
int forward_tile(std::int64_t d);
template <class T>
int dq_tile(std::int64_t d);
template <class T>
int dkv_tile(std::int64_t d);
template <>
int forward_tile<float>(std::int64_t d);
template <>
int dq_tile<float>(std::int64_t d);
template <>
int dkv_tile<float>(std::int64_t d);

void launch_tiled(const Problem& p, const Forward<float>& t, const List& list, float scale,
                  cudaStream_t stream);
template <class T>
void launch_fa2(const Problem& p, const Forward<T>& t, const List& list, float scale,
                cudaStream_t stream);
// With tiles of so many queries, or keys; for d <= 64 the forward's `queries` may have tall ones.
// taken: 0, where blocks count the tiles that they have taken.
inline constexpr int hopper_tile = 128, tall_tile = 192;
template <class T>
std::string not_for_hopper(const Problem& p, const Forward<T>& t);
template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, const Side& queries, const List& list,
                   int* taken, float scale, cudaStream_t stream);
template <class T>
std::string not_for_hopper(const Problem& p, const Backward<T>& t);
template <class T>
void launch_hopper(const Problem& p, const Backward<T>& t, const List& of_queries,
                   const List& of_keys, float scale, const Passed& passed, cudaStream_t stream);

// D is [Hq, Nq].
void launch_delta(const Problem& p, const Backward<float>& t, float* D, cudaStream_t stream);
void launch_dq(const Problem& p, const Backward<float>& t, const List& list, float scale,
               const float* D, cudaStream_t stream);
void launch_dkv(const Problem& p, const Backward<float>& t, const List& list, float scale,
                const float* D, cudaStream_t stream);

// LSE2 and D are [Hq, rows]; where a sequence's rows begin says Work::padded_row(). The list is of
// tiles of `rows` queries.
template <class T>
void launch_before(const Problem& p, const Backward<T>& t, const List& list, int rows,
                   const Passed& passed, cudaStream_t stream);
template <class T>
void launch_swizzle_dq(const Problem& p, const Backward<T>& t, const List& list, float scale,
                       const Passed& passed, cudaStream_t stream);
template <class T>
void launch_swizzle_dkv(const Problem& p, const Backward<T>& t, const List& list, float scale,
                        const Passed& passed, cudaStream_t stream);

}  // namespace fa::packed
