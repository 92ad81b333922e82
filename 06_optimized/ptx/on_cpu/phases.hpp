// What a barrier in shared memory counts.
#pragma once
#include <cstdint>
#include <map>

#include "06_optimized/ptx/on_cpu/barrier.hpp"
#include "common/emulator/block.hpp"

namespace fa::optimized {

struct Phases {
  int count = 0;    // arrivals that end a phase
  int missing = 0;  // of them, in the phase under way
  long bytes = 0;   // announced and not there; below 0 if they came before they were announced
  long ended = 0;   // phases that have ended, so this is the number of the one under way
  int waiters = 0;
  unsigned initialised_by = 0;
  emulator::Place initialised_at = nullptr;
  emulator::Deed initialised;
  bool fenced = false;
  struct Arrival {
    emulator::Deed deed;
    emulator::Place place = nullptr;
  };
  std::map<unsigned, Arrival> from_afar;  // of other blocks' threads, the last one of each
  std::map<unsigned, long> passed;        // by thread, the last phase whose end it saw; -1 at first

  void look();
  // Where those who arrive in a phase leave what they know, for those who wait for its end.
  const void* order_of(long phase) const { return &orders[phase & 1]; }
  char orders[2] = {};
};
using AllPhases = std::map<unsigned, Phases>;  // by place in shared memory
Phases& phases_of(const Barrier* b, emulator::Place at);

}  // namespace fa::optimized
