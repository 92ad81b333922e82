// Practice 04, level 1, of register_tiled.cu. Keep the marks; ./learn practice 04
// Register tiles. In tiled.cu every multiply-add reads its operands from shared memory, which can
// deliver at most a third of what the arithmetic units could use. Here a thread holds TR x TK
// scores and reads TR + TK groups of four numbers for 4 TR TK multiply-adds: less than half as
// many turns of the shared memory for each.
//
//   a warp      4 TR rows of Q_i; its lanes lie in 4 rows of 8:  ty = lane / 8, tx = lane % 8
//   a thread    rows ty + 4 i (i < TR), keys tx + 8 j (j < TK), columns 4 tx + 32 y + {0, 1, 2, 3}
//
// A row of scores lies in the 8 lanes of one ty: m and l are found with three exchanges.
#include "04_cuda_forward/cuda_forward.hpp"

namespace fa::cuda_forward {
namespace {

constexpr int warps = 4, threads = 32 * warps;

// Tiles and padded rows for a head dimension of at most D. Rows of the shared tiles are padded so
// that what 8 lanes read or write at once lies in different banks.
template <int D>
struct Tile {
  static constexpr int TR = 4, TK = 8;           // rows and keys of a thread
  static constexpr int Br = warps * 4 * TR;      // 64 queries
  static constexpr int Bc = 8 * TK;              // 64 keys
  static constexpr int columns = (D + 31) / 32;  // groups of four columns of O of a thread
  static constexpr int pad = 4;
  static constexpr int P_pad = 8;
  static constexpr int row = D + pad, P_row = Bc + P_pad;
  static constexpr std::size_t shared_bytes = sizeof(float) * (Br * row + Bc * row + Br * P_row);
};

__device__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

// tile[r][x] = X[first + r][x] for r < rows and x < d; rows and columns beyond are 0. A thread
// keeps its four columns and goes down the rows, so that a step costs two additions, not a
// multiplication.
template <int D, int tile_rows>
__device__ void load(float* tile, const Rows<const float>& X, std::int64_t first, int rows,
                     bool vectorised) {
  constexpr int at_once = threads / (D / 4);
  const int d = int(X.cols), r0 = threadIdx.x / (D / 4), x = threadIdx.x % (D / 4) * 4;
  const float* from = X[first + r0] + x;
#pragma unroll
  for (int r = r0; r < r0 + tile_rows; r += at_once) {
    float4 four = make_float4(0, 0, 0, 0);
    if (r < rows && x < d) {
      if (vectorised)
        four = load4(from);
      else
        four = make_float4(from[0], x + 1 < d ? from[1] : 0, x + 2 < d ? from[2] : 0,
                           x + 3 < d ? from[3] : 0);
    }
    *reinterpret_cast<float4*>(tile + r * Tile<D>::row + x) = four;
    from += at_once * X.stride;
  }
}

// Combines the 8 lanes that share a row.
__device__ float row_max(float x) {
  for (int bits = 4; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ float row_sum(float x) {
  for (int bits = 4; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}

template <int D>
__global__ void __launch_bounds__(threads, D <= 64 ? 4 : 2)
    register_tiled_kernel(Problem p, Forward<float> t, float scale, bool vectorised) {
  using Sizes = Tile<D>;
  constexpr int TR = Sizes::TR, TK = Sizes::TK, Br = Sizes::Br, Bc = Sizes::Bc;
  constexpr int columns = Sizes::columns;
  float* Qi = dynamic_shared<float>();  // [Br, row]
  float* KVj = Qi + Br * Sizes::row;    // [Bc, row]: first K_j, then V_j
  float* Pij = KVj + Bc * Sizes::row;   // [Br, P_row]

  const int warp = threadIdx.x / 32, ty = threadIdx.x % 32 / 8, tx = threadIdx.x % 8;
  const int d = int(p.d);
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);
  const int r0 = warp * 4 * TR + ty;  // this thread's rows of the tile are r0 + 4 i

  load<D, Br>(Qi, Q, i0, rows, vectorised);

  // (1) O_i = 0, l_i = 0, m_i = -infinity
  float m[TR], l[TR];
  float4 o[TR][columns];
  for (int i = 0; i < TR; ++i) {
    m[i] = -INFINITY;
    l[i] = 0;
    for (int y = 0; y < columns; ++y) o[i][y] = make_float4(0, 0, 0, 0);
  }

  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const int cols = int(min(std::int64_t(Bc), end - j0));
    __syncthreads();  // V of the previous tile is no longer read
    // (2) load K_j
    load<D, Bc>(KVj, K, j0, cols, vectorised);
    __syncthreads();  // K_j, and before the first tile Q_i, are complete

    // (3) S_ij = scale Q_i K_j^T
    float s[TR][TK] = {};
    // [step 04.4: add to s[i][j] columns x to x + 3 of row r0 + 4 i times key tx + 8 j (14 lines)]
    // TODO
    // [end]

    // Masks cost nothing on full tiles: the first row of the tile sees least.
    const bool full = mask.visible_keys(i0) >= j0 + Bc;
    for (int i = 0; i < TR; ++i) {
      const int r = r0 + 4 * i;
      const int n = full ? Bc : int(mask.visible_keys(i0 + min(r, rows - 1)) - j0);

      // (4) m_new = max(m, rowmax S_ij)
      float m_new = m[i];
      for (int j = 0; j < TK; ++j) {
        s[i][j] = tx + 8 * j < n ? scale * s[i][j] : -INFINITY;
        m_new = fmaxf(m_new, s[i][j]);
      }
      m_new = row_max(m_new);
      const float shift = m_new == -INFINITY ? 0 : m_new;

      // (5) P_ij = exp(S_ij - m_new);  l = exp(m - m_new) l + rowsum P_ij
      // __expf: the hardware's exponential, less exact than expf; the tests' tolerance allows it
      const float rescale = __expf(m[i] - shift);
      float sum = 0;
      for (int j = 0; j < TK; ++j) {
        const float weight = __expf(s[i][j] - shift);
        Pij[r * Sizes::P_row + tx + 8 * j] = weight;
        sum += weight;
      }
      l[i] = rescale * l[i] + row_sum(sum);
      m[i] = m_new;
      for (int y = 0; y < columns; ++y)
        o[i][y] = make_float4(rescale * o[i][y].x, rescale * o[i][y].y, rescale * o[i][y].z,
                              rescale * o[i][y].w);
    }

    __syncthreads();  // K_j is no longer read
    load<D, Bc>(KVj, V, j0, cols, vectorised);
    // V_j is complete, and so is P_ij
    __syncthreads();

    // (6) O_i = exp(m - m_new) O_i + P_ij V_j
    // [step 04.5: add to o[i][y] the products of keys c ... c + 3 (16 lines)]
    // TODO
    // [end]
  }

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i
#pragma unroll
  for (int i = 0; i < TR; ++i) {
    const int r = r0 + 4 * i;
    if (r >= rows) continue;
    const float inverse = l[i] == 0 ? 0 : 1 / l[i];
    float* O = t.O.at(b, h, i0 + r);
    for (int y = 0; y < columns; ++y) {
      const int x = 4 * tx + 32 * y;
      const float four[] = {o[i][y].x * inverse, o[i][y].y * inverse, o[i][y].z * inverse,
                            o[i][y].w * inverse};
      if (vectorised && x < d)
        *reinterpret_cast<float4*>(O + x) = make_float4(four[0], four[1], four[2], four[3]);
      else
        for (int e = 0; e < 4; ++e)
          if (x + e < d) O[x + e] = four[e];
    }
    if (t.LSE && tx == 0) t.LSE[head * p.Nq + i0 + r] = m[i] + logf(l[i]);
  }
}

// Four numbers at once need addresses that are multiples of 16 bytes: the first and all strides.
template <class T>
bool aligned(const View<T>& v) {
  return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.batch % 4 == 0 &&
         v.head % 4 == 0 && v.row % 4 == 0;
}

template <int D>
void launch(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream) {
  const auto register_tiled = register_tiled_kernel<D>;
  const std::size_t bytes = Tile<D>::shared_bytes;
  allow_shared_memory(register_tiled, bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Tile<D>::Br - 1) / Tile<D>::Br);
  const bool vectorised =
      p.d % 4 == 0 && aligned(t.Q) && aligned(t.K) && aligned(t.V) && aligned(t.O);
  FA_LAUNCH(register_tiled, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, scale,
            vectorised);
}

}  // namespace

std::size_t register_tiled_shared_bytes(std::int64_t d) {
  return d <= 32   ? Tile<32>::shared_bytes
         : d <= 64 ? Tile<64>::shared_bytes
                   : Tile<128>::shared_bytes;
}

void launch_register_tiled(const Problem& p, const Forward<float>& t, float scale,
                           cudaStream_t stream) {
  (p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>)(p, t, scale, stream);
}

}  // namespace fa::cuda_forward
