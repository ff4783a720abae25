// Prefill against a naive reference in double precision, on every instruction set that this machine runs. Every buffer ends where its last
// element ends (for the address sanitizer), and everything in it that is not part of the problem is NaN.
#include <stdio.h>
#include <stdlib.h>

#include <thread>

#include "../schedule.h"
#include "tensor.h"

using namespace attnworks;
using namespace attnworks::test;

namespace {

struct Case : ForwardCase {
  double least_bound = 1e-7;  // of a result, whatever the values
  Case(const std::string& isa, const Shape& shape, DType dtype, Bounds bounds = ALL, int64_t tile_q = 192, int64_t tile_kv = 256, int layout = 0,
       float scale = 0)
      : ForwardCase(isa, shape, dtype, bounds, tile_q, tile_kv, layout, scale) {}
  Operands operands() const { return {q.data(), k.data(), v.data(), out.data(), (float*)lse.data()}; }
  void run(const Kernels& kernels, int threads = 2) { run_forward(kernels, problem(), operands(), threads); }
  std::string result() const { return out.bytes() + lse.bytes(); }

  // Rows [q0, q0 + seq_q) against keys [kv0, kv0 + seq_kv) of one batch entry.
  void check(int64_t b, int64_t q0, int64_t seq_q, int64_t kv0, int64_t seq_kv) const {
    const int64_t group = shape.heads_q / std::max<int64_t>(shape.heads_kv, 1), shift = bounds.top_left ? 0 : seq_kv - seq_q;
    for (int64_t h_kv = 0; h_kv < shape.heads_kv; h_kv++) {
      const Matrix keys = k.matrix(b, h_kv, kv0, seq_kv), values = v.matrix(b, h_kv, kv0, seq_kv);
      for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++) {
        const Matrix queries = q.matrix(b, h, q0, seq_q);
        for (int64_t i = 0; i < seq_q; i++) check_row(b, h, q0 + i, i + shift, queries.row(i), keys, values, seq_kv);
      }
    }
  }
  void check() const {
    for (int64_t b = 0; b < shape.batch; b++) check(b, 0, shape.seq_q, 0, shape.seq_kv);
  }

  // The bound of a correct kernel: 8 (u + 2^-24 scale |q| |k|), carried through P |V|.
  void check_row(int64_t b, int64_t h, int64_t row, int64_t position, const double* query, const Matrix& keys, const Matrix& values,
                 int64_t seq_kv) const {
    const int64_t begin = std::max<int64_t>(0, position - bounds.left), end = std::min(seq_kv, position + bounds.right + 1);
    std::vector<Product> scores;
    double highest = -INFINITY, sum = 0, largest = 0;
    for (int64_t j = begin; j < end; j++) {
      scores.emplace_back(query, keys.row(j), shape.head_dim, scale);
      highest = std::max(highest, scores.back().value);
      largest = std::max(largest, scores.back().size);
    }
    std::vector<double> probs;  // times their sum
    for (const Product& score : scores) {
      probs.push_back(highest == -INFINITY ? 0 : exp(score.value - highest));
      sum += probs.back();
    }
    const double expected_lse = sum == 0 ? -INFINITY : highest + log(sum), got_lse = lse.value(b, h, row, 0);
    // A bf16 kernel may take exponentials with 7.5e-5 of relative error.
    const double lse_bound = 8 * 0x1p-24 * (1 + fabs(expected_lse) + largest) + (dtype == DType::bfloat16 ? 1e-4 : 0);
    expect(got_lse == expected_lse || fabs(got_lse - expected_lse) <= lse_bound, [&] {
      return label + ": lse of row " + std::to_string(row) + " was " + std::to_string(got_lse) + ", must be " + std::to_string(expected_lse);
    });
    WeightedSum expected(shape.head_dim_v, least_bound);
    for (size_t n = 0; n < probs.size(); n++) {
      if (probs[n] == 0) continue;
      const double prob = probs[n] / sum;
      expected.add(prob, 8 * prob * (roundoff(dtype) + 0x1p-24 * scores[n].size), values.row(begin + n));
    }
    for (int64_t c = 0; c < shape.head_dim_v; c++) {
      const double got = out.value(b, h, row, c);
      expect(fabs(got - expected.value[c]) <= expected.bound[c], [&] {
        return label + ": out of row " + std::to_string(row) + " column " + std::to_string(c) + " was " + std::to_string(got) + ", must be " +
               std::to_string(expected.value[c]);
      });
    }
  }
};

