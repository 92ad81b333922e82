#include "common/measure/bench.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include <regex>
#include <sstream>

#include "common/core/parallel_for.hpp"
#include "common/core/simd.hpp"
#include "common/judge/memory.hpp"
#include "common/measure/bench_rows.hpp"
#include "common/measure/flops.hpp"
#include "common/measure/machine.hpp"
#include "common/measure/roof.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace fa::bench {

using namespace fa::judge;

std::vector<std::int64_t> sizes(Size size, std::vector<std::int64_t> quick,
                                std::vector<std::int64_t> more) {
  if (size == Size::smoke) return {quick.front()};
  if (size == Size::full) quick.insert(quick.end(), more.begin(), more.end());
  return quick;
}

namespace {

// Inputs and expected rows of one problem, made at its first use and kept for all rounds.
template <class T>
struct Prepared {
  Buffer<T> Q, K, V, O;
  Buffer<Stat<T>> LSE;
  ForwardOracle want;
  double extra_bytes = 0;

  explicit Prepared(const Problem& p)
      : Q(p.B, p.Hq, p.Nq, p.d),
        K(p.B, p.Hkv, p.Nk, p.d),
        V(p.B, p.Hkv, p.Nk, p.d),
        O(p.B, p.Hq, p.Nq, p.d),
        LSE(p.B, p.Hq, p.Nq, 1) {
    const auto fill = [&](Buffer<T>& x, char tensor) {
      x.fill([&](auto b, auto h, auto i, auto e) { return element({}, tensor, p, 7, b, h, i, e); });
    };
    fill(Q, 'Q');
    fill(K, 'K');
    fill(V, 'V');
    std::vector<std::int64_t> rows = {0, p.Nq / 3, p.Nq / 2, p.Nq - 1};
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    want = oracle_rows(p, to_array(Q), to_array(K), to_array(V), rows);
  }

  std::string verdict() const {
    Comparison c("O");
    for (std::int64_t b = 0; b < want.O.B; ++b)
      for (std::int64_t h = 0; h < want.O.H; ++h)
        for (std::int64_t r = 0; r < want.O.N; ++r)
          for (std::int64_t x = 0; x < want.O.d; ++x)
            c.add(b, h, want.rows[std::size_t(r)], x,
                  double(O.at(b, h, want.rows[std::size_t(r)], x)), want.O.at(b, h, r, x),
                  forward_tolerance<T>(want.A.at(b, h, r), want.PV.at(b, h, r, x)));
    return c.report() + O.written_outside();
  }
};

std::vector<std::string> registered;  // names, in the order of registration
double seconds_a_sample = 0.05, seconds_a_sample_on_cpu = 0.5;

std::string this_machine, this_device, this_isa;
int this_machines_cores = 0;

}  // namespace

Row add_row(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  registered.push_back(name);
  return benchmark::RegisterBenchmark(name.c_str(),
                                      [body](benchmark::State& state) {
                                        try {
                                          body(state);
                                        } catch (const std::exception& e) {
                                          state.SkipWithError(e.what());
                                        }
                                      })
      ->Unit(benchmark::kMillisecond);
}

void describe_machine(const std::string& machine, const std::string& device, const std::string& isa,
                      int cores) {
  this_machine = machine;
  this_device = device;
  this_isa = isa;
  this_machines_cores = cores;
}

double sample_seconds() { return seconds_a_sample; }

void add_context(const std::string& key, const std::string& value) {
  benchmark::AddCustomContext(key, value);
}

