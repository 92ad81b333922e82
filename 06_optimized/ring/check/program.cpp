// Measures the ring. Of one problem, round by round, with all ranks starting together:
//
//   the method itself; of each round the slowest rank's time counts
//   its share: the plain kernel on this rank's own pairs of blocks, one after the other: no
//     message, no merge. A rank's share has 1 / P of all pairs: this is what one GPU takes for it
//   silent: the method with its messages left out. What it takes longer than that is waiting
//   the whole: the plain kernel on the whole problem, on rank 0 alone; divided by P
//
// A method's efficiency is the share's time by its own, or the whole's time / P by its own.
#include "06_optimized/ring/check/program.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>

#include "06_optimized/ring/types.hpp"
#include "common/core/check.hpp"
#include "common/measure/flops.hpp"
#include "common/measure/machine.hpp"
#ifdef __linux__
#include <sys/prctl.h>

#include <csignal>
#endif

#ifdef __APPLE__
extern char** environ;
#endif

namespace fa::ring {
namespace {

using Int = std::int64_t;
using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point base) {
  return std::chrono::duration<double>(Clock::now() - base).count();
}

// The messages left out; all others are as this one.
class Silent : public Communicator {
 public:
  Silent(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void begin(const std::string&, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    for (std::size_t k = 0; k < sent.size(); ++k) {
      bytes_sent += sent[k].bytes;
      if (deliver && k < received.size()) deliver(sent[k], received[k]);
    }
  }
  void wait() override {}
  void tell_all(const std::string&, const void* mine, void* all, std::size_t bytes) override {
    for (int r = 0; r < size_ && bytes; ++r)
      std::memcpy(static_cast<char*>(all) + std::size_t(r) * bytes, mine, bytes);
  }
  void leave(const std::string&) noexcept override {}

  // Once, so that rooms for others' keys hold keys: a GPU that multiplies zeros may be faster.
  std::function<void(const Message& sent, const Message& received)> deliver;

 private:
  int rank_, size_;
};

// Tensors of one problem, or of one rank's rows of it.
template <class T>
struct Tensors {
  using Sum = Stat<T>;
  Int Hq, Hkv, Nq, Nk, d;
  bool backward;
  std::size_t bytes = 0;
  T *Q, *K, *V, *O, *dO = nullptr, *dQ = nullptr, *dK = nullptr, *dV = nullptr;
  Sum* LSE;
  std::vector<std::shared_ptr<void>> kept{};

  Tensors(Machine<T>& machine, const Problem& p, Int Nq_, Int Nk_, bool backward_)
      : Hq(p.Hq), Hkv(p.Hkv), Nq(Nq_), Nk(Nk_), d(p.d), backward(backward_) {
    const auto take = [&](auto*& to, Int numbers) {
      const std::size_t size = std::size_t(numbers) * sizeof *to;
      kept.push_back(machine.allocate(size));
      to = static_cast<std::remove_reference_t<decltype(to)>>(kept.back().get());
      bytes += size;
    };
    const Int q = Hq * Nq * d, k = Hkv * (Nk + slack) * d;
    take(Q, q), take(K, k), take(V, k), take(O, q), take(LSE, Hq * Nq);
    if (backward) take(dO, q), take(dQ, q), take(dK, k), take(dV, k);
  }
  static double bytes_of(const Problem& p, bool backward) {
    const double q = double(p.Hq * p.Nq * p.d), k = double(p.Hkv * p.Nk * p.d);
    return (2 * q + 2 * k) * sizeof(T) * (backward ? 2 : 1) + double(p.Hq * p.Nq) * sizeof(Sum);
  }
  void draw(Machine<T>& machine, const std::vector<Block>& queries,
            const std::vector<Block>& keys) const {
    machine.draw(1, Hq, d, queries, contiguous(Q, Hq, Nq, d));
    machine.draw(2, Hkv, d, keys, contiguous(K, Hkv, Nk, d));
    machine.draw(3, Hkv, d, keys, contiguous(V, Hkv, Nk, d));
    if (backward) machine.draw(4, Hq, d, queries, contiguous(dO, Hq, Nq, d));
  }
  View<const T> q(const T* x) const { return contiguous(x, Hq, Nq, d); }
  View<const T> k(const T* x) const { return contiguous(x, Hkv, Nk, d); }
  // The same memory as if it had another number of keys.
  Tensors with_keys(Int keys) const {
    Tensors other = *this;
    other.Nk = keys;
    return other;
  }
  Forward<T> forward_tensors() const { return {q(Q), k(K), k(V), contiguous(O, Hq, Nq, d), LSE}; }
  Backward<T> backward_tensors() const {
    return {q(Q),
            k(K),
            k(V),
            q(O),
            q(dO),
            LSE,
            contiguous(dQ, Hq, Nq, d),
            contiguous(dK, Hkv, Nk, d),
            contiguous(dV, Hkv, Nk, d)};
  }

