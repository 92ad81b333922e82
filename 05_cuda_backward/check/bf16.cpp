// What a backward loses if some of its numbers have bf16's 8 digits in place of float's 24. One
// head, N = 256, d = 64, no mask; all is computed in double, and only what is named is rounded. The
// error of a gradient is the length of the difference, divided by the length of the exact gradient.
// Twice: with normal inputs, and with scores four times as large, so that few keys have the weight.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <vector>

#include "common/judge/random.hpp"

namespace {

constexpr int N = 256, d = 64;
using Matrix = std::vector<double>;  // [N, d], by rows

struct Rounded {
  const char* what;
  bool inputs, weights, O, L, D, sums;
};

double to_bf16(double x) {
  int exponent = 0;
  const double digits = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(digits, 8)), exponent - 8);
}
double when(bool rounded, double x) { return rounded ? to_bf16(x) : x; }

double dot(const double* a, const double* b) {
  double sum = 0;
  for (int x = 0; x < d; ++x) sum += a[x] * b[x];
  return sum;
}

struct Gradients {
  Matrix dQ = Matrix(N * d), dK = dQ, dV = dQ;
};

Gradients backward(const Rounded& r, double sharpness) {
  const auto input = [&](std::uint64_t seed) {
    Matrix X(N * d);
    for (std::size_t n = 0; n < X.size(); ++n) X[n] = when(r.inputs, fa::judge::normal(seed, n));
    return X;
  };
  const Matrix Q = input(1), K = input(2), V = input(3), dO = input(4);
  const double scale = sharpness / std::sqrt(double(d));
  Gradients g;
  const auto add = [&](double* y, double a, const double* x) {
    for (int n = 0; n < d; ++n) y[n] = when(r.sums, y[n] + a * x[n]);
  };
  for (int i = 0; i < N; ++i) {
    const double *q = &Q[i * d], *dO_i = &dO[i * d];
    double S[N], l = 0, O[d] = {};
    for (int j = 0; j < N; ++j) l += std::exp(S[j] = scale * dot(q, &K[j * d]));
    for (int j = 0; j < N; ++j)
      for (int x = 0; x < d; ++x) O[x] += std::exp(S[j]) / l * V[j * d + x];
    for (double& x : O) x = when(r.O, x);
    const double D = when(r.D, dot(dO_i, O)), L = when(r.L, std::log(l));
    for (int j = 0; j < N; ++j) {
      const double P = std::exp(S[j] - L), dS = P * (dot(dO_i, &V[j * d]) - D);
      const double P_used = when(r.weights, P), dS_used = when(r.weights, dS);
      add(&g.dV[j * d], P_used, dO_i);
      add(&g.dK[j * d], dS_used, q);  // the scale comes at the end, and is a power of two
      add(&g.dQ[i * d], dS_used, &K[j * d]);
    }
  }
  return g;
}

double error(const Matrix& got, const Matrix& exact) {
  double off = 0, all = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    off += (got[n] - exact[n]) * (got[n] - exact[n]);
    all += exact[n] * exact[n];
  }
  return std::sqrt(off / all);
}

}  // namespace

int main() {
  constexpr double sharpness[] = {1, 4};
  std::printf("error / 0.001             scores as usual       four times as large\n");
  std::printf("rounded to bf16          dQ     dK     dV        dQ     dK     dV\n");
  for (const Rounded& r : std::initializer_list<Rounded>{
           {"Q, K, V, dO", 1, 0, 0, 0, 0, 0},
           {"P, dS", 0, 1, 0, 0, 0, 0},
           {"O, and D made of it", 0, 0, 1, 0, 0, 0},
           {"all of these", 1, 1, 1, 0, 0, 0},
           {"L", 0, 0, 0, 1, 0, 0},
           {"D", 0, 0, 0, 0, 1, 0},
           {"the sums dQ, dK, dV", 0, 0, 0, 0, 0, 1},
       }) {
    std::printf("%-20s", r.what);
    for (double by : sharpness) {
      const Gradients exact = backward({"nothing", 0, 0, 0, 0, 0, 0}, by), g = backward(r, by);
      std::printf("%s%7.1f%7.1f%7.1f", by == 1 ? "" : "   ", 1e3 * error(g.dQ, exact.dQ),
                  1e3 * error(g.dK, exact.dK), 1e3 * error(g.dV, exact.dV));
    }
    std::printf("\n");
  }
  return 0;
}
