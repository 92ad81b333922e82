// From the public face to the kernels: check the arguments, bring them to the kernels' units,
// launch.
#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/scores/scores.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/core/check.hpp"

namespace fa::scores {
namespace {

constexpr const char* who = "scores";

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

std::int64_t offset_of(const Problem& p, const std::optional<std::int64_t>& offset) {
  return offset ? *offset : p.causal == Causal::top_left ? 0 : p.Nk - p.Nq;
}

template <class X>
bool has_strides(const View<X>& v) {
  return v.batch != 0 || v.head != 0 || v.row != 0;
}

// A bias is a tensor of as many rows as it does not repeat.
template <class X>
detail::Region region_of_bias(const char* name, const Problem& p, const View<X>& v) {
  detail::Region r =
      detail::region(name, v, v.batch ? p.B : 1, v.head ? p.Hq : 1, v.row ? p.Nq : 1, p.Nk);
  r.optional = true;
  return r;
}

// Without queries or without keys nobody asks how they stand to each other.
bool turns(const Problem& p, const Rotary& r) { return r.dims > 0 && p.Nq > 0 && p.Nk > 0; }

void check_rotary(const Problem& p, const Rotary& r, std::int64_t offset) {
  require(r.dims >= 0 && r.dims % 2 == 0, who, ": rotary.dims must be even and >= 0, got ", r.dims);
  require(r.dims <= p.d, who, ": rotary.dims must be at most d = ", p.d, ", got ", r.dims);
  if (r.dims == 0) {
    require(!r.cos && !r.sin, who, ": rotary.dims is 0, but there are tables");
    return;
  }
  require(r.cos && r.sin, who, ": rotary.", r.cos ? "sin" : "cos", " is a null pointer");
  for (const float* table : {r.cos, r.sin})
    require(reinterpret_cast<std::uintptr_t>(table) % alignof(float) == 0, who, ": rotary.",
            table == r.cos ? "cos" : "sin", " must be aligned to its element, 4 bytes");
  if (!turns(p, r)) return;  // no position is looked up
  require(offset >= 0, who, ": rotary wants positions >= 0, but query 0 has offset ", offset);
  require(r.positions >= p.Nk && r.positions - offset >= p.Nq, who,
          ": rotary.positions must be at least max(Nk, offset + Nq) = ",
          std::max(p.Nk, offset + p.Nq), ", got ", r.positions);
}

template <class T>
void check_scores(const Problem& p, const Scores<T>& s) {
  detail::check_scale<T>(who, p);
  require(std::max(p.Nq, p.Nk) <= 1 << 30, who, ": Nq and Nk must be at most 2^30, got ", p.Nq,
          " and ", p.Nk);
  require(!s.slopes_of_batch || s.slopes || p.B * p.Hq == 0, who,
          ": slopes_of_batch is set, but slopes is null");
  require(reinterpret_cast<std::uintptr_t>(s.slopes) % alignof(float) == 0, who,
          ": slopes must be aligned to its element, 4 bytes");
  if (s.cap)
    require(*s.cap > 0 && float(*s.cap) > 0 && std::isfinite(float(*s.cap)), who,
            ": cap must be > 0 and finite in fp32, got ", *s.cap);
  require(!s.bias.data || !s.bias32.data, who, ": bias and bias32 are both given; one is meant");
  require(s.bias.data || !has_strides(s.bias), who, ": bias is a null pointer, but has strides");
  require(s.bias32.data || !has_strides(s.bias32), who,
          ": bias32 is a null pointer, but has strides");
  const std::int64_t offset = offset_of(p, s.offset);
  // Nq - Nk may be as large; no more, so that all positions are ints.
  require(offset >= -(1 << 30) && offset <= 1 << 30, who,
          ": offset must lie in [-2^30, 2^30], got ", offset);
  check_rotary(p, s.rotary, offset);
}

// What the tensor cores' kernels want besides.
template <class T>
void check_half([[maybe_unused]] const Problem& p, Kernel kernel) {
  require(kernel >= Kernel::best && kernel <= Kernel::hopper, who,
          ": kernel has the unknown value ", static_cast<int>(kernel));
  if constexpr (is_half<T>) {
    const std::string why = optimized::wrong_capability("fa2", 80, optimized::device_capability());
    require(why.empty(), who, ": ", why);
    require(float(p.softmax_scale()) > 0 && std::isfinite(1 / float(p.softmax_scale())), who,
            ": fa2: scale and 1 / scale must be > 0 and finite in fp32, got ", p.softmax_scale(),
            "; the maximum is taken before scaling");
    const std::string wrong = optimized::wrong_scale(p);
    require(wrong.empty(), who, ": fa2", wrong);
  }
}

// A block has at least 16 rows, or 32 keys.
void check_blocks(const Problem& p) {
  const std::int64_t heads = std::max(p.Hq, p.Hkv), tiles = std::max(p.Nq, p.Nk) / 16 + 1;
  require(p.B <= 1 << 30 && (p.B == 0 || heads == 0 || tiles <= (1 << 30) / p.B / heads), who,
          ": B Hq max(Nq, Nk) / 16 must be below 2^30, got B = ", p.B, ", Hq = ", p.Hq,
          ", Nq = ", p.Nq, ", Nk = ", p.Nk);
}

template <class X>
bool even(const View<X>& v) {
  return reinterpret_cast<std::uintptr_t>(v.data) % (2 * sizeof(X)) == 0 && v.batch % 2 == 0 &&
         v.head % 2 == 0 && v.row % 2 == 0;
}
bool in_16_bytes(const float* table) { return reinterpret_cast<std::uintptr_t>(table) % 16 == 0; }

template <class T>
Change<T> change_of(const Problem& p, const Scores<T>& s) {
  Change<T> c{};
  const bool bias = s.bias.data || s.bias32.data;
  c.parts = (s.slopes ? with_alibi : 0) | (s.cap ? with_cap : 0) | (bias ? with_bias : 0) |
            (turns(p, s.rotary) ? with_rotary : 0);
  const double scale = is_half<T> ? p.softmax_scale() : 1;
  c.unit = float(1 / scale);
  if (s.cap) {
    c.cap = float(*s.cap / scale);
    c.per_cap = float(scale / *s.cap);
    require(c.cap > 0 && std::isfinite(c.cap) && c.per_cap > 0 && std::isfinite(c.per_cap), who,
            ": cap / scale and scale / cap must be > 0 and finite in fp32, got cap = ", *s.cap);
  }
  c.slopes = s.slopes;
  c.slopes_batch = s.slopes_of_batch ? p.Hq : 0;
  c.bias = s.bias;
  c.bias32 = s.bias32;
  if constexpr (!is_half<T>)
    if (s.bias32.data) c.bias = s.bias32, c.bias32 = {};
  c.in_pairs = c.bias.data ? even(c.bias) : even(c.bias32);
  if (turns(p, s.rotary)) c.rotary = s.rotary;
  c.in_chunks = c.rotary.dims % 16 == 0 && in_16_bytes(c.rotary.cos) && in_16_bytes(c.rotary.sin);
  c.offset = int(offset_of(p, s.offset));
  const std::int64_t last =
      p.causal == Causal::bottom_right ? p.Nk - p.Nq : 0;  // i sees to i + last
  if (s.slopes && p.causal != Causal::none && c.offset >= last) c.parts |= behind;
  if constexpr (is_half<T>)
    if (c.parts == with_bias && c.bias.data && optimized::in_16_bytes(c.bias)) c.parts |= in_tiles;
  return c;
}

// Is this call for hopper? Tensors: Forward<T> or Backward<T>.
template <class Tensors, class T>
bool takes_hopper(const Problem& p, const Tensors& t, const Change<T>& change, float scale,
                  Kernel kernel) {
  if (kernel == Kernel::fa2) return false;
  std::string why_not = not_for_hopper(p, t, change, scale);
  if (why_not.empty())
    why_not = optimized::wrong_capability("hopper", 90, optimized::device_capability());
  require(kernel != Kernel::hopper || why_not.empty(), who, ": ", why_not);
  return why_not.empty();
}

// Regions of what the scores read and the tensors do not hold.
template <class T>
void check_apart(const Problem& p, const Scores<T>& s, std::span<const detail::Region> outputs) {
  detail::Region slopes{"slopes", s.slopes, 4, s.slopes_of_batch ? p.B : 1, 1, 1, p.Hq, p.Hq, 0, 0};
  const auto table = [&](const char* name, const float* data) {
    detail::Region r{
        name, data, 4, 1, 1, s.rotary.positions, s.rotary.dims / 2, 0, 0, s.rotary.dims / 2};
    r.optional = true;
    return r;
  };
  slopes.optional = true;
  const detail::Region inputs[] = {
      slopes, table("rotary.cos", s.rotary.cos), table("rotary.sin", s.rotary.sin),
      region_of_bias("bias", p, s.bias), region_of_bias("bias32", p, s.bias32)};
  detail::check_regions(who, inputs, outputs);
}

std::int64_t padded_rows(std::int64_t Nq) { return optimized::Passed::padded_rows(Nq); }

}  // namespace

template <class T>
void forward(const Problem& p, const Forward<T>& t, const Scores<T>& scores,
             const Options& options) {
  check_problem(who, p, widest<T>);
  check_scores(p, scores);
  check_tensors(who, p, t);
  check_apart(p, scores, detail::outputs_of(p, t));
  check_half<T>(p, options.kernel);
  check_blocks(p);
  if (options.scratch.data)
    check_scratch(who, options.scratch, "sizeof(unsigned)", sizeof(unsigned), alignof(unsigned));
  const Change<T> change = change_of(p, scores);
  if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return;
  const float scale = float(p.softmax_scale());
  if constexpr (is_half<T>) {
    if (takes_hopper(p, t, change, scale, options.kernel))
      launch_hopper(p, t, change, scale, static_cast<unsigned*>(options.scratch.data),
                    options.stream);
    else
      launch_fa2(p, t, change, scale, options.stream);
  } else {
    launch_tiled(p, t, change, scale, options.stream);
  }
}

template <class T>
std::size_t scratch_bytes(const Problem& p) {
  check_problem(who, p, widest<T>);
  if constexpr (is_half<T>) {
    // Room for either kernel: LSE2, D, and on 9.0, up to d = 128, hopper's sums, turns and counter.
    const bool hopper = p.d <= 128 && optimized::device_capability() == 90;
    const auto kernel =
        hopper ? optimized::BackwardKernel::hopper : optimized::BackwardKernel::swizzle;
    return optimized::backward_scratch_bytes(p, {kernel, true});
  }
  return sizeof(float) * std::size_t(p.B * p.Hq * p.Nq);
}

template <class T>
void backward(const Problem& p, const Backward<T>& t, const Scores<T>& scores,
              const View<float>& dbias, const Options& options) {
  check_problem(who, p, widest<T>);
  check_scores(p, scores);
  check_tensors(who, p, t);
  const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
  require(!rows || t.LSE, who, ": LSE must not be null; let the forward write it");
  require(!rows || t.O.data, who, ": O must not be null; the forward returned it");
  require(dbias.data || !has_strides(dbias), who, ": dbias is a null pointer, but has strides");
  if (dbias.data) {
    require(scores.bias.data || scores.bias32.data, who, ": dbias is given, but there is no bias");
    const auto repeats = [&](auto stride) {
      return scores.bias.data ? scores.bias.*stride.of_bias == 0
                              : scores.bias32.*stride.of_bias32 == 0;
    };
    struct {
      const char* name;
      std::int64_t size, of_dbias;
      std::int64_t View<const T>::*of_bias;
      std::int64_t View<const float>::*of_bias32;
    } const strides[] = {
        {"batch", p.B, dbias.batch, &View<const T>::batch, &View<const float>::batch},
        {"head", p.Hq, dbias.head, &View<const T>::head, &View<const float>::head},
        {"row", p.Nq, dbias.row, &View<const T>::row, &View<const float>::row}};
    for (const auto& stride : strides)
      require(stride.size <= 1 || repeats(stride) == (stride.of_dbias == 0), who,
              ": dbias must have a ", stride.name, " stride of 0 where the bias has one, got ",
              stride.of_dbias);
  }
  const auto [dQ, dK, dV] = detail::outputs_of(p, t);
  const detail::Region outputs[] = {dQ, dK, dV, region_of_bias("dbias", p, dbias)};
  check_apart(p, scores, outputs);
  if (dbias.data && rows)
    detail::check_regions(who, detail::inputs_of(p, t), std::span(outputs + 3, 1));
  check_half<T>(p, options.kernel);
  check_blocks(p);
  check_scratch(who, options.scratch, "scratch_bytes()", scratch_bytes<T>(p), 16);
  const Change<T> change = change_of(p, scores);
  const float scale = float(p.softmax_scale());
  const bool keys = p.B > 0 && p.Hkv > 0 && p.Nk > 0;
  float* const scratch = static_cast<float*>(options.scratch.data);
  if constexpr (is_half<T>) {
    const std::int64_t padded = p.B * p.Hq * padded_rows(p.Nq);
    optimized::Passed passed{};
    passed.rows = padded_rows(p.Nq);
    passed.LSE2 = scratch;
    passed.D = scratch + padded;
    if (takes_hopper(p, t, change, scale, options.kernel)) {
      passed.dQ = passed.D + padded;
      const std::int64_t sums = padded * optimized::Passed::padded(p.d);
      // Behind them a turn for each 64 x 64, and a counter for blocks that stay, as at d <= 64.
      int* const turns = reinterpret_cast<int*>(passed.dQ + sums);
      if (options.deterministic) passed.turn = turns;
      if (p.d <= 64) passed.taken = reinterpret_cast<unsigned*>(turns + sums / 4096);
      return launch_hopper(p, t, change, scale, passed, options.stream);
    }
    if (rows) optimized::launch_before(p, t, passed, options.stream);
    if (rows) launch_swizzle_dq(p, t, change, scale, passed, options.stream);
    if (keys) launch_swizzle_dkv(p, t, change, scale, passed, options.stream);
    if (dbias.data)  // also a sum over nothing, 0
      launch_swizzle_dbias(p, t, change, dbias, scale, passed, options.stream);
  } else {
    if (rows) launch_delta(p, t, scratch, options.stream);
    if (rows) launch_dq(p, t, change, scale, scratch, options.stream);
    if (keys) launch_dkv(p, t, change, scale, scratch, options.stream);
    if (dbias.data) launch_dbias(p, t, change, dbias, scale, scratch, options.stream);
  }
}

#define FA_FOR(T)                                                                                  \
  template void forward(const Problem&, const Forward<T>&, const Scores<T>&, const Options&);      \
  template std::size_t scratch_bytes<T>(const Problem&);                                           \
  template void backward(const Problem&, const Backward<T>&, const Scores<T>&, const View<float>&, \
                         const Options&)
FA_FOR(float);
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::scores
