// see: attention on four tokens, every number on screen.
//
//   ./learn see          show it, then change one number and watch stage 00 break
//   ./learn see 200      the same, with the new value of Q[3][0] given
//
// It needs a C++17 compiler and nothing else. No output is stored here: all is computed.
#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <string>

#include "common/practice/see.hpp"

using namespace see;

using Row = std::array<float, N>;  // one number per key

// ---- attention for one query ----

Row scores(const Token& q) {  // one row of S = Q K^T / sqrt(d)
  Row s{};
  for (std::size_t j = 0; j < N; ++j)
    s[j] = (q[0] * K[j][0] + q[1] * K[j][1]) / std::sqrt(float(D));
  return s;
}

float largest(const Row& s) { return *std::max_element(s.begin(), s.end()); }

struct Softmax {
  Row exps, p;
  float sum;
};

// exp(S - m) / sum. Stage 00 has m = 0, stage 01 has m = max(S). That is the whole fix.
Softmax softmax(const Row& s, float m) {
  Softmax r{};
  for (std::size_t j = 0; j < N; ++j) r.sum += r.exps[j] = std::exp(s[j] - m);
  for (std::size_t j = 0; j < N; ++j) r.p[j] = r.exps[j] / r.sum;
  return r;
}

Token output(const Row& p) {  // one row of O = P V
  Token o{};
  for (std::size_t j = 0; j < N; ++j)
    for (std::size_t c = 0; c < D; ++c) o[c] += p[j] * V[j][c];
  return o;
}

// The referee, in double. It subtracts the best key before it multiplies by q, so two
// huge scores that float rounds to one number still keep their small difference here.
std::array<double, N> referee(const Token& q, std::size_t best) {
  std::array<double, N> p{};
  double sum = 0;
  for (std::size_t j = 0; j < N; ++j) {
    double diff = 0;
    for (std::size_t c = 0; c < D; ++c)
      diff += double(q[c]) * (double(K[j][c]) - double(K[best][c]));
    sum += p[j] = std::exp(diff / std::sqrt(double(D)));
  }
  for (double& x : p) x /= sum;
  return p;
}

bool agree(const Row& p, const std::array<double, N>& exact) {
  for (std::size_t j = 0; j < N; ++j)
    if (!(std::fabs(double(p[j]) - exact[j]) < 1e-3)) return false;  // nan lands here too
  return true;
}

// ---- drawing ----

std::string shortest(float x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", double(x));
  return text;
}

std::string heat(float x, float low, float high) {  // a score on a cold-to-hot background
  static const char* const ramp[] = {"48;5;25;38;5;255", "48;5;74;38;5;16",  "48;5;152;38;5;16",
                                     "48;5;223;38;5;16", "48;5;215;38;5;16", "48;5;203;38;5;16"};
  const float t = high > low ? (x - low) / (high - low) : 0;
  return paint(ramp[std::lround(5 * t)], num(x, 10) + "  ");
}

std::string bar(float p) {  // a weight from 0 to 1, eight cells long
  const std::size_t n = std::size_t(std::lround(8 * p));
  return paint(BAR, std::string(n, colour() ? ' ' : '#')) + paint(DIM, std::string(8 - n, '.'));
}

// ---- part 1: the four steps ----

