// FlashAttention-3's decoding behind the functions of decode's peer library (peer.hpp there), so
// that decode_bench.py times both in one process, on the same tensors. What mha_fwd of
// hopper/flash_api.cpp does for bf16 and sequences of one length, on memory that is there already.
// Its own heuristics choose the number of parts and whether heads are packed.
#include <algorithm>
#include <cmath>

#include "06_optimized/beyond/decode/check/peer.hpp"
#include "06_optimized/check/fa3/fa3.hpp"
#include "common/measure/peers/peer.hpp"
#include "heuristics.h"
#include "tile_size.h"

namespace {

using namespace fa3;

// Throws a reason if the call is not for these kernels.
void check_call(const fa_decode_call& c) {
  refuse_if(c.dtype != 2, "built for bf16");
  refuse_if(c.d != 64 && c.d != 128, "built for d = 64 and 128");
  refuse_if(c.B < 1 || c.Hkv < 1 || c.Hq < 1 || c.Nq < 1 || c.Nk < 1, "built for sizes from 1 on");
  refuse_if(c.Hq % c.Hkv != 0, "Hq must be a multiple of Hkv");
  // What one tile holds. With more, mha_fwd would also read pages and share keys in other ways.
  refuse_if(c.Nq * (c.Hq / c.Hkv) > 128, "built for at most 128 queries on a key head");
  refuse_if(c.lengths, "built for sequences of one length");
  refuse_if(c.new_K || c.new_V, "built for caches that have all keys");
  refuse_if(c.table && (c.page_size != 64 || c.Nk % 64 != 0), "built for full pages of 64 tokens");
  refuse_if(c.table && c.table_stride * c.page_size < c.Nk, "the table is shorter than Nk");
  refuse_if(c.splits < 0 || c.splits > 256, "splits must be in [0, 256]");
}

// Which kernel of them, and where its scratch lies: offsets in bytes.
struct Plan {
  bool paged, causal, packed;
  int splits;
  std::int64_t LSE, parts_LSE, parts_O, turn, end;

  explicit Plan(const fa_decode_call& c) {
    check_call(c);
    paged = c.table != nullptr;
    causal = c.Nq > 1;  // one query sees all keys
    const int d = int(c.d), Nq = int(c.Nq), Nk = int(c.Nk), group = int(c.Hq / c.Hkv);
    const auto tile = tile_size_fwd_sm90(d, d, causal, /*local*/ false, /*bytes of a number*/ 2,
                                         /*V by columns*/ false, paged, /*softcap*/ false);
    const int tile_rows = std::get<0>(tile), tile_keys = std::get<1>(tile);
    splits = int(c.splits);
    if (splits == 0)
      splits = num_splits_heuristic(/*tiles of rows*/ int(c.B * c.Hkv), multiprocessors(),
                                    (Nk + tile_keys - 1) / tile_keys, /*tiles of a head*/ 1,
                                    /*bytes of a head*/ Nk * 2 * d * 2, causal, /*at most*/ 128);
    packed = paged || splits > 1 ||
             (group > 1 && should_pack_gqa(/*lengths*/ false, Nq, group, tile_rows));

    const std::int64_t rows = c.B * c.Hq * c.Nq, parts = splits > 1 ? splits : 0;
    const auto next = [](std::int64_t at, std::int64_t numbers) {
      return rounded(at + 4 * numbers, 256);
    };
    LSE = 0;
    parts_LSE = next(LSE, rows);
    parts_O = next(parts_LSE, parts * rows);
    turn = next(parts_O, parts * rows * c.d);
    end = next(turn, 1);
  }