 private:
  // Another rank may have two keys more than this one, whose keys stand in for them.
  static constexpr Int slack = 2;
};

// ---- is it right? ------------------------------------------------------------------------------

// How far X is from what it should be: |X - X'| / |X'| over a head, the worst of all heads; and of
// a row's |X - X'|, measured by that row's own size and the tensor's usual one. The first is a
// rounding error's size, the second finds a row that is another's.
struct Distance {
  double head = 0, row = 0;
};
Distance distance(const std::vector<float>& got, const std::vector<float>& want, Int H, Int N,
                  Int d) {
  double all = 0;
  for (const float x : want) all += double(x) * x;
  const double usual = std::sqrt(all / double(std::max<Int>(H * N, 1)));
  Distance most;
  const auto larger = [](double& to, double x) {
    if (!(x <= to)) to = x;  // NaN too
  };
  std::size_t k = 0;
  for (Int h = 0; h < H; ++h) {
    double head_off = 0, head_size = 0;
    for (Int i = 0; i < N; ++i) {
      double off = 0, size = 0;
      for (Int x = 0; x < d; ++x, ++k) {
        off += (double(got[k]) - want[k]) * (double(got[k]) - want[k]);
        size += double(want[k]) * want[k];
      }
      larger(most.row, off > 0 || off != off ? std::sqrt(off) / (std::sqrt(size) + usual) : 0);
      head_off += off, head_size += size;
    }
    larger(most.head, head_off > 0 || head_off != head_off ? std::sqrt(head_off / head_size) : 0);
  }
  return most;
}
// Two results that were rounded to T on other ways. P and dS are rounded before they are
// multiplied, and parts of O before they are merged: a few roundings, and no sum of many.
double allowed(const std::string& type) {
  return type == "bf16" ? 0.01 : type == "fp16" ? 0.002 : type == "float" ? 1e-4 : 1e-10;
}

// To rank 0 from all ranks, in the order of the sequence.
template <class X, class Copy>
void collect(Communicator& comm, Int H, Int N, Int d, Order order, X* own, X* room, X* whole,
             const Copy& copy) {
  const auto bytes = [&](int r) {
    return std::size_t(H * rows_of(N, comm.size(), r, order) * d) * sizeof(X);
  };
  if (comm.rank() > 0) {
    comm.begin("the check, to rank 0", {{0, own, bytes(comm.rank())}}, {});
    comm.wait();
    return;
  }
  for (int r = 0; r < comm.size(); ++r) {
    if (r > 0) {
      comm.begin("the check, from rank " + std::to_string(r), {}, {{r, room, bytes(r)}});
      comm.wait();
    }
    const Int rows = rows_of(N, comm.size(), r, order);
    Int row = 0;
    for (const Block& block : blocks_of(N, comm.size(), r, order)) {
      copy(Size{1, H, block.rows, d}, from(contiguous(r ? room : own, H, rows, d), row),
           from(contiguous(whole, H, N, d), block.first));
      row += block.rows;
    }
  }
}

// ---- one problem -------------------------------------------------------------------------------

struct Pass {
  const char* name;
  bool backward;
};

double median_of(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  const std::size_t n = all.size();
  return n ? (all[n / 2] + all[(n - 1) / 2]) / 2 : 0;
}
// What all ranks took, round by round, in milliseconds.
struct Rounds {
  std::vector<double> ms;                     // of the slowest rank
  std::vector<std::vector<double>> of_ranks;  // [round][rank]
  void add(const std::vector<double>& of_all) {
    ms.push_back(*std::max_element(of_all.begin(), of_all.end()));
    of_ranks.push_back(of_all);
  }
  double median() const { return median_of(ms); }
  double least() const { return ms.empty() ? 0 : *std::min_element(ms.begin(), ms.end()); }
  std::vector<double> medians_of_ranks() const {
    std::vector<double> medians;
    for (std::size_t rank = 0; !of_ranks.empty() && rank < of_ranks[0].size(); ++rank) {
      std::vector<double> own;
      for (const std::vector<double>& round : of_ranks) own.push_back(round[rank]);
      medians.push_back(median_of(own));
    }
    return medians;
  }
};
std::string list(const std::vector<double>& all) {
  std::ostringstream text;
  text << '[';
  for (std::size_t k = 0; k < all.size(); ++k) text << (k ? ", " : "") << all[k];
  return text.str() + "]";
}
std::string quoted(const std::string& text) {
  std::string all = "\"";
  for (const char c : text)
    if (c == '"' || c == '\\')
      all += '\\', all += c;
    else if (static_cast<unsigned char>(c) < ' ')
      all += ' ';
    else
      all += c;
  return all + "\"";
}

template <class T>
class Measured {
 public:
  Measured(Machine<T>& machine, Assembly& assembly, const Asked& asked, const Problem& p,
           Method method, std::map<std::string, double>& wholes)
      : machine_(machine),
        assembly_(assembly),
        asked_(asked),
        wholes_(wholes),
        p_(p),
        options_{method, asked.contiguous ? Order::contiguous : Order::zigzag},
        silent_(machine.comm().rank(), asked.alone ? asked.alone : machine.comm().size()),
        comm_(asked.alone ? silent_ : machine.comm()),
        engine_(machine.engine(asked.deterministic)),
        t_(machine, p, rows(p.Nq), rows(p.Nk), asked.backward) {
    t_.draw(machine, blocks(p.Nq), blocks(p.Nk));
    machine.finish("its tensors");
  }