namespace {
std::string row_name(const std::string& prefix, const Problem& p, std::size_t element_bytes) {
  std::ostringstream name;
  name << prefix << "/N:" << p.Nk << "/d:" << p.d
       << "/causal:" << (p.causal == Causal::none ? 0 : 1)
       << (element_bytes == 8 ? "/f64" : "/f32");
  return name.str();
}

// A row of `f` that is verified before and after its timing, which is left to `timed`.
template <class T>
Row verified(const std::string& prefix, const Problem& p, int threads, double flops,
             const std::function<void(const Problem&, const Forward<T>&)>& f,
             const std::function<void(benchmark::State&, const Forward<T>&)>& timed) {
  auto prepared = std::make_shared<std::unique_ptr<Prepared<T>>>();
  return add_row(row_name(prefix, p, sizeof(T)), [=](benchmark::State& state) {
    const bool first = !*prepared;
    if (first) *prepared = std::make_unique<Prepared<T>>(p);
    Prepared<T>& x = **prepared;
    const Forward<T> t{x.Q.view(), x.K.view(), x.V.view(), x.O.view(), nullptr};

    x.O.poison();
    if (first)
      x.extra_bytes = double(peak_heap_bytes([&] { f(p, t); }));
    else
      f(p, t);
    const std::string before = x.verdict();
    if (!before.empty()) return state.SkipWithError(("wrong before timing: " + before).c_str());

    x.O.poison();
    double roof = fma_peak(threads);
    timed(state, t);
    roof = (roof + fma_peak(threads)) / 2;
    const std::string after = x.verdict();
    if (!after.empty()) return state.SkipWithError(("wrong after timing: " + after).c_str());

    state.counters["flops"] =
        benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
    state.counters["roof"] = roof;
    if (x.extra_bytes >= 0) state.counters["extra_bytes"] = x.extra_bytes;
  });
}

}  // namespace

template <class T>
void forward(const std::string& prefix, const Problem& p,
             const std::function<void(const Problem&, const Forward<T>&)>& f, int threads) {
  verified<T>(prefix, p, threads, forward_flops(p), f,
              [=](benchmark::State& state, const Forward<T>& t) {
                for (auto _ : state) f(p, t);
              })
      ->UseRealTime()
      ->MinTime(seconds_a_sample_on_cpu);
}

void lines(const std::string& prefix, const Problem& p, const std::vector<Line>& lines,
           const std::function<void(const Problem&, const Forward<float>&, const Lap&)>& f) {
  using Clock = std::chrono::steady_clock;
  for (std::size_t line = 0; line < lines.size(); ++line)
    verified<float>(
        prefix + "/line/" + lines[line].name, p, 1, lines[line].flops * visible_pairs(p),
        [=](const Problem& q, const Forward<float>& t) { f(q, t, [](std::size_t) {}); },
        [=](benchmark::State& state, const Forward<float>& t) {
          for (auto _ : state) {
            std::chrono::duration<double> taken{};
            Clock::time_point began = Clock::now();
            f(p, t, [&](std::size_t done) {
              const Clock::time_point now = Clock::now();
              if (done == line) taken += now - began;
              began = now;
            });
            state.SetIterationTime(taken.count());
          }
        })
        ->UseManualTime()
        ->MinTime(seconds_a_sample_on_cpu / 16);  // of the line; the whole takes many times as long
}

template void forward(const std::string&, const Problem&,
                      const std::function<void(const Problem&, const Forward<float>&)>&, int);
template void forward(const std::string&, const Problem&,
                      const std::function<void(const Problem&, const Forward<double>&)>&, int);

void part(const std::string& prefix, const Problem& p,
          const std::function<void(const Problem&, const Forward<float>&)>& f) {
  auto prepared = std::make_shared<std::unique_ptr<Prepared<float>>>();
  add_row(row_name(prefix, p, sizeof(float)),
          [=](benchmark::State& state) {
            if (!*prepared) *prepared = std::make_unique<Prepared<float>>(p);
            Prepared<float>& x = **prepared;
            const Forward<float> t{x.Q.view(), x.K.view(), x.V.view(), x.O.view(), nullptr};
            for (auto _ : state) f(p, t);
            state.counters["unverified"] = 1;
          })
      ->UseRealTime()
      ->MinTime(seconds_a_sample_on_cpu);
}