  std::string pass() const {
    const char* how = splits > 1 ? "_split" : packed && !paged ? "_packed" : "";
    return std::string("decode") + (paged ? "_paged" : "") + how;
  }
};

// Tensors are as peer.hpp says; strides count elements. A page is a batch of its own.
Flash_bwd_params params_of(const fa_decode_call& c, const Plan& plan) {
  const std::int64_t rows = c.B * c.Hq * c.Nq, keys = plan.paged ? c.page_size : c.Nk;
  auto* scratch = static_cast<char*>(c.scratch);
  Flash_bwd_params p{};
  p.q_ptr = c.Q, p.k_ptr = c.K, p.v_ptr = c.V, p.o_ptr = c.O;
  p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = c.d;
  p.q_head_stride = p.o_head_stride = c.Nq * c.d;
  p.k_head_stride = p.v_head_stride = keys * c.d;
  p.q_batch_stride = p.o_batch_stride = c.Hq * c.Nq * c.d;
  p.k_batch_stride = p.v_batch_stride = c.Hkv * keys * c.d;
  p.v_dim_stride = 1;
  p.softmax_lse_ptr = c.LSE ? c.LSE : scratch + plan.LSE;  // it is always written
  p.b = p.b_k = int(c.B);
  p.h = int(c.Hq);
  p.h_k = int(c.Hkv);
  p.seqlen_q = int(c.Nq);
  p.seqlen_k = int(c.Nk);
  p.seqlen_q_rounded = int(rounded(c.Nq, 128));
  p.seqlen_k_rounded = int(rounded(c.Nk, 128));
  p.total_q = int(c.B * c.Nq);
  p.total_k = int(c.B * c.Nk);
  p.d = p.d_rounded = p.dv = p.dv_rounded = int(c.d);
  p.scale_softmax = float(1 / std::sqrt(double(c.d)));
  p.is_bf16 = true;
  p.is_causal = plan.causal;
  p.window_size_left = int(c.Nk - 1);
  p.window_size_right = plan.causal ? 0 : int(c.Nq - 1);
  p.page_table = static_cast<int*>(c.table);
  p.page_table_batch_stride = c.table_stride;
  p.page_size = plan.paged ? int(c.page_size) : 1;
  p.num_pages = int(c.pages);
  p.num_splits = plan.splits;
  p.pack_gqa = plan.packed;
  p.arch = 90;
  p.num_sm = multiprocessors();
  if (plan.splits > 1) {  // O [splits, B, Hq, Nq, d] and LSE [splits, B, Hq, Nq] of the parts
    p.oaccum_ptr = scratch + plan.parts_O;
    p.oaccum_row_stride = c.d;
    p.oaccum_head_stride = c.Nq * c.d;
    p.oaccum_batch_stride = c.Hq * c.Nq * c.d;
    p.oaccum_split_stride = rows * c.d;
    p.softmax_lseaccum_ptr = scratch + plan.parts_LSE;
    p.lseaccum_head_stride = c.Nq;
    p.lseaccum_batch_stride = c.Hq * c.Nq;
    p.lseaccum_split_stride = rows;
  } else if (plan.causal) {
    p.tile_count_semaphore = reinterpret_cast<int*>(scratch + plan.turn);
  }
  return p;
}

}  // namespace

extern "C" {

// Null, or what is wrong.
const char* fa_decode_forward(const fa_decode_call* call) {
  return fa::bench::as_c([&] {
    const Plan plan(*call);
    refuse_if(call->scratch_bytes < plan.end,
              "needs " + std::to_string(plan.end) + " bytes of scratch");
    const Run run = kernel_of(plan.pass(), call->d, plan.causal);
    const Run merge = plan.splits > 1 ? kernel_of("decode_merge", call->d, false) : nullptr;
    Flash_bwd_params p = params_of(*call, plan);
    const auto stream = static_cast<cudaStream_t>(call->stream);
    if (p.tile_count_semaphore)  // blocks take their next tile from a counter
      check(cudaMemsetAsync(p.tile_count_semaphore, 0, sizeof(int), stream));
    run(p, stream);
    if (merge) merge(p, stream);
    check(cudaGetLastError());
  });
}

// Device memory that a call needs, and the number of parts where call->splits is 0.
const char* fa_decode_plan(const fa_decode_call* call, std::int64_t* bytes, std::int64_t* parts) {
  return fa::bench::as_c([&] {
    const Plan plan(*call);
    *bytes = plan.end;
    *parts = plan.splits;
  });
}
}
