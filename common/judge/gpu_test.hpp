// Tests that need a GPU: skipped with the reason where there is none, failed with FA_REQUIRE_GPU=1.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "common/judge/gpu.hpp"

namespace fa::judge {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string why_not = no_gpu();
    if (why_not.empty()) return;
    const char* required = std::getenv("FA_REQUIRE_GPU");
    if (required && std::string(required) == "1") FAIL() << why_not;
    GTEST_SKIP() << why_not;
  }
};

}  // namespace fa::judge
