// Who did the work: how a test sees whether a call starts threads.
#pragma once
#include <ctime>

#include "common/judge/function_ref.hpp"

namespace fa::judge {

// The part of the process's CPU time during f() that other threads than this one have used.
inline double share_of_other_threads(FunctionRef<void()> f) {
  const auto now = [](clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  };
  const double all = now(CLOCK_PROCESS_CPUTIME_ID), own = now(CLOCK_THREAD_CPUTIME_ID);
  f();
  const double own_after = now(CLOCK_THREAD_CPUTIME_ID), all_after = now(CLOCK_PROCESS_CPUTIME_ID);
  return 1 - (own_after - own) / (all_after - all);
}

}  // namespace fa::judge
