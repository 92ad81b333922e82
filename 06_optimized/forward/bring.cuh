// How tiles come to hopper and O leaves it: by TMA where that can go, else by hand.
//
// TMA wants addresses and rows that are multiples of 16 bytes, and here d a multiple of 8. For all
// else the 128 threads of the loading warpgroup carry tiles into shared memory themselves, a number
// at a time, and a thread that computes writes its numbers of O. Slow, and right everywhere.
#pragma once
#include <cstdint>

#include "06_optimized/ptx/fragments.hpp"
#include "06_optimized/ptx/tma.cuh"
#include "common/core/tensor.hpp"

namespace fa::optimized {

// tile[r][x] = X[first + r][x] for first + r < end and x < d, 0 beyond, swizzled as TMA does it: a
// tile of `rows` rows in boxes of 64 columns. `barrier` is a numbered one for these threads.
template <int D, int rows, class T>
__device__ void carry(T* tile, const View<const T>& X, Barrier* full, int barrier, std::int64_t end,
                      std::int64_t d, int first, int h, int b) {
#pragma unroll 1
  for (int e = threadIdx.x; e < rows * D; e += 128) {
    const int r = e / D, x = e % D;
    tile[x / 64 * rows * 64 + swizzled_chunk(r, x % 64 / 8) + x % 8] =
        first + r < end && x < d ? X.at(b, h, first + r)[x] : T(0.0f);
  }
  fence_async();
  sync(barrier, 128);
  if (threadIdx.x == 0) arrive(full);
}

// A tile of `rows` rows, from row `first` of head h on: by TMA one thread asks, else 128 carry.
template <class Tiles, int rows, class T>
__device__ void bring(T* tile, const CUtensorMap& map, const View<const T>& X, Barrier* full,
                      int barrier, std::int64_t end, std::int64_t d, int first, int h, int b) {
  if constexpr (Tiles::tma) {
    arrive_expecting(full, rows * Tiles::D * int(sizeof(T)));
#pragma unroll
    for (int x = 0; x < Tiles::D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
  } else {
    carry<Tiles::D, rows>(tile, X, full, barrier, end, d, first, h, b);
  }
}

// A tile of keys that the blocks of a cluster share: each asks for its part, and it comes to all.
template <class Tiles, class T>
__device__ void bring_keys(T* tile, const CUtensorMap& map, const View<const T>& X, Barrier* full,
                           int barrier, std::int64_t end, std::int64_t d, int first, int h, int b) {
  if constexpr (Tiles::cluster == 1) {
    bring<Tiles, Tiles::Bc>(tile, map, X, full, barrier, end, d, first, h, b);
  } else {
    constexpr int rows = Tiles::Bc / Tiles::cluster;
    static_assert(rows % 8 == 0);  // the swizzle counts eight
    const int part = int(rank_in_cluster()) * rows;
    arrive_expecting(full, Tiles::Bc * Tiles::D * int(sizeof(T)));
#pragma unroll
    for (int x = 0; x < Tiles::D; x += 64)
      tma_load_to_all(tile + x * Tiles::Bc + part * 64, map, full, x, first + part, h, b,
                      (1 << Tiles::cluster) - 1);
  }
}
// Arrives at a barrier in each block of the cluster.
template <class Tiles>
__device__ void arrive_at_all(Barrier* b) {
  if constexpr (Tiles::cluster == 1)
    arrive(b);
  else
    for (int rank = 0; rank < Tiles::cluster; ++rank) arrive_at(b, rank);
}
// Says that this group has read what bring_keys() brought: to all who bring a part of the next.
template <class Tiles>
__device__ void give_back(Barrier* free) {
  const int thread = threadIdx.x % 128;
  if constexpr (Tiles::cluster == 1) {
    if (thread == 0) arrive(free);
  } else {
    if (thread < Tiles::cluster) arrive_at(free, thread);
  }
}

// Keys past the length may hold anything, and 0 times NaN is NaN: rows of V from `seen` on become
// 0, by the 128 threads of a group.
template <class Tiles, class T>
__device__ void clear(T* V, int seen, int barrier) {
  for (int e = max(seen, 0) * 8 + threadIdx.x % 128; e < Tiles::Bc * 8; e += 128)
    for (int x = 0; x < Tiles::D; x += 64)
      *reinterpret_cast<uint4*>(V + x * Tiles::Bc + e * 8) = make_uint4(0, 0, 0, 0);
  fence_async();
  sync(barrier, 128);
}

// The thread's numbers of O, in rows `row` and row + 8 of a tile of `rows` that begins at i0.
template <class T, int n>
__device__ void carry_out(const View<T>& X, const float (&O)[n], std::int64_t d, int row, int rows,
                          int i0, int h, int b) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int r = row + 8 * (i / 2 % 2), x = 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
    if (r < rows && x < d) X.at(b, h, i0 + r)[x] = T(O[i]);
  }
}

}  // namespace fa::optimized
