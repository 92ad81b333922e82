// Where the copy engine puts a swizzled tile, and how the two distances of a descriptor lead to its
// numbers: tried out on the CPU, with the same wrappers as the kernels of this stage.
#include <algorithm>
#include <bitset>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "06_optimized/ptx/barrier.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"
#include "common/core/cuda_program.hpp"

namespace fa::optimized {
namespace {

using T = __half;
constexpr int keys = 128, columns = 128, box = 64, sum = 64, chunk = 8;  // counted in numbers
constexpr int row_bytes = box * int(sizeof(T)), chunk_bytes = chunk * int(sizeof(T));

struct Shared {
  alignas(1024) T Q[64 * sum];       // the unit matrix: it picks rows
  alignas(1024) T K[keys * sum];     // one box
  alignas(1024) T V[sum * columns];  // two boxes of 64 columns
  Barrier full;
};

// A matrix in device memory without gaps, and its map for boxes of `rows` rows.
CUtensorMap map_of(std::vector<T>& X, int rows, int d) {
  return tensor_map(View<T>{X.data(), 0, 0, d}, 1, 1, rows, d, rows);
}
__device__ Shared& loaded(const CUtensorMap& Q, const CUtensorMap& K, const CUtensorMap& V) {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&s.full, 1);
    fence_barriers();
    arrive_expecting(&s.full, sizeof(s.Q) + sizeof(s.K) + sizeof(s.V));
    tma_load(s.Q, Q, &s.full, 0, 0, 0, 0);
    tma_load(s.K, K, &s.full, 0, 0, 0, 0);
    for (int x = 0; x < columns; x += box) tma_load(s.V + x * sum, V, &s.full, x, 0, 0, 0);
  }
  __syncthreads();
  wait(&s.full, 0);
  return s;
}

// K as it lies in shared memory.
__global__ void copy_kernel(CUtensorMap Q, CUtensorMap K, CUtensorMap V, T* as_it_lies) {
  const Shared& s = loaded(Q, K, V);
  for (int i = int(threadIdx.x); i < keys * sum; i += 128) as_it_lies[i] = s.K[i];
}

