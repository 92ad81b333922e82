// A head as an Eigen matrix: same memory, no copy. Eigen's default is column-major; ours is not.
#pragma once
#include <Eigen/Core>
#include <type_traits>

#include "common/core/tensor.hpp"

namespace fa {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;
template <class T>
using MatrixMap = Eigen::Map<
    std::conditional_t<std::is_const_v<T>, const Matrix<std::remove_const_t<T>>, Matrix<T>>,
    Eigen::Unaligned, Eigen::OuterStride<>>;

template <class T>
MatrixMap<T> as_matrix(const Rows<T>& r) {
  return {r.data, r.rows, r.cols, Eigen::OuterStride<>(r.stride)};
}

}  // namespace fa
