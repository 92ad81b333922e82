// A case of the judge, dealt out to ranks: what the tests of the ring share.
#pragma once
#include <limits>
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

inline constexpr Causal masks[] = {Causal::none, Causal::top_left, Causal::bottom_right};

}  // namespace fa::ring
