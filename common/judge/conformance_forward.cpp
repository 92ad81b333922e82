// Properties of a forward pass, family by family.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <thread>

#include "common/judge/conformance.hpp"
#include "common/judge/memory.hpp"
#include "common/judge/random.hpp"

namespace fa::judge {
namespace {

using Int = std::int64_t;
using Kind = Data::Kind;
constexpr double infinity = std::numeric_limits<double>::infinity();

bool always(const StageUnderTest& s) {
  return s.promises.tests_forward &&
         (s.f32.forward || s.f64.forward || s.f16.forward || s.bf16.forward);
}

std::vector<Causal> masks(const Run& run) {
  if (!run.promises().causal) return {Causal::none};
  return {Causal::none, Causal::top_left, Causal::bottom_right};
}

void sizes(Run& run) {
  for (const Problem& p : awkward_sizes(run, Causal::none)) run.forward({p});
}

void causal(Run& run, Causal alignment) {
  for (const Problem& p : awkward_sizes(run, alignment)) run.forward({p});
  // What row i gives must not depend on anything at keys that it does not see, not even by a bit.
  const Int d = run.d(16);
  const Spec spec{shape(37, 45, d, 1, 2, 2, alignment)};
  run.each_type([&](auto type) {
    using T = decltype(type);
    run.run(std::string("later keys changed ") + type_name<T>(), [&]() -> std::string {
      ForwardCase<T> before(spec, run.promises().lse), after(spec, run.promises().lse);
      const Int i = 20, n = visible_keys(before.p, 0, i);
      const auto change = [&](auto& x) {
        const Array old = to_array(x);
        x.fill([&](auto b, auto h, auto j, auto e) {
          return old.at(b, h, j, e) + (j >= n ? 3.0 + double(e) : 0.0);
        });
      };
      change(after.K);
      change(after.V);
      forward(run, before);
      forward(run, after);
      for (Int h = 0; h < 2; ++h)
        for (Int x = 0; x < d; ++x)
          if (!(before.O.at(0, h, i, x) == after.O.at(0, h, i, x)))
            return "O row 20 changed when only keys it must not see changed";
      return {};
    });
  });
}

void values(Run& run) {
  std::vector<Data> kinds = {{Kind::normal, 0.01},   {Kind::uniform},     {Kind::integers},
                             {Kind::equal},          {Kind::level, -5},   {Kind::level, 20},
                             {Kind::rising, 20},     {Kind::falling, 20}, {Kind::denormal},
                             {Kind::spike_last, 10}, {Kind::opposed, 20}};
  if (run.promises().large_scores)
    for (Data d : std::vector<Data>{{Kind::normal, 5},
                                    {Kind::level, 100},
                                    {Kind::level, 1e4},
                                    {Kind::level, -100},
                                    {Kind::level, -500},
                                    {Kind::level, -2e4},
                                    {Kind::level, -1e5},
                                    {Kind::alternating, 1e4},
                                    {Kind::rising, 1000},
                                    {Kind::opposed, 1000},
                                    {Kind::falling, 1000},
                                    {Kind::spike_first, 1e4},
                                    {Kind::spike_middle, 1e4},
                                    {Kind::spike_last, 120},
                                    {Kind::spike_last, 1e4}})
      kinds.push_back(d);
  for (const Data& data : kinds)
    for (Causal c : masks(run))
      for (auto [Nq, Nk] : {std::pair{33, 97}, {3, 64}, {65, 130}}) {
        run.forward({shape(Nq, Nk, run.d(16), 1, 1, 1, c), data});
        if (run.small()) break;
      }
}

void scale(Run& run) {
  for (double s : {0.0, 0.1, 1.0, 2.0, -0.7}) {
    if (s <= 0 && run.promises().positive_scale_only) continue;
    for (Int d : {1, 8, 64}) {
      Spec spec{shape(9, 70, run.d(d))};
      spec.p.scale = s;
      run.forward(spec);
    }
  }
  // The largest score is that of the smallest product.
  if (!run.promises().large_scores || run.promises().positive_scale_only) return;
  Spec spec{shape(33, 97, run.d(16)), {Kind::normal, 15}};
  spec.p.scale = -1;
  run.forward(spec);
}

template <class T>
void copy_heads(Buffer<T>& to, const Buffer<T>& from, Int group) {
  to.fill([&](auto b, auto h, auto i, auto x) {
    return static_cast<double>(from.at(b, h / group, i, x));
  });
}

void heads(Run& run) {
  const Int d = run.d(8);
  run.forward({shape(13, 21, d, 3, 6, 2)});
  run.forward({shape(6, 9, run.d(4), 2, 5, 1)});
  run.each_type([&](auto type) {
    using T = decltype(type);
    const std::string t = std::string(" ") + type_name<T>();
    const bool lse = run.promises().lse;
    run.run("groups equal repeated keys" + t, [&]() -> std::string {
      ForwardCase<T> grouped({shape(11, 19, d, 2, 6, 2)}, lse);
      ForwardCase<T> repeated({shape(11, 19, d, 2, 6, 6)}, lse);
      copy_heads(repeated.K, grouped.K, 3);
      copy_heads(repeated.V, grouped.V, 3);
      forward(run, grouped);
      forward(run, repeated);
      return same_bits("O", grouped.O, repeated.O);
    });
    run.run("one head alone" + t, [&]() -> std::string {
      ForwardCase<T> all({shape(11, 19, d, 3, 4, 2)}, lse), one({shape(11, 19, d)}, lse);
      const auto take = [](auto& to, const auto& from, Int b, Int h) {
        to.fill(
            [&](auto, auto, auto i, auto x) { return static_cast<double>(from.at(b, h, i, x)); });
      };
      take(one.Q, all.Q, 1, 3);
      take(one.K, all.K, 1, 1);
      take(one.V, all.V, 1, 1);
      forward(run, all);
      forward(run, one);
      Buffer<T> slice(1, 1, 11, d);
      take(slice, all.O, 1, 3);
      Buffer<Stat<T>> slice_lse(1, 1, 11, 1);
      take(slice_lse, all.LSE, 1, 3);
      return same_bits("O", one.O, slice) + (lse ? same_bits("LSE", one.LSE, slice_lse) : "");
    });
  });
}

void layouts(Run& run) {
  using Order = Layout::Order;
  if (!run.promises().unaligned) {
    for (const Layout& layout :
         std::vector<Layout>{{Order::BNHD, 0, 0, false, false, true},
                             {Order::BHND, 1, 0, false, false, true},
                             {Order::BNHD, 3, 1, false, false, true},  // slices of larger tensors
                             {Order::BHND, 0, 5, false, false, true},
                             {Order::BHND, 0, 0, false, true, true},
                             {Order::BNHD, 2, 3, false, true, true}})
      for (Causal c : masks(run)) run.forward({shape(18, 35, run.d(8), 2, 4, 2, c), {}, layout});
    return;
  }
  std::vector<Layout> list = {{Order::BNHD, 0, 0, false, false}, {Order::BHND, 5, 0, false, false},
                              {Order::BNHD, 3, 1, false, false}, {Order::BHND, 0, 0, true, false},
                              {Order::BHND, 0, 0, false, true},  {Order::BNHD, 1, 2, true, true}};
  for (Int offset = 1; offset < (run.small() ? 3 : 8); ++offset)
    list.push_back({Order::BHND, 0, offset, false, false});
  std::size_t n = 0;
  for (const Layout& layout : list)
    for (Int d : {8, 13})
      for (Causal c : masks(run))
        if (!run.tiny() || n++ % 5 == 0)
          run.forward({shape(18, 35, run.d(d), 2, 4, 2, c), {}, layout});
  // Rows at multiples of 16 bytes whose last 16 are not full: what is behind d is not ours.
  for (Int d : {1, 7, 59, 100, 129, 250}) {
    if (run.d(d) != d) continue;
    run.forward({shape(18, 35, d, 1, 2, 2), {}, {Order::BHND, 1, 0, false, false, true}});
  }
  // One tensor out of line is enough, for any reason. Multiples of 8 rows, so that heads and
  // batches stay in line where rows are not.
  const Spec spec{shape(8, 16, run.d(16), 2, 2, 2)};
  const char* const names[] = {"Q", "K", "V", "O"};
  run.each_type([&](auto type) {
    using T = decltype(type);
    for (int tensor = 0; tensor < 4; ++tensor)
      for (const OutOfLine& off : out_of_line()) {
        if (run.tiny() && n++ % 3 != 0) continue;
        run.run<T>(spec, std::string(names[tensor]) + " alone " + off.what, [&]() {
          ForwardCase<T> c(spec, run.promises().lse);
          Buffer<T>* const all[] = {&c.Q, &c.K, &c.V, &c.O};
          all[tensor]->move_to(off.layout);
          forward(run, c);
          return c.verdict();
        });
      }
  });
}

// No element behind a tensor is read, let alone written. In memory that the test chooses.
void bounds(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    // Ends that fill no tile and no vector, by one column or one row only.
    for (auto [Nq, d] : {std::pair{21, 13}, {21, 16}, {32, 15}, {31, 16}})
      for (Causal mask : masks(run)) {
        const Spec spec{shape(Nq, 35, run.d(d), 1, 2, 1, mask)};
        run.run<T>(spec, "", [&]() -> std::string {
          ForwardCase<T> c(spec, run.promises().lse);
          c.call();
          const AtTheEdge<T> Q(c.Q), K(c.K), V(c.V), O(c.O);
          const AtTheEdge<Stat<T>> LSE(c.LSE);
          const ForwardCall<T> call{c.p,
                                    {Q.view(), K.view(), V.view(), O.view(),
                                     run.promises().lse ? LSE.view().data : nullptr},
                                    {}};
          const std::string end = survives([&] { run.functions<T>().forward(call); });
          return end.empty() ? "" : "touches memory behind the end of a tensor: " + end;
        });
      }
  });
}

