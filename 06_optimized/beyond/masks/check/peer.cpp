// Masks as C functions, for masks_bench.py; part of libstage06_peer.so.
#include "06_optimized/beyond/masks/check/peer.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "06_optimized/beyond/masks/masks.hpp"
#include "common/measure/peers/peer.hpp"

namespace {

using namespace fa;

Problem problem_of(const fa_masks_call& c) {
  Problem p;
  p.B = c.B;
  p.Hq = c.Hq;
  p.Hkv = c.Hkv;
  p.Nq = c.Nq;
  p.Nk = c.Nk;
  p.d = c.d;
  p.causal = c.causal ? Causal::bottom_right : Causal::none;
  return p;
}

masks::Blocks blocks_of(const fa_masks_call& c, void* offsets, void* numbers, std::int64_t N) {
  if (!offsets) return {};
  return {static_cast<const std::int32_t*>(offsets),
          static_cast<const std::int32_t*>(numbers),
          (N + masks::block - 1) / masks::block,
          c.entries,
          0,
          0};
}

masks::Pattern pattern_of(const fa_masks_call& c) {
  masks::Pattern m;
  if (c.left >= 0) m.left = c.left;
  if (c.right >= 0) m.right = c.right;
  m.first = c.first;
  m.keys = blocks_of(c, c.keys_offsets, c.keys_numbers, c.Nq);
  m.queries = blocks_of(c, c.queries_offsets, c.queries_numbers, c.Nk);
  m.sinks = static_cast<const float*>(c.sinks);
  m.query_documents = static_cast<const std::int32_t*>(c.query_documents);
  m.key_documents = static_cast<const std::int32_t*>(c.key_documents);
  m.sorted = c.query_documents != nullptr;
  return m;
}

masks::Options options_of(const fa_masks_call& c) {
  return {static_cast<cudaStream_t>(c.stream),
          {c.scratch, std::size_t(c.scratch_bytes)},
          static_cast<masks::Kernel>(std::min(c.kernel, std::int64_t(2))),
          c.kernel == 3};
}

// f(T()) with the tensors' own type.
template <class F>
void with_type(const fa_masks_call& c, F f) {
  if (c.dtype == 0) return f(float());
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("dtype must be 0, 1 or 2, got " + std::to_string(c.dtype));
}

template <class T>
View<T> queries(const fa_masks_call& c, void* data) {
  return contiguous(static_cast<T*>(data), c.Hq, c.Nq, c.d);
}
template <class T>
View<T> keys(const fa_masks_call& c, void* data) {
  return contiguous(static_cast<T*>(data), c.Hkv, c.Nk, c.d);
}

}  // namespace

// Null, or what is wrong.
extern "C" const char* fa_masks_forward(const fa_masks_call* call) {
  return bench::as_c([&] {
    const fa_masks_call& c = *call;
    with_type(c, [&]<class T>(T) {
      masks::forward<T>(problem_of(c), pattern_of(c),
                        {queries<T>(c, c.Q), keys<T>(c, c.K), keys<T>(c, c.V), queries<T>(c, c.O),
                         static_cast<float*>(c.LSE)},
                        options_of(c));
    });
  });
}

extern "C" const char* fa_masks_backward(const fa_masks_call* call) {
  return bench::as_c([&] {
    const fa_masks_call& c = *call;
    with_type(c, [&]<class T>(T) {
      masks::backward<T>(problem_of(c), pattern_of(c),
                         {queries<T>(c, c.Q), keys<T>(c, c.K), keys<T>(c, c.V), queries<T>(c, c.O),
                          queries<T>(c, c.dO), static_cast<float*>(c.LSE), queries<T>(c, c.dQ),
                          keys<T>(c, c.dK), keys<T>(c, c.dV)},
                         static_cast<float*>(c.dsinks), options_of(c));
    });
  });
}

extern "C" const char* fa_masks_scratch_bytes(const fa_masks_call* call, std::int64_t* bytes) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      *bytes = std::int64_t(masks::scratch_bytes<T>(problem_of(*call)));
    });
  });
}
