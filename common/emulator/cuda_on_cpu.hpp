// CUDA on the CPU, for tests: enough of the language and of the runtime to run the kernels of
// stages 04 to 06 unchanged. Included by common/core/cuda.hpp when FA_EMULATED is defined.
//
// Blocks run one after the other. The threads of a block are fibers, each with a stack of its own,
// that take turns: a thread runs until it reaches a barrier, a warp until all its threads wait at
// __syncthreads, and only then the next; in every second block the last warp comes first. So what a
// missing __syncthreads breaks is the same in every run: a warp reads what others have not written
// yet, or overwrites what they have not read. Built with
// ThreadSanitizer, every fiber counts as a thread and only barriers order them: a race is reported
// with its lines even where the result happens to be right.
//
// Shared memory is filled with NaN before each block, device memory when it is allocated. A write
// behind the shared memory that a launch asked for is an error of that launch.
// What is asynchronous: block.hpp. Not here: the time a GPU takes, several blocks at once.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

// ---- the language ----

// See xray.hpp and hooks.hpp: what a kernel calls becomes part of it, as under nvcc.
#if defined(FA_XRAY) || defined(FA_HOOKED)
#define __global__ __attribute__((noinline))
#define __device__ __attribute__((always_inline))
#else
#define __global__
#define __device__
#endif
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Static shared memory. In its own section, so that it can be filled before each block; GCC ignores
// the section inside templates, which therefore use fa::dynamic_shared().
#ifdef __APPLE__
#define __shared__ static __attribute__((section("__DATA,fa_shared"), used))
#else
#define __shared__ static __attribute__((section("fa_shared"), used))
#endif

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

struct fa_emulated_stream;

namespace fa::emulator {
void misaligned();
bool alike(const void* a, const void* b, std::size_t bytes);  // looks without being watched
// Notes an access that a GPU would refuse, and says so: it does not happen, for it would end the
// program. The compiler believes in alignas and must not see what is compared.
inline bool check_alignment(const void* p, std::uintptr_t alignment) {
  asm("" : "+r"(p));
  if (reinterpret_cast<std::uintptr_t>(p) % alignment == 0) return true;
  misaligned();
  return false;
}
void move(void* to, const void* from, unsigned bytes);  // seen by the x-ray
// 16 bytes of anything, anywhere: Clang before 16 copies them by memcpy, which nobody watches.
using Sixteen [[gnu::vector_size(16), gnu::may_alias, gnu::aligned(1)]] = char;
// One access to all of it, of whatever type the memory is.
template <class T>
__device__ inline T& copy_at_once(T& to, const T& from) {
  if (!check_alignment(&from, sizeof(T)) || !check_alignment(&to, sizeof(T))) return to;
#ifdef FA_EMULATOR_TSAN  // two threads that fill the same place with the same zeros do no harm
  if (alike(&to, &from, sizeof(T))) return to;
#endif
#ifdef FA_XRAY
  move(&to, &from, sizeof(T));
#else
  if constexpr (sizeof(T) == sizeof(Sixteen))
    *reinterpret_cast<Sixteen*>(&to) = *reinterpret_cast<const Sixteen*>(&from);
  else
    std::memcpy(static_cast<void*>(&to), static_cast<const void*>(&from), sizeof(T));
#endif
  return to;
}
}  // namespace fa::emulator

