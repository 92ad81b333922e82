// The tiles of this walk's backward in fp32.
#pragma once
#include "06_optimized/beyond/packed/sequence.cuh"
#include "06_optimized/beyond/tile.cuh"

namespace fa::packed {

using namespace beyond::fp32;

}  // namespace fa::packed
