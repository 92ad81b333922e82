// The program that measures the ring: one process a rank. What it wants of the machine that it runs
// on, so that it is the same on GPUs, on the emulator and in host memory.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "06_optimized/ring/processes.hpp"
#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// What one message's exchange took, in milliseconds since timeline(true).
struct Exchange {
  std::string at;
  float compute_from, compute_to, copy_from, copy_to;
};

template <class T>
class Machine {
 public:
  virtual ~Machine() = default;
  virtual Communicator& comm() = 0;
  // deterministic: the same bits in every run, where that is not so anyway
  virtual std::unique_ptr<Engine<T>> engine(bool deterministic) = 0;
  virtual std::string name() const = 0;      // of the GPU, or of the processor
  virtual std::string carriers() const = 0;  // what carries messages

  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;
  virtual std::size_t free_bytes() const = 0;
  virtual std::size_t used_bytes() const = 0;  // of the whole GPU by anybody; 0: not known
  virtual void to_host(float* to, const T* from, std::size_t count) = 0;
  virtual void sums_to_host(Stat<T>* to, const Stat<T>* from, std::size_t count) = 0;

  // Rows of a tensor of standard normal numbers; each depends on its place in the whole sequence
  // alone, so that ranks draw their own rows and rank 0 draws all of them again. `to` holds the
  // blocks one after the other.
  virtual void draw(std::uint64_t seed, std::int64_t H, std::int64_t d,
                    const std::vector<Block>& blocks, const View<T>& to) = 0;

  // Until all that was asked for is done. Throws RankLost if that cannot be.
  virtual void finish(const std::string& at) = 0;
  // Milliseconds between the two, by the machine's own clock; stop() finishes first.
  virtual void start() = 0;
  virtual double stop() = 0;

  virtual void timeline(bool on) = 0;
  virtual std::vector<Exchange> exchanges() = 0;
};

// Number (h, i, x) of a tensor: standard normal to the eye, and the same on every machine up to the
// rounding to T. A sum of four 16-bit uniform numbers of a well mixed 64-bit one.
FA_HOST_DEVICE inline float drawn(std::uint64_t seed, std::uint64_t h, std::uint64_t i,
                                  std::uint64_t x) {
  std::uint64_t n = seed * 0x9e3779b97f4a7c15u + (h << 52) + (i << 16) + x;
  n = (n ^ (n >> 30)) * 0xbf58476d1ce4e5b9u;  // Steele, Lea and Flood's splitmix64
  n = (n ^ (n >> 27)) * 0x94d049bb133111ebu;
  n ^= n >> 31;
  const float sum =
      float(n & 0xffff) + float(n >> 16 & 0xffff) + float(n >> 32 & 0xffff) + float(n >> 48);
  // Mean 4 x 32767.5; variance 4 x 65536^2 / 12.
  return (sum - 131070.0f) * (1 / 37837.2f);
}

// ---- what the program is asked for -------------------------------------------------------------

struct Asked {
  std::vector<std::int64_t> lengths{32768}, key_heads{};
  std::int64_t heads = 16, d = 128;
  std::vector<Method> methods{Method::ring};
  std::vector<bool> causal{false};
  std::string type;  // as the machine's first one
  bool contiguous = false, backward = false, deterministic = false, check = false, whole = true,
       sockets = false, help = false;
  int rounds = 5, alone = 0, timeout_ms = 20000;
  double seconds = 0;  // begins no further problem after that; 0: all of them
  std::string json, timeline;

  std::string text() const;  // what all ranks must be asked alike
};
// Throws std::invalid_argument in words. `types`: those that this program knows.
Asked asked(const std::vector<std::string>& words, const std::vector<std::string>& types);
extern const char* const usage;

// Measures all that is asked for; rank 0 prints it. False if a result that was checked is wrong.
template <class T>
bool measure(Machine<T>& machine, Assembly& assembly, const Asked& asked);

// The machines, by the program's build. They throw std::runtime_error in words if there is none.
std::vector<std::string> types_of_this_program();
int run_on_this_machine(Assembly& assembly, const Place& place, const Asked& asked);
template <class T, class M>
int run_on(Assembly& assembly, const Asked& asked, M&& make_machine) {
  const std::unique_ptr<Machine<T>> machine = make_machine();
  return measure<T>(*machine, assembly, asked) ? 0 : 1;
}

}  // namespace fa::ring
