// ptx/tma.cuh on the CPU: tensor maps and the copy engine; copies.cpp says what they do.
#pragma once
#include <array>
#include <cstdint>

#include "06_optimized/ptx/on_cpu/barrier.hpp"

// What the engine knows of a tensor: where it begins, how many numbers it has of columns, rows,
// heads and batches, how far they lie apart in bytes; and the rows of a box.
struct CUtensorMap {
  char* data = nullptr;
  std::array<std::int64_t, 4> size{}, stride{};
  int rows = 0;
};

namespace fa::optimized {

void tma_load(void* to, const CUtensorMap& map, Barrier* full, int x, int i, int h, int b);
void tma_load_to_all(void* to, const CUtensorMap& map, Barrier* full, int x, int i, int h, int b,
                     std::uint16_t ranks);
void tma_store(const CUtensorMap& map, const void* from, int x, int i, int h, int b);
void tma_commit();
void tma_wait_read();
void tma_wait();
void fence_async();
void bulk_load(void* to, const void* from, int bytes, Barrier* full);
void bulk_store(float* to, const float* from, int bytes);
void bulk_add(float* to, const float* from, int bytes);
void wait_turn(const int* turn, int n);  // these two are ptx/add.cuh's
void pass_turn(int* turn);

}  // namespace fa::optimized
