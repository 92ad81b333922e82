// A thread holds a tile of 4 x 8 scores, and of the outputs 4 rows of D / 8. A number of Q or of
// the weights that it reads from shared memory serves 8 multiply-adds and more, a number of K or V
// serves 4. In tiled.cu they serve one and four.
//
//   a warp      16 rows of Q_i; its lanes lie in 4 rows (ty) of 8 (tx)
//   a thread    rows ty + 4 i, keys tx + 8 j, columns tx + 8 y
#include "04_cuda_forward/cuda_forward.hpp"

namespace fa::cuda_forward {
namespace {

constexpr int lanes = 32, warps = 4, TR = 4, TK = 8;  // TR rows and TK keys a thread
constexpr int Br = warps * 4 * TR;                    // 64 queries in a tile
constexpr int Bc = 8 * TK;                            // 64 keys in a tile
constexpr int columns = max_d / 8;                    // of O that a thread owns
constexpr int pad = 1, P_row = Bc + 8;                // rows are d + pad and P_row numbers apart

// Combines the 8 lanes that share a row.
__device__ float row_max(float x) {
  for (int bits = 4; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ float row_sum(float x) {
  for (int bits = 4; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}

__global__ void thread_tile_kernel(Problem p, Forward<float> t, float scale) {
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const int ty = lane / 8, tx = lane % 8, width = d + pad;
  float* const Qi = dynamic_shared<float>();  // [Br, width]
  float* const Kj = Qi + Br * width;          // [Bc, width]
  float* const Vj = Kj + Bc * width;          // [Bc, width]
  float* const Pij = Vj + Bc * width;         // [Br, P_row]

  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);
  const auto row = [&](int i) { return warp * 4 * TR + ty + 4 * i; };  // this thread's, i < TR

  for (int r = warp; r < Br; r += warps)
    for (int x = lane; x < d; x += lanes) Qi[r * width + x] = r < rows ? Q[i0 + r][x] : 0;

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

    __syncthreads();  // no warp may still be reading the previous tile
    // (2) load K_j and V_j: neighbouring lanes read neighbouring addresses
    for (int c = warp; c < Bc; c += warps)
      for (int x = lane; x < d; x += lanes) {
        Kj[c * width + x] = c < cols ? K[j0 + c][x] : 0;
        Vj[c * width + x] = c < cols ? V[j0 + c][x] : 0;
      }
    __syncthreads();  // the tile is complete before anybody reads it

    // (3) S_ij = scale Q_i K_j^T: TR + TK numbers are read for TR TK multiply-adds
    // [quote scores]
    float s[TR][TK] = {};
    for (int x = 0; x < d; ++x)
      for (int j = 0; j < TK; ++j)
        for (int i = 0; i < TR; ++i)
          s[i][j] += Qi[row(i) * width + x] * Kj[(tx + 8 * j) * width + x];
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
        Pij[row(i) * P_row + tx + 8 * j] = weight;
        sum += weight;
      }
      l[i] = rescale * l[i] + row_sum(sum);
      m[i] = m_new;

      // (6) O_i = exp(m - m_new) O_i ...
      for (int y = 0; y < columns; ++y) o[i][y] *= rescale;
    }
    __syncwarp();  // a row of P_ij is written and read by the same warp

    // (6) ... + P_ij V_j: now tx stands for columns
    for (int c = 0; c < cols; ++c)
      for (int y = 0; y < columns && tx + 8 * y < d; ++y)
        for (int i = 0; i < TR; ++i)
          o[i][y] += Pij[row(i) * P_row + c] * Vj[c * width + tx + 8 * y];
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

}  // namespace

std::size_t thread_tile_shared_bytes(std::int64_t d) {
  return sizeof(float) * ((Br + 2 * Bc) * (d + pad) + Br * P_row);
}
void launch_thread_tile(const Problem& p, const Forward<float>& t, float scale,
                        cudaStream_t stream) {
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  const std::size_t bytes = thread_tile_shared_bytes(p.d);
  allow_shared_memory(thread_tile_kernel, bytes);
  FA_LAUNCH(thread_tile_kernel, dim3(unsigned(blocks)), dim3(lanes * warps), bytes, stream, p, t,
            scale);
}

}  // namespace fa::cuda_forward
