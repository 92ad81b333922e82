// The functions that an instrumented kernel calls before each access to memory (hooks.hpp).
#include "common/emulator/hooks.hpp"

#include <cstddef>
#include <cstring>

namespace {
const bool linked = fa::emulator::hooked = true;
}

#define FA_HOOK extern "C" __attribute__((used, visibility("default")))
FA_HOOK void __tsan_init() {}
FA_HOOK void __tsan_func_entry(void*) {}
FA_HOOK void __tsan_func_exit() {}
FA_HOOK void __tsan_vptr_update(void**, void*) {}
FA_HOOK void __tsan_vptr_read(void**) {}
#define FA_HOOKS(n)                                                                           \
  FA_HOOK void __tsan_read##n(void* p) { fa::emulator::hooked_access(p, n, false, FA_HERE); } \
  FA_HOOK void __tsan_write##n(void* p) { fa::emulator::hooked_access(p, n, true, FA_HERE); } \
  FA_HOOK void __tsan_unaligned_read##n(void* p) {                                            \
    fa::emulator::hooked_access(p, n, false, FA_HERE);                                        \
  }                                                                                           \
  FA_HOOK void __tsan_unaligned_write##n(void* p) {                                           \
    fa::emulator::hooked_access(p, n, true, FA_HERE);                                         \
  }
FA_HOOKS(1)
FA_HOOKS(2)
FA_HOOKS(4)
FA_HOOKS(8)
FA_HOOKS(16)
FA_HOOK void __tsan_read_range(void* p, std::size_t n) {
  fa::emulator::hooked_access(p, unsigned(n), false, FA_HERE);
}
FA_HOOK void __tsan_write_range(void* p, std::size_t n) {
  fa::emulator::hooked_access(p, unsigned(n), true, FA_HERE);
}
FA_HOOK void* __tsan_memcpy(void* to, const void* from, std::size_t n) {
  fa::emulator::hooked_access(from, unsigned(n), false, FA_HERE);
  fa::emulator::hooked_access(to, unsigned(n), true, FA_HERE);
  return std::memcpy(to, from, n);
}
FA_HOOK void* __tsan_memset(void* to, int byte, std::size_t n) {
  fa::emulator::hooked_access(to, unsigned(n), true, FA_HERE);
  return std::memset(to, byte, n);
}
// A static variable of a function is asked whether it has been made.
FA_HOOK unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// What atomicAdd() is made of.
FA_HOOK int __tsan_atomic32_load(const volatile int* p, int) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
FA_HOOK int __tsan_atomic32_fetch_add(volatile int* p, int x, int) {
  fa::emulator::hooked_addition(p, 4, FA_HERE);
  return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}
FA_HOOK int __tsan_atomic32_compare_exchange_strong(volatile int* p, int* expected, int x, int,
                                                    int) {
  fa::emulator::hooked_addition(p, 4, FA_HERE);
  return __atomic_compare_exchange_n(p, expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
FA_HOOK int __tsan_atomic32_compare_exchange_val(volatile int* p, int expected, int x, int, int) {
  fa::emulator::hooked_addition(p, 4, FA_HERE);
  __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
