// What becomes of a score on its way to the softmax, and of its gradient on the way back: what the
// kernels of this walk share.
#pragma once
#include <cstring>
#include <type_traits>

#include "06_optimized/backward/2_swizzle.cuh"
#include "06_optimized/beyond/scores/scores.hpp"
#include "06_optimized/ptx/fragments.hpp"
#include "common/core/tiles.cuh"

namespace fa::scores {

// Does a kernel that was built for `built` have this part? Only for all is it asked when it runs.
template <int built, class T>
__device__ bool has(const Change<T>& change, int part) {
  return built == with_all ? change.parts & part : built & part;
}

// Has all been added to a score before changed() is asked?
template <int built>
inline constexpr bool added_before = (built & (behind | in_tiles)) != 0;

// f(built, D), as std::integral_constant, of a kernel that has all that is asked for. d > 128 has
// one kernel for all, or there would be too many of them to build.
template <class T, class F>
void with_built([[maybe_unused]] const Change<T>& change, std::int64_t d, const F& f) {
  const auto with_width = [&](auto built) {
    if (d <= 64) return f(built, std::integral_constant<int, 64>());
    f(built, std::integral_constant<int, 128>());
  };
  if (d > 128)
    return f(std::integral_constant<int, with_all>(), std::integral_constant<int, 256>());
  // A kernel for all has no tiles of the bias.
  if (change.parts == (with_bias | in_tiles))
    return with_width(std::integral_constant<int, with_bias | in_tiles>());
#if defined(FA_ONE_FOR_ALL)  // it has all lines; where a sanitizer or a mistake is at work
  constexpr bool one = true;
#elif defined(FA_ONE_FOR_FP16)  // where there is no GPU to run them: bf16 has one for each
  constexpr bool one = std::is_same_v<T, __half>;
#else
  constexpr bool one = false;
#endif
  if constexpr (one)
    with_width(std::integral_constant<int, with_all>());
  else
    switch (change.parts) {
      case 0:
        return with_width(std::integral_constant<int, 0>());
      case with_alibi:
        return with_width(std::integral_constant<int, with_alibi>());
      case with_alibi | behind:
        return with_width(std::integral_constant<int, with_alibi | behind>());
      case with_cap:
        return with_width(std::integral_constant<int, with_cap>());
      case with_bias:
        return with_width(std::integral_constant<int, with_bias>());
      case with_rotary:
        return with_width(std::integral_constant<int, with_rotary>());
      default:
        return with_width(std::integral_constant<int, with_all>());
    }
}

// One head: its slope, in units of `change`, and where its bias begins.
template <int built, class T>
struct Head {
  float slope = 0;
  const void* bias = nullptr;

  __device__ Head(const Change<T>& c, std::int64_t b, std::int64_t h) {
    if (has<built>(c, with_alibi)) slope = c.unit * c.slopes[b * c.slopes_batch + h];
    if (!has<built>(c, with_bias)) return;
    bias = c.bias32.data ? static_cast<const void*>(c.bias32.at(b, h)) : c.bias.at(b, h);
  }
};

inline __device__ float2 two(float x, float y) {
  float2 both;
  both.x = x;
  both.y = y;
  return both;
}

// One row of S from key j on: what its scores have in common.
template <int built, class T>
struct Line {
  const Change<T>& change;
  const float slope, position;  // of the query, seen from key j
  const T* bias = nullptr;      // of key j
  const float* bias32 = nullptr;

  __device__ Line(const Change<T>& c, const Head<built, T>& head, int i, int j)
      : change(c), slope(head.slope), position(float(i + c.offset - j)) {
    if (!has<built>(c, with_bias)) return;
    if (c.bias32.data)
      bias32 = static_cast<const float*>(head.bias) + i * c.bias32.row + j;
    else
      bias = static_cast<const T*>(head.bias) + i * c.bias.row + j;
  }

