// For test_tune.py: what launch_tuned() says of one problem, N = argv[1], d = 128, without a mask.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "common/core/tuned.hpp"

int main(int, char** words) {
  fa::Problem p;
  p.Nq = p.Nk = std::atoi(words[1]);
  p.d = 128;
  const fa::TunedCall call{&p, nullptr, fa::TunedCall::bf16, 1, nullptr, nullptr};
  for (int time = 0; time < 2; ++time) {  // a refusal comes again at every call
    try {
      std::puts(fa::launch_tuned("hopper", call, [] { return std::string("the emulator"); })
                    ? "launched"
                    : "as in the code");
    } catch (const std::exception& e) {
      std::puts(e.what());
    }
  }
}