  // Prints, at rank 0. False if a result is wrong.
  bool run(std::string& json, std::string& timeline) {
    std::ostringstream row;
    row.precision(12);
    row << "{\"method\": \"" << name(options_.method) << "\", \"order\": \""
        << (asked_.contiguous ? "contiguous" : "zigzag") << "\", \"ranks\": " << comm_.size()
        << ", \"N\": " << p_.Nq << ", \"Hq\": " << p_.Hq << ", \"Hkv\": " << p_.Hkv
        << ", \"d\": " << p_.d << ", \"type\": \"" << asked_.type
        << "\", \"causal\": " << (p_.causal != Causal::none ? "true" : "false")
        << ", \"alone\": " << (asked_.alone ? "true" : "false");
    if (leads()) {
      std::printf("%s, N %lld, %lld heads, %lld key heads, d %lld, %s%s, %s, %d ranks\n",
                  name(options_.method), ll(p_.Nq), ll(p_.Hq), ll(p_.Hkv), ll(p_.d),
                  asked_.type.c_str(), p_.causal != Causal::none ? ", causal" : "",
                  asked_.contiguous ? "contiguous" : "zigzag", comm_.size());
      std::fflush(stdout);
    }
    // The first call agrees with the others, allocates what the method needs, and counts bytes.
    comm_.bytes_sent = 0;
    if (asked_.alone)
      silent_.deliver = [this](const Message& from, const Message& to) {
        const Int rows = Int(std::min(from.bytes, to.bytes) / sizeof(T)) / p_.d;
        engine_->copy({1, 1, rows, p_.d},
                      contiguous(static_cast<const T*>(from.data), 1, rows, p_.d),
                      contiguous(static_cast<T*>(to.data), 1, rows, p_.d));
      };
    try {
      call(comm_, false, true);
    } catch (const std::invalid_argument& error) {
      if (leads()) std::printf("  refused: %s\n", error.what());
      json = row.str() + ", \"refused\": " + quoted(error.what()) + "}";
      return true;
    }
    const double forward_bytes = double(comm_.bytes_sent);
    if (asked_.backward) call(comm_, true, true);
    const double all_bytes = double(comm_.bytes_sent);
    machine_.finish("the first call");
    silent_.deliver = nullptr;
    bool right = true;
    if (asked_.check) right = check(row);

    const double most_used = largest(double(machine_.used_bytes()));
    const double most_held = largest(double(engine_->held()));
    row << ", \"bytes_of_tensors\": " << largest(double(t_.bytes))
        << ", \"bytes_of_method\": " << most_held << ", \"bytes_used_on_gpu\": " << most_used;
    for (const Pass& pass : passes())
      if (asked_.rounds > 0)
        measure_pass(pass, largest(pass.backward ? all_bytes : forward_bytes), row);
    if (leads())
      std::printf(
          "  memory of a rank: tensors %.2f GiB, method %.2f GiB%s\n", double(t_.bytes) / gib,
          most_held / gib,
          most_used > 0 ? (", in use on the GPU " + fixed(most_used / gib) + " GiB").c_str() : "");
    std::fflush(stdout);
    if (!asked_.timeline.empty()) timeline = record();
    json = row.str() + "}";
    return right;
  }

