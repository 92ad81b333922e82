// Stage 06: attention on tensor cores, in fp16 and bf16. A ladder of kernels, one idea each: those
// of `mma.sync` run from compute capability 8.0 on, those of `wgmma` on 9.0 only.
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

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::optimized {

inline constexpr int max_d = 256;

enum class Kernel {
  best,           // hopper if it can run here and the copy engine reads the tensors, else fa2
  mma,            // forward/1: tensor cores by mma.sync
  cp_async,       // forward/2: copies that do not wait, two buffers
  swizzle,        // forward/3: no bank conflicts, ldmatrix
  wide_warps,     // forward/4: a warp owns 32 rows, and two blocks share an SM
  two_loops,      // forward/5: masks in a loop of their own, the longest tiles first
  fa2,            // FlashAttention-2: the whole contract, from compute capability 8.0 on
  tma,            // forward/6: the copy engine fills shared memory
  wgmma,          // forward/7: a warpgroup multiplies from shared memory
  ring,           // forward/8: full and empty barriers instead of __syncthreads
  specialised,    // forward/9: a warp loads, two warpgroups compute, registers go where they work
  lock,           // forward/10: ping-pong: one warpgroup's softmax under the other's products
  no_lock,        // forward/10: the same, left to chance
  overlap,        // forward/11: and a warpgroup's softmax under its own products
  rows,           // forward/12: one row's maximum under the other row's exponentials
  persistent,     // forward/13: a block for each SM, the next Q and the last O on their way
  longest_first,  // forward/14: who is done takes the longest tile that is left
  hopper,         // the whole contract, on 9.0; fa2 takes what the copy engine cannot read
};

// What a kernel promises beyond this: any B, heads (groups too), Nq and Nk, both causal alignments,
// scale > 0, LSE; scale log2 e must be finite in fp32. The row's largest score times it, x, may be
// as large as 2^28: weights are then as exact as the scores are. Beyond, the row may be 0 or NaN;
// no other row is. A kernel of the whole contract: d <= 256, key lengths (clamped to [0, Nk]), any
// strides and addresses. The others: d = 128, no key lengths, and rows that begin at multiples of
// 16 bytes.
struct Rung {
  Kernel kernel;
  const char* name;
  int capability;  // 80: this and later; 90: this alone
  bool whole_contract;
  bool fp16, d64;  // also fp16; also d = 64
};
// Kernels take powers of two: exp(scale x) = 2^(c x) with c = scale log2 e. What to say where c is
// not finite in fp32, or "".
std::string wrong_scale(const Problem& p);
const Rung* rungs(std::size_t& count);  // in the order of the ladder
const char* name(Kernel kernel);

// Who runs where; `here` is a GPU's compute capability, 80 for 8.0. The kernel that `best` stands
// for (any other stands for itself; hopper hands to fa2 what the copy engine cannot read), and why
// `who`, built for `wanted` (80: and later; 90: alone), cannot run: a sentence, or empty.
Kernel chosen(Kernel kernel, int here);
std::string wrong_capability(const std::string& who, int wanted, int here);
int device_capability();  // of the current GPU

// Bytes of this GPU's L2 cache: as large a part of it as so many MiB are of an H200's 60, where it
// was measured how many heads a section may have (order.cuh).
inline std::int64_t of_L2(int MiB) {
  return std::int64_t(of_this_gpu(cudaDevAttrL2CacheSize)) * MiB / 60;
}

// Are the address and all strides multiples of 16 bytes (also a stride that is never used), so that
// rows can be copied in pieces of 16?
template <class X>
bool in_16_bytes(const View<X>& v) {
  return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.batch % 8 == 0 &&
         v.head % 8 == 0 && v.row % 8 == 0;
}
// And is no stride negative? What the rungs on the way want.
template <class X>
bool in_order(const View<X>& v) {
  return in_16_bytes(v) && v.batch >= 0 && v.head >= 0 && v.row >= 0;
}

struct Options {
  Kernel kernel = Kernel::best;
  cudaStream_t stream = nullptr;
  Scratch scratch = {};  // scratch_bytes() of device memory, aligned to 4
  // hopper: a block for each tile, in place of one for each SM that stays until the end. For a GPU
  // where kernels of other streams want SMs meanwhile: they get one as soon as a tile is done.
  bool block_a_tile = false;
};

// Device memory that the kernel needs beside its arguments: 4 bytes, to count tiles, for
// longest_first, and for a hopper with a mask; else 0. What it holds before does not matter. Calls
// that may run at the same time need one each.
std::size_t scratch_bytes(const Problem& p, Kernel kernel = Kernel::best);

// Empty, or a sentence that says why `kernel` cannot take this problem on the current GPU.
// T: __half or __nv_bfloat16.
template <class T>
std::string unsupported(const Problem& p, const Forward<T>& t, Kernel kernel);

// O = softmax(scale Q K^T + mask) V and, if asked for, LSE (fp32); all pointers, key_lengths too,
// are to device memory. Scores, statistics and sums are fp32; the weights P are rounded to T for
// the second product, their sum l is not. Puts its work on the stream and returns at once; returns
// the kernel that it took: the one asked for, or what `best` stands for; if Nk = 0, `swizzle` in
// the place of a rung from `tma` to `longest_first`. The same result, bit by bit, from run to run.
// A NaN in the value of a key that the mask hides may reach a row if one of its tile of at most 192
// rows sees a key of the same tile of keys, for 0 * NaN is NaN; keys past a key length never do.
//
// T is __half or __nv_bfloat16; any other type is refused in words. Throws std::invalid_argument,
// before any write, for arguments outside the kernel's promises, and fa::CudaError where CUDA
// fails.
// Sources: FlashAttention-2 (https://arxiv.org/abs/2307.08691) and FlashAttention-3
// (https://arxiv.org/abs/2407.08608).
template <class T>
Kernel forward(const Problem& p, const Forward<T>& t, const Options& options = {});

// ---- the kernels' launches, one a file --------------------------------------------------------

#define FA_LAUNCH_OF(name) \
  template <class T>       \
  void launch_##name(const Problem& p, const Forward<T>& t, float scale, cudaStream_t stream)
FA_LAUNCH_OF(mma);
FA_LAUNCH_OF(cp_async);
FA_LAUNCH_OF(swizzle);
FA_LAUNCH_OF(wide_warps);
FA_LAUNCH_OF(two_loops);
FA_LAUNCH_OF(fa2);
FA_LAUNCH_OF(tma);
FA_LAUNCH_OF(wgmma);
FA_LAUNCH_OF(ring);
FA_LAUNCH_OF(specialised);
FA_LAUNCH_OF(lock);
FA_LAUNCH_OF(no_lock);
FA_LAUNCH_OF(overlap);
FA_LAUNCH_OF(rows);
FA_LAUNCH_OF(persistent);
#undef FA_LAUNCH_OF
template <class T>
void launch_longest_first(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
                          cudaStream_t stream);
template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
                   cudaStream_t stream, bool by_tile);  // block_a_tile
template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, float scale, unsigned* taken,
                   cudaStream_t stream) {
  launch_hopper(p, t, scale, taken, stream, false);
}

}  // namespace fa::optimized
