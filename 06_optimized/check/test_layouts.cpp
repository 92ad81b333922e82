// Where the numbers of a fragment lie, and where the swizzle puts them. No GPU is needed for this.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "06_optimized/ptx/fragments.hpp"

namespace {

using namespace fa::optimized;
using Cells = std::set<std::pair<int, int>>;

// The cells of a fragment, each pair with its second cell; a pair too many would be missed by a
// set's size alone, so the pairs are counted too.
template <class PlaceOf>
Cells cells(PlaceOf place, int registers, int next_row, int next_col) {
  Cells all;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < registers; ++i) {
      const Place at = place(lane, i);
      EXPECT_TRUE(all.insert({at.row, at.col}).second) << "lane " << lane << ", register " << i;
      EXPECT_TRUE(all.insert({at.row + next_row, at.col + next_col}).second)
          << "lane " << lane << ", register " << i;
    }
  return all;
}

Cells rectangle(int rows, int cols) {
  Cells all;
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col) all.insert({row, col});
  return all;
}

TEST(fragments, hold_every_number_once) {
  EXPECT_EQ(cells(a_place, 4, 0, 1), rectangle(16, 16));
  EXPECT_EQ(cells(b_place, 2, 1, 0), rectangle(16, 8));
  EXPECT_EQ(cells(c_place, 2, 0, 1), rectangle(16, 8));
}

// What the ladder rests on: blocks 2 k and 2 k + 1 of S, registers 0 and 1 of each, are operand P.
TEST(fragments, two_blocks_of_S_are_the_operand_P) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Place s = c_place(lane, i % 2), p = a_place(lane, i);
      EXPECT_EQ(p.row, s.row);
      EXPECT_EQ(p.col, s.col + i / 2 * 8);
    }
}

// ldmatrix: register i of a lane is block i, whose row r begins where lane 8 i + r points; the
// lane's pair is row lane / 4, columns 2 (lane % 4) and the next, or transposed.
template <class Pointed>
Place loaded(Pointed pointed, int lane, int i, bool transposed) {
  const int r = transposed ? lane % 4 * 2 : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2;
  const RowChunk row = pointed(8 * i + r);
  return {row.row, 8 * row.chunk + c};
}

TEST(fragments, ldmatrix_loads_Q) {  // a block of A, by rows
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Place got = loaded(ldmatrix_by_rows, lane, i, false), want = a_place(lane, i);
      EXPECT_EQ(got.row, want.row) << "lane " << lane << ", register " << i;
      EXPECT_EQ(got.col, want.col) << "lane " << lane << ", register " << i;
    }
}

TEST(fragments, ldmatrix_loads_K) {  // two fragments of B, by columns: B[k][n] = K[n][k]
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Place got = loaded(ldmatrix_by_columns, lane, i, false), want = b_place(lane, i % 2);
      EXPECT_EQ(got.row, want.col + i / 2 * 8) << "lane " << lane << ", register " << i;
      EXPECT_EQ(got.col, want.row) << "lane " << lane << ", register " << i;
    }
}

TEST(fragments, ldmatrix_transposed_loads_V) {  // two fragments of B, by rows: B[k][n] = V[k][n]
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Place got = loaded(ldmatrix_by_rows, lane, i, true), want = b_place(lane, i % 2);
      EXPECT_EQ(got.row, want.row) << "lane " << lane << ", register " << i;
      EXPECT_EQ(got.col, want.col + i / 2 * 8) << "lane " << lane << ", register " << i;
    }
}

TEST(swizzle, gives_every_chunk_of_a_row_a_place) {
  for (int chunks : {8, 16, 32})
    for (int row = 0; row < 64; ++row) {
      std::set<int> places;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int place = swizzled(row, chunk);
        EXPECT_TRUE(place >= 0 && place < chunks) << "row " << row << ", chunk " << chunk;
        places.insert(place);
      }
      EXPECT_EQ(int(places.size()), chunks) << "row " << row;
    }
}

// The banks of 16 bytes that 8 lanes touch at once; 8 different ones are all there are.
int banks_of_a_column(int chunks, int first_row, int chunk, bool swizzle) {
  std::set<int> banks;
  for (int r = first_row; r < first_row + 8; ++r)
    banks.insert((r * chunks + (swizzle ? swizzled(r, chunk) : chunk)) % 8);
  return int(banks.size());
}

TEST(swizzle, keeps_8_rows_of_a_chunk_in_different_banks) {
  for (int chunks : {8, 16, 32})
    for (int row = 0; row < 64; row += 8)
      for (int chunk = 0; chunk < chunks; ++chunk) {
        EXPECT_EQ(banks_of_a_column(chunks, row, chunk, true), 8);
        EXPECT_EQ(banks_of_a_column(chunks, row, chunk, false), 1);  // what it is there for
      }
}

TEST(swizzle, keeps_8_chunks_of_a_row_in_different_banks) {  // how tiles are written
  for (int row = 0; row < 64; ++row)
    for (int first = 0; first < 32; first += 8) {
      std::set<int> banks;
      for (int chunk = first; chunk < first + 8; ++chunk) banks.insert(swizzled(row, chunk) % 8);
      EXPECT_EQ(banks.size(), 8u);
    }
}

// 4_fa2.cu finds chunk c + x of a row by an exclusive or, if c and x have no bit in common.
TEST(swizzle, moves_along_a_row_by_an_exclusive_or) {
  for (int row = 0; row < 16; ++row)
    for (int chunk = 0; chunk < 2; ++chunk)
      for (int x = 0; x < 32; x += 2) EXPECT_EQ(swizzled(row, chunk) ^ x, swizzled(row, chunk + x));
}

}  // namespace
