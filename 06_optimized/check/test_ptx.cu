// The instructions behind ptx/: every layout in which the kernels pass operands, against a product
// of the CPU. Elements are small integers without a pattern: sums are exact in any order, so == is
// right, and one element in a wrong place shows. Where only places count, elements are bits that
// tell them apart. What nobody has written is NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/barrier.cuh"
#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::optimized {
namespace {

class Hopper : public testing::Test {
 protected:
  void SetUp() override {
    int device = 0, major = 0, minor = 0;
    std::string why_not;
    if (const cudaError_t code = cudaGetDevice(&device); code != cudaSuccess) {
      why_not = std::string("no usable GPU: ") + cudaGetErrorString(code);
    } else {
      FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
      FA_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
      if (major == 9 && minor == 0) return;
      why_not = "for compute capability 9.0 alone, this GPU is " + capability(10 * major + minor);
    }
    const char* required = std::getenv("FA_REQUIRE_GPU");
    if (required && std::string(required) == "1") FAIL() << why_not;
    GTEST_SKIP() << why_not;
  }
};

template <class T>
constexpr const char* name_of = std::is_same_v<T, __half> ? "fp16" : "bf16";

// An array in device memory: a copy, or NaNs.
template <class X>
struct OnDevice {
  explicit OnDevice(const std::vector<X>& host) : memory(host.size() * sizeof(X)) {
    FA_CUDA_CHECK(cudaMemcpy(*this, host.data(), memory.bytes(), cudaMemcpyHostToDevice));
  }
  explicit OnDevice(std::size_t count) : memory(count * sizeof(X)) {
    FA_CUDA_CHECK(cudaMemset(*this, 0xff, memory.bytes()));
  }
  operator X*() const { return static_cast<X*>(memory.as<void>()); }
  std::vector<X> back() const {
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<X> host(memory.bytes() / sizeof(X));
    FA_CUDA_CHECK(cudaMemcpy(host.data(), *this, memory.bytes(), cudaMemcpyDeviceToHost));
    return host;
  }
  DeviceMemory memory;
};

// Integers in [-limit, limit]; another `seed`, other integers.
template <class T>
std::vector<T> integers(int count, int limit, std::uint32_t seed) {
  std::vector<T> all;
  for (int e = 0; e < count; ++e) {
    std::uint32_t x = (std::uint32_t(e) * 8 + seed) * 2654435761u;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    all.push_back(T(float(int((x ^ x >> 12) % (2 * limit + 1)) - limit)));
  }
  return all;
}

#ifdef FA_HOOKED  // no kernel: a call at each access would take nine tenths of the time
#define FA_OF_THE_HOST __attribute__((no_sanitize("thread")))
#else
#define FA_OF_THE_HOST
#endif
FA_OF_THE_HOST double inner_product(const double* x, const double* y, int n, int step) {
  double sum = 0;
  for (int k = 0; k < n; ++k) sum += x[k] * y[k * step];
  return sum;
}
// X Y^T, or X Y, [.., cols]; rows of X are `inner` long.
template <class A, class B>
std::vector<double> product(const std::vector<A>& X, const std::vector<B>& Y, int inner, int cols,
                            bool transposed) {
  const std::vector<double> x(X.begin(), X.end()), y(Y.begin(), Y.end());
  std::vector<double> C(x.size() / inner * cols);
  for (int e = 0; e < int(C.size()); ++e) {
    const int r = e / cols, c = e % cols;
    C[e] = inner_product(x.data() + r * inner, y.data() + (transposed ? c * inner : c), inner,
                         transposed ? 1 : cols);
  }
  return C;
}

// All are equal; else the first that is not.
template <class A, class B>
testing::AssertionResult same(const std::vector<A>& got, const std::vector<B>& want, int cols) {
  if (got.size() != want.size()) return testing::AssertionFailure() << "sizes differ";
  for (int e = 0; e < int(got.size()); ++e)
    if (!(got[e] == want[e]))
      return testing::AssertionFailure() << "row " << e / cols << ", column " << e % cols
                                         << ": got " << got[e] << ", want " << want[e];
  return testing::AssertionSuccess();
}

// ---- mma.sync ----

// S = Q K^T and O = S V by one warp; Q, K and V are 16 x 64, swizzled. Counts registers that do not
// hold what fragments.hpp says, which is how rung 1 fills them.
template <class T>
__global__ void mma_kernel(const T* Q, const T* K, const T* V, float* S_out, float* O_out,
                           int* wrong) {
  auto& tiles = *dynamic_shared<T[3][16 * 64]>();
  const int lane = threadIdx.x;
  for (int e = lane; e < 16 * 64; e += 32) {
    const int to = e / 64 * 64 + swizzled(e / 64, e % 64 / 8) * 8 + e % 8;
    tiles[0][to] = Q[e];
    tiles[1][to] = K[e];
    tiles[2][to] = V[e];
  }
  __syncwarp();
  const auto pointed = [&](int tile, const RowChunk& of, int x) {
    return tiles[tile] + of.row * 64 + swizzled(of.row, x / 8 + of.chunk) * 8;
  };
  float S[2][4] = {}, O[8][4] = {};
  for (int x = 0; x < 64; x += 16) {
    std::uint32_t q[4], k[4];
    ldmatrix(q, pointed(0, ldmatrix_by_rows(lane), x));
    ldmatrix(k, pointed(1, ldmatrix_by_columns(lane), x));
    for (int i = 0; i < 4; ++i) {
      const Cell a = a_cell(lane, i), b = b_cell(lane, i % 2);
      if (q[i] != pair(Q + a.row * 64 + x + a.col)) atomicAdd(wrong, 1);
      if (k[i] != pair(K + (b.col + i / 2 * 8) * 64 + x + b.row)) atomicAdd(wrong, 1);
    }
    mma<T>(S[0], q, k[0], k[1]);
    mma<T>(S[1], q, k[2], k[3]);
  }
  std::uint32_t P[4];
  for (int i = 0; i < 4; ++i) P[i] = rounded_pair<T>(S[i / 2][i % 2 * 2], S[i / 2][i % 2 * 2 + 1]);
  for (int x = 0; x < 64; x += 16) {
    std::uint32_t v[4];
    ldmatrix_transposed(v, pointed(2, ldmatrix_by_rows(lane), x));
    for (int i = 0; i < 4; ++i) {
      const Cell b = b_cell(lane, i % 2);
      const T* low = V + b.row * 64 + x + b.col + i / 2 * 8;
      if (v[i] != pair(low[0], low[64])) atomicAdd(wrong, 1);
    }
    mma<T>(O[x / 8], P, v[0], v[1]);
    mma<T>(O[x / 8 + 1], P, v[2], v[3]);
  }
  for (int i = 0; i < 4; ++i) {
    const Cell c = c_cell(lane, i / 2);
    for (int n = 0; n < 2; ++n) S_out[c.row * 16 + 8 * n + c.col + i % 2] = S[n][i];
    for (int n = 0; n < 8; ++n) O_out[c.row * 64 + 8 * n + c.col + i % 2] = O[n][i];
  }
}

template <class T>
void test_mma() {
  SCOPED_TRACE(name_of<T>);  // |S| <= 256, which bf16 still holds exactly
  const auto Q = integers<T>(1024, 2, 1), K = integers<T>(1024, 2, 2), V = integers<T>(1024, 7, 3);
  const OnDevice<T> q(Q), k(K), v(V);
  const OnDevice<float> S(16 * 16), O(16 * 64);
  const OnDevice<int> wrong(std::vector<int>{0});
  FA_LAUNCH(mma_kernel<T>, 1, 32, 3 * 16 * 64 * sizeof(T), nullptr, q, k, v, S, O, wrong);
  EXPECT_EQ(wrong.back()[0], 0) << "registers that do not hold their places";
  const auto S_want = product(Q, K, 64, 16, true);
  EXPECT_TRUE(same(S.back(), S_want, 16)) << "S = Q K^T";
  EXPECT_TRUE(same(O.back(), product(S_want, V, 16, 64, false), 64)) << "O = S V";
}
TEST_F(Hopper, MmaMultipliesWhatLdmatrixLoads) {
  test_mma<__half>();
  test_mma<__nv_bfloat16>();
}

// ---- wgmma ----

enum class Way { copy_engine, stores, stores_without_swizzle };

// A tile of `rows` rows and D columns, by all threads.
template <int rows, int D, class T>
__device__ void bring(T* tile, const CUtensorMap& map, const T* X, Barrier* full, int phase,
                      Way way) {
  if (way == Way::copy_engine) {
    if (threadIdx.x == 0) {
      arrive_expecting(full, rows * D * 2);
      for (int x = 0; x < D; x += 64) tma_load(tile + x * rows, map, full, x, 0, 0, 0);
    }
    return wait(full, phase);
  }
  for (int e = threadIdx.x; e < rows * D; e += blockDim.x) {
    const int r = e / D, x = e % D, chunk = x % 64 / 8;
    tile[x / 64 * rows * 64 + x % 8 +
         (way == Way::stores ? swizzled_chunk(r, chunk) : r * 64 + chunk * 8)] = X[e];
  }
  fence_async();
  __syncthreads();
}

// Where wgmma.cuh says that C[i] lies.
__device__ int row_of(int i) {
  return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
__device__ int col_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <class T, int Br, int Bc, int D>
struct Shared {
  alignas(1024) T Q[Br * D];
  alignas(1024) T K[Bc * D];
  Barrier full;
};

// S = Q K^T and O += S K, as in a kernel: a block is a warpgroup that takes 64 of the Br rows. S is
// computed again while O is under way, into registers that hold NaN, and waited for alone.
template <class T, int Br, int Bc, int D, bool add>
__global__ void __launch_bounds__(128)
    wgmma_kernel(const __grid_constant__ CUtensorMap map_Q,
                 const __grid_constant__ CUtensorMap map_K, const T* Q, const T* K, float* S_out,
                 float* O_out, Way way) {
  auto& shared = FA_DYNAMIC_SHARED(Shared<T, Br, Bc, D>);
  if (threadIdx.x == 0) {
    init(&shared.full, 1);
    fence_barriers();
  }
  __syncthreads();
  bring<Br, D>(shared.Q, map_Q, Q, &shared.full, 0, way);
  bring<Bc, D>(shared.K, map_K, K, &shared.full, 1, way);
  const T* Qi = shared.Q + blockIdx.x * 64 * 64;
  S_out += blockIdx.x * 64 * Bc;
  O_out += blockIdx.x * 64 * D;

  float S[Bc / 2], O[D / 2];
  std::uint32_t P[Bc / 16][4];
#pragma unroll
  for (int i = 0; i < Bc / 2; ++i) S[i] = S_out[row_of(i) * Bc + col_of(i)];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) O[i] = O_out[row_of(i) * D + col_of(i)];
  wgmma_fence();
  multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K);
  wgmma_commit();
  wgmma_wait<0>(S);
  if constexpr (add) {
#pragma unroll
    for (int i = 0; i < Bc / 2; i += 2) P[i / 8][i / 2 % 4] = rounded_pair<T>(S[i], S[i + 1]);
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) S[i] = S_out[row_of(i) * Bc + col_of(i)];
    wgmma_fence();
    multiply_transposed<T, D, Br, Bc>(S, Qi, shared.K);
    wgmma_commit();
    multiply_add<T, Bc>(O, P, shared.K);
    wgmma_commit();
    wgmma_wait<1>(S);
  }