void lengths(Run& run) {
  std::size_t n = 0;
  for (Causal c : masks(run))
    for (auto [Nq, Nk] : {std::pair{7, 70}, {70, 70}, {66, 33}}) {
      if (run.tiny() && n++ % 4 != 0) continue;  // one size for each mask
      Spec spec{shape(Nq, Nk, run.d(8), 4, 2, 1, c), {}, {}, {0, 1, Nk / 2, Nk}};
      run.forward(spec);
      // Whatever padded keys hold, it must not leak: 0 * NaN is NaN. Wider heads may be another
      // kernel's.
      for (Int d : {8, 72, 200}) {
        if (d != 8 && (run.d(d) == spec.p.d || Nq != 70)) continue;
        spec.p.d = run.d(d);
        if (run.promises().takes && !run.promises().takes(spec.p)) continue;
        run.each_type([&](auto type) {
          using T = decltype(type);
          run.run<T>(spec, "padding NaN", [&]() -> std::string {
            ForwardCase<T> clean(spec, run.promises().lse), dirty(spec, run.promises().lse);
            const auto spoil = [&](auto& x) {
              const Array old = to_array(x);
              x.fill([&](auto b, auto h, auto j, auto e) {
                const bool padding = j >= spec.lengths[static_cast<std::size_t>(b)];
                return padding ? std::nan("") : old.at(b, h, j, e);
              });
            };
            spoil(dirty.K);
            spoil(dirty.V);
            forward(run, clean);
            forward(run, dirty);
            const std::string o = same_bits("O", clean.O, dirty.O);
            return o.empty() && run.promises().lse ? same_bits("LSE", clean.LSE, dirty.LSE) : o;
          });
        });
      }
    }
}

// Where a length cannot be looked at without waiting for it, it is clamped to [0, Nk].
void clamped_lengths(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    run.run(std::string("lengths outside [0, Nk] ") + type_name<T>(), [&]() -> std::string {
      const Problem p = shape(9, 40, run.d(8), 3, 2, 1);
      ForwardCase<T> inside({p, {}, {}, {0, 17, 40}}, run.promises().lse);
      ForwardCase<T> outside({p, {}, {}, {-5, 17, 1000}}, run.promises().lse);
      forward(run, inside);
      forward(run, outside);
      const std::string o = same_bits("O", inside.O, outside.O);
      return o + (run.promises().lse ? same_bits("LSE", inside.LSE, outside.LSE) : "");
    });
  });
}

