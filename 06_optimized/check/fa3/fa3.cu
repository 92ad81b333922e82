// FlashAttention-3 behind the functions that a stage's peer library has (peer.hpp), so that
// compare.py times both in one process, on the same tensors. What mha_fwd and mha_bwd of
// hopper/flash_api.cpp do for 16 bits, fixed lengths and one split, on memory that is there
// already.
#include <algorithm>
#include <cmath>

#include "06_optimized/check/fa3/fa3.hpp"
#include "common/measure/peers/peer.hpp"
#include "heuristics.h"
#include "tile_size.h"

namespace {

using namespace fa3;

bool in_groups(const fa_peer_call& c) { return c.H != c.Hkv; }

// Of a forward: the heads of a group share tiles of queries where each by itself fills them badly.
bool packed(const fa_peer_call& c) {
  const int d = int(c.d);
  const auto tile =
      tile_size_fwd_sm90(d, d, c.causal != 0, /*local*/ false, /*bytes of a number*/ 2,
                         /*V by columns*/ false, /*pages*/ false, /*softcap*/ false);
  return in_groups(c) && should_pack_gqa(/*lengths*/ false, int(c.N), int(c.H / c.Hkv),
                                         /*rows*/ std::get<0>(tile));
}

// Throws a reason if the call is not for any kernel of this library.
Run kernel_for(const std::string& pass, const fa_peer_call& c) {
  refuse_if(c.dtype != 1 && c.dtype != 2, "takes 16 bits");
  refuse_if(c.Hkv < 1 || c.H % c.Hkv != 0, "H must be a multiple of Hkv");
  refuse_if(c.N <= 0 || c.N % 256 != 0, "built for N that are multiples of 256");
  refuse_if(pass == "deterministic" && c.d > 128, "has no deterministic backward for d > 128");
  const std::string heads = pass != "forward" ? in_groups(c) ? "_groups" : ""
                            : packed(c)       ? "_packed"
                                              : "";
  return kernel_of(pass + heads + (c.dtype == 1 ? "_f16" : ""), c.d, c.causal != 0);
}
std::string backward_pass(const std::string& kernel) {
  if (kernel == "fa3" || kernel == "best") return "backward";
  if (kernel == "fa3_deterministic") return "deterministic";
  throw std::invalid_argument("no kernel is called '" + kernel + "'");
}
void check_forward_name(const std::string& kernel) {
  if (kernel != "fa3" && kernel != "best")
    throw std::invalid_argument("no kernel is called '" + kernel + "'");
}

// What a walk of beyond/ adds to a call: at most one of the two.
struct Twist {
  std::int64_t left = -1, right = -1;  // keys that a query sees on either side; below 0: no window
  double cap = 0;                      // of the scores; 0: none
  bool window() const { return left >= 0; }
  std::string of(const char* pass) const {
    return std::string(pass) + (window() ? "_window" : cap > 0 ? "_softcap" : "");
  }
};

// ---- what a call takes --------------------------------------------------------------------------

// The tiles of a backward, as flash_api.cpp has them: they say how its scratch lies.
std::int64_t queries_of_a_tile(const fa_peer_call& c, const Twist& twist = {}) {
  if (c.d <= 64) return c.causal && twist.cap > 0 ? 96 : 128;
  return c.d <= 128 && !c.causal && !twist.window() && twist.cap == 0 ? 80 : 64;
}
std::int64_t keys_of_a_tile(const fa_peer_call& c) { return c.d <= 128 ? 128 : 80; }

// Offsets into a backward's scratch, in bytes. What it holds before does not matter: the first of
// the three kernels writes the statistics of all rows, padding too, and zeroes the sums of dQ and
// the turns.
struct Parts {
  std::int64_t LSE2, D, dQ, turns;
  // Of groups, whose heads add to dK and dV in fp32. These, and the turns at them, begin with 0.
  std::int64_t dK, dV, dK_turns, dV_turns, end;