#pragma unroll
  for (int i = 0; i < Bc / 2; ++i) S_out[row_of(i) * Bc + col_of(i)] = S[i];
  if constexpr (add) wgmma_wait<0>(O);
#pragma unroll
  for (int i = 0; i < D / 2; ++i) O_out[row_of(i) * D + col_of(i)] = O[i];
}

template <class T, int Br, int Bc, int D>
testing::AssertionResult multiplied(Way way) {
  constexpr bool add = Bc <= 128;  // else S, P and O together are too many registers
  const auto Q = integers<T>(Br * D, 1, 1), K = integers<T>(Bc * D, 1, 2);  // so that |S| <= 256
  const auto O_before = integers<float>(Br * D, 1000, 3);
  const OnDevice<T> q(Q), k(K);
  const OnDevice<float> S(Br * Bc), O(O_before);
  const auto map = [](T* X, int rows) {
    return tensor_map(View<T>{X, 0, 0, D}, 1, 1, rows, D, rows);
  };
  const auto kernel = wgmma_kernel<T, Br, Bc, D, add>;
  constexpr std::size_t bytes = sizeof(Shared<T, Br, Bc, D>);
  allow_shared_memory(kernel, bytes);
  FA_LAUNCH(kernel, Br / 64, 128, bytes, nullptr, map(q, Br), map(k, Bc), q, k, S, O, way);
  const auto S_want = product(Q, K, D, Bc, true);
  auto O_want = product(S_want, K, Bc, D, false);
  for (int e = 0; e < Br * D; ++e) O_want[e] = O_before[e] + (add ? O_want[e] : 0);
  const auto S_same = same(S.back(), S_want, Bc), O_same = same(O.back(), O_want, D);
  if (S_same && O_same) return testing::AssertionSuccess();
  return testing::AssertionFailure() << Bc << " keys, D = " << D << ": " << (S_same ? "O: " : "S: ")
                                     << (S_same ? O_same : S_same).message();
}

