// Both ladders for compare.py: any kernel by name, in fp16 and bf16.
#include "common/measure/peers/peer.hpp"

#include <stdexcept>
#include <string>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"

namespace {

using namespace fa;
using optimized::BackwardKernel;
using optimized::BackwardOptions;
using optimized::Kernel;

// Of either ladder: rungs is optimized::rungs or optimized::backward_rungs.
auto kernel_of(const std::string& wanted, auto rungs) {
  std::size_t count = 0;
  const auto* all = rungs(count);
  if (wanted == "best") return decltype(all->kernel)::best;
  for (std::size_t n = 0; n < count; ++n)
    if (wanted == all[n].name) return all[n].kernel;
  throw std::invalid_argument("no kernel is called '" + wanted + "'");
}
Kernel forward_kernel(const char* wanted) { return kernel_of(wanted, optimized::rungs); }
// A backward's kernel by name; "best_deterministic" is the best with the same bits in every run.
BackwardOptions backward_options(const std::string& wanted) {
  if (wanted == "best_deterministic") return {BackwardKernel::best, true};
  return {kernel_of(wanted, optimized::backward_rungs)};
}

std::string names_of(auto rungs) {
  std::size_t count = 0;
  const auto* all = rungs(count);
  std::string names;
  for (std::size_t n = 0; n < count; ++n) {
    names += n > 0 ? " " : "";
    names += all[n].name;
    names += all[n].whole_contract ? ":whole" : ":rung";
  }
  return names;
}

// f(T()) with the tensors' own type.
template <class F>
void with_type(const fa_peer_call& c, F f) {
  if (c.dtype == 1) return f(__half());
  if (c.dtype == 2) return f(__nv_bfloat16());
  throw std::invalid_argument("dtype must be 1 (fp16) or 2 (bf16), got " + std::to_string(c.dtype));
}

void refuse(const std::string& why) {
  if (!why.empty()) throw std::invalid_argument(why);
}

// A figure under a kernel's name must be that kernel's.
template <class K>
void expect(K wanted, K ran) {
  if (wanted != K::best && ran != wanted)
    throw std::logic_error(std::string("asked for ") + name(wanted) + ", ran " + name(ran));
}

}  // namespace

// Names with what they promise, like "mma:rung fa2:whole".
extern "C" const char* fa_peer_kernels() {
  static const std::string text = names_of(optimized::rungs);
  return text.c_str();
}
extern "C" const char* fa_peer_backward_kernels() {
  static const std::string text =
      names_of(optimized::backward_rungs) + " best:whole best_deterministic:whole";
  return text.c_str();
}

extern "C" const char* fa_peer_compiler() { return FA_COMPILER; }
extern "C" const char* fa_peer_flags() { return FA_FLAGS; }

// Null, or why this kernel cannot take this call here.
extern "C" const char* fa_peer_unsupported(const char* kernel, const fa_peer_call* call) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      refuse(optimized::unsupported(bench::problem_of(*call), bench::forward_of<T>(*call),
                                    forward_kernel(kernel)));
    });
  });
}
extern "C" const char* fa_peer_backward_unsupported(const char* kernel, const fa_peer_call* call) {
  return bench::as_c([&] {
    with_type(*call, [&]<class T>(T) {
      refuse(optimized::unsupported(bench::problem_of(*call), bench::backward_of<T>(*call),
                                    backward_options(kernel).kernel));
    });
  });
}

extern "C" const char* fa_peer_forward(const char* kernel, const fa_peer_call* call) {
  return bench::as_c([&] {
    const Kernel wanted = forward_kernel(kernel);
    const Problem p = bench::problem_of(*call);
    const Scratch scratch{call->scratch, optimized::scratch_bytes(p, wanted)};  // 256 at least
    with_type(*call, [&]<class T>(T) {
      expect(wanted,
             optimized::forward(p, bench::forward_of<T>(*call),
                                {wanted, static_cast<cudaStream_t>(call->stream), scratch}));
    });
  });
}

// O and LSE must be there.
extern "C" const char* fa_peer_backward(const char* kernel, const fa_peer_call* call) {
  return bench::as_c([&] {
    BackwardOptions options = backward_options(kernel);
    const Problem p = bench::problem_of(*call);
    options.stream = static_cast<cudaStream_t>(call->stream);
    options.scratch = {call->scratch, optimized::backward_scratch_bytes(p, options)};
    with_type(*call, [&]<class T>(T) {
      const BackwardKernel ran = optimized::backward(p, bench::backward_of<T>(*call), options);
      expect(optimized::chosen(p, options, optimized::device_capability(), processors()), ran);
    });
  });
}

// Device memory that a backward needs; null, or what is wrong.
extern "C" const char* fa_peer_backward_scratch_bytes(const char* kernel, const fa_peer_call* call,
                                                      std::int64_t* bytes) {
  return bench::as_c([&] {
    *bytes = static_cast<std::int64_t>(
        optimized::backward_scratch_bytes(bench::problem_of(*call), backward_options(kernel)));
  });
}
