// Properties of a backward pass, family by family.
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <tuple>
#include <utility>
#include <vector>

#include "common/judge/conformance.hpp"
#include "common/judge/memory.hpp"
#include "common/judge/random.hpp"

namespace fa::judge {
namespace {

using Int = std::int64_t;

bool has_backward(const StageUnderTest& s) {
  return s.f32.backward || s.f64.backward || s.f16.backward || s.bf16.backward;
}

std::vector<Causal> masks(const Run& run) {
  if (!run.promises().causal) return {Causal::none};
  return {Causal::none, Causal::top_left, Causal::bottom_right};
}

template <class A, class B>
std::vector<std::pair<A, B>> pairs(const std::vector<A>& as, const std::vector<B>& bs) {
  std::vector<std::pair<A, B>> all;
  for (const A& a : as)
    for (const B& b : bs) all.push_back({a, b});
  return all;
}

struct Size {
  Int Nq, Nk, d;
};
const Size sizes[] = {{1, 1, 8},    {1, 17, 3},   {17, 1, 3},   {2, 2, 1},   {17, 17, 16},
                      {33, 65, 40}, {65, 33, 64}, {64, 64, 64}, {70, 130, 8}};
// Several tiles each way, whole ones and not.
const Size large_sizes[] = {{128, 128, 128}, {127, 129, 64},  {129, 257, 128},
                            {257, 129, 96},  {256, 384, 128}, {300, 200, 256},
                            {1, 1000, 64},   {1000, 1, 64},   {513, 511, 80}};

void backward_sizes(Run& run) {
  for (auto [Nq, Nk, d] : sizes) run.backward({shape(Nq, Nk, run.d(d))});
  if (run.promises().head_dims.empty() && run.promises().max_d > 128 && !run.small())
    for (auto [Nq, Nk, d] : {Size{33, 97, 129}, {65, 33, 160}, {33, 65, 256}})
      run.backward({shape(Nq, Nk, run.d(d))});
  if (!run.large()) return;
  for (auto [Nq, Nk, d] : large_sizes) run.backward({shape(Nq, Nk, run.d(d), 1, 2, 2)});
}

void backward_heads(Run& run) {
  for (auto [B, Hq, Hkv] : {std::tuple{1, 2, 2}, {2, 3, 3}, {1, 2, 1}, {3, 6, 2}, {2, 5, 1}})
    run.backward({shape(13, 21, run.d(8), B, Hq, Hkv)});
  std::size_t n = 0;
  for (auto [Nq, Nk, d] : sizes)
    if (!run.tiny() || n++ % 4 == 0)
      run.backward({shape(Nq, Nk, run.d(d), 2, 4, 2), {Data::Kind::normal, 0.01}});
  if (!run.large()) return;
  for (auto [Nq, Nk, d] : large_sizes) run.backward({shape(Nq, Nk, run.d(d), 1, 2, 1)});
}

void backward_causal(Run& run) {
  std::size_t n = 0;
  for (Causal c : {Causal::top_left, Causal::bottom_right}) {
    for (auto [Nq, Nk, d] : sizes) {
      run.backward({shape(Nq, Nk, run.d(d), 1, 1, 1, c)});
      if (!run.tiny() || n++ % 5 == 0)
        run.backward({shape(Nq, Nk, run.d(d), 2, 4, 2, c), {Data::Kind::normal, 0.01}});
    }
    if (!run.large()) continue;
    for (auto [Nq, Nk, d] : large_sizes) run.backward({shape(Nq, Nk, run.d(d), 1, 2, 1, c)});
  }
}

void backward_values(Run& run) {
  using Kind = Data::Kind;
  // Not Kind::level or alternating: a component that keys share makes sums over dS that cancel to
  // 0, and what is left of them is rounding only.
  std::vector<Data> kinds = {{Kind::normal, 3},  {Kind::integers},    {Kind::equal},
                             {Kind::rising, 20}, {Kind::falling, 20}, {Kind::spike_last, 10}};
  if (run.promises().large_scores)
    for (Data d :
         std::vector<Data>{{Kind::normal, 15}, {Kind::spike_first, 1000}, {Kind::falling, 1000}})
      kinds.push_back(d);
  for (const Data& data : kinds)
    for (Causal c : masks(run))
      for (auto [Nq, Nk] : {std::pair{33, 97}, {70, 65}}) {
        run.backward({shape(Nq, Nk, run.d(16), 1, 1, 1, c), data});
        if (run.small()) break;
      }
  // exp(0 - L) overflows where L is low: for a key beyond the last one that weight meets a K of 0.
  // Right or not is hard to say here, where the sums are rounding only; but they are numbers.
  if (!run.promises().large_scores) return;
  for (auto [Nq, Nk] : {std::pair{33, 97}, {70, 65}})
    run.each_type([&, Nq = Nq, Nk = Nk](auto type) {
      using T = decltype(type);
      const Spec spec{shape(Nq, Nk, run.d(16)), {Kind::level, -100}};
      run.run<T>(spec, "finite", [&]() -> std::string {
        BackwardCase<T> c(spec);
        backward(run, c);
        std::string text;
        for (auto [name, x] : {std::pair{"dQ", &c.dQ}, {"dK", &c.dK}, {"dV", &c.dV}}) {
          Comparison numbers(name);
          x->for_each([&, x = x](auto b, auto h, auto i, auto e) {
            const double got = double(x->at(b, h, i, e));
            numbers.add(b, h, i, e, got, std::isfinite(got) ? got : 0, 0);
          });
          text += numbers.report();
        }
        return text + c.check_memory_untouched();
      });
    });
}

// Of a result, the elements of which must_be(b, h, i, x) holds are the same as those of another
// run; but not bit by bit, for a kernel that adds with atomics.
template <class T, class F>
std::string unchanged(const std::string& name, const Buffer<T>& want, const Buffer<T>& got,
                      F must_be) {
  double largest = 0;
  want.for_each([&](auto b, auto h, auto i, auto x) {
    largest = std::max(largest, std::fabs(double(want.at(b, h, i, x))));
  });
  Comparison same(name);
  want.for_each([&](auto b, auto h, auto i, auto x) {
    const double w = double(want.at(b, h, i, x)), g = double(got.at(b, h, i, x));
    same.add(b, h, i, x, must_be(b, h, i, x) ? g : w, w, 1e-6 * largest + 2 * rounding<T>().of(w));
  });
  return same.ok() ? "" : same.report() + "\n";
}

// Whatever padded keys hold, it must not leak, and their own gradients are 0.
void backward_lengths(Run& run) {
  // Where a length cannot be looked at without waiting for it, it is clamped to [0, Nk].
  if (!run.promises().rejects_lengths)
    run.backward({shape(9, 40, run.d(8), 3, 2, 1), {}, {}, {-5, 17, 1000}});
  for (Causal c : masks(run))
    run.backward({shape(20, 35, run.d(8), 4, 2, 1, c), {}, {}, {0, 1, 17, 35}});
  if (run.large())
    for (Causal c : masks(run))
      run.backward({shape(260, 300, run.d(128), 4, 2, 1, c), {}, {}, {0, 1, 129, 300}});
  // Wider heads may be another kernel's.
  std::vector<Int> ds = {run.d(8), run.d(72)};
  if (run.d(200) != ds[1]) ds.push_back(run.d(200));
  std::size_t n = 0;
  for (const auto& [c, d] : pairs(masks(run), ds)) {
    if (run.tiny() && n++ % 4 != 0) continue;  // one d for each mask
    const Spec spec{shape(40, 70, d, 3, 2, 1, c), {}, {}, {0, 30, 70}};
    run.each_type([&](auto type) {
      using T = decltype(type);
      run.run<T>(spec, "padding NaN", [&]() -> std::string {
        BackwardCase<T> clean(spec), dirty(spec);
        const auto spoil = [&](auto& x) {
          const Array old = to_array(x);
          x.fill([&](auto b, auto h, auto j, auto e) {
            const bool padding = j >= spec.lengths[static_cast<std::size_t>(b)];
            return padding ? std::nan("") : old.at(b, h, j, e);
          });
        };
        spoil(dirty.K);
        spoil(dirty.V);
        backward(run, clean);
        backward(run, dirty);
        std::string text = clean.verdict();
        const auto same = [&](const char* name, auto& x, auto& y) {
          text += unchanged(name, x, y, [](auto...) { return true; });
        };
        same("dQ with NaN in padded keys", clean.dQ, dirty.dQ);
        same("dK with NaN in padded keys", clean.dK, dirty.dK);
        same("dV with NaN in padded keys", clean.dV, dirty.dV);
        dirty.dK.for_each([&](auto b, auto h, auto j, auto e) {
          if (j >= spec.lengths[std::size_t(b)] &&
              !(dirty.dK.at(b, h, j, e) == 0 && dirty.dV.at(b, h, j, e) == 0))
            text = "a key that nobody sees must have gradients that are exactly 0";
        });
        return text;
      });
    });
  }
}

// NaN in one row of an input: every gradient that depends on it is NaN, as it is for the oracle,
// and those are unchanged that share no tile with it.
void backward_non_finite(Run& run) {
  const double nan = std::nan("");
  const Promises& promises = run.promises();
  // A row in the middle; with two tiles on the diagonal, the last row of one and the first of the
  // next.
  std::vector<std::tuple<Causal, Int, Int, Int>> places;
  for (Causal mask : masks(run)) places.push_back({mask, 40, 50, 23});
  if (const Int tile = promises.nan_tile; tile > 1 && promises.causal && promises.host_memory)
    for (Int bad : {tile - 1, tile}) places.push_back({Causal::top_left, tile + 6, tile + 6, bad});
  for (const auto& place : places)
    for (char tensor : {'Q', 'K', 'V', 'd'})
      run.each_type([&](auto type) {
        using T = decltype(type);
        const auto [mask, Nq, Nk, row] = place;
        const Int bad = row;
        const Spec spec{shape(Nq, Nk, run.d(8), 1, 1, 1, mask)};
        const std::string name = tensor == 'd' ? "dO" : std::string(1, tensor);
        const std::string what = "NaN in row " + std::to_string(bad) + " of " + name;
        run.run<T>(spec, what, [&]() -> std::string {
          BackwardCase<T> clean(spec), dirty(spec);
          auto& x = tensor == 'Q'   ? dirty.Q
                    : tensor == 'K' ? dirty.K
                    : tensor == 'V' ? dirty.V
                                    : dirty.dO;
          const Array old = to_array(x);
          x.fill([&](auto, auto, auto i, auto e) {
            return i == bad && e == 2 ? nan : old.at(0, 0, i, e);
          });
          dirty.fill_context();
          backward(run, clean);
          backward(run, dirty);
          const BackwardOracle want = oracle_backward(dirty.p, to_array(dirty.Q), to_array(dirty.K),
                                                      to_array(dirty.V), to_array(dirty.dO));
          // Which rows have a NaN of their own, and what shares a tile with them?
          const bool of_key = tensor == 'K' || tensor == 'V';
          const auto has_nan = [&](Int i) {
            return of_key ? bad < visible_keys(spec.p, 0, i) : i == bad;
          };
          const auto near_row = [&](Int i) {
            return of_key && !(tensor == 'V' && promises.hidden_V_is_harmless) &&
                   shares_a_tile(promises, spec.p, i, bad);
          };
          const auto near_key = [&](Int j) {
            for (Int i = 0; i < spec.p.Nq; ++i)
              if ((has_nan(i) || near_row(i)) && shares_a_tile(promises, spec.p, i, j)) return true;
            return false;
          };
          std::string text;
          const auto check = [&](const char* gradient, const Buffer<T>& before,
                                 const Buffer<T>& after, const Array& wanted, auto near) {
            Comparison lost(std::string(gradient) + ", NaN is lost");
            after.for_each([&](auto b, auto h, auto i, auto e) {
              const double got = double(after.at(b, h, i, e));
              lost.add(b, h, i, e, got, std::isnan(wanted.at(b, h, i, e)) ? nan : got, 0);
            });
            text +=
                lost.report() + unchanged(std::string(gradient) + ", NaN where it does not belong",
                                          before, after, [&](auto b, auto h, auto i, auto e) {
                                            return !std::isnan(wanted.at(b, h, i, e)) && !near(i);
                                          });
          };
          check("dQ", clean.dQ, dirty.dQ, want.dQ, near_row);
          check("dK", clean.dK, dirty.dK, want.dK, near_key);
          check("dV", clean.dV, dirty.dV, want.dV, near_key);
          return text + dirty.check_memory_untouched();
        });
      });
  // A row without any weight, although it sees keys: its scores were all -infinity, and so is its
  // LSE. It has no gradient and adds nothing to those of the keys.
  if (!promises.backward_reads_O_and_LSE) return;
  run.each_type([&](auto type) {
    using T = decltype(type);
    const Spec spec{shape(40, 50, run.d(8))};
    run.run<T>(spec, "rows without weight", [&]() -> std::string {
      BackwardCase<T> c(spec);
      const auto without = [](Int i) { return i == 0 || i % 16 == 5 || i == 39; };
      const Array O = to_array(c.O), LSE = to_array(c.LSE);
      Array dO = to_array(c.dO);
      c.O.fill([&](auto b, auto h, auto i, auto x) { return without(i) ? 0 : O.at(b, h, i, x); });
      c.LSE.fill(
          [&](auto b, auto h, auto i, auto) { return without(i) ? -HUGE_VAL : LSE.at(b, h, i); });
      backward(run, c);
      dO.for_each(
          [&](auto b, auto h, auto i, auto x) {  // of a row with dO = 0, all of that is true
            if (without(i)) dO.at(b, h, i, x) = 0;
          });
      c.dO.fill([&](auto b, auto h, auto i, auto x) { return dO.at(b, h, i, x); });
      c.O.fill([&](auto b, auto h, auto i, auto x) { return O.at(b, h, i, x); });
      return c.verdict();
    });
  });
}

// No element behind a tensor is read. In memory that the test chooses.
void backward_bounds(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    for (Int d : {13, 16})
      for (Causal mask : masks(run)) {
        const Spec spec{shape(20, 35, run.d(d), 1, 2, 1, mask)};
        run.run<T>(spec, "", [&]() -> std::string {
          BackwardCase<T> c(spec);
          c.call();
          const AtTheEdge<T> Q(c.Q), K(c.K), V(c.V), O(c.O), dO(c.dO), dQ(c.dQ), dK(c.dK), dV(c.dV);
          const AtTheEdge<Stat<T>> LSE(c.LSE);
          const BackwardCall<T> call{c.p,
                                     {Q.view(), K.view(), V.view(), O.view(), dO.view(),
                                      LSE.view().data, dQ.view(), dK.view(), dV.view()},
                                     {}};
          const std::string end = survives([&] { run.functions<T>().backward(call); });
          return end.empty() ? "" : "touches memory behind the end of a tensor: " + end;
        });
      }
  });
}

