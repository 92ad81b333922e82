// From the public face to the kernels: check the arguments, make windows of causal masks, launch.
#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/masks/reach.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/core/check.hpp"

namespace fa::masks {
namespace {

constexpr const char* who = "masks";

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

std::int64_t blocks_of(std::int64_t n) { return (n + block - 1) / block; }

template <class T>
void check_sizes(const Problem& p) {
  check_problem(who, p, widest<T>);
  require(std::max(p.Nq, p.Nk) <= 1 << 29, who, ": Nq and Nk must be at most 2^29, got ", p.Nq,
          " and ", p.Nk);
  const std::int64_t tiles = (std::max(p.Nq, p.Nk) + 15) / 16;  // of the smallest kernel
  const std::int64_t heads = std::max(p.Hq, p.Hkv);
  require(p.B <= 1 << 30 && (p.B == 0 || heads <= (1 << 30) / p.B) &&
              (p.B * heads == 0 || tiles <= (1 << 30) / (p.B * heads)),
          who, ": B Hq max(Nq, Nk) / 16 must be at most 2^30, got B = ", p.B, ", Hq = ", p.Hq,
          ", Nq = ", p.Nq, ", Nk = ", p.Nk);
}

void check_list(const Problem& p, const char* name, const Blocks& list, std::int64_t N) {
  if (!list.offsets) {
    require(!list.numbers && list.lists == 0 && list.entries == 0, who, ": ", name,
            ".offsets is a null pointer, but there are ", list.lists, " lists and ", list.entries,
            " entries");
    return;
  }
  require(list.entries >= 0 && list.entries < std::int64_t(1) << 31, who, ": ", name,
          ".entries must lie in [0, 2^31), got ", list.entries);
  require(list.numbers || list.entries == 0, who, ": ", name,
          ".numbers is a null pointer, but there are ", list.entries, " entries");
  require(list.batch >= 0 && list.head >= 0, who, ": ", name,
          ".batch and head must be at least 0, got ", list.batch, " and ", list.head);
  require(list.lists >= 0 && list.lists < std::int64_t(1) << 31 &&
              std::max(list.batch, list.head) < std::int64_t(1) << 31,
          who, ": ", name, ".lists, batch and head must be below 2^31, got ", list.lists, ", ",
          list.batch, " and ", list.head);
  const bool none = p.B == 0 || p.Hq == 0;
  const std::int64_t last =
      none ? 0 : (p.B - 1) * list.batch + (p.Hq - 1) * list.head + blocks_of(N);
  require(list.lists >= last, who, ": ", name, ".lists must be at least (B - 1) batch + ",
          "(Hq - 1) head + ceil(N / 128) = ", last, ", got ", list.lists);
}

void check_pattern(const Problem& p, const Pattern& m, bool backward) {
  const auto at_least_0 = [](const char* name, std::int64_t x, const char* none) {
    require(x >= 0, who, ": ", name, " must be at least 0", none, ", got ", x);
  };
  at_least_0("left", m.left, "; no_limit is none");
  at_least_0("right", m.right, "; no_limit is none");
  at_least_0("first", m.first, "");
  require(p.causal == Causal::none || m.right == no_limit || m.right == 0, who,
          ": right must be no_limit or 0 with a causal mask, got ", m.right);
  require(!m.top_left || p.causal != Causal::bottom_right, who,
          ": top_left must be false with a causal mask that is aligned to the bottom right");
  require((m.query_documents == nullptr) == (m.key_documents == nullptr), who,
          ": query_documents and key_documents must both be given or both be null, got ",
          m.query_documents ? "query_documents" : "key_documents", " alone");
  require(!m.sorted || m.query_documents, who, ": sorted is about documents, and there are none");
  check_list(p, "keys", m.keys, p.Nq);
  check_list(p, "queries", m.queries, p.Nk);
  if (!backward) return;
  require((m.keys.offsets == nullptr) == (m.queries.offsets == nullptr), who,
          ": the backward wants the list `keys` and the same transposed, `queries`; got ",
          m.keys.offsets ? "keys" : "queries", " alone");
}

// An array of n numbers without gaps. One that is not given overlaps nothing.
template <class X>
detail::Region array(const char* name, X* data, std::int64_t n) {
  return {name, data, sizeof(X), 1, 1, n > 0, n, 0, 0, 0, true};
}

// What a pattern reads and the tensors do not hold: aligned, and apart from what is written.
void check_apart(const Problem& p, const Pattern& m, std::span<const detail::Region> outputs) {
  const detail::Region inputs[] = {array("key_lengths", p.key_lengths, p.B),
                                   array("prefix", m.prefix, p.B),
                                   array("query_documents", m.query_documents, p.B * p.Nq),
                                   array("key_documents", m.key_documents, p.B * p.Nk),
                                   array("keys.offsets", m.keys.offsets, m.keys.lists + 1),
                                   array("keys.numbers", m.keys.numbers, m.keys.entries),
                                   array("queries.offsets", m.queries.offsets, m.queries.lists + 1),
                                   array("queries.numbers", m.queries.numbers, m.queries.entries),
                                   array("sinks", m.sinks, p.Hq)};
  detail::check_regions(who, inputs, outputs);
}

template <class T>
void check_kernel([[maybe_unused]] const Problem& p, Kernel kernel, [[maybe_unused]] bool forward) {
  require(kernel >= Kernel::best && kernel <= Kernel::hopper, who,
          ": kernel has the unknown value ", static_cast<int>(kernel));
  if constexpr (is_half<T>) {
    const char* const name = forward ? "fa2" : "swizzle";
    const std::string why = optimized::wrong_capability(name, 80, optimized::device_capability());
    require(why.empty(), who, ": ", why);
    require(!forward || float(p.softmax_scale()) > 0, who, ": scale must be > 0 in fp32, got ",
            p.softmax_scale(), "; the maximum is taken before scaling");
    const std::string wrong = optimized::wrong_scale(p);
    require(wrong.empty(), who, wrong);
  }
}

// Is this call for hopper?
bool takes_hopper(Kernel kernel, std::string why_not) {
  if (kernel == Kernel::fa2) return false;
  if (why_not.empty())
    why_not = optimized::wrong_capability("hopper", 90, optimized::device_capability());
  require(kernel != Kernel::hopper || why_not.empty(), who, ": ", why_not);
  return why_not.empty();
}

// The mask that the pattern comes to, where a problem has it without a pattern: the stage's own
// kernels take it, which ask nobody who sees whom. Of a pattern as as_window() leaves it.
std::optional<Causal> plain_mask(const Problem& p, const Pattern& m) {
  if (m.sinks || m.prefix || m.query_documents || m.keys.offsets) return {};
  const std::int64_t offset = m.top_left ? 0 : p.Nk - p.Nq;
  if (m.left < p.Nq - 1 + offset && m.first < p.Nk) return {};  // it hides keys on the left
  if (m.right >= p.Nk - 1 - offset) return Causal::none;
  if (m.right > 0) return {};
  return m.top_left ? Causal::top_left : Causal::bottom_right;
}

std::int64_t rows_of_a_head(const Problem& p, bool half) {
  return half ? optimized::Passed::padded_rows(p.Nq) : p.Nq;
}

BlockLists lists(std::int64_t B, std::int64_t H, std::int64_t rows, std::int64_t columns,
                 const Wanted& wanted) {
  BlockLists all{{0}, {}};
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c)
          if (wanted(b, h, r, c)) all.numbers.push_back(std::int32_t(c));
        all.offsets.push_back(std::int32_t(all.numbers.size()));
      }
  return all;
}

}  // namespace

