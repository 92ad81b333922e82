// Dropout, and the plain kernels that it comes from, as C functions for dropout_bench.py; part of
// libstage06_peer.so.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/beyond/dropout/dropout.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/measure/peers/peer.hpp"

// Tensors [B, H, N, d] without gaps; LSE [B, Hq, Nq].
extern "C" struct fa_dropout_call {
  std::int64_t B, Hq, Hkv, Nq, Nk, d;
  std::int64_t causal;  // 0 none, 1 top left, 2 bottom right
  std::int64_t dtype;   // 1 fp16, 2 bf16
  std::int64_t kernel;  // with dropout: 0 best, 1 fa2 and swizzle, 2 hopper
  std::int64_t scratch_bytes;
  double p;
  std::uint64_t seed, offset;
  void *Q, *K, *V, *O, *LSE, *dO, *dQ, *dK, *dV, *scratch, *stream;
};

namespace {

using namespace fa;

Problem problem_of(const fa_dropout_call& c) {
  if (c.causal < 0 || c.causal > 2)
    throw std::invalid_argument("causal must be 0, 1 or 2, got " + std::to_string(c.causal));
  Problem p;
  p.B = c.B;
  p.Hq = c.Hq;
  p.Hkv = c.Hkv;
  p.Nq = c.Nq;
  p.Nk = c.Nk;
  p.d = c.d;
  p.causal = static_cast<Causal>(c.causal);
  return p;
}
dropout::Dropout dropout_of(const fa_dropout_call& c) { return {c.p, c.seed, c.offset, nullptr}; }
cudaStream_t stream_of(const fa_dropout_call& c) { return static_cast<cudaStream_t>(c.stream); }
dropout::Kernel kernel_of(const fa_dropout_call& c) {
  return static_cast<dropout::Kernel>(c.kernel);
}
Scratch scratch_of(const fa_dropout_call& c) { return {c.scratch, std::size_t(c.scratch_bytes)}; }

template <class T>
View<T> view(void* data, std::int64_t heads, std::int64_t N, const fa_dropout_call& c) {
  return contiguous(static_cast<T*>(data), heads, N, c.d);
}
template <class T>
Forward<T> forward_of(const fa_dropout_call& c) {
  return {view<const T>(c.Q, c.Hq, c.Nq, c), view<const T>(c.K, c.Hkv, c.Nk, c),
          view<const T>(c.V, c.Hkv, c.Nk, c), view<T>(c.O, c.Hq, c.Nq, c),
          static_cast<float*>(c.LSE)};
}
template <class T>
Backward<T> backward_of(const fa_dropout_call& c) {
  return {view<const T>(c.Q, c.Hq, c.Nq, c),  view<const T>(c.K, c.Hkv, c.Nk, c),
          view<const T>(c.V, c.Hkv, c.Nk, c), view<const T>(c.O, c.Hq, c.Nq, c),
          view<const T>(c.dO, c.Hq, c.Nq, c), static_cast<const float*>(c.LSE),
          view<T>(c.dQ, c.Hq, c.Nq, c),       view<T>(c.dK, c.Hkv, c.Nk, c),
          view<T>(c.dV, c.Hkv, c.Nk, c)};
}

// f(T()) with the tensors' own type.
template <class F>
void with_type(const fa_dropout_call& c, F f) {
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("dtype must be 1 or 2, got " + std::to_string(c.dtype));
}

void forward_without(const fa_dropout_call& c, optimized::Kernel kernel) {
  with_type(c, [&]<class T>(T) {
    optimized::forward(problem_of(c), forward_of<T>(c), {kernel, stream_of(c), scratch_of(c)});
  });
}
void backward_without(const fa_dropout_call& c, optimized::BackwardKernel kernel) {
  optimized::BackwardOptions options;
  options.kernel = kernel;
  options.stream = stream_of(c);
  options.scratch = scratch_of(c);
  with_type(c, [&]<class T>(T) { optimized::backward(problem_of(c), backward_of<T>(c), options); });
}

}  // namespace

// All of these: null, or what is wrong.
extern "C" const char* fa_dropout_forward(const fa_dropout_call* c) {
  return bench::as_c([&] {
    with_type(*c, [&]<class T>(T) {
      dropout::forward(problem_of(*c), dropout_of(*c), forward_of<T>(*c),
                       {stream_of(*c), scratch_of(*c), kernel_of(*c)});
    });
  });
}
extern "C" const char* fa_dropout_backward(const fa_dropout_call* c) {
  return bench::as_c([&] {
    with_type(*c, [&]<class T>(T) {
      dropout::backward(problem_of(*c), dropout_of(*c), backward_of<T>(*c),
                        {stream_of(*c), scratch_of(*c), kernel_of(*c)});
    });
  });
}
extern "C" const char* fa_dropout_plain_forward(const fa_dropout_call* c) {
  return bench::as_c([&] { forward_without(*c, optimized::Kernel::fa2); });
}
extern "C" const char* fa_dropout_plain_backward(const fa_dropout_call* c) {
  return bench::as_c([&] { backward_without(*c, optimized::BackwardKernel::swizzle); });
}
// What the stage takes without dropout: hopper, where it can run.
extern "C" const char* fa_dropout_best_forward(const fa_dropout_call* c) {
  return bench::as_c([&] { forward_without(*c, optimized::Kernel::best); });
}
extern "C" const char* fa_dropout_best_backward(const fa_dropout_call* c) {
  return bench::as_c([&] { backward_without(*c, optimized::BackwardKernel::best); });
}

// Device memory that a backward needs, of each kind; a forward counts its tiles there, too.
extern "C" const char* fa_dropout_plan(const fa_dropout_call* c, std::int64_t* bytes) {
  return bench::as_c([&] {
    with_type(*c, [&]<class T>(T) {
      const Problem p = problem_of(*c);
      std::size_t most = dropout::scratch_bytes<T>(p);
      for (auto kernel : {optimized::BackwardKernel::swizzle, optimized::BackwardKernel::best}) {
        optimized::BackwardOptions options;
        options.kernel = kernel;
        most = std::max(most, optimized::backward_scratch_bytes(p, options));
      }
      *bytes = std::int64_t(most);
    });
  });
}

// kept[(i - i0) cols + j - j0] = 1 if weight (i, j) of head h is kept, else 0; in host memory.
extern "C" const char* fa_dropout_kept(const fa_dropout_call* c, std::int64_t b, std::int64_t h,
                                       std::int64_t i0, std::int64_t rows, std::int64_t j0,
                                       std::int64_t cols, unsigned char* kept) {
  return bench::as_c([&] {
    const Problem p = problem_of(*c);
    for (std::int64_t i = i0; i < i0 + rows; ++i)
      for (std::int64_t j = j0; j < j0 + cols; ++j)
        *kept++ = dropout::kept(p, dropout_of(*c), b, h, i, j);
  });
}
// The probability with which a weight is kept, and the host's check of p.
extern "C" const char* fa_dropout_probability(double p, double* kept) {
  return bench::as_c([&] { *kept = dropout::kept_probability(p); });
}
