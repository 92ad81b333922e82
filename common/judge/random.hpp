// Seeded test data that is the same on every platform: a hash of (seed, index), integer arithmetic,
// no library distribution (std::normal_distribution differs between libraries).
#pragma once
#include <cstdint>

namespace fa::judge {

// SplitMix64's finaliser (Steele, Lea, Flood 2014) over seed and index.
inline std::uint64_t hash(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed * 0x9e3779b97f4a7c15u + (index + 1) * 0xd1b54a32d192ed03u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Uniform in [0, 1), 53 bits.
inline double uniform(std::uint64_t seed, std::uint64_t index) {
  return static_cast<double>(hash(seed, index) >> 11) * 0x1p-53;
}

// Nearly normal, mean 0, variance 1, within +-6: the sum of twelve 16-bit uniforms. Sums of
// integers are exact, so no platform's logarithm or cosine can change a bit.
inline double normal(std::uint64_t seed, std::uint64_t index) {
  std::int64_t sum = 0;
  for (std::uint64_t k = 0; k < 3; ++k)
    for (std::uint64_t bits = hash(seed, 3 * index + k), n = 0; n < 4; ++n, bits >>= 16)
      sum += static_cast<std::int64_t>(bits & 0xffff);
  return (static_cast<double>(sum) + 6.0 - 6.0 * 65536.0) * 0x1p-16;
}

// Integer in [lo, hi].
inline std::int64_t integer(std::uint64_t seed, std::uint64_t index, std::int64_t lo,
                            std::int64_t hi) {
  const auto span = static_cast<std::uint64_t>(hi - lo) + 1;
  return lo + static_cast<std::int64_t>(hash(seed, index) % span);
}

}  // namespace fa::judge
