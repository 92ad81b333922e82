// The rules of Hopper's asynchronous instructions, one by one: a kernel of a few lines that breaks
// one rule and must be told so, with the line of each side; and the same kernel as it keeps the
// rule, about which nothing is to be said. On the CPU alone: a GPU says nothing, or stops.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "06_optimized/ptx/add.cuh"
#include "06_optimized/ptx/barrier.cuh"
#include "06_optimized/ptx/mma.cuh"
#include "06_optimized/ptx/tma.cuh"
#include "06_optimized/ptx/wgmma.cuh"
#include "common/core/cp_async.cuh"

namespace fa::optimized {
namespace {

using emulator::Schedule;
using emulator::Timing;

// ---- launches, and what they are told ----

// The lines of the two sides of a rule, as a kernel runs through them.
int first_line, second_line;
#define FIRST(...) (first_line = __LINE__, __VA_ARGS__)
#define SECOND(...) (second_line = __LINE__, __VA_ARGS__)

alignas(128) std::array<__half, 64 * 64> device_memory;  // zeros before each launch
alignas(16) std::array<float, 64 * 64> sums_memory;
float result;  // that compilers must believe in

__half* halves() {  // memory of the device
  static const DeviceMemory memory(64 * 64 * sizeof(__half));
  return memory.as<__half>();
}
float* floats() { return reinterpret_cast<float*>(halves()); }

struct Shared {
  alignas(1024) __half a[64 * 64];
  alignas(1024) __half b[64 * 64];
  alignas(16) float sums[64];
  Barrier full, other;
};

// Compilers may put no write to x off beyond this.
template <class T>
__device__ void in_memory(T& x) {
  asm volatile("" : : "r"(&x) : "memory");
}

using Kernel = void (*)();
// What a launch is told: the finding, from behind the kernel's name and its block on, or nothing.
// If there is a kernel before it, it is launched early.
// `cluster`: of so many blocks, or a block alone.
std::string told(Kernel kernel, int threads, Schedule times, Kernel before = nullptr,
                 unsigned cluster = 1) {
  const emulator::WithSchedule for_now(times);
  device_memory.fill(__half(0.0f));
  sums_memory.fill(0);
  floats()[2] = 0;
  allow_shared_memory(kernel, sizeof(Shared));
  if (before) allow_shared_memory(before, sizeof(Shared));
  try {
    if (before) {
      FA_LAUNCH(before, 1, unsigned(threads), sizeof(Shared), nullptr);
      FA_LAUNCH_EARLY(kernel, 1, unsigned(threads), sizeof(Shared), nullptr);
    } else {
      FA_LAUNCH_CLUSTERS(cluster, kernel, cluster, unsigned(threads), sizeof(Shared), nullptr);
    }
  } catch (const std::logic_error& e) {
    const std::string text = e.what();
    const std::string where = cluster == 1 ? "block 0" : "blocks 0-" + std::to_string(cluster - 1);
    const std::size_t at = text.find(where);
    return at == std::string::npos ? text : text.substr(at + where.size());
  }
  return {};
}

// "{1}" and "{2}" in a sentence are the places of the two sides.
std::string with_places(std::string sentence) {
  const std::pair<const char*, int> places[] = {{"{1}", first_line}, {"{2}", second_line}};
  for (const auto& [mark, line] : places)
    for (std::size_t at; (at = sentence.find(mark)) != std::string::npos;)
      sentence.replace(at, 3, "test_rules.cu:" + std::to_string(line));
  return sentence;
}

// Does a text hold these words? "*" stands for any.
bool holds(const std::string& text, const std::string& words) {
  for (std::size_t at = 0, begin = 0; begin <= words.size();) {
    const std::size_t end = std::min(words.find('*', begin), words.size());
    at = text.find(words.substr(begin, end - begin), at);
    if (at == std::string::npos) return false;
    at += end - begin;
    begin = end + 1;
  }
  return true;
}

// Is this what is to be told? Where no order forbids an early copy or product from being done with,
// it is told as a race of the two sides.
bool tells(const std::string& text, const std::string& sentence) {
  return holds(text, with_places(sentence)) ||
         holds(text,
               with_places("{2}* byte * of shared memory, which * {1}*nothing orders the two"));
}

enum Times { late, always };  // when a broken rule must be told: if things come late; at any time
constexpr unsigned seeds = 20;

// If not `always`, the broken rule may seem kept when things come early, or with most of the seeds.
void test_rule(Kernel breaks, Kernel keeps, int threads, Times times, const std::string& sentence,
               Kernel before = nullptr, unsigned cluster = 1) {
  const auto is_told = [&](Schedule s, const std::string& when) {
    const std::string text = told(breaks, threads, s, before, cluster);
    const bool found = tells(text, sentence);
    EXPECT_TRUE(found || (times == late && s.timing != Timing::late && text.empty()))
        << when << ", told: \"" << text << "\"\nwanted: \"" << with_places(sentence) << '"';
    return found;
  };
  is_told({Timing::late, 0}, "late");
  is_told({Timing::early, 0}, "early");
  unsigned found = 0;
  for (unsigned seed = 1; seed <= seeds; ++seed)
    found += is_told({Timing::random, seed}, "seed " + std::to_string(seed));
  EXPECT_GT(found, 0u) << "no seed finds it";

  EXPECT_EQ(told(keeps, threads, {Timing::late, 0}, before, cluster), "") << "late";
  EXPECT_EQ(told(keeps, threads, {Timing::early, 0}, before, cluster), "") << "early";
  for (unsigned seed = 1; seed <= seeds; ++seed)
    EXPECT_EQ(told(keeps, threads, {Timing::random, seed}, before, cluster), "") << "seed " << seed;
}
// Of a kernel<breaks>, of so many threads.
#define RULE(name, kernel, threads, times, sentence) \
  TEST(Rules, name) { test_rule(kernel<true>, kernel<false>, threads, times, sentence); }

// A barrier that wants one arrival, and zeros in all tiles, which the asynchronous proxy may read.
__device__ Shared& begin(int arrivals = 1) {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&s.full, arrivals);
    init(&s.other, 1);
    fence_barriers();
  }
  for (unsigned e = threadIdx.x; e < 64 * 64; e += blockDim.x) s.a[e] = s.b[e] = __half(0.0f);
  for (unsigned e = threadIdx.x; e < 64; e += blockDim.x) s.sums[e] = 0;
  fence_async();
  __syncthreads();
  return s;
}
__device__ CUtensorMap map_of(int rows) {
  return {reinterpret_cast<char*>(device_memory.data()), {64, 64, 1, 1}, {2, 128, 16, 16}, rows};
}

