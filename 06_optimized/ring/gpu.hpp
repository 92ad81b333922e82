// The engine on a GPU: the kernels of stage 06 as they are, and a few that move rows.
#pragma once
#include <memory>

#include "06_optimized/forward/forward.hpp"
#include "06_optimized/ring/ring.hpp"

namespace fa::ring {

// T: __half or __nv_bfloat16. Work is put on `stream`, of the GPU that is current now.
//
// A part's O is rounded to T before it is merged. Parts have shares whose sum is 1, so that what
// all roundings add to O_ix is at most one rounding of the largest of the parts' |O_ix|; and a
// part's dQ, dK or dV is rounded once, then added up in fp32.
template <class T>
std::unique_ptr<Engine<T>> gpu_engine(cudaStream_t stream, bool deterministic = false);

}  // namespace fa::ring
