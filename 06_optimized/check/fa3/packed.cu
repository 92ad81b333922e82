// FlashAttention-3 for sequences of different lengths, behind the functions of packed's peer
// library (peer.hpp there), so that packed_bench.py times both in one process, on the same tensors.
// What mha_fwd and mha_bwd of hopper/flash_api.cpp do for bf16, a causal mask, equal numbers of
// heads, offsets of queries that are those of keys and one split, on memory that is there already.
#include <algorithm>
#include <cmath>

#include "06_optimized/beyond/packed/check/peer.hpp"
#include "06_optimized/check/fa3/fa3.hpp"
#include "common/measure/peers/peer.hpp"

namespace {

using namespace fa3;

// Throws a reason if the call is not for these kernels.
void check_call(const fa_packed_call& c) {
  refuse_if(c.dtype != 2, "built for bf16");
  refuse_if(c.Hq != c.Hkv, "built for as many key heads as query heads");
  refuse_if(c.causal == 0 || c.queries != c.keys || c.Nq != c.Nk,
            "built for a causal mask, and keys where the queries are");
  refuse_if(c.B < 1 || c.Nq < 1, "built for sizes from 1 on");
  refuse_if(!c.queries_on_host, "wants the offsets on the host, too: it is told the longest");
}

std::int64_t longest(const fa_packed_call& c) {
  const auto* offsets = static_cast<const std::int32_t*>(c.queries_on_host);
  std::int64_t most = 0;
  for (std::int64_t b = 0; b < c.B; ++b)
    most = std::max<std::int64_t>(most, offsets[b + 1] - offsets[b]);
  return most;
}

// Offsets into scratch, in bytes. What it holds before does not matter.
struct Parts {
  // Of a forward: for each sequence its parts, its tiles, its place by length and how many heads
  // run side by side; then the counter from which blocks take their next tile.
  std::int64_t vectors, forward_end;
  // Of a backward, with each sequence's rows rounded up to whole tiles.
  std::int64_t LSE2, D, dQ, turns, backward_end;

  explicit Parts(const fa_packed_call& c) {
    vectors = rounded(c.B, 4);  // numbers in one of the four
    forward_end = 4 * (4 * vectors + 1);
    const std::int64_t tile = queries_of_a_tile(c), rows = rounded(c.Nq + c.B * tile, tile);
    const auto next = [](std::int64_t at, std::int64_t numbers) {
      return rounded(at + 4 * numbers, 256);
    };
    LSE2 = 0;
    D = next(LSE2, c.Hq * rows);
    dQ = next(D, c.Hq * rows);
    turns = next(dQ, c.Hq * rows * c.d);
    backward_end = next(turns, c.B * c.Hq * rounded(longest(c), tile) / tile);
  }
  static std::int64_t queries_of_a_tile(const fa_packed_call& c) { return c.d <= 64 ? 128 : 64; }
};

// What both passes are told. Tensors are [tokens, H, d] without gaps; strides count elements.
Flash_bwd_params params_of(const fa_packed_call& c) {
  Flash_bwd_params p{};
  p.q_ptr = c.Q, p.k_ptr = c.K, p.v_ptr = c.V, p.o_ptr = c.O;
  p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = c.Hq * c.d;
  p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = c.d;
  p.v_dim_stride = 1;
  p.softmax_lse_ptr = c.LSE;  // [H, tokens]
  p.cu_seqlens_q = static_cast<int*>(c.queries);
  p.cu_seqlens_k = static_cast<int*>(c.keys);
  p.b = p.b_k = int(c.B);
  p.h = p.h_k = int(c.Hq);
  p.seqlen_q = p.seqlen_k = int(longest(c));
  p.seqlen_q_rounded = p.seqlen_k_rounded = int(rounded(longest(c), 128));
  p.total_q = p.total_k = int(c.Nq);
  p.d = p.d_rounded = p.dv = p.dv_rounded = int(c.d);
  p.scale_softmax = float(1 / std::sqrt(double(c.d)));
  p.is_bf16 = true;
  p.is_causal = true;
  p.window_size_left = int(longest(c) - 1);
  p.window_size_right = 0;
  p.num_splits = 1;
  p.arch = 90;
  p.num_sm = multiprocessors();
  return p;
}

}  // namespace

extern "C" {

// All of these: null, or what is wrong.
const char* fa_packed_plan(const fa_packed_call* call, std::int64_t* forward_bytes,
                           std::int64_t* backward_bytes) {
  return fa::bench::as_c([&] {
    check_call(*call);
    *forward_bytes = Parts(*call).forward_end;
    *backward_bytes = Parts(*call).backward_end;
  });
}

const char* fa_packed_forward(const fa_packed_call* call) {
  return fa::bench::as_c([&] {
    const fa_packed_call& c = *call;
    check_call(c);
    const Parts parts(c);
    refuse_if(c.scratch_bytes < parts.forward_end, "scratch is too small");
    Flash_bwd_params p = params_of(c);
    auto* numbers = static_cast<int*>(c.scratch);
    p.num_splits_dynamic_ptr = numbers;
    p.num_m_blocks_ptr = numbers + parts.vectors;
    p.varlen_batch_idx_ptr = numbers + 2 * parts.vectors;
    p.num_nheads_in_l2_ptr = numbers + 3 * parts.vectors;
    p.tile_count_semaphore = numbers + 4 * parts.vectors;
    p.tile_count_semaphore_offset = int(4 * parts.vectors);
    p.varlen_sort_batches = p.head_swizzle = true;
    p.prepare_varlen_pdl = c.B <= 992;
    kernel_of("forward_varlen", c.d, true)(p, static_cast<cudaStream_t>(c.stream));
    check(cudaGetLastError());
  });
}

const char* fa_packed_backward(const fa_packed_call* call) {
  return fa::bench::as_c([&] {
    const fa_packed_call& c = *call;
    check_call(c);
    const Parts parts(c);
    refuse_if(c.scratch_bytes < parts.backward_end, "scratch is too small");
    Flash_bwd_params p = params_of(c);
    p.seqlen_q_rounded = int(rounded(longest(c), parts.queries_of_a_tile(c)));
    p.do_ptr = c.dO, p.dq_ptr = c.dQ, p.dk_ptr = c.dK, p.dv_ptr = c.dV;
    p.do_row_stride = p.dq_row_stride = p.dk_row_stride = p.dv_row_stride = p.q_row_stride;
    p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = p.q_head_stride;
    auto* scratch = static_cast<char*>(c.scratch);
    p.softmax_lse_log2_ptr = scratch + parts.LSE2;
    p.dsoftmax_sum = scratch + parts.D;
    p.dq_accum_ptr = scratch + parts.dQ;
    p.dq_semaphore = reinterpret_cast<int*>(scratch + parts.turns);
    kernel_of("backward_varlen", c.d, true)(p, static_cast<cudaStream_t>(c.stream));
    check(cudaGetLastError());
  });
}
}