BlockLists lists_of(const Problem& p, const Wanted& wanted) {
  return lists(p.B, p.Hq, blocks_of(p.Nq), blocks_of(p.Nk), wanted);
}
BlockLists transposed(const Problem& p, const Wanted& wanted) {
  return lists(p.B, p.Hq, blocks_of(p.Nk), blocks_of(p.Nq),
               [&](auto b, auto h, auto key, auto query) { return wanted(b, h, query, key); });
}

template <class T>
void forward(const Problem& p, const Pattern& pattern, const Forward<T>& t,
             const Options& options) {
  check_sizes<T>(p);
  check_pattern(p, pattern, false);
  check_tensors(who, p, t);
  check_apart(p, pattern, detail::outputs_of(p, t));
  check_kernel<T>(p, options.kernel, true);
  if (options.scratch.data)
    check_scratch(who, options.scratch, "sizeof(unsigned)", sizeof(unsigned), alignof(unsigned));
  if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return;
  const Pattern window = as_window(p, pattern);
  const float scale = float(p.softmax_scale());
  if constexpr (is_half<T>) {
    if (const auto mask = plain_mask(p, window); mask && options.kernel == Kernel::best) {
      Problem plain = p;
      plain.causal = *mask;
      if (options.scratch.data || optimized::scratch_bytes(plain) == 0) {
        optimized::forward(plain, t, {.stream = options.stream, .scratch = options.scratch});
        return;
      }
    }
    if (takes_hopper(options.kernel, not_for_hopper(p, window, t)))
      launch_hopper(p, window, t, scale, static_cast<unsigned*>(options.scratch.data),
                    options.stream);
    else
      launch_fa2(p, window, t, scale, options.stream);
  } else {
    launch_tiled(p, window, t, scale, options.stream);
  }
}

