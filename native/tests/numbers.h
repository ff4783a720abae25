// What the torch-free tests share: counting failures, elements of any dtype, sums in double precision, and which kernels to test.
#pragma once
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <vector>

#include "../dispatch.h"

#ifdef ATTNWORKS_WITH_generic16
namespace attnworks::generic16 {
extern const Kernels kernels;
}
#endif

namespace attnworks::test {

inline int checks = 0, failures = 0;

inline void expect(bool right, const std::string& what) {
  checks++;
  if (right) return;
  if (++failures <= 20) printf("FAILED: %s\n", what.c_str());
}
// The same with words that are made only for a failure: for the checks of single elements, which they would cost more than all else.
template <typename What>
auto expect(bool right, const What& what) -> decltype(what(), void()) {
  if (right)
    checks++;
  else
    expect(false, what());
}

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

// Rows of elements in double precision: read once, as the loops of a reference need each of them many times.
struct Matrix {
  int64_t columns;
  std::vector<double> values;
  // begin(r): where row r begins
  template <typename Begin>
  Matrix(DType dtype, int64_t rows, int64_t columns, Begin begin) : columns(columns) {
    values.reserve(rows * columns);
    for (int64_t r = 0; r < rows; r++) {
      const char* p = begin(r);
      for (int64_t c = 0; c < columns; c++) values.push_back(get(dtype, p + c * size_of(dtype)));
    }
  }
  const double* row(int64_t r) const { return values.data() + r * columns; }
};

// A product of two rows, and what it is of their magnitudes.
struct Product {
  double value = 0, size = 0;
  Product(const double* x, const double* y, int64_t count, double factor) {
    for (int64_t c = 0; c < count; c++) {
      const double term = x[c] * y[c];
      value += term;
      size += fabs(term);
    }
    value *= factor;
    size *= fabs(factor);
  }
};

// A sum of weighted rows, and the bound on its error if the weights have the errors given.
struct WeightedSum {
  std::vector<double> value, bound;
  WeightedSum(int64_t columns, double least_bound) : value(columns), bound(columns, least_bound) {}
  void add(double weight, double error, const double* row) {
    for (size_t c = 0; c < value.size(); c++) {
      value[c] += weight * row[c];
      bound[c] += error * fabs(row[c]);
    }
  }
};

// Every instruction set that this machine runs, and the portable kernels once more with 16 lanes.
inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all;
  for (const std::string& isa : supported_isas()) all.push_back(&kernels_for(isa));
#ifdef ATTNWORKS_WITH_generic16
  all.push_back(&generic16::kernels);
#endif
  return all;
}

}  // namespace attnworks::test
