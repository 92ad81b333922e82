// What the program is asked for, in words that are checked before anything is started.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "06_optimized/ring/check/program.hpp"
#include "common/core/check.hpp"

namespace fa::ring {

const char* const usage =
    R"(usage: stage06_ring [options], one process a rank: ./learn ring --gpus N [options] starts N

  --length N,...       rows of the whole sequence (32768)
  --heads N            of queries (16)
  --key-heads N,...    of keys (as --heads)
  --head-dim N         (128)
  --type T             bf16, fp16; on the CPU float, double
  --causal             under a causal mask; --masks none,causal: both, in this order
  --kind K,...         ring, gather, heads (ring)
  --contiguous         a rank's rows are one block; else zigzag, two
  --backward           also forward and backward together
  --deterministic      a backward with the same bits in every run; else the fastest
  --check              compares the result with the plain kernel's on the whole, at rank 0
  --rounds N           (5); 0 times nothing
  --seconds S          begins no further problem after that time
  --alone P            one process as if it were a rank of P, with nobody to talk to: what such a
                       rank computes, and its memory
  --no-whole           does not time the whole problem on one GPU
  --json FILE          what was measured
  --timeline FILE      what was computed and copied when, step by step
  --sockets            messages take the way through host memory, so that ranks may share a GPU: to
                       try the program where there is one
  --timeout S          how long a rank that does not come is waited for (20): longer than the
                       longest computation between two messages, as the whole on one GPU
)";

namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream text(list);
  for (std::string part; std::getline(text, part, ',');) parts.push_back(part);
  if (parts.empty()) parts.emplace_back();
  return parts;
}
std::int64_t number(const std::string& option, const std::string& text, std::int64_t least,
                    std::int64_t most) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  require(!text.empty() && *end == 0 && value >= least && value <= most, "ring: ", option,
          " must be a number from ", least, " to ", most, ", got '", text, "'");
  return value;
}
double seconds(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  require(!text.empty() && *end == 0 && value > 0 && value <= 1e6, "ring: ", option,
          " must be a time in seconds, got '", text, "'");
  return value;
}
Method method(const std::string& text) {
  for (const Method method : {Method::ring, Method::gather, Method::heads})
    if (text == name(method)) return method;
  throw std::invalid_argument("ring: --kind must be ring, gather or heads, got '" + text + "'");
}

}  // namespace

Asked asked(const std::vector<std::string>& words, const std::vector<std::string>& types) {
  Asked a;
  a.type = types.front();
  for (std::size_t k = 0; k < words.size(); ++k) {
    const std::string& option = words[k];
    const auto value = [&]() -> const std::string& {
      require(k + 1 < words.size(), "ring: ", option, " needs a value");
      return words[++k];
    };
    const auto numbers = [&](std::int64_t least, std::int64_t most) {
      std::vector<std::int64_t> all;
      for (const std::string& text : split(value()))
        all.push_back(number(option, text, least, most));
      return all;
    };
    constexpr std::int64_t longest = std::int64_t(1) << 30;
    if (option == "--length") {
      a.lengths = numbers(1, longest);
    } else if (option == "--heads") {
      a.heads = number(option, value(), 1, 4096);
    } else if (option == "--key-heads") {
      a.key_heads = numbers(1, 4096);
    } else if (option == "--head-dim") {
      a.d = number(option, value(), 1, 512);
    } else if (option == "--type") {
      a.type = value();
      std::string known;
      for (const std::string& type : types) known += (known.empty() ? "" : ", ") + type;
      require(std::find(types.begin(), types.end(), a.type) != types.end(),
              "ring: --type must be one of ", known, ", got '", a.type, "'");
    } else if (option == "--causal") {
      a.causal = {true};
    } else if (option == "--masks") {
      a.causal.clear();
      for (const std::string& mask : split(value())) {
        require(mask == "none" || mask == "causal", "ring: --masks are none and causal, got '",
                mask, "'");
        a.causal.push_back(mask == "causal");
      }
    } else if (option == "--kind") {
      a.methods.clear();
      for (const std::string& text : split(value())) a.methods.push_back(method(text));
    } else if (option == "--contiguous") {
      a.contiguous = true;
    } else if (option == "--deterministic") {
      a.deterministic = true;
    } else if (option == "--backward") {
      a.backward = true;
    } else if (option == "--check") {
      a.check = true;
    } else if (option == "--sockets") {
      a.sockets = true;
    } else if (option == "--no-whole") {
      a.whole = false;
    } else if (option == "--rounds") {
      a.rounds = int(number(option, value(), 0, 1000));
    } else if (option == "--alone") {
      a.alone = int(number(option, value(), 1, 65536));
    } else if (option == "--seconds") {
      a.seconds = seconds(option, value());
    } else if (option == "--timeout") {
      a.timeout_ms = int(seconds(option, value()) * 1000);
    } else if (option == "--json") {
      a.json = value();
    } else if (option == "--timeline") {
      a.timeline = value();
    } else if (option == "--help") {
      a.help = true;
    } else {
      require(option == "--cpu", "ring: unknown option '", option, "'; --help lists all");
    }
  }
  if (a.key_heads.empty()) a.key_heads = {a.heads};
  for (const std::int64_t heads : a.key_heads)
    require(a.heads % heads == 0, "ring: --heads must be a multiple of --key-heads, got ", a.heads,
            " and ", heads);
  return a;
}

// A setting a line, so that what differs can be named.
std::string Asked::text() const {
  std::ostringstream text;
  const auto list = [&](const char* what, const auto& all, const auto& shown) {
    text << what << ' ';
    for (std::size_t k = 0; k < all.size(); ++k) text << (k ? "," : "") << shown(all[k]);
    text << '\n';
  };
  const auto same = [](std::int64_t x) { return x; };
  list("--length", lengths, same);
  text << "--heads " << heads << '\n';
  list("--key-heads", key_heads, same);
  text << "--head-dim " << d << "\n--type " << type << '\n';
  list("--masks", causal, [](bool x) { return x ? "causal" : "none"; });
  list("--kind", methods, [](Method x) { return name(x); });
  text << "--contiguous " << contiguous << "\n--backward " << backward << "\n--deterministic "
       << deterministic << "\n--check " << check << "\n--alone " << alone << "\n--no-whole "
       << !whole << "\n--rounds " << rounds << "\n--seconds " << seconds << "\n--sockets "
       << sockets << "\n--timeline " << !timeline.empty() << '\n';
  return text.str();
}

}  // namespace fa::ring
