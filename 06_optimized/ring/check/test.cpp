// Tests of the ring on the CPU. Ranks are threads; each gets its rows of a case of the judge, and
// what all of them return is put together and judged as one result.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "03_tiled_cpu/tiled_cpu.hpp"
#include "05_cuda_backward/cuda_backward.hpp"
#include "06_optimized/ring/check/cpu.hpp"
#include "06_optimized/ring/check/parts.hpp"
#include "06_optimized/ring/ring.hpp"
#include "06_optimized/ring/threads.hpp"
#include "common/judge/cases.hpp"

namespace {

using namespace fa;
using namespace fa::judge;
using namespace fa::ring;
using Int = std::int64_t;
using std::chrono::milliseconds;

constexpr milliseconds patience(20000);

// ---- a case, run by ranks -----------------------------------------------------------------------

struct Ran {
  std::vector<std::string> ends;
  std::vector<Int> bytes;         // sent by each rank
  std::vector<std::size_t> held;  // by each rank's engine
};

template <class T>
std::unique_ptr<Engine<T>> engine_of_rank(int) {
  return cpu_engine<T>();
}

template <class T, class MakeEngine = decltype(&engine_of_rank<T>)>
Ran run_forward(ForwardCase<T>& c, int ranks, const Options& options,
                MakeEngine make = engine_of_rank<T>, milliseconds wait = patience) {
  const Problem p = c.call().p;
  Ran ran{{}, std::vector<Int>(std::size_t(ranks)), std::vector<std::size_t>(std::size_t(ranks))};
  std::vector<ForwardParts<T>> parts;
  parts.reserve(std::size_t(ranks));
  for (int r = 0; r < ranks; ++r) {
    parts.emplace_back(p, ranks, r, options.order);
  }
  for (auto& part : parts) {
    part.Q.take(c.Q), part.K.take(c.K), part.V.take(c.V);
  }
  ran.ends = on_threads(ranks, wait, [&](Communicator& comm) {
    const auto me = std::size_t(comm.rank());
    const std::unique_ptr<Engine<T>> engine = make(comm.rank());
    ring::forward(comm, *engine, p, parts[me].tensors(), options);
    ran.bytes[me] = comm.bytes_sent;
    ran.held[me] = engine->held();
  });
  for (auto& part : parts) part.O.give(c.O), part.L.give(c.LSE);
  return ran;
}

template <class T, class MakeEngine = decltype(&engine_of_rank<T>)>
Ran run_backward(BackwardCase<T>& c, int ranks, const Options& options,
                 MakeEngine make = engine_of_rank<T>, milliseconds wait = patience) {
  const Problem p = c.call().p;
  Ran ran{{}, std::vector<Int>(std::size_t(ranks)), std::vector<std::size_t>(std::size_t(ranks))};
  ran.ends = on_threads(ranks, wait, [&](Communicator& comm) {
    const int r = comm.rank();
    ForwardParts<T> in(p, ranks, r, options.order), out(p, ranks, r, options.order);
    Part<T> dO = in.Q;
    in.Q.take(c.Q), in.K.take(c.K), in.V.take(c.V), in.O.take(c.O), in.L.take(c.LSE);
    dO.view.data = dO.data.data();
    dO.take(c.dO);
    const Backward<T> t{in.Q.view,        in.K.view,  in.V.view,  in.O.view, dO.view,
                        in.L.data.data(), out.Q.view, out.K.view, out.V.view};
    const std::unique_ptr<Engine<T>> engine = make(r);
    ring::backward(comm, *engine, p, t, options);
    out.Q.give(c.dQ), out.K.give(c.dK), out.V.give(c.dV);
    ran.bytes[std::size_t(r)] = comm.bytes_sent;
    ran.held[std::size_t(r)] = engine->held();
  });
  return ran;
}

std::string all_ends(const Ran& ran) {
  std::string text;
  for (std::size_t r = 0; r < ran.ends.size(); ++r)
    if (!ran.ends[r].empty()) text += "rank " + std::to_string(r) + ": " + ran.ends[r] + "\n";
  return text;
}

template <class T>
std::string forward_verdict(const Spec& spec, int ranks, const Options& options) {
  ForwardCase<T> c(spec, true);
  c.call();
  const std::string ends = all_ends(run_forward(c, ranks, options));
  return ends.empty() ? c.verdict() : ends;
}
template <class T>
std::string backward_verdict(const Spec& spec, int ranks, const Options& options) {
  BackwardCase<T> c(spec);
  c.call();
  const std::string ends = all_ends(run_backward(c, ranks, options));
  return ends.empty() ? c.verdict() : ends;
}

// Every mask; lengths that no number of ranks divides, fewer rows than blocks, more keys than
// queries and fewer; groups; key lengths, among them 0.
std::vector<Spec> specs() {
  std::vector<Spec> all;
  for (const Causal causal : masks) {
    all.push_back(sized(1, 1, 1, 96, 96, 8, causal));
    all.push_back(sized(2, 4, 2, 67, 67, 5, causal));
    all.push_back(sized(1, 2, 1, 5, 41, 8, causal));
    all.push_back(sized(1, 2, 2, 41, 5, 8, causal));
    all.push_back(sized(1, 3, 3, 30, 53, 4, causal));
    all.push_back(sized(1, 3, 3, 53, 30, 4, causal));
    all.push_back(sized(3, 2, 1, 33, 37, 8, causal, {0, 37, 11}));
    all.push_back(sized(1, 1, 1, 1, 1, 4, causal));
  }
  return all;
}

std::string traced(const Spec& spec, int ranks, const Options& options) {
  return spec.name() + ", " + std::to_string(ranks) + " ranks, " + name(options.method) +
         (options.order == Order::zigzag ? ", zigzag" : ", contiguous");
}

template <class T, class Verdict>
void all_right(const std::vector<Spec>& cases, const std::vector<int>& ranks_of, Method method,
               const Verdict& verdict) {
  for (const Spec& spec : cases)
    for (const int ranks : ranks_of)
      for (const Order order : {Order::zigzag, Order::contiguous}) {
        const Options options{method, order};
        if (method == Method::heads && ranks > spec.p.Hkv) continue;
        const std::string wrong = verdict(T(), spec, ranks, options);
        ASSERT_EQ(wrong, "") << traced(spec, ranks, options);
      }
}
const auto forward_of = [](auto type, const Spec& spec, int ranks, const Options& options) {
  return forward_verdict<decltype(type)>(spec, ranks, options);
};
const auto backward_of = [](auto type, const Spec& spec, int ranks, const Options& options) {
  return backward_verdict<decltype(type)>(spec, ranks, options);
};

// ---- who holds what ----------------------------------------------------------------------------

TEST(Blocks, EveryRowOnce) {
  for (const Int N : {0, 1, 7, 16, 41, 64, 1000})
    for (const Order order : {Order::zigzag, Order::contiguous})
      for (int P = 1; P <= 8; ++P) {
        std::vector<int> seen(std::size_t(N), 0);
        Int most = 0, least = N;
        for (int r = 0; r < P; ++r) {
          Int end = 0;
          for (const Block& b : blocks_of(N, P, r, order)) {
            EXPECT_GT(b.rows, 0);
            EXPECT_TRUE(end == 0 || b.first > end)
                << "blocks that touch are one, in ascending order";
            end = b.first + b.rows;
            for (Int i = b.first; i < end; ++i) ++seen[std::size_t(i)];
          }
          most = std::max(most, rows_of(N, P, r, order));
          least = std::min(least, rows_of(N, P, r, order));
        }
        EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), N) << "N " << N << ", P " << P;
        EXPECT_LE(most - least, 2) << "N " << N << ", P " << P;
      }
}

