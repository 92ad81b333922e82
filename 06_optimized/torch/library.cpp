// From a flat struct to the stages' public faces, and from exceptions to numbers and words.
#include "06_optimized/torch/library.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/core/check.hpp"
#include "common/core/tensor.hpp"

// What this library holds: FA_TORCH_CUDA for kernels, FA_TORCH_MINE for one stage alone, and then
// none of the walks.
#ifndef FA_TORCH_MINE
#define FA_TORCH_MINE (-1)
#endif
#define FA_TORCH_HAS(stage) (FA_TORCH_MINE == -1 || FA_TORCH_MINE == (stage))
#ifdef FA_EMULATED
#define FA_TORCH_DEVICE "cpu"
#else
#define FA_TORCH_DEVICE "cuda"
#endif

#if FA_TORCH_HAS(0)
#include "00_naive/naive.hpp"
#endif
#if FA_TORCH_HAS(1)
#include "01_safe_softmax/safe_softmax.hpp"
#endif
#if FA_TORCH_HAS(2)
#include "02_online_softmax/online_softmax.hpp"
#endif
#if FA_TORCH_HAS(3)
#include "03_tiled_cpu/tiled_cpu.hpp"
#endif
#if FA_TORCH_HAS(5)
#include "05_cuda_backward/cuda_backward.hpp"
#endif
#ifdef FA_TORCH_CUDA
#include "common/core/cuda.hpp"
#if FA_TORCH_HAS(4)
#include "04_cuda_forward/cuda_forward.hpp"
#endif
#if FA_TORCH_HAS(6)
#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#endif
#if FA_TORCH_MINE == -1
#define FA_TORCH_WALKS
#include "06_optimized/beyond/decode/decode.hpp"
#include "06_optimized/beyond/dropout/dropout.hpp"
#include "06_optimized/beyond/masks/masks.hpp"
#endif
#endif