 private:
  static constexpr double gib = 1024.0 * 1024 * 1024;
  static long long ll(Int x) { return x; }
  static std::string fixed(double x) {
    char text[64];
    std::snprintf(text, sizeof text, "%.2f", x);
    return text;
  }
  bool leads() const { return comm_.rank() == 0; }
  Int rows(Int N) const { return rows_of(N, comm_.size(), comm_.rank(), options_.order); }
  std::vector<Block> blocks(Int N) const {
    return blocks_of(N, comm_.size(), comm_.rank(), options_.order);
  }
  std::vector<Pass> passes() const {
    std::vector<Pass> all{{"forward", false}};
    if (asked_.backward) all.push_back({"forward+backward", true});
    return all;
  }
  std::vector<double> of_all(double mine) {
    std::vector<double> all(std::size_t(assembly_.size()), 0);
    assembly_.tell_all("a time", &mine, all.data(), sizeof mine);
    return all;
  }
  double largest(double mine) {
    const std::vector<double> all = of_all(mine);
    return *std::max_element(all.begin(), all.end());
  }

  void call(Communicator& comm, bool backward, bool agree) {
    Options options = options_;
    options.agree = agree;
    backward ? ring::backward(comm, *engine_, p_, t_.backward_tensors(), options)
             : ring::forward(comm, *engine_, p_, t_.forward_tensors(), options);
  }
  void method(Communicator& comm, const Pass& pass) {
    call(comm, false, false);
    if (pass.backward) call(comm, true, false);
  }

  // The plain kernel on all pairs of this rank's queries and any rank's keys. Its own keys stand in
  // for the others', which are as many.
  void share(const Pass& pass) {
    for (int owner = 0; owner < comm_.size(); ++owner) {
      const Tensors<T> t = t_.with_keys(rows_of(p_.Nk, comm_.size(), owner, options_.order));
      each_piece(p_, blocks(p_.Nq), blocks_of(p_.Nk, comm_.size(), owner, options_.order),
                 [&](const Problem& pair, Int row) {
                   const Forward<T> f = t.forward_tensors();
                   engine_->forward(pair, {from(f.Q, row), f.K, f.V, from(f.O, row), f.LSE});
                   if (!pass.backward) return;
                   const Backward<T> b = t.backward_tensors();
                   engine_->backward(pair, {from(b.Q, row), b.K, b.V, from(b.O, row),
                                            from(b.dO, row), b.LSE, from(b.dQ, row), b.dK, b.dV});
                 });
    }
  }

  double timed(const std::function<void()>& f, int calls) {
    machine_.finish("a round");
    of_all(0);  // all start together
    machine_.start();
    for (int k = 0; k < calls; ++k) f();
    return machine_.stop() / calls;
  }
  // As many calls as take `ms`, the same on all ranks.
  static int calls_for(double ms, double one) {
    return std::clamp(int(std::ceil(ms / std::max(one, 1e-3))), 1, 1000);
  }

