// Stage 06, the other half: dQ, dK, dV on tensor cores, in fp16 and bf16. A ladder of its own, on
// the instructions of the forward.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstddef>
#include <string>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::optimized {

enum class BackwardKernel {
  best,     // hopper; where chosen() says so, two_kernels; where neither can run, swizzle
  mma,      // backward/1: stage 05's two kernels on tensor cores, by mma.sync
  swizzle,  // backward/2: cp.async, ldmatrix. The whole contract, from compute capability 8.0 on
  two_kernels,  // backward/3: the two kernels by wgmma and TMA. The whole contract, on 9.0
  fused,        // backward/4: one kernel, five products; dQ is added up with atomics
  bulk,         // backward/5: dQ is added up by the copy engine, asked by a warp of its own
  early,        // backward/6: the next scores are under way before this step is done
  at_once,      // backward/7: P is multiplied as soon as it is there
  late,         // backward/8: dQ one step late, and nobody waits for the other group
  masks,        // backward/9: no work that only a mask needs where there is none
  in_order,     // backward/10: blocks add to dQ in turns, so that its bits are always the same
  hopper,       // a shape for each head dimension. The whole contract, on 9.0
};

// What a kernel promises beyond this: any B, heads (groups too: dK and dV are sums over the group),
// Nq and Nk, both causal alignments, any scale; scale log2 e must be finite in fp32. So must every
// score times it, x, and L has 24 bits: a row's P are off by a factor of up to 2^(x 2^-23), 1 % at
// 2^17. A row with a larger x is lost, with dK and dV of the keys that it sees; dQ of other rows is
// not. A kernel of the whole contract: d <= 256, key lengths (clamped to [0, Nk]), any strides and
// addresses. The others: d = 128, no key lengths, and rows that begin at multiples of 16 bytes.
struct BackwardRung {
  BackwardKernel kernel;
  const char* name;
  int capability;  // 80: this and later; 90: this alone
  bool whole_contract;
  bool fp16, d64;  // also fp16; also d = 64
  bool
      deterministic;  // dQ too has the same bits in every run (hopper's if asked); dK and dV always
};
const BackwardRung* backward_rungs(std::size_t& count);  // in the order of the ladder
const char* name(BackwardKernel kernel);

struct BackwardOptions {
  BackwardKernel kernel = BackwardKernel::best;
  bool deterministic = false;  // dQ, too, gets the same bits in every run
  cudaStream_t stream = nullptr;
  Scratch scratch = {};  // backward_scratch_bytes() of device memory, aligned to 16 bytes
  // hopper at d <= 64: a block for each tile of keys, as at d = 128, in place of one for each SM
  // that stays until the end. For a GPU where kernels of other streams want SMs meanwhile.
  bool block_a_tile = false;
  // hopper at d > 128: bytes of scratch for dS, of which B Hq Nq Nk numbers of 2 bytes are made. If
  // they do not fit, the keys come in parts (at least 64 keys each, however little this is).
  std::size_t most_kept = std::size_t(2) << 30;
};

// What options.kernel stands for on a GPU of this compute capability (80 for 8.0) with so many SMs,
// if the copy engine can read and write the tensors. best is two_kernels, and not hopper, if dQ
// must have the same bits, with a mask and large groups (eight heads at d <= 64, four at d <= 128);
// and at d > 128 if a part of the keys (most_kept) is small: less than three blocks of 64 keys for
// two SMs, or less than 1024 keys.
BackwardKernel chosen(const Problem& p, const BackwardOptions& options, int capability,
                      int processors);

// Device memory that a call needs beside its arguments: 8 bytes for each row of Q and, in kernels
// that add dQ up, 4 more for each number of it; in turns, 4 more for 4096; a counter. hopper at
// d > 128: for dS most_kept at most, or what 64 keys need, 128 bytes for each row of Q; and if that
// is not all of dS, 4 for each number of dQ. What it holds before does not matter. Calls that may
// run at the same time need one each.
std::size_t backward_scratch_bytes(const Problem& p, const BackwardOptions& options = {});

