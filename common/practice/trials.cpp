// Two tests that only a program of exercises has. `practice.py` runs them with FA_STEPS set: each
// hole alone, all of them, none. What they print is for it: fields between tabs.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/judge/cases.hpp"
#include "common/judge/conformance.hpp"
#include "common/judge/function_ref.hpp"
#include "common/judge/tiny.hpp"
#include "common/practice/steps.hpp"

namespace fa::practice {

namespace {
unsigned long long from_environment() {
  const char* text = std::getenv("FA_STEPS");
  return text ? std::strtoull(text, nullptr, 16) : ~0ull;
}
}  // namespace

const unsigned long long readers = from_environment();
bool recording = false;

void record(const char* name, double x) {
  std::printf("see\t%s\t%.9g\n", name, x);
  std::fflush(stdout);  // what comes before a crash is not lost
}

[[noreturn]] void eigen_complains(const char* assertion) {
  const std::string text = assertion;
  const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
  std::string words = "Eigen asserts " + text;
  if (says("invalid matrix product"))
    words =
        "shapes: a product A B needs as many columns in A as B has rows; a .transpose() may be "
        "missing";
  else if (says("rows() == ") || says("== rows") || says("cols() == ") || says("must match"))
    words = "shapes: both sides need as many rows and columns (a row is not a column)";
  else if (says("index") || says("row < rows()") || says("row >= 0"))
    words = "an index lies outside of its matrix";
  throw std::logic_error(words + "  [" + text + "]");
}

namespace {

using namespace fa::judge;

std::string one_line(const std::string& text) {
  std::string line;
  for (char c : text) line += c == '\n' ? "\\n" : std::string(1, c == '\t' ? ' ' : c);
  return line;
}
std::string tried(FunctionRef<std::string()> f) {
  try {
    return one_line(f());
  } catch (const std::exception& e) {
    return "threw: " + one_line(e.what());
  }
}
// FA_SUITES names the stages that the reader's files decide, `rows,lanes`; all without it.
bool asked_for(const StageUnderTest& stage) {
  const char* names = std::getenv("FA_SUITES");
  return !names ||
         ("," + std::string(names) + ",").find("," + stage.name + ",") != std::string::npos;
}
std::vector<StageUnderTest> stages() {
  std::vector<StageUnderTest> all;
  for (const StageUnderTest& stage : registered())
    if (asked_for(stage) && !(stage.unavailable && !stage.unavailable().empty()))
      all.push_back(stage);
  return all;
}

bool has_forward(const StageUnderTest& stage) {
  return stage.f32.forward && stage.promises.tests_forward;
}

template <class T>
void fill(Buffer<T>& x, const float* from) {
  x.fill([&](auto, auto, auto i, auto e) { return double(from[i * 2 + e]); });
}
template <class T>
void show(const char* name, const Buffer<T>& x) {
  x.for_each([&](auto b, auto h, auto i, auto e) { record(name, double(x.at(b, h, i, e))); });
}

using ForwardFunction = std::function<void(const ForwardCall<float>&)>;

Spec tiny_spec() {
  Spec spec;
  spec.p = TinyProblem().p;
  return spec;
}

// ---- problems on which all is right but for one thing, each with what its Q, K and V have instead

Spec causal(const Problem& p, const Data& data = {}) {
  Spec spec{p, data};
  spec.p.causal = Causal::top_left;
  return spec;
}
using Change = void (*)(ForwardCase<float>&);

// The last key, which no query sees, would weigh all: a maximum over it leaves the others nothing.
Spec hidden_score() { return causal(shape(9, 12, 4), {Data::Kind::spike_last, 300}); }

// Keys that no query sees, also where a vector of rows is not full: 0 * NaN is NaN.
Spec hidden_V() { return causal(shape(17, 22, 8)); }
void nan_in_hidden_V(ForwardCase<float>& c) {
  const Array V = to_array(c.V);
  c.V.fill([&](auto b, auto h, auto j, auto x) {
    return j >= c.p.Nq ? std::nan("") : V.at(b, h, j, x);
  });
}

// Where one product with all of V is the method, a NaN in it reaches every row.
bool spares_hidden_V(const Promises& is) {
  const Problem p = hidden_V().p;
  return is.causal && !shares_a_tile(is, p, p.Nq - 1, p.Nq);
}

// Every score is -infinity, so that no key weighs anything, but for a NaN in row 2 and another one
// in row 4: infinity - infinity. Neither comes first, where some maxima start.
Spec no_weight() { return {shape(5, 50, 4)}; }
void nan_among_no_weight(ForwardCase<float>& c) {
  const double infinity = INFINITY;
  c.Q.fill([](auto, auto, auto i, auto x) { return x == 0 || i == 2 * x ? 1.0 : -1.0; });
  c.K.fill([&](auto, auto, auto j, auto x) {
    const bool meets = (x == 1 && j == 20) || (x == 2 && j == 49);
    return x == 0 ? -infinity : meets ? infinity : 1.0;
  });
}

// A method as a black box: small problems, each of which shows one quantity whatever the method
// calls it, in an order in which the first that differs tells most. Where V is one for one key and
// zero for the others, O is what that key weighs.
struct Forwards {
  const StageUnderTest& stage;
  const ForwardFunction& forward;
  const TinyProblem tiny = {};

