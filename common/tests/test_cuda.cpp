// Tests of common/core/cuda.hpp on a GPU and, with FA_EMULATED, of the emulator.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/judge/cases.hpp"
#include "common/judge/conformance.hpp"
#include "common/judge/function_ref.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/tests/cuda_kernels.hpp"

extern const char* const fa_under_test;
const char* const fa_under_test = "";
namespace fa::test_kernels {
void launch_on_another_architecture();
}

namespace {

using namespace fa;

class Cuda : public judge::GpuTest {};

std::string error(judge::FunctionRef<void()> f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}
void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}
template <class T>
std::vector<T> from_device(const DeviceMemory& m, std::size_t n) {
  std::vector<T> v(n);
  FA_CUDA_CHECK(cudaMemcpy(v.data(), m.as<void>(), n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

// ---- the adapter that carries a test's tensors to the device and back ----

TEST_F(Cuda, EveryRunMustLeaveTheBitsOfTheFirst) {
  judge::ForwardCase<float> c({judge::shape(3, 5, 8)}, false);
  int runs = 0;
  const auto f = judge::on_gpu_forward<float>([&](const Problem&, const Forward<float>& t) {
    ++runs;
    const float x = runs < 4 ? 1 : 2;
    FA_CUDA_CHECK(cudaMemcpy(t.O.at(0, 0, 2), &x, sizeof x, cudaMemcpyHostToDevice));
  });
  judge::ForwardCall<float> call = c.call();
  call.runs = 3;
  f(call);
  EXPECT_EQ(c.O.at(0, 0, 2, 0), 1);
  EXPECT_EQ(c.check_memory_untouched(), "");
  call.runs = 300;
  runs = 0;
  expect_words(error([&] { f(call); }), {"run 4 of 300", "other bits"});
}

TEST_F(Cuda, OfAReservationOnlyTheUsedPartsAreCopied) {
  float host[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  const judge::DeviceCopy copy({{host, sizeof host, {{0, 4}, {20, 8}}}});
  for (float& x : host) x = -1;
  copy.copy_back();
  EXPECT_EQ(host[0], 0);
  EXPECT_EQ(host[4], -1);
  EXPECT_EQ(host[5], 5);
  EXPECT_EQ(host[6], 6);
  EXPECT_EQ(host[7], -1);
  EXPECT_EQ(copy.at(host + 6), copy.at(host) + 6);
}

TEST_F(Cuda, TheHostsHalfTypesAreTheDevices) {
  struct DeviceHalf {
    unsigned short bits;
  };
  judge::ForwardCase<Eigen::bfloat16> c({judge::shape(3, 5, 8)}, true);
  c.V.fill([](auto...) { return 1.5; });
  judge::on_gpu_forward<Eigen::bfloat16>([&](const Problem&, const Forward<Eigen::bfloat16>& host) {
    const Forward<DeviceHalf> t = judge::as_device<DeviceHalf>(host);
    EXPECT_EQ(t.K.row, host.K.row);
    EXPECT_EQ(static_cast<const void*>(t.LSE), host.LSE);
    FA_CUDA_CHECK(cudaMemcpy(t.O.at(0, 0, 1), t.V.at(0, 0, 4), 16, cudaMemcpyDeviceToDevice));
  })(c.call());
  EXPECT_EQ(float(c.O.at(0, 0, 1, 7)), 1.5f);
  EXPECT_TRUE(std::isnan(c.O.at(0, 0, 0, 0)));
}

// ---- checks and memory ----

TEST_F(Cuda, AFailedLaunchIsReportedByNameAndOnce) {
  expect_words(error([] { test_kernels::launch_with(2048, 0); }),
               {"launch of nothing failed at", "cuda_kernels.cu:", "invalid"});
  EXPECT_EQ(error([] { test_kernels::launch_with(32, 0); }), "no error");
}

TEST_F(Cuda, AnEarlyLaunchIsCheckedLikeAnyOther) {
#ifndef FA_EMULATED
  int major = 0;
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 9) GTEST_SKIP() << "kernels are launched early from compute capability 9.0 on";
#endif
  expect_words(error([] { test_kernels::launch_early_with(2048, 0); }),
               {"launch of nothing failed at", "cuda_kernels.cu:", "invalid"});
  EXPECT_EQ(error([] { test_kernels::launch_early_with(32, 0); }), "no error");
}

TEST_F(Cuda, ALaunchOfClustersIsCheckedLikeAnyOther) {
#ifndef FA_EMULATED
  int major = 0;
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 9) GTEST_SKIP() << "blocks form clusters from compute capability 9.0 on";
#endif
  EXPECT_EQ(error([] { test_kernels::launch_clusters_with(2, 6, 64); }), "no error");
  EXPECT_EQ(error([] { test_kernels::launch_clusters_with(1, 3, 64); }), "no error");
  for (const unsigned size : {4u, 32u})  // not all blocks have a cluster; too large
    expect_words(error([=] { test_kernels::launch_clusters_with(size, 6, 64); }),
                 {"launch of nothing failed at", "cuda_kernels.cu:"});
  EXPECT_EQ(error([] { test_kernels::launch_with(32, 0); }), "no error");
}

TEST_F(Cuda, SharedMemoryBeyondTheLimitIsReported) {
  expect_words(error([] { test_kernels::launch_with(32, 1 << 20); }),
               {"launch of nothing failed at", "invalid argument"});
  EXPECT_EQ(error([] { test_kernels::launch_with(32, 48 * 1024); }), "no error");
}

TEST_F(Cuda, AnEarlierErrorIsNotBlamedOnTheLaunch) {
  void* none = nullptr;
  EXPECT_NE(cudaMalloc(&none, std::size_t(1) << 45), cudaSuccess);  // and nobody asks why
  expect_words(error([] { test_kernels::launch_with(32, 0); }),
               {"a CUDA call before the launch of nothing failed", "out of memory"});
  EXPECT_EQ(error([] { test_kernels::launch_with(32, 0); }), "no error");
}

TEST_F(Cuda, OutOfMemorySaysBytesWantedAndFreeAndLosesNothing) {
  expect_words(error([] { DeviceMemory(std::size_t(1) << 45); }),
               {"out of memory", "wanted 35184372088832 bytes", "are free"});
  const DeviceMemory small(64);
  EXPECT_NE(small.as<void>(), nullptr);
}

TEST_F(Cuda, BarriersAndSharedMemory) {
  std::vector<float> in(256);
  std::iota(in.begin(), in.end(), 0.0f);
  const DeviceMemory a(1024), b(1024);
  FA_CUDA_CHECK(cudaMemcpy(a.as<void>(), in.data(), 1024, cudaMemcpyHostToDevice));
  test_kernels::reverse(a.as<float>(), b.as<float>(), true);
  const auto out = from_device<float>(b, 256);
  for (std::size_t t = 0; t < 256; ++t) EXPECT_EQ(out[t], in[255 - t]);
}

TEST_F(Cuda, SharedMemoryOfTilesIsAligned) {
  const DeviceMemory address(sizeof(std::uintptr_t));
  test_kernels::where_tiles_begin(address.as<std::uintptr_t>());
  EXPECT_EQ(from_device<std::uintptr_t>(address, 1)[0] % 1024, 0u);
}

TEST_F(Cuda, AWaitCoversItsGroupsOfCopiesAndNoOthers) {
  std::vector<float> in(12);
  std::iota(in.begin(), in.end(), 1.0f);
  const DeviceMemory from(12 * sizeof(float)), m(36 * sizeof(float));
  FA_CUDA_CHECK(cudaMemcpy(from.as<void>(), in.data(), 48, cudaMemcpyHostToDevice));
  test_kernels::copies(from.as<float>(), m.as<float>());
  const auto seen = from_device<float>(m, 36);
  for (std::size_t wait = 0; wait < 3; ++wait)
    for (std::size_t e = 0; e < 12; ++e) {
      const std::size_t copy = e / 4;
      SCOPED_TRACE("wait " + std::to_string(wait) + ", number " + std::to_string(e));
      if (copy <= wait) {
        EXPECT_EQ(seen[12 * wait + e], e % 4 <= copy ? in[e] : 0);
      }
#ifdef FA_EMULATED
      if (copy > wait) {
        EXPECT_TRUE(std::isnan(seen[12 * wait + e]));
      }
#endif
    }
}

TEST_F(Cuda, SeveralNumbersAtOnce) {
  std::vector<short> in(16);
  std::iota(in.begin(), in.end(), short(1));
  const DeviceMemory from(32), to(16), steps(4);
  FA_CUDA_CHECK(cudaMemcpy(from.as<void>(), in.data(), 32, cudaMemcpyHostToDevice));
  FA_CUDA_CHECK(cudaMemset(steps.as<void>(), 0, 4));
  test_kernels::at_once(from.as<short>(), to.as<short>(), steps.as<unsigned>());
  EXPECT_EQ(from_device<short>(to, 8), (std::vector<short>{5, 6, 7, 8, 0, 0, 0, 0}));
  EXPECT_EQ(from_device<unsigned>(steps, 1)[0], 2u);
#if defined(FA_EMULATED) && !defined(FA_EMULATOR_ASAN)  // there UBSan ends the program first
  expect_words(error([&] {
                 test_kernels::at_once(from.as<short>() + 4, to.as<short>(), steps.as<unsigned>());
               }),
               {"launch of at_once_kernel failed at", "misaligned address"});
  const DeviceMemory four(32);
  FA_CUDA_CHECK(cudaMemset(four.as<void>(), 0, 32));
  test_kernels::four(four.as<float>() + 4, four.as<float>());
  for (int at : {0, 4}) {
    expect_words(error([&] { test_kernels::four(four.as<float>() + 1, four.as<float>() + at); }),
                 {"launch of four_kernel failed at", "misaligned address"});
    expect_words(error([&] { test_kernels::four(four.as<float>() + at, four.as<float>() + 3); }),
                 {"launch of four_kernel failed at", "misaligned address"});
  }
#endif
}

TEST_F(Cuda, Shuffles) {
  const DeviceMemory m(128 * sizeof(int));
  test_kernels::shuffles(m.as<int>());
  const auto out = from_device<int>(m, 128);
  for (std::size_t t = 0; t < 64; ++t) {
    EXPECT_EQ(out[t], 496);
    EXPECT_EQ(out[64 + t], std::min(int(t % 32) + 1, 31));
  }
}

TEST_F(Cuda, AThreadThatHasReturnedKeepsNobodyWaiting) {
  const DeviceMemory m(sizeof(float));
  FA_CUDA_CHECK(cudaMemset(m.as<void>(), 0, sizeof(float)));
  test_kernels::count(m.as<float>());
  EXPECT_EQ(from_device<float>(m, 1)[0], 160);
}

TEST_F(Cuda, EventsTimeWhatLiesBetweenThem) {
  const DeviceMemory m(sizeof(float));
  FA_CUDA_CHECK(cudaMemset(m.as<void>(), 0, sizeof(float)));
  cudaEvent_t first, second, third;
  for (cudaEvent_t* event : {&first, &second, &third}) FA_CUDA_CHECK(cudaEventCreate(event));
  FA_CUDA_CHECK(cudaEventRecord(first));
  FA_CUDA_CHECK(cudaEventRecord(second));
  for (int i = 0; i < 100; ++i) test_kernels::count(m.as<float>());
  FA_CUDA_CHECK(cudaEventRecord(third));
  FA_CUDA_CHECK(cudaEventSynchronize(third));
  float nothing = -1, kernels = -1;
  FA_CUDA_CHECK(cudaEventElapsedTime(&nothing, first, second));
  FA_CUDA_CHECK(cudaEventElapsedTime(&kernels, second, third));
  EXPECT_GE(nothing, 0);
  EXPECT_GT(kernels, nothing);
  for (cudaEvent_t event : {first, second, third}) FA_CUDA_CHECK(cudaEventDestroy(event));
}

TEST(Hint, NamesBothArchitectures) {
  expect_words(cuda_hint(cudaErrorNoKernelImageForDevice, "8.0, 9.0", 75),
               {"built for compute capability 8.0, 9.0", "this GPU is 7.5",
                "-DCMAKE_CUDA_ARCHITECTURES=75"});
}

#ifdef FA_EMULATED
TEST(Emulator, AMissingBarrierShowsEveryTime) {
#ifdef FA_EMULATOR_TSAN
  GTEST_SKIP() << "ThreadSanitizer would report the race, as it should";
#endif
  std::vector<float> in(256), out(256);
  std::iota(in.begin(), in.end(), 0.0f);
  test_kernels::reverse(in.data(), out.data(), false);
  const auto unwritten = std::count_if(out.begin(), out.end(), [](float x) { return x != x; });
  EXPECT_GE(unwritten, 128) << "a warp that comes first must not see what later ones will write";
}
TEST(Emulator, SharedMemoryBeginsAsNaN) {
  std::vector<float> out(32, 0.0f);
  test_kernels::read_uninitialised(out.data());
  for (float x : out) EXPECT_TRUE(std::isnan(x));
  out.assign(32, 0.0f);
  test_kernels::read_uninitialised_static(out.data());  // a block must not see the one before
  for (float x : out) EXPECT_TRUE(std::isnan(x));
}
TEST(Emulator, AWriteBehindSharedMemoryIsReported) {
#if FA_SANITIZED
  GTEST_SKIP() << "a sanitizer would end the program, as it should";
#else
  EXPECT_EQ(error([] { test_kernels::write_shared(33, 33 * 4); }), "no error");
  expect_words(error([] { test_kernels::write_shared(33, 32 * 4); }),
               {"launch of write_shared_kernel failed at", "illegal memory access"});
#endif
}
TEST(Emulator, DeviceMemoryBeginsAsNaN) { EXPECT_TRUE(std::isnan(*DeviceMemory(4).as<float>())); }
TEST(Emulator, KernelsAreNotedByName) {
  emulator::take_kernels();
  test_kernels::launch_with(32, 0);
  EXPECT_EQ(emulator::take_kernels(), std::set<std::string>{"nothing"});
  EXPECT_TRUE(emulator::take_kernels().empty());
}
TEST(Emulator, BlocksOnSeveralCoresAreOneLaunch) {
#ifdef FA_EMULATOR_TSAN
  GTEST_SKIP()
      << "ThreadSanitizer: where a block hangs, nothing orders its threads with what comes";
#endif
  using test_kernels::InBlockThree;
  for (const unsigned cores : {1u, 4u, 100u}) {
    SCOPED_TRACE(cores);
    const emulator::WithCores several(cores);
    const auto run = [&](InBlockThree what) {
      DeviceMemory out(7 * sizeof(float));  // a block that hangs has not finished with its own
      std::fill_n(out.as<float>(), 7, 0.0f);
      std::string said = error([&] { test_kernels::blocks(out.as<float>(), what); });
      if (what == InBlockThree::nothing) {
        EXPECT_EQ(from_device<float>(out, 7), (std::vector<float>{6 * 32, 0, 1, 2, 3, 4, 5}));
      }
      return said;
    };
    EXPECT_EQ(run(InBlockThree::nothing), "no error");
    expect_words(run(InBlockThree::hangs), {"blocks_kernel: block 1 hangs: threads 0-15"});
#if !FA_SANITIZED
    expect_words(run(InBlockThree::writes_behind),
                 {"launch of blocks_kernel failed at", "illegal memory access"});
#endif
    EXPECT_EQ(run(InBlockThree::nothing), "no error");
    if (cores == 1) continue;
    EXPECT_EQ(run(InBlockThree::ends),
              "blocks_kernel: a process with some of its blocks ended early");
  }
}
TEST(Emulator, ThreadsThatWaitForEachOtherForEverAreReported) {
  EXPECT_EQ(error([] { test_kernels::diverge(false); }),
            "diverge_kernel: block 0 hangs: threads 0-15 wait for their warp (__syncwarp or a "
            "shuffle), but not all lanes of the mask come; threads 16-31 wait in __syncthreads");
  EXPECT_EQ(error([] { test_kernels::diverge(true); }),
            "diverge_kernel: block 0 hangs: threads 1, 3, 5 and 13 more wait for their warp "
            "(__syncwarp or a shuffle), but not all lanes of the mask come; threads 0, 2, 4 and 13 "
            "more wait in __syncthreads");
  EXPECT_EQ(error([] { test_kernels::launch_with(32, 0); }), "no error");
}
#else
class Errors : public judge::GpuTest {};

TEST_F(Errors, AnotherArchitectureIsNamed) {
  const std::string text = error([] { test_kernels::launch_on_another_architecture(); });
  int major = 0;
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major == 7) GTEST_SKIP() << "this GPU is the architecture that the test is built for";
  expect_words(text, {"launch of nothing failed at", "built for compute capability 7.5",
                      "this GPU is", "-DCMAKE_CUDA_ARCHITECTURES="});
}

// An illegal address ends the process's use of the GPU, so it happens in a child.
[[noreturn]] void read_nowhere(bool sync_check) {
  if (sync_check) setenv("FA_SYNC_CHECK", "1", 1);
  try {
    const DeviceMemory out(4);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that nobody has
    test_kernels::read(reinterpret_cast<const float*>(std::uintptr_t(16)), out.as<float>());
    if (sync_check) std::_Exit(9);  // the launch itself must have reported it
    FA_CUDA_CHECK(cudaDeviceSynchronize());
  } catch (const CudaError& e) {
    std::fputs(e.what(), stderr);
    std::_Exit(7);
  }
  std::_Exit(8);
}
TEST_F(Errors, AnAsynchronousErrorNamesTheKernelWithSyncCheck) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(read_nowhere(true), testing::ExitedWithCode(7),
              "kernel read_kernel failed at .*illegal memory access");
  EXPECT_EXIT(read_nowhere(false), testing::ExitedWithCode(7),
              "cudaDeviceSynchronize.* failed at .*illegal memory access.*FA_SYNC_CHECK=1");
}
#endif

}  // namespace