// ---- copies into shared memory ----

template <bool breaks>
__global__ void reads_a_copy() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 16);
    FIRST(bulk_load(s.a, device_memory.data(), 16, &s.full));
    if (!breaks) wait(&s.full, 0);
    SECOND(result = float(s.a[0]));
  }
  wait(&s.full, 0);
}
RULE(ACopyIsReadAfterItsWait, reads_a_copy, 32, always,
     ": thread 0 reads byte 0 of shared memory at {2}, to which the copy asked for at {1} is on "
     "its way: it has not waited for it")

template <bool breaks>
__global__ void writes_to_a_copy() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 16);
    FIRST(bulk_load(s.a, device_memory.data(), 16, &s.full));
    if (!breaks) wait(&s.full, 0);
    SECOND(s.a[0] = __half(1.0f));
  }
  wait(&s.full, 0);
}
RULE(WhereACopyIsUnderWayNobodyWrites, writes_to_a_copy, 32, always,
     ": thread 0 writes byte 0 of shared memory at {2}, to which the copy asked for at {1} is "
     "on its way")

template <bool breaks>
__global__ void copies_twice() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, breaks ? 2048 : 1024);
    FIRST(tma_load(s.a, map_of(8), &s.full, 0, 0, 0, 0));
    if (!breaks) {
      wait(&s.full, 0);
      arrive_expecting(&s.full, 1024);
    }
    SECOND(tma_load(s.a, map_of(8), &s.full, 0, 8, 0, 0));
  }
  wait(&s.full, breaks ? 0 : 1);
}
RULE(TwoCopiesDoNotGoToOnePlace, copies_twice, 1, always,
     ": the copy asked for at {2} overwrites byte 0 of shared memory, to which the copy asked "
     "for at {1} is on its way")

template <bool breaks>
__global__ void multiplies_a_copy() {
  auto& s = begin();
  float C[32];
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 8192);
    FIRST(tma_load(s.b, map_of(64), &s.full, 0, 0, 0, 0));
  }
  if (!breaks) wait(&s.full, 0);
  __syncthreads();
  wgmma_fence();
  SECOND(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  wgmma_wait<0>(C);
  wait(&s.full, 0);
}
RULE(AProductReadsACopyAfterItsWait, multiplies_a_copy, 128, always,
     ": the product asked for at {2} reads byte 8192 of shared memory, to which the copy asked "
     "for at {1} is on its way")

// Rows come by two boxes, and bytes of one are announced: the phase ends while the other is on its
// way.
template <bool breaks>
__global__ void announces_half() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, breaks ? 1024 : 2048);
    for (int i = 0; i < 16; i += 8) FIRST(tma_load(s.a + 64 * i, map_of(8), &s.full, 0, i, 0, 0));
  }
  wait(&s.full, 0);
}
template <bool breaks>
__global__ void expects_too_few() {
  announces_half<breaks>();
  const auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0)
    for (int i = 0; i < 16; i += 8) SECOND(result = float(s.a[64 * i]));
}
RULE(AllBytesAreAnnounced, expects_too_few, 32, always,
     ": thread 0 reads byte * of shared memory at {2}, to which the copy asked for at {1} is on "
     "its way")
TEST(Rules, BytesThatNobodyAnnouncedAreToldAtTheEnd) {
  const std::string text = told(announces_half<true>, 32, {Timing::early, 0});
  EXPECT_TRUE(
      holds(text,
            ": the block ends, and in phase 1 of the barrier initialised at test_rules.cu:* "
            "1024 bytes have come that nobody announced"))
      << text;
  EXPECT_EQ(told(announces_half<false>, 32, {Timing::early, 0}), "");
}

template <bool breaks>
__global__ void expects_too_many() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, breaks ? 1024 + 128 : 1024);
    tma_load(s.a, map_of(8), &s.full, 0, 0, 0, 0);
  }
  FIRST(wait(&s.full, 0));
}
RULE(NoMoreBytesAreAnnouncedThanCome, expects_too_many, 32, always,
     " hangs: threads 0-31 wait for the end of a phase of parity 0 of the barrier at byte 16640 "
     "(phase 0 is under way, 0 of 1 arrivals and 128 bytes missing) at {1}")

template <bool breaks>
__global__ void leaves_a_copy() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 16);
    FIRST(bulk_load(s.a, device_memory.data(), 16, &s.full));
    if (!breaks) wait(&s.full, 0);
  }
}
RULE(ABlockDoesNotEndUnderACopy, leaves_a_copy, 32, late,
     ": the block ends while the copy asked for at {1} is on its way")

// Buffers that threads have read go back to the copy engine.
template <bool breaks>
__global__ void copies_over_what_was_read() {
  auto& s = begin();
  if (threadIdx.x == 1) FIRST(result = float(s.a[0]));
  if (!breaks) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 16);
    SECOND(bulk_load(s.a, device_memory.data(), 16, &s.full));
  }
  wait(&s.full, 0);
}
RULE(AFenceLiesBetweenReadsAndTheNextCopy, copies_over_what_was_read, 32, always,
     ": the copy asked for at {2} overwrites byte 0 of shared memory, which thread 1 read at "
     "{1} without fence_async() since")

// ---- copies out of shared memory ----

template <bool breaks>
__global__ void stores_without_fence() {
  auto& s = begin();
  if (threadIdx.x == 1) FIRST(s.a[0] = __half(1.0f));
  if (!breaks) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    SECOND(tma_store(map_of(8), s.a, 0, 0, 0, 0));
    tma_commit();
    tma_wait_read();
  }
}
RULE(AFenceLiesBetweenWritesAndAStore, stores_without_fence, 32, always,
     ": the store asked for at {2} reads byte 0 of shared memory, which thread 1 wrote at {1} "
     "without fence_async() since")

template <bool breaks>
__global__ void adds_without_fence() {
  auto& s = begin();
  if (threadIdx.x == 1) FIRST(s.sums[0] = 1);
  if (!breaks) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    SECOND(bulk_add(sums_memory.data(), s.sums, 256));
    tma_commit();
    tma_wait_read();
  }
}
RULE(AFenceLiesBetweenWritesAndAnAddition, adds_without_fence, 32, always,
     ": the store asked for at {2} reads byte 1638* of shared memory, which thread 1 wrote at "
     "{1} without fence_async() since")

