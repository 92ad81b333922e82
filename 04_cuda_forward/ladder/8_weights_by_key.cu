// P lies key by key, not row by row, and a thread's rows are neighbours, four by four. So the
// weights that a thread has for a key go to shared memory as one float4 or two, and come back as
// many: eight numbers wait in registers for their products, no longer 32.
//
//   a warp      4 TR rows of Q_i; its lanes lie in 4 rows (ty) of 8 (tx)
//   a thread    rows 4 ty ... 4 ty + 3, and four more 16 rows below where TR is 8;
//               keys tx + 8 j, columns 4 tx + 32 y ... 4 tx + 32 y + 3
#include <cfloat>

#include "04_cuda_forward/cuda_forward.hpp"
#include "common/core/tiles.cuh"

namespace fa::cuda_forward {
namespace {

constexpr int lanes = 32, warps = 4, threads = lanes * warps;

template <int D_>
struct Shape {
  static constexpr int D = D_, LC = 8, LR = 4;  // a warp's lanes: LR rows of LC
  static constexpr int TR = D <= 64 ? 8 : 4, TK = 8,
                       columns = D / LC;               // rows, keys and columns of O of a thread
  static constexpr int WR = TR * LR, Br = warps * WR;  // rows of a warp, of a block
  static constexpr int Bc = TK * LC;                   // keys
  static constexpr int row = D + 4, P_row = WR + 8;    // padded
  static constexpr std::size_t bytes = sizeof(float) * ((Br + Bc) * row + warps * Bc * P_row);
};

template <int D, bool vectorised>
__global__ void __launch_bounds__(threads, 2)
    weights_by_key_kernel(Problem p, Forward<float> t, float scale) {
  using C = Shape<D>;
  constexpr int TR = C::TR, TK = C::TK, Br = C::Br, Bc = C::Bc, columns = C::columns;
  constexpr int WR = C::WR, LC = C::LC;
  const int warp = __shfl_sync(0xffffffff, int(threadIdx.x / lanes), 0);
  const int lane = threadIdx.x % lanes, d = int(p.d);
  const int tx = lane / 2 % LC, ty = lane % 2 + lane / (2 * LC) * 2;
  float* const Qi = dynamic_shared<float>();                    // [Br, row]
  float* const KVj = Qi + Br * C::row;                          // [Bc, row]: first K_j, then V_j
  float* const Pij = KVj + Bc * C::row + warp * Bc * C::P_row;  // of this warp: [Bc, P_row]

  const int tiles = int((p.Nq + Br - 1) / Br);
  const int head = int(blockIdx.x) / tiles, b = head / int(p.Hq), h = head % int(p.Hq);
  const std::int64_t i0 = std::int64_t(tiles - 1 - int(blockIdx.x) % tiles) * Br;
  const int rows = int(min(std::int64_t(Br), p.Nq - i0));
  const Mask mask(p, b);
  const auto Q = t.Q.rows(b, h, p.Nq, d), K = t.K.rows(b, p.key_head(h), p.Nk, d),
             V = t.V.rows(b, p.key_head(h), p.Nk, d);

  // Row i of this thread: four neighbours, and four more half a warp's rows below.
  const auto row = [&](int i) { return warp * WR + 4 * ty + i + (i < 4 ? 0 : WR / 2 - 4); };
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
    const float* const k = KVj + tx * C::row;
#pragma unroll 1
    for (int x = 0; x < D; x += 4) {
      float4 qi[TR];
      for (int i = 0; i < TR; ++i) qi[i] = load4(Qi + row(i) * C::row + x);
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
      for (int bits = 2; bits < 2 * LC; bits *= 2)
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, bits));
      const float rescale = __expf(m[i] - m_new);
      m[i] = m_new;
      l[i] *= rescale;
      for (int x = 0; x < columns; ++x) o[i][x] *= rescale;
    }

    // (5) P_ij = exp(S_ij - m)
    // [quote weights]
    for (int j = 0; j < TK; ++j) {
      float w[TR];
      for (int i = 0; i < TR; ++i) {
        w[i] = __expf(s[i][j] - m[i]);
        l[i] += w[i];
      }
      for (int i = 0; i < TR; i += 4)
        store4(Pij + (tx + 8 * j) * C::P_row + 4 * ty + 4 * i,
               make_float4(w[i], w[i + 1], w[i + 2], w[i + 3]));
    }
    // [end quote]

    __syncthreads();  // K_j is no longer read
    load_tile<threads, D, Bc, 1, vectorised>(KVj, V, j0, cols);
    __syncthreads();

    // (6) O_i += P_ij V_j
#pragma unroll 4
    for (int c = 0; c < Bc; ++c) {
      float4 weight[TR / 4];
      for (int i = 0; i < TR / 4; ++i) weight[i] = load4(Pij + c * C::P_row + 4 * ty + 16 * i);
      for (int x = 0; x < columns; x += 4) {
        const float4 vx = load4(KVj + c * C::row + 4 * tx + 8 * x);
        for (int i = 0; i < TR; ++i) {
          const float wi = (&weight[i / 4].x)[i % 4];
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
    for (int bits = 2; bits < 2 * LC; bits *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
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
  const auto kernel =
      aligned(p, t) ? weights_by_key_kernel<D, true> : weights_by_key_kernel<D, false>;
  allow_shared_memory(kernel, Shape<D>::bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Shape<D>::Br - 1) / Shape<D>::Br);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), Shape<D>::bytes, stream, p, t, scale);
}

}  // namespace

std::size_t weights_by_key_shared_bytes(std::int64_t d) {
  return d <= 32 ? Shape<32>::bytes : d <= 64 ? Shape<64>::bytes : Shape<128>::bytes;
}
void launch_weights_by_key(const Problem& p, const Forward<float>& t, float scale,
                           cudaStream_t stream) {
  (p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>)(p, t, scale, stream);
}

}  // namespace fa::cuda_forward
