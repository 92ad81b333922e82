// What the two fast kernels share: how the work of a block is cut up, and the two products. Threads
// and lanes as at the end of stage 04's ladder:
//   a warp      WR rows of the tile that the block owns; its lanes lie in LR rows of LC
//   a thread    8 rows and 4 neighbouring columns of a tile of scores, 8 x 8 numbers of a gradient
#pragma once
#include <type_traits>

#include "05_cuda_backward/cuda_backward.hpp"
#include "common/core/tiles.cuh"

namespace fa::cuda_backward {

// For head dimensions of at most D. At d = 128 a block has an SM for itself, and twice the warps.
template <int D_>
struct Fast {
  static constexpr int D = D_, LC = D / 8, LR = 32 / LC;
  static constexpr int blocks = D <= 64 ? 2 : 1, warps = 8 / blocks, threads = 32 * warps;
  static constexpr int WR = 8 * LR, rows = warps * WR;        // rows of a warp, of the block
  static constexpr int cols = 4 * LC;                         // of the tiles that come by
  static constexpr int pitch = 4 * D + 4;                     // of a tile, for 4 rows
  static constexpr int W_pitch = 4 * WR + (D <= 64 ? 8 : 0);  // of a warp's weights, for 4 columns
  static constexpr int own_size = rows / 4 * pitch, tile_size = cols / 4 * pitch,
                       W_size = cols / 4 * W_pitch;
  // Two tiles that stay, two that come by, the weights, and a number for each column.
  static constexpr std::size_t bytes =
      sizeof(float) * (2 * own_size + 2 * tile_size + warps * W_size + cols);
};

#if defined(__CUDACC__) || defined(FA_EMULATED)

// Where a thread stands: its warp's number, its column and row among the lanes.
template <class F>
struct Place {
  int warp, tx, ty;
  __device__ Place()
      : warp(__shfl_sync(0xffffffff, int(threadIdx.x / 32), 0)),
        tx(int(threadIdx.x) % 32 / 2 % F::LC),
        ty(int(threadIdx.x) % 2 + int(threadIdx.x) % 32 / (2 * F::LC) * 2) {}
  // Row i of this thread: four neighbours, and four more half a warp's rows below.
  __device__ int row(int i) const {
    return warp * F::WR + 4 * ty + i + (i < 4 ? 0 : F::WR / 2 - 4);
  }
};

// Rows first ... of X into shared memory: there after cp_async_wait() of all threads and a barrier.
template <class F, int rows, bool vectorised>
__device__ __forceinline__ void ask_for(float* tile, const Rows<const float>& X, std::int64_t first,
                                        int present) {
  ask_for_tile<F::threads, F::D, rows, 4, vectorised>(tile, X, first, present);
}

// s = A B^T: rows of A are the block's own, rows of B those of a tile that comes by.
template <class F>
__device__ __forceinline__ void product(float (&s)[8][4], const float* A, const float* B,
                                        const Place<F>& at) {
  const float* const a = A + at.row(0) / 4 * F::pitch;
  const float* const b = B + at.tx * F::pitch;
  const auto a_at = [&](int i, int x) {
    return load4(a + (i < 4 ? 0 : F::WR / 8 * F::pitch) + i % 4 * F::D + x);
  };
  float4 ai[8], bj = load4(b);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    ai[i] = a_at(i, 0);
#pragma unroll
    for (int j = 0; j < 4; ++j) s[i][j] = 0;
  }
#pragma unroll 1
  for (int x = 0; x < F::D; x += 4) {
    const int ahead = (x + 4) % F::D;  // at the end some numbers are loaded for nothing
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 next = load4(b + (j < 3 ? (j + 1) * F::D + x : ahead));  // meanwhile
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s[i][j] += ai[i].x * bj.x;
        s[i][j] += ai[i].y * bj.y;
        s[i][j] += ai[i].z * bj.z;
        s[i][j] += ai[i].w * bj.w;
        if (j == 3) ai[i] = a_at(i, ahead);
      }
      bj = next;
    }
  }
}

// g += W X: rows of X are those of a tile that comes by, and the columns of W.
template <class F>
__device__ __forceinline__ void accumulate(float (&g)[8][8], const float* W, const float* X,
                                           const Place<F>& at) {
  constexpr int WR = F::WR, D = F::D;
  const float *w = W + 4 * at.ty, *v = X + 4 * at.tx;
  float4 w0 = load4(w), w1 = load4(w + WR / 2), v0 = load4(v), v1 = load4(v + D / 2);
#pragma unroll 1
  for (int k = 0; k < F::cols; k += 8) {
    const bool last = k + 8 == F::cols;
    const float* const w_after = last ? w : w + 2 * F::W_pitch;
    const float* const v_after = last ? v : v + 2 * F::pitch;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float wi[] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
      const float vx[] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
      const int n = e + 1;
      const float* const w_next = n < 8 ? w + n / 4 * F::W_pitch + n % 4 * WR : w_after;
      const float* const v_next = n < 8 ? v + n / 4 * F::pitch + n % 4 * D : v_after;
      w0 = load4(w_next), w1 = load4(w_next + WR / 2);
      v0 = load4(v_next), v1 = load4(v_next + D / 2);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int x = 0; x < 8; ++x) g[i][x] += wi[i] * vx[x];
    }
    w = w_after;
    v = v_after;
  }
}

// Where this thread's weights of column j lie: four rows here, four more WR / 2 numbers on.
template <class F>
__device__ __forceinline__ float* weights_at(float* W, const Place<F>& at, int j) {
  return W + at.tx * F::W_pitch + j * F::WR + 4 * at.ty;
}

// From registers to where accumulate() reads. Only the warp writes and reads its weights.
template <class F>
__device__ __forceinline__ void share(float* W, const float (&s)[8][4], const Place<F>& at) {
  __syncwarp();  // what was there has been read
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float* const to = weights_at<F>(W, at, j);
    store4(to, make_float4(s[0][j], s[1][j], s[2][j], s[3][j]));
    store4(to + F::WR / 2, make_float4(s[4][j], s[5][j], s[6][j], s[7][j]));
  }
  __syncwarp();  // what is there now may be read
}

template <int rows, int columns>
__device__ __forceinline__ void clear(float (&g)[rows][columns]) {
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int x = 0; x < columns; ++x) g[i][x] = 0;
}

// X[first + r][...] = scale g, for the rows r of this thread that exist.
template <class F, bool vectorised>
__device__ __forceinline__ void store(const Rows<float>& X, std::int64_t first, int rows,
                                      float scale, const float (&g)[8][8], const Place<F>& at) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (at.row(i) >= rows) continue;
    float* const to = X[first + at.row(i)];
    store_columns<vectorised>(to, 4 * at.tx, int(X.cols), g[i], scale);
    store_columns<vectorised>(to, 4 * at.tx + F::D / 2, int(X.cols), g[i] + 4, scale);
  }
}

// L_i; infinity for a row without any weight, so that exp(s - L) is 0.
inline __device__ float log_sum(float L) { return L == -INFINITY ? INFINITY : L; }

// delta[r] = dO_r . O_r for r < rows, by a warp per row.
template <class F>
__device__ void row_deltas(float* delta, const Rows<const float>& dO, const Rows<const float>& O,
                           std::int64_t first, int rows) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < rows; r += F::warps) {
    float sum = 0;
    for (int x = lane; x < O.cols; x += 32) sum += dO[first + r][x] * O[first + r][x];
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
    if (lane == 0) delta[r] = sum;
  }
}

#endif

}  // namespace fa::cuda_backward