void backward_fuzz(Run& run) {
  const char* seed_text = std::getenv("FA_FUZZ_SEED");
  const char* count_text = std::getenv("FA_FUZZ_CASES");
  const std::uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : 20;
  const int count = count_text ? std::atoi(count_text) : run.tiny() ? 5 : run.small() ? 8 : 40;
  std::cout << "fuzz: seed " << seed << ", " << count
            << " cases (FA_FUZZ_SEED and FA_FUZZ_CASES choose others)\n";
  run.rerun_with("FA_FUZZ_SEED=" + std::to_string(seed) +
                 " FA_FUZZ_CASES=" + std::to_string(count));
  for (int n = 0; n < count; ++n) {
    std::uint64_t draw = 0;
    const auto pick = [&](Int lo, Int hi) {
      return integer(seed * 1000033 + static_cast<std::uint64_t>(n), draw++, lo, hi);
    };
    const Int Hkv = pick(1, 2), most = run.small() ? 48 : 140;
    Spec spec{shape(pick(1, most), pick(1, most),
                    run.d(pick(1, std::min<Int>(128, run.promises().max_d))), pick(1, 2),
                    Hkv * pick(1, 3), Hkv)};
    spec.seed = static_cast<std::uint64_t>(pick(1, 1 << 30));
    if (run.promises().causal) spec.p.causal = static_cast<Causal>(pick(0, 2));
    if (run.promises().key_lengths && pick(0, 2) == 0)
      for (Int b = 0; b < spec.p.B; ++b) spec.lengths.push_back(pick(0, spec.p.Nk));
    spec.layout = {pick(0, 1) ? Layout::Order::BNHD : Layout::Order::BHND, pick(0, 5), pick(0, 7),
                   pick(0, 4) == 0, pick(0, 4) == 0};
    if (!run.promises().unaligned) {
      spec.layout.in_16_bytes = true;
      spec.layout.reversed = false;
    }
    run.backward(spec);
  }
}

