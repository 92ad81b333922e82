// From the public face of the backward to its kernels: check the arguments, choose, launch.
#include <algorithm>
#include <iterator>
#include <type_traits>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ptx/tma.cuh"
#include "common/core/check.hpp"

namespace fa::optimized {
namespace {

constexpr BackwardRung ladder[] = {
    // kernel, name, capability, whole contract, fp16, d = 64, deterministic
    {BackwardKernel::mma, "mma", 80, false, true, true, true},
    {BackwardKernel::swizzle, "swizzle", 80, true, true, true, true},
    {BackwardKernel::two_kernels, "two_kernels", 90, true, true, true, true},
    {BackwardKernel::fused, "fused", 90, false, false, false, false},
    {BackwardKernel::bulk, "bulk", 90, false, false, false, false},
    {BackwardKernel::early, "early", 90, false, false, false, false},
    {BackwardKernel::at_once, "at_once", 90, false, false, false, false},
    {BackwardKernel::late, "late", 90, false, false, false, false},
    {BackwardKernel::masks, "masks", 90, false, false, false, false},
    {BackwardKernel::in_order, "in_order", 90, false, false, false, true},
    {BackwardKernel::hopper, "hopper", 90, true, true, true, false},
};

const BackwardRung& rung(BackwardKernel kernel) {
  return *std::find_if(std::begin(ladder), std::end(ladder),
                       [&](const BackwardRung& r) { return r.kernel == kernel; });
}

BackwardKernel chosen_here(const Problem& p, const BackwardOptions& options) {
  const int capability = device_capability();
  return chosen(p, options, capability, capability == 90 ? processors() : 0);
}

// Does one kernel make dS, and another one dQ of it?
bool keeps_dS(const Problem& p, BackwardKernel kernel) {
  return kernel == BackwardKernel::hopper && p.d > 128 && p.d % 8 == 0;
}
bool adds_up_dQ(const Problem& p, BackwardKernel kernel) {
  return kernel >= BackwardKernel::fused && p.d <= 128;
}

// Do blocks add to dQ in turns? Those of hopper if the same bits are wanted, or if that is faster:
// who is first stores, and with so few blocks to a head that saves more than waiting costs.
// Measured, not derived.
bool takes_turns(const Problem& p, BackwardKernel kernel, const BackwardOptions& options) {
  if (kernel != BackwardKernel::hopper) return kernel == BackwardKernel::in_order;
  if (!adds_up_dQ(p, kernel)) return false;
  const bool faster = p.d <= 64 && p.Nk <= 512;
  return options.deterministic || (options.kernel == BackwardKernel::best && faster);
}
// A turn for each 64 x 64 numbers of dQ.
std::int64_t turns(const Problem& p) {
  return p.B * p.Hq * (Passed::padded_rows(p.Nq) / 64) * (Passed::padded(p.d) / 64);
}

// Can the copy engine bring and store what the kernel wants from it? Sums of dQ leave otherwise.
template <class T>
bool has_tensor_maps(const Problem& p, const Backward<T>& t, BackwardKernel kernel) {
  const auto queries = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hq, p.Nq); };
  const auto keys = [&](const auto& X) { return has_tensor_map(X, p.B, p.Hkv, p.Nk); };
  return p.d % 8 == 0 && queries(t.Q) && queries(t.dO) &&
         (adds_up_dQ(p, kernel) || queries(t.dQ)) && keys(t.K) && keys(t.V) && keys(t.dK) &&
         keys(t.dV);
}

// Do blocks stay for more than one tile of keys, and count those that are taken?
bool counts_tiles(const Problem& p, BackwardKernel kernel, const BackwardOptions& options) {
  return kernel == BackwardKernel::hopper && p.d <= 64 && !options.block_a_tile;
}

// For how many tiles of 64 keys dS is kept at a time (for as many in each part), and its bytes.
struct Kept {
  int tiles;
  bool all;  // of the keys
  std::size_t bytes;
};
Kept kept(const Problem& p, const BackwardOptions& options) {
  const auto a_tile = std::size_t(p.B * p.Hq * Passed::padded_rows(p.Nq) * 64 * 2);
  const auto all = std::size_t((std::max<std::int64_t>(p.Nk, 0) + 63) / 64);
  if (a_tile * all <= options.most_kept) return {int(all), true, a_tile * all};
  const std::size_t fit = std::max<std::size_t>(1, options.most_kept / a_tile);
  const std::size_t parts = (all + fit - 1) / fit, tiles = (all + parts - 1) / parts;
  return {int(tiles), parts == 1, a_tile * tiles};
}