// Pairs of a query and a key that it sees, of each rank: counted row by row.
std::vector<Int> pairs(const Problem& p, int ranks, Order order) {
  std::vector<Int> of(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r)
    for (const Block& b : blocks_of(p.Nq, ranks, r, order))
      for (Int i = b.first; i < b.first + b.rows; ++i) of[std::size_t(r)] += visible_keys(p, 0, i);
  return of;
}

TEST(Blocks, ZigzagIsBalanced) {
  Problem p = sized(1, 1, 1, 1024, 1024, 8, Causal::top_left).p;
  for (int P = 2; P <= 8; P *= 2) {
    const std::vector<Int> zigzag = pairs(p, P, Order::zigzag);
    const std::vector<Int> contiguous = pairs(p, P, Order::contiguous);
    EXPECT_EQ(*std::max_element(zigzag.begin(), zigzag.end()),
              *std::min_element(zigzag.begin(), zigzag.end()));
    // The last rank's triangle and P - 1 squares, against the first rank's triangle alone.
    EXPECT_GT(contiguous.back(), (2 * P - 2) * contiguous.front());
  }
  // Step by step as well: after the first, in which everybody meets their own keys, no rank has
  // more to do than another.
  const int P = 4;
  for (int s = 1; s < P; ++s) {
    std::set<Int> work;
    for (int r = 0; r < P; ++r) {
      Int seen = 0;
      each_piece(p, blocks_of(1024, P, r, Order::zigzag),
                 blocks_of(1024, P, (r - s + P) % P, Order::zigzag), [&](const Problem& pair, Int) {
                   for (Int i = 0; i < pair.Nq; ++i) seen += visible_keys(pair, 0, i);
                 });
      work.insert(seen);
    }
    EXPECT_EQ(work.size(), 1u) << "step " << s;
  }
}

