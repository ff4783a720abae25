// What the torch-free tests of forward and backward share: counting failures, and tensors of any layout with NaN around them.
#pragma once
#include <stdio.h>

#include <algorithm>
#include <memory>
#include <random>

#include "numbers.h"

namespace attnworks::test {

inline int checks = 0, failures = 0;
inline std::mt19937 generator(2026);

inline void expect(bool right, const std::string& what) {
  checks++;
  if (right) return;
  if (++failures <= 20) printf("FAILED: %s\n", what.c_str());
}

// One (batch, head, row, column) tensor in memory of exactly its extent; elements outside it are NaN.
struct Tensor {
  DType dtype;
  int64_t batch, heads, rows, columns;
  Strides strides;
  int64_t base = 0, extent = 0;  // of element 0, and of the buffer, in elements
  std::unique_ptr<char[]> memory;

  // layout 0: bhsd; 1: bshd; 2: bhsd with gaps of odd size; 3: rows backwards in memory
  Tensor(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int layout)
      : dtype(dtype), batch(batch), heads(heads), rows(rows), columns(columns) {
    const int64_t row = layout == 1 ? heads * columns : layout == 2 ? columns + 3 : columns;
    strides = layout == 1 ? Strides{rows * row, columns, row} : Strides{heads * (rows * row + 5 * (layout == 2)), rows * row + 5 * (layout == 2), row};
    if (layout == 3) {
      strides.row = -row;
      base = std::max<int64_t>(rows - 1, 0) * row;
    }
    if (batch && heads && rows) extent = (batch - 1) * strides.batch + (heads - 1) * strides.head + (rows - 1) * row + columns;
    memory.reset(new char[extent * size_of(dtype)]);
    for (int64_t i = 0; i < extent; i++) set(dtype, memory.get() + i * size_of(dtype), NAN);
  }
  char* at(int64_t b, int64_t h, int64_t r, int64_t c) const {
    return memory.get() + (base + b * strides.batch + h * strides.head + r * strides.row + c) * size_of(dtype);
  }
  char* data() const { return at(0, 0, 0, 0); }
  double value(int64_t b, int64_t h, int64_t r, int64_t c) const { return get(dtype, at(b, h, r, c)); }
  void put(int64_t b, int64_t h, int64_t r, int64_t c, float x) { set(dtype, at(b, h, r, c), x); }
  void fill_row(int64_t b, int64_t h, int64_t r, float x) {
    for (int64_t c = 0; c < columns; c++) put(b, h, r, c, x);
  }
  void randomise(float size = 1) {
    std::normal_distribution<float> normal(0, size);
    for (int64_t b = 0; b < batch; b++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++)
          for (int64_t c = 0; c < columns; c++) put(b, h, r, c, normal(generator));
  }
  std::string bytes() const { return std::string(memory.get(), extent * size_of(dtype)); }
};

struct Shape {
  int64_t batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v;
};

const Bounds ALL = {UNLIMITED, UNLIMITED, false}, CAUSAL = {UNLIMITED, 0, false};

}  // namespace attnworks::test
