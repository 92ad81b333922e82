// What a stage tells the conformance suite about itself. A stage's check/test.cpp fills this in and
// the suite, compiled once, tests every point that is promised and that the rest is refused in
// words.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "common/core/tensor.hpp"
#include "common/harness/buffer.hpp"

namespace fa::harness {

// One call: the views (and key_lengths) are into the storages, which include gaps and canaries. A
// stage on the CPU looks at the views only; an adapter for a GPU copies the storages there and
// back.
template <class T>
struct ForwardCall {
  Problem p;
  Forward<T> t;
  std::vector<Storage> storage;
};
template <class T>
struct BackwardCall {
  Problem p;
  Backward<T> t;
  std::vector<Storage> storage;
};

template <class T>
struct Functions {
  std::function<void(const ForwardCall<T>&)> forward;    // null: this type is not promised
  std::function<void(const BackwardCall<T>&)> backward;  // null: no backward
};

// The functions of a stage that works in host memory.
template <class T, class F>
std::function<void(const ForwardCall<T>&)> on_host_forward(F f) {
  return [f](const ForwardCall<T>& call) { f(call.p, call.t); };
}
template <class T, class F>
std::function<void(const BackwardCall<T>&)> on_host_backward(F f) {
  return [f](const BackwardCall<T>& call) { f(call.p, call.t); };
}

// Sizes, heads (groups included), strides and any finite scale are promised by all.
struct Promises {
  std::int64_t max_d = 512;
  bool positive_scale_only = false;
  bool lse = false;
  bool causal = false;          // both alignments
  bool key_lengths = false;     // and rows that see nothing
  bool rejects_lengths = true;  // a length outside [0, Nk] is refused; kernels clamp it instead
  bool large_scores = false;
  // A NaN in V_j may reach rows that do not see j only if they share a tile of this many rows and
  // keys with one that does; 0: any row of the head.
  std::int64_t nan_tile = 1;
  bool tests_forward = true;  // false: the forward is another stage's, here for what needs it only
  bool host_memory = true;    // the functions read the views directly, not a copy of the storages
  // Upper bound of heap bytes beyond the arguments, for float; null: not promised.
  std::function<double(const Problem&)> extra_bytes, extra_bytes_backward;
  bool backward_reads_O_and_LSE = true;  // if false they may be null
  bool deterministic_backward = true;    // false for a kernel that adds with atomics, by name
  // Sizes that this kernel takes; null: all. What it does not take must be refused in words.
  std::function<bool(const Problem&)> takes;
};

struct StageUnderTest {
  std::string name;  // the test suite's name: "safe_softmax", "tiled"
  Promises promises;
  Functions<float> f32;
  Functions<double> f64;
  // Effort by which lists of sizes are cut: an emulated GPU affords little, a real one much.
  enum class Effort { small, normal, large } effort = Effort::normal;
  // Why this stage cannot run here (no GPU, too old ...); empty if it can. A reason skips its
  // tests, or fails them where FA_REQUIRE_GPU=1.
  std::function<std::string()> unavailable;
};

// Registers one test per family of properties. Call it from a static initialiser:
//   static const bool registered = register_conformance({...});
bool register_conformance(const StageUnderTest& stage);

}  // namespace fa::harness
