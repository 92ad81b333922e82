// Where the numbers of a fragment lie, and where the swizzle puts them. No GPU is needed for this.
// In the order of the exercise; each test stops at the first place that is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "06_optimized/order.cuh"
#include "06_optimized/ptx/fragments.hpp"

namespace {

using namespace fa::optimized;

std::string text(Cell at) {
  return "row " + std::to_string(at.row) + ", column " + std::to_string(at.col);
}
std::string text(int lane, int i) {
  return "lane " + std::to_string(lane) + ", register " + std::to_string(i);
}

// Empty if the lanes hold every number of a block once, or the first place where they do not. Of a
// pair the second number lies at `next` from the first.
template <class CellOf>
std::string wrong_cover(int rows, int cols, CellOf cell, int registers, Cell next) {
  std::vector<std::string> owner(rows * cols);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < registers; ++i)
      for (int second = 0; second < 2; ++second) {
        Cell at = cell(lane, i);
        at.row += second * next.row;
        at.col += second * next.col;
        if (at.row < 0 || at.row >= rows || at.col < 0 || at.col >= cols)
          return text(lane, i) + ": " + text(at) + " is outside";
        std::string& held = owner[at.row * cols + at.col];
        if (!held.empty()) return text(lane, i) + ": " + text(at) + " is already held by " + held;
        held = text(lane, i);
      }
  for (int n = 0; n < rows * cols; ++n)
    if (owner[n].empty()) return text({n / cols, n % cols}) + " is held by nobody";
  return {};
}

// Lane 5 of the drawings in the PTX manual, and the whole block.
TEST(fragments, C_is_what_mma_gives) {
  EXPECT_EQ(text(c_cell(5, 0)), "row 1, column 2");
  EXPECT_EQ(text(c_cell(5, 1)), "row 9, column 2");
  EXPECT_EQ(wrong_cover(16, 8, c_cell, 2, {0, 1}), "");
}
TEST(fragments, A_is_what_mma_takes) {
  EXPECT_EQ(text(a_cell(5, 0)), "row 1, column 2");
  EXPECT_EQ(text(a_cell(5, 1)), "row 9, column 2");
  EXPECT_EQ(text(a_cell(5, 2)), "row 1, column 10");
  EXPECT_EQ(text(a_cell(5, 3)), "row 9, column 10");
  EXPECT_EQ(wrong_cover(16, 16, a_cell, 4, {0, 1}), "");
}

// What the ladder rests on: blocks 2 k and 2 k + 1 of S, registers 0 and 1 of each, are operand P.
TEST(fragments, two_blocks_of_S_are_the_operand_P) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Cell s = c_cell(lane, i % 2);
      ASSERT_EQ(text(a_cell(lane, i)), text({s.row, s.col + i / 2 * 8})) << text(lane, i);
    }
}

// ldmatrix: register i of a lane is block i, whose row r begins where lane 8 i + r points; the
// lane's pair is row lane / 4, columns 2 (lane % 4) and the next, or transposed.
template <class Pointed>
Cell loaded(Pointed pointed, int lane, int i, bool transposed) {
  const int r = transposed ? lane % 4 * 2 : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2;
  const RowChunk row = pointed(8 * i + r);
  return {row.row, 8 * row.chunk + c};
}

TEST(fragments, ldmatrix_loads_Q) {  // a block of A, by rows
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      ASSERT_EQ(text(loaded(ldmatrix_by_rows, lane, i, false)), text(a_cell(lane, i)))
          << text(lane, i);
}

TEST(fragments, B_is_what_mma_takes) {
  EXPECT_EQ(text(b_cell(5, 0)), "row 2, column 1");
  EXPECT_EQ(text(b_cell(5, 1)), "row 10, column 1");
  EXPECT_EQ(wrong_cover(16, 8, b_cell, 2, {1, 0}), "");
}