void backward_layouts(Run& run) {
  using Order = Layout::Order;
  if (!run.promises().unaligned) {
    for (const Layout& layout : std::vector<Layout>{{Order::BNHD, 0, 0, false, false, true},
                                                    {Order::BHND, 5, 3, false, false, true},
                                                    {Order::BNHD, 2, 0, false, true, true}})
      run.backward({shape(18, 35, run.d(16), 2, 4, 2), {}, layout});
    return;
  }
  std::size_t n = 0;
  for (const Layout& layout : std::vector<Layout>{{Order::BNHD, 0, 0, false, false},
                                                  {Order::BHND, 5, 3, false, false},
                                                  {Order::BHND, 0, 1, true, false},
                                                  {Order::BNHD, 2, 0, false, true}})
    for (Int d : {13, 16})
      if (!run.tiny() || n++ % 3 == 0) run.backward({shape(18, 35, run.d(d), 2, 4, 2), {}, layout});
  // Rows at multiples of 16 bytes whose last 16 are not full: what is behind d is not ours.
  for (Int d : {1, 7, 59, 100, 129, 250}) {
    if (run.d(d) != d) continue;
    run.backward({shape(18, 35, d, 1, 2, 2), {}, {Order::BHND, 1, 0, false, false, true}});
  }
  // One tensor out of line is enough, for any reason. Multiples of 8 rows, so that heads and
  // batches stay in line where rows are not.
  const Spec spec{shape(8, 16, run.d(16), 2, 2, 2)};
  const char* const names[] = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV"};
  run.each_type([&](auto type) {
    using T = decltype(type);
    for (int tensor = 0; tensor < 8; ++tensor)
      for (const OutOfLine& off : out_of_line()) {
        if (run.tiny() && n++ % 5 != 0) continue;
        run.run<T>(spec, std::string(names[tensor]) + " alone " + off.what, [&]() {
          BackwardCase<T> c(spec);
          Buffer<T>* const all[] = {&c.Q, &c.K, &c.V, &c.O, &c.dO, &c.dQ, &c.dK, &c.dV};
          all[tensor]->move_to(off.layout);
          backward(run, c);
          return c.verdict();
        });
      }
  });
}