// The scratch, cut into what passes from kernel to kernel.
Passed passed(const Problem& p, BackwardKernel kernel, const BackwardOptions& options) {
  Passed parts{};
  parts.rows = Passed::padded_rows(p.Nq);
  const std::int64_t rows = p.B * p.Hq * parts.rows;
  parts.LSE2 = static_cast<float*>(options.scratch.data);
  parts.D = parts.LSE2 + rows;
  float* const next = parts.D + rows;
  if (keeps_dS(p, kernel)) {
    const Kept dS = kept(p, options);
    parts.kept = next;
    parts.kept_tiles = dS.tiles;
    if (!dS.all) parts.dQ = next + dS.bytes / sizeof(float);
  }
  if (!adds_up_dQ(p, kernel)) return parts;
  parts.dQ = next;
  auto* const counts = reinterpret_cast<int*>(parts.dQ + rows * Passed::padded(p.d));
  const bool in_turns = takes_turns(p, kernel, options);
  if (in_turns) parts.turn = counts;
  if (counts_tiles(p, kernel, options))
    parts.taken = reinterpret_cast<unsigned*>(counts + (in_turns ? turns(p) : 0));
  return parts;
}

template <class T>
void launch(const Problem& p, const Backward<T>& t, BackwardKernel kernel, float scale,
            const Passed& parts, cudaStream_t stream) {
  const auto run = [&](auto launch) { launch(p, t, scale, parts, stream); };
  switch (kernel) {
    case BackwardKernel::mma:
      return run(launch_backward_mma<T>);
    case BackwardKernel::swizzle:
      return run(launch_backward_swizzle<T>);
    case BackwardKernel::two_kernels:
      return run(launch_backward_two_kernels<T>);
    case BackwardKernel::hopper:
      return keeps_dS(p, kernel) ? run(launch_backward_hopper_wide<T>)
                                 : run(launch_backward_hopper<T>);
    default:
      break;
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) switch (kernel) {
      case BackwardKernel::fused:
        return run(launch_backward_fused<T>);
      case BackwardKernel::bulk:
        return run(launch_backward_bulk<T>);
      case BackwardKernel::early:
        return run(launch_backward_early<T>);
      case BackwardKernel::at_once:
        return run(launch_backward_at_once<T>);
      case BackwardKernel::late:
        return run(launch_backward_late<T>);
      case BackwardKernel::masks:
        return run(launch_backward_masks<T>);
      default:
        return run(launch_backward_in_order<T>);
    }
}

}  // namespace

const BackwardRung* backward_rungs(std::size_t& count) {
  count = std::size(ladder);
  return ladder;
}

const char* name(BackwardKernel kernel) {
  return kernel == BackwardKernel::best ? "best" : rung(kernel).name;
}

BackwardKernel chosen(const Problem& p, const BackwardOptions& options, int capability,
                      int processors) {
  if (options.kernel != BackwardKernel::best) return options.kernel;
  if (capability != 90) return BackwardKernel::swizzle;
  if (p.d > 128) {
    // Where a part is small its tail weighs, and the sums that wait between two. Measured: with 128
    // blocks and with 256 on 132 SMs; with 8 tiles and with 16.
    const Kept part = kept(p, options);
    const bool few =
        2 * p.B * p.Hkv * part.tiles < 3 * processors || (!part.all && part.tiles < 16);
    return few ? BackwardKernel::two_kernels : BackwardKernel::hopper;
  }
  // With a mask hopper's turns make its longest blocks begin last, and they are as many times as
  // long as a group has heads. Measured, not derived: with 1, 2, 4 and 8.
  const bool long_turns = p.causal != Causal::none && p.Hq * Passed::padded(p.d) >= 512 * p.Hkv;
  return options.deterministic && long_turns ? BackwardKernel::two_kernels : BackwardKernel::hopper;
}

std::size_t backward_scratch_bytes(const Problem& p, const BackwardOptions& options) {
  const BackwardKernel kernel = chosen_here(p, options);
  const auto rows = std::size_t(p.B * p.Hq * Passed::padded_rows(p.Nq));
  std::size_t bytes = 2 * sizeof(float) * rows;
  if (keeps_dS(p, kernel)) {
    const Kept dS = kept(p, options);
    bytes += dS.bytes;
    if (!dS.all) bytes += sizeof(float) * rows * std::size_t(Passed::padded(p.d));
  }
  if (adds_up_dQ(p, kernel)) bytes += sizeof(float) * rows * std::size_t(Passed::padded(p.d));
  if (takes_turns(p, kernel, options)) bytes += sizeof(int) * std::size_t(turns(p));
  if (counts_tiles(p, kernel, options)) bytes += sizeof(unsigned);
  return bytes;
}

