// Every kernel on a problem of which it has several of everything at once: tiles of keys and of
// queries, heads, and tiles for each block that stays. What is asked for too early, waited for too
// briefly or given free too soon (mutants.txt) shows here or nowhere.
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using bf16 = Eigen::bfloat16;

struct Rung {
  std::string name;
  bool wide;  // takes d = 256, too
  optimized::Kernel forward = optimized::Kernel::best;
  optimized::BackwardKernel backward = optimized::BackwardKernel::best;
};
void PrintTo(const Rung& rung, std::ostream* out) { *out << rung.name; }

std::vector<Rung> rungs() {
  std::vector<Rung> all;
  std::size_t count = 0;
  const auto* const forward = optimized::rungs(count);
  for (std::size_t n = 0; n < count; ++n)
    all.push_back({forward[n].name, forward[n].whole_contract, forward[n].kernel});
  const auto* const backward = optimized::backward_rungs(count);
  for (std::size_t n = 0; n < count; ++n)
    all.push_back({std::string("backward_") + backward[n].name,
                   backward[n].whole_contract,
                   {},
                   backward[n].kernel});
  return all;
}

class Tiles : public GpuTest, public testing::WithParamInterface<Rung> {
 protected:
  static void forward(const Spec& s) {
    ForwardCase<bf16> c(s, true);
    on_gpu_forward<bf16>([](const Problem& p, const Forward<bf16>& t) {
      const DeviceMemory scratch(256);
      optimized::forward(p, as_device<__nv_bfloat16>(t), {GetParam().forward, nullptr, scratch});
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << s.name();
  }
  static void backward(const Spec& s) {
    BackwardCase<bf16> c(s);
    on_gpu_backward<bf16>([](const Problem& p, const Backward<bf16>& t) {
      optimized::BackwardOptions options{GetParam().backward};
      const DeviceMemory scratch(optimized::backward_scratch_bytes(p, options));
      options.scratch = scratch;
      optimized::backward(p, as_device<__nv_bfloat16>(t), options);
      FA_CUDA_CHECK(cudaDeviceSynchronize());
    })(c.call());
    EXPECT_EQ(c.verdict(), "") << s.name();
  }
};

TEST_P(Tiles, SeveralOfEach) {
  const bool is_forward = GetParam().forward != optimized::Kernel::best;
  for (const std::int64_t d : {128, 256}) {
    if (d == 256 && !GetParam().wide) continue;
    Spec s = is_forward ? spec(270, 600, d) : spec(330, 140, d);
    s.p.Hq = 2;
    s.p.Hkv = is_forward ? 2 : 1;
    is_forward ? forward(s) : backward(s);
  }
}

// The diagonal goes through several tiles of keys.
TEST_P(Tiles, AndAMask) {
  for (const std::int64_t d : {128, 256}) {
    if (d == 256 && !GetParam().wide) continue;
    const Spec s = spec(140, 150, d, Causal::top_left);
    GetParam().forward != optimized::Kernel::best ? forward(s) : backward(s);
  }
}

INSTANTIATE_TEST_SUITE_P(, Tiles, testing::ValuesIn(rungs()),
                         [](const auto& rung) { return rung.param.name; });

}  // namespace
