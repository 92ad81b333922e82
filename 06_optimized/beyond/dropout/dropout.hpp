// Dropout: in training, every weight of P is set to 0 with probability p, and those that are kept
// are multiplied by 1 / (1 - p), so that O stays what it was in the mean.
//
//   O = (M o P) V / (1 - p),   M_ij = 0 or 1 at random,   P and L as without dropout
//
// The backward needs the same M, and M has as many numbers as P. So M is not kept but made: M_ij is
// a function of seed, offset, batch, head, i and j (keep.cuh), and whoever asks gets the same
// answer, whatever tile it works on.
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

namespace fa::dropout {

template <class T>
inline constexpr int widest = sizeof(T) == 4 ? 128 : 256;  // d, at most

// Which weights are dropped. Seed and offset: any numbers; a training step that shall not repeat
// another's mask takes another offset. The masks of one seed are all different; only offsets of
// 2^32 and more can meet the masks of other seeds.
struct Dropout {
  double p = 0;  // of being dropped, in [0, 1); 0: none is, and the results are the plain kernels',
                 // bit by bit (hopper behind a mask and without scratch, which the plain one needs
                 // there: d <= 64, or d <= 128 and Nk < 6144)
  std::uint64_t seed = 0, offset = 0;
  // In device memory, aligned to 8: two numbers, the seed and what is added to the offset; read
  // when the kernel runs, so that a recorded CUDA graph draws anew each time. No part of an output.
  // `seed` must be 0 then. Null: there is none.
  const std::uint64_t* in_memory = nullptr;
};

// A weight is kept if 16 random bits are below this: (1 - p) 2^16, rounded, in [1, 2^16].
std::uint32_t threshold(double p);
// So weights are kept with exactly this probability, within 2^-17 of 1 - p (but at least 2^-16),
// and the factor of those that are kept is 1 / kept_probability(p), not 1 / (1 - p): the mean of O
// is right.
double kept_probability(double p);
// Is weight (i, j) of query head h in batch entry b kept? On the CPU; without in_memory. A place
// outside the problem has an answer, too, which no kernel asks for.
bool kept(const Problem& p, const Dropout& dropout, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j);

// In 16 bits; fp32 has one kernel, whatever this says. hopper is for 9.0 alone, for d a multiple
// of 8 (in the backward at most 128), at least one key, in the backward a query, too, and tensors
// whose addresses and strides are multiples of 16 bytes. All kernels keep the same weights.
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

// O with dropout and LSE without it. T is float (kernel `tiled`, d <= 128), or __half or
// __nv_bfloat16 (`fa2` and `hopper`: tensor cores, compute capability 8.0 and later, d <= 256,
// scale > 0, and every score times scale log2 e must be finite in fp32). The rest of the contract
// is that of all stages: groups of heads, both causal alignments, key lengths in device memory
// (clamped to [0, Nk]), any strides; Nq and Nk up to 2^30. The same bits from run to run.
//
// Throws std::invalid_argument, before any write, for arguments outside of this, and fa::CudaError
// where CUDA fails. Puts its work on the stream and returns at once.
template <class T>
void forward(const Problem& p, const Dropout& dropout, const Forward<T>& t,
             const Options& options = {});

// dQ, dK, dV, given the same `dropout` as the forward, by whichever kernel: `dq` and `dkv` in fp32,
// `swizzle` or `hopper` in fp16 and bf16, where any scale is good. The same bits from run to run;
// dQ of hopper only if `deterministic`, since its sums have no order else. Scratch holds D of
// each row, in 16 bits LSE, too, and on 9.0, whichever kernel runs, dQ in fp32 and turns for its
// sums: with rows and d padded, about 4 d + 8 bytes a row.
template <class T>
std::size_t scratch_bytes(const Problem& p);
template <class T>
void backward(const Problem& p, const Dropout& dropout, const Backward<T>& t,
              const Options& options = {});

// ---- what the files of this walk give each other ----------------------------------------------

// Dropout, as the kernels take it.
struct Draw {
  std::uint32_t threshold;
  float factor;  // 2^16 / threshold
  std::uint64_t seed, offset;
  const std::uint64_t* in_memory;
};
// D [B, Hq, rows], and of the tensor cores' kernels LSE2 too, as struct Passed describes them.
struct Statistics {
  float *LSE2, *D;
  std::int64_t rows;
};

void launch_tiled(const Problem& p, const Draw& draw, const Forward<float>& t, float scale,
                  cudaStream_t stream);
void launch_dq(const Problem& p, const Draw& draw, const Backward<float>& t, float scale, float* D,
               cudaStream_t stream);
void launch_dkv(const Problem& p, const Draw& draw, const Backward<float>& t, float scale,
                const float* D, cudaStream_t stream);
template <class T>
void launch_fa2(const Problem& p, const Draw& draw, const Forward<T>& t, float scale,
                cudaStream_t stream);
template <class T>
void launch_swizzle(const Problem& p, const Draw& draw, const Backward<T>& t, float scale,
                    const Statistics& s, cudaStream_t stream);
template <class T>
void launch_swizzle_dkv(const Problem& p, const Draw& draw, const Backward<T>& t, float scale,
                        const Statistics& s, cudaStream_t stream);
// hopper, and why it does not take a call, or "".
template <class T>
std::string not_for_hopper(const Problem& p, const Forward<T>& t);
template <class T>
std::string not_for_hopper(const Problem& p, const Backward<T>& t);
template <class T>
void launch_hopper(const Problem& p, const Draw& draw, const Forward<T>& t, float scale,
                   unsigned* taken, cudaStream_t stream);
template <class T>
void launch_hopper(const Problem& p, const Draw& draw, const Backward<T>& t, float scale,
                   const optimized::Passed& passed, cudaStream_t stream);

}  // namespace fa::dropout
