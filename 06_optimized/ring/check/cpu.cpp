#include "06_optimized/ring/check/cpu.hpp"

#include <algorithm>

#include "03_tiled_cpu/tiled_cpu.hpp"
#include "05_cuda_backward/cuda_backward.hpp"

namespace fa::ring {
namespace {

using Int = std::int64_t;

// f(from, to) for every row.
template <class From, class To, class F>
void each_row(const Size& size, const View<From>& from, const View<To>& to, const F& f) {
  for (Int b = 0; b < size.B; ++b)
    for (Int h = 0; h < size.H; ++h)
      for (Int i = 0; i < size.N; ++i) f(from.at(b, h, i), to.at(b, h, i));
}

template <class T>
class CpuEngine : public Engine<T> {
 public:
  using Sum = Stat<T>;
  explicit CpuEngine(int threads) : threads_(threads) {}

  void forward(const Problem& pair, const Forward<T>& t) override {
    tiled_cpu::Options options;
    options.threads = threads_;
    tiled_cpu::forward(pair, t, options);
  }
  void backward(const Problem& pair, const Backward<T>& t) override {
    cuda_backward::CpuOptions options;
    options.threads = threads_;
    cuda_backward::backward_on_cpu(pair, t, options);
  }
  void merge(const Size& size, const View<const T>& part_O, const Sum* part_L, const View<Sum>& O,
             const View<Sum>& L) override {
    for (Int b = 0; b < size.B; ++b)
      for (Int h = 0; h < size.H; ++h)
        for (Int i = 0; i < size.N; ++i)
          ring::merge(part_O.at(b, h, i), *part_L++, size.d, O.at(b, h, i), *L.at(b, h, i));
  }
  void fill(Sum* to, std::size_t count, Sum value) override { std::fill_n(to, count, value); }
  void copy(const Size& size, const View<const T>& from, const View<T>& to) override {
    each_row(size, from, to, [&](const T* x, T* y) { std::copy_n(x, size.d, y); });
  }
  void copy_sums(const Size& size, const View<const Sum>& from, const View<Sum>& to) override {
    each_row(size, from, to, [&](const Sum* x, Sum* y) { std::copy_n(x, size.d, y); });
  }
  void add(const Size& size, const View<const T>& from, const View<Sum>& to) override {
    each_row(size, from, to, [&](const T* x, Sum* y) {
      for (Int e = 0; e < size.d; ++e) y[e] += Sum(x[e]);
    });
  }
  void add_sums(const Sum* from, Sum* to, std::size_t count) override {
    for (std::size_t k = 0; k < count; ++k) to[k] += from[k];
  }
  void round(const Size& size, const View<const Sum>& from, const View<T>& to) override {
    each_row(size, from, to, [&](const Sum* x, T* y) {
      for (Int e = 0; e < size.d; ++e) y[e] = T(x[e]);
    });
  }

 protected:
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
  }

 private:
  int threads_;
};

}  // namespace

template <class T>
std::unique_ptr<Engine<T>> cpu_engine(int threads) {
  return std::make_unique<CpuEngine<T>>(threads);
}
template std::unique_ptr<Engine<float>> cpu_engine(int);
template std::unique_ptr<Engine<double>> cpu_engine(int);

}  // namespace fa::ring