  void measure_pass(const Pass& pass, double sent, std::ostringstream& row) {
    const std::function<void()> all = [&] { method(comm_, pass); };
    const std::function<void()> silent = [&] { method(silent_, pass); };
    const std::function<void()> own = [&] { share(pass); };
    const double once = largest(timed(all, 1));
    const int calls = calls_for(60, once);
    if (once < 1000) silent(), own();  // what takes so long needs no warming up
    Rounds method_ms, silent_ms, share_ms;
    // Each of the three comes first, second and third in turn: who follows a long one finds the GPU
    // hot, and slower.
    const std::pair<Rounds*, const std::function<void()>*> three[] = {
        {&method_ms, &all}, {&silent_ms, &silent}, {&share_ms, &own}};
    for (int round = 0; round < asked_.rounds; ++round)
      for (int k = 0; k < 3; ++k) {
        const auto& [found, f] = three[(round + k) % 3];
        found->add(of_all(timed(*f, calls)));
      }
    std::string why_not;
    const double whole = time_whole(pass, why_not);
    const double ms = method_ms.median(), P = comm_.size();
    const double flops =
        bench::forward_flops(p_) + (pass.backward ? bench::backward_flops(p_) : 0.0);
    row << ", \"" << pass.name << "\": {\"ms\": " << ms << ", \"ms_least\": " << method_ms.least()
        << ", \"rounds\": " << list(method_ms.ms) << ", \"calls_a_round\": " << calls
        << ", \"share_ms\": " << share_ms.median() << ", \"share_rounds\": " << list(share_ms.ms)
        << ", \"silent_ms\": " << silent_ms.median()
        << ", \"silent_rounds\": " << list(silent_ms.ms)
        << ", \"of_ranks\": " << list(method_ms.medians_of_ranks())
        << ", \"silent_of_ranks\": " << list(silent_ms.medians_of_ranks())
        << ", \"share_of_ranks\": " << list(share_ms.medians_of_ranks());
    if (whole > 0)
      row << ", \"whole_ms\": " << whole << ", \"efficiency_whole\": " << whole / P / ms;
    else
      row << ", \"no_whole\": " << quoted(why_not);
    row << ", \"efficiency_share\": " << share_ms.median() / ms
        << ", \"bytes_sent_a_rank\": " << sent << ", \"tflops_a_gpu\": " << flops / P / ms * 1e-9
        << "}";
    if (!leads()) return;
    std::printf("  %-16s %10.3f ms, at best %.3f; %.1f TFLOP/s a rank; %.1f MB sent by a rank\n",
                pass.name, ms, method_ms.least(), flops / P / ms * 1e-9, sent * 1e-6);
    std::printf("  %-16s %10.3f ms for its share alone: %.1f %%; %.3f ms without messages", "",
                share_ms.median(), 100 * share_ms.median() / ms, silent_ms.median());
    if (whole > 0)
      std::printf("; the whole on one %.3f ms: %.1f %%\n", whole, 100 * whole / P / ms);
    else
      std::printf("; %s\n", why_not.c_str());
    std::fflush(stdout);
  }

  // The plain kernel on the whole problem, on rank 0 while the others wait. 0: not timed.
  double time_whole(const Pass& pass, std::string& why_not) {
    double ms = 0;
    if (!asked_.whole) why_not = "the whole on one was not asked for";
    if (comm_.size() == 1) why_not = "one rank is the whole";
    if (!why_not.empty()) return 0;
    // It does not depend on the method.
    std::ostringstream problem;
    problem << p_.Nq << ' ' << p_.Hkv << ' ' << int(p_.causal) << ' ' << pass.backward;
    const auto known = wholes_.find(problem.str());
    if (known != wholes_.end()) return known->second;
    if (leads()) {
      // Beside the tensors the backward wants scratch: four bytes a number of dQ, and some more
      // (where 06 keeps dS, at d > 128, up to 2 GiB more).
      const double wanted = Tensors<T>::bytes_of(p_, pass.backward) +
                            (pass.backward ? double(p_.Hq * p_.Nq * (p_.d + 4)) * 4 : 0);
      const double there = double(machine_.free_bytes());
      if (wanted > 0.95 * there) {
        why_not = "the whole does not fit one: it wants " + fixed(wanted / gib) + " GiB, " +
                  fixed(there / gib) + " are free";
      } else {
        try {
          ms = whole_on_this(pass);
        } catch (const RankLost&) {
          throw;
        } catch (const std::exception& error) {  // memory that was free in pieces
          why_not = std::string("the whole did not run on one: ") + error.what();
        }
      }
    }
    ms = of_all(ms)[0];
    if (ms > 0) wholes_[problem.str()] = ms;
    return ms;
  }
  double whole_on_this(const Pass& pass) {
    const Tensors<T> whole(machine_, p_, p_.Nq, p_.Nk, pass.backward);
    whole.draw(machine_, {{0, p_.Nq}}, {{0, p_.Nk}});
    const auto f = [&] { compute_whole(whole, pass.backward); };
    machine_.finish("the whole problem");
    machine_.start();
    f();
    const double first = machine_.stop();  // also warms up
    const int calls = calls_for(60, first);
    Rounds rounds;
    for (int round = 0; round < std::min(asked_.rounds, first > 1000 ? 1 : 3); ++round) {
      machine_.start();
      for (int k = 0; k < calls; ++k) f();
      rounds.ms.push_back(machine_.stop() / calls);
    }
    return rounds.median();
  }
  void compute_whole(const Tensors<T>& whole, bool backward) {
    engine_->forward(p_, whole.forward_tensors());
    if (backward) engine_->backward(p_, whole.backward_tensors());
  }

