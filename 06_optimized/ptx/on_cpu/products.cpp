// What the instructions of ptx/mma.cuh and ptx/wgmma.cuh do.
#include "06_optimized/ptx/on_cpu/products.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "06_optimized/ptx/fragments.hpp"
#include "common/emulator/block.hpp"

namespace fa::optimized {
using namespace fa::emulator;

namespace {

using Bits = std::uint16_t;
Bits half_of(std::uint32_t pair, int second) { return Bits(pair >> 16 * second); }

// All 2^16 numbers of fp16; a number of bf16 is the upper half of a float.
const std::vector<float> fp16 = [] {
  std::vector<float> all(1 << 16);
  for (std::uint32_t b = 0; b < all.size(); ++b) {
    __half h;
    h.bits = Bits(b);
    all[b] = float(h);
  }
  return all;
}();
inline float to_float(Bits bits, Type type) {
  if (type == Type::fp16) return fp16[bits];
  const std::uint32_t b = std::uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

}  // namespace

// ---- a warp multiplies 16 x 16 by 16 x 8: mma.sync ----

namespace {
struct Mma {
  float* C;
  const std::uint32_t *A, *B;
  Type type;
};
}  // namespace
// The lanes hold their parts as fragments.hpp says; the sums are made in fp32.
void mma(float* C, const std::uint32_t* A, std::uint32_t B0, std::uint32_t B1, Type type) {
  const std::array<std::uint32_t, 2> B = {B0, B1};
  const Mma mine = {C, A, B.data(), type};
  meet();
  count(Op::mma, nullptr, 8, FA_HERE);
  together(
      [](unsigned first) {
        const auto of_lane = [&](int lane) -> const Mma& {
          return *static_cast<const Mma*>(all_threads()[first + unsigned(lane)].given);
        };
        float a[16][16], b[16][8], c[16][8];
        for (int lane = 0; lane < 32; ++lane) {
          const Mma& m = of_lane(lane);
          for (int second = 0; second < 2; ++second) {
            for (int i = 0; i < 4; ++i)
              a[a_cell(lane, i).row][a_cell(lane, i).col + second] =
                  to_float(half_of(m.A[i], second), m.type);
            for (int i = 0; i < 2; ++i) {
              b[b_cell(lane, i).row + second][b_cell(lane, i).col] =
                  to_float(half_of(m.B[i], second), m.type);
              c[c_cell(lane, i).row][c_cell(lane, i).col + second] = m.C[2 * i + second];
            }
          }
        }
        // [quote sum]
        for (int row = 0; row < 16; ++row)
          for (int k = 0; k < 16; ++k)
            for (int col = 0; col < 8; ++col) c[row][col] += a[row][k] * b[k][col];
        // [end quote]
        for (int lane = 0; lane < 32; ++lane)
          for (int i = 0; i < 4; ++i)
            of_lane(lane).C[i] = c[c_cell(lane, i / 2).row][c_cell(lane, i / 2).col + i % 2];
      },
      &mine, FA_HERE);
}

// ---- blocks of 8 x 8 between shared memory and fragments: ldmatrix, stmatrix ----

namespace {
struct Blocks {
  void* row;  // of block lane / 8, row lane % 8
  std::uint32_t* fragment;
  bool transposed;
};
// f(number in shared memory, the fragment that holds it, which half of it), for all 4 x 64.
template <class F>
void each_number(unsigned first, const F& f) {
  const auto of_lane = [&](int lane) -> const Blocks& {
    return *static_cast<const Blocks*>(all_threads()[first + unsigned(lane)].given);
  };
  for (int lane = 0; lane < 32; ++lane)
    for (int block = 0; block < 4; ++block)
      for (int second = 0; second < 2; ++second) {
        // [quote ldmatrix]
        int row = lane / 4, col = lane % 4 * 2 + second;
        if (of_lane(lane).transposed) std::swap(row, col);
        f(static_cast<Bits*>(of_lane(8 * block + row).row) + col, of_lane(lane).fragment + block,
          second);
        // [end quote]
      }
}
unsigned row_of_block(const void* row, const char* who, Place at) {
  const unsigned byte = shared_offset(row, who, at);
  if (byte % 16)
    finding(std::string(who) + " at " + text_of(at) + ": byte " + std::to_string(byte) +
            " of shared memory is no multiple of 16 (PTX, ldmatrix)");
  return byte;
}
}  // namespace
void load_blocks(std::uint32_t* to, const void* row, bool transposed) {
  thread_reads(row_of_block(row, "ldmatrix", FA_HERE), 16, FA_HERE);
  meet();
  count(Op::ldmatrix, row, 16, FA_HERE);
  const Blocks mine = {const_cast<void*>(row), to, transposed};
  together(
      [](unsigned first) {
        each_number(first, [](const Bits* number, std::uint32_t* fragment, int second) {
          *fragment = second ? (*fragment & 0xffff) | std::uint32_t(*number) << 16 : *number;
        });
      },
      &mine, FA_HERE);
}
void store_blocks(void* row, const std::uint32_t* from, bool transposed) {
  thread_writes(row_of_block(row, "stmatrix", FA_HERE), 16, FA_HERE, true);
  meet();
  count(Op::stmatrix, row, 16, FA_HERE);
  const Blocks mine = {row, const_cast<std::uint32_t*>(from), transposed};
  together(
      [](unsigned first) {
        each_number(first, [](Bits* number, const std::uint32_t* fragment, int second) {
          *number = half_of(*fragment, second);
        });
        warp_has_written(first);
      },
      &mine, FA_HERE);
}

float ex2(float x) {
  count(Op::exponential, nullptr, 1, FA_HERE);
  return std::exp2(x);
}

// ---- a warpgroup multiplies 64 x 16 by 16 x N: wgmma.mma_async ----
// Each of its four warps has 16 rows of A and C, and may be at another product than the others.

namespace {

// Sums that a warp has under way: 16 rows, 2 n columns. Until the wait that covers the last product
// that adds to them its registers hold NaN.
struct Sums {
  int n = 0;
  std::array<float*, 32> registers{};
  std::vector<float> X;
  long last_group = 0;
  int owners = 0;  // lanes that have not got them back
  Place asked = nullptr;