  void call(ForwardCase<float>& c) const {
    std::fflush(stdout);  // what comes before a crash is not lost
    forward(c.call());
  }

  // Key 0 and key j, with `between` keys that weigh nothing between them; the larger score comes
  // first, or last. Rows may differ in which that is, so both orders are tried.
  void two_keys(const char* ratio, const char* sum, const char* lse, std::int64_t between,
                bool rising) const {
    std::vector<double> ratios, sums, lses;
    for (int j = 1; j < 4; ++j)
      for (int i = 0; i < 4; ++i) {
        const float *q = tiny.Q + 2 * i, *one = tiny.K, *other = tiny.K + 2 * j;
        const bool grows = q[0] * one[0] + q[1] * one[1] <= q[0] * other[0] + q[1] * other[1];
        const bool swapped = grows != rising;
        double weight[2];
        for (const bool last : {false, true}) {
          ForwardCase<float> c({shape(4, 2 + between, 2)}, stage.promises.lse);
          fill(c.Q, tiny.Q);
          c.K.fill([&](auto, auto, auto k, auto x) {
            return k == 0             ? double((swapped ? other : one)[x])
                   : k == between + 1 ? double((swapped ? one : other)[x])
                                      : -100.0;
          });
          c.V.fill([&](auto, auto, auto k, auto) { return k == last * (between + 1) ? 1.0 : 0.0; });
          call(c);
          weight[last != swapped] = double(c.O.at(0, 0, i, 0));
          if (stage.promises.lse && last) lses.push_back(double(c.LSE.at(0, 0, i)));
        }
        ratios.push_back(std::log(weight[1] / weight[0]));
        sums.push_back(weight[0] + weight[1]);
      }
    for (double x : ratios) record(ratio, x);
    for (double x : sums) record(sum, x);
    for (double x : lses) record(lse, x);
  }

  void random(const Spec& spec, const char* output, const char* lse,
              Change change = nullptr) const {
    ForwardCase<float> c(spec, stage.promises.lse);
    if (change) change(c);
    call(c);
    show(output, c.O);
    if (stage.promises.lse) show(lse, c.LSE);
  }

  // All scores are equal, and V is one for key 0 in its first column, for all keys in the second.
  void mask(const Spec& spec, const char* sum, const char* seen) const {
    ForwardCase<float> c(spec, stage.promises.lse);
    const auto one = [](auto, auto, auto, auto x) { return x == 0 ? 1.0 : 0.0; };
    c.Q.fill(one), c.K.fill(one);
    c.V.fill([](auto, auto, auto j, auto x) { return j == 0 || x == 1 ? 1.0 : 0.0; });
    call(c);
    c.O.for_each([&](auto b, auto h, auto i, auto x) {
      if (x == 1) record(sum, double(c.O.at(b, h, i, 1)));
    });
    c.O.for_each([&](auto b, auto h, auto i, auto x) {
      if (x == 0) record(seen, 1 / double(c.O.at(b, h, i, 0)));
    });
  }

