// What draw.py draws: the weights of one head that continues repeated texts, asked of the kernels
// on the CPU.
//
//   cmake --build build --target stage06_weights_record
//   build/06_optimized/stage06_weights_record > 06_optimized/beyond/weights/results/head.json
//
// The head is made by hand, without any training. A query says its own word, and a key the word
// before it: so a word looks at what came after it the last time. The first key has an entry that
// every query likes a little, for those that find nothing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "06_optimized/beyond/weights/weights.hpp"
#include "common/core/cuda.hpp"

namespace {

const std::vector<std::string> text = {"the", "cat", "sat", "on", "the", "mat", ".",
                                       "the", "dog", "sat", "on", "the", "mat", "."};
constexpr int d = 16, top = 2;
constexpr float match = 4, first_key = 2;  // scores; all others are 0

template <class T>
void print(const char* name, const std::vector<T>& numbers, int per_row, const char* format) {
  std::printf("  \"%s\": [", name);
  for (std::size_t n = 0; n < numbers.size(); ++n) {
    if (n) std::printf(n % std::size_t(per_row) ? ", " : ",\n    ");
    std::printf(format, numbers[n]);
  }
  std::printf("]");
}

}  // namespace

int main() {
  std::vector<std::string> words;
  for (const std::string& word : text)
    if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
  const auto number = [&](std::size_t i) {
    return std::size_t(std::find(words.begin(), words.end(), text[i]) - words.begin());
  };

  const std::size_t N = text.size();
  std::vector<float> Q(N * d), K(N * d), L(N), P(N * N), best(N * top), sums(N);
  std::vector<std::int32_t> keys(N * top);
  for (std::size_t i = 0; i < N; ++i) {
    Q[i * d + number(i)] = match;
    Q[i * d + d - 1] = first_key;
    if (i > 0)
      K[i * d + number(i - 1)] = 1;
    else
      K[d - 1] = 1;
  }

  fa::Problem p;
  p.Nq = p.Nk = std::int64_t(N);
  p.d = d;
  p.causal = fa::Causal::top_left;
  p.scale = 1;
  // L, in double: there is no need of a forward for so few rows.
  for (std::size_t i = 0; i < N; ++i) {
    double l = 0;
    for (std::size_t j = 0; j <= i; ++j) {
      double s = 0;
      for (std::size_t x = 0; x < d; ++x) s += double(Q[i * d + x]) * double(K[j * d + x]);
      l += std::exp(s);
    }
    L[i] = float(std::log(l));
  }

  const auto n = std::int64_t(N);
  const fa::weights::Inputs<float> in{fa::contiguous<const float>(Q.data(), 1, n, d),
                                      fa::contiguous<const float>(K.data(), 1, n, d), L.data()};
  fa::weights::tile(p, in, {0, n, 0, n}, fa::contiguous(P.data(), 1, n, n));
  fa::weights::largest(p, in, 0, n, top, fa::contiguous(best.data(), 1, n, top),
                       fa::contiguous(keys.data(), 1, n, top));
  fa::weights::column_sums(p, in, sums.data());
  FA_CUDA_CHECK(cudaDeviceSynchronize());

  std::printf("{\n  \"text\": [");
  for (std::size_t i = 0; i < N; ++i) std::printf("%s\"%s\"", i ? ", " : "", text[i].c_str());
  std::printf("],\n");
  print("P", P, int(N), "%.4f");
  std::printf(",\n");
  print("largest", best, top, "%.4f");
  std::printf(",\n");
  print("keys", keys, top, "%d");
  std::printf(",\n");
  print("sums", sums, int(N), "%.4f");
  std::printf("\n}\n");
}