  // C[i] of a lane: row lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2
  float& at(unsigned lane, int i) {
    const unsigned row = lane / 4 + 8 * unsigned(i / 2 % 2);
    return X[row * 2 * unsigned(n) + 8 * unsigned(i / 4) + 2 * (lane % 4) + unsigned(i % 2)];
  }
};
struct Asked {  // a product, of a warp
  Product p;
  const Chunks *chunks_of_A = nullptr, *chunks_of_B = nullptr;
  Sums* sums = nullptr;
  std::array<std::array<std::uint32_t, 4>, 32> A{};
  int lanes = 0;
  long group = 0;
  Place at = nullptr;
};
struct LentA {
  const std::uint32_t* registers;
  long group;
};
struct Warp {
  std::list<Sums> sums;
  std::deque<Asked> asked;  // and not done
  std::array<std::vector<LentA>, 32> lent;
  std::vector<Deed> last_of_group;
  std::array<long, 32> issued{}, committed{}, waited{};
  std::array<bool, 32> waiting{};
  long first = 0;                // the number of asked[0]
  std::array<char, 4> orders{};  // see order_of()
  long done = 0;                 // groups
  long all_committed() const { return *std::min_element(committed.begin(), committed.end()); }
};
using Warps = std::array<Warp, 32>;
Warp& warp_of_thread() { return of_block<Warps>()[thread() / 32]; }

// What the first warp of a warpgroup to come has asked for, until all four have.
struct Agreed {
  Product p;
  Place at;
  int warps = 0;
};
struct Warpgroup {
  std::deque<Agreed> products;
  std::array<long, 4> asked{};
  long first = 0;  // the number of products[0]
};
using Warpgroups = std::array<Warpgroup, 8>;
bool same(const Product& p, const Product& q) {
  return p.a == q.a && p.b == q.b && p.n == q.n && !p.A == !q.A && p.adds == q.adds;
}
void must_agree(const Product& p, Place at) {
  Warpgroup& g = of_block<Warpgroups>()[thread() / 128];
  const auto index = std::size_t(g.asked[thread() / 32 % 4]++ - g.first);
  if (index == g.products.size()) g.products.push_back({p, at});
  Agreed& agreed = g.products[index];
  if (!same(agreed.p, p))
    finding("the warps of a warpgroup ask for different products at " + text_of(agreed.at) +
            " and at " + text_of(at) + " (PTX, wgmma.mma_async: .sync.aligned)");
  for (++agreed.warps; !g.products.empty() && g.products.front().warps == 4; ++g.first)
    g.products.pop_front();
}

// A matrix in shared memory as its descriptor has it: rows of 128 bytes, swizzled; 8 rows are
// `stride` bytes from the next 8; where B is transposed, 64 columns are `leading` bytes from the
// next.
struct Descriptor {
  unsigned start, leading, stride;
  explicit Descriptor(std::uint64_t d)
      : start(unsigned(d & 0x3fff) << 4),
        leading(unsigned(d >> 16 & 0x3fff) << 4),
        stride(unsigned(d >> 32 & 0x3fff) << 4) {}
  // [quote descriptor]
  unsigned byte(unsigned row, unsigned chunk) const {  // of 8 numbers
    const unsigned at =
        start + row / 8 * stride + row % 8 * 128 + chunk / 8 * leading + chunk % 8 * 16;
    return at ^ (at >> 7 & 7) << 4;
  }
  // [end quote]
};
// The places of rows [first, first + rows) of an operand, 8 numbers each. Kernels name few operands
// again and again. A descriptor counts from where the block's shared memory begins.
const Chunks& places(std::uint64_t descriptor, unsigned first, unsigned rows, unsigned chunks) {
  static std::map<std::array<std::uint64_t, 5>, Chunks> known;
  const unsigned begin = shared_begin_of(rank());
  const auto [found, is_new] = known.try_emplace({descriptor, first, rows, chunks, begin});
  if (is_new)
    for (unsigned r = 0; r < rows; ++r)
      for (unsigned c = 0; c < chunks; ++c)
        found->second.push_back(begin + Descriptor(descriptor).byte(first + r, c));
  return found->second;
}
// Of A the 16 rows of warp w of its warpgroup.
const Chunks& places_of_A(const Product& p, unsigned w) {
  static const Chunks none;
  return p.A ? none : places(p.a, 16 * w, 16, 2);
}
const Chunks& places_of_B(const Product& p) {
  const unsigned N = 2 * unsigned(p.n);
  return p.B_transposed ? places(p.b, 0, 16, N / 8) : places(p.b, 0, N, 2);
}

// The swizzle counts from multiples of 1024 bytes: there rows 0, 8, 16 ... of an operand begin.
void must_lie_in_shared_memory(const Asked& asked) {
  const Product& p = asked.p;
  const auto begins = [&](const Descriptor& d) {
    if (d.start % 1024 >= 128)
      finding("an operand of the product asked for at " + text_of(asked.at) + " begins at byte " +
              std::to_string(d.start) +
              " of shared memory, which is in no first row of 128 bytes "
              "of the swizzle's 1024 (PTX, matrix descriptor)");
  };
  if (!p.A) begins(Descriptor(p.a));
  begins(Descriptor(p.b));
  for (const Chunks* chunks : {asked.chunks_of_A, asked.chunks_of_B})
    for (const unsigned byte : *chunks)
      if (byte + 16 > shared_begin_of(rank()) + shared_bytes_of_block())
        finding("the product asked for at " + text_of(asked.at) + " reads byte " +
                std::to_string(byte - shared_begin_of(rank())) + " of shared memory, which has " +
                std::to_string(shared_bytes_of_block()) + " (PTX, matrix descriptor)");
}

// [16][N] of B as numbers. The four warps mostly want the same, one after the other.
const float* numbers_of_B(const Asked& asked) {
  struct Held {
    alignas(64) std::array<float, 16 * 256> B;
    std::uint64_t block = 0, version = 0;
    const Chunks* chunks = nullptr;
    int n = 0;
    bool transposed = false;
    Type type = Type::bf16;
  };
  static std::array<Held, 16> all;
  async_reads(*asked.chunks_of_B, "the product asked for", asked.at);
  const Product& p = asked.p;
  const auto N = 2 * unsigned(p.n);
  const std::uint64_t version = async_version();
  Held& held = all[(p.b ^ p.b >> 6) % all.size()];
  if (held.block == block_number && held.version == version && held.chunks == asked.chunks_of_B &&
      held.n == p.n && held.transposed == p.B_transposed && held.type == p.type)
    return held.B.data();
  const char* const memory = async_memory();
  const unsigned* byte = asked.chunks_of_B->data();
  const unsigned rows = p.B_transposed ? 16 : N, chunks = p.B_transposed ? N / 8 : 2;
  for (unsigned r = 0; r < rows; ++r)
    for (unsigned c = 0; c < chunks; ++c) {
      std::array<Bits, 8> eight;
      std::memcpy(eight.data(), memory + *byte++, 16);
      for (unsigned e = 0; e < 8; ++e)
        held.B[p.B_transposed ? r * N + 8 * c + e : (8 * c + e) * N + r] =
            to_float(eight[e], p.type);
    }
  held.block = block_number, held.version = version;
  held.chunks = asked.chunks_of_B, held.n = p.n, held.transposed = p.B_transposed,
  held.type = p.type;
  return held.B.data();
}

// 16 rows: C (+)= A B, sums in fp32.
void multiply(float* C, const std::array<std::array<float, 16>, 16>& A, const float* B, unsigned N,
              bool adds) {
  for (unsigned row = 0; row < 16; ++row) {
    float* const c = C + row * N;
    if (!adds) std::fill(c, c + N, 0.0f);
    for (unsigned k = 0; k < 16; ++k) {
      const float a = A[row][k];
      const float* const b = B + k * N;
      for (unsigned col = 0; col < N; ++col) c[col] += a * b[col];
    }
  }
}

void do_one(const Asked& asked) {
  const Product& p = asked.p;
  std::array<std::array<float, 16>, 16> A;
  if (p.A) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int second = 0; second < 2; ++second)
          A[unsigned(a_cell(lane, i).row)][unsigned(a_cell(lane, i).col + second)] =
              to_float(half_of(asked.A[unsigned(lane)][unsigned(i)], second), p.type);
  } else {
    async_reads(*asked.chunks_of_A, "the product asked for", asked.at);
    const char* const memory = async_memory();
    for (unsigned chunk = 0; chunk < 32; ++chunk) {
      std::array<Bits, 8> eight;
      std::memcpy(eight.data(), memory + (*asked.chunks_of_A)[chunk], 16);
      for (unsigned e = 0; e < 8; ++e)
        A[chunk / 2][8 * (chunk % 2) + e] = to_float(eight[e], p.type);
    }
  }
  multiply(asked.sums->X.data(), A, numbers_of_B(asked), 2 * unsigned(p.n), p.adds);
  async_has_read(*asked.chunks_of_A);
  async_has_read(*asked.chunks_of_B);
}

// A group of products, of one warp: they read and add whenever this happens.
struct Group : Pending {
  unsigned w = 0;
  long number = 0;
  Warp* warp = nullptr;
  Warps* warps = nullptr;

