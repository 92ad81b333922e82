// The ladder for compare.py: any kernel by name, in fp16 and bf16.
#include "common/harness/peers/peer.hpp"

#include <stdexcept>
#include <string>

#include "06_optimized/optimized.hpp"

namespace {

using namespace fa;

optimized::Kernel kernel_of(const std::string& wanted) {
  if (wanted == "best") return optimized::Kernel::best;
  std::size_t count = 0;
  const optimized::Rung* all = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n)
    if (wanted == all[n].name) return all[n].kernel;
  throw std::invalid_argument("no kernel is called '" + wanted + "'");
}

// f(tensors) with the tensors' own type.
template <class F>
void with_tensors(const fa_peer_call& c, F f) {
  if (c.dtype == 1) return f(harness::forward_of<__half>(c));
  if (c.dtype == 2) return f(harness::forward_of<__nv_bfloat16>(c));
  throw std::invalid_argument("dtype must be 1 (fp16) or 2 (bf16), got " + std::to_string(c.dtype));
}

}  // namespace

// Names with what they promise, like "mma:rung fa2:whole".
extern "C" const char* fa_peer_kernels() {
  static const std::string text = [] {
    std::size_t count = 0;
    const optimized::Rung* all = optimized::rungs(count);
    std::string names;
    for (std::size_t n = 0; n < count; ++n) {
      names += n > 0 ? " " : "";
      names += all[n].name;
      names += all[n].whole_contract ? ":whole" : ":rung";
    }
    return names;
  }();
  return text.c_str();
}

extern "C" const char* fa_peer_compiler() { return FA_COMPILER; }
extern "C" const char* fa_peer_flags() { return FA_FLAGS; }

// Null, or why this kernel cannot take this call here.
extern "C" const char* fa_peer_unsupported(const char* kernel, const fa_peer_call* call) {
  return harness::as_c([&] {
    with_tensors(*call, [&](const auto& t) {
      const std::string why =
          optimized::unsupported(harness::problem_of(*call), t, kernel_of(kernel));
      if (!why.empty()) throw std::invalid_argument(why);
    });
  });
}

extern "C" const char* fa_peer_forward(const char* kernel, const fa_peer_call* call) {
  return harness::as_c([&] {
    const optimized::Kernel wanted = kernel_of(kernel);
    with_tensors(*call, [&](const auto& t) {
      const optimized::Kernel ran =
          optimized::forward(harness::problem_of(*call), t,
                             {wanted, static_cast<cudaStream_t>(call->stream), call->scratch});
      if (wanted != optimized::Kernel::best && ran != wanted)
        throw std::logic_error(std::string("asked for ") + kernel + ", ran " +
                               optimized::name(ran));
    });
  });
}
