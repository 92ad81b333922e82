// Practice 06, level 1, of beyond/decode/tiled.cu. Keep the marks; ./learn practice 06
// Stage 04's tiled kernel for one to eight new queries a sequence: a block has a part of the keys
// of one key head, and the rows of its tile are the queries of all heads of the group.
//
//   the tiles of rows, the parts of the keys, heads and batches    a block each (Work)
//   the rows r of the tile                               4 warps, 4 rows each: warp, then i
//   the keys c of a tile of keys                         a lane each: Bc = 32 = the width of a warp
//   the columns x of O                                   lanes again: x = lane, lane + 32, ...
//   the loop over tiles of keys                          still a loop, over those of the part
#include "06_optimized/beyond/decode/cache.cuh"

namespace fa::decode {
namespace {

constexpr int lanes = 32, warps = 4, rows_per_warp = 4;
constexpr int Br = warps * rows_per_warp;  // 16 rows in a tile
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

__global__ void tiled_kernel(Problem p, Tensors<float> t, Parts parts, float scale, bool causal) {
  constexpr int pad = 1;  // without it all lanes would read K from the same bank
  __shared__ float Qi[Br][max_d], Kj[Bc][max_d + pad], Vj[Bc][max_d], Pij[Br][Bc];  // 42 KiB

  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  merge_may_start();
  const Work at(p, Br, parts.splits, blockIdx.x);
  const int rows = at.rows;
  const Mask mask = mask_of(p, at.b, causal);
  const Keys<float> K(p, t, t.cache.K, t.new_K, at, mask), V(p, t, t.cache.V, t.new_V, at, mask);
  // One block of all that share a key head. Nobody waits for it: new keys are read where they are.
  if (at.split == 0 && at.first == 0) append(p, K, V);

  for (int r = warp; r < Br; r += warps)
    for (int x = lane; x < d; x += lanes)
      Qi[r][x] = r < rows ? t.Q.at(at.b, at.head(p, r), at.query(p, r))[x] : 0;

  // (1) O_i = 0, l_i = 0, m_i = -infinity; m and l are the same in all lanes of a warp
  float m[rows_per_warp], l[rows_per_warp], o[rows_per_warp][columns];
  for (int i = 0; i < rows_per_warp; ++i) {
    m[i] = -INFINITY;
    l[i] = 0;
    for (int y = 0; y < columns; ++y) o[i][y] = 0;
  }

  // The part's tiles of keys. Those of the sequence, not of Nk: its parts are of equal size.
  std::int64_t first = 0, end = 0;
  // [step 06.27: of all tiles, the part's first key, and the key behind its last one (3 lines)]
  // TODO
  // [end]
  for (std::int64_t j0 = first; j0 < end; j0 += Bc) {
    const int cols = int(min(std::int64_t(Bc), end - j0));

    __syncthreads();  // no warp may still be reading the previous tile
    // (2) load K_j and V_j: neighbouring lanes read neighbouring addresses
    for (int c = warp; c < Bc; c += warps)
      for (int x = lane; x < d; x += lanes) {
        Kj[c][x] = c < cols ? K[int(j0) + c][x] : 0;
        Vj[c][x] = c < cols ? V[int(j0) + c][x] : 0;
      }
    __syncthreads();  // the tile is complete before anybody reads it

    // (3) S_ij = scale Q_i K_j^T: a key per lane, rows_per_warp rows for every number of K read
    float s[rows_per_warp] = {};
    for (int x = 0; x < d; ++x)
      for (int i = 0; i < rows_per_warp; ++i) s[i] += Qi[warp * rows_per_warp + i][x] * Kj[lane][x];

    for (int i = 0; i < rows_per_warp; ++i) {
      const int r = warp * rows_per_warp + i;
      bool visible = false;
      // [step 06.28: which query is row r, and does it see this lane's key? (2 lines)]
      // TODO
      // [end]
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

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i: of the part, or of all if it is the only one
  for (int i = 0; i < rows_per_warp; ++i) {
    const int r = warp * rows_per_warp + i;
    if (r >= rows) break;
    const std::int64_t row = at.row(p, r), before = at.split * (p.B * p.Hq * p.Nq);
    const bool whole = parts.splits == 1;
    float* O = whole ? t.O.at(at.b, at.head(p, r), at.query(p, r)) : parts.O + (before + row) * d;
    float* L = whole ? t.LSE : parts.L + before;
    for (int y = 0; y < columns; ++y)
      if (const int x = lane + lanes * y; x < d) O[x] = l[i] == 0 ? 0 : o[i][y] / l[i];
    if (L && lane == 0) L[row] = m[i] + logf(l[i]);
  }
}

}  // namespace

template <>
Shape shape<float>(const Problem&) {
  return {Br, Bc, blocks_of_an_sm(tiled_kernel, lanes * warps, 0, 4)};
}

void launch_tiled(const Problem& p, const Tensors<float>& t, const Parts& parts, float scale,
                  bool causal, cudaStream_t stream) {
  const std::int64_t blocks = p.B * p.Hkv * parts.splits * row_tiles(p, Br);
  FA_LAUNCH(tiled_kernel, dim3(unsigned(blocks)), dim3(lanes * warps), 0, stream, p, t, parts,
            scale, causal);
}

}  // namespace fa::decode
