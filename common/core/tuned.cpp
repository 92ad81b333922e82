#include "common/core/tuned.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "common/core/check.hpp"

namespace fa {

const char* sources_of(const std::string& kernel);  // generated: a hash, or null

namespace {

// What was best for head dimensions up to d, with or without a mask, from N keys on.
struct Cell {
  std::string kernel;
  std::int64_t d = 0;
  bool masked = false;
  std::int64_t N = 0;
  std::string library;  // "-": the shape in the code
};

struct File {
  std::string path;
  std::vector<Cell> cells;
};

template <class... Why>
[[noreturn]] void refuse(const std::string& path, const Why&... why) {
  require(false, "FA_TUNED: ", path, ": ", why..., "; run ./learn tune again, or unset FA_TUNED");
  std::abort();
}

// Words of a line, in order. Without streams: where a library brings a C++ library of its own into
// somebody else's process, the two may disagree on what a locale holds, and to read a number ends
// the process.
class Words {
 public:
  explicit Words(std::string_view line) : rest_(line) {}

  bool next(std::string& word) {
    const std::size_t begin = std::min(rest_.find_first_not_of(' '), rest_.size());
    const std::size_t end = std::min(rest_.find(' ', begin), rest_.size());
    word = rest_.substr(begin, end - begin);
    rest_.remove_prefix(end);
    return !word.empty();
  }
  bool next(std::int64_t& number) {
    std::string word;
    if (!next(word)) return false;
    const char* const end = word.data() + word.size();
    const auto [stopped, error] = std::from_chars(word.data(), end, number);
    return error == std::errc() && stopped == end;
  }
  std::string all() {  // that are left
    rest_.remove_prefix(std::min(rest_.find_first_not_of(' '), rest_.size()));
    return std::string(rest_);
  }

 private:
  std::string_view rest_;
};

std::string text_of(const std::string& path) {
  std::string text;
  std::FILE* const in = std::fopen(path.c_str(), "r");
  if (!in) refuse(path, "cannot be read");
  char some[4096];
  while (const std::size_t n = std::fread(some, 1, sizeof some, in)) text.append(some, n);
  const bool failed = std::ferror(in);  // a folder, say
  std::fclose(in);
  if (failed) refuse(path, "cannot be read");
  return text;
}

File read(const std::string& path, const std::string& gpu) {
  const std::string text = text_of(path);
  File file{path, {}};
  std::string measured_on;
  bool complete = false;
  int number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    Words words(line);
    std::string word, kernel, sources, mask;
    words.next(word);
    const auto broken = [&] { refuse(path, "line ", number, " cannot be read: '", line, "'"); };
    if (complete) broken();
    if (number == 1) {
      if (line != "tuned 1") refuse(path, "is not a file of ./learn tune");
    } else if (word == "gpu") {
      measured_on = words.all();
      if (measured_on != gpu) refuse(path, "was measured on ", measured_on, ", this GPU is ", gpu);
    } else if (word == "kernel") {
      if (!words.next(kernel) || !words.next(sources)) broken();
      const char* here = sources_of(kernel);
      if (!here) refuse(path, "has a kernel that this build does not know, '" + kernel + "'");
      if (sources != here)
        refuse(path, "was measured with other sources of ", kernel, ", ", sources,
               ", than this program was built from, ", here);
    } else if (word == "cell") {
      Cell cell;
      if (!words.next(cell.kernel) || !words.next(cell.d) || !words.next(mask) ||
          !words.next(cell.N) || !words.next(cell.library) || (mask != "none" && mask != "causal"))
        broken();
      cell.masked = mask == "causal";
      file.cells.push_back(cell);
    } else if (word == "end") {
      complete = true;
    } else if (word != "compiler") {
      broken();
    }
  }
  if (!complete || measured_on.empty()) refuse(path, "ends too early");
  return file;
}

// Of the cells of the smallest d that holds p.d: the longest one that is not longer than p, or the
// shortest there is.
const Cell* cell_of(const File& file, const std::string& kernel, const Problem& p) {
  const bool masked = p.causal != Causal::none || p.key_lengths;
  const Cell* found = nullptr;
  for (const Cell& cell : file.cells) {
    if (cell.kernel != kernel || cell.masked != masked || cell.d < p.d) continue;
    const auto better = [&] {
      if (cell.d != found->d) return cell.d < found->d;
      const bool fits = cell.N <= p.Nk, fitted = found->N <= p.Nk;
      return fits != fitted ? fits : fits ? cell.N > found->N : cell.N < found->N;
    };
    if (!found || better()) found = &cell;
  }
  return found;
}

TunedLaunch* loaded(const File& file, const Cell& cell) {
  static std::mutex mutex;
  static std::map<std::string, TunedLaunch*> libraries;
  const std::lock_guard lock(mutex);
  const std::string path = file.path.substr(0, file.path.rfind('/') + 1) + cell.library;
  TunedLaunch*& launch = libraries[path];
  if (launch) return launch;
  // A name without a slash would be searched for elsewhere.
  void* library = dlopen((path[0] == '/' ? path : "./" + path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse(file.path, "its library cannot be loaded: ", dlerror());
  const auto sources = reinterpret_cast<const char* (*)()>(dlsym(library, "fa_tuned_sources"));
  const auto found = reinterpret_cast<TunedLaunch*>(dlsym(library, "fa_tuned_launch"));
  if (!sources || !found || sources() != std::string(sources_of(cell.kernel)))
    refuse(file.path, "its library ", cell.library, " was made from other sources");
  return launch = found;
}

}  // namespace

bool launch_tuned(const char* kernel, const TunedCall& call, std::string (*gpu)()) {
  static const char* const path = std::getenv("FA_TUNED");
  if (!path || !*path) return false;
  static const File file = read(path, gpu());  // throws again at the next call if it throws
  const Cell* cell = cell_of(file, kernel, *call.problem);
  if (!cell || cell->library == "-") return false;
  const char* error = nullptr;
  const int done = loaded(file, *cell)(&call, &error);
  if (done < 0) throw std::runtime_error(cell->library + ": " + error);
  return done == 1;
}

}  // namespace fa
