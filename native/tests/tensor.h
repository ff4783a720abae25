// What the torch-free tests of forward and backward share: tensors of any layout with NaN around them.
#pragma once
#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "../schedule.h"
#include "numbers.h"

namespace attnworks::test {

inline std::mt19937 generator(2026);

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
  void scale_row(int64_t b, int64_t h, int64_t r, float factor) {
    for (int64_t c = 0; c < columns; c++) put(b, h, r, c, (float)value(b, h, r, c) * factor);
  }
  void randomise(float size = 1) {
    std::normal_distribution<float> normal(0, size);
    for (int64_t b = 0; b < batch; b++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++)
          for (int64_t c = 0; c < columns; c++) put(b, h, r, c, normal(generator));
  }
  std::string bytes() const { return std::string(memory.get(), extent * size_of(dtype)); }
  // Rows [first, first + count) of one head.
  Matrix matrix(int64_t b, int64_t h, int64_t first, int64_t count) const {
    return Matrix(dtype, count, columns, [&](int64_t r) { return at(b, h, first + r, 0); });
  }
};

struct Shape {
  int64_t batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v;
};

const Bounds ALL = {UNLIMITED, UNLIMITED, false}, CAUSAL = {UNLIMITED, 0, false};

// Where packed sequences end: empty ones, and ones without keys or without queries.
const std::vector<int64_t> ENDS_Q = {0, 0, 5, 40, 40, 77}, ENDS_KV = {0, 9, 9, 60, 70, 300};
// run(dtype, bounds, layout) for packed sequences: each layout with each dtype and with each of the bounds.
template <typename Run>
void each_packed(Run run) {
  int layout = 0;
  for (DType dtype : DTYPES) {
    for (const Bounds& bounds : {ALL, CAUSAL, Bounds{7, 2, true}}) run(dtype, bounds, layout++ % 3);
    layout++;
  }
}

// The tensors of a forward call, its inputs random.
struct ForwardCase {
  Shape shape;
  DType dtype;
  Bounds bounds;
  float scale;
  int64_t tile_q, tile_kv;
  Tensor q, k, v, out, lse;
  std::string label;

  ForwardCase(const std::string& isa, const Shape& s, DType dtype, Bounds bounds, int64_t tile_q, int64_t tile_kv, int layout, float scale)
      : shape(s), dtype(dtype), bounds(bounds), scale(scale != 0 ? scale : 1 / sqrtf((float)s.head_dim)), tile_q(tile_q), tile_kv(tile_kv),
        q(dtype, s.batch, s.heads_q, s.seq_q, s.head_dim, layout), k(dtype, s.batch, s.heads_kv, s.seq_kv, s.head_dim, layout),
        v(dtype, s.batch, s.heads_kv, s.seq_kv, s.head_dim_v, layout), out(dtype, s.batch, s.heads_q, s.seq_q, s.head_dim_v, layout),
        lse(lse_like(layout)) {
    for (Tensor* x : {&q, &k, &v}) x->randomise();
    label = isa + " " + name(dtype);
    for (int64_t x : {s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_kv, s.head_dim, s.head_dim_v}) label += " " + std::to_string(x);
    label += " left " + std::to_string(bounds.left) + " right " + std::to_string(bounds.right) + (bounds.top_left ? " top-left" : "") +
             " tiles " + std::to_string(tile_q) + "x" + std::to_string(tile_kv) + " layout " + std::to_string(layout);
  }
  Tensor lse_like(int layout) const { return Tensor(DType::float32, shape.batch, shape.heads_q, shape.seq_q, 1, layout == 3 ? 0 : layout); }
  ForwardProblem problem() const {
    return {dtype, shape.batch, shape.heads_q, shape.heads_kv, shape.seq_q, shape.seq_kv, shape.head_dim, shape.head_dim_v, q.strides,
            k.strides, v.strides, out.strides, lse.strides, scale, bounds, tile_q, tile_kv};
  }
  // Keys from `first` on hold NaN.
  void poison_keys(int64_t first) {
    for (int64_t h = 0; h < shape.heads_kv; h++)
      for (int64_t r = first; r < shape.seq_kv; r++) {
        k.fill_row(0, h, r, NAN);
        v.fill_row(0, h, r, NAN);
      }
  }
};

}  // namespace attnworks::test
