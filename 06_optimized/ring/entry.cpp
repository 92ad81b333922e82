// From the public face to the methods: memory, arguments, and that all ranks agree.
#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>

#include "06_optimized/ring/ring.hpp"
#include "06_optimized/ring/types.hpp"
#include "common/core/check.hpp"

namespace fa::ring {

using Int = std::int64_t;

template <class T>
void* Engine<T>::take(std::size_t bytes) {
  if (taken_ == memory_.size()) memory_.push_back({nullptr, 0});
  Held& held = memory_[taken_++];
  if (held.bytes < bytes) {
    held = {nullptr, 0};  // before the larger one is there, not after
    held = {allocate(bytes), bytes};
  }
  return held.data.get();
}

template <class T>
std::size_t Engine<T>::held() const {
  std::size_t bytes = 0;
  for (const Held& held : memory_) bytes += held.bytes;
  return bytes;
}

namespace {

// What a rank tells the others: what it was called with, and what is wrong with that.
struct Told {
  char called[256], wrong[768];
};

void set(char* to, std::size_t room, const std::string& text) {
  std::snprintf(to, room, "%s", text.c_str());
}

std::string called_with(const Problem& p, const char* pass, const Options& options, Int width) {
  std::ostringstream text;
  text.precision(17);  // scales that differ in their last bit differ
  text << name(options.method) << ' ' << pass << ' '
       << (options.order == Order::zigzag ? "zigzag" : "contiguous") << " B" << p.B << " Hq" << p.Hq
       << " Hkv" << p.Hkv << " Nq" << p.Nq << " Nk" << p.Nk << " d" << p.d << " causal"
       << int(p.causal) << " scale" << p.softmax_scale() << " bytes" << width;
  if (p.key_lengths) {
    std::uint64_t mixed = 1469598103934665603u;  // FNV-1a: a list of any length in a few letters
    for (Int b = 0; b < p.B; ++b)
      mixed = (mixed ^ std::uint64_t(p.key_lengths[b])) * 1099511628211u;
    text << " lengths" << std::hex << mixed;
  }
  return text.str();
}

// Throws the same on every rank, unless all ranks' arguments are right and the same.
void all_agree(Communicator& comm, const std::string& called, const std::string& wrong) {
  Told mine{};
  set(mine.called, sizeof mine.called, called);
  set(mine.wrong, sizeof mine.wrong, wrong);
  std::vector<Told> told(static_cast<std::size_t>(comm.size()));
  comm.tell_all("before the first step", &mine, told.data(), sizeof mine);
  for (std::size_t r = 0; r < told.size(); ++r)
    require(told[r].wrong[0] == 0, "ring: rank ", r,
            " was called with a bad argument: ", told[r].wrong);
  for (std::size_t r = 1; r < told.size(); ++r)
    require(std::strcmp(told[r].called, told[0].called) == 0,
            "ring: all ranks must be called with the same problem; rank 0 has '", told[0].called,
            "', rank ", r, " has '", told[r].called, "'");
}

// Checks, then computes; and if this rank fails on its way, all others hear of it.
template <class T, class Check, class Compute>
void together(Communicator& comm, Engine<T>& engine, const std::string& called,
              const Options& options, const Check& check, const Compute& compute) {
  std::string wrong;
  try {
    check();
  } catch (const std::invalid_argument& error) {
    if (!options.agree) {
      comm.leave(error.what());
      throw;
    }
    wrong = error.what();
  }
  if (options.agree) all_agree(comm, called, wrong);
  try {
    engine.take_back();
    compute();
    const char done = 1;
    std::vector<char> all(static_cast<std::size_t>(comm.size()));
    if (options.agree) comm.tell_all("after the last step", &done, all.data(), 1);
  } catch (const std::exception& error) {
    comm.leave(error.what());
    throw;
  }
}

template <class T>
void check_call(const Communicator& comm, const Problem& p, const Options& options) {
  check_problem("ring", p, 512);
  check_key_lengths("ring", p);
  require(options.method != Method::heads || comm.size() <= std::max<Int>(p.Hkv, 1),
          "ring: heads can be exchanged among at most Hkv = ", p.Hkv, " ranks, got ", comm.size(),
          "; use Method::ring");
}

// The problem that a rank's own tensors are of.
Problem own(const Problem& p, const Communicator& comm, Order order) {
  Problem rows = p;
  rows.Nq = rows_of(p.Nq, comm.size(), comm.rank(), order);
  rows.Nk = rows_of(p.Nk, comm.size(), comm.rank(), order);
  rows.scale = p.softmax_scale();
  return rows;
}

}  // namespace

template <class T>
void forward(Communicator& comm, Engine<T>& engine, const Problem& p, const Forward<T>& t,
             const Options& options) {
  const auto check = [&] {
    check_call<T>(comm, p, options);
    check_tensors("ring", own(p, comm, options.order), t);
  };
  const Rank<T> at{comm, engine, p, options.order};
  together(comm, engine, called_with(p, "forward", options, sizeof(T)), options, check, [&] {
    if (options.method == Method::ring) ring_forward(at, t);
    if (options.method == Method::gather) gather_forward(at, t);
    if (options.method == Method::heads) heads_forward(at, t);
  });
}

template <class T>
void backward(Communicator& comm, Engine<T>& engine, const Problem& p, const Backward<T>& t,
              const Options& options) {
  const auto check = [&] {
    check_call<T>(comm, p, options);
    const Problem rows = own(p, comm, options.order);
    check_tensors("ring", rows, t);
    const bool any = p.B > 0 && p.Hq > 0 && rows.Nq > 0;
    require(!any || t.LSE, "ring: LSE must not be null; let the forward write it");
    require(!any || t.O.data, "ring: O must not be null; the forward returned it");
  };
  const Rank<T> at{comm, engine, p, options.order};
  together(comm, engine, called_with(p, "backward", options, sizeof(T)), options, check, [&] {
    if (options.method == Method::ring) ring_backward(at, t);
    if (options.method == Method::gather) gather_backward(at, t);
    if (options.method == Method::heads) heads_backward(at, t);
  });
}

#define FA_INSTANTIATE(T)                                                               \
  template class Engine<T>;                                                             \
  template void forward(Communicator&, Engine<T>&, const Problem&, const Forward<T>&,   \
                        const Options&);                                                \
  template void backward(Communicator&, Engine<T>&, const Problem&, const Backward<T>&, \
                         const Options&);
FA_RING_TYPES(FA_INSTANTIATE)

}  // namespace fa::ring
