// Where the numbers are: views into memory that somebody else owns. Nothing here allocates.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/core/problem.hpp"

namespace fa {

// One head: row i is d consecutive elements that start at data + i * stride.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t rows = 0, cols = 0;
  std::int64_t stride = 0;  // elements from one row to the next; any sign, 0 repeats one row

  FA_HOST_DEVICE T* operator[](std::int64_t i) const { return data + i * stride; }
};

// One tensor [B, H, N, d]: strides in elements, the last one is always 1. So [B, N, H, d] memory,
// slices of a larger tensor and broadcast heads (stride 0) are all views.
template <class T>
struct View {
  T* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;

  FA_HOST_DEVICE T* at(std::int64_t b, std::int64_t h, std::int64_t i = 0) const {
    return data + b * batch + h * head + i * row;
  }
  FA_HOST_DEVICE Rows<T> rows(std::int64_t b, std::int64_t h, std::int64_t N,
                              std::int64_t d) const {
    return {at(b, h), N, d, row};
  }
  operator View<const T>() const { return {data, batch, head, row}; }
};

// A view of [B, H, N, d] stored without gaps in that order.
template <class T>
View<T> contiguous(T* data, std::int64_t H, std::int64_t N, std::int64_t d) {
  return {data, H * N * d, N * d, d};
}

// Statistics of a row (LSE, D) are double for double and fp32 for everything else.
template <class T>
using Stat = std::conditional_t<std::is_same_v<std::remove_const_t<T>, double>, double, float>;

// O = softmax(scale Q K^T + mask) V. LSE is [B, Hq, Nq] without gaps, the natural logarithm of
// sum_j exp(scale q_i . k_j) over the visible keys; null if not wanted.
template <class T>
struct Forward {
  View<const T> Q, K, V;
  View<T> O;
  Stat<T>* LSE = nullptr;
};

// Gradients of a loss whose derivative by O is dO. O and LSE are what the forward returned.
template <class T>
struct Backward {
  View<const T> Q, K, V, O, dO;
  const Stat<T>* LSE = nullptr;
  View<T> dQ, dK, dV;
};

// Memory that a caller lends to a call, beside the tensors: where, and how much. What it holds
// before does not matter.
struct Scratch {
  void* data = nullptr;
  std::size_t bytes = 0;
};

}  // namespace fa
