// What a thread of a kernel reads and writes, call by call: the compiler is asked to instrument
// kernels as for ThreadSanitizer, and hooks.cpp stands where its library would. Who links hooks.cpp
// has it; other programs know nothing of single accesses.
#pragma once
#include "common/emulator/block.hpp"

namespace fa::emulator {

void hooked_access(const void* p, unsigned bytes, bool writes, Place);
void hooked_addition(const volatile void* p, unsigned bytes, Place);  // by an atomic

}  // namespace fa::emulator