template <bool breaks>
__global__ void writes_under_a_store() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    FIRST(tma_store(map_of(8), s.a, 0, 0, 0, 0));
    tma_commit();
    if (!breaks) tma_wait_read();
    SECOND(s.a[0] = __half(1.0f));
    tma_wait_read();
  }
}
RULE(ABufferIsWrittenAfterItsStoreHasRead, writes_under_a_store, 32, always,
     ": thread 0 writes byte 0 of shared memory at {2}, which what was asked for at {1} has yet "
     "to read")

template <bool breaks>
__global__ void copies_under_a_store() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    FIRST(tma_store(map_of(8), s.a, 0, 0, 0, 0));
    tma_commit();
    if (!breaks) tma_wait_read();
    arrive_expecting(&s.full, 16);
    SECOND(bulk_load(s.a, device_memory.data(), 16, &s.full));
    tma_wait_read();
  }
  wait(&s.full, 0);
}
RULE(ABufferIsFilledAfterItsStoreHasRead, copies_under_a_store, 32, always,
     ": the copy asked for at {2} overwrites byte 0 of shared memory, which what was asked for "
     "at {1} has yet to read")

// A store that belongs to no group is waited for by nobody.
template <bool breaks>
__global__ void does_not_commit_a_store() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    FIRST(tma_store(map_of(8), s.a, 0, 0, 0, 0));
    if (!breaks) tma_commit();
    tma_wait_read();
  }
}
RULE(ABlockDoesNotEndUnderAStore, does_not_commit_a_store, 32, late,
     ": thread 0 has ended while the store asked for at {1} may still read shared memory")

// ---- in turns ----

__device__ int* a_turn() { return reinterpret_cast<int*>(sums_memory.data() + 64); }  // 0

template <bool breaks>
__global__ void passes_on_what_may_not_be_added() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    wait_turn(a_turn(), 0);
    FIRST(bulk_add(sums_memory.data(), s.sums, 256));
    tma_commit();
    tma_wait_read();
    if (!breaks) tma_wait();
    SECOND(pass_turn(a_turn()));
  }
}
RULE(ATurnIsPassedOnWhenTheSumHasArrived, passes_on_what_may_not_be_added, 32, always,
     ": the turn is passed on at {2} while what was asked for at {1} may not have been added yet")

template <bool breaks>
__global__ void passes_on_what_it_has_not_got() {
  begin();
  if (threadIdx.x == 0) {
    if (!breaks) wait_turn(a_turn(), 0);
    FIRST(pass_turn(a_turn()));
  }
}
RULE(ATurnIsPassedOnByWhoHasIt, passes_on_what_it_has_not_got, 32, always,
     ": the turn is passed on at {1}, and no thread of this warp has waited for it")

template <bool breaks>
__global__ void waits_for_one_who_never_comes() {
  begin();
  if (threadIdx.x == 0) {
    FIRST(wait_turn(a_turn(), breaks ? 1 : 0));
    pass_turn(a_turn());
  }
}
RULE(ATurnThatNeverComesIsTold, waits_for_one_who_never_comes, 32, always,
     " hangs: threads 0 wait for its turn to add, when 1 have added; so far 0 have at {1}")

// ---- products of a warpgroup ----

template <bool breaks>
__global__ void multiplies_without_fence() {
  auto& s = begin();
  float C[32];
  if (threadIdx.x == 1) FIRST(s.b[0] = __half(1.0f));
  if (!breaks) fence_async();
  __syncthreads();
  wgmma_fence();
  SECOND(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(AFenceLiesBetweenWritesAndAProduct, multiplies_without_fence, 128, always,
     ": the product asked for at {2} reads byte 8192 of shared memory, which thread 1 wrote at "
     "{1} without fence_async() since")

template <bool breaks>
__global__ void writes_under_a_product() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  if (!breaks) wgmma_wait<0>(C);
  __syncthreads();
  if (threadIdx.x == 0) SECOND(s.b[0] = __half(1.0f));
  wgmma_wait<0>(C);
}
RULE(AnOperandIsWrittenAfterItsProduct, writes_under_a_product, 128, late,
     ": thread 0 writes byte 8192 of shared memory at {2}, which what was asked for at {1} has "
     "yet to read")

template <bool breaks>
__global__ void copies_under_a_product() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  if (!breaks) wgmma_wait<0>(C);
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 8192);
    SECOND(tma_load(s.b, map_of(64), &s.full, 0, 0, 0, 0));
  }
  wgmma_wait<0>(C);
  wait(&s.full, 0);
}
RULE(AnOperandIsFilledAfterItsProduct, copies_under_a_product, 128, always,
     ": the copy asked for at {2} overwrites byte 8192 of shared memory, which what was asked "
     "for at {1} has yet to read")

template <bool breaks>
__global__ void reads_sums() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  if (!breaks) wgmma_wait<0>(C);
  SECOND(result = C[0]);
  wgmma_wait<0>(C);
}
RULE(SumsAreReadAfterTheirWait, reads_sums, 128, always,
     " reads at {2} registers of the product asked for at {1}, which nobody has waited for")

template <bool breaks>
__global__ void writes_sums() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  if (!breaks) wgmma_wait<0>(C);
  SECOND(C[0] = 0);
  wgmma_wait<0>(C);
}
RULE(SumsAreWrittenAfterTheirWait, writes_sums, 128, always,
     " writes at {2} registers of the product asked for at {1}, which nobody has waited for")

template <bool breaks>
__global__ void waits_too_weakly() {
  auto& s = begin();
  float C[32], D[32];
  wgmma_fence();
  multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b);
  wgmma_commit();
  FIRST(multiply_transposed<__half, 64, 64, 64>(D, s.a, s.b));
  wgmma_commit();
  wgmma_wait<breaks ? 1 : 0>(D);
  SECOND(result = D[0]);
  wgmma_wait<0>(C);
}
RULE(AWaitCoversTheGroupThatIsRead, waits_too_weakly, 128, always,
     " reads at {2} registers of the product asked for at {1}, which nobody has waited for")

