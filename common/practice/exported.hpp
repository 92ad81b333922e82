// What a program of ./learn export has besides its kernel: random inputs, attention in fp64 on the
// CPU, row by row and without tiles, the comparison, and the time. It shares no code with a stage.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::exported {

using Numbers = std::vector<double>;

// ---- on the device ----

template <class T>
std::vector<T> rounded(const Numbers& numbers) {
  std::vector<T> result;
  for (double x : numbers) result.push_back(T(float(x)));
  return result;
}
template <class T>
DeviceMemory sent(const Numbers& numbers) {
  const std::vector<T> from = rounded<T>(numbers);
  DeviceMemory to(from.size() * sizeof(T));
  FA_CUDA_CHECK(cudaMemcpy(to.as<T>(), from.data(), to.bytes(), cudaMemcpyHostToDevice));
  return to;
}
template <class T>
Numbers fetched(const DeviceMemory& memory) {
  std::vector<T> to(memory.bytes() / sizeof(T));
  FA_CUDA_CHECK(cudaMemcpy(to.data(), memory.as<T>(), memory.bytes(), cudaMemcpyDeviceToHost));
  Numbers result;
  for (const T& x : to) result.push_back(double(float(x)));
  return result;
}
// All bytes 0xff, which is NaN in every type here: what a kernel forgets to write is seen.
inline DeviceMemory unwritten(std::size_t bytes) {
  DeviceMemory memory(bytes);
  FA_CUDA_CHECK(cudaMemset(memory.as<char>(), 0xff, bytes));
  return memory;
}

// ---- what is right ----

// A result, and for each of its numbers the sum of the sizes of what was added up: the error of a
// number that is nearly 0 because large terms cancel is measured by those terms.
struct Sum {
  Numbers value, size;

  explicit Sum(std::int64_t count) : value(std::size_t(count)), size(std::size_t(count)) {}
  void add(std::int64_t at, double term, double size_of_term) {
    value[std::size_t(at)] += term;
    size[std::size_t(at)] += size_of_term;
  }
};

struct Exact {
  Numbers Q, K, V, dO;  // as T holds them
  Sum O, LSE, D, dQ, dK, dV;

  explicit Exact(const Problem& p)
      : O(p.B * p.Hq * p.Nq * p.d),
        LSE(p.B * p.Hq * p.Nq),
        D(p.B * p.Hq * p.Nq),
        dQ(p.B * p.Hq * p.Nq * p.d),
        dK(p.B * p.Hkv * p.Nk * p.d),
        dV(p.B * p.Hkv * p.Nk * p.d) {}
};

// One row of queries, row i of head h: O and LSE, then what it adds to the gradients.
inline void compute_row(const Problem& p, Exact& x, std::int64_t b, std::int64_t h,
                        std::int64_t i) {
  const std::int64_t keys = visible_keys(p, b, i), row = (b * p.Hq + h) * p.Nq + i;
  const std::int64_t first = (b * p.Hkv + p.key_head(h)) * p.Nk;  // row of K and V
  const double scale = p.softmax_scale();
  const auto dot = [&](const Numbers& A, std::int64_t a, const Numbers& B, std::int64_t b) {
    double sum = 0;
    for (std::int64_t e = 0; e < p.d; ++e)
      sum += A[std::size_t(a * p.d + e)] * B[std::size_t(b * p.d + e)];
    return sum;
  };
  Numbers P;  // [keys]
  for (std::int64_t j = 0; j < keys; ++j) P.push_back(scale * dot(x.Q, row, x.K, first + j));
  const double m = *std::max_element(P.begin(), P.end());
  double l = 0;
  for (double& weight : P) l += weight = std::exp(weight - m);
  for (double& weight : P) weight /= l;
  x.LSE.add(row, m + std::log(l), std::max(1.0, std::abs(m + std::log(l))));
  for (std::int64_t j = 0; j < keys; ++j)
    for (std::int64_t e = 0; e < p.d; ++e) {
      const double term = P[std::size_t(j)] * x.V[std::size_t((first + j) * p.d + e)];
      x.O.add(row * p.d + e, term, std::abs(term));
    }

  double D = 0, size_of_D = 0;  // D_i = sum_e dO_ie O_ie
  for (std::int64_t e = row * p.d; e < (row + 1) * p.d; ++e) {
    const double term = x.dO[std::size_t(e)] * x.O.value[std::size_t(e)];
    D += term;
    size_of_D += std::abs(term);
  }
  x.D.add(row, D, size_of_D);
  for (std::int64_t j = 0; j < keys; ++j) {
    const double weight = P[std::size_t(j)], dP = dot(x.dO, row, x.V, first + j);
    const double dS = scale * weight * (dP - D);
    const double size_of_dS = scale * weight * (std::abs(dP) + size_of_D);
    for (std::int64_t e = 0; e < p.d; ++e) {
      const std::int64_t query = row * p.d + e, key = (first + j) * p.d + e;
      const double q = x.Q[std::size_t(query)], k = x.K[std::size_t(key)];
      const double term = weight * x.dO[std::size_t(query)];
      x.dQ.add(query, dS * k, size_of_dS * std::abs(k));
      x.dK.add(key, dS * q, size_of_dS * std::abs(q));
      x.dV.add(key, term, std::abs(term));
    }
  }
}

