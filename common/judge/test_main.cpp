// main() of every stage's tests.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/judge/at_work.hpp"

extern const char* const fa_under_test;  // generated: empty, or the files that replace the lesson's

namespace {

// Where a test has no cases, or is between two, its name is all there is to say.
class TellTheTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    const std::string name = std::string(test.test_suite_name()) + "." + test.name();
    fa::judge::at_work_on("test  " + name + "\nthis test alone:  " + fa::judge::this_program() +
                          " --gtest_filter=" + name + "\n");
  }
  void OnTestEnd(const testing::TestInfo&) override { fa::judge::at_work_on(""); }
};

// A program of many mutants is one of them, or the lesson: FA_MUTANT says which.
std::string chosen() {
  const char* name = std::getenv("FA_MUTANT");
  return name ? name : "";
}
std::vector<std::string>& mutants() {
  static std::vector<std::string> names;
  return names;
}

}  // namespace

// Asked before main() begins, once for each mutant, by the sources that mutants.py weaves.
bool fa_mutant(const char* name) {
  mutants().push_back(name);
  return chosen() == name;
}

std::string fa::judge::this_program() {
  const bool one = !mutants().empty() && !chosen().empty();
  return (one ? "FA_MUTANT=" + chosen() + " " : "") + testing::internal::GetArgvs()[0];
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto& names = mutants();
  if (!names.empty() && !chosen().empty() &&
      std::find(names.begin(), names.end(), chosen()) == names.end()) {
    std::fprintf(stderr, "FA_MUTANT=%s: this program has no such mutant, but", chosen().c_str());
    for (const std::string& name : names) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  if (std::strstr(fa_under_test, "/mine/") || std::strstr(fa_under_test, "/hunt/"))
    std::printf("testing YOUR code: %s\n", fa_under_test);
  else if (*fa_under_test && names.empty())
    std::printf("testing a mutant: %s\n", fa_under_test);
  else if (*fa_under_test && chosen().empty())
    std::printf("testing the lesson; FA_MUTANT chooses a mutant: %s\n", fa_under_test);
  else if (*fa_under_test)
    std::printf("testing the mutant %s: %s\n", chosen().c_str(), fa_under_test);
  testing::UnitTest::GetInstance()->listeners().Append(new TellTheTest);
  fa::judge::tell_what_ends();
  return RUN_ALL_TESTS();
}