template <bool breaks>
__global__ void never_fences() {
  auto& s = begin();
  float C[32];
  if (!breaks) wgmma_fence();
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(AFenceComesBeforeTheFirstProduct, never_fences, 128, always,
     ": the product at {1} is the first of thread *, which has not called wgmma_fence()")

template <bool breaks>
__global__ void adds_to_unfenced_sums() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b);
  wgmma_commit();
  wgmma_wait<0>(C);
  FIRST(C[0] = 1);
  if (!breaks) wgmma_fence();
  SECOND(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(AFenceLiesBetweenRegistersAndProducts, adds_to_unfenced_sums, 128, always,
     ": the product at {2} takes registers that thread * has written since its last "
     "wgmma_fence()")

template <bool breaks>
__global__ void takes_unfenced_A() {
  auto& s = begin();
  float C[32] = {};
  std::uint32_t A[1][4] = {};
  in_memory(A);
  wgmma_fence();
  FIRST(A[0][1] = 1);
  in_memory(A);
  if (!breaks) wgmma_fence();
  SECOND(multiply_add<__half, 16>(C, A, s.b));
  wgmma_commit();
  wgmma_wait<0>(C);
}
#ifndef __clang__  // which says nothing of writes to one element of a thread's own array
RULE(AFenceLiesBetweenAInRegistersAndProducts, takes_unfenced_A, 128, always,
     ": the product at {2} takes registers that thread * has written since its last "
     "wgmma_fence()")
#endif

// Reading them is allowed, and so is another product that takes them.
template <bool breaks>
__global__ void writes_A() {
  auto& s = begin();
  float C[32] = {};
  std::uint32_t A[1][4] = {};
  wgmma_fence();
  multiply_add<__half, 16>(C, A, s.b);
  wgmma_commit();
  FIRST(multiply_add<__half, 16>(C, A, s.b));
  wgmma_commit();
  result = float(A[0][1]);
  wgmma_wait<breaks ? 1 : 0>(C);
  SECOND(A[0][1] = 1);
  in_memory(A);
  wgmma_wait<0>(C);
}
#ifndef __clang__  // which says nothing of writes to one element of a thread's own array
RULE(AInRegistersIsWrittenAfterTheWait, writes_A, 128, always,
     " writes at {2} registers of the product asked for at {1}, which nobody has waited for")
#endif

template <bool breaks>
__global__ void leaves_a_product() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
  wgmma_commit();
  if (!breaks) wgmma_wait<0>(C);
}
RULE(ABlockDoesNotEndUnderAProduct, leaves_a_product, 128, late,
     ": the block ends while the product asked for at {1} is under way")

template <bool breaks>
__global__ void lanes_differ() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  const __half* const B = breaks && threadIdx.x % 32 == 5 ? s.a : s.b;
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, B));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(TheLanesOfAWarpAskForOneProduct, lanes_differ, 128, always,
     ": the lanes of a warp ask for different products at {1}")

template <bool breaks>
__global__ void warps_differ() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  const __half* const B = breaks && threadIdx.x / 32 == 2 ? s.a : s.b;
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, B));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(TheWarpsOfAWarpgroupAskForOneProduct, warps_differ, 128, always,
     ": the warps of a warpgroup ask for different products at {1} and at {1}")

template <bool breaks>
__global__ void reads_beyond_the_end() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  const __half* const B = breaks ? s.b + 1024 : s.b;
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, B));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(AnOperandLiesInSharedMemory, reads_beyond_the_end, 128, always,
     ": the product asked for at {1} reads byte 17408 of shared memory, which has 17408")

template <bool breaks>
__global__ void begins_at_an_odd_row() {
  auto& s = begin();
  float C[32];
  wgmma_fence();
  const __half* const A = breaks ? s.a + 64 : s.a;
  FIRST(multiply_transposed<__half, 64, 64, 64>(C, A, s.b));
  wgmma_commit();
  wgmma_wait<0>(C);
}
RULE(AnOperandBeginsWhereTheSwizzleDoes, begins_at_an_odd_row, 128, always,
     ": an operand of the product asked for at {1} begins at byte 128 of shared memory")

// ---- barriers in shared memory ----

template <bool breaks>
__global__ void never_initialises() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (!breaks) init(&s.full, 1);
  FIRST(arrive(&s.full));
}
RULE(ABarrierIsInitialised, never_initialises, 1, always,
     ": the barrier at {1} was never initialised")

template <bool breaks>
__global__ void does_not_fence_a_barrier() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    FIRST(init(&s.full, 1));
    if (!breaks) fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 1) SECOND(arrive(&s.full));
}
RULE(ABarriersInitialisationIsFenced, does_not_fence_a_barrier, 32, always,
     ": the barrier at {2} is used before the thread that initialised it at {1} has called "
     "fence_barriers()")

template <bool breaks>
__global__ void arrives_too_often() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 16);
    if (breaks) FIRST(arrive(&s.full));
    bulk_load(s.a, device_memory.data(), 16, &s.full);
  }
  wait(&s.full, 0);
}
RULE(NoMoreArriveThanABarrierCounts, arrives_too_often, 32, always,
     ": thread 0 arrives at {1}, but all arrivals of this phase have come, and only bytes are "
     "missing")

template <bool breaks>
__global__ void one_does_not_arrive() {
  auto& s = begin(32);
  if (!breaks || threadIdx.x != 7) arrive(&s.full);
  FIRST(wait(&s.full, 0));
}
RULE(AsManyArriveAsABarrierCounts, one_does_not_arrive, 32, always,
     " hangs: threads 0-31 wait for the end of a phase of parity 0 of the barrier at byte 16640 "
     "(phase 0 is under way, 1 of 32 arrivals and 0 bytes missing) at {1}")

template <bool breaks>
__global__ void leaves_a_phase() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    FIRST(init(&s.full, 2));
    fence_barriers();
    arrive(&s.full);
    if (!breaks) arrive(&s.full);
  }
}
RULE(ABlockDoesNotEndInTheMiddleOfAPhase, leaves_a_phase, 32, always,
     ": the block ends in the middle of phase 0 of the barrier initialised at {1}: 1 of 2 "
     "arrivals are missing")

template <bool breaks>
__global__ void looks_two_phases_late() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive(&s.full);
    if (breaks) arrive(&s.full);
  }
  __syncthreads();
  if (threadIdx.x == 1) FIRST(wait(&s.full, 0));
}
RULE(NobodyLooksTwoPhasesLate, looks_two_phases_late, 32, always,
     " hangs: threads 1 wait for phase 0 of a barrier whose phase 2 is under way: it looks two "
     "phases late, and by its parity waits for another one (PTX, mbarrier.try_wait) at {1}")

