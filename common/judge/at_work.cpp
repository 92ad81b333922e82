#include "common/judge/at_work.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "common/judge/sanitizer.hpp"

#if FA_SANITIZED
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

namespace fa::judge {
namespace {

// A handler may neither allocate nor lock: the lines lie ready, in memory of their own.
char lines[4096];
std::atomic<std::size_t> length{0};
int patience_ = 0;

void say(const char* text, std::size_t n) {
  while (n > 0) {
    const ssize_t written = write(STDERR_FILENO, text, n);
    if (written <= 0) return;
    text += written;
    n -= std::size_t(written);
  }
}
void say(const char* text) { say(text, std::strlen(text)); }

void say_lines() { say(lines, length.load()); }

const char* cause(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "\nended by SIGSEGV (memory that is not there, or a stack that is full) at\n";
    case SIGBUS:
      return "\nended by SIGBUS (memory that is not there) at\n";
    case SIGFPE:
      return "\nended by SIGFPE (a whole number divided by 0) at\n";
    case SIGILL:
      return "\nended by SIGILL (an instruction that this machine does not know) at\n";
    case SIGABRT:
      return "\nended by abort() (a failed assertion, or an exception that nobody catches) at\n";
    default:
      return "\ninterrupted at\n";
  }
}

extern "C" void fa_on_signal(int signal) {
  if (length.load() > 0) {
    say(cause(signal));
    say_lines();
  }
  raise(signal);  // with the action that SA_RESETHAND has restored, as soon as this returns
}
extern "C" void fa_on_alarm(int) {
  const int before = errno;
  if (length.load() > 0) {
    say("\nstill at it:\n");
    say_lines();
  }
  errno = before;
}
#if FA_SANITIZED
void on_death() {
  if (length.load() == 0) return;
  say("\nended by the sanitizer at\n");
  say_lines();
}
#endif

}  // namespace

void at_work_on(const std::string& text) {
  length = 0;  // what a handler finds in between is nothing, not half of it
  const std::size_t n = std::min(text.size(), sizeof lines);
  std::copy_n(text.data(), n, lines);
  length = n;
  if (patience_ > 0) alarm(n > 0 ? unsigned(patience_) : 0);
}

void tell_what_ends(int patience) {
  patience_ = patience;
  // A full stack has no room for a handler. A sanitizer has seen to that already.
  static char stack[64 * 1024];
  stack_t own{}, before_own{};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  if (sigaltstack(nullptr, &before_own) == 0 && (before_own.ss_flags & SS_DISABLE))
    sigaltstack(&own, nullptr);
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGINT, SIGALRM}) {
    struct sigaction action {
    }, before{};
    if (sigaction(signal, nullptr, &before) != 0) continue;
    if ((before.sa_flags & SA_SIGINFO) || before.sa_handler != SIG_DFL) continue;  // a sanitizer's
    action.sa_handler = signal == SIGALRM ? fa_on_alarm : fa_on_signal;
    action.sa_flags = signal == SIGALRM ? SA_RESTART : int(SA_ONSTACK | SA_RESETHAND);
    sigaction(signal, &action, nullptr);
  }
#if FA_SANITIZED
  __sanitizer_set_death_callback(on_death);
#endif
}

}  // namespace fa::judge
