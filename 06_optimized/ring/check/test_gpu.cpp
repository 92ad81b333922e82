// Tests of the ring with stage 06's kernels, in fp16 and bf16. All ranks are threads and share one
// GPU, or the emulator; several GPUs need NCCL, and program.cu checks itself.
#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "06_optimized/ring/check/parts.hpp"
#include "06_optimized/ring/gpu.hpp"
#include "06_optimized/ring/threads.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using namespace fa::ring;
using half = Eigen::half;
using bf16 = Eigen::bfloat16;

using Int = std::int64_t;
constexpr std::chrono::milliseconds patience(60000);

template <class T>
using Device = std::conditional_t<std::is_same_v<T, half>, __half, __nv_bfloat16>;

// The same numbers by CUDA's name of their type.
template <class To, class From>
View<To> as(const View<From>& v) {
  static_assert(sizeof(To) == sizeof(From));
  return {reinterpret_cast<To*>(v.data), v.batch, v.head, v.row};
}

// All ranks use the default stream: what one has asked for before it sends is done before the
// receiver's copy, which is asked for later.
void copy_on_gpu(void* to, const void* from, std::size_t bytes) {
  FA_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
}

// An engine whose memory is NaN: what is read before it is written shows. compute-sanitizer's
// initcheck cannot tell: it does not see what the copy engine writes, as a part's O.
constexpr std::size_t enough = 64, bytes_of_each = 1 << 17;  // places; none asks for more bytes
template <class T>
std::unique_ptr<Engine<T>> engine_of(bool deterministic) {
  auto engine = gpu_engine<T>(nullptr, deterministic);
  for (std::size_t n = 0; n < enough; ++n)
    FA_CUDA_CHECK(cudaMemset(engine->take(bytes_of_each), 0xff, bytes_of_each));
  engine->take_back();
  return engine;
}
template <class T>
void expect_no_more(const Engine<T>& engine) {
  EXPECT_EQ(engine.held(), enough * bytes_of_each);
}

std::string joined(const std::vector<std::string>& ends) {
  std::string text;
  for (const std::string& end : ends) text += end.empty() ? "" : end + "\n";
  return text;
}

template <class T>
std::string run_forward(ForwardCase<T>& c, const Problem& p, int ranks,
                        const ring::Options& options) {
  using D = Device<T>;
  const auto ends = on_threads(
      ranks, patience,
      [&](Communicator& comm) {
        ForwardParts<T> x(p, ranks, comm.rank(), options.order);
        x.Q.take(c.Q), x.K.take(c.K), x.V.take(c.V);
        const DeviceCopy copy(
            {x.Q.storage(), x.K.storage(), x.V.storage(), x.O.storage(), x.L.storage()});
        const Forward<D> t{as<const D>(copy.at(x.Q.view)), as<const D>(copy.at(x.K.view)),
                           as<const D>(copy.at(x.V.view)), as<D>(copy.at(x.O.view)),
                           copy.at(x.L.data.data())};
        const auto engine = engine_of<D>(false);
        ring::forward(comm, *engine, p, t, options);
        expect_no_more(*engine);
        FA_CUDA_CHECK(cudaDeviceSynchronize());
        copy.copy_back();
        x.O.give(c.O), x.L.give(c.LSE);
      },
      copy_on_gpu);
  return joined(ends);
}
template <class T>
std::string forward_verdict(const Spec& spec, int ranks, const ring::Options& options) {
  ForwardCase<T> c(spec, true);
  const std::string ends = run_forward(c, c.call().p, ranks, options);
  return ends.empty() ? c.verdict() : ends;
}