// Warp 1 has never waited for this barrier, but knows from warp 0 that three phases are over.
__global__ void counts_by_hearsay() {
  auto& s = begin();
  if (threadIdx.x < 32) {
    for (unsigned phase = 0; phase < 3; ++phase) {
      if (threadIdx.x == 0) arrive(&s.full);
      wait(&s.full, phase & 1);
    }
    sync(1, 64);
    __nanosleep(100);
    if (threadIdx.x == 0) arrive(&s.full);
  } else {
    sync(1, 64);
    wait(&s.full, 1);
  }
}
TEST(Rules, WhoKnowsFromOthersOfAPhaseDoesNotLookTwoPhasesLate) {
  EXPECT_EQ(told(counts_by_hearsay, 64, {Timing::late, 0}), "");
  EXPECT_EQ(told(counts_by_hearsay, 64, {Timing::early, 0}), "");
  for (unsigned seed = 1; seed <= seeds; ++seed)
    EXPECT_EQ(told(counts_by_hearsay, 64, {Timing::random, seed}), "") << "seed " << seed;
}

template <bool breaks>
__global__ void initialises_between_words() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  char* const place = reinterpret_cast<char*>(&s.full) + (breaks ? 4 : 0);
  FIRST(init(reinterpret_cast<Barrier*>(place), 1));
}
RULE(ABarrierIsAligned, initialises_between_words, 1, always,
     ": the barrier at {1} is not aligned to 8 bytes")

template <bool breaks>
__global__ void counts_nobody() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  FIRST(init(&s.full, breaks ? 0 : 1));
}
RULE(ABarrierCountsSomebody, counts_nobody, 1, always,
     ": the barrier at {1} is to count 0 arrivals")

template <bool breaks>
__global__ void waits_elsewhere() {
  auto& s = begin();
  Barrier mine = 0;
  if (threadIdx.x == 0) FIRST(arrive(breaks ? &mine : &s.full));
}
RULE(ABarrierLiesInSharedMemory, waits_elsewhere, 32, always,
     ": a barrier at {1} wants an address in shared memory")

// ---- clusters of two blocks ----

#define RULE_OF_CLUSTERS(name, kernel, times, sentence) \
  TEST(Rules, name) { test_rule(kernel<true>, kernel<false>, 32, times, sentence, nullptr, 2); }

template <bool breaks>
__global__ void arrives_before_the_other_is_ready() {
  auto& s = FA_DYNAMIC_SHARED(Shared);
  if (threadIdx.x == 0) {
    init(&s.full, 1);
    fence_barriers();
  }
  if (breaks)
    __syncthreads();
  else
    sync_cluster();
  if (threadIdx.x == 0) FIRST(arrive_at(&s.full, rank_in_cluster() ^ 1));
  wait(&s.full, 0);
  sync_cluster();
}
RULE_OF_CLUSTERS(BlocksMeetBeforeOneUsesTheOthersBarriers, arrives_before_the_other_is_ready,
                 always, "barrier at {1}*initialis")

template <bool breaks>
__global__ void ends_while_the_other_arrives() {
  auto& s = begin();
  sync_cluster();
  if (rank_in_cluster() == 0 && threadIdx.x == 0) FIRST(arrive_at(&s.full, 1));
  if (!breaks && rank_in_cluster() == 1) wait(&s.full, 0);
}
RULE_OF_CLUSTERS(ABlockWaitsForTheLastThatArrivesInIt, ends_while_the_other_arrives, always,
                 ": the block of rank 1 ends, and none of its threads has waited for the arrival "
                 "of thread 0 at {1}")

template <bool breaks>
__global__ void ends_while_a_copy_comes() {
  auto& s = begin();
  sync_cluster();
  if (threadIdx.x == 0) arrive_expecting(&s.full, 1024);
  sync_cluster();
  if (rank_in_cluster() == 0 && threadIdx.x == 0)
    FIRST(tma_load_to_all(s.a, map_of(8), &s.full, 0, 0, 0, 0, 3));
  if (!breaks || rank_in_cluster() == 0) wait(&s.full, 0);
}
RULE_OF_CLUSTERS(ABlockWaitsForWhatTheOtherCopiesToIt, ends_while_a_copy_comes, late,
                 "the copy asked for at {1}")

template <bool breaks>
__global__ void copies_where_the_other_reads() {
  auto& s = begin();
  sync_cluster();
  if (threadIdx.x == 0) arrive_expecting(&s.full, 1024);
  if (rank_in_cluster() == 1) {
    FIRST(result = float(s.a[threadIdx.x]));
    fence_async();
    __syncwarp();
  }
  if (!breaks) sync_cluster();
  if (rank_in_cluster() == 0 && threadIdx.x == 0)
    SECOND(tma_load_to_all(s.a, map_of(8), &s.full, 0, 0, 0, 0, 3));
  wait(&s.full, 0);
  sync_cluster();
}
RULE_OF_CLUSTERS(ACopyDoesNotOvertakeWhatTheOtherReads, copies_where_the_other_reads, late,
                 "the copy asked for at {2}")

template <bool breaks>
__global__ void arrives_in_no_block() {
  auto& s = begin();
  sync_cluster();
  if (threadIdx.x == 0) FIRST(arrive_at(&s.full, breaks ? 2 : rank_in_cluster()));
  sync_cluster();
}
RULE_OF_CLUSTERS(WhoArrivesNamesABlockOfTheCluster, arrives_in_no_block, always,
                 ": at {1} a thread names the block of rank 2 of a cluster of 2")

template <bool breaks>
__global__ void ends_while_the_other_reads() {
  auto& s = begin();
  s.a[threadIdx.x] = __half(1.f);
  sync_cluster();
  if (rank_in_cluster() == 0) FIRST(result = float(in_block(s.a, 1)[threadIdx.x]));
  if (!breaks) sync_cluster();
}
RULE_OF_CLUSTERS(ABlockWaitsForWhoReadsItsMemory, ends_while_the_other_reads, always,
                 "which is in its shared memory at {1}")

template <bool breaks>
__global__ void reads_what_the_other_is_writing() {
  auto& s = begin();
  SECOND(s.a[threadIdx.x] = __half(1.f));
  if (!breaks) sync_cluster();
  FIRST(result = float(in_block(s.a, rank_in_cluster() ^ 1)[threadIdx.x]));
  sync_cluster();
}
RULE_OF_CLUSTERS(WhatAnotherBlockWritesIsReadAfterABarrierOfTheCluster,
                 reads_what_the_other_is_writing, always, "{1}")

template <bool breaks>
__global__ void reads_no_block() {
  auto& s = begin();
  s.a[threadIdx.x] = __half(1.f);
  sync_cluster();
  FIRST(result = float(in_block(s.a, breaks ? 2 : 1)[threadIdx.x]));
  sync_cluster();
}
RULE_OF_CLUSTERS(WhoReadsNamesABlockOfTheCluster, reads_no_block, always,
                 ": at {1} a thread names the block of rank 2 of a cluster of 2")

