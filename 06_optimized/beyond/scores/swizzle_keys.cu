// The backward's owner of dK and dV, of 2_swizzle_keys.cu, with changed scores. Rows are keys here
// and columns are queries: a thread has two queries of each block of eight, so two lines.
#include "06_optimized/backward/2_swizzle.cuh"
#include "06_optimized/beyond/scores/change.cuh"

namespace fa::scores {
namespace {

using namespace optimized;
using namespace optimized::swizzle_backward;

// For head dimensions of at most D. groups: of 16 rows that a warp owns.
template <int D, bool with_dK>
struct DkvTile {
  static constexpr int groups = D <= 64 ? 2 : 1;
  static constexpr int Bc = 16 * groups * warps, Br = D == 128 ? 64 : 32;
  static constexpr bool two_Q = D <= 128 || !with_dK;  // else one buffer is all that fits
  // K_j, V_j, Q_i, dO_i, and LSE2 and D of the rows i. At most 97 KiB.
  static constexpr std::size_t shared_bytes =
      ((with_dK ? 2 : 1) * Bc + (two_Q ? 3 : 2) * Br) * D * 2 + 2 * Br * sizeof(float);
  static constexpr std::size_t bias_bytes = Br * Bc * 2;  // and a tile of the bias
};

// The owner of dK_j and dV_j, or of one of them: it passes over the queries that see its keys, in
// all query heads of the group. In S^T and dP^T the rows are keys and the columns queries.
template <int D, bool with_dK, bool with_dV, int built, class T>
__global__ void __launch_bounds__(threads, 2)
    swizzle_dkv_kernel(Problem p, Backward<T> t, Change<T> change, float scale, Passed passed,
                       bool aligned) {
  using Sizes = DkvTile<D, with_dK>;
  constexpr int groups = Sizes::groups, Bc = Sizes::Bc, Br = Sizes::Br;
  constexpr bool two_Q = Sizes::two_Q;
  T* const Kj = dynamic_shared<T>();           // [Bc, D]; at the end dK_j, then dV_j
  T* const Vj = Kj + Bc * D;                   // [Bc, D], only for dK
  T* const dOi = Vj + (with_dK ? Bc * D : 0);  // [Br, D]
  T* const Qs = dOi + Br * D;                  // [1 or 2][Br, D]
  float* const LSE2 = reinterpret_cast<float*>(Qs + (two_Q ? 2 : 1) * Br * D);  // [Br]
  float* const D_i = LSE2 + Br;                                                 // [Br]
  T* const Bij = reinterpret_cast<T*>(D_i + Br);  // [Br, Bc], if biases come in tiles
  constexpr bool tiles_of_bias = built & in_tiles;

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * groups;
  const int r0 = warp_row + lane / 4;  // this thread's rows of the tile: r0 + 8 i, i < 2 groups
  const int x0 = lane % 4 * 2;         // and its columns of a block: x0, x0 + 1
  // Counted in int, for the sums need the registers: Nq and Nk are at most 2^30.
  const int tiles = int((p.Nk + Bc - 1) / Bc), head = int(blockIdx.x) / tiles;
  const int b = head / int(p.Hkv), hk = head % int(p.Hkv), group = int(p.Hq) / int(p.Hkv);
  const int j0 = int(blockIdx.x) % tiles * Bc;  // with a causal mask the first keys have most
  const int keys = min(Bc, int(p.Nk) - j0), Nq = int(p.Nq);
  const Mask mask(p, b);
  const float c = scale * log2_e;  // exp(scale x) = 2^(c x)

  const auto load_Q = [&](T* to, int h, int i0) {
    bring<built, D, Br>(to, t.Q.rows(b, h, Nq, p.d), i0, min(Br, Nq - i0), change, change.offset,
                        aligned);
  };
  const auto load_dO = [&](int h, int i0) {  // LSE2 and D, which are padded, and the bias
    const int four = 4 * threadIdx.x;
    load<D, Br>(dOi, t.dO.rows(b, h, Nq, p.d), i0, min(Br, Nq - i0), aligned);
    const std::int64_t row = (b * p.Hq + h) * passed.rows + i0 + four;
    if (four < Br) {
      cp_async(LSE2 + four, passed.LSE2 + row, 16);
      cp_async(D_i + four, passed.D + row, 16);
    }
    if constexpr (tiles_of_bias) load_bias<Br, Bc>(Bij, change.bias.rows(b, h, p.Nq, p.Nk), i0, j0);
  };

  // The first key of the tile is seen by most rows, the last one by least: no row before `begin`
  // sees any, all rows from `full` on see all.
  int begin = int(mask.first_row(j0));
  if (begin < Nq) begin = begin / Br * Br;
  const int full = int(mask.first_row(j0 + keys - 1));
  const int h_end = (hk + 1) * group;
  int h = hk * group, i0 = begin, buffer = 0;  // of Q
  if (h < h_end && begin < Nq) {
    // Padded keys are not even looked at: 0 times what they hold may be NaN.
    const int seen = min(keys, int(mask.length) - j0);
    bring<built, D, Bc>(Kj, t.K.rows(b, hk, p.Nk, p.d), j0, seen, change, 0, aligned);
    if constexpr (with_dK) load<D, Bc>(Vj, t.V.rows(b, hk, p.Nk, p.d), j0, seen, aligned);
    if constexpr (two_Q) load_Q(Qs, h, i0);
    load_dO(h, i0);
    cp_async_commit();
  }

  int first[2 * groups];  // the first row that sees this thread's keys
#pragma unroll
  for (int r = 0; r < 2 * groups; ++r) first[r] = int(mask.first_row(j0 + r0 + 8 * r));

  float dK[groups][D / 8][4] = {}, dV[groups][D / 8][4] = {};
  const auto step = [&](auto with_mask) {
    constexpr bool masked = decltype(with_mask)::value;
    const bool same_head = i0 + Br < Nq;
    const int next_h = same_head ? h : h + 1, next_i0 = same_head ? i0 + Br : begin;
    const bool more = next_h < h_end;
    T* const Qi = Qs + buffer;
    if constexpr (two_Q) buffer ^= Br * D;
    const Head<built, T> of_head(change, b, h);  // now, for its slope comes from memory

    cp_async_wait<0>();
    __syncthreads();  // dO_i and, of two, Q_i are complete, and Q before it is no longer read
    if constexpr (!two_Q)
      load_Q(Qi, h, i0);
    else if (more)
      load_Q(Qs + buffer, next_h, next_i0);
    cp_async_commit();

    // dP_ij^T = V_j dO_i^T
    float S[groups][Br / 8][4];
    [[maybe_unused]] float dP[groups][Br / 8][4];
    [[maybe_unused]] std::uint32_t P16[Br / 16][groups][4], dS16[Br / 16][groups][4];
    if constexpr (with_dK) product<D, groups, Br>(dP, Vj + warp_row * D, dOi);

    if constexpr (!two_Q) {
      cp_async_wait<0>();
      __syncthreads();  // Q_i is complete
    }

    // P_ij^T = 2^(c K_j Q_i^T - LSE2_i);  dS_ij = P_ij (dP_ij - D_i); 0 where row i does not see j
    start_sums<built, true>(S, of_head, float(i0 + x0 + change.offset - j0 - r0));
    add_product<D, groups, Br>(S, Kj + warp_row * D, Qi);
    if constexpr (tiles_of_bias) add_bias<Bc, true>(S, Bij, warp_row, change.unit);
#pragma unroll
    for (int i = 0; i < Br / 8; ++i) {
      const float2 LSE2_i = *reinterpret_cast<const float2*>(LSE2 + 8 * i + x0);
      [[maybe_unused]] const float2 delta = *reinterpret_cast<const float2*>(D_i + 8 * i + x0);
      const int query = i0 + 8 * i + x0;  // and the next one
      const Line<built, T> lines[] = {{change, of_head, query, j0 + r0},
                                      {change, of_head, query + 1, j0 + r0}};
#pragma unroll
      for (int g = 0; g < groups; ++g)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int x = 16 * g + e / 2 * 8;  // the key's place, from j0 + r0 on
          const Line<built, T>& line = lines[e % 2];
          const float bias = line.bias_at(x, query + e % 2 < Nq ? keys - r0 : 0);
          const bool hidden = masked && i0 + 8 * i + x0 + e % 2 < first[2 * g + e / 2];
          float& P = S[g][i][e];
          [[maybe_unused]] const float derivative = line.derivative(P);
          P = line.changed(P, x, bias);
          P = hidden ? 0 : ex2(fmaf(c, P, -(e % 2 ? LSE2_i.y : LSE2_i.x)));
          if constexpr (with_dK) {
            float& dS = dP[g][i][e];
            dS = hidden ? 0 : P * (dS - (e % 2 ? delta.y : delta.x)) * derivative;
          }
        }
    }

    // dV_j += P_ij^T dO_i;  dK_j += dS_ij^T Q_i. P and dS are rounded both at once: from here on
    // they need half the registers.
    if constexpr (with_dV) round<T>(P16, S);
    if constexpr (with_dK) round<T>(dS16, dP);
    if constexpr (with_dV) accumulate<D>(dV, P16, dOi);
    __syncthreads();  // dO_i, LSE2, D and B_ij are no longer read
    if (more) load_dO(next_h, next_i0);
    cp_async_commit();
    if constexpr (with_dK) accumulate<D>(dK, dS16, Qi);
  };
  for (; h < h_end; ++h) {
    for (i0 = begin; i0 < full; i0 += Br) step(std::true_type());
    for (; i0 < Nq; i0 += Br) step(std::false_type());
  }