TEST(Blocks, PiecesAreTheMask) {
  for (const Causal causal : masks)
    for (const Int Nq : {1, 6, 13})
      for (const Int Nk : {1, 6, 13, 20})
        for (const Int length : {Int(-1), Int(0), Nk / 2}) {
          Problem p = sized(1, 1, 1, Nq, Nk, 4, causal).p;
          if (length >= 0) p.key_lengths = &length;
          for (int P = 1; P <= 5; ++P)
            for (int r = 0; r < P; ++r)
              for (int o = 0; o < P; ++o) {
                const auto queries = blocks_of(Nq, P, r, Order::zigzag);
                const auto keys = blocks_of(Nk, P, o, Order::zigzag);
                std::set<std::pair<Int, Int>> got, want;
                each_piece(p, queries, keys, [&](const Problem& pair, Int row) {
                  for (Int i = 0; i < pair.Nq; ++i)
                    for (Int j = 0; j < visible_keys(pair, 0, i); ++j)
                      EXPECT_TRUE(got.insert({row + i, j}).second) << "a pair twice";
                });
                Int row = 0;
                for (const Block& q : queries)
                  for (Int i = q.first; i < q.first + q.rows; ++i, ++row) {
                    Int key = 0;
                    for (const Block& k : keys)
                      for (Int j = k.first; j < k.first + k.rows; ++j, ++key)
                        if (sees(p, 0, i, j)) want.insert({row, key});
                  }
                ASSERT_EQ(got, want)
                    << "Nq " << Nq << ", Nk " << Nk << ", causal " << int(causal) << ", length "
                    << length << ", P " << P << ", rank " << r << ", keys of " << o;
              }
        }
}

TEST(Blocks, FewPieces) {
  // Its own keys are one triangle, although its blocks do not touch; those of others are one
  // rectangle: a column of squares or a row. Without a mask it is everything.
  const Problem p = sized(1, 1, 1, 64, 64, 4, Causal::top_left).p;
  int launches = 0;
  for (int o = 0; o < 4; ++o)
    each_piece(p, blocks_of(64, 4, 1, Order::zigzag), blocks_of(64, 4, o, Order::zigzag),
               [&](const Problem&, Int) { ++launches; });
  EXPECT_EQ(launches, 4);
  const auto early_and_late = blocks_of(64, 4, 1, Order::zigzag);
  EXPECT_EQ(pieces_of(p, early_and_late, early_and_late).size(), 1u);
  const Problem open = sized(1, 1, 1, 64, 64, 4, Causal::none).p;
  EXPECT_EQ(pieces_of(open, early_and_late, blocks_of(64, 4, 2, Order::zigzag)).size(), 1u);
}

// ---- two results are one -----------------------------------------------------------------------

TEST(Merge, LOfBoth) {
  const float part[] = {0};
  for (const auto& [first, second] : {std::pair{0.f, 0.f}, {2.f, -1.f}, {-3.f, 1.5f}}) {
    float O[] = {0}, L = first;
    merge(part, second, 1, O, L);
    EXPECT_NEAR(L, std::log(std::exp(first) + std::exp(second)), 1e-6);
  }
}

TEST(Merge, KeysOfBoth) {
  // Three keys with scores 0, log 2 and log 5 and values 1, 10 and 100; the first two came first.
  const double L_ab = std::log(3.0), L_c = std::log(5.0), O_c[] = {100};
  double O[] = {(1 + 2 * 10) / 3.0}, L = L_ab;
  merge(O_c, L_c, 1, O, L);
  EXPECT_NEAR(L, std::log(8.0), 1e-14);
  EXPECT_NEAR(O[0], (1 + 2 * 10 + 5 * 100) / 8.0, 1e-12);
}

TEST(Merge, WhoSawNoKeyCountsNothing) {
  const double none = -INFINITY;
  double O[] = {0, 0}, L = none;
  const double part[] = {3, -4}, empty[] = {0, 0};
  merge(part, 1.5, 2, O, L);
  EXPECT_EQ(L, 1.5);
  EXPECT_EQ(O[0], 3);
  EXPECT_EQ(O[1], -4);
  merge(empty, none, 2, O, L);
  EXPECT_EQ(L, 1.5);
  EXPECT_EQ(O[0], 3);
  double nobody[] = {0, 0}, L_nobody = none;
  merge(empty, none, 2, nobody, L_nobody);
  EXPECT_EQ(L_nobody, none);
  EXPECT_EQ(nobody[0], 0);
}

