// Which weights are kept. One call of Philox gives 128 bits, 16 for each of eight weights:
//
//   its rows      i, i + 8, i + 16, i + 24      of 32 rows, i = 0 ... 7    word 0, 1, 2, 3
//   its columns   j, j + 8                      of 16 columns, j = 0 ... 7    lower, upper half
//
// Eight apart, because so are the rows of a thread in an accumulator of mma.sync, and its blocks of
// columns. The thread holds rows r, r + 8 ... and columns x, x + 1, x + 8, x + 9 ...: of a call for
// (r, x) it needs all eight weights, if its warp has 32 rows; and the same thread of the owner of
// keys, whose rows are keys and whose columns are queries, needs all eight of its calls too.
#pragma once
#include "06_optimized/beyond/dropout/dropout.hpp"
#include "06_optimized/beyond/dropout/philox.hpp"

namespace fa::dropout {

struct Keep {
  std::uint32_t key0, key1, head, offset, threshold;
  float factor;

  FA_HOST_DEVICE Keep(const Draw& draw, std::int64_t head_)
      : head(std::uint32_t(head_)), threshold(draw.threshold), factor(draw.factor) {
    const std::uint64_t seed = draw.in_memory ? draw.in_memory[0] : draw.seed;
    const std::uint64_t all = draw.offset + (draw.in_memory ? draw.in_memory[1] : 0);
    key0 = std::uint32_t(seed);
    key1 = std::uint32_t(seed >> 32) + std::uint32_t(all >> 32);
    offset = std::uint32_t(all);
  }

  // Is any weight dropped at all? All threads of a launch agree, so asking costs next to nothing.
  FA_HOST_DEVICE bool drops() const { return threshold < 0x10000; }

  // A word's two answers, in a call that drops any. A shift costs less than a mask.
  FA_HOST_DEVICE bool lower(std::uint32_t word) const { return word << 16 < threshold << 16; }
  FA_HOST_DEVICE bool upper(std::uint32_t word) const { return word < threshold << 16; }

  // [quote map]
  // The numbers of the eight weights that share a call with (i, j).
  FA_HOST_DEVICE Words numbers(std::uint32_t i, std::uint32_t j) const {
    return philox({i / 32 * 8 + i % 8, j / 16 * 8 + j % 8, head, offset}, key0, key1);
  }
  FA_HOST_DEVICE bool operator()(std::int64_t i, std::int64_t j) const {
    if (!drops()) return true;
    const std::uint32_t word = numbers(std::uint32_t(i), std::uint32_t(j))[int(i / 8 % 4)];
    return j / 8 % 2 ? upper(word) : lower(word);
  }
  // [end quote]

#if defined(__CUDACC__) || defined(FA_EMULATED)
  // f(row, block, x, keeps) for a thread's part of a tile of queries by keys. (i, j) is its
  // first row and column; rows 0 and 1 are i and i + 8, and with 32 rows a warp, groups = 2, rows 2
  // and 3 are the two below. The weight is in block `block` of eight columns, of which the thread
  // has two, x = 0 and 1.
  template <int groups, int blocks, class F>
  __device__ void each(std::int64_t i, std::int64_t j, F f) const {
    if (!drops()) return;
    // With 32 rows a warp these are words 0 to 3, with 16 the first or the last two.
    const bool last_two = groups == 1 && i / 16 % 2;
#pragma unroll
    for (int k = 0; k < blocks / 2; ++k)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const Words four = numbers(std::uint32_t(i), std::uint32_t(j) + 16 * k + x);
#pragma unroll
        for (int r = 0; r < 2 * groups; ++r) {
          const std::uint32_t word = last_two ? four[2 + r % 2] : four[r];
          f(r, 2 * k, x, lower(word));
          f(r, 2 * k + 1, x, upper(word));
        }
      }
  }
  // Sets to 0 what is dropped, in fp32 accumulators ...
  template <int groups, int blocks>
  __device__ void drop(float (&S)[groups][blocks][4], std::int64_t i, std::int64_t j) const {
    each<groups, blocks>(i, j, [&](int row, int block, int x, bool keeps) {
      if (!keeps) S[row / 2][block][row % 2 * 2 + x] = 0;
    });
  }
  // ... and in pairs of 16 bits, as the left operand of a product has them.
  template <int groups, int steps>
  __device__ void drop(std::uint32_t (&P)[steps][groups][4], std::int64_t i, std::int64_t j) const {
    each<groups, 2 * steps>(i, j, [&](int row, int block, int x, bool keeps) {
      if (!keeps) P[block / 2][row / 2][block % 2 * 2 + row % 2] &= x == 0 ? 0xffff0000 : 0xffff;
    });
  }

  // The same for a tile of keys by queries, as bits: (i, j) is the thread's first query, a column
  // here, and key, a row. What is kept has bit 4 block + element of bits[group].
  template <int groups, int blocks>
  __device__ void transposed(std::uint32_t (&bits)[groups], std::int64_t i, std::int64_t j) const {
#pragma unroll
    for (std::uint32_t& of_group : bits) of_group = 0xffffffff;
    if (!drops()) return;
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      bits[g] = 0;
#pragma unroll
      for (int k = 0; k < blocks / 4; ++k)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const Words four = numbers(std::uint32_t(i) + 32 * k + x, std::uint32_t(j) + 16 * g);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (lower(four[n])) bits[g] |= 1u << (16 * k + 4 * n + x);
            if (upper(four[n])) bits[g] |= 1u << (16 * k + 4 * n + 2 + x);
          }
        }
    }
  }

  // The same for two warps of 16 rows each, of which this is one, in accumulators of wgmma: who
  // draws has every other column, for both. (i, j) is a row of the thread's, and its first column.
  // What is kept has bit 4 block + 2 right + r of bits[warp]: of a block of 16 columns the left or
  // the right half, and row r = 0 or 1, 8 below.
  template <int blocks>
  __device__ void of_two_warps(std::uint32_t (&bits)[2], std::int64_t i, std::int64_t j) const {
    static_assert(4 * blocks <= 32);
    bits[0] = bits[1] = 0xffffffff;
    if (!drops()) return;
    bits[0] = bits[1] = 0;
#pragma unroll
    for (int k = 0; k < blocks; ++k) {
      const Words four = numbers(std::uint32_t(i), std::uint32_t(j) + 16 * k);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (lower(four[n])) bits[n / 2] |= 1u << (4 * k + n % 2);
        if (upper(four[n])) bits[n / 2] |= 1u << (4 * k + 2 + n % 2);
      }
    }
  }
#endif
};

}  // namespace fa::dropout
