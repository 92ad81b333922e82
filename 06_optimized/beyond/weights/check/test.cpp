// Tests of weights: tiles of P, the largest weights of rows, sums of columns, against P in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "04_cuda_forward/cuda_forward.hpp"
#include "06_optimized/beyond/weights/weights.hpp"
#include "06_optimized/check/testing.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/judge/cases.hpp"
#include "common/judge/gpu.hpp"
#include "common/judge/gpu_test.hpp"
#include "common/judge/half.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
namespace walk = fa::weights;
using walk::Box;
using Int = std::int64_t;
using half = Eigen::half;
using bf16 = Eigen::bfloat16;

template <class T>
using Device =
    std::conditional_t<std::is_same_v<T, float>, float,
                       std::conditional_t<std::is_same_v<T, half>, __half, __nv_bfloat16>>;

// f(T()) for every type that the suite knows here.
template <class F>
void each_type(const F& f) {
  f(float());
#ifndef FA_WITHOUT_HALF
  f(half());
  f(bf16());
#endif
}

Spec sized_as(Int B, Int Hq, Int Hkv, Int Nq, Int Nk, Int d, Causal causal = Causal::none,
              std::vector<Int> lengths = {}) {
  Spec s;
  s.p.B = B, s.p.Hq = Hq, s.p.Hkv = Hkv, s.p.Nq = Nq, s.p.Nk = Nk, s.p.d = d;
  s.p.causal = causal;
  s.lengths = std::move(lengths);
  return s;
}

// Q, K and L, and what the weights are: P in double, from the L that the kernels get.
template <class T>
struct Case {
  ForwardCase<T> meant;
  Array P;       // [B, Hq, Nq, Nk]
  double A = 0;  // the largest sum of |scale q k| of a score: what its error is made of
  std::string fault;

  explicit Case(const Spec& s)
      : meant(s, true), P(s.p.B, s.p.Hq, s.p.Nq, s.p.Nk), seen_(P.data.size()) {
    weigh(true);
  }

  // P of what Q and K hold now, and L too if it is to be made anew.
  void weigh(bool new_L) {
    const Problem& p = meant.p;
    const double scale = p.softmax_scale();
    Array L(p.B, p.Hq, p.Nq, 1);
    A = 0;
    P.for_each([&](Int b, Int h, Int i, Int j) {
      double s = 0, most = 0;
      for (Int x = 0; x < p.d; ++x) {
        const double product =
            double(meant.Q.at(b, h, i, x)) * double(meant.K.at(b, h / (p.Hq / p.Hkv), j, x));
        s += product;
        most += std::fabs(scale * product);
      }
      const bool sees_it = sees(with_lengths(), b, i, j);
      seen_[place(b, h, i, j)] = sees_it;
      P.at(b, h, i, j) = scale * s;
      if (sees_it && std::isfinite(most)) A = std::max(A, most);
    });
    const auto rows = [&](const auto& f) {
      L.for_each([&](Int b, Int h, Int i, Int) { f(b, h, i); });
    };
    if (new_L) {
      rows([&](Int b, Int h, Int i) {
        double m = -INFINITY, l = 0;
        for (Int j = 0; j < p.Nk; ++j)
          if (seen(b, h, i, j)) m = std::max(m, P.at(b, h, i, j));
        for (Int j = 0; j < p.Nk; ++j)
          if (seen(b, h, i, j)) l += std::exp(P.at(b, h, i, j) - m);
        L.at(b, h, i) = l == 0 ? -INFINITY : m + std::log(l);
      });
      meant.LSE.fill([&](Int b, Int h, Int i, Int) { return L.at(b, h, i); });
    }
    rows([&](Int b, Int h, Int i) {
      const double L_i = double(meant.LSE.at(b, h, i));
      for (Int j = 0; j < p.Nk; ++j) {
        double& weight = P.at(b, h, i, j);
        weight = seen(b, h, i, j) && L_i != -INFINITY ? std::exp(weight - L_i) : 0;
      }
    });
  }
  bool seen(Int b, Int h, Int i, Int j) const { return seen_[place(b, h, i, j)]; }
  double tolerance(double weight) const { return forward_tolerance<float>(A, weight); }

  // f(problem, inputs, copy) with all that may be read, and `outputs`, in device memory.
  template <class F>
  void on_gpu(std::vector<Storage> outputs, const F& f) {
    outputs.push_back(meant.Q.storage());
    outputs.push_back(meant.K.storage());
    outputs.push_back(meant.LSE.storage());
    outputs.push_back({meant.spec.lengths.data(), meant.spec.lengths.size() * sizeof(Int)});
    const DeviceCopy copy(outputs);
    Problem p = with_lengths();
    p.key_lengths = copy.at(p.key_lengths);
    using D = Device<T>;
    const walk::Inputs<D> in{as_device<const D>(copy.at(View<const T>(meant.Q.view()))),
                             as_device<const D>(copy.at(View<const T>(meant.K.view()))),
                             copy.at(meant.LSE.view()).data};
    f(p, in, copy);
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    copy.copy_back();
    fault = meant.Q.changed() + meant.K.changed() + meant.LSE.changed();
  }

