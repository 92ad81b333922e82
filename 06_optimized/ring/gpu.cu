// The engine on a GPU. Attention of two blocks is stage 06's; what is left moves rows from one
// place to another, and is limited by memory alone. A warp has four rows, and a lane four numbers
// at a time of each, so that a warp's loads are whole sectors in 16 bits, too. All four rows are
// asked for before one is used: more bytes are under way.
#include "06_optimized/ring/gpu.hpp"

#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "06_optimized/backward/backward.hpp"
#include "common/core/check.hpp"

namespace fa::ring {
namespace {

using Int = std::int64_t;
constexpr int lanes = 32, warps = 8, at_once = 4;
constexpr int tile = warps * at_once;  // rows of a block, of one head

dim3 blocks_of(const Size& size) {
  const Int blocks = size.B * size.H * ((size.N + tile - 1) / tile);
  require(blocks <= std::numeric_limits<int>::max(), "ring: ", blocks,
          " blocks of rows are more than a launch has");
  return dim3(unsigned(blocks));
}

// A warp's rows: of which batch and head, and the number of the first. Found once for all of them,
// in 32 bits: to divide numbers of 64 bits for each row took longer than to move it.
struct Rows {
  unsigned b, h;
  Int i;
};
__device__ inline Rows own_rows(const Size& size) {
  const unsigned tiles = unsigned((size.N + tile - 1) / tile), head = blockIdx.x / tiles;
  const Int i = Int(blockIdx.x % tiles) * tile + threadIdx.y * at_once;
  return {head / unsigned(size.H), head % unsigned(size.H), i};
}

// So many numbers are one load. One where a row, or its address, is no multiple of four.
constexpr int wide = 4;
template <int width, class X>
struct alignas(width * sizeof(X)) Numbers {
  X x[width];
};
template <int width, class X>
__device__ inline auto& numbers_at(X* row, int e) {
  using Whole = Numbers<width, std::remove_const_t<X>>;
  return *reinterpret_cast<std::conditional_t<std::is_const_v<X>, const Whole, Whole>*>(row + e);
}

// to = from; if `adds`, to += from
template <int width, bool adds, class From, class To>
__global__ void move_rows(Size size, View<const From> from, View<To> to) {
  const Rows at = own_rows(size);
  for (int e = int(threadIdx.x) * width; e < int(size.d); e += lanes * width) {
    Numbers<width, From> given[at_once];
    Numbers<width, To> sum[at_once];
#pragma unroll
    for (int r = 0; r < at_once; ++r) {
      if (at.i + r >= size.N) continue;
      given[r] = numbers_at<width>(from.at(at.b, at.h, at.i + r), e);
      if constexpr (adds) sum[r] = numbers_at<width>(to.at(at.b, at.h, at.i + r), e);
    }
#pragma unroll
    for (int r = 0; r < at_once; ++r) {
      if (at.i + r >= size.N) continue;
#pragma unroll
      for (int k = 0; k < width; ++k)
        sum[r].x[k] = To(adds ? float(given[r].x[k]) + float(sum[r].x[k]) : float(given[r].x[k]));
      numbers_at<width>(to.at(at.b, at.h, at.i + r), e) = sum[r];
    }
  }
}

// Numbers of a block that lie in a row: `at_once` a thread, of which neighbours have neighbours.
constexpr int threads = 256, numbers = threads * at_once;
__device__ inline std::size_t own_number(int k) {
  return std::size_t(blockIdx.x) * numbers + k * threads + threadIdx.x;
}
__global__ void fill_numbers(float* to, std::size_t count, float value) {
#pragma unroll
  for (int k = 0; k < at_once; ++k)
    if (own_number(k) < count) to[own_number(k)] = value;
}
__global__ void add_numbers(const float* from, float* to, std::size_t count) {
  float sum[at_once];
#pragma unroll
  for (int k = 0; k < at_once; ++k)
    if (own_number(k) < count) sum[k] = from[own_number(k)] + to[own_number(k)];
#pragma unroll
  for (int k = 0; k < at_once; ++k)
    if (own_number(k) < count) to[own_number(k)] = sum[k];
}

// merge() of ring.cpp
template <int width, class T>
__global__ void merge_rows(Size size, View<const T> part_O, const float* part_L, View<float> O,
                           View<float> L) {
  const Rows at = own_rows(size);
  bool seen[at_once];
  float m[at_once], l[at_once], old_share[at_once], new_share[at_once];
#pragma unroll
  for (int r = 0; r < at_once; ++r) {
    const Int i = at.i + r;
    seen[r] = false;  // neither has seen a key, or there is no such row
    if (i >= size.N) continue;
    const float before = *L.at(at.b, at.h, i);
    const float part = part_L[(at.b * size.H + at.h) * size.N + i];
    seen[r] = before != -INFINITY || part != -INFINITY;  // NaN stays NaN
    m[r] = fmaxf(before, part);
    // (2), (3) of ring.cpp
    const float old_weight = expf(before - m[r]), new_weight = expf(part - m[r]);
    l[r] = old_weight + new_weight;
    old_share[r] = old_weight / l[r], new_share[r] = new_weight / l[r];
  }
  __syncwarp();  // every lane has read L before one writes it
  // (4) O' = (exp(L - m) O + exp(L_part - m) O_part) / l
  for (int e = int(threadIdx.x) * width; e < int(size.d); e += lanes * width) {
    Numbers<width, T> part_of_row[at_once];
    Numbers<width, float> row[at_once] = {};
#pragma unroll
    for (int r = 0; r < at_once; ++r) {
      if (!seen[r]) continue;
      part_of_row[r] = numbers_at<width>(part_O.at(at.b, at.h, at.i + r), e);
      // Of the first keys that a row sees there is nothing to read.
      if (old_share[r] > 0) row[r] = numbers_at<width>(O.at(at.b, at.h, at.i + r), e);
    }
#pragma unroll
    for (int r = 0; r < at_once; ++r) {
      if (!seen[r]) continue;
#pragma unroll
      for (int k = 0; k < width; ++k)
        row[r].x[k] = old_share[r] * row[r].x[k] + new_share[r] * float(part_of_row[r].x[k]);
      numbers_at<width>(O.at(at.b, at.h, at.i + r), e) = row[r];
    }
  }
#pragma unroll
  for (int r = 0; r < at_once; ++r)
    if (threadIdx.x == 0 && seen[r]) *L.at(at.b, at.h, at.i + r) = m[r] + logf(l[r]);
}

template <class T>
class GpuEngine : public Engine<T> {
 public:
  GpuEngine(cudaStream_t stream, bool deterministic)
      : stream_(stream), deterministic_(deterministic) {}

