// From the public face to the kernels: check the arguments, turn p into a threshold, launch.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <type_traits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/dropout/keep.cuh"
#include "06_optimized/forward/forward.hpp"
#include "common/core/check.hpp"

namespace fa::dropout {
namespace {

constexpr const char* who = "dropout";
constexpr double steps = 65536;  // 16 bits

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

template <class T>
void check_sizes(const Problem& p) {
  check_problem(who, p, widest<T>);
  require(std::max(p.Nq, p.Nk) <= 1 << 30, who, ": Nq and Nk must be at most 2^30, got ", p.Nq,
          " and ", p.Nk);
  const std::int64_t tiles = (std::max(p.Nq, p.Nk) + 15) / 16;  // of the smallest kernel
  const std::int64_t heads = std::max(p.Hq, p.Hkv);
  require(p.B <= 1 << 30 && (p.B == 0 || heads <= (1 << 30) / p.B) &&
              (p.B * heads == 0 || tiles <= (1 << 30) / (p.B * heads)),
          who, ": B Hq max(Nq, Nk) / 16 must be at most 2^30, got B = ", p.B, ", Hq = ", p.Hq,
          ", Nq = ", p.Nq, ", Nk = ", p.Nk);
}

void check_p(double p) {
  require(p >= 0 && p < 1, who, ": p must lie in [0, 1), got ", p);  // and is no NaN
}

void check_dropout(const Dropout& dropout) {
  check_p(dropout.p);
  require(reinterpret_cast<std::uintptr_t>(dropout.in_memory) % alignof(std::uint64_t) == 0, who,
          ": in_memory must be aligned to its element, ", sizeof(std::uint64_t), " bytes");
  require(!dropout.in_memory || dropout.seed == 0, who,
          ": seed must be 0 if in_memory is given, which has one, got ", dropout.seed);
}

// What is drawn from is read when the kernel runs: it must not be what the kernel writes.
void check_apart(const Dropout& dropout, std::span<const detail::Region> outputs) {
  detail::Region two{"in_memory", dropout.in_memory, sizeof(std::uint64_t), 1, 1, 1, 2, 0, 0, 0};
  two.optional = true;
  detail::check_regions(who, {&two, 1}, outputs);
}

template <class T>
void check_kernel([[maybe_unused]] const Problem& p, [[maybe_unused]] bool forward, Kernel kernel) {
  require(kernel >= Kernel::best && kernel <= Kernel::hopper, who,
          ": kernel has the unknown value ", static_cast<int>(kernel));
  if constexpr (is_half<T>) {
    const char* const name = kernel == Kernel::hopper ? "hopper" : forward ? "fa2" : "swizzle";
    const std::string why = optimized::wrong_capability(name, 80, optimized::device_capability());
    require(why.empty(), who, ": ", why);
    require(!forward || float(p.softmax_scale()) > 0, who, ": ", name,
            ": scale must be > 0 in fp32, got ", p.softmax_scale(),
            "; the maximum is taken before scaling");
    const std::string wrong = optimized::wrong_scale(p);
    require(wrong.empty(), who, ": ", name, wrong);
  }
}

// Is this call for hopper? Tensors: Forward<T> or Backward<T>.
template <class Tensors>
bool takes_hopper(const Problem& p, const Tensors& t, Kernel kernel) {
  if (kernel == Kernel::fa2) return false;
  std::string why_not = not_for_hopper(p, t);
  if (why_not.empty())
    why_not = optimized::wrong_capability("hopper", 90, optimized::device_capability());
  require(kernel != Kernel::hopper || why_not.empty(), who, ": ", why_not);
  return why_not.empty();
}

Draw draw_of(const Dropout& dropout) {
  return {threshold(dropout.p), float(1 / kept_probability(dropout.p)), dropout.seed,
          dropout.offset, dropout.in_memory};
}

}  // namespace

std::uint32_t threshold(double p) {
  check_p(p);
  return std::uint32_t(std::clamp(std::round((1 - p) * steps), 1., steps));
}
double kept_probability(double p) { return threshold(p) / steps; }

bool kept(const Problem& p, const Dropout& dropout, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j) {
  check_dropout(dropout);
  require(!dropout.in_memory, who, ": kept() does not read in_memory; give it seed and offset");
  return Keep(draw_of(dropout), b * p.Hq + h)(i, j);
}

template <class T>
void forward(const Problem& p, const Dropout& dropout, const Forward<T>& t,
             const Options& options) {
  check_sizes<T>(p);
  check_dropout(dropout);
  check_tensors(who, p, t);
  check_apart(dropout, detail::outputs_of(p, t));
  check_kernel<T>(p, true, options.kernel);
  if (options.scratch.data)
    check_scratch(who, options.scratch, "sizeof(unsigned)", sizeof(unsigned), alignof(unsigned));
  if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return;
  const Draw draw = draw_of(dropout);
  const float scale = float(p.softmax_scale());
  if constexpr (is_half<T>) {
    if (takes_hopper(p, t, options.kernel))
      launch_hopper(p, draw, t, scale, static_cast<unsigned*>(options.scratch.data),
                    options.stream);
    else
      launch_fa2(p, draw, t, scale, options.stream);
  } else {
    launch_tiled(p, draw, t, scale, options.stream);
  }
}

template <class T>
std::size_t scratch_bytes(const Problem& p) {
  check_sizes<T>(p);
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
void backward(const Problem& p, const Dropout& dropout, const Backward<T>& t,
              const Options& options) {
  check_sizes<T>(p);
  check_dropout(dropout);
  check_tensors(who, p, t);
  check_apart(dropout, detail::outputs_of(p, t));
  check_kernel<T>(p, false, options.kernel);
  const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
  require(!rows || t.LSE, who, ": LSE must not be null; let the forward write it");
  require(!rows || t.O.data, who, ": O must not be null; the forward returned it");
  check_scratch(who, options.scratch, "scratch_bytes()", scratch_bytes<T>(p), 16);
  if (p.B == 0 || p.Hkv == 0) return;

  const Draw draw = draw_of(dropout);
  const float scale = float(p.softmax_scale());
  float* const scratch = static_cast<float*>(options.scratch.data);
  if constexpr (is_half<T>) {
    optimized::Passed passed{};
    passed.rows = optimized::Passed::padded_rows(p.Nq);
    const std::int64_t padded = p.B * p.Hq * passed.rows;
    passed.LSE2 = scratch;
    passed.D = scratch + padded;
    if (takes_hopper(p, t, options.kernel)) {
      passed.dQ = passed.D + padded;
      const std::int64_t sums = padded * optimized::Passed::padded(p.d);
      // Behind them a turn for each 64 x 64, and a counter for blocks that stay, as at d <= 64.
      int* const turns = reinterpret_cast<int*>(passed.dQ + sums);
      if (options.deterministic) passed.turn = turns;
      if (p.d <= 64) passed.taken = reinterpret_cast<unsigned*>(turns + sums / 4096);
      return launch_hopper(p, draw, t, scale, passed, options.stream);
    }
    const Statistics s{passed.LSE2, passed.D, passed.rows};
    if (rows) launch_swizzle(p, draw, t, scale, s, options.stream);
    if (p.Nk > 0) launch_swizzle_dkv(p, draw, t, scale, s, options.stream);
  } else {
    if (rows) launch_dq(p, draw, t, scale, scratch, options.stream);
    if (p.Nk > 0) launch_dkv(p, draw, t, scale, scratch, options.stream);
  }
}

#define FA_FOR(T)                                                                           \
  template void forward(const Problem&, const Dropout&, const Forward<T>&, const Options&); \
  template std::size_t scratch_bytes<T>(const Problem&);                                    \
  template void backward(const Problem&, const Dropout&, const Backward<T>&, const Options&)
FA_FOR(float);
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::dropout