TEST(fragments, ldmatrix_transposed_loads_V) {  // two fragments of B, by rows: B[k][n] = V[k][n]
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Cell b = b_cell(lane, i % 2);
      ASSERT_EQ(text(loaded(ldmatrix_by_rows, lane, i, true)), text({b.row, b.col + i / 2 * 8}))
          << text(lane, i);
    }
}

TEST(fragments, ldmatrix_loads_K) {  // two fragments of B, by columns: B[k][n] = K[n][k]
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Cell b = b_cell(lane, i % 2);
      ASSERT_EQ(text(loaded(ldmatrix_by_columns, lane, i, false)), text({b.col + i / 2 * 8, b.row}))
          << text(lane, i) << ": row and column of K";
    }
}

TEST(swizzle, gives_every_chunk_of_a_row_a_place) {
  for (int chunks : {8, 16, 32})
    for (int row = 0; row < 64; ++row) {
      std::set<int> places;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int place = swizzled(row, chunk);
        ASSERT_TRUE(place >= 0 && place < chunks) << "row " << row << ", chunk " << chunk;
        places.insert(place);
      }
      ASSERT_EQ(int(places.size()), chunks) << "row " << row;
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
        ASSERT_EQ(banks_of_a_column(chunks, row, chunk, false), 1);  // what it is there for
        ASSERT_EQ(banks_of_a_column(chunks, row, chunk, true), 8)
            << "chunk " << chunk << " of rows " << row << " to " << row + 7;
      }
}

TEST(swizzle, keeps_8_chunks_of_a_row_in_different_banks) {  // how tiles are written
  for (int row = 0; row < 64; ++row)
    for (int first = 0; first < 32; first += 8) {
      std::set<int> banks;
      for (int chunk = first; chunk < first + 8; ++chunk) banks.insert(swizzled(row, chunk) % 8);
      ASSERT_EQ(banks.size(), 8u) << "row " << row << ", from chunk " << first << " on";
    }
}

// fa2.cu finds chunk c + x of a row by an exclusive or, if c and x have no bit in common.
TEST(swizzle, moves_along_a_row_by_an_exclusive_or) {
  for (int row = 0; row < 16; ++row)
    for (int chunk = 0; chunk < 2; ++chunk)
      for (int x = 0; x < 32; x += 2)
        ASSERT_EQ(swizzled(row, chunk) ^ x, swizzled(row, chunk + x))
            << "row " << row << ", chunk " << chunk << " and " << x << " further";
}

// The hardware's words for it: of the address in bytes, bits 4 to 6 are changed by bits 7 to 9.
TEST(swizzle, of_a_box_is_the_one_that_the_hardware_knows) {
  for (int row = 0; row < 128; ++row)
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int plain = row * 128 + chunk * 16;
      ASSERT_EQ(swizzled_chunk(row, chunk) * 2, plain ^ (plain >> 7 & 7) << 4)
          << "in bytes, of row " << row << ", chunk " << chunk;
    }
}

// Also where the last section has fewer heads than the others.
TEST(order, takes_every_tile_once) {
  for (int tiles : {1, 2, 5})
    for (int heads : {1, 7, 12})
      for (int section : {1, 2, 4, heads})
        for (bool last_first : {false, true}) {
          const Order<int> order{tiles, heads, section, last_first};
          std::set<std::pair<int, int>> seen;
          for (int n = 0; n < tiles * heads; ++n) {
            int head = -1, tile = -1;
            order.place(n, head, tile);
            EXPECT_TRUE(head >= 0 && head < heads && tile >= 0 && tile < tiles);
            EXPECT_TRUE(seen.insert({head, tile}).second) << "head " << head << ", tile " << tile;
          }
        }
}

TEST(order, takes_the_tiles_of_a_section_by_turns) {
  const Order<int> order{2, 3, 2, true};  // heads 0 and 1, then 2
  std::vector<std::pair<int, int>> found(6);
  for (int n = 0; n < 6; ++n) order.place(n, found[n].first, found[n].second);
  EXPECT_EQ(found,
            (std::vector<std::pair<int, int>>{{0, 1}, {1, 1}, {0, 0}, {1, 0}, {2, 1}, {2, 0}}));
}

