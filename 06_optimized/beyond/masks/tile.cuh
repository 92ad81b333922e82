// The tiles of this walk's backward in fp32.
#pragma once
#include "06_optimized/beyond/masks/reach.hpp"
#include "06_optimized/beyond/tile.cuh"

namespace fa::masks {

using namespace beyond::fp32;

}  // namespace fa::masks