template <class T, int Bc>
void test_wgmma() {
#ifdef FA_EMULATED  // one type sees all of it, the other what its numbers are
  constexpr int many = 128, some = 64, fewer = 64;
  constexpr bool all = std::is_same_v<T, __half>;
#else
  constexpr int many = 192, some = 128, fewer = Bc <= 128 ? 64 : 128;
  constexpr bool all = true;
#endif
  for (const Way way : {Way::copy_engine, Way::stores}) {
    if (!all && way == Way::stores) continue;
    SCOPED_TRACE(way == Way::stores ? "tiles by stores" : "tiles by the copy engine");
    EXPECT_TRUE((multiplied<T, many, Bc, 64>(way))) << name_of<T>;
    EXPECT_TRUE((multiplied<T, some, Bc, 128>(way))) << name_of<T>;
    EXPECT_TRUE((multiplied<T, fewer, Bc, 256>(way))) << name_of<T>;
  }
}
template <int... Bc>
void test_wgmma_by() {
  (test_wgmma<__half, Bc>(), ...);
  (test_wgmma<__nv_bfloat16, Bc>(), ...);
}
TEST_F(Hopper, WgmmaMultipliesTilesInSharedMemory) {
  test_wgmma_by<64, 80, 128, 144, 160, 176, 192>();
  EXPECT_FALSE((multiplied<__half, 128, 128, 128>(Way::stores_without_swizzle)))
      << "without swizzle this is another product: the comparison is blind";
}