TEST(Merge, NaNIsNotForgotten) {
  const double nan = std::nan(""), none = -INFINITY, part[] = {3};
  for (const auto& [first, second] : {std::pair{none, nan}, {nan, none}, {1.5, nan}, {nan, 1.5}}) {
    double O[] = {1}, L = first;
    merge(part, second, 1, O, L);
    EXPECT_TRUE(std::isnan(L) && std::isnan(O[0])) << first << ", " << second;
  }
}

TEST(Merge, FarApart) {
  // Scores near 1000: exp() of them is no number, and of their differences it is.
  float O[] = {1}, L = 1000;
  const float part[] = {3};
  merge(part, 1000.0f, 1, O, L);
  EXPECT_FLOAT_EQ(L, 1000 + std::log(2.0f));
  EXPECT_FLOAT_EQ(O[0], 2);
  merge(part, -1000.0f, 1, O, L);
  EXPECT_FLOAT_EQ(O[0], 2);
}

// ---- the ring ----------------------------------------------------------------------------------

TEST(Ring, Forward) {
  all_right<float>(specs(), {1, 2, 3, 4, 5, 6, 7, 8}, Method::ring, forward_of);
}
TEST(Ring, ForwardOfTheJudgesCases) {
  all_right<float>(walk_specs(), {2, 3}, Method::ring, forward_of);
}
TEST(Ring, ForwardInDouble) { all_right<double>(specs(), {2, 5}, Method::ring, forward_of); }
TEST(Ring, Backward) {
  all_right<float>(specs(), {1, 2, 3, 4, 5, 6, 7, 8}, Method::ring, backward_of);
}
TEST(Ring, BackwardOfTheJudgesCases) {
  all_right<float>(walk_specs(), {2, 3}, Method::ring, backward_of);
}
TEST(Ring, NaNGoesWhereItIsSeen) {
  for (const int P : {1, 2, 3, 4})
    for (const Method method : {Method::ring, Method::gather, Method::heads}) {
      if (method == Method::heads && P > 2) continue;  // key heads
      ForwardCase<float> c(with_NaN(), true);
      c.call();
      put_NaN(c);
      EXPECT_EQ(all_ends(run_forward(c, P, {method})), "");
      EXPECT_EQ(where_NaN_is_wrong(c), "") << name(method) << ", " << P << " ranks";
    }
}
TEST(Ring, BackwardInDouble) { all_right<double>(specs(), {2, 5}, Method::ring, backward_of); }

// What a rank hands to its communicator, step by step. 10 rows on 3 ranks: 3, 3 and 4, so that the
// size of a message tells whose keys are in it.
class Recorded : public Communicator {
 public:
  struct Step {
    std::vector<Message> sent, received;
  };
  Recorded(Communicator& real, std::vector<Step>& steps) : real_(real), steps_(steps) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  void begin(const std::string& at, const std::vector<Message>& sent,
             const std::vector<Message>& received) override {
    steps_.push_back({sent, received});
    real_.begin(at, sent, received);
  }
  void wait() override { real_.wait(); }
  void tell_all(const std::string& at, const void* mine, void* all, std::size_t n) override {
    real_.tell_all(at, mine, all, n);
  }
  void leave(const std::string& why) noexcept override { real_.leave(why); }

 private:
  Communicator& real_;
  std::vector<Step>& steps_;
};

std::vector<std::vector<Recorded::Step>> travel(bool backward) {
  constexpr int P = 3;
  const Problem p = sized(1, 1, 1, 10, 10, 1).p;
  std::vector<std::vector<Recorded::Step>> steps(P);
  on_threads(P, patience, [&](Communicator& real) {
    Recorded comm(real, steps[std::size_t(real.rank())]);
    ForwardParts<float> x(p, P, comm.rank(), Order::contiguous);
    ForwardParts<float> y(p, P, comm.rank(), Order::contiguous);
    for (Part<float>* part : {&x.Q, &x.K, &x.V, &x.O, &x.L})
      std::fill(part->data.begin(), part->data.end(), 1.0f);
    const auto engine = cpu_engine<float>();
    const Options options{Method::ring, Order::contiguous};
    if (backward)
      ring::backward<float>(comm, *engine, p,
                            {x.Q.view, x.K.view, x.V.view, x.O.view, x.O.view, x.L.data.data(),
                             y.Q.view, y.K.view, y.V.view},
                            options);
    else
      ring::forward<float>(comm, *engine, p, x.tensors(), options);
  });
  return steps;
}

// Each message of a step: how far the keys, or sums, that are sent have come before.
void expect_messages(const Recorded::Step& step, int r, const std::vector<int>& moved) {
  constexpr std::size_t rows[] = {3, 3, 4};
  ASSERT_EQ(step.sent.size(), moved.size());
  ASSERT_EQ(step.received.size(), moved.size());
  for (std::size_t k = 0; k < moved.size(); ++k) {
    EXPECT_EQ(step.sent[k].peer, (r + 1) % 3);
    EXPECT_EQ(step.received[k].peer, (r + 2) % 3);
    EXPECT_EQ(step.sent[k].bytes, 2 * sizeof(float) * rows[(r + 3 - moved[k]) % 3]);
    EXPECT_EQ(step.received[k].bytes, 2 * sizeof(float) * rows[(r + 5 - moved[k]) % 3]);
  }
}

