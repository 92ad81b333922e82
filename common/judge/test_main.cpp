// main() of every stage's tests.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "common/judge/at_work.hpp"

extern const char* const fa_under_test;  // generated: empty, or the files that replace the lesson's

namespace {

// Where a test has no cases, or is between two, its name is all there is to say.
class TellTheTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    const std::string name = std::string(test.test_suite_name()) + "." + test.name();
    fa::judge::at_work_on("test  " + name + "\nthis test alone:  " +
                          testing::internal::GetArgvs()[0] + " --gtest_filter=" + name + "\n");
  }
  void OnTestEnd(const testing::TestInfo&) override { fa::judge::at_work_on(""); }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (std::strstr(fa_under_test, "/mine/") || std::strstr(fa_under_test, "/hunt/"))
    std::printf("testing YOUR code: %s\n", fa_under_test);
  else if (*fa_under_test)
    std::printf("testing a mutant: %s\n", fa_under_test);
  testing::UnitTest::GetInstance()->listeners().Append(new TellTheTest);
  fa::judge::tell_what_ends();
  return RUN_ALL_TESTS();
}
