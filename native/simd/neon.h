// AArch64 Advanced SIMD: 4 floats, 32 registers. What each function does is said in generic.h.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "../attention.h"

#define ATTNWORKS_INLINE static inline __attribute__((always_inline))

namespace attnworks::ATTNWORKS_ISA {

constexpr int W = 4;
constexpr int MR = 6, NV = 4;
constexpr bool HAS_BF16_DOT = false;
constexpr bool FLOORS = false;

typedef float32x4_t Vec;

ATTNWORKS_INLINE Vec load(const float* p) { return vld1q_f32(p); }
ATTNWORKS_INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
ATTNWORKS_INLINE Vec load_n(const float* p, int n) {
  float whole[W] = {};
  memcpy(whole, p, 4 * n);
  return load(whole);
}
ATTNWORKS_INLINE void store_n(float* p, Vec x, int n) {
  float whole[W];
  store(whole, x);
  memcpy(p, whole, 4 * n);
}

ATTNWORKS_INLINE Vec in_register(Vec x) { return x; }  // no instruction of NEON takes an operand from memory
ATTNWORKS_INLINE Vec zero() { return vdupq_n_f32(0.f); }
ATTNWORKS_INLINE Vec set1(float x) { return vdupq_n_f32(x); }
ATTNWORKS_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
ATTNWORKS_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
ATTNWORKS_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
ATTNWORKS_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
ATTNWORKS_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
ATTNWORKS_INLINE Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
ATTNWORKS_INLINE Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
ATTNWORKS_INLINE Vec choose(uint32_t bits, Vec a, Vec b) {
  const uint32_t lanes[W] = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lanes)), a, b);
}

ATTNWORKS_INLINE Vec split_whole(Vec x, Vec& fraction) {
  const Vec magic = set1(12582912.f + 127.f);
  const Vec whole = add(x, magic);
  fraction = sub(x, sub(whole, magic));
  return whole;
}
ATTNWORKS_INLINE Vec scale_by_pow2(Vec x, Vec whole) {
  return mul(x, vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(whole), 23)));
}

ATTNWORKS_INLINE float reduce_add(Vec x) { return vaddvq_f32(x); }
ATTNWORKS_INLINE float reduce_max(Vec x) { return vmaxvq_f32(x); }
ATTNWORKS_INLINE Vec reduce_add_all(const Vec (&x)[W]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }
ATTNWORKS_INLINE void transpose(Vec (&x)[W]) {
  const float32x4x2_t a = vtrnq_f32(x[0], x[1]), b = vtrnq_f32(x[2], x[3]);
  x[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  x[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  x[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  x[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

ATTNWORKS_INLINE Vec widen(uint16x4_t x, const bf16*) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
ATTNWORKS_INLINE Vec widen(uint16x4_t x, const fp16*) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
ATTNWORKS_INLINE uint16x4_t narrow(Vec x, const fp16*) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
ATTNWORKS_INLINE uint16x4_t narrow(Vec x, const bf16*) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

template <typename T>
ATTNWORKS_INLINE Vec load_as_float(const T* p) {
  return widen(vld1_u16((const uint16_t*)p), p);
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
template <typename T>
ATTNWORKS_INLINE void store_from_float(T* p, Vec x) {
  vst1_u16((uint16_t*)p, narrow(x, p));
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

ATTNWORKS_INLINE void load_even_odd(const bf16* p, Vec& a, Vec& b) {
  const uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16((const uint16_t*)p));
  a = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
  b = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000)));
}
ATTNWORKS_INLINE void load_even_odd_n(const bf16* p, int n, Vec& a, Vec& b) {
  bf16 whole[2 * W] = {};
  memcpy(whole, p, n * sizeof(bf16));
  load_even_odd(whole, a, b);
}
ATTNWORKS_INLINE void interleave(Vec& a, Vec& b) {
  const float32x4x2_t x = vzipq_f32(a, b);
  a = x.val[0];
  b = x.val[1];
}

ATTNWORKS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
ATTNWORKS_INLINE void prefetch_early(const void* p) { prefetch(p); }

Vec dot_bf16(Vec acc, Vec pairs_a, Vec pairs_b);  // see generic.h: declared only
Vec pack_bf16(Vec first, Vec second);
void interleave_bf16(Vec row0, Vec row1, Vec& lo, Vec& hi);
Vec load_pairs(const bf16* p);
Vec load_pairs_n(const bf16* p, int n);

}  // namespace attnworks::ATTNWORKS_ISA
