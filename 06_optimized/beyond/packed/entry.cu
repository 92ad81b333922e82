// From the public face to the kernels: check the arguments, cut the scratch, launch in order.
#include <algorithm>
#include <string>
#include <type_traits>

#include "06_optimized/beyond/packed/packed.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/core/check.hpp"

namespace fa::packed {
namespace {

constexpr const char* who = "packed";

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// All sequences as the one entry of a batch: so the views' batch is never used.
Problem as_one(const Problem& p) {
  Problem one = p;
  one.B = 1;
  return one;
}

template <class T>
void check_sizes(const Problem& p) {
  require(p.B >= 0 && p.B <= 1 << 29, who,
          ": B, the number of sequences, must lie in [0, 2^29], got ", p.B);
  check_problem(who, as_one(p), widest<T>);
  require(!p.key_lengths, who, ": key_lengths must be null; the offsets say where sequences end");
  require(std::max(p.Nq, p.Nk) <= 1 << 29, who,
          ": Nq and Nk, all queries and keys, must be at most 2^29, got ", p.Nq, " and ", p.Nk);
  // The smallest tile has 16 rows; a grid has at most 2^31 - 1 blocks along x.
  require(p.Hkv == 0 || std::max(p.Nq, p.Nk) / 16 + p.B <= (1 << 30) / std::max(p.Hq, p.Hkv), who,
          ": Hq (max(Nq, Nk) / 16 + B) must be at most 2^30, got Hq = ", p.Hq, ", Nq = ", p.Nq,
          ", Nk = ", p.Nk, ", B = ", p.B);
}

void check_offsets(const char* name, const std::int32_t* there, const std::int32_t* on_host,
                   std::int64_t B, const char* total_name, std::int64_t total) {
  require(there, who, ": ", name, " is a null pointer; it needs B + 1 = ", B + 1, " offsets");
  require(reinterpret_cast<std::uintptr_t>(there) % alignof(std::int32_t) == 0, who, ": ", name,
          " must be aligned to its element, ", sizeof(std::int32_t), " bytes");
  if (!on_host) return;
  require(on_host[0] >= 0, who, ": ", name, "[0] must not be negative, got ", on_host[0]);
  for (std::int64_t b = 0; b < B; ++b)
    require(on_host[b + 1] >= on_host[b], who, ": ", name, "[", b + 1, "] must be at least ", name,
            "[", b, "] = ", on_host[b], ", got ", on_host[b + 1]);
  require(on_host[B] <= total, who, ": ", name, "[", B, "] must be at most ", total_name, " = ",
          total, ", got ", on_host[B]);
}

void check_sequences(const Problem& p, const Sequences& s) {
  check_offsets("queries", s.queries, s.queries_on_host, p.B, "Nq", p.Nq);
  check_offsets("keys", s.keys, s.keys_on_host, p.B, "Nk", p.Nk);
}

// What tensor cores want besides.
template <class T>
void check_capability(const Problem& p) {
  if constexpr (is_half<T>) {
    const std::string why = optimized::wrong_capability(who, 80, optimized::device_capability());
    require(why.empty(), why);
    const std::string wrong = optimized::wrong_scale(p);
    require(wrong.empty(), who, wrong);
  }
}

void check_order(Order order, Kernel kernel) {
  require(kernel >= Kernel::best && kernel <= Kernel::hopper, who,
          ": kernel has the unknown value ", static_cast<int>(kernel));
  require(order >= Order::automatic && order <= Order::given, who, ": order has the unknown value ",
          static_cast<int>(order));
}

// With few blocks for each SM, how long the last ones run counts more than what the L2 cache saves;
// not at d <= 64, where a tile takes half as long to compute, and as many keys come with it; nor
// for hopper, which computes as fast.
Order chosen(Order order, const Problem& p, const Side& side, bool hopper) {
  if (order != Order::automatic) return order;
  if (hopper) return Order::sequences;
  constexpr std::int64_t few = 32;
  const std::int64_t blocks = side.most(p) * (side.keys ? p.Hkv : p.Hq);
  return p.d > 64 && blocks <= few * processors() ? Order::tiles : Order::sequences;
}

// Tall tiles pay where a sequence is long; short ones have a third of a block idle then.
Side queries_of_hopper(const Problem& p, const Sequences& s) {
  bool tall = p.Nq > long_sequence * p.B;
  if (const std::int32_t* const offsets = s.queries_on_host)
    tall = std::adjacent_find(offsets, offsets + p.B + 1, [](std::int32_t from, std::int32_t to) {
             return to - from > long_sequence;
           }) != offsets + p.B + 1;
  return {false, hopper_tile, tall && p.d <= 64 ? tall_tile : hopper_tile};
}

// Hands out the scratch, piece by piece, in multiples of 16 bytes.
struct Pieces {
  char* begin;
  std::size_t used = 0;