void shapes(const Kernels& kernels) {
  const Shape list[] = {{1, 1, 1, 1, 1, 1, 1},     {2, 4, 2, 37, 70, 64, 64},  {1, 6, 2, 13, 95, 33, 65}, {1, 2, 1, 70, 7, 24, 7},
                        {1, 1, 1, 20, 600, 80, 80}, {1, 1, 1, 9, 40, 576, 512}, {1, 3, 3, 31, 64, 128, 16}, {1, 1, 1, 5, 530, 256, 256}};
  const Bounds bounds[] = {ALL, CAUSAL, {UNLIMITED, 0, true}, {5, 3, false}, {40, 0, true}, {0, 0, false}, {0, UNLIMITED, false}};
  const int64_t tiles[][2] = {{192, 256}, {1, 1}, {50, 33}, {1 << 30, 1 << 30}};
  int layout = 0;
  for (DType dtype : DTYPES)
    for (const Shape& shape : list)
      for (const Bounds& b : bounds) {
        const int64_t* tile = tiles[layout % 4];
        Case x(kernels.isa, shape, dtype, b, tile[0], tile[1], layout % 3, layout % 5 == 4 ? -0.4f : 0);
        layout++;
        x.run(kernels);
        x.check();
      }
  Case backwards(kernels.isa, {1, 2, 2, 20, 40, 48, 32}, DType::float32, CAUSAL, 192, 256, 3);
  backwards.run(kernels);
  backwards.check();
}

void nothing_to_do(const Kernels& kernels) {
  for (const Shape& shape : {Shape{0, 2, 2, 5, 5, 8, 8}, Shape{2, 0, 1, 5, 5, 8, 8}, Shape{2, 2, 2, 0, 5, 8, 8}, Shape{1, 2, 1, 4, 0, 8, 8}}) {
    Case x(kernels.isa, shape, DType::float32);
    x.run(kernels);
    x.check();  // no keys: out 0, lse -inf
  }
}

// Same bits whatever tile_q, the number of threads and the rest of the batch.
void same_bits(const Kernels& kernels) {
  for (DType dtype : DTYPES) {
    Case x(kernels.isa, {2, 2, 2, 130, 150, 40, 48}, dtype, {100, 20, false}, 192, 64);
    x.run(kernels, 1);
    const std::string once = x.result();
    for (int threads : {1, 2, 5})
      for (int64_t tile_q : {1, 50, 64, 1000}) {
        x.tile_q = tile_q;
        x.run(kernels, threads);
        expect(x.result() == once, x.label + ": other bits with tile_q " + std::to_string(tile_q) + " on " + std::to_string(threads) + " threads");
      }
    Case alone(kernels.isa, {1, 1, 1, 130, 150, 40, 48}, dtype, {100, 20, false}, 192, 64);
    const int64_t es = size_of(dtype);
    memcpy(alone.q.data(), x.q.at(1, 1, 0, 0), 130 * 40 * es);
    memcpy(alone.k.data(), x.k.at(1, 1, 0, 0), 150 * 40 * es);
    memcpy(alone.v.data(), x.v.at(1, 1, 0, 0), 150 * 48 * es);
    alone.run(kernels, 1);
    expect(memcmp(alone.out.data(), x.out.at(1, 1, 0, 0), 130 * 48 * es) == 0, x.label + ": other bits alone than in a batch");
  }
}