TEST(Travel, KeysMoveOnByOneRank) {
  const auto steps = travel(false);
  for (int r = 0; r < 3; ++r) {
    ASSERT_EQ(steps[std::size_t(r)].size(), 2u);
    for (int s = 0; s < 2; ++s) expect_messages(steps[std::size_t(r)][std::size_t(s)], r, {s});
  }
}

TEST(Travel, SumsFollowTheirKeysOneStepBehind) {
  const auto steps = travel(true);
  for (int r = 0; r < 3; ++r) {
    const auto& of_rank = steps[std::size_t(r)];
    ASSERT_EQ(of_rank.size(), 4u);
    expect_messages(of_rank[0], r, {0});
    expect_messages(of_rank[1], r, {1, 0});
    expect_messages(of_rank[2], r, {1});
    expect_messages(of_rank[3], r, {2});  // home
    for (const Recorded::Step& step : of_rank)
      for (const Message& sent : step.sent)
        for (const Message& received : step.received) EXPECT_NE(sent.data, received.data);
  }
}

// Equal, or zeros of different signs: a sum begins with 0, and 0 + -0 = 0.
template <class X>
std::string same_numbers(const char* what, const Buffer<X>& got, const Buffer<X>& want) {
  std::string text;
  got.for_each([&](Int b, Int h, Int i, Int x) {
    if (got.at(b, h, i, x) != want.at(b, h, i, x) && text.empty())
      text = std::string(what) + " differs in row " + std::to_string(i);
  });
  return text;
}

template <class T>
void whole_forward(ForwardCase<T>& c) {
  const ForwardCall<T> call = c.call();
  tiled_cpu::forward(call.p, call.t);
}

TEST(Ring, OneRankIsStage03) {
  for (const Spec& spec : specs()) {
    ForwardCase<float> ring(spec, true), whole(spec, true);
    ring.call();
    ASSERT_EQ(all_ends(run_forward(ring, 1, {})), "");
    whole_forward(whole);
    EXPECT_EQ(same_numbers("O", ring.O, whole.O), "") << spec.name();
    EXPECT_EQ(same_numbers("LSE", ring.LSE, whole.LSE), "") << spec.name();
  }
}

TEST(Ring, OneRankIsStage05) {
  for (const Spec& spec : specs()) {
    BackwardCase<float> ring(spec), whole(spec);
    ring.call();
    ASSERT_EQ(all_ends(run_backward(ring, 1, {})), "");
    const BackwardCall<float> call = whole.call();
    cuda_backward::backward_on_cpu(call.p, call.t);
    EXPECT_EQ(same_numbers("dQ", ring.dQ, whole.dQ), "") << spec.name();
    EXPECT_EQ(same_numbers("dK", ring.dK, whole.dK), "") << spec.name();
    EXPECT_EQ(same_numbers("dV", ring.dV, whole.dV), "") << spec.name();
  }
}

TEST(Ring, SameBitsInEveryRun) {
  const Spec spec = sized(1, 4, 2, 67, 67, 8, Causal::top_left);
  for (int P = 2; P <= 5; ++P) {
    BackwardCase<float> first(spec), again(spec);
    first.call(), again.call();
    ASSERT_EQ(all_ends(run_backward(first, P, {})), "");
    ASSERT_EQ(all_ends(run_backward(again, P, {})), "");
    EXPECT_EQ(same_numbers("dK", first.dK, again.dK), "");
    EXPECT_EQ(same_numbers("dV", first.dV, again.dV), "");
    EXPECT_EQ(same_numbers("dQ", first.dQ, again.dQ), "");
  }
}

TEST(Ring, ALongerSequenceOnMoreRanks) {
  for (const Causal causal : masks) {
    ForwardCase<float> c(sized(1, 1, 1, 1031, 1031, 16, causal), true);
    c.call();
    ASSERT_EQ(all_ends(run_forward(c, 8, {})), "");
    EXPECT_EQ(c.verdict({0, 1, 64, 515, 1030}), "");
  }
}

// ---- rivals ------------------------------------------------------------------------------------

