// ./learn xray 05: one launch on one head. FA_XRAY_FILE is its file, FA_XRAY_LAUNCH its name.
#include FA_XRAY_FILE
#include "common/emulator/xray.hpp"

namespace fa::cuda_backward {

// launch_atomic has it for the tiles of fast/, which nobody asks for here: it need not be there.
__attribute__((weak)) void launch_fast_atomic(const Problem&, const Backward<float>&, float,
                                              const Options&, const float*);

namespace {

// The launches differ in what they are given.
void call(void (*launch)(const Problem&, const Backward<float>&, float*, cudaStream_t),
          const Problem& p, const Backward<float>& t, float* D) {
  launch(p, t, D, nullptr);
}
template <class Deltas>  // float* or const float*
void call(void (*launch)(const Problem&, const Backward<float>&, float, const Options&, Deltas),
          const Problem& p, const Backward<float>& t, float* D) {
  Options options;
  options.tiles = Tiles::lesson;
  launch(p, t, float(p.softmax_scale()), options, D);
}

}  // namespace
}  // namespace fa::cuda_backward

int main(int argc, char** argv) {
  using namespace fa;
  return xray::run(argc, argv, [](const xray::Arguments& a) {
    const Problem p = a.problem();
    const xray::Tensor Q("Q", a.N, a.d), K("K", a.N, a.d), V("V", a.N, a.d), O("O", a.N, a.d),
        dO("dO", a.N, a.d), LSE("LSE", a.N, 1), D("D", a.N, 1), dQ("dQ", a.N, a.d),
        dK("dK", a.N, a.d), dV("dV", a.N, a.d);
    const auto view = [&](const xray::Tensor& t) { return contiguous(t.data(), 1, a.N, a.d); };
    const Backward<float> t{view(Q),    view(K),  view(V),  view(O), view(dO),
                            LSE.data(), view(dQ), view(dK), view(dV)};
    cuda_backward::call(cuda_backward::FA_XRAY_LAUNCH, p, t, D.data());
  });
}
