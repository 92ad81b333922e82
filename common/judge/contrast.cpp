#include "common/judge/contrast.hpp"

#include <algorithm>
#include <functional>
#include <set>

namespace fa::judge {
namespace {

// A property of a case, in words for those that have it and for those that do not.
struct Property {
  std::string with, without;
  std::function<bool(const Outcome&)> holds;
};

// Simple ones first: of those that explain as much, the first is told.
std::vector<Property> properties(const std::vector<Outcome>& outcomes) {
  std::vector<Property> list;
  const auto add = [&](const std::string& with, const std::string& without, auto holds) {
    list.push_back({with, without, holds});
  };
  std::set<std::string> types;
  for (const Outcome& o : outcomes) types.insert(o.type);
  for (const std::string& type : types)
    add("type " + type, "other types than " + type,
        [type](const Outcome& o) { return o.type == type; });

  add("groups of query heads", "a key head for each query head",
      [](const Outcome& o) { return o.spec.p.Hq != o.spec.p.Hkv; });
  add("a causal mask", "no causal mask",
      [](const Outcome& o) { return o.spec.p.causal != Causal::none; });
  add("top_left", "another mask than top_left",
      [](const Outcome& o) { return o.spec.p.causal == Causal::top_left; });
  add("bottom_right", "another mask than bottom_right",
      [](const Outcome& o) { return o.spec.p.causal == Causal::bottom_right; });
  add("key lengths", "no key lengths", [](const Outcome& o) { return !o.spec.lengths.empty(); });
  add("scale < 0", "scale >= 0", [](const Outcome& o) { return o.spec.p.softmax_scale() < 0; });
  add("Nq > Nk", "Nq <= Nk", [](const Outcome& o) { return o.spec.p.Nq > o.spec.p.Nk; });
  add("Nq < Nk", "Nq >= Nk", [](const Outcome& o) { return o.spec.p.Nq < o.spec.p.Nk; });
  add("BNHD", "BHND", [](const Outcome& o) { return o.spec.layout.order == Layout::Order::BNHD; });
  add("gaps", "no gaps", [](const Outcome& o) { return o.spec.layout.gap != 0; });
  add("an offset", "no offset", [](const Outcome& o) { return o.spec.layout.offset != 0; });
  add("reversed rows", "rows in order", [](const Outcome& o) { return o.spec.layout.reversed; });
  add("broadcast heads", "heads of their own",
      [](const Outcome& o) { return o.spec.layout.broadcast_heads; });

  const std::pair<std::string, std::int64_t Problem::*> sizes[] = {
      {"Nk", &Problem::Nk}, {"Nq", &Problem::Nq}, {"d", &Problem::d},
      {"B", &Problem::B},   {"Hq", &Problem::Hq}, {"Hkv", &Problem::Hkv}};
  for (const auto& [name, size] : sizes) {
    std::set<std::int64_t> values;
    for (const Outcome& o : outcomes) values.insert(o.spec.p.*size);
    for (std::int64_t v : values)
      if (v != *values.rbegin())
        add(name + " > " + std::to_string(v), name + " <= " + std::to_string(v),
            [size = size, v](const Outcome& o) { return o.spec.p.*size > v; });
  }
  for (const auto& [name, size] : sizes)
    for (std::int64_t m : {2, 4, 8, 16, 32, 64, 128})
      for (std::int64_t r = 0; r < m; ++r)
        if (r == 0 || m <= 8) {
          const std::string text = name + " % " + std::to_string(m);
          add(text + " == " + std::to_string(r), text + " != " + std::to_string(r),
              [size = size, m, r](const Outcome& o) { return o.spec.p.*size % m == r; });
        }
  // All kinds of data with which something fails, if they can be told in a line.
  std::set<std::string> data;
  for (const Outcome& o : outcomes)
    if (o.failed) data.insert(o.spec.data.name());
  std::string names;
  for (const std::string& name : data) names += (names.empty() ? "data " : ", ") + name;
  if (data.size() <= 6)
    add(names, "other data",
        [data](const Outcome& o) { return data.count(o.spec.data.name()) > 0; });
  return list;
}

// What is done in some cases and not in others.
std::vector<Property> deeds(const std::vector<Outcome>& outcomes) {
  std::set<std::string> whats;
  for (const Outcome& o : outcomes)
    if (o.failed) whats.insert(o.what);
  std::vector<Property> list;
  list.reserve(whats.size());
  for (const std::string& what : whats)
    list.push_back({"'" + what + "'", "no '" + what + "'",
                    [what](const Outcome& o) { return o.what == what; }});
  return list;
}

std::string all(std::size_t n, bool noun) {
  const std::string cases = !noun ? "" : n == 1 ? " case" : " cases";
  return (n == 1 ? "the one" : "all " + std::to_string(n)) + cases;
}

}  // namespace

std::string contrast(const std::vector<Outcome>& all_outcomes) {
  // Comparisons with the oracle are set against their like, if such fail.
  std::vector<Outcome> outcomes;
  for (const Outcome& o : all_outcomes)
    if (o.what.empty()) outcomes.push_back(o);
  const bool plain =
      std::any_of(outcomes.begin(), outcomes.end(), [](auto& o) { return o.failed; });
  if (!plain) outcomes = all_outcomes;
  const auto count = [&](auto which) {
    return std::size_t(std::count_if(outcomes.begin(), outcomes.end(), which));
  };
  const std::size_t failed = count([](const Outcome& o) { return o.failed; });
  const std::size_t passed = outcomes.size() - failed;
  if (failed == 0 || passed == 0) return {};

  // Of a property that all failures share: how many cases without it there are. They all pass.
  std::size_t most = 0;
  std::string with, without;
  for (const Property& property : plain ? properties(outcomes) : deeds(outcomes))
    for (bool holds : {true, false}) {
      const auto has = [&](const Outcome& o) { return property.holds(o) == holds; };
      if (count([&](const Outcome& o) { return o.failed && !has(o); }) > 0) continue;
      const std::size_t explained = count([&](const Outcome& o) { return !has(o); });
      if (explained <= most) continue;
      most = explained;
      with = holds ? property.with : property.without;
      without = holds ? property.without : property.with;
    }
  if (2 * most < passed) return {};
  const std::size_t others = passed - most;
  return "passes: " + all(most, true) + " with " + without + "; fails: " +
         (others == 0 ? all(failed, false)
                      : std::to_string(failed) + " of the " + std::to_string(failed + others)) +
         " with " + with;
}

}  // namespace fa::judge
