// Which part of the work a block does, and where a key lies: what the kernels of this walk share.
#pragma once
#include "06_optimized/beyond/decode/decode.hpp"
#include "06_optimized/ptx/barrier.cuh"

namespace fa::decode {

// Built for compute capability 9.0 or later, the merge is launched while the parts are at work, and
// waits for them itself; and two blocks can merge their parts without one.
__device__ inline void merge_may_start() {
#if defined(FA_EMULATED) || __CUDA_ARCH__ >= 900
  optimized::next_kernel_may_start();
#endif
}
__device__ inline void parts_are_done() {
#if defined(FA_EMULATED) || __CUDA_ARCH__ >= 900
  optimized::previous_kernel_is_done();
#endif
}

// How many blocks of a kernel an SM holds at once; the emulator, which has no SMs, is told.
template <class Kernel>
int blocks_of_an_sm([[maybe_unused]] Kernel kernel, [[maybe_unused]] int threads,
                    [[maybe_unused]] std::size_t shared_bytes, int told) {
#ifdef FA_EMULATED
  return told;
#else
  allow_shared_memory(kernel, shared_bytes);
  FA_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&told, kernel, threads, shared_bytes));
  return told > 0 ? told : 1;
#endif
}

// Block n takes a tile of rows of key head g of sequence b against part `split` of its keys. Row r
// of all rows of a key head is query r % Nq of query head r / Nq of the group: all of them want the
// same keys. The parts of a tile of rows follow each other: two of them may be a cluster.
struct Work {
  std::int64_t b, g;
  int split, first, rows;  // of the tile: its first row, and how many it has, at most Br

  __device__ Work(const Problem& p, int Br, int splits, unsigned n) {
    const int all = int(p.Hq / p.Hkv * p.Nq), tiles = (all + Br - 1) / Br;
    split = int(n % splits);
    first = int(n / splits % tiles) * Br;
    rows = min(Br, all - first);
    b = n / splits / tiles / unsigned(p.Hkv);
    g = n / splits / tiles % unsigned(p.Hkv);
  }
  __device__ int query(const Problem& p, int r) const { return (first + r) % int(p.Nq); }
  __device__ std::int64_t head(const Problem& p, int r) const {
    return g * (p.Hq / p.Hkv) + (first + r) / int(p.Nq);
  }
  // Its row among all of [B, Hq, Nq].
  __device__ std::int64_t row(const Problem& p, int r) const {
    return (b * p.Hq + head(p, r)) * p.Nq + query(p, r);
  }
};

// The queries are the last ones of their sequence: their diagonal ends at its length, not at Nk.
__device__ inline Mask mask_of(const Problem& p, std::int64_t b, bool causal) {
  Mask mask(p, b);
  mask.Nk = mask.length;
  mask.causal = causal ? Causal::bottom_right : Causal::none;
  return mask;
}

// K or V of key head g of sequence b. Key j >= first_new is read from the new tensor: so nobody
// waits for the block that appends it.
template <class T>
struct Keys {
  T* cache;                           // its first row; in pages, that of page 0
  const T* added;                     // the first new row
  std::int64_t row, page, added_row;  // from one to the next
  const std::int32_t* table;          // of this sequence; null: no pages
  int pages, bits, first_new;         // a page has 2^bits keys

  __device__ Keys(const Problem& p, const Tensors<T>& t, const View<T>& X,
                  const View<const T>& new_X, const Work& at, const Mask& mask)
      : cache(X.at(t.cache.table ? 0 : at.b, at.g)),
        added(new_X.data ? new_X.at(at.b, at.g) : nullptr),
        row(X.row),
        page(X.batch),
        added_row(new_X.row),
        table(t.cache.table ? t.cache.table + at.b * t.cache.table_stride : nullptr),
        pages(int(t.cache.pages)),
        bits(0),
        first_new(int(mask.length - (new_X.data ? p.Nq : 0))) {
    while (t.cache.page_size >> (bits + 1)) ++bits;
  }

  // [quote lookup]
  // Where key j lies in the cache. The host cannot see page numbers, so they are clamped.
  __device__ T* place(int j) const {
    if (!table) return cache + j * row;
    const int number = max(0, min(table[j >> bits], pages - 1));
    return cache + number * page + (j & ((1 << bits) - 1)) * row;
  }
  __device__ const T* operator[](int j) const {
    return j >= first_new ? added + (j - first_new) * added_row : place(j);
  }
  // [end quote]

  // Sixteen keys from a multiple of 16 on lie in one page, which is looked up once.
  struct Sixteen {
    const Keys& keys;
    int j;         // the first one
    const T* old;  // where it lies in the cache, if it does

    __device__ const T* operator()(int r) const {
      return j + r >= keys.first_new ? keys[j + r] : old + r * keys.row;
    }
  };
  __device__ Sixteen sixteen(int j) const { return {*this, j, j < first_new ? place(j) : nullptr}; }

  // Where new row i goes: null if nowhere. A place below 0 is none, nor is one in a page that is
  // not there.
  __device__ T* place_of_new(int i) const {
    const int j = first_new + i;
    const bool there = added && j >= 0 && (!table || unsigned(table[j >> bits]) < unsigned(pages));
    return there ? place(j) : nullptr;
  }
};

// By a block: the new rows to their places. A thread reads both of its numbers before it writes, so
// that it waits for memory once.
template <class T>
__device__ void append(const Problem& p, const Keys<T>& K, const Keys<T>& V) {
  const int d = int(p.d), all = int(p.Nq) * d;
  if (!K.added && !V.added) return;
  for (int n = int(threadIdx.x); n < all; n += int(blockDim.x)) {
    const int i = n / d, x = n % d;
    T *const to_K = K.place_of_new(i), *const to_V = V.place_of_new(i);
    const T new_K = to_K ? K.added[i * K.added_row + x] : T(0.f);
    const T new_V = to_V ? V.added[i * V.added_row + x] : T(0.f);
    if (to_K) to_K[x] = new_K;
    if (to_V) to_V[x] = new_V;
  }
}

}  // namespace fa::decode
