// Ring attention, as one rank sees it: queries stay, keys and values go round. While a step
// computes with the keys that are here, the next ones are under way.
#include "06_optimized/ring/ring.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "06_optimized/ring/travel.hpp"
#include "06_optimized/ring/types.hpp"

namespace fa::ring {

using Int = std::int64_t;

// ---- two partial results are one ---------------------------------------------------------------

template <class Sum, class T>
void merge(const T* part_O, Sum part_L, Int d, Sum* O, Sum& L) {
  // [blank]
  constexpr Sum none = -std::numeric_limits<Sum>::infinity();
  if (L == none && part_L == none) return;  // neither has seen a key
  const Sum m = std::max(L, part_L);
  // (2) what the keys of each weigh, measured from the larger L: exp(L - m) and exp(L_part - m)
  const Sum old_weight = std::exp(L - m), new_weight = std::exp(part_L - m);
  const Sum l = old_weight + new_weight;
  // (3) L' = m + log(l)
  // [step 06.45: the log-sum-exp of all keys of both (1 line)]
  L = m + std::log(l);
  // [end]
  // (4) O' = (exp(L - m) O + exp(L_part - m) O_part) / l: two shares whose sum is 1
  for (Int x = 0; x < d; ++x) {
    // [step 06.46: each result counts as much as its keys weigh among all of them (1 line)]
    O[x] = (old_weight * O[x] + new_weight * Sum(part_O[x])) / l;
    // [end]
  }
  // [end blank]
}

// ---- the ring ----------------------------------------------------------------------------------

namespace {

template <class T>
struct Travel : Cargo<T> {
  const int P = this->at.comm.size(), me = this->at.comm.rank();
  const int next = (me + 1) % P, last = (me + P - 1) % P;

  // Whose keys are here in step s. In step 0 everybody has their own; then all move on by one.
  int owner_of(int s) const {
    int owner = me;
    // [blank]
    // [step 06.47: whose keys have come s ranks far (1 line)]
    owner = (me - s + P) % P;
    // [end]
    // [end blank]
    return owner;
  }

  std::string step(const char* what, int s) const {
    return std::string(what) + ", step " + std::to_string(s + 1) + " of " + std::to_string(P);
  }
};

}  // namespace

template <class T>
void ring_forward(const Rank<T>& at, const Forward<T>& t) {
  const Travel<T> ring{{at}};
  const MergedForward<T> merged(at);  // of the keys that have been here
  T* here = ring.template room<T>();
  T* coming = ring.template room<T>();
  ring.pack(t.K, t.V, here);

  for (int s = 0; s < ring.P; ++s) {
    const int owner = ring.owner_of(s);
    // The keys that are here are sent on and computed with at once: both only read them.
    if (s + 1 < ring.P)
      at.comm.begin(ring.step("forward", s), {ring.message(ring.next, here, owner)},
                    {ring.message(ring.last, coming, ring.owner_of(s + 1))});
    const Pair<T> keys = ring.pair(here, owner);
    each_piece(
        at.p, at.query_blocks(ring.me), at.key_blocks(owner),
        [&](const Problem& piece, Int row) { merged.add(piece, t, keys.K(), keys.V(), row); });
    if (s + 1 < ring.P) at.comm.wait();
    std::swap(here, coming);
  }
  merged.give(t);
}

template <class T>
void ring_backward(const Rank<T>& at, const Backward<T>& t) {
  using Sum = Stat<T>;
  const Problem& p = at.p;
  const Travel<T> ring{{at}};
  const Int rows = at.queries(ring.me), numbers = p.B * p.Hq * rows * p.d;
  Sum* const dQ = at.template take<Sum>(numbers);
  at.engine.fill(dQ, std::size_t(numbers), 0);
  const PartOfBackward<T> part(at, rows, ring.most_keys());
  T* here = ring.template room<T>();
  T* coming = ring.template room<T>();
  ring.pack(t.K, t.V, here);
  // [blank]
  // dK and dV of keys: what all ranks have given that they have been to. This rank adds its part.
  Sum* arriving = ring.template room<Sum>();
  Sum* leaving = ring.template room<Sum>();
  at.engine.fill(arriving, std::size_t(2 * ring.numbers(ring.me)), 0);  // its own keys come first

  for (int s = 0; s < ring.P; ++s) {
    const int owner = ring.owner_of(s);
    std::vector<Message> sent, received;
    if (s + 1 < ring.P) {
      sent.push_back(ring.message(ring.next, here, owner));
      received.push_back(ring.message(ring.last, coming, ring.owner_of(s + 1)));
    }
    // The sums follow their keys, one step behind: they are on their way while the next rank
    // computes what it will add.
    if (s > 0) {
      // [step 06.48: the sums of the last step's keys go on; those of these keys come (2 lines)]
      sent.push_back(ring.message(ring.next, leaving, ring.owner_of(s - 1)));
      received.push_back(ring.message(ring.last, arriving, owner));
      // [end]
    }
    if (ring.P > 1) at.comm.begin(ring.step("backward", s), sent, received);
    bool under_way = ring.P > 1;
    const auto wait = [&] {
      if (std::exchange(under_way, false)) at.comm.wait();
    };
    const Pair<T> keys = ring.pair(here, owner);
    each_piece(p, at.query_blocks(ring.me), at.key_blocks(owner),
               [&](const Problem& pair, Int row) {
                 part.compute(pair, t, keys.K(), keys.V(), row);
                 // (5) dK_j and dV_j are sums over all queries that see key j, whoever has them
                 // [step 06.49: added to what the ranks before gave, once it is here (3 lines)]
                 wait();
                 const Pair<Sum> sums = ring.pair(arriving, owner);
                 part.add(pair, row, contiguous(dQ, p.Hq, rows, p.d), sums.K(), sums.V());
                 // [end]
               });
    wait();  // in a step without a piece
    std::swap(arriving, leaving);
    std::swap(here, coming);
  }
  // After P - 1 moves the sums are complete, but one rank short of home. There nothing is added to
  // them, so they go as what they will be: in 16 bits that is half of the bytes.
  const auto round_keys = [&](const Pair<Sum>& from, const View<T>& dK, const View<T>& dV) {
    const Size size{p.B, p.Hkv, from.rows, p.d};
    at.engine.round(size, from.K(), dK);
    at.engine.round(size, from.V(), dV);
  };
  const Pair<T> own = ring.pair(coming, ring.me);
  if (ring.P == 1) {
    round_keys(ring.pair(leaving, ring.me), t.dK, t.dV);
  } else {
    const Pair<T> going = ring.pair(here, ring.next);
    round_keys(ring.pair(leaving, ring.next), going.K(), going.V());
    at.comm.begin("backward, the last move of dK and dV",
                  {ring.message(ring.next, going.data, ring.next)},
                  {ring.message(ring.last, own.data, ring.me)});
  }
  at.engine.round({p.B, p.Hq, rows, p.d}, contiguous(dQ, p.Hq, rows, p.d), t.dQ);
  if (ring.P > 1) {
    at.comm.wait();
    at.engine.copy({p.B, p.Hkv, own.rows, p.d}, own.K(), t.dK);
    at.engine.copy({p.B, p.Hkv, own.rows, p.d}, own.V(), t.dV);
  }
  // [end blank]
}

#define FA_INSTANTIATE(T)                                          \
  template void merge(const T*, Stat<T>, Int, Stat<T>*, Stat<T>&); \
  template void ring_forward(const Rank<T>&, const Forward<T>&);   \
  template void ring_backward(const Rank<T>&, const Backward<T>&);
FA_RING_TYPES(FA_INSTANTIATE)

}  // namespace fa::ring