  void forward(const Problem& pair, const Forward<T>& t) override {
    const Problem p = with_lengths(pair);
    optimized::Options options;
    options.stream = stream_;
    options.scratch = scratch(optimized::scratch_bytes(p));
    options.block_a_tile = true;  // messages want some SMs for a while, and not at the end
    optimized::forward(p, t, options);
  }
  void backward(const Problem& pair, const Backward<T>& t) override {
    const Problem p = with_lengths(pair);
    optimized::BackwardOptions options;
    options.deterministic = deterministic_;
    options.stream = stream_;
    options.scratch = scratch(optimized::backward_scratch_bytes(p, options));
    options.block_a_tile = true;
    optimized::backward(p, t, options);
  }
  void merge(const Size& size, const View<const T>& part_O, const float* part_L,
             const View<float>& O, const View<float>& L) override {
    const bool fours = by_fours(size, part_O) && by_fours(size, O);
    const auto kernel = fours ? merge_rows<wide, T> : merge_rows<1, T>;
    if (const dim3 blocks = blocks_of(size); blocks.x > 0)
      FA_LAUNCH(kernel, blocks, dim3(lanes, warps), 0, stream_, size, part_O, part_L, O, L);
  }
  void fill(float* to, std::size_t count, float value) override {
    if (count > 0)
      FA_LAUNCH(fill_numbers, of_numbers(count), dim3(threads), 0, stream_, to, count, value);
  }
  void add_sums(const float* from, float* to, std::size_t count) override {
    if (count > 0)
      FA_LAUNCH(add_numbers, of_numbers(count), dim3(threads), 0, stream_, from, to, count);
  }
  void copy(const Size& size, const View<const T>& from, const View<T>& to) override {
    move<false>(size, from, to);
  }
  void copy_sums(const Size& size, const View<const float>& from, const View<float>& to) override {
    move<false>(size, from, to);
  }
  void add(const Size& size, const View<const T>& from, const View<float>& to) override {
    move<true>(size, from, to);
  }
  void round(const Size& size, const View<const float>& from, const View<T>& to) override {
    move<false>(size, from, to);
  }

 protected:
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    const auto memory = std::make_shared<DeviceMemory>(bytes);
    return {memory, memory->as<void>()};
  }

 private:
  static dim3 of_numbers(std::size_t count) {
    return dim3(unsigned((count + numbers - 1) / numbers));
  }

  template <class X>
  static bool by_fours(const Size& size, const View<X>& v) {
    const Int strides = size.d | v.batch | v.head | v.row;  // a common factor of four is in all
    return strides % wide == 0 &&
           reinterpret_cast<std::uintptr_t>(v.data) % (wide * sizeof(X)) == 0;
  }

  template <bool adds, class From, class To>
  void move(const Size& size, const View<const From>& from, const View<To>& to) {
    const bool fours = by_fours(size, from) && by_fours(size, to);
    const auto kernel = fours ? move_rows<wide, adds, From, To> : move_rows<1, adds, From, To>;
    if (const dim3 blocks = blocks_of(size); blocks.x > 0)
      FA_LAUNCH(kernel, blocks, dim3(lanes, warps), 0, stream_, size, from, to);
  }

  Scratch scratch(std::size_t bytes) {
    if (scratch_.bytes() < bytes) scratch_ = DeviceMemory(bytes);
    return scratch_;
  }
  // Kernels read lengths in device memory. The stream keeps calls in order, so that one place is
  // enough; a copy from memory that is not pinned has read it when it returns.
  Problem with_lengths(Problem p) {
    if (!p.key_lengths) return p;
    const std::size_t bytes = std::size_t(p.B) * sizeof(Int);
    if (lengths_.bytes() < bytes) lengths_ = DeviceMemory(bytes);
    FA_CUDA_CHECK(cudaMemcpyAsync(lengths_.as<void>(), p.key_lengths, bytes, cudaMemcpyHostToDevice,
                                  stream_));
    p.key_lengths = lengths_.as<Int>();
    return p;
  }

  cudaStream_t stream_;
  bool deterministic_;
  DeviceMemory scratch_, lengths_;
};

}  // namespace

template <class T>
std::unique_ptr<Engine<T>> gpu_engine(cudaStream_t stream, bool deterministic) {
  return std::make_unique<GpuEngine<T>>(stream, deterministic);
}
template std::unique_ptr<Engine<__half>> gpu_engine(cudaStream_t, bool);
template std::unique_ptr<Engine<__nv_bfloat16>> gpu_engine(cudaStream_t, bool);

}  // namespace fa::ring
