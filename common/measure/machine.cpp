#include "common/measure/machine.hpp"

#include <sched.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

namespace fa::bench {

std::string cpu_model() {
#ifdef __APPLE__
  char name[128] = "";
  std::size_t size = sizeof name;
  if (sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0) == 0) return name;
#endif
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

namespace {

// The numbers of the cores that this process may use; none where the system does not say.
std::vector<int> usable_cores() {
  std::vector<int> usable;
#ifdef __linux__
  cpu_set_t set;  // for 1024 cores; with more of them this call fails
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) usable.push_back(core);
#endif
  return usable;
}

// Ticks of the clock, of one hundredth of a second, that the usable cores have worked.
double worked_ticks() {
  std::set<std::string> names;
  for (int core : usable_cores()) names.insert("cpu" + std::to_string(core));
  double ticks = 0;
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    if (!(words >> name) || names.count(name) == 0) continue;
    double value = 0;
    // user nice system idle iowait irq softirq steal
    for (int column = 0; column < 8 && words >> value; ++column)
      if (column != 3 && column != 4) ticks += value;
  }
  return ticks;
}

}  // namespace

int cores() {
  const std::size_t usable = usable_cores().size();
  return static_cast<int>(usable ? usable : std::thread::hardware_concurrency());
}

std::string load_average() {
  std::ifstream file("/proc/loadavg");
  std::string minute;
  file >> minute;
  return minute;
}

double busy_cores(double seconds) {
  const double before = worked_ticks();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  return (worked_ticks() - before) / double(sysconf(_SC_CLK_TCK)) / seconds;
}

std::string busy_machine(double busy, int cores, double share, const std::string& highest) {
  std::ostringstream why;
  if (busy > 0.5)
    why << std::fixed << std::setprecision(1) << "load " << busy << " on " << cores << " cores";
  else if (share > 1.05)
    why << highest << " at " << std::lround(100 * share) << " % of the peak";
  else
    return "";
  return "this machine was busy (" + why.str() +
         "): shares of the peak may be wrong; measure again";
}

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
