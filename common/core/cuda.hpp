// What a CUDA stage uses besides CUDA: every call and launch checked, errors in words, memory that
// frees itself. With FA_EMULATED the same kernels are plain C++ and run on the CPU, one after the
// other, so that they can be tested where there is no GPU. Every kernel includes this, and nvcc
// reads it three times: of the library it names only what is cheap.
#pragma once
#ifdef FA_EMULATED
#include "common/emulator/cuda_on_cpu.hpp"
#else
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/core/tensor.hpp"

namespace fa {

// A CUDA call or launch that failed. The text holds the call, file and line, and CUDA's own words.
class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t error, const std::string& text) : std::runtime_error(text), code(error) {}
  cudaError_t code;
};

// "compute capability 9.0", from 90 or 900 (__CUDA_ARCH_LIST__ counts in tens).
inline std::string capability(int number) {
  if (number >= 500) number /= 10;
  return std::to_string(number / 10) + "." + std::to_string(number % 10);
}

// The most usual reasons, and what to do. `built`: the architectures that the kernels were built
// for; `device`: what this GPU is (both as 10 * major + minor).
inline std::string cuda_hint(cudaError_t code, const std::string& built, int device) {
  switch (code) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return "; the kernels were built for compute capability " + built + ", this GPU is " +
             capability(device) +
             ": configure with -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(device);
    case cudaErrorInvalidConfiguration:
      return "; the grid, the block or the shared memory is larger than this GPU allows";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
      return "; a kernel launched earlier may be the cause: run again with FA_SYNC_CHECK=1, or "
             "under compute-sanitizer";
    default:
      return "";
  }
}

// The architectures that this file is compiled for, like "750,900"; they differ from file to file.
#define FA_TEXT_OF(...) #__VA_ARGS__
#define FA_TEXT(...) FA_TEXT_OF(__VA_ARGS__)
#ifdef __CUDA_ARCH_LIST__
#define FA_BUILT_FOR FA_TEXT(__CUDA_ARCH_LIST__)
#else
#define FA_BUILT_FOR ""
#endif
inline std::string capabilities(const std::string& list) {
  std::string text;
  for (const char* at = list.c_str(); *at; at += std::strspn(at, ",")) {
    text += (text.empty() ? "" : ", ") + capability(std::atoi(at));
    at += std::strcspn(at, ",");
  }
  return text.empty() ? "unknown" : text;
}

[[noreturn]] inline void throw_cuda_error(cudaError_t code, const std::string& what,
                                          const char* file, int line, const char* built_for = "") {
  cudaGetLastError();  // an error that is not sticky must not be found by the next call
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  throw CudaError(code, what + " failed at " + file + ":" + std::to_string(line) + ": " +
                            cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")" +
                            cuda_hint(code, capabilities(built_for), 10 * major + minor));
}