// ---- the copy engine ----

using Bits = std::uint16_t;  // of an element
constexpr Bits unwritten = 0xffff;
constexpr int storage_size = 60000;  // so that 1 + an element's place fits into its bits

// Byte of an element in a tile of `rows` rows by the manual: in a swizzle of 128 bytes, bits 7 to 9
// of an address go into bits 4 to 6.
int byte_of(int rows, int row, int x) {
  const int byte = (x / 64 * rows + row) * 128 + x % 64 * 2;
  return byte ^ (byte >> 7 & 7) << 4;
}

TEST(Swizzle, IsThatOfTheManual) {
  for (int row = 0; row < 64; ++row)
    for (int x = 0; x < 64; ++x)
      EXPECT_EQ(2 * (swizzled_chunk(row, x / 8) + x % 8), byte_of(64, row, x));
}

struct Tensor {
  const char* name;
  int B, H, N, d, offset, batch, head, row;
  bool is_output;

  View<__half> on(Bits* storage) const {
    return {reinterpret_cast<__half*>(storage + offset), batch, head, row};
  }
  int place(int b, int h, int i, int x) const {
    return offset + b * batch + h * head + i * row + x;
  }
};
const Tensor tensors[] = {
    {"[B, H, N, d]", 2, 3, 70, 128, 0, 3 * 70 * 128, 70 * 128, 128, true},
    {"[B, N, H, d], d = 72", 2, 3, 70, 72, 0, 70 * 216, 72, 216, true},
    {"K of [B, N, 3, H, d]", 2, 2, 33, 40, 80, 33 * 240, 40, 240, true},
    {"gaps after rows, d = 200", 1, 2, 21, 200, 8, 0, 21 * 208, 208, true},
    {"d = 1", 1, 2, 17, 1, 0, 0, 17 * 8, 8, false},
    {"one row, one head", 3, 1, 1, 64, 0, 64, 3, 5, true},
    {"the same for all heads", 2, 4, 70, 64, 0, 70 * 64, 0, 64, false},
    {"the same for all rows", 2, 2, 40, 64, 0, 128, 64, 0, false},
    {"the same for all batches", 3, 2, 40, 64, 0, 0, 40 * 64, 64, false},
};

