// What all programs of `./learn see` share: the tiny problem, and numbers, colours and tables on
// screen. Such a program is one file that needs a C++17 compiler and nothing else; it takes its
// figures from the lessons that it includes, and stores no output.
#pragma once
#include <unistd.h>  // isatty
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace see {

// ---- the tiny problem, carried through the whole course, small enough to check by hand ----

constexpr std::size_t N = 4;  // tokens
constexpr std::size_t D = 2;  // numbers per token: the head dimension d

using Token = std::array<float, D>;
using Matrix = std::array<Token, N>;  // one token per row

inline constexpr Matrix Q = {{{1, 0}, {0, 1}, {1, 1}, {2, -1}}};
inline constexpr Matrix K = {{{1, 0}, {0, 1}, {1, 1}, {1, -1}}};
inline constexpr Matrix V = {{{1, 0}, {0, 1}, {2, 2}, {-1, 1}}};

// ---- colours, which only a terminal gets ----

inline const char *const BOLD = "1", *const DIM = "2", *const BAR = "42";
inline const char *const RED = "1;31", *const GREEN = "32", *const YELLOW = "33";

inline bool colour() {
  static const bool yes = [] {
    const char *off = std::getenv("NO_COLOR"), *term = std::getenv("TERM");
    return isatty(STDOUT_FILENO) && !(off && *off) && !(term && std::string(term) == "dumb");
  }();
  return yes;
}

inline std::string paint(const char* code, const std::string& text) {
  return colour() ? std::string("\033[") + code + "m" + text + "\033[0m" : text;
}

// ---- numbers ----

inline std::string num(float x, int width = 0, int digits = 4) {
  const float a = std::fabs(x);
  if (std::isnan(x) || a == 0) x = a;  // print neither "-nan" nor "-0"
  const bool e = std::isfinite(a) && (a >= 1e7f || (a > 0 && a < 5e-5f));
  char text[64];
  if (e)
    std::snprintf(text, sizeof text, "%*.2e", width, double(x));
  else
    std::snprintf(text, sizeof text, "%*.*f", width, a >= 1e4f ? 1 : digits, double(x));
  return text;
}

inline std::string pair(const float* o) {  // a token's d = 2 numbers
  return "[" + num(o[0], 8) + num(o[1], 8) + " ]";
}

// ---- text and tables ----

inline void title(const std::string& name, const std::string& meaning) {
  std::printf("\n%s  %s\n", paint(BOLD, name).c_str(), meaning.c_str());
}

struct Cell {
  std::string text;
  const char* code = nullptr;  // its colour

  Cell(std::string text_, const char* code_ = nullptr) : text(std::move(text_)), code(code_) {}
  Cell(const char* text_) : text(text_) {}
};

// Columns as wide as their widest cell, right-aligned, below a head; notes stand between the rows.
class Table {
 public:
  explicit Table(std::vector<Cell> head) { row(std::move(head)); }
  void row(std::vector<Cell> cells) { lines_.push_back({std::move(cells), ""}); }
  void note(std::string text) { lines_.push_back({{}, std::move(text)}); }
  void print() const {
    std::vector<std::size_t> width;
    for (const Line& line : lines_)
      for (std::size_t c = 0; c < line.cells.size(); ++c) {
        if (c == width.size()) width.push_back(0);
        width[c] = std::max(width[c], line.cells[c].text.size());
      }
    for (const Line& line : lines_) {
      std::string text;
      for (std::size_t c = 0; c < line.cells.size(); ++c) {
        const Cell& cell = line.cells[c];
        text += "  " + std::string(width[c] - cell.text.size(), ' ');
        text += cell.code ? paint(cell.code, cell.text) : cell.text;
      }
      text.erase(text.find_last_not_of(' ') + 1);  // no blanks where the last cells are empty
      if (!line.note.empty()) text = "       " + paint(DIM, line.note);
      std::printf("%s\n", text.c_str());
    }
  }

 private:
  struct Line {
    std::vector<Cell> cells;
    std::string note;
  };
  std::vector<Line> lines_;
};

// ---- arguments ----

[[noreturn]] inline void refuse(const std::string& why_and_fix) {
  std::fprintf(stderr, "see: %s\n", why_and_fix.c_str());
  std::exit(2);
}

// The only argument, a whole number from low to high; `otherwise` if there is none.
inline int argument(int argc, char** argv, const std::string& name, int low, int high,
                    int otherwise) {
  if (argc < 2) return otherwise;
  char* end = nullptr;
  const long x = std::strtol(argv[1], &end, 10);
  if (argc > 2 || end == argv[1] || *end || x < low || x > high)
    refuse(name + " is one number from " + std::to_string(low) + " to " + std::to_string(high) +
           ", got \"" + std::string(argv[1]).substr(0, 30) + "\"" + (argc > 2 ? " and more" : ""));
  return int(x);
}

}  // namespace see
