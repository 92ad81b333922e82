// Stage 04's tiled kernel, which stops where the weights are: with the L that a forward has
// returned there is no m, no l and no rescaling, and without V no O.
//
//   the tiles of rows, parts of the keys, heads, batches one block each: blockIdx.x
//   the rows r of the tile                               4 warps, 4 rows each: warp, then i
//   the keys c of a tile of keys                         a lane each: Bc = 32 = the width of a warp
//   the loop over tiles of keys                          still a loop, with nothing to carry but a
//                                                        list, if the largest are wanted
#include "06_optimized/beyond/weights/list.cuh"

namespace fa::weights {
namespace {

constexpr int lanes = 32, warps = 4, rows_per_warp = 4;
constexpr int Br = warps * rows_per_warp;  // 16 queries in a tile
constexpr int Bc = lanes;                  // 32 keys in a tile
constexpr int max_d = widest<float>;

// [quote kernel]
__global__ void tiled_kernel(Problem p, Inputs<float> t, Wanted wanted, float scale) {
  // [blank]
  constexpr int pad = 1;  // without it all lanes would read K from the same bank
  __shared__ float Qi[Br][max_d], Kj[Bc][max_d + pad];  // 24 KiB

  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const Box box = wanted.box;
  const std::int64_t part = blockIdx.x % wanted.parts(), tile = blockIdx.x / wanted.parts();
  const std::int64_t tiles = (box.rows + Br - 1) / Br, head = tile / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t i0 = box.i0 + (tiles - 1 - tile % tiles) * Br;  // the longest rows first
  const int rows = int(min(std::int64_t(Br), box.i0 + box.rows - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d);

  for (int r = warp; r < Br; r += warps)
    for (int x = lane; x < d; x += lanes) Qi[r][x] = r < rows ? Q[i0 + r][x] : 0;

  // (1) L_i, and how many keys the row sees; the same in all lanes of a warp
  float L[rows_per_warp];
  std::int64_t sees[rows_per_warp];
  Rank best[rows_per_warp] = {};
  for (int i = 0; i < rows_per_warp; ++i) {
    const int r = min(warp * rows_per_warp + i, rows - 1);
    L[i] = t.LSE[head * p.Nq + i0 + r];
    sees[i] = L[i] == -INFINITY ? 0 : mask.visible_keys(i0 + r);
  }

  // The last row of the tile sees most: keys beyond that are not read. Their weights are 0, and
  // none of them is among the largest.
  const std::int64_t end = mask.visible_keys(i0 + rows - 1);
  const std::int64_t first = box.j0 + part * wanted.keys_of_a_block();
  const std::int64_t last = min(first + wanted.keys_of_a_block(), box.j0 + box.cols);
  for (std::int64_t j0 = first; j0 < (wanted.k ? min(last, end) : last); j0 += Bc) {
    const std::int64_t cols = min(std::int64_t(Bc), end - j0);  // may be negative

    __syncthreads();  // no warp may still be reading the previous tile
    // (2) load K_j: neighbouring lanes read neighbouring addresses
    for (int c = warp; c < Bc; c += warps)
      for (int x = lane; x < d; x += lanes) Kj[c][x] = c < cols ? K[j0 + c][x] : 0;
    __syncthreads();  // the tile is complete before anybody reads it

    // (3) S_ij = scale Q_i K_j^T: a key per lane, rows_per_warp rows for every number of K read
    float s[rows_per_warp] = {};
    for (int x = 0; x < d; ++x)
      for (int i = 0; i < rows_per_warp; ++i) s[i] += Qi[warp * rows_per_warp + i][x] * Kj[lane][x];

    for (int i = 0; i < rows_per_warp; ++i) {
      const int r = warp * rows_per_warp + i;
      // (4) P_ij = exp(S_ij - L_i), 0 where row i does not see j
      bool visible = false;
      float weight = 0;
      // [step 06.30 (4): does the row see this lane's key, and with what weight? (2 lines)]
      visible = j0 + lane < sees[i];
      if (visible) weight = expf(scale * s[i] - L[i]);
      // [end]

      // (5) written, or offered to the row's list
      const Rank rank = visible ? rank_of(weight, j0 + lane) : 0;
      if (wanted.k)
        best[i] = with_offers(best[i], rank, wanted.k);
      else if (r < rows && j0 + lane < last)
        wanted.P.at(b, h, i0 - box.i0 + r)[j0 - box.j0 + lane] = weight;
    }
  }

  // (6) the lists: lane n has the n-th
  for (int i = 0; i < rows_per_warp; ++i) {
    const int r = warp * rows_per_warp + i;
    if (r >= rows || lane >= wanted.k) break;
    wanted.P.at(b, h, i0 - box.i0 + r)[lane] = weight_of(best[i]);
    wanted.keys.at(b, h, i0 - box.i0 + r)[lane] = key_of(best[i]);
  }
  // [end blank]
}
// [end quote]

}  // namespace

void launch_tiled(const Problem& p, const Inputs<float>& t, const Wanted& wanted, float scale,
                  cudaStream_t stream) {
  const std::int64_t blocks = p.B * p.Hq * ((wanted.box.rows + Br - 1) / Br) * wanted.parts();
  FA_LAUNCH(tiled_kernel, dim3(unsigned(blocks)), dim3(lanes * warps), 0, stream, p, t, wanted,
            scale);
}

}  // namespace fa::weights