  Buffer<float> tile(const Box& box, const Layout& layout = {}) {
    Buffer<float> out(meant.p.B, meant.p.Hq, box.rows, box.cols, layout);
    on_gpu({out.storage()}, [&](const Problem& p, const auto& in, const DeviceCopy& copy) {
      walk::tile(p, in, box, copy.at(out.view()));
    });
    fault += out.written_outside();
    return out;
  }
  std::string check_tile(const Box& box, const Layout& layout = {}) {
    const Buffer<float> out = tile(box, layout);
    Comparison c("P");
    out.for_each([&](Int b, Int h, Int r, Int x) {
      const double want = P.at(b, h, box.i0 + r, box.j0 + x);
      c.add(b, h, r, x, out.at(b, h, r, x), want,
            seen(b, h, box.i0 + r, box.j0 + x) ? tolerance(want) : 0);
    });
    return (c.ok() ? "" : c.report()) + fault;
  }
  std::string check_all() { return check_tile({0, meant.p.Nq, 0, meant.p.Nk}); }

  struct Best {
    Buffer<float> P;
    Buffer<std::int32_t> keys;
  };
  Best largest(Int i0, Int rows, int k, const Layout& layout = {}) {
    Layout other = layout;
    if (layout.gap > 0) ++other.gap;
    Best best{Buffer<float>(meant.p.B, meant.p.Hq, rows, k, layout),
              Buffer<std::int32_t>(meant.p.B, meant.p.Hq, rows, k, other)};
    best.keys.fill([](Int, Int, Int, Int) { return -7; });
    on_gpu({best.P.storage(), best.keys.storage()},
           [&](const Problem& p, const auto& in, const DeviceCopy& copy) {
             walk::largest(p, in, i0, rows, k, copy.at(best.P.view()), copy.at(best.keys.view()));
           });
    fault += best.P.written_outside() + best.keys.written_outside();
    return best;
  }
  // Against a sort of P: of keys whose weights are nearly equal either may come first, but the
  // weight that is said must be that of the key that is said.
  std::string check_largest(Int i0, Int rows, int k, const Layout& layout = {}) {
    return verdict(largest(i0, rows, k, layout), i0, rows, k);
  }
  std::string verdict(const Best& best, Int i0, Int rows, int k) const {
    std::string text = fault;
    const Array places(meant.p.B, meant.p.Hq, rows, 1);
    places.for_each([&](Int b, Int h, Int r, Int) {
      const Int i = i0 + r;
      std::vector<double> want;
      for (Int j = 0; j < meant.p.Nk; ++j)
        if (seen(b, h, i, j)) want.push_back(P.at(b, h, i, j));
      std::sort(want.rbegin(), want.rend());
      std::vector<Int> before;
      for (Int n = 0; n < k; ++n) {
        const float got = best.P.at(b, h, r, n);
        const Int key = best.keys.at(b, h, r, n);
        bool good = got == 0 && key == -1;
        if (n < Int(want.size())) {
          good = key >= 0 && key < meant.p.Nk && seen(b, h, i, key) &&
                 std::fabs(got - want[std::size_t(n)]) <= tolerance(want[std::size_t(n)]) &&
                 std::fabs(got - P.at(b, h, i, key)) <= tolerance(P.at(b, h, i, key)) &&
                 std::find(before.begin(), before.end(), key) == before.end();
          if (n > 0) {
            const float last = best.P.at(b, h, r, n - 1);
            good = good && (last > got || (last == got && before.back() < key));
          }
          before.push_back(key);
        }
        if (!good && text.size() < 1000)
          text += "head " + std::to_string(h) + ", row " + std::to_string(i) + ", place " +
                  std::to_string(n) + ": weight " + std::to_string(got) + " of key " +
                  std::to_string(key) + "\n";
      }
    });
    return text;
  }

  Buffer<float> sums() {
    Buffer<float> out(meant.p.B, meant.p.Hq, meant.p.Nk, 1);
    on_gpu({out.storage()}, [&](const Problem& p, const auto& in, const DeviceCopy& copy) {
      walk::column_sums(p, in, copy.at(out.view()).data);
    });
    fault += out.written_outside();
    return out;
  }
  std::string check_sums() { return verdict_of_sums(sums()); }
  std::string verdict_of_sums(const Buffer<float>& out) const {
    Comparison c("sums");
    out.for_each([&](Int b, Int h, Int j, Int) {
      double want = 0;
      for (Int i = 0; i < meant.p.Nq; ++i) want += P.at(b, h, i, j);
      c.add(b, h, j, 0, out.at(b, h, j), want, want == 0 ? 0 : tolerance(want));
    });
    return (c.ok() ? "" : c.report()) + fault;
  }

 private:
  Problem with_lengths() {
    Problem p = meant.p;
    p.key_lengths = meant.spec.lengths.empty() ? nullptr : meant.spec.lengths.data();
    return p;
  }
  std::size_t place(Int b, Int h, Int i, Int j) const {
    return std::size_t(((b * meant.p.Hq + h) * meant.p.Nq + i) * meant.p.Nk + j);
  }
  std::vector<bool> seen_;
};

template <class T>
std::vector<char> bits(Buffer<T> x) {
  const Storage s = x.storage();
  const char* const first = static_cast<const char*>(s.data);
  return {first, first + s.bytes};
}

class weights : public GpuTest {};  // the tests' name is the walk's