__global__ void load_kernel(const __grid_constant__ CUtensorMap map, Bits* out, int rows, int D) {
  Bits* const tile = &FA_DYNAMIC_SHARED(Bits);
  Barrier& full = *reinterpret_cast<Barrier*>(tile + rows * D);
  for (int e = threadIdx.x; e < rows * D; e += 128) tile[e] = unwritten;
  fence_async();
  if (threadIdx.x == 0) {
    init(&full, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expecting(&full, rows * D * 2);
    for (int x = 0; x < D; x += 64)
      tma_load(tile + x * rows, map, &full, x, blockIdx.x * rows, blockIdx.y, blockIdx.z);
  }
  wait(&full, 0);
  out += ((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * rows * D;
  for (int e = threadIdx.x; e < rows * D; e += 128) out[e] = tile[e];
}

TEST_F(Hopper, TmaLoadPutsEveryElementInItsPlaceAndZerosBeyondTheEnd) {
  std::vector<Bits> storage(storage_size);
  for (int e = 0; e < storage_size; ++e) storage[e] = Bits(1 + e);
  const OnDevice<Bits> memory(storage);
  constexpr int D = 256;
  for (const Tensor& t : tensors)
    for (const int rows : {16, 80, 128, 192}) {
      const auto v = t.on(memory);
      ASSERT_TRUE(has_tensor_map(v, t.B, t.H, t.N)) << t.name;
      const int tiles = t.N / rows + 2;  // the last one lies beyond the end
      const OnDevice<Bits> out(t.B * t.H * tiles * rows * D);
      const int bytes = rows * D * 2 + int(sizeof(Barrier));
      allow_shared_memory(load_kernel, bytes);
      FA_LAUNCH(load_kernel, dim3(tiles, t.H, t.B), 128, bytes, nullptr,
                tensor_map(v, t.B, t.H, t.N, t.d, rows), out, rows, D);
      std::vector<Bits> want(out.memory.bytes() / 2, 0);
      for (int b = 0; b < t.B; ++b)
        for (int h = 0; h < t.H; ++h)
          for (int i = 0; i < t.N; ++i)
            for (int x = 0; x < t.d; ++x)
              want[((b * t.H + h) * tiles + i / rows) * rows * D + byte_of(rows, i % rows, x) / 2] =
                  storage[t.place(b, h, i, x)];
      EXPECT_TRUE(same(out.back(), want, 64)) << t.name << ", boxes of " << rows << " rows";
    }
}

// The blocks of a cluster bring a part of a tile each, for all. Then each writes down what it got,
// and a second tile comes only when all have.
__global__ void parts_kernel(const __grid_constant__ CUtensorMap map, Bits* out, int rows,
                             int blocks) {
  Bits* const tile = &FA_DYNAMIC_SHARED(Bits);
  Barrier& full = *reinterpret_cast<Barrier*>(tile + rows * 64);
  Barrier& free = *(&full + 1);
  if (threadIdx.x == 0) {
    init(&full, 1);
    init(&free, blocks);
    fence_barriers();
  }
  sync_cluster();
  const int part = rows / blocks * int(rank_in_cluster());
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x == 0) {
      wait(&free, 1 ^ i);
      arrive_expecting(&full, rows * 64 * 2);
      tma_load_to_all(tile + part * 64, map, &full, 0, i * rows + part, 0, 0,
                      std::uint16_t((1 << blocks) - 1));
    }
    wait(&full, i);
    for (int e = threadIdx.x; e < rows * 64; e += 128)
      out[(blockIdx.x * 2 + i) * rows * 64 + e] = tile[e];
    fence_async();
    __syncthreads();
    if (int(threadIdx.x) < blocks) arrive_at(&free, threadIdx.x);
  }
  sync_cluster();
}

TEST_F(Hopper, PartsOfATileComeToAllBlocksOfACluster) {
  constexpr int rows = 96, clusters = 3;
  std::vector<Bits> storage(2 * rows * 64);
  for (int e = 0; e < int(storage.size()); ++e) storage[e] = Bits(1 + e);
  const OnDevice<Bits> memory(storage);
  for (const int blocks : {1, 2, 4}) {
    View<const __nv_bfloat16> v{};
    v.data = reinterpret_cast<const __nv_bfloat16*>(static_cast<Bits*>(memory));
    v.row = 64;
    const OnDevice<Bits> out(clusters * blocks * storage.size());
    const int bytes = rows * 64 * 2 + 2 * int(sizeof(Barrier));
    FA_LAUNCH_CLUSTERS(unsigned(blocks), parts_kernel, dim3(clusters * blocks), 128, bytes, nullptr,
                       tensor_map(v, 1, 1, 2 * rows, 64, rows / blocks), out, rows, blocks);
    std::vector<Bits> want;
    for (int b = 0; b < clusters * blocks; ++b)
      for (int i = 0; i < 2; ++i)
        for (int e = 0; e < rows * 64; ++e)
          want.push_back(storage[i * rows * 64 + (e ^ e / 64 % 8 * 8)]);
    EXPECT_TRUE(same(out.back(), want, 64)) << "clusters of " << blocks;
  }
}

// Every block leaves a number in its own memory and one in that of the next of its cluster.
__global__ void neighbours_kernel(int* out, int blocks) {
  int* const mine = dynamic_shared<int>();  // [2]
  const int rank = int(rank_in_cluster()), next = (rank + 1) % blocks;
  if (threadIdx.x == 0) {
    mine[0] = int(blockIdx.x);
    in_block(mine, unsigned(next))[1] = 100 + int(blockIdx.x);
  }
  sync_cluster();
  if (threadIdx.x == 0) {
    out[2 * blockIdx.x] = in_block(mine, unsigned(next))[0];
    out[2 * blockIdx.x + 1] = mine[1];
  }
  sync_cluster();
}

TEST_F(Hopper, BlocksOfAClusterReachEachOthersMemory) {
  constexpr int clusters = 3;
  for (const int blocks : {1, 2, 4}) {
    const OnDevice<int> out(std::size_t(2 * clusters * blocks));
    FA_LAUNCH_CLUSTERS(unsigned(blocks), neighbours_kernel, dim3(clusters * blocks), 32,
                       2 * sizeof(int), nullptr, out, blocks);
    std::vector<int> want;
    for (int b = 0; b < clusters * blocks; ++b) {
      const int first = b / blocks * blocks, rank = b % blocks;
      want.push_back(first + (rank + 1) % blocks);
      want.push_back(100 + first + (rank + blocks - 1) % blocks);
    }
    EXPECT_EQ(out.back(), want) << "clusters of " << blocks;
  }
}

TEST(Maps, RefuseWhatTmaCannotRead) {
  alignas(16) Bits memory[64];
  const auto can = [&](int offset, int batch, int head, int row) {
    const Tensor t = {"", 2, 3, 8, 8, offset, batch, head, row, false};
    return has_tensor_map(t.on(memory), t.B, t.H, t.N);
  };
  EXPECT_TRUE(can(0, 192, 64, 8));
  EXPECT_FALSE(can(4, 192, 64, 8)) << "address";
  EXPECT_FALSE(can(0, 196, 64, 8)) << "batch";
  EXPECT_FALSE(can(0, 192, 60, 8)) << "head";
  EXPECT_FALSE(can(0, 192, 64, 9)) << "row";
  EXPECT_FALSE(can(56, 192, 64, -8)) << "rows in reverse";
}

// Writes its bits into every element of a tensor, 16 rows a warp, as the kernels write O.
__host__ __device__ Bits bits_of(int head, int i, int x) {
  return Bits(((head * 70 + i) * 256 + x) * 40503u >> 1);
}
__global__ void store_kernel(const __grid_constant__ CUtensorMap map) {
  Bits* const tile = &FA_DYNAMIC_SHARED(Bits);  // 64 x 64
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i0 = blockIdx.x * 64;
  const int head = blockIdx.z * gridDim.y + blockIdx.y;
  Bits* const mine = tile + 16 * warp * 64;
  for (int box = 0; box < 256; box += 64) {
    for (int x = 0; x < 4; ++x) {
      std::uint32_t fragment[4];
      for (int k = 0; k < 4; ++k) {
        const int row = i0 + row_of(8 * x + 2 * k), col = box + col_of(8 * x + 2 * k);
        fragment[k] = pair(bits_of(head, row, col), bits_of(head, row, col + 1));
      }
      stmatrix(mine + swizzled_chunk(lane % 16, 2 * x + lane / 16), fragment);
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
      tma_store(map, mine, box, i0 + 16 * warp, blockIdx.y, blockIdx.z);
      tma_commit();
      tma_wait_read();
    }
    __syncwarp();  // the next box may take its place
  }
}

TEST_F(Hopper, TmaStorePutsWhatStmatrixLeftInItsPlaceAndNothingBeyondTheEnd) {
  for (const Tensor& t : tensors) {
    if (!t.is_output) continue;
    const OnDevice<Bits> memory(storage_size);
    FA_LAUNCH(store_kernel, dim3((t.N + 63) / 64, t.H, t.B), 128, 64 * 64 * 2, nullptr,
              tensor_map(t.on(memory), t.B, t.H, t.N, t.d, 16));
    std::vector<Bits> want(storage_size, unwritten);
    for (int head = 0; head < t.B * t.H; ++head)
      for (int i = 0; i < t.N; ++i)
        for (int x = 0; x < t.d; ++x)
          want[t.place(head / t.H, head % t.H, i, x)] = bits_of(head, i, x);
    EXPECT_TRUE(same(memory.back(), want, t.row)) << t.name;
  }
}

// ---- barriers ----

// Two warps pass `count` rounds of numbers through a ring; now one is slow, now the other.
template <int size>
struct Passing {
  int buffer[size][32];
  Barrier full[size], free[size];
};
template <int size>
__global__ void ring_kernel(int* out, int count) {
  auto& [buffer, full, free] = *dynamic_shared<Passing<size>>();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < size; ++i) {
      init(&full[i], 32);
      init(&free[i], 32);
    }
    fence_barriers();
  }
  __syncthreads();
  Ring<size> ring;
  for (int k = 0; k < count; ++k, ring.next()) {
    if (threadIdx.x < 32) {
      wait(&free[ring.at], ring.phase ^ 1);
      if (k % 7 == 0) __nanosleep(3000);
      buffer[ring.at][lane] = 32 * k + lane;
      arrive(&full[ring.at]);
    } else {
      wait(&full[ring.at], ring.phase);
      if (k % 11 < 2) __nanosleep(3000);
      out[32 * k + 31 - lane] = buffer[ring.at][31 - lane];  // another lane's
      arrive(&free[ring.at]);
    }
  }
}
template <int size>
void test_ring() {
  std::vector<int> want(32 * 200);
  for (int e = 0; e < int(want.size()); ++e) want[e] = e;
  const OnDevice<int> out(want.size());
  FA_LAUNCH(ring_kernel<size>, 1, 64, sizeof(Passing<size>), nullptr, out, 200);
  EXPECT_TRUE(same(out.back(), want, 32)) << "a ring of " << size;
}
TEST_F(Hopper, ARingPassesEveryRoundOnce) {
  test_ring<1>();
  test_ring<2>();
  test_ring<3>();
}