template <class T>
std::string rows_are_empty(const ForwardCase<T>& c, bool lse) {
  std::string text;
  c.O.for_each([&](auto b, auto h, auto i, auto x) {
    if (visible_keys(c.p, b, i) == 0 && !(c.O.at(b, h, i, x) == T(0)))
      text = "O row " + std::to_string(i) + " sees no key and must be exactly 0, got " +
             std::to_string(c.O.at(b, h, i, x));
  });
  c.LSE.for_each([&](auto b, auto h, auto i, auto) {
    if (lse && visible_keys(c.p, b, i) == 0 && !(double(c.LSE.at(b, h, i)) == -infinity))
      text = "LSE of row " + std::to_string(i) + ", which sees no key, must be -infinity, got " +
             std::to_string(c.LSE.at(b, h, i));
  });
  return text;
}

void masked_rows(Run& run) {
  const Int d = run.d(8);
  for (const Spec& spec :
       {Spec{shape(70, 5, d, 1, 1, 1, Causal::bottom_right)},
        Spec{shape(200, 97, run.d(4), 1, 2, 1, Causal::bottom_right)},
        Spec{shape(6, 6, d, 2, 1, 1, Causal::none), {}, {}, {0, 6}},
        Spec{shape(6, 9, d, 2, 1, 1, Causal::top_left), {Kind::level, -1e5}, {}, {0, 3}},
        Spec{shape(65, 3, d, 1, 1, 1, Causal::bottom_right), {Kind::level, -500}}})
    run.each_type([&](auto type) {
      using T = decltype(type);
      if (!spec.lengths.empty() && !run.promises().key_lengths) return;
      run.run<T>(spec, "", [&]() -> std::string {
        ForwardCase<T> c(spec, run.promises().lse);
        forward(run, c);
        return rows_are_empty(c, run.promises().lse) + c.check_memory_untouched();
      });
    });
}

void empty_sizes(Run& run) {
  const Int d = run.d(8);
  for (const Problem& p : {shape(5, 7, d, 0, 2, 1), shape(5, 7, d, 2, 0, 0), shape(0, 7, d),
                           shape(0, 0, d), shape(5, 0, d, 2, 2, 1)})
    run.forward({p});  // where Nk = 0 the oracle wants O = 0 and LSE = -infinity
  // What holds nothing need not be anywhere.
  if (!run.promises().host_memory) return;
  for (const Problem& p : {shape(5, 7, d, 0, 2, 1), shape(0, 7, d), shape(5, 0, d)})
    run.each_type([&](auto type) {
      using T = decltype(type);
      run.run<T>({p}, "from null", [&]() -> std::string {
        ForwardCase<T> c({p}, run.promises().lse);
        ForwardCall<T> call = c.call();
        if (p.B * p.Nq == 0) call.t.Q.data = call.t.O.data = nullptr, call.t.LSE = nullptr;
        if (p.B * p.Nk == 0) call.t.K.data = call.t.V.data = nullptr;
        run.functions<T>().forward(call);
        return c.verdict();
      });
    });
}

void non_finite(Run& run) {
  const double nan = std::nan("");
  for (Causal c : masks(run))
    run.each_type([&](auto type) {
      using T = decltype(type);
      const std::string t =
          std::string(" ") + type_name<T>() + " mask " + std::to_string(static_cast<int>(c));
      const Int d = run.d(8);
      const Spec spec{shape(40, 50, d, 1, 1, 1, c)};
      const auto outcome = [&](const Spec& s, Int bad, char tensor, auto expected) {
        const Int Nq = s.p.Nq;
        ForwardCase<T> clean(s, run.promises().lse), dirty(s, run.promises().lse);
        auto& x = tensor == 'Q' ? dirty.Q : tensor == 'K' ? dirty.K : dirty.V;
        const Array old = to_array(x);
        x.fill([&](auto, auto, auto i, auto e) {
          return i == bad && e == 2 ? nan : old.at(0, 0, i, e);
        });
        forward(run, clean);
        forward(run, dirty);
        const std::string what = std::string("NaN in row ") + std::to_string(bad) + " of " + tensor;
        Comparison lost(what + " is lost in O"), reached(what + " reaches O");
        for (Int i = 0; i < Nq; ++i)
          for (Int e = 0; e < d; ++e) {
            const double got = double(dirty.O.at(0, 0, i, e));
            const int want = expected(i, e);  // 1 NaN, 0 unchanged, -1 either
            lost.add(0, 0, i, e, got, want == 1 ? nan : got, 0);
            reached.add(0, 0, i, e, got, want == 0 ? double(clean.O.at(0, 0, i, e)) : got, 0);
          }
        return lost.report() + reached.report();
      };
      // A key in the middle, one that no row sees, beside rows that fill no vector, and the first
      // one behind a tile.
      std::vector<std::tuple<Int, Int, Int>> places = {{40, 50, 23}, {17, 22, 21}};
      if (const Int tile = run.promises().nan_tile; tile > 1 && run.promises().host_memory)
        places.push_back({tile + 6, tile + 6, tile});
      for (const auto& [rows, keys, key] : places) {
        const Int Nq = rows, Nk = keys, bad = key;  // bindings cannot be captured
        Spec s = spec;
        s.p.Nq = Nq;
        s.p.Nk = Nk;
        const std::string size = std::to_string(Nq) + " x " + std::to_string(Nk) + t;
        const auto seen = [&](Int i) { return bad < visible_keys(s.p, 0, i); };
        const auto near = [&](Int i) { return shares_a_tile(run.promises(), s.p, i, bad); };
        if (bad < Nq)
          run.run("NaN in Q, " + size,
                  [&] { return outcome(s, bad, 'Q', [&](Int i, Int) { return i == bad; }); });
        run.run("NaN in K, " + size,
                [&] { return outcome(s, bad, 'K', [&](Int i, Int) { return seen(i); }); });
        run.run("NaN in V, " + size, [&] {
          return outcome(s, bad, 'V', [&](Int i, Int e) {
            return e != 2 ? 0 : seen(i) ? 1 : near(i) ? -1 : 0;
          });
        });
      }
      run.run("score of -infinity" + t, [&] {
        ForwardCase<T> x(spec, run.promises().lse);
        const Array q = to_array(x.Q), k = to_array(x.K);
        x.Q.fill([&](auto, auto, auto i, auto e) { return e ? q.at(0, 0, i, e) : 1.0; });
        x.K.fill([&](auto, auto, auto j, auto e) {
          return e == 0 && j % 3 == 1 ? -infinity : k.at(0, 0, j, e);
        });
        forward(run, x);
        return x.verdict();
      });
      // No weight anywhere: like a row that sees no key, in one tile of keys and over several. A
      // method that does not promise large scores divides 0 by 0 here.
      for (Int keys : {spec.p.Nk, Int(300)}) {
        if (!run.promises().large_scores) continue;
        run.run("every score -infinity, Nk" + std::to_string(keys) + t, [&] {
          Spec all = spec;
          all.p.Nk = keys;
          ForwardCase<T> x(all, run.promises().lse);
          x.Q.fill([](auto, auto, auto, auto e) { return e ? 0.5 : 1.0; });
          x.K.fill([](auto, auto, auto, auto e) { return e ? 1.0 : -infinity; });
          forward(run, x);
          const std::string zeros = x.verdict();
          x.K.fill([&](auto, auto, auto j, auto e) {  // one NaN must not be passed over
            return e == 0 ? -infinity : j == 7 && e == 1 ? nan : 1.0;
          });
          forward(run, x);
          return zeros + x.verdict();
        });
      }
      // -infinity + infinity is NaN, -infinity - infinity is not: one row has a NaN, and it alone
      // must not go on as if it saw nothing.
      if (run.promises().large_scores)
        run.run("every score -infinity, one NaN in one row" + t, [&] {
          ForwardCase<T> x(spec, run.promises().lse);
          x.Q.fill([](auto, auto, auto i, auto e) { return e == 1 && i != 31 ? -1.0 : 1.0; });
          x.K.fill([](auto, auto, auto j, auto e) {
            return e == 0 ? -infinity : e == 1 && j == 7 ? infinity : 1.0;
          });
          forward(run, x);
          return x.verdict();
        });
    });
}

