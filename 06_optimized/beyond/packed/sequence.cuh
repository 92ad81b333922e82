// How a block finds its work and enters the sequence: what the kernels of this walk share.
#pragma once
#include "06_optimized/beyond/packed/packed.hpp"
#include "06_optimized/ptx/barrier.cuh"

namespace fa::packed {

// The lists take a few microseconds, and to launch a kernel behind them takes as long. Built for
// compute capability 9.0 or later, they and the forward of tensor cores are launched while the
// kernel before them is at work, and wait for it themselves.
__device__ inline void next_may_start() {
#if defined(FA_EMULATED) || __CUDA_ARCH__ >= 900
  optimized::next_kernel_may_start();
#endif
}
__device__ inline void offsets_or_list_are_done() {
#if defined(FA_EMULATED) || __CUDA_ARCH__ >= 900
  optimized::previous_kernel_is_done();
#endif
}

// fa::Mask of one sequence, in three registers: row i sees the keys below i + ahead.
struct SequenceMask {
  int Nq, Nk, ahead;

  __device__ SequenceMask(const Sequence& s, Causal causal)
      : Nq(s.Nq),
        Nk(s.Nk),
        ahead(causal == Causal::none       ? s.Nk
              : causal == Causal::top_left ? 1
                                           : 1 + s.Nk - s.Nq) {}
  __device__ int visible_keys(int i) const { return max(0, min(i + ahead, Nk)); }
  __device__ int first_row(int j) const { return j >= Nk ? Nq : max(0, min(j + 1 - ahead, Nq)); }
};

// [quote enter]
// From here on, what p says and t holds to be read is one sequence's. As it is alone in its batch,
// b = 0. Where results go is reckoned at the end: until then a register would have to keep it.
template <class T>
__device__ void enter(const Sequence& s, Problem& p, Forward<T>& t) {
  p.Nq = s.Nq;
  p.Nk = s.Nk;
  t.Q.data = t.Q.at(0, 0, s.q0);
  t.K.data = t.K.at(0, 0, s.k0);
  t.V.data = t.V.at(0, 0, s.k0);
}
// [end quote]
template <class T>
__device__ void enter(const Sequence& s, Problem& p, Backward<T>& t) {
  p.Nq = s.Nq;
  p.Nk = s.Nk;
  for (View<const T>* X : {&t.Q, &t.O, &t.dO}) X->data = X->at(0, 0, s.q0);
  for (View<const T>* X : {&t.K, &t.V}) X->data = X->at(0, 0, s.k0);
  if (t.LSE) t.LSE += s.q0;
}

}  // namespace fa::packed
