// The saved context, and the public face of the backward on the CPU.
#include <algorithm>
#include <memory>

#include "05_cuda_backward/cuda_backward.hpp"
#include "common/core/check.hpp"
#include "common/core/parallel_for.hpp"

namespace fa::cuda_backward {

template <class T>
Context<T>::Context(const Problem& problem, const Forward<T>& forward)
    : p(problem), Q(forward.Q), K(forward.K), V(forward.V), O(forward.O), LSE(forward.LSE) {
  require(LSE || p.B * p.Hq * p.Nq == 0,
          "cuda_backward: the forward was not asked for LSE; the backward needs it");
}
template struct Context<float>;
template struct Context<double>;

template <class T>
void backward_on_cpu(const Problem& p, const Backward<T>& t, const CpuOptions& options) {
  check_problem("backward_on_cpu", p, 512);
  check_key_lengths("backward_on_cpu", p);
  check_tensors("backward_on_cpu", p, t);
  const bool rows = p.B > 0 && p.Hq > 0 && p.Nq > 0;
  require(!rows || t.LSE, "backward_on_cpu: LSE must not be null; let the forward write it");
  require(!rows || t.O.data, "backward_on_cpu: O must not be null; the forward returned it");
  require(options.threads >= 0, "backward_on_cpu: threads must not be negative, got ",
          options.threads);
  require(options.Br >= 1 && options.Bc >= 1, "backward_on_cpu: Br and Bc must be positive, got ",
          options.Br, " and ", options.Bc);

  const T scale = T(p.softmax_scale());
  // A task owns the dK and dV of one key head, and the dQ of all query heads that read it.
  parallel_for(p.B * p.Hkv, options.threads, [&] {
    return [&, D = std::unique_ptr<T[]>(new T[std::size_t(p.Nq)])](std::int64_t task) {
      const std::int64_t b = task / p.Hkv, hk = task % p.Hkv, group = p.Hq / p.Hkv;
      const auto dK = t.dK.rows(b, hk, p.Nk, p.d), dV = t.dV.rows(b, hk, p.Nk, p.d);
      for (std::int64_t j = 0; j < p.Nk; ++j) {
        std::fill_n(dK[j], p.d, T(0));
        std::fill_n(dV[j], p.d, T(0));
      }
      for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h)
        attention_backward<T>(t.Q.rows(b, h, p.Nq, p.d), t.K.rows(b, hk, p.Nk, p.d),
                              t.V.rows(b, hk, p.Nk, p.d), t.O.rows(b, h, p.Nq, p.d),
                              t.dO.rows(b, h, p.Nq, p.d), t.LSE + (b * p.Hq + h) * p.Nq, scale,
                              Mask(p, b), std::min(options.Br, p.Nq), std::min(options.Bc, p.Nk),
                              D.get(), t.dQ.rows(b, h, p.Nq, p.d), dK, dV);
    };
  });
}

template void backward_on_cpu(const Problem&, const Backward<float>&, const CpuOptions&);
template void backward_on_cpu(const Problem&, const Backward<double>&, const CpuOptions&);

}  // namespace fa::cuda_backward
