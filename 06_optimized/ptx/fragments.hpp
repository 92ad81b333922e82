// Where the numbers of a fragment lie: pure functions, so that they can be tested without a GPU.
// Kernels use the ones of ldmatrix and the swizzle; a(), b() and c() say what the tensor cores
// expect, as the PTX manual draws it for m16n8k16.
#pragma once
#include "common/core/problem.hpp"

namespace fa::optimized {

struct Place {
  int row, col;
};

// Register i of a lane holds a pair: this place and the one a column further, in A [16, 16] and C
// [16, 8]; a row further in B [16, 8].
FA_HOST_DEVICE constexpr Place a_place(int lane, int i) {
  return {lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8};
}
FA_HOST_DEVICE constexpr Place b_place(int lane, int i) { return {lane % 4 * 2 + i * 8, lane / 4}; }
FA_HOST_DEVICE constexpr Place c_place(int lane, int i) { return {lane / 4 + i * 8, lane % 4 * 2}; }

// Which row (of 16) and chunk of 8 columns (of 2) a lane names to ldmatrix, for the 16 x 16 block
//   of A                                        blocks 0 and 1 one above the other, then 2 and 3
//   of B stored by rows, with .transposed       the same: two fragments of B side by side
//   of B stored by columns (K for S = Q K^T)    blocks 0 and 1 side by side, then 2 and 3
struct RowChunk {
  int row, chunk;
};
FA_HOST_DEVICE constexpr RowChunk ldmatrix_by_rows(int lane) { return {lane % 16, lane / 16}; }
FA_HOST_DEVICE constexpr RowChunk ldmatrix_by_columns(int lane) {
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// Shared memory has 32 banks of 4 bytes; a chunk is 16 bytes, so 8 chunks fill the banks. In rows
// of 8, 16 or 32 chunks the same chunk of 8 rows lies in the same 4 banks: 8 lanes would wait for
// each other. With row r's chunk c at place c ^ (r % 8), they lie in 8 different ones.
FA_HOST_DEVICE constexpr int swizzled(int row, int chunk) { return chunk ^ (row & 7); }

}  // namespace fa::optimized