void invariances(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    const std::string t = std::string(" ") + type_name<T>();
    const bool lse = run.promises().lse;
    const Int Nq = 21, Nk = 67, d = run.d(8);
    const Spec spec{shape(Nq, Nk, d)};
    const auto scaled = [](auto& x, double factor) {
      const Array old = to_array(x);
      x.fill([&](auto b, auto h, auto i, auto e) { return factor * old.at(b, h, i, e); });
    };
    run.run("Q * 4 with K / 4 leaves every bit" + t, [&]() -> std::string {
      ForwardCase<T> x(spec, lse), y(spec, lse);
      scaled(y.Q, 4);
      scaled(y.K, 0.25);
      forward(run, x);
      forward(run, y);
      return same_bits("O", x.O, y.O);
    });
    run.run("V * -8 gives O * -8, bit by bit" + t, [&]() -> std::string {
      ForwardCase<T> x(spec, lse), y(spec, lse);
      scaled(y.V, -8);
      forward(run, x);
      forward(run, y);
      std::string text;
      x.O.for_each([&](auto b, auto h, auto i, auto e) {
        if (!scaled_bits<T>(double(x.O.at(b, h, i, e)), -8, double(y.O.at(b, h, i, e))))
          text = "O is not -8 times as large in row " + std::to_string(i);
      });
      return text;
    });
    run.run("V constant gives that constant" + t, [&]() -> std::string {
      ForwardCase<T> x(spec, lse);
      x.V.fill([](auto...) { return 3.0; });
      forward(run, x);
      return x.verdict();
    });
    run.run("V = identity reads P: rows sum to 1" + t, [&]() -> std::string {
      ForwardCase<T> x({shape(Nq, 16, run.d(16))}, lse);
      x.V.fill([](auto, auto, auto j, auto e) { return j == e ? 1.0 : 0.0; });
      forward(run, x);
      for (Int i = 0; i < Nq; ++i) {
        double sum = 0;
        for (Int e = 0; e < 16; ++e) {
          const double P = static_cast<double>(x.O.at(0, 0, i, e));
          if (!(P >= 0)) return "P has an element that is not >= 0";
          sum += P;
        }
        // P is rounded twice: as a factor, and as a result.
        if (!(std::fabs(sum - 1) <= 1e-5 + 2 * rounding<T>().unit))
          return "row " + std::to_string(i) + " of P sums to " + std::to_string(sum);
      }
      return {};
    });
    run.run("permuted keys, doubled keys" + t, [&]() -> std::string {
      ForwardCase<T> x(spec, lse), y({shape(Nq, 2 * Nk, d)}, lse);
      const auto twice = [&](auto& to, const auto& from) {
        to.fill([&](auto b, auto h, auto j, auto e) {
          return static_cast<double>(from.at(b, h, (j * 5 + 3) % Nk, e));
        });
      };
      twice(y.K, x.K);
      twice(y.V, x.V);
      forward(run, x);
      forward(run, y);
      Comparison o("O of doubled keys"), l("LSE of doubled keys");
      const ForwardOracle want =
          oracle_forward(x.p, to_array(x.Q), to_array(x.K), to_array(x.V), rounding<T>());
      x.O.for_each([&](auto b, auto h, auto i, auto e) {
        o.add(b, h, i, e, double(y.O.at(b, h, i, e)), double(x.O.at(b, h, i, e)),
              2 * tolerance<T>(want, b, h, i, e).element);
        if (lse && e == 0)
          l.add(b, h, i, e, double(y.LSE.at(b, h, i)), double(x.LSE.at(b, h, i)) + std::log(2.0),
                2 * lse_tolerance<T>(want.LSE.at(b, h, i), want.A.at(b, h, i)));
      });
      return o.report() + l.report();
    });
    run.run("keys shifted by one vector leave O" + t, [&]() -> std::string {
      ForwardCase<T> x(spec, lse), y(spec, lse);
      // The half types have no digits for key + shift, unless the keys have few.
      const auto shift = [&](ForwardCase<T>& to, double by) {
        to.K.fill([&](auto b, auto h, auto j, auto e) {
          const double k = double(y.K.at(b, h, j, e));
          return (is_half<T> ? std::nearbyint(4 * k) / 4 : k) + by * double(e % 8);
        });
      };
      shift(x, 0.5);
      shift(y, 0);
      forward(run, x);
      forward(run, y);
      Comparison o("O");
      const ForwardOracle want =
          oracle_forward(x.p, to_array(x.Q), to_array(x.K), to_array(x.V), rounding<T>());
      x.O.for_each([&](auto b, auto h, auto i, auto e) {
        o.add(b, h, i, e, double(x.O.at(b, h, i, e)), double(y.O.at(b, h, i, e)),
              2 * tolerance<T>(want, b, h, i, e).element);
      });
      return o.report();
    });
    run.run("one key: O = V, bit by bit" + t, [&]() -> std::string {
      ForwardCase<T> x({shape(5, 1, d)}, lse);
      forward(run, x);
      for (Int i = 0; i < 5; ++i)
        for (Int e = 0; e < d; ++e)
          if (!(x.O.at(0, 0, i, e) == x.V.at(0, 0, 0, e))) return "O differs from V";
      return {};
    });
  });
}

