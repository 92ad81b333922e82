// From the public face to the kernels: check the arguments, choose, launch.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <type_traits>

#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/tma.cuh"
#include "common/core/check.hpp"
#include "common/core/tuned.hpp"

namespace fa::optimized {
namespace {

constexpr Rung ladder[] = {
    // kernel, name, capability, whole contract, fp16, d = 64
    {Kernel::mma, "mma", 80, false, true, true},
    {Kernel::cp_async, "cp_async", 80, false, true, true},
    {Kernel::swizzle, "swizzle", 80, false, true, true},
    {Kernel::wide_warps, "wide_warps", 80, false, true, true},
    {Kernel::two_loops, "two_loops", 80, false, true, true},
    {Kernel::fa2, "fa2", 80, true, true, true},
    {Kernel::tma, "tma", 90, false, false, false},
    {Kernel::wgmma, "wgmma", 90, false, false, false},
    {Kernel::ring, "ring", 90, false, false, false},
    {Kernel::specialised, "specialised", 90, false, false, false},
    {Kernel::lock, "lock", 90, false, false, false},
    {Kernel::no_lock, "no_lock", 90, false, false, false},
    {Kernel::overlap, "overlap", 90, false, false, false},
    {Kernel::rows, "rows", 90, false, false, false},
    {Kernel::persistent, "persistent", 90, false, false, false},
    {Kernel::longest_first, "longest_first", 90, false, false, false},
    {Kernel::hopper, "hopper", 90, true, true, true},
};

const Rung& rung(Kernel kernel) {
  return *std::find_if(std::begin(ladder), std::end(ladder),
                       [&](const Rung& r) { return r.kernel == kernel; });
}

// On this GPU, which is asked only if it matters.
Kernel chosen(Kernel kernel) {
  return kernel == Kernel::best ? optimized::chosen(kernel, device_capability()) : kernel;
}

// Can the copy engine bring and store these tensors?
template <class T>
bool has_tensor_maps(const Problem& p, const Forward<T>& t) {
  const auto queries = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hq, p.Nq); };
  const auto keys = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hkv, p.Nk); };
  return p.Nk > 0 && p.d % 8 == 0 && queries(t.Q) && keys(t.K) && keys(t.V) && queries(t.O);
}

template <class T>
void launch(const Problem& p, const Forward<T>& t, Kernel kernel, float scale,
            const Options& options) {
  const auto stream = options.stream;
  switch (kernel) {
    case Kernel::mma:
      return launch_mma(p, t, scale, stream);
    case Kernel::cp_async:
      return launch_cp_async(p, t, scale, stream);
    case Kernel::swizzle:
      return launch_swizzle(p, t, scale, stream);
    case Kernel::wide_warps:
      return launch_wide_warps(p, t, scale, stream);
    case Kernel::two_loops:
      return launch_two_loops(p, t, scale, stream);
    case Kernel::fa2:
      return launch_fa2(p, t, scale, stream);
    case Kernel::hopper:
      return launch_hopper(p, t, scale, static_cast<unsigned*>(options.scratch.data), stream,
                           options.block_a_tile);
    default:
      break;
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) switch (kernel) {
      case Kernel::tma:
        return launch_tma(p, t, scale, stream);
      case Kernel::wgmma:
        return launch_wgmma(p, t, scale, stream);
      case Kernel::ring:
        return launch_ring(p, t, scale, stream);
      case Kernel::specialised:
        return launch_specialised(p, t, scale, stream);
      case Kernel::lock:
        return launch_lock(p, t, scale, stream);
      case Kernel::no_lock:
        return launch_no_lock(p, t, scale, stream);
      case Kernel::overlap:
        return launch_overlap(p, t, scale, stream);
      case Kernel::rows:
        return launch_rows(p, t, scale, stream);
      case Kernel::persistent:
        return launch_persistent(p, t, scale, stream);
      default:
        return launch_longest_first(p, t, scale, static_cast<unsigned*>(options.scratch.data),
                                    stream);
    }
}

}  // namespace

std::string wrong_scale(const Problem& p) {
  if (std::isfinite(float(p.softmax_scale()) * log2_e)) return {};
  std::ostringstream text;
  text << ": scale log2 e must be finite in fp32, got a scale of " << p.softmax_scale();
  return text.str();
}

const Rung* rungs(std::size_t& count) {
  count = std::size(ladder);
  return ladder;
}

const char* name(Kernel kernel) { return kernel == Kernel::best ? "best" : rung(kernel).name; }

Kernel chosen(Kernel kernel, int here) {
  if (kernel != Kernel::best) return kernel;
  return here == 90 ? Kernel::hopper : Kernel::fa2;
}

int device_capability() {
  return 10 * of_this_gpu(cudaDevAttrComputeCapabilityMajor) +
         of_this_gpu(cudaDevAttrComputeCapabilityMinor);
}

