// Runs a stage that works in device memory under tests written for host memory: every storage of a
// call is copied to the device, the views are moved there, and all of it, canaries included, is
// copied back. Works on a GPU and, with FA_EMULATED, on the CPU.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/core/cuda.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/sanitizer.hpp"
#include "common/judge/stage.hpp"

namespace fa::judge {

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

// The kernels launched since the last time, by name; null where nobody notes them.
inline std::function<std::set<std::string>()> take_kernels() {
#ifdef FA_EMULATED
  return emulator::take_kernels;
#else
  return nullptr;
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
      parts_.back().copy(cudaMemcpyHostToDevice);
    }
  }
  // The device's address of what `host` points to; a pointer into no storage stays what it is.
  template <class T>
  T* at(T* host) const {
    for (const Part& part : parts_)
      if (part.host.contains(host))
        return reinterpret_cast<T*>(part.memory.as<char>() +
                                    (reinterpret_cast<std::uintptr_t>(host) -
                                     reinterpret_cast<std::uintptr_t>(part.host.data)));
    return host;
  }
  template <class T>
  View<T> at(const View<T>& v) const {
    return {at(v.data), v.batch, v.head, v.row};
  }
  void copy_there() const {
    for (const Part& part : parts_) part.copy(cudaMemcpyHostToDevice);
  }
  void copy_back(cudaStream_t stream = nullptr) const {
    for (const Part& part : parts_) part.copy(cudaMemcpyDeviceToHost, stream);
  }
  void copy_back(const std::vector<Storage>& some) const {
    for (const Part& part : parts_)
      for (const Storage& s : some)
        if (s.data == part.host.data) part.copy(cudaMemcpyDeviceToHost);
  }

 private:
  struct Part {
    Storage host;
    DeviceMemory memory;

    void copy(cudaMemcpyKind kind, cudaStream_t stream = nullptr) const {
      const bool there = kind == cudaMemcpyHostToDevice;
      std::vector<Storage::Part> used = host.used;
      if (used.empty() && host.bytes > 0) used = {{0, host.bytes}};
      for (const auto& [first, bytes] : used) {
        char* const on_host = static_cast<char*>(host.data) + first;
        char* const on_device = memory.as<char>() + first;
        FA_CUDA_CHECK(cudaMemcpyAsync(there ? on_device : on_host, there ? on_host : on_device,
                                      bytes, kind, stream));
      }
      FA_CUDA_CHECK(cudaStreamSynchronize(stream));
    }
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

// The same tensors under another name of their type, as CUDA's half types are to the host's:
//   on_gpu_forward<Eigen::bfloat16>([](const Problem& p, const Forward<Eigen::bfloat16>& t) {
//     optimized::forward(p, as_device<__nv_bfloat16>(t));
//   })
template <class Device, class Host>
View<Device> as_device(const View<Host>& v) {
  static_assert(sizeof(Device) == sizeof(Host));
  return {reinterpret_cast<Device*>(v.data), v.batch, v.head, v.row};
}
template <class Device, class Host>
Forward<Device> as_device(const Forward<Host>& t) {
  using In = const Device;
  return {as_device<In>(t.Q), as_device<In>(t.K), as_device<In>(t.V), as_device<Device>(t.O),
          t.LSE};
}
template <class Device, class Host>
Backward<Device> as_device(const Backward<Host>& t) {
  using In = const Device;
  return {as_device<In>(t.Q),      as_device<In>(t.K),      as_device<In>(t.V),
          as_device<In>(t.O),      as_device<In>(t.dO),     t.LSE,
          as_device<Device>(t.dQ), as_device<Device>(t.dK), as_device<Device>(t.dV)};
}

// What large tensors may take: nine tenths of the memory that is free.
inline double free_device_bytes() {
  std::size_t free = 0, total = 0;
  FA_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return 0.9 * static_cast<double>(free);
}

// f(problem, tensors) with everything in device memory; then waits and copies back.
template <class Call, class F>
void call_on_gpu(const Call& call, F f) {
  const DeviceCopy copy(call.storage);
  Problem p = call.p;
  p.key_lengths = copy.at(p.key_lengths);
  const std::vector<Storage> written = outputs(call);
  repeat(call.runs, written, [&] {
    f(p, on_device(copy, call.t));
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back(written);
  });
  copy.copy_back();  // inputs too, which must not have changed
}
template <class T, class F>
std::function<void(const ForwardCall<T>&)> on_gpu_forward(F f) {
  return [f](const ForwardCall<T>& call) { call_on_gpu(call, f); };
}
template <class T, class F>
std::function<void(const BackwardCall<T>&)> on_gpu_backward(F f) {
  return [f](const BackwardCall<T>& call) { call_on_gpu(call, f); };
}

#ifndef FA_EMULATED
// Holds up a stream: what is put on it from now on cannot run. For ten seconds at most, so that a
// test of who waits comes to its end.
class HeldUp {
 public:
  explicit HeldUp(cudaStream_t stream) : stream_(stream) {
    FA_CUDA_CHECK(cudaLaunchHostFunc(
        stream,
        [](void* go) {
          const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
          while (!static_cast<std::atomic<bool>*>(go)->load() &&
                 std::chrono::steady_clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        },
        &go_));
  }
  ~HeldUp() {
    go_ = true;
    cudaStreamSynchronize(stream_);  // before go_ is gone
  }
  HeldUp(const HeldUp&) = delete;
  HeldUp& operator=(const HeldUp&) = delete;

 private:
  cudaStream_t stream_;
  std::atomic<bool> go_{false};
};
#endif

// f(problem, tensors, stream) must put all its work on the stream and return without waiting.
// Leaves in host memory what the stream alone has brought forth, for the case's verdict; empty, or
// whom f waits for. On a GPU each of the two is shown by holding up a stream: its own, then the
// default one, for which work that was put there by mistake would have to wait. The emulator notes
// streams.
template <class Call, class F>
std::string on_its_stream(const Call& call, F f) {
  const DeviceCopy copy(call.storage);
  Problem p = call.p;
  p.key_lengths = copy.at(p.key_lengths);
  const auto t = on_device(copy, call.t);
  std::string text;
#ifdef FA_EMULATED
  char place = 0;
  const auto stream = reinterpret_cast<cudaStream_t>(&place);
  emulator::take_streams();
  f(p, t, stream);
  for (const cudaStream_t used : emulator::take_streams())
    if (used != stream) text = "puts work on another stream than the one that it is given";
  copy.copy_back(stream);
#else
  cudaStream_t stream = nullptr;
  FA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  f(p, t, stream);  // modules are loaded at the first call, and that may wait
  FA_CUDA_CHECK(cudaStreamSynchronize(stream));
  copy.copy_there();  // the outputs' poison
  {
    const HeldUp own(stream);
    f(p, t, stream);
    if (cudaStreamQuery(stream) != cudaErrorNotReady) text = "waits for its own stream";
    cudaGetLastError();  // "not ready" is no error
  }
  copy.copy_there();
  {
    const HeldUp other(nullptr);
    f(p, t, stream);
    copy.copy_back(stream);
  }
  FA_CUDA_CHECK(cudaStreamDestroy(stream));
#endif
  return text;
}

#ifndef FA_EMULATED
// Cases that differ in their lengths and numbers alone, for what follows.
inline Spec with_lengths(std::vector<std::int64_t> lengths, std::uint64_t seed) {
  Spec s;
  s.p.B = std::int64_t(lengths.size());
  s.p.Hq = 4;
  s.p.Hkv = 2;
  s.p.Nq = s.p.Nk = 300;
  s.p.d = 64;
  s.p.causal = Causal::bottom_right;
  s.lengths = std::move(lengths);
  s.seed = seed;
  return s;
}

// What f(problem, tensors, stream) puts on its stream, recorded once as a CUDA graph and replayed
// with the inputs of two cases that differ in nothing else, at the same addresses. Empty, or what
// is wrong with one of the two results.
template <class Case, class F>
std::string replayed_as_graph(Case& first, Case& second, F f) {
  const auto call = first.call(), other = second.call();
  const DeviceCopy copy(call.storage);
  Problem p = call.p;
  p.key_lengths = copy.at(p.key_lengths);
  const auto t = on_device(copy, call.t);
  cudaStream_t stream = nullptr;
  FA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  f(p, t, stream);  // modules are loaded at the first call, which a recording does not allow
  FA_CUDA_CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  FA_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  f(p, t, stream);
  FA_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t replay = nullptr;
  FA_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  const auto run = [&] {
    copy.copy_there();  // the outputs' poison too
    FA_CUDA_CHECK(cudaGraphLaunch(replay, stream));
    copy.copy_back(stream);
  };
  run();
  std::string text = first.verdict();
  const auto exchange = [&](bool there) {
    for (std::size_t n = 0; n < call.storage.size(); ++n) {
      const Storage &a = call.storage[n], &b = other.storage[n];
      there ? std::memcpy(a.data, b.data, a.bytes) : std::memcpy(b.data, a.data, a.bytes);
    }
  };
  exchange(true);
  run();
  exchange(false);
  if (text.empty()) text = second.verdict();
  FA_CUDA_CHECK(cudaGraphExecDestroy(replay));
  FA_CUDA_CHECK(cudaGraphDestroy(graph));
  FA_CUDA_CHECK(cudaStreamDestroy(stream));
  return text;
}

// Makes the second GPU the current one for as long as it lives; there() says whether it exists.
class SecondGpu {
 public:
  SecondGpu() {
    FA_CUDA_CHECK(cudaGetDeviceCount(&count_));
    if (there()) FA_CUDA_CHECK(cudaSetDevice(1));
  }
  ~SecondGpu() { cudaSetDevice(0); }
  SecondGpu(const SecondGpu&) = delete;
  SecondGpu& operator=(const SecondGpu&) = delete;
  bool there() const { return count_ > 1; }

 private:
  int count_ = 0;
};
#endif

}  // namespace fa::judge