void show_attention() {
  std::printf("%s\n", paint(BOLD, "Attention on N = 4 tokens of d = 2 numbers").c_str());

  title("Q, K, V", "What each token looks for (query), is found by (key), hands on (value).");
  std::printf("                   Q             K             V\n");
  for (std::size_t i = 0; i < N; ++i) {
    std::printf("  token %zu", i);
    for (const Matrix* m : {&Q, &K, &V})
      std::printf("     [%3.0f%3.0f ]", double((*m)[i][0]), double((*m)[i][1]));
    std::printf("\n");
  }

  std::array<Row, N> S{}, P{};
  float low = std::numeric_limits<float>::max(), high = -low;
  for (std::size_t i = 0; i < N; ++i) {
    S[i] = scores(Q[i]);
    P[i] = softmax(S[i], largest(S[i])).p;
    for (float s : S[i]) low = std::min(low, s), high = std::max(high, s);
  }

  title("S = Q K^T / sqrt(d)", "Scores: how well query i (row) matches key j (column).");
  std::printf("                key 0       key 1       key 2       key 3\n");
  for (std::size_t i = 0; i < N; ++i) {
    std::string row;
    for (float s : S[i]) row += heat(s, low, high);
    row.erase(row.find_last_not_of(' ') + 1);  // without colour: no blanks at the end
    std::printf("  query %zu  %s\n", i, row.c_str());
  }

  title("P = softmax(S)", "Weights: each row of S made positive, with sum 1.");
  std::printf("           key 0           key 1           key 2           key 3           sum\n");
  for (std::size_t i = 0; i < N; ++i) {
    float sum = 0;
    std::printf("  query %zu  ", i);
    for (float p : P[i]) {
      std::printf("%s %s  ", num(p, 5, 3).c_str(), bar(p).c_str());
      sum += p;
    }
    std::printf("%s\n", num(sum, 5, 3).c_str());
  }

  title("O = P V", "Output: for each query, the average of the values with those weights.");
  for (std::size_t i = 0; i < N; ++i) {
    const Token o = output(P[i]);
    std::printf("  token %zu     %s\n", i, pair(o.data()).c_str());
  }
}

// ---- part 2: one number changed, row 3 by both methods ----

void line(const std::string& label, const std::string& s, const std::string& exp00,
          const std::string& p00, const std::string& shifted, const std::string& exp01,
          const std::string& p01) {
  std::printf("  %-8s%10s  %10s %9s  | %10s  %10s %9s\n", label.c_str(), s.c_str(), exp00.c_str(),
              p00.c_str(), shifted.c_str(), exp01.c_str(), p01.c_str());
}

void show_change(float x) {
  const Token q = {x, Q[3][1]};
  const Row s = scores(q);
  const float m = largest(s), limit = std::log(std::numeric_limits<float>::max());

  title("One number changed", "Row 3 again, now with Q[3][0] = " + shortest(x) + " (it was 2).");
  if (!std::all_of(s.begin(), s.end(), [](float v) { return std::isfinite(v); })) {
    std::printf(
        "\nWith this value a score itself is larger than any float (3.4e+38). It is\n"
        "lost before softmax begins, so no softmax can repair it. Try a smaller value.\n");
    return;
  }

  const auto exact = referee(q, std::size_t(std::max_element(s.begin(), s.end()) - s.begin()));
  const Softmax a = softmax(s, 0), b = softmax(s, m);
  const Token oa = output(a.p), ob = output(b.p);
  const bool a_right = agree(a.p, exact), b_right = agree(b.p, exact);
  const auto mark = [](float v, int width, bool right) {
    return paint(!std::isfinite(v) ? RED : right ? GREEN : YELLOW, num(v, width));
  };

  std::printf("%20sThe largest score is m = %s.\n\n", "", num(m, 0).c_str());
  std::printf("%20s%s  | %6s%s\n", "", paint(BOLD, "stage 00: exp(S) / sum").c_str(), "",
              paint(BOLD, "stage 01: exp(S - m) / sum").c_str());
  line("", "S", "exp(S)", "P", "S - m", "exp(S - m)", "P");
  for (std::size_t j = 0; j < N; ++j)
    line("key " + std::to_string(j), num(s[j], 10), mark(a.exps[j], 10, true),
         mark(a.p[j], 9, a_right), num(s[j] - m, 10), mark(b.exps[j], 10, b_right),
         mark(b.p[j], 9, b_right));
  line("sum", "", mark(a.sum, 10, true), mark(a.p[0] + a.p[1] + a.p[2] + a.p[3], 9, a_right), "",
       mark(b.sum, 10, b_right), mark(b.p[0] + b.p[1] + b.p[2] + b.p[3], 9, b_right));
  for (std::size_t c = 0; c < D; ++c)
    line("O[3][" + std::to_string(c) + "]", "", std::string(10, ' '), mark(oa[c], 9, a_right), "",
         std::string(10, ' '), mark(ob[c], 9, b_right));
  std::printf("\n");

  if (a_right) {
    std::printf(
        "Both are right: the largest score is %s, and float exp overflows only for a\n"
        "score above %.1f. Try a larger value, for example ./learn see 200\n",
        num(m, 0, 1).c_str(), double(limit));
  } else {
    if (m > limit)
      std::printf("exp(%s) does not fit in a float: it becomes inf, and inf / inf is nan.\n",
                  num(m, 0, 1).c_str());
    else
      std::printf(
          "Every exp still fits in a float, but their sum does not: it becomes inf, and\n"
          "every weight becomes 0. No nan warns you.\n");
    std::printf(
        "Float exp overflows for any score above %.1f. Stage 01 subtracts m first: the\n"
        "factor exp(-m) cancels in the division, and no exponent is above 0 any more.\n",
        double(limit));
  }
  if (!b_right)
    std::printf(
        "\nYet stage 01 is off too: P should be %.4f, %.4f, %.4f and %.4f. Floats\n"
        "near m are %.3g apart, so the scores were rounded before softmax saw them.\n"
        "No softmax can repair that.\n",
        exact[0], exact[1], exact[2], exact[3], double(m - std::nextafter(m, 0.0f)));
}

