// Where the numbers of a fragment lie: pure functions, so that they can be tested without a GPU.
// Kernels use the ones of ldmatrix and the swizzle; a_cell, b_cell and c_cell say what the tensor
// cores expect, as the PTX manual draws it for m16n8k16.
#pragma once
#include "common/core/problem.hpp"

namespace fa::optimized {

struct Cell {
  int row, col;
};

// Register i of a lane holds a pair: this cell and the one a column further, in C [16, 8] and
// A [16, 16]; a row further in B [16, 8].
FA_HOST_DEVICE constexpr Cell c_cell(int lane, int i) { return {lane / 4 + i * 8, lane % 4 * 2}; }
FA_HOST_DEVICE constexpr Cell a_cell(int lane, int i) {
  Cell at = {};
  // [blank]
  // [step 06.1: A: which row and column a register begins with, next to those of C (2 lines)]
  at.row = lane / 4 + i % 2 * 8;
  at.col = lane % 4 * 2 + i / 2 * 8;
  // [end]
  // [end blank]
  return at;
}
FA_HOST_DEVICE constexpr Cell b_cell(int lane, int i) {
  Cell at = {};
  // [blank]
  // [step 06.2: B: which row and which column (2 lines)]
  at.row = lane % 4 * 2 + i * 8;
  at.col = lane / 4;
  // [end]
  // [end blank]
  return at;
}

// Which row (of 16) and chunk of 8 columns (of 2) a lane names to ldmatrix, for the 16 x 16 block
//   of A                                        blocks 0 and 1 one above the other, then 2 and 3
//   of B stored by rows, with .transposed       the same: two fragments of B side by side
//   of B stored by columns (K for S = Q K^T)    blocks 0 and 1 side by side, then 2 and 3
struct RowChunk {
  int row, chunk;
};
FA_HOST_DEVICE constexpr RowChunk ldmatrix_by_rows(int lane) { return {lane % 16, lane / 16}; }
FA_HOST_DEVICE constexpr RowChunk ldmatrix_by_columns(int lane) {
  RowChunk named = {};
  // [blank]
  // [step 06.3: for K: lane 8 i + r names row r of block i (2 lines)]
  named.row = lane % 8 + lane / 16 * 8;
  named.chunk = lane / 8 % 2;
  // [end]
  // [end blank]
  return named;
}

// Shared memory has 32 banks of 4 bytes; a chunk is 16 bytes, so 8 chunks fill the banks. In rows
// of 8, 16 or 32 chunks the same chunk of 8 rows lies in the same 4 banks: 8 lanes would wait for
// each other. Here it lies at another place in each of them, in 8 different groups of 4 banks: its
// number, with those bits flipped that are set in the last three of the row's number.
FA_HOST_DEVICE constexpr int swizzled(int row, int chunk) {
  int place = chunk;
  // [blank]
  // [step 06.4: the place of this chunk in its row (1 line)]
  place ^= row & 7;
  // [end]
  // [end blank]
  return place;
}

// Where chunk `chunk` of row `row` begins in a box of 64 columns, counted in numbers of 16 bits.
// Copy engine and tensor cores of Hopper know this order as the "128-byte swizzle".
FA_HOST_DEVICE constexpr int swizzled_chunk(int row, int chunk) {
  int number = 0;
  // [blank]
  // [step 06.5: the number in the box with which this chunk begins (1 line)]
  number = row * 64 + swizzled(row, chunk) * 8;
  // [end]
  // [end blank]
  return number;
}

}  // namespace fa::optimized