struct alignas(16) float4 {
  float x, y, z, w;
  float4() = default;
  float4(float x_, float y_, float z_, float w_) : x(x_), y(y_), z(z_), w(w_) {}
#ifdef FA_XRAY  // one access of 16 bytes, not four
  float4(const float4& from);
  float4& operator=(const float4& from);
#else
  __device__ float4(const float4& from) { *this = from; }
  __device__ float4& operator=(const float4& from) {
    if (!fa::emulator::check_alignment(&from, 16) || !fa::emulator::check_alignment(this, 16))
      return *this;
    x = from.x;
    y = from.y;
    z = from.z;
    w = from.w;
    return *this;
  }
#endif
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
// These may lie in memory of another type: eight numbers of 16 bits are one uint4.
struct [[gnu::may_alias]] alignas(8) float2 {
  float x, y;
  float2() = default;
  __device__ float2(const float2& from) { fa::emulator::copy_at_once(*this, from); }
  __device__ float2& operator=(const float2& from) {
    return fa::emulator::copy_at_once(*this, from);
  }
};
struct [[gnu::may_alias]] alignas(16) uint4 {
  unsigned x, y, z, w;
  uint4() = default;
  uint4(unsigned x_, unsigned y_, unsigned z_, unsigned w_) : x(x_), y(y_), z(z_), w(w_) {}
  __device__ uint4(const uint4& from) { fa::emulator::copy_at_once(*this, from); }
  __device__ uint4& operator=(const uint4& from) { return fa::emulator::copy_at_once(*this, from); }
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class T>
__device__ T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
__device__ T max(T a, T b) {
  return a < b ? b : a;
}
#ifdef FA_XRAY
float __expf(float x) noexcept;
#else
inline float __expf(float x) { return std::exp(x); }
#endif
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
// Never fused with a sum, whatever the compiler would do with a * b + c.
inline float __fmul_rn(float a, float b) {
  volatile const float product = a * b;
  return product;
}

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffff);
void __nanosleep(unsigned);

namespace fa::emulator {
// The lanes of `mask` each hand in a value and take that of lane `source` (its own if outside).
std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source);
// Is x true in any lane of `mask`? Orders no memory either.
bool any(unsigned mask, bool x);
unsigned lane();
void* dynamic_shared_memory();

// cp.async: what this thread has asked for and not waited for. The place holds NaN until then.
struct Copy {
  char* to;
  const void* from;
  int bytes, size;  // read, and written: the rest becomes 0
  int group;
};
struct Copies {
  std::vector<Copy> under_way;
  int group = 0;  // of the next copy: so many groups are committed
};
Copies& copies();
#ifdef FA_XRAY
void copy_later(void* to, const void* from, int bytes, int size);
#else
inline void copy_later(void* to, const void* from, int bytes, int size) {
  std::memset(to, 0xff, std::size_t(size));
  copies().under_way.push_back({static_cast<char*>(to), from, bytes, size, copies().group});
}
#endif
inline void commit_copies() { ++copies().group; }
void wait_for_copies(int newest);  // until no other groups than these are under way

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Runs thread(what) once per thread of every block. A launch that a GPU would refuse sets the error
// that cudaGetLastError() returns. Throws std::logic_error where threads wait for each other for
// ever. `early`: it may start before the kernel before it in the stream has ended. `cluster`: so
// many blocks run at the same time, and reach each other's shared memory.
struct How {
  bool early = false;
  unsigned cluster = 1;
};
void launch(const char* kernel, const void* function, How how, dim3 grid, dim3 block,
            std::size_t shared_bytes, fa_emulated_stream* stream, void (*thread)(const void* what),
            const void* what);
template <class Body>
void launch(const char* kernel, const void* function, How how, dim3 grid, dim3 block,
            std::size_t shared_bytes, fa_emulated_stream* stream, const Body& body) {
  launch(
      kernel, function, how, grid, block, shared_bytes, stream,
      [](const void* what) { (*static_cast<const Body*>(what))(); }, &body);
}

// For the x-ray: which thread of which kernel runs.
struct Position {
  const char* kernel;        // null outside of kernels
  unsigned thread;           // of its block, or cluster
  unsigned waits;            // how often this thread has met its warp
  std::uint64_t phase;       // counts what lies between two __syncthreads of a block
  const char *shared, *end;  // the block's dynamic shared memory
};
Position position();

// For tests: the streams that launches and asynchronous calls named since the last time, and the
// kernels that were to be launched.
std::set<fa_emulated_stream*> take_streams();
std::set<std::string> take_kernels();

// The GPU that is emulated.
struct Device {
  std::size_t shared_bytes = 99 * 1024;  // that a block can have
  int capability = 86;
  int processors = 2;  // its SMs: small, so that a block that stays has much to do
};
extern Device device;
// For tests: until the end of its life a block can have so much shared memory; a T4's 64 KiB.
class WithSharedMemory {
 public:
  explicit WithSharedMemory(std::size_t bytes) : before_(device.shared_bytes) {
    device.shared_bytes = bytes;
  }
  ~WithSharedMemory() { device.shared_bytes = before_; }