// Keys that no row of a block sees are never read: poison them.
void skipped_tiles(const Kernels& kernels) {
  Case x(kernels.isa, {1, 1, 1, 20, 900, 16, 16}, DType::float32, {30, 0, false}, 192, 128);
  for (int64_t key = 0; key < 768; key++) {  // row 0 sees keys 850..880, row 19 sees 869..899; their tile begins at 768
    x.k.fill_row(0, 0, key, NAN);
    x.v.fill_row(0, 0, key, NAN);
  }
  x.run(kernels);
  x.check();
}

void varlen(const Kernels& kernels) {
  const std::vector<int64_t>&q = ENDS_Q, &kv = ENDS_KV;
  each_packed([&](DType dtype, const Bounds& bounds, int layout) {
    // rows past the last sequence hold NaN: they are not part of the problem
    Case x(kernels.isa, {1, 4, 2, 80, 310, 32, 24}, dtype, bounds, 16, 64, layout);
    x.poison_keys(kv.back());
    ForwardProblem p = x.problem();
    p.batch = (int64_t)q.size() - 1;
    p.q.batch = p.k.batch = p.v.batch = p.out.batch = p.lse.batch = 1 << 30;  // must be ignored
    run_forward_varlen(kernels, p, x.operands(), q.data(), kv.data(), 2);
    for (size_t b = 0; b + 1 < q.size(); b++) x.check(0, q[b], q[b + 1] - q[b], kv[b], kv[b + 1] - kv[b]);
    expect(std::isnan(x.out.value(0, 0, 77, 0)), x.label + ": a row past the last sequence was written");
  });
}

void extreme_scores(const Kernels& kernels) {
  for (DType dtype : DTYPES)
    for (float size : {100.f, 1e4f, 1e15f})
      for (float sign : {1.f, -1.f}) {
        if (dtype == DType::float16 && size > 1e4f) continue;
        // one key: its value and its score
        Case one(kernels.isa, {1, 1, 1, 3, 1, 8, 8}, dtype, ALL, 192, 256, 0, 1);
        for (int64_t r = 0; r < 3; r++) one.q.fill_row(0, 0, r, size);
        one.k.fill_row(0, 0, 0, sign * size);
        one.run(kernels);
        one.check();
        // every score the same, all far below zero or above
        Case equal(kernels.isa, {1, 1, 1, 7, 300, 8, 8}, dtype, ALL, 192, 128, 0, 1);
        for (int64_t r = 0; r < 7; r++) equal.q.fill_row(0, 0, r, size);
        for (int64_t r = 0; r < 300; r++) equal.k.fill_row(0, 0, r, sign * size);
        equal.run(kernels);
        equal.check();
        for (int64_t c = 0; c < 8; c++) {  // the bound grows with the scores; that equal ones weigh alike does not
          double mean = 0, mean_size = 0;
          for (int64_t r = 0; r < 300; r++) mean += equal.v.value(0, 0, r, c) / 300, mean_size += fabs(equal.v.value(0, 0, r, c)) / 300;
          for (int64_t r = 0; r < 7; r++)
            expect(fabs(equal.out.value(0, 0, r, c) - mean) <= 8 * roundoff(dtype) * mean_size + 1e-6,
                   equal.label + ": equal scores weigh differently");
        }
      }
  // the maximum rises in every tile, and falls
  for (bool rising : {true, false}) {
    Case x(kernels.isa, {1, 1, 1, 7, 500, 4, 8}, DType::float32, ALL, 192, 32, 0, 1);
    for (int64_t j = 0; j < 500; j++) x.k.fill_row(0, 0, j, (rising ? j : 500 - j) * 0.25f);
    for (int64_t r = 0; r < 7; r++) x.q.fill_row(0, 0, r, r - 3.f);
    x.run(kernels);
    x.check();
  }
}

