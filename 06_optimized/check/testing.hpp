// What the tests of both ladders use.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/judge/cases.hpp"

namespace fa::judge {

inline Spec spec(std::int64_t Nq, std::int64_t Nk, std::int64_t d, Causal causal = Causal::none) {
  Spec s;
  s.p.Nq = Nq;
  s.p.Nk = Nk;
  s.p.d = d;
  s.p.causal = causal;
  return s;
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
