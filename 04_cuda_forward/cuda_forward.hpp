// Stage 04: the forward pass on a GPU, in fp32. Stage 03's loop over tiles becomes a kernel.
#pragma once
#include <cstddef>
#include <string>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::cuda_forward {

enum class Kernel {
  best,      // the highest rung of the ladder that can run here
  baseline,  // cuBLAS, softmax, cuBLAS: stores S and P, in scratch. To be beaten
  tiled,     // the lesson: stage 03's tiles, a block of threads each
  // ladder/, one idea each; a kernel has all ideas of those before it
  thread_tile,      // a thread holds 4 x 8 scores
  fixed_width,      // the head dimension is known to the compiler
  one_buffer,       // K_j and V_j take turns in the same shared memory
  register_tiled,   // the second lesson: the same with few instructions, four numbers a load
  neighbours,       // neighbouring lanes share what they read
  eight_rows,       // 8 rows a thread
  weights_by_key,   // P lies key by key
  eight_by_eight,   // 8 x 8 numbers a thread in both products
  copies_ahead,     // the next chunk of keys or values comes while this one is used
  fragments_ahead,  // and so do the next numbers from shared memory
  lazy_maximum,     // m moves only when it must
  longest_first,    // the longest rows of all heads first
};
const char* name(Kernel kernel);
inline constexpr Kernel ladder[] = {
    Kernel::tiled,          Kernel::thread_tile,  Kernel::fixed_width,     Kernel::one_buffer,
    Kernel::register_tiled, Kernel::neighbours,   Kernel::eight_rows,      Kernel::weights_by_key,
    Kernel::eight_by_eight, Kernel::copies_ahead, Kernel::fragments_ahead, Kernel::lazy_maximum,
    Kernel::longest_first};

struct Options {
  Kernel kernel = Kernel::best;
  cudaStream_t stream = nullptr;
  Scratch scratch = {};  // scratch_bytes() of device memory, aligned to 4
};

// Device memory that the kernel needs beside its arguments. 0 for all but the baseline, which
// stores the scores: 4 B Hq Nq Nk bytes.
std::size_t scratch_bytes(const Problem& p, Kernel kernel);

// Empty, or a sentence that says why `kernel` cannot take this problem on the current GPU.
std::string unsupported(const Problem& p, const Forward<float>& t, Kernel kernel);

// O = softmax(scale Q K^T + mask) V and, if asked for, LSE; all pointers, key_lengths too, are to
// device memory. Puts its work on the stream and returns at once; returns the kernel it chose.
//
// The kernels of the ladder promise: strides, unaligned pointers, groups of heads, both causal
// alignments, key lengths (a length outside [0, Nk] is clamped: nobody can look at it without
// waiting for the GPU), any finite scale, d <= 128, B Hq ceil(Nq / 16) < 2^31. The result is the
// same, bit by bit, from run to run. From neighbours on Nk is below 2^31 - 256; lazy_maximum and
// longest_first take powers of 2, and want scale log2(e), and the scores times log2(e), finite.
// Where a kernel cannot take a problem, best takes the next lower one that can.
// A NaN in the value of a key that the mask hides may reach a row if one of its tile of rows sees a
// key of the same tile of keys, for 0 * NaN is NaN: 32 rows in tiled, 64 from thread_tile to
// neighbours, 128 in eight_rows and weights_by_key; from eight_by_eight on 64 rows and eight keys.
// Keys past a key length never do. The baseline promises rows that do not overlap or run backwards.
//
// T is float; any other type is refused in words. Throws std::invalid_argument, before any write,
// for arguments outside these promises, and fa::CudaError where CUDA fails.
// Source: FlashAttention-2, Algorithm 1 (https://arxiv.org/abs/2307.08691).
template <class T>
Kernel forward(const Problem& p, const Forward<T>& t, const Options& options = {});

// ---- the kernels' launches, one a file
// -----------------------------------------------------------

inline constexpr int max_d = 128;

void launch_tiled(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream);
void launch_thread_tile(const Problem& p, const Forward<float>& t, float scale,
                        cudaStream_t stream);
std::size_t thread_tile_shared_bytes(std::int64_t d);
void launch_fixed_width(const Problem& p, const Forward<float>& t, float scale,
                        cudaStream_t stream);
std::size_t fixed_width_shared_bytes(std::int64_t d);
void launch_one_buffer(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream);
std::size_t one_buffer_shared_bytes(std::int64_t d);
void launch_register_tiled(const Problem& p, const Forward<float>& t, float scale,
                           cudaStream_t stream);
std::size_t register_tiled_shared_bytes(std::int64_t d);
void launch_neighbours(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream);
std::size_t neighbours_shared_bytes(std::int64_t d);
void launch_eight_rows(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream);
std::size_t eight_rows_shared_bytes(std::int64_t d);
void launch_weights_by_key(const Problem& p, const Forward<float>& t, float scale,
                           cudaStream_t stream);
std::size_t weights_by_key_shared_bytes(std::int64_t d);
void launch_eight_by_eight(const Problem& p, const Forward<float>& t, float scale,
                           cudaStream_t stream);
std::size_t eight_by_eight_shared_bytes(std::int64_t d);
void launch_copies_ahead(const Problem& p, const Forward<float>& t, float scale,
                         cudaStream_t stream);
std::size_t copies_ahead_shared_bytes(std::int64_t d);
void launch_fragments_ahead(const Problem& p, const Forward<float>& t, float scale,
                            cudaStream_t stream);
std::size_t fragments_ahead_shared_bytes(std::int64_t d);
void launch_lazy_maximum(const Problem& p, const Forward<float>& t, float scale,
                         cudaStream_t stream);
std::size_t lazy_maximum_shared_bytes(std::int64_t d);
void launch_longest_first(const Problem& p, const Forward<float>& t, float scale,
                          cudaStream_t stream);
std::size_t longest_first_shared_bytes(std::int64_t d);
// S: [B, Hq, Nq, Nk] without gaps; holds P afterwards.
void launch_baseline(const Problem& p, const Forward<float>& t, float scale, float* S,
                     cudaStream_t stream);

}  // namespace fa::cuda_forward