// Small, and several of everything: tiles of rows and keys, heads of a group, masked rows.
TEST_F(weights, Tiles) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 2, 1, 140, 139, 64, Causal::bottom_right));
    EXPECT_EQ(c.check_all(), "") << sizeof(T);
    EXPECT_EQ(c.check_largest(0, 140, 5), "") << sizeof(T);
    EXPECT_EQ(c.check_sums(), "") << sizeof(T);
  });
}

// ---- 1. tiles of P ----

TEST_F(weights, AllOfP) {
  each_type([]<class T>(T) {
    for (const Spec& s : walk_specs()) EXPECT_EQ(Case<T>(s).check_all(), "") << s.name();
  });
}

TEST_F(weights, RowsSumToOne) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(2, 2, 1, 50, 40, 24, Causal::bottom_right, {40, 17}));
    const Buffer<float> out = c.tile({0, 50, 0, 40});
    for (Int b = 0; b < 2; ++b)
      for (Int h = 0; h < 2; ++h)
        for (Int i = 0; i < 50; ++i) {
          double sum = 0;
          for (Int j = 0; j < 40; ++j) sum += out.at(b, h, i, j);
          EXPECT_NEAR(sum, i < 10 ? 0 : 1, 1e-5) << b << " " << h << " " << i;
        }
  });
}

TEST_F(weights, TilesAtOddPlaces) {
  const Box boxes[] = {{5, 40, 7, 70},   {100, 1, 149, 1}, {60, 33, 50, 61}, {0, 130, 64, 32},
                       {17, 16, 16, 17}, {129, 1, 0, 150}, {3, 0, 0, 5},     {3, 5, 9, 0}};
  each_type([&]<class T>(T) {
    Case<T> c(sized_as(1, 2, 1, 130, 150, 16, Causal::top_left));
    for (const Box& box : boxes) EXPECT_EQ(c.check_tile(box), "") << box.i0 << " " << box.j0;
  });
}

// Keys are shared out among blocks there.
TEST_F(weights, WideTiles) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 1, 1, 3, 1100, 8));
    EXPECT_EQ(c.check_all(), "");
    EXPECT_EQ(c.check_tile({1, 2, 3, 1090}), "");
    EXPECT_EQ(c.check_tile({0, 1, 500, 513}), "");
  });
}

// ---- 2. the largest ----

// On the CPU each problem meets one type.
TEST_F(weights, LargestOfRows) {
  std::size_t type = 0;
  each_type([&]<class T>(T) {
    int k = 0;
    std::size_t n = 0;
    for (const Spec& s : walk_specs()) {
      k = k % walk::max_k + 5;
      if (!meets(n++, type)) continue;
      EXPECT_EQ(Case<T>(s).check_largest(0, s.p.Nq, std::min(k, 16)), "") << s.name();
    }
    ++type;
  });
}

TEST_F(weights, LargestOneAndLargestSixteen) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 2, 2, 40, 200, 16, Causal::bottom_right));
    for (int k : {1, 16}) EXPECT_EQ(c.check_largest(3, 30, k), "") << k;
  });
}

TEST_F(weights, FewerKeysThanK) {
  each_type([]<class T>(T) {
    Case<T> causal(sized_as(1, 1, 1, 20, 20, 16, Causal::top_left));
    EXPECT_EQ(causal.check_largest(0, 20, 16), "");
    Case<T> lengths(sized_as(3, 1, 1, 5, 40, 16, Causal::none, {0, 1, 15}));
    EXPECT_EQ(lengths.check_largest(0, 5, 16), "");
    Case<T> none(sized_as(1, 1, 1, 5, 0, 16));
    EXPECT_EQ(none.check_largest(0, 5, 2), "");
  });
}

// Equal weights: the first keys, in their order.
TEST_F(weights, TiesAreForTheSmallerKey) {
  each_type([]<class T>(T) {
    Spec s = sized_as(1, 1, 1, 18, 150, 16);
    s.data = {Data::Kind::equal, 1};
    Case<T> equal(s);
    const auto best = equal.largest(0, 18, 16);
    for (Int i = 0; i < 18; ++i)
      for (Int n = 0; n < 16; ++n) EXPECT_EQ(best.keys.at(0, 0, i, n), n) << "row " << i;

    // Three keys alike, in three tiles, and larger than all others.
    Case<T> alike(sized_as(1, 1, 1, 18, 150, 16));
    const Buffer<T> K = alike.meant.K;
    const Int keys[] = {5, 90, 149};
    for (Int j : keys)
      for (Int x = 0; x < 16; ++x) alike.meant.K.at(0, 0, j, x) = T(3.f * float(K.at(0, 0, 7, x)));
    alike.weigh(true);
    const auto got = alike.largest(0, 18, 16);
    Int listed = 0;
    for (Int i = 0; i < 18; ++i)
      for (Int n = 0; n < 16; ++n)
        if (got.keys.at(0, 0, i, n) == 5)
          for (Int m = 0; m < 3 && n + m < 16; ++m, ++listed) {
            EXPECT_EQ(got.keys.at(0, 0, i, n + m), keys[m]) << "row " << i;
            EXPECT_EQ(got.P.at(0, 0, i, n + m), got.P.at(0, 0, i, n));
          }
    EXPECT_GT(listed, 2) << "no row has found the three";
  });
}

