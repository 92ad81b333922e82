// From the public face to the lesson: check the arguments, then call it for every head.
#include <cmath>
#include <cstdint>

#include "02_online_softmax/online_softmax.hpp"
#include "common/core/check.hpp"

namespace fa::online_softmax {

template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options& options) {
  check_problem("online_softmax", p, 512);
  check_key_lengths("online_softmax", p);
  check_tensors("online_softmax", p, t);
  require(options.kernel == Kernel::rows || std::is_same_v<T, float>,
          "online_softmax: the kernel 'lanes' is for float; use Kernel::rows for double");
  if (options.kernel == Kernel::lanes) {
    require(p.Nk <= INT32_MAX, "online_softmax: the kernel 'lanes' takes at most ", INT32_MAX,
            " keys, got Nk = ", p.Nk, "; use Kernel::rows");
    // exp(s) = 2^(s log2 e), and that factor goes into the scale
    require(std::isfinite(float(p.softmax_scale()) * log2_e),
            "online_softmax: the kernel 'lanes' needs scale * log2(e) to be finite in float, got ",
            p.softmax_scale(), "; use Kernel::rows");
  }
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h) {
      const auto Q = t.Q.rows(b, h, p.Nq, p.d);
      const auto K = t.K.rows(b, p.key_head(h), p.Nk, p.d);
      const auto V = t.V.rows(b, p.key_head(h), p.Nk, p.d);
      const auto O = t.O.rows(b, h, p.Nq, p.d);
      T* LSE = t.LSE ? t.LSE + (b * p.Hq + h) * p.Nq : nullptr;
      if constexpr (std::is_same_v<T, float>)
        if (options.kernel == Kernel::lanes) {
          attention_lanes(Q, K, V, float(p.softmax_scale()), Mask(p, b), O, LSE);
          continue;
        }
      attention<T>(Q, K, V, T(p.softmax_scale()), Mask(p, b), O, LSE);
    }
}

template void forward(const Problem&, const Forward<float>&, const Options&);
template void forward(const Problem&, const Forward<double>&, const Options&);

}  // namespace fa::online_softmax
