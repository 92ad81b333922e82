#include "common/measure/gpu_bench.hpp"

#include <benchmark/benchmark.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <sstream>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/judge/compare.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/oracle.hpp"
#include "common/measure/bench_rows.hpp"
#include "common/measure/flops.hpp"
#include "common/measure/gpu_roof.hpp"

namespace fa::bench {

using namespace fa::judge;
using Int = std::int64_t;

namespace {

constexpr std::size_t past_any_cache = std::size_t(256) << 20;

template <class T>
const char* const dtype_name = "f32";
template <>
const char* const dtype_name<__half> = "f16";
template <>
const char* const dtype_name<__nv_bfloat16> = "bf16";

// The host's name of the type, by which tolerances are found.
template <class T>
using HostType = std::conditional_t<
    std::is_same_v<T, __half>, Eigen::half,
    std::conditional_t<std::is_same_v<T, __nv_bfloat16>, Eigen::bfloat16, float>>;

template <class T>
double roof_of() {
  if constexpr (std::is_same_v<T, float>)
    return gpu_fma_peak();
  else
    return gpu_matmul_peak<T>();
}

// How far O may be off: for half types twice what the rounding of the weights and of O explains,
// element by element, and, what errors that all point one way do not pass, so much in relative L2.
template <class T>
double o_tolerance(double A, double PV, double O) {
  constexpr double eps = std::is_same_v<T, float>    ? 0
                         : std::is_same_v<T, __half> ? 0x1p-10
                                                     : 0x1p-7;
  return forward_tolerance<float>(A, PV) + eps * (PV + std::fabs(O));
}
template <class T>
constexpr double most_relative_l2 = std::is_same_v<T, float>
                                        ? std::numeric_limits<double>::infinity()
                                    : std::is_same_v<T, __half> ? 1.5e-3
                                                                : 1e-2;

// Device memory of one tensor: as many copies of it as keep the cache from helping.
template <class T>
struct Tensor {
  DeviceMemory memory;
  Int H = 0, N = 0, d = 0, elements = 0;

  Tensor() = default;
  Tensor(Int B, Int H_, Int N_, Int d_, Int copies, std::uint64_t seed)
      : H(H_), N(N_), d(d_), elements(B * H_ * N_ * d_) {
    memory = DeviceMemory(std::size_t(elements * copies) * sizeof(T));
    if (seed) gpu_fill(memory.as<T>(), elements * copies, seed);
  }
  View<T> view(Int copy) const { return contiguous(flat(copy), H, N, d); }
  T* flat(Int copy) const { return memory.as<T>() + copy * elements; }
  // NaN into some rows of one head of the first copy. So little of it leaves the caches as the runs
  // before have left them.
  void poison(Int b, Int h, const std::vector<Int>& rows) const {
    for (Int i : rows)
      FA_CUDA_CHECK(cudaMemsetAsync(view(0).at(b, h, i), 0xff, std::size_t(d) * sizeof(T)));
  }
  // One head of the first copy, in double.
  Array head(Int b, Int h) const {
    std::vector<T> x(std::size_t(N * d));
    FA_CUDA_CHECK(
        cudaMemcpy(x.data(), view(0).at(b, h), x.size() * sizeof(T), cudaMemcpyDeviceToHost));
    Array a(1, 1, N, d);
    std::transform(x.begin(), x.end(), a.data.begin(), [](T e) { return double(float(e)); });
    return a;
  }
};

Int copies_for(const Problem& p, std::size_t element_bytes) {
  const double bytes =
      double(element_bytes) * double(p.d) * double(p.B) * double(p.Hq * p.Nq + p.Hkv * p.Nk);
  return std::max<Int>(1, Int(std::ceil(double(past_any_cache) / bytes)));
}

template <class T>
struct Prepared {
  Problem p;
  Int copies;
  Tensor<T> Q, K, V, O;
  Tensor<float> LSE;
  DeviceMemory scratch;

