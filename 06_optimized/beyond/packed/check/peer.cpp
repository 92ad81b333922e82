// Packed sequences as C functions, for packed_bench.py; part of libstage06_peer.so. And the batch
// of padded sequences that they stand for, by `fa2` and the backward's `swizzle`, or by `hopper`,
// with key lengths.
#include <stdexcept>
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/packed/check/peer.hpp"
#include "06_optimized/beyond/packed/packed.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/measure/peers/peer.hpp"

namespace {

using namespace fa;

Problem problem_of(const fa_packed_call& c) {
  Problem p;
  p.B = c.B, p.Hq = c.Hq, p.Hkv = c.Hkv, p.Nq = c.Nq, p.Nk = c.Nk, p.d = c.d;
  p.causal = static_cast<Causal>(c.causal);
  p.key_lengths = static_cast<const std::int64_t*>(c.lengths);
  return p;
}
packed::Sequences sequences_of(const fa_packed_call& c) {
  const auto offsets = [](const void* p) { return static_cast<const std::int32_t*>(p); };
  return {offsets(c.queries), offsets(c.keys), offsets(c.queries_on_host)};
}
packed::Options options_of(const fa_packed_call& c) {
  return {static_cast<packed::Order>(c.order),
          static_cast<cudaStream_t>(c.stream),
          {c.scratch, std::size_t(c.scratch_bytes)},
          static_cast<packed::Kernel>(c.kernel)};
}

template <class T>
View<T> view(const fa_packed_call& c, void* data, std::int64_t heads, std::int64_t N) {
  return {static_cast<T*>(data), N * heads * c.d, c.d, heads * c.d};
}
template <class T>
Forward<T> forward_of(const fa_packed_call& c) {
  return {view<T>(c, c.Q, c.Hq, c.Nq), view<T>(c, c.K, c.Hkv, c.Nk), view<T>(c, c.V, c.Hkv, c.Nk),
          view<T>(c, c.O, c.Hq, c.Nq), static_cast<float*>(c.LSE)};
}
template <class T>
Backward<T> backward_of(const fa_packed_call& c) {
  return {
      view<T>(c, c.Q, c.Hq, c.Nq),  view<T>(c, c.K, c.Hkv, c.Nk),  view<T>(c, c.V, c.Hkv, c.Nk),
      view<T>(c, c.O, c.Hq, c.Nq),  view<T>(c, c.dO, c.Hq, c.Nq),  static_cast<float*>(c.LSE),
      view<T>(c, c.dQ, c.Hq, c.Nq), view<T>(c, c.dK, c.Hkv, c.Nk), view<T>(c, c.dV, c.Hkv, c.Nk)};
}

// f(T()) with the tensors' own type.
template <class F>
void with_type(const fa_packed_call& c, F f) {
  if (c.dtype == 0) return f(float());
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("dtype must be 0, 1 or 2, got " + std::to_string(c.dtype));
}
template <class F>
void with_half(const fa_packed_call& c, F f) {
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("padded: dtype must be 1 or 2, got " + std::to_string(c.dtype));
}

}  // namespace

// All of these: null, or what is wrong.
extern "C" const char* fa_packed_plan(const fa_packed_call* call, std::int64_t* forward_bytes,
                                      std::int64_t* backward_bytes) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      *forward_bytes = std::int64_t(packed::scratch_bytes<T>(problem_of(*call)));
      *backward_bytes = std::int64_t(packed::backward_scratch_bytes<T>(problem_of(*call)));
    });
  });
}
extern "C" const char* fa_packed_forward(const fa_packed_call* call) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      packed::forward(problem_of(*call), sequences_of(*call), forward_of<T>(*call),
                      options_of(*call));
    });
  });
}
extern "C" const char* fa_packed_backward(const fa_packed_call* call) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      packed::backward(problem_of(*call), sequences_of(*call), backward_of<T>(*call),
                       options_of(*call));
    });
  });
}

namespace {
optimized::BackwardKernel backward_kernel(const fa_packed_call& c) {
  return c.kernel == 2 ? optimized::BackwardKernel::hopper : optimized::BackwardKernel::swizzle;
}
}  // namespace

extern "C" const char* fa_padded_plan(const fa_packed_call* call, std::int64_t* backward_bytes) {
  return bench::as_c([&] {
    *backward_bytes = std::int64_t(
        optimized::backward_scratch_bytes(problem_of(*call), {backward_kernel(*call)}));
  });
}
extern "C" const char* fa_padded_forward(const fa_packed_call* call) {
  return bench::as_c([&] {
    with_half(*call, [&]<class T>(T) {
      const auto kernel = call->kernel == 2 ? optimized::Kernel::hopper : optimized::Kernel::fa2;
      optimized::forward(problem_of(*call), forward_of<T>(*call),
                         {kernel,
                          static_cast<cudaStream_t>(call->stream),
                          {call->scratch, std::size_t(call->scratch_bytes)}});
    });
  });
}
extern "C" const char* fa_padded_backward(const fa_packed_call* call) {
  return bench::as_c([&] {
    with_half(*call, [&]<class T>(T) {
      optimized::BackwardOptions options;
      options.kernel = backward_kernel(*call);
      options.stream = static_cast<cudaStream_t>(call->stream);
      options.scratch = {call->scratch, std::size_t(call->scratch_bytes)};
      optimized::backward(problem_of(*call), backward_of<T>(*call), options);
    });
  });
}
