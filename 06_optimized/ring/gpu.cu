// The engine on a GPU. Attention of two blocks is stage 06's; what is left moves rows from one
// place to another, and is limited by memory alone: a warp has a row, and a lane four numbers at a
// time, so that a warp's loads are whole sectors in 16 bits, too.
#include "06_optimized/ring/gpu.hpp"

#include <cstdint>
#include <type_traits>
#include <vector>

#include "06_optimized/backward.hpp"

namespace fa::ring {
namespace {

using Int = std::int64_t;
constexpr int lanes = 32, warps = 8;

// Where a warp's row is: batch, head and number.
struct Row {
  Int b, h, i;
};
__device__ inline bool own_row(const Size& size, Row& row) {
  const Int n = Int(blockIdx.x) * warps + threadIdx.y;
  if (n >= size.B * size.H * size.N) return false;
  row = {n / size.N / size.H, n / size.N % size.H, n % size.N};
  return true;
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
  Row at;
  if (!own_row(size, at)) return;
  const From* const x = from.at(at.b, at.h, at.i);
  To* const y = to.at(at.b, at.h, at.i);
  for (int e = int(threadIdx.x) * width; e < int(size.d); e += lanes * width) {
    const auto given = numbers_at<width>(x, e);
    Numbers<width, To> sum;
    if constexpr (adds) sum = numbers_at<width>(y, e);
    for (int k = 0; k < width; ++k)
      sum.x[k] = To(adds ? float(given.x[k]) + float(sum.x[k]) : float(given.x[k]));
    numbers_at<width>(y, e) = sum;
  }
}

__global__ void fill_numbers(float* to, std::size_t count, float value) {
  const std::size_t first = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (first < count) to[first] = value;
}
__global__ void add_numbers(const float* from, float* to, std::size_t count) {
  const std::size_t first = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (first < count) to[first] += from[first];
}

// merge() of ring.cpp, a row a warp.
template <int width, class T>
__global__ void merge_rows(Size size, View<const T> part_O, const float* part_L, View<float> O,
                           View<float> L) {
  Row at;
  if (!own_row(size, at)) return;
  const float before = *L.at(at.b, at.h, at.i);
  const float part = part_L[(at.b * size.H + at.h) * size.N + at.i];
  __syncwarp();  // every lane has read L before one writes it
  const float m = fmaxf(before, part);
  if (m == -INFINITY) return;
  // (2), (3) of ring.cpp
  const float old_weight = expf(before - m), new_weight = expf(part - m);
  const float l = old_weight + new_weight;
  const float old_share = old_weight / l, new_share = new_weight / l;
  // (4) O' = (exp(L - m) O + exp(L_part - m) O_part) / l
  const T* const x = part_O.at(at.b, at.h, at.i);
  float* const y = O.at(at.b, at.h, at.i);
  for (int e = int(threadIdx.x) * width; e < int(size.d); e += lanes * width) {
    const auto part_of_row = numbers_at<width>(x, e);
    Numbers<width, float> row{};  // the first keys that this row sees: nothing to read
    if (old_share > 0) row = numbers_at<width>(y, e);
    for (int k = 0; k < width; ++k)
      row.x[k] = old_share * row.x[k] + new_share * float(part_of_row.x[k]);
    numbers_at<width>(y, e) = row;
  }
  if (threadIdx.x == 0) *L.at(at.b, at.h, at.i) = m + logf(l);
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
    optimized::backward(p, t, options);
  }
  void merge(const Size& size, const View<const T>& part_O, const float* part_L,
             const View<float>& O, const View<float>& L) override {
    const bool fours = by_fours(size, part_O) && by_fours(size, O);
    const auto kernel = fours ? merge_rows<wide, T> : merge_rows<1, T>;
    if (rows(size) > 0)
      FA_LAUNCH(kernel, blocks(size), dim3(lanes, warps), 0, stream_, size, part_O, part_L, O, L);
  }
  void fill(float* to, std::size_t count, float value) override {
    if (count > 0)
      FA_LAUNCH(fill_numbers, dim3(unsigned((count + 255) / 256)), dim3(256), 0, stream_, to, count,
                value);
  }
  void add_sums(const float* from, float* to, std::size_t count) override {
    if (count > 0)
      FA_LAUNCH(add_numbers, dim3(unsigned((count + 255) / 256)), dim3(256), 0, stream_, from, to,
                count);
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
  static Int rows(const Size& size) { return size.B * size.H * size.N; }
  static dim3 blocks(const Size& size) { return dim3(unsigned((rows(size) + warps - 1) / warps)); }

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
    if (rows(size) > 0)
      FA_LAUNCH(kernel, blocks(size), dim3(lanes, warps), 0, stream_, size, from, to);
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
