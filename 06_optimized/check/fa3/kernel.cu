// One kernel of FlashAttention-3, in a file's compilation of its own; build.py defines
//   FA3_NAME      the function that launches it
//   FA3_D         64, 128, 256
//   FA3_CAUSAL and the following: 0 or 1
//   FA3_BACKWARD, FA3_DETERMINISTIC
//   FA3_DECODE    a few queries of a sequence: one tile holds those of a head
//   FA3_PACKED    or those of all heads that share keys
//   FA3_SPLIT     and a block sees a part of the keys, so O and LSE are the part's
//   FA3_PAGED     and the keys lie in pages
//   FA3_MERGE     puts the parts together
//   FA3_LOCAL     a window to the left and to the right
//   FA3_SOFTCAP   scores are bent by tanh
//   FA3_VARLEN    sequences of different lengths behind one another
//   FA3_GROUPS    several query heads on a key head, backward: dK and dV are sums
//   FA3_F16       fp16, not bf16
//
// FlashAttention-3's own dispatch chooses the tiles. It asks at run time what kind of call it is,
// and would compile a kernel for every answer, so its switches are given the one answer here.
#include "static_switch.h"

namespace asked {  // by the names that the dispatch gives to its answers
[[maybe_unused]] constexpr bool GQA = FA3_GROUPS, Deterministic_ = FA3_DETERMINISTIC;
[[maybe_unused]] constexpr bool HasQV_ = false;
[[maybe_unused]] constexpr bool Varlen = FA3_VARLEN;
// A forward's N is a multiple of 256: an even number of tiles of 128 queries.
[[maybe_unused]] constexpr bool Use_cluster = !FA3_DECODE && !FA3_VARLEN;
[[maybe_unused]] constexpr bool Sort = true;  // the longest sequence first, but for windows
}  // namespace asked

#undef BOOL_SWITCH
#define BOOL_SWITCH(condition, name, ...)     \
  [&] {                                       \
    static constexpr bool name = asked::name; \
    return __VA_ARGS__();                     \
  }()
#undef CLUSTER_SWITCH
#define CLUSTER_SWITCH BOOL_SWITCH
#undef CAUSAL_LOCAL_SWITCH
#define CAUSAL_LOCAL_SWITCH(is_causal, is_local, causal_name, local_name, ...) \
  [&] {                                                                        \
    static constexpr bool causal_name = FA3_CAUSAL, local_name = FA3_LOCAL;    \
    return __VA_ARGS__();                                                      \
  }()

// With other answers it is another function, so each kernel's has a name of its own: of functions
// with one name the linker keeps any.
#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define OWN(name) JOINED(FA3_NAME, name)
#define run_mha_fwd_ OWN(_forward)
#define run_mha_fwd_combine_ OWN(_combine)
#define prepare_varlen_num_blocks OWN(_prepare)
#define run_mha_bwd_dispatch OWN(_dispatch)
#define run_mha_bwd_hdim64 OWN(_64)
#define run_mha_bwd_hdim128 OWN(_128)
#define run_mha_bwd_hdim256 OWN(_256)
// CUTLASS's kernels are static: each file has its own, and must raise that one's limit of shared
// memory. What launches them is not: the linker would keep one, with another file's kernel.
#define kernel_launch OWN(_launch)

#if FA3_BACKWARD
#include "flash_bwd_launch_template.h"
#elif FA3_MERGE
#include "flash_fwd_combine_launch_template.h"
#else
#include "flash_fwd_launch_template.h"
#if FA3_VARLEN
#include "flash_prepare_scheduler.cu"  // a kernel before it, which counts tiles
#endif
#endif

using T = std::conditional_t<FA3_F16, cutlass::half_t, cutlass::bfloat16_t>;

void FA3_NAME(Flash_bwd_params& params, cudaStream_t stream) {
#if FA3_BACKWARD
  JOINED(FA3_NAME, JOINED(_, FA3_D))<90, T, FA3_SOFTCAP>(params, stream);
#elif FA3_MERGE
  run_mha_fwd_combine_<T, float, FA3_D>(params, stream, /*early launch*/ true);
#else
  run_mha_fwd_<90, T, FA3_D, FA3_D, FA3_SPLIT, FA3_PAGED, FA3_SOFTCAP, FA3_PACKED>(params, stream);
#endif
}
