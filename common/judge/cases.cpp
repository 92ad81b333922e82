#include "common/judge/cases.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace fa::judge {

std::string Spec::name() const {
  std::ostringstream s;
  s << "B" << p.B << " Hq" << p.Hq << " Hkv" << p.Hkv << " Nq" << p.Nq << " Nk" << p.Nk << " d"
    << p.d;
  if (p.causal != Causal::none) s << (p.causal == Causal::top_left ? " top_left" : " bottom_right");
  if (p.scale) s << " scale" << *p.scale;
  if (!lengths.empty()) {
    s << " lengths";
    for (std::size_t b = 0; b < lengths.size(); ++b) s << (b ? "," : "") << lengths[b];
  }
  if (layout.order == Layout::Order::BNHD) s << " BNHD";
  if (layout.in_16_bytes) s << " in 16 bytes";
  if (layout.gap) s << " gap" << layout.gap;
  if (layout.head_gap) s << " head_gap" << layout.head_gap;
  if (layout.batch_gap) s << " batch_gap" << layout.batch_gap;
  if (layout.offset) s << " offset" << layout.offset;
  if (layout.reversed) s << " reversed";
  if (layout.broadcast_heads) s << " broadcast";
  s << " " << data.name() << " seed" << seed;
  return s.str();
}

std::vector<Spec> walk_specs(std::int64_t multiple) {
  std::vector<Spec> specs;
  const auto add = [&](std::int64_t Nq, std::int64_t Nk, std::int64_t d, std::int64_t B,
                       std::int64_t Hq, std::int64_t Hkv, Causal causal) -> Spec& {
    Spec s;
    s.p.B = B, s.p.Hq = Hq, s.p.Hkv = Hkv, s.p.Nq = Nq, s.p.Nk = Nk;
    s.p.d = (d + multiple - 1) / multiple * multiple;
    s.p.causal = causal;
    s.seed = specs.size() + 1;
    return specs.emplace_back(s);
  };
  using enum Causal;
  add(1, 1, 8, 1, 1, 1, none);
  add(37, 70, 16, 1, 2, 1, none);
  add(70, 37, 24, 2, 2, 2, top_left);
  add(33, 97, 8, 1, 4, 2, bottom_right);
  add(97, 33, 40, 1, 1, 1, bottom_right);  // the first rows see nothing
  add(64, 128, 32, 1, 1, 1, top_left);
  add(130, 131, 16, 1, 1, 1, bottom_right);
  add(40, 70, 16, 3, 2, 1, none).lengths = {70, 33, 0};
  add(70, 70, 16, 3, 1, 1, bottom_right).lengths = {1, 64, 70};  // rows that see nothing
  add(50, 60, 16, 2, 2, 1, bottom_right).layout.order = Layout::Order::BNHD;
  Spec& gaps = add(50, 60, 13, 2, 2, 1, top_left);
  gaps.layout.gap = 3, gaps.layout.offset = 1;
  add(50, 60, 16, 1, 4, 1, none).p.scale = 0.7;
  return specs;
}

namespace {

template <class T>
void fill(Buffer<T>& x, char tensor, const Spec& spec) {
  // What float cannot hold with all digits is nothing at all in fp16, whose smallest such number
  // is far larger.
  double unit = 1;
  if (is_half<T> && spec.data.kind == Data::Kind::denormal && tensor == 'V')
    unit = double(std::numeric_limits<T>::min()) / double(std::numeric_limits<float>::min());
  x.fill([&](auto b, auto h, auto i, auto e) {
    return unit * element(spec.data, tensor, spec.p, spec.seed, b, h, i, e);
  });
}

// Broadcast inputs have one head in memory; outputs need a place for every row.
Layout output(Layout layout) {
  layout.broadcast_heads = false;
  return layout;
}

Storage lengths(Spec& spec) {
  return {spec.lengths.data(), spec.lengths.size() * sizeof(std::int64_t)};
}

// Every tensor has strides of its own, or reading V with K's would look right. The plain layout
// stays plain: it is what most callers have.
Layout own(Layout layout, std::int64_t n) {
  if (layout.order == Layout::Order::BNHD || layout.gap || layout.reversed) layout.gap += n;
  return layout;
}

template <class T>
std::string untouched(const char* name, const Buffer<T>& x, bool is_input) {
  const std::string change = is_input ? x.changed() : x.written_outside();
  return change.empty() ? "" : std::string(name) + ": " + change + "\n";
}

template <class T>
Comparison compare_gradient(const char* name, const Buffer<T>& got, const Array& want,
                            const BackwardOracle& o, const Spread& e) {
  double largest = 0;
  for (double w : want.data) largest = std::max(largest, std::fabs(w));
  Comparison c(name);
  const double fp32 = gradient_tolerance<T>(o.A, largest, o.noise);
  got.for_each([&](auto b, auto h, auto i, auto x) {
    const double w = want.at(b, h, i, x);
    const Tolerance t = tolerance<T>(fp32, e, w, b, h, i, x);
    c.add(b, h, i, x, static_cast<double>(got.at(b, h, i, x)), w, t.element, t.usual);
  });
  return c;
}

template <class T>
std::string compare_rows(const char* name, const Buffer<T>& got, const GradientRows& want,
                         double A) {
  Comparison c(name);
  const double largest = want.largest();
  want.value.for_each([&](auto b, auto h, auto r, auto x) {
    const std::int64_t i = want.rows[static_cast<std::size_t>(r)];
    const double w = want.value.at(b, h, r, x);
    const Tolerance t = tolerance<T>(gradient_tolerance<T>(A, largest, want.noise.at(b, h, r)),
                                     want.e, w, b, h, r, x);
    c.add(b, h, i, x, static_cast<double>(got.at(b, h, i, x)), w, t.element, t.usual);
  });
  std::string text = c.ok() ? "" : c.report() + "\n";
  std::int64_t no_numbers = 0;
  got.for_each([&](auto b, auto h, auto i, auto x) {
    no_numbers += !std::isfinite(double(got.at(b, h, i, x)));
  });
  if (no_numbers)
    text += std::string(name) + " is no number in " + std::to_string(no_numbers) + " places\n";
  return text;
}

}  // namespace