  Prepared(const Problem& problem, std::size_t scratch_bytes, Int wanted_copies = 0)
      : p(problem),
        copies(wanted_copies ? wanted_copies : copies_for(p, sizeof(T))),
        Q(p.B, p.Hq, p.Nq, p.d, copies, 11),
        K(p.B, p.Hkv, p.Nk, p.d, copies, 12),
        V(p.B, p.Hkv, p.Nk, p.d, copies, 13),
        O(p.B, p.Hq, p.Nq, p.d, copies, 0),
        LSE(p.B, p.Hq, p.Nq, 1, copies, 0),
        scratch(scratch_bytes) {}

  Forward<T> tensors(Int copy) const {
    return {Q.view(copy), K.view(copy), V.view(copy), O.view(copy), LSE.flat(copy)};
  }
  // The first and the last head, rows at the ends and in between.
  template <class Check>
  void sampled_heads(Check check) const {
    check(Int(0), Int(0));
    if (p.B * p.Hq > 1) check(p.B - 1, p.Hq - 1);
  }
  std::vector<Int> rows(Int N) const {
    std::vector<Int> rows = {0, N / 3, N / 2 + 1, N - 1};
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }
  // What verdict() looks at.
  void poison() const {
    sampled_heads([&](Int b, Int h) {
      O.poison(b, h, rows(p.Nq));
      LSE.poison(b, h, rows(p.Nq));
    });
  }
  Problem one_head() const {
    Problem one = p;
    one.B = one.Hq = one.Hkv = 1;
    return one;
  }
  std::string verdict() const {
    Comparison o("O"), lse("LSE");
    double error2 = 0, want2 = 0;
    sampled_heads([&](Int b, Int h) {
      const ForwardOracle want = oracle_rows(one_head(), Q.head(b, h), K.head(b, p.key_head(h)),
                                             V.head(b, p.key_head(h)), rows(p.Nq));
      const Array got = O.head(b, h), got_lse = LSE.head(b, h);
      for (Int r = 0; r < want.O.N; ++r) {
        const Int i = want.rows[std::size_t(r)];
        for (Int x = 0; x < p.d; ++x) {
          const double g = got.at(0, 0, i, x), w = want.O.at(0, 0, r, x);
          o.add(b, h, i, x, g, w, o_tolerance<T>(want.A.at(0, 0, r), want.PV.at(0, 0, r, x), w));
          error2 += (g - w) * (g - w);
          want2 += w * w;
        }
        lse.add(b, h, i, 0, got_lse.at(0, 0, i), want.LSE.at(0, 0, r),
                lse_tolerance<float>(want.LSE.at(0, 0, r)));
      }
    });
    const double relative = std::sqrt(error2 / want2);
    std::string text = o.report() + lse.report();
    if (!(relative <= most_relative_l2<T>)&&text.empty())
      text = "O: relative L2 " + std::to_string(relative);
    return text;
  }
};

template <class T>
struct PreparedBackward : Prepared<T> {
  using Base = Prepared<T>;
  using Base::p, Base::copies, Base::Q, Base::K, Base::V, Base::O, Base::LSE;
  Tensor<T> dO, dQ, dK, dV;

  PreparedBackward(const Problem& problem, std::size_t scratch_bytes, Int wanted_copies)
      : Base(problem, scratch_bytes, wanted_copies),
        dO(p.B, p.Hq, p.Nq, p.d, copies, 14),
        dQ(p.B, p.Hq, p.Nq, p.d, copies, 0),
        dK(p.B, p.Hkv, p.Nk, p.d, copies, 0),
        dV(p.B, p.Hkv, p.Nk, p.d, copies, 0) {}

