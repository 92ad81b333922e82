// Practice 06, level 1, of beyond/packed/tiled.cu. Keep the marks; ./learn practice 06
// Stage 04's tiled kernel for sequences of different lengths, one behind the other in a tensor.
//
//   the tiles of queries of all sequences, and heads     a block each, by a list (sequence.cuh)
//   the rows r of the tile                               4 warps, 4 rows each: warp, then i
//   the keys c of a tile of keys                         a lane each: Bc = 32 = the width of a warp
//   the columns x of O                                   lanes again: x = lane, lane + 32, ...
//   the loop over tiles of keys                          still a loop, over those of the sequence
#include "06_optimized/beyond/packed/sequence.cuh"

namespace fa::packed {
namespace {

constexpr int lanes = 32, warps = 4, rows_per_warp = 4;
constexpr int Br = warps * rows_per_warp;  // 16 queries in a tile
constexpr int Bc = lanes;                  // 32 keys in a tile
constexpr int max_d = widest<float>;
constexpr int columns = max_d / lanes;  // of O that a lane owns

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

__global__ void tiled_kernel(Problem p, Forward<float> t, List list, float scale) {
  constexpr int pad = 1;  // without it all lanes would read K from the same bank
  __shared__ float Qi[Br][max_d], Kj[Bc][max_d + pad], Vj[Bc][max_d], Pij[Br][Bc];  // 42 KiB

  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const int n = int(blockIdx.x / unsigned(p.Hq));
  const Work& work = list.work[n];
  if (work.tile < 0) return;  // the host counts tiles that may be needed
  const std::int64_t b = 0, h = blockIdx.x % unsigned(p.Hq), all_queries = p.Nq;
  enter(work, p, t);
  std::int64_t i0 = 0;
  // [step 06.39: the first query of this block's tile, counted in its sequence (1 line)]
  // TODO
  // [end]
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const SequenceMask mask(work, p.causal);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);

  for (int r = warp; r < Br; r += warps)
    for (int x = lane; x < d; x += lanes) Qi[r][x] = r < rows ? Q[i0 + r][x] : 0;

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
        Kj[c][x] = c < cols ? K[j0 + c][x] : 0;
        Vj[c][x] = c < cols ? V[j0 + c][x] : 0;
      }
    __syncthreads();  // the tile is complete before anybody reads it

    // (3) S_ij = scale Q_i K_j^T: a key per lane, rows_per_warp rows for every number of K read
    float s[rows_per_warp] = {};
    for (int x = 0; x < d; ++x)
      for (int i = 0; i < rows_per_warp; ++i) s[i] += Qi[warp * rows_per_warp + i][x] * Kj[lane][x];

    for (int i = 0; i < rows_per_warp; ++i) {
      const int r = warp * rows_per_warp + i;
      const bool visible = j0 + lane < mask.visible_keys(i0 + min(r, rows - 1));
      s[i] = visible ? scale * s[i] : -INFINITY;

      // (4) m_new = max(m, rowmax S_ij)
      const float m_new = fmaxf(m[i], warp_max(s[i]));
      const float shift = m_new == -INFINITY ? 0 : m_new;  // no weight yet: any finite number

      // (5) P_ij = exp(S_ij - m_new);  l = exp(m - m_new) l + rowsum P_ij
      const float rescale = expf(m[i] - shift);
      const float weight = expf(s[i] - shift);
      Pij[r][lane] = weight;
      l[i] = rescale * l[i] + warp_sum(weight);
      m[i] = m_new;

      // (6) O_i = exp(m - m_new) O_i ...
      for (int y = 0; y < columns; ++y) o[i][y] *= rescale;
    }
    __syncwarp();  // a row of P_ij is written and read by the same warp

    // (6) ... + P_ij V_j: now a lane owns columns
    for (int c = 0; c < cols; ++c)
      for (int y = 0; y < columns && lanes * y < d; ++y)
        for (int i = 0; i < rows_per_warp; ++i)
          o[i][y] += Pij[warp * rows_per_warp + i][c] * Vj[c][lane + lanes * y];
  }

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i
  for (int i = 0; i < rows_per_warp; ++i) {
    const int r = warp * rows_per_warp + i;
    if (r >= rows) break;
    float* O = t.O.at(b, h, work.q0 + i0 + r);
    for (int y = 0; y < columns; ++y)
      if (const int x = lane + lanes * y; x < d) O[x] = l[i] == 0 ? 0 : o[i][y] / l[i];
    if (t.LSE && lane == 0) t.LSE[h * all_queries + work.q0 + i0 + r] = m[i] + logf(l[i]);
  }
}

}  // namespace

template <>
int forward_tile<float>(std::int64_t) {
  return Br;
}

void launch_tiled(const Problem& p, const Forward<float>& t, const List& list, float scale,
                  cudaStream_t stream) {
  const std::int64_t blocks = Side{false, Br}.most(p) * p.Hq;
  FA_LAUNCH(tiled_kernel, dim3(unsigned(blocks)), dim3(lanes * warps), 0, stream, p, t, list,
            scale);
}

}  // namespace fa::packed
