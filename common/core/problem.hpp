// What is to be computed: sizes, mask and scale of one attention problem.
#pragma once
#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>

#ifdef __CUDACC__
#define FA_HOST_DEVICE __host__ __device__
#else
#define FA_HOST_DEVICE
#endif

namespace fa {

// exp(x) = 2^(x log2_e), where 2^x is one instruction, or few.
inline constexpr float log2_e = std::numbers::log2e_v<float>, ln_2 = std::numbers::ln2_v<float>;

// Which keys a query may see. The two alignments differ only when Nq != Nk:
//   top_left      row i sees keys j <= i                (PyTorch)
//   bottom_right  row i sees keys j <= i + (Nk - Nq)    (flash-attn 2.1 and later)
enum class Causal { none, top_left, bottom_right };

// Q is [B, Hq, Nq, d]; K and V are [B, Hkv, Nk, d]; query head h reads key head h / (Hq / Hkv).
struct Problem {
  std::int64_t B = 1;    // batch
  std::int64_t Hq = 1;   // query heads, a multiple of Hkv
  std::int64_t Hkv = 1;  // key/value heads
  std::int64_t Nq = 0;   // queries per head
  std::int64_t Nk = 0;   // keys per head
  std::int64_t d = 0;    // head dimension
  Causal causal = Causal::none;
  std::optional<double> scale = std::nullopt;  // factor of the scores; 1 / sqrt(d) unless given
  const std::int64_t* key_lengths = nullptr;   // [B], or null: batch b sees keys j < key_lengths[b]

  double softmax_scale() const { return scale ? *scale : 1.0 / std::sqrt(static_cast<double>(d)); }
  FA_HOST_DEVICE std::int64_t key_head(std::int64_t h) const { return h / (Hq / Hkv); }
};

// The mask of one batch entry. Every mask of this course lets a row see a prefix of the keys, so
// one number per row says it all: tails, tiles to skip, diagonal tiles, rows that see nothing.
// A copy is 32 bytes and may be passed to a kernel.
struct Mask {
  std::int64_t Nq, Nk;
  std::int64_t length;  // keys at or past this one are padding
  Causal causal;

  FA_HOST_DEVICE Mask(const Problem& p, std::int64_t b)
      : Nq(p.Nq), Nk(p.Nk), length(p.Nk), causal(p.causal) {
    if (p.key_lengths) length = clamp(p.key_lengths[b], Nk);
  }

  // Row i sees keys [0, visible_keys(i)). Never decreases with i.
  FA_HOST_DEVICE std::int64_t visible_keys(std::int64_t i) const {
    if (causal == Causal::none) return length;
    return clamp(causal == Causal::top_left ? i + 1 : i + 1 + Nk - Nq, length);
  }

  // The first row that sees key j, Nq if none does: rows [first_row(j), Nq) are those that see it.
  FA_HOST_DEVICE std::int64_t first_row(std::int64_t j) const {
    if (j >= length) return Nq;
    if (causal == Causal::none) return 0;
    return clamp(causal == Causal::top_left ? j : j - Nk + Nq, Nq);
  }

 private:
  FA_HOST_DEVICE static std::int64_t clamp(std::int64_t x, std::int64_t top) {
    return x < 0 ? 0 : x > top ? top : x;
  }
};

// Number of keys that query i of batch entry b sees.
FA_HOST_DEVICE inline std::int64_t visible_keys(const Problem& p, std::int64_t b, std::int64_t i) {
  return Mask(p, b).visible_keys(i);
}

}  // namespace fa
