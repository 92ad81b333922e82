// The lesson and the side trail against stages 01 and 02, on one core and on two, with the share of
// the multiply-add peak of as many cores; the lesson with tiles of other sizes; and the lesson
// without one of its parts, or with one done better.
#include "common/measure/bench.hpp"

#include "01_safe_softmax/safe_softmax.hpp"
#include "02_online_softmax/online_softmax.hpp"
#include "03_tiled_cpu/check/ablation.hpp"
#include "03_tiled_cpu/fast/fast.hpp"
#include "03_tiled_cpu/tiled_cpu.hpp"
#include "common/core/cache_lines.hpp"

namespace {

// The side trail with single ideas taken away, on one core.
template <int Groups, bool InRegisters>
void steps(const fa::Problem& p, const fa::Forward<float>& t, bool head_by_head) {
  namespace fast = fa::tiled_cpu::fast;
  const std::int64_t rows = std::int64_t(Groups) * fast::lanes;
  const std::int64_t blocks = (p.Nq + rows - 1) / rows;
  fa::CacheLines<float> scratch(fast::scratch_elements(p.d));
  for (std::int64_t task = 0; task < p.Hq * blocks; ++task) {
    const std::int64_t h = head_by_head ? task / blocks : task % p.Hq;
    const std::int64_t block = head_by_head ? task % blocks : task / p.Hq;
    fast::attention_block<Groups, InRegisters>(t.Q.rows(0, h, p.Nq, p.d), t.K.rows(0, h, p.Nk, p.d),
                                               t.V.rows(0, h, p.Nk, p.d), float(p.softmax_scale()),
                                               fa::Mask(p, 0), (blocks - 1 - block) * rows,
                                               scratch.data(), t.O.rows(0, h, p.Nq, p.d), nullptr);
  }
}

using fa::tiled_cpu::ablation::Change;

// The lesson with a change, head by head and the last queries first, as its entry has them.
template <Change change>
void changed(const fa::Problem& p, const fa::Forward<float>& t) {
  constexpr std::int64_t B = 64;
  fa::CacheLines<float> scratch(fa::tiled_cpu::scratch_elements(B, B, p.d));
  for (std::int64_t h = 0; h < p.Hq; ++h)
    for (std::int64_t i0 = (p.Nq - 1) / B * B; i0 >= 0; i0 -= B)
      fa::tiled_cpu::ablation::attention_tile<change>(
          t.Q.rows(0, h, p.Nq, p.d), t.K.rows(0, h, p.Nk, p.d), t.V.rows(0, h, p.Nk, p.d),
          float(p.softmax_scale()), fa::Mask(p, 0), i0, B, B, scratch.data(),
          t.O.rows(0, h, p.Nq, p.d), nullptr);
}
template <Change change>
void register_change(const char* name, const fa::Problem& p) {
  const std::string prefix = std::string("stage03/ablation/") + name;
  if constexpr (change.is_attention())
    fa::bench::forward<float>(prefix, p, changed<change>);
  else
    fa::bench::part(prefix, p, changed<change>);
}

fa::Problem one_head(std::int64_t N) {
  fa::Problem p;
  p.Nq = p.Nk = N;
  p.d = 64;
  return p;
}

}  // namespace

void fa::bench::register_benchmarks(Size size) {
  using tiled_cpu::Kernel;
  // What fits the first, the second and the third cache of most processors, and what fits none.
  bandwidth("L1", 1, 24 << 10);
  bandwidth("L2", 1, 384 << 10);
  bandwidth("L3", 1, 6 << 20);
  for (int threads : {1, 2}) bandwidth("triad", threads, 192 << 20);
  const auto run = [](Kernel kernel, int threads) {
    return [=](const Problem& q, const Forward<float>& t) {
      tiled_cpu::forward(q, t, {kernel, threads});
    };
  };
  for (std::int64_t d :
       size == Size::full ? std::vector<std::int64_t>{64, 128} : std::vector<std::int64_t>{64})
    for (std::int64_t N : sizes(size, {512, 1024, 2048}, {4096, 8192}))
      for (Causal causal : {Causal::none, Causal::top_left}) {
        Problem p;
        p.Hq = p.Hkv = 4;
        p.Nq = p.Nk = N;
        p.d = d;
        p.causal = causal;
        if (d == 64) {
          forward<float>(
              "stage01/forward/safe_softmax", p,
              [](const Problem& q, const Forward<float>& t) { safe_softmax::forward(q, t); });
          forward<float>("stage02/forward/lanes", p, [](const Problem& q, const Forward<float>& t) {
            online_softmax::forward(q, t, {online_softmax::Kernel::lanes});
          });
          forward<float>("stage03/forward/tiled", p, run(Kernel::tiled, 1));
        }
        if (causal == Causal::none && size != Size::quick) {
          using tiled_cpu::fast::groups;
          const auto step = [](auto f, bool head_by_head) {
            return [=](const Problem& q, const Forward<float>& t) { f(q, t, head_by_head); };
          };
          forward<float>("stage03/forward/step1", p, step(steps<1, false>, false));
          forward<float>("stage03/forward/step2", p, step(steps<groups, false>, false));
          forward<float>("stage03/forward/step3", p, step(steps<groups, false>, true));
          forward<float>("stage03/forward/step4", p, step(steps<groups, true>, true));
        }
        forward<float>("stage03/forward/fast", p, run(Kernel::fast, 1));
        forward<float>("stage03/forward/fast_2_threads", p, run(Kernel::fast, 2), 2);
      }

  const auto sized = [](std::int64_t N, std::int64_t Br, std::int64_t Bc) {
    const std::string sizes = "Br:" + std::to_string(Br) + "/Bc:" + std::to_string(Bc);
    forward<float>("stage03/tiles/sized/" + sizes, one_head(N),
                   [=](const Problem& q, const Forward<float>& t) {
                     tiled_cpu::forward(q, t, {Kernel::tiled, 1, Br, Bc});
                   });
  };
  if (size == Size::full)
    for (std::int64_t N : {512, 4096}) {
      for (std::int64_t Br : {1, 4, 16, 64, 256}) sized(N, Br, 64);
      for (std::int64_t Bc : {1, 4, 16, 256, 1024})
        if (Bc <= N) sized(N, 64, Bc);
    }

  const Problem p = one_head(size == Size::smoke ? 512 : 2048);
  register_change<Change{}>("as_written", p);
  register_change<Change{.no_exp = true}>("no_exp", p);
  register_change<Change{.no_PV = true}>("no_PV", p);
  register_change<Change{.no_QK = true}>("no_QK", p);
  register_change<Change{.no_QK = true, .no_PV = true}>("no_products", p);
  register_change<Change{.vector_exp = true}>("vector_exp", p);
  register_change<Change{.register_sums = true}>("register_sums", p);
  register_change<Change{.vector_exp = true, .register_sums = true}>("both", p);
}
