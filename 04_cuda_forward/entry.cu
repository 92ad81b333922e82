// From the public face to the kernels: check the arguments, choose, launch.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "04_cuda_forward/cuda_forward.hpp"
#include "common/core/check.hpp"
#include "common/core/tuned.hpp"

namespace fa::cuda_forward {

namespace {
struct Rung {
  const char* name;
  void (*launch)(const Problem&, const Forward<float>&, float scale, cudaStream_t);
  std::size_t (*shared_bytes)(std::int64_t d);  // that the launch asks for
};
Rung rung(Kernel kernel) {
  switch (kernel) {
    case Kernel::thread_tile:
      return {"thread_tile", launch_thread_tile, thread_tile_shared_bytes};
    case Kernel::fixed_width:
      return {"fixed_width", launch_fixed_width, fixed_width_shared_bytes};
    case Kernel::one_buffer:
      return {"one_buffer", launch_one_buffer, one_buffer_shared_bytes};
    case Kernel::register_tiled:
      return {"register_tiled", launch_register_tiled, register_tiled_shared_bytes};
    case Kernel::neighbours:
      return {"neighbours", launch_neighbours, neighbours_shared_bytes};
    case Kernel::eight_rows:
      return {"eight_rows", launch_eight_rows, eight_rows_shared_bytes};
    case Kernel::weights_by_key:
      return {"weights_by_key", launch_weights_by_key, weights_by_key_shared_bytes};
    case Kernel::eight_by_eight:
      return {"eight_by_eight", launch_eight_by_eight, eight_by_eight_shared_bytes};
    case Kernel::copies_ahead:
      return {"copies_ahead", launch_copies_ahead, copies_ahead_shared_bytes};
    case Kernel::fragments_ahead:
      return {"fragments_ahead", launch_fragments_ahead, fragments_ahead_shared_bytes};
    case Kernel::lazy_maximum:
      return {"lazy_maximum", launch_lazy_maximum, lazy_maximum_shared_bytes};
    case Kernel::longest_first:
      return {"longest_first", launch_longest_first, longest_first_shared_bytes};
    default:
      return {"tiled", launch_tiled, [](std::int64_t) { return std::size_t(0); }};
  }
}
}  // namespace

const char* name(Kernel kernel) {
  return kernel == Kernel::best       ? "best"
         : kernel == Kernel::baseline ? "baseline"
                                      : rung(kernel).name;
}

std::size_t scratch_bytes(const Problem& p, Kernel kernel) {
  if (kernel != Kernel::baseline) return 0;
  return sizeof(float) * std::size_t(p.B * p.Hq * p.Nq * p.Nk);
}

std::string unsupported(const Problem& p, [[maybe_unused]] const Forward<float>& t, Kernel kernel) {
  switch (kernel) {
    case Kernel::baseline:
#ifdef FA_EMULATED
      return "baseline needs cuBLAS, which the CPU emulation does not have";
#else
      if (std::max(p.Nq, p.Nk) > 0x7fffffff || p.B * p.Hq > 0x7fffffff)
        return "baseline: cuBLAS wants Nq, Nk and B Hq below 2^31";
      for (const auto& [name, row] :
           {std::pair{"Q", t.Q.row}, {"K", t.K.row}, {"V", t.V.row}, {"O", t.O.row}})
        if (row < p.d || row > 0x7fffffff)
          return std::string("baseline: cuBLAS wants rows of ") + name +
                 " at least d = " + std::to_string(p.d) + " elements apart, got " +
                 std::to_string(row);
      return {};
#endif
    case Kernel::best:
      return {};
    default:
      // Rungs from neighbours on count keys in 32 bits.
      if (kernel >= Kernel::neighbours && p.Nk > 0x7fffffff - 256)
        return std::string(name(kernel)) + ": Nk must be below 2^31 - 256";
      // exp(s) = 2^(s log2 e), and that factor goes into the scale
      if (kernel >= Kernel::lazy_maximum && !std::isfinite(float(p.softmax_scale()) * log2_e))
        return std::string(name(kernel)) + ": scale * log2(e) must be finite in float";
      return too_little_shared_memory(name(kernel), rung(kernel).shared_bytes(p.d),
                                      shared_memory_limit());
  }
}

template <class T>
Kernel forward(const Problem& p, const Forward<T>& t, const Options& options) {
  if constexpr (!std::is_same_v<T, float>) {
    require(false, "cuda_forward: T must be float, got elements of ", sizeof(T),
            " bytes; half precision begins in stage 06, double stays on the CPU");
    return Kernel::best;
  } else {
    check_problem("cuda_forward", p, max_d);
    check_tensors("cuda_forward", p, t);
    Kernel kernel = options.kernel;
    if (kernel == Kernel::best)
      for (Kernel higher : ladder)
        if (unsupported(p, t, higher).empty()) kernel = higher;
    const std::string why_not = unsupported(p, t, kernel);
    require(why_not.empty(), "cuda_forward: ", why_not);
    check_scratch(std::string("cuda_forward: ") + name(kernel), options.scratch, "scratch_bytes()",
                  scratch_bytes(p, kernel), alignof(float));
    if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return kernel;
    // The smallest tile has 16 rows; a grid has at most 2^31 - 1 blocks along x.
    require(p.B <= 0x7fffffff && p.Hq <= 0x7fffffff / p.B &&
                (p.Nq + 15) / 16 <= 0x7fffffff / (p.B * p.Hq),
            "cuda_forward: B Hq ceil(Nq / 16) must be below 2^31, got B = ", p.B, ", Hq = ", p.Hq,
            ", Nq = ", p.Nq);
    const float scale = float(p.softmax_scale());
    if (kernel == Kernel::longest_first &&
        launch_tuned("longest_first", p, t, TunedCall::fp32, scale, nullptr, options.stream,
                     current_gpu))
      return kernel;
    if (kernel == Kernel::baseline)
      launch_baseline(p, t, scale, static_cast<float*>(options.scratch.data), options.stream);
    else
      rung(kernel).launch(p, t, scale, options.stream);
    return kernel;
  }
}

template Kernel forward(const Problem&, const Forward<float>&, const Options&);
template Kernel forward(const Problem&, const Forward<double>&, const Options&);

}  // namespace fa::cuda_forward
