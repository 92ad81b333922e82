// What is in this library, and what its functions check.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "flash.h"

#include "built.hpp"  // by build.py: FA3_COMMIT and other texts, FA3_KERNELS(X)

#define DECLARED(pass, d, causal) void fa3_##pass##_##d##_##causal(Flash_bwd_params&, cudaStream_t);
FA3_KERNELS(DECLARED)
#undef DECLARED

namespace fa3 {

using Run = void (*)(Flash_bwd_params&, cudaStream_t);

inline void refuse_if(bool wrong, const std::string& why) {
  if (wrong) throw std::invalid_argument("FlashAttention-3: " + why);
}
inline void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(e));
}

inline int attribute(cudaDeviceAttr what) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&value, what, device));
  return value;
}
inline int multiprocessors() {
  static const int found = attribute(cudaDevAttrMultiProcessorCount);
  return found;
}

constexpr std::int64_t rounded(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// pass: of KINDS in build.py. Throws a reason if it is not here.
inline Run kernel_of(const std::string& pass, std::int64_t d, bool causal) {
  refuse_if(attribute(cudaDevAttrComputeCapabilityMajor) != 9, "for compute capability 9.0");
#define FOUND(its_pass, its_d, its_causal)                           \
  if (pass == #its_pass && d == its_d && causal == bool(its_causal)) \
    return fa3_##its_pass##_##its_d##_##its_causal;
  FA3_KERNELS(FOUND)
#undef FOUND
  throw std::invalid_argument("FlashAttention-3: not built (" + pass + ", d = " +
                              std::to_string(d) + ", " + (causal ? "causal" : "no mask") + ")");
}

}  // namespace fa3