void bandwidth(const std::string& level, int threads, std::int64_t bytes) {
  std::ostringstream name;
  name << "roof/bandwidth/" << level << "/threads:" << threads << "/f32";
  add_row(name.str(),
          [threads, bytes](benchmark::State& state) {
            constexpr std::int64_t W = simd::W, most = 3 * sizeof(float) << 24;
            const std::int64_t part = bytes / std::int64_t(3 * sizeof(float)) / threads / W * W;
            const std::int64_t n = part * threads, turns = most / bytes;
            std::vector<float> a(std::size_t(n), 1), b(a), c(a);
            for (auto _ : state)
              parallel_for(threads, threads, [&] {
                return [&](std::int64_t t) {
                  float* x = a.data() + t * part;
                  const float *y = b.data() + t * part, *z = c.data() + t * part;
                  const simd::Vec s = simd::broadcast(0.5f);
                  for (std::int64_t turn = 0; turn < turns; ++turn) {
                    for (std::int64_t i = 0; i < part; i += W)
                      simd::store(x + i, simd::load(y + i) + s * simd::load(z + i));
                    benchmark::ClobberMemory();  // each turn reads again what the last one read
                  }
                };
              });
            if (!(a.front() == 1.5f && a.back() == 1.5f))
              return state.SkipWithError("the triad is wrong");
            state.counters["bytes_per_second"] =
                benchmark::Counter(double(turns * n) * 3 * sizeof(float),
                                   benchmark::Counter::kIsIterationInvariantRate);
          })
      ->UseRealTime()
      ->MinTime(seconds_a_sample_on_cpu);
}

void error(const std::string& prefix, double scores,
           const std::function<void(const Problem&, const Forward<float>&)>& f) {
  std::ostringstream name;
  name << prefix << "/scores:" << scores << "/f32";
  add_row(name.str(),
          [=](benchmark::State& state) {
            Spec spec;
            spec.p.Nq = spec.p.Nk = 128;
            spec.p.d = 64;
            spec.data = {Data::Kind::level, scores};
            ForwardCase<float> c(spec, false);
            const ForwardCall<float> call = c.call();
            for (auto _ : state) f(call.p, call.t);
            const ForwardOracle want =
                oracle_forward(c.p, to_array(c.Q), to_array(c.K), to_array(c.V));
            double worst = 0, largest = 0, nonfinite = 0;
            c.O.for_each([&](auto b, auto h, auto i, auto x) {
              const double got = double(c.O.at(b, h, i, x)), right = want.O.at(b, h, i, x);
              largest = std::max(largest, std::fabs(right));
              if (!std::isfinite(got)) return void(++nonfinite);
              worst = std::max(worst, std::fabs(got - right));
            });
            if (nonfinite == 0) state.counters["max_error"] = worst / largest;
            state.counters["nonfinite"] = nonfinite;
          })
      ->UseRealTime()
      ->Iterations(1);
}