template <class T>
std::string unsupported(const Problem& p, const Backward<T>& t, BackwardKernel kernel) {
  const int here = device_capability();
  const BackwardRung& r = rung(chosen_here(p, {kernel}));
  const std::string who = std::string("the backward's ") + r.name;
  if (std::string why = wrong_capability(who, r.capability, here); !why.empty()) return why;
  if (std::string why = wrong_scale(p); !why.empty()) return who + why;
  if (std::max(p.Nq, p.Nk) > 1 << 30)
    return who + " wants Nq and Nk up to 2^30, got " + std::to_string(p.Nq) + " and " +
           std::to_string(p.Nk);
  if (r.whole_contract) return {};
  if (!r.fp16 && std::is_same_v<T, __half>) return who + " is for bf16 only, got fp16";
  if (p.d != 128 && !(r.d64 && p.d == 64))
    return who + " takes d = " + (r.d64 ? "64 or 128" : "128") + ", got d = " + std::to_string(p.d);
  if (p.key_lengths) return who + " takes no key_lengths";
  for (const auto& [tensor, fits] : {std::pair{"Q", in_order(t.Q)},
                                     {"K", in_order(t.K)},
                                     {"V", in_order(t.V)},
                                     {"O", in_order(t.O)},
                                     {"dO", in_order(t.dO)},
                                     {"dQ", in_order(t.dQ)},
                                     {"dK", in_order(t.dK)},
                                     {"dV", in_order(t.dV)}})
    if (!fits)
      return who + " wants rows of " + tensor +
             " to begin at multiples of 16 bytes, in ascending order";
  return {};
}

template <class T>
BackwardKernel backward(const Problem& p, const Backward<T>& t, const BackwardOptions& options) {
  if constexpr (!std::is_same_v<T, __half> && !std::is_same_v<T, __nv_bfloat16>) {
    require(false, "optimized: T must be __half or __nv_bfloat16, got elements of ", sizeof(T),
            " bytes; fp32 is for stages 04 and 05");
    return BackwardKernel::best;
  } else {
    check_problem("optimized", p, max_d);
    check_tensors("optimized", p, t);
    const std::string why_not = unsupported(p, t, options.kernel);
    require(why_not.empty(), "optimized: ", why_not);
    BackwardKernel kernel = chosen_here(p, options);
    require(!options.deterministic || rung(kernel).deterministic || !adds_up_dQ(p, kernel) ||
                takes_turns(p, kernel, options),
            "optimized: the backward's ", name(kernel),
            " adds dQ up in an order that varies; deterministic wants another kernel");
    const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
    require(!rows || t.LSE, "optimized: LSE must not be null; let the forward write it");
    require(!rows || t.O.data, "optimized: O must not be null; the forward returned it");
    check_scratch(std::string("optimized: the backward's ") + name(kernel), options.scratch,
                  "backward_scratch_bytes()", backward_scratch_bytes(p, options), 16);
    if (p.B == 0 || p.Hkv == 0) return kernel;
    // A block of the smallest kernel takes 8 rows; a grid has at most 2^31 - 1 blocks along x.
    const std::int64_t longest = std::max(p.Nq, p.Nk);
    const std::int64_t heads = std::max(p.Hq, p.Hkv);
    require(p.B <= 1 << 30 && heads <= (1 << 30) / p.B &&
                (longest + 127) / 128 * 16 <= (1 << 30) / (p.B * heads),
            "optimized: B Hq max(Nq, Nk) / 8 must be at most 2^30, got B = ", p.B, ", Hq = ", p.Hq,
            ", Nq = ", p.Nq, ", Nk = ", p.Nk);
    // What the copy engine does not know: empty tensors, and those without a map.
    const bool empty = p.Hq == 0 || p.Nq == 0 || p.Nk == 0;
    if (rung(kernel).capability == 90 && (empty || !has_tensor_maps(p, t, kernel)))
      kernel = BackwardKernel::swizzle;
    launch(p, t, kernel, float(p.softmax_scale()), passed(p, kernel, options), options.stream);
    return kernel;
  }
}

template std::string unsupported(const Problem&, const Backward<__half>&, BackwardKernel);
template std::string unsupported(const Problem&, const Backward<__nv_bfloat16>&, BackwardKernel);
template BackwardKernel backward(const Problem&, const Backward<__half>&, const BackwardOptions&);
template BackwardKernel backward(const Problem&, const Backward<__nv_bfloat16>&,
                                 const BackwardOptions&);
template BackwardKernel backward(const Problem&, const Backward<float>&, const BackwardOptions&);

}  // namespace fa::optimized