  void look() const {
    const std::int64_t many = stage.effort <= StageUnderTest::Effort::small ? 70 : 150;
    two_keys("S_ij - S_i0", "sum of P_i", "L of two keys", 0, false);
    two_keys("P, rising", "sum, rising", "L, rising", 0, true);
    random({shape(4, 1, 70)}, "O, wide head", "S, wide head");
    random({shape(3, 30, 4)}, "O, 30 keys", "L, 30 keys");
    random({shape(many, 2, 8)}, "O, many rows", "L, many rows");
    two_keys("P, far key", "sum, far key", "L, far key", many, false);
    two_keys("P, far rising", "sum, far rising", "L, far rising", many, true);
    mask({shape(2, many, 2)}, "sum, many keys", "keys seen");
    random({shape(3, many, 8)}, "O, many keys", "L, many keys");
    if (stage.promises.causal) {
      Spec spec{shape(40, 75, 2)};
      for (const Causal causal : {Causal::top_left, Causal::bottom_right}) {
        spec.p.causal = causal;
        mask(spec, "sum, causal", "keys, causal");
      }
      if (stage.promises.large_scores) random(hidden_score(), "O, hidden far", "L, hidden far");
      if (spares_hidden_V(stage.promises))
        random(hidden_V(), "O, hidden NaN", "L, hidden NaN", nan_in_hidden_V);
    }
    if (stage.promises.key_lengths) {
      Spec spec{shape(2, 40, 2, 2)};
      spec.lengths = {1, 35};
      mask(spec, "sum, lengths", "keys, lengths");
      spec.lengths = {0, 3};
      random(spec, "O, no keys", "L, no keys");
    }
    random({shape(5, 7, 4, 2, 4, 2)}, "O, heads", "L, heads");
    if (stage.promises.large_scores) {
      Spec spec{shape(5, 7, 4)};
      spec.data = {Data::Kind::alternating, 60};
      random(spec, "O, +60 and -60", "L, +60 and -60");
      random(no_weight(), "O, -inf and NaN", "L, -inf and NaN", nan_among_no_weight);
    }
    if (stage.promises.lse) {
      ForwardCase<float> c({shape(3, 4, 2)}, false);
      call(c);
      show("O without L", c.O);
    }
  }
};

// The same for a backward. The scores are those of the tiny problem, in the first two of 12
// columns. Of the others each query has one of its own, and so has each key, where the other side
// is zero: there dQ and dK hold scale dS. One more, which no score sees, is D's: where V is zero,
// dS is -P D, and D is what O says; where O is zero, dS is P dP.
struct Backwards {
  const StageUnderTest& stage;
  const TinyProblem tiny = {};

  void call(BackwardCase<float>& c) const {
    std::fflush(stdout);  // what comes before a crash is not lost
    stage.f32.backward(c.call());
  }
  using Scores = std::array<std::array<double, 4>, 4>;

  // dS as dQ and as dK have it.
  std::array<Scores, 2> scores(bool values, bool delta) const {
    Spec spec{shape(4, 4, 12)};
    spec.p.scale = 0.5;
    BackwardCase<float> c(spec);
    const auto columns = [](const float* from, int own) {
      return [=](auto, auto, auto i, auto x) {
        return x < 2 ? double(from[2 * i + x]) : double(x == own + i);
      };
    };
    c.Q.fill(columns(tiny.Q, 4)), c.K.fill(columns(tiny.K, 8));
    c.V.fill([&](auto, auto, auto j, auto x) {
      return values && x < 2 ? double(tiny.V[2 * j + x]) : 0.0;
    });
    c.dO.fill([&](auto, auto, auto i, auto x) {
      return x < 2 && values ? double(1 + i * x) : double(x == 2);
    });
    c.fill_context();
    if (!values || !delta)
      c.O.fill([&](auto, auto, auto i, auto x) { return delta && x == 2 ? 1.0 + double(i) : 0.0; });
    call(c);
    std::array<Scores, 2> dS;
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) {
        dS[0][i][j] = 2 * double(c.dQ.at(0, 0, i, 8 + j));
        dS[1][i][j] = 2 * double(c.dK.at(0, 0, j, 4 + i));
      }
    return dS;
  }
  void show_scores(bool values, bool delta, std::array<const char*, 2> names) const {
    const auto dS = scores(values, delta);
    for (std::size_t k = 0; k < 2; ++k)
      for (const auto& row : dS[k])
        for (double x : row) record(names[k], x);
  }
  void show_deltas() const {
    const auto dS = scores(false, true);
    const char *const ratio[] = {"S, by dQ", "S, by dK"}, *const D[] = {"D, by dQ", "D, by dK"};
    for (std::size_t k = 0; k < 2; ++k)
      for (const auto& row : dS[k])
        for (int j = 1; j < 4; ++j) record(ratio[k], std::log(row[j] / row[0]));
    for (std::size_t k = 0; k < 2; ++k)
      for (const auto& row : dS[k]) record(D[k], -(row[0] + row[1] + row[2] + row[3]));
  }

