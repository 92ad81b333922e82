// What a stage offers to peers.py: its kernels as C functions, so that they and PyTorch's are timed
// in one process, on the same tensors. Tensors are [B, H, N, d] without gaps; LSE, [B, H, N].
#pragma once
#include <cstdint>
#include <exception>
#include <string>

#include "common/core/tensor.hpp"

extern "C" struct fa_peer_call {
  std::int64_t B, H, N, d, causal;
  void *Q, *K, *V, *O, *LSE, *dO, *dQ, *dK, *dV, *scratch, *stream;
};

namespace fa::harness {

inline Problem problem_of(const fa_peer_call& c) {
  Problem p;
  p.B = c.B;
  p.Hq = p.Hkv = c.H;
  p.Nq = p.Nk = c.N;
  p.d = c.d;
  p.causal = c.causal ? Causal::top_left : Causal::none;
  return p;
}
template <class T>
Forward<T> forward_of(const fa_peer_call& c) {
  const auto view = [&](void* data) { return contiguous(static_cast<T*>(data), c.H, c.N, c.d); };
  return {view(c.Q), view(c.K), view(c.V), view(c.O), static_cast<Stat<T>*>(c.LSE)};
}
template <class T>
Backward<T> backward_of(const fa_peer_call& c) {
  const auto view = [&](void* data) { return contiguous(static_cast<T*>(data), c.H, c.N, c.d); };
  return {view(c.Q),  view(c.K),  view(c.V), view(c.O), view(c.dO), static_cast<Stat<T>*>(c.LSE),
          view(c.dQ), view(c.dK), view(c.dV)};
}

// Null if f returns; else what it threw, valid until the next call.
template <class F>
const char* as_c(F f) {
  static thread_local std::string text;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    text = e.what();
    return text.c_str();
  }
}

}  // namespace fa::harness