// Keys in ascending and in descending order of weight: every key, or none, enters the list.
TEST_F(weights, LargestFirstAndLargestLast) {
  each_type([]<class T>(T) {
    for (const auto kind : {Data::Kind::rising, Data::Kind::falling}) {
      Spec s = sized_as(1, 1, 1, 17, 100, 16);
      s.data = {kind, 8};
      EXPECT_EQ(Case<T>(s).check_largest(0, 17, 7), "") << s.name();
    }
  });
}

// ---- 3. sums of columns ----

TEST_F(weights, SumsOfColumns) {
  each_type([]<class T>(T) {
    for (const Spec& s : walk_specs()) EXPECT_EQ(Case<T>(s).check_sums(), "") << s.name();
  });
}

// All sums together are the number of rows that see something.
TEST_F(weights, SumsAddUpToTheRows) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(2, 1, 1, 150, 60, 16, Causal::bottom_right, {60, 20}));
    const Buffer<float> out = c.sums();
    for (Int b = 0; b < 2; ++b) {
      double all = 0;
      for (Int j = 0; j < 60; ++j) all += out.at(b, 0, j);
      EXPECT_NEAR(all, 60, 60 * 1e-5) << b;
    }
  });
}

// ---- all three ----

template <class T>
void all_three(Case<T>& c, const std::string& what, const Layout& layout = {}) {
  const Problem& p = c.meant.p;
  EXPECT_EQ(c.check_tile({0, p.Nq, 0, p.Nk}, layout), "") << what << ", " << sizeof(T) << " bytes";
  EXPECT_EQ(c.check_largest(0, p.Nq, 6, layout), "") << what << ", " << sizeof(T) << " bytes";
  EXPECT_EQ(c.check_sums(), "") << what << ", " << sizeof(T) << " bytes";
}

TEST_F(weights, Widths) {
  each_type([]<class T>(T) {
    for (Int d : {1, 13, 100, 128}) {
      Case<T> c(sized_as(1, 1, 1, 20, 35, d));
      all_three(c, "d = " + std::to_string(d));
    }
  });
#ifndef FA_WITHOUT_HALF
  for (Int d : {136, 256}) {
    Case<bf16> c(sized_as(1, 1, 1, 66, 67, d, Causal::top_left));
    all_three(c, "d = " + std::to_string(d));
  }
#endif
}

TEST_F(weights, LayoutsOfAll) {
  std::vector<Layout> layouts(4);
  layouts[0].order = Layout::Order::BNHD;
  layouts[1].gap = 3, layouts[1].offset = 1;
  layouts[2].reversed = true;
  layouts[3].order = Layout::Order::BNHD, layouts[3].in_16_bytes = true, layouts[3].gap = 1;
  std::size_t type = 0;
  each_type([&]<class T>(T) {
    std::size_t n = type++;
    for (const Layout& layout : layouts) {
      if (n++ % 3 == 2 && sized(0, 1) == 1) continue;  // on the CPU each meets two types
      Spec s = sized_as(2, 4, 2, 20, 40, 24, Causal::none, {40, 20});
      s.layout = layout;
      Case<T> c(s);
      all_three(c, s.name(), layout);
    }
  });
}

// No maximum is taken, so the scale's sign does not matter.
TEST_F(weights, AnyScale) {
  each_type([]<class T>(T) {
    for (double scale : {0.7, -0.3, 0.0}) {
      Spec s = sized_as(1, 1, 1, 20, 40, 16);
      s.p.scale = scale;
      Case<T> c(s);
      all_three(c, s.name());
    }
    for (double level : {300., -300.}) {
      Spec s = sized_as(1, 1, 1, 20, 40, 16);
      s.data = {Data::Kind::level, level};
      Case<T> c(s);
      all_three(c, s.name());
    }
  });
}

// On the CPU each problem meets one type.
TEST_F(weights, Fuzz) {
  std::mt19937_64 engine(20260101);
  const auto upto = [&](Int n) { return Int(engine() % std::uint64_t(n + 1)); };
  for (int n = 0; n < int(sized(60, 12)); ++n) {
    const Int Hkv = 1 + upto(1);
    Spec s = sized_as(1 + upto(1), Hkv * (1 + upto(2)), Hkv, 1 + upto(90), 1 + upto(150),
                      2 + upto(126), Causal(upto(2)));
    s.seed = std::uint64_t(n) + 1;
    if (upto(2) == 0)
      for (Int b = 0; b < s.p.B; ++b) s.lengths.push_back(upto(s.p.Nk));
    const Int i0 = upto(s.p.Nq - 1), rows = 1 + upto(s.p.Nq - 1 - i0);
    const Int j0 = upto(s.p.Nk - 1), keys = 1 + upto(s.p.Nk - 1 - j0);
    const int k = int(1 + upto(15));
    std::size_t type = 0;
    each_type([&]<class T>(T) {
      if (!meets(std::size_t(n), type++)) return;
      Case<T> c(s);
      const std::string what = s.name() + ", " + std::to_string(sizeof(T)) + " bytes";
      EXPECT_EQ(c.check_tile({i0, rows, j0, keys}), "") << what;
      EXPECT_EQ(c.check_largest(i0, rows, k), "") << what;
      EXPECT_EQ(c.check_sums(), "") << what;
    });
  }
}

TEST_F(weights, LengthsOutsideAreClamped) {
  each_type([]<class T>(T) {
    const Spec s = sized_as(3, 1, 1, 5, 40, 16, Causal::none, {0, 40, 40});
    Case<T> c(s);
    c.meant.spec.lengths = {-3, 41, std::numeric_limits<Int>::max()};
    all_three(c, "clamped");
  });
}