// Equal weights for many keys. A sum in fp16 stops growing at 2048, one in bf16 at 256; a result
// is off by no more than its own rounding, for every weight is exactly 1.
void long_rows(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    for (Int Nk : run.small() ? std::vector<Int>{4096} : std::vector<Int>{4096, 16384}) {
      const Spec spec{shape(3, Nk, run.d(8)), {Kind::uniform}};
      const std::string t = " Nk " + std::to_string(Nk) + " " + type_name<T>();
      const auto equal_weights = [&](ForwardCase<T>& x, auto V) {
        x.Q.fill([](auto...) { return 0.0; });
        x.V.fill(V);
        forward(run, x);
      };
      run.run("Q = 0, V = 1" + t, [&]() -> std::string {
        ForwardCase<T> x(spec, run.promises().lse);
        equal_weights(x, [](auto...) { return 1.0; });
        Comparison o("O");
        x.O.for_each([&](auto b, auto h, auto i, auto e) {
          o.add(b, h, i, e, double(x.O.at(b, h, i, e)), 1, 0);
        });
        return o.report() + x.verdict();
      });
      run.run("Q = 0, V in [0, 1)" + t, [&]() -> std::string {
        ForwardCase<T> x(spec, run.promises().lse);
        const Array V = to_array(x.V);
        equal_weights(x, [&](auto b, auto h, auto j, auto e) { return V.at(b, h, j, e); });
        const ForwardOracle want = oracle_forward(x.p, to_array(x.Q), to_array(x.K), V);
        Comparison o("O");
        x.O.for_each([&](auto b, auto h, auto i, auto e) {
          const double w = want.O.at(b, h, i, e);
          o.add(b, h, i, e, double(x.O.at(b, h, i, e)), w, rounding<T>().of(w) + 1e-5 * w);
        });
        return o.report() + x.verdict();
      });
    }
  });
}

// Nq * Nk is above 2^31, and one tile is less than a thousandth of a row.
void long_sequences(Run& run) {
  for (Causal c : masks(run)) {
    const bool shifted = c == Causal::bottom_right;
    const Spec spec{shifted ? shape(32771, 65537, run.d(128), 1, 2, 1, c)
                            : shape(65536, 65536, run.d(64), 1, 1, 1, c)};
    if (run.promises().takes && !run.promises().takes(spec.p)) continue;
    run.each_type([&](auto type) {
      using T = decltype(type);
      run.run<T>(spec, "", [&]() -> std::string {
        ForwardCase<T> x(spec, run.promises().lse);
        forward(run, x);
        return x.verdict(sample(spec.p.Nq));
      });
    });
  }
}

void determinism(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    run.run(std::string("again and again ") + type_name<T>(), [&]() -> std::string {
      const Spec spec{shape(65, 130, run.d(16), 2, 4, 2)};
      ForwardCase<T> first(spec, run.promises().lse), again(spec, run.promises().lse);
      forward(run, first);
      for (int n = 0; n < (run.large() ? 50 : 10); ++n) {
        forward(run, again);
        std::string difference = same_bits("O", first.O, again.O);
        if (run.promises().lse) difference += same_bits("LSE", first.LSE, again.LSE);
        if (!difference.empty()) return difference;
      }
      return {};
    });
    // Scratch memory must belong to a call, not to the function.
    run.run(std::string("two calls at once ") + type_name<T>(), [&]() -> std::string {
      const Spec spec{shape(65, 130, run.d(16), 1, 2, 1)};
      Spec other = spec;
      other.seed = 2;
      ForwardCase<T> x(spec, false), y(other, false);
      const ForwardCall<T> call_x = x.call(), call_y = y.call();
      const auto& function = run.functions<T>().forward;
      std::thread second([&] {
        for (int n = 0; n < 5; ++n) function(call_y);
      });
      for (int n = 0; n < 5; ++n) function(call_x);
      second.join();
      return x.verdict() + y.verdict();
    });
    if (run.promises().lse)
      run.run(std::string("LSE not wanted ") + type_name<T>(), [&]() -> std::string {
        const Spec spec{shape(21, 35, run.d(8), 2, 2, 1)};
        ForwardCase<T> with(spec, true), without(spec, false);
        forward(run, with);
        forward(run, without);
        return same_bits("O", with.O, without.O);
      });
  });
}

// A race may show only where all of a GPU is at work, and then only now and then.
void races(Run& run) {
  for (Causal c : masks(run)) {
    if (c == Causal::bottom_right) continue;
    const Spec spec{shape(300, 333, run.d(64), 4, 66, 33, c)};
    if (run.promises().takes && !run.promises().takes(spec.p)) continue;
    run.each_type([&](auto type) {
      using T = decltype(type);
      run.run<T>(spec, "300 times", [&]() -> std::string {
        ForwardCase<T> x(spec, run.promises().lse);
        ForwardCall<T> call = x.call();
        call.runs = 300;
        run.functions<T>().forward(call);
        return x.verdict({0, 127, 128, 299});
      });
    });
  }
}

