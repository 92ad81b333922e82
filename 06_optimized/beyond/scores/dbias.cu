// The gradient by the bias: dbias_ij = sum of P_ij (dP_ij - D_i) over all that share it, batch
// entries, heads and, if it has one row, rows. A block owns a tile of dbias and goes through them,
// always in the same order: no atomics. It is the owner of dQ without its last product.
#include "06_optimized/beyond/scores/tile.cuh"

namespace fa::scores {
namespace {

using namespace fp32;

// [quote kernel]
template <class Tile>
__global__ void __launch_bounds__(threads, 2)
    dbias_kernel(Problem p, Backward<float> t, Change<float> change, View<float> dbias, float scale,
                 const float* D_rows, bool vectorised) {
  constexpr int TR = Tile::TR, TK = Tile::TK, Br = Tile::rows, Bc = Tile::cols;
  float* Qi = dynamic_shared<float>();      // [Br, pitch]
  float* dOi = Qi + Br * Tile::pitch;       // [Br, pitch]
  float* KVj = dOi + Br * Tile::pitch;      // [Bc, pitch]: first V_j, then K_j
  float* columns = KVj + Bc * Tile::pitch;  // [warps, Bc]: at the end

  const int tx = threadIdx.x % 8, r0 = threadIdx.x / 32 * 4 * TR + threadIdx.x % 32 / 8;
  const int d = int(p.d);
  const Shared share(p, dbias, Br, Bc, blockIdx.x);
  const std::int64_t j0 = share.j0;
  const int keys = int(min(std::int64_t(Bc), p.Nk - j0));

  float sum[TR][TK] = {};
  for (std::int64_t b = share.b; b < share.b_end; ++b)
    for (std::int64_t h = share.h; h < share.h_end; ++h) {
      const Mask mask(p, b);
      const std::int64_t head = b * p.Hq + h, hk = p.key_head(h);
      const Head<with_all, float> of_head(change, b, h);
      for (std::int64_t i0 = share.i; i0 < share.i_end; i0 += Br) {
        const int rows = int(min(std::int64_t(Br), p.Nq - i0));
        const int seen = int(min(std::int64_t(keys), mask.visible_keys(i0 + rows - 1) - j0));
        if (seen <= 0) continue;  // by no row of the tile
        __syncthreads();          // the tiles before are no longer read
        load_turned<Tile, Br>(Qi, t.Q.rows(b, h, p.Nq, d), i0, rows, change.rotary, change.offset);
        load<Tile, Br>(dOi, t.dO.rows(b, h, p.Nq, d), i0, rows, vectorised);
        load<Tile, Bc>(KVj, t.V.rows(b, hk, p.Nk, d), j0, seen, vectorised);
        __syncthreads();  // Q_i, dO_i and V_j are complete
        float dP[TR][TK], S[TR][TK];
        product<Tile>(dP, dOi, KVj, r0);
        __syncthreads();  // V_j is no longer read
        load_turned<Tile, Bc>(KVj, t.K.rows(b, hk, p.Nk, d), j0, seen, change.rotary, 0);
        __syncthreads();  // K_j is complete
        product<Tile>(S, Qi, KVj, r0);
        for (int i = 0; i < TR; ++i) {
          const int r = r0 + 4 * i, query = int(i0) + min(r, rows - 1);
          const std::int64_t row = head * p.Nq + query;
          const float L = t.LSE[row], D_i = D_rows[row];
          const int n = r >= rows || L == -INFINITY
                            ? 0
                            : int(min(std::int64_t(seen), mask.visible_keys(query) - j0));
          const Line<with_all, float> line(change, of_head, query, int(j0));
          for (int j = 0; j < TK; ++j) {
            const int x = tx + 8 * j;
            const float s = line.changed(scale * S[i][j], x, line.bias_at(x, n));
            const float P = x < n ? __expf(s - L) : 0;
            // dbias_ij += P_ij (dP_ij - D_i)
            if (P != 0) sum[i][j] += P * (dP[i][j] - D_i);
          }
        }
      }
    }

  if (dbias.row != 0) {
    for (int i = 0; i < TR; ++i)
      for (int j = 0; j < TK; ++j)
        if (const int r = r0 + 4 * i, x = tx + 8 * j; share.i + r < p.Nq && x < keys)
          dbias.at(share.b, share.h, share.i + r)[j0 + x] = sum[i][j];
    return;
  }
  // One row for all: the sums of columns, first in a warp, then of the four warps.
  for (int j = 0; j < TK; ++j) {
    float column = 0;
    for (int i = 0; i < TR; ++i) column += sum[i][j];
    for (int bits = 8; bits < 32; bits *= 2) column += __shfl_xor_sync(0xffffffff, column, bits);
    if (threadIdx.x % 32 < 8) columns[threadIdx.x / 32 * Bc + tx + 8 * j] = column;
  }
  __syncthreads();  // all four are there
  const int x = threadIdx.x;
  if (x >= keys) return;
  float column = 0;
  for (int w = 0; w < warps; ++w) column += columns[w * Bc + x];
  dbias.at(share.b, share.h)[j0 + x] = column;
}
// [end quote]

template <class Tile>
void launch(const Problem& p, const Backward<float>& t, const Change<float>& change,
            const View<float>& dbias, float scale, const float* D_rows, cudaStream_t stream) {
  const auto kernel = dbias_kernel<Tile>;
  const std::size_t bytes = Tile::shared_bytes;
  allow_shared_memory(kernel, bytes);
  const std::int64_t blocks = Shared::blocks(p, dbias, Tile::rows, Tile::cols);
  if (blocks == 0) return;
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, change, dbias,
            scale, D_rows, aligned(p, t));
}

}  // namespace

void launch_dbias(const Problem& p, const Backward<float>& t, const Change<float>& change,
                  const View<float>& dbias, float scale, const float* D, cudaStream_t stream) {
  with_tile(p.d, [&](auto tile) { launch<decltype(tile)>(p, t, change, dbias, scale, D, stream); });
}

}  // namespace fa::scores