  bool possible() const override { return warp->done == number && warp->all_committed() > number; }
  bool wanted() const override {
    for (unsigned other = w / 4 * 4; other < w / 4 * 4 + 4; ++other)
      for (unsigned lane = 0; lane < 32; ++lane)
        if (const Warp& v = (*warps)[other]; v.waiting[lane] && v.waited[lane] > number)
          return true;
    return false;
  }
  int kind() const override { return 1; }
  std::string at_the_end() const override {
    for (const Asked& a : warp->asked)
      if (a.group == number)
        return "the block ends while the product asked for at " + text_of(a.at) +
               " is under way (PTX, wgmma.wait_group)";
    return {};
  }
  void happen() override {
    for (; !warp->asked.empty() && warp->asked.front().group == number; ++warp->first) {
      do_one(warp->asked.front());
      warp->asked.pop_front();
    }
    warp->done = number + 1;
  }
};

}  // namespace

void issue(const Product& p) {
  Warp& warp = warp_of_thread();
  const unsigned lane = thread() % 32;
  const auto index = std::size_t(warp.issued[lane]++ - warp.first);
  if (index == warp.asked.size()) {  // the first lane to come
    Asked asked;
    asked.p = p;
    asked.group = warp.committed[lane];
    asked.at = FA_HERE;
    for (Sums& s : warp.sums)
      if (s.registers[lane] == p.C) asked.sums = &s;
    if (!asked.sums) {
      asked.sums = &warp.sums.emplace_back();
      asked.sums->n = p.n;
      asked.sums->X.resize(16 * 2 * std::size_t(p.n));
      asked.sums->asked = FA_HERE;
    }
    asked.sums->last_group = asked.group;
    asked.chunks_of_A = &places_of_A(p, thread() / 32 % 4);
    asked.chunks_of_B = &places_of_B(p);
    warp.asked.push_back(asked);
    must_lie_in_shared_memory(asked);
    must_agree(p, FA_HERE);
    const Deed deed = a_product();
    warp.last_of_group.resize(std::size_t(asked.group) + 1, deed);
    warp.last_of_group.back() = deed;
    async_will_read(*asked.chunks_of_A, FA_HERE, deed);
    async_will_read(*asked.chunks_of_B, FA_HERE, deed);
  }
  Asked& asked = warp.asked[index];
  if (!same(asked.p, p) || asked.group != warp.committed[lane])
    finding("the lanes of a warp ask for different products at " + text_of(FA_HERE) +
            " (PTX, wgmma.mma_async: .sync.aligned)");
  ++asked.lanes;
  const unsigned N = 2 * unsigned(p.n);  // 64 x 16 of A and 16 x N of B are read
  meet();
  count(Op::operands, generic_memory(), 32 * (N + (p.A ? 0 : 64)), FA_HERE);
  count(Op::wgmma, nullptr, N, FA_HERE);
  Sums& sums = *asked.sums;
  if (!sums.registers[lane]) {  // C is the tensor cores' from here on
    need_fenced(p.C, std::size_t(p.n) * 4, FA_HERE);
    sums.registers[lane] = p.C;
    ++sums.owners;
    for (int i = 0; i < p.n; ++i) {
      sums.at(lane, i) = p.C[i];
      p.C[i] = std::numeric_limits<float>::quiet_NaN();
    }
    lend_registers(p.C, std::size_t(p.n) * 4, true, FA_HERE);
  }
  if (p.A) {
    need_fenced(p.A, 16, FA_HERE);
    std::copy(p.A, p.A + 4, asked.A[lane].begin());
    lend_registers(p.A, 16, false, FA_HERE);
    warp.lent[lane].push_back({p.A, asked.group});
  }
}
// Ordinary reads and writes of registers come before the products that follow.
void wgmma_fence() { fence_registers(); }

