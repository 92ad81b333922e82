// From the public face to the lesson: check the arguments, then call it for every head.
#include "00_naive/naive.hpp"
#include "common/core/check.hpp"

namespace fa::naive {
namespace {

// `matrices` counts those of Nq x Nk, `jacobians` those of Nk x Nk.
void check(const Problem& p, int matrices, int jacobians, std::size_t element) {
  check_problem("naive", p, 512);
  require(p.causal == Causal::none, "naive: has no causal mask; stage 01 has");
  require(!p.key_lengths, "naive: has no key_lengths; stage 01 has");
  check_memory(
      "naive", std::to_string(matrices) + " matrices of Nq x Nk",
      (matrices * double(p.Nq) + jacobians * double(p.Nk)) * double(p.Nk) * double(element));
}

}  // namespace

template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options&) {
  check(p, 2, 0, sizeof(T));
  require(!t.LSE, "naive: does not compute LSE, pass null; stage 01 does");
  check_tensors("naive", p, t);
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h)
      attention<T>(as_matrix(t.Q.rows(b, h, p.Nq, p.d)),
                   as_matrix(t.K.rows(b, p.key_head(h), p.Nk, p.d)),
                   as_matrix(t.V.rows(b, p.key_head(h), p.Nk, p.d)), T(p.softmax_scale()),
                   as_matrix(t.O.rows(b, h, p.Nq, p.d)));
}

template <class T>
void backward(const Problem& p, const Backward<T>& t, const Options& options) {
  check(p, 4, options.gradient == SoftmaxGradient::jacobian, sizeof(T));
  check_tensors("naive", p, t);
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t g = 0; g < p.Hkv; ++g) {
      const auto dK = as_matrix(t.dK.rows(b, g, p.Nk, p.d));
      const auto dV = as_matrix(t.dV.rows(b, g, p.Nk, p.d));
      // A key head collects from every query head that reads it.
      MatrixMap<T>(dK).setZero();
      MatrixMap<T>(dV).setZero();
      for (std::int64_t h = 0; h < p.Hq; ++h)
        if (p.key_head(h) == g)
          attention_backward<T>(as_matrix(t.Q.rows(b, h, p.Nq, p.d)),
                                as_matrix(t.K.rows(b, g, p.Nk, p.d)),
                                as_matrix(t.V.rows(b, g, p.Nk, p.d)),
                                as_matrix(t.dO.rows(b, h, p.Nq, p.d)), T(p.softmax_scale()),
                                options.gradient, as_matrix(t.dQ.rows(b, h, p.Nq, p.d)), dK, dV);
    }
}

template void forward(const Problem&, const Forward<float>&, const Options&);
template void forward(const Problem&, const Forward<double>&, const Options&);
template void backward(const Problem&, const Backward<float>&, const Options&);
template void backward(const Problem&, const Backward<double>&, const Options&);

}  // namespace fa::naive