// Warpgroups take turns as in the kernels; each notes itself in a log, slowly and without atomics.
__global__ void turns_kernel(int* log, int rounds) {
  __shared__ volatile int entries;
  const int group = threadIdx.x / 128, groups = blockDim.x / 128;
  if (threadIdx.x == 0) entries = 0;
  __syncthreads();
  if (group == 0) arrive(1, 256);
  for (int k = 0; k < rounds; ++k) {
    sync(1 + group, 256);
    if (threadIdx.x % 128 == 96) {
      const int n = entries;
      __nanosleep(k % 3 * 1000);
      log[n] = group;
      entries = n + 1;
    }
    __syncwarp();
    arrive(1 + (group + 1) % groups, 256);
    __nanosleep((k + group) % 4 * 1000);
  }
}
TEST_F(Hopper, WarpgroupsTakeTurns) {
  for (const int groups : {2, 3}) {
    std::vector<int> want(100 * groups);
    for (int e = 0; e < int(want.size()); ++e) want[e] = e % groups;
    const OnDevice<int> log(want.size());
    FA_LAUNCH(turns_kernel, 1, 128 * groups, 0, nullptr, log, 100);
    EXPECT_TRUE(same(log.back(), want, groups)) << groups << " warpgroups";
  }
}

// ---- in turns ----

