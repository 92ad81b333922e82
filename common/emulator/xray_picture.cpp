#include "common/emulator/xray_picture.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

namespace fa::xray {
namespace {

const char *const INK = "#222222", *const FAINT = "#555555";
const char *const GLOBAL = "#0072B2", *const SHARED = "#D55E00";
constexpr double left_margin = 86, right_margin = 24, top = 110, gap = 12, panel = 96;  // pixels
constexpr double full_width = 760;

std::string number(double x) {  // as short as it is exact to a hundredth
  std::ostringstream text;
  text << std::round(100 * x) / 100;
  return text.str();
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  return out;
}

struct Drawing {
  std::ostringstream out;

  void text(double x, double y, const std::string& words, int pixels = 13, const char* fill = FAINT,
            const char* anchor = "start", bool bold = false) {
    out << "<text x=\"" << number(x) << "\" y=\"" << number(y) << "\" font-size=\"" << pixels
        << "\" fill=\"" << fill << "\" text-anchor=\"" << anchor << '"'
        << (bold ? " font-weight=\"bold\"" : "") << '>' << escaped(words) << "</text>\n";
  }
  void box(double x, double y, double width, double height, const char* fill, double opacity) {
    out << "<rect x=\"" << number(x) << "\" y=\"" << number(y) << "\" width=\"" << number(width)
        << "\" height=\"" << number(height) << "\" fill=\"" << fill << "\" fill-opacity=\""
        << number(opacity) << "\"/>\n";
  }
  void frame(double x, double y, double width, double height) {
    out << "<rect x=\"" << number(x) << "\" y=\"" << number(y) << "\" width=\"" << number(width)
        << "\" height=\"" << number(height) << "\" fill=\"none\" stroke=\"#b0b0b0\"/>\n";
  }
};

// Often enough to be seen; a computed number may look like one of a tensor by chance.
constexpr double noise = 0.05;

// Light if a number is read less than once, full if it is read as often as any of this panel.
double opacity(double times, double most) { return 0.2 + 0.8 * std::min(1.0, times / most); }

// One warp's reads of one tensor. Neighbouring bands with the same number are one rectangle.
void draw(Drawing& to, const std::vector<std::vector<Heat>>& bands, double Heat::*memory,
          double most, double x, double width, double y) {
  const auto n = bands.size(), intervals = bands.empty() ? 0 : bands[0].size();
  const char* const colour = memory == &Heat::global ? GLOBAL : SHARED;
  const double column = width / double(intervals), row = panel / double(n);
  for (std::size_t t = 0; t < intervals; ++t) {
    for (std::size_t from = 0, end = 0; from < n; from = end) {
      const double times = bands[from][t].*memory;
      while (end < n && bands[end][t].*memory == times) ++end;
      if (times < noise) continue;
      // Where a number comes from both memories, one on the left and one on the right.
      const bool both = bands[from][t].global >= noise && bands[from][t].shared >= noise;
      const double at = x + column * (double(t) + (both && memory == &Heat::shared ? 0.5 : 0));
      to.box(at, y + row * double(from), both ? column / 2 : column, row * double(end - from),
             colour, opacity(times, most));
    }
  }
}

double most_of(const Panel& of, double Heat::*memory) {
  double most = 0;
  for (const auto& warp : of.heat)
    for (const auto& band : warp)
      for (const Heat& heat : band) most = std::max(most, heat.*memory);
  return most;
}

double height_of(const KernelMap& kernel) {
  return top + double(kernel.panels.size()) * (panel + gap) + 30;
}

void draw(Drawing& to, const KernelMap& kernel, double y) {
  const std::size_t warps = kernel.panels[0].heat.size();
  to.text(24, y + 34, kernel.title, 18, INK, "start", true);
  to.text(24, y + 56,
          "What block 0 reads. Rows of a tensor down; for each warp time to the right, a "
          "column from one __syncthreads to the next.");
  to.box(24, y + 66, 12, 12, GLOBAL, 1);
  to.text(42, y + 76, "from global memory");
  to.box(184, y + 66, 12, 12, SHARED, 1);
  to.text(202, y + 76, "from shared memory; the darker, the more often");
  const double width = (full_width - left_margin - right_margin + gap) / double(warps) - gap;
  for (std::size_t w = 0; w < warps; ++w)
    to.text(left_margin + double(w) * (width + gap) + width / 2, y + top - 10,
            "warp " + std::to_string(w), 13, INK, "middle");
  double at = y + top;
  for (const Panel& p : kernel.panels) {
    to.text(left_margin - 10, at + panel / 2 + 5, p.name, p.name.size() > 3 ? 12 : 15, INK, "end",
            true);
    to.text(left_margin - 10, at + 11, p.first, 11, FAINT, "end");
    to.text(left_margin - 10, at + panel - 1, p.last, 11, FAINT, "end");
    for (std::size_t w = 0; w < warps; ++w) {
      const double x = left_margin + double(w) * (width + gap);
      to.out << "<g class=\"" << p.name << " w" << w << "\">\n";
      for (double Heat::*memory : {&Heat::global, &Heat::shared})
        draw(to, p.heat[w], memory, most_of(p, memory), x, width, at);
      to.frame(x, at, width, panel);
      to.out << "</g>\n";
    }
    at += panel + gap;
  }
}

}  // namespace

std::string svg(std::vector<KernelMap> kernels) {
  const auto reads_nothing = [](const KernelMap& kernel) { return kernel.panels.empty(); };
  kernels.erase(std::remove_if(kernels.begin(), kernels.end(), reads_nothing), kernels.end());
  double height = 0;
  for (const KernelMap& kernel : kernels) height += height_of(kernel);
  Drawing to;
  to.out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << full_width << ' '
         << height << "\" width=\"" << full_width << "\" height=\"" << height
         << "\" font-family=\"Helvetica, Arial, sans-serif\" role=\"img\">\n"
         << "<title>What the warps of a block read, and when</title>\n"
         << "<rect x=\"0.5\" y=\"0.5\" width=\"" << full_width - 1 << "\" height=\"" << height - 1
         << "\" rx=\"8\" fill=\"#fcfcfa\" stroke=\"#d8d8d8\"/>\n";
  double y = 0;
  for (const KernelMap& kernel : kernels) {
    draw(to, kernel, y);
    y += height_of(kernel);
  }
  to.out << "</svg>\n";
  return to.out.str();
}

}  // namespace fa::xray
