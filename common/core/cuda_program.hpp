// The main() of a small CUDA program that checks its own result.
#pragma once
#include <cstdio>
#include <exception>

#include "common/core/cuda.hpp"

namespace fa {

// What run() returns; 77 with the reason where there is no GPU to run on, 1 after an error.
inline int cuda_program(int (*run)()) {
  try {
#ifndef FA_EMULATED
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0) {
      std::printf("skipped, no usable GPU: %s\n",
                  code != cudaSuccess ? cudaGetErrorString(code) : "the driver finds none");
      return 77;
    }
#endif
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace fa