// Scores that rise from tile to tile, fall or stay, each row's by as much as it likes, and tiles before them that hide by -inf: whether the
// maximum of the tiles before will do for a row is its own affair, so it has the same bits alone.
void rising_scores(const Kernels& kernels) {
  const float rises[] = {0, 1, 5, 12, 20, 100, 1000, -5, -100, -1000};
  for (DType dtype : DTYPES)
    for (float scale : {1.f, -0.25f})
      for (int64_t hidden : {0, 64, 70, 128, -64}) {  // from all rows or, where negative, from some: by a product that overflows
        if (hidden < 0 && dtype == DType::float16) continue;
        const float large = hidden < 0 ? 0x1p100f : INFINITY;
        Case x(kernels.isa, {1, 1, 1, 40, 400, 16, 24}, dtype, ALL, 192, 64, 0, scale);
        x.label += " rising, " + std::to_string(hidden) + " hidden";
        for (int64_t r = 0; r < 40; r++) {
          x.q.put(0, 0, r, 0, rises[hidden < 0 ? r % 4 : r * 7 % 10]);  // no huge maxima, which all rows of a block would wait for
          x.q.put(0, 0, r, 1, hidden >= 0 ? 1 : r % 8 ? 0 : large);
        }
        for (int64_t j = 0; j < 400; j++) {
          x.k.put(0, 0, j, 0, (float)(j / 64) / scale);
          if (hidden < 0) x.k.put(0, 0, j, 1, 0);
          if (j < std::abs(hidden)) x.k.put(0, 0, j, 1, scale > 0 ? -large : large);
        }
        x.run(kernels);
        x.check();
        for (int64_t r = 0; r < 40; r++) {
          Case alone(kernels.isa, {1, 1, 1, 1, 400, 16, 24}, dtype, ALL, 192, 64, 0, scale);
          memcpy(alone.q.data(), x.q.at(0, 0, r, 0), 16 * size_of(dtype));
          memcpy(alone.k.data(), x.k.data(), 400 * 16 * size_of(dtype));
          memcpy(alone.v.data(), x.v.data(), 400 * 24 * size_of(dtype));
          alone.run(kernels);
          expect(memcmp(alone.out.data(), x.out.at(0, 0, r, 0), 24 * size_of(dtype)) == 0 && memcmp(alone.lse.data(), x.lse.at(0, 0, r, 0), 4) == 0,
                 x.label + ": row " + std::to_string(r) + " has other bits alone");
        }
      }
}

// Next to nothing in v, and in k against queries that make up for it.
void tiny_numbers(const Kernels& kernels) {
  for (float size : {1e-26f, 1e-34f, 1e-37f}) {
    for (bool some : {true, false}) {
      Case x(kernels.isa, {1, 1, 1, 9, 70, 24, 24}, DType::float32, ALL, 192, 64, 0, 1);
      x.least_bound = 0x1p-125;  // tiles take subnormal sums for 0
      for (int64_t row = 0; row < 70; row++) {
        if (!some || row % 3 == 0) x.v.scale_row(0, 0, row, size);
        if (!some || row % 5 == 0) x.k.scale_row(0, 0, row, size);
      }
      for (int64_t row = 0; row < 9; row++)
        if (!some || row % 4 == 0) x.q.scale_row(0, 0, row, 1 / size);
      x.run(kernels);
      x.check();
    }
  }
}

// The largest numbers: rounded to bf16 they would be infinite.
void large_values(const Kernels& kernels) {
  Case x(kernels.isa, {1, 1, 1, 5, 1, 8, 8}, DType::float32, ALL, 192, 64);
  x.v.fill_row(0, 0, 0, 3.4e38f);
  x.run(kernels);
  x.check();
}

