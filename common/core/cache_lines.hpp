// Memory that begins where a cache line does. `new T[n]` promises 16 bytes; a vector of 64 bytes
// that lies across two lines takes twice as long, and a measurement then depends on luck.
#pragma once
#include <cstddef>
#include <new>
#include <vector>

namespace fa {

template <class T>
struct OnCacheLines {
  using value_type = T;
  static constexpr std::align_val_t line{64};

  OnCacheLines() = default;
  template <class U>
  OnCacheLines(const OnCacheLines<U>&) {}

  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), line)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, line); }
  // Scratch(n) sets nothing, as `new T[n]` does.
  template <class U>
  void construct(U* p) {
    ::new (static_cast<void*>(p)) U;
  }
  template <class U, class... Args>
  void construct(U* p, const Args&... args) {
    ::new (static_cast<void*>(p)) U(args...);
  }
  bool operator==(const OnCacheLines&) const = default;
};

template <class T>
using CacheLines = std::vector<T, OnCacheLines<T>>;

}  // namespace fa
