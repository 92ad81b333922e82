// What decode_bench.py asks of decoding as C functions, ours and a peer's.
#pragma once
#include <cstdint>

// Tensors without gaps: Q and O [B, Hq, Nq, d]; K and V [B, Hkv, Nk, d], or, with a table,
// [pages, Hkv, page_size, d]; new_K and new_V [B, Hkv, Nq, d] or null; LSE, lengths or null.
extern "C" struct fa_decode_call {
  std::int64_t B, Hq, Hkv, Nq, Nk, d;
  std::int64_t dtype;  // 0 fp32, 1 fp16, 2 bf16
  std::int64_t page_size, pages, table_stride, splits, scratch_bytes;
  void *Q, *K, *V, *new_K, *new_V, *O, *LSE, *table, *lengths, *scratch, *stream;
};