void not_finite(const Kernels& kernels) {
  for (DType dtype : DTYPES) {
    Case x(kernels.isa, {1, 1, 1, 20, 150, 16, 16}, dtype, ALL, 192, 64);
    x.run(kernels);
    const std::string clean = x.out.bytes();
    x.q.put(0, 0, 13, 5, NAN);  // a row of q: that row alone
    x.run(kernels);
    for (int64_t r = 0; r < 20; r++)
      for (int64_t c = 0; c < 16; c++) {
        const double got = x.out.value(0, 0, r, c);
        if (r == 13)
          expect(std::isnan(got), x.label + ": NaN in q vanished");
        else
          expect(got == get(dtype, clean.data() + (r * 16 + c) * size_of(dtype)), x.label + ": NaN in q reached another row");
      }
    expect(std::isnan(x.lse.value(0, 0, 13, 0)), x.label + ": NaN in q vanished from the lse");

    for (int64_t key : {0, 70, 149}) {  // a key or value: every row that sees it
      for (bool in_k : {true, false}) {
        Case y(kernels.isa, {1, 1, 1, 20, 150, 16, 16}, dtype, ALL, 192, 64);
        (in_k ? y.k : y.v).put(0, 0, key, 3, NAN);
        y.run(kernels);
        for (int64_t r = 0; r < 20; r++) expect(std::isnan(y.out.value(0, 0, r, 3)), y.label + ": NaN in k or v vanished");
      }
      // a score of -inf hides, one of +inf gives NaN as inf - inf does
      Case z(kernels.isa, {1, 1, 1, 20, 150, 16, 16}, dtype, ALL, 192, 64);
      for (int64_t r = 0; r < 20; r++) z.q.put(0, 0, r, 3, 1);
      z.k.put(0, 0, key, 3, -INFINITY);
      z.run(kernels);
      z.check();
      z.k.put(0, 0, key, 3, INFINITY);
      z.run(kernels);
      for (int64_t r = 0; r < 20; r++) expect(std::isnan(z.out.value(0, 0, r, 0)), z.label + ": +inf gave a number");
    }
    Case hidden(kernels.isa, {1, 1, 1, 5, 100, 4, 4}, dtype, ALL, 192, 64);  // all scores -inf: as if no key were visible
    for (int64_t r = 0; r < 5; r++) hidden.q.fill_row(0, 0, r, 1);
    for (int64_t j = 0; j < 100; j++) hidden.k.fill_row(0, 0, j, -INFINITY);
    hidden.run(kernels);
    hidden.check();
  }
}

// Two threads of a program may call at once.
void concurrent_calls(const Kernels& kernels) {
  Case a(kernels.isa, {1, 4, 4, 100, 200, 64, 64}, DType::float32, CAUSAL), b(kernels.isa, {1, 4, 4, 90, 210, 32, 32}, DType::bfloat16);
  a.run(kernels, 1);
  b.run(kernels, 1);
  const std::string results[] = {a.result(), b.result()};
  std::thread other([&] {
    for (int i = 0; i < 10; i++) a.run(kernels, 2);
  });
  for (int i = 0; i < 10; i++) b.run(kernels, 2);
  other.join();
  expect(a.result() == results[0] && b.result() == results[1], a.label + ": other bits in concurrent calls");
}

}  // namespace

// An argument names the only instruction set to test.
int main(int argc, char** argv) {
  for (const Kernels* kernels : all_kernels()) {
    if (argc > 1 && std::string(kernels->isa) != argv[1]) continue;
    const int before = checks;
    shapes(*kernels);
    nothing_to_do(*kernels);
    same_bits(*kernels);
    skipped_tiles(*kernels);
    varlen(*kernels);
    extreme_scores(*kernels);
    rising_scores(*kernels);
    tiny_numbers(*kernels);
    large_values(*kernels);
    not_finite(*kernels);
    concurrent_calls(*kernels);
    printf("%s: %d checks\n", kernels->isa, checks - before);
  }
  printf("%d checks, %d failures\n", checks, failures);
  return failures || !checks ? 1 : 0;
}