TEST_F(weights, PaddedKeysNeverLeak) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(2, 2, 1, 20, 70, 16, Causal::none, {33, 0}));
    for (Int b = 0; b < 2; ++b)
      for (Int j = b == 0 ? 33 : 0; j < 70; ++j)
        for (Int x = 0; x < 16; ++x) c.meant.K.at(b, 0, j, x) = T(std::nanf(""));
    c.meant.K.fill(
        [K = c.meant.K](Int b, Int h, Int j, Int x) { return double(K.at(b, h, j, x)); });
    all_three(c, "NaN in padded keys");
  });
}

// A NaN in a key is one in L of the rows that see it; with an L from before, one in its weights.
TEST_F(weights, NaNInAKey) {
  each_type([]<class T>(T) {
    for (const bool new_L : {false, true}) {
      Case<T> c(sized_as(1, 1, 1, 40, 40, 16, Causal::top_left));
      const Buffer<float> before = c.tile({0, 40, 0, 40});
      const Buffer<T> K = c.meant.K;
      c.meant.K.fill([&](Int b, Int h, Int j, Int x) {
        return j == 25 && x == 3 ? std::nan("") : double(K.at(b, h, j, x));
      });
      c.weigh(false);
      if (new_L)
        c.meant.LSE.fill([L = c.meant.LSE](Int b, Int h, Int i, Int) {
          return i >= 25 ? std::nan("") : double(L.at(b, h, i));
        });
      const Buffer<float> out = c.tile({0, 40, 0, 40}), sums = c.sums();
      const auto best = c.largest(0, 40, 2);
      for (Int i = 0; i < 40; ++i) {
        for (Int j = 0; j < 40; ++j) {
          const float got = out.at(0, 0, i, j);
          const bool hit = i >= 25 && j <= i && (new_L || j == 25);
          EXPECT_TRUE(hit ? std::isnan(got) : got == before.at(0, 0, i, j)) << i << " " << j;
        }
        EXPECT_EQ(std::isnan(best.P.at(0, 0, i, 0)), i >= 25) << i;
        if (i >= 25) {
          EXPECT_EQ(best.keys.at(0, 0, i, 0), new_L ? 0 : 25) << i;
        }
      }
      for (Int j = 0; j < 40; ++j) EXPECT_EQ(std::isnan(sums.at(0, 0, j)), new_L || j == 25) << j;
    }
  });
}

TEST_F(weights, NaNInAQueryStaysInItsRow) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 1, 1, 40, 40, 16, Causal::top_left));
    const Buffer<float> before = c.tile({0, 40, 0, 40});
    c.meant.Q.at(0, 0, 21, 2) = T(std::nanf(""));
    const Buffer<float> out = c.tile({0, 40, 0, 40});
    out.for_each([&](Int, Int, Int i, Int j) {
      const float got = out.at(0, 0, i, j);
      EXPECT_TRUE(i == 21 && j <= 21 ? std::isnan(got) : got == before.at(0, 0, i, j))
          << i << " " << j;
    });
  });
}

// As of a forward whose scores were all -infinity.
TEST_F(weights, ARowWhoseLIsMinusInfinitySeesNothing) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 1, 1, 20, 40, 16));
    c.meant.LSE.fill([L = c.meant.LSE](Int b, Int h, Int i, Int) {
      return i == 3 ? -INFINITY : double(L.at(b, h, i));
    });
    c.weigh(false);
    EXPECT_EQ(c.check_all(), "");
    EXPECT_EQ(c.check_sums(), "");
    const auto best = c.largest(0, 20, 2);
    for (Int i = 0; i < 20; ++i) EXPECT_EQ(best.keys.at(0, 0, i, 0) == -1, i == 3) << i;
  });
}

TEST_F(weights, OneHeadIsAProblemOfItsOwn) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(2, 4, 2, 20, 40, 16, Causal::bottom_right, {40, 30}));
    for (Int b = 0; b < 2; ++b)
      for (Int h = 0; h < 4; ++h) {
        Buffer<float> out(1, 1, 7, 9);
        c.on_gpu({out.storage()}, [&](const Problem& p, const auto& in, const DeviceCopy& copy) {
          const auto one = walk::one_head(p, in, b, h);
          walk::tile(one.p, one.in, {11, 7, 22, 9}, copy.at(out.view()));
        });
        out.for_each([&](Int, Int, Int r, Int x) {
          const double want = c.P.at(b, h, 11 + r, 22 + x);
          EXPECT_NEAR(out.at(0, 0, r, x), want, c.tolerance(want)) << b << " " << h;
        });
      }
  });
}