  Backward<T> gradients(Int copy) const {
    return {Q.view(copy),   K.view(copy),  V.view(copy),  O.view(copy), dO.view(copy),
            LSE.flat(copy), dQ.view(copy), dK.view(copy), dV.view(copy)};
  }
  // What gradient_verdict() looks at.
  void poison_gradients() const {
    this->sampled_heads([&](Int b, Int h) {
      dQ.poison(b, h, this->rows(p.Nq));
      dK.poison(b, p.key_head(h), this->rows(p.Nk));
      dV.poison(b, p.key_head(h), this->rows(p.Nk));
    });
  }
  // Sampled rows of the gradients, from the forward's own O and LSE, which verdict() has judged.
  std::string gradient_verdict() const {
    if (p.Hq != p.Hkv) return "the sampled gradients are for Hq = Hkv";
    std::string text;
    this->sampled_heads([&](Int b, Int h) {
      const BackwardInputs in{Q.head(b, h), K.head(b, h),  V.head(b, h),
                              O.head(b, h), dO.head(b, h), LSE.head(b, h)};
      const BackwardRowsOracle want = oracle_backward_rows(
          this->one_head(), in, this->rows(p.Nq), this->rows(p.Nk), rounding<HostType<T>>());
      const auto compare = [&](const char* name, const Array& got, const GradientRows& w) {
        Comparison c(name);
        const double largest = w.largest();
        w.value.for_each([&](auto, auto, auto r, auto x) {
          const Int i = w.rows[std::size_t(r)];
          const double fp32 = gradient_tolerance<float>(want.A, largest, w.noise.at(0, 0, r));
          const double value = w.value.at(0, 0, r, x);
          const Tolerance t = tolerance<HostType<T>>(fp32, w.e, value, 0, 0, r, x);
          c.add(b, h, i, x, got.at(0, 0, i, x), value, t.element, t.usual);
        });
        text += c.report();
      };
      compare("dQ", dQ.head(b, h), want.dQ);
      compare("dK", dK.head(b, h), want.dK);
      compare("dV", dV.head(b, h), want.dV);
    });
    return text;
  }
};

template <class T>
std::string row_name(const std::string& prefix, const Problem& p) {
  std::ostringstream name;
  name << prefix << "/N:" << p.Nk << "/d:" << p.d
       << "/causal:" << (p.causal == Causal::none ? 0 : 1) << "/" << dtype_name<T>;
  return name.str();
}

// Only the newest row's memory is held: long sequences need most of the card. A row is called
// several times in a row until its sample is long enough, and finds its tensors ready.
struct {
  std::string name;
  std::shared_ptr<void> tensors;
} newest;

// make() unless the newest row has this name; the second value says whether it was made.
template <class Made, class Make>
std::pair<std::shared_ptr<Made>, bool> prepared(const std::string& name, Make make) {
  const bool fresh = newest.name != name;
  if (fresh) {
    newest = {};
    newest.tensors = make();
    newest.name = name;
  }
  return {std::static_pointer_cast<Made>(newest.tensors), fresh};
}

// poison(), run(copy), verdict(): measured by events around every single run.
template <class T, class Poison, class Once, class Verdict>
void measure(benchmark::State& state, bool fresh, double flops, std::size_t extra_bytes, Int copies,
             Poison poison, Once once, Verdict verdict) {
  if (fresh) {
    poison();
    for (Int copy = 0; copy < copies; ++copy) once(copy);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    const std::string before = verdict();
    if (!before.empty()) return state.SkipWithError(("wrong before timing: " + before).c_str());
  }
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  double roof = roof_of<T>();
  Int copy = 0;
  for (Int n = 0; n < copies; ++n) once(n);  // clocks and caches as they are from run to run
  poison();  // what verdict() finds in the first copy is of the timed runs, which begin with it
  for (auto _ : state) {
    FA_CUDA_CHECK(cudaEventRecord(begin));
    once(copy);
    FA_CUDA_CHECK(cudaEventRecord(end));
    FA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    FA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    state.SetIterationTime(1e-3 * double(ms));
    copy = (copy + 1) % copies;
  }
  roof = (roof + roof_of<T>()) / 2;
  FA_CUDA_CHECK(cudaEventDestroy(begin));
  FA_CUDA_CHECK(cudaEventDestroy(end));
  const std::string after = verdict();
  if (!after.empty()) return state.SkipWithError(("wrong after timing: " + after).c_str());
  state.counters["flops"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["roof"] = roof;
  state.counters["extra_bytes"] = double(extra_bytes);
}

}  // namespace

void needs_gpu() {
  const std::string why_not = no_gpu();
  if (!why_not.empty()) {
    std::printf("skipped: %s\n", why_not.c_str());
    std::exit(77);
  }
  cudaDeviceProp device;
  FA_CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  std::string machine;
  for (char c : std::string(device.name))
    machine += std::isalnum(static_cast<unsigned char>(c)) ? char(std::tolower(c)) : '-';
  if (machine.rfind("nvidia-", 0) != 0) machine = "nvidia-" + machine;
  int driver = 0, runtime = 0;
  FA_CUDA_CHECK(cudaDriverGetVersion(&driver));
  FA_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  describe_machine(machine, device.name,
                   "sm_" + std::to_string(device.major) + std::to_string(device.minor),
                   device.multiProcessorCount);
  add_context("memory_bytes", std::to_string(device.totalGlobalMem));
  add_context("cuda_driver", std::to_string(driver));
  add_context("cuda_runtime", std::to_string(runtime));
}

template <class T>
void gpu_forward(const std::string& prefix, const Problem& p, std::size_t scratch_bytes,
                 const std::type_identity_t<GpuForward<T>>& f) {
  const std::string name = row_name<T>(prefix, p);
  add_row(name,
          [=](benchmark::State& state) {
            const auto [made, fresh] = prepared<Prepared<T>>(
                name, [&] { return std::make_shared<Prepared<T>>(p, scratch_bytes); });
            Prepared<T>& x = *made;
            measure<T>(
                state, fresh, forward_flops(p), scratch_bytes, x.copies, [&] { x.poison(); },
                [&](Int copy) { f(p, x.tensors(copy), x.scratch, nullptr); },
                [&] { return x.verdict(); });
          })
      ->UseManualTime()
      ->MinTime(sample_seconds());
}
template void gpu_forward<float>(const std::string&, const Problem&, std::size_t,
                                 const GpuForward<float>&);
template void gpu_forward<__half>(const std::string&, const Problem&, std::size_t,
                                  const GpuForward<__half>&);
template void gpu_forward<__nv_bfloat16>(const std::string&, const Problem&, std::size_t,
                                         const GpuForward<__nv_bfloat16>&);

template <class T>
void gpu_backward(const std::string& prefix, const Problem& p, const BackwardRow& row,
                  const std::type_identity_t<GpuForward<T>>& forward,
                  const std::type_identity_t<GpuBackward<T>>& f) {
  const std::string name = row_name<T>(prefix, p);
  add_row(name,
          [=](benchmark::State& state) {
            const auto [made, fresh] = prepared<PreparedBackward<T>>(name, [&] {
              return std::make_shared<PreparedBackward<T>>(p, row.scratch_bytes,
                                                           row.one_copy ? 1 : 0);
            });
            PreparedBackward<T>& x = *made;
            const Scratch scratch = x.scratch;
            if (fresh) {
              for (Int copy = 0; copy < x.copies; ++copy)
                forward(p, x.tensors(copy), scratch, nullptr);
              FA_CUDA_CHECK(cudaDeviceSynchronize());
              const std::string wrong = x.verdict();
              if (!wrong.empty()) return state.SkipWithError(("the forward: " + wrong).c_str());
            }
            measure<T>(
                state, fresh, (row.with_forward ? forward_flops(p) : 0) + backward_flops(p),
                row.scratch_bytes, x.copies, [&] { x.poison_gradients(); },
                [&](Int copy) {
                  if (row.with_forward) forward(p, x.tensors(copy), scratch, nullptr);
                  f(p, x.gradients(copy), scratch, nullptr);
                },
                [&] { return x.gradient_verdict(); });
          })
      ->UseManualTime()
      ->MinTime(sample_seconds());
}
template void gpu_backward<float>(const std::string&, const Problem&, const BackwardRow&,
                                  const GpuForward<float>&, const GpuBackward<float>&);
template void gpu_backward<__half>(const std::string&, const Problem&, const BackwardRow&,
                                   const GpuForward<__half>&, const GpuBackward<__half>&);
template void gpu_backward<__nv_bfloat16>(const std::string&, const Problem&, const BackwardRow&,
                                          const GpuForward<__nv_bfloat16>&,
                                          const GpuBackward<__nv_bfloat16>&);

}  // namespace fa::bench
