// What the inputs of a test look like. Random normal numbers alone cannot see a maximum that starts
// at zero, a finite mask value or a sum that is never rescaled; these kinds can.
#pragma once
#include <cstdint>
#include <string>

#include "common/core/problem.hpp"

namespace fa::judge {

struct Data {
  enum class Kind {
    normal,       // N(0, level^2)
    uniform,      // V in [0, 1), Q and K normal
    integers,     // sparse small integers: products and sums are exact
    equal,        // Q = 0: every visible key has the same weight
    level,        // every score is about `level`; far below zero it shows what masks are made of
    alternating,  // scores +level, -level, +level ...
    rising,       // scores grow by `level` from the first key to the last: every step rescales
    falling,      // ... and shrink: no step after the first does
    opposed,  // rising in even rows, falling below zero in odd ones: neighbours share no maximum
    spike_first,  // one key outweighs all others by `level`
    spike_middle,
    spike_last,
    denormal,  // V below the smallest normal number
  };
  Kind kind = Kind::normal;
  double level = 1;

  std::string name() const;
};

// Element of Q, K, V or dO for the given kind. `tensor` is 'Q', 'K', 'V' or 'd'.
double element(const Data& data, char tensor, const Problem& p, std::uint64_t seed, std::int64_t b,
               std::int64_t h, std::int64_t i, std::int64_t x);

}  // namespace fa::judge
