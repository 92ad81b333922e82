// What goes round in the ring: a rank's keys and values, and what has been added up for them.
#pragma once
#include <algorithm>

#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// K and V of one rank, [B, Hkv, rows, d] each, one behind the other so that one message takes both.
template <class X>
struct Pair {
  X* data;
  std::int64_t room, heads, rows, d;  // room: numbers of each

  View<X> K() const { return contiguous(data, heads, rows, d); }
  View<X> V() const { return contiguous(data + room, heads, rows, d); }
};

// Their sizes, their messages, and room for them. `owner`: the rank that they are of.
template <class T>
struct Cargo {
  using Int = std::int64_t;
  const Rank<T>& at;

  Int numbers(int owner) const { return at.p.B * at.p.Hkv * at.keys(owner) * at.p.d; }
  template <class X>
  Message message(int peer, X* data, int owner) const {
    return {peer, data, std::size_t(2 * numbers(owner)) * sizeof(X)};
  }
  template <class X>
  Pair<X> pair(X* data, int owner) const {
    return {data, numbers(owner), at.p.Hkv, at.keys(owner), at.p.d};
  }
  Int most_keys() const {
    Int most = 0;
    for (int r = 0; r < at.comm.size(); ++r) most = std::max(most, at.keys(r));
    return most;
  }
  // Room for the keys and values of any rank.
  template <class X>
  X* room() const {
    return at.template take<X>(2 * at.p.B * at.p.Hkv * most_keys() * at.p.d);
  }
  // The rank's own.
  void pack(const View<const T>& K, const View<const T>& V, T* to) const {
    const Pair<T> own = pair(to, at.comm.rank());
    const Size size{at.p.B, at.p.Hkv, own.rows, at.p.d};
    at.engine.copy(size, K, own.K());
    at.engine.copy(size, V, own.V());
  }
};

}  // namespace fa::ring