  // The bias of key j + x, and of the next one as well; 0 from x = n on, where nothing is read.
  __device__ float bias_at(int x, int n) const {
    if (!has<built>(change, with_bias) || added_before<built> || x >= n) return 0;
    return bias ? float(bias[x]) : bias32[x];
  }
  __device__ float2 two_biases(int x, int n) const {
    if (!has<built>(change, with_bias) || added_before<built>) return two(0, 0);
    if (!change.in_pairs || x + 1 >= n) return two(bias_at(x, n), bias_at(x + 1, n));
    if (!bias) return *reinterpret_cast<const float2*>(bias32 + x);
    struct alignas(2 * sizeof(T)) Two {
      T x, y;
    } const pair = *reinterpret_cast<const Two*>(bias + x);
    return two(float(pair.x), float(pair.y));
  }

  // [quote changed]
  // (4) s = cap tanh(s / cap) - slope |i + offset - j| + bias, in units of `change`
  __device__ float changed(float s, int x, float bias_x) const {
    if (added_before<built>) return s;  // start_sums() or add_bias() has done it
    if (has<built>(change, with_cap)) s = change.cap * tanhf(change.per_cap * s);
    if (has<built>(change, with_alibi)) s = fmaf(-slope, fabsf(position - float(x)), s);
    if (has<built>(change, with_bias)) s = fmaf(change.unit, bias_x, s);
    return s;
  }
  // The derivative of all that by s: 1 - tanh^2 (s / cap)
  __device__ float derivative(float s) const {
    if (!has<built>(change, with_cap)) return 1;
    const float t = tanhf(change.per_cap * s);
    return 1 - t * t;
  }
  // [end quote]
};

// What the sums of Q K^T begin with: 0; behind a causal mask, where nothing asks for |.|, all that
// ALiBi adds: one instruction, for here distances are numbers in the code. position: of the
// thread's first query, seen from its first key. transposed: rows of S are keys.
template <int built, bool transposed = false, int groups, int blocks, class T>
__device__ void start_sums(float (&S)[groups][blocks][4], const Head<built, T>& head,
                           float position) {
  const float first = -head.slope * position;
#pragma unroll
  for (int g = 0; g < groups; ++g)
#pragma unroll
    for (int j = 0; j < blocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int down = 16 * g + e / 2 * 8, across = 8 * j + e % 2;
        const float nearer = float(transposed ? down - across : across - down);
        S[g][j][e] = built == (with_alibi | behind) ? fmaf(head.slope, nearer, first) : 0;
      }
}

// Where chunk c of row r of a tile of the bias lies: in the swizzled order, in which two rows of 32
// numbers are one of 64.
template <int Bc>
__device__ int bias_at(int r, int c) {
  return Bc == 32 ? optimized::swizzle_backward::at<64>(r / 2, r % 2 * 4 + c)
                  : optimized::swizzle_backward::at<Bc>(r, c);
}

// tile[r][x] = bias of query i0 + r and key j0 + x, 0 where there is none.
template <int Br, int Bc, int threads = optimized::swizzle_backward::threads, class T>
__device__ void load_bias(T* tile, const Rows<const T>& bias, int i0, int j0) {
  constexpr int chunks = Bc / 8, at_once = threads / chunks;
  const int r0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const int inside = min(8, max(0, int(bias.cols) - j0 - 8 * chunk));  // of the eight
  const T* from = bias[i0 + r0] + j0 + 8 * chunk;
#pragma unroll
  for (int r = r0; r < r0 + Br; r += at_once) {
    cp_async(tile + bias_at<Bc>(r, chunk), from, i0 + r < bias.rows ? 2 * inside : 0);
    from += at_once * bias.stride;
  }
}

// S_ij += bias_ij, in units of `change`, from a tile of it. ldmatrix gives a thread the numbers of
// its own scores. transposed: rows of S are keys. (If the sums of Q K^T began with a large bias,
// tensor cores would add to it what they truncate to its last bit.)
template <int Bc, bool transposed = false, int groups, int blocks, class T>
__device__ void add_bias(float (&S)[groups][blocks][4], const T* tile, int warp_row, float unit) {
  using namespace optimized;
  const int lane = threadIdx.x % 32;
  const RowChunk named = transposed ? ldmatrix_by_columns(lane) : ldmatrix_by_rows(lane);
  const int first = transposed ? bias_at<Bc>(named.row, warp_row / 8 + named.chunk)
                               : bias_at<Bc>(warp_row + named.row, named.chunk);
#pragma unroll
  for (int g = 0; g < groups; ++g)
#pragma unroll
    for (int j = 0; j < blocks; j += 2) {
      std::uint32_t pairs[4];
      if constexpr (transposed)
        ldmatrix_transposed(pairs, tile + 8 * j * Bc + (first ^ 16 * g));
      else
        ldmatrix(pairs, tile + 16 * g * Bc + (first ^ 8 * j));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        T bias[2];
        std::memcpy(bias, &pairs[k], sizeof bias);
        for (int e = 0; e < 2; ++e) {
          float& s = S[g][j + k / 2][k % 2 * 2 + e];
          s = fmaf(unit, float(bias[e]), s);
        }
      }
    }
}

