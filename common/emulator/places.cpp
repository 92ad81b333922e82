// file:line of an address in this program, for people.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "common/emulator/block.hpp"
#ifndef __APPLE__
#include <dlfcn.h>
#include <link.h>
#endif

namespace fa::emulator {
namespace {
// Code that says less than the line that calls it: the meanings of instructions, and CUDA.
bool is_plumbing(const std::string& line) {
  for (const char* part : {"/ptx/", "/common/", "include/c++", "??"})
    if (line.find(part) != std::string::npos) return true;
  return false;
}
std::string looked_up(Place place) {
  std::string program, line;
  auto address = reinterpret_cast<std::uintptr_t>(place) - 1;  // in the call
#ifdef __APPLE__
  return "?";
#else
  Dl_info info;
  link_map* map = nullptr;
  if (!dladdr1(place, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) || !map) return "?";
  program = map->l_name;
  char itself[4096] = {};
  if (program.empty() && realpath("/proc/self/exe", itself)) program = itself;
  address -= map->l_addr;
  char command[4400];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", program.c_str(),
                std::size_t(address));
  std::vector<std::string> lines;
  if (FILE* const pipe = popen(command, "r")) {  // NOLINT(cert-env33-c): a program of binutils
    char text[4096];
    while (std::fgets(text, sizeof text, pipe)) lines.emplace_back(text);
    pclose(pipe);
  }
  for (const std::string& one : lines)
    if (line.empty() || is_plumbing(line)) line = one;
#endif
  if (line.empty() || line[0] == '?') return "?";
  // A reader's copy and the lesson bear the same name, and stand in one program.
  const auto end = line.find_first_of("\n ("), slash = line.rfind('/', end);
  const auto mine = line.rfind("/mine/", end), from = mine == line.npos ? slash : mine;
  return line.substr(from + 1, end - from - 1);
}
}  // namespace

std::string text_of(Place place) {
  static std::map<Place, std::string> known;
  const auto [at, is_new] = known.try_emplace(place);
  if (is_new) at->second = place ? looked_up(place) : "?";
  return at->second;
}

}  // namespace fa::emulator
