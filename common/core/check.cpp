#include "common/core/check.hpp"

#include <sys/resource.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <limits>
#include <optional>
#include <vector>

namespace fa {
namespace {

using Int = std::int64_t;

// A size of 0 leaves the product of the others to be asked for: strides are made of them.
bool product_fits(std::initializer_list<Int> factors) {
  Int product = 1;
  for (Int f : factors)
    if (__builtin_mul_overflow(product, std::max<Int>(f, 1), &product)) return false;
  return true;
}

}  // namespace

void check_problem(const char* who, const Problem& p, Int max_d) {
  struct {
    const char* name;
    Int value;
  } const sizes[] = {{"B", p.B}, {"Hq", p.Hq}, {"Hkv", p.Hkv}, {"Nq", p.Nq}, {"Nk", p.Nk}};
  for (const auto& s : sizes)
    require(s.value >= 0, who, ": ", s.name, " must not be negative, got ", s.value);
  require(p.d >= 1 && p.d <= max_d, who, ": d must lie in [1, ", max_d, "], got ", p.d);
  require(p.Hkv > 0 ? p.Hq % p.Hkv == 0 : p.Hq == 0, who,
          ": Hq must be a multiple of Hkv, got Hq = ", p.Hq, ", Hkv = ", p.Hkv);
  require(product_fits({p.B, p.Hq, p.Nq, p.d, 16}) && product_fits({p.B, p.Hkv, p.Nk, p.d, 16}) &&
              product_fits({p.B, p.Hq, p.Nq, p.Nk}),
          who, ": B * H * N * d does not fit 64 bits");
  require(
      p.causal == Causal::none || p.causal == Causal::top_left || p.causal == Causal::bottom_right,
      who, ": causal has the unknown value ", static_cast<int>(p.causal));
}

void check_key_lengths(const char* who, const Problem& p) {
  for (Int b = 0; p.key_lengths && b < p.B; ++b)
    require(p.key_lengths[b] >= 0 && p.key_lengths[b] <= p.Nk, who, ": key_lengths[", b,
            "] must lie in [0, Nk = ", p.Nk, "], got ", p.key_lengths[b]);
}

namespace detail {
namespace {

bool empty(const Region& r) { return r.B == 0 || r.H == 0 || r.N == 0; }

struct Dim {
  Int stride, size;
};

struct Both {
  Int stride, n_x, n_y;
};

// The rows' dimensions that repeat anything, smallest stride first.
std::vector<Dim> dims(const Region& r) {
  std::vector<Dim> dims;
  for (Dim dim : {Dim{r.row, r.N}, Dim{r.head, r.H}, Dim{r.batch, r.B}})
    if (dim.size > 1) dims.push_back({std::abs(dim.stride), dim.size});
  std::sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride < b.stride; });
  return dims;
}

// Addresses of the first byte of every row, ascending.
std::vector<const char*> row_starts(const Region& r) {
  std::vector<const char*> starts;
  starts.reserve(static_cast<std::size_t>(r.B * r.H * r.N));
  const char* base = static_cast<const char*>(r.data);
  for (Int b = 0; b < r.B; ++b)
    for (Int h = 0; h < r.H; ++h)
      for (Int i = 0; i < r.N; ++i)
        starts.push_back(base + (b * r.batch + h * r.head + i * r.row) * r.element);
  std::sort(starts.begin(), starts.end());
  return starts;
}

bool overlaps_itself(const Region& r) {
  // Usual layouts nest: each stride steps over all that lies inside it. Others are counted out.
  Int extent = r.d;
  bool nested = true;
  for (Dim dim : dims(r)) {
    nested = nested && dim.stride >= extent;
    extent += dim.stride * (dim.size - 1);
  }
  if (nested) return false;
  const auto starts = row_starts(r);
  for (std::size_t i = 1; i < starts.size(); ++i)
    if (starts[i] - starts[i - 1] < r.d * r.element) return true;
  return false;
}

// Two tensors with the same strides, as the parts of one packed tensor have them, overlap if the
// distance between them is a sum of steps n_k stride_k that both can make, up to a row's length. As
// the strides nest, n_k is the quotient or the one above it: at most eight sums, whatever the
// sizes. Nothing if the strides differ or do not nest.
std::optional<bool> overlap_of_equal_strides(const Region& x, const Region& y) {
  if (x.row != y.row || x.head != y.head || x.batch != y.batch || x.element != y.element) return {};
  std::array<Both, 3> dims = {{{x.row, x.N, y.N}, {x.head, x.H, y.H}, {x.batch, x.B, y.B}}};
  std::sort(dims.begin(), dims.end(), [](Both a, Both b) { return a.stride > b.stride; });
  Int extent = std::max(x.d, y.d);
  for (int k = 2; k >= 0; --k) {
    const Int most = std::max(dims[k].n_x, dims[k].n_y);
    if (most == 1) continue;
    if (dims[k].stride < extent) return {};
    extent += dims[k].stride * (most - 1);
  }
  std::vector<Int> distances = {
      (static_cast<const char*>(y.data) - static_cast<const char*>(x.data)) / x.element};
  for (const Both& dim : dims) {
    if (std::max(dim.n_x, dim.n_y) == 1) continue;
    std::vector<Int> rest;
    for (Int distance : distances) {
      const Int q = distance / dim.stride - (distance % dim.stride < 0);
      for (Int n : {q, q + 1})
        if (n > -dim.n_y && n < dim.n_x) rest.push_back(distance - n * dim.stride);
    }
    distances = rest;
  }
  return std::any_of(distances.begin(), distances.end(),
                     [&](Int distance) { return distance < x.d && -distance < y.d; });
}

bool overlap(const Region& x, const Region& y) {
  if (empty(x) || empty(y) || !x.data || !y.data) return false;
  // Numbers, not pointers: strides may reach where no memory can be.
  const auto range = [](const Region& r) {
    Int lo = static_cast<Int>(reinterpret_cast<std::uintptr_t>(r.data));
    Int hi = lo + r.d * r.element;
    for (Dim dim : {Dim{r.row, r.N}, Dim{r.head, r.H}, Dim{r.batch, r.B}}) {
      const Int reach = dim.stride * (dim.size - 1) * r.element;
      (reach < 0 ? lo : hi) += reach;
    }
    return std::pair(lo, hi);
  };
  const auto [x_lo, x_hi] = range(x);
  const auto [y_lo, y_hi] = range(y);
  if (x_hi <= y_lo || y_hi <= x_lo) return false;
  // The ranges cross, as those of Q and K in one packed tensor do.
  if (const auto answer = overlap_of_equal_strides(x, y)) return *answer;
  // Rare: compare row by row.
  const auto xs = row_starts(x), ys = row_starts(y);
  for (std::size_t i = 0, j = 0; i < xs.size() && j < ys.size();) {
    if (xs[i] + x.d * x.element <= ys[j])
      ++i;
    else if (ys[j] + y.d * y.element <= xs[i])
      ++j;
    else
      return true;
  }
  return false;
}

}  // namespace

