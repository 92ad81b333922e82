// The roof that CPU figures are held against: this machine's own multiply-add peak, measured.
#pragma once

namespace fa::bench {

// fp32 FLOP/s of independent multiply-adds in registers on `threads` threads, sampled for about
// `seconds`. A shared machine's clock drifts by tens of per cent within the hour, so a figure is
// divided by a sample taken next to it.
double fma_peak(int threads, double seconds = 0.004);

}  // namespace fa::bench
