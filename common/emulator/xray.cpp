// The x-ray. -fsanitize=thread makes the compiler put a call before every access to memory, and
// -fsanitize-coverage=trace-pc one at the begin of every basic block. Here they come to these
// functions, which look for no races: they keep each thread's way through the code. From the ways
// of 32 lanes follows what a warp does together. This file itself is not instrumented.
#include "common/emulator/xray.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "common/emulator/block.hpp"
#include "common/emulator/xray_picture.hpp"

// As in cuda_on_cpu.cpp: what `__shared__` names.
extern char static_begin[] asm("__start_fa_shared") __attribute__((weak));
extern char static_end[] asm("__stop_fa_shared") __attribute__((weak));

namespace fa::xray {
namespace {

constexpr unsigned lanes = 32, max_warps = 32, max_threads = lanes * max_warps;

using emulator::Op;
// By op, and whether the memory is shared.
const char* const verbs[][2] = {{"reads", "reads"},
                                {"writes", "writes"},
                                {"adds to", "adds to"},
                                {"copies", "copies into"},
                                {"", "ldmatrix reads"},
                                {"", "stmatrix writes"},
                                {"TMA loads", "TMA loads into"},
                                {"TMA stores to", "TMA stores from"},
                                {"TMA adds to", "TMA adds from"},
                                {"", "wgmma reads"}};
// What takes cycles of a unit and touches no memory.
bool is_work(Op op) { return op >= Op::mma; }
bool is_engine(Op op) { return op >= Op::load && op <= Op::operands; }
constexpr int nowhere = -2;  // instead of an array

struct Array {
  std::string name;
  bool shared = true;
  const char *begin = nullptr, *end = nullptr;
  std::int64_t rows = 0, cols = 0;  // of a tensor
  std::uint32_t first = 0;          // of its numbers
};
// The first one stands for all dynamic shared memory, which has no names.
std::vector<Array>& arrays() {
  static std::vector<Array> all{{"shared"}};
  return all;
}

// ---- what was counted ----

struct Total {
  std::uint64_t times = 0, lanes = 0;  // accesses of a warp, and lanes that took part in them
  std::uint64_t took = 0, least = 0;   // sectors, turns, or cycles
};

// An access in the code; several may stand in a line.
struct Site {
  std::uintptr_t code;
  const char* kernel;
  Op op;
  unsigned bytes;
  std::map<int, Total> totals;  // by array
};
std::string program;
std::map<std::pair<std::uintptr_t, Op>, Site> sites;

struct Launch {
  std::string blocks, threads;
};
std::vector<std::pair<const char*, Launch>> launches;  // by kernel, in the order of the launches

// Of block 0: how many numbers of a row of a tensor each warp read.
struct Reads {
  std::array<std::uint64_t, max_warps> global{}, shared{};
};
// By kernel, tensor and row, and then by phase (emulator::Position). Numbers that the block has
// computed are rows of `computed`, one for each warp that wrote them.
std::map<std::tuple<std::string, int, std::int64_t>, std::map<std::uint64_t, Reads>> reads;
constexpr int computed = -1, unknown = -2;
std::unordered_map<const char*, unsigned> writer;
bool traced = true;  // only where all tensors are fp32: 16 bits are too few for a number of its own
std::set<std::pair<int, std::int64_t>> fetched;  // rows of tensors
std::uint64_t ways_phase = 0;                    // of what is being counted

// ---- one access of a warp ----

struct Access {
  Site* site;
  unsigned lane, warp, amount;
  int array;
  const char* address;
  int tensor;        // whose number it is: computed, or unknown if nobody asks
  std::int64_t row;  // of the tensor, or the warp that computed it
};

struct Cost {
  unsigned took, least;
};

unsigned distinct(std::vector<std::uintptr_t>& of) {
  std::sort(of.begin(), of.end());
  of.erase(std::unique(of.begin(), of.end()), of.end());
  return unsigned(of.size());
}

// Global memory is fetched in sectors of 32 bytes.
Cost sectors(const Access* a, const Access* end) {
  const unsigned bytes = a->site->bytes;
  std::vector<std::uintptr_t> touched, addresses;
  for (; a != end; ++a) {
    const auto at = reinterpret_cast<std::uintptr_t>(a->address);
    addresses.push_back(at);
    for (auto s = at / 32; s <= (at + bytes - 1) / 32; ++s) touched.push_back(s);
  }
  return {distinct(touched), (distinct(addresses) * bytes + 31) / 32};
}

// Shared memory has 32 banks; word w lies in bank w % 32, and in a turn each bank gives one word,
// to all lanes that want it. A turn returns at most 128 bytes: of accesses of 16 bytes it serves 8
// lanes, of 8 bytes 16; twice as many if all lanes ask for the same as their neighbours (lane ^ 1),
// or all for the same as lane ^ 2. ldmatrix and stmatrix take their blocks, 8 lanes, one by one.
Cost turns(const Access* first, const Access* end) {
  const unsigned bytes = first->site->bytes, words = std::max(bytes / 4, 1u);
  const bool by_blocks = first->site->op == Op::ldmatrix || first->site->op == Op::stmatrix;
  std::array<const char*, lanes> address{};
  for (const Access* a = first; a != end; ++a) address[a->lane] = a->address;
  const auto same = [&](unsigned other) {
    for (unsigned l = 0; l < lanes; ++l)
      if (address[l] && address[l ^ other] && address[l] != address[l ^ other]) return false;
    return true;
  };
  const unsigned narrow = lanes / words;
  const unsigned widest = by_blocks ? narrow : std::min(lanes, 2 * narrow);
  const unsigned group = same(1) || same(2) ? widest : narrow;
  Cost cost{0, 0};
  std::vector<std::uintptr_t> all, wanted;
  for (unsigned l = 0; l < lanes; ++l) {
    if (l % group == 0) wanted.clear();
    for (unsigned w = 0; address[l] && w < words; ++w)
      wanted.push_back(reinterpret_cast<std::uintptr_t>(address[l]) / 4 + w);
    if (l % group != group - 1) continue;
    distinct(wanted);
    std::array<unsigned, 32> bank{};
    for (const std::uintptr_t w : wanted) ++bank[w % 32];
    cost.took += *std::max_element(bank.begin(), bank.end());
    all.insert(all.end(), wanted.begin(), wanted.end());
  }
  for (unsigned l = 0; l < lanes; l += widest)
    cost.least += std::any_of(&address[l], &address[l] + widest, [](auto* a) { return a; });
  cost.least = std::max(cost.least, (distinct(all) + 31) / 32);
  return cost;
}

// What moves in one piece, and what a unit does: cycles of an SM.
Cost whole(const Access* a, bool shared) {
  constexpr unsigned sector = 32, turn = 128, flop = 4096, exponentials = 16;
  const auto cycles = [&] {
    switch (a->site->op) {
      case Op::mma:
        return 2 * 16 * 16 * a->amount / flop;
      case Op::wgmma:
        return 2 * 64 * 16 * a->amount / flop;
      case Op::exponential:
        return lanes / exponentials;
      default:
        return (a->amount + (shared ? turn : sector) - 1) / (shared ? turn : sector);
    }
  }();
  return {cycles, cycles};
}

void serve(const Access* first, const Access* end) {
  const Op op = first->site->op;
  const bool shared = !is_work(op) && arrays()[std::size_t(first->array)].shared;
  const Cost cost = is_work(op) || is_engine(op) ? whole(first, shared)
                    : shared                     ? turns(first, end)
                                                 : sectors(first, end);
  Total& total = first->site->totals[first->array];
  total.times += 1;
  total.lanes += std::uint64_t(end - first);
  total.took += cost.took;
  total.least += cost.least;
  // A number that several lanes read at once is read once.
  std::vector<const char*> seen;
  for (const Access* a = first; a != end; ++a) {
    if (a->tensor == unknown || std::find(seen.begin(), seen.end(), a->address) != seen.end())
      continue;
    seen.push_back(a->address);
    Reads& r = reads[{a->site->kernel, a->tensor, a->row}][ways_phase];
    (shared ? r.shared : r.global)[a->warp] += std::max(a->site->bytes / 4, 1u);
  }
}

// ---- the ways of the threads of a block, since its last __syncthreads ----

struct Step {
  unsigned waits;   // how often the thread has met its warp before
  unsigned access;  // its number, from 1; 0: a basic block begins
  std::uintptr_t code;
  auto place() const { return std::pair(waits, code); }
};
struct Way {
  std::vector<Step> steps;
  std::vector<Access> accesses;
} ways[max_threads];

// Lanes that part come together again as on a GPU: those whose next step stands first in the code
// go on, and the others wait for them. So a lane that has left a loop waits behind it.
void follow_warp(unsigned warp) {
  std::array<std::size_t, lanes> at{};
  const Way* const way = &ways[warp * lanes];
  std::vector<Access> together;
  for (;;) {
    const Step* next = nullptr;
    for (unsigned l = 0; l < lanes; ++l)
      if (const auto& steps = way[l].steps;
          at[l] < steps.size() && (!next || steps[at[l]].place() < next->place()))
        next = &steps[at[l]];
    if (!next) return;
    together.clear();
    for (unsigned l = 0; l < lanes; ++l) {
      const auto& steps = way[l].steps;
      if (at[l] == steps.size() || steps[at[l]].place() != next->place()) continue;
      if (const unsigned n = steps[at[l]++].access) together.push_back(way[l].accesses[n - 1]);
    }
    if (!together.empty()) serve(together.data(), together.data() + together.size());
  }
}

void follow_all() {
  for (unsigned w = 0; w < max_warps; ++w) follow_warp(w);
  for (Way& way : ways) {
    way.steps.clear();
    way.accesses.clear();
  }
}

// Where the thread that runs now can put its next step.
Way& way_of(const emulator::Position& now) {
  if (now.phase != ways_phase) {
    follow_all();
    ways_phase = now.phase;
  }
  return ways[now.thread];
}

// ---- one access of a thread ----

int array_of(const char* address, const emulator::Position& now) {
  if (address >= now.shared && address < now.end) return 0;
  const auto& all = arrays();
  for (std::size_t i = 1; i < all.size(); ++i)
    if (address >= all[i].begin && address < all[i].end) return int(i);
  return -1;  // the thread's own
}

void note_origin(Access& a) {
  const bool first_block = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0;
  const auto& all = arrays();
  const Array& array = all[std::size_t(a.array)];
  a.tensor = unknown;
  if (!first_block || a.site->bytes < 4) return;
  if (array.shared && a.site->op != Op::read) {
    for (unsigned i = 0; i < a.site->bytes; i += 4) writer[a.address + i] = a.warp;
    return;
  }
  if (a.site->op == Op::write || a.site->op == Op::add) return;
  if (!array.shared) {
    a.tensor = a.array;
    a.row = (a.address - array.begin) / std::int64_t(sizeof(float)) / array.cols;
    fetched.insert({a.tensor, a.row});
    return;
  }
  float value;
  std::memcpy(&value, a.address, sizeof value);
  const std::uint32_t k = which(value);
  for (std::size_t t = 1; t < all.size(); ++t) {
    if (all[t].shared || k < all[t].first || k - all[t].first >= all[t].rows * all[t].cols)
      continue;
    a.row = (k - all[t].first) / all[t].cols;
    if (fetched.count({int(t), a.row}) == 0) break;  // looks like it by chance
    a.tensor = int(t);
    return;
  }
  a.tensor = computed;
  a.row = writer[a.address];
}

void note(const void* memory, unsigned bytes, Op op, const void* caller) {
  const emulator::Position now = emulator::position();
  if (!now.kernel) return;
  const auto* address = static_cast<const char*>(memory);
  const int array = is_work(op) ? nowhere : array_of(address, now);
  if (is_work(op) ? traced : array < 0) return;  // work: beside tensor cores
  const auto code = reinterpret_cast<std::uintptr_t>(caller);
  auto found = sites.find({code, op});
  if (found == sites.end()) {
    found = sites.emplace(std::pair(code, op), Site{code, now.kernel, op, bytes, {}}).first;
    const auto is = [&](auto& launch) { return std::string(launch.first) == now.kernel; };
    if (std::none_of(launches.begin(), launches.end(), is))
      launches.push_back({now.kernel,
                          {std::to_string(gridDim.x * gridDim.y * gridDim.z),
                           std::to_string(blockDim.x * blockDim.y * blockDim.z)}});
  }
  auto& way = way_of(now);  // before what this thread does now
  Access a{
      &found->second, now.thread % lanes, now.thread / lanes, bytes, array, address, unknown, 0};
  if (traced) note_origin(a);
  // A product is of four warps, and counts once.
  if ((op == Op::wgmma || op == Op::operands) && now.thread % 128 >= lanes) return;
  way.accesses.push_back(a);
  way.steps.push_back({now.waits, unsigned(way.accesses.size()), code});
}

void note_block(void* caller) {
  const emulator::Position now = emulator::position();
  if (!now.kernel) return;
  way_of(now).steps.push_back({now.waits, 0, reinterpret_cast<std::uintptr_t>(caller)});
}

// ---- from addresses to lines and names, by binutils ----

std::vector<std::string> lines_of(const std::string& command) {
  std::vector<std::string> lines;
  FILE* const pipe = popen(command.c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot run: " + command);
  std::string line;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    if (c != '\n') {
      line += char(c);
      continue;
    }
    lines.push_back(std::exchange(line, {}));
  }
  if (pclose(pipe) != 0) throw std::runtime_error("failed: " + command);
  return lines;
}

struct Line {
  std::string file;
  int number = 0;
  bool operator<(const Line& other) const {
    return std::tie(file, number) < std::tie(other.file, other.number);
  }
};

const std::string& text_of(const Line& line) {
  static std::map<std::string, std::vector<std::string>> files;
  static const std::string nothing;
  auto& lines = files[line.file];
  if (lines.empty()) {
    std::ifstream file(line.file);
    for (std::string text; std::getline(file, text);) lines.push_back(text);
  }
  const auto at = std::size_t(line.number - 1);
  return at < lines.size() ? lines[at] : nothing;
}

// A function in one line, like load4, says less than the line that calls it.
bool is_short_function(const Line& line) {
  const std::string& text = text_of(line);
  const auto begin = text.find_first_not_of(' '), brace = text.find(") {");
  if (brace == std::string::npos || text.back() != '}') return false;
  for (const char* word : {"for ", "if ", "while ", "else "})
    if (text.compare(begin, std::strlen(word), word) == 0) return false;
  return true;
}

bool is_part_of_cuda(const Line& line) {
  for (const char* folder : {"common/core/", "common/emulator/", "06_optimized/ptx/"})
    if (line.file.rfind(folder, 0) == 0) return true;
  return false;
}

// The lines that led to each address: where it is, and from where that was called.
std::map<std::uintptr_t, std::vector<Line>> places() {
  std::ostringstream command;
  command << "addr2line -a -i -e '" << program << "'" << std::hex;
  for (const auto& [key, site] : sites) command << " " << site.code - 1;  // in the call
  std::map<std::uintptr_t, std::vector<Line>> found;
  std::vector<Line>* here = nullptr;
  for (const std::string& text : lines_of(command.str())) {
    if (text.compare(0, 2, "0x") == 0) {
      here = &(found[std::uintptr_t(std::stoull(text, nullptr, 16)) + 1] = {});
      continue;
    }
    const auto colon = text.rfind(':');
    const auto path = std::filesystem::path(text.substr(0, colon)).lexically_normal();
    here->push_back({path.lexically_proximate(std::filesystem::current_path()).string(),
                     std::atoi(text.c_str() + colon + 1)});
  }
  for (auto& [code, lines] : found)
    while (lines.size() > 1 && (is_part_of_cuda(lines[0]) || is_short_function(lines[0])))
      lines.erase(lines.begin());
  return found;
}

// What `__shared__` names, from the program's symbols: "address size type name".
void name_shared_arrays() {
  if (&static_begin[0] == &static_end[0]) return;
  for (const std::string& text : lines_of("nm -S -C '" + program + "'")) {
    std::istringstream words(text);
    std::uintptr_t at = 0, size = 0;
    char type = 0;
    std::string name;
    if (!(words >> std::hex >> at >> size >> type) || !std::getline(words, name)) continue;
    if (name[0] != ' ') continue;  // no size
    if (at < reinterpret_cast<std::uintptr_t>(static_begin) ||
        at >= reinterpret_cast<std::uintptr_t>(static_end))
      continue;
    const char* const begin = static_begin + (at - reinterpret_cast<std::uintptr_t>(static_begin));
    arrays().push_back({name.substr(name.rfind(':') + 1), true, begin, begin + size});
  }
}

// ---- the report ----

bool in_shared(Op op, int array) { return !is_work(op) && arrays()[std::size_t(array)].shared; }

struct Row {  // accesses of one kind from one line
  std::string kernel;
  Line line;
  int via;  // the line of the kernel that called it, 0 if it is the kernel's own
  Op op;
  int array;
  unsigned bytes;
  auto key() const { return std::tie(kernel, line.file, line.number, op, array, via, bytes); }
  bool operator<(const Row& other) const { return key() < other.key(); }
};

void add(Total& to, const Total& more) {
  to.times += more.times;
  to.lanes += more.lanes;
  to.took += more.took;
  to.least += more.least;
}

// The line of the kernel's file that called a function, or 0.
int caller(const std::vector<Line>& lines) {
  for (std::size_t n = 1; n < lines.size(); ++n)
    if (lines[n].file == lines.back().file) return lines[n].number;
  return 0;
}

std::map<Row, Total> all_rows() {
  const auto where = places();
  std::map<Row, Total> rows;
  for (const auto& [key, site] : sites) {
    const auto& lines = where.at(site.code);
    const int via = caller(lines);
    for (const auto& [array, total] : site.totals)
      add(rows[{site.kernel, lines[0], via, site.op, array, site.bytes}], total);
  }
  return rows;
}

std::string text_of_via(int via, const std::string& before = "") {
  return via ? before + std::to_string(via) : "";
}

void print_csv(const std::map<Row, Total>& rows) {
  const char* const ops[] = {"read",     "write", "add",        "copy",   "ldmatrix",
                             "stmatrix", "load",  "store",      "reduce", "operands",
                             "mma",      "wgmma", "exponential"};
  std::printf("kernel,file,line,via,op,memory,array,bytes,times,lanes,took,least\n");
  for (const auto& [kernel, launch] : launches)
    for (const auto& [row, t] : rows) {
      if (row.kernel != kernel) continue;
      const bool shared = in_shared(row.op, row.array);
      std::ostringstream line;
      line << '"' << kernel << "\"," << row.line.file << ',' << row.line.number << ','
           << text_of_via(row.via) << ',' << ops[std::size_t(row.op)] << ','
           << (is_work(row.op) ? ""
               : shared        ? "shared"
                               : "global")
           << ',' << (is_work(row.op) ? "" : arrays()[std::size_t(row.array)].name) << ','
           << row.bytes << ',' << t.times << ',' << t.lanes << ',' << t.took << ',' << t.least;
      std::puts(line.str().c_str());
    }
}

std::string fixed(double x, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}
// 12345678 -> 12,345,678
std::string grouped(std::uint64_t x) {
  std::string text = std::to_string(x);
  for (int at = int(text.size()) - 3; at > 0; at -= 3) text.insert(std::size_t(at), ",");
  return text;
}

// A line without blanks at its end.
void print_line(std::string text) {
  text.erase(text.find_last_not_of(' ') + 1);
  std::puts(text.c_str());
}
std::string left(const std::string& text, std::size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}
std::string right(const std::string& text, std::size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

// A line of the table: of sectors if the memory is global, of turns if it is shared.
void print_costs(const std::string& what, bool shared, const Total& t, bool cycles = false) {
  const auto mean = [&](std::uint64_t x, int digits) {
    return fixed(double(x) / double(t.times), digits);
  };
  print_line("      " + left(what, 44) + right(grouped(t.times), 10) + right(mean(t.lanes, 1), 7) +
             std::string(shared || cycles ? 16 : 0, ' ') + right(mean(t.took, 2), 8) +
             (cycles ? " cycles" : right(mean(t.least, 2), 7)) + (t.took > t.least ? "  <-" : ""));
}

std::string text_of(const Row& row) {
  switch (row.op) {
    case Op::mma:
      return "mma 16 x " + std::to_string(row.bytes) + " x 16";
    case Op::wgmma:
      return "wgmma 64 x " + std::to_string(row.bytes) + " x 16";
    case Op::exponential:
      return "2^x";
    default:
      const Array& array = arrays()[std::size_t(row.array)];
      return verbs[std::size_t(row.op)][array.shared] + (" " + array.name) +
             (row.bytes == 4 || row.op >= Op::ldmatrix
                  ? ""
                  : ", " + std::to_string(row.bytes) + " bytes");
  }
}

void print_lines(const std::string& kernel, const std::map<Row, Total>& rows) {
  const std::string blanks(50, ' ');
  print_line(blanks + "  accesses  lanes        sectors           turns");
  print_line(blanks + "  of warps at work    took  least     took  least");
  Line before;
  std::map<Row, int> calls;  // from how many lines
  const auto anyhow = [](Row row) {
    row.via = 0;
    return row;
  };
  for (const auto& [row, total] : rows) ++calls[anyhow(row)];
  for (const auto& [row, total] : rows) {
    if (row.kernel != kernel) continue;
    if (row.line.file != before.file) print_line(row.line.file);
    if (row.line < before || before < row.line) {
      const std::string& text = text_of(row.line);
      const auto begin = std::min(text.find_first_not_of(' '), text.size());
      print_line(right(std::to_string(row.line.number), 5) + " " + text.substr(begin));
    }
    before = row.line;
    const bool says_who = calls[anyhow(row)] > 1;
    print_costs("  " + text_of(row) + (says_who ? text_of_via(row.via, ", called at ") : ""),
                in_shared(row.op, row.array), total, is_work(row.op));
  }
}

void print_sums(const std::string& kernel, const std::map<Row, Total>& rows) {
  std::map<std::pair<bool, Op>, Total> sums;  // by memory
  std::map<std::pair<Op, int>, Total> tensors;
  for (const auto& [row, total] : rows) {
    if (row.kernel != kernel) continue;
    if (is_work(row.op)) continue;
    const bool shared = arrays()[std::size_t(row.array)].shared;
    add(sums[{shared, row.op}], total);
    if (!shared) add(tensors[{row.op, row.array}], total);
  }
  std::printf("all lines\n");
  for (const auto& [key, total] : sums)
    print_costs(std::string("  ") + verbs[std::size_t(key.second)][key.first] +
                    (key.first ? " shared memory" : " global memory"),
                key.first, total);
  std::printf("bytes between the kernel and global memory\n");
  for (const auto& [key, total] : tensors) {
    const Array& array = arrays()[std::size_t(key.second)];
    const double kib = double(total.took) * 32 / 1024;
    std::printf("  %-8s %-4s%10s KiB, %s times its size\n", verbs[std::size_t(key.first)][0],
                array.name.c_str(), fixed(kib, 1).c_str(),
                fixed(kib * 1024 / double(array.end - array.begin), 2).c_str());
  }
}

// ---- the map of block 0 ----

// Rows [from, to) of a tensor, or what one warp has computed, in some of the phases.
Reads reads_of(const std::string& kernel, int tensor, std::int64_t from, std::int64_t to,
               std::uint64_t first = 0, std::uint64_t last = UINT64_MAX) {
  Reads sum;
  for (auto row = reads.lower_bound({kernel, tensor, from});
       row != reads.end() && row->first < std::tuple(kernel, tensor, to); ++row)
    for (auto at = row->second.lower_bound(first); at != row->second.end() && at->first <= last;
         ++at)
      for (unsigned w = 0; w < max_warps; ++w) {
        sum.global[w] += at->second.global[w];
        sum.shared[w] += at->second.shared[w];
      }
  return sum;
}

// The rows of a tensor from the first to behind the last that was read; (0, 0) if none was.
std::pair<std::int64_t, std::int64_t> rows_read(const std::string& kernel, int tensor) {
  const auto first = reads.lower_bound({kernel, tensor, 0}),
             end = reads.lower_bound({kernel, tensor + 1, 0});
  if (first == end) return {0, 0};
  return {std::get<2>(first->first), std::get<2>(std::prev(end)->first) + 1};
}

// A band of rows of a tensor in a line, how often each of its numbers was read, by each warp.
// Neighbouring bands that look the same share a line.
void print_map(const std::string& kernel, unsigned warps) {
  constexpr std::int64_t bands = 16;
  constexpr double noise = 0.05;  // a computed number may look like one of a tensor
  const auto cells = [&](const auto& of_warps, double numbers) {
    std::string text;
    for (unsigned w = 0; w < warps; ++w) {
      const double x = double(of_warps[w]) / numbers;
      text += right(x < noise ? "." : fixed(x, x < 10 ? 2 : 0), 7);
    }
    return text;
  };
  std::string names;
  for (unsigned w = 0; w < warps; ++w) names += right("w" + std::to_string(w), 7);
  const std::string blanks(17, ' ');
  if (reads.lower_bound({kernel, 0, 0}) == reads.lower_bound({kernel, int(arrays().size()), 0}))
    return;
  print_line("block 0: how often its warps read a number of these rows");
  print_line(blanks + left("   from global memory", names.size() + 4) + "   from shared memory");
  print_line(blanks + names + "    " + names);
  for (int t = 0; t < int(arrays().size()); ++t) {
    const Array& array = arrays()[std::size_t(t)];
    const auto [first, end] = rows_read(kernel, t);
    const std::int64_t step = (end - first + bands - 1) / bands;
    std::string before;
    std::int64_t before_from = first;
    for (std::int64_t from = first; from < end + step; from += step) {
      const std::int64_t to = std::min(from + step, end);
      const Reads sum = reads_of(kernel, t, from, to);
      const double numbers = double((to - from) * array.cols);
      const std::string text = cells(sum.global, numbers) + "    " + cells(sum.shared, numbers);
      if (from < end && text == before) continue;
      if (before.find_first_of("123456789") != std::string::npos)
        print_line("  " + left(array.name, 4) + right(std::to_string(before_from), 5) + "-" +
                   left(std::to_string(std::min(from, end) - 1), 5) + before);
      before = from < end ? text : "";
      before_from = from;
    }
  }
  if (rows_read(kernel, computed).second == 0) return;
  print_line("block 0: computed numbers, put into shared memory and read there");
  print_line("  " + left("read by", 15) + names);
  for (unsigned from = 0; from < warps; ++from) {
    const Reads sum = reads_of(kernel, computed, from, from + 1);
    std::string text = "  " + left("written by w" + std::to_string(from), 15);
    for (unsigned w = 0; w < warps; ++w)
      text += right(sum.shared[w] ? std::to_string(sum.shared[w]) : ".", 7);
    print_line(text);
  }
}

// ---- what a tile takes ----

// Of each kernel, cycles of an SM: of tensor cores, of exponentials, and of shared memory by op.
struct Units {
  double products = 0, exponentials = 0;
  std::map<Op, double> shared;
};
std::map<std::string, Units> of_a_tile;

void print_tile(const std::string& kernel) {
  const auto found = of_a_tile.find(kernel);
  if (found == of_a_tile.end()) return;
  const Units& units = found->second;
  const auto print = [](const std::string& what, double cycles) {
    if (cycles > 0.005) print_line("  " + left(what, 27) + right(fixed(cycles, 1), 10));
  };
  double shared = 0;
  for (const auto& [op, cycles] : units.shared) shared += cycles;
  if (units.products + units.exponentials + shared < 0.005) return;
  print_line("cycles of an SM for 128 queries and 128 keys more");
  print("tensor cores", units.products);
  print("exponentials", units.exponentials);
  print("shared memory", shared);
  for (const auto& [op, cycles] : units.shared)
    print(std::string("  ") + verbs[std::size_t(op)][1], cycles);
}

// The same for the picture: a column for each phase.
KernelMap map_of(const std::string& kernel, const std::string& title, unsigned warps) {
  constexpr std::int64_t most_bands = 64;
  const auto begin = reads.lower_bound({kernel, computed, 0}),
             end = reads.lower_bound({kernel, int(arrays().size()), 0});
  std::uint64_t first_phase = UINT64_MAX, last_phase = 0;
  for (auto row = begin; row != end; ++row) {
    first_phase = std::min(first_phase, row->second.begin()->first);
    last_phase = std::max(last_phase, row->second.rbegin()->first);
  }
  KernelMap map{title, {}};
  const auto add = [&](int tensor, std::int64_t first, std::int64_t last, std::int64_t cols,
                       const Panel& empty) {
    const std::int64_t rows = (last - first + most_bands - 1) / most_bands;  // of a band
    Panel panel = empty;
    panel.heat.resize(warps);
    for (std::int64_t from = first; from < last; from += rows) {
      for (auto& warp : panel.heat) warp.emplace_back();
      for (std::uint64_t phase = first_phase; phase <= last_phase; ++phase) {
        const Reads sum = reads_of(kernel, tensor, from, from + rows, phase, phase);
        const double numbers = double((std::min(from + rows, last) - from) * cols);
        for (unsigned w = 0; w < warps; ++w)
          panel.heat[w].back().push_back(
              {double(sum.global[w]) / numbers, double(sum.shared[w]) / numbers});
      }
    }
    map.panels.push_back(panel);
  };
  for (int t = 0; t < int(arrays().size()); ++t)
    if (const auto [first, last] = rows_read(kernel, t); last > 0)
      add(t, first, last, arrays()[std::size_t(t)].cols,
          {arrays()[std::size_t(t)].name, std::to_string(first), std::to_string(last - 1), {}});
  if (rows_read(kernel, computed).second > 0)
    add(computed, 0, warps, 1, {"computed", "by w0", "by w" + std::to_string(warps - 1), {}});
  return map;
}

}  // namespace

void tensor(const char* name, const void* data, std::size_t bytes, std::int64_t rows,
            std::int64_t cols, std::uint32_t first) {
  const char* const begin = static_cast<const char*>(data);
  const auto size = std::int64_t(bytes);
  traced &= size == 4 * rows * cols;
  arrays().push_back({name, false, begin, begin + size, rows, cols, first});
}

void begin(const char* path) {
  program = path;
  name_shared_arrays();
}

void add_to_tile(double times) {
  follow_all();
  for (auto& [key, site] : sites) {
    Units& units = of_a_tile[site.kernel];
    for (const auto& [array, total] : site.totals) {
      const double cycles = times * double(total.took);
      if (site.op == Op::exponential)
        units.exponentials += cycles;
      else if (is_work(site.op))
        units.products += cycles;
      else if (in_shared(site.op, array))
        units.shared[site.op] += cycles;
    }
    site.totals.clear();
  }
  arrays().erase(
      std::find_if(arrays().begin(), arrays().end(), [](const Array& a) { return !a.shared; }),
      arrays().end());
  launches.clear();
  sites.clear();
}

void report(const std::string& problem, bool csv, const std::string& picture) {
  follow_all();
  const auto all = all_rows();
  if (csv) print_csv(all);
  std::vector<KernelMap> maps;
  for (const auto& [kernel, launch] : launches) {
    const std::string title = kernel + (": " + problem);
    const unsigned warps = unsigned(std::atoi(launch.threads.c_str()) + 31) / 32;
    if (!picture.empty())
      maps.push_back(
          map_of(kernel, std::filesystem::path(program).filename().string() + ", " + title, warps));
    if (csv) continue;
    std::printf("%s; %s blocks of %s threads\n", title.c_str(), launch.blocks.c_str(),
                launch.threads.c_str());
    print_lines(kernel, all);
    print_sums(kernel, all);
    print_tile(kernel);
    print_map(kernel, warps);
    std::printf("\n");
  }
  if (picture.empty()) return;
  std::ofstream file(picture);
  file << svg(maps);
  file.close();
  if (!file) throw std::runtime_error("cannot write " + picture);
}

}  // namespace fa::xray

// ---- what the compiler calls ----

using fa::xray::note;
using fa::xray::Op;

float4::float4(const float4& from) {
  fa::emulator::check_alignment(&from, 16);
  note(&from, 16, Op::read, __builtin_return_address(0));
  std::memcpy(this, &from, 16);
}
float4& float4::operator=(const float4& from) {
  fa::emulator::check_alignment(&from, 16);
  fa::emulator::check_alignment(this, 16);
  note(&from, 16, Op::read, __builtin_return_address(0));
  note(this, 16, Op::write, __builtin_return_address(0));
  std::memcpy(this, &from, 16);
  return *this;
}
// A thread that asks for what it has just got keeps it, as compilers see to where they know what is
// read. Here they do not.
void fa::emulator::move(void* to, const void* from, unsigned bytes) {
  static struct {
    const void* from;
    std::uint64_t phase;
    unsigned waits;
  } last[fa::xray::max_threads];
  const Position now = position();
  auto& l = last[now.thread];
  if (l.from != from || l.phase != now.phase || l.waits != now.waits)
    note(from, bytes, Op::read, __builtin_return_address(0));
  l = {from, now.phase, now.waits};
  note(to, bytes, Op::write, __builtin_return_address(0));
  std::memcpy(to, from, bytes);
}
void fa::emulator::count(Op op, const void* of, unsigned amount, Place at) {
  note(of, amount, op, at);
}
void fa::emulator::copy_later(void* to, const void* from, int bytes, int size) {
  if (bytes > 0) note(from, unsigned(bytes), Op::copy, __builtin_return_address(0));
  note(to, unsigned(size), Op::copy, __builtin_return_address(0));
  std::memset(to, 0xff, std::size_t(size));
  copies().under_way.push_back({static_cast<char*>(to), from, bytes, size, copies().group});
}
float __expf(float x) noexcept {
  note(nullptr, 1, Op::exponential, __builtin_return_address(0));
  return std::exp(x);
}
float atomicAdd(float* address, float value) {
  note(address, 4, Op::add, __builtin_return_address(0));
  return fa::emulator::add(address, value);
}

extern "C" {
#define FA_ACCESS(BYTES)                                                                          \
  void __tsan_read##BYTES(void* at) { note(at, BYTES, Op::read, __builtin_return_address(0)); }   \
  void __tsan_write##BYTES(void* at) { note(at, BYTES, Op::write, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##BYTES(void* at) {                                                   \
    note(at, BYTES, Op::read, __builtin_return_address(0));                                       \
  }                                                                                               \
  void __tsan_unaligned_write##BYTES(void* at) {                                                  \
    note(at, BYTES, Op::write, __builtin_return_address(0));                                      \
  }
FA_ACCESS(1) FA_ACCESS(2) FA_ACCESS(4) FA_ACCESS(8) FA_ACCESS(16) void __sanitizer_cov_trace_pc() {
  fa::xray::note_block(__builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
// Whole structs: a word at a time.
void __tsan_read_range(void* at, unsigned long bytes) {
  for (unsigned long x = 0; x < bytes; x += 4)
    note(static_cast<char*>(at) + x, 4, Op::read, __builtin_return_address(0));
}
void __tsan_write_range(void* at, unsigned long bytes) {
  for (unsigned long x = 0; x < bytes; x += 4)
    note(static_cast<char*>(at) + x, 4, Op::write, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) { return *at; }
int __tsan_atomic32_fetch_add(volatile int* at, int x, int) {
  note(const_cast<int*>(at), 4, Op::add, __builtin_return_address(0));
  return std::exchange(*at, *at + x);
}
}