namespace {

using namespace fa;
using Call = fa_torch_call;

// Of 05, beside its kernels: the backward for host memory, and two_kernels with the lesson's tiles.
[[maybe_unused]] constexpr int on_cpu = -1, lesson = -2;
// Of 06, beside its kernels: walks of beyond/.
[[maybe_unused]] constexpr int windows = -1, drops = -2, decodes = -3;

Problem problem_of(const Call& c) {
  Problem p;
  p.B = c.B;
  p.Hq = c.Hq;
  p.Hkv = c.Hkv;
  p.Nq = c.Nq;
  p.Nk = c.Nk;
  p.d = c.d;
  p.causal = static_cast<Causal>(c.causal);
  p.scale = c.scale;
  p.key_lengths = static_cast<const std::int64_t*>(c.at.key_lengths);
  return p;
}
template <class T>
View<T> view(void* data, const fa_torch_strides& s) {
  return {static_cast<T*>(data), s.batch, s.head, s.row};
}
template <class T>
Forward<T> forward_of(const Call& c) {
  return {view<T>(c.at.Q, c.Q), view<T>(c.at.K, c.K), view<T>(c.at.V, c.V), view<T>(c.at.O, c.O),
          static_cast<Stat<T>*>(c.at.LSE)};
}
template <class T>
Backward<T> backward_of(const Call& c) {
  return {view<T>(c.at.Q, c.Q),   view<T>(c.at.K, c.K),   view<T>(c.at.V, c.V),
          view<T>(c.at.O, c.O),   view<T>(c.at.dO, c.dO), static_cast<Stat<T>*>(c.at.LSE),
          view<T>(c.at.dQ, c.dQ), view<T>(c.at.dK, c.dK), view<T>(c.at.dV, c.dV)};
}

[[noreturn]] void no_kernel(const Call& c) {
  throw std::invalid_argument("this library has no kernel " + std::to_string(c.kernel) +
                              " of stage " + std::to_string(c.stage) + " for tensors of type " +
                              std::to_string(c.dtype));
}

// f(T()) with the tensors' own type, one of those that the stage is built for.
template <class F>
void with_float_or_double(const Call& c, F f) {
  if (c.dtype == 0) return f(float());
  if (c.dtype == 3) return f(double());
  no_kernel(c);
}
#if defined(FA_TORCH_CUDA) && FA_TORCH_HAS(6)
template <class F>
void with_half(const Call& c, F f) {
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  no_kernel(c);
}
#endif

#ifdef FA_TORCH_WALKS
template <class F>
void with_float_or_half(const Call& c, F f) {
  if (c.dtype == 0) return f(float());
  with_half(c, f);
}
#endif

#ifdef FA_TORCH_CUDA
void refuse(const std::string& why) { require(why.empty(), why); }
cudaStream_t stream_of(const Call& c) { return static_cast<cudaStream_t>(c.at.stream); }
Scratch scratch_of(const Call& c) {
  return {c.at.scratch, static_cast<std::size_t>(c.scratch_bytes)};
}
// PyTorch has its own copy of CUDA's runtime, and each remembers a device for each thread.
void use_device([[maybe_unused]] const Call& c) {
#ifndef FA_EMULATED
  int device = -1;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  if (device != c.device) FA_CUDA_CHECK(cudaSetDevice(static_cast<int>(c.device)));
#endif
}
#endif

// ---- the walks ---------------------------------------------------------------------------------

#ifdef FA_TORCH_WALKS
masks::Pattern pattern_of(const Call& c) {
  masks::Pattern m;
  if (c.window_left >= 0) m.left = c.window_left;
  if (c.window_right >= 0) m.right = c.window_right;
  m.top_left = static_cast<Causal>(c.causal) != Causal::bottom_right;
  return m;
}
dropout::Dropout dropout_of(const Call& c) {
  require(c.dropout == 0 || c.at.seed, "dropout wants a seed, two integers, got none");
  return {c.dropout, 0, 0, static_cast<const std::uint64_t*>(c.at.seed)};
}

void walk_forward(const Call& c) {
  with_float_or_half(c, [&]<class T>(T) {
    if (c.kernel == windows)
      masks::forward(problem_of(c), pattern_of(c), forward_of<T>(c), {stream_of(c), scratch_of(c)});
    else
      dropout::forward(problem_of(c), dropout_of(c), forward_of<T>(c),
                       {stream_of(c), scratch_of(c)});
  });
}
void walk_backward(const Call& c) {
  with_float_or_half(c, [&]<class T>(T) {
    const Problem p = problem_of(c);
    const Backward<T> t = backward_of<T>(c);
    if (c.kernel == windows)
      masks::backward(p, pattern_of(c), t, nullptr,
                      {stream_of(c), scratch_of(c), masks::Kernel::best, c.deterministic != 0});
    else
      dropout::backward(p, dropout_of(c), t,
                        {stream_of(c), scratch_of(c), dropout::Kernel::best, c.deterministic != 0});
  });
}
std::size_t walk_backward_needs(const Call& c) {
  std::size_t bytes = 0;
  with_float_or_half(c, [&]<class T>(T) {
    const Problem p = problem_of(c);
    bytes = c.kernel == windows ? masks::scratch_bytes<T>(p) : dropout::scratch_bytes<T>(p);
  });
  return bytes;
}
bool is_walk(const Call& c) { return c.stage == 6 && (c.kernel == windows || c.kernel == drops); }

template <class T>
decode::Tensors<T> decode_of(const fa_torch_decode_call& step) {
  const Call& c = step.call;
  decode::Tensors<T> t;
  t.Q = view<T>(c.at.Q, c.Q);
  t.cache.K = view<T>(c.at.K, c.K);
  t.cache.V = view<T>(c.at.V, c.V);
  t.cache.table = static_cast<const std::int32_t*>(step.at.table);
  t.cache.table_stride = step.table_stride;
  t.cache.page_size = step.page_size;
  t.cache.pages = step.pages;
  t.new_K = view<T>(step.at.new_K, step.new_K);
  t.new_V = view<T>(step.at.new_V, step.new_V);
  t.O = view<T>(c.at.O, c.O);
  return t;
}
#endif

void decode_step([[maybe_unused]] const fa_torch_decode_call& step) {
#ifdef FA_TORCH_WALKS
  const Call& c = step.call;
  use_device(c);
  return with_float_or_half(c, [&]<class T>(T) {
    decode::forward(problem_of(c), decode_of<T>(step), {true, 0, stream_of(c), scratch_of(c)});
  });
#else
  no_kernel(step.call);
#endif
}
std::size_t decode_needs([[maybe_unused]] const fa_torch_decode_call& step) {
#ifdef FA_TORCH_WALKS
  const Call& c = step.call;
  std::size_t bytes = 0;
  use_device(c);
  with_float_or_half(c, [&]<class T>(T) { bytes = decode::scratch_bytes<T>(problem_of(c)); });
  return bytes;
#else
  no_kernel(step.call);
#endif
}

// ---- forward -----------------------------------------------------------------------------------

// Stages 00 to 03, for host memory.
void forward_on_cpu(const Call& c) {
  [[maybe_unused]] const Problem p = problem_of(c);
  with_float_or_double(c, [&]<class T>(T) {
    [[maybe_unused]] Forward<T> t = forward_of<T>(c);
#if FA_TORCH_HAS(0)
    if (c.stage == 0) {
      t.LSE = nullptr;  // it has none; the caller knows
      return naive::forward(p, t);
    }
#endif
#if FA_TORCH_HAS(1)
    if (c.stage == 1) return safe_softmax::forward(p, t);
#endif
#if FA_TORCH_HAS(2)
    if (c.stage == 2)
      return online_softmax::forward(p, t, {static_cast<online_softmax::Kernel>(c.kernel)});
#endif
#if FA_TORCH_HAS(3)
    if (c.stage == 3)
      return tiled_cpu::forward(
          p, t, {static_cast<tiled_cpu::Kernel>(c.kernel), static_cast<int>(c.at.threads), 64, 64});
#endif
    no_kernel(c);
  });
}

void forward(const Call& c) {
  if (c.stage <= 3) return forward_on_cpu(c);
#ifdef FA_TORCH_CUDA
  [[maybe_unused]] const Problem p = problem_of(c);
  use_device(c);
#ifdef FA_TORCH_WALKS
  if (is_walk(c)) return walk_forward(c);
#endif
#if FA_TORCH_HAS(4)
  if (c.stage == 4 && c.dtype == 0) {
    cuda_forward::forward(
        p, forward_of<float>(c),
        {static_cast<cuda_forward::Kernel>(c.kernel), stream_of(c), scratch_of(c)});
    return;
  }
#endif
#if FA_TORCH_HAS(6)
  if (c.stage == 6)
    return with_half(c, [&]<class T>(T) {
      optimized::forward(p, forward_of<T>(c),
                         {static_cast<optimized::Kernel>(c.kernel), stream_of(c), scratch_of(c)});
    });
#endif
#endif
  no_kernel(c);
}

// What does not fit is said by the call itself on the CPU, before it writes.
std::size_t forward_needs(const Call& c) {
  if (c.stage <= 3) return 0;
#ifdef FA_TORCH_CUDA
  [[maybe_unused]] const Problem p = problem_of(c);
  [[maybe_unused]] std::size_t bytes = 0;
  use_device(c);
#ifdef FA_TORCH_WALKS
  // They say themselves what does not fit, before they write. Their tiles are counted.
  if (is_walk(c)) return sizeof(unsigned);
#endif
#if FA_TORCH_HAS(4)
  if (c.stage == 4 && c.dtype == 0) {
    const auto kernel = static_cast<cuda_forward::Kernel>(c.kernel);
    check_problem("cuda_forward", p, cuda_forward::max_d);
    refuse(cuda_forward::unsupported(p, forward_of<float>(c), kernel));
    return cuda_forward::scratch_bytes(p, kernel);
  }
#endif
#if FA_TORCH_HAS(6)
  if (c.stage == 6) {
    const auto kernel = static_cast<optimized::Kernel>(c.kernel);
    check_problem("optimized", p, optimized::max_d);
    with_half(c, [&]<class T>(T) {
      refuse(optimized::unsupported(p, forward_of<T>(c),
                                    optimized::chosen(kernel, optimized::device_capability())));
    });
    return optimized::scratch_bytes(p, kernel);
  }
#endif
#endif
  no_kernel(c);
}

// ---- backward ----------------------------------------------------------------------------------

#if defined(FA_TORCH_CUDA) && FA_TORCH_HAS(5)
cuda_backward::Options options_of_05(const Call& c) {
  cuda_backward::Options options;
  if (c.kernel == lesson)
    options.tiles = cuda_backward::Tiles::lesson;
  else
    options.kernel = static_cast<cuda_backward::Kernel>(c.kernel);
  options.stream = stream_of(c);
  options.scratch = scratch_of(c);
  require(!c.deterministic || options.kernel != cuda_backward::Kernel::atomic,
          "05.atomic adds dQ up in an order that varies; deterministic wants 05.two_kernels");
  return options;
}
#endif
#if defined(FA_TORCH_CUDA) && FA_TORCH_HAS(6)
optimized::BackwardOptions options_of_06(const Call& c) {
  return {static_cast<optimized::BackwardKernel>(c.kernel), c.deterministic != 0, stream_of(c),
          scratch_of(c)};
}
#endif

void backward(const Call& c) {
  [[maybe_unused]] const Problem p = problem_of(c);
#if FA_TORCH_HAS(0)
  if (c.stage == 0)
    return with_float_or_double(c, [&]<class T>(T) { naive::backward(p, backward_of<T>(c)); });
#endif
#if FA_TORCH_HAS(5)
  if (c.stage == 5 && c.kernel == on_cpu)
    return with_float_or_double(c, [&]<class T>(T) {
      cuda_backward::backward_on_cpu(p, backward_of<T>(c),
                                     {static_cast<int>(c.at.threads), 64, 64});
    });
#endif
#ifdef FA_TORCH_CUDA
  use_device(c);
#ifdef FA_TORCH_WALKS
  if (is_walk(c)) return walk_backward(c);
#endif
#if FA_TORCH_HAS(5)
  if (c.stage == 5 && c.dtype == 0)
    return cuda_backward::backward(p, backward_of<float>(c), options_of_05(c));
#endif
#if FA_TORCH_HAS(6)
  if (c.stage == 6)
    return with_half(
        c, [&]<class T>(T) { optimized::backward(p, backward_of<T>(c), options_of_06(c)); });
#endif
#endif
  no_kernel(c);
}

std::size_t backward_needs(const Call& c) {
  if (c.stage == 0 || (c.stage == 5 && c.kernel == on_cpu)) return 0;
#ifdef FA_TORCH_CUDA
  [[maybe_unused]] const Problem p = problem_of(c);
  use_device(c);
#ifdef FA_TORCH_WALKS
  if (is_walk(c)) return walk_backward_needs(c);
#endif
#if FA_TORCH_HAS(5)
  if (c.stage == 5 && c.dtype == 0) {
    check_problem("cuda_backward", p, cuda_backward::max_d);
    refuse(cuda_backward::unsupported(p, backward_of<float>(c), options_of_05(c)));
    return cuda_backward::scratch_bytes(p, options_of_05(c));
  }
#endif
#if FA_TORCH_HAS(6)
  if (c.stage == 6) {
    check_problem("optimized", p, optimized::max_d);
    with_half(c, [&]<class T>(T) {
      refuse(optimized::unsupported(p, backward_of<T>(c), options_of_06(c).kernel));
    });
    return optimized::backward_scratch_bytes(p, options_of_06(c));
  }
#endif
#endif
  no_kernel(c);
}

// ---- names -------------------------------------------------------------------------------------

void line(std::string& text, const char* way, const std::string& name, int stage, int kernel,
          const char* device, const char* types) {
  text += std::string(way) + " " + name + " " + std::to_string(stage) + " " +
          std::to_string(kernel) + " " + device + " " + types + "\n";
}

std::string all_kernels() {
  std::string text;
  [[maybe_unused]] constexpr const char* both = "float,double";
#if FA_TORCH_HAS(0)
  line(text, "forward", "00.naive", 0, 0, "cpu", both);
  line(text, "backward", "00.naive", 0, 0, "cpu", both);
#endif
#if FA_TORCH_HAS(1)
  line(text, "forward", "01.safe_softmax", 1, 0, "cpu", both);
#endif
#if FA_TORCH_HAS(2)
  line(text, "forward", "02.rows", 2, int(online_softmax::Kernel::rows), "cpu", both);
  line(text, "forward", "02.lanes", 2, int(online_softmax::Kernel::lanes), "cpu", "float");
#endif
#if FA_TORCH_HAS(3)
  line(text, "forward", "03.tiled", 3, int(tiled_cpu::Kernel::tiled), "cpu", both);
  line(text, "forward", "03.fast", 3, int(tiled_cpu::Kernel::fast), "cpu", "float");
#endif
#if FA_TORCH_HAS(5)
  line(text, "backward", "05.on_cpu", 5, on_cpu, "cpu", both);
#endif
#ifdef FA_TORCH_CUDA
#if FA_TORCH_HAS(4)
  line(text, "forward", "04.best", 4, int(cuda_forward::Kernel::best), FA_TORCH_DEVICE, "float");
#ifndef FA_EMULATED
  line(text, "forward", "04.baseline", 4, int(cuda_forward::Kernel::baseline), FA_TORCH_DEVICE,
       "float");
#endif
  for (const cuda_forward::Kernel k : cuda_forward::ladder)
    line(text, "forward", std::string("04.") + cuda_forward::name(k), 4, int(k), FA_TORCH_DEVICE,
         "float");
#endif
#if FA_TORCH_HAS(5)
  for (const auto k : {cuda_backward::Kernel::two_kernels, cuda_backward::Kernel::atomic})
    line(text, "backward", std::string("05.") + cuda_backward::name(k), 5, int(k), FA_TORCH_DEVICE,
         "float");
#endif
#if FA_TORCH_HAS(5)
  line(text, "backward", "05.lesson", 5, lesson, FA_TORCH_DEVICE, "float");
#endif
#if FA_TORCH_HAS(6)
  constexpr const char* halves = "half,bfloat16";
  std::size_t count = 0;
  line(text, "forward", "06.best", 6, int(optimized::Kernel::best), FA_TORCH_DEVICE, halves);
  const optimized::Rung* up = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n)
    line(text, "forward", std::string("06.") + up[n].name, 6, int(up[n].kernel), FA_TORCH_DEVICE,
         up[n].fp16 ? halves : "bfloat16");
  line(text, "backward", "06.backward_best", 6, int(optimized::BackwardKernel::best),
       FA_TORCH_DEVICE, halves);
  const optimized::BackwardRung* down = optimized::backward_rungs(count);
  for (std::size_t n = 0; n < count; ++n)
    line(text, "backward", std::string("06.backward_") + down[n].name, 6, int(down[n].kernel),
         FA_TORCH_DEVICE, down[n].fp16 ? halves : "bfloat16");
#endif
#ifdef FA_TORCH_WALKS
  for (const char* way : {"forward", "backward"}) {
    line(text, way, "beyond.masks", 6, windows, FA_TORCH_DEVICE, "float,half,bfloat16");
    line(text, way, "beyond.dropout", 6, drops, FA_TORCH_DEVICE, "float,half,bfloat16");
  }
  line(text, "decode", "beyond.decode", 6, decodes, FA_TORCH_DEVICE, "float,half,bfloat16");
#endif
#endif
  return text;
}