// A batch, head or row that begins more than 2^32 elements after the one before it: a product of
// 32-bit numbers on the way to an address would wrap, without a sign too. Q, K, V and O lie side by
// side in one block, of which a page or two are used at either end: on the host the rest is
// reserved, not used.
void large_offsets(Run& run) {
  const Int d = run.d(8), far = (Int(1) << 32) + 64, room = 8 * d;
  const struct {
    const char* what;
    Problem p;
  } variants[] = {
      {"batches", shape(3, 5, d, 2)}, {"heads", shape(3, 5, d, 1, 2, 2)}, {"rows", shape(2, 2, d)}};
  run.each_type([&](auto type) {
    using T = decltype(type);
    const std::size_t bytes = std::size_t(far + 4 * room) * sizeof(T);
    for (const auto& v : variants)
      run.run(std::string(v.what) + " 2^32 + 64 elements apart " + type_name<T>(),
              [&, what = std::string(v.what), p = v.p]() -> std::string {
                ForwardCase<T> c({p}, false);
                c.call();
                if (!run.promises().host_memory && double(bytes) > run.promises().device_bytes()) {
                  std::cout << "left out, as the device has no room: " << bytes << " bytes\n";
                  return {};
                }
                const Reserved reserved(bytes);
                if (!reserved.data()) return {};
                T* const block = static_cast<T*>(reserved.data());
                Int n = 0;
                const auto spread = [&](const Buffer<T>& x) {
                  const View<T> view{block + room * n++, what == "batches" ? far : 0,
                                     what == "heads" ? far : 0, what == "rows" ? far : d};
                  x.for_each([&](auto b, auto h, auto i, auto e) {
                    view.at(b, h, i)[e] = x.at(b, h, i, e);
                  });
                  return view;
                };
                const View<T> Q = spread(c.Q), K = spread(c.K), V = spread(c.V), O = spread(c.O);
                std::vector<Storage> storage;
                if (!run.promises().host_memory)
                  storage = {reserved.storage(std::size_t(4 * room) * sizeof(T))};
                run.functions<T>().forward({p, {Q, K, V, O, nullptr}, storage});
                c.O.for_each(
                    [&](auto b, auto h, auto i, auto e) { c.O.at(b, h, i, e) = O.at(b, h, i)[e]; });
                return c.verdict();
              });
  });
}

void memory(Run& run) {
  if (peak_heap_bytes([] {}) < 0) GTEST_SKIP() << "malloc cannot be counted in this build";
  run.each_type([&](auto type) {
    using T = decltype(type);
    for (Int N : run.small() ? std::vector<Int>{64} : std::vector<Int>{64, 300, 1000}) {
      const Spec spec{shape(N, N, run.d(64), 1, 2, 2)};
      run.run<T>(spec, "", [&]() -> std::string {
        ForwardCase<T> c(spec, run.promises().lse);
        const ForwardCall<T> call = c.call();
        const auto& function = run.functions<T>().forward;
        const double bytes = static_cast<double>(peak_heap_bytes([&] { function(call); }));
        const double most = run.promises().extra_bytes(c.p) * (sizeof(T) == 8 ? 2 : 1);
        if (bytes <= most) return {};
        return "took " + std::to_string(bytes) + " bytes beyond its arguments, promised at most " +
               std::to_string(most);
      });
    }
    // Around what 30 MiB hold: two matrices of 1982 x 1982 floats are 30 MiB.
    if (!run.promises().host_memory) return;
    for (Int N : {1000, 1400, 1900, 1982, 2100, 2800}) {
      const Spec spec{shape(N, N, run.d(1))};
      run.run("30 MiB left, " + spec.name() + " " + type_name<T>(), [&] {
        ForwardCase<T> c(spec, run.promises().lse);
        const ForwardCall<T> call = c.call();
        return under_limit(30 << 20, [&] { run.functions<T>().forward(call); });
      });
    }
  });
}