struct SixtyFour {
  alignas(16) float x[64];
};
// Numbers whose sum depends on the order: 1 is lost beside 10^8, and not beside 10^8 - 10^8.
__host__ __device__ float term(int block, int e) {
  return block % 3 == 0 ? 1e8f : block % 3 == 1 ? -1e8f : 1.0f + float(e);
}
__global__ void blocks_in_turns_kernel(float* by_engine, float* by_thread, int* turns) {
  auto& x = FA_DYNAMIC_SHARED(SixtyFour).x;
  const int block = int(blockIdx.x), e = int(threadIdx.x) * 4;
  for (int i = int(threadIdx.x); i < 64; i += 16) x[i] = term(block, i);
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    wait_turn(turns, block);
    if (block == 0)
      bulk_store(by_engine, x, int(sizeof x));
    else
      bulk_add(by_engine, x, int(sizeof x));
    tma_commit();
    tma_wait();
    pass_turn(turns);
    wait_turn(turns + 1, block);
  }
  __syncthreads();
  if (block == 0)
    *reinterpret_cast<float4*>(by_thread + e) = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
  else
    add(by_thread + e, x + e);
  __syncthreads();
  if (threadIdx.x == 0) pass_turn(turns + 1);
}
TEST_F(Hopper, BlocksThatAddInTurnsAddInTheirOrder) {
  constexpr int blocks = 1000;
  const OnDevice<float> by_engine(64), by_thread(64);
  const OnDevice<int> turns(std::vector<int>{0, 0});
  FA_LAUNCH(blocks_in_turns_kernel, blocks, 16, sizeof(SixtyFour), nullptr, by_engine, by_thread,
            turns);
  const auto engine = by_engine.back(), thread = by_thread.back();
  for (int e = 0; e < 64; ++e) {
    float sum = term(0, e);
    for (int b = 1; b < blocks; ++b) sum += term(b, e);
    EXPECT_EQ(engine[e], sum) << e;
    EXPECT_EQ(thread[e], sum) << e;
  }
  EXPECT_EQ(turns.back(), (std::vector<int>{blocks, blocks}));
}