// ---- to C --------------------------------------------------------------------------------------

thread_local std::string error;

template <class F>
int as_c(F f) {
  try {
    f();
    return 0;
  } catch (const std::invalid_argument& e) {
    error = e.what();
    return 1;
  } catch (const std::exception& e) {
    error = e.what();
    return 2;
  }
}

}  // namespace

std::int64_t fa_torch_call_bytes() { return sizeof(Call); }
std::int64_t fa_torch_decode_call_bytes() { return sizeof(fa_torch_decode_call); }
const char* fa_torch_kernels() {
  static const std::string text = all_kernels();
  return text.c_str();
}
const char* fa_torch_source() { return FA_TORCH_SOURCE; }
const char* fa_torch_mine() {
  static const std::string text = FA_TORCH_MINE < 0 ? "" : "0" + std::to_string(FA_TORCH_MINE);
  return text.c_str();
}
const char* fa_torch_error() { return error.c_str(); }
int fa_torch_forward(const Call* call) {
  return as_c([&] { forward(*call); });
}
int fa_torch_backward(const Call* call) {
  return as_c([&] { backward(*call); });
}
int fa_torch_forward_needs(const Call* call, std::int64_t* bytes) {
  return as_c([&] { *bytes = static_cast<std::int64_t>(forward_needs(*call)); });
}
int fa_torch_backward_needs(const Call* call, std::int64_t* bytes) {
  return as_c([&] { *bytes = static_cast<std::int64_t>(backward_needs(*call)); });
}
int fa_torch_decode(const fa_torch_decode_call* call) {
  return as_c([&] { decode_step(*call); });
}
int fa_torch_decode_needs(const fa_torch_decode_call* call, std::int64_t* bytes) {
  return as_c([&] { *bytes = static_cast<std::int64_t>(decode_needs(*call)); });
}
