// Runs a stage that works in device memory under tests written for host memory: every storage of a
// call is copied to the device, the views are moved there, and all of it, canaries included, is
// copied back. Works on a GPU and, with FA_EMULATED, on the CPU.
#pragma once
#include <cstdlib>
#include <string>
#include <vector>

#include "common/core/cuda.hpp"
#include "common/harness/sanitizer.hpp"
#include "common/harness/stage.hpp"

namespace fa::harness {

// Empty, or why no kernel can run here, in the driver's own words.
inline std::string no_gpu() {
#ifdef FA_EMULATED
  return {};
#else
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    cudaGetLastError();
    return std::string("no usable GPU: ") + cudaGetErrorString(code);
  }
  return count > 0 ? "" : "no usable GPU: the driver finds none";
#endif
}

// A GPU affords long lists of sizes; the emulator less, under a sanitizer little.
inline StageUnderTest::Effort gpu_effort() {
#ifdef FA_EMULATED
  return FA_SANITIZED ? StageUnderTest::Effort::small : StageUnderTest::Effort::normal;
#else
  return StageUnderTest::Effort::large;
#endif
}

// Copies of storages in device memory.
class DeviceCopy {
 public:
  explicit DeviceCopy(const std::vector<Storage>& storages) {
    for (const Storage& s : storages) {
      parts_.push_back({s, DeviceMemory(s.bytes)});
      if (s.bytes > 0)
        FA_CUDA_CHECK(
            cudaMemcpy(parts_.back().memory.as<void>(), s.data, s.bytes, cudaMemcpyHostToDevice));
    }
  }
  // The device's address of what `host` points to; a pointer into no storage stays what it is.
  template <class T>
  T* at(T* host) const {
    const auto address = reinterpret_cast<std::uintptr_t>(host);
    for (const Part& part : parts_) {
      const auto begin = reinterpret_cast<std::uintptr_t>(part.host.data);
      if (address >= begin && address < begin + part.host.bytes)
        return reinterpret_cast<T*>(part.memory.as<char>() + (address - begin));
    }
    return host;
  }
  template <class T>
  View<T> at(const View<T>& v) const {
    return {at(v.data), v.batch, v.head, v.row};
  }
  void copy_back() const {
    for (const Part& part : parts_)
      if (part.host.bytes > 0)
        FA_CUDA_CHECK(cudaMemcpy(part.host.data, part.memory.as<void>(), part.host.bytes,
                                 cudaMemcpyDeviceToHost));
  }

 private:
  struct Part {
    Storage host;
    DeviceMemory memory;
  };
  std::vector<Part> parts_;
};

template <class T>
Forward<T> on_device(const DeviceCopy& copy, const Forward<T>& t) {
  return {copy.at(t.Q), copy.at(t.K), copy.at(t.V), copy.at(t.O), copy.at(t.LSE)};
}
template <class T>
Backward<T> on_device(const DeviceCopy& copy, const Backward<T>& t) {
  return {copy.at(t.Q),   copy.at(t.K),  copy.at(t.V),  copy.at(t.O), copy.at(t.dO),
          copy.at(t.LSE), copy.at(t.dQ), copy.at(t.dK), copy.at(t.dV)};
}

// f(problem, tensors) with everything in device memory; then waits and copies back.
template <class T, class F>
std::function<void(const ForwardCall<T>&)> on_gpu_forward(F f) {
  return [f](const ForwardCall<T>& call) {
    const DeviceCopy copy(call.storage);
    Problem p = call.p;
    p.key_lengths = copy.at(p.key_lengths);
    f(p, on_device(copy, call.t));
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back();
  };
}
template <class T, class F>
std::function<void(const BackwardCall<T>&)> on_gpu_backward(F f) {
  return [f](const BackwardCall<T>& call) {
    const DeviceCopy copy(call.storage);
    Problem p = call.p;
    p.key_lengths = copy.at(p.key_lengths);
    f(p, on_device(copy, call.t));
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back();
  };
}

}  // namespace fa::harness
