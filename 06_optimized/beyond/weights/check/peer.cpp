// The questions of this walk as C functions, for weights_bench.py; part of libstage06_peer.so.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "06_optimized/beyond/weights/weights.hpp"
#include "common/measure/peers/peer.hpp"

namespace {

using namespace fa;

// f(T()) with the tensors' own type.
template <class F>
void with_type(const fa_peer_call& c, F f) {
  if (c.dtype == 0) return f(float());
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("dtype must be 0, 1 or 2, got " + std::to_string(c.dtype));
}

// f(problem, inputs) with L of a forward, and the tensors' own type.
template <class F>
void ask(const fa_peer_call& c, F f) {
  with_type(c, [&]<class T>(T) {
    const Forward<T> t = bench::forward_of<T>(c);
    f(bench::problem_of(c), weights::Inputs<T>{t.Q, t.K, t.LSE});
  });
}

}  // namespace

// Null, or what is wrong. Of all rows: P and keys are [B, Hq, Nq, k] without gaps.
extern "C" const char* fa_weights_largest(const fa_peer_call* call, std::int64_t k, float* P,
                                          std::int32_t* keys) {
  return bench::as_c([&] {
    ask(*call, [&](const Problem& p, const auto& in) {
      weights::largest(p, in, 0, p.Nq, int(k), contiguous(P, p.Hq, p.Nq, k),
                       contiguous(keys, p.Hq, p.Nq, k), static_cast<cudaStream_t>(call->stream));
    });
  });
}

// sums: [B, Hq, Nk].
extern "C" const char* fa_weights_column_sums(const fa_peer_call* call, float* sums) {
  return bench::as_c([&] {
    ask(*call, [&](const Problem& p, const auto& in) {
      weights::column_sums(p, in, sums, static_cast<cudaStream_t>(call->stream));
    });
  });
}

// Every head's first rows and keys: P is [B, Hq, rows, cols].
extern "C" const char* fa_weights_tile(const fa_peer_call* call, std::int64_t rows,
                                       std::int64_t cols, float* P) {
  return bench::as_c([&] {
    ask(*call, [&](const Problem& p, const auto& in) {
      weights::tile(p, in, {0, rows, 0, cols}, contiguous(P, p.Hq, rows, cols),
                    static_cast<cudaStream_t>(call->stream));
    });
  });
}
