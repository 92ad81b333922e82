// What the tests of both ladders use.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/judge/cases.hpp"
#include "common/judge/stage.hpp"

namespace fa::judge {

inline Spec spec(std::int64_t Nq, std::int64_t Nk, std::int64_t d, Causal causal = Causal::none) {
  Spec s;
  s.p.Nq = Nq;
  s.p.Nk = Nk;
  s.p.d = d;
  s.p.causal = causal;
  return s;
}

// A thread of a tensor core's kernel is a fiber that meets its warp at every product: the emulator
// affords short lists.
inline StageUnderTest::Effort effort(StageUnderTest::Effort on_gpu) {
#ifdef FA_EMULATED
  return std::min(on_gpu, StageUnderTest::Effort::tiny);
#else
  return on_gpu;
#endif
}

// A size, on a GPU and on the CPU: several tiles either way.
inline std::int64_t sized([[maybe_unused]] std::int64_t on_gpu,
                          [[maybe_unused]] std::int64_t on_cpu) {
#ifdef FA_EMULATED
  return on_cpu;
#else
  return on_gpu;
#endif
}

// Are the n-th of one list and the m-th of another tried together? On the CPU each meets one.
inline bool meets([[maybe_unused]] std::size_t n, [[maybe_unused]] std::size_t m) {
#ifdef FA_EMULATED
  return n % 3 == m % 3;
#else
  return true;
#endif
}

// The words with which f fails as the first that a thread does: nothing of CUDA was called in it,
// and no context is current.
inline std::string in_a_new_thread(const std::function<void()>& f) {
  std::string words;
  std::thread([&] {
    try {
      f();
    } catch (const std::exception& e) {
      words = e.what();
    }
  }).join();
  return words;
}

// What TMA cannot read: rows that begin between multiples of 16 bytes, or that run backwards.
inline std::vector<Spec> not_for_the_copy_engine() {
  using Order = Layout::Order;
  std::vector<Spec> all(4, spec(65, 130, 64, Causal::bottom_right));
  all[0].layout = {Order::BHND, 0, 1};
  all[1].layout = {Order::BHND, 1, 0};
  all[2].layout = {Order::BHND, 0, 0, true};
  all[3].p.d = 13;
  return all;
}

// The words in which f refuses its arguments.
inline std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}
inline void expect_words(const std::string& text, std::initializer_list<std::string> words) {
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}

}  // namespace fa::judge
