// From the public face to the kernels: check the arguments, launch.
#include <string>
#include <type_traits>

#include "06_optimized/beyond/weights/weights.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/core/check.hpp"

namespace fa::weights {
namespace {

constexpr const char* who = "weights";

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

template <class T>
void check_sizes(const Problem& p) {
  check_problem(who, p, widest<T>);
  require(p.Nk <= 1 << 30, who, ": Nk must be at most 2^30, got ", p.Nk);
}

void check_range(const char* first_name, const char* size_name, const char* limit_name,
                 std::int64_t first, std::int64_t size, std::int64_t limit) {
  require(first >= 0 && first <= limit, who, ": ", first_name, " must lie in [0, ", limit_name,
          " = ", limit, "], got ", first);
  require(size >= 0 && size <= limit - first, who, ": ", size_name, " must lie in [0, ", limit_name,
          " - ", first_name, " = ", limit - first, "], got ", size);
}

template <class T>
void check_inputs(const Problem& p, const Inputs<T>& in, std::span<const detail::Region> outputs) {
  detail::check_scale<float>(who, p);
  require(in.LSE || p.B * p.Hq * p.Nq == 0, who,
          ": LSE is a null pointer; the weights are exp(S - L), so the L of the forward is needed");
  const detail::Region inputs[] = {detail::region("Q", in.Q, p.B, p.Hq, p.Nq, p.d),
                                   detail::region("K", in.K, p.B, p.Hkv, p.Nk, p.d),
                                   detail::region("LSE", in.LSE, p)};
  detail::check_regions(who, inputs, outputs);
  if constexpr (is_half<T>) {
    const std::string why = optimized::wrong_capability("fa2", 80, optimized::device_capability());
    require(why.empty(), who, ": ", why);
  }
}

// A block has at least 16 rows, or 32 keys.
void check_blocks(const Problem& p, std::int64_t tiles) {
  require(p.B * p.Hq == 0 || tiles <= (1 << 30) / (p.B * p.Hq), who,
          ": B Hq times the tiles must be at most 2^30, got B = ", p.B, ", Hq = ", p.Hq, " and ",
          tiles, " tiles");
}

template <class T>
void ask(const Problem& p, const Inputs<T>& in, const Wanted& wanted, cudaStream_t stream) {
  check_blocks(p, (wanted.box.rows + 15) / 16 * wanted.parts());
  if (p.B == 0 || p.Hq == 0 || wanted.box.rows == 0) return;
  const float scale = float(p.softmax_scale());
  if constexpr (is_half<T>)
    launch_fa2(p, in, wanted, scale, stream);
  else
    launch_tiled(p, in, wanted, scale, stream);
}

}  // namespace

template <class T>
Head<T> one_head(const Problem& p, const Inputs<T>& in, std::int64_t b, std::int64_t h) {
  check_sizes<T>(p);
  require(b >= 0 && b < p.B, who, ": b must lie in [0, B = ", p.B, "), got ", b);
  require(h >= 0 && h < p.Hq, who, ": h must lie in [0, Hq = ", p.Hq, "), got ", h);
  // Steps to its first row are taken here, before anybody asks where they lead.
  detail::Region read[] = {detail::region("Q", in.Q, p.B, p.Hq, p.Nq, p.d),
                           detail::region("K", in.K, p.B, p.Hkv, p.Nk, p.d)};
  for (detail::Region& r : read) r.optional = true;
  detail::check_regions(who, read, {});
  Head<T> one{p, in};
  one.p.B = one.p.Hq = one.p.Hkv = 1;
  if (p.key_lengths) one.p.key_lengths += b;
  if (in.Q.data) one.in.Q.data = in.Q.at(b, h);
  if (in.K.data) one.in.K.data = in.K.at(b, p.key_head(h));
  if (in.LSE) one.in.LSE += (b * p.Hq + h) * p.Nq;
  return one;
}

template <class T>
void tile(const Problem& p, const Inputs<T>& in, const Box& box, const View<float>& P,
          cudaStream_t stream) {
  check_sizes<T>(p);
  check_range("i0", "rows", "Nq", box.i0, box.rows, p.Nq);
  check_range("j0", "cols", "Nk", box.j0, box.cols, p.Nk);
  if (box.cols == 0) return;
  const detail::Region output = detail::region("P", P, p.B, p.Hq, box.rows, box.cols);
  check_inputs(p, in, {&output, 1});
  ask(p, in, {box, 0, P, {}}, stream);
}

template <class T>
void largest(const Problem& p, const Inputs<T>& in, std::int64_t i0, std::int64_t rows, int k,
             const View<float>& P, const View<std::int32_t>& keys, cudaStream_t stream) {
  check_sizes<T>(p);
  check_range("i0", "rows", "Nq", i0, rows, p.Nq);
  require(k >= 1 && k <= max_k, who, ": k must lie in [1, ", max_k, "], got ", k);
  const detail::Region outputs[] = {detail::region("P", P, p.B, p.Hq, rows, k),
                                    detail::region("keys", keys, p.B, p.Hq, rows, k)};
  check_inputs(p, in, outputs);
  ask(p, in, {{i0, rows, 0, p.Nk}, k, P, keys}, stream);
}

template <class T>
void column_sums(const Problem& p, const Inputs<T>& in, float* sums, cudaStream_t stream) {
  check_sizes<T>(p);
  const View<float> view{sums, p.Hq * p.Nk, p.Nk, 1};
  const detail::Region output = detail::region("sums", view, p.B, p.Hq, p.Nk, 1);
  check_inputs(p, in, {&output, 1});
  check_blocks(p, (p.Nk + 31) / 32);
  if (p.B == 0 || p.Hq == 0 || p.Nk == 0) return;
  const float scale = float(p.softmax_scale());
  if constexpr (is_half<T>)
    launch_fa2_columns(p, in, sums, scale, stream);
  else
    launch_columns(p, in, sums, scale, stream);
}

#define FA_FOR(T)                                                                          \
  template Head<T> one_head(const Problem&, const Inputs<T>&, std::int64_t, std::int64_t); \
  template void tile(const Problem&, const Inputs<T>&, const Box&, const View<float>&,     \
                     cudaStream_t);                                                        \
  template void largest(const Problem&, const Inputs<T>&, std::int64_t, std::int64_t, int, \
                        const View<float>&, const View<std::int32_t>&, cudaStream_t);      \
  template void column_sums(const Problem&, const Inputs<T>&, float*, cudaStream_t)
FA_FOR(float);
FA_FOR(__half);
FA_FOR(__nv_bfloat16);
#undef FA_FOR

}  // namespace fa::weights
