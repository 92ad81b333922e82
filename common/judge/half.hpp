// The half types of the host are Eigen's: fp16 is Eigen::half, bf16 is Eigen::bfloat16. They have
// the bits of CUDA's __half and __nv_bfloat16 (as_device in gpu.hpp). For .cpp files: nvcc need not
// read Eigen.
#pragma once
#include <Eigen/Core>

namespace fa::judge {

template <class T>
constexpr bool is_half = sizeof(T) == 2;

}  // namespace fa::judge
