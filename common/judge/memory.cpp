#include "common/judge/memory.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <stdexcept>

#include "common/judge/sanitizer.hpp"

// -DFA_COUNT_HEAP=0 leaves malloc alone, as a static link needs it.
#ifndef FA_COUNT_HEAP
#if defined(__GLIBC__) && !FA_SANITIZED
#define FA_COUNT_HEAP 1
#else
#define FA_COUNT_HEAP 0
#endif
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
  if (q || n == 0) return count(q);
  count(p);  // it failed, and p is still there
  return nullptr;
}
void* memalign(std::size_t a, std::size_t n) noexcept { return count(__libc_memalign(a, n)); }
void* aligned_alloc(std::size_t a, std::size_t n) noexcept { return memalign(a, n); }
int posix_memalign(void** out, std::size_t a, std::size_t n) noexcept {
  if (a == 0 || a % sizeof(void*) != 0 || (a & (a - 1)) != 0) return EINVAL;
  void* p = memalign(a, n);
  if (!p) return ENOMEM;
  *out = p;
  return 0;
}
void free(void* p) noexcept {
  uncount(p);
  __libc_free(p);
}
}

std::int64_t fa::judge::peak_heap_bytes(FunctionRef<void()> f) {
  const std::int64_t before = alive.load();
  peak.store(before);
  f();
  return peak.load() - before;
}

#else

std::int64_t fa::judge::peak_heap_bytes(FunctionRef<void()> f) {
  f();
  return -1;
}

#endif

namespace {

// In the child: how it ended, in words.
std::string outcome_under_limit(std::int64_t bytes, fa::judge::FunctionRef<void()> f) {
  std::int64_t pages = 0;
  if (!(std::ifstream("/proc/self/statm") >> pages)) return "the size of the process is not known";
  const auto most = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + bytes);
  const rlimit limit{most, most};
  if (setrlimit(RLIMIT_AS, &limit) != 0) return "no limit can be set";
  try {
    f();
  } catch (const std::invalid_argument&) {
  } catch (const std::exception& e) {
    return e.what();
  }
  return {};
}

}  // namespace

std::string fa::judge::under_limit(std::int64_t bytes, FunctionRef<void()> f) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child < 0) return "no child process";
  if (child == 0) {
    const std::string text = outcome_under_limit(bytes, f);
    const bool written = write(ends[1], text.data(), text.size()) == ssize_t(text.size());
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  char text[200];
  const ssize_t size = read(ends[0], text, sizeof text);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (size > 0) return std::string(text, std::size_t(size));
  return status == 0 ? "" : "the process ended with status " + std::to_string(status);
}