template <bool breaks>
__global__ void copies_to_no_block() {
  auto& s = begin();
  sync_cluster();
  if (rank_in_cluster() == 0 && threadIdx.x == 0) {
    arrive_expecting(&s.full, 1024);
    FIRST(tma_load_to_all(s.a, map_of(8), &s.full, 0, 0, 0, 0, breaks ? 5 : 1));
    wait(&s.full, 0);
  }
  sync_cluster();
}
RULE_OF_CLUSTERS(ACopyNamesBlocksOfTheCluster, copies_to_no_block, always,
                 ": the copy at {1} names blocks 5 of a cluster of 2")

template <bool breaks>
__global__ void a_block_does_not_come() {
  if (breaks && rank_in_cluster() == 1 && threadIdx.x == 0) sync(1, 64);
  FIRST(sync_cluster());
}
RULE_OF_CLUSTERS(AllBlocksOfAClusterMeet, a_block_does_not_come, always,
                 "in sync_cluster(), 63 threads are there at {1}")

// ---- numbered barriers ----

template <bool breaks>
__global__ void counts_differ() {
  if (threadIdx.x < 32)
    FIRST(arrive(1, 64));
  else
    SECOND(sync(1, breaks ? 96 : 64));
}
RULE(ANumberedBarrierHasOneCount, counts_differ, 64, always, ": barrier 1 has ")

template <bool breaks>
__global__ void counts_half_warps() {
  FIRST(sync(1, breaks ? 48 : 32));
}
RULE(ANumberedBarrierIsOfWholeWarps, counts_half_warps, 32, always,
     ": at {1}: barrier 1 of 48 threads; there are barriers 0 to 15, of a multiple of 32 threads")

template <bool breaks>
__global__ void takes_a_number_too_large() {
  FIRST(sync(breaks ? 16 : 15, 32));
}
RULE(ThereAre16NumberedBarriers, takes_a_number_too_large, 32, always,
     ": at {1}: barrier 16 of 32 threads; there are barriers 0 to 15")

// All are named that wait, each with its place.
template <bool breaks>
__global__ void waits_for_nobody() {
  auto& s = begin();
  if (threadIdx.x < 32) FIRST(sync(1, breaks ? 64 : 32));
  if (threadIdx.x >= 64) {
    if (!breaks && threadIdx.x == 64) arrive(&s.full);
    SECOND(wait(&s.full, 0));
  }
  __syncthreads();
}
RULE(AHangIsToldWithAllWhoWait, waits_for_nobody, 96, always,
     "threads 64-95 wait for the end of a phase of parity 0 of the barrier at byte 16640 (phase "
     "0 is under way, 1 of 1 arrivals and 0 bytes missing) at {2}; threads 0-31 wait in barrier "
     "1, 32 of 64 threads are there at {1}; threads 32-63 wait in __syncthreads")

// ---- plain accesses, and who waits for whom ----

template <bool breaks>
__global__ void reads_before_the_barrier() {
  auto& s = begin();
  if (threadIdx.x == 3) FIRST(s.sums[0] = 1);
  if (!breaks) __syncthreads();
  if (threadIdx.x == 40) SECOND(result = s.sums[0]);
}
template <bool breaks>
__global__ void writes_before_the_barrier() {
  auto& s = begin();
  if (threadIdx.x == 40) FIRST(result = s.sums[0]);
  if (!breaks) __syncthreads();
  if (threadIdx.x == 3) SECOND(s.sums[0] = 1);
}
// Who comes first is the schedule's choice; that nothing orders the two is told in any case.
void test_race(Kernel breaks, Kernel keeps, int threads, const std::string& one,
               const std::string& other) {
  for (int i = 0; i < 10; ++i) {
    const Schedule times = i == 0   ? Schedule{Timing::late, 0}
                           : i == 1 ? Schedule{Timing::early, 0}
                                    : Schedule{Timing::random, unsigned(i)};
    const std::string text = told(breaks, threads, times);
    const std::string end = ", and nothing orders the two (PTX, memory consistency model)";
    const std::string way = ": " + one + " byte * of shared memory, which " + other + end;
    const std::string back = ": " + other + " byte * of shared memory, which " + one + end;
    EXPECT_TRUE(holds(text, with_places(way)) || holds(text, with_places(back)))
        << text << "\nwanted: " << with_places(way);
    EXPECT_EQ(told(keeps, threads, times), "");
  }
}
#define RACE(name, kernel, threads, one, other) \
  TEST(Races, name) { test_race(kernel<true>, kernel<false>, threads, one, other); }
RACE(ABarrierLiesBetweenAWriteAndARead, reads_before_the_barrier, 64, "thread 3 writes at {1}",
     "thread 40 reads at {2}")
RACE(ABarrierLiesBetweenAReadAndAWrite, writes_before_the_barrier, 64, "thread 3 writes at {2}",
     "thread 40 reads at {1}")

template <bool breaks>
__global__ void passes_within_a_warp() {
  auto& s = begin();
  FIRST(s.sums[threadIdx.x] = 1);
  if (!breaks) __syncwarp();
  if (threadIdx.x == 7) SECOND(result = s.sums[8]);
}
RACE(LanesWaitForEachOther, passes_within_a_warp, 32, "thread 8 writes at {1}",
     "thread 7 reads at {2}")

template <bool breaks>
__global__ void passes_by_a_barrier() {
  auto& s = begin();
  if (threadIdx.x == 5) {
    FIRST(s.sums[0] = 1);
    if (!breaks) arrive(&s.full);
  }
  if (threadIdx.x == 5 && breaks) arrive(&s.other);
  if (threadIdx.x == 6) {
    if (!breaks) wait(&s.full, 0);
    SECOND(result = s.sums[0]);
  }
}
RACE(WhoArrivesComesBeforeWhoWaits, passes_by_a_barrier, 32, "thread 5 writes at {1}",
     "thread 6 reads at {2}")

template <bool breaks>
__global__ void arrives_before_it_writes() {
  auto& s = begin();
  if (threadIdx.x < 32) {
    if (breaks) arrive(1, 64);
    if (threadIdx.x == 0) FIRST(s.sums[0] = 1);
    if (!breaks) arrive(1, 64);
  } else {
    sync(1, 64);
    if (threadIdx.x == 33) SECOND(result = s.sums[0]);
  }
}
RACE(WhoArrivesHasWritten, arrives_before_it_writes, 64, "thread 0 writes at {1}",
     "thread 33 reads at {2}")

