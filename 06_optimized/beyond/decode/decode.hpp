// Decoding: one to eight new queries of a sequence against all keys that it has had so far.
//
// Nothing is read twice, so the memory's bandwidth is the limit, and a block for each key head
// would leave most SMs idle. So the keys of a head are split among blocks. Each part is attention
// over its own keys, with its own O and L, and `merge` of stage 02 puts the parts together. The
// query heads of a group are rows of one tile: they read the same keys.
//
// The cache that holds the keys may lie in pages, in any order; new keys and values are appended
// by the same launch. Forward only.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstddef>
#include <cstdint>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::decode {

inline constexpr std::int64_t max_Nq = 8;                              // new queries of a sequence
inline constexpr std::int64_t smallest_page = 16, largest_page = 256;  // tokens
inline constexpr int max_splits = 256;
template <class T>
inline constexpr int widest = sizeof(T) == 4 ? 128 : 256;  // d, at most

// Keys and values of all sequences, up to Nk for each; key_lengths of the problem says how many
// there are, with the new ones. Contiguous, if `table` is null, and what follows it 0: K and V are
// [B, Hkv, Nk, d]. Else in pages: K and V are [pages, Hkv, page_size, d], and token j of sequence b
// is row j % page_size of page table[b * table_stride + j / page_size]. Sequences may share pages
// that nobody appends to. What lies behind a sequence's length is never read.
template <class T>
struct Cache {
  View<T> K, V;                         // written only where new tokens are appended
  const std::int32_t* table = nullptr;  // [B, table_stride], in device memory
  std::int64_t table_stride = 0;        // entries; times page_size at least Nk
  std::int64_t page_size = 0;           // a power of two in [16, 256]
  std::int64_t pages = 0;               // of K and V; a number in the table outside [0, pages)
                                        // reads the nearest page, and appends nothing
};

// new_K, new_V: the last Nq tokens of each sequence, [B, Hkv, Nq, d], if the cache does not have
// them yet. Token i has place length - Nq + i, and is put there; places below 0 are left out. Null:
// nothing is appended. O is [B, Hq, Nq, d] like Q; LSE [B, Hq, Nq] without gaps, or null.
template <class T>
struct Tensors {
  View<const T> Q;
  Cache<T> cache;
  View<const T> new_K, new_V;
  View<T> O;
  float* LSE = nullptr;
};

struct Options {
  // The queries are the last Nq tokens of their own sequence: query i sees the keys up to itself,
  // j <= length - Nq + i. False: all keys of the sequence.
  bool causal = true;
  int splits = 0;  // parts of a head's keys, at most max_splits; 0: as many as `splits` says
  cudaStream_t stream = nullptr;
  Scratch scratch = {};  // scratch_bytes() of device memory, aligned to 4
};

// What the kernel for this problem takes at a time, and how many of its blocks an SM of the current
// GPU holds.
struct Shape {
  int rows, keys, blocks;
};
template <class T>
Shape shape(const Problem& p);
template <>
Shape shape<float>(const Problem& p);

// How many parts cost least on a GPU of so many SMs. Blocks run in waves of processors * blocks,
// and a block costs its tiles of keys, so
//   cost(s) = waves(s) (tiles(s) keys + extra),   waves(s) = ceil(n s / (processors blocks)),
//   tiles(s) = ceil(ceil(Nk / keys) / s),         n = B Hkv ceil(Nq Hq / Hkv / rows).
// A part costs an extra of 128 keys: to fill its buffers, to write O and L, to have them merged.
// One part alone, s = 1, does not. The least s of the least cost.
int splits(const Problem& p, const Shape& shape, int processors);

// Bytes of scratch: O in fp32 and L of each part; none for one part. T: float, __half or
// __nv_bfloat16. With options.splits = 0 it asks the current GPU.
template <class T>
std::size_t scratch_bytes(const Problem& p, const Options& options = {});

// O = softmax(scale Q K^T + mask) V over the cache. T is float (kernel `tiled`, d <= 128), or
// __half or __nv_bfloat16 (`fa2`: tensor cores, compute capability 8.0 and later, d <= 256,
// scale > 0, and every score times scale log2 e must be finite in fp32). p.Nk is the largest
// length, p.key_lengths the lengths, in device memory, clamped to [0, Nk]; null: all Nk. p.causal
// must be none: see Options. Nq is 1 to 8; 0: nothing is done, not even appended. A row that sees
// no key: O = 0, LSE = -infinity. Returns the number of parts. The same bits from run to run, not
// for another number of parts.
//
// Throws std::invalid_argument, before any write, for arguments outside of this, and fa::CudaError
// where CUDA fails. It does not see whether scratch, table or lengths overlap another tensor. Puts
// its work on the stream and returns at once.
template <class T>
int forward(const Problem& p, const Tensors<T>& t, const Options& options = {});

// ---- what the files of this walk give each other ----------------------------------------------

// Tiles of Br rows that a key head's rows make: the queries of a group.
inline std::int64_t row_tiles(const Problem& p, int Br) {
  return p.Hkv == 0 ? 0 : (p.Hq / p.Hkv * p.Nq + Br - 1) / Br;
}

// O [splits, B, Hq, Nq, d] and L [splits, B, Hq, Nq] of the parts.
struct Parts {
  int splits;
  float *O, *L;
};

void launch_tiled(const Problem& p, const Tensors<float>& t, const Parts& parts, float scale,
                  bool causal, cudaStream_t stream);
// Returns whether O and LSE are complete: if there is one part, or two that merge themselves.
template <class T>
bool launch_fa2(const Problem& p, const Tensors<T>& t, const Parts& parts, float scale, bool causal,
                cudaStream_t stream);
// O and LSE, if not null, from the parts.
template <class T>
void launch_merge(const Problem& p, const Parts& parts, const View<T>& O, float* LSE,
                  cudaStream_t stream);

}  // namespace fa::decode
