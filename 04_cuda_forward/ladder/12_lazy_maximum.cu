// The maximum may lag behind. Softmax is the same for every m that keeps exp(s - m) from
// overflowing; m follows only when a score passes it by a factor of 2^8, which after the first
// tiles is seldom. Then a tile costs no shuffle and O is not scaled again. Powers of 2, not of e.
#include <algorithm>
#include <cfloat>

#include "04_cuda_forward/cuda_forward.hpp"
#include "common/core/tiles.cuh"

namespace fa::cuda_forward {
namespace {

constexpr int lanes = 32, warps = 4, threads = lanes * warps;
constexpr float slack = 8;  // m moves when a score passes it by more: weights stay below 2^8

template <int D_>
struct Shape {
  static constexpr int TR = 8, TK = 8, columns = 8;       // rows, keys and columns of O of a thread
  static constexpr int D = D_, LC = D / 8, LR = 32 / LC;  // a warp's lanes: LR rows of LC
  static constexpr int WR = TR * LR, Br = warps * WR;     // rows of a warp, of a block
  static constexpr int Bc = TK * LC;                      // keys
  // A tile of keys comes in chunks of at most 16 KiB: K by columns, V by keys.
  static constexpr int KX = std::min(D, 4096 / Bc), VK = std::min(Bc, 4096 / D);
  static constexpr int K_chunks = D / KX, V_chunks = Bc / VK;
  static constexpr int Q_size = Br * D + Br;       // row r begins at r D + 4 (r / 4)
  static constexpr int K_size = Bc * KX + Bc / 2;  // key c begins at c KX + 4 (c / 8)
  static constexpr int stage = std::max(K_size, VK* D);
  static constexpr int P_size = Bc * WR + Bc;  // key c begins at c WR + 8 (c / 8)
  static constexpr std::size_t bytes = sizeof(float) * (Q_size + 2 * stage + warps * P_size);
};

template <int D, bool vectorised>
__global__ void __launch_bounds__(threads, 2)
    lazy_maximum_kernel(Problem p, Forward<float> t, float scale) {
  using C = Shape<D>;
  constexpr int TR = C::TR, TK = C::TK, Br = C::Br, Bc = C::Bc, columns = C::columns;
  constexpr int WR = C::WR, LC = C::LC, KX = C::KX, VK = C::VK;
  const int warp = __shfl_sync(0xffffffff, int(threadIdx.x / lanes), 0);
  const int lane = threadIdx.x % lanes, d = int(p.d);
  const int tx = lane / 2 % LC, ty = lane % 2 + lane / (2 * LC) * 2;
  float* const Qi = dynamic_shared<float>();
  float* const stages = Qi + C::Q_size;
  float* const Pij = stages + 2 * C::stage + warp * C::P_size;

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
  const int most = visible(warp * WR + WR - 1);  // keys that a row of this warp sees
  const int end = visible(rows - 1);

  // Chunk c of the tile of keys at j0, into the stage that chunk c - 2 was in.
  static_assert((C::K_chunks + C::V_chunks) % 2 == 0);
  const auto fetch = [&](int c, int j0) {
    float* const to = stages + c % 2 * C::stage;
    const int cols = min(Bc, end - j0), first = (c - C::K_chunks) * VK;
    if (c < C::K_chunks)
      ask_for_tile<threads, KX, Bc, 8, vectorised>(to, K, j0, cols, c * KX);
    else
      ask_for_tile<threads, D, VK, none, vectorised>(to, V, j0 + first, cols - first);
  };
  ask_for_tile<threads, D, Br, 4, vectorised>(Qi, Q, i0, rows);
  if (end > 0) fetch(0, 0);

  // (1) O_i = 0, l_i = 0, and m_i the least number there is: with it, m - m is 0
  float m[TR], l[TR], o[TR][columns];  // m: of scale log2(e) q k; l: of this lane's keys alone
  for (int i = 0; i < TR; ++i) {
    m[i] = -FLT_MAX;
    l[i] = 0;
    for (int x = 0; x < columns; ++x) o[i][x] = 0;
  }

  for (int j0 = 0; j0 < end; j0 += Bc) {
    const bool used = j0 < most;  // a warp whose rows see nothing here only waits and copies

    // (3) S_ij = scale Q_i K_j^T, chunk by chunk of d
    float s[TR][TK] = {};
#pragma unroll 1
    for (int c = 0; c < C::K_chunks; ++c) {
      cp_async_wait();
      __syncthreads();  // chunk c is here, and nobody reads chunk c - 1
      fetch(c + 1, j0);
      if (!used) continue;
      const float* const q = Qi + row(0) * D + row(0) + c * KX;
      const float* const k = stages + c % 2 * C::stage + tx * (8 * KX + 4);
      const auto q_at = [&](int i, int x) {
        return load4(q + (row(i) - row(0)) * D + (i < 4 ? 0 : WR / 2) + x);
      };
      float4 qi[TR], kj = load4(k);
      for (int i = 0; i < TR; ++i) qi[i] = q_at(i, 0);
#pragma unroll 1
      for (int x = 0; x < KX; x += 4) {
        const int ahead = (x + 4) % KX;  // at the end some numbers are loaded for nothing
#pragma unroll
        for (int j = 0; j < TK; ++j) {
          const float4 next = load4(k + (j < 7 ? (j + 1) * KX + x : ahead));  // meanwhile
          for (int i = 0; i < TR; ++i) {
            s[i][j] += qi[i].x * kj.x;
            s[i][j] += qi[i].y * kj.y;
            s[i][j] += qi[i].z * kj.z;
            s[i][j] += qi[i].w * kj.w;
            if (j == 7) qi[i] = q_at(i, ahead);
          }
          kj = next;
        }
      }
    }

    if (used) {
      const bool full = visible(warp * WR) >= j0 + Bc;
      bool passed = false;
#pragma unroll
      for (int i = 0; i < TR; ++i) {
        const int n = full ? 8 : visible(row(i)) - j0 - 8 * tx;
        float highest = -INFINITY;
        for (int j = 0; j < TK; ++j) {
          s[i][j] = j < n ? scale * s[i][j] : -INFINITY;
          highest = fmaxf(highest, s[i][j]);
        }
        passed |= highest > m[i] + slack;
      }

      // (4) m_new = max(m, rowmax S_ij), and l and O in its terms: only if m is far behind
      // [quote lazy]
      if (__any_sync(0xffffffff, passed)) {
#pragma unroll
        for (int i = 0; i < TR; ++i) {
          float m_new = m[i];
          for (int j = 0; j < TK; ++j) m_new = fmaxf(m_new, s[i][j]);
          for (int bits = 2; bits < 2 * LC; bits *= 2)
            m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, bits));
          const float rescale = exp2_of(m[i] - m_new);
          m[i] = m_new;
          l[i] *= rescale;
          for (int x = 0; x < columns; ++x) o[i][x] *= rescale;
        }
      }
      // [end quote]

      // (5) P_ij = exp(S_ij - m), key by key: eight rows of a thread are two float4
      float* const to = Pij + tx * (8 * WR + 8) + 4 * ty;
      for (int j = 0; j < TK; ++j) {
        float w[TR];
        for (int i = 0; i < TR; ++i) {
          w[i] = exp2_of(s[i][j] - m[i]);
          l[i] += w[i];
        }
        store4(to + j * WR, make_float4(w[0], w[1], w[2], w[3]));
        store4(to + j * WR + WR / 2, make_float4(w[4], w[5], w[6], w[7]));
      }
      __syncwarp();
    }