template <class T>
ForwardCase<T>::ForwardCase(const Spec& s, bool want_lse)
    : spec(s),
      p(s.p),
      Q(p.B, p.Hq, p.Nq, p.d, output(s.layout)),
      K(p.B, p.Hkv, p.Nk, p.d, own(s.layout, 1)),
      V(p.B, p.Hkv, p.Nk, p.d, own(s.layout, 2)),
      O(p.B, p.Hq, p.Nq, p.d, own(output(s.layout), 3)),
      LSE(p.B, p.Hq, p.Nq, 1),
      want_lse_(want_lse) {
  p.key_lengths = spec.lengths.empty() ? nullptr : spec.lengths.data();
  fill(Q, 'Q', spec);
  fill(K, 'K', spec);
  fill(V, 'V', spec);
}

template <class T>
ForwardCall<T> ForwardCase<T>::call() {
  O.poison();
  LSE.poison();
  return {p,
          {Q.view(), K.view(), V.view(), O.view(), want_lse_ ? LSE.view().data : nullptr},
          {Q.storage(), K.storage(), V.storage(), O.storage(), LSE.storage(), lengths(spec)}};
}

template <class T>
std::string ForwardCase<T>::verdict() {
  return verdict(
      oracle_forward(p, to_array(Q), to_array(K), to_array(V), rounding<T>(), spec.hooks));
}

template <class T>
std::string ForwardCase<T>::verdict(const std::vector<std::int64_t>& rows) {
  const std::string text = verdict(
      oracle_rows(p, to_array(Q), to_array(K), to_array(V), rows, rounding<T>(), spec.hooks));
  std::int64_t no_numbers = 0;
  O.for_each([&](auto b, auto h, auto i, auto x) {
    no_numbers += std::isnan(O.at(b, h, i, x)) || (want_lse_ && std::isnan(LSE.at(b, h, i)));
  });
  return no_numbers ? text + "O or LSE is NaN in " + std::to_string(no_numbers) + " places\n"
                    : text;
}

template <class T>
std::string ForwardCase<T>::verdict(const ForwardOracle& want) {
  Comparison o("O"), lse("LSE");
  want.O.for_each([&](auto b, auto h, auto r, auto x) {
    const std::int64_t i = want.rows[static_cast<std::size_t>(r)];
    const Tolerance t = tolerance<T>(want, b, h, r, x);
    o.add(b, h, i, x, static_cast<double>(O.at(b, h, i, x)), want.O.at(b, h, r, x), t.element,
          t.usual);
    const double w = want.LSE.at(b, h, r);
    if (want_lse_ && x == 0)
      lse.add(b, h, i, 0, static_cast<double>(LSE.at(b, h, i)), w,
              lse_tolerance<T>(w, want.A.at(b, h, r)));
  });
  return Comparison::reports({o, lse}) + check_memory_untouched();
}

template <class T>
std::string ForwardCase<T>::check_memory_untouched() const {
  return untouched("Q", Q, true) + untouched("K", K, true) + untouched("V", V, true) +
         untouched("O", O, false) + untouched("LSE", LSE, false);
}

