// Numbers that look random and are a function of their place: Philox 4x32 with ten rounds. Who
// knows key and counter has the number, so nobody needs to keep it. A round multiplies half of the
// counter, 32 x 32 bits to 64, and adds the rest without carries; the key moves on by constants.
// Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, Parallel Random Numbers: As Easy as 1, 2, 3
// (SC 2011), section 4.3, which names the constants. Tested against the known answers that the
// authors published with Random123 (kat_vectors).
#pragma once
#include <cstdint>

#include "common/core/problem.hpp"

namespace fa::dropout {

struct Words {
  std::uint32_t x, y, z, w;

  // Word n of the four, by selects: an index that a thread finds out would cost memory.
  FA_HOST_DEVICE std::uint32_t operator[](int n) const {
    return n < 2 ? (n == 0 ? x : y) : (n == 2 ? z : w);
  }
};

// x y, all 64 bits. In C++ ptxas would add a zero to the upper half, an instruction.
FA_HOST_DEVICE inline std::uint64_t wide_product(std::uint32_t x, std::uint32_t y) {
#ifdef __CUDA_ARCH__
  std::uint64_t all;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(all) : "r"(x), "r"(y));
  return all;
#else
  return std::uint64_t(x) * y;
#endif
}

// [quote philox]
FA_HOST_DEVICE inline Words philox(Words counter, std::uint32_t key0, std::uint32_t key1) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = wide_product(0xD2511F53, counter.x);
    const std::uint64_t b = wide_product(0xCD9E8D57, counter.z);
    counter = {std::uint32_t(b >> 32) ^ counter.y ^ key0, std::uint32_t(b),
               std::uint32_t(a >> 32) ^ counter.w ^ key1, std::uint32_t(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}
// [end quote]

}  // namespace fa::dropout