  bool check(std::ostringstream& row) {
    using Sum = Stat<T>;
    std::unique_ptr<Tensors<T>> want, got;
    std::shared_ptr<void> room;
    if (leads()) {
      want = std::make_unique<Tensors<T>>(machine_, p_, p_.Nq, p_.Nk, asked_.backward);
      got = std::make_unique<Tensors<T>>(machine_, p_, p_.Nq, p_.Nk, asked_.backward);
      want->draw(machine_, {{0, p_.Nq}}, {{0, p_.Nk}});
      compute_whole(*want, asked_.backward);
      Int most = 0;
      for (int r = 0; r < comm_.size(); ++r)
        most = std::max(most, rows_of(std::max(p_.Nq, p_.Nk), comm_.size(), r, options_.order));
      room = machine_.allocate(std::size_t(p_.Hq * most * p_.d) * std::max(sizeof(T), sizeof(Sum)));
    }
    bool right = true;
    row << ", \"check\": {";
    const char* comma = "";
    const auto says = [&](const char* what, const Distance& far, double head, double of_row) {
      const bool ok = far.head <= head && far.row <= of_row;
      right = right && ok;
      row << comma << '"' << what << "\": [" << far.head << ", " << far.row << "]";
      comma = ", ";
      std::printf("  check of %-4s %s: off by %.2e of its size, a row by at most %.2e\n", what,
                  ok ? "right" : "WRONG", far.head, far.row);
    };
    const auto copy = [&](const Size& size, const View<const T>& x, const View<T>& y) {
      engine_->copy(size, x, y);
    };
    const auto tensor = [&](const char* what, Int H, Int N, T* Tensors<T>::*member) {
      collect(comm_, H, N, p_.d, options_.order, t_.*member, static_cast<T*>(room.get()),
              got ? (*got).*member : nullptr, copy);
      machine_.finish("the check");
      if (!leads()) return;
      const std::size_t count = std::size_t(H * N * p_.d);
      std::vector<float> x(count), y(count);
      machine_.to_host(x.data(), (*got).*member, count);
      machine_.to_host(y.data(), (*want).*member, count);
      says(what, distance(x, y, H, N, p_.d), allowed(asked_.type), 0.25);
    };
    tensor("O", p_.Hq, p_.Nq, &Tensors<T>::O);
    collect(comm_, p_.Hq, p_.Nq, 1, options_.order, t_.LSE, static_cast<Sum*>(room.get()),
            got ? got->LSE : nullptr,
            [&](const Size& size, const View<const Sum>& x, const View<Sum>& y) {
              engine_->copy_sums(size, x, y);
            });
    machine_.finish("the check");
    if (leads()) {
      const std::size_t count = std::size_t(p_.Hq * p_.Nq);
      std::vector<Sum> x(count), y(count);
      machine_.sums_to_host(x.data(), got->LSE, count);
      machine_.sums_to_host(y.data(), want->LSE, count);
      says("LSE", distance({x.begin(), x.end()}, {y.begin(), y.end()}, p_.Hq, p_.Nq, 1), 1e-4,
           1e-3);
    }
    if (asked_.backward) {
      tensor("dQ", p_.Hq, p_.Nq, &Tensors<T>::dQ);
      tensor("dK", p_.Hkv, p_.Nk, &Tensors<T>::dK);
      tensor("dV", p_.Hkv, p_.Nk, &Tensors<T>::dV);
    }
    right = of_all(right ? 1 : 0)[0] > 0;
    row << ", \"right\": " << (right ? "true" : "false") << "}";
    return right;
  }

