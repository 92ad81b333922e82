// How tiles come to hopper, to a block alone or to a pair, and what is said of them.
#pragma once
#include "06_optimized/ptx/tma.cuh"

namespace fa::optimized {

// A tile of `rows` rows, from row `first` of head h on.
template <class Tiles, int rows, class T>
__device__ void bring(T* tile, const CUtensorMap& map, Barrier* full, int first, int h, int b) {
  arrive_expecting(full, rows * Tiles::D * int(sizeof(T)));
#pragma unroll
  for (int x = 0; x < Tiles::D; x += 64) tma_load(tile + x * rows, map, full, x, first, h, b);
}

// A tile of keys that the blocks of a cluster share: each asks for its part, and it comes to all.
template <class Tiles, class T>
__device__ void bring_keys(T* tile, const CUtensorMap& map, Barrier* full, int first, int h,
                           int b) {
  if constexpr (Tiles::cluster == 1) {
    bring<Tiles, Tiles::Bc>(tile, map, full, first, h, b);
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

}  // namespace fa::optimized
