// ./learn xray 06: one launch on one head, in bf16. FA_XRAY_FILE is its file, FA_XRAY_LAUNCH its
// name; the launches of other files that it may want are in xray_others.cpp.
#include FA_XRAY_FILE
#include <algorithm>
#include <string>
#include <string_view>

#include "06_optimized/backward/backward.hpp"
#include "06_optimized/forward/forward.hpp"
#include "common/emulator/xray.hpp"

namespace fa::optimized {
namespace {

using Half = __nv_bfloat16;
using Halves = xray::TensorOf<Half>;

// ---- the launches differ in what they are given ----

template <class Launch>
void look_forward(const Problem& p, const Launch& launch) {
  const Halves Q("Q", p.Nq, p.d), K("K", p.Nk, p.d), V("V", p.Nk, p.d), O("O", p.Nq, p.d);
  const xray::Tensor LSE("LSE", p.Nq, 1);
  const auto view = [&](const Halves& t, std::int64_t N) {
    return contiguous(t.data(), 1, N, p.d);
  };
  launch(Forward<Half>{view(Q, p.Nq), view(K, p.Nk), view(V, p.Nk), view(O, p.Nq), LSE.data()});
}
void look(void (*launch)(const Problem&, const Forward<Half>&, float, cudaStream_t),
          const Problem& p) {
  look_forward(p, [&](const Forward<Half>& t) { launch(p, t, float(p.softmax_scale()), nullptr); });
}
void look(void (*launch)(const Problem&, const Forward<Half>&, float, unsigned*, cudaStream_t),
          const Problem& p) {
  const DeviceMemory taken(sizeof(unsigned));  // for a mask
  look_forward(p, [&](const Forward<Half>& t) {
    launch(p, t, float(p.softmax_scale()),
           p.causal == Causal::none ? nullptr : taken.as<unsigned>(), nullptr);
  });
}
bool is_one_of(std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), FA_TEXT(FA_XRAY_LAUNCH)) != names.end();
}
void look(void (*launch)(const Problem&, const Backward<Half>&, float, const Passed&, cudaStream_t),
          const Problem& p) {
  const std::int64_t rows = Passed::padded_rows(p.Nq);
  const Halves Q("Q", p.Nq, p.d), K("K", p.Nk, p.d), V("V", p.Nk, p.d), O("O", p.Nq, p.d),
      dO("dO", p.Nq, p.d), dQ("dQ", p.Nq, p.d), dK("dK", p.Nk, p.d), dV("dV", p.Nk, p.d);
  const xray::Tensor LSE("LSE", p.Nq, 1), LSE2("LSE2", rows, 1), D("D", rows, 1),
      sums("sums of dQ", rows, Passed::padded(p.d));
  const std::int64_t tiles = (p.Nk + 63) / 64;
  const Halves dS("dS", rows, tiles * 64);
  const DeviceMemory turns(std::size_t(rows * Passed::padded(p.d) / 4096) * sizeof(int));
  FA_CUDA_CHECK(cudaMemset(turns.as<int>(), 0, turns.bytes()));
  const auto view = [&](const Halves& t, std::int64_t N) {
    return contiguous(t.data(), 1, N, p.d);
  };
  Passed passed{LSE2.data(), D.data(), sums.data(), rows,
                is_one_of({"launch_backward_in_order"}) ? turns.as<int>() : nullptr};
  if (is_one_of({"launch_backward_hopper_wide"})) {
    passed.kept = dS.data();
    passed.kept_tiles = int(tiles);
  }
  launch(p,
         {view(Q, p.Nq), view(K, p.Nk), view(V, p.Nk), view(O, p.Nq), view(dO, p.Nq), LSE.data(),
          view(dQ, p.Nq), view(dK, p.Nk), view(dV, p.Nk)},
         float(p.softmax_scale()), passed, nullptr);
}

// ---- what they take ----
void look(const xray::Arguments& a, std::int64_t Nq, std::int64_t Nk) {
  Problem p = a.problem();
  p.Nq = Nq;
  p.Nk = Nk;
  look(FA_XRAY_LAUNCH<Half>, p);
}
void look(const xray::Arguments& a) {
  const auto only = [&](bool fits, const std::string& what) {
    if (!fits)
      xray::Arguments::refuse("this kernel takes --d " + what + ", got " + std::to_string(a.d));
  };
  const bool hopper = is_one_of({"launch_hopper"});
  const bool two_kernels = is_one_of({"launch_backward_two_kernels"});
  if (two_kernels || is_one_of({"launch_backward_hopper"}))
    only(a.d <= 128, "up to 128 here");  // beyond, a part of the first has a file of its own
  else if (is_one_of({"launch_mma", "launch_cp_async", "launch_swizzle", "launch_wide_warps",
                      "launch_two_loops", "launch_backward_mma"}))
    only(a.d == 64 || a.d == 128, "64 or 128");
  else if (is_one_of({"launch_backward_hopper_wide"}))
    only(a.d > 128, "of more than 128");
  else if (!hopper && !is_one_of({"launch_fa2", "launch_backward_swizzle"}))
    only(a.d == 128, "128");
  // Some have tiles of 192 queries, 96 keys, or 80; the others' are 64 and 128.
  const std::int64_t whole = hopper && a.d > 128 ? 640 : hopper || two_kernels ? 384 : 128;
  if (!a.causal && !a.csv)
    xray::measure_tile(whole, [&](std::int64_t Nq, std::int64_t Nk) { look(a, Nq, Nk); });
  look(a, a.N, a.N);
}

}  // namespace
}  // namespace fa::optimized

int main(int argc, char** argv) {
  using namespace fa;
  return xray::run(
      argc, argv, [](const xray::Arguments& a) { optimized::look(a); }, 128, 256);
}