// What a block of the gradient by the bias goes through: the batch entries, heads and rows that
// share its tile of dbias. Where dbias has a stride of 0, that is all of them.
struct Shared {
  std::int64_t b, b_end, h, h_end, i, i_end, j0;

  FA_HOST_DEVICE static std::int64_t tiles(std::int64_t n, int size) {
    return (n + size - 1) / size;
  }
  static std::int64_t blocks(const Problem& p, const View<float>& dbias, int Br, int Bc) {
    return (dbias.batch ? p.B : 1) * (dbias.head ? p.Hq : 1) * (dbias.row ? tiles(p.Nq, Br) : 1) *
           tiles(p.Nk, Bc);
  }
  __device__ Shared(const Problem& p, const View<float>& dbias, int Br, int Bc, std::int64_t n) {
    const std::int64_t across = tiles(p.Nk, Bc), down = dbias.row ? tiles(p.Nq, Br) : 1;
    j0 = n % across * Bc;
    n /= across;
    i = n % down * Br;
    i_end = dbias.row ? min(i + Br, p.Nq) : p.Nq;
    n /= down;
    h = dbias.head ? n % p.Hq : 0;
    h_end = dbias.head ? h + 1 : p.Hq;
    if (dbias.head) n /= p.Hq;
    b = dbias.batch ? n : 0;
    b_end = dbias.batch ? b + 1 : p.B;
  }
};

// Number x of a row, turned for its position; sign = -1 turns back.
template <class T>
__device__ float turned(const Rotary& rotary, const T* row, int x, std::int64_t position,
                        float sign = 1) {
  const int half = int(rotary.dims) / 2;
  if (x >= 2 * half) return float(row[x]);
  // [quote turned]
  const bool second = rotary.interleaved ? x % 2 : x >= half;
  const int pair = rotary.interleaved ? x / 2 : x - half * second;
  const int other = rotary.interleaved ? x ^ 1 : second ? x - half : x + half;
  const float cos = rotary.cos[position * half + pair];
  const float sin = sign * rotary.sin[position * half + pair];
  return fmaf(second ? float(row[other]) : -float(row[other]), sin, float(row[x]) * cos);
  // [end quote]
}

