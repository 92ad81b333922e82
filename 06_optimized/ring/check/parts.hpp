// A case of the judge, dealt out to ranks: what the tests of the ring share.
#pragma once
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "06_optimized/ring/ring.hpp"
#include "common/judge/cases.hpp"

namespace fa::ring {

using Int = std::int64_t;
using judge::Buffer, judge::Spec, judge::Storage;

// One tensor's rows of one rank.
template <class X>
struct Part {
  std::vector<X> data;
  View<X> view;
  std::vector<Block> blocks;
  Int B, H, d;

  Part(Int B_, Int H_, Int N, Int d_, int ranks, int rank, Order order)
      : blocks(blocks_of(N, ranks, rank, order)), B(B_), H(H_), d(d_) {
    const Int rows = rows_of(N, ranks, rank, order);
    data.assign(std::size_t(B * H * rows * d), std::numeric_limits<X>::quiet_NaN());
    view = contiguous(data.data(), H, rows, d);
  }
  template <class F>
  void each(const F& f) {
    Int row = 0;
    for (const Block& block : blocks)
      for (Int i = block.first; i < block.first + block.rows; ++i, ++row)
        for (Int b = 0; b < B; ++b)
          for (Int h = 0; h < H; ++h)
            for (Int x = 0; x < d; ++x) f(b, h, i, x, view.at(b, h, row)[x]);
  }
  Part& take(const Buffer<X>& from) {
    each([&](Int b, Int h, Int i, Int x, X& mine) { mine = from.at(b, h, i, x); });
    return *this;
  }
  Storage storage() { return {data.data(), data.size() * sizeof(X)}; }
  void give(Buffer<X>& to) {
    each([&](Int b, Int h, Int i, Int x, X& mine) { to.at(b, h, i, x) = mine; });
  }
};

template <class T>
struct ForwardParts {
  Part<T> Q, K, V, O;
  Part<Stat<T>> L;
  ForwardParts(const Problem& p, int ranks, int rank, Order order)
      : Q(p.B, p.Hq, p.Nq, p.d, ranks, rank, order),
        K(p.B, p.Hkv, p.Nk, p.d, ranks, rank, order),
        V(K),
        O(Q),
        L(p.B, p.Hq, p.Nq, 1, ranks, rank, order) {
    V.view.data = V.data.data(), O.view.data = O.data.data();
  }
  Forward<T> tensors() { return {Q.view, K.view, V.view, O.view, L.data.data()}; }
};

inline Spec sized(Int B, Int Hq, Int Hkv, Int Nq, Int Nk, Int d, Causal causal = Causal::none,
                  std::vector<Int> lengths = {}) {
  Spec s;
  s.p.B = B, s.p.Hq = Hq, s.p.Hkv = Hkv, s.p.Nq = Nq, s.p.Nk = Nk, s.p.d = d;
  s.p.causal = causal;
  s.lengths = std::move(lengths);
  return s;
}

// A causal problem with NaN in a query of head 0 and in a key of key head 1.
inline Spec with_NaN() { return sized(1, 4, 2, 24, 24, 8, Causal::top_left); }
template <class T>
void put_NaN(judge::ForwardCase<T>& c) {
  const T nan(std::numeric_limits<float>::quiet_NaN());
  c.Q.at(0, 0, 5, 1) = c.K.at(0, 1, 7, 2) = nan;
}
// Empty, or a row whose O and L are not NaN although it sees it, or are although it does not.
template <class T>
std::string where_NaN_is_wrong(const judge::ForwardCase<T>& c) {
  std::string wrong;
  for (Int h = 0; h < 4; ++h)
    for (Int i = 0; i < 24; ++i) {
      const bool want = h < 2 ? h == 0 && i == 5 : i >= 7;
      if (std::isnan(float(c.O.at(0, h, i, 3))) != want || std::isnan(c.LSE.at(0, h, i)) != want)
        wrong += "head " + std::to_string(h) + ", row " + std::to_string(i) + "\n";
    }
  return wrong;
}

inline constexpr Causal masks[] = {Causal::none, Causal::top_left, Causal::bottom_right};

}  // namespace fa::ring