template <class T>
BackwardCase<T>::BackwardCase(const Spec& s, Inputs)
    : spec(s),
      p(s.p),
      Q(p.B, p.Hq, p.Nq, p.d, output(s.layout)),
      K(p.B, p.Hkv, p.Nk, p.d, own(s.layout, 1)),
      V(p.B, p.Hkv, p.Nk, p.d, own(s.layout, 2)),
      O(p.B, p.Hq, p.Nq, p.d, own(output(s.layout), 3)),
      dO(p.B, p.Hq, p.Nq, p.d, own(output(s.layout), 4)),
      dQ(p.B, p.Hq, p.Nq, p.d, own(output(s.layout), 5)),
      dK(p.B, p.Hkv, p.Nk, p.d, own(output(s.layout), 6)),
      dV(p.B, p.Hkv, p.Nk, p.d, own(output(s.layout), 7)),
      LSE(p.B, p.Hq, p.Nq, 1) {
  p.key_lengths = spec.lengths.empty() ? nullptr : spec.lengths.data();
  fill(Q, 'Q', spec);
  fill(K, 'K', spec);
  fill(V, 'V', spec);
  fill(dO, 'd', spec);
}

template <class T>
BackwardCase<T>::BackwardCase(const Spec& s) : BackwardCase(s, Inputs{}) {
  fill_context();
}

template <class T>
void BackwardCase<T>::fill_context() {
  const ForwardOracle f = oracle_forward(p, to_array(Q), to_array(K), to_array(V), {}, spec.hooks);
  O.fill([&](auto b, auto h, auto i, auto x) { return f.O.at(b, h, i, x); });
  LSE.fill([&](auto b, auto h, auto i, auto) { return f.LSE.at(b, h, i); });
}

template <class T>
BackwardCase<T>::BackwardCase(const Spec& s, FunctionRef<void(const ForwardCall<T>&)> forward)
    : BackwardCase(s, Inputs{}) {
  ForwardCase<T> f(s, true);
  forward(f.call());
  O.fill([&](auto b, auto h, auto i, auto x) { return double(f.O.at(b, h, i, x)); });
  LSE.fill([&](auto b, auto h, auto i, auto) { return double(f.LSE.at(b, h, i)); });
}

template <class T>
BackwardCall<T> BackwardCase<T>::call() {
  dQ.poison();
  dK.poison();
  dV.poison();
  return {p,
          {Q.view(), K.view(), V.view(), O.view(), dO.view(), LSE.view().data, dQ.view(), dK.view(),
           dV.view()},
          {Q.storage(), K.storage(), V.storage(), O.storage(), dO.storage(), LSE.storage(),
           dQ.storage(), dK.storage(), dV.storage(), lengths(spec)}};
}

template <class T>
std::string BackwardCase<T>::verdict() {
  const BackwardOracle want = oracle_backward(p, to_array(Q), to_array(K), to_array(V),
                                              to_array(dO), rounding<T>(), spec.hooks);
  return Comparison::reports({compare_gradient("dQ", dQ, want.dQ, want, want.eQ),
                              compare_gradient("dK", dK, want.dK, want, want.eK),
                              compare_gradient("dV", dV, want.dV, want, want.eV)}) +
         check_memory_untouched();
}

template <class T>
std::string BackwardCase<T>::verdict(const std::vector<std::int64_t>& queries,
                                     const std::vector<std::int64_t>& keys) {
  const BackwardRowsOracle want = oracle_backward_rows(
      p, {to_array(Q), to_array(K), to_array(V), to_array(O), to_array(dO), to_array(LSE)}, queries,
      keys, rounding<T>(), spec.hooks);
  return compare_rows("dQ", dQ, want.dQ, want.A) + compare_rows("dK", dK, want.dK, want.A) +
         compare_rows("dV", dV, want.dV, want.A) + check_memory_untouched();
}

template <class T>
std::string BackwardCase<T>::check_memory_untouched() const {
  return untouched("Q", Q, true) + untouched("K", K, true) + untouched("V", V, true) +
         untouched("O", O, true) + untouched("dO", dO, true) + untouched("LSE", LSE, true) +
         untouched("dQ", dQ, false) + untouched("dK", dK, false) + untouched("dV", dV, false);
}

template struct ForwardCase<float>;
template struct ForwardCase<double>;
template struct ForwardCase<Eigen::half>;
template struct ForwardCase<Eigen::bfloat16>;
template struct BackwardCase<float>;
template struct BackwardCase<double>;
template struct BackwardCase<Eigen::half>;
template struct BackwardCase<Eigen::bfloat16>;

}  // namespace fa::judge