namespace {

using Run = benchmark::BenchmarkReporter::Run;

// Google Benchmark 1.8 renamed these members.
template <class R>
bool is_error(const R& run) {
  if constexpr (requires { run.error_occurred; })
    return run.error_occurred;
  else
    return static_cast<int>(run.skipped) != 0;
}
template <class R>
const std::string& message(const R& run) {
  if constexpr (requires { run.error_message; })
    return run.error_message;
  else
    return run.skip_message;
}

// "stage01/forward/naive/N:64/f32" without what Google Benchmark appends.
const std::string& clean(const Run& run) { return run.run_name.function_name; }

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x.empty() ? 0 : (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

std::string duration(double seconds) {
  char text[32];
  if (seconds < 90)
    std::snprintf(text, sizeof text, "%.0f s", std::max(1.0, seconds));
  else
    std::snprintf(text, sizeof text, "%.0f min", seconds / 60);
  return text;
}

// Collects the rows of all rounds and says how far it is.
class Collector : public benchmark::BenchmarkReporter {
 public:
  Collector(int total, int rounds) : total_(total), rounds_(rounds) {}
  void begin_round(int round) {
    round_ = round;
    done_ = 0;
  }
  void end_round() const {
    if (rounds_ > 1)
      std::printf("round %d of %d done%s\n", round_ + 1, rounds_,
                  round_ + 1 < rounds_ ? (", about " + duration(left()) + " left").c_str() : "");
    std::fflush(stdout);
  }
  bool ReportContext(const Context& context) override {
    context_.emplace(context);
    return true;
  }
  void ReportRuns(const std::vector<Run>& report) override {
    for (Run run : report) {
      run.repetition_index = round_;
      run.repetitions = rounds_;
      ++done_;
      if (round_ == 0 || is_error(run)) print(run);
      failed_ = failed_ || is_error(run);
      runs_.push_back(run);
    }
  }
  bool failed() const { return failed_; }
  bool empty() const { return runs_.empty(); }
  // The highest median share of the roof, and the row that has it.
  std::pair<double, std::string> highest_share() const {
    std::map<std::string, std::vector<double>> shares;
    for (const Run& run : runs_)
      if (!is_error(run) && run.counters.count("flops") && run.counters.count("roof"))
        shares[clean(run)].push_back(run.counters.at("flops") / run.counters.at("roof"));
    std::pair<double, std::string> highest;
    for (const auto& [name, x] : shares) highest = std::max(highest, {median(x), name});
    return highest;
  }

  // Google Benchmark's own JSON, all rounds in one file.
  void write(std::ostream& out) {
    benchmark::JSONReporter json;
    json.SetOutputStream(&out);
    json.SetErrorStream(&std::cerr);
    json.ReportContext(*context_);
    json.ReportRuns(runs_);
    json.Finalize();
  }

  void print_summary() const {
    std::map<std::string, std::vector<const Run*>> rows;
    for (const Run& run : runs_)
      if (!is_error(run) && run.counters.count("flops")) rows[clean(run)].push_back(&run);
    std::vector<std::string> order;
    for (const std::string& name : registered)
      if (rows.count(name)) order.push_back(name);
    if (order.empty()) return print_other_rows();
    std::printf(
        "\nmedians of %d rounds; ratios are taken within a round\n%-52s %10s %8s %8s %9s  %s\n",
        rounds_, "", "ms", "GFLOP/s", "of peak", "MiB extra", "time against");
    for (const std::string& name : order) {
      std::vector<double> ms, flops, share;
      for (const Run* run : rows[name]) {
        ms.push_back(run->GetAdjustedRealTime());
        flops.push_back(run->counters.at("flops") / 1e9);
        share.push_back(100 * run->counters.at("flops") / run->counters.at("roof"));
      }
      std::printf("%-52s %10.3f %8.1f %6.1f %%", name.c_str(), median(ms), median(flops),
                  median(share));
      const Run& any = *rows[name].front();
      if (any.counters.count("extra_bytes"))
        std::printf(" %9.2f", any.counters.at("extra_bytes") / (1 << 20));
      else
        std::printf(" %9s", "-");
      const std::string rival = earlier_row(name, order);
      if (!rival.empty()) {
        std::vector<double> ratio;
        for (const Run* a : rows[name])
          for (const Run* b : rows[rival])
            if (a->repetition_index == b->repetition_index)
              ratio.push_back(a->GetAdjustedRealTime() / b->GetAdjustedRealTime());
        std::printf("  %.2fx %s", median(ratio), rival.substr(0, rival.find("/N:")).c_str());
      }
      std::printf("\n");
    }
    print_other_rows();
  }

  // Rows of error(): one line each, from the first round, for they are the same in all. Rows of
  // bandwidth() and part(): the median.
  void print_other_rows() const {
    for (const std::string& name : registered) {
      std::vector<double> rate, ms;
      for (const Run& run : runs_) {
        if (is_error(run) || clean(run) != name) continue;
        if (run.counters.count("bytes_per_second"))
          rate.push_back(run.counters.at("bytes_per_second") / 1e9);
        if (run.counters.count("unverified")) ms.push_back(run.GetAdjustedRealTime());
      }
      if (!rate.empty()) std::printf("%-52s %.1f GB/s\n", name.c_str(), median(rate));
      if (!ms.empty())
        std::printf("%-52s %10.3f ms  no attention, a part is left out: not verified\n",
                    name.c_str(), median(ms));
    }
    for (const std::string& name : registered)
      for (const Run& run : runs_) {
        if (clean(run) != name || run.repetition_index != 0 || !run.counters.count("nonfinite"))
          continue;
        if (run.counters.at("nonfinite") > 0)
          std::printf("%-52s %.0f outputs are not finite\n", name.c_str(),
                      double(run.counters.at("nonfinite")));
        else
          std::printf("%-52s largest relative error %.1e\n", name.c_str(),
                      double(run.counters.at("max_error")));
      }
  }

 private:
  double left() const {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start_;
    const double part = (round_ + double(done_) / total_) / rounds_;
    return taken.count() * (1 - part) / part;
  }
  void print(const Run& run) const {
    std::printf("%3d/%d  %-56s", done_, total_, clean(run).c_str());
    if (is_error(run))
      std::printf("ERROR: %s", message(run).c_str());
    else
      std::printf("%10.3f ms", run.GetAdjustedRealTime());
    if (round_ == 0 && total_ > 1) std::printf(", about %s left", duration(left()).c_str());
    std::printf("\n");
    std::fflush(stdout);
  }
  // "forward" of "stage01/forward/naive/N:64/f32".
  static std::string what(const std::string& name) {
    const std::size_t at = name.find('/') + 1;
    return name.substr(at, name.find('/', at) - at);
  }
  // The first other row with the same parameters: what this one is compared with. The lines of one
  // forward do different things.
  static std::string earlier_row(const std::string& name, const std::vector<std::string>& order) {
    const std::size_t at = name.find("/N:");
    if (at == std::string::npos || what(name) == "line") return {};
    for (const std::string& other : order) {
      if (other == name) return {};
      const std::size_t there = other.find("/N:");
      if (there != std::string::npos && other.substr(there) == name.substr(at) &&
          what(other) == what(name))
        return other;
    }
    return {};
  }

  int total_, rounds_, round_ = 0, done_ = 0;
  bool failed_ = false;
  std::optional<Context> context_;
  std::vector<Run> runs_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

int usage(const std::string& problem) {
  std::fprintf(stderr,
               "benchmark: %s; usage: [--smoke | --full] [--rounds N] [--out FILE.json] "
               "[--benchmark_filter=REGEX]\n",
               problem.c_str());
  return 2;
}

}  // namespace

int run(int argc, char** argv) {
  Size size = Size::quick;
  int rounds = 0;
  std::string filter;
  std::string out;
  std::vector<char*> google = {argv[0]};
  for (int a = 1; a < argc; ++a) {
    const std::string arg = argv[a];
    if (arg == "--help") {
      usage("help");
      return 0;
    }
    if (arg == "--smoke")
      size = Size::smoke;
    else if (arg == "--full")
      size = Size::full;
    else if ((arg == "--rounds" || arg == "--out") && a + 1 == argc)
      return usage(arg + " needs a value");
    else if (arg == "--rounds") {
      char* end = nullptr;
      const long value = std::strtol(argv[++a], &end, 10);
      if (*end || value < 1 || value > 1000)
        return usage(std::string("--rounds must be 1 to 1000, got '") + argv[a] + "'");
      rounds = static_cast<int>(value);
    } else if (arg == "--out")
      out = argv[++a];
    else if (arg.rfind("--benchmark_filter=", 0) == 0)
      google.push_back(argv[a]), filter = arg.substr(arg.find('=') + 1);
    else
      return usage("unknown argument '" + arg + "'");
  }
  if (size != Size::smoke && std::string(FA_BUILD_TYPE) != "Release") {
    std::fprintf(stderr,
                 "benchmark: this is a %s build and its figures would mislead; use the preset "
                 "'default', or --smoke to see that it runs\n",
                 FA_BUILD_TYPE);
    return 3;
  }
  // Whole or not at all: the file appears under its name when the last round is done.
  const std::string part = out + ".part";
  if (!out.empty() && !std::ofstream(part)) {
    std::fprintf(stderr, "benchmark: cannot write '%s': %s; choose another --out\n", part.c_str(),
                 std::strerror(errno));
    return 3;
  }

#ifdef M_MMAP_MAX
  // glibc moves its thresholds while a program runs: whether a large matrix costs fresh pages would
  // depend on the rows measured before it. Memory that was once had is kept instead.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
  static char interleave[] = "--benchmark_enable_random_interleaving=true";
  google.push_back(interleave);
  seconds_a_sample = size == Size::smoke ? 0.001 : 0.05;
  seconds_a_sample_on_cpu = size == Size::smoke ? 0.001 : size == Size::quick ? 0.1 : 0.5;
  int google_argc = static_cast<int>(google.size());
  benchmark::Initialize(&google_argc, google.data());

  describe_machine(machine_name(), cpu_model(), isa(), cores());
  register_benchmarks(size);
  // A GPU's rows are many, and scatter less.
  const int quick = this_isa.rfind("sm_", 0) == 0 ? 3 : 4;
  if (rounds == 0) rounds = size == Size::smoke ? 1 : size == Size::quick ? quick : 11;
  benchmark::AddCustomContext("machine", this_machine);
  benchmark::AddCustomContext("device", this_device);
  benchmark::AddCustomContext("isa", this_isa);
  benchmark::AddCustomContext("cores", std::to_string(this_machines_cores));
  benchmark::AddCustomContext("compiler", FA_COMPILER);
  benchmark::AddCustomContext("flags", FA_FLAGS);
  benchmark::AddCustomContext("commit", commit());
  benchmark::AddCustomContext("size", size == Size::full    ? "full"
                                      : size == Size::quick ? "quick"
                                                            : "smoke");
  benchmark::AddCustomContext("rows", std::to_string(registered.size()));
  benchmark::AddCustomContext("flop_formula", flop_formula);
  benchmark::AddCustomContext("load_before", load_average());
  // Cores that others keep busy say nothing about a GPU.
  const bool on_cpu = this_machine == machine_name();
  const double others = on_cpu && size != Size::smoke ? busy_cores() : 0;

  std::regex pattern;
  try {
    pattern = filter;
  } catch (const std::regex_error&) {
    return usage("'" + filter + "' is not a regular expression");
  }
  const auto chosen = std::count_if(registered.begin(), registered.end(), [&](const auto& name) {
    return std::regex_search(name, pattern);
  });
  Collector collector(static_cast<int>(chosen), rounds);
  for (int round = 0; round < rounds; ++round) {
    collector.begin_round(round);
    benchmark::RunSpecifiedBenchmarks(&collector);
    collector.end_round();
  }
  if (collector.empty()) {
    if (!out.empty()) std::remove(part.c_str());
    return usage("the filter matches no benchmark");
  }
  benchmark::AddCustomContext("load_after", load_average());
  if (size != Size::smoke) {
    collector.print_summary();
    const auto [share, row] = collector.highest_share();
    const std::string busy = busy_machine(others, cores(), share, row);
    if (!busy.empty()) {
      benchmark::AddCustomContext("busy", busy);
      std::printf("\n%s\n", busy.c_str());
    }
  }
  if (collector.failed()) {
    if (!out.empty()) std::remove(part.c_str());
    std::fprintf(stderr,
                 "benchmark: a row was wrong or failed (see ERROR above); nothing written\n");
    return 1;
  }
  if (!out.empty()) {
    std::ofstream file(part);
    collector.write(file);
    file.close();
    if (!file || std::rename(part.c_str(), out.c_str()) != 0) {
      std::remove(part.c_str());
      std::fprintf(stderr, "benchmark: cannot write '%s': %s\n", out.c_str(), std::strerror(errno));
      return 3;
    }
  }
  return 0;
}

}  // namespace fa::bench

int main(int argc, char** argv) { return fa::bench::run(argc, argv); }
