// The types that the method is made for: on GPUs those of tensor cores.
#pragma once
#ifdef FA_RING_ON_GPU
#ifdef FA_EMULATED
#include "06_optimized/ptx/on_cpu/half.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif
#define FA_RING_TYPES(F) F(__half) F(__nv_bfloat16)
#else
#define FA_RING_TYPES(F) F(float) F(double)
#endif