// L as a forward of this course returns it.
template <class T, class F>
void with_L_of(const F& forward) {
  Case<T> c(sized_as(1, 2, 1, 70, 70, 16, Causal::bottom_right));
  const std::string text = [&] {
    const ForwardCall<T> call = c.meant.call();
    on_gpu_forward<T>(forward)(call);
    return c.meant.verdict();
  }();
  ASSERT_EQ(text, "");
  c.meant.LSE.fill([L = c.meant.LSE](Int b, Int h, Int i, Int) { return double(L.at(b, h, i)); });
  c.weigh(false);
  all_three(c, "L of a forward");
  const Buffer<float> out = c.tile({0, 70, 0, 70});
  for (Int i = 0; i < 70; ++i) {
    double sum = 0;
    for (Int j = 0; j < 70; ++j) sum += out.at(0, 1, i, j);
    EXPECT_NEAR(sum, 1, 2e-5) << i;
  }
}
TEST_F(weights, LOfAForward) {
  with_L_of<float>([](const Problem& p, const Forward<float>& t) { cuda_forward::forward(p, t); });
#ifndef FA_WITHOUT_HALF
  with_L_of<bf16>([](const Problem& p, const Forward<bf16>& t) {
    optimized::Options options;
    options.kernel = optimized::Kernel::fa2;
    optimized::forward(p, as_device<__nv_bfloat16>(t), options);
  });
#endif
}

TEST_F(weights, TheSameBitsInEveryRun) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 2, 1, 140, 70, 24, Causal::top_left));
    EXPECT_TRUE(bits(c.sums()) == bits(c.sums()));
    EXPECT_TRUE(bits(c.tile({3, 90, 5, 60})) == bits(c.tile({3, 90, 5, 60})));
    const auto one = c.largest(0, 140, 9), two = c.largest(0, 140, 9);
    EXPECT_TRUE(bits(one.P) == bits(two.P) && bits(one.keys) == bits(two.keys));
  });
}

// O's place is that of P, as wide as it is.
TEST_F(weights, WorkIsPutOnTheStreamAndNobodyWaits) {
  Case<float> c(sized_as(1, 2, 1, 20, 24, 16));
  const Buffer<float> L = c.meant.LSE;
  const ForwardCall<float> call = c.meant.call();
  c.meant.LSE.fill([&](Int b, Int h, Int i, Int) { return double(L.at(b, h, i)); });
  const auto f = [](const Problem& p, const Forward<float>& t, cudaStream_t stream) {
    walk::tile<float>(p, {t.Q, t.K, t.LSE}, {0, 20, 0, 16}, t.O, stream);
  };
  EXPECT_EQ(on_its_stream(call, f), "");
  c.meant.O.for_each([&](Int b, Int h, Int i, Int j) {
    const double want = c.P.at(b, h, i, j);
    EXPECT_NEAR(c.meant.O.at(b, h, i, j), want, c.tolerance(want));
  });
}

TEST_F(weights, SumsArePutOnTheStreamAndNobodyWaits) {
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 2, 1, 20, 24, 16));
    const Buffer<float> L = c.meant.LSE;
    const ForwardCall<T> call = c.meant.call();
    c.meant.LSE.fill([&](Int b, Int h, Int i, Int) { return double(L.at(b, h, i)); });
    const auto f = [](const Problem& p, const Forward<T>& t, cudaStream_t stream) {
      using D = Device<T>;
      const walk::Inputs<D> in{as_device<const D>(t.Q), as_device<const D>(t.K), t.LSE};
      walk::column_sums(p, in, reinterpret_cast<float*>(t.O.data), stream);
    };
    EXPECT_EQ(on_its_stream(call, f), "");
    std::vector<float> sums(2 * 24);
    std::memcpy(sums.data(), &c.meant.O.at(0, 0, 0), sums.size() * sizeof(float));
    for (Int n = 0; n < 2 * 24; ++n) {
      double want = 0;
      for (Int i = 0; i < 20; ++i) want += c.P.at(0, n / 24, i, n % 24);
      EXPECT_NEAR(sums[std::size_t(n)], want, c.tolerance(want)) << n;
    }
  });
}

// ---- errors ----