// FA_CUDA_CHECK(cudaMemcpy(...)): throws fa::CudaError unless the call returns cudaSuccess.
#define FA_CUDA_CHECK(call)                                         \
  do {                                                              \
    if (const cudaError_t fa_code = (call); fa_code != cudaSuccess) \
      ::fa::throw_cuda_error(fa_code, #call, __FILE__, __LINE__);   \
  } while (false)

// Before every launch: an error that nobody has looked at must not be blamed on this kernel.
inline void check_no_earlier_error(const char* kernel, const char* file, int line) {
  if (const cudaError_t code = cudaGetLastError(); code != cudaSuccess)
    throw_cuda_error(code, std::string("a CUDA call before the launch of ") + kernel, file, line);
}

// After every launch: a bad configuration is reported here and nowhere else. FA_SYNC_CHECK=1 waits
// for the kernel, so that what goes wrong inside it is reported under its name too.
inline void check_launch(const char* kernel, const char* file, int line, const char* built_for,
                         cudaStream_t stream) {
  if (cudaError_t code = cudaGetLastError(); code != cudaSuccess)
    throw_cuda_error(code, std::string("launch of ") + kernel, file, line, built_for);
  static const char* const wait = std::getenv("FA_SYNC_CHECK");
  if (!wait || std::strcmp(wait, "1") != 0) return;
#ifndef FA_EMULATED
  // What is recorded as a graph runs later: there is nothing to wait for.
  cudaStreamCaptureStatus recorded = cudaStreamCaptureStatusNone;
  FA_CUDA_CHECK(cudaStreamIsCapturing(stream, &recorded));
  if (recorded != cudaStreamCaptureStatusNone) return;
#endif
  if (const cudaError_t code = cudaStreamSynchronize(stream); code != cudaSuccess)
    throw_cuda_error(code, std::string("kernel ") + kernel, file, line, built_for);
}

// What the current GPU says of itself.
inline int of_this_gpu(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int processors() { return of_this_gpu(cudaDevAttrMultiProcessorCount); }

// FA_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...):
// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), checked. It does not wait.
#ifdef FA_EMULATED
#define FA_LAUNCH_ON_CPU(how, kernel, grid, block, shared_bytes, stream, ...)                  \
  do {                                                                                         \
    ::fa::check_no_earlier_error(#kernel, __FILE__, __LINE__);                                 \
    ::fa::emulator::launch(#kernel, reinterpret_cast<const void*>(&*kernel), how, grid, block, \
                           shared_bytes, stream, [&] { kernel(__VA_ARGS__); });                \
    ::fa::check_launch(#kernel, __FILE__, __LINE__, FA_BUILT_FOR, stream);                     \
  } while (false)
#define FA_LAUNCH(...) FA_LAUNCH_ON_CPU(::fa::emulator::How{}, __VA_ARGS__)
#else
#define FA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)          \
  do {                                                                     \
    ::fa::check_no_earlier_error(#kernel, __FILE__, __LINE__);             \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__);            \
    ::fa::check_launch(#kernel, __FILE__, __LINE__, FA_BUILT_FOR, stream); \
  } while (false)
#endif

// FA_LAUNCH_EARLY(...): the same, but the kernel need not wait for the one before it in the stream
// ("programmatic stream serialization", from compute capability 9.0 on): it may start as soon as
// all blocks of that kernel have allowed it or ended. On the CPU that one has always ended, and the
// two are judged as if they ran at once (common/emulator/overlap.cpp).
#if defined(FA_EMULATED)
#define FA_LAUNCH_EARLY(...) FA_LAUNCH_ON_CPU(::fa::emulator::How{.early = true}, __VA_ARGS__)
#elif defined(__CUDACC__)
template <class... Parameters, class... Arguments>
void launch_with(cudaLaunchAttribute attribute, void (*kernel)(Parameters...), dim3 grid,
                 dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                 Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  // As after <<<>>>, an error is left for check_launch to find.
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                  cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch_with(early, kernel, grid, block, shared_bytes, stream,
              std::forward<Arguments>(arguments)...);
}
#define FA_LAUNCH_EARLY(kernel, grid, block, shared_bytes, stream, ...)                       \
  do {                                                                                        \
    ::fa::check_no_earlier_error(#kernel, __FILE__, __LINE__);                                \
    ::fa::launch_early(kernel, grid, block, shared_bytes, stream __VA_OPT__(, ) __VA_ARGS__); \
    ::fa::check_launch(#kernel, __FILE__, __LINE__, FA_BUILT_FOR, stream);                    \
  } while (false)
#endif

// FA_LAUNCH_CLUSTERS(size, ...): the same as FA_LAUNCH, and `size` blocks each that follow one
// another in x run at the same time, near each other (from compute capability 9.0 on); the grid's
// x is a multiple of it.
#if defined(FA_EMULATED)
#define FA_LAUNCH_CLUSTERS(size, ...) \
  FA_LAUNCH_ON_CPU(::fa::emulator::How{.cluster = size}, __VA_ARGS__)
#elif defined(__CUDACC__)
template <class... Parameters, class... Arguments>
void launch_clusters(unsigned size, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                     std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = size;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  launch_with(cluster, kernel, grid, block, shared_bytes, stream,
              std::forward<Arguments>(arguments)...);
}
#define FA_LAUNCH_CLUSTERS(size, kernel, grid, block, shared_bytes, stream, ...) \
  do {                                                                           \
    ::fa::check_no_earlier_error(#kernel, __FILE__, __LINE__);                   \
    ::fa::launch_clusters(size, kernel, grid, block, shared_bytes,               \
                          stream __VA_OPT__(, ) __VA_ARGS__);                    \
    ::fa::check_launch(#kernel, __FILE__, __LINE__, FA_BUILT_FOR, stream);       \
  } while (false)
#endif

// The shared memory whose size is chosen at the launch, as an array of T, aligned to 16 bytes.
#if defined(FA_EMULATED)
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulator::dynamic_shared_memory());
}
#elif defined(__CUDACC__)
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char fa_dynamic_shared_memory[];
  return reinterpret_cast<T*>(fa_dynamic_shared_memory);
}
#endif

// FA_DYNAMIC_SHARED(T): the same as one T, aligned to 1024 bytes as the copy engine of Hopper wants
// its tiles. No function: nvcc makes other code of some kernels where a function returns the place.
// At most what a block can have on compute capability 9.0; who also runs elsewhere may have less.
template <class T>
struct InABlock {
  static_assert(sizeof(T) <= 227 * 1024, "more shared memory than a block can have");
  using type = T;
};
#if defined(FA_EMULATED)
#define FA_DYNAMIC_SHARED(...) (*::fa::dynamic_shared<typename ::fa::InABlock<__VA_ARGS__>::type>())
#elif defined(__CUDACC__)
extern __shared__ __align__(1024) unsigned char fa_dynamic_shared_tiles[];
#define FA_DYNAMIC_SHARED(...) \
  (*reinterpret_cast<typename ::fa::InABlock<__VA_ARGS__>::type*>(::fa::fa_dynamic_shared_tiles))
#endif

// "NVIDIA H200, compute capability 9.0"
inline std::string current_gpu() {
#ifdef FA_EMULATED
  return "the emulator";
#else
  int device = 0;
  cudaDeviceProp gpu;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaGetDeviceProperties(&gpu, device));
  return std::string(gpu.name) + ", compute capability " + capability(10 * gpu.major + gpu.minor);
#endif
}

// The most dynamic shared memory that a block may have on the current GPU, in bytes.
inline std::size_t shared_memory_limit() {
  int device = 0, bytes = 0;
  FA_CUDA_CHECK(cudaGetDevice(&device));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<std::size_t>(bytes);
}

// Empty, or why a kernel that wants `bytes` of shared memory per block cannot run: both numbers.
inline std::string too_little_shared_memory(const std::string& who, std::size_t bytes,
                                            std::size_t limit) {
  if (bytes <= limit) return {};
  return who + " needs " + std::to_string(bytes) +
         " bytes of shared memory per block, this GPU has " + std::to_string(limit);
}

// More than 48 KiB of shared memory must be asked for, kernel by kernel: `bytes`, whose number a
// launch chooses, together with what the kernel has besides, here at most 2 KiB.
template <class Kernel>
void allow_shared_memory(Kernel kernel, std::size_t bytes) {
  if (bytes > 46 * 1024)
    FA_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)));
}

// Device memory that frees itself. Throws with the bytes wanted and the bytes free.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const cudaError_t code = cudaMalloc(&data_, bytes);
    if (code == cudaSuccess) return;
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw CudaError(code, std::string("cudaMalloc: ") + cudaGetErrorString(code) + ": wanted " +
                              std::to_string(bytes) + " bytes, " + std::to_string(free) + " of " +
                              std::to_string(total) + " are free");
  }
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceMemory() { cudaFree(data_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  operator Scratch() const { return {data_, bytes_}; }

 private:
  void swap(DeviceMemory& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace fa
