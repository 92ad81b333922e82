// A program of two mutants, which ask what they are as those do that mutants.py weaves.
#include <gtest/gtest.h>

#include <cstdlib>

bool fa_mutant(const char* name);
static const bool too_many = fa_mutant("too_many");
static const bool crash = fa_mutant("crash");

TEST(OneOfMany, Adds) {
  if (crash) std::abort();
  EXPECT_EQ(2 + 2 + too_many, 4);
}
