// What a problem costs, counted once for all stages and printed under every chart.
#pragma once
#include "common/core/problem.hpp"

namespace fa::bench {

inline constexpr const char* flop_formula = "4 d FLOP per visible (query, key) pair";

// Number of (query, key) pairs that the mask leaves, over batch and query heads. Exact: half of
// Nq * Nk is right for a causal mask only when Nq = Nk is large.
double visible_pairs(const Problem& p);

// Forward: two products of 2 d FLOP a pair. The exponentials are not counted, by convention.
double forward_flops(const Problem& p);

// Backward: five products (S and dP recomputed, dV, dK, dQ) instead of two, so 2.5 times as many.
double backward_flops(const Problem& p);

// Least bytes between memory and processor: every input read once, every output written once.
double forward_bytes(const Problem& p, double element_bytes);
double backward_bytes(const Problem& p, double element_bytes);

}  // namespace fa::bench