void backward_scale(Run& run) {
  for (double scale : {0.0, 0.3, -0.7}) {
    if (scale <= 0 && run.promises().positive_scale_only) continue;
    Spec spec{shape(9, 12, run.d(8))};
    spec.p.scale = scale;
    run.backward(spec);
  }
}

void backward_empty(Run& run) {
  // A sum over no queries is 0, and so are the gradients of keys that nobody asks.
  const Int d = run.d(8);
  for (const Problem& p :
       {shape(5, 7, d, 0, 2, 1), shape(0, 7, d), shape(5, 0, d, 2, 2, 1), shape(5, 7, d, 1, 0, 2)})
    run.backward({p});
  // What holds nothing need not be anywhere.
  if (!run.promises().host_memory) return;
  for (const Problem& p : {shape(5, 7, d, 0, 2, 1), shape(0, 7, d), shape(5, 0, d)})
    run.each_type([&](auto type) {
      using T = decltype(type);
      run.run<T>({p}, "from null", [&]() -> std::string {
        BackwardCase<T> c({p});
        BackwardCall<T> call = c.call();
        if (p.B * p.Nq == 0) {
          call.t.Q.data = call.t.O.data = call.t.dO.data = call.t.dQ.data = nullptr;
          call.t.LSE = nullptr;
        }
        if (p.B * p.Nk == 0)
          call.t.K.data = call.t.V.data = call.t.dK.data = call.t.dV.data = nullptr;
        run.functions<T>().backward(call);
        return c.verdict();
      });
    });
}