// Q K^T with a descriptor of K, and Q V with one of V; x or k goes in steps of 16.
__global__ void product_kernel(CUtensorMap Q, CUtensorMap K, CUtensorMap V, bool of_V, int leading,
                               int stride, float* result) {
  const Shared& s = loaded(Q, K, V);
  const std::uint64_t a = descriptor(s.Q, 16, 1024);
  const std::uint64_t b = descriptor(of_V ? s.V : s.K, leading, stride);
  float C[64];
  wgmma_fence();
  for (int x = 0; x < sum; x += 16) {
    const int right = x * 2 / 16, down = x * 128 / 16;  // in units of 16 bytes
    if (of_V)
      Wgmma<T, 128, false>::run<1>(C, a + right, b + down, x > 0);
    else
      Wgmma<T, 128, false>::run<0>(C, a + right, b + right, x > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(C);
  const int t = int(threadIdx.x), lane = t % 32;
  for (int i = 0; i < 64; ++i) {
    const int row = t / 32 * 16 + lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    result[row * 128 + col] = C[i];
  }
}

// A copy, or a product, of a tile that begins a row later.
__global__ void odd_copy_kernel(CUtensorMap Q, CUtensorMap K, CUtensorMap V) {
  Shared& s = loaded(Q, K, V);
  if (threadIdx.x == 0) tma_load(s.K + box, Q, &s.full, 0, 0, 0, 0);
}
__global__ void odd_product_kernel(CUtensorMap Q, CUtensorMap K, CUtensorMap V) {
  Shared& s = loaded(Q, K, V);
  float C[32];
  wgmma_fence();
  multiply_transposed<T, sum, 64, 64>(C, s.Q, s.K + box);
  wgmma_commit();
  wgmma_wait<0>(C);
}

std::string bits(unsigned x, int first, int count) {
  return std::bitset<32>(x).to_string().substr(std::size_t(32 - first - count), std::size_t(count));
}

// ---- what is printed ----

struct Tensors {
  std::vector<T> Q = std::vector<T>(64 * sum), K = std::vector<T>(keys * sum), V = K;
  CUtensorMap of_Q = map_of(Q, 64, sum), of_K = map_of(K, keys, sum),
              of_V = map_of(V, sum, columns);
};

template <class... Arguments>
void launch(void (*kernel)(Arguments...), Arguments... arguments) {
  allow_shared_memory(kernel, sizeof(Shared));
  FA_LAUNCH(kernel, 1, 128, sizeof(Shared), nullptr, arguments...);
}

bool print_places(Tensors& t) {
  for (int i = 0; i < keys * sum; ++i) t.K[std::size_t(i)] = T(float(i / chunk));
  std::vector<T> lies(t.K.size());
  launch(copy_kernel, t.of_Q, t.of_K, t.of_V, lies.data());
  const auto found_at = [&](int row, int place) {
    return int(float(lies[std::size_t(row * box + place * chunk)])) % 8;
  };
  std::printf("which chunk lies at place\n        0  1  2  3  4  5  6  7\n");
  for (int row = 0; row < 9; ++row) {
    std::printf("row %d ", row);
    for (int place = 0; place < 8; ++place) std::printf("  %d", found_at(row, place));
    std::printf("\n");
  }
  std::printf("\nrow 5, chunk 2                    bits 7-9  4-6  0-3\n");
  const unsigned plain = 5 * row_bytes + 2 * chunk_bytes, there = plain ^ (plain >> 7 & 7) << 4;
  for (const auto& [what, at] :
       {std::pair("counted in rows: byte", plain), {"swizzled:        byte", there}})
    std::printf("  %s %u           %s  %s  %s\n", what, at, bits(at, 7, 3).c_str(),
                bits(at, 4, 3).c_str(), bits(at, 0, 4).c_str());
  std::printf("  lies there:           row %d, chunk %d\n", int(float(lies[there / sizeof(T)])) / 8,
              int(float(lies[there / sizeof(T)])) % 8);
  bool right = true;
  for (int row = 0; row < keys; ++row)
    for (int place = 0; place < 8; ++place)
      right = right && found_at(row, place) == swizzled(row, place);
  return right && int(float(lies[there / sizeof(T)])) == 5 * 8 + 2;
}

// How many of 8192 numbers come out wrong with these distances.
int wrong(Tensors& t, bool of_V, int leading, int stride) {
  const int rows = of_V ? sum : keys, d = of_V ? columns : sum;
  std::vector<T>& X = of_V ? t.V : t.K;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < d; ++c) X[std::size_t(r * d + c)] = T(float((r * 67 + c * 13) % 2039));
  std::vector<float> result(64 * 128);
  launch(product_kernel, t.of_Q, t.of_K, t.of_V, of_V, leading, stride, result.data());
  int count = 0;
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < 128; ++j) {
      const T want = of_V ? X[std::size_t(i * d + j)] : X[std::size_t(j * d + i)];
      count += result[std::size_t(i * 128 + j)] != float(want);
    }
  return count;
}

bool print_distances(Tensors& t) {
  for (int i = 0; i < 64; ++i) t.Q[std::size_t(i * sum + i)] = T(1.0f);
  struct Try {
    bool of_V;
    int leading, stride;
    bool right;
  };
  const Try all[] = {{false, 16, 1024, true},       {false, 8192, 1024, true},
                     {false, 16, 512, false},       {true, sum * 128, 1024, true},
                     {true, sum * 64, 1024, false}, {true, 16, 1024, false},
                     {true, sum * 128, 512, false}};
  std::printf("\noperand B   leading  stride   wrong, of 8192\n");
  bool as_expected = true;
  for (const Try& a : all) {
    const int count = wrong(t, a.of_V, a.leading, a.stride);
    std::printf("%s  %7d  %6d  %6d\n", a.of_V ? "V, of Q V  " : "K, of Q K^T", a.leading, a.stride,
                count);
    as_expected = as_expected && (count == 0) == a.right;
  }
  return as_expected;
}

bool print_refusal(const char* what, void (*kernel)(CUtensorMap, CUtensorMap, CUtensorMap),
                   Tensors& t) {
  try {
    launch(kernel, t.of_Q, t.of_K, t.of_V);
  } catch (const std::logic_error& error) {
    std::string text = error.what();
    text = text.substr(text.find("block 0: ") + 9);
    const std::size_t middle = std::min(text.rfind(' ', 90), text.size());  // a line has 96 columns
    std::printf("\n%s\n  %s\n", what, text.substr(0, middle).c_str());
    if (middle + 1 < text.size()) std::printf("  %s\n", text.substr(middle + 1).c_str());
    return true;
  }
  return false;
}

int run() {
  Tensors t;
  bool right = print_places(t);
  right = print_distances(t) && right;
  right = print_refusal("a copy to a tile that begins a row later:", odd_copy_kernel, t) && right;
  right = print_refusal("a product that begins there:", odd_product_kernel, t) && right;
  return right ? 0 : 1;
}

}  // namespace
}  // namespace fa::optimized

int main() { return fa::cuda_program(fa::optimized::run); }
