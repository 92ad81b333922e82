// What packed_bench.py asks of packed sequences as C functions.
#pragma once
#include <cstdint>

// Tensors without gaps: [tokens, heads, d], LSE [Hq, Nq]; if padded, [B, N, heads, d], LSE
// [B, Hq, N]. causal as in fa::Causal, order as in packed::Order.
extern "C" struct fa_packed_call {
  std::int64_t B, Hq, Hkv, Nq, Nk, d, causal, order;
  std::int64_t dtype;   // 0 fp32, 1 fp16, 2 bf16
  std::int64_t kernel;  // 1 fa2 and swizzle, 2 hopper
  std::int64_t scratch_bytes;
  void *Q, *K, *V, *O, *LSE, *dO, *dQ, *dK, *dV;
  // Offsets, int32 [B + 1], if padded lengths, int64 [B]; the offsets in host memory, or null.
  void *queries, *keys, *lengths, *queries_on_host;
  void *scratch, *stream;
};
