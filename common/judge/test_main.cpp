// main() of every stage's tests.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

extern const char* const fa_under_test;  // generated: empty, or the files that replace the lesson's

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (std::strstr(fa_under_test, "/mine/") || std::strstr(fa_under_test, "/hunt/"))
    std::printf("testing YOUR code: %s\n", fa_under_test);
  else if (*fa_under_test)
    std::printf("testing a mutant: %s\n", fa_under_test);
  return RUN_ALL_TESTS();
}
