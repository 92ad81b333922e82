// Included before everything else in a reader's file: Eigen checks shapes and indices there.
#pragma once
namespace fa::practice {
// In words, as an exception: the tests then name the case and go on.
[[noreturn]] void eigen_complains(const char* assertion);
}  // namespace fa::practice
#define eigen_assert(condition) \
  ((condition) ? static_cast<void>(0) : ::fa::practice::eigen_complains(#condition))
