// The tiles of this walk's backward in fp32.
#pragma once
#include "06_optimized/beyond/dropout/keep.cuh"
#include "06_optimized/beyond/tile.cuh"

namespace fa::dropout {

using namespace beyond::fp32;

}  // namespace fa::dropout
