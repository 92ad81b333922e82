// K_j and V_j share one buffer: V_j is loaded when nobody reads K_j any more. That takes two more
// barriers for each tile of keys, and less shared memory, so that more blocks fit an SM.
//
//   a warp      16 rows of Q_i; its lanes lie in 4 rows (ty) of 8 (tx)
//   a thread    rows ty + 4 i, keys tx + 8 j, columns tx + 8 y
#include "04_cuda_forward/cuda_forward.hpp"

namespace fa::cuda_forward {
namespace {

constexpr int lanes = 32, warps = 4, threads = lanes * warps;

template <int D>
struct Shape {
  static constexpr int TR = 4, TK = 8;               // rows and keys of a thread
  static constexpr int Br = warps * 4 * TR;          // 64 queries in a tile
  static constexpr int Bc = 8 * TK;                  // 64 keys in a tile
  static constexpr int columns = D / 8;              // of O that a thread owns
  static constexpr int row = D + 1, P_row = Bc + 8;  // padded
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

template <int D>
__global__ void __launch_bounds__(threads)
    one_buffer_kernel(Problem p, Forward<float> t, float scale) {
  using C = Shape<D>;
  constexpr int TR = C::TR, TK = C::TK, Br = C::Br, Bc = C::Bc, columns = C::columns;
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const int ty = lane / 8, tx = lane % 8;
  float* const Qi = dynamic_shared<float>();  // [Br, row]
  float* const KVj = Qi + Br * C::row;        // [Bc, row]: first K_j, then V_j
  float* const Pij = KVj + Bc * C::row;       // [Br, P_row]

  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);
  const auto row = [&](int i) { return warp * 4 * TR + ty + 4 * i; };  // this thread's, i < TR

  for (int r = warp; r < Br; r += warps)
    for (int x = lane; x < D; x += lanes) Qi[r * C::row + x] = r < rows && x < d ? Q[i0 + r][x] : 0;

  // (1) O_i = 0, l_i = 0, m_i = -infinity; m and l are the same in all lanes of a row
  float m[TR], l[TR], o[TR][columns];
  for (int i = 0; i < TR; ++i) {
    m[i] = -INFINITY;
    l[i] = 0;
    for (int y = 0; y < columns; ++y) o[i][y] = 0;
  }

  // The last row of the tile sees most: tiles of keys beyond that are skipped, not masked.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  for (std::int64_t j0 = 0; j0 < end; j0 += Bc) {
    const int cols = int(min(std::int64_t(Bc), end - j0));

    __syncthreads();  // V of the previous tile is no longer read
    // (2) load K_j: neighbouring lanes read neighbouring addresses
    for (int c = warp; c < Bc; c += warps)
      for (int x = lane; x < D; x += lanes)
        KVj[c * C::row + x] = c < cols && x < d ? K[j0 + c][x] : 0;
    __syncthreads();  // K_j, and before the first tile Q_i, are complete

    // (3) S_ij = scale Q_i K_j^T: TR + TK numbers are read for TR TK multiply-adds
    // [quote scores]
    float s[TR][TK] = {};
    for (int x = 0; x < D; ++x)
      for (int j = 0; j < TK; ++j)
        for (int i = 0; i < TR; ++i)
          s[i][j] += Qi[row(i) * C::row + x] * KVj[(tx + 8 * j) * C::row + x];
    // [end quote]

    for (int i = 0; i < TR; ++i) {
      const int n = int(mask.visible_keys(i0 + min(row(i), rows - 1)) - j0);

      // (4) m_new = max(m, rowmax S_ij)
      float m_new = m[i];
      for (int j = 0; j < TK; ++j) {
        s[i][j] = tx + 8 * j < n ? scale * s[i][j] : -INFINITY;
        m_new = fmaxf(m_new, s[i][j]);
      }
      m_new = row_max(m_new);
      const float shift = m_new == -INFINITY ? 0 : m_new;  // no weight yet: any finite number

      // (5) P_ij = exp(S_ij - m_new);  l = exp(m - m_new) l + rowsum P_ij
      const float rescale = expf(m[i] - shift);
      float sum = 0;
      for (int j = 0; j < TK; ++j) {
        const float weight = expf(s[i][j] - shift);
        Pij[row(i) * C::P_row + tx + 8 * j] = weight;
        sum += weight;
      }
      l[i] = rescale * l[i] + row_sum(sum);
      m[i] = m_new;

      // (6) O_i = exp(m - m_new) O_i ...
      for (int y = 0; y < columns; ++y) o[i][y] *= rescale;
    }
    // [quote barriers]
    __syncthreads();  // K_j is no longer read
    for (int c = warp; c < Bc; c += warps)
      for (int x = lane; x < D; x += lanes)
        KVj[c * C::row + x] = c < cols && x < d ? V[j0 + c][x] : 0;
    __syncthreads();  // V_j is complete, and so is P_ij
    // [end quote]

    // (6) ... + P_ij V_j: now tx stands for columns
    for (int c = 0; c < Bc; ++c)
      for (int y = 0; y < columns; ++y)
        for (int i = 0; i < TR; ++i)
          o[i][y] += Pij[row(i) * C::P_row + c] * KVj[c * C::row + tx + 8 * y];
  }

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i
  for (int i = 0; i < TR; ++i) {
    const int r = row(i);
    if (r >= rows) break;
    float* O = t.O.at(b, h, i0 + r);
    for (int y = 0; y < columns; ++y)
      if (const int x = tx + 8 * y; x < d) O[x] = l[i] == 0 ? 0 : o[i][y] / l[i];
    if (t.LSE && tx == 0) t.LSE[head * p.Nq + i0 + r] = m[i] + logf(l[i]);
  }
}

template <int D>
void launch(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream) {
  const auto kernel = one_buffer_kernel<D>;
  allow_shared_memory(kernel, Shape<D>::bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Shape<D>::Br - 1) / Shape<D>::Br);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), Shape<D>::bytes, stream, p, t, scale);
}

}  // namespace

std::size_t one_buffer_shared_bytes(std::int64_t d) {
  return d <= 32 ? Shape<32>::bytes : d <= 64 ? Shape<64>::bytes : Shape<128>::bytes;
}
void launch_one_buffer(const Problem& p, const Forward<float>& t, float scale,
                       cudaStream_t stream) {
  (p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>)(p, t, scale, stream);
}

}  // namespace fa::cuda_forward
