// Benchmark rows on a GPU: timed by CUDA events, inputs in device memory, random, and rotated
// through more than the L2 cache holds; verified against the oracle before and after timing.
#pragma once
#include <functional>
#include <string>
#include <type_traits>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"
#include "common/measure/bench.hpp"

namespace fa::bench {

// To be called first by register_benchmarks(): where no GPU answers, prints why and ends the
// program with exit code 77. Otherwise the results are those of this GPU.
void needs_gpu();

// Puts one forward on the stream; scratch is device memory of the bytes asked for.
template <class T>
using GpuForward =
    std::function<void(const Problem&, const Forward<T>&, const Scratch& scratch, cudaStream_t)>;

// One row "PREFIX/N:4096/d:64/causal:0/f32" (for B and H see the context); T is float, __half or
// __nv_bfloat16, whose rows end in f16 and bf16. scratch_bytes are reported as extra memory. A row
// whose memory cannot be had reports an error that says so. The roof is that of the units T is for:
// multiply-adds for float, else a matrix product on tensor cores.
template <class T = float>
void gpu_forward(const std::string& prefix, const Problem& p, std::size_t scratch_bytes,
                 const std::type_identity_t<GpuForward<T>>& f);

// What a row of gpu_backward() times and on what.
struct BackwardRow {
  std::size_t scratch_bytes = 0;
  bool with_forward = false;  // time both passes, as a training step has them
  bool one_copy = false;  // the forward leaves something in the scratch that belongs to one copy
};

// Puts one backward on the stream.
template <class T>
using GpuBackward =
    std::function<void(const Problem&, const Backward<T>&, const Scratch& scratch, cudaStream_t)>;

// The same for a backward. `forward` runs before the timing starts, or as a part of what is timed;
// both use the one scratch.
template <class T = float>
void gpu_backward(const std::string& prefix, const Problem& p, const BackwardRow& row,
                  const std::type_identity_t<GpuForward<T>>& forward,
                  const std::type_identity_t<GpuBackward<T>>& f);

}  // namespace fa::bench
