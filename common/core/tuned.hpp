// The tile sizes that `./learn tune` has found on this GPU, for a forward() that is asked to take
// them: FA_TUNED names the file.
//
// A kernel's tile sizes are template arguments, so only what was compiled can run; and which shapes
// are worth it is known when they have been measured, after the stage was built. So the file names
// libraries that lie beside it, one for each shape that won, and they are loaded when first needed.
// The other way, all shapes in the product, would make everybody compile those that lose.
#pragma once
#include <cstdint>
#include <string>
#include <type_traits>

#include "common/core/problem.hpp"

namespace fa {

// What a library is asked: the arguments of a launch, as plain data.
struct TunedCall {
  enum Type { fp32, fp16, bf16 };
  const Problem* problem;
  const void* tensors;  // Forward<T>
  Type type;            // T
  float scale;
  unsigned* taken;  // one number of device memory, for kernels that count tiles; or null
  void* stream;
};
// 1: launched; 0: not a problem for this shape, so the stage's own kernel is; -1: failed, see error
using TunedLaunch = int(const TunedCall*, const char** error);

// Launches what the file that FA_TUNED names has for `kernel` and this problem. False if there is
// nothing: no FA_TUNED, or the shape in the code is the best one. A file that is broken, of another
// GPU or of other sources is a std::invalid_argument. `gpu` tells which one this is; it is asked
// once, with the file.
bool launch_tuned(const char* kernel, const TunedCall& call, std::string (*gpu)());

// The same with what a stage has at hand.
template <class Tensors>
bool launch_tuned(const char* kernel, const Problem& p, const Tensors& t, TunedCall::Type type,
                  float scale, unsigned* taken, void* stream, std::string (*gpu)()) {
  return launch_tuned(kernel, TunedCall{&p, &t, type, scale, taken, stream}, gpu);
}

}  // namespace fa