// The stage's own forward in double, differentiated numerically, must agree with its backward.
void gradient_check(Run& run) {
  const auto& f = run.functions<double>();
  if (!f.forward || !f.backward) return;
  for (Causal mask : masks(run)) {
    const Spec spec{shape(5, 6, 3, 1, 2, 1, mask)};
    run.run(spec.name(), [&]() -> std::string {
      BackwardCase<double> analytic(spec);
      f.backward(analytic.call());
      ForwardCase<double> numeric(spec, false);
      // loss = <dO, O>
      const auto loss = [&] {
        f.forward(numeric.call());
        double sum = 0;
        numeric.O.for_each([&](auto b, auto h, auto i, auto x) {
          sum += analytic.dO.at(b, h, i, x) * numeric.O.at(b, h, i, x);
        });
        return sum;
      };
      const auto check = [&](const char* name, Buffer<double>& input,
                             const Buffer<double>& got) -> std::string {
        std::vector<double*> elements;
        input.for_each(
            [&](auto b, auto h, auto i, auto x) { elements.push_back(&input.at(b, h, i, x)); });
        const std::vector<double> want = central_differences(elements, loss);
        double largest = 0;
        for (double w : want) largest = std::max(largest, std::fabs(w));
        Comparison c(std::string(name) + " against central differences");
        std::size_t n = 0;
        got.for_each([&](auto b, auto h, auto i, auto x) {
          c.add(b, h, i, x, got.at(b, h, i, x), want[n++], 1e-7 * largest);
        });
        return c.report();
      };
      return check("dQ", numeric.Q, analytic.dQ) + check("dK", numeric.K, analytic.dK) +
             check("dV", numeric.V, analytic.dV);
    });
  }
}

void identities(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    // The half types round each term twice, as dS or P and as the result.
    const double relative = sizeof(T) == 8 ? 1e-12 : 2e-5 + 2 * rounding<T>().unit;
    const std::string t = std::string(" ") + type_name<T>();
    const Int d = run.d(16);
    const Spec spec{shape(33, 47, d, 1, 2, 1)};
    const auto dot = [](const auto& x, const auto& y, double* size) {
      double sum = 0;
      x.for_each([&](auto b, auto h, auto i, auto e) {
        const double term = double(x.at(b, h, i, e)) * double(y.at(b, h, i, e));
        sum += term;
        *size += std::fabs(term);
      });
      return sum;
    };
    const auto close = [&](const char* what, double u, double v, double size) -> std::string {
      if (std::fabs(u - v) <= relative * size) return {};
      return std::string(what) + ": " + std::to_string(u) + " and " + std::to_string(v);
    };
    run.run("<dQ, Q> = <dK, K> and <dO, O> = <dV, V>" + t, [&]() -> std::string {
      BackwardCase<T> c(spec);
      backward(run, c);
      double size = 0, more = 0;
      const double dQ_Q = dot(c.dQ, c.Q, &size), dK_K = dot(c.dK, c.K, &size);
      const double dO_O = dot(c.dO, c.O, &more), dV_V = dot(c.dV, c.V, &more);
      return close("<dQ, Q> and <dK, K>", dQ_Q, dK_K, size) +
             close("<dO, O> and <dV, V>", dO_O, dV_V, more);
    });
    // The rows of P sum to 1 and those of dS to 0, but where a row sees nothing.
    for (Causal mask : masks(run)) {
      const Int Nq = mask == Causal::bottom_right ? 47 : 33, Nk = 80 - Nq;
      const Spec masked{shape(Nq, Nk, d, 1, 2, 1, mask)};
      run.run("sum of dK is 0, sum of dV is the sum of dO" + t + " mask " +
                  std::to_string(static_cast<int>(mask)),
              [&]() -> std::string {
                BackwardCase<T> c(masked);
                backward(run, c);
                std::string text;
                for (Int x = 0; x < d; ++x) {
                  double dK = 0, dV = 0, dO = 0, size_dK = 0, size_dV = 0;
                  for (Int j = 0; j < Nk; ++j) {
                    dK += double(c.dK.at(0, 0, j, x));
                    size_dK += std::fabs(double(c.dK.at(0, 0, j, x)));
                    dV += double(c.dV.at(0, 0, j, x));
                    size_dV += std::fabs(double(c.dV.at(0, 0, j, x)));
                  }
                  for (Int h = 0; h < 2; ++h)
                    for (Int i = 0; i < Nq; ++i)
                      if (visible_keys(c.p, 0, i) > 0) dO += double(c.dO.at(0, h, i, x));
                  text += close("sum of dK", dK, 0, size_dK) +
                          close("sums of dV and dO", dV, dO, size_dV);
                }
                return text;
              });
    }
    run.run("dO = 0 gives exact zeros; dO * 2 gives twice the bits" + t, [&]() -> std::string {
      BackwardCase<T> once(spec), twice(spec), zero(spec);
      twice.dO.fill([&](auto b, auto h, auto i, auto x) {
        return 2 * static_cast<double>(once.dO.at(b, h, i, x));
      });
      twice.O = once.O;
      zero.dO.fill([](auto...) { return 0.0; });
      backward(run, once);
      backward(run, twice);
      backward(run, zero);
      std::string text;
      const auto check = [&](const char* name, const auto& x, const auto& y, const auto& z) {
        x.for_each([&](auto b, auto h, auto i, auto e) {
          const double one = double(x.at(b, h, i, e)), two = double(y.at(b, h, i, e));
          // Of fp16's dS some are so small that they lose digits, and the rest rounds differently.
          const double room = rounding<T>().tiny > 1e-30 ? 2 * rounding<T>().of(two) : 0;
          if (run.promises().deterministic_backward && !(std::fabs(2 * one - two) <= room))
            text = std::string(name) + " is not linear in dO";
          if (!(z.at(b, h, i, e) == 0)) text = std::string(name) + " is not 0 for dO = 0";
        });
      };
      check("dQ", once.dQ, twice.dQ, zero.dQ);
      check("dK", once.dK, twice.dK, zero.dK);
      check("dV", once.dV, twice.dV, zero.dV);
      return text;
    });
  });
}

