// Arguments are checked before anything is touched; a bad one is a std::invalid_argument that names
// the function, the argument, the limit and the value.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/core/tensor.hpp"

namespace fa {

template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Sizes, heads, mask, and 1 <= d <= max_d. Does not read key_lengths: they may live on a GPU.
void check_problem(const char* who, const Problem& p, std::int64_t max_d);

// Every key length lies in [0, Nk]. For lengths in host memory.
void check_key_lengths(const char* who, const Problem& p);

// The scale is finite in the type that it is used in. Every tensor is there; no output overlaps an
// input, another output or itself. LSE may be null, and in the backward O too: a method that needs
// them asks for them.
template <class T>
void check_tensors(const char* who, const Problem& p, const Forward<T>& t);
template <class T>
void check_tensors(const char* who, const Problem& p, const Backward<T>& t);

// The scratch is there, as large as `asked` says (the name of a function, which returned `bytes`),
// and aligned. Nothing is asked of it where no bytes are needed.
void check_scratch(const std::string& who, const Scratch& scratch, const char* asked,
                   std::size_t bytes, std::size_t alignment);

// Bytes that this process can still allocate: the least of what the system has free, the cgroup's
// limit and `ulimit -v`. The largest number if the system does not say.
std::int64_t available_memory();

// For methods that need a lot: throws before the first byte is allocated.
void check_memory(const char* who, const std::string& what, double bytes,
                  const char* advice = "use a shorter sequence, or a stage that stores no scores");

namespace detail {

// What the process's cgroup and those above it leave, of either version; the largest number if they
// have no limit. `root` is for tests.
std::int64_t cgroup_room(const std::string& root = "");

// Memory touched by one tensor, or by one statistic (d = 1).
struct Region {
  const char* name;
  const void* data;  // null is an error unless the tensor is empty or optional
  std::int64_t element, B, H, N, d, batch, head, row;  // strides in elements
  bool optional = false;
};
// No output may share memory with an input or another output, nor two of its rows with each other.
void check_regions(const char* who, std::span<const Region> inputs,
                   std::span<const Region> outputs);

template <class T>
Region region(const char* name, const View<T>& v, std::int64_t B, std::int64_t H, std::int64_t N,
              std::int64_t d) {
  return {name, v.data, sizeof(T), B, H, N, d, v.batch, v.head, v.row};
}
template <class T>
Region region(const char* name, T* data, const Problem& p) {
  return {name, data, sizeof(T), p.B, p.Hq, p.Nq, 1, p.Hq * p.Nq, p.Nq, 1, true};
}

template <class T>
std::array<Region, 3> inputs_of(const Problem& p, const Forward<T>& t) {
  return {region("Q", t.Q, p.B, p.Hq, p.Nq, p.d), region("K", t.K, p.B, p.Hkv, p.Nk, p.d),
          region("V", t.V, p.B, p.Hkv, p.Nk, p.d)};
}
template <class T>
std::array<Region, 2> outputs_of(const Problem& p, const Forward<T>& t) {
  return {region("O", t.O, p.B, p.Hq, p.Nq, p.d), region("LSE", t.LSE, p)};
}
template <class T>
std::array<Region, 6> inputs_of(const Problem& p, const Backward<T>& t) {
  Region O = region("O", t.O, p.B, p.Hq, p.Nq, p.d);
  O.optional = true;
  return {region("Q", t.Q, p.B, p.Hq, p.Nq, p.d),
          region("K", t.K, p.B, p.Hkv, p.Nk, p.d),
          region("V", t.V, p.B, p.Hkv, p.Nk, p.d),
          region("dO", t.dO, p.B, p.Hq, p.Nq, p.d),
          O,
          region("LSE", t.LSE, p)};
}
template <class T>
std::array<Region, 3> outputs_of(const Problem& p, const Backward<T>& t) {
  return {region("dQ", t.dQ, p.B, p.Hq, p.Nq, p.d), region("dK", t.dK, p.B, p.Hkv, p.Nk, p.d),
          region("dV", t.dV, p.B, p.Hkv, p.Nk, p.d)};
}

template <class T>
void check_scale(const char* who, const Problem& p) {
  require(std::isfinite(static_cast<Stat<T>>(p.softmax_scale())), who,
          ": scale must be finite in the type of the scores, got ", p.softmax_scale());
}

}  // namespace detail

template <class T>
void check_tensors(const char* who, const Problem& p, const Forward<T>& t) {
  detail::check_scale<T>(who, p);
  detail::check_regions(who, detail::inputs_of(p, t), detail::outputs_of(p, t));
}
template <class T>
void check_tensors(const char* who, const Problem& p, const Backward<T>& t) {
  detail::check_scale<T>(who, p);
  detail::check_regions(who, detail::inputs_of(p, t), detail::outputs_of(p, t));
}

}  // namespace fa