constexpr std::int64_t MiB = 1 << 20;
TEST(order, sections_by_their_bytes) {
  EXPECT_EQ(heads_within(32 * MiB, 2 * MiB, 64), 16);
  EXPECT_EQ(heads_within(32 * MiB, 3 * MiB, 64), 8);   // a power of two
  EXPECT_EQ(heads_within(32 * MiB, 2 * MiB, 12), 12);  // or all
  EXPECT_EQ(heads_within(32 * MiB, 64 * MiB, 12), 1);  // at least one
  EXPECT_EQ(heads_within(32 * MiB, 0, 12), 12);
}

// The counts of forward/hopper.md, backward/6_early.md and hopper.md. Each tile in its turn
// goes to the SM that is free first; steps[tile] is what it costs there. Of the SM that is done
// last: its steps.
int last_SM(const Order<int>& order, const std::vector<int>& steps) {
  std::vector<int> SMs(132);
  for (int n = 0; n < order.tiles * order.heads; ++n) {
    int head, tile;
    order.place(n, head, tile);
    *std::min_element(SMs.begin(), SMs.end()) += steps[tile];
  }
  return *std::max_element(SMs.begin(), SMs.end());
}

// B N = 16,384, 16 heads, tiles of 128 queries: number i sees i + 1 blocks of 128 keys.
TEST(order, longest_first_ends_all_SMs_together) {
  for (auto [N, last] : {std::pair{512, 39}, {1024, 70}, {4096, 258}, {16384, 1003}}) {
    const int tiles = N / 128, heads = 16384 / N * 16;
    std::vector<int> steps(tiles);
    for (int i = 0; i < tiles; ++i) steps[i] = i + 1;
    const int section = heads_within(32 * MiB, std::int64_t(N) * 128 * 4, heads);
    EXPECT_EQ(last_SM({tiles, heads, section, true}, steps), last) << "N = " << N;
  }
}

// The backward: 128 keys a tile, 64 queries a step. Tile j is seen by the rows from 128 j on.
std::vector<int> steps_of_keys(int N, int group) {
  std::vector<int> steps(N / 128);
  for (int j = 0; j < N / 128; ++j) steps[j] = group * (N / 64 - 2 * j);
  return steps;
}

TEST(order, sections_end_all_SMs_together_in_the_backward) {
  struct Row {
    int N, head_by_head, in_sections;
  };
  for (auto [N, head_by_head, in_sections] :
       {Row{1024, 150, 142}, Row{4096, 548, 512}, Row{16384, 2020, 2006}}) {
    const int heads = 16384 / N * 16,
              section = heads_within(40 * MiB, std::int64_t(N) * 128 * 8, heads);
    EXPECT_EQ(last_SM({N / 128, heads, 1, false}, steps_of_keys(N, 1)), head_by_head) << N;
    EXPECT_EQ(last_SM({N / 128, heads, section, false}, steps_of_keys(N, 1)), in_sections) << N;
  }
}

// Groups of eight, N = 4096: 4 batches of 2 key heads. A section of one ends late.
TEST(order, a_section_counts_one_query_head_of_a_group) {
  constexpr int N = 4096, heads = 8;
  const std::vector<int> steps = steps_of_keys(N, 8);
  const double mean = heads * std::accumulate(steps.begin(), steps.end(), 0.0) / 132;
  EXPECT_EQ(heads_within(20 * MiB, N * 128 * 8, heads), 4);
  EXPECT_NEAR(last_SM({N / 128, heads, 4, false}, steps) / mean, 1.00, 0.005);
  EXPECT_EQ(heads_within(20 * MiB, 8 * N * 128 * 8, heads), 1);
  EXPECT_NEAR(last_SM({N / 128, heads, 1, false}, steps) / mean, 1.59, 0.005);
}

}  // namespace
