// Vectors for any target, by the compiler's vector extensions. Also the description of what every simd/*.h provides:
// all of them define the same names in namespace attnworks::ATTNWORKS_ISA.
//
// Vec holds W floats, or W 32-bit units that are only moved (pairs of bf16). Functions ending in _n touch the first n <= W elements of
// memory only; the other lanes of a load are 0.
#pragma once
#include <stdint.h>
#include <string.h>

#include "../attention.h"

#define ATTNWORKS_INLINE static inline __attribute__((always_inline))
#ifndef ATTNWORKS_GENERIC_WIDTH
#define ATTNWORKS_GENERIC_WIDTH 4
#endif

namespace attnworks::ATTNWORKS_ISA {

constexpr int W = ATTNWORKS_GENERIC_WIDTH;
constexpr int MR = 4, NV = 2;  // the microkernel keeps MR rows x NV vectors of accumulators in registers
#ifdef ATTNWORKS_GENERIC_BF16_DOT
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif
constexpr bool FLOORS = false;

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t IntVec __attribute__((vector_size(4 * W)));

ATTNWORKS_INLINE Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
ATTNWORKS_INLINE Vec load_n(const float* p, int n) {
  Vec x = {};
  memcpy(&x, p, 4 * n);
  return x;
}
ATTNWORKS_INLINE void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }
ATTNWORKS_INLINE void store_n(float* p, Vec x, int n) { memcpy(p, &x, 4 * n); }

// x, read from memory once. Compilers like to make a load part of every instruction that uses it, and loads bound a product.
ATTNWORKS_INLINE Vec in_register(Vec x) { return x; }
ATTNWORKS_INLINE Vec zero() { return Vec{}; }
ATTNWORKS_INLINE Vec set1(float x) { return Vec{} + x; }
ATTNWORKS_INLINE Vec add(Vec a, Vec b) { return a + b; }
ATTNWORKS_INLINE Vec sub(Vec a, Vec b) { return a - b; }
ATTNWORKS_INLINE Vec mul(Vec a, Vec b) { return a * b; }
ATTNWORKS_INLINE Vec div(Vec a, Vec b) { return a / b; }
ATTNWORKS_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // may round twice here
ATTNWORKS_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }     // NaN if b is NaN; a NaN in a may be lost
ATTNWORKS_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }     // as max
// Lane i is a's where bit i of `bits` is set, else b's.
ATTNWORKS_INLINE Vec choose(uint32_t bits, Vec a, Vec b) {
  for (int i = 0; i < W; i++) a[i] = bits >> i & 1 ? a[i] : b[i];
  return a;
}

// x = whole + fraction with |fraction| <= 1/2; `whole` comes back in the form that scale_by_pow2 wants. -127 <= x <= 127 or NaN.
// Where it FLOORS, 0 <= fraction <= 1, for any x.
ATTNWORKS_INLINE Vec split_whole(Vec x, Vec& fraction) {
  const Vec magic = set1(12582912.f + 127.f);  // 1.5 * 2^23: adding it rounds to integer; + 127: the exponent's bias
  Vec whole = x + magic;
  fraction = x - (whole - magic);
  return whole;
}
// x * 2^whole; exactly 0 for whole = -127, and below where it FLOORS. NaN stays NaN.
ATTNWORKS_INLINE Vec scale_by_pow2(Vec x, Vec whole) { return x * (Vec)((IntVec)whole << 23); }

ATTNWORKS_INLINE float reduce_add(Vec x) {
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
ATTNWORKS_INLINE float reduce_max(Vec x) {  // ignores or returns NaN
  float most = x[0];
  for (int i = 1; i < W; i++) most = most > x[i] ? most : x[i];
  return most;
}
// Lane i of the result is the sum of x[i]'s lanes.
ATTNWORKS_INLINE Vec reduce_add_all(const Vec (&x)[W]) {
  Vec sums = {};
  for (int i = 0; i < W; i++) sums[i] = reduce_add(x[i]);
  return sums;
}
// W x W transpose of 32-bit units.
ATTNWORKS_INLINE void transpose(Vec (&x)[W]) {
  float rows[W][W], columns[W][W];
  memcpy(rows, x, sizeof rows);
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) columns[j][i] = rows[i][j];
  memcpy(x, columns, sizeof columns);
}

