// Neighbouring lanes share what they read. A float4 load of a warp takes four turns of the shared
// memory, eight lanes a turn; where two lanes want the same address, their groups go together. With
// the row in the lowest and the highest bit of the lane, and the key in between, a load of Q or K
// takes two. Where a lane stands has changed, and in which order lanes are combined.
//
//   a warp      16 rows of Q_i; its lanes lie in 4 rows (ty) of 8 (tx)
//   a thread    rows ty + 4 i, keys tx + 8 j, columns 4 tx + 32 y ... 4 tx + 32 y + 3
#include <cfloat>

#include "04_cuda_forward/cuda_forward.hpp"
#include "common/core/tiles.cuh"

namespace fa::cuda_forward {
namespace {

constexpr int lanes = 32, warps = 4, threads = lanes * warps;

template <int D>
struct Shape {
  static constexpr int TR = 4, TK = 8;       // rows and keys of a thread
  static constexpr int Br = warps * 4 * TR;  // queries
  static constexpr int Bc = 8 * TK;          // 64 keys
  static constexpr int columns = D / 8;      // of O of a thread
  static constexpr int pad = 4, P_pad = 8;
  static constexpr int row = D + pad, P_row = Bc + P_pad;
  static constexpr std::size_t bytes = sizeof(float) * ((Br + Bc) * row + Br * P_row);
};

template <int D, bool vectorised>
__global__ void __launch_bounds__(threads, D <= 64 ? 4 : 2)
    neighbours_kernel(Problem p, Forward<float> t, float scale) {
  using C = Shape<D>;
  constexpr int TR = C::TR, TK = C::TK, Br = C::Br, Bc = C::Bc, columns = C::columns;
  // [quote lanes]
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, d = int(p.d);
  const int tx = lane / 2 % 8, ty = lane % 2 + lane / 16 * 2;
  // [end quote]
  float* const Qi = dynamic_shared<float>();  // [Br, row]
  float* const KVj = Qi + Br * C::row;        // [Bc, row]: first K_j, then V_j
  float* const Pij = KVj + Bc * C::row;       // [Br, P_row]

  const int tiles = int((p.Nq + Br - 1) / Br);
  const int head = int(blockIdx.x) / tiles, b = head / int(p.Hq), h = head % int(p.Hq);
  const std::int64_t i0 = std::int64_t(tiles - 1 - int(blockIdx.x) % tiles) * Br;
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);

  const auto row = [&](int i) { return warp * 4 * TR + ty + 4 * i; };
  const auto visible = [&](int r) { return int(mask.visible_keys(i0 + min(r, rows - 1))); };
  const int end = visible(rows - 1);

  load_tile<threads, D, Br, 1, vectorised>(Qi, Q, i0, rows);

  // (1) O_i = 0, l_i = 0, and m_i the least number there is: with it, m - m is 0
  float m[TR], l[TR], o[TR][columns];  // l: of this lane's keys alone
  for (int i = 0; i < TR; ++i) {
    m[i] = -FLT_MAX;
    l[i] = 0;
    for (int x = 0; x < columns; ++x) o[i][x] = 0;
  }

