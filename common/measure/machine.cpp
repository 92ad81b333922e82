#include "common/measure/machine.hpp"

#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

namespace fa::bench {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown CPU";
}

std::string isa() {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__x86_64__)
  return "sse2";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "scalar";
#endif
}

int cores() { return static_cast<int>(std::thread::hardware_concurrency()); }

std::string machine_name() {
  // Letters only: model numbers, clocks and trade marks say nothing that a file name needs.
  std::string letters;
  for (char c : cpu_model()) letters += c == '(' ? ' ' : static_cast<char>(std::tolower(c));
  std::istringstream words(letters);
  const std::set<std::string> noise = {"r)", "tm)", "cpu", "processor", "unknown", "core", "with"};
  std::string name;
  int kept = 0;
  for (std::string word; kept < 3 && words >> word;) {
    bool plain = noise.count(word) == 0;
    for (char c : word) plain = plain && std::isalpha(static_cast<unsigned char>(c));
    if (plain) {
      name += word + "-";
      ++kept;
    }
  }
  return (name.empty() ? "cpu-" : name) + isa() + "-" + std::to_string(cores()) + "c";
}

std::string commit() {
  // A machine that has a copy of the tree but not of its history is told.
  if (const char* given = std::getenv("FA_COMMIT")) return given;
  std::string text;
  if (FILE* pipe = popen("git -C '" FA_SOURCE_DIR "' describe --always --dirty 2>/dev/null", "r")) {
    std::array<char, 128> buffer{};
    while (fgets(buffer.data(), buffer.size(), pipe)) text += buffer.data();
    pclose(pipe);
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text.empty() ? "unknown" : text;
}

}  // namespace fa::bench