TEST(Rivals, GatherForward) { all_right<float>(specs(), {1, 2, 3, 8}, Method::gather, forward_of); }
TEST(Rivals, GatherBackward) {
  all_right<float>(specs(), {1, 2, 3, 8}, Method::gather, backward_of);
}
TEST(Rivals, HeadsForward) { all_right<float>(specs(), {1, 2, 3}, Method::heads, forward_of); }
TEST(Rivals, HeadsBackward) { all_right<float>(specs(), {1, 2, 3}, Method::heads, backward_of); }
// A rank may do without LSE, whatever the others want: they still expect its messages.
TEST(Rivals, ARankWithoutLSE) {
  for (const Method method : {Method::ring, Method::gather, Method::heads}) {
    ForwardCase<float> c(sized(1, 2, 2, 21, 21, 4, Causal::top_left), true);
    const Problem p = c.call().p;
    const auto ends = on_threads(2, milliseconds(2000), [&](Communicator& comm) {
      ForwardParts<float> parts(p, 2, comm.rank(), Order::zigzag);
      parts.Q.take(c.Q), parts.K.take(c.K), parts.V.take(c.V);
      Forward<float> t = parts.tensors();
      if (comm.rank() == 1) t.LSE = nullptr;
      ring::forward(comm, *cpu_engine<float>(), p, t, {method});
      parts.O.give(c.O);
    });
    for (const std::string& end : ends) EXPECT_EQ(end, "") << name(method);
    ForwardCase<float> whole(sized(1, 2, 2, 21, 21, 4, Causal::top_left), true);
    whole_forward(whole);
    c.O.for_each([&](Int b, Int h, Int i, Int x) {
      EXPECT_NEAR(c.O.at(b, h, i, x), whole.O.at(b, h, i, x), 1e-5) << name(method);
    });
  }
}
TEST(Rivals, HeadsAreStage03ForAnyNumberOfRanks) {
  for (const int P : {2, 3}) {
    const Spec spec = sized(2, 6, 3, 45, 61, 8, Causal::bottom_right);
    ForwardCase<float> heads(spec, true), whole(spec, true);
    heads.call();
    ASSERT_EQ(all_ends(run_forward(heads, P, {Method::heads})), "");
    whole_forward(whole);
    EXPECT_EQ(same_numbers("O", heads.O, whole.O), "");
  }
}

// ---- what is sent, what is held ----------------------------------------------------------------

TEST(Bytes, AsThePageCounts) {
  const Int B = 2, Hq = 4, Hkv = 4, N = 64, d = 8;
  for (const int P : {1, 2, 4}) {
    const Spec spec = sized(B, Hq, Hkv, N, N, d, Causal::top_left);
    // Of one rank, in bytes: rows of queries, and of keys; and of L.
    const Int queries = 4 * B * Hq * (N / P) * d, keys = 4 * B * Hkv * (N / P) * d;
    const Int L = 4 * B * Hq * (N / P);
    const auto sent = [&](Method method, bool backward) {
      ForwardCase<float> f(spec, true);
      BackwardCase<float> b(spec);
      f.call(), b.call();
      const Ran ran = backward ? run_backward(b, P, {method}) : run_forward(f, P, {method});
      EXPECT_EQ(all_ends(ran), "");
      for (const Int bytes : ran.bytes) EXPECT_EQ(bytes, ran.bytes[0]) << name(method);
      return ran.bytes[0];
    };
    EXPECT_EQ(sent(Method::ring, false), (P - 1) * 2 * keys);
    EXPECT_EQ(sent(Method::gather, false), (P - 1) * 2 * keys);
    EXPECT_EQ(sent(Method::heads, false), (P - 1) * (2 * queries + 2 * keys + L) / P);
    EXPECT_EQ(sent(Method::ring, true), (P - 1) * 2 * keys + (P > 1 ? P * 2 * keys : 0));
    EXPECT_EQ(sent(Method::gather, true), (P - 1) * 4 * keys);
    EXPECT_EQ(sent(Method::heads, true), (P - 1) * (4 * queries + 4 * keys + L) / P);
  }
}

TEST(Bytes, MemoryOfARankShrinks) {
  const Spec spec = sized(1, 1, 1, 512, 512, 16);
  const auto held = [&](Method method, int ranks) {
    ForwardCase<float> c(spec, true);
    c.call();
    const Ran ran = run_forward(c, ranks, {method});
    EXPECT_EQ(all_ends(ran), "");
    return double(*std::max_element(ran.held.begin(), ran.held.end()));
  };
  EXPECT_NEAR(held(Method::ring, 8), held(Method::ring, 2) / 4, held(Method::ring, 8) / 100);
  EXPECT_GT(held(Method::gather, 8), 3 * held(Method::ring, 8));
}

// ---- what goes wrong ---------------------------------------------------------------------------

