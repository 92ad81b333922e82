#include "common/measure/flops.hpp"

namespace fa::bench {

double visible_pairs(const Problem& p) {
  double pairs = 0;
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t i = 0; i < p.Nq; ++i) pairs += static_cast<double>(visible_keys(p, b, i));
  return pairs * static_cast<double>(p.Hq);
}

double forward_flops(const Problem& p) { return 4.0 * static_cast<double>(p.d) * visible_pairs(p); }

double backward_flops(const Problem& p) { return 2.5 * forward_flops(p); }

namespace {
double query_elements(const Problem& p) { return static_cast<double>(p.B * p.Hq * p.Nq * p.d); }
double key_elements(const Problem& p) { return static_cast<double>(p.B * p.Hkv * p.Nk * p.d); }
double lse_bytes(const Problem& p, double element_bytes) {
  return static_cast<double>(p.B * p.Hq * p.Nq) * (element_bytes == 8 ? 8.0 : 4.0);
}
}  // namespace

double forward_bytes(const Problem& p, double element_bytes) {
  // Q, K, V in; O, LSE out.
  return element_bytes * (2 * query_elements(p) + 2 * key_elements(p)) +
         lse_bytes(p, element_bytes);
}

double backward_bytes(const Problem& p, double element_bytes) {
  // Q, K, V, O, dO, LSE in; dQ, dK, dV out.
  return element_bytes * (4 * query_elements(p) + 4 * key_elements(p)) +
         lse_bytes(p, element_bytes);
}

}  // namespace fa::bench