// A buffer is given back before the product that reads it has ended.
template <bool breaks>
__global__ void frees_too_early() {
  auto& s = begin(128);
  if (threadIdx.x < 128) {
    float C[32];
    wgmma_fence();
    FIRST(multiply_transposed<__half, 64, 64, 64>(C, s.a, s.b));
    wgmma_commit();
    if (breaks) arrive(&s.full);
    wgmma_wait<0>(C);
    if (!breaks) arrive(&s.full);
  } else if (threadIdx.x == 128) {
    wait(&s.full, 0);
    arrive_expecting(&s.other, 8192);
    SECOND(tma_load(s.b, map_of(64), &s.other, 0, 0, 0, 0));
    wait(&s.other, 0);
  }
}
RULE(ABufferIsFreeWhenItsProductHasEnded, frees_too_early, 160, always,
     ": the copy asked for at {2} overwrites byte 8192 of shared memory, which what was asked for "
     "at {1} has yet to read")

// ---- registers, branches ----

template <bool breaks>
__global__ void gives_more_than_it_has() {
  if (breaks) FIRST(give_registers<240>());
  give_registers<24>();
}
RULE(NobodyGivesMoreRegistersThanItHas, gives_more_than_it_has, 384, always,
     ": setmaxnreg at {1} gives back, and keeps 240 registers where the warp has 168")

template <bool breaks>
__global__ void takes_what_nobody_gave() {
  if (threadIdx.x < 128 && !breaks) give_registers<24>();
  if (threadIdx.x >= 128) FIRST(take_registers<240>());
}
RULE(RegistersAreTakenAfterTheyWereGiven, takes_what_nobody_gave, 384, always,
     " hangs: threads 128-383 wait for 2304 registers, of which 1024 are free at {1}")

template <bool breaks>
__global__ void takes_an_odd_number() {
  FIRST(give_registers < breaks ? 100 : 104 > ());
}
RULE(RegistersComeInEights, takes_an_odd_number, 128, always,
     ": setmaxnreg at {1}: 100 registers; 24 to 256 are possible, a multiple of 8")

template <bool breaks>
__global__ void warps_give_differently() {
  if (!breaks || threadIdx.x < 64)
    FIRST(give_registers<104>());
  else
    SECOND(give_registers<96>());
}
RULE(AWarpgroupGivesRegistersTogether, warps_give_differently, 128, always,
     ": the threads of a warpgroup ask for ")

template <bool breaks>
__global__ void stops() {
  if (breaks) FIRST(stop());
}
RULE(StopIsNeverReached, stops, 32, always, ": the branch at {1}, which is never to be taken, was")

// ---- places and sizes ----

template <bool breaks>
__global__ void copies_to_an_odd_place() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 1024);
    FIRST(tma_load(s.a + (breaks ? 64 : 0), map_of(8), &s.full, 0, 0, 0, 0));
  }
  wait(&s.full, 0);
}
RULE(ABoxBeginsWhereTheSwizzleDoes, copies_to_an_odd_place, 32, always,
     ": the copy at {1}: byte 128 of shared memory is no multiple of 1024")

template <bool breaks>
__global__ void copies_beyond_the_end() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 8192);
    FIRST(tma_load(breaks ? s.b + 1024 : s.b, map_of(64), &s.full, 0, 0, 0, 0));
  }
  wait(&s.full, 0);
}
RULE(ABoxEndsInSharedMemory, copies_beyond_the_end, 32, always,
     ": the copy at {1} goes beyond the end of shared memory")

template <bool breaks>
__global__ void copies_into_registers() {
  auto& s = begin();
  alignas(1024) __half mine[512];
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 1024);
    FIRST(tma_load(breaks ? mine : s.a, map_of(8), &s.full, 0, 0, 0, 0));
  }
  wait(&s.full, 0);
}
RULE(ABoxGoesToSharedMemory, copies_into_registers, 32, always,
     ": the copy at {1} wants an address in shared memory")

template <bool breaks>
__global__ void asks_for_a_large_box() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 1024);
    FIRST(tma_load(s.a, map_of(breaks ? 257 : 8), &s.full, 0, 0, 0, 0));
  }
  wait(&s.full, 0);
}
RULE(ABoxHasUpTo256Rows, asks_for_a_large_box, 32, always,
     ": the copy at {1} wants a box of 257 rows; 1 to 256 are possible")

template <bool breaks>
__global__ void copies_from_an_odd_place() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    arrive_expecting(&s.full, 16);
    FIRST(bulk_load(s.a, device_memory.data() + (breaks ? 4 : 0), 16, &s.full));
  }
  wait(&s.full, 0);
}
RULE(APieceIsAligned, copies_from_an_odd_place, 32, always,
     ": the copy at {1}: address and bytes must be multiples of 16")

template <bool breaks>
__global__ void adds_half_a_chunk() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    FIRST(bulk_add(sums_memory.data(), s.sums, breaks ? 24 : 32));
    tma_commit();
    tma_wait_read();
  }
}
RULE(APieceIsOfWholeChunks, adds_half_a_chunk, 32, always,
     ": the addition at {1}: address and bytes must be multiples of 16")

template <bool breaks>
__global__ void loads_odd_rows() {
  auto& s = begin();
  std::uint32_t fragment[4];
  FIRST(ldmatrix(fragment, s.a + threadIdx.x * 64 + (breaks ? 4 : 0)));
  result = float(fragment[0]);
}
RULE(RowsOfLdmatrixAreAligned, loads_odd_rows, 32, always,
     ": ldmatrix at {1}: byte 8 of shared memory is no multiple of 16")

template <bool breaks>
__global__ void stores_odd_rows() {
  auto& s = begin();
  const std::uint32_t fragment[4] = {};
  FIRST(stmatrix(s.a + threadIdx.x * 64 + (breaks ? 4 : 0), fragment));
}
RULE(RowsOfStmatrixAreAligned, stores_odd_rows, 32, always,
     ": stmatrix at {1}: byte 8 of shared memory is no multiple of 16")

// ---- cp.async: no sentence, but NaN, or CUDA's error ----