    // (6) O_i += P_ij V_j, chunk by chunk of the keys
#pragma unroll 1
    for (int c = 0; c < C::V_chunks; ++c) {
      cp_async_wait();
      __syncthreads();
      if (c + 1 < C::V_chunks)
        fetch(C::K_chunks + c + 1, j0);
      else if (j0 + Bc < end)
        fetch(0, j0 + Bc);
      if (!used) continue;
      const int n = min(VK, most - j0 - c * VK);  // keys of the chunk that the warp sees
      const float* w = Pij + c * (VK / 8) * (8 * WR + 8) + 4 * ty;
      const float* v = stages + (C::K_chunks + c) % 2 * C::stage + 4 * tx;
      float4 w0 = load4(w), w1 = load4(w + WR / 2), v0 = load4(v), v1 = load4(v + D / 2);
#pragma unroll 1
      for (int k = 0; k < n; k += 8) {
        const int w_step = k + 8 < n ? 8 * WR + 8 : 0, v_step = k + 8 < n ? 8 * D : 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float wi[] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
          const float vx[] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
          const float* const w_next = e < 7 ? w + (e + 1) * WR : w + w_step;
          const float* const v_next = e < 7 ? v + (e + 1) * D : v + v_step;
          w0 = load4(w_next), w1 = load4(w_next + WR / 2);
          v0 = load4(v_next), v1 = load4(v_next + D / 2);
          for (int i = 0; i < TR; ++i)
            for (int x = 0; x < columns; ++x) o[i][x] += wi[i] * vx[x];
        }
        w += w_step;
        v += v_step;
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
    store_columns<vectorised>(O, 4 * tx, d, o[i], inverse);
    store_columns<vectorised>(O, 4 * tx + D / 2, d, o[i] + 4, inverse);
    if (t.LSE && tx == 0) t.LSE[head * p.Nq + i0 + r] = m[i] * ln_2 + logf(sum);
  }
}

template <int D>
void launch(const Problem& p, const Forward<float>& t, float scale, cudaStream_t stream) {
  const auto kernel = aligned(p, t) ? lazy_maximum_kernel<D, true> : lazy_maximum_kernel<D, false>;
  allow_shared_memory(kernel, Shape<D>::bytes);
  const std::int64_t blocks = p.B * p.Hq * ((p.Nq + Shape<D>::Br - 1) / Shape<D>::Br);
  FA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(threads), Shape<D>::bytes, stream, p, t,
            scale * log2_e);
}

}  // namespace

std::size_t lazy_maximum_shared_bytes(std::int64_t d) {
  return d <= 32 ? Shape<32>::bytes : d <= 64 ? Shape<64>::bytes : Shape<128>::bytes;
}
void launch_lazy_maximum(const Problem& p, const Forward<float>& t, float scale,
                         cudaStream_t stream) {
  (p.d <= 32 ? launch<32> : p.d <= 64 ? launch<64> : launch<128>)(p, t, scale, stream);
}

}  // namespace fa::cuda_forward