template <class T>
std::size_t scratch_bytes(const Problem& p) {
  check_sizes<T>(p);
  if constexpr (is_half<T>) {
    // Room for either kernel: LSE2, D, and on 9.0 hopper's sums, turns and counter (at d > 128 its
    // dS, for a plain mask). By name: with a mask and large groups the stage's best in turns is
    // another one.
    const auto kernel = optimized::device_capability() == 90 ? optimized::BackwardKernel::hopper
                                                             : optimized::BackwardKernel::swizzle;
    return optimized::backward_scratch_bytes(p, {kernel, true});
  }
  return sizeof(float) * std::size_t(p.B * p.Hq * p.Nq);
}

template <class T>
void backward(const Problem& p, const Pattern& pattern, const Backward<T>& t, float* dsinks,
              const Options& options) {
  check_sizes<T>(p);
  check_pattern(p, pattern, true);
  check_tensors(who, p, t);
  check_kernel<T>(p, options.kernel, false);
  const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
  require(!rows || t.LSE, who, ": LSE must not be null; let the forward write it");
  require(!rows || t.O.data, who, ": O must not be null; the forward returned it");
  require(!dsinks || pattern.sinks, who, ": dsinks is given, but there are no sinks");
  const auto [dQ, dK, dV] = detail::outputs_of(p, t);
  const detail::Region outputs[] = {array("dsinks", dsinks, p.Hq), dQ, dK, dV};
  check_apart(p, pattern, outputs);
  detail::check_regions(who, detail::inputs_of(p, t), std::span(outputs, 1));
  check_scratch(who, options.scratch, "scratch_bytes()", scratch_bytes<T>(p), 16);
  if (p.B == 0 && dsinks && p.Hq > 0)
    FA_CUDA_CHECK(cudaMemsetAsync(dsinks, 0, sizeof(float) * std::size_t(p.Hq), options.stream));
  if (p.B == 0 || p.Hkv == 0) return;

  const Pattern window = as_window(p, pattern);
  if constexpr (is_half<T>)
    if (const auto mask = plain_mask(p, window); mask && options.kernel == Kernel::best) {
      Problem plain = p;
      plain.causal = *mask;
      const optimized::BackwardOptions same{.deterministic = options.deterministic,
                                            .stream = options.stream,
                                            .scratch = options.scratch};
      if (optimized::backward_scratch_bytes(plain, same) <= options.scratch.bytes) {
        optimized::backward(plain, t, same);
        return;
      }
    }
  const float scale = float(p.softmax_scale());
  Statistics s{};
  s.rows = rows_of_a_head(p, is_half<T>);
  s.D = static_cast<float*>(options.scratch.data);
  if constexpr (is_half<T>) {
    s.LSE2 = s.D + p.B * p.Hq * s.rows;
    if (takes_hopper(options.kernel, not_for_hopper(p, window, t, options.deterministic))) {
      float* const dQ = s.LSE2 + p.B * p.Hq * s.rows;
      const std::int64_t sums = p.B * p.Hq * s.rows * optimized::Passed::padded(p.d);
      // Behind them a turn for each 64 x 64, and a counter for blocks that stay, as at d = 64.
      int* const turns = reinterpret_cast<int*>(dQ + sums);
      auto* const taken = p.d <= 64 ? reinterpret_cast<unsigned*>(turns + sums / 4096) : nullptr;
      launch_hopper(p, window, t, scale,
                    {s.LSE2, s.D, dQ, s.rows, options.deterministic ? turns : nullptr, taken},
                    options.stream);
    } else {
      if (p.Hq > 0 && p.Nq > 0) launch_swizzle(p, window, t, scale, s, options.stream);
      if (p.Nk > 0) launch_swizzle_dkv(p, window, t, scale, s, options.stream);
    }
  } else {
    if (p.Hq > 0 && p.Nq > 0) launch_dq(p, window, t, scale, s, options.stream);
    if (p.Nk > 0) launch_dkv(p, window, t, scale, s, options.stream);
  }
  if (dsinks && p.Hq > 0) launch_dsinks(p, window, t.LSE, s, dsinks, options.stream);
}

#define FA_FOR(T)                                                                           \
  template void forward(const Problem&, const Pattern&, const Forward<T>&, const Options&); \
  template std::size_t scratch_bytes<T>(const Problem&);                                    \
  template void backward(const Problem&, const Pattern&, const Backward<T>&, float*, const Options&)
FA_FOR(float);
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::masks
