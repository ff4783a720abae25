// 2^x on a vector, for the probabilities.
#pragma once

namespace attnworks::ATTNWORKS_ISA {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// 2^x for x <= 0 (a little above 0 is fine). Relative error at DEGREE 5: 9.1e-8 and the rounding of fp32, together below 1.6e-7, and exactly
// 1 for x = 0; at DEGREE 4: 2.9e-6, for probs that are rounded to bf16 (unit roundoff 3.9e-3), so that their sum and the LSE keep nearly
// fp32's precision. Exactly 0 for x <= -127, so also for -inf. NaN stays NaN: max() keeps a NaN in its second operand. The polynomials are minimax on [-1/2, 1/2].
template <int DEGREE>
ATTNWORKS_INLINE Vec exp2(Vec x) {
  Vec fraction;
  const Vec whole = split_whole(max(set1(-127.f), x), fraction);
  Vec p;
  if constexpr (DEGREE == 5) {
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
  return scale_by_pow2(p, whole);
}
ATTNWORKS_INLINE float exp2_scalar(float x) {
  float y[W];
  store(y, exp2<5>(set1(x)));
  return y[0];
}

}  // namespace attnworks::ATTNWORKS_ISA
