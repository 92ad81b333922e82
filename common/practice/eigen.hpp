// Read once, before a reader's code that multiplies with Eigen (see fa_stage_tests): reading Eigen
// and compiling the inner loops of its products is a third of what a reader would wait for at every
// save. The loops are compiled in eigen.cpp.
#pragma once
#include "common/practice/assertions.hpp"
// The order matters: Eigen takes the assertions from above.
#include <Eigen/Core>

#include "common/practice/steps.hpp"

// The names are Eigen 3.4's own; another version compiles its loops where they are used.
#if EIGEN_VERSION_AT_LEAST(3, 4, 0) && !EIGEN_VERSION_AT_LEAST(3, 4, 90)
// NOLINTBEGIN(bugprone-macro-parentheses): types and declarations
#define FA_PRODUCTS(PREFIX, T)                                                               \
  PREFIX template struct Eigen::internal::gebp_kernel<                                       \
      T, T, Eigen::Index, Eigen::internal::blas_data_mapper<T, Eigen::Index, 0, 0, 1>,       \
      Eigen::internal::gebp_traits<T, T>::mr, Eigen::internal::gebp_traits<T, T>::nr, false, \
      false>;                                                                                \
  FA_PACKS(PREFIX, T, 0)                                                                     \
  FA_PACKS(PREFIX, T, 1)
// Of one order of storage: what copies tiles of the factors, and matrix times vector.
#define FA_PACKS(PREFIX, T, ORDER)                                                             \
  PREFIX template struct Eigen::internal::gemm_pack_lhs<                                       \
      T, Eigen::Index, Eigen::internal::const_blas_data_mapper<T, Eigen::Index, ORDER>,        \
      Eigen::internal::gebp_traits<T, T>::mr, Eigen::internal::gebp_traits<T, T>::LhsProgress, \
      Eigen::internal::gebp_traits<T, T>::LhsPacket4Packing, ORDER, false, false>;             \
  PREFIX template struct Eigen::internal::gemm_pack_rhs<                                       \
      T, Eigen::Index, Eigen::internal::const_blas_data_mapper<T, Eigen::Index, ORDER>,        \
      Eigen::internal::gebp_traits<T, T>::nr, ORDER, false, false>;                            \
  PREFIX template struct Eigen::internal::general_matrix_vector_product<                       \
      Eigen::Index, T, Eigen::internal::const_blas_data_mapper<T, Eigen::Index, ORDER>, ORDER, \
      false, T, Eigen::internal::const_blas_data_mapper<T, Eigen::Index, 1 - ORDER>, false, 0>;
// NOLINTEND(bugprone-macro-parentheses)
FA_PRODUCTS(extern, float)
FA_PRODUCTS(extern, double)
#endif
