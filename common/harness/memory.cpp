#include "common/harness/memory.hpp"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FA_COUNT_HEAP 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FA_COUNT_HEAP 0
#endif
#endif
#if !defined(FA_COUNT_HEAP) && defined(__GLIBC__)
#define FA_COUNT_HEAP 1
#endif

#if FA_COUNT_HEAP
#include <malloc.h>

// glibc lets a program replace malloc and keeps its own under these names.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace {
std::atomic<std::int64_t> alive{0}, peak{0};

void* count(void* p) {
  if (!p) return p;
  const auto size = static_cast<std::int64_t>(malloc_usable_size(p));
  const std::int64_t now = alive.fetch_add(size, std::memory_order_relaxed) + size;
  std::int64_t top = peak.load(std::memory_order_relaxed);
  while (now > top && !peak.compare_exchange_weak(top, now, std::memory_order_relaxed)) {
  }
  return p;
}

void uncount(void* p) {
  if (p)
    alive.fetch_sub(static_cast<std::int64_t>(malloc_usable_size(p)), std::memory_order_relaxed);
}
}  // namespace

extern "C" {
void* malloc(std::size_t n) noexcept { return count(__libc_malloc(n)); }
void* calloc(std::size_t n, std::size_t size) noexcept { return count(__libc_calloc(n, size)); }
void* realloc(void* p, std::size_t n) noexcept {
  uncount(p);
  void* q = __libc_realloc(p, n);
  return q ? count(q) : (n ? count(p), q : q);
}
void* memalign(std::size_t a, std::size_t n) noexcept { return count(__libc_memalign(a, n)); }
void* aligned_alloc(std::size_t a, std::size_t n) noexcept { return memalign(a, n); }
int posix_memalign(void** out, std::size_t a, std::size_t n) noexcept {
  *out = memalign(a, n);
  return *out ? 0 : ENOMEM;
}
void free(void* p) noexcept {
  uncount(p);
  __libc_free(p);
}
}

std::int64_t fa::harness::peak_heap_bytes(const std::function<void()>& f) {
  const std::int64_t before = alive.load();
  peak.store(before);
  f();
  return peak.load() - before;
}

#else

std::int64_t fa::harness::peak_heap_bytes(const std::function<void()>& f) {
  f();
  return -1;
}

#endif
