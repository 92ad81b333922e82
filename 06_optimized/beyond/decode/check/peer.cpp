// Decoding as C functions, for decode_bench.py; part of libstage06_peer.so.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "06_optimized/beyond/decode/check/peer.hpp"
#include "06_optimized/beyond/decode/decode.hpp"
#include "common/measure/peers/peer.hpp"

namespace {

using namespace fa;

Problem problem_of(const fa_decode_call& c) {
  Problem p;
  p.B = c.B;
  p.Hq = c.Hq;
  p.Hkv = c.Hkv;
  p.Nq = c.Nq;
  p.Nk = c.Nk;
  p.d = c.d;
  p.key_lengths = static_cast<const std::int64_t*>(c.lengths);
  return p;
}

decode::Options options_of(const fa_decode_call& c) {
  decode::Options options;
  options.splits = int(c.splits);
  options.stream = static_cast<cudaStream_t>(c.stream);
  options.scratch = {c.scratch, std::size_t(c.scratch_bytes)};
  return options;
}

template <class T>
decode::Tensors<T> tensors_of(const fa_decode_call& c) {
  const auto view = [&](void* data, std::int64_t heads, std::int64_t N) {
    return contiguous(static_cast<T*>(data), heads, N, c.d);
  };
  const std::int64_t rows = c.table ? c.page_size : c.Nk;
  decode::Tensors<T> t;
  t.Q = view(c.Q, c.Hq, c.Nq);
  t.O = view(c.O, c.Hq, c.Nq);
  t.LSE = static_cast<float*>(c.LSE);
  t.cache.K = view(c.K, c.Hkv, rows);
  t.cache.V = view(c.V, c.Hkv, rows);
  t.cache.table = static_cast<const std::int32_t*>(c.table);
  t.cache.table_stride = c.table_stride;
  t.cache.page_size = c.page_size;
  t.cache.pages = c.pages;
  if (c.new_K) t.new_K = view(c.new_K, c.Hkv, c.Nq);
  if (c.new_V) t.new_V = view(c.new_V, c.Hkv, c.Nq);
  return t;
}

// f(T()) with the tensors' own type.
template <class F>
void with_type(const fa_decode_call& c, F f) {
  if (c.dtype == 0) return f(float());
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("dtype must be 0, 1 or 2, got " + std::to_string(c.dtype));
}

}  // namespace

// Null, or what is wrong.
extern "C" const char* fa_decode_forward(const fa_decode_call* call) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      decode::forward(problem_of(*call), tensors_of<T>(*call), options_of(*call));
    });
  });
}

// Device memory that a call needs, and the number of parts where call->splits is 0.
extern "C" const char* fa_decode_plan(const fa_decode_call* call, std::int64_t* bytes,
                                      std::int64_t* parts) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      const Problem p = problem_of(*call);
      *bytes = std::int64_t(decode::scratch_bytes<T>(p, options_of(*call)));
      *parts = call->splits ? call->splits : decode::splits(p, decode::shape<T>(p), processors());
    });
  });
}
