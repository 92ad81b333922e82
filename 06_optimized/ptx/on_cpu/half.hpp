// CUDA's half types on the CPU: 16 bits, and how they become float and back. To the nearest number,
// of two equally near ones to the even one, as the GPU rounds.
#pragma once
#include <cstdint>
#include <cstring>

// As __device__ functions are: the line that reads a number is the kernel's, not one of these.
#define FA_INLINE __attribute__((always_inline))

// 1 bit for the sign, 8 for the exponent, 7 more digits: the upper half of a float.
struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    std::uint32_t b;
    std::memcpy(&b, &x, 4);
    const std::uint32_t to_even = 0x7fff + (b >> 16 & 1);
    bits = std::uint16_t(x != x ? 0x7fff : (b + to_even) >> 16);
  }
  FA_INLINE operator float() const {
    const std::uint32_t b = std::uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &b, 4);
    return x;
  }
};

// 1 bit for the sign, 5 for the exponent, 10 more digits.
struct __half {
  std::uint16_t bits;

  __half() = default;
  explicit __half(float x) {
    std::uint32_t b;
    std::memcpy(&b, &x, 4);
    const auto sign = std::uint16_t(b >> 16 & 0x8000);
    b &= 0x7fffffff;
    if (x != x) {
      bits = 0x7fff;
    } else if (b >= 0x477ff000) {  // 65520 and more: infinite
      bits = std::uint16_t(sign | 0x7c00);
    } else if (b < 0x38800000) {  // below 2^-14 the digits stand for multiples of 2^-24
      float magnitude;
      std::memcpy(&magnitude, &b, 4);
      magnitude += 0.5f;  // whose digits end there: this rounds
      std::memcpy(&b, &magnitude, 4);
      bits = std::uint16_t(sign | (b - 0x3f000000));
    } else {
      b -= 112u << 23;  // the exponent counts from 15, not 127
      bits = std::uint16_t(sign | (b + 0xfff + (b >> 13 & 1)) >> 13);
    }
  }
  FA_INLINE operator float() const {
    const std::uint32_t exponent = bits >> 10 & 31, digits = bits & 1023;
    const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
    float x = float(digits) * 0x1p-24f;
    std::uint32_t b;
    std::memcpy(&b, &x, 4);
    if (exponent == 31) b = 0x7f800000 | digits << 13;
    if (exponent > 0 && exponent < 31) b = (exponent + 112) << 23 | digits << 13;
    b |= sign;
    std::memcpy(&x, &b, 4);
    return x;
  }
};

#undef FA_INLINE
