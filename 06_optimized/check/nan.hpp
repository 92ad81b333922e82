// Where a NaN may come to, and where no bit may change.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "common/judge/cases.hpp"

namespace fa::judge {

// hit(b, h, i, x) says NaN by yes, the same bits by no, and anything by nothing.
template <class T, class Hit>
void expect_hit(const char* name, const Buffer<T>& now, const Buffer<T>& before, const Hit& hit,
                const std::string& what) {
  std::int64_t wrong = 0;
  now.for_each([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x) {
    const T &got = now.at(b, h, i, x), &was = before.at(b, h, i, x);
    const std::optional<bool> must = hit(b, h, i, x);
    if (must) wrong += *must ? !std::isnan(double(got)) : std::memcmp(&got, &was, sizeof(T)) != 0;
  });
  EXPECT_EQ(wrong, 0) << name << what;
}

// NaN in a backward with a causal mask, that sees(i, j) may narrow. In query i: dQ_i, and the dK of
// all keys that i sees, are NaN. In key j: dK_j, and the dQ of all rows that see j. So is each dV_j
// whose weight of such a pair is kept(i, j). Tiles before the key's, or behind the query's, have no
// bit changed.
template <class T, class Run, class Sees, class Kept>
void expect_nan_in_its_tiles(BackwardCase<T>& c, const Run& run, const Sees& sees, const Kept& kept,
                             const std::string& what) {
  constexpr std::int64_t tile = sizeof(T) == 4 ? 64 : 128, query = 10, key = tile + 5;
  run();
  const Buffer<T> Q = c.Q, K = c.K, dQ = c.dQ, dK = c.dK, dV = c.dV;
  for (const bool in_key : {false, true}) {
    in_key ? c.K.at(0, 0, key, 3) = T(NAN) : c.Q.at(0, 0, query, 3) = T(NAN);
    run();
    const auto sure = [](bool nan, bool same) {
      return nan ? std::optional(true) : same ? std::optional(false) : std::nullopt;
    };
    const auto of_query = [&](auto, auto, std::int64_t i, auto) {
      return in_key ? sure(sees(i, key), i < tile) : sure(i == query, i >= tile);
    };
    const auto of_key = [&](auto, auto, std::int64_t j, auto) {
      return in_key ? sure(j == key, j < tile) : sure(sees(query, j), j >= tile);
    };
    const auto of_value = [&](auto, auto, std::int64_t j, auto) {
      bool adds = false;
      for (std::int64_t i = in_key ? key : query; i < (in_key ? c.p.Nq : query + 1); ++i)
        adds |= (in_key ? j == key : true) && sees(i, j) && kept(i, j);
      return sure(adds, in_key ? j < tile : j >= tile);
    };
    const std::string where = (in_key ? " of NaN in a key, " : " of NaN in a query, ") + what;
    expect_hit("dQ", c.dQ, dQ, of_query, where);
    expect_hit("dK", c.dK, dK, of_key, where);
    expect_hit("dV", c.dV, dV, of_value, where);
    c.Q = Q, c.K = K;
  }
}

}  // namespace fa::judge
