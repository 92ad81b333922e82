// From the public face to the kernels: check the arguments, choose the number of parts, launch.
#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "06_optimized/beyond/decode/decode.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/core/check.hpp"

namespace fa::decode {
namespace {

constexpr const char* who = "decode";

template <class T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

std::int64_t tiles_of(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }

void check_sizes(const Problem& p) {
  require(p.causal == Causal::none, who,
          ": causal must be none; Options::causal says what the last queries of a sequence see");
  require(p.Nq <= max_Nq, who, ": Nq must lie in [0, ", max_Nq, "], got ", p.Nq);
  require(p.Nk <= 1 << 30, who, ": Nk must be at most 2^30, got ", p.Nk);
  require(p.B <= 1 << 30 && (p.B == 0 || p.Hq * p.Nq <= (1 << 30) / p.B), who,
          ": B Hq Nq must be at most 2^30, got B = ", p.B, ", Hq = ", p.Hq, ", Nq = ", p.Nq);
}

template <class T>
void check_cache(const Problem& p, const Cache<T>& c) {
  if (!c.table) {
    require(c.page_size == 0 && c.pages == 0 && c.table_stride == 0, who,
            ": table is a null pointer, but page_size is ", c.page_size, ", pages is ", c.pages,
            " and table_stride is ", c.table_stride);
    return;
  }
  const std::int64_t size = c.page_size;
  require(size >= smallest_page && size <= largest_page && (size & (size - 1)) == 0, who,
          ": page_size must be a power of two in [", smallest_page, ", ", largest_page, "], got ",
          size);
  require(c.pages >= (p.Nk > 0 ? 1 : 0) && c.pages <= 1 << 30, who,
          ": pages must lie in [1, 2^30], got ", c.pages);
  require(c.table_stride >= tiles_of(p.Nk, size), who,
          ": table_stride must be at least ceil(Nk / page_size) = ", tiles_of(p.Nk, size), ", got ",
          c.table_stride);
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / sizeof(std::int32_t);
  require(c.table_stride <= most / std::max<std::int64_t>(p.B, 1), who,
          ": the table, B * table_stride * 4 bytes, must fit 64 bits signed, got B = ", p.B,
          " and table_stride = ", c.table_stride);
  require(reinterpret_cast<std::uintptr_t>(c.table) % alignof(std::int32_t) == 0, who,
          ": table must be aligned to its element, ", sizeof(std::int32_t), " bytes");
}

template <class T>
void check_tensors_of(const Problem& p, const Tensors<T>& t) {
  using detail::region;
  detail::check_scale<T>(who, p);
  const Cache<T>& c = t.cache;
  const bool paged = c.table, appends = t.new_K.data || t.new_V.data;
  const auto in_cache = [&](const char* name, const View<T>& X) {
    return region(name, X, paged ? c.pages : p.B, p.Hkv, paged ? c.page_size : p.Nk, p.d);
  };
  const detail::Region Q = region("Q", t.Q, p.B, p.Hq, p.Nq, p.d), K = in_cache("K", c.K),
                       V = in_cache("V", c.V),
                       new_K = region("new_K", t.new_K, p.B, p.Hkv, p.Nq, p.d),
                       new_V = region("new_V", t.new_V, p.B, p.Hkv, p.Nq, p.d),
                       O = region("O", t.O, p.B, p.Hq, p.Nq, p.d), LSE = region("LSE", t.LSE, p);
  if (appends) {
    const detail::Region inputs[] = {Q, new_K, new_V}, outputs[] = {O, LSE, K, V};
    detail::check_regions(who, inputs, outputs);
  } else {
    const detail::Region inputs[] = {Q, K, V}, outputs[] = {O, LSE};
    detail::check_regions(who, inputs, outputs);
  }
}

template <class T>
int chosen_splits(const Problem& p, const Options& options) {
  require(options.splits >= 0 && options.splits <= max_splits, who, ": splits must lie in [0, ",
          max_splits, "], got ", options.splits);
  return options.splits ? options.splits : splits(p, shape<T>(p), processors());
}

std::size_t bytes_for(const Problem& p, int splits) {
  return splits == 1 ? 0
                     : sizeof(float) * std::size_t(splits) * std::size_t(p.B * p.Hq * p.Nq) *
                           std::size_t(p.d + 1);
}

// What the tensor cores' kernel wants besides.
void check_fa2(const Problem& p) {
  const std::string why = optimized::wrong_capability("fa2", 80, optimized::device_capability());
  require(why.empty(), who, ": ", why);
  require(float(p.softmax_scale()) > 0, who, ": fa2: scale must be > 0 in fp32, got ",
          p.softmax_scale(), "; the maximum is taken before scaling");
  const std::string wrong = optimized::wrong_scale(p);
  require(wrong.empty(), who, ": fa2", wrong);
}

}  // namespace

int splits(const Problem& p, const Shape& shape, int processors) {
  constexpr std::int64_t part = 128;  // what it costs, in keys
  const std::int64_t tiles = tiles_of(p.Nk, shape.keys), n = p.B * p.Hkv * row_tiles(p, shape.rows),
                     at_once = std::int64_t(processors) * shape.blocks;
  std::int64_t best = 1, least = tiles_of(n, at_once) * tiles * shape.keys;
  for (std::int64_t s = 2; s <= std::min<std::int64_t>(tiles, max_splits); ++s) {
    const std::int64_t cost = tiles_of(n * s, at_once) * (tiles_of(tiles, s) * shape.keys + part);
    if (cost < least) best = s, least = cost;
  }
  return int(best);
}

template <class T>
std::size_t scratch_bytes(const Problem& p, const Options& options) {
  check_problem(who, p, widest<T>);
  check_sizes(p);
  return bytes_for(p, chosen_splits<T>(p, options));
}

template <class T>
int forward(const Problem& p, const Tensors<T>& t, const Options& options) {
  check_problem(who, p, widest<T>);
  check_sizes(p);
  check_cache(p, t.cache);
  check_tensors_of(p, t);
  if constexpr (is_half<T>) check_fa2(p);
  const int parts_wanted = chosen_splits<T>(p, options);
  const std::size_t bytes = bytes_for(p, parts_wanted);
  check_scratch(who, options.scratch, "scratch_bytes()", bytes, alignof(float));
  if (p.B == 0 || p.Hq == 0 || p.Nq == 0) return parts_wanted;
  const std::int64_t rows = p.B * p.Hq * p.Nq,
                     blocks = p.B * p.Hkv * row_tiles(p, shape<T>(p).rows);
  require(rows <= 1 << 30 && blocks <= (1 << 30) / parts_wanted, who,
          ": B Hq Nq, and B Hkv times the parts and tiles of rows, must be at most 2^30, got B = ",
          p.B, ", Hq = ", p.Hq, ", Nq = ", p.Nq, " and ", parts_wanted, " parts");

  float* const O = static_cast<float*>(options.scratch.data);
  const bool whole = parts_wanted == 1;
  const Parts parts{parts_wanted, whole ? nullptr : O,
                    whole ? nullptr : O + parts_wanted * rows * p.d};
  const float scale = float(p.softmax_scale());
  bool merged = whole;
  if constexpr (is_half<T>)
    merged = launch_fa2(p, t, parts, scale, options.causal, options.stream);
  else
    launch_tiled(p, t, parts, scale, options.causal, options.stream);
  if (!merged) launch_merge(p, parts, t.O, t.LSE, options.stream);
  return parts_wanted;
}

template std::size_t scratch_bytes<float>(const Problem&, const Options&);
template std::size_t scratch_bytes<__half>(const Problem&, const Options&);
template std::size_t scratch_bytes<__nv_bfloat16>(const Problem&, const Options&);
template int forward(const Problem&, const Tensors<float>&, const Options&);
template int forward(const Problem&, const Tensors<__half>&, const Options&);
template int forward(const Problem&, const Tensors<__nv_bfloat16>&, const Options&);

}  // namespace fa::decode
