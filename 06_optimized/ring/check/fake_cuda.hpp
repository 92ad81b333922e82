// As much of CUDA as nccl.cpp calls, in host memory, so that it can be tested where there is no
// GPU. A stream is a thread that does one thing after the other. The null stream is the host
// itself, which stands for the engine's: what waits there stops the host.
#pragma once
#include <cuda_runtime.h>

#include <functional>

// What a fake NCCL puts on a stream.
extern "C" void fake_cuda_put(cudaStream_t stream, const std::function<void()>& work);