TEST(Refusals, OnEveryRankInWords) {
  const Problem p = sized(1, 2, 2, 16, 16, 4).p;
  const auto ends = on_threads(3, patience, [&](Communicator& comm) {
    ForwardParts<float> parts(p, 3, comm.rank(), Order::zigzag);
    Forward<float> t = parts.tensors();
    if (comm.rank() == 1) t.O.data = nullptr;
    ring::forward(comm, *cpu_engine<float>(), p, t);
  });
  for (const std::string& end : ends) {
    EXPECT_NE(end.find("rank 1"), std::string::npos) << end;
    EXPECT_NE(end.find("O is a null pointer"), std::string::npos) << end;
  }
}

TEST(Refusals, RanksThatDisagree) {
  const auto ends = on_threads(3, patience, [&](Communicator& comm) {
    Problem p = sized(1, 2, 2, 16, 16, 4).p;
    if (comm.rank() == 2) p.causal = Causal::top_left;
    ForwardParts<float> parts(p, 3, comm.rank(), Order::zigzag);
    ring::forward(comm, *cpu_engine<float>(), p, parts.tensors());
  });
  for (const std::string& end : ends) {
    EXPECT_NE(end.find("the same problem"), std::string::npos) << end;
    EXPECT_NE(end.find("rank 2"), std::string::npos) << end;
  }
}

TEST(Refusals, MoreRanksThanKeyHeads) {
  ForwardCase<float> c(sized(1, 4, 2, 16, 16, 4), true);
  c.call();
  for (const std::string& end : run_forward(c, 3, {Method::heads}).ends)
    EXPECT_NE(end.find("at most Hkv = 2 ranks, got 3"), std::string::npos) << end;
}

TEST(Refusals, LengthsAndTheBackwardsLSE) {
  ForwardCase<float> c(sized(1, 1, 1, 16, 16, 4, Causal::none, {17}), true);
  c.call();
  for (const std::string& end : run_forward(c, 2, {}).ends)
    EXPECT_NE(end.find("key_lengths"), std::string::npos) << end;
  const Problem p = sized(1, 1, 1, 16, 16, 4).p;
  const auto ends = on_threads(2, patience, [&](Communicator& comm) {
    ForwardParts<float> x(p, 2, comm.rank(), Order::zigzag), y(x);
    ForwardParts<float> out(p, 2, comm.rank(), Order::zigzag);
    const Backward<float> t{x.Q.view, x.K.view,   x.V.view,   x.O.view,  x.O.view,
                            nullptr,  out.Q.view, out.K.view, out.V.view};
    ring::backward(comm, *cpu_engine<float>(), p, t);
  });
  for (const std::string& end : ends)
    EXPECT_NE(end.find("LSE must not be null"), std::string::npos) << end;
}

// An engine of one rank that fails, or never ends, in its n-th pair of blocks.
class Faulty : public Engine<float> {
 public:
  Faulty(int pair, std::function<void()> fault) : left_(pair), fault_(std::move(fault)) {}
  void forward(const Problem& p, const Forward<float>& t) override {
    if (left_-- == 0) fault_();
    right_->forward(p, t);
  }
  void backward(const Problem& p, const Backward<float>& t) override {
    if (left_-- == 0) fault_();
    right_->backward(p, t);
  }
  void merge(const Size& s, const View<const float>& o, const float* l, const View<float>& O,
             const View<float>& L) override {
    right_->merge(s, o, l, O, L);
  }
  void fill(float* to, std::size_t n, float x) override { right_->fill(to, n, x); }
  void copy(const Size& s, const View<const float>& x, const View<float>& y) override {
    right_->copy(s, x, y);
  }
  void copy_sums(const Size& s, const View<const float>& x, const View<float>& y) override {
    right_->copy_sums(s, x, y);
  }
  void add(const Size& s, const View<const float>& x, const View<float>& y) override {
    right_->add(s, x, y);
  }
  void add_sums(const float* x, float* y, std::size_t n) override { right_->add_sums(x, y, n); }
  void round(const Size& s, const View<const float>& x, const View<float>& y) override {
    right_->round(s, x, y);
  }

 protected:
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
  }

 private:
  int left_;
  std::function<void()> fault_;
  std::unique_ptr<Engine<float>> right_ = cpu_engine<float>();
};

using Clock = std::chrono::steady_clock;

// Everybody says which rank, where and why; only the one that failed may leave out the others.
void expect_told(const Ran& ran, int culprit, const std::vector<std::string>& words) {
  for (std::size_t r = 0; r < ran.ends.size(); ++r) {
    EXPECT_NE(ran.ends[r], "") << "rank " << r << " claims a result";
    if (int(r) == culprit) continue;
    for (const std::string& word : words)
      EXPECT_NE(ran.ends[r].find(word), std::string::npos) << "rank " << r << ": " << ran.ends[r];
  }
}