ATTNWORKS_INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
ATTNWORKS_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// Scalar conversions, round to nearest even, NaN stays NaN.
ATTNWORKS_INLINE float to_float(float x) { return x; }
ATTNWORKS_INLINE float to_float(bf16 x) { return bits_to_float((uint32_t)x.bits << 16); }
ATTNWORKS_INLINE float to_float(fp16 x) {
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = (uint32_t)(x.bits & 0x7fff) << 13;
  if (rest >= 0x7c00u << 13) return bits_to_float(sign | 0x70000000 | rest);                 // Inf, NaN: exponent 31 -> 255
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));  // rebias; right for subnormals, too
}
ATTNWORKS_INLINE void from_float(float x, float* out) { *out = x; }
ATTNWORKS_INLINE void from_float(float x, bf16* out) {
  const uint32_t bits = float_to_bits(x);
  out->bits = x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
ATTNWORKS_INLINE void from_float(float x, fp16* out) {
  const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000)
    out->bits = sign | 0x7e00;
  else if (magnitude >= 0x477ff000)  // 65520 and more round to infinity
    out->bits = sign | 0x7c00;
  else if (magnitude < 0x38800000)  // subnormal: the addition rounds at 2^-24
    out->bits = sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000);
  else
    out->bits = sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

template <typename T>
ATTNWORKS_INLINE Vec load_as_float_n(const T* p, int n) {
  Vec x = {};
  for (int i = 0; i < n; i++) x[i] = to_float(p[i]);
  return x;
}
template <typename T>
ATTNWORKS_INLINE Vec load_as_float(const T* p) {
  return load_as_float_n(p, W);
}
template <typename T>
ATTNWORKS_INLINE void store_from_float_n(T* p, Vec x, int n) {
  for (int i = 0; i < n; i++) from_float(x[i], p + i);
}
template <typename T>
ATTNWORKS_INLINE void store_from_float(T* p, Vec x) {
  store_from_float_n(p, x, W);
}

// For 16-bit floats it is cheaper to take neighbours apart than to widen them in order: a = elements 0, 2, 4, …, b = 1, 3, 5, … of 2W.
ATTNWORKS_INLINE void load_even_odd(const bf16* p, Vec& a, Vec& b) {
  for (int i = 0; i < W; i++) {
    a[i] = to_float(p[2 * i]);
    b[i] = to_float(p[2 * i + 1]);
  }
}
ATTNWORKS_INLINE void load_even_odd_n(const bf16* p, int n, Vec& a, Vec& b) {  // n <= 2W elements, the rest 0
  bf16 whole[2 * W] = {};
  memcpy(whole, p, n * sizeof(bf16));
  load_even_odd(whole, a, b);
}
ATTNWORKS_INLINE void interleave(Vec& a, Vec& b) {  // (even, odd) -> (first W, last W)
  Vec first = {}, last = {};
  for (int i = 0; i < W / 2; i++) {
    first[2 * i] = a[i];
    first[2 * i + 1] = b[i];
    last[2 * i] = a[W / 2 + i];
    last[2 * i + 1] = b[W / 2 + i];
  }
  a = first;
  b = last;
}

ATTNWORKS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }  // into L1
ATTNWORKS_INLINE void prefetch_early(const void* p) { prefetch(p); }            // of what is needed some microseconds from now

// Pairs of bf16: used only where HAS_BF16_DOT, other targets just declare them so that `if constexpr` branches parse. Here they are a
// model of the instructions, for tests on machines that lack them.
ATTNWORKS_INLINE Vec dot_bf16(Vec acc, Vec pairs_a, Vec pairs_b) {  // acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]
  const IntVec a = (IntVec)pairs_a, b = (IntVec)pairs_b, high = IntVec{} + (int32_t)0xffff0000;
  return acc + (Vec)(a << 16) * (Vec)(b << 16) + (Vec)(a & high) * (Vec)(b & high);
}
ATTNWORKS_INLINE Vec load_pairs_n(const bf16* p, int n) {  // n <= 2W bf16, the rest 0
  Vec x = {};
  memcpy(&x, p, n * sizeof(bf16));
  return x;
}
ATTNWORKS_INLINE Vec load_pairs(const bf16* p) { return load_pairs_n(p, 2 * W); }  // 2W bf16
ATTNWORKS_INLINE Vec pack_bf16(Vec first, Vec second) {                            // 2W floats in order -> 2W bf16, that is W pairs
  bf16 packed[2 * W];
  for (int i = 0; i < W; i++) {
    from_float(first[i], packed + i);
    from_float(second[i], packed + W + i);
  }
  return load_pairs(packed);
}
// Rows of 2W bf16 -> pairs (row0[i], row1[i]), first W in lo.
ATTNWORKS_INLINE void interleave_bf16(Vec row0, Vec row1, Vec& lo, Vec& hi) {
  bf16 rows[2][2 * W], pairs[4 * W];
  memcpy(rows[0], &row0, sizeof row0);
  memcpy(rows[1], &row1, sizeof row1);
  for (int i = 0; i < 4 * W; i++) pairs[i] = rows[i % 2][i / 2];
  lo = load_pairs(pairs);
  hi = load_pairs(pairs + 2 * W);
}

}  // namespace attnworks::ATTNWORKS_ISA
