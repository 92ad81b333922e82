// Accesses whose cost can be counted by hand. A comment says what its line does, all warps and
// times together: accesses of a warp, lanes that took part, sectors or turns, and the least
// possible. test_xray.py compares with what the x-ray counts.
#include "common/core/cp_async.cuh"
#include "common/emulator/xray.hpp"

namespace {

__device__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ float sum_of(const float* x, int lane) {
  return x[lane + 160];  // read global: 2 64 8 8
}

// One block of one warp. `in` begins at a multiple of 256 bytes.
__global__ void global_kernel(const float* in, float* out) {
  const int lane = int(threadIdx.x);
  float s = 0;
  s += in[lane];                                            // read global: 1 32 4 4
  s += in[2 * lane];                                        // read global: 1 32 8 4
  s += in[32 * lane];                                       // read global: 1 32 32 4
  s += in[lane + 1];                                        // read global: 1 32 5 4
  s += in[7];                                               // read global: 1 32 1 1
  s += in[lane / 4];                                        // read global: 1 32 1 1
  s += load4(in + 4 * lane).x;                              // read global: 1 32 16 16
  s += load4(in + 36 * lane).y;                             // read global: 1 32 32 16
  if (lane < 9) s += in[lane + 64];                         // read global: 1 9 2 2
  for (int x = lane; x < 40; x += 32) s += in[96 + x];      // read global: 2 40 5 5
  for (int x = 0; x < 3; ++x) s += in[200 + lane + 8 * x];  // read global: 3 96 12 12
  s += sum_of(in, lane);
  s += sum_of(in, lane + 32);
  out[lane] = s;                   // write global: 1 32 4 4
  out[64 + 2 * lane] = s;          // write global: 1 32 8 4
  atomicAdd(out + 256 + lane, s);  // add global: 1 32 4 4
}

// One block of two warps, dynamic shared memory.
__global__ void shared_kernel(float* out) {
  float* const tile = fa::dynamic_shared<float>();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (int x = int(threadIdx.x); x < 1280; x += 64) tile[x] = 1;  // write shared: 40 1280 40 40
  __syncthreads();
  float s = 0;
  s += tile[lane];              // read shared: 2 64 2 2
  s += tile[2 * lane];          // read shared: 2 64 4 2
  s += tile[32 * lane];         // read shared: 2 64 64 2
  s += tile[33 * lane];         // read shared: 2 64 2 2
  s += tile[lane + 5];          // read shared: 2 64 2 2
  s += tile[7];                 // read shared: 2 64 2 2
  s += tile[32 * (lane / 8)];   // read shared: 2 64 8 2
  s += tile[lane + 64 * warp];  // read shared: 2 64 2 2
  // float4: 8 lanes a turn, 16 where neighbours share
  s += load4(tile + 4 * lane).x;                       // read shared: 2 64 8 8
  s += load4(tile + 4 * (lane % 8)).x;                 // read shared: 2 64 8 4
  s += load4(tile + 4 * (lane / 8)).x;                 // read shared: 2 64 4 4
  s += load4(tile + 4 * (lane / 2 % 8)).x;             // read shared: 2 64 4 4
  s += load4(tile + 4 * (lane / 4 * 2 + lane % 2)).x;  // read shared: 2 64 4 4
  s += load4(tile + 32 * lane).x;                      // read shared: 2 64 64 8
  s += load4(tile + 36 * lane).x;                      // read shared: 2 64 8 8
  s += load4(tile + 8).x;                              // read shared: 2 64 4 4
  if (lane < 8) s += load4(tile + 4 * lane + 64).x;    // read shared: 2 16 2 2
  // 8 bytes: 16 lanes a turn, 32 where neighbours share
  const double* const pairs = reinterpret_cast<const double*>(tile);
  double two = pairs[lane];  // read shared: 2 64 4 4
  two += pairs[lane / 2];    // read shared: 2 64 2 2
  two += pairs[16 * lane];   // read shared: 2 64 64 4
  // Lanes that part and come together again
  for (int x = 0; x < 2; ++x) {
    __syncwarp();
    if (lane % 2 == x) s += tile[lane + 640];  // read shared: 4 64 4 4
  }
  for (int r = 0; r < 4; ++r)
    for (int x = lane; x < 40; x += 32) s += tile[40 * r + x];  // read shared: 16 320 16 16
  for (int r = lane; r < 40; r += 32)
    if (r % 2)
      s += tile[r + 700];  // read shared: 4 40 4 4
    else
      s += tile[2 * r + 800];  // read shared: 4 40 6 4
  if (lane == 3) return;
  s += tile[lane + 900];              // read shared: 2 62 2 2
  out[threadIdx.x] = s + float(two);  // write global: 2 62 8 8
}

// A copy is counted where it comes from and where it goes to; what does not exist is not fetched.
__global__ void copy_kernel(const float* in) {
  float* const tile = fa::dynamic_shared<float>();
  const int lane = int(threadIdx.x);
  fa::cp_async<16>(tile + 4 * lane, in + 4 * lane, true);           // copy global: 1 32 16 16
  fa::cp_async<4>(tile + 128 + 2 * lane, in + 2 * lane, true);      // copy shared: 1 32 2 1
  fa::cp_async<16>(tile + 256 + 4 * lane, in, lane < 4);            // copy global: 1 4 1 1
  fa::cp_async<16>(tile + 384 + 4 * lane, in + 512 + lane, false);  // copy shared: 1 32 4 4
  fa::cp_async_wait();
}

struct Three {
  int a, b, c;
};

// Static shared memory has names; what is no number is moved a word at a time.
__global__ void static_kernel(float* out) {
  alignas(16) __shared__ float square[32][32], padded[32][33];
  __shared__ Three threes[32];
  const int lane = int(threadIdx.x);
  if (lane < 2) threes[lane] = threes[7 - lane];  // read threes: 3 6 3 3
  for (int r = 0; r < 32; ++r) {
    square[r][lane] = float(r);  // write square: 32 1024 32 32
    padded[r][lane] = float(r);  // write padded: 32 1024 32 32
  }
  __syncthreads();
  for (int r = 0; r < 32; ++r) {
    out[32 * r + lane] = square[lane][r];         // read square: 32 1024 1024 32
    out[1024 + 32 * r + lane] = padded[lane][r];  // read padded: 32 1024 32 32
  }
}

}  // namespace

int main(int argc, char** argv) {
  return fa::xray::run(argc, argv, [](const fa::xray::Arguments&) {
    for (std::uint32_t k = 1; k < 1 << 24; k += 4099)
      if (fa::xray::which(fa::xray::number(k)) != k)
        throw std::logic_error("a number is not found");
    const fa::xray::Tensor in("in", 1, 2048), out("out", 1, 2048);
    FA_LAUNCH(global_kernel, dim3(1), dim3(32), 0, nullptr, in.data(), out.data());
    FA_LAUNCH(shared_kernel, dim3(1), dim3(64), 1280 * sizeof(float), nullptr, out.data());
    FA_LAUNCH(copy_kernel, dim3(1), dim3(32), 512 * sizeof(float), nullptr, in.data());
    FA_LAUNCH(static_kernel, dim3(1), dim3(32), 0, nullptr, out.data());
  });
}