TEST(Faults, ARankThatThrows) {
  for (const Method method : {Method::ring, Method::gather})
    for (const bool backward : {false, true})
      for (int pair = 0; pair < (method == Method::ring ? 4 : 1); ++pair) {
        const Spec spec = sized(1, 1, 1, 40, 40, 4);  // one piece a step
        const auto make = [&](int rank) -> std::unique_ptr<Engine<float>> {
          if (rank != 1) return cpu_engine<float>();
          return std::make_unique<Faulty>(
              pair, [] { throw std::runtime_error("the card fell off the bus"); });
        };
        const auto start = Clock::now();
        ForwardCase<float> f(spec, true);
        BackwardCase<float> b(spec);
        f.call(), b.call();
        const Options options{method};
        const Ran ran =
            backward ? run_backward(b, 4, options, make) : run_forward(f, 4, options, make);
        std::vector<std::string> words{"rank 1", backward ? "backward" : "forward",
                                       "the card fell off the bus"};
        if (method == Method::ring) words.push_back("step " + std::to_string(pair + 1) + " of 4");
        // In the last step of a forward nothing is sent: who is done is told at the end.
        if (method == Method::ring && !backward && pair == 3) words.pop_back();
        expect_told(ran, 1, words);
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(10)) << "long before patience ends";
      }
}

TEST(Faults, ARankThatHangs) {
  // Rank 2 stops in its second step until the others have given up. All name it, also rank 0,
  // which waits for rank 3, which waits for rank 2.
  std::atomic<int> over{0};
  const auto make = [&](int rank) -> std::unique_ptr<Engine<float>> {
    if (rank != 2) return cpu_engine<float>();
    return std::make_unique<Faulty>(1, [&] {
      while (over < 3) std::this_thread::sleep_for(milliseconds(1));
    });
  };
  const Problem p = sized(1, 1, 1, 40, 40, 4).p;
  Ran ran;
  ran.ends = on_threads(4, milliseconds(300), [&](Communicator& comm) {
    ForwardParts<float> parts(p, 4, comm.rank(), Order::zigzag);
    for (Part<float>* part : {&parts.Q, &parts.K, &parts.V})
      std::fill(part->data.begin(), part->data.end(), 1.0f);
    const auto engine = make(comm.rank());
    try {
      ring::forward(comm, *engine, p, parts.tensors());
    } catch (const std::exception&) {
      ++over;
      throw;
    }
  });
  expect_told(ran, 2, {"rank 2 did not come within 300 ms", "forward, step 2 of 4"});
  EXPECT_NE(ran.ends[2], "") << "too late: the others are gone";
}

TEST(Faults, TheOneBehindIsNamed) {
  // Rank 0 is the first to lose patience. It waits for rank 1, which waits for rank 2.
  std::atomic<int> over{0};
  const auto ends = on_threads(3, milliseconds(400), [&](Communicator& comm) {
    char x = 0;
    if (comm.rank() == 2)
      while (over < 2) std::this_thread::sleep_for(milliseconds(1));
    if (comm.rank() == 2) return;
    if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(150));
    comm.begin("a test", {}, {{comm.rank() + 1, &x, 1}});
    try {
      comm.wait();
    } catch (const RankLost&) {
      ++over;
      throw;
    }
  });
  for (const std::size_t r : {0u, 1u})
    EXPECT_NE(ends[r].find("rank 2 did not come"), std::string::npos) << ends[r];
}

TEST(Faults, ARankThatNeverComes) {
  std::atomic<int> over{0};
  const Problem p = sized(1, 1, 1, 40, 40, 4).p;
  const auto ends = on_threads(3, milliseconds(300), [&](Communicator& comm) {
    if (comm.rank() == 0) {
      while (over < 2) std::this_thread::sleep_for(milliseconds(1));
      return;
    }
    ForwardParts<float> parts(p, 3, comm.rank(), Order::zigzag);
    try {
      ring::forward(comm, *cpu_engine<float>(), p, parts.tensors());
    } catch (const RankLost&) {
      ++over;
      throw;
    }
  });
  EXPECT_EQ(ends[0], "");
  for (const std::size_t r : {1u, 2u})
    for (const char* word : {"rank 0 did not come", "before the first step", "its first call"})
      EXPECT_NE(ends[r].find(word), std::string::npos) << ends[r];
}

TEST(Faults, AMessageOfAnotherSize) {
  const auto ends = on_threads(2, patience, [&](Communicator& comm) {
    char out[8] = {}, in[8] = {};
    const auto bytes = std::size_t(comm.rank() ? 4 : 8);
    comm.begin("a test", {{1 - comm.rank(), out, bytes}}, {{1 - comm.rank(), in, bytes}});
    comm.wait();
  });
  for (const std::string& end : ends)
    EXPECT_NE(end.find("were expected"), std::string::npos) << end;
}

}  // namespace
