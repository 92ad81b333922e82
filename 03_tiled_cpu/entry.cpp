// From the public face to the lessons: check the arguments, then share the tiles of queries of all
// heads among the threads.
#include <cmath>
#include <string>
#include <type_traits>

#include "03_tiled_cpu/fast/fast.hpp"
#include "03_tiled_cpu/tiled_cpu.hpp"
#include "common/core/cache_lines.hpp"
#include "common/core/check.hpp"
#include "common/core/parallel_for.hpp"

namespace fa::tiled_cpu {

template <class T>
void forward(const Problem& p, const Forward<T>& t, const Options& options) {
  check_problem("tiled_cpu", p, 512);
  check_key_lengths("tiled_cpu", p);
  check_tensors("tiled_cpu", p, t);
  require(options.threads >= 0, "tiled_cpu: threads must not be negative, got ", options.threads);
  require(options.Br >= 1 && options.Bc >= 1 && options.Br <= 65536 && options.Bc <= 65536,
          "tiled_cpu: Br and Bc must lie in [1, 65536], got ", options.Br, " and ", options.Bc);
  const bool fast = options.kernel == Kernel::fast;
  require(!fast || std::is_same_v<T, float>,
          "tiled_cpu: the kernel 'fast' is for float; use Kernel::tiled for double");
  // exp(s) = 2^(s log2 e), and that factor goes into the scale
  require(!fast || std::isfinite(float(p.softmax_scale()) * log2_e),
          "tiled_cpu: the kernel 'fast' needs scale * log2(e) to be finite in float, got ",
          p.softmax_scale(), "; use Kernel::tiled");

  // A task is one tile of queries of one head. All tiles of a head come one after the other, so
  // that its K and V stay in the cache; with a causal mask the longest come first.
  const std::int64_t Br = fast ? fast::block_rows : std::min(options.Br, p.Nq);
  const std::int64_t Bc = std::min(options.Bc, std::max<std::int64_t>(p.Nk, 1));
  const std::int64_t tiles = p.Nq > 0 ? (p.Nq + Br - 1) / Br : 0;
  const std::int64_t tasks = p.B * p.Hq * tiles;
  const std::size_t elements = fast ? fast::scratch_elements(p.d) : scratch_elements(Br, Bc, p.d);
  const int threads = threads_for(tasks, options.threads);
  check_memory("tiled_cpu",
               std::to_string(threads) + " x " + std::to_string(elements) + " elements of scratch",
               double(threads) * double(elements) * sizeof(T),
               "use smaller tiles or fewer threads");
  const T scale = T(p.softmax_scale());
  parallel_for(tasks, threads, [&] {
    return [&, scratch = CacheLines<T>(elements)](std::int64_t task) mutable {
      const std::int64_t b = task / tiles / p.Hq, h = task / tiles % p.Hq;
      const std::int64_t i0 = (tiles - 1 - task % tiles) * Br;
      const auto Q = t.Q.rows(b, h, p.Nq, p.d);
      const auto K = t.K.rows(b, p.key_head(h), p.Nk, p.d);
      const auto V = t.V.rows(b, p.key_head(h), p.Nk, p.d);
      const auto O = t.O.rows(b, h, p.Nq, p.d);
      T* LSE = t.LSE ? t.LSE + (b * p.Hq + h) * p.Nq : nullptr;
      if constexpr (std::is_same_v<T, float>)
        if (fast)
          return fast::attention_block(Q, K, V, scale, Mask(p, b), i0, scratch.data(), O, LSE);
      attention_tile<T>(Q, K, V, scale, Mask(p, b), i0, Br, Bc, scratch.data(), O, LSE);
    };
  });
}

template void forward(const Problem&, const Forward<float>&, const Options&);
template void forward(const Problem&, const Forward<double>&, const Options&);

}  // namespace fa::tiled_cpu
