// ./learn xray 04: one kernel on one head. FA_XRAY_FILE is its file, FA_XRAY_LAUNCH its launch.
#include FA_XRAY_FILE
#include "common/emulator/xray.hpp"

int main(int argc, char** argv) {
  using namespace fa;
  return xray::run(argc, argv, [](const xray::Arguments& a) {
    const Problem p = a.problem();
    const xray::Tensor Q("Q", a.N, a.d), K("K", a.N, a.d), V("V", a.N, a.d), O("O", a.N, a.d),
        LSE("LSE", a.N, 1);
    const auto view = [&](const xray::Tensor& t) { return contiguous(t.data(), 1, a.N, a.d); };
    cuda_forward::FA_XRAY_LAUNCH(p, {view(Q), view(K), view(V), view(O), LSE.data()},
                                 float(p.softmax_scale()), nullptr);
  });
}
