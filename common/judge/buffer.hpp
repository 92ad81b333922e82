// A test's tensor: memory with canaries around it and in every gap, in any layout that the contract
// allows, so that a write outside the tensor or to an input is seen.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/core/cache_lines.hpp"
#include "common/core/tensor.hpp"

namespace fa::judge {

// How a tensor [B, H, N, d] lies in memory.
struct Layout {
  enum class Order { BHND, BNHD } order = Order::BHND;
  std::int64_t gap = 0;          // unused elements after every row
  std::int64_t offset = 0;       // elements between an aligned address and the first row
  bool reversed = false;         // rows run backwards: a negative stride
  bool broadcast_heads = false;  // all heads share one (stride 0); inputs only
  bool in_16_bytes = false;      // rows are padded to, gap and offset counted in, 16 bytes
  std::int64_t head_gap = 0, batch_gap = 0;  // unused elements after every head (BHND), every batch
};

// A block of memory that a call may touch: what an adapter must carry to a GPU and back.
struct Storage {
  struct Part {
    std::size_t first, bytes;
  };
  void* data = nullptr;
  std::size_t bytes = 0;
  std::vector<Part> used = {};  // of a huge reservation only these hold anything; empty: all does

  bool contains(const void* p) const {
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return at >= begin && at < begin + bytes;
  }
};

template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::int64_t B, std::int64_t H, std::int64_t N, std::int64_t d, Layout layout = {})
      : B_(B), H_(H), N_(N), d_(d) {
    const std::int64_t unit = layout.in_16_bytes ? 16 / std::int64_t(sizeof(T)) : 1;
    const std::int64_t heads = layout.broadcast_heads ? 1 : H;
    const std::int64_t pitch = (d + unit - 1) / unit * unit + unit * layout.gap;
    const bool BHND = layout.order == Layout::Order::BHND;
    row_ = BHND ? pitch : heads * pitch;
    const std::int64_t head = BHND ? N * pitch + layout.head_gap : pitch;
    head_ = layout.broadcast_heads ? 0 : head;
    batch_ = (BHND ? heads * head : N * row_) + layout.batch_gap;
    first_ = guard + unit * layout.offset;
    memory_.assign(static_cast<std::size_t>(first_ + B * batch_ + guard), canary());
    if (layout.reversed && N > 0) {
      first_ += (N - 1) * row_;
      row_ = -row_;
    }
    inside_.assign(memory_.size(), false);
    for_each([&](auto b, auto h, auto i, auto x) { inside_[index(b, h, i, x)] = true; });
    seal();
  }

  View<T> view() { return {memory_.data() + first_, batch_, head_, row_}; }
  T& at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x = 0) {
    return memory_[index(b, h, i, x)];
  }
  const T& at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x = 0) const {
    return memory_[index(b, h, i, x)];
  }
  std::int64_t B() const { return B_; }
  std::int64_t H() const { return H_; }
  std::int64_t N() const { return N_; }
  std::int64_t d() const { return d_; }
  Storage storage() { return {memory_.data(), memory_.size() * sizeof(T)}; }

  // value(b, h, i, x) -> double, rounded to T.
  template <class Value>
  void fill(Value value) {
    for_each([&](auto b, auto h, auto i, auto x) {
      memory_[index(b, h, i, x)] = static_cast<T>(value(b, h, i, x));
    });
    seal();
  }

  // The same numbers, elsewhere.
  void move_to(const Layout& layout) {
    Buffer there(B_, H_, N_, d_, layout);
    there.fill([&](auto b, auto h, auto i, auto x) { return static_cast<double>(at(b, h, i, x)); });
    *this = there;
  }

  // NaN everywhere, so that an element which is never written cannot look right.
  void poison() {
    memory_.assign(memory_.size(), canary());
    seal();
  }

  // Empty if nothing outside the tensor has changed; else which element was hit.
  std::string written_outside() const { return first_change(false); }
  // Empty if nothing at all has changed since the last fill or poison.
  std::string changed() const { return first_change(true); }

  // f(b, h, i, x) for every element.
  template <class F>
  void for_each(F f) const {
    for (std::int64_t b = 0; b < B_; ++b)
      for (std::int64_t h = 0; h < H_; ++h)
        for (std::int64_t i = 0; i < N_; ++i)
          for (std::int64_t x = 0; x < d_; ++x) f(b, h, i, x);
  }

 private:
  static constexpr std::int64_t guard = 512;
  static T canary() { return std::numeric_limits<T>::quiet_NaN(); }
  std::size_t index(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t x) const {
    return static_cast<std::size_t>(first_ + b * batch_ + h * head_ + i * row_ + x);
  }
  void seal() { sealed_ = memory_; }
  std::string first_change(bool inside_too) const {
    for (std::size_t k = 0; k < memory_.size(); ++k)
      if ((inside_too || !inside_[k]) && std::memcmp(&memory_[k], &sealed_[k], sizeof(T)) != 0)
        return "element " + std::to_string(static_cast<std::int64_t>(k) - first_) +
               " from the start of the tensor" + (inside_[k] ? "" : ", outside of it,") +
               " was overwritten";
    return {};
  }

  std::int64_t B_ = 0, H_ = 0, N_ = 0, d_ = 0;
  std::int64_t first_ = 0, batch_ = 0, head_ = 0, row_ = 0;
  CacheLines<T> memory_, sealed_;
  std::vector<bool> inside_;
};

}  // namespace fa::judge
