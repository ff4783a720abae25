// AVX2 + FMA + F16C: 8 floats, 16 registers. What each function does is said in generic.h.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "../attention.h"

#define ATTNWORKS_INLINE static inline __attribute__((always_inline))

namespace attnworks::ATTNWORKS_ISA {

constexpr int W = 8;
constexpr int MR = 6, NV = 2;
constexpr bool HAS_BF16_DOT = false;
constexpr bool FLOORS = false;

typedef __m256 Vec;

alignas(64) static const int32_t lane_mask[2 * W] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
ATTNWORKS_INLINE __m256i first_lanes(int n) { return _mm256_loadu_si256((const __m256i*)(lane_mask + W - n)); }

ATTNWORKS_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
ATTNWORKS_INLINE Vec load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
ATTNWORKS_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
ATTNWORKS_INLINE void store_n(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }

ATTNWORKS_INLINE Vec in_register(Vec x) {
  asm("" : "+x"(x));
  return x;
}
ATTNWORKS_INLINE Vec zero() { return _mm256_setzero_ps(); }
ATTNWORKS_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
ATTNWORKS_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
ATTNWORKS_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
ATTNWORKS_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
ATTNWORKS_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
ATTNWORKS_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
ATTNWORKS_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
ATTNWORKS_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
ATTNWORKS_INLINE Vec choose(uint32_t bits, Vec a, Vec b) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set));
}

ATTNWORKS_INLINE Vec split_whole(Vec x, Vec& fraction) {
  const Vec magic = set1(12582912.f + 127.f);
  const Vec whole = add(x, magic);
  fraction = sub(x, sub(whole, magic));
  return whole;
}
ATTNWORKS_INLINE Vec scale_by_pow2(Vec x, Vec whole) {
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(whole), 23)));
}

ATTNWORKS_INLINE float reduce_add(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
ATTNWORKS_INLINE float reduce_max(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
ATTNWORKS_INLINE Vec reduce_add_all(const Vec (&x)[W]) {
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
ATTNWORKS_INLINE void transpose(Vec (&x)[W]) {
  Vec t[W], u[W];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < W; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

ATTNWORKS_INLINE Vec widen(__m128i x, const bf16*) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
ATTNWORKS_INLINE Vec widen(__m128i x, const fp16*) { return _mm256_cvtph_ps(x); }
ATTNWORKS_INLINE __m128i narrow(Vec x, const fp16*) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ATTNWORKS_INLINE __m128i narrow(Vec x, const bf16*) {
  const __m256i bits = _mm256_castps_si256(x), nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

template <typename T>
ATTNWORKS_INLINE Vec load_as_float(const T* p) {
  return widen(_mm_loadu_si128((const __m128i*)p), p);
}
ATTNWORKS_INLINE Vec load_as_float(const float* p) {
  return load(p);
}
template <typename T>
ATTNWORKS_INLINE Vec load_as_float_n(const T* p, int n) {
  T whole[W] = {};
  memcpy(whole, p, n * sizeof(T));
  return load_as_float(whole);
}
ATTNWORKS_INLINE Vec load_as_float_n(const float* p, int n) {
  return load_n(p, n);
}
template <typename T>
ATTNWORKS_INLINE void store_from_float(T* p, Vec x) {
  _mm_storeu_si128((__m128i*)p, narrow(x, p));
}
ATTNWORKS_INLINE void store_from_float(float* p, Vec x) {
  store(p, x);
}
template <typename T>
ATTNWORKS_INLINE void store_from_float_n(T* p, Vec x, int n) {
  T whole[W];
  store_from_float(whole, x);
  memcpy(p, whole, n * sizeof(T));
}
ATTNWORKS_INLINE void store_from_float_n(float* p, Vec x, int n) {
  store_n(p, x, n);
}

ATTNWORKS_INLINE void load_even_odd(const bf16* p, Vec& a, Vec& b) {
  const __m256i x = _mm256_castps_si256(in_register(load((const float*)p)));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
ATTNWORKS_INLINE void load_even_odd_n(const bf16* p, int n, Vec& a, Vec& b) {
  bf16 whole[2 * W] = {};
  memcpy(whole, p, n * sizeof(bf16));
  load_even_odd(whole, a, b);
}
ATTNWORKS_INLINE void interleave(Vec& a, Vec& b) {
  const Vec lo = _mm256_unpacklo_ps(a, b), hi = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(lo, hi, 0x20);
  b = _mm256_permute2f128_ps(lo, hi, 0x31);
}

ATTNWORKS_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
ATTNWORKS_INLINE void prefetch_early(const void* p) { prefetch(p); }  // into L2 only is no different (Zen 3)

Vec dot_bf16(Vec acc, Vec pairs_a, Vec pairs_b);  // see generic.h: declared only
Vec pack_bf16(Vec first, Vec second);
void interleave_bf16(Vec row0, Vec row1, Vec& lo, Vec& hi);
Vec load_pairs(const bf16* p);
Vec load_pairs_n(const bf16* p, int n);

}  // namespace attnworks::ATTNWORKS_ISA
