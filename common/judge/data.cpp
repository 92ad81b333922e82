#include "common/judge/data.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "common/judge/random.hpp"

namespace fa::judge {

std::string Data::name() const {
  static constexpr const char* names[] = {
      "normal",  "uniform", "integers",    "equal",        "level",      "alternating", "rising",
      "falling", "opposed", "spike_first", "spike_middle", "spike_last", "denormal"};
  std::ostringstream s;
  s << names[static_cast<int>(kind)];
  if (level != 1) s << level;
  return s.str();
}

namespace {

// What the last component contributes to the score of key j, before noise in the other components.
double score_of_key(const Data& data, std::int64_t j, std::int64_t Nk) {
  const double t = Nk > 1 ? double(j) / double(Nk - 1) : 0.0;
  switch (data.kind) {
    case Data::Kind::level:
      return data.level;
    case Data::Kind::alternating:
      return j % 2 ? -data.level : data.level;
    case Data::Kind::rising:
      return data.level * t;
    case Data::Kind::falling:
      return data.level * (1 - t);
    case Data::Kind::spike_first:
      return j == 0 ? data.level : 0;
    case Data::Kind::spike_middle:
      return j == Nk / 2 ? data.level : 0;
    case Data::Kind::spike_last:
      return j == Nk - 1 ? data.level : 0;
    default:
      return 0;
  }
}

}  // namespace

double element(const Data& data, char tensor, const Problem& p, std::uint64_t seed, std::int64_t b,
               std::int64_t h, std::int64_t i, std::int64_t x) {
  // Sizes do not enter the index, so a slice of a problem has the same numbers when run alone.
  const auto index = static_cast<std::uint64_t>(((b * 4096 + h) * (1 << 20) + i) * 1024 + x);
  const std::uint64_t stream = seed * 256 + static_cast<std::uint64_t>(tensor);
  const double z = normal(stream, index);
  const bool score = tensor == 'Q' || tensor == 'K';
  using Kind = Data::Kind;
  switch (data.kind) {
    case Kind::normal:
      return score ? data.level * z : z;
    case Kind::uniform:
      return tensor == 'V' ? judge::uniform(stream, index) : z;
    case Kind::integers:
      return hash(stream, index) % 5 ? 0.0 : static_cast<double>(integer(stream, index, -3, 3));
    case Kind::equal:
      if (tensor == 'Q') return 0;
      return tensor == 'V' ? static_cast<double>(integer(stream, index, -4, 4)) : z;
    case Kind::denormal:
      return tensor == 'V' ? 1e-40 * z : z;
    default:
      break;
  }
  if (!score) return z;
  // The last component makes the wanted score, so that it is added once, to small sums; as the
  // first it would round every later addition at its own size. The other components add noise.
  const double root =
      std::sqrt(std::max(std::fabs(data.level) / std::fabs(p.softmax_scale()), 1e-30));
  if (x == p.d - 1) {
    if (tensor == 'Q') return data.kind == Kind::opposed && i % 2 ? -root : root;
    const double sign = p.softmax_scale() < 0 ? -1 : 1;
    return sign * score_of_key(data, i, p.Nk) / (root * std::fabs(p.softmax_scale()));
  }
  return 0.25 * z;
}

}  // namespace fa::judge