  explicit Parts(const fa_peer_call& c, const Twist& twist = {}) {
    const std::int64_t tile = queries_of_a_tile(c, twist),
                       tiles = c.B * c.H * rounded(c.N, tile) / tile;
    const auto next = [](std::int64_t at, std::int64_t numbers) {
      return rounded(at + 4 * numbers, 256);
    };
    LSE2 = 0;
    D = next(LSE2, tiles * tile);
    dQ = next(D, tiles * tile);
    turns = next(dQ, tiles * tile * c.d);
    const std::int64_t key_tile = keys_of_a_tile(c), key_rows = rounded(c.N, key_tile),
                       sums = in_groups(c) ? c.B * c.Hkv * key_rows : 0;
    dK = next(turns, tiles);
    dV = next(dK, sums * c.d);
    dK_turns = next(dV, sums * c.d);
    dV_turns = next(dK_turns, sums / key_tile);
    end = next(dV_turns, sums / key_tile);
  }
};

// What both passes are told. Tensors are [B, H, N, d] without gaps; strides count elements.
Flash_bwd_params params_of(const fa_peer_call& c, const Twist& twist) {
  const std::int64_t row = c.d, head = c.N * row;
  Flash_bwd_params p{};
  p.q_ptr = c.Q, p.k_ptr = c.K, p.v_ptr = c.V, p.o_ptr = c.O;
  p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = row;
  p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = head;
  p.q_batch_stride = p.o_batch_stride = c.H * head;
  p.k_batch_stride = p.v_batch_stride = c.Hkv * head;
  p.v_dim_stride = 1;
  p.softmax_lse_ptr = c.LSE;
  p.b = int(c.B);
  p.h = int(c.H);
  p.h_k = int(c.Hkv);
  p.seqlen_q = p.seqlen_k = int(c.N);
  p.seqlen_q_rounded = p.seqlen_k_rounded = int(rounded(c.N, 128));
  p.total_q = p.total_k = int(c.B * c.N);
  p.d = p.d_rounded = p.dv = p.dv_rounded = int(c.d);
  p.scale_softmax = float(1 / std::sqrt(double(c.d)));
  p.is_causal = c.causal != 0;
  p.is_local = twist.window();
  p.window_size_left = int(twist.window() ? twist.left : c.N - 1);
  p.window_size_right = int(twist.window() ? twist.right : p.is_causal ? 0 : c.N - 1);
  p.softcap = float(twist.cap);
  p.num_splits = 1;
  p.num_sm = multiprocessors();
  return p;
}

void forward(const Run run, const fa_peer_call& c, const Twist& twist) {
  Flash_bwd_params p = params_of(c, twist);
  p.pack_gqa = packed(c);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (p.is_causal || p.is_local) {  // blocks take their next tile from a counter
    p.tile_count_semaphore = static_cast<int*>(c.scratch);
    check(cudaMemsetAsync(p.tile_count_semaphore, 0, sizeof(int), stream));
  }
  run(p, stream);
  check(cudaGetLastError());
}

void backward(const Run run, const fa_peer_call& c, bool deterministic, const Twist& twist) {
  Flash_bwd_params p = params_of(c, twist);
  p.seqlen_q_rounded = int(rounded(c.N, queries_of_a_tile(c, twist)));
  p.seqlen_k_rounded = int(rounded(c.N, keys_of_a_tile(c)));
  p.do_ptr = c.dO, p.dq_ptr = c.dQ, p.dk_ptr = c.dK, p.dv_ptr = c.dV;
  p.do_row_stride = p.dq_row_stride = p.dk_row_stride = p.dv_row_stride = p.q_row_stride;
  p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = p.q_head_stride;
  p.do_batch_stride = p.dq_batch_stride = p.q_batch_stride;
  p.dk_batch_stride = p.dv_batch_stride = p.k_batch_stride;
  const Parts parts(c, twist);
  auto* scratch = static_cast<char*>(c.scratch);
  p.softmax_lse_log2_ptr = scratch + parts.LSE2;
  p.dsoftmax_sum = scratch + parts.D;
  p.dq_accum_ptr = scratch + parts.dQ;
  p.dq_semaphore = reinterpret_cast<int*>(scratch + parts.turns);
  p.deterministic = deterministic;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (in_groups(c)) {
    p.dk_accum_ptr = scratch + parts.dK, p.dv_accum_ptr = scratch + parts.dV;
    p.dk_semaphore = reinterpret_cast<int*>(scratch + parts.dK_turns);
    p.dv_semaphore = reinterpret_cast<int*>(scratch + parts.dV_turns);
    check(cudaMemsetAsync(scratch + parts.dK, 0, std::size_t(parts.end - parts.dK), stream));
  }
  run(p, stream);
  check(cudaGetLastError());
}

}  // namespace

