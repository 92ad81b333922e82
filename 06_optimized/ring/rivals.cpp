// Two other ways to the same result. `gather`: all keys come to every rank, then nothing moves any
// more. `heads`: heads do not look at each other, so a rank takes all rows of some heads, computes
// them alone, and gives the rows back.
#include <type_traits>
#include <utility>

#include "06_optimized/ring/ring.hpp"
#include "06_optimized/ring/types.hpp"

namespace fa::ring {
namespace {

using Int = std::int64_t;

// From a rank's rows, one block after the other, to their places in the whole sequence; or back.
// f(size, the rank's rows, the sequence's rows): views from where the block begins in each.
template <class X, class F>
void each_block(Int B, Int H, Int d, const std::vector<Block>& blocks, const View<X>& packed,
                const View<X>& whole, const F& f) {
  Int row = 0;
  for (const Block& block : blocks) {
    f(Size{B, H, block.rows, d}, from(packed, row), from(whole, block.first));
    row += block.rows;
  }
}

// ---- all keys first ----------------------------------------------------------------------------

// K or V of all ranks, [B, Hkv, Nk, d], in the order of the sequence.
template <class T>
struct AllKeys {
  const Rank<T>& at;
  const int P = at.comm.size(), me = at.comm.rank();

  Int numbers(int rank) const { return at.p.B * at.p.Hkv * at.keys(rank) * at.p.d; }
  template <class X>
  View<X> whole(X* data) const {
    return contiguous(data, at.p.Hkv, at.p.Nk, at.p.d);
  }
  template <class X>
  View<X> packed(X* data, int rank) const {
    return contiguous(data, at.p.Hkv, at.keys(rank), at.p.d);
  }

  std::pair<View<T>, View<T>> gather(const std::string& what, const View<const T>& K,
                                     const View<const T>& V) const {
    const Problem& p = at.p;
    const Int all = p.B * p.Hkv * p.Nk * p.d;
    T* const rooms[2] = {at.template take<T>(all), at.template take<T>(all)};
    T* const packed_all[2] = {at.template take<T>(all), at.template take<T>(all)};
    std::vector<Message> sent, received;
    for (int x = 0; x < 2; ++x) {
      Int mine = 0, place = 0;
      for (int rank = 0; rank < me; ++rank) mine += numbers(rank);
      at.engine.copy({p.B, p.Hkv, at.keys(me), p.d}, x ? V : K, packed(packed_all[x] + mine, me));
      for (int rank = 0; rank < P; place += numbers(rank++)) {
        if (rank == me) continue;
        sent.push_back({rank, packed_all[x] + mine, std::size_t(numbers(me)) * sizeof(T)});
        received.push_back({rank, packed_all[x] + place, std::size_t(numbers(rank)) * sizeof(T)});
      }
    }
    at.comm.begin(what, sent, received);
    at.comm.wait();
    for (int x = 0; x < 2; ++x) {
      T* place = packed_all[x];
      for (int rank = 0; rank < P; place += numbers(rank++))
        each_block(p.B, p.Hkv, p.d, at.key_blocks(rank), packed(place, rank), whole(rooms[x]),
                   [&](const Size& size, const View<T>& part, const View<T>& there) {
                     at.engine.copy(size, part, there);
                   });
    }
    return {whole(rooms[0]), whole(rooms[1])};
  }
};

}  // namespace

template <class T>
void gather_forward(const Rank<T>& at, const Forward<T>& t) {
  const Problem& p = at.p;
  const AllKeys<T> keys{at};
  const auto [K, V] = keys.gather("forward, all keys", t.K, t.V);
  const MergedForward<T> merged(at);
  // No row is in more than one piece: the merge only puts it in its place.
  each_piece(p, at.query_blocks(keys.me), {{0, p.Nk}},
             [&, K = K, V = V](const Problem& piece, Int row) { merged.add(piece, t, K, V, row); });
  merged.give(t);
}

template <class T>
void gather_backward(const Rank<T>& at, const Backward<T>& t) {
  using Sum = Stat<T>;
  const Problem& p = at.p;
  const AllKeys<T> keys{at};
  const auto [K, V] = keys.gather("backward, all keys", t.K, t.V);
  const Int rows = at.queries(keys.me), numbers = p.B * p.Hq * rows * p.d;
  const Int all = p.B * p.Hkv * p.Nk * p.d, own = keys.numbers(keys.me);
  Sum* const dQ = at.template take<Sum>(numbers);
  Sum* const sums[2] = {at.template take<Sum>(all), at.template take<Sum>(all)};  // of dK, of dV
  at.engine.fill(dQ, std::size_t(numbers), 0);
  for (Sum* sum : sums) at.engine.fill(sum, std::size_t(all), 0);
  const PartOfBackward<T> part(at, rows, p.Nk);
  each_piece(p, at.query_blocks(keys.me), {{0, p.Nk}},
             [&, K = K, V = V](const Problem& pair, Int row) {
               part.compute(pair, t, K, V, row);
               part.add(pair, row, contiguous(dQ, p.Hq, rows, p.d), keys.whole(sums[0]),
                        keys.whole(sums[1]));
             });
  // Each rank's part of the sums goes to that rank, which adds up what came, in the order of ranks.
  Sum* const packed[2] = {at.template take<Sum>(all), at.template take<Sum>(all)};
  Sum* const came[2] = {at.template take<Sum>(own * keys.P), at.template take<Sum>(own * keys.P)};
  std::vector<Message> sent, received;
  for (int x = 0; x < 2; ++x) {
    Sum* place = packed[x];
    for (int rank = 0; rank < keys.P; ++rank) {
      each_block(p.B, p.Hkv, p.d, at.key_blocks(rank), keys.packed(place, rank),
                 keys.whole(sums[x]),
                 [&](const Size& size, const View<Sum>& to, const View<Sum>& there) {
                   at.engine.copy_sums(size, there, to);
                 });
      if (rank == keys.me)
        at.engine.copy_sums({p.B, p.Hkv, at.keys(rank), p.d}, keys.packed(place, rank),
                            keys.packed(came[x] + own * rank, rank));
      if (rank != keys.me) {
        sent.push_back({rank, place, std::size_t(keys.numbers(rank)) * sizeof(Sum)});
        received.push_back({rank, came[x] + own * rank, std::size_t(own) * sizeof(Sum)});
      }
      place += keys.numbers(rank);
    }
  }
  at.comm.begin("backward, dK and dV go home", sent, received);
  at.comm.wait();
  for (int x = 0; x < 2; ++x) {
    for (int rank = 1; rank < keys.P; ++rank)
      at.engine.add_sums(came[x] + own * rank, came[x], std::size_t(own));
    at.engine.round({p.B, p.Hkv, at.keys(keys.me), p.d}, keys.packed(came[x], keys.me),
                    x ? t.dV : t.dK);
  }
  at.engine.round({p.B, p.Hq, rows, p.d}, contiguous(dQ, p.Hq, rows, p.d), t.dQ);
}

// ---- heads for rows ----------------------------------------------------------------------------

namespace {

// Rank r has the key heads [r Hkv / P, (r + 1) Hkv / P), and the query heads that read them.
template <class T>
struct Heads {
  const Rank<T>& at;
  const int P = at.comm.size(), me = at.comm.rank();
  std::vector<Message> sent{}, received{};
  std::vector<std::function<void()>> after{};  // what came is put in its place

