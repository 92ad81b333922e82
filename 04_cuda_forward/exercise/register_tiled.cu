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
#include "common/core/tiles.cuh"

namespace fa::cuda_forward {
namespace {

constexpr int lanes = 32, warps = 4, threads = lanes * warps;

// Tiles and padded rows for a head dimension of at most D. Rows of the shared tiles are padded so
// that what 8 lanes read or write at once lies in different banks.
template <int D>
struct Shape {
  static constexpr int TR = 4, TK = 8;       // rows and keys of a thread
  static constexpr int Br = warps * 4 * TR;  // 64 queries
  static constexpr int Bc = 8 * TK;          // 64 keys
  static constexpr int columns = D / 8;      // of O of a thread
  static constexpr int pad = 4;
  static constexpr int P_pad = 8;
  static constexpr int row = D + pad, P_row = Bc + P_pad;
  static constexpr std::size_t bytes = sizeof(float) * ((Br + Bc) * row + Br * P_row);
};

// Combines the 8 lanes that share a row.
__device__ float row_max(float x) {
  for (int bits = 4; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ float row_sum(float x) {
  for (int bits = 4; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}

template <int D, bool vectorised>
__global__ void __launch_bounds__(threads, D <= 64 ? 4 : 2)
    register_tiled_kernel(Problem p, Forward<float> t, float scale) {
  using C = Shape<D>;
  constexpr int TR = C::TR, TK = C::TK, Br = C::Br, Bc = C::Bc, columns = C::columns;
  float* const Qi = dynamic_shared<float>();  // [Br, row]
  float* const KVj = Qi + Br * C::row;        // [Bc, row]: first K_j, then V_j
  float* const Pij = KVj + Bc * C::row;       // [Br, P_row]

  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const int ty = lane / 8, tx = lane % 8;
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);
  const auto row = [&](int i) { return warp * 4 * TR + ty + 4 * i; };  // this thread's, i < TR

  load_tile<threads, D, Br, 1, vectorised>(Qi, Q, i0, rows);

  // (1) O_i = 0, l_i = 0, m_i = -infinity
  float m[TR], l[TR], o[TR][columns];
  for (int i = 0; i < TR; ++i) {
    m[i] = -INFINITY;
    l[i] = 0;
    for (int x = 0; x < columns; ++x) o[i][x] = 0;
  }

  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const int cols = int(min(std::int64_t(Bc), end - j0));
    __syncthreads();  // V of the previous tile is no longer read
    // (2) load K_j
    load_tile<threads, D, Bc, 1, vectorised>(KVj, K, j0, cols);
    __syncthreads();  // K_j, and before the first tile Q_i, are complete

    // (3) S_ij = scale Q_i K_j^T
    float s[TR][TK] = {};
    // [step 04.4: add to s[i][j] columns x to x + 3 of row(i) times key tx + 8 j (14 lines)]
    // TODO
    // [end]

    // Masks cost nothing on full tiles: the first row of the tile sees least.
    const bool full = mask.visible_keys(i0) >= j0 + Bc;
    for (int i = 0; i < TR; ++i) {
      const int n = full ? Bc : int(mask.visible_keys(i0 + min(row(i), rows - 1)) - j0);

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
        Pij[row(i) * C::P_row + tx + 8 * j] = weight;
        sum += weight;
      }
      l[i] = rescale * l[i] + row_sum(sum);
      m[i] = m_new;
      for (int x = 0; x < columns; ++x) o[i][x] *= rescale;
    }

    __syncthreads();  // K_j is no longer read
    load_tile<threads, D, Bc, 1, vectorised>(KVj, V, j0, cols);
    // V_j is complete, and so is P_ij
    __syncthreads();

    // (6) O_i = exp(m - m_new) O_i + P_ij V_j
    // [step 04.5: add to o[i][x] ... o[i][x + 3] the products of keys c ... c + 3 (16 lines)]
    // TODO
    // [end]
  }

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i
  for (int i = 0; i < TR; ++i) {
    const int r = row(i);
    if (r >= rows) continue;
    const float inverse = l[i] == 0 ? 0 : 1 / l[i];
    float* const O = t.O.at(b, h, i0 + r);
    for (int x = 0; x < columns; x += 4)
      store_columns<vectorised>(O, 4 * tx + 8 * x, d, o[i] + x, inverse);
    if (t.LSE && tx == 0) t.LSE[head * p.Nq + i0 + r] = m[i] + logf(l[i]);
  }
}

template <int D>
void launch(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream) {
  const auto kernel =
      aligned(p, t) ? register_tiled_kernel<D, true> : register_tiled_kernel<D, false>;
  allow_shared_memory(kernel, Shape<D>::bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Shape<D>::Br - 1) / Shape<D>::Br);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), Shape<D>::bytes, stream, p, t, scale);
}

}  // namespace

std::size_t register_tiled_shared_bytes(std::int64_t d) {
  return d <= 32 ? Shape<32>::bytes : d <= 64 ? Shape<64>::bytes : Shape<128>::bytes;
}

void launch_register_tiled(const Problem& p, const Forward<float>& t, float scale,
                           cudaStream_t stream) {
  (p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>)(p, t, scale, stream);
}

}  // namespace fa::cuda_forward
