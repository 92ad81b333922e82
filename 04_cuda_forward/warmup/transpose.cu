// Warm-up 3: a matrix of 32 x 32 turned, a thread for each number, a warp for each row. Three
// times: straight from memory to memory, through a tile in shared memory, and through a tile whose
// rows are one word longer. The result is the same. What the accesses of a warp cost is not, and
// is counted from the places that the threads touched: no GPU and no profiler is needed.
#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "common/core/cuda_program.hpp"

namespace {

constexpr int n = 32, lanes = 32, threads = n * n;
constexpr int bytes_per_sector = 32, banks = 32, bytes_per_word = 4;

// The places that a thread touched, counted in numbers; -1 for none.
struct Touched {
  int read, put, get, write;
};

// [quote naive]
__global__ void naive_kernel(const float* in, float* out, Touched* touched) {
  const int x = threadIdx.x, y = threadIdx.y;  // a warp has one y and every x
  const int read = y * n + x, write = x * n + y;
  out[write] = in[read];
  touched[y * n + x] = {read, -1, -1, write};
}
// [end quote]

// [quote tile]
__global__ void tile_kernel(const float* in, float* out, int row, Touched* touched) {
  __shared__ float tile[n * (n + 1)];
  const int x = threadIdx.x, y = threadIdx.y;
  const int read = y * n + x, put = y * row + x, get = x * row + y, write = y * n + x;
  tile[put] = in[read];
  __syncthreads();  // other warps put what this one gets
  out[write] = tile[get];
  touched[y * n + x] = {read, put, get, write};
}
// [end quote]

// [quote sectors]
// Sectors of 32 bytes that one access of a warp touches.
int sectors(const std::vector<int>& places) {
  std::set<int> touched;
  for (int place : places) touched.insert(place * bytes_per_word / bytes_per_sector);
  return int(touched.size());
}
// [end quote]

// [quote turns]
// Turns that one access of a warp takes: the different words in the bank that is asked for most.
int turns(const std::vector<int>& places) {
  std::vector<std::set<int>> words(banks);
  std::size_t most = 0;
  for (int place : places) {
    std::set<int>& bank = words[place % banks];
    bank.insert(place);
    most = std::max(most, bank.size());
  }
  return int(most);
}
// [end quote]

// Of all warps the most that `count` finds in one access; -1 where the kernel has no such access.
int most(const std::vector<Touched>& touched, int Touched::*access,
         int (*count)(const std::vector<int>&)) {
  int result = -1;
  for (int first = 0; first < threads; first += lanes) {
    std::vector<int> places(lanes);
    for (int lane = 0; lane < lanes; ++lane) places[lane] = touched[first + lane].*access;
    if (places[0] >= 0) result = std::max(result, count(places));
  }
  return result;
}

// Launches a version, prints its line, and returns how many numbers are wrong.
template <class Launch>
int report(const char* name, const Launch& launch) {
  std::vector<float> in(threads), out(threads);
  std::vector<Touched> touched(threads);
  for (int i = 0; i < threads; ++i) in[i] = float(i);
  const fa::DeviceMemory din(threads * sizeof(float)), dout(threads * sizeof(float)),
      dtouched(threads * sizeof(Touched));
  FA_CUDA_CHECK(cudaMemcpy(din.as<float>(), in.data(), din.bytes(), cudaMemcpyHostToDevice));

  launch(din.as<float>(), dout.as<float>(), dtouched.as<Touched>());
  FA_CUDA_CHECK(cudaMemcpy(out.data(), dout.as<float>(), dout.bytes(), cudaMemcpyDeviceToHost));
  FA_CUDA_CHECK(
      cudaMemcpy(touched.data(), dtouched.as<Touched>(), dtouched.bytes(), cudaMemcpyDeviceToHost));

  int wrong = 0;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) wrong += out[i * n + j] != in[j * n + i];
  const auto cell = [](int count) { return count < 0 ? std::string("-") : std::to_string(count); };
  std::printf("%-24s%9s%9s%9s%9s%9d\n", name, cell(most(touched, &Touched::read, sectors)).c_str(),
              cell(most(touched, &Touched::write, sectors)).c_str(),
              cell(most(touched, &Touched::put, turns)).c_str(),
              cell(most(touched, &Touched::get, turns)).c_str(), wrong);
  return wrong;
}

int run() {
  const dim3 one(1), block(n, n);
  std::printf("%-24s%9s%9s%9s%9s\n", "an access of a warp:", "sectors", "sectors", "turns",
              "turns");
  std::printf("%-24s%9s%9s%9s%9s%9s\n", "", "to read", "to write", "to put", "to get", "wrong");
  int wrong = report("naive", [&](const float* in, float* out, Touched* touched) {
    FA_LAUNCH(naive_kernel, one, block, 0, nullptr, in, out, touched);
  });
  for (const int row : {n, n + 1})
    wrong += report(row == n ? "tile, rows of 32 words" : "tile, rows of 33 words",
                    [&](const float* in, float* out, Touched* touched) {
                      FA_LAUNCH(tile_kernel, one, block, 0, nullptr, in, out, row, touched);
                    });
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() { return fa::cuda_program(run); }