namespace {
// A product ends when all four warps have asked for it. So what a thread has done before it commits
// comes before what another does after the wait. Kernels count on it: one thread says for a
// warpgroup that a buffer has been read.
const void* order_of(long group) {
  return &of_block<Warps>()[thread() / 128 * 4].orders[std::size_t(group & 3)];
}
}  // namespace
void wgmma_commit() {
  Warp& warp = warp_of_thread();
  const long number = warp.committed[thread() % 32]++;
  release(order_of(number));
  if (warp.all_committed() == number + 1) {  // the last lane
    auto group = std::make_unique<Group>();
    group->w = thread() / 32;
    group->number = number;
    group->warp = &warp;
    group->warps = &of_block<Warps>();
    ask(std::move(group));
  }
  maybe_others_first();
}

namespace {
// A in registers, of all groups before `until`, unless a later one takes it, too.
void return_A(std::vector<LentA>& lent, long until) {
  std::vector<LentA> kept;
  for (const LentA& a : lent)
    if (a.group >= until) kept.push_back(a);
  for (const LentA& a : lent)
    if (std::none_of(kept.begin(), kept.end(),
                     [&](const LentA& k) { return k.registers == a.registers; }))
      return_registers(a.registers, 16);
  lent = std::move(kept);
}
}  // namespace
void wait_for_products(int newest) {
  meet();
  Warp& warp = warp_of_thread();
  const unsigned lane = thread() % 32;
  const long until = warp.committed[lane] - newest;
  warp.waited[lane] = until;
  warp.waiting[lane] = true;
  // The product is the warpgroup's: it has ended when all four warps' rows are there.
  Warps& warps = of_block<Warps>();
  const unsigned w = thread() / 128 * 4;
  const Warp* const four = &warps[w];
  wait_until(
      [&] {
        return std::min({four[0].done, four[1].done, four[2].done, four[3].done}) >= until;
      },
      [] { return "for products that not all threads of its warpgroup have committed"; }, FA_HERE);
  warp.waiting[lane] = false;
  if (until > 0) acquire(order_of(until - 1));
  return_A(warp.lent[lane], until);
  for (unsigned other = w; other < w + 4; ++other)
    if (const auto& last = warps[other].last_of_group; until > 0 && !last.empty())
      take_end_of(last[std::min(std::size_t(until), last.size()) - 1]);
  for (auto s = warp.sums.begin(); s != warp.sums.end();) {
    if (s->last_group >= until || !s->registers[lane]) {
      ++s;
      continue;
    }
    return_registers(s->registers[lane], std::size_t(s->n) * 4);
    for (int i = 0; i < s->n; ++i) s->registers[lane][i] = s->at(lane, i);
    s->registers[lane] = nullptr;
    if (--s->owners == 0)
      s = warp.sums.erase(s);
    else
      ++s;
  }
}

}  // namespace fa::optimized