template <class T>
std::string backward_verdict(const Spec& spec, int ranks, const ring::Options& options,
                             std::vector<Int>* sent = nullptr) {
  using D = Device<T>;
  BackwardCase<T> c(spec);
  const Problem p = c.call().p;
  const auto ends = on_threads(
      ranks, patience,
      [&](Communicator& comm) {
        ForwardParts<T> x(p, ranks, comm.rank(), options.order);
        ForwardParts<T> y(p, ranks, comm.rank(), options.order);
        x.Q.take(c.Q), x.K.take(c.K), x.V.take(c.V), x.O.take(c.O), x.L.take(c.LSE);
        y.O.take(c.dO);
        const DeviceCopy copy({x.Q.storage(), x.K.storage(), x.V.storage(), x.O.storage(),
                               x.L.storage(), y.Q.storage(), y.K.storage(), y.V.storage(),
                               y.O.storage()});
        const auto in = [&](Part<T>& part) { return as<const D>(copy.at(part.view)); };
        const auto out = [&](Part<T>& part) { return as<D>(copy.at(part.view)); };
        const Backward<D> t{in(x.Q),  in(x.K),  in(x.V), in(x.O), in(y.O), copy.at(x.L.data.data()),
                            out(y.Q), out(y.K), out(y.V)};
        const auto engine = engine_of<D>(true);
        ring::backward(comm, *engine, p, t, options);
        expect_no_more(*engine);
        if (sent) sent->at(std::size_t(comm.rank())) = comm.bytes_sent;
        FA_CUDA_CHECK(cudaDeviceSynchronize());
        copy.copy_back();
        y.Q.give(c.dQ), y.K.give(c.dK), y.V.give(c.dV);
      },
      copy_on_gpu);
  return joined(ends).empty() ? c.verdict() : joined(ends);
}

std::vector<Spec> specs() {
  return {
      sized(1, 2, 1, 70, 70, 16, Causal::top_left), sized(2, 2, 2, 41, 77, 8, Causal::bottom_right),
      sized(2, 1, 1, 50, 66, 24, Causal::none, {0, 41}), sized(1, 1, 1, 3, 2, 8, Causal::top_left)};
}

using OnOneGpu = GpuTest;

TEST_F(OnOneGpu, Forward) {
  for (const Spec& spec : specs())
    for (const int P : {1, 2, 3}) {
      EXPECT_EQ(forward_verdict<half>(spec, P, {}), "") << spec.name() << ", " << P << " ranks";
      EXPECT_EQ(forward_verdict<bf16>(spec, P, {}), "") << spec.name() << ", " << P << " ranks";
    }
}
TEST_F(OnOneGpu, Backward) {
  for (const Spec& spec : specs())
    for (const int P : {1, 2, 3}) {
      EXPECT_EQ(backward_verdict<half>(spec, P, {}), "") << spec.name() << ", " << P << " ranks";
      EXPECT_EQ(backward_verdict<bf16>(spec, P, {}), "") << spec.name() << ", " << P << " ranks";
    }
}
TEST_F(OnOneGpu, NaNGoesWhereItIsSeen) {
  for (const int P : {1, 2, 3}) {
    ForwardCase<bf16> c(with_NaN(), true);
    const Problem p = c.call().p;
    put_NaN(c);
    EXPECT_EQ(run_forward(c, p, P, {}), "");
    EXPECT_EQ(where_NaN_is_wrong(c), "") << P << " ranks";
  }
}
// The page's count, where a number's bytes and a sum's differ.
TEST_F(OnOneGpu, BytesOfTheBackward) {
  const Int P = 3, N = 36, d = 8, Hkv = 2, keys = Hkv * N / P * d, w = 2;
  std::vector<Int> sent(P);
  EXPECT_EQ(backward_verdict<bf16>(sized(1, 2, Hkv, N, N, d), int(P), {}, &sent), "");
  for (const Int bytes : sent) EXPECT_EQ(bytes, P * 2 * keys * w + (P - 1) * 8 * keys);
}
TEST_F(OnOneGpu, Rivals) {
  const Spec spec = sized(1, 4, 2, 45, 61, 16, Causal::bottom_right);
  for (const Method method : {Method::gather, Method::heads}) {
    EXPECT_EQ(forward_verdict<bf16>(spec, 2, {method}), "") << name(method);
    EXPECT_EQ(backward_verdict<bf16>(spec, 2, {method}), "") << name(method);
  }
}

}  // namespace