void backward_errors(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    using Call = BackwardCall<T>;
    using Change = FunctionRef<void(Call&)>;  // `auto` would compile the case 20 times
    const auto refuse = [&](const std::string& name, const std::vector<std::string>& words,
                            Change change) {
      run.run("refuses " + name + " " + type_name<T>(), [&]() -> std::string {
        BackwardCase<T> c({shape(6, 7, run.d(8), 2, 4, 2)});
        Call call = c.call();
        change(call);
        std::string text = expect_refusal([&] { run.functions<T>().backward(call); }, words);
        if (text.empty() && !(c.dQ.changed() + c.dK.changed() + c.dV.changed()).empty())
          text = "refused, but only after writing";
        return text;
      });
    };
    if (run.promises().head_dims.empty())
      refuse("d too large", {"d must"}, [&](Call& c) { c.p.d = run.promises().max_d + 1; });
    if (!run.promises().unaligned) {
      refuse("rows of dK off the multiples of 16 bytes", {"16 bytes"},
             [](Call& c) { c.t.dK.data += 1; });
      refuse("rows of dO off the multiples of 16 bytes", {"16 bytes"},
             [](Call& c) { c.t.dO.row += 4; });
    }
    refuse("d = 0", {"d must"}, [](Call& c) { c.p.d = 0; });
    refuse("Nk < 0", {"Nk", "-3"}, [](Call& c) { c.p.Nk = -3; });
    refuse("Hq no multiple of Hkv", {"Hq", "Hkv", "3"}, [](Call& c) { c.p.Hkv = 3; });
    refuse("scale infinite", {"scale", "finite"}, [](Call& c) { c.p.scale = HUGE_VAL; });
    static const Int lengths[] = {7, 7};
    if (!run.promises().key_lengths)
      refuse("key lengths, which it does not promise", {"key_lengths"},
             [](Call& c) { c.p.key_lengths = lengths; });
    if (!run.promises().causal)
      refuse("a causal mask, which it does not promise", {"causal"},
             [](Call& c) { c.p.causal = Causal::top_left; });
    if (run.promises().backward_reads_O_and_LSE) {
      refuse("O null", {"O", "null"}, [](Call& c) { c.t.O.data = nullptr; });
      refuse("LSE null", {"LSE", "null"}, [](Call& c) { c.t.LSE = nullptr; });
    } else {
      run.run(std::string("takes neither O nor LSE ") + type_name<T>(), [&]() -> std::string {
        BackwardCase<T> c({shape(6, 7, run.d(8), 2, 4, 2)});
        Call call = c.call();
        call.t.O.data = nullptr;
        call.t.LSE = nullptr;
        run.functions<T>().backward(call);
        return c.verdict();
      });
    }
    refuse("dO null", {"dO", "null"}, [](Call& c) { c.t.dO.data = nullptr; });
    refuse("dQ on top of Q", {"dQ overlaps Q"}, [](Call& c) { c.t.Q = c.t.dQ; });
    refuse("dV on top of dK", {"dV overlaps dK"}, [](Call& c) { c.t.dV = c.t.dK; });
    refuse("dK with stride 0", {"rows of dK share memory"}, [](Call& c) { c.t.dK.head = 0; });
  });
}

void backward_determinism(Run& run) {
  run.each_type([&](auto type) {
    using T = decltype(type);
    run.run(std::string("again and again ") + type_name<T>(), [&]() -> std::string {
      const Spec spec{shape(65, 70, run.d(16), 2, 4, 2)};
      BackwardCase<T> first(spec), again(spec);
      backward(run, first);
      for (int n = 0; n < (run.large() ? 50 : 10); ++n) {
        backward(run, again);
        std::string difference = same_bits("dQ", first.dQ, again.dQ) +
                                 same_bits("dK", first.dK, again.dK) +
                                 same_bits("dV", first.dV, again.dV);
        if (!difference.empty()) return difference;
      }
      return {};
    });
  });
}

// A race may show only where all of a GPU is at work, and then only now and then.
void backward_races(Run& run) {
  for (Causal c : masks(run)) {
    if (c == Causal::bottom_right) continue;
    const Spec spec{shape(150, 166, run.d(64), 2, 66, 33, c)};
    if (run.promises().takes && !run.promises().takes(spec.p)) continue;
    run.each_type([&](auto type) {
      using T = decltype(type);
      run.run<T>(spec, "300 times", [&]() -> std::string {
        BackwardCase<T> x(spec);
        BackwardCall<T> call = x.call();
        call.runs = 300;
        run.functions<T>().backward(call);
        return x.verdict();
      });
    });
  }
}

