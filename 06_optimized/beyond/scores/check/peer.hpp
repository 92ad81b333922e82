// What scores_bench.py asks of this walk, as C functions.
#pragma once
#include <cstdint>

// Tensors [B, H, N, d] without gaps, bf16; LSE and dbias fp32. `slopes`, `bias`, `cos` and `sin`
// may be null, cap 0. The bias, bf16, has strides of its own, dbias the same.
// kernel: 0 best, 1 fa2, 2 hopper, 3 hopper and deterministic.
extern "C" struct fa_scores_call {
  std::int64_t B, H, N, d, causal, positions, dims, interleaved, bias_batch, bias_head, bias_row,
      scratch_bytes, kernel;
  double cap;
  void *Q, *K, *V, *O, *LSE, *dO, *dQ, *dK, *dV, *slopes, *bias, *cos, *sin, *dbias, *scratch,
      *stream;
};