  // One call of all passes, with the times of its messages. Each rank's clock begins when all have
  // come to the same place.
  std::string record() {
    machine_.finish("a round");
    of_all(0);
    machine_.timeline(true);
    method(comm_, passes().back());
    std::ostringstream mine;
    mine << "{\"rank\": " << comm_.rank() << ", \"steps\": [";
    const std::vector<Exchange> all = machine_.exchanges();
    machine_.timeline(false);
    for (std::size_t k = 0; k < all.size(); ++k)
      mine << (k ? ", " : "") << "{\"at\": " << quoted(all[k].at) << ", \"compute\": ["
           << all[k].compute_from << ", " << all[k].compute_to << "], \"copy\": ["
           << all[k].copy_from << ", " << all[k].copy_to << "]}";
    mine << "]}";
    std::ostringstream text;
    text << "{\"method\": \"" << name(options_.method) << "\", \"N\": " << p_.Nq
         << ", \"Hkv\": " << p_.Hkv
         << ", \"causal\": " << (p_.causal != Causal::none ? "true" : "false")
         << ", \"backward\": " << (asked_.backward ? "true" : "false") << ", \"ranks\": [";
    const std::vector<std::string> ranks = assembly_.tell_texts("the timeline", mine.str());
    for (std::size_t r = 0; r < ranks.size(); ++r) text << (r ? ",\n  " : "\n  ") << ranks[r];
    return text.str() + "]}";
  }

  Machine<T>& machine_;
  Assembly& assembly_;
  const Asked& asked_;
  std::map<std::string, double>& wholes_;
  const Problem p_;
  const Options options_;
  Silent silent_;
  Communicator& comm_;
  std::unique_ptr<Engine<T>> engine_;
  Tensors<T> t_;
};

// ---- all problems ------------------------------------------------------------------------------

// In the file, so that its numbers can be read without this one.
const char* const meaning =
    "ms: of each round the slowest rank's mean time of calls_a_round calls, and of the rounds the "
    "median; share_ms: the plain kernel on a rank's own pairs of blocks, without messages and "
    "merges, the slowest rank's as well; silent_ms: the method without its messages; of_ranks: "
    "each rank's median; whole_ms: "
    "the plain kernel on the whole "
    "problem on rank 0 alone; efficiency_share = share_ms / ms; efficiency_whole = whole_ms / "
    "ranks / ms; bytes_used_on_gpu: by all, as the driver says after the first call";

// All ranks must have been asked for the same. What differs is named, with both ranks.
void agree(Assembly& assembly, const Asked& asked) {
  const std::vector<std::string> told = assembly.tell_texts("what it was asked for", asked.text());
  for (std::size_t r = 1; r < told.size(); ++r) {
    std::istringstream first(told[0]), other(told[r]);
    std::string a, b;
    while (std::getline(first, a) && std::getline(other, b))
      require(a == b, "ring: all ranks must be asked for the same; rank 0 has '", a, "', rank ", r,
              " has '", b, "'");
  }
}

void write(const std::string& path, const std::string& text) {
  const std::string beside = path + ".part";
  {
    std::ofstream file(beside);
    file << text << '\n';
    if (!file.flush()) throw std::runtime_error("ring: cannot write " + path);
  }
  if (std::rename(beside.c_str(), path.c_str()) != 0)
    throw std::runtime_error("ring: cannot write " + path);
}

std::string joined(const std::vector<std::string>& all) {
  std::string text;
  for (const std::string& one : all) text += (text.empty() ? "\n  " : ",\n  ") + one;
  return text;
}

// What may change how messages travel.
std::string environment() {
  std::string text;
  for (char** at = environ; *at; ++at)
    if (std::strncmp(*at, "NCCL_", 5) == 0)
      if (const char* equals = std::strchr(*at, '='))
        text += (text.empty() ? "" : ", ") + quoted(std::string(*at, std::size_t(equals - *at))) +
                ": " + quoted(equals + 1);
  return "{" + text + "}";
}

// The last resort: a rank that is told that all is over and still does not come to its end, because
// a call of a library never returns. Its process ends then, as it would by a signal.
void watch(Assembly& assembly) {
  std::thread([&assembly] {
    while (!assembly.over()) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::this_thread::sleep_for(std::min(assembly.patience(), Assembly::Duration(8000)));
    const std::string why =
        "ring: rank " + std::to_string(assembly.rank()) + " gave up: " + assembly.why() + "\n";
    if (::write(STDERR_FILENO, why.data(), why.size()) < 0) std::_Exit(4);
    std::_Exit(3);
  }).detach();
}

}  // namespace

template <class T>
bool measure(Machine<T>& machine, Assembly& assembly, const Asked& asked) {
  const auto begun = Clock::now();
  agree(assembly, asked);
  require(!asked.alone || (assembly.size() == 1 && !asked.check),
          "ring: --alone wants one process, and has no result to check");
  const std::vector<std::string> names = assembly.tell_texts("its machine", machine.name());
  std::string gpus;
  for (const std::string& name : names) gpus += (gpus.empty() ? "" : ", ") + quoted(name);
  const bool leads = assembly.rank() == 0;
  if (leads)
    std::printf("%d ranks, %s; messages by %s\n", assembly.size(), names[0].c_str(),
                machine.carriers().c_str());
  std::vector<std::string> rows, timelines;
  std::map<std::string, double> wholes;
  bool right = true, stopped = false;
  const auto save = [&] {
    if (!leads) return;
    if (!asked.json.empty())
      write(asked.json,
            "{\"machines\": [" + gpus + "], \"messages\": " + quoted(machine.carriers()) +
                ", \"commit\": " + quoted(bench::commit()) + ", \"environment\": " + environment() +
                ", \"meaning\": " + quoted(meaning) + ", \"asked\": " + quoted(asked.text()) +
                ", \"stopped_early\": " + (stopped ? "true" : "false") + ",\n\"rows\": [" +
                joined(rows) + "]}");
    if (!asked.timeline.empty()) write(asked.timeline, "[" + joined(timelines) + "]");
  };
  for (const Int N : asked.lengths)
    for (const Int key_heads : asked.key_heads)
      for (const bool causal : asked.causal)
        for (const Method method : asked.methods) {
          // Rank 0's clock decides for all.
          const double late = asked.seconds > 0 && seconds_since(begun) > asked.seconds;
          std::vector<double> all(std::size_t(assembly.size()), 0);
          assembly.tell_all("the next problem", &late, all.data(), sizeof late);
          if (all[0] > 0) {
            stopped = true;
            continue;
          }
          Problem p;
          p.Hq = asked.heads, p.Hkv = key_heads, p.Nq = N, p.Nk = N, p.d = asked.d;
          p.causal = causal ? Causal::top_left : Causal::none;
          std::string row, timeline;
          Measured<T> measured(machine, assembly, asked, p, method, wholes);
          right = measured.run(row, timeline) && right;
          rows.push_back(row);
          if (!timeline.empty()) timelines.push_back(timeline);
          save();
        }
  save();
  if (stopped && leads)
    std::printf("stopped after %.0f s: not all problems were measured\n", asked.seconds);
  assembly.at("its end");
  return right;
}

#define FA_INSTANTIATE(T) template bool measure(Machine<T>&, Assembly&, const Asked&);
FA_RING_TYPES(FA_INSTANTIATE)

}  // namespace fa::ring