  for (int j0 = 0; j0 < end; j0 += Bc) {
    const int cols = min(Bc, end - j0);
    __syncthreads();  // V of the previous tile is no longer read
    load_tile<threads, D, Bc, 1, vectorised>(KVj, K, j0, cols);
    __syncthreads();  // K_j, and before the first tile Q_i, are complete

    // (3) S_ij = scale Q_i K_j^T
    float s[TR][TK] = {};
    const float* const q = Qi + row(0) * C::row;
    const float* const k = KVj + tx * C::row;
#pragma unroll 1
    for (int x = 0; x < D; x += 4) {
      float4 qi[TR];
      for (int i = 0; i < TR; ++i) qi[i] = load4(q + 4 * i * C::row + x);
      for (int j = 0; j < TK; ++j) {
        const float4 kj = load4(k + 8 * j * C::row + x);
        for (int i = 0; i < TR; ++i) {
          s[i][j] += qi[i].x * kj.x;
          s[i][j] += qi[i].y * kj.y;
          s[i][j] += qi[i].z * kj.z;
          s[i][j] += qi[i].w * kj.w;
        }
      }
    }

    const bool full = visible(0) >= j0 + Bc;
    for (int i = 0; i < TR; ++i) {
      const int n = full ? Bc : visible(row(i)) - j0;
      // (4) m_new = max(m, rowmax S_ij), and l and O in its terms
      float m_new = m[i];
      for (int j = 0; j < TK; ++j) {
        s[i][j] = tx + 8 * j < n ? scale * s[i][j] : -INFINITY;
        m_new = fmaxf(m_new, s[i][j]);
      }
      for (int bits = 2; bits < 16; bits *= 2)
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, bits));
      const float rescale = __expf(m[i] - m_new);
      m[i] = m_new;
      l[i] *= rescale;
      for (int x = 0; x < columns; ++x) o[i][x] *= rescale;

      // (5) P_ij = exp(S_ij - m)
      for (int j = 0; j < TK; ++j) {
        const float w = __expf(s[i][j] - m[i]);
        Pij[row(i) * C::P_row + tx + 8 * j] = w;
        l[i] += w;
      }
    }

    __syncthreads();  // K_j is no longer read
    load_tile<threads, D, Bc, 1, vectorised>(KVj, V, j0, cols);
    __syncthreads();

    // (6) O_i += P_ij V_j
    const float *w = Pij + row(0) * C::P_row, *v = KVj + 4 * tx;
#pragma unroll 1
    for (int c = 0; c < Bc; c += 4) {
      float4 weight[TR];
      for (int i = 0; i < TR; ++i) weight[i] = load4(w + 4 * i * C::P_row + c);
      for (int e = 0; e < 4; ++e)
        for (int x = 0; x < columns; x += 4) {
          const float4 vx = load4(v + (c + e) * C::row + 8 * x);
          for (int i = 0; i < TR; ++i) {
            const float wi = (&weight[i].x)[e];
            o[i][x] += wi * vx.x;
            o[i][x + 1] += wi * vx.y;
            o[i][x + 2] += wi * vx.z;
            o[i][x + 3] += wi * vx.w;
          }
        }
    }
  }

  // (7) O_i = O_i / l_i;  L_i = m_i + log l_i
#pragma unroll
  for (int i = 0; i < TR; ++i) {
    float sum = l[i];
    for (int bits = 2; bits < 16; bits *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
    const int r = row(i);
    if (r >= rows) continue;
    const float inverse = sum == 0 ? 0 : 1 / sum;
    float* const O = t.O.at(b, h, i0 + r);
    for (int x = 0; x < columns; x += 4)
      store_columns<vectorised>(O, 4 * tx + 8 * x, d, o[i] + x, inverse);
    if (t.LSE && tx == 0) t.LSE[head * p.Nq + i0 + r] = m[i] + logf(sum);
  }
}

template <int D>
void launch(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream) {
  const auto kernel = aligned(p, t) ? neighbours_kernel<D, true> : neighbours_kernel<D, false>;
  allow_shared_memory(kernel, Shape<D>::bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Shape<D>::Br - 1) / Shape<D>::Br);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), Shape<D>::bytes, stream, p, t, scale);
}

}  // namespace

std::size_t neighbours_shared_bytes(std::int64_t d) {
  return d <= 32 ? Shape<32>::bytes : d <= 64 ? Shape<64>::bytes : Shape<128>::bytes;
}
void launch_neighbours(const Problem& p, const Forward<float>& t, float scale,
                       cudaStream_t stream) {
  (p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>)(p, t, scale, stream);
}

}  // namespace fa::cuda_forward