 private:
  std::size_t before_;
};

// When that happens which a thread asks for and does not do itself (block.hpp): as late as the
// rules allow, as early, or at random times. FA_TIMING=late, early, or a number, the seed.
enum class Timing { late, early, random };
struct Schedule {
  Timing timing = Timing::late;
  unsigned seed = 0;
  static Schedule asked_for();
};
// For tests: until the end of its life.
class WithSchedule {
 public:
  explicit WithSchedule(Schedule);
  ~WithSchedule();

 private:
  Schedule before_;
};

// For tests: until the end of its life blocks run on so many cores, as with FA_CORES (cores.cpp).
// Kernels find memory that was allocated in it, and no other.
class WithCores {
 public:
  explicit WithCores(unsigned);
  ~WithCores();

 private:
  unsigned before_;
};

// For tests: until the end of its life a block may have only so much shared memory.
class LessSharedMemory {
 public:
  explicit LessSharedMemory(std::size_t bytes);
  ~LessSharedMemory();

 private:
  std::size_t before_;
};

// For tests: until the end of its life launches run their first block alone. What it has written
// tells which part of the work comes first.
class FirstBlockOnly {
 public:
  FirstBlockOnly();
  ~FirstBlockOnly();
};
}  // namespace fa::emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return fa::emulator::shuffle(mask, value, unsigned(source) % 32);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return fa::emulator::shuffle(mask, value, fa::emulator::lane() ^ unsigned(bits));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  return fa::emulator::shuffle(mask, value, fa::emulator::lane() + by);
}
inline int __any_sync(unsigned mask, int x) { return fa::emulator::any(mask, x != 0); }

namespace fa::emulator {

// *address += value; returns what was there. One thread runs at a time; the atomic tells
// ThreadSanitizer that this is no race.
inline float add(float* address, float value) {
  std::uint32_t bits, now;
  auto* word = reinterpret_cast<std::uint32_t*>(address);
  __atomic_load(word, &bits, __ATOMIC_RELAXED);
  for (;;) {
    float old;
    std::memcpy(&old, &bits, sizeof old);
    const float sum = old + value;
    std::memcpy(&now, &sum, sizeof now);
    if (__atomic_compare_exchange(word, &bits, &now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return old;
  }
}

}  // namespace fa::emulator

#ifdef FA_XRAY
float atomicAdd(float* address, float value);  // notes it
#else
inline float atomicAdd(float* address, float value) { return fa::emulator::add(address, value); }
#endif

inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

// ---- the runtime ----

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorInvalidConfiguration,
  cudaErrorInvalidDeviceFunction,
  cudaErrorNoKernelImageForDevice,
  cudaErrorUnsupportedPtxVersion,
  cudaErrorIllegalAddress,
  cudaErrorMisalignedAddress,
  cudaErrorLaunchFailure,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = fa_emulated_stream*;
using cudaEvent_t = struct fa_emulated_event*;

const char* cudaGetErrorString(cudaError_t);
const char* cudaGetErrorName(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device);
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t = nullptr);
cudaError_t cudaMemset(void* memory, int byte, std::size_t bytes);
cudaError_t cudaMemsetAsync(void* memory, int byte, std::size_t bytes, cudaStream_t = nullptr);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamCreate(cudaStream_t*);
inline constexpr unsigned cudaStreamNonBlocking = 1;
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
// A kernel runs inside its launch, so an event holds the time of the CPU at which it was recorded.
cudaError_t cudaEventCreate(cudaEvent_t*);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t);
namespace fa::emulator {
cudaError_t allow_dynamic_shared_memory(const void* kernel, int bytes);
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  return fa::emulator::allow_dynamic_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}
