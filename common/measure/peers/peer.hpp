// What a stage offers to peers.py: its kernels as C functions, so that they and PyTorch's are timed
// in one process, on the same tensors. Tensors are [B, H, N, d] without gaps, K and V and their
// gradients [B, Hkv, N, d]; LSE, [B, H, N].
#pragma once
#include <cstdint>
#include <exception>
#include <string>

#include "common/core/tensor.hpp"

extern "C" struct fa_peer_call {
  std::int64_t B, H, Hkv, N, d, causal;
  std::int64_t dtype;  // of the tensors but LSE: 0 fp32, 1 fp16, 2 bf16
  void *Q, *K, *V, *O, *LSE, *dO, *dQ, *dK, *dV, *scratch, *stream;
};

namespace fa::bench {

inline Problem problem_of(const fa_peer_call& c) {
  Problem p;
  p.B = c.B;
  p.Hq = c.H;
  p.Hkv = c.Hkv;
  p.Nq = p.Nk = c.N;
  p.d = c.d;
  p.causal = c.causal ? Causal::top_left : Causal::none;
  return p;
}
template <class T>
View<T> peer_view(const fa_peer_call& c, void* data, std::int64_t heads) {
  return contiguous(static_cast<T*>(data), heads, c.N, c.d);
}
template <class T>
Forward<T> forward_of(const fa_peer_call& c) {
  return {peer_view<T>(c, c.Q, c.H), peer_view<T>(c, c.K, c.Hkv), peer_view<T>(c, c.V, c.Hkv),
          peer_view<T>(c, c.O, c.H), static_cast<Stat<T>*>(c.LSE)};
}
template <class T>
Backward<T> backward_of(const fa_peer_call& c) {
  return {peer_view<T>(c, c.Q, c.H),  peer_view<T>(c, c.K, c.Hkv),  peer_view<T>(c, c.V, c.Hkv),
          peer_view<T>(c, c.O, c.H),  peer_view<T>(c, c.dO, c.H),   static_cast<Stat<T>*>(c.LSE),
          peer_view<T>(c, c.dQ, c.H), peer_view<T>(c, c.dK, c.Hkv), peer_view<T>(c, c.dV, c.Hkv)};
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

}  // namespace fa::bench
