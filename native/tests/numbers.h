// What the torch-free tests share: reading and writing elements of any dtype, and which kernels to test.
#pragma once
#include <math.h>
#include <string.h>

#include <string>
#include <vector>

#include "../dispatch.h"

namespace attnworks::generic16 {
extern const Kernels kernels;
}

namespace attnworks::test {

constexpr int64_t UNLIMITED = int64_t(1) << 40;
constexpr DType DTYPES[] = {DType::float32, DType::bfloat16, DType::float16};

inline const char* name(DType dtype) { return dtype == DType::float32 ? "float32" : dtype == DType::bfloat16 ? "bfloat16" : "float16"; }
inline int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }
inline double roundoff(DType dtype) { return dtype == DType::float32 ? 0x1p-24 : dtype == DType::bfloat16 ? 0x1p-8 : 0x1p-11; }

inline double get(DType dtype, const char* p) {
  if (dtype == DType::float32) {
    float x;
    memcpy(&x, p, 4);
    return x;
  }
  uint16_t bits;
  memcpy(&bits, p, 2);
  const int mantissa_bits = dtype == DType::bfloat16 ? 7 : 10, exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
  double x = exponent ? ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits) : ldexp(mantissa, 1 - bias - mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) x = mantissa ? NAN : INFINITY;
  return bits >> 15 ? -x : x;
}

// Cuts off what the dtype cannot hold; magnitudes below its normal range become 0.
inline void set(DType dtype, char* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (dtype == DType::float32) {
    memcpy(p, &bits, 4);
    return;
  }
  uint16_t half = bits >> 16;
  if (dtype == DType::float16) {
    const int exponent = int(bits >> 23 & 255) - 112;
    const int magnitude = std::isnan(x) ? 0x7e00 : exponent >= 31 ? 0x7c00 : exponent <= 0 ? 0 : exponent << 10 | (bits >> 13 & 0x3ff);
    half = (bits >> 16 & 0x8000) | magnitude;
  }
  memcpy(p, &half, 2);
}

// Every instruction set that this machine runs, and the portable kernels once more with 16 lanes.
inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all;
  for (const std::string& isa : supported_isas()) all.push_back(&kernels_for(isa));
  all.push_back(&generic16::kernels);
  return all;
}

}  // namespace attnworks::test
