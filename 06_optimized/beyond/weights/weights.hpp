// "Where are the weights?" FlashAttention writes no P, but whoever has Q, K and the L that the
// forward returned can make any part of it again:
//
//   P_ij = exp(scale q_i . k_j - L_i)
//
// Three questions, and only their answers are written: a tile of P, the largest weights of a row,
// the sum of a column. No buffer grows with Nq Nk, and there is no scratch. Forward only: no
// gradient flows through what is looked at.
#pragma once
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstdint>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::weights {

inline constexpr int max_k = 16;  // largest weights of a row
template <class T>
inline constexpr int widest = sizeof(T) == 4 ? 128 : 256;  // d, at most

// LSE is what the forward returned for these Q and K: [B, Hq, Nq] without gaps. A row whose L is
// -infinity sees nothing.
template <class T>
struct Inputs {
  View<const T> Q, K;
  const float* LSE = nullptr;
};

// Rows [i0, i0 + rows) and keys [j0, j0 + cols) of every head.
struct Box {
  std::int64_t i0 = 0, rows = 0, j0 = 0, cols = 0;
};

// One head alone, as a problem of its own.
template <class T>
struct Head {
  Problem p;
  Inputs<T> in;
};
template <class T>
Head<T> one_head(const Problem& p, const Inputs<T>& in, std::int64_t b, std::int64_t h);

// All three: T is float (d <= 128), or __half or __nv_bfloat16 (tensor cores, compute capability
// 8.0 and later, d <= 256). Any finite scale, negative ones too: no maximum is taken here. All
// pointers are to device memory; key lengths are clamped to [0, Nk]. What a row does not see has
// weight 0, whatever K holds there. A NaN in L_i or in q_i makes NaN of the weights that row i
// sees, a NaN in k_j, if L was made without it, of those of key j. The same bits from run to run.
//
// They throw std::invalid_argument, before any write, for arguments outside of this, and
// fa::CudaError where CUDA fails; they put their work on the stream and return at once.

// P is [B, Hq, box.rows, box.cols].
template <class T>
void tile(const Problem& p, const Inputs<T>& in, const Box& box, const View<float>& P,
          cudaStream_t stream = nullptr);

// Of rows [i0, i0 + rows) the k largest weights, 1 <= k <= 16, in descending order, and of equal
// ones the smaller key first: P and keys are [B, Hq, rows, k]. Who sees fewer than k keys gets
// weight 0 and key -1 in the places that are left. NaN counts as larger than any number.
template <class T>
void largest(const Problem& p, const Inputs<T>& in, std::int64_t i0, std::int64_t rows, int k,
             const View<float>& P, const View<std::int32_t>& keys, cudaStream_t stream = nullptr);

// sums is [B, Hq, Nk] without gaps: c_j = sum_i P_ij over all rows. No atomics.
template <class T>
void column_sums(const Problem& p, const Inputs<T>& in, float* sums, cudaStream_t stream = nullptr);

// ---- what the files of this walk give each other ----------------------------------------------

// A tile of P if k = 0, else the k largest weights of its rows; box.cols is then all keys.
struct Wanted {
  Box box;
  int k;
  View<float> P;
  View<std::int32_t> keys;

  // A block looks at so many keys: all of them if it looks for the largest.
  FA_HOST_DEVICE std::int64_t keys_of_a_block() const { return k ? box.cols : 512; }
  FA_HOST_DEVICE std::int64_t parts() const {
    return k ? 1 : (box.cols + keys_of_a_block() - 1) / keys_of_a_block();
  }
};

void launch_tiled(const Problem& p, const Inputs<float>& t, const Wanted& wanted, float scale,
                  cudaStream_t stream);
void launch_columns(const Problem& p, const Inputs<float>& t, float* sums, float scale,
                    cudaStream_t stream);
template <class T>
void launch_fa2(const Problem& p, const Inputs<T>& t, const Wanted& wanted, float scale,
                cudaStream_t stream);
template <class T>
void launch_fa2_columns(const Problem& p, const Inputs<T>& t, float* sums, float scale,
                        cudaStream_t stream);

}  // namespace fa::weights