TEST_F(weights, RefusesInWords) {
  Problem p = sized_as(2, 4, 2, 20, 40, 16).p;
  std::vector<float> Q(std::size_t(p.B * p.Hq * p.Nq * p.d)),
      K(std::size_t(p.B * p.Hkv * p.Nk * 16)),
      L(std::size_t(p.B * p.Hq * p.Nk)),  // as many as there are sums, which are asked for there
      P(std::size_t(p.B * p.Hq * p.Nq * p.Nk));
  std::vector<std::int32_t> keys(std::size_t(p.B * p.Hq * p.Nq * 16));
  const walk::Inputs<float> all{contiguous<const float>(Q.data(), p.Hq, p.Nq, p.d),
                                contiguous<const float>(K.data(), p.Hkv, p.Nk, p.d), L.data()};
  const auto tile = [&](Box box, auto change) {
    Problem q = p;
    walk::Inputs<float> in = all;
    View<float> out = contiguous(P.data(), p.Hq, box.rows, box.cols);
    change(q, in, out);
    return refusal([&] { walk::tile(q, in, box, out); });
  };
  const auto as_it_is = [](Problem&, walk::Inputs<float>&, View<float>&) {};
  using R = Problem&;
  using I = walk::Inputs<float>&;
  using V = View<float>&;
  const Box whole{0, 20, 0, 40};
  expect_words(tile({-1, 2, 0, 4}, as_it_is), {"weights: i0 must lie in [0, Nq = 20], got -1"});
  expect_words(tile({21, 0, 0, 4}, as_it_is), {"weights: i0 must lie in [0, Nq = 20], got 21"});
  expect_words(tile({18, 3, 0, 4}, as_it_is),
               {"weights: rows must lie in [0, Nq - i0 = 2], got 3"});
  expect_words(tile({18, -1, 0, 4}, as_it_is), {"rows must lie in [0, Nq - i0 = 2], got -1"});
  expect_words(tile({0, 2, 41, 0}, as_it_is), {"weights: j0 must lie in [0, Nk = 40], got 41"});
  expect_words(tile({0, 2, 39, 2}, as_it_is),
               {"weights: cols must lie in [0, Nk - j0 = 1], got 2"});
  expect_words(tile(whole, [](R, I in, V) { in.LSE = nullptr; }),
               {"weights: LSE is a null pointer", "the L of the forward"});
  expect_words(tile(whole, [](R, I in, V) { in.Q.data = nullptr; }), {"weights: Q is a null"});
  expect_words(tile(whole, [](R, I, V out) { out.data = nullptr; }), {"weights: P is a null"});
  expect_words(tile(whole, [](R, I in, V out) { out.data = const_cast<float*>(in.LSE); }),
               {"weights: P overlaps"});
  expect_words(tile(whole, [](R, I, V out) { out.row = 0; }),
               {"weights: two rows of P share memory"});
  expect_words(tile(whole, [](R q, I, V) { q.d = 129; }), {"d must lie in [1, 128], got 129"});
  expect_words(tile(whole, [](R q, I, V) { q.Hq = 3; }), {"Hq must be a multiple of Hkv"});
  expect_words(tile(whole, [](R q, I, V) { q.scale = INFINITY; }), {"scale must be finite"});
  expect_words(tile({0, 2, 0, 4}, [](R q, I, V) { q.Nk = (1 << 30) + 1; }),
               {"weights: Nk must be at most 2^30, got 1073741825"});

  // What nobody asks for is counted, too.
  expect_words(tile({0, 2, 0, 4}, [](R q, I, V) { q.B = 0, q.Hq = q.Hkv = Int(1) << 61; }),
               {"weights: B * H * N * d does not fit 64 bits"});
  expect_words(refusal([&] {
                 Problem q = p;
                 q.Hq = q.Hkv = Int(1) << 40, q.Nq = 0, q.Nk = 1 << 30;
                 walk::column_sums(q, all, P.data());
               }),
               {"weights: B * H * N * d does not fit 64 bits"});

  const auto best = [&](int k, bool overlap) {
    return refusal([&] {
      walk::largest(p, all, 0, 20, k, contiguous(P.data(), p.Hq, 20, 16),
                    contiguous(overlap ? reinterpret_cast<std::int32_t*>(P.data()) : keys.data(),
                               p.Hq, 20, 16));
    });
  };
  for (int k : {0, 17, -1})
    expect_words(best(k, false), {"weights: k must lie in [1, 16], got " + std::to_string(k)});
  expect_words(best(3, true), {"weights: keys overlaps P"});
  expect_words(refusal([&] { walk::column_sums(p, all, L.data()); }),
               {"weights: sums overlaps LSE"});
  expect_words(refusal([&] { walk::column_sums<float>(p, all, nullptr); }),
               {"weights: sums is a null pointer"});
  expect_words(refusal([&] { walk::one_head(p, all, 2, 0); }), {"b must lie in [0, B = 2), got 2"});
  walk::Inputs<float> far = all;
  far.K.batch = Int(1) << 62;
  expect_words(refusal([&] { walk::one_head(p, far, 1, 0); }),
               {"weights: a stride of K reaches beyond 64 bits: 4611686018427387904"});
  far = all, far.Q.head = -(Int(1) << 61);
  expect_words(refusal([&] { walk::one_head(p, far, 1, 3); }),
               {"weights: a stride of Q reaches beyond 64 bits: -2305843009213693952"});
  expect_words(refusal([&] { walk::one_head(p, all, 0, 4); }),
               {"h must lie in [0, Hq = 4), got 4"});
}

TEST_F(weights, NothingToDo) {
  each_type([]<class T>(T) {
    for (int what = 0; what < 4; ++what) {
      Case<T> c(sized_as(what == 0 ? 0 : 2, what == 1 ? 0 : 2, what == 1 ? 0 : 1, what == 2 ? 0 : 3,
                         what == 3 ? 0 : 5, 16));
      all_three(c, std::to_string(what));
    }
  });
}

// ---- what only the CPU can do, or only a GPU ----

#ifdef FA_EMULATED
// What is copied comes as early as it may, and at random times; late in all other tests.
TEST_F(weights, EarlyAndAtRandom) {
  using emulator::Timing;
  each_type([]<class T>(T) {
    Case<T> c(sized_as(1, 1, 1, 70, 140, 72));
    for (const emulator::Schedule& now :
         {emulator::Schedule{Timing::early, 0}, {Timing::random, 1}, {Timing::random, 2}}) {
      const emulator::WithSchedule until_the_end(now);
      all_three(c, "seed " + std::to_string(now.seed));
    }
  });
}
#else
// Rows of P 2^22 numbers apart, so that the last ones lie beyond 2^31.
TEST_F(weights, ATileOfMoreThanTwoToThe31) {
  constexpr Int apart = Int(1) << 22, rows = 600;
  const std::size_t bytes = std::size_t(rows * apart) * sizeof(float);
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  const DeviceMemory memory(bytes);
  each_type([&]<class T>(T) {
    Case<T> c(sized_as(1, 1, 1, rows, 70, 16));
    c.on_gpu({}, [&](const Problem& p, const auto& in, const DeviceCopy&) {
      walk::tile(p, in, {0, rows, 0, 70}, {memory.as<float>(), 0, 0, apart});
    });
    for (Int i : {Int(0), Int(511), Int(512), rows - 1}) {
      float row[70];
      FA_CUDA_CHECK(
          cudaMemcpy(row, memory.as<float>() + i * apart, sizeof row, cudaMemcpyDeviceToHost));
      for (Int j = 0; j < 70; ++j)
        EXPECT_NEAR(row[j], c.P.at(0, 0, i, j), c.tolerance(c.P.at(0, 0, i, j))) << i;
    }
  });
}

