// The score of a pair, changed before the softmax. Four changes, each of them optional:
//
//   rotary     q_i and k_j are turned by angles of their places, before they are multiplied
//   soft cap   s = cap tanh(s / cap): no score is larger than cap
//   ALiBi      s = s - slope_h |i + offset - j|: far keys count less, in each head differently
//   bias       s = s + bias_ij: any numbers, broadcast over batch, heads or rows
//
// in this order, and then the mask. What is left out is not paid for: the kernels of the tensor
// cores are built plain, for each change alone, for ALiBi behind a causal mask, and once for all.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::scores {

template <class T>
inline constexpr int widest = sizeof(T) == 4 ? 128 : 256;  // d, at most

// cos and sin of position n and pair k are numbers n dims / 2 + k of their tables. Pair k is
// numbers k and k + dims / 2 of a row, or, interleaved, numbers 2 k and 2 k + 1:
//   (x, y) becomes (x cos - y sin, x sin + y cos).
// Numbers of a row from `dims` on stay as they are. Without queries or without keys nothing is
// turned, and the tables are not read.
struct Rotary {
  const float *cos = nullptr, *sin = nullptr;
  std::int64_t positions = 0;  // rows of the tables
  std::int64_t dims = 0;       // even, at most d; 0: nothing is turned
  bool interleaved = false;
};

// All pointers are to device memory.
template <class T>
struct Scores {
  const float* slopes = nullptr;  // [Hq], or [B, Hq] if they are those of each batch entry
  bool slopes_of_batch = false;
  std::optional<double> cap = std::nullopt;  // > 0
  // [B or 1, Hq or 1, Nq or 1, Nk], in T or in fp32, one of the two; a stride of 0 repeats what
  // there is one of. -infinity hides the pair.
  View<const T> bias = {};
  View<const float> bias32 = {};
  Rotary rotary = {};
  // Query i has position i + offset, key j has position j. Not given: 0 if the mask is top_left,
  // else Nk - Nq, so that the last query stands where the last key does, whatever the lengths.
  std::optional<std::int64_t> offset = std::nullopt;
};

// In 16 bits; fp32 has one kernel, whatever this says. hopper is for 9.0 alone, with ALiBi alone, a
// soft cap up to 100 alone, or neither, for d a multiple of 8 (in the backward at most 128) and
// tensors whose addresses and strides are multiples of 16 bytes.
enum class Kernel {
  best,  // hopper if it can run, else fa2
  fa2,   // and for the backward swizzle: all there is, compute capability 8.0 and later
  hopper
};

struct Options {
  cudaStream_t stream = nullptr;
  // Of device memory: the backward wants scratch_bytes(), aligned to 16; the forward nothing. But
  // with four bytes, aligned to 4, hopper counts its tiles, and takes them as SMs come free. What
  // scratch holds before does not matter; calls that may run at the same time need one each.
  Scratch scratch = {};
  Kernel kernel = Kernel::best;
  bool deterministic = false;  // hopper's backward, too, has the same bits in every run
};

// O = softmax(scores + mask) V and, if asked for, LSE. T is float (d <= 128, any finite scale), or
// __half or __nv_bfloat16 (tensor cores, compute capability 8.0 and later, d <= 256, scale > 0;
// cap, slopes and bias divided by scale, and every score times log2 e, must be finite in fp32).
// Masks, key lengths (clamped to [0, Nk]), groups, strides and rows that see nothing are those of
// the course's other kernels. Rotated numbers are computed in fp32 and rounded to T once. tanh is
// CUDA's tanhf, right to two units in the last place; in hopper made of two instructions of the
// hardware, so that a capped score is right to 2^-22 cap. The same bits from run to run.
//
// Throws std::invalid_argument, before any write, for arguments outside of this, and fa::CudaError
// where CUDA fails. It cannot see how long slopes, tables and a bias are. Puts its work on the
// stream and returns at once.
template <class T>
void forward(const Problem& p, const Forward<T>& t, const Scores<T>& scores,
             const Options& options = {});

