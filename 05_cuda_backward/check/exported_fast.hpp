// ./learn export 05 dkv: in the place of fast/fast_dkv.cu.
#pragma once
#include <stdexcept>

#include "05_cuda_backward/cuda_backward.hpp"

namespace fa::cuda_backward {

inline void launch_fast_atomic(const Problem&, const Backward<float>&, float, const Options&,
                               const float*) {
  throw std::logic_error("Tiles::fast is for fast/fast_dkv.cu, which is no part of this file");
}

}  // namespace fa::cuda_backward
