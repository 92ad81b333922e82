// Small kernels for the tests of common/core/cuda.hpp and of the emulator.
#pragma once
#include "common/core/cuda.hpp"
#include "common/core/tensor.hpp"

namespace fa::test_kernels {

void launch_with(unsigned threads, std::size_t shared_bytes);
void launch_early_with(unsigned threads, std::size_t shared_bytes);  // FA_LAUNCH_EARLY
void launch_clusters_with(unsigned size, unsigned blocks, unsigned threads);

// out[t] = in[255 - t] through static shared memory, 256 threads. Without the barrier: a race.
void reverse(const float* in, float* out, bool with_barrier);
// out[t] = what dynamic shared memory holds before anybody writes to it; 32 threads.
void read_uninitialised(float* out);
// The same for static shared memory.
void read_uninitialised_static(float* out);
// Each thread writes a float to dynamic shared memory.
void write_shared(unsigned threads, std::size_t shared_bytes);
// Where dynamic shared memory begins that is to be aligned to 1024 bytes.
void where_tiles_begin(std::uintptr_t* address);
// One thread asks for three copies of four numbers, of which the first, the first two, and all are
// read; two are groups, the third is in none. seen[0 .. 11]: shared memory when all groups but the
// newest are there, then when both are, then when all is.
void copies(const float* from, float* seen);
// to[0 .. 3] = from[4 .. 7], to[4 .. 7] = 0, *steps += 2: 16 bytes at once, and 8.
void at_once(const short* from, short* to, unsigned* steps);
void four(const float* from, float* to);
// out[t] = sum over the warp of lane t; out[64 + t] = the lane that is 1 higher; 64 threads.
void shuffles(int* out);
// out[0] += 1 from 4 blocks of 64 threads; threads past the 40th return before a barrier.
void count(float* out);
// Half of a warp waits in a shuffle, the other half at __syncthreads. Hangs on a GPU.
void diverge(bool odd);
// out[0] += 32 and out[1 + b] = b by 6 blocks of 32 threads, of which one may do what it must not.
enum class InBlockThree { nothing, hangs, ends, writes_behind };
void blocks(float* out, InBlockThree);
// The forward of one head with a single key, where O is V.
void one_key(const Problem& p, const Forward<float>& t, cudaStream_t stream);
// Reads *address.
void read(const float* address, float* out);

}  // namespace fa::test_kernels
