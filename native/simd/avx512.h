// AVX-512 F + BW + DQ + VL: 16 floats, 32 registers; with ATTNWORKS_AVX512_BF16 also products of bf16 pairs.
// What each function does is said in generic.h.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "../attention.h"

#define ATTNWORKS_INLINE static inline __attribute__((always_inline))

namespace attnworks::ATTNWORKS_ISA {

constexpr int W = 16;
constexpr int MR = 12, NV = 2;
#ifdef ATTNWORKS_AVX512_BF16
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif
constexpr bool FLOORS = true;

typedef __m512 Vec;

ATTNWORKS_INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1); }

ATTNWORKS_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
ATTNWORKS_INLINE Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
ATTNWORKS_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
ATTNWORKS_INLINE void store_n(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

ATTNWORKS_INLINE Vec in_register(Vec x) {
  asm("" : "+v"(x));
  return x;
}
ATTNWORKS_INLINE Vec zero() { return _mm512_setzero_ps(); }
ATTNWORKS_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
ATTNWORKS_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
ATTNWORKS_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
ATTNWORKS_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
ATTNWORKS_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
ATTNWORKS_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
ATTNWORKS_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
ATTNWORKS_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
ATTNWORKS_INLINE Vec choose(uint32_t bits, Vec a, Vec b) { return _mm512_mask_blend_ps((__mmask16)bits, b, a); }

// scalef rounds its exponent down for itself, and takes any, so that x is `whole`.
ATTNWORKS_INLINE Vec split_whole(Vec x, Vec& fraction) {
  fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // one operation where roundscale is two
  return x;
}
// 0 where scalef alone would give a subnormal, for which it takes 30 times as long.
ATTNWORKS_INLINE Vec scale_by_pow2(Vec x, Vec whole) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(whole, set1(-126.f), _CMP_NLT_UQ), x, whole);
}

ATTNWORKS_INLINE float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
ATTNWORKS_INLINE float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
ATTNWORKS_INLINE Vec reduce_add_all(const Vec (&x)[W]) {
  Vec t[8], u[4], v[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) t[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    v[i] = add(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88), _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  return add(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}
ATTNWORKS_INLINE void transpose(Vec (&x)[W]) {
  Vec t[W];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    x[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    x[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    x[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    x[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    x[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
}

ATTNWORKS_INLINE Vec widen(__m256i x, const bf16*) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
ATTNWORKS_INLINE Vec widen(__m256i x, const fp16*) { return _mm512_cvtph_ps(x); }
ATTNWORKS_INLINE __m256i narrow(Vec x, const fp16*) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ATTNWORKS_INLINE __m256i narrow(Vec x, const bf16*) {
#ifdef ATTNWORKS_AVX512_BF16
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)), 16));
#endif
}

template <typename T>
ATTNWORKS_INLINE Vec load_as_float(const T* p) {
  return widen(_mm256_loadu_si256((const __m256i*)p), p);
}
ATTNWORKS_INLINE Vec load_as_float(const float* p) {
  return load(p);
}
template <typename T>
ATTNWORKS_INLINE Vec load_as_float_n(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), p);
}
ATTNWORKS_INLINE Vec load_as_float_n(const float* p, int n) {
  return load_n(p, n);
}
template <typename T>
ATTNWORKS_INLINE void store_from_float(T* p, Vec x) {
  _mm256_storeu_si256((__m256i*)p, narrow(x, p));
}
ATTNWORKS_INLINE void store_from_float(float* p, Vec x) {
  store(p, x);
}
template <typename T>
ATTNWORKS_INLINE void store_from_float_n(T* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x, p));
}
ATTNWORKS_INLINE void store_from_float_n(float* p, Vec x, int n) {
  store_n(p, x, n);
}

ATTNWORKS_INLINE void split_even_odd(__m512i x, Vec& a, Vec& b) {
  a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}
ATTNWORKS_INLINE void load_even_odd(const bf16* p, Vec& a, Vec& b) { split_even_odd(_mm512_loadu_si512(p), a, b); }
ATTNWORKS_INLINE void load_even_odd_n(const bf16* p, int n, Vec& a, Vec& b) {
  split_even_odd(_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p), a, b);
}
ATTNWORKS_INLINE void interleave(Vec& a, Vec& b) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Vec x = a;
  a = _mm512_permutex2var_ps(x, first, b);
  b = _mm512_permutex2var_ps(x, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
}

ATTNWORKS_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// For what lies in memory and is needed some microseconds from now. Into L2: on its way to L1 a line would hold one of the few buffers that
// loads from L2 need too (Xeon: decode 5 to 18 % slower).
ATTNWORKS_INLINE void prefetch_early(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#ifdef ATTNWORKS_AVX512_BF16
ATTNWORKS_INLINE Vec dot_bf16(Vec acc, Vec pairs_a, Vec pairs_b) { return _mm512_dpbf16_ps(acc, (__m512bh)pairs_a, (__m512bh)pairs_b); }
ATTNWORKS_INLINE Vec pack_bf16(Vec first, Vec second) { return (Vec)_mm512_cvtne2ps_pbh(second, first); }
ATTNWORKS_INLINE void interleave_bf16(Vec row0, Vec row1, Vec& lo, Vec& hi) {
  alignas(64) static const uint16_t order[2][32] = {
      {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i a = _mm512_castps_si512(row0), b = _mm512_castps_si512(row1);
  lo = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, _mm512_load_si512(order[0]), b));
  hi = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, _mm512_load_si512(order[1]), b));
}
ATTNWORKS_INLINE Vec load_pairs(const bf16* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
ATTNWORKS_INLINE Vec load_pairs_n(const bf16* p, int n) {
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p));
}
#else
Vec dot_bf16(Vec acc, Vec pairs_a, Vec pairs_b);  // see generic.h: declared only
Vec pack_bf16(Vec first, Vec second);
void interleave_bf16(Vec row0, Vec row1, Vec& lo, Vec& hi);
Vec load_pairs(const bf16* p);
Vec load_pairs_n(const bf16* p, int n);
#endif

}  // namespace attnworks::ATTNWORKS_ISA