template <int newest>
__global__ void cp_async_kernel() {
  auto& s = begin();
  cp_async(s.a + threadIdx.x * 8, device_memory.data() + threadIdx.x * 8, 16);
  cp_async_commit();
  cp_async(s.b + threadIdx.x * 8, device_memory.data() + threadIdx.x * 8, 16);
  cp_async_commit();
  cp_async_wait<newest>();
  result = float(s.a[threadIdx.x * 8]) + (newest < 1 ? float(s.b[threadIdx.x * 8]) : 0);
  cp_async_wait<0>();
}
TEST(Rules, WhatCpAsyncHasYetToBringIsNaN) {
  for (const Schedule times : {Schedule{Timing::late, 0}, Schedule{Timing::early, 0}}) {
    EXPECT_EQ(told(cp_async_kernel<2>, 32, times), "");
    EXPECT_TRUE(std::isnan(result)) << "not waited for";
    EXPECT_EQ(told(cp_async_kernel<1>, 32, times), "");
    EXPECT_EQ(result, 0) << "the first of two groups";
    EXPECT_EQ(told(cp_async_kernel<0>, 32, times), "");
    EXPECT_EQ(result, 0) << "both";
  }
}

template <bool breaks>
__global__ void cp_async_to_an_odd_place() {
  auto& s = begin();
  cp_async(s.a + threadIdx.x * 8 + (breaks ? 4 : 0), device_memory.data(), 16);
  cp_async_wait();
}
TEST(Rules, ACopyOf16BytesIsAligned) {
  const Schedule times{Timing::late, 0};
  EXPECT_THROW(told(cp_async_to_an_odd_place<true>, 16, times), CudaError);
  EXPECT_EQ(told(cp_async_to_an_odd_place<false>, 16, times), "");
}

// ---- kernels that overlap ----

__device__ CUtensorMap map_of_halves() {
  CUtensorMap map = map_of(64);
  map.data = reinterpret_cast<char*>(halves());
  return map;
}
// Of a kernel<breaks> launched early behind `before`.
#define RULE_BEHIND(before, name, kernel, does)                             \
  TEST(Rules, name) {                                                       \
    test_rule(kernel<true>, kernel<false>, 64, always,                      \
              ": thread * " does                                            \
              ": that one may run still, and no previous_kernel_is_done() " \
              "comes before (PTX, griddepcontrol)",                         \
              before);                                                      \
  }

__global__ void writes_and_lets_start() {
  if (threadIdx.x == 0) FIRST(floats()[2] = 1);
  next_kernel_may_start();
}
template <bool breaks>
__global__ void reads_what_was_written() {
  if (!breaks) previous_kernel_is_done();
  result = SECOND(floats()[2]);
  previous_kernel_is_done();
}
RULE_BEHIND(writes_and_lets_start, TheNextKernelWaitsBeforeItReads, reads_what_was_written,
            "reads device memory at {2} that the kernel before writes at {1}")

// One thread has waited; a barrier tells the others.
template <bool breaks>
__global__ void reads_while_another_waits() {
  if (threadIdx.x == 0) previous_kernel_is_done();
  if (!breaks) __syncthreads();
  if (threadIdx.x == 32) result = SECOND(floats()[2]);
}
RULE_BEHIND(writes_and_lets_start, OneThreadWaitsAndABarrierTellsTheOthers,
            reads_while_another_waits,
            "reads device memory at {2} that the kernel before writes at {1}")

template <bool breaks>
__global__ void loads_what_was_written() {
  auto& s = begin();
  if (threadIdx.x == 0) {
    if (!breaks) previous_kernel_is_done();
    arrive_expecting(&s.full, sizeof s.a);
    SECOND(tma_load(s.a, map_of_halves(), &s.full, 0, 0, 0, 0));
    wait(&s.full, 0);
    previous_kernel_is_done();
  }
}
RULE_BEHIND(writes_and_lets_start, TheNextKernelWaitsBeforeItLoads, loads_what_was_written,
            "reads device memory at {2} that the kernel before writes at {1}")

__global__ void stores_and_lets_start() {
  auto& s = begin();
  next_kernel_may_start();
  if (threadIdx.x == 0) {
    FIRST(tma_store(map_of_halves(), s.a, 0, 0, 0, 0));
    tma_commit();
    tma_wait_read();
  }
}
RULE_BEHIND(stores_and_lets_start, WhatACopyStoredIsWaitedFor, reads_what_was_written,
            "reads device memory at {2} that the kernel before writes at {1}")

__global__ void lets_start_and_reads() {
  next_kernel_may_start();
  if (threadIdx.x == 0) result = FIRST(floats()[2]);
}
template <bool breaks>
__global__ void writes_what_is_read() {
  if (threadIdx.x == 0) {
    if (!breaks) previous_kernel_is_done();
    SECOND(floats()[2] = 2);
    previous_kernel_is_done();
  }
}
RULE_BEHIND(lets_start_and_reads, TheNextKernelWaitsBeforeItWrites, writes_what_is_read,
            "writes device memory at {2} that the kernel before reads at {1}")

template <bool breaks>
__global__ void writes_elsewhere_and_leaves() {
  if (threadIdx.x == 0) floats()[3] = 2;
  if (!breaks) previous_kernel_is_done();
}
TEST(Rules, AKernelThatWasLaunchedEarlyWaitsBeforeItEnds) {
  test_rule(writes_elsewhere_and_leaves<true>, writes_elsewhere_and_leaves<false>, 64, always,
            "no thread of it has called previous_kernel_is_done(): what comes later in the stream "
            "waits for this kernel",
            lets_start_and_reads);
}

// What may be: the kernel before has read before it let this one start, never let it start, or adds
// as this one does; or somebody has waited between.
__global__ void reads_and_lets_start() {
  if (threadIdx.x == 0) result = floats()[2];
  __syncthreads();
  next_kernel_may_start();
}
__global__ void writes_and_lets_nobody_start() { floats()[2] = 1; }
__global__ void adds_and_lets_start() {
  next_kernel_may_start();
  atomicAdd(floats() + 2, 1.0f);
}
template <bool>
__global__ void adds() {
  atomicAdd(floats() + 2, 1.0f);
  previous_kernel_is_done();
}
TEST(Rules, KernelsThatMayOverlap) {
  const Schedule late{Timing::late, 0};
  EXPECT_EQ(told(writes_what_is_read<true>, 64, late, reads_and_lets_start), "");
  EXPECT_EQ(told(reads_what_was_written<true>, 64, late, writes_and_lets_nobody_start), "");
  EXPECT_EQ(told(adds<true>, 64, late, adds_and_lets_start), "");
  EXPECT_NE(told(reads_what_was_written<true>, 64, late, adds_and_lets_start), "");
  FA_LAUNCH(adds_and_lets_start, 1, 32, 0, nullptr);
  FA_CUDA_CHECK(cudaStreamSynchronize(nullptr));
  FA_LAUNCH_EARLY(reads_what_was_written<true>, 1, 32, 0, nullptr);
}

}  // namespace
}  // namespace fa::optimized