// A kernel that adds dQ up in no fixed order: two runs differ by the rounding of fp32 sums. What is
// left of that after rounding to T is a step of T here and there, but rounding does not change how
// large the differences are in the mean.
void backward_spread(Run& run) {
  std::vector<Spec> specs = {{shape(65, 70, run.d(16), 2, 4, 2)}};
  if (run.large())
    for (Causal c : masks(run))
      if (c != Causal::bottom_right) specs.push_back({shape(150, 1030, run.d(64), 1, 32, 16, c)});
  for (const Spec& spec : specs)
    run.each_type([&](auto type) {
      using T = decltype(type);
      const int runs = run.large() ? 50 : 10;
      const std::string name =
          spec.name() + " " + std::to_string(runs) + " times " + type_name<T>();
      run.run(name, [&]() -> std::string {
        BackwardCase<T> first(spec), again(spec);
        backward(run, first);
        double sum = 0, differences = 0, largest = 0;
        for (int n = 0; n < runs; ++n) {
          backward(run, again);
          std::string bits =
              same_bits("dK", first.dK, again.dK) + same_bits("dV", first.dV, again.dV);
          if (!bits.empty()) return bits;
          first.dQ.for_each([&](auto b, auto h, auto i, auto x) {
            const double u = double(first.dQ.at(b, h, i, x)), v = double(again.dQ.at(b, h, i, x));
            sum += std::fabs(u);
            differences += std::fabs(u - v);
            largest = std::max(largest, std::fabs(u - v));
          });
        }
        std::cout << name << ": dQ differs by " << differences / sum << " of |dQ| in the mean, by "
                  << largest << " at most\n";
        std::string text = again.verdict();
        if (differences <= 1e-5 * sum) return text;
        return text + "dQ differs from run to run by " + std::to_string(differences / sum) +
               " of |dQ| in the mean; sums in fp32 differ by less than 1e-5\n";
      });
    });
}

// As many queries and keys as there are, sampled rows of the gradients against the oracle. O and
// LSE come from the stage's forward and are judged first.
void backward_long_sequences(Run& run) {
  for (Causal c : masks(run)) {
    const bool shifted = c == Causal::bottom_right;
    const Spec spec{shifted ? shape(32771, 65537, run.d(128), 1, 2, 1, c)
                            : shape(65536, 65536, run.d(64), 1, 1, 1, c)};
    if (run.promises().takes && !run.promises().takes(spec.p)) continue;
    run.each_type([&](auto type) {
      using T = decltype(type);
      if (!run.functions<T>().forward || !run.functions<T>().backward) return;
      run.run<T>(spec, "", [&]() -> std::string {
        BackwardCase<T> x(spec,
                          [&](const ForwardCall<T>& call) { run.functions<T>().forward(call); });
        const ForwardOracle o =
            oracle_rows(x.p, to_array(x.Q), to_array(x.K), to_array(x.V), {0, spec.p.Nq / 2});
        for (Int r = 0; r < 2; ++r)
          if (const double want = o.LSE.at(0, 0, r);
              !(std::fabs(double(x.LSE.at(0, 0, o.rows[std::size_t(r)])) - want) <=
                lse_tolerance<T>(want, o.A.at(0, 0, r))))
            return "the forward's LSE is wrong; its own tests come first";
        backward(run, x);
        return x.verdict(sample(spec.p.Nq), sample(spec.p.Nk));
      });
    });
  }
}

// As in the forward: a batch, head or row that begins more than 2^32 elements after the one before
// it. Eight tensors lie side by side in one block.
void backward_large_offsets(Run& run) {
  const Int d = run.d(8), far = (Int(1) << 32) + 64, room = 8 * d;
  const struct {
    const char* what;
    Problem p;
  } variants[] = {
      {"batches", shape(3, 5, d, 2)}, {"heads", shape(3, 5, d, 1, 2, 2)}, {"rows", shape(2, 2, d)}};
  run.each_type([&](auto type) {
    using T = decltype(type);
    const std::size_t bytes = std::size_t(far + 8 * room) * sizeof(T);
    for (const auto& v : variants)
      run.run(std::string(v.what) + " 2^32 + 64 elements apart " + type_name<T>(),
              [&, what = std::string(v.what), p = v.p]() -> std::string {
                if (!run.promises().host_memory && double(bytes) > run.promises().device_bytes()) {
                  std::cout << "left out, as the device has no room: " << bytes << " bytes\n";
                  return {};
                }
                const Reserved reserved(bytes);
                if (!reserved.data()) return {};
                BackwardCase<T> c({p});
                BackwardCall<T> call = c.call();
                Int n = 0;
                const auto spread = [&](const Buffer<T>& x) {
                  const View<T> view{static_cast<T*>(reserved.data()) + room * n++,
                                     what == "batches" ? far : 0, what == "heads" ? far : 0,
                                     what == "rows" ? far : d};
                  x.for_each([&](auto b, auto h, auto i, auto e) {
                    view.at(b, h, i)[e] = x.at(b, h, i, e);
                  });
                  return view;
                };
                const View<T> dQ = spread(c.dQ), dK = spread(c.dK), dV = spread(c.dV);
                call.t = {spread(c.Q), spread(c.K), spread(c.V), spread(c.O), spread(c.dO),
                          call.t.LSE,  dQ,          dK,          dV};
                call.storage = {c.LSE.storage()};
                if (!run.promises().host_memory)
                  call.storage.push_back(reserved.storage(std::size_t(8 * room) * sizeof(T)));
                run.functions<T>().backward(call);
                const auto gather = [](Buffer<T>& to, const View<T>& from) {
                  to.for_each([&](auto b, auto h, auto i, auto e) {
                    to.at(b, h, i, e) = from.at(b, h, i)[e];
                  });
                };
                gather(c.dQ, dQ);
                gather(c.dK, dK);
                gather(c.dV, dV);
                return c.verdict();
              });
  });
}

