// The x-ray: what a kernel does to memory, line by line, counted on the CPU (docs/xray.md).
//
// A program of `./learn xray` includes a kernel's file, makes the tensors and launches it. Built
// with xray.flags it runs on the emulator, and xray.cpp counts; built by nvcc it does nothing but
// launch, so that a profiler can count the same accesses on a GPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "common/core/cuda.hpp"
#include "common/core/problem.hpp"

namespace fa::xray {

#ifdef FA_EMULATED
// Before the first launch. `program`: its path, for the names and lines in it.
void begin(const char* program);
// A tensor in device memory, rows of `cols` numbers without gaps, the numbers from `first` on.
void tensor(const char* name, const void* data, std::size_t bytes, std::int64_t rows,
            std::int64_t cols, std::uint32_t first);
// What was counted since the last time is not shown, and counts so many times for a tile of 128
// queries and 128 keys.
void add_to_tile(double times);
// `picture`: an SVG file to write, or empty.
void report(const std::string& problem, bool csv, const std::string& picture);
#else
inline void begin(const char*) {}
inline void tensor(const char*, const void*, std::size_t, std::int64_t, std::int64_t,
                   std::uint32_t) {}
inline void report(const std::string&, bool, const std::string&) {}
#endif

// Number k of 2^24, no two alike, of magnitude 1 to 2: found in shared memory it says where it
// comes from, for weights are not larger than 1.
inline float number(std::uint32_t k) {
  k = (k ^ k >> 12) * 0x3779b1 & 0xffffff;
  k = (k ^ k >> 12) * 0xebca6b & 0xffffff;
  const float magnitude = 1 + float(k >> 1) / 0x1p23f;
  return k & 1 ? -magnitude : magnitude;
}
// Which number x is; any other x gives one, too, or 2^24. The inverse factors undo the products.
inline std::uint32_t which(float x) {
  const float magnitude = std::fabs(x);
  if (!(magnitude >= 1 && magnitude < 2)) return 1 << 24;
  std::uint32_t k = std::uint32_t((magnitude - 1) * 0x1p23f) << 1 | std::uint32_t(x < 0);
  k = k * 0xcb9243 & 0xffffff;
  k = (k ^ k >> 12) * 0x8b2f51 & 0xffffff;
  return k ^ k >> 12;
}

// A tensor of numbers that nothing else holds, if they are fp32.
inline std::uint32_t next = 1;  // number 0 is 1, which a weight may be
template <class T>
class TensorOf {
 public:
  TensorOf(const char* name, std::int64_t rows, std::int64_t cols)
      : memory_(std::size_t(rows * cols) * sizeof(T)) {
    tensor(name, data(), memory_.bytes(), rows, cols, next);
    std::vector<T> numbers;
    for (std::int64_t n = 0; n < rows * cols; ++n) numbers.emplace_back(number(next++));
    FA_CUDA_CHECK(cudaMemcpy(data(), numbers.data(), memory_.bytes(), cudaMemcpyHostToDevice));
  }
  T* data() const { return memory_.template as<T>(); }

 private:
  DeviceMemory memory_;
};
using Tensor = TensorOf<float>;

// What 128 queries and 128 keys more cost, without what a block does once: f(Nq, Nk) launches; all
// four sizes are whole tiles if `whole` is a multiple of them.
template <class F>
void measure_tile([[maybe_unused]] std::int64_t whole, [[maybe_unused]] F f) {
#ifdef FA_EMULATED
  const double share = 128. * 128 / double(whole * whole);
  for (const std::int64_t queries : {1, 2})
    for (const std::int64_t keys : {1, 2}) {
      f(queries * whole, keys * whole);
      add_to_tile(queries == keys ? share : -share);
    }
#endif
}

// What is to be looked at: --n N --d D --causal --csv --svg FILE. Bad arguments end the program.
struct Arguments {
  std::int64_t N = 256, d;
  bool causal = false, csv = false;
  std::string svg;

  Arguments(int argc, char** argv, std::int64_t usual_d, long most_d) : d(usual_d) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--causal")
        causal = true;
      else if (word == "--csv")
        csv = true;
      else if (word == "--svg" && i + 1 < argc)
        svg = argv[++i];
      else if (word == "--n")
        N = value(argv[++i], "--n", 4096);
      else if (word == "--d")
        d = value(argv[++i], "--d", most_d);
      else
        refuse("no option '" + word + "'; there are --n N, --d D, --causal, --csv and --svg FILE");
    }
  }
  Problem problem() const {
    Problem p;
    p.Nq = p.Nk = N;
    p.d = d;
    p.causal = causal ? Causal::top_left : Causal::none;
    return p;
  }
  std::string name() const {
    return "N = " + std::to_string(N) + ", d = " + std::to_string(d) +
           (causal ? ", causal" : ", no mask");
  }

  [[noreturn]] static void refuse(const std::string& why) {
    std::fprintf(stderr, "xray: %s\n", why.c_str());
    std::exit(2);
  }

 private:
  static std::int64_t value(const char* text, const std::string& name, long most) {
    char* end = nullptr;
    const long x = text ? std::strtol(text, &end, 10) : 0;
    if (!text || end == text || *end || x < 1 || x > most)
      refuse(name + " is a number from 1 to " + std::to_string(most) +
             (text ? ", got '" + std::string(text) + "'" : ""));
    return x;
  }
};

// The body of main(): f(arguments) launches, then comes the report.
template <class F>
int run(int argc, char** argv, F f, std::int64_t usual_d = 64, long most_d = 128) {
  const Arguments arguments(argc, argv, usual_d, most_d);
  try {
    begin(argv[0]);
    f(arguments);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    FA_CUDA_CHECK(cudaGetLastError());
    report(arguments.name(), arguments.csv, arguments.svg);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "xray: %s\n", e.what());
    return 1;
  }
  return 0;
}

}  // namespace fa::xray