void errors(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    const Int d = run.d(8), step = run.promises().unaligned ? 1 : 16 / Int(sizeof(T));
    const Spec good{shape(6, 7, d, 2, 4, 2), {}, {}, {}};
    using Call = ForwardCall<T>;
    using Change = FunctionRef<void(Call&)>;  // `auto` would compile the case 30 times
    const auto refuse = [&](const std::string& name, const std::vector<std::string>& words,
                            Change change) {
      run.run("refuses " + name + " " + type_name<T>(), [&]() -> std::string {
        ForwardCase<T> c(good, run.promises().lse);
        Call call = c.call();
        change(call);
        std::string text = expect_refusal([&] { run.functions<T>().forward(call); }, words);
        if (text.empty() && !c.O.changed().empty()) text = "refused, but only after writing to O";
        return text;
      });
    };
    const double nan = std::nan("");
    refuse("Nq < 0", {"Nq", "-1"}, [](Call& c) { c.p.Nq = -1; });
    refuse("Nk < 0", {"Nk", "-3"}, [](Call& c) { c.p.Nk = -3; });
    refuse("B < 0", {"B", "-1"}, [](Call& c) { c.p.B = -1; });
    refuse("d = 0", {"d must", "0"}, [](Call& c) { c.p.d = 0; });
    const std::vector<Int>& head_dims = run.promises().head_dims;
    if (head_dims.empty())
      refuse("d too large", {"d must", std::to_string(run.promises().max_d)},
             [&](Call& c) { c.p.d = run.promises().max_d + 1; });
    else
      for (Int other : {1, 8, 32, 64, 72, 128, 136, 256})
        if (std::find(head_dims.begin(), head_dims.end(), other) == head_dims.end())
          run.run("refuses d = " + std::to_string(other) + " " + type_name<T>(), [&] {
            ForwardCase<T> c({shape(6, 7, other, 2, 4, 2)}, run.promises().lse);
            const ForwardCall<T> call = c.call();
            return expect_refusal([&] { run.functions<T>().forward(call); },
                                  {"d", std::to_string(other)});
          });
    if (!run.promises().unaligned) {
      const auto refuse_rows = [&](const std::string& name, Change change) {
        refuse(name + " off the multiples of 16 bytes", {"16 bytes"}, change);
      };
      refuse_rows("Q", [](Call& c) { c.t.Q.data += 1; });
      refuse_rows("K", [](Call& c) { c.t.K.data += 4; });
      refuse_rows("V", [](Call& c) { c.t.V.data += 7; });
      refuse_rows("O", [](Call& c) { c.t.O.data += 2; });
      refuse_rows("rows of Q", [](Call& c) { c.t.Q.row += 4; });
      refuse_rows("heads of K", [](Call& c) { c.t.K.head += 1; });
      refuse_rows("batches of V", [](Call& c) { c.t.V.batch += 2; });
      refuse_rows("batches of O", [](Call& c) { c.t.O.batch += 1; });
    }
    refuse("Hq no multiple of Hkv", {"Hq", "Hkv", "3"}, [](Call& c) { c.p.Hkv = 3; });
    refuse("Hkv = 0", {"Hkv"}, [](Call& c) { c.p.Hkv = 0; });
    refuse("sizes beyond 64 bits", {"64 bits"}, [](Call& c) { c.p.Nq = Int(1) << 60; });
    refuse("scale NaN", {"scale", "finite"}, [&](Call& c) { c.p.scale = nan; });
    refuse("scale infinite", {"scale", "finite"}, [&](Call& c) { c.p.scale = infinity; });
    refuse("Q null", {"Q", "null"}, [](Call& c) { c.t.Q.data = nullptr; });
    refuse("K null", {"K", "null"}, [](Call& c) { c.t.K.data = nullptr; });
    refuse("V null", {"V", "null"}, [](Call& c) { c.t.V.data = nullptr; });
    refuse("O null", {"O", "null"}, [](Call& c) { c.t.O.data = nullptr; });
    refuse("a mask that does not exist", {"causal"}, [](Call& c) { c.p.causal = Causal(7); });
    if constexpr (sizeof(T) <= 4)
      refuse("a scale that float cannot hold", {"scale", "finite"},
             [](Call& c) { c.p.scale = 1e39; });
    refuse("a stride beyond 64 bits", {"stride of K"}, [](Call& c) { c.t.K.batch = Int(1) << 62; });
    refuse("O on top of K", {"O overlaps K"}, [](Call& c) {
      c.t.K = View<const T>(c.t.O);
      c.p.Hq = 2;
    });
    refuse("O on top of Q", {"O overlaps Q"}, [](Call& c) { c.t.Q = c.t.O; });
    refuse("O on top of V by one element", {"O overlaps V"}, [d, step](Call& c) {
      c.t.V = View<const T>(c.t.O);
      c.t.V.data += 2 * 4 * 6 * d - step;
      c.t.V.head = 7 * d;
      c.t.V.batch = 2 * 7 * d;
    });
    refuse("O with stride 0", {"rows of O share memory"}, [](Call& c) { c.t.O.row = 0; });
    refuse("O with rows that overlap", {"rows of O share memory"},
           [step](Call& c) { c.t.O.row = c.p.d - step; });
    if (run.promises().lse)
      refuse("LSE on top of O", {"LSE overlaps O"},
             [](Call& c) { c.t.LSE = reinterpret_cast<Stat<T>*>(c.t.O.data); });
    if (run.promises().positive_scale_only)
      for (double scale : {0.0, -1.0})
        refuse("scale <= 0", {"scale"}, [scale](Call& c) { c.p.scale = scale; });
    static const Int long_lengths[] = {7, 8}, negative[] = {-1, 7}, fine[] = {7, 7};
    if (run.promises().key_lengths && run.promises().rejects_lengths) {
      refuse("key length > Nk", {"key_lengths[1]", "7", "8"},
             [](Call& c) { c.p.key_lengths = long_lengths; });
      refuse("key length < 0", {"key_lengths[0]", "-1"},
             [](Call& c) { c.p.key_lengths = negative; });
    } else if (!run.promises().key_lengths) {
      refuse("key lengths, which it does not promise", {"key_lengths"},
             [](Call& c) { c.p.key_lengths = fine; });
    }
    if (!run.promises().causal)
      for (Causal m : {Causal::top_left, Causal::bottom_right})
        refuse("a causal mask, which it does not promise", {"causal"},
               [m](Call& c) { c.p.causal = m; });
    static Stat<T> some_lse[2 * 4 * 6];
    if (!run.promises().lse)
      refuse("LSE, which it does not promise", {"LSE"}, [](Call& c) { c.t.LSE = some_lse; });
    // Q, K and V of one packed tensor [B, N, 3, H, d] cross in memory without sharing an element.
    run.run(std::string("takes packed Q, K, V, O ") + type_name<T>(), [&]() -> std::string {
      Buffer<T> packed(2, 4 * 2, 6, d, {Layout::Order::BNHD, 0, 0, false, false});
      packed.fill(
          [&](auto b, auto h, auto i, auto x) { return element({}, 'Q', good.p, 5, b, h, i, x); });
      const View<T> all = packed.view();
      const auto part = [&](Int n) {
        return View<T>{all.at(0, 2 * n), all.batch, all.head, all.row};
      };
      ForwardCall<T> call{shape(6, 6, d, 2, 2, 2),
                          {part(0), part(1), part(2), part(3), nullptr},
                          {packed.storage()}};
      const Array before = to_array(packed);
      Array Q(2, 2, 6, d), K = Q, V = Q;
      packed.for_each([&](auto b, auto h, auto i, auto x) {
        if (h < 6) (h < 2 ? Q : h < 4 ? K : V).at(b, h % 2, i, x) = before.at(b, h, i, x);
      });
      const ForwardOracle want = oracle_forward(call.p, Q, K, V, rounding<T>());
      run.functions<T>().forward(call);
      Comparison o("O"), inputs("packed Q, K and V");
      packed.for_each([&](auto b, auto h, auto i, auto x) {
        const double got = double(packed.at(b, h, i, x));
        if (h < 6)
          inputs.add(b, h, i, x, got, before.at(b, h, i, x), 0);
        else
          o.add(b, h - 6, i, x, got, want.O.at(b, h - 6, i, x),
                tolerance<T>(want, b, h - 6, i, x).element);
      });
      return o.report() + inputs.report() + packed.written_outside();
    });
  });
}

