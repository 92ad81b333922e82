// One test case: a problem, its data and layout, with the buffers and the verdict.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "common/judge/buffer.hpp"
#include "common/judge/compare.hpp"
#include "common/judge/data.hpp"
#include "common/judge/function_ref.hpp"
#include "common/judge/oracle.hpp"
#include "common/judge/stage.hpp"

namespace fa::judge {

struct Spec {
  Problem p;  // its key_lengths pointer is ignored; `lengths` counts
  Data data = {};
  Layout layout = {};
  std::vector<std::int64_t> lengths = {};  // empty, or one per batch entry
  std::uint64_t seed = 1;
  Hooks hooks = {};  // what is not plain attention; not in the name

  // "B2 Hq4 Hkv2 Nq17 Nk65 d8 top_left normal": unique enough to run this case alone.
  std::string name() const;
};

// What a kernel of 06_optimized/beyond is tried on, besides its own cases: ragged sizes, groups of
// heads, both causal alignments, key lengths, rows that see nothing, layouts. d is a multiple of
// `multiple` and at most 40.
std::vector<Spec> walk_specs(std::int64_t multiple = 1);

// The double-precision copy that the oracle reads.
template <class T>
Array to_array(const Buffer<T>& x) {
  Array a(x.B(), x.H(), x.N(), x.d());
  x.for_each([&](auto b, auto h, auto i, auto e) {
    a.at(b, h, i, e) = static_cast<double>(x.at(b, h, i, e));
  });
  return a;
}

template <class T>
struct ForwardCase {
  Spec spec;
  Problem p;
  Buffer<T> Q, K, V, O;
  Buffer<Stat<T>> LSE;

  ForwardCase(const Spec& spec, bool want_lse);
  ForwardCase(const ForwardCase&) = delete;
  ForwardCase& operator=(const ForwardCase&) = delete;

  // Views and storages for the stage. Outputs are poisoned with NaN.
  ForwardCall<T> call();
  // Empty, or what is wrong: O or LSE against the oracle, a write outside, a changed input.
  std::string verdict();
  // Only these rows against the oracle, so that long cases stay cheap; the others must be numbers.
  std::string verdict(const std::vector<std::int64_t>& rows);
  std::string check_memory_untouched() const;

 private:
  std::string verdict(const ForwardOracle& want);
  bool want_lse_;
};

template <class T>
struct BackwardCase {
  Spec spec;
  Problem p;
  Buffer<T> Q, K, V, O, dO, dQ, dK, dV;
  Buffer<Stat<T>> LSE;

  explicit BackwardCase(const Spec& spec);  // O and LSE come from the oracle
  // O and LSE are what this forward makes of Q, K and V: the oracle's take too long for long cases.
  BackwardCase(const Spec& spec, FunctionRef<void(const ForwardCall<T>&)> forward);
  BackwardCase(const BackwardCase&) = delete;
  BackwardCase& operator=(const BackwardCase&) = delete;

  // O and LSE once more, of what Q, K and V hold now.
  void fill_context();

  BackwardCall<T> call();
  std::string verdict();
  // Only dQ of these queries and dK, dV of these keys against the oracle, which takes O and LSE as
  // they are; the other rows must be numbers.
  std::string verdict(const std::vector<std::int64_t>& queries,
                      const std::vector<std::int64_t>& keys);
  std::string check_memory_untouched() const;

 private:
  struct Inputs {};
  BackwardCase(const Spec& spec, Inputs);  // without O and LSE
};

// Derivative of f at x by central differences, element by element: (f(x+h) - f(x-h)) / 2h. f reads
// x through the reference. For double precision and h = 1e-5 the error is near 1e-9 relative.
template <class F>
std::vector<double> central_differences(const std::vector<double*>& x, F f, double h = 1e-5) {
  std::vector<double> gradient;
  for (double* element : x) {
    const double at = *element;
    *element = at + h;
    const double above = f();
    *element = at - h;
    const double below = f();
    *element = at;
    gradient.push_back((above - below) / (2 * h));
  }
  return gradient;
}

}  // namespace fa::judge
