// The program's machine in host memory.
#include <algorithm>
#include <utility>

#include "06_optimized/ring/check/cpu.hpp"
#include "06_optimized/ring/check/program.hpp"
#include "common/core/check.hpp"
#include "common/measure/machine.hpp"

namespace fa::ring {
namespace {

using Clock = std::chrono::steady_clock;
float since(Clock::time_point base) {
  return std::chrono::duration<float, std::milli>(Clock::now() - base).count();
}

// Notes when messages travel, which here is while the rank waits.
class Timed : public Communicator {
 public:
  explicit Timed(std::unique_ptr<Communicator> real) : real_(std::move(real)) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    if (on) exchanges.push_back({at, since(base), 0, 0, 0});
    real_->begin(at, sent, received);
    bytes_sent += std::exchange(real_->bytes_sent, 0);
  }
  void wait() override {
    if (on) exchanges.back().compute_to = exchanges.back().copy_from = since(base);
    real_->wait();
    if (on) exchanges.back().copy_to = since(base);
  }
  void tell_all(const std::string& at, const void* mine, void* all, std::size_t bytes) override {
    real_->tell_all(at, mine, all, bytes);
  }
  void leave(const std::string& why) noexcept override { real_->leave(why); }

  bool on = false;
  Clock::time_point base;
  std::vector<Exchange> exchanges;

 private:
  std::unique_ptr<Communicator> real_;
};

template <class T>
class Host : public Machine<T> {
 public:
  explicit Host(Assembly& assembly) : comm_(over_sockets(assembly)) {}
  Communicator& comm() override { return comm_; }
  std::unique_ptr<Engine<T>> engine(bool) override { return cpu_engine<T>(); }
  std::string name() const override { return bench::cpu_model(); }
  std::string carriers() const override { return "sockets"; }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    check_memory("ring", "a rank's tensors", double(bytes), "use a shorter --length");
    return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
  }
  std::size_t free_bytes() const override { return std::size_t(available_memory()); }
  std::size_t used_bytes() const override { return 0; }
  void to_host(float* to, const T* from, std::size_t count) override {
    for (std::size_t k = 0; k < count; ++k) to[k] = float(from[k]);
  }
  void sums_to_host(Stat<T>* to, const Stat<T>* from, std::size_t count) override {
    std::copy_n(from, count, to);
  }
  void draw(std::uint64_t seed, std::int64_t H, std::int64_t d, const std::vector<Block>& blocks,
            const View<T>& to) override {
    std::int64_t row = 0;
    for (const Block& block : blocks)
      for (std::int64_t i = block.first; i < block.first + block.rows; ++i, ++row)
        for (std::int64_t h = 0; h < H; ++h)
          for (std::int64_t x = 0; x < d; ++x)
            to.at(0, h, row)[x] =
                T(drawn(seed, std::uint64_t(h), std::uint64_t(i), std::uint64_t(x)));
  }

  void finish(const std::string&) override {}
  void start() override { begun_ = Clock::now(); }
  double stop() override { return double(since(begun_)); }
  void timeline(bool on) override {
    comm_.on = on;
    comm_.base = Clock::now();
    if (on) comm_.exchanges.clear();
  }
  std::vector<Exchange> exchanges() override {
    std::vector<Exchange> all = comm_.exchanges;
    const float rest = all.empty() ? 0 : all.back().copy_to;
    all.push_back({"the rest", rest, since(comm_.base), rest, rest});
    return all;
  }

 private:
  Timed comm_;
  Clock::time_point begun_;
};

}  // namespace

std::vector<std::string> types_of_this_program() { return {"float", "double"}; }
int run_on_this_machine(Assembly& assembly, const Place&, const Asked& asked) {
  if (asked.type == "double")
    return run_on<double>(assembly, asked,
                          [&] { return std::make_unique<Host<double>>(assembly); });
  return run_on<float>(assembly, asked, [&] { return std::make_unique<Host<float>>(assembly); });
}

}  // namespace fa::ring
