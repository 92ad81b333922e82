// What one piece of the mask gives: it is computed by itself, then merged or added.
#include <limits>

#include "06_optimized/ring/ring.hpp"
#include "06_optimized/ring/types.hpp"

namespace fa::ring {

using Int = std::int64_t;

template <class T>
MergedForward<T>::MergedForward(const Rank<T>& at) : at_(at), rows_(at.queries(at.comm.rank())) {
  const Int numbers = at.p.B * at.p.Hq * rows_;
  O_ = at.template take<Sum>(numbers * at.p.d);
  L_ = at.template take<Sum>(numbers);
  part_O_ = at.template take<T>(numbers * at.p.d);
  part_L_ = at.template take<Sum>(numbers);
  at.engine.fill(O_, std::size_t(numbers * at.p.d), 0);
  at.engine.fill(L_, std::size_t(numbers), -std::numeric_limits<Sum>::infinity());
}

template <class T>
void MergedForward<T>::add(const Problem& piece, const Forward<T>& t, const View<T>& K,
                           const View<T>& V, Int row) const {
  const Problem& p = at_.p;
  const View<T> part = contiguous(part_O_, p.Hq, piece.Nq, p.d);
  at_.engine.forward(piece, {from(t.Q, row), K, V, part, part_L_});
  at_.engine.merge({p.B, p.Hq, piece.Nq, p.d}, part, part_L_,
                   from(contiguous(O_, p.Hq, rows_, p.d), row),
                   from(contiguous(L_, p.Hq, rows_, 1), row));
}

template <class T>
void MergedForward<T>::give(const Forward<T>& t) const {
  const Problem& p = at_.p;
  at_.engine.round({p.B, p.Hq, rows_, p.d}, contiguous(O_, p.Hq, rows_, p.d), t.O);
  if (t.LSE)
    at_.engine.copy_sums({p.B, p.Hq, rows_, 1}, contiguous(L_, p.Hq, rows_, 1),
                         contiguous(t.LSE, p.Hq, rows_, 1));
}

template <class T>
PartOfBackward<T>::PartOfBackward(const Rank<T>& at, Int most_rows, Int most_keys)
    : at_(at),
      dQ_(at.template take<T>(at.p.B * at.p.Hq * most_rows * at.p.d)),
      dK_(at.template take<T>(at.p.B * at.p.Hkv * most_keys * at.p.d)),
      dV_(at.template take<T>(at.p.B * at.p.Hkv * most_keys * at.p.d)),
      L_(at.template take<Sum>(at.p.B * at.p.Hq * most_rows)) {}

template <class T>
void PartOfBackward<T>::compute(const Problem& pair, const Backward<T>& t, const View<T>& K,
                                const View<T>& V, Int row) const {
  const Problem& p = at_.p;
  const Int rows = at_.queries(at_.comm.rank());
  // A kernel wants the L of its rows without gaps.
  at_.engine.copy_sums({p.B, p.Hq, pair.Nq, 1}, from(contiguous(t.LSE, p.Hq, rows, 1), row),
                       contiguous(L_, p.Hq, pair.Nq, 1));
  at_.engine.backward(pair,
                      {from(t.Q, row), K, V, from(t.O, row), from(t.dO, row), L_,
                       contiguous(dQ_, p.Hq, pair.Nq, p.d), contiguous(dK_, p.Hkv, pair.Nk, p.d),
                       contiguous(dV_, p.Hkv, pair.Nk, p.d)});
}

template <class T>
void PartOfBackward<T>::add(const Problem& pair, Int row, const View<Sum>& dQ, const View<Sum>& dK,
                            const View<Sum>& dV) const {
  const Problem& p = at_.p;
  const Size queries{p.B, p.Hq, pair.Nq, p.d}, keys{p.B, p.Hkv, pair.Nk, p.d};
  at_.engine.add(queries, contiguous(dQ_, p.Hq, pair.Nq, p.d), from(dQ, row));
  at_.engine.add(keys, contiguous(dK_, p.Hkv, pair.Nk, p.d), dK);
  at_.engine.add(keys, contiguous(dV_, p.Hkv, pair.Nk, p.d), dV);
}

#define FA_INSTANTIATE(T)          \
  template class MergedForward<T>; \
  template class PartOfBackward<T>;
FA_RING_TYPES(FA_INSTANTIATE)

}  // namespace fa::ring