template <class T>
std::size_t scratch_bytes(const Problem& p);  // of the backward

// dQ, dK and dV by the Q and K that are given, which the kernel turns itself. dbias, if its data is
// not null, is the gradient by the bias, in fp32 whatever the bias is in: [B or 1, Hq or 1, Nq or
// 1, Nk] like the bias, summed over what that repeats. Hidden pairs have 0 there. A kernel of its
// own computes it: a block owns a tile of dbias and goes through all that share it, without
// atomics. The same bits from run to run, but for dQ of hopper without `deterministic`.
template <class T>
void backward(const Problem& p, const Backward<T>& t, const Scores<T>& scores,
              const View<float>& dbias = {}, const Options& options = {});

// ---- what the files of this walk give each other ----------------------------------------------

// Which changes there are, or which a kernel was built for. behind: beside ALiBi, if the mask lets
// no query see what comes after its position, so that |i + offset - j| is i + offset - j. in_tiles:
// beside a bias alone, if it has 16 bits and eight of its numbers can be copied at once.
inline constexpr int with_alibi = 1, with_cap = 2, with_bias = 4, with_rotary = 8, with_all = 15,
                     behind = 16, in_tiles = 32;

// The scores as kernels get them. fp32: everything as it is given, unit = 1. Tensor cores: in units
// of q.k, as they compute it, so that one multiplication by scale log2 e is still all that the
// exponent costs: unit = 1 / scale.
template <class T>
struct Change {
  int parts;
  float unit, cap, per_cap;  // cap and 1 / cap, in units
  const float* slopes;
  std::int64_t slopes_batch;  // 0 or Hq
  View<const T> bias;
  View<const float> bias32;
  bool in_pairs;  // may two numbers of the bias be read at once?
  Rotary rotary;
  bool in_chunks;  // may eight numbers be turned at once?
  int offset;
};

void launch_tiled(const Problem& p, const Forward<float>& t, const Change<float>& change,
                  float scale, cudaStream_t stream);
void launch_delta(const Problem& p, const Backward<float>& t, float* D, cudaStream_t stream);
void launch_dq(const Problem& p, const Backward<float>& t, const Change<float>& change, float scale,
               const float* D, cudaStream_t stream);
void launch_dkv(const Problem& p, const Backward<float>& t, const Change<float>& change,
                float scale, const float* D, cudaStream_t stream);
void launch_dbias(const Problem& p, const Backward<float>& t, const Change<float>& change,
                  const View<float>& dbias, float scale, const float* D, cudaStream_t stream);

template <class T>
void launch_fa2(const Problem& p, const Forward<T>& t, const Change<T>& change, float scale,
                cudaStream_t stream);
template <class T>
std::string not_for_hopper(const Problem& p, const Forward<T>& t, const Change<T>& change,
                           float scale);
template <class T>
void launch_hopper(const Problem& p, const Forward<T>& t, const Change<T>& change, float scale,
                   unsigned* taken, cudaStream_t stream);
template <class T>
std::string not_for_hopper(const Problem& p, const Backward<T>& t, const Change<T>& change,
                           float scale);
template <class T>
void launch_hopper(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
                   const optimized::Passed& passed, cudaStream_t stream);
template <class T>
void launch_swizzle_dq(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
                       const optimized::Passed& passed, cudaStream_t stream);
template <class T>
void launch_swizzle_dkv(const Problem& p, const Backward<T>& t, const Change<T>& change,
                        float scale, const optimized::Passed& passed, cudaStream_t stream);
template <class T>
void launch_swizzle_dbias(const Problem& p, const Backward<T>& t, const Change<T>& change,
                          const View<float>& dbias, float scale, const optimized::Passed& passed,
                          cudaStream_t stream);

}  // namespace fa::scores