// ---- copies of single threads, exponentials, rounding ----

// Chunk c gets c % 9 elements. Of three groups, the older two are read before the last has come.
__global__ void cp_async_kernel(const Bits* from, Bits* out) {
  __shared__ __align__(16) Bits to[3 * 32 * 8];
  for (int e = threadIdx.x; e < 3 * 32 * 8; e += 32) to[e] = unwritten;
  __syncthreads();
  for (int c = threadIdx.x; c < 96; c += 32) {
    cp_async(to + c * 8, from + c * 8, c % 9 * 2);
    cp_async_commit();
  }
  cp_async_wait<1>();
  for (int c = threadIdx.x; c < 96; c += 32) {
    if (c >= 64) cp_async_wait<0>();
    for (int e = 8 * c; e < 8 * c + 8; ++e) out[e] = to[e];
  }
}
TEST_F(Hopper, CpAsyncFillsUpWithZeros) {
  std::vector<Bits> from(96 * 8), want(96 * 8);
  for (int e = 0; e < 96 * 8; ++e) {
    from[e] = Bits(1 + e);
    want[e] = e % 8 < e / 8 % 9 ? from[e] : 0;
  }
  const OnDevice<Bits> in(from), out(from.size());
  FA_LAUNCH(cp_async_kernel, 1, 32, 0, nullptr, in, out);
  EXPECT_TRUE(same(out.back(), want, 8));
}

template <class T>
__global__ void numbers_kernel(const float* x, float* power, std::uint32_t* low,
                               std::uint32_t* high) {
  const int e = threadIdx.x;
  power[e] = ex2(x[e]);
  low[e] = rounded_pair<T>(x[e], 1.0f);
  high[e] = rounded_pair<T>(1.0f, x[e]);
}
template <class T>
void test_numbers() {
  SCOPED_TRACE(name_of<T>);
  constexpr int digits = std::is_same_v<T, __half> ? 11 : 8;
  const float inf = std::numeric_limits<float>::infinity();
  const float tie = std::ldexp(1.0f, -digits);  // half of what 1 has to its next number
  const std::vector<float> x = {0,    -0.0f, -inf, inf, NAN, 1 + tie, -1 - 3 * tie, 1 + 1.01f * tie,
                                0.1f, -2.7f};
  const OnDevice<float> in(x), power(x.size());
  const OnDevice<std::uint32_t> low(x.size()), high(x.size());
  FA_LAUNCH(numbers_kernel<T>, 1, unsigned(x.size()), 0, nullptr, in, power, low, high);
  const auto y = power.back();
  const auto l = low.back(), h = high.back();
  EXPECT_TRUE(y[0] == 1 && y[1] == 1 && y[2] == 0 && y[3] == inf && std::isnan(y[4]));
  for (int e = 0; e < int(x.size()); ++e) {
    EXPECT_EQ(l[e], h[e] << 16 | h[e] >> 16) << "the order of a pair with " << x[e];
    T pair[2];
    std::memcpy(pair, &l[e], sizeof pair);
    const float got = float(pair[0]);
    EXPECT_EQ(float(pair[1]), 1);
    EXPECT_TRUE(std::isnan(x[e]) ? std::isnan(got) : std::signbit(got) == std::signbit(x[e]))
        << x[e];
    if (e < 4) {
      EXPECT_EQ(got, x[e]);
    }
    if (e < 5) continue;
    EXPECT_NEAR(y[e], std::exp2(x[e]), 1e-6 * y[e]) << x[e];
    // std::nearbyint rounds ties to even, as the tensor cores' types want it.
    const int shift = digits - 1 - std::ilogb(x[e]);
    EXPECT_EQ(got, std::ldexp(std::nearbyint(std::ldexp(x[e], shift)), -shift)) << x[e];
  }
}
TEST_F(Hopper, Ex2IsExactWhereItMattersAndPairsAreRoundedToNearest) {
  test_numbers<__half>();
  test_numbers<__nv_bfloat16>();
}

}  // namespace
}  // namespace fa::optimized