// Empty, or a sentence that says why `kernel` cannot take this problem on the current GPU.
// T: __half or __nv_bfloat16.
template <class T>
std::string unsupported(const Problem& p, const Backward<T>& t, BackwardKernel kernel);

// dQ, dK, dV from Q, K, V, dO and what the forward returned, O and LSE; all pointers, key_lengths
// too, are to device memory. Scores and sums are fp32; P and dS are rounded to T for the second
// products. Puts its work on the stream and returns at once; returns the kernel that it chose.
//
// T is __half or __nv_bfloat16; any other type is refused in words. Throws std::invalid_argument,
// before any write, for arguments outside the kernel's promises, and fa::CudaError where CUDA
// fails.
// Sources: FlashAttention-2, Algorithm 2 (https://arxiv.org/abs/2307.08691), and FlashAttention-3
// (https://arxiv.org/abs/2407.08608).
template <class T>
BackwardKernel backward(const Problem& p, const Backward<T>& t,
                        const BackwardOptions& options = {});

// ---- what passes from kernel to kernel, in the caller's scratch --------------------------------

// Rows of a head are padded to a multiple of 128, so that a tile's statistics are always all there.
//
// dQ is added up in blocks of 64 rows and 64 columns, [B, Hq, rows / 64, D / 64], D = padded(d). A
// block lies as a warpgroup holds it after a product of wgmma: number i (of 32) of thread t (of
// 128) is at i / 4 * 512 + t * 4 + i % 4. So what a thread holds leaves in pieces of 16 bytes.
struct Passed {
  float* LSE2;          // [B, Hq, rows]: LSE log2 e; where P is 0 anyway (padding, LSE = -inf) +inf
  float* D;             // [B, Hq, rows]: rowsum(dO o O); 0 in the padding
  float* dQ;            // the sums before they are scaled; null if the kernel does not add
  std::int64_t rows;    // of a head
  int* turn = nullptr;  // [B, Hq, rows / 64, D / 64]: how many have added; null: in any order
  unsigned* taken = nullptr;  // by hopper's blocks that stay: tiles of keys; null: a block each
  // hopper at d > 128: dS of kept_tiles tiles of 64 keys, the first of them kept_first (kept.cuh).
  // If these are not all, the sums of dQ wait in dQ, each block of 64 rows as its threads hold it.
  void* kept = nullptr;
  int kept_first = 0, kept_tiles = 0;

  static std::int64_t padded_rows(std::int64_t Nq) { return (Nq + 127) / 128 * 128; }
  static std::int64_t padded(std::int64_t d) { return d <= 64 ? 64 : d <= 128 ? 128 : 256; }
};

// backward/0_around.cu. Before: LSE2 and D, and 0 where sums begin: into dQ, if it is not null, and
// into `turn`; if that is not null the first to add stores, and only rows that see no key are 0.
// After: dQ = T(scale dQ).
template <class T>
void launch_before(const Problem& p, const Backward<T>& t, const Passed& passed,
                   cudaStream_t stream);
template <class T>
void launch_after(const Problem& p, const Backward<T>& t, float scale, const Passed& passed,
                  cudaStream_t stream);

// ---- the kernels' launches, one a file: all that a call has to do, launch_before too ------------

#define FA_LAUNCH_OF(name)                                                         \
  template <class T>                                                               \
  void launch_backward_##name(const Problem& p, const Backward<T>& t, float scale, \
                              const Passed& passed, cudaStream_t stream)
FA_LAUNCH_OF(mma);
FA_LAUNCH_OF(swizzle);
FA_LAUNCH_OF(two_kernels);
FA_LAUNCH_OF(fused);
FA_LAUNCH_OF(bulk);
FA_LAUNCH_OF(early);
FA_LAUNCH_OF(at_once);
FA_LAUNCH_OF(late);
FA_LAUNCH_OF(masks);
FA_LAUNCH_OF(in_order);
FA_LAUNCH_OF(hopper);
FA_LAUNCH_OF(hopper_wide);  // for d > 128
#undef FA_LAUNCH_OF

}  // namespace fa::optimized