void check_regions(const char* who, std::span<const Region> inputs,
                   std::span<const Region> outputs) {
  const auto present = [&](const Region& r) {
    for (Dim dim : {Dim{r.row, r.N}, Dim{r.head, r.H}, Dim{r.batch, r.B}})
      require(std::abs(dim.stride / 2) <
                  std::numeric_limits<Int>::max() / 64 / std::max<Int>(dim.size, 1),
              who, ": a stride of ", r.name, " reaches beyond 64 bits: ", dim.stride);
    require(r.data || r.optional || empty(r), who, ": ", r.name, " is a null pointer");
    require(reinterpret_cast<std::uintptr_t>(r.data) % static_cast<std::size_t>(r.element) == 0,
            who, ": ", r.name, " must be aligned to its element, ", r.element, " bytes");
  };
  std::for_each(inputs.begin(), inputs.end(), present);
  std::for_each(outputs.begin(), outputs.end(), present);
  for (const Region& output : outputs) {
    if (empty(output) || !output.data) continue;
    require(!overlaps_itself(output), who, ": two rows of ", output.name,
            " share memory (strides batch ", output.batch, ", head ", output.head, ", row ",
            output.row, "); an output needs a place for every row");
    for (const Region& input : inputs)
      require(!overlap(output, input), who, ": ", output.name, " overlaps ", input.name,
              "; outputs must not share memory with inputs");
    for (const Region* other = outputs.data(); other != &output; ++other)
      require(!overlap(output, *other), who, ": ", output.name, " overlaps ", other->name,
              "; every output needs memory of its own");
  }
}

}  // namespace detail