  // Where dO is one for one row, dV holds that row's weights.
  void weights() const {
    for (int pair = 0; pair < 2; ++pair) {
      BackwardCase<float> c(tiny_spec());
      fill(c.Q, tiny.Q), fill(c.K, tiny.K), fill(c.V, tiny.V);
      c.dO.fill([&](auto, auto, auto i, auto x) { return i == 2 * pair + x ? 1.0 : 0.0; });
      c.fill_context();
      call(c);
      for (int x = 0; x < 2; ++x)
        for (int j = 0; j < 4; ++j) record("P, by dV", double(c.dV.at(0, 0, j, x)));
    }
  }

  void random(const Spec& spec, std::array<const char*, 3> names) const {
    BackwardCase<float> c(spec);
    call(c);
    show(names[0], c.dV), show(names[1], c.dK), show(names[2], c.dQ);
  }

  void look() const {
    const std::int64_t many = stage.effort <= StageUnderTest::Effort::small ? 70 : 150;
    if (stage.promises.backward_reads_O_and_LSE) {
      show_deltas();
      show_scores(true, false, {"P dP, by dQ", "P dP, by dK"});
    }
    weights();
    show_scores(true, true, {"dS, by dQ", "dS, by dK"});
    random({shape(3, 5, 70)}, {"dV, wide head", "dK, wide head", "dQ, wide head"});
    random({shape(many, 5, 8)}, {"dV, many rows", "dK, many rows", "dQ, many rows"});
    random({shape(5, many, 8)}, {"dV, many keys", "dK, many keys", "dQ, many keys"});
    if (stage.promises.causal) {
      Spec spec{shape(40, 75, 8)};
      for (const Causal causal : {Causal::top_left, Causal::bottom_right}) {
        spec.p.causal = causal;
        random(spec, {"dV, causal", "dK, causal", "dQ, causal"});
      }
    }
    if (stage.promises.key_lengths) {
      Spec spec{shape(7, 40, 8, 3)};
      spec.lengths = {0, 1, 35};
      random(spec, {"dV, lengths", "dK, lengths", "dQ, lengths"});
    }
    random({shape(5, 7, 4, 2, 4, 2)}, {"dV, heads", "dK, heads", "dQ, heads"});
  }
};

// The chapter's problem: what the steps note on the way, or with FA_OUTSIDE what can be seen
// without them; then the results, and which kernels were launched.
TEST(Practice, Trace) {
  const TinyProblem tiny;
  const bool outside = std::getenv("FA_OUTSIDE");
  for (const StageUnderTest& stage : stages()) {
    std::printf("stage\t%s\n", stage.name.c_str());
    if (stage.take_kernels) stage.take_kernels();
    const std::string wrong = tried([&] {
      if (has_forward(stage)) {
        const ForwardFunction forward = stage.by_hand ? stage.by_hand : stage.f32.forward;
        if (outside) Forwards{stage, forward}.look();
        ForwardCase<float> c(tiny_spec(), stage.promises.lse);
        fill(c.Q, tiny.Q), fill(c.K, tiny.K), fill(c.V, tiny.V);
        const auto call = c.call();
        recording = !outside;
        forward(call);
        recording = false;
        if (stage.promises.lse) show("L", c.LSE);
        show("O", c.O);
      }
      if (stage.f32.backward) {
        if (outside) Backwards{stage}.look();
        // Where the forward's own stage has a backward, in 00, the chapter takes another last row.
        const float dO[] = {1, 0, 0, 1, 1, 1, 1, has_forward(stage) ? 1.f : -1.f};
        BackwardCase<float> c(tiny_spec());
        fill(c.Q, tiny.Q), fill(c.K, tiny.K), fill(c.V, tiny.V), fill(c.dO, dO);
        c.fill_context();
        const auto call = c.call();
        recording = !outside;
        stage.f32.backward(call);
        recording = false;
        show("dV", c.dV), show("dK", c.dK), show("dQ", c.dQ);
      }
      return std::string();
    });
    recording = false;
    if (stage.take_kernels) {
      std::printf("launched\t");
      for (const std::string& kernel : stage.take_kernels()) std::printf("%s ", kernel.c_str());
      std::printf("\n");
    }
    if (!wrong.empty()) std::printf("stopped\t%s\n", wrong.c_str());
  }
}

struct Trial {
  const char* about;
  Spec spec;
  bool wanted;
  Change change = nullptr;  // of a forward's inputs
  bool lse = true;          // is it wanted?