// Rows of Q and K 2^22 numbers apart, and so those of the lists: the last ones lie beyond 2^31.
TEST_F(weights, LargestAndSumsBeyondTwoToThe31) {
  constexpr Int d = 16, apart = Int(1) << 22, N = 600;
  constexpr int k = 5;
  const std::size_t bytes = std::size_t(N * apart) * sizeof(float);
  if (free_device_bytes() < 3. * double(bytes)) GTEST_SKIP() << "needs " << 3 * bytes << " bytes";
  const DeviceMemory inputs(bytes), lists(bytes), numbers(bytes);
  each_type([&]<class T>(T) {
    using D = Device<T>;
    Case<T> c(sized_as(1, 1, 1, N, N, d, Causal::top_left));
    D* const rows = inputs.as<D>();
    float* const P = lists.as<float>();
    std::int32_t* const keys = numbers.as<std::int32_t>();
    const auto to = cudaMemcpyHostToDevice, back = cudaMemcpyDeviceToHost;
    for (Int i = 0; i < N; ++i) {
      D* const row = rows + i * apart;
      FA_CUDA_CHECK(cudaMemcpy(row, &c.meant.Q.at(0, 0, i), d * sizeof(D), to));
      FA_CUDA_CHECK(cudaMemcpy(row + d, &c.meant.K.at(0, 0, i), d * sizeof(D), to));
    }
    Buffer<float> sums(1, 1, N, 1);
    c.on_gpu({sums.storage()}, [&](const Problem& p, const auto& in, const DeviceCopy& copy) {
      auto far = in;
      far.Q = {rows, 0, 0, apart};
      far.K = {rows + d, 0, 0, apart};
      walk::largest(p, far, 0, N, k, {P, 0, 0, apart}, {keys, 0, 0, apart});
      walk::column_sums(p, far, copy.at(sums.view()).data);
    });
    typename Case<T>::Best best{Buffer<float>(1, 1, N, k), Buffer<std::int32_t>(1, 1, N, k)};
    for (Int i = 0; i < N; ++i) {
      FA_CUDA_CHECK(cudaMemcpy(&best.P.at(0, 0, i), P + i * apart, k * sizeof(float), back));
      FA_CUDA_CHECK(cudaMemcpy(&best.keys.at(0, 0, i), keys + i * apart, k * sizeof *keys, back));
    }
    EXPECT_EQ(c.verdict(best, 0, N, k), "") << sizeof(T) << " bytes";
    EXPECT_EQ(c.verdict_of_sums(sums), "") << sizeof(T) << " bytes";
  });
}

// More sums than 2^31. All scores are 0, so that a weight is exp(-L) of its head.
TEST_F(weights, MoreThanTwoToThe31Sums) {
  constexpr Int heads = 520, Nk = Int(1) << 22, d = 8;
  const std::size_t bytes = std::size_t(heads * Nk) * sizeof(float);
  const DeviceMemory zeros(std::size_t(Nk * d) * sizeof(float)), of_heads(heads * sizeof(float));
  if (free_device_bytes() < double(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes";
  const DeviceMemory memory(bytes);
  FA_CUDA_CHECK(cudaMemset(zeros.as<void>(), 0, zeros.bytes()));
  std::vector<float> L(heads);
  for (Int h = 0; h < heads; ++h) L[std::size_t(h)] = 0.01f * float(h) - 2;
  FA_CUDA_CHECK(
      cudaMemcpy(of_heads.as<void>(), L.data(), of_heads.bytes(), cudaMemcpyHostToDevice));
  each_type([&]<class T>(T) {
    using D = Device<T>;
    FA_CUDA_CHECK(cudaMemset(memory.as<void>(), 0xff, bytes));  // NaN
    const Problem p = sized_as(1, heads, 1, 1, Nk, d).p;
    const walk::Inputs<D> in{contiguous<const D>(zeros.as<D>(), heads, 1, d),
                             contiguous<const D>(zeros.as<D>(), 1, Nk, d), of_heads.as<float>()};
    walk::column_sums(p, in, memory.as<float>());
    FA_CUDA_CHECK(cudaDeviceSynchronize());
    for (Int h : {Int(0), Int(511), Int(512), heads - 1})
      for (Int j : {Int(0), Nk / 2 + 1, Nk - 1}) {
        float sum = 0;
        FA_CUDA_CHECK(
            cudaMemcpy(&sum, memory.as<float>() + h * Nk + j, sizeof sum, cudaMemcpyDeviceToHost));
        const double want = std::exp(-double(L[std::size_t(h)]));
        EXPECT_NEAR(sum, want, 1e-5 * want) << h << " " << j << ", " << sizeof(T) << " bytes";
      }
  });
}
#endif

}  // namespace