template <class T>
Exact exact(const Problem& p) {
  Exact x(p);
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](Numbers& numbers, std::size_t count) {
    for (std::size_t e = 0; e < count; ++e) numbers.push_back(double(float(T(normal(bits)))));
  };
  fill(x.Q, x.dQ.value.size());
  fill(x.K, x.dK.value.size());
  fill(x.V, x.dV.value.size());
  fill(x.dO, x.O.value.size());
  for (std::int64_t b = 0; b < p.B; ++b)
    for (std::int64_t h = 0; h < p.Hq; ++h)
      for (std::int64_t i = 0; i < p.Nq; ++i) compute_row(p, x, b, h, i);
  return x;
}

// ---- the comparison ----

// How far a number may be off, as a part of what was added up for it. bf16 has 8 bits: a rounding
// costs up to 2^-9. Rounded are weights, differences, results, and O, from which D is computed. In
// fp32 every sum is rounded a hundred times, and the hardware has exponentials of its own.
template <class T>
constexpr double rounding = std::is_same_v<T, float> ? 1e-5 : 4.0 / 512;

// Prints how far that number is off which is closest to what is allowed, or beyond. NaN is wrong.
inline bool compare(const char* what, const Numbers& got, const Sum& want, double part) {
  double worst = -1, error = 0, allowed = 0;
  for (std::size_t e = 0; e < got.size(); ++e) {
    const double off = std::abs(got[e] - want.value[e]), may = part * want.size[e] + 1e-7;
    const double ratio = std::isnan(off) ? INFINITY : off / may;
    if (ratio > worst) worst = ratio, error = off, allowed = may;
  }
  std::printf("  %-4s off by %.1e at its worst place, where %.1e is allowed%s\n", what, error,
              allowed, worst <= 1 ? "" : "   <- WRONG");
  return worst <= 1;
}

// Milliseconds of a launch, between two events: the median of eleven, after one that is not timed.
template <class Launch>
double milliseconds(const Launch& launch) {
  cudaEvent_t begin, end;
  FA_CUDA_CHECK(cudaEventCreate(&begin));
  FA_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int run = 0; run < 12; ++run) {
    float time = 0;
    FA_CUDA_CHECK(cudaEventRecord(begin));
    launch();
    FA_CUDA_CHECK(cudaEventRecord(end));
    FA_CUDA_CHECK(cudaEventSynchronize(end));
    FA_CUDA_CHECK(cudaEventElapsedTime(&time, begin, end));
    if (run > 0) times.push_back(time);
  }
  FA_CUDA_CHECK(cudaEventDestroy(begin));
  FA_CUDA_CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return double(times[times.size() / 2]);
}
inline void head(const char* name, const Problem& p, double ms) {
  std::printf("%s, %s: %.4f ms\n", name, p.causal == Causal::none ? "no mask" : "causal", ms);
}

// ---- a pass ----

// launch(Forward<T>)
template <class T, class Launch>
bool check_forward(const char* name, const Problem& p, const Launch& launch) {
  const Exact x = exact<T>(p);
  const DeviceMemory Q = sent<T>(x.Q), K = sent<T>(x.K), V = sent<T>(x.V);
  const DeviceMemory O = unwritten(Q.bytes()), LSE = unwritten(x.LSE.value.size() * sizeof(float));
  const auto view = [&](const DeviceMemory& memory, std::int64_t H, std::int64_t N) {
    return contiguous(memory.as<T>(), H, N, p.d);
  };
  const Forward<T> t{view(Q, p.Hq, p.Nq), view(K, p.Hkv, p.Nk), view(V, p.Hkv, p.Nk),
                     view(O, p.Hq, p.Nq), LSE.as<float>()};
  head(name, p, milliseconds([&] { launch(t); }));
  const bool right = compare("O", fetched<T>(O), x.O, rounding<T>);
  return compare("LSE", fetched<float>(LSE), x.LSE, rounding<float>) && right;
}