  if constexpr (with_dK) {
    const auto dK_rows = t.dK.rows(b, hk, p.Nk, p.d);
    if (has<built>(change, with_rotary)) {
      store_turned_back<D>(dK_rows, j0, keys, scale, dK, reinterpret_cast<float*>(Kj),
                           change.rotary, 0);
      __syncthreads();  // other warps' rows of dK lay where dV passes now
    } else {
      store<D>(dK_rows, j0, keys, scale, dK, Kj, aligned);
    }
  }
  if constexpr (with_dV) store<D>(t.dV.rows(b, hk, p.Nk, p.d), j0, keys, 1, dV, Kj, aligned);
}

template <int D, bool with_dK, bool with_dV, int built, class T>
void launch_dkv(const Problem& p, const Backward<T>& t, const Change<T>& change, float scale,
                const Passed& passed, cudaStream_t stream) {
  using Sizes = DkvTile<D, with_dK>;
  const auto dkv = swizzle_dkv_kernel<D, with_dK, with_dV, built, T>;
  constexpr std::size_t bytes = Sizes::shared_bytes + (built & in_tiles ? Sizes::bias_bytes : 0);
  static_assert(bytes <= most_shared);
  const std::int64_t blocks = p.B * p.Hkv * ((p.Nk + Sizes::Bc - 1) / Sizes::Bc);
  if (blocks == 0) return;
  allow_shared_memory(dkv, bytes);
  FA_LAUNCH(dkv, dim3(unsigned(blocks)), dim3(threads), bytes, stream, p, t, change, scale, passed,
            all_in_16_bytes(t));
}

}  // namespace

template <class T>
void launch_swizzle_dkv(const Problem& p, const Backward<T>& t, const Change<T>& change,
                        float scale, const Passed& passed, cudaStream_t stream) {
  with_built(change, p.d, [&](auto built_, auto D_) {
    constexpr int built = decltype(built_)::value, D = decltype(D_)::value;
    launch_dkv<D, true, D <= 128, built>(p, t, change, scale, passed, stream);
    if constexpr (D > 128) launch_dkv<D, false, true, built>(p, t, change, scale, passed, stream);
  });
}
template void launch_swizzle_dkv(const Problem&, const Backward<__half>&, const Change<__half>&,
                                 float, const Passed&, cudaStream_t);
template void launch_swizzle_dkv(const Problem&, const Backward<__nv_bfloat16>&,
                                 const Change<__nv_bfloat16>&, float, const Passed&, cudaStream_t);

}  // namespace fa::scores