void fuzz(Run& run) {
  const char* seed_text = std::getenv("FA_FUZZ_SEED");
  const char* count_text = std::getenv("FA_FUZZ_CASES");
  const std::uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : 20;
  const int count = count_text ? std::atoi(count_text) : run.tiny() ? 6 : run.small() ? 12 : 100;
  std::cout << "fuzz: seed " << seed << ", " << count
            << " cases (FA_FUZZ_SEED and FA_FUZZ_CASES choose others)\n";
  run.rerun_with("FA_FUZZ_SEED=" + std::to_string(seed) +
                 " FA_FUZZ_CASES=" + std::to_string(count));
  const Int edges[] = {1, 2, 3, 5, 15, 16, 17, 31, 33, 47, 63, 64, 65, 79, 97, 127, 128, 129};
  for (int n = 0; n < count; ++n) {
    std::uint64_t draw = 0;
    const auto pick = [&](Int lo, Int hi) {
      return integer(seed * 1000003 + static_cast<std::uint64_t>(n), draw++, lo, hi);
    };
    const auto size = [&](Int most) {
      return std::min(most, pick(0, 1) ? edges[pick(0, std::ssize(edges) - 1)] : pick(1, most));
    };
    const Int Hkv = pick(1, 3), most_N = run.small() ? 48 : 140;
    const Int most_d = std::min<Int>(run.large() ? 256 : 130, run.promises().max_d);
    Spec spec{
        shape(size(most_N), size(most_N), run.d(size(most_d)), pick(1, 3), Hkv * pick(1, 3), Hkv)};
    spec.seed = static_cast<std::uint64_t>(pick(1, 1 << 30));
    if (run.promises().causal) spec.p.causal = static_cast<Causal>(pick(0, 2));
    if (run.promises().key_lengths && pick(0, 2) == 0)
      for (Int b = 0; b < spec.p.B; ++b) spec.lengths.push_back(pick(0, spec.p.Nk));
    if (pick(0, 3) == 0) spec.p.scale = 0.05 * double(pick(1, 20));
    spec.layout = {pick(0, 1) ? Layout::Order::BNHD : Layout::Order::BHND, pick(0, 5), pick(0, 7),
                   pick(0, 4) == 0, pick(0, 4) == 0};
    if (!run.promises().unaligned) {
      spec.layout.in_16_bytes = true;
      spec.layout.reversed = false;
    }
    if (run.promises().large_scores) {
      const double levels[] = {10, -5, -500, -2e4, 1e4};
      spec.data.kind = static_cast<Kind>(pick(0, static_cast<Int>(Kind::denormal)));
      if (spec.data.kind > Kind::equal && spec.data.kind < Kind::denormal)
        spec.data.level = levels[pick(0, 4)];
    }
    run.forward(spec);
  }
}

}  // namespace

std::vector<Family> forward_families() {
  const auto with_masks = [](const StageUnderTest& s) { return always(s) && s.promises.causal; };
  // Tests run in this order: what a later family rests on comes first, so that the first one that
  // fails names the idea.
  return {
      {"Sizes", "plain problems of awkward sizes, against the double-precision oracle", always,
       sizes},
      {"Scale", "scale is applied once, and 1/sqrt(d) only by default", always, scale},
      {"Heads", "query head h reads key head h / (Hq / Hkv); heads do not mix", always, heads},
      {"Empty", "B, H or Nq = 0: nothing to do; Nk = 0: O = 0 and LSE = -infinity", always,
       empty_sizes},
      {"CausalTopLeft", "row i sees keys j <= i, the diagonal included", with_masks,
       [](Run& run) { causal(run, Causal::top_left); }},
      {"MaskedRows", "a row that sees no key: O = 0 exactly, LSE = -infinity, never NaN",
       with_masks, masked_rows},
      {"CausalBottomRight", "row i sees keys j <= i + Nk - Nq", with_masks,
       [](Run& run) { causal(run, Causal::bottom_right); }},
      {"KeyLengths", "keys at or past the length are not seen, whatever they hold",
       [](const StageUnderTest& s) { return always(s) && s.promises.key_lengths; }, lengths},
      {"ClampedLengths", "a key length below 0 means no key, one above Nk means all",
       [](const StageUnderTest& s) {
         return always(s) && s.promises.key_lengths && !s.promises.rejects_lengths;
       },
       clamped_lengths},
      {"Values", "scores that are tiny, equal, huge, far below zero, rising, falling", always,
       values},
      {"NonFinite", "NaN reaches the rows that see it, and only those", always, non_finite},
      {"Layouts", "strides, gaps and unaligned rows are honoured; nothing outside is written",
       always, layouts},
      {"Invariances", "what must stay the same when inputs are scaled, permuted, doubled, shifted",
       always, invariances},
      {"Bounds", "nothing behind the last element of a tensor is read",
       [](const StageUnderTest& s) { return always(s) && s.promises.host_memory; }, bounds},
      {"LongRows", "sums are fp32, or better: they do not stop growing", always, long_rows},
      {"LongSequences", "as many keys as there are, sampled rows against the oracle",
       [](const StageUnderTest& s) {
         return always(s) && s.effort == StageUnderTest::Effort::large;
       },
       long_sequences},
      {"Determinism", "the same call gives the same bits", always, determinism},
      {"Races", "the same bits from every run, however full the GPU is",
       [](const StageUnderTest& s) {
         return always(s) && s.effort == StageUnderTest::Effort::large;
       },
       races},
      {"LargeOffsets", "addresses are computed with 64 bits",
       [](const StageUnderTest& s) {
         return always(s) && (s.promises.host_memory || s.promises.device_bytes);
       },
       large_offsets},
      {"Memory", "no more memory than promised; where it is not there, a refusal in words",
       [](const StageUnderTest& s) { return always(s) && bool(s.promises.extra_bytes); }, memory},
      {"Errors", "bad arguments and what is not promised are refused in words, before any write",
       always, errors},
      {"Fuzz", "random problems within the promises", always, fuzz},
  };
}

}  // namespace fa::judge
