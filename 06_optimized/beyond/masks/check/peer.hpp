// What masks_bench.py asks of masks as C functions.
#pragma once
#include <cstdint>

// Tensors without gaps: Q, O, dO and dQ [B, Hq, Nq, d]; K, V, dK and dV [B, Hkv, Nk, d]; LSE
// [B, Hq, Nq]. left and right: negative for no limit. One list for all batch entries and heads, or
// none: offsets [ceil(N / 128) + 1]. Documents, if there are, are sorted.
extern "C" struct fa_masks_call {
  std::int64_t B, Hq, Hkv, Nq, Nk, d;
  std::int64_t dtype;   // 0 fp32, 1 fp16, 2 bf16
  std::int64_t causal;  // 0, or 1: aligned to the bottom right
  std::int64_t left, right, first, entries, scratch_bytes;
  std::int64_t kernel;  // 0 best, 1 fa2, 2 hopper, 3 hopper and deterministic
  void *Q, *K, *V, *O, *LSE, *dO, *dQ, *dK, *dV;
  void *keys_offsets, *keys_numbers, *queries_offsets, *queries_numbers, *sinks, *dsinks;
  void *scratch, *stream, *query_documents, *key_documents;
};
