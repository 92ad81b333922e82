// Masks: who sees whom, where it is not simply a prefix of the keys. Sliding windows, first tokens
// that stay visible, learnable sinks, prefixes, documents packed into one row, lists of blocks.
//
// A mask is two questions. "Which tiles of keys must this tile of queries visit?" decides what it
// costs, "does i see j?" is asked in those tiles alone that some pair is hidden in. The owner of
// keys, in the backward, asks the first one the other way round.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::optimized {
struct Passed;  // backward/backward.hpp
}

namespace fa::masks {

inline constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t block = 128;  // queries and keys of a block in a list
template <class T>
inline constexpr int widest = sizeof(T) == 4 ? 128 : 256;  // d, at most

// For every block of 128 queries its blocks of 128 keys, in ascending order, or the other way
// round: list n is numbers[offsets[n]] ... numbers[offsets[n + 1] - 1]. The list of block x for
// batch entry b and query head h is number b batch + h head + x.
struct Blocks {
  const std::int32_t* offsets = nullptr;  // [lists + 1], in device memory; null: all blocks
  const std::int32_t* numbers = nullptr;  // [entries], in device memory
  std::int64_t lists = 0, entries = 0;
  std::int64_t batch = 0, head = 0;  // lists from one to the next; 0: they share
};

// Query i stands at key a = i + Nk - Nq, or at a = i if top_left. It sees key j if all this holds:
//
//   the length                 j < length
//   the window, or what stays  a - left <= j <= a + right,  or  j < first and j <= a + right,
//                              or  j < prefix
//   the documents              both have the same
//   the list                   it has the block that the pair lies in
//
// A causal mask of the problem is right = 0 with its own alignment. What is left out hides nothing.
// All pointers are to device memory.
struct Pattern {
  std::int64_t left = no_limit, right = no_limit;  // 0: itself alone
  bool top_left = false;                           // with a causal mask: as that is aligned
  std::int64_t first = 0;                          // keys that a window never hides on its left
  const std::int64_t* prefix = nullptr;            // [B]: keys that all see, clamped to [0, Nk]
  const std::int32_t* query_documents = nullptr;   // [B, Nq] and
  const std::int32_t* key_documents = nullptr;     // [B, Nk]: numbers of documents, or both null
  bool sorted = false;  // promised: they never decrease along a row. Then tiles can be skipped
  Blocks keys;          // of each block of queries
  Blocks queries;       // of each block of keys: `keys` transposed, which the backward wants
  const float* sinks = nullptr;  // [Hq]: one more logit of every row, of a key without a value
};

// In 16 bits; fp32 has one kernel, whatever this says. hopper is for 9.0 alone, without documents,
// for d a multiple of 8 (in the backward at most 128, and without lists if deterministic) and
// tensors whose addresses and strides are multiples of 16 bytes.
enum class Kernel {
  best,  // hopper if it can run, else fa2; the stage's own kernel for what a Problem can say
  fa2,   // and for the backward swizzle: all there is, compute capability 8.0 and later
  hopper
};

struct Options {
  cudaStream_t stream = nullptr;
  // Of device memory: the backward wants scratch_bytes(), aligned to 16; the forward nothing. But
  // with four bytes, aligned to 4, hopper counts its tiles, and takes them as SMs come free; and a
  // pattern that comes to a plain causal mask gets the stage's kernel, which wants them, too. What
  // scratch holds before does not matter; calls that may run at the same time need one each.
  Scratch scratch = {};
  Kernel kernel = Kernel::best;
  bool deterministic = false;  // hopper's backward, too, has the same bits in every run
};

// O = softmax(scale Q K^T + mask) V. T is float (kernel `tiled`, d <= 128), or __half or
// __nv_bfloat16 (tensor cores, compute capability 8.0 and later, d <= 256, scale > 0). Nq and Nk
// are at most 2^29. With sinks, LSE is of all logits, the sink's too. A row that sees no key:
// O = 0, LSE = -infinity, or the sink. The same bits from run to run, and with fa2 and fp32, where
// the pattern hides nothing, those of the kernel that this one comes from.
//
// What the host cannot see is clamped: lengths and prefixes to [0, Nk], offsets of a list to what
// it has; numbers of blocks that do not exist are passed over. A list out of order, one block
// twice, or documents that are not sorted, but promised so, give a wrong result, and read nothing
// else.
//
// Throws std::invalid_argument, before any write, for arguments outside of this, outputs that
// overlap anything that is read, and fa::CudaError where CUDA fails. It does not see whether
// scratch overlaps something. Puts its work on the stream and returns at once.
template <class T>
void forward(const Problem& p, const Pattern& pattern, const Forward<T>& t,
             const Options& options = {});

// dQ, dK, dV and, if not null, dsinks [Hq] from what the forward returned, O and LSE. Any finite
// scale. The same bits from run to run, with hopper if asked: it adds to dQ in turns then. (dK, dV
// and dsinks have them always.)
template <class T>
void backward(const Problem& p, const Pattern& pattern, const Backward<T>& t,
              float* dsinks = nullptr, const Options& options = {});
template <class T>
std::size_t scratch_bytes(const Problem& p);  // that the backward needs

// Lists in host memory, for whoever copies them to the device.
struct BlockLists {
  std::vector<std::int32_t> offsets, numbers;
};
// Of all blocks of queries: wanted(batch entry, head, block of queries, block of keys).
using Wanted = std::function<bool(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;
BlockLists lists_of(const Problem& p, const Wanted& wanted);
BlockLists transposed(const Problem& p, const Wanted& wanted);  // of all blocks of keys

// ---- what the files of this walk give each other ----------------------------------------------

// A backward's D [B, Hq, rows], and LSE log2(e) where tensor cores compute.
struct Statistics {
  float *LSE2, *D;
  std::int64_t rows;  // of a head
};

void launch_tiled(const Problem& p, const Pattern& pattern, const Forward<float>& t, float scale,
                  cudaStream_t stream);
void launch_dq(const Problem& p, const Pattern& pattern, const Backward<float>& t, float scale,
               const Statistics& s, cudaStream_t stream);
void launch_dkv(const Problem& p, const Pattern& pattern, const Backward<float>& t, float scale,
                const Statistics& s, cudaStream_t stream);
void launch_dsinks(const Problem& p, const Pattern& pattern, const float* LSE, const Statistics& s,
                   float* dsinks, cudaStream_t stream);
template <class T>
void launch_fa2(const Problem& p, const Pattern& pattern, const Forward<T>& t, float scale,
                cudaStream_t stream);
template <class T>
std::string not_for_hopper(const Problem& p, const Pattern& pattern, const Forward<T>& t);
template <class T>
void launch_hopper(const Problem& p, const Pattern& pattern, const Forward<T>& t, float scale,
                   unsigned* taken, cudaStream_t stream);
template <class T>
std::string not_for_hopper(const Problem& p, const Pattern& pattern, const Backward<T>& t,
                           bool deterministic);
template <class T>
void launch_hopper(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
                   const optimized::Passed& passed, cudaStream_t stream);
template <class T>
void launch_swizzle(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
                    const Statistics& s, cudaStream_t stream);
template <class T>
void launch_swizzle_dkv(const Problem& p, const Pattern& pattern, const Backward<T>& t, float scale,
                        const Statistics& s, cudaStream_t stream);

}  // namespace fa::masks
