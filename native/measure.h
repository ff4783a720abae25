// The ceilings that a kernel is held against: multiply-adds per second and bytes read per second.
#pragma once

namespace attnworks::ATTNWORKS_ISA {

// Independent multiply-adds in as many registers as the microkernel uses; 16-bit types without dot products count as fp32.
template <bool PAIRS>
static double flops_loop(int64_t iterations) {
  Vec acc[MR * NV];
  const Vec a = set1(1.f), b = set1(0.5f);
  for (int i = 0; i < MR * NV; i++) acc[i] = set1(i);
  for (int64_t k = 0; k < iterations; k++)
#pragma GCC unroll 32
    for (int i = 0; i < MR * NV; i++) acc[i] = PAIRS ? dot_bf16(acc[i], a, b) : fma(acc[i], b, a);  // a b would be known beforehand
  volatile float used = 0;
  for (int i = 0; i < MR * NV; i++) used = used + reduce_add(acc[i]);
  return (double)iterations * MR * NV * W * (PAIRS ? 4 : 2);
}
static double flops(DType dtype, int64_t iterations) {
#ifdef ATTNWORKS_AMX
  switch (dtype) {  // over the products of pieces that one product is: the mean of those for scores and for values
    case DType::float32: return tile_flops(iterations) / 6;
    case DType::bfloat16: return tile_flops(iterations);
    case DType::float16: return tile_flops(iterations) / 3.5;
  }
#endif
  if constexpr (HAS_BF16_DOT)
    if (dtype == DType::bfloat16) return flops_loop<true>(iterations);
  return flops_loop<false>(iterations);
}

static float read(const void* memory, int64_t bytes) {
  constexpr int LINES = 8;
  const float* p = (const float*)memory;
  const int64_t floats = bytes / 4;
  Vec sum[LINES];
  for (int i = 0; i < LINES; i++) sum[i] = zero();
  int64_t at = 0;
  for (; at + LINES * W <= floats; at += LINES * W)
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) {
      __builtin_prefetch(p + at + i * W + 1024);  // past the end it is no access
      sum[i] = add(sum[i], load(p + at + i * W));
    }
  for (int i = 1; i < LINES; i++) sum[0] = add(sum[0], sum[i]);
  float rest = 0;
  for (; at < floats; at++) rest += p[at];
  return reduce_add(sum[0]) + rest;
}

}  // namespace attnworks::ATTNWORKS_ISA