// 0: done. 1: this rank failed, or a result is wrong. 2: it was called wrongly. 3: another rank was
// lost. On standard error stands one sentence then.
int main(int count, char** words) {
  using namespace fa::ring;
#ifdef __linux__
  // Who was started by ./learn ring ends with it, however that ends.
  if (const char* parent = std::getenv("FA_RING_PARENT")) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != std::atoi(parent)) return 3;
  }
#endif
  int code = 0;
  std::string wrong;
  std::unique_ptr<Assembly> assembly;
  try {
    const Asked asked =
        fa::ring::asked({words + 1, words + count}, fa::ring::types_of_this_program());
    if (asked.help) {
      std::cout << usage;
      return 0;
    }
    const Place place = place_of_this_process();
    assembly = std::make_unique<Assembly>(place, std::chrono::milliseconds(asked.timeout_ms));
    watch(*assembly);
    code = run_on_this_machine(*assembly, place, asked);
  } catch (const RankLost& error) {
    code = 3, wrong = error.what();
  } catch (const std::invalid_argument& error) {
    code = 2, wrong = error.what();
  } catch (const std::exception& error) {
    code = 1, wrong = error.what();
  }
  if (!wrong.empty()) {
    if (assembly) assembly->leave(wrong);
    std::cerr << wrong << std::endl;
  }
  std::cout.flush();
  // The thread that watches looks at the assembly to the end.
  Assembly* const last = assembly.release();
  if (last) last->end();
  // Threads of a library that was ended in the middle of something shall not be waited for.
  std::fflush(nullptr);
  std::_Exit(code);
}