std::string wrong_capability(const std::string& who, int wanted, int here) {
  const bool alone = wanted == 90;  // what is built for sm_90a runs nowhere else
  if (alone ? here == wanted : here >= wanted) return {};
  return who + " is built for compute capability " + capability(wanted) +
         (alone ? " alone" : " and later") + ", this GPU is " + capability(here);
}

std::size_t scratch_bytes(const Problem& p, Kernel kernel) {
  const bool masked = p.causal != Causal::none || p.key_lengths;
  kernel = chosen(kernel);
  const bool counts = kernel == Kernel::longest_first || kernel == Kernel::hopper;
  return masked && counts ? sizeof(unsigned) : 0;
}

template <class T>
std::string unsupported(const Problem& p, const Forward<T>& t, Kernel kernel) {
  const Rung& r = rung(chosen(kernel));
  if (std::string why = wrong_capability(r.name, r.capability, device_capability()); !why.empty())
    return why;
  if (!(float(p.softmax_scale()) > 0)) {
    std::ostringstream text;
    text << r.name << ": scale must be > 0 in fp32, got " << p.softmax_scale()
         << "; the maximum is taken before scaling";
    return text.str();
  }
  if (std::string why = wrong_scale(p); !why.empty()) return std::string(r.name) + why;
  if (std::max(p.Nq, p.Nk) > 1 << 30)
    return std::string(r.name) + " wants Nq and Nk up to 2^30, got " + std::to_string(p.Nq) +
           " and " + std::to_string(p.Nk);
  if (r.whole_contract) return {};
  if (!r.fp16 && std::is_same_v<T, __half>)
    return std::string(r.name) + " is for bf16 only, got fp16";
  if (p.d != 128 && !(r.d64 && p.d == 64))
    return std::string(r.name) + " takes d = " + (r.d64 ? "64 or 128" : "128") +
           ", got d = " + std::to_string(p.d);
  if (p.key_lengths) return std::string(r.name) + " takes no key_lengths";
  for (const auto& [tensor, fits] : {std::pair{"Q", in_order(t.Q)},
                                     {"K", in_order(t.K)},
                                     {"V", in_order(t.V)},
                                     {"O", in_order(t.O)}})
    if (!fits)
      return std::string(r.name) + " wants rows of " + tensor +
             " to begin at multiples of 16 bytes, in ascending order";
  return {};
}

template <class T>
Kernel forward(const Problem& p, const Forward<T>& t, const Options& options) {
  if constexpr (!std::is_same_v<T, __half> && !std::is_same_v<T, __nv_bfloat16>) {
    require(false, "optimized: T must be __half or __nv_bfloat16, got elements of ", sizeof(T),
            " bytes; fp32 is for stages 04 and 05");
    return Kernel::best;
  } else {
    check_problem("optimized", p, max_d);
    check_tensors("optimized", p, t);
    Kernel kernel = chosen(options.kernel);
    const std::string why_not = unsupported(p, t, kernel);
    require(why_not.empty(), "optimized: ", why_not);
    check_scratch(std::string("optimized: ") + name(kernel), options.scratch, "scratch_bytes()",
                  scratch_bytes(p, kernel), alignof(unsigned));
    if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return kernel;
    // The smallest tile has 64 rows; a grid has at most 2^31 - 1 blocks along x.
    require(
        p.B <= 1 << 30 && p.Hq <= (1 << 30) / p.B && (p.Nq + 63) / 64 <= (1 << 30) / (p.B * p.Hq),
        "optimized: B Hq ceil(Nq / 64) must be at most 2^30, got B = ", p.B, ", Hq = ", p.Hq,
        ", Nq = ", p.Nq);
    // The copy engine knows no empty tensor, and not every address and stride.
    if (kernel == Kernel::hopper && !has_tensor_maps(p, t)) kernel = Kernel::fa2;
    if (p.Nk == 0 && rung(kernel).capability == 90) kernel = Kernel::swizzle;
    Options launched = options;
    if (scratch_bytes(p, kernel) == 0) launched.scratch = {};
    const float scale = float(p.softmax_scale());
    const auto type = std::is_same_v<T, __half> ? TunedCall::fp16 : TunedCall::bf16;
    const bool tunable = kernel == Kernel::fa2 || kernel == Kernel::hopper;
    if (tunable && !launched.block_a_tile &&
        launch_tuned(name(kernel), p, t, type, scale, static_cast<unsigned*>(launched.scratch.data),
                     launched.stream, current_gpu))
      return kernel;
    launch(p, t, kernel, scale, launched);
    return kernel;
  }
}

template std::string unsupported(const Problem&, const Forward<__half>&, Kernel);
template std::string unsupported(const Problem&, const Forward<__nv_bfloat16>&, Kernel);
template Kernel forward(const Problem&, const Forward<__half>&, const Options&);
template Kernel forward(const Problem&, const Forward<__nv_bfloat16>&, const Options&);
template Kernel forward(const Problem&, const Forward<float>&, const Options&);

}  // namespace fa::optimized
