#include "common/judge/conformance.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>

#include "common/judge/at_work.hpp"
#include "common/judge/random.hpp"

namespace fa::judge {
namespace {

constexpr int most_failures = 3;
constexpr std::chrono::seconds seconds_for_contrast{4};

class FamilyTest : public testing::Test {
 public:
  FamilyTest(StageUnderTest stage, Family family)
      : stage_(std::move(stage)), family_(std::move(family)) {}

  void SetUp() override {
    const std::string why_not = stage_.unavailable ? stage_.unavailable() : "";
    if (why_not.empty()) return;
    const char* required = std::getenv("FA_REQUIRE_GPU");
    if (required && std::string(required) == "1") FAIL() << why_not;
    GTEST_SKIP() << why_not;
  }
  void TestBody() override {
    judge::Run run(stage_, family_);
    family_.body(run);
    run.conclude();
    // A typing error in FA_CASE must not look like success.
    if (run.cases() == 0) GTEST_SKIP() << "FA_CASE matches no case of this test";
  }

 private:
  StageUnderTest stage_;
  Family family_;
};

}  // namespace

// In a function, since stages are registered before main() begins.
static std::vector<StageUnderTest>& all_registered() {
  static std::vector<StageUnderTest> all;
  return all;
}
const std::vector<StageUnderTest>& registered() { return all_registered(); }

bool register_conformance(const StageUnderTest& stage) {
  all_registered().push_back(stage);
  auto families = forward_families();
  for (Family& f : backward_families()) families.push_back(f);
  for (const Family& family : families) {
    if (!family.promised(stage)) continue;
    testing::RegisterTest(
        stage.name.c_str(), family.name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
        [stage, family]() -> testing::Test* { return new FamilyTest(stage, family); });
  }
  return true;
}

// What fails is told three times; the others are run for the sake of the contrast, which must not
// make anybody wait, and not where nothing works any more, as on a GPU after an illegal address.
bool Run::has_seen_enough() const {
  return (failures_ > 0 && Clock::now() - first_failure_ > seconds_for_contrast) ||
         thrown_in_turn_ >= most_failures;
}

void Run::run_case(const std::string& name, FunctionRef<std::string()> check, const Spec* spec,
                   const std::string& what, const std::string& type) {
  const char* only = std::getenv("FA_CASE");
  if (only && name.find(only) == std::string::npos) return;
  ++cases_;
  if (has_seen_enough()) {
    ++left_out_;
    return;
  }
  const std::string test = stage_.name + "." + family_.name;
  const std::string alone = "this case alone:  " + environment_ + "FA_CASE='" + name + "' " +
                            this_program() + " --gtest_filter=" + test;
  at_work_on(test + ": " + family_.about + "\ncase  " + name + "\n" + alone + "\n");
  std::string wrong;
  bool thrown = false;
  try {
    wrong = check();
  } catch (const std::exception& e) {
    wrong = std::string("threw: ") + e.what();
    thrown = true;
  }
  at_work_on("test  " + test + ", after case  " + name + "\n");
  thrown_in_turn_ = thrown ? thrown_in_turn_ + 1 : 0;
  if (spec) outcomes_.push_back({*spec, type, !wrong.empty(), what});
  if (wrong.empty()) return;
  if (failures_++ == 0) {
    first_failure_ = Clock::now();
    std::cout << "  " << family_.name << ": " << family_.about << "\n";
  }
  if (failures_ <= most_failures)
    ADD_FAILURE() << "case  " << name << "\n" << wrong << "\n" << alone;
  else if (spec && spec->p.Nq + spec->p.Nk > most_rows_) {
    most_rows_ = spec->p.Nq + spec->p.Nk;
    largest_ = "case  " + name + "\n" + wrong + (wrong.back() == '\n' ? "" : "\n");
  }
}

void Run::conclude() const {
  if (failures_ == 0 || cases_ == 1) return;
  std::cout << "  " << failures_ << " of " << cases_ - left_out_ << " cases fail";
  if (failures_ > most_failures) std::cout << ", the first " << most_failures << " are shown";
  if (left_out_ > 0) std::cout << "; " << left_out_ << " more are left out";
  std::cout << "\n";
  if (!largest_.empty()) std::cout << "  of the others the longest:\n" << largest_;
  const std::string line = contrast(outcomes_);
  if (!line.empty()) std::cout << "  " << line << "\n";
}

std::int64_t Run::d(std::int64_t wanted) const {
  const std::vector<std::int64_t>& list = promises().head_dims;
  if (list.empty()) return std::min(wanted, promises().max_d);
  const auto at = std::lower_bound(list.begin(), list.end(), wanted);
  return at == list.end() ? list.back() : *at;
}

void Run::forward(const Spec& spec) {
  each_type([&](auto type) {
    using T = decltype(type);
    run<T>(spec, "", [&]() -> std::string {
      ForwardCase<T> c(spec, promises().lse);
      if (promises().takes && !promises().takes(c.p))
        return expect_refusal([&] { functions<T>().forward(c.call()); }, {});
      functions<T>().forward(c.call());
      return c.verdict();
    });
  });
}

void Run::backward(const Spec& spec) {
  each_type([&](auto type) {
    using T = decltype(type);
    run<T>(spec, "", [&]() -> std::string {
      BackwardCase<T> c(spec);
      if (promises().takes && !promises().takes(c.p))
        return expect_refusal([&] { functions<T>().backward(c.call()); }, {});
      functions<T>().backward(c.call());
      return c.verdict();
    });
  });
}

std::string expect_refusal(FunctionRef<void()> f, const std::vector<std::string>& words) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    for (const std::string& word : words)
      if (std::string(e.what()).find(word) == std::string::npos)
        return "the error does not name '" + word + "': " + e.what();
    return {};
  } catch (const std::exception& e) {
    return std::string("threw something other than std::invalid_argument: ") + e.what();
  }
  return "was accepted; expected std::invalid_argument with words that say why";
}