  bool of_the_forward() const { return change || !lse; }
  // "several tiles (33 x 150 x 16)": Nq, Nk and d.
  std::string name() const {
    std::ostringstream s;
    s << about << " (" << spec.p.Nq << " x " << spec.p.Nk << " x " << spec.p.d << ")";
    return s.str();
  }
};

// Few cases, each with a trait of its own: what tells one mistake from another.
std::vector<Trial> trials(const StageUnderTest& stage) {
  const Promises& is = stage.promises;
  const bool forward = has_forward(stage);
  using Kind = Data::Kind;
  const Spec plain{shape(5, 7, 3)},
      tiles{shape(33, stage.effort <= StageUnderTest::Effort::small ? 70 : 150, 16)};
  const auto with = [](Spec spec, auto change) {
    change(spec);
    return spec;
  };
  const auto data = [&](const Spec& spec, Kind kind, double level) {
    return with(spec, [&](Spec& s) { s.data = {kind, level}; });
  };
  const auto mask = [&](Causal causal) {
    return with(Spec{shape(40, 75, 8)}, [&](Spec& s) { s.p.causal = causal; });
  };
  std::vector<Trial> all = {
      {"one key", {shape(3, 1, 4)}, true},
      {"equal scores", data(plain, Kind::equal, 1), true},
      {"a few keys", plain, true},
      {"falling scores", data(tiles, Kind::falling, 8), true},
      {"rising scores", data(tiles, Kind::rising, 8), true},
      {"several tiles", tiles, true},
      {"several heads", {shape(9, 21, 8, 2, 4, 2)}, true},
      {"a scale of 2", with(plain, [](Spec& s) { s.p.scale = 2.0; }), true},
      {"a negative scale", with(plain, [](Spec& s) { s.p.scale = -0.7; }), !is.positive_scale_only},
      {"scores near 100", data(plain, Kind::level, 100), is.large_scores && forward},
      {"scores near -500", data(plain, Kind::level, -500), is.large_scores && forward},
      {"causal, top left", mask(Causal::top_left), is.causal},
      {"causal, bottom right", mask(Causal::bottom_right), is.causal},
      {"rows that see no key",
       with(Spec{shape(20, 5, 8)}, [](Spec& s) { s.p.causal = Causal::bottom_right; }), is.causal},
      {"key lengths",
       with(Spec{shape(7, 70, 8, 4, 2, 1)},
            [](Spec& s) {
              s.lengths = {0, 1, 35, 70};
            }),
       is.key_lengths},
      {"a hidden score of 300", hidden_score(), is.causal && is.large_scores},
      {"NaN in hidden V", hidden_V(), spares_hidden_V(is) && forward, nan_in_hidden_V},
      {"NaN beside -infinity", no_weight(), is.large_scores && forward, nan_among_no_weight},
      {"a wide head", {shape(18, 20, 100)}, true},
      {"no keys", {shape(5, 0, 8)}, true},
      {"no LSE wanted", plain, is.lse && forward, nullptr, false}};
  std::erase_if(all, [](const Trial& t) { return !t.wanted; });
  return all;
}

TEST(Practice, Trials) {
  for (const StageUnderTest& stage : stages()) {
    std::printf("stage\t%s\n", stage.name.c_str());
    for (const Trial& t : trials(stage)) {
      if (stage.promises.takes && !stage.promises.takes(t.spec.p)) continue;
      const std::string name = t.name();
      const auto say = [&](const std::string& wrong) {
        std::printf("trial\t%s\t%s\n", name.c_str(), wrong.c_str());
        std::fflush(stdout);  // what comes before a crash is not lost
      };
      std::printf("begins\t%s\n", name.c_str());
      std::fflush(stdout);
      if (has_forward(stage))
        say(tried([&] {
          ForwardCase<float> c(t.spec, stage.promises.lse && t.lse);
          if (t.change) t.change(c);
          stage.f32.forward(c.call());
          return c.verdict();
        }));
      if (stage.f32.backward && !t.of_the_forward())
        say(tried([&] {
          BackwardCase<float> c(t.spec);
          stage.f32.backward(c.call());
          return c.verdict();
        }));
    }
  }
}

}  // namespace
}  // namespace fa::practice
