// Two tests that only a program of exercises has. `practice.py` runs them with FA_STEPS set: each
// hole alone, all of them, none. What they print is for it: fields between tabs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/judge/cases.hpp"
#include "common/judge/conformance.hpp"
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

void record(const char* name, double x) { std::printf("see\t%s\t%.9g\n", name, x); }

void eigen_complains(const char* assertion) {
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
std::string tried(const std::function<std::string()>& f) {
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
using BackwardFunction = std::function<void(const BackwardCall<float>&)>;

Spec tiny_spec() {
  Spec spec;
  spec.p = TinyProblem().p;
  return spec;
}

// A method as a black box. Where V is one for one key and zero for the others, O is what that key
// weighs: the weights of any method can be seen, whatever it calls them.
void look_from_outside(const ForwardFunction& forward, bool lse) {
  const TinyProblem tiny;
  double P[4][4] = {};
  for (int pair = 0; pair < 2; ++pair) {
    ForwardCase<float> c(tiny_spec(), lse);
    fill(c.Q, tiny.Q), fill(c.K, tiny.K);
    c.V.fill([&](auto, auto, auto j, auto x) { return j == 2 * pair + x ? 1.0 : 0.0; });
    forward(c.call());
    c.O.for_each(
        [&](auto b, auto h, auto i, auto x) { P[i][2 * pair + x] = double(c.O.at(b, h, i, x)); });
  }
  for (const auto& row : P)
    for (int j = 1; j < 4; ++j) record("S_ij - S_i0", std::log(row[j] / row[0]));
  for (const auto& row : P) record("sum of P_i", row[0] + row[1] + row[2] + row[3]);
  for (const auto& row : P)
    for (double weight : row) record("P", weight);
}
// Where dO is one for one row, dV holds that row's weights. Where the keys' last number is one, the
// last of dQ is the sum of a row of dS, which is zero.
void look_from_outside(const BackwardFunction& backward) {
  const TinyProblem tiny;
  for (int pair = 0; pair < 2; ++pair) {
    BackwardCase<float> c(tiny_spec());
    fill(c.Q, tiny.Q), fill(c.K, tiny.K), fill(c.V, tiny.V);
    c.dO.fill([&](auto, auto, auto i, auto x) { return i == 2 * pair + x ? 1.0 : 0.0; });
    c.fill_context();
    backward(c.call());
    for (int x = 0; x < 2; ++x)
      for (int j = 0; j < 4; ++j) record("P", double(c.dV.at(0, 0, j, x)));
  }
  BackwardCase<float> c(tiny_spec());
  fill(c.Q, tiny.Q), fill(c.V, tiny.V);
  c.K.fill([&](auto, auto, auto j, auto x) { return x == 1 ? 1.0 : double(j); });
  c.fill_context();
  backward(c.call());
  for (int i = 0; i < 4; ++i) record("sum of dS_i", double(c.dQ.at(0, 0, i, 1)));
}

// The chapter's problem: what the steps note on the way, or with FA_OUTSIDE what can be seen
// without them; then the results.
TEST(Practice, Trace) {
  const TinyProblem tiny;
  const bool outside = std::getenv("FA_OUTSIDE");
  for (const StageUnderTest& stage : stages()) {
    std::printf("stage\t%s\n", stage.name.c_str());
    const std::string wrong = tried([&] {
      if (has_forward(stage)) {
        const ForwardFunction forward = stage.by_hand ? stage.by_hand : stage.f32.forward;
        if (outside) look_from_outside(forward, stage.promises.lse);
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
        if (outside) look_from_outside(stage.f32.backward);
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
    if (!wrong.empty()) std::printf("stopped\t%s\n", wrong.c_str());
  }
}

struct Trial {
  const char* about;
  Spec spec;
  bool wanted;
};

// Few cases, each with a trait of its own: what tells one mistake from another.
std::vector<Trial> trials(const StageUnderTest& stage) {
  const Promises& is = stage.promises;
  const bool forward = has_forward(stage);
  using Kind = Data::Kind;
  const Spec plain{shape(5, 7, 3)},
      tiles{shape(33, stage.effort == StageUnderTest::Effort::small ? 70 : 150, 16)};
  const auto with = [](Spec spec, auto change) {
    change(spec);
    return spec;
  };
  const auto data = [&](const Spec& spec, Kind kind, double level) {
    return with(spec, [&](Spec& s) { s.data = {kind, level}; });
  };
  const auto mask = [&](Causal causal) {
    return with(Spec{shape(37, 45, 8)}, [&](Spec& s) { s.p.causal = causal; });
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
      {"a wide head", {shape(18, 20, 100)}, true},
      {"no keys", {shape(5, 0, 8)}, true}};
  std::erase_if(all, [](const Trial& t) { return !t.wanted; });
  return all;
}

TEST(Practice, Trials) {
  for (const StageUnderTest& stage : stages()) {
    std::printf("stage\t%s\n", stage.name.c_str());
    const auto say = [](const char* about, const std::string& wrong) {
      std::printf("trial\t%s\t%s\n", about, wrong.c_str());
      std::fflush(stdout);  // what comes before a crash is not lost
    };
    for (const Trial& t : trials(stage)) {
      if (stage.promises.takes && !stage.promises.takes(t.spec.p)) continue;
      std::printf("begins\t%s\n", t.about);
      std::fflush(stdout);
      if (has_forward(stage))
        say(t.about, tried([&] {
              ForwardCase<float> c(t.spec, stage.promises.lse);
              stage.f32.forward(c.call());
              return c.verdict();
            }));
      if (stage.f32.backward)
        say(t.about, tried([&] {
              BackwardCase<float> c(t.spec);
              stage.f32.backward(c.call());
              return c.verdict();
            }));
    }
    if (stage.promises.lse && has_forward(stage)) {
      std::printf("begins\tno LSE wanted\n");
      std::fflush(stdout);
      say("no LSE wanted", tried([&] {
            ForwardCase<float> c({shape(5, 7, 3)}, false);
            stage.f32.forward(c.call());
            return c.verdict();
          }));
    }
  }
}

}  // namespace
}  // namespace fa::practice