Problem shape(std::int64_t Nq, std::int64_t Nk, std::int64_t d, std::int64_t B, std::int64_t Hq,
              std::int64_t Hkv, Causal causal) {
  Problem p;
  p.B = B;
  p.Hq = Hq;
  p.Hkv = Hkv;
  p.Nq = Nq;
  p.Nk = Nk;
  p.d = d;
  p.causal = causal;
  return p;
}

std::vector<Problem> awkward_sizes(const Run& run, Causal causal) {
  std::vector<std::int64_t> Ns = {1, 2, 17, 63, 64, 65, 130};
  if (run.small()) Ns = {1, 17, 33, 65};
  if (run.large()) Ns = {1, 2, 17, 63, 64, 65, 127, 128, 129, 257, 1000};
  const std::int64_t ds[] = {8, 64, 3, 128, 1, 40, 111, 59};
  std::vector<Problem> sizes;
  std::size_t n = 0;
  for (std::int64_t Nq : Ns)
    for (std::int64_t Nk : Ns) {
      sizes.push_back(shape(Nq, Nk, run.d(ds[n++ % std::size(ds)]), 1, 1, 1, causal));
    }
  // Groups of heads have a family of their own; a mask must go with them.
  const std::int64_t group = causal == Causal::none ? 1 : 2;
  sizes.push_back(shape(19, 23, run.d(16), 2, 2 * group, 2, causal));
  sizes.push_back(shape(5, 7, run.d(run.promises().max_d), 1, group, 1, causal));
  if (run.small()) return sizes;
  if (run.promises().head_dims.empty() && run.promises().max_d > 128)
    for (auto [Nq, Nk, d] : {std::tuple{33, 97, 129}, {65, 130, 160}, {130, 65, 192}})
      sizes.push_back(shape(Nq, Nk, run.d(d), 1, 1, 1, causal));
  for (auto [Nq, Nk] : {std::pair{1, 1000}, {1000, 1}, {113, 203}, {108, 256}, {256, 97}})
    sizes.push_back(shape(Nq, Nk, run.d(32), 1, 2, 2, causal));
  if (!run.large()) return sizes;
  for (auto [Nq, Nk, d] : {std::tuple{1, 4097, 64},
                           {4097, 1, 32},
                           {1023, 1024, 128},
                           {1024, 1023, 80},
                           {130, 515, 96},
                           {515, 130, 112},
                           {257, 1000, 256},
                           {1000, 129, 200}})
    sizes.push_back(shape(Nq, Nk, run.d(d), 1, 1, 1, causal));
  return sizes;
}

std::vector<std::int64_t> sample(std::int64_t N) {
  std::vector<std::int64_t> rows = {0, 1, 63, 64, N / 3, N / 2 + 1, N - 129, N - 128, N - 2, N - 1};
  for (std::uint64_t n = 0; n < 22; ++n) rows.push_back(integer(7, n, 0, N - 1));
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

Reserved::Reserved(std::size_t bytes) : bytes_(bytes) {
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
               -1, 0);
  if (data_ == MAP_FAILED) data_ = nullptr;
}
Reserved::~Reserved() {
  if (data_) munmap(data_, bytes_);
}

bool shares_a_tile(const Promises& promises, const Problem& p, std::int64_t i, std::int64_t j) {
  const std::int64_t rows = promises.nan_tile, keys = promises.nan_keys;
  if (rows == 0) return true;
  const std::int64_t last = std::min(i / rows * rows + rows, p.Nq) - 1;
  return j / keys * keys < visible_keys(p, 0, last);
}

const std::vector<OutOfLine>& out_of_line() {
  static const std::vector<OutOfLine> list = [] {
    std::vector<OutOfLine> reasons = {
        {"begins off", {}}, {"has rows off", {}}, {"has heads off", {}}, {"has batches off", {}}};
    reasons[0].layout.offset = reasons[1].layout.gap = 1;
    reasons[2].layout.head_gap = reasons[3].layout.batch_gap = 1;
    reasons[2].layout.batch_gap = 14;  // two heads: the batches are in line again
    return reasons;
  }();
  return list;
}

// In a process of its own, since a fault ends it. What it says of itself is not repeated here.
std::string survives(FunctionRef<void()> f) {
  std::cout.flush();
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork() failed");
  if (child == 0) {
    at_work_on("");
    try {
      f();
    } catch (...) {
      std::_Exit(2);
    }
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return strsignal(WTERMSIG(status));
  if (WEXITSTATUS(status) == 2) return "an exception";
  return status == 0 ? "" : "exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace fa::judge