  template <class X>
  X* take(std::int64_t n) {
    X* const piece = reinterpret_cast<X*>(begin ? begin + used : nullptr);
    used += (std::size_t(n) * sizeof(X) + 15) / 16 * 16;
    return piece;
  }
  List list(const Problem& p, const Side& side) {
    const std::int64_t most = side.most(p);
    return {take<Work>(most), int(most)};
  }
};

struct ForwardScratch : Pieces {
  std::int32_t* offsets;  // and behind them a number, for who counts
  List list;

  ForwardScratch(const Problem& p, const Side& queries, void* data)
      : Pieces{static_cast<char*>(data)} {
    offsets = take<std::int32_t>(2 * (p.B + 1) + 1);
    list = Pieces::list(p, queries);
  }
};

template <class T>
struct BackwardScratch : Pieces {
  std::int32_t* offsets;  // as above
  Side queries, keys;
  List of_queries, of_keys;
  Passed passed{};

  BackwardScratch(const Problem& p, bool hopper, void* data) : Pieces{static_cast<char*>(data)} {
    offsets = take<std::int32_t>(2 * (p.B + 1) + 1);
    queries = {false, hopper ? hopper_tile : dq_tile<T>(p.d)};
    keys = {true, hopper ? hopper_tile : dkv_tile<T>(p.d)};
    of_queries = list(p, queries);
    of_keys = list(p, keys);
    passed.rows = is_half<T> ? Work::padded_row(p.Nq, p.B) : p.Nq;
    passed.D = take<float>(p.Hq * passed.rows);
    if (is_half<T>) passed.LSE2 = take<float>(p.Hq * passed.rows);
    if (hopper) passed.dQ = take<float>(p.Hq * passed.rows * Passed::padded(p.d));
    if (data) passed.taken = reinterpret_cast<unsigned*>(offsets + 2 * (p.B + 1));
  }
};

// Is this call for hopper? Tensors: Forward<T> or Backward<T>.
template <class T, class Tensors>
bool takes_hopper(const Problem& p, const Tensors& t, Kernel kernel, bool in_order = false) {
  if constexpr (is_half<T>) {
    if (kernel == Kernel::fa2) return false;
    std::string why_not = not_for_hopper(p, t);
    if (in_order) why_not = "hopper's backward is not deterministic";
    if (why_not.empty())
      why_not = optimized::wrong_capability("hopper", 90, optimized::device_capability());
    require(kernel != Kernel::hopper || why_not.empty(), who, ": ", why_not);
    return why_not.empty();
  } else {
    return false;
  }
}

// Without heads of queries gradients of keys are still written: 0.
bool nothing_to_do(const Problem& p) { return p.B == 0 || p.Hkv == 0; }

}  // namespace

template <class T>
std::size_t scratch_bytes(const Problem& p) {
  check_sizes<T>(p);
  const Side queries{false, std::min(forward_tile<T>(p.d), hopper_tile)};
  return nothing_to_do(p) ? 0 : ForwardScratch(p, queries, nullptr).used;
}

template <class T>
std::size_t backward_scratch_bytes(const Problem& p) {
  check_sizes<T>(p);
  if (nothing_to_do(p)) return 0;
  const bool hopper = is_half<T> && p.d <= 128 && optimized::device_capability() == 90;
  const std::size_t plain = BackwardScratch<T>(p, false, nullptr).used;
  return hopper ? std::max(plain, BackwardScratch<T>(p, true, nullptr).used) : plain;
}

template <class T>
void forward(const Problem& p, const Sequences& s, const Forward<T>& t, const Options& options) {
  check_sizes<T>(p);
  check_tensors(who, as_one(p), t);
  check_sequences(p, s);
  check_order(options.order, options.kernel);
  check_capability<T>(p);
  require(!is_half<T> || float(p.softmax_scale()) > 0, who, ": scale must be > 0 in fp32, got ",
          p.softmax_scale(), "; the maximum is taken before scaling");
  check_scratch(who, options.scratch, "scratch_bytes()", scratch_bytes<T>(p), 16);
  if (nothing_to_do(p) || p.Hq == 0 || p.Nq == 0) return;
  const bool hopper = takes_hopper<T>(p, t, options.kernel);
  const Side queries = hopper ? queries_of_hopper(p, s) : Side{false, forward_tile<T>(p.d)};
  const ForwardScratch scratch(p, queries, options.scratch.data);
  const float scale = float(p.softmax_scale());
  launch_offsets(p, s, scratch.offsets, options.stream);
  const Order order = chosen(options.order, p, queries, hopper);
  launch_lists(p, scratch.offsets, {{{queries, order, scratch.list}}, 1}, options.stream);
  if constexpr (is_half<T>)
    hopper ? launch_hopper(p, t, queries, scratch.list, scratch.offsets + 2 * (p.B + 1), scale,
                           options.stream)
           : launch_fa2(p, t, scratch.list, scale, options.stream);
  else
    launch_tiled(p, t, scratch.list, scale, options.stream);
}

template <class T>
void backward(const Problem& p, const Sequences& s, const Backward<T>& t, const Options& options) {
  check_sizes<T>(p);
  check_tensors(who, as_one(p), t);
  check_sequences(p, s);
  check_order(options.order, options.kernel);
  check_capability<T>(p);
  const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
  require(!rows || t.LSE, who, ": LSE must not be null; let the forward write it");
  require(!rows || t.O.data, who, ": O must not be null; the forward returned it");
  check_scratch(who, options.scratch, "backward_scratch_bytes()", backward_scratch_bytes<T>(p), 16);
  if (nothing_to_do(p)) return;
  const bool hopper = takes_hopper<T>(p, t, options.kernel, options.deterministic) && p.Hq > 0;
  const BackwardScratch<T> scratch(p, hopper, options.scratch.data);
  const Passed& passed = scratch.passed;
  const float scale = float(p.softmax_scale());
  const cudaStream_t stream = options.stream;
  const auto listed = [&](const Side& side, const List& list) {
    return ToList{side, chosen(options.order, p, side, hopper), list};
  };
  launch_offsets(p, s, scratch.offsets, stream);
  launch_lists(
      p, scratch.offsets,
      {{listed(scratch.queries, scratch.of_queries), listed(scratch.keys, scratch.of_keys)}, 2},
      stream);
  if constexpr (is_half<T>)
    if (hopper)
      return launch_hopper(p, t, scratch.of_queries, scratch.of_keys, scale, passed, stream);
  if (rows) {
    if constexpr (is_half<T>) {
      launch_before(p, t, scratch.of_queries, scratch.queries.size, passed, stream);
      launch_swizzle_dq(p, t, scratch.of_queries, scale, passed, stream);
    } else {
      launch_delta(p, t, passed.D, stream);
      launch_dq(p, t, scratch.of_queries, scale, passed.D, stream);
    }
  }
  if (p.Nk == 0) return;
  if constexpr (is_half<T>)
    launch_swizzle_dkv(p, t, scratch.of_keys, scale, passed, stream);
  else
    launch_dkv(p, t, scratch.of_keys, scale, passed.D, stream);
}

#define FA_FOR(T)                                                                             \
  template std::size_t scratch_bytes<T>(const Problem&);                                      \
  template std::size_t backward_scratch_bytes<T>(const Problem&);                             \
  template void forward(const Problem&, const Sequences&, const Forward<T>&, const Options&); \
  template void backward(const Problem&, const Sequences&, const Backward<T>&, const Options&)
FA_FOR(float);
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::packed
