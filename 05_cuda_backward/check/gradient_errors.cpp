// How far the gradients are off, in fp32, on problems whose shapes are drawn from a seed: those of
// the CPU, of the lesson's two kernels and of the fast ones, each beside the oracle in double. The
// kernels run on the CPU's emulation. What is printed behind a ~ is rounding, so another computer
// or compiler prints a little more or less.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "05_cuda_backward/cuda_backward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/random.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using namespace fa::cuda_backward;
using Int = std::int64_t;

constexpr int problems = 10;
constexpr const char* gradients[] = {"dQ", "dK", "dV"};
constexpr const char* methods[] = {"CPU", "two_kernels", "fast"};

Spec draw(int n) {
  std::uint64_t drawn = 0;
  const auto any = [&](Int lo, Int hi) {
    return integer(2205, std::uint64_t(n) * 64 + drawn++, lo, hi);
  };
  Spec s;
  s.p.B = any(1, 2);
  s.p.Hkv = any(1, 2);
  s.p.Hq = s.p.Hkv * any(1, 3);
  s.p.Nq = any(1, 130);
  s.p.Nk = any(1, 130);
  s.p.d = any(1, 128);
  s.p.causal =
      std::array{Causal::none, Causal::top_left, Causal::bottom_right}[std::size_t(any(0, 2))];
  if (any(0, 1))
    for (Int b = 0; b < s.p.B; ++b) s.lengths.push_back(any(1, s.p.Nk));
  if (any(0, 1)) s.layout.order = Layout::Order::BNHD;
  s.layout.gap = any(0, 1) * any(1, 4);
  s.seed = std::uint64_t(n) + 1;
  return s;
}

void run(int method, BackwardCase<float>& c) {
  const auto call = c.call();
  if (method == 0) return backward_on_cpu(call.p, call.t);
  call_on_gpu(call, [&](const Problem& p, const Backward<float>& t) {
    Options options;
    options.tiles = method == 1 ? Tiles::lesson : Tiles::fast;
    const DeviceMemory scratch(scratch_bytes(p, options));
    options.scratch = scratch;
    backward(p, t, options);
  });
}

struct Error {
  double largest = 0, tolerance = 1;
  double share() const { return largest / tolerance; }
};
// A NaN is infinitely far off.
Error error(const Buffer<float>& got, const Array& want, const BackwardOracle& o) {
  double off = 0, most = 0;
  got.for_each([&](auto b, auto h, auto i, auto x) {
    const double one = std::fabs(double(got.at(b, h, i, x)) - want.at(b, h, i, x));
    off = one <= off ? off : std::isnan(one) ? INFINITY : one;
    most = std::max(most, std::fabs(want.at(b, h, i, x)));
  });
  return {off, gradient_tolerance<float>(o.A, most, o.noise)};
}

std::string about(double figure) {
  char text[32];
  std::snprintf(text, sizeof text, "~%.1g", figure);
  return text;
}

std::string described(const Spec& s) {
  const Problem& p = s.p;
  std::string lengths, layout = s.layout.order == Layout::Order::BNHD ? "BNHD" : "BHND";
  for (Int length : s.lengths) {
    if (!lengths.empty()) lengths += ',';
    lengths += std::to_string(length);
  }
  if (s.layout.gap) layout += " gap " + std::to_string(s.layout.gap);
  const char* const mask = p.causal == Causal::none       ? "none"
                           : p.causal == Causal::top_left ? "top left"
                                                          : "bottom right";
  char text[100];
  std::snprintf(text, sizeof text, "%d %3d %3d %4d %4d %4d  %-13s%-8s%-11s", int(p.B), int(p.Hq),
                int(p.Hkv), int(p.Nq), int(p.Nk), int(p.d), mask,
                lengths.empty() ? "all" : lengths.c_str(), layout.c_str());
  return text;
}

}  // namespace

int main() {
  Error worst[3][3];  // [gradient][method]
  std::printf("%58slargest error / tolerance\n", "");
  std::printf("B  Hq Hkv   Nq   Nk    d  mask         lengths layout    ");
  for (const char* method : methods) std::printf(" %11s", method);
  std::printf("\n");
  for (int n = 0; n < problems; ++n) {
    const Spec spec = draw(n);
    std::printf("%s", described(spec).c_str());
    BackwardCase<float> c(spec);
    const BackwardOracle want =
        oracle_backward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V), to_array(c.dO));
    for (int method = 0; method < 3; ++method) {
      run(method, c);
      const Error errors[] = {error(c.dQ, want.dQ, want), error(c.dK, want.dK, want),
                              error(c.dV, want.dV, want)};
      double largest = 0;
      for (int g = 0; g < 3; ++g) {
        largest = std::max(largest, errors[g].share());
        if (errors[g].share() > worst[g][method].share()) worst[g][method] = errors[g];
      }
      std::printf(" %11s", about(largest).c_str());
    }
    std::printf("\n");
  }

  bool right = true;
  std::printf("\nworst of all  method           error   tolerance  error / tolerance\n");
  for (int g = 0; g < 3; ++g)
    for (int method = 0; method < 3; ++method) {
      const Error& e = worst[g][method];
      right = right && e.share() <= 1;
      std::printf("%-13s %-11s %10s  %10s  %17s\n", gradients[g], methods[method],
                  about(e.largest).c_str(), about(e.tolerance).c_str(), about(e.share()).c_str());
    }
  return right ? 0 : 1;
}
