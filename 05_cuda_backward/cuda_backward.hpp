// Stage 05: the backward pass. Nothing of size Nq x Nk is kept from the forward: P is computed
// again from Q, K and the log-sum-exp of each row. First on the CPU, plainly; then on a GPU, in
// fp32.
#pragma once
#include <cstddef>
#include <string>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::cuda_backward {

// ---- what a forward keeps
// ------------------------------------------------------------------------

// The saved context of a training step: what the forward was given and what it returned. O(N): no
// scores. An autograd framework keeps this between the two passes.
template <class T>
struct Context {
  Problem p;
  View<const T> Q, K, V, O;
  const Stat<T>* LSE;

  // From the arguments of any stage's forward, after it ran. Throws if it wrote no LSE.
  Context(const Problem& problem, const Forward<T>& forward);

  // The arguments of backward(): one gradient for each input that has one.
  Backward<T> with(const View<const T>& dO, const View<T>& dQ, const View<T>& dK,
                   const View<T>& dV) const {
    return {Q, K, V, O, dO, LSE, dQ, dK, dV};
  }
};

// ---- on the CPU
// ----------------------------------------------------------------------------------

struct CpuOptions {
  int threads = 0;                // 0: all cores; a task is a key head with its query heads
  std::int64_t Br = 64, Bc = 64;  // tile of queries, tile of keys
};

// dQ, dK, dV from O, LSE and dO, all in host memory. T: float or double. The same result, bit by
// bit, for any number of threads. Extra memory: Nq elements for each thread. d <= 512. P =
// exp(score - LSE) has the rounding of a score in it, because the forward may have added up q.k in
// another order: with a single key dV is dO up to (d + 8) eps (1 + scale sum |q_x k_x|) of it.
// Throws std::invalid_argument, before any write, for arguments outside these promises.
template <class T>
void backward_on_cpu(const Problem& p, const Backward<T>& t, const CpuOptions& options = {});

// The lesson, for one query head: sets dQ, adds to dK and dV. D: [Nq], scratch.
template <class T>
void attention_backward(const Rows<const T>& Q, const Rows<const T>& K, const Rows<const T>& V,
                        const Rows<const T>& O, const Rows<const T>& dO, const T* LSE, T scale,
                        const Mask& mask, std::int64_t Br, std::int64_t Bc, T* D, const Rows<T>& dQ,
                        const Rows<T>& dK, const Rows<T>& dV);

// ---- on a GPU
// ------------------------------------------------------------------------------------

enum class Kernel {
  two_kernels,  // one owns dQ, one owns dK and dV: seven products, deterministic
  atomic,       // one kernel, five products; dQ is added up with atomics: its last bits vary
  stored,       // the rival: P is kept by the forward, dP is stored too; four products by cuBLAS
};
const char* name(Kernel kernel);

// Where D = rowsum(dO o O) is computed; for two_kernels.
enum class Delta {
  own_kernel,  // a small kernel first
  with_dq,     // by the kernel of dQ, which stores it for the other
  in_loop,     // by both, each time a tile of dO is loaded; needs no scratch
};
const char* name(Delta delta);

// How much shared memory a block takes; for two_kernels and atomic. Where the GPU has not that
// much, or Nk is no int, the next is taken.
enum class Tiles {
  fast,    // fast/: 8 rows a thread, copies ahead; up to 226 KiB
  lesson,  // dq.cu and dkv.cu; up to 93 KiB
  small,   // the same with tiles that fit into 64 KiB (a T4)
};

struct Options {
  Kernel kernel = Kernel::two_kernels;
  Delta delta = Delta::own_kernel;
  cudaStream_t stream = nullptr;
  Scratch scratch = {};  // scratch_bytes() of device memory, aligned to 4
  Tiles tiles = Tiles::fast;
};

// D, [B, Hq, Nq] floats, unless it is computed in the loop. For `stored`: P and dP, 8 B Hq Nq Nk
// bytes, and the first half must hold P when backward() is called.
std::size_t scratch_bytes(const Problem& p, const Options& options);

// Empty, or a sentence that says why this cannot run on the current GPU.
std::string unsupported(const Problem& p, const Backward<float>& t, const Options& options);

// dQ, dK, dV from O, LSE and dO; all pointers, key_lengths too, are to device memory. Puts its work
// on the stream and returns at once. O and LSE are needed.
//
// two_kernels and atomic promise: strides, unaligned pointers, groups of heads (dK and dV are sums
// over the group), both causal alignments, key lengths (clamped to [0, Nk]), any finite scale,
// d <= 128. two_kernels gives the same bits from run to run. `stored` promises none of this: no
// groups, rows that do not overlap or run backwards.
//
// T is float; any other type is refused in words. Throws std::invalid_argument, before any write,
// for arguments outside these promises, and fa::CudaError where CUDA fails.
// Source: FlashAttention-2, Algorithm 2 (https://arxiv.org/abs/2307.08691).
template <class T>
void backward(const Problem& p, const Backward<T>& t, const Options& options = {});

// ---- the kernels' launches
// -----------------------------------------------------------------------

inline constexpr int max_d = 128;

void launch_delta(const Problem& p, const Backward<float>& t, float* D, cudaStream_t stream);
void launch_dq(const Problem& p, const Backward<float>& t, float scale, const Options& options,
               float* D);
void launch_dkv(const Problem& p, const Backward<float>& t, float scale, const Options& options,
                const float* D);
void launch_atomic(const Problem& p, const Backward<float>& t, float scale, const Options& options,
                   const float* D);
void launch_stored(const Problem& p, const Backward<float>& t, float scale, const float* P,
                   float* dP, cudaStream_t stream);
void launch_fast_dq(const Problem& p, const Backward<float>& t, float scale, const Options& options,
                    float* D);
void launch_fast_dkv(const Problem& p, const Backward<float>& t, float scale,
                     const Options& options, const float* D);
void launch_fast_atomic(const Problem& p, const Backward<float>& t, float scale,
                        const Options& options, const float* D);
std::size_t shared_bytes(std::int64_t d, bool small_tiles);  // of a block, in all kernels
std::size_t fast_shared_bytes(std::int64_t d);

}  // namespace fa::cuda_backward