// launch(Backward<T>, D). O, LSE and, for those who want it, D come from the reference. A launch
// may compute a part: one that is not asked for is not looked at.
struct Parts {
  bool dQ, dK_and_dV, D;
};
template <class T, class Launch>
bool check_backward(const char* name, const Problem& p, Parts parts, const Launch& launch) {
  const Exact x = exact<T>(p);
  const DeviceMemory Q = sent<T>(x.Q), K = sent<T>(x.K), V = sent<T>(x.V), dO = sent<T>(x.dO);
  const DeviceMemory O = sent<T>(x.O.value), LSE = sent<float>(x.LSE.value);
  const DeviceMemory D = parts.D ? unwritten(LSE.bytes()) : sent<float>(x.D.value);
  const DeviceMemory dQ = unwritten(Q.bytes()), dK = unwritten(K.bytes()),
                     dV = unwritten(K.bytes());
  const auto view = [&](const DeviceMemory& memory, std::int64_t H, std::int64_t N) {
    return contiguous(memory.as<T>(), H, N, p.d);
  };
  const Backward<T> t{view(Q, p.Hq, p.Nq),  view(K, p.Hkv, p.Nk),  view(V, p.Hkv, p.Nk),
                      view(O, p.Hq, p.Nq),  view(dO, p.Hq, p.Nq),  LSE.as<float>(),
                      view(dQ, p.Hq, p.Nq), view(dK, p.Hkv, p.Nk), view(dV, p.Hkv, p.Nk)};
  head(name, p, milliseconds([&] { launch(t, D.as<float>()); }));
  bool right = true;
  const auto look = [&](bool wanted, const char* what, const Numbers& got, const Sum& want,
                        double part) { right &= !wanted || compare(what, got, want, part); };
  look(parts.D, "D", fetched<float>(D), x.D, rounding<float>);
  look(parts.dQ, "dQ", fetched<T>(dQ), x.dQ, rounding<T>);
  look(parts.dK_and_dV, "dK", fetched<T>(dK), x.dK, rounding<T>);
  look(parts.dK_and_dV, "dV", fetched<T>(dV), x.dV, rounding<T>);
  return right;
}

// ---- the program ----

// Why a kernel that was compiled for this compute capability (80: and later; 90: alone) cannot run
// here; empty if it can.
inline std::string cannot_run(int wanted) {
  int major = 0, minor = 0;
  if (const cudaError_t code = cudaFree(nullptr); code != cudaSuccess)  // which looks for a GPU
    return std::string("no usable GPU: ") + cudaGetErrorString(code);
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  FA_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  const int here = 10 * major + minor;
  if (wanted == 90 ? here == 90 : here >= wanted) return {};
  return "this program is for compute capability " + capability(wanted) +
         (wanted == 90 ? " alone" : " and later") + ", this GPU is " + capability(here);
}

// check(problem) for both masks, with as many queries and keys as the command line says.
template <class Check>
int run(int argc, char** argv, int wanted, std::int64_t d, const Check& check) try {
  Problem p;
  p.Hq = 4;
  p.Hkv = 2;
  p.Nq = p.Nk = argc == 1 ? 512 : std::atoi(argv[1]);
  p.d = d;
  if (argc > 2 || p.Nq < 1 || p.Nq > 16384) {
    std::fprintf(stderr, "usage: %s [N], with N from 1 to 16384\n", argv[0]);
    return 2;
  }
  if (const std::string why = cannot_run(wanted); !why.empty()) {
    std::fprintf(stderr, "%s: %s\n", argv[0], why.c_str());
    return 3;
  }
  std::printf("B = 1, Hq = 4, Hkv = 2, N = %d, d = %d\n", int(p.Nq), int(p.d));
  bool right = true;
  for (Causal causal : {Causal::none, Causal::top_left}) {
    p.causal = causal;
    right &= check(p);
  }
  std::printf(right ? "right\n" : "WRONG\n");
  return right ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
  return 1;
}

}  // namespace fa::exported