// ---- reading the new value ----

float parse(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const float x = std::strtof(text.c_str(), &end);
  const bool range = errno == ERANGE;
  while (std::isspace(static_cast<unsigned char>(*end))) ++end;
  std::string shown = "\"" + text.substr(0, 30) + "\"";
  for (char& c : shown)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';  // arrow keys and the like
  if (end == text.c_str() || *end)
    refuse(shown + " is not a number, and Q[3][0] must be one. Try: ./learn see 200");
  if (std::isinf(x) && range)
    refuse(shown +
           " does not fit in a float (at most 3.4e+38 in size), so it gives no score. Try: ./learn "
           "see 1e38");
  if (!std::isfinite(x))
    refuse(shown +
           " is not finite, and would break every stage, not only 00. Try: ./learn see 200");
  return x;
}

int main(int argc, char** argv) {
  const std::string arg = argc > 1 ? argv[1] : "";
  if (arg == "--help" || arg == "-h") {
    std::printf(
        "usage: ./learn see [x]\n\n"
        "Shows attention on 4 tokens, then sets Q[3][0] to x and computes row 3 as stage 00\n"
        "and as stage 01. Without x it asks on a terminal; otherwise x is 200.\n"
        "NO_COLOR=1 switches colours off.\n");
    return 0;
  }
  if (argc > 2)
    refuse("got " + std::to_string(argc - 1) +
           " arguments, but only one number is changed. Try: ./learn see 200");

  float x = argc > 1 ? parse(arg) : 200.0f;
  show_attention();
  if (argc == 1 && isatty(STDOUT_FILENO) && isatty(STDIN_FILENO)) {
    std::printf("\ntype a new value for Q[3][0] (now 2), or press Enter for 200: ");
    std::fflush(stdout);
    std::string typed;
    if (!std::getline(std::cin, typed)) std::printf("\n");  // end of input counts as Enter
    if (typed.find_first_not_of(" \t\r") != std::string::npos) x = parse(typed);
  }
  show_change(x);
  std::printf(
      "\nNext:  00_naive/README.md         these four steps; to check them, ./learn test 00\n"
      "       01_safe_softmax/README.md  why m may be subtracted; ./learn test 01\n");
}
