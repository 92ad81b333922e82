// Stage 04's tiled kernel, and between a product and the softmax the score is changed. Rotary
// positions come in earlier, where Q and K are loaded.
//
//   the loop over tiles of queries, heads and batches    one block each: blockIdx.x
//   the rows r of the tile                               4 warps, 4 rows each: warp, then i
//   the keys c of a tile of keys                         a lane each: Bc = 32 = the width of a warp
//   the columns x of O                                   lanes again: x = lane, lane + 32, ...
//   the loop over tiles of keys                          still a loop: m, l and O are carried by it
#include "06_optimized/beyond/scores/change.cuh"

namespace fa::scores {
namespace {

constexpr int lanes = 32, warps = 4, rows_per_warp = 4;
constexpr int Br = warps * rows_per_warp;  // 16 queries in a tile
constexpr int Bc = lanes;                  // 32 keys in a tile
constexpr int max_d = widest<float>;
constexpr int columns = max_d / lanes;  // of O that a lane owns

// [blank]
// What every lane holds, combined for all of the warp: after n steps a lane knows 2^n values.
__device__ float warp_max(float x) {
  for (int bits = lanes / 2; bits > 0; bits /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, bits));
  return x;
}
__device__ float warp_sum(float x) {
  for (int bits = lanes / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(0xffffffff, x, bits);
  return x;
}
// [end blank]

// [quote kernel]
__global__ void tiled_kernel(Problem p, Forward<float> t, Change<float> change, float scale) {
  // [blank]
  constexpr int pad = 1;  // without it all lanes would read K from the same bank
  __shared__ float Qi[Br][max_d], Kj[Bc][max_d + pad], Vj[Bc][max_d], Pij[Br][Bc];  // 42 KiB

  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const std::int64_t tiles = (p.Nq + Br - 1) / Br, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = (tiles - 1 - blockIdx.x % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);
  const bool has_cap = change.parts & with_cap, has_alibi = change.parts & with_alibi,
             has_bias = change.parts & with_bias;
  const float slope = has_alibi ? change.slopes[b * change.slopes_batch + h] : 0;

  for (int r = warp; r < Br; r += warps)
    for (int x = lane; x < d; x += lanes)
      Qi[r][x] = r < rows ? turned(change.rotary, Q[i0 + r], x, i0 + r + change.offset) : 0;

  // (1) O_i = 0, l_i = 0, m_i = -infinity; m and l are the same in all lanes of a warp
  float m[rows_per_warp], l[rows_per_warp], o[rows_per_warp][columns];
  for (int i = 0; i < rows_per_warp; ++i) {
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
        Kj[c][x] = c < cols ? turned(change.rotary, K[j0 + c], x, j0 + c) : 0;
        Vj[c][x] = c < cols ? V[j0 + c][x] : 0;
      }
    __syncthreads();  // the tile is complete before anybody reads it

    // (3) S_ij = scale Q_i K_j^T: a key per lane, rows_per_warp rows for every number of K read
    float s[rows_per_warp] = {};
    for (int x = 0; x < d; ++x)
      for (int i = 0; i < rows_per_warp; ++i) s[i] += Qi[warp * rows_per_warp + i][x] * Kj[lane][x];

    for (int i = 0; i < rows_per_warp; ++i) {
      const int r = warp * rows_per_warp + i;
      const std::int64_t row = i0 + min(r, rows - 1), key = j0 + lane;
      const bool visible = key < mask.visible_keys(row);
      s[i] = visible ? scale * s[i] : -INFINITY;
      // (4) s = cap tanh(s / cap) - slope_h |i + offset - j| + bias_ij
      if (visible) {
        // [step 06.36 (4): no score beyond the cap, if there is one (1 line)]
        if (has_cap) s[i] = change.cap * tanhf(s[i] / change.cap);
        // [end]
        // [step 06.37 (4): keys far from the query count less, on both sides (1 line)]
        if (has_alibi) s[i] -= slope * fabsf(float(row + change.offset - key));
        // [end]
        if (has_bias) s[i] += change.bias.at(b, h, row)[key];
      }

      // (5) m_new = max(m, rowmax S_ij)
      const float m_new = fmaxf(m[i], warp_max(s[i]));
      const float shift = m_new == -INFINITY ? 0 : m_new;  // no weight yet: any finite number

      // (6) P_ij = exp(S_ij - m_new);  l = exp(m - m_new) l + rowsum P_ij
      const float rescale = expf(m[i] - shift);
      const float weight = expf(s[i] - shift);
      Pij[r][lane] = weight;
      l[i] = rescale * l[i] + warp_sum(weight);
      m[i] = m_new;

      // (7) O_i = exp(m - m_new) O_i ...
      for (int y = 0; y < columns; ++y) o[i][y] *= rescale;
    }
    __syncwarp();  // a row of P_ij is written and read by the same warp

    // (7) ... + P_ij V_j: now a lane owns columns
    for (int c = 0; c < cols; ++c)
      for (int y = 0; y < columns && lanes * y < d; ++y)
        for (int i = 0; i < rows_per_warp; ++i)
          o[i][y] += Pij[warp * rows_per_warp + i][c] * Vj[c][lane + lanes * y];
  }

  // (8) O_i = O_i / l_i;  L_i = m_i + log l_i
  for (int i = 0; i < rows_per_warp; ++i) {
    const int r = warp * rows_per_warp + i;
    if (r >= rows) break;
    float* O = t.O.at(b, h, i0 + r);
    for (int y = 0; y < columns; ++y)
      if (const int x = lane + lanes * y; x < d) O[x] = l[i] == 0 ? 0 : o[i][y] / l[i];
    if (t.LSE && lane == 0) t.LSE[head * p.Nq + i0 + r] = m[i] + logf(l[i]);
  }
  // [end blank]
}
// [end quote]

}  // namespace

void launch_tiled(const Problem& p, const Forward<float>& t, const Change<float>& change,
                  float scale, cudaStream_t stream) {
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Br - 1) / Br);
  FA_LAUNCH(tiled_kernel, dim3(unsigned(blocks)), dim3(lanes * warps), 0, stream, p, t, change,
            scale);
}

}  // namespace fa::scores
