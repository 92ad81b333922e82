// From the public face to the kernels: check the arguments, choose, launch.
#include <algorithm>
#include <type_traits>

#include "04_cuda_forward/cuda_forward.hpp"
#include "common/core/check.hpp"

namespace fa::cuda_forward {

const char* name(Kernel kernel) {
  switch (kernel) {
    case Kernel::baseline:
      return "baseline";
    case Kernel::tiled:
      return "tiled";
    case Kernel::register_tiled:
      return "register_tiled";
    default:
      return "best";
  }
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
    case Kernel::register_tiled:
      return too_little_shared_memory("register_tiled", register_tiled_shared_bytes(p.d),
                                      shared_memory_limit());
    default:
      return {};
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
      kernel = unsupported(p, t, Kernel::register_tiled).empty() ? Kernel::register_tiled
                                                                 : Kernel::tiled;
    const std::string why_not = unsupported(p, t, kernel);
    require(why_not.empty(), "cuda_forward: ", why_not);
    require(options.scratch || scratch_bytes(p, kernel) == 0, "cuda_forward: ", name(kernel),
            " needs scratch_bytes() = ", scratch_bytes(p, kernel), " bytes of scratch, got null");
    if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return kernel;
    // The smallest tile has 16 rows; a grid has at most 2^31 - 1 blocks along x.
    require(p.B <= 0x7fffffff && p.Hq <= 0x7fffffff / p.B &&
                (p.Nq + 15) / 16 <= 0x7fffffff / (p.B * p.Hq),
            "cuda_forward: B Hq ceil(Nq / 16) must be below 2^31, got B = ", p.B, ", Hq = ", p.Hq,
            ", Nq = ", p.Nq);
    const float scale = float(p.softmax_scale());
    switch (kernel) {
      case Kernel::baseline:
        launch_baseline(p, t, scale, static_cast<float*>(options.scratch), options.stream);
        break;
      case Kernel::tiled:
        launch_tiled(p, t, scale, options.stream);
        break;
      default:
        launch_register_tiled(p, t, scale, options.stream);
        break;
    }
    return kernel;
  }
}

template Kernel forward(const Problem&, const Forward<float>&, const Options&);
template Kernel forward(const Problem&, const Forward<double>&, const Options&);

}  // namespace fa::cuda_forward
