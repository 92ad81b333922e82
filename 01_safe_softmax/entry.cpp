// From the public face to the lesson: check the arguments, then call it for every head.
#include "01_safe_softmax/safe_softmax.hpp"
#include "common/core/check.hpp"

namespace fa::safe_softmax {

template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options&) {
  check_problem("safe_softmax", p, 512);
  check_key_lengths("safe_softmax", p);
  check_memory("safe_softmax", "2 matrices of Nq x Nk",
               2.0 * double(p.Nq) * double(p.Nk) * sizeof(T));
  check_tensors("safe_softmax", p, t);
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h)
      attention<T>(
          as_matrix(t.Q.rows(b, h, p.Nq, p.d)), as_matrix(t.K.rows(b, p.key_head(h), p.Nk, p.d)),
          as_matrix(t.V.rows(b, p.key_head(h), p.Nk, p.d)), T(p.softmax_scale()), Mask(p, b),
          as_matrix(t.O.rows(b, h, p.Nq, p.d)), t.LSE ? t.LSE + (b * p.Hq + h) * p.Nq : nullptr);
}

template void forward(const Problem&, const Forward<float>&, const Options&);
template void forward(const Problem&, const Forward<double>&, const Options&);

}  // namespace fa::safe_softmax
