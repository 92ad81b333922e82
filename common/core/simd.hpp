// One register full of floats, for lessons that place a lane where CUDA places a thread. The
// compiler knows + - * / and comparisons on it; here is what it does not know.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <xmmintrin.h>  // a tenth of the other one, which a compiler reads for half a second
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace fa::simd {

#if defined(__AVX512F__)
inline constexpr int W = 16;  // lanes
#elif defined(__AVX__)
inline constexpr int W = 8;
#else
inline constexpr int W = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * W)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * W)));

// From and to any address; nothing is asked of its alignment.
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec broadcast(float x) { return x - Vec{}; }

// The larger one, lane by lane; where a or b is NaN: b, or NaN.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#elif defined(__ARM_NEON)
  return (Vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

// 2^x for x <= 0, relative error about 2e-7: exactly 1 at 0, NaN stays NaN. Below -126, where
// floats become denormal, the result is exactly 0: hidden scores are -infinity, and a processor
// that has to underflow on the way to 0 may take a hundred cycles for it.
// x = n + r with an integer n and |r| <= 1/2; 2^n is an exponent, 2^r a polynomial fitted to that
// interval (relative error 1.1e-7 as stored), with 1 at r = 0.
inline Vec exp2(Vec x) {
  const auto polynomial = [](Vec r) {
    Vec p = broadcast(1.3264727e-3f);
    for (float c : {9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.93147e-1f, 1.0f}) p = p * r + c;
    return p;
  };
#if defined(__AVX512F__)
  // "not less than" is true for NaN: it is kept
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)polynomial(x - n), (__m512)n);
#else
  x = max(broadcast(-127.0f), x);
  // Adding 1.5 * 2^23 leaves no room for a fraction: the low bits of t hold n + 127, the exponent
  // field of 2^n. At n = -127 the field is 0, and so is the result.
  const Vec magic = broadcast(12582912.0f + 127.0f);
  const Vec t = x + magic;
  return polynomial(x - (t - magic)) * (Vec)((IntVec)t << 23);
#endif
}

}  // namespace fa::simd