extern "C" {

// Names with what they promise, as a stage's.
const char* fa_peer_kernels() { return "fa3:whole"; }
const char* fa_peer_backward_kernels() { return "fa3:whole fa3_deterministic:whole"; }

const char* fa_peer_compiler() { return FA3_COMPILER; }
const char* fa_peer_flags() { return FA3_FLAGS; }
const char* fa_peer_commit() { return FA3_COMMIT; }
const char* fa_peer_cutlass() { return FA3_CUTLASS; }

const char* fa_peer_unsupported(const char* kernel, const fa_peer_call* call) {
  return fa::bench::as_c([&] {
    check_forward_name(kernel);
    kernel_for("forward", *call);
  });
}
const char* fa_peer_backward_unsupported(const char* kernel, const fa_peer_call* call) {
  return fa::bench::as_c([&] { kernel_for(backward_pass(kernel), *call); });
}

// 4 bytes of scratch.
const char* fa_peer_forward(const char* kernel, const fa_peer_call* call) {
  return fa::bench::as_c([&] {
    check_forward_name(kernel);
    forward(kernel_for("forward", *call), *call, {});
  });
}

const char* fa_peer_backward(const char* kernel, const fa_peer_call* call) {
  return fa::bench::as_c([&] {
    const std::string pass = backward_pass(kernel);
    backward(kernel_for(pass, *call), *call, pass == "deterministic", {});
  });
}

// For the walks: with a window (left and right from 0 on, and no mask besides) or with a cap (and a
// causal mask). A backward's scratch is as large as fa3_twist_scratch_bytes says.
const char* fa3_window_forward(const fa_peer_call* call, std::int64_t left, std::int64_t right) {
  return fa::bench::as_c([&] {
    const Twist twist{left, right};
    forward(kernel_for(twist.of("forward"), *call), *call, twist);
  });
}
const char* fa3_window_backward(const fa_peer_call* call, std::int64_t left, std::int64_t right) {
  return fa::bench::as_c([&] {
    const Twist twist{left, right};
    backward(kernel_for(twist.of("backward"), *call), *call, false, twist);
  });
}
const char* fa3_softcap_forward(const fa_peer_call* call, double cap) {
  return fa::bench::as_c([&] {
    const Twist twist{-1, -1, cap};
    forward(kernel_for(twist.of("forward"), *call), *call, twist);
  });
}
const char* fa3_softcap_backward(const fa_peer_call* call, double cap) {
  return fa::bench::as_c([&] {
    const Twist twist{-1, -1, cap};
    backward(kernel_for(twist.of("backward"), *call), *call, false, twist);
  });
}
std::int64_t fa3_twist_scratch_bytes(const fa_peer_call* call) {
  return std::max(Parts(*call, {0, 0}).end, Parts(*call, {-1, -1, 1}).end);
}

// Device memory that a backward needs; null, or what is wrong.
const char* fa_peer_backward_scratch_bytes(const char* kernel, const fa_peer_call* call,
                                           std::int64_t* bytes) {
  return fa::bench::as_c([&] {
    backward_pass(kernel);
    *bytes = Parts(*call).end;
  });
}
}
