// Practice 06, level 1, of beyond/weights/columns.cu. Keep the marks; ./learn practice 06
// How much attention a key gets: c_j = sum_i P_ij. As in stage 05's dkv.cu a block owns keys and
// walks down the rows that see them, so a sum has one owner: no atomics, the same bits in each run.
#include "06_optimized/beyond/weights/weights.hpp"

namespace fa::weights {
namespace {

constexpr int lanes = 32, warps = 4, rows_per_warp = 4;
constexpr int Br = warps * rows_per_warp;  // 16 queries in a tile
constexpr int Bc = lanes;                  // 32 keys, a lane each
constexpr int max_d = widest<float>;

__global__ void columns_kernel(Problem p, Inputs<float> t, float* sums, float scale) {
  constexpr int pad = 1;  // without it all lanes would read K from the same bank
  __shared__ float Kj[Bc][max_d + pad], Qi[Br][max_d], of_warp[warps][Bc];

  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const std::int64_t tiles = (p.Nk + Bc - 1) / Bc, head = blockIdx.x / tiles;
  const std::int64_t b = head / p.Hq, h = head % p.Hq;
  const std::int64_t j0 = blockIdx.x % tiles * Bc;  // with a causal mask the first keys have most
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d);

  // (1) K_j stays. Padded keys are not even looked at.
  const std::int64_t seen = mask.length - j0;
  for (int c = warp; c < Bc; c += warps)
    for (int x = lane; x < d; x += lanes) Kj[c][x] = c < seen ? K[j0 + c][x] : 0;

  float sum = 0;  // of this lane's key, over the warp's rows
  // Rows before the first that sees key j0 see nothing of this tile.
  const std::int64_t first = mask.first_row(j0);
  for (std::int64_t i0 = first; i0 < p.Nq; i0 += Br) {
    const int rows = int(min(std::int64_t(Br), p.Nq - i0));
    __syncthreads();  // Q_i of the tile before is no longer read
    // (2) load Q_i
    for (int r = warp; r < Br; r += warps)
      for (int x = lane; x < d; x += lanes) Qi[r][x] = r < rows ? Q[i0 + r][x] : 0;
    __syncthreads();  // Q_i is complete, at first K_j too

    // (3) S_ij = scale Q_i K_j^T: a key per lane
    float s[rows_per_warp] = {};
    for (int x = 0; x < d; ++x)
      for (int i = 0; i < rows_per_warp; ++i) s[i] += Qi[warp * rows_per_warp + i][x] * Kj[lane][x];

    for (int i = 0; i < rows_per_warp; ++i) {
      const int r = warp * rows_per_warp + i;
      if (r >= rows) break;
      // (4) c_j += exp(S_ij - L_i), if row i sees j
      const float L = t.LSE[head * p.Nq + i0 + r];
      // [step 06.31: what row i0 + r adds to the sum of this lane's key (2 lines)]
      // TODO
      // [end]
    }
  }

  // (5) c_j of the four warps, added up
  of_warp[warp][lane] = sum;
  __syncthreads();  // all four are there
  if (warp > 0 || j0 + lane >= p.Nk) return;
  // Always in this order: the last bits depend on it.
  for (int w = 1; w < warps; ++w) sum += of_warp[w][lane];
  sums[head * p.Nk + j0 + lane] = sum;
}

}  // namespace

void launch_columns(const Problem& p, const Inputs<float>& t, float* sums, float scale,
                    cudaStream_t stream) {
  const std::int64_t blocks = p.B * p.Hq * ((p.Nk + Bc - 1) / Bc);
  FA_LAUNCH(columns_kernel, dim3(unsigned(blocks)), dim3(lanes * warps), 0, stream, p, t, sums,
            scale);
}

}  // namespace fa::weights
