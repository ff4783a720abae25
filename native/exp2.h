// 2^x on a vector, for the probabilities.
#pragma once

namespace attnworks::ATTNWORKS_ISA {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// What scale_by_pow2 makes 2^x of, together with `whole`. The polynomials are minimax among those with 1 at 0, on [-1/2, 1/2], or on [0, 1]
// where it FLOORS.
template <int DEGREE>
ATTNWORKS_INLINE Vec exp2_mantissa(Vec x, Vec& whole) {
  Vec fraction, p;
  whole = split_whole(FLOORS ? x : max(set1(-127.f), x), fraction);
  if constexpr (DEGREE == 5 && FLOORS) {
    p = fma(set1(0.0018669526f), fraction, set1(0.009017481f));
    p = fma(p, fraction, set1(0.055799514f));
    p = fma(p, fraction, set1(0.2401646f));
    p = fma(p, fraction, set1(0.6931513f));
    p = fma(p, fraction, set1(1.f));
  } else if constexpr (FLOORS) {
    static_assert(DEGREE == 4);
    p = fma(set1(0.013426696f), fraction, set1(0.052242443f));
    p = fma(p, fraction, set1(0.24128023f));
    p = fma(p, fraction, set1(0.69304484f));
    p = fma(p, fraction, set1(1.f));
  } else if constexpr (DEGREE == 5) {
    p = fma(set1(0.0013269521f), fraction, set1(0.009671291f));
    p = fma(p, fraction, set1(0.05550711f));
    p = fma(p, fraction, set1(0.24022247f));
    p = fma(p, fraction, set1(0.693147f));
    p = fma(p, fraction, set1(1.f));
  } else {
    static_assert(DEGREE == 4);
    p = fma(set1(0.009582853f), fraction, set1(0.055906426f));
    p = fma(p, fraction, set1(0.24024099f));
    p = fma(p, fraction, set1(0.6931242f));
    p = fma(p, fraction, set1(1.f));
  }
  return p;
}

// 2^x for x <= 0 (a little above 0 is fine; any x where it FLOORS). Relative error at DEGREE 5: 9.1e-8 and the rounding of fp32, together
// below 1.6e-7, and exactly 1 for x = 0; at DEGREE 4: 3e-6, for probs that are rounded to bf16 (unit roundoff 3.9e-3), so that their sum and
// the LSE keep nearly fp32's precision. Exactly 0 for x <= -127, so also for -inf. NaN stays NaN: max() keeps a NaN in its second operand.
template <int DEGREE>
ATTNWORKS_INLINE Vec exp2(Vec x) {
  Vec whole;
  const Vec p = exp2_mantissa<DEGREE>(x, whole);
  return scale_by_pow2(p, whole);
}
ATTNWORKS_INLINE float exp2_scalar(float x) {
  float y[W];
  store(y, exp2<5>(set1(x)));
  return y[0];
}

}  // namespace attnworks::ATTNWORKS_ISA