// tile[r][x] = X[first + r][x], turned for position offset + first + r, for r < rows and x < d, 0
// beyond; in the swizzled order of the tensor cores' tiles. Each number is computed in fp32 and
// rounded once. A thread fetches its eight numbers and what they are paired with, and waits.
template <int D, int tile_rows, int threads, class T>
__device__ void load_turned(T* tile, const Rows<const T>& X, std::int64_t first, int rows,
                            const Change<T>& change, std::int64_t offset, bool aligned) {
  constexpr int chunks = D / 8, at_once = threads / chunks;
  const Rotary& rotary = change.rotary;
  const int r0 = threadIdx.x / chunks, x = threadIdx.x % chunks * 8, d = int(X.cols);
  const int half = int(rotary.dims) / 2;
  const bool turns = x < 2 * half, second = !rotary.interleaved && x >= half;
#pragma unroll 2
  for (int r = r0; r < r0 + tile_rows; r += at_once) {
    T* const to = tile + r * D + 8 * optimized::swizzled(r, x / 8);
    const std::int64_t position = offset + first + r;
    const T* row = X[first + r];
    if (!aligned || !change.in_chunks || x + 8 > d) {
#pragma unroll 1
      for (int e = 0; e < 8; ++e)
        to[e] = T(r < rows && x + e < d ? turned(rotary, row, x + e, position) : 0.f);
      continue;
    }
    uint4 own{};
    if (r < rows) own = *reinterpret_cast<const uint4*>(row + x);
    if (r < rows && turns) {
      uint4 other = own;
      if (!rotary.interleaved)
        other = *reinterpret_cast<const uint4*>(row + (second ? x - half : x + half));
      const T* const from = reinterpret_cast<const T*>(&own);
      const T* const with = reinterpret_cast<const T*>(&other);
      const std::int64_t at = position * half + (rotary.interleaved ? x / 2
                                                 : second           ? x - half
                                                                    : x);
      alignas(16) float cos[8], sin[8];
      const int pairs = rotary.interleaved ? 4 : 8;
#pragma unroll
      for (int k = 0; k < 8; k += 4)
        if (k < pairs) {
          store4(cos + k, load4(rotary.cos + at + k));
          store4(sin + k, load4(rotary.sin + at + k));
        }
      alignas(16) T now[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (rotary.interleaved) {
          const float y = float(from[e ^ 1]);
          now[e] = T(fmaf(e % 2 ? y : -y, sin[e / 2], float(from[e]) * cos[e / 2]));
        } else {
          const float y = float(with[e]);
          now[e] = T(fmaf(second ? y : -y, sin[e], float(from[e]) * cos[e]));
        }
      }
      own = *reinterpret_cast<const uint4*>(now);
    }
    *reinterpret_cast<uint4*>(to) = own;
  }
}

// A tile of Q or K: turned, or as `load` of backward/2_swizzle.cuh brings it.
template <int built, int D, int tile_rows, class T>
__device__ void bring(T* tile, const Rows<const T>& X, std::int64_t first, int rows,
                      const Change<T>& change, std::int64_t offset, bool aligned) {
  using namespace optimized::swizzle_backward;
  if (has<built>(change, with_rotary))
    load_turned<D, tile_rows, threads>(tile, X, first, rows, change, offset, aligned);
  else
    load<D, tile_rows>(tile, X, first, rows, aligned);
}

// X[first + r] = factor G, turned back, of the warp's rows those that exist, computed in fp32 and
// rounded once. They pass through `tile`, [rows of the block, D] in fp32.
template <int D, int groups, class T>
__device__ void store_turned_back(const Rows<T>& X, std::int64_t first, int rows, float factor,
                                  const float (&G)[groups][D / 8][4], float* tile,
                                  const Rotary& rotary, std::int64_t offset) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4, x0 = lane % 4 * 2, d = int(X.cols);
  __syncthreads();  // what was there is no longer read
#pragma unroll
  for (int i = 0; i < 2 * groups; ++i)
#pragma unroll
    for (int y = 0; y < D / 8; ++y)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        tile[(r0 + 8 * i) * D + 8 * y + x0 + e] = factor * G[i / 2][y][i % 2 * 2 + e];
  __syncwarp();  // the warp's rows are complete
#pragma unroll 1
  for (int r = warp_row; r < min(warp_row + 16 * groups, rows); ++r)
    for (int x = lane; x < d; x += 32)
      X[first + r][x] = T(turned(rotary, tile + r * D, x, offset + first + r, -1));
}

}  // namespace fa::scores
