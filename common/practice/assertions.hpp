// Included before everything else in a reader's file: Eigen checks shapes and indices there.
#pragma once
namespace fa::practice {
[[noreturn]] void eigen_complains(const char* assertion);
}
#define eigen_assert(condition) \
  ((condition) ? static_cast<void>(0) : ::fa::practice::eigen_complains(#condition))