void backward_memory(Run& run) {
  if (peak_heap_bytes([] {}) < 0) GTEST_SKIP() << "malloc cannot be counted in this build";
  run.each_type([&](auto type) {
    using T = decltype(type);
    const Spec spec{shape(700, 700, run.d(32))};
    run.run<T>(spec, "", [&]() -> std::string {
      BackwardCase<T> c(spec);
      const BackwardCall<T> call = c.call();
      const auto& function = run.functions<T>().backward;
      const auto bytes = static_cast<double>(peak_heap_bytes([&] { function(call); }));
      const double most = run.promises().extra_bytes_backward(c.p) * (sizeof(T) == 8 ? 2 : 1);
      if (bytes <= most) return {};
      return "took " + std::to_string(bytes) + " bytes beyond its arguments, promised at most " +
             std::to_string(most);
    });
  });
}

}  // namespace

// In an order as in the forward.
std::vector<Family> backward_families() {
  return {
      {"BackwardSizes", "dQ, dK and dV of awkward sizes, against the double-precision oracle",
       has_backward, backward_sizes},
      {"BackwardScale", "scale enters dQ and dK once, dV never", has_backward, backward_scale},
      {"BackwardHeads", "heads do not mix; dK and dV are sums over the query heads of a group",
       has_backward, backward_heads},
      {"BackwardEmpty", "empty sums are 0", has_backward, backward_empty},
      {"BackwardCausal", "a pair of query and key that is masked adds to no gradient",
       [](const StageUnderTest& s) { return has_backward(s) && s.promises.causal; },
       backward_causal},
      {"BackwardKeyLengths", "padded keys leak nothing, and their own gradients are 0",
       [](const StageUnderTest& s) { return has_backward(s) && s.promises.key_lengths; },
       backward_lengths},
      {"BackwardValues", "scores that are equal, large, far below zero, rising, falling",
       has_backward, backward_values},
      {"BackwardNonFinite",
       "NaN reaches what depends on it, and only that; a row may have no weight", has_backward,
       backward_non_finite},
      {"BackwardLayouts", "strides of gradients are honoured; nothing outside is written",
       has_backward, backward_layouts},
      {"BackwardBounds", "nothing behind the last element of a tensor is read",
       [](const StageUnderTest& s) { return has_backward(s) && s.promises.host_memory; },
       backward_bounds},
      {"BackwardFuzz", "random problems within the promises", has_backward, backward_fuzz},
      {"GradientCheck", "the backward is the derivative of the forward (central differences)",
       [](const StageUnderTest& s) { return bool(s.f64.backward); }, gradient_check},
      {"BackwardIdentities", "identities that need no reference", has_backward, identities},
      {"BackwardDeterminism", "the same call gives the same bits",
       [](const StageUnderTest& s) { return has_backward(s) && s.promises.deterministic_backward; },
       backward_determinism},
      {"BackwardRaces", "the same bits from every run, however full the GPU is",
       [](const StageUnderTest& s) {
         return has_backward(s) && s.promises.deterministic_backward &&
                s.effort == StageUnderTest::Effort::large;
       },
       backward_races},
      {"BackwardSpread", "dQ differs by rounding from run to run, dK and dV not by a bit",
       [](const StageUnderTest& s) {
         return has_backward(s) && !s.promises.deterministic_backward;
       },
       backward_spread},
      {"BackwardLongSequences", "as many keys as there are, sampled rows against the oracle",
       [](const StageUnderTest& s) {
         const auto both = [](const auto& f) { return f.forward && f.backward; };
         return s.effort == StageUnderTest::Effort::large &&
                (both(s.f32) || both(s.f64) || both(s.f16) || both(s.bf16));
       },
       backward_long_sequences},
      {"BackwardLargeOffsets", "addresses are computed with 64 bits",
       [](const StageUnderTest& s) {
         return has_backward(s) && (s.promises.host_memory || s.promises.device_bytes);
       },
       backward_large_offsets},
      {"BackwardMemory", "no more memory than promised",
       [](const StageUnderTest& s) {
         return has_backward(s) && bool(s.promises.extra_bytes_backward);
       },
       backward_memory},
      {"BackwardErrors", "bad arguments are refused in words, before any write", has_backward,
       backward_errors},
  };
}

}  // namespace fa::judge