namespace {

constexpr Int unlimited = std::numeric_limits<Int>::max();

// First number after `key` in a file of "key number" lines; with an empty key the file's first.
Int read_number(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  if (!key.empty())
    while (file >> word && word != key) {
    }
  Int value = 0;
  return file >> value ? value : unlimited;
}

Int ulimit_room() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return unlimited;
  const Int pages = read_number("/proc/self/statm", "");
  if (pages == unlimited) return unlimited;
  return std::max<Int>(static_cast<Int>(limit.rlim_cur) - pages * sysconf(_SC_PAGESIZE), 0);
}

}  // namespace

Int detail::cgroup_room(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  Int room = unlimited;
  for (std::string line; std::getline(file, line);) {
    // "4:cpu,memory:/group" in version 1, "0::/group" in version 2
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && (controllers + ',').find("memory,") == std::string::npos) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (v2 ? "" : "/memory");
    // A group has no more than any group above it. Memory of files can be had back.
    for (std::string group = line.substr(second + 1);; group.resize(group.rfind('/'))) {
      const std::string folder = mount + group;
      const Int limit = read_number(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), "");
      const Int used = read_number(folder + "/memory.stat", v2 ? "anon" : "total_rss");
      if (limit != unlimited)
        room = std::min(room, std::max<Int>(limit - (used == unlimited ? 0 : used), 0));
      if (group.rfind('/') == std::string::npos) break;
    }
  }
  return room;
}

namespace {

#ifdef __APPLE__
// All that is built in: macOS compresses and swaps, so that what is free says little.
Int system_room() {
  Int bytes = 0;
  std::size_t size = sizeof bytes;
  return sysctlbyname("hw.memsize", &bytes, &size, nullptr, 0) == 0 ? bytes : unlimited;
}
#else
// What the system and the cgroup have free.
Int system_room() {
  const Int kib = read_number("/proc/meminfo", "MemAvailable:");
  return std::min(kib == unlimited ? unlimited : kib * 1024, detail::cgroup_room());
}
#endif

bool malloc_has(double bytes) {
  if (bytes > 1e18) return false;
  void* volatile memory = std::malloc(static_cast<std::size_t>(bytes));
  std::free(memory);
  return memory != nullptr;
}

}  // namespace

Int available_memory() { return std::min(system_room(), ulimit_room()); }

void check_memory(const char* who, const std::string& what, double bytes, const char* advice) {
  // A little more than `bytes`, for the buffers of a product and a thread's stack.
  const double mib = 1024.0 * 1024.0;
  const double wanted = bytes + std::min(bytes, 2 * mib);
  // Is `ulimit -v` set? Where it leaves nothing, malloc may still hold what was freed before.
  double room = static_cast<double>(ulimit_room());
  if (room < wanted && malloc_has(wanted)) room = static_cast<double>(unlimited);
  // To ask the system takes a tenth of a millisecond, which would show in the time of a small
  // problem; and there malloc fails only beyond a ulimit.
  if (bytes >= 16e6) room = std::min(room, static_cast<double>(system_room()));
  const double available = std::max(room - (wanted - bytes), 0.0);
  require(bytes <= available, std::fixed, std::setprecision(1), who, ": no memory for ", what, ": ",
          bytes / mib, " MiB, but only ", available / mib, " MiB are free; ", advice);
}

void check_scratch(const std::string& who, const Scratch& scratch, const char* asked,
                   std::size_t bytes, std::size_t alignment) {
  if (bytes == 0) return;
  require(scratch.data, who, " needs ", asked, " = ", bytes, " bytes of scratch, got null");
  require(scratch.bytes >= bytes, who, " needs ", asked, " = ", bytes, " bytes of scratch, got ",
          scratch.bytes);
  require(reinterpret_cast<std::uintptr_t>(scratch.data) % alignment == 0, who,
          ": scratch must be aligned to ", alignment, " bytes, got ", scratch.data);
}

}  // namespace fa
