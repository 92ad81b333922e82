// From the public face to the kernels: check the arguments, choose, launch in order. All kernels of
// a call go to one stream, so the second finds what the first has written.
#include <algorithm>
#include <type_traits>

#include "05_cuda_backward/cuda_backward.hpp"
#include "common/core/check.hpp"

namespace fa::cuda_backward {

const char* name(Kernel kernel) {
  switch (kernel) {
    case Kernel::two_kernels:
      return "two_kernels";
    case Kernel::atomic:
      return "atomic";
    default:
      return "stored";
  }
}
const char* name(Delta delta) {
  switch (delta) {
    case Delta::own_kernel:
      return "own_kernel";
    case Delta::with_dq:
      return "with_dq";
    default:
      return "in_loop";
  }
}

std::size_t scratch_bytes(const Problem& p, const Options& options) {
  const auto rows = std::size_t(p.B * p.Hq * p.Nq);
  if (options.kernel == Kernel::stored) return 2 * sizeof(float) * rows * std::size_t(p.Nk);
  if (options.kernel == Kernel::two_kernels && options.delta == Delta::in_loop) return 0;
  return sizeof(float) * rows;
}

std::string unsupported(const Problem& p, [[maybe_unused]] const Backward<float>& t,
                        const Options& options) {
  if (options.kernel != Kernel::stored)
    return too_little_shared_memory(name(options.kernel), shared_bytes(p.d, true),
                                    shared_memory_limit());
#ifdef FA_EMULATED
  return "stored needs cuBLAS, which the CPU emulation does not have";
#else
  if (p.Nq == 0 || p.Nk == 0) return "stored: empty problems are not supported";
  if (std::max(p.Nq, p.Nk) > 0x7fffffff)
    return "stored: cuBLAS wants Nq and Nk below 2^31, got " + std::to_string(p.Nq) + " and " +
           std::to_string(p.Nk);
  if (p.Hq != p.Hkv) return "stored: groups of heads are not supported, Hq must equal Hkv";
  for (const auto& [tensor, row] : {std::pair{"Q", t.Q.row},
                                    {"K", t.K.row},
                                    {"V", t.V.row},
                                    {"dO", t.dO.row},
                                    {"dQ", t.dQ.row},
                                    {"dK", t.dK.row},
                                    {"dV", t.dV.row}})
    if (row < p.d || row > 0x7fffffff)
      return std::string("stored: cuBLAS wants rows of ") + tensor +
             " at least d = " + std::to_string(p.d) + " and less than 2^31 elements apart, got " +
             std::to_string(row);
  return {};
#endif
}

template <class T>
void backward(const Problem& p, const Backward<T>& t, const Options& asked) {
  if constexpr (!std::is_same_v<T, float>) {
    require(false, "cuda_backward: T must be float, got elements of ", sizeof(T),
            " bytes; double is for backward_on_cpu, half precision begins in stage 06");
  } else {
    check_problem("cuda_backward", p, max_d);
    check_tensors("cuda_backward", p, t);
    Options options = asked;
    // The fast kernels count keys in 32 bits.
    const bool fast_can =
        p.Nk <= 0x7fffffff - 256 && fast_shared_bytes(p.d) <= shared_memory_limit();
    if (options.tiles == Tiles::fast && !fast_can) options.tiles = Tiles::lesson;
    if (options.tiles == Tiles::lesson && shared_bytes(p.d, false) > shared_memory_limit())
      options.tiles = Tiles::small;
    const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
    require(!rows || t.LSE, "cuda_backward: LSE must not be null; let the forward write it");
    require(!rows || t.O.data, "cuda_backward: O must not be null; the forward returned it");
    const std::string why_not = unsupported(p, t, options);
    require(why_not.empty(), "cuda_backward: ", why_not);
    check_scratch(std::string("cuda_backward: ") + name(options.kernel), options.scratch,
                  "scratch_bytes()", scratch_bytes(p, options), alignof(float));
    if (p.B == 0 || p.Hkv == 0) return;
    // A block per 4 rows in the smallest kernel; a grid has at most 2^31 - 1 along x.
    const std::int64_t longest = std::max(std::max(p.Nq, p.Nk), std::int64_t(1));
    const std::int64_t heads = std::max(p.Hq, p.Hkv);
    require(p.B <= 0x7fffffff && heads <= 0x7fffffff / p.B &&
                longest / 4 + 1 <= 0x7fffffff / (p.B * heads),
            "cuda_backward: B Hq max(Nq, Nk) / 4 must be below 2^31, got B = ", p.B,
            ", Hq = ", p.Hq, ", Nq = ", p.Nq, ", Nk = ", p.Nk);
    const float scale = float(p.softmax_scale());
    float* D = static_cast<float*>(options.scratch.data);
    if (options.kernel == Kernel::stored) {
      launch_stored(p, t, scale, D, D + p.B * p.Hq * p.Nq * p.Nk, options.stream);
      return;
    }
    const bool atomic = options.kernel == Kernel::atomic, fast = options.tiles == Tiles::fast;
    if (rows) {
      if (atomic || options.delta == Delta::own_kernel) launch_delta(p, t, D, options.stream);
      if (!atomic) (fast ? launch_fast_dq : launch_dq)(p, t, scale, options, D);
    }
    if (atomic)
      launch_atomic(p, t, scale, options, D);
    else if (p.Nk > 0)
      (fast ? launch_fast_dkv : launch_dkv)(p, t, scale, options, D);
  }
}

template void backward(const Problem&, const Backward<float>&, const Options&);
template void backward(const Problem&, const Backward<double>&, const Options&);

}  // namespace fa::cuda_backward
