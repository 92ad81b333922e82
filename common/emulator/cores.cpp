// Blocks on several cores: FA_CORES=4 in front of a program that emulates. A block's state is
// spread over the emulator, and `__shared__` is static, so that each core gets a process: a launch
// forks, every child runs its share of the blocks in memory that all of them have, and says what it
// found. What kernels that overlap do to each other (overlap.cpp) is not told so.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "common/core/check.hpp"
#include "common/emulator/block.hpp"

namespace fa::emulator {
namespace {

std::mutex of_pages;  // guards the next
std::map<void*, std::size_t> shared_by_all;

unsigned in_use = 0;  // 0: not asked yet
// Not called by the x-ray, nor under ThreadSanitizer: both have all blocks in one process.
[[maybe_unused]] unsigned asked_for() {
  const char* const text = std::getenv("FA_CORES");
  if (!text) return 1;
  char* end = nullptr;
  const long n = std::strtol(text, &end, 10);
  require(end != text && *end == 0 && n >= 1 && n <= 1024,
          "FA_CORES is a number from 1 to 1024, got '", text, "'");
  return unsigned(n);
}

struct Child {
  pid_t process = -1;
  int says = -1;  // the end of a pipe: the number of a cudaError_t, or what went wrong
};

std::string all_of(int pipe) {
  std::string text;
  char piece[4096];
  for (ssize_t n; (n = read(pipe, piece, sizeof piece)) != 0;) {
    if (n > 0) text.append(piece, std::size_t(n));
    if (n < 0 && errno != EINTR) break;
  }
  close(pipe);
  return text;
}

[[noreturn]] void be_a_child(int pipe, const std::function<cudaError_t()>& run) {
  std::string said;
  try {
    said = std::to_string(int(run()));
  } catch (const std::exception& e) {
    said = e.what();
  }
  for (std::size_t at = 0; at < said.size();) {
    const ssize_t n = write(pipe, said.data() + at, said.size() - at);
    if (n < 0 && errno != EINTR) break;
    at += n > 0 ? std::size_t(n) : 0;
  }
  _exit(0);  // nothing is flushed twice, no destructor runs twice
}

}  // namespace

unsigned cores() {
#if defined FA_XRAY || defined FA_EMULATOR_TSAN
  return 1;  // what they note is in one process
#else
  return in_use ? in_use : in_use = asked_for();
#endif
}
WithCores::WithCores(unsigned n) : before_(std::exchange(in_use, n)) {}
WithCores::~WithCores() { in_use = before_; }

void* memory_of_all(std::size_t bytes) {
  void* const at = mmap(nullptr, std::max(bytes, std::size_t(1)), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  const std::lock_guard lock(of_pages);
  shared_by_all[at] = bytes;
  return at;
}
bool free_memory_of_all(void* at) {
  const std::lock_guard lock(of_pages);
  const auto found = shared_by_all.find(at);
  if (found == shared_by_all.end()) return false;
  munmap(at, std::max(found->second, std::size_t(1)));
  shared_by_all.erase(found);
  return true;
}

cudaError_t on_cores(unsigned n, const char* kernel,
                     const std::function<cudaError_t(unsigned core)>& run) {
  std::fflush(nullptr);
  std::vector<Child> children(n);
  std::string wrong;
  for (unsigned core = 0; core < n && wrong.empty(); ++core) {
    int ends[2];
    if (pipe(ends) != 0) {
      wrong = std::system_category().message(errno);
      break;
    }
    children[core] = {fork(), ends[0]};
    if (children[core].process == 0) be_a_child(ends[1], [&] { return run(core); });
    if (children[core].process < 0) wrong = std::system_category().message(errno);
    close(ends[1]);
  }
  cudaError_t error = cudaSuccess;
  for (const Child& child : children) {
    if (child.says < 0) continue;
    const std::string said = all_of(child.says);
    if (child.process < 0) continue;
    int status = 0;
    while (waitpid(child.process, &status, 0) < 0 && errno == EINTR) {
    }
    char* end = nullptr;
    const long number = std::strtol(said.c_str(), &end, 10);
    if (!WIFEXITED(status) || said.empty())
      wrong = std::string(kernel).append(": a process with some of its blocks ended early");
    else if (*end != 0)
      wrong = wrong.empty() ? said : wrong;
    else if (number)
      error = cudaError_t(number);
  }
  if (!wrong.empty()) throw std::logic_error(wrong);
  return error;
}

}  // namespace fa::emulator
