// What a stage tells the conformance suite about itself. A stage's check/test.cpp fills this in and
// the suite, compiled once, tests every point that is promised and that the rest is refused in
// words.
#pragma once
#include <cstring>
#include <functional>
#include <initializer_list>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/core/tensor.hpp"
#include "common/judge/buffer.hpp"
#include "common/judge/half.hpp"

namespace fa::judge {

// One call: the views (and key_lengths) are into the storages, which include gaps and canaries. A
// stage on the CPU looks at the views only; an adapter for a GPU copies the storages there and
// back.
template <class T>
struct ForwardCall {
  Problem p;
  Forward<T> t;
  std::vector<Storage> storage;
  int runs = 1;  // every one must leave the first's bits in O and LSE, or the call throws
};
template <class T>
struct BackwardCall {
  Problem p;
  Backward<T> t;
  std::vector<Storage> storage;
  int runs = 1;  // the same for dQ, dK and dV
};

template <class T>
struct Functions {
  std::function<void(const ForwardCall<T>&)> forward;    // null: this type is not promised
  std::function<void(const BackwardCall<T>&)> backward;  // null: no backward
};

// The storages that a call writes to.
inline std::vector<Storage> holding(const std::vector<Storage>& all,
                                    std::initializer_list<const void*> outputs) {
  std::vector<Storage> found;
  for (const Storage& s : all)
    for (const void* output : outputs)
      if (s.contains(output)) {
        found.push_back(s);
        break;
      }
  return found;
}
template <class T>
std::vector<Storage> outputs(const ForwardCall<T>& call) {
  return holding(call.storage, {call.t.O.data, call.t.LSE});
}
template <class T>
std::vector<Storage> outputs(const BackwardCall<T>& call) {
  return holding(call.storage, {call.t.dQ.data, call.t.dK.data, call.t.dV.data});
}

// f(), which leaves its outputs in host memory, again and again.
template <class F>
void repeat(int runs, const std::vector<Storage>& outputs, F f) {
  f();
  if (runs == 1) return;
  std::vector<std::vector<char>> first;
  for (const Storage& s : outputs) {
    const char* begin = static_cast<const char*>(s.data);
    first.emplace_back(begin, begin + s.bytes);
  }
  for (int n = 1; n < runs; ++n) {
    f();
    for (std::size_t k = 0; k < outputs.size(); ++k)
      if (std::memcmp(outputs[k].data, first[k].data(), outputs[k].bytes) != 0)
        throw std::runtime_error("run " + std::to_string(n + 1) + " of " + std::to_string(runs) +
                                 " left other bits than the first");
  }
}

// The functions of a stage that works in host memory.
template <class T, class F>
std::function<void(const ForwardCall<T>&)> on_host_forward(F f) {
  return [f](const ForwardCall<T>& call) {
    repeat(call.runs, outputs(call), [&] { f(call.p, call.t); });
  };
}
template <class T, class F>
std::function<void(const BackwardCall<T>&)> on_host_backward(F f) {
  return [f](const BackwardCall<T>& call) {
    repeat(call.runs, outputs(call), [&] { f(call.p, call.t); });
  };
}

// Sizes, heads (groups included), strides and any finite scale are promised by all, unless it says
// otherwise here.
struct Promises {
  std::int64_t max_d = 512;
  std::vector<std::int64_t> head_dims = {};  // the only ones, ascending; empty: all up to max_d
  bool unaligned = true;  // false: refuses rows that do not begin at multiples of 16 bytes
  bool positive_scale_only = false;
  bool lse = false;
  bool causal = false;          // both alignments
  bool key_lengths = false;     // and rows that see nothing
  bool rejects_lengths = true;  // a length outside [0, Nk] is refused; kernels clamp it instead
  bool large_scores = false;
  // A NaN in V_j, and in the backward any NaN, may reach rows that do not see j only if they share
  // a tile of nan_tile rows and nan_keys keys with one that does; 0: any row of the head.
  std::int64_t nan_tile = 1, nan_keys = 1;
  bool hidden_V_is_harmless = false;  // in the backward not even there, if it is in V
  bool tests_forward = true;  // false: the forward is another stage's, here for what needs it only
  bool host_memory = true;    // the functions read the views directly, not a copy of the storages
  // Device memory that a test may take, in bytes; null: its tensors stay small.
  std::function<double()> device_bytes;
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
  Functions<Eigen::half> f16;
  Functions<Eigen::bfloat16> bf16;
  // The forward as the chapter works it by hand, if that is not f32's: tiles of two, for instance.
  std::function<void(const ForwardCall<float>&)> by_hand = nullptr;
  // Effort by which lists of sizes are cut: an emulated GPU affords little, emulated tensor cores
  // less (tiny: of what is crossed with what, each meets some of the other), a real GPU much.
  enum class Effort { tiny, small, normal, large } effort = Effort::normal;
  // The kernels launched since the last time it was asked; null: there are none, or nobody counts.
  std::function<std::set<std::string>()> take_kernels = nullptr;
  // Why this stage cannot run here (no GPU, too old ...); empty if it can. A reason skips its
  // tests, or fails them where FA_REQUIRE_GPU=1.
  std::function<std::string()> unavailable;
};

// Registers one test per family of properties. Call it from a static initialiser:
//   static const bool registered = register_conformance({...});
bool register_conformance(const StageUnderTest& stage);
// Those registered so far.
const std::vector<StageUnderTest>& registered();

}  // namespace fa::judge