  Int first(Int H, int rank) const { return at.p.Hkv ? rank * at.p.Hkv / P * (H / at.p.Hkv) : 0; }
  Int count(Int H, int rank) const { return first(H, rank + 1) - first(H, rank); }

  // To the owners of heads: of H heads each rank gets its own, of all rows. [B, count, N, d]
  template <class X, class Copy>
  X* to_heads(const View<const X>& rows, Int H, Int N, Int d, const Copy& copy) {
    X* const whole = at.template take<X>(at.p.B * count(H, me) * N * d);
    move<X>(rows, H, N, d, whole, true, copy);
    return whole;
  }
  // And back. rows: [B, H, this rank's N, d]
  template <class X, class Copy>
  void to_rows(X* whole, Int H, Int N, Int d, const View<X>& rows, const Copy& copy) {
    move<X>(rows, H, N, d, whole, false, copy);
  }
  void go(const std::string& what) {
    at.comm.begin(what, sent, received);
    at.comm.wait();
    for (const auto& put : after) put();
    sent.clear(), received.clear(), after.clear();
  }

 private:
  template <class X, class Rows, class Copy>
  void move(const View<Rows>& rows, Int H, Int N, Int d, X* whole, bool to_heads,
            const Copy& copy) {
    const Int B = at.p.B;
    const Int own_rows = rows_of(N, P, me, at.order), own_heads = count(H, me);
    const View<X> sequence = contiguous(whole, own_heads, N, d);
    for (int rank = 0; rank < P; ++rank) {
      // A: this rank's rows, that rank's heads. C: that rank's rows, this rank's heads.
      const Int n = rows_of(N, P, rank, at.order), heads = count(H, rank);
      X* const A = at.template take<X>(B * heads * own_rows * d);
      X* const C = rank == me ? A : at.template take<X>(B * own_heads * n * d);
      const View<X> packed_A = contiguous(A, heads, own_rows, d);
      const View<X> packed_C = contiguous(C, own_heads, n, d);
      const View<Rows> part{rows.at(0, first(H, rank)), rows.batch, rows.head, rows.row};
      const Size size_A{B, heads, own_rows, d};
      const auto put_C = [=, this] {
        each_block(B, own_heads, d, blocks_of(N, P, rank, at.order), packed_C, sequence,
                   [&](const Size& size, const View<X>& x, const View<X>& y) {
                     to_heads ? copy(size, x, y) : copy(size, y, x);
                   });
      };
      const std::size_t bytes_A = std::size_t(B * heads * own_rows * d) * sizeof(X);
      const std::size_t bytes_C = std::size_t(B * own_heads * n * d) * sizeof(X);
      if (to_heads) {
        copy(size_A, View<const X>{part.data, part.batch, part.head, part.row}, packed_A);
        after.push_back(put_C);
      } else if constexpr (!std::is_const_v<Rows>) {
        put_C();
        after.push_back([=] { copy(size_A, View<const X>(packed_A), part); });
      }
      if (rank == me) continue;
      sent.push_back({rank, to_heads ? A : C, to_heads ? bytes_A : bytes_C});
      received.push_back({rank, to_heads ? C : A, to_heads ? bytes_C : bytes_A});
    }
  }
};

template <class T>
Problem of_heads(const Heads<T>& heads) {
  Problem p = heads.at.p;
  p.Hq = heads.count(p.Hq, heads.me), p.Hkv = heads.count(p.Hkv, heads.me);
  return p;
}

}  // namespace

template <class T>
void heads_forward(const Rank<T>& at, const Forward<T>& t) {
  using Sum = Stat<T>;
  const Problem& p = at.p;
  const auto copy = [&](const Size& s, const View<const T>& x, const View<T>& y) {
    at.engine.copy(s, x, y);
  };
  const auto copy_sums = [&](const Size& s, const View<const Sum>& x, const View<Sum>& y) {
    at.engine.copy_sums(s, x, y);
  };
  Heads<T> heads{at};
  const Problem own = of_heads(heads);
  T* const Q = heads.to_heads(t.Q, p.Hq, p.Nq, p.d, copy);
  T* const K = heads.to_heads(t.K, p.Hkv, p.Nk, p.d, copy);
  T* const V = heads.to_heads(t.V, p.Hkv, p.Nk, p.d, copy);
  heads.go("forward, rows for heads");
  T* const O = at.template take<T>(p.B * own.Hq * p.Nq * p.d);
  Sum* const L = at.template take<Sum>(p.B * own.Hq * p.Nq);
  at.engine.forward(
      own, {contiguous<const T>(Q, own.Hq, p.Nq, p.d), contiguous<const T>(K, own.Hkv, p.Nk, p.d),
            contiguous<const T>(V, own.Hkv, p.Nk, p.d), contiguous(O, own.Hq, p.Nq, p.d), L});
  heads.to_rows(O, p.Hq, p.Nq, p.d, t.O, copy);
  // Also who wants no LSE takes part: the others cannot know.
  const Int rows = at.queries(heads.me);
  Sum* const own_L = t.LSE ? t.LSE : at.template take<Sum>(p.B * p.Hq * rows);
  heads.to_rows(L, p.Hq, p.Nq, 1, contiguous(own_L, p.Hq, rows, 1), copy_sums);
  heads.go("forward, heads for rows");
}

template <class T>
void heads_backward(const Rank<T>& at, const Backward<T>& t) {
  using Sum = Stat<T>;
  const Problem& p = at.p;
  const auto copy = [&](const Size& s, const View<const T>& x, const View<T>& y) {
    at.engine.copy(s, x, y);
  };
  const auto copy_sums = [&](const Size& s, const View<const Sum>& x, const View<Sum>& y) {
    at.engine.copy_sums(s, x, y);
  };
  Heads<T> heads{at};
  const Problem own = of_heads(heads);
  const auto queries = [&](const View<const T>& x) {
    return contiguous<const T>(heads.to_heads(x, p.Hq, p.Nq, p.d, copy), own.Hq, p.Nq, p.d);
  };
  const auto keys = [&](const View<const T>& x) {
    return contiguous<const T>(heads.to_heads(x, p.Hkv, p.Nk, p.d, copy), own.Hkv, p.Nk, p.d);
  };
  Backward<T> whole;
  whole.Q = queries(t.Q), whole.K = keys(t.K), whole.V = keys(t.V);
  whole.O = queries(t.O), whole.dO = queries(t.dO);
  whole.LSE =
      heads.to_heads(contiguous(t.LSE, p.Hq, at.queries(heads.me), 1), p.Hq, p.Nq, 1, copy_sums);
  heads.go("backward, rows for heads");
  const Int Nq = p.B * p.Nq * p.d, Nk = p.B * p.Nk * p.d;
  whole.dQ = contiguous(at.template take<T>(own.Hq * Nq), own.Hq, p.Nq, p.d);
  whole.dK = contiguous(at.template take<T>(own.Hkv * Nk), own.Hkv, p.Nk, p.d);
  whole.dV = contiguous(at.template take<T>(own.Hkv * Nk), own.Hkv, p.Nk, p.d);
  at.engine.backward(own, whole);
  heads.to_rows(whole.dQ.data, p.Hq, p.Nq, p.d, t.dQ, copy);
  heads.to_rows(whole.dK.data, p.Hkv, p.Nk, p.d, t.dK, copy);
  heads.to_rows(whole.dV.data, p.Hkv, p.Nk, p.d, t.dV, copy);
  heads.go("backward, heads for rows");
}

#define FA_INSTANTIATE(T)                                            \
  template void gather_forward(const Rank<T>&, const Forward<T>&);   \
  template void gather_backward(const Rank<T>&, const Backward<T>&); \
  template void heads_forward(const Rank<T>&, const Forward<T>&);    \
  template void heads_backward(const Rank<T>&, const Backward<T>&);
FA_RING_TYPES(FA_INSTANTIATE)

}  // namespace fa::ring
