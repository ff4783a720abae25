// The backward against a naive one in double precision, on every instruction set that this machine runs. Every buffer ends where its last
// element ends (for the address sanitizer), and everything in it that is not part of the problem is NaN.
#include "../schedule.h"
#include "tensor.h"

using namespace attnworks;
using namespace attnworks::test;

namespace {

struct Case : ForwardCase {
  Tensor d_out, d_lse, d_q, d_k, d_v;
  bool with_d_lse = true;

  // Modified: scores + bias[head][row][key], capped, less slope[head] times the distance; and a map. See modify().
  static constexpr double CAP = 2;
  std::vector<float> bias, d_bias, slopes;
  std::vector<int32_t> places;
  std::vector<uint64_t> bits;

  Case(const std::string& isa, const Shape& s, DType dtype, Bounds bounds = ALL, int64_t tile_q = 96, int64_t tile_kv = 256, int layout = 0,
       float scale = 0)
      : ForwardCase(isa, s, dtype, bounds, tile_q, tile_kv, layout, scale),
        d_out(dtype, s.batch, s.heads_q, s.seq_q, s.head_dim_v, (layout + 1) % 3), d_lse(lse_like(layout)),
        d_q(dtype, s.batch, s.heads_q, s.seq_q, s.head_dim, layout), d_k(dtype, s.batch, s.heads_kv, s.seq_kv, s.head_dim, (layout + 2) % 3),
        d_v(dtype, s.batch, s.heads_kv, s.seq_kv, s.head_dim_v, layout) {
    for (Tensor* x : {&d_out, &d_lse}) x->randomise();
  }
  BackwardProblem problem() const {
    BackwardProblem p = {};
    static_cast<ForwardProblem&>(p) = ForwardCase::problem();
    p.tile_q = 192;  // of the forward, whose tiles are none of the backward's
    p.tile_kv = 256;
    p.d_out = d_out.strides;
    p.d_q = d_q.strides;
    p.d_k = d_k.strides;
    p.d_v = d_v.strides;
    if (bias.empty()) return p;
    p.modifiers.count = 3;
    p.modifiers.steps[0] = {StepKind::bias, 0, DType::float32, 0, shape.seq_q * shape.seq_kv, shape.seq_kv, 1};
    p.modifiers.steps[1] = {StepKind::softcap, CAP, DType::float32, 0, 0, 0, 0};
    p.modifiers.steps[2] = {StepKind::alibi, 0, DType::float32, 0, 1, 0, 0};
    p.modifiers.map = {0, 0, tiles(shape.seq_kv, MAP_KEYS), MAP_ROWS};
    return p;
  }
  static int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

  // A third of the map's tiles are hidden, a third full, the others have random bits; the second tile of keys is hidden from all rows.
  void modify() {
    std::normal_distribution<float> normal;
    for (int64_t n = 0; n < shape.heads_q * shape.seq_q * shape.seq_kv; n++) bias.push_back(normal(generator));
    d_bias.assign(bias.size(), 0);
    for (int64_t h = 0; h < shape.heads_q; h++) slopes.push_back(0.01f * (h + 1));
    for (int64_t tile = 0; tile < tiles(shape.seq_q, MAP_ROWS) * tiles(shape.seq_kv, MAP_KEYS); tile++) {
      const int kind = tile % tiles(shape.seq_kv, MAP_KEYS) == 1 ? 0 : generator() % 3;
      places.push_back(kind == 0 ? PLACE_HIDDEN : kind == 1 ? PLACE_FULL : (int32_t)(bits.size() / MAP_ROWS));
      for (int64_t row = 0; kind == 2 && row < MAP_ROWS; row++) bits.push_back((uint64_t)generator() << 32 | generator());
    }
    label += " modified";
  }
  bool sees(int64_t row, int64_t key) const {
    if (places.empty()) return true;
    const int32_t place = places[row / MAP_ROWS * tiles(shape.seq_kv, MAP_KEYS) + key / MAP_KEYS];
    return place == PLACE_FULL || (place >= 0 && bits[place * MAP_ROWS + row % MAP_ROWS] >> key % MAP_KEYS & 1);
  }
  ModifierOperands modifier_operands() const {
    if (bias.empty()) return {};
    ModifierOperands m;
    m.steps[0] = bias.data();
    m.steps[2] = slopes.data();
    m.places = places.data();
    m.bits = bits.data();
    return m;
  }
  BackwardOperands operands() {
    BackwardOperands x = {q.data(), k.data(), v.data(), out.data(), d_out.data(), (float*)lse.data(), with_d_lse ? (float*)d_lse.data() : nullptr,
                          d_q.data(), d_k.data(), d_v.data(), modifier_operands()};
    if (!bias.empty()) x.d_bias[0] = {d_bias.data(), 0, shape.seq_q * shape.seq_kv, shape.seq_kv, 1};
    return x;
  }
  void run(const Kernels& kernels, int threads = 2) { run(kernels, problem(), nullptr, nullptr, threads); }
  void run(const Kernels& kernels, BackwardProblem p, const int64_t* cu_q, const int64_t* cu_kv, int threads) {
    const Operands forward = {q.data(), k.data(), v.data(), out.data(), (float*)lse.data(), modifier_operands()};
    if (cu_q)
      run_forward_varlen(kernels, p, forward, cu_q, cu_kv, threads);
    else
      run_forward(kernels, p, forward, threads);
    p.tile_q = tile_q;
    p.tile_kv = tile_kv;
    run_backward(kernels, p, operands(), cu_q, cu_kv, threads);
  }
  std::string result() const { return d_q.bytes() + d_k.bytes() + d_v.bytes(); }

  // Rows [q0, q0 + seq_q) and keys [kv0, kv0 + seq_kv) of one batch entry, which are a problem of their own.
  void check(int64_t b, int64_t q0, int64_t seq_q, int64_t kv0, int64_t seq_kv) const {
    for (int64_t h = 0; h < shape.heads_kv; h++) check_head(b, h, q0, seq_q, kv0, seq_kv);
  }
  void check() const {
    for (int64_t b = 0; b < shape.batch; b++) check(b, 0, shape.seq_q, 0, shape.seq_kv);
  }

 private:
  // One weighted sum for each row of a gradient; the errors are relative (of the terms' magnitudes) and those of S and dS.
  struct Sums {
    int64_t columns;
    std::vector<double> value, bound;
    Sums(int64_t rows, int64_t columns) : columns(columns), value(rows * columns), bound(rows * columns) {}
    void add(int64_t row, double weight, double error, const double* x) {
      for (int64_t at = row * columns, c = 0; c < columns; at++, c++) {
        value[at] += weight * x[c];
        bound[at] += error * fabs(x[c]);
      }
    }
  };

  void check_head(int64_t b, int64_t h_kv, int64_t q0, int64_t seq_q, int64_t kv0, int64_t seq_kv) const {
    const int64_t group = shape.heads_q / shape.heads_kv;
    const Matrix keys = k.matrix(b, h_kv, kv0, seq_kv), values = v.matrix(b, h_kv, kv0, seq_kv);
    Sums sum_k(seq_kv, shape.head_dim), sum_v(seq_kv, shape.head_dim_v);
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++) {
      const Matrix queries = q.matrix(b, h, q0, seq_q), d_outs = d_out.matrix(b, h, q0, seq_q);
      Sums sum_q(seq_q, shape.head_dim);
      for (int64_t i = 0; i < seq_q; i++) {
        const double through_lse = with_d_lse ? d_lse.value(b, h, q0 + i, 0) : 0;
        add_row(h, queries.row(i), d_outs.row(i), through_lse, i, i + (bounds.top_left ? 0 : seq_kv - seq_q), keys, values, sum_q, sum_k, sum_v);
      }
      compare("dq", d_q.matrix(b, h, q0, seq_q), sum_q);
    }
    compare("dk", d_k.matrix(b, h_kv, kv0, seq_kv), sum_k);
    compare("dv", d_v.matrix(b, h_kv, kv0, seq_kv), sum_v);
  }

  // What row i adds to the gradients; `origin` is its own place among the keys.
  void add_row(int64_t h, const double* query, const double* d_row, double through_lse, int64_t i, int64_t origin, const Matrix& keys, const Matrix& values,
               Sums& sum_q, Sums& sum_k, Sums& sum_v) const {
    const int64_t dim = shape.head_dim, dim_v = shape.head_dim_v, seq_kv = (int64_t)keys.values.size() / dim;
    const int64_t begin = std::max<int64_t>(0, origin - bounds.left), end = std::min(seq_kv, origin + bounds.right + 1);
    if (begin >= end) return;
    std::vector<Product> scores, d_probs;
    std::vector<double> probs, derivatives;
    double highest = -INFINITY, sum = 0, delta = 0, delta_size = 0;
    for (int64_t j = begin; j < end; j++) {
      scores.emplace_back(query, keys.row(j), dim, scale);
      d_probs.emplace_back(d_row, values.row(j), dim_v, 1);
      double& score = scores.back().value;
      derivatives.push_back(1);
      if (!bias.empty()) {
        const double t = tanh((score + bias[(h * shape.seq_q + i) * shape.seq_kv + j]) / CAP);
        scores.back().size += 4;
        derivatives.back() = 1 - t * t;
        score = CAP * t - slopes[h] * fabs((double)(i + seq_kv - shape.seq_q - j));
      }
      if (!sees(i, j)) score = -INFINITY;
      highest = std::max(highest, score);
    }
    if (highest == -INFINITY) return;
    for (const Product& score : scores) {
      probs.push_back(exp(score.value - highest));
      sum += probs.back();
    }
    for (size_t n = 0; n < probs.size(); n++) {
      probs[n] /= sum;
      delta += probs[n] * d_probs[n].value;
      delta_size += probs[n] * d_probs[n].size;
    }
    for (size_t n = 0; n < probs.size(); n++) {
      const int64_t j = begin + (int64_t)n;
      if (!sees(i, j)) {  // its key may be NaN
        if (d_bias[(h * shape.seq_q + i) * shape.seq_kv + j] != 0) expect(false, label + ": d_bias of a hidden pair");
        continue;
      }
      const double d_capped = probs[n] * (d_probs[n].value - delta + through_lse), d_score = scale * derivatives[n] * d_capped;
      const double error = 8 * (roundoff(dtype) + 0x1p-24 * scores[n].size);
      const double d_size = probs[n] * (d_probs[n].size + delta_size + fabs(through_lse)), d_error = error * fabs(scale) * d_size;
      if (!bias.empty()) {
        const double got = d_bias[(h * shape.seq_q + i) * shape.seq_kv + j], expected = derivatives[n] * d_capped;
        if (fabs(got - expected) > error * d_size + 1e-7)
          expect(false, label + ": d_bias of row " + std::to_string(i) + " key " + std::to_string(j) + " was " + std::to_string(got) + ", must be " +
                            std::to_string(expected));
      }
      sum_q.add(i, d_score, d_error, keys.row(j));
      sum_k.add(j, d_score, d_error, query);
      sum_v.add(j, probs[n], error * probs[n], d_row);
    }
  }

  void compare(const char* what, const Matrix& got, const Sums& sums) const {
    checks++;
    for (size_t n = 0; n < got.values.size(); n++) {
      const double expected = sums.value[n], bound = sums.bound[n] + 1e-7;
      if (fabs(got.values[n] - expected) <= bound) continue;
      const int64_t row = (int64_t)n / got.columns, column = (int64_t)n % got.columns;
      return expect(false, label + ": " + what + " of row " + std::to_string(row) + " column " + std::to_string(column) + " was " +
                               std::to_string(got.values[n]) + ", must be " + std::to_string(expected) + " within " + std::to_string(bound));
    }
  }
};

void shapes(const Kernels& kernels) {
  const Shape list[] = {{1, 1, 1, 1, 1, 1, 1},      {2, 4, 2, 37, 70, 64, 64},  {1, 6, 2, 13, 95, 33, 65}, {1, 2, 1, 70, 7, 24, 7},
                        {1, 1, 1, 110, 300, 20, 16}, {1, 1, 1, 9, 40, 288, 257}, {1, 3, 3, 31, 64, 40, 16}};
  const Bounds bounds[] = {ALL, CAUSAL, {UNLIMITED, 0, true}, {5, 3, false}, {40, 0, true}, {0, 0, false}, {0, UNLIMITED, false}};
  const int64_t tiles[][2] = {{96, 256}, {1, 1}, {50, 33}, {1 << 30, 1 << 30}, {24, 48}};
  int layout = 0;
  for (DType dtype : DTYPES)
    for (const Shape& shape : list)
      for (const Bounds& b : bounds) {
        const int64_t* tile = tiles[layout % 5];
        Case x(kernels.isa, shape, dtype, b, tile[0], tile[1], layout % 3, layout % 7 == 4 ? -0.4f : 0);
        x.with_d_lse = layout++ % 2;
        x.run(kernels);
        x.check();
      }
  Case backwards(kernels.isa, {1, 2, 2, 20, 40, 48, 32}, DType::float32, CAUSAL, 96, 256, 3);
  backwards.run(kernels);
  backwards.check();
}

void nothing_to_do(const Kernels& kernels) {
  for (const Shape& shape : {Shape{0, 2, 2, 5, 5, 8, 8}, Shape{2, 0, 1, 5, 5, 8, 8}, Shape{2, 2, 2, 0, 5, 8, 8}, Shape{1, 2, 1, 4, 0, 8, 8}}) {
    Case x(kernels.isa, shape, DType::float32);
    x.run(kernels);
    x.check();  // no rows: dK and dV 0; no keys: dQ 0
  }
}

// Same bits whatever the number of threads and the rest of the batch: also where all tiles of keys are of one head, and take turns.
void same_bits(const Kernels& kernels) {
  for (DType dtype : DTYPES)
    for (const Shape& shape : {Shape{2, 4, 2, 70, 100, 24, 40}, Shape{1, 1, 1, 100, 200, 16, 16}}) {
      Case x(kernels.isa, shape, dtype, {60, 20, false}, 24, 32);
      x.run(kernels, 1);
      const std::string once = x.result();
      for (int threads : {2, 3, 7})
        for (int repeat = 0; repeat < 3; repeat++) {
          x.run(kernels, threads);
          expect(x.result() == once, x.label + ": other bits on " + std::to_string(threads) + " threads");
        }
      if (shape.batch == 1) continue;
      Case alone(kernels.isa, {1, shape.heads_q, shape.heads_kv, shape.seq_q, shape.seq_kv, shape.head_dim, shape.head_dim_v}, dtype,
                 x.bounds, x.tile_q, x.tile_kv);
      for (auto [whole, one] : {std::pair{&x.q, &alone.q}, {&x.k, &alone.k}, {&x.v, &alone.v}, {&x.d_out, &alone.d_out}, {&x.d_lse, &alone.d_lse}})
        memcpy(one->memory.get(), whole->memory.get() + one->extent * size_of(one->dtype), one->extent * size_of(one->dtype));
      alone.run(kernels, 1);
      for (auto [whole, one] : {std::pair{&x.d_q, &alone.d_q}, {&x.d_k, &alone.d_k}, {&x.d_v, &alone.d_v}})
        for (int64_t h = 0; h < one->heads; h++)
          for (int64_t r = 0; r < one->rows; r++)
            expect(memcmp(one->at(0, h, r, 0), whole->at(1, h, r, 0), one->columns * size_of(dtype)) == 0, x.label + ": other bits alone");
    }
}

// Keys that no row sees, and rows that see none of a tile's keys, are never read by what sees them not: poison them.
void skipped_tiles(const Kernels& kernels) {
  Case x(kernels.isa, {1, 1, 1, 300, 900, 16, 16}, DType::float32, {30, 0, false}, 24, 64);
  for (int64_t key = 0; key < 512; key++) {  // row 0 sees keys 570..600
    x.k.fill_row(0, 0, key, NAN);
    x.v.fill_row(0, 0, key, NAN);
  }
  x.run(kernels);
  for (int64_t r = 0; r < 300; r++)
    for (int64_t c = 0; c < 16; c++) expect(!std::isnan(x.d_q.value(0, 0, r, c)), x.label + ": a hidden key's NaN reached dq");
  for (int64_t r = 0; r < 900; r++)
    for (int64_t c = 0; c < 16; c++)
      expect(!std::isnan(x.d_k.value(0, 0, r, c) + x.d_v.value(0, 0, r, c)), x.label + ": a hidden key's NaN reached dk or dv");
}

// What is hidden inside a tile adds exact zeros, whatever a row's cotangent holds.
void not_finite(const Kernels& kernels) {
  for (DType dtype : DTYPES) {
    Case x(kernels.isa, {1, 1, 1, 40, 40, 16, 16}, dtype, CAUSAL);
    x.run(kernels);
    const std::string clean = x.d_k.bytes();
    x.d_lse.put(0, 0, 3, 0, NAN);  // row 3 sees keys 0..3, all in one tile with the others
    x.run(kernels);
    for (int64_t key = 0; key < 40; key++) {
      const double got = x.d_k.value(0, 0, key, 2);
      expect(key <= 3 ? std::isnan(got) : got == get(dtype, clean.data() + (x.d_k.at(0, 0, key, 2) - x.d_k.memory.get())),
             x.label + ": NaN of row 3 at key " + std::to_string(key) + " gave " + std::to_string(got));
    }
    for (int64_t row = 0; row < 40; row++) expect(std::isnan(x.d_q.value(0, 0, row, 2)) == (row == 3), x.label + ": NaN of row 3 in dq");
  }
}

// What tiles can't multiply in pieces, other kernels do.
void outliers(const Kernels& kernels) {
  if (!kernels.has_outliers) return;
  for (DType dtype : {DType::float32, DType::float16})
    for (float odd : {INFINITY, 1e-37f})
      for (int operand = 0; operand < 4; operand++) {
        if (dtype == DType::float16 && odd < 1) continue;
        const auto result = [&](const Kernels& of, bool with) {
          Case x(of.isa, {1, 4, 2, 40, 60, 16, 16}, dtype, CAUSAL);
          if (with) (operand == 0 ? x.q : operand == 1 ? x.k : operand == 2 ? x.v : x.d_out).put(0, 1, 39, 3, odd);
          x.run(kernels_without_tiles());  // the same out and lse for both
          run_backward(of, x.problem(), x.operands(), nullptr, nullptr, 2);
          return x.result();
        };
        const auto seed = generator;
        const std::string tiles = result(kernels, true);
        generator = seed;
        const std::string plain = result(kernels_without_tiles(), true);
        generator = seed;
        expect(tiles == plain, std::string(kernels.isa) + ": an outlier in operand " + std::to_string(operand) + " was multiplied in pieces");
        expect(tiles != result(kernels, false), std::string(kernels.isa) + ": outliers make no difference here");
      }
}

// Rows that see no key: gradients 0, also from keys that are there.
void rows_without_keys(const Kernels& kernels) {
  for (DType dtype : DTYPES) {
    Case x(kernels.isa, {1, 2, 1, 90, 20, 16, 16}, dtype, CAUSAL, 24, 16);  // bottom-right: the first 70 rows see nothing
    for (int64_t h = 0; h < 2; h++) x.d_out.fill_row(0, h, 3, 1e30f);
    x.run(kernels);
    x.check();
    for (int64_t c = 0; c < 16; c++) expect(x.d_q.value(0, 1, 69, c) == 0, x.label + ": dq of a row without keys");
  }
}

// Scores so large that only the right shift keeps probs finite: one key has all the weight.
void large_scores(const Kernels& kernels) {
  for (DType dtype : DTYPES) {
    Case x(kernels.isa, {1, 1, 1, 30, 200, 8, 8}, dtype, ALL, 24, 64, 0, 1);
    for (int64_t j = 0; j < 200; j++) x.k.fill_row(0, 0, j, j == 77 ? 64 : -64);
    for (int64_t r = 0; r < 30; r++) x.q.fill_row(0, 0, r, 16);
    x.run(kernels);
    x.check();
  }
}

void varlen(const Kernels& kernels) {
  const std::vector<int64_t>&q = ENDS_Q, &kv = ENDS_KV;
  each_packed([&](DType dtype, const Bounds& bounds, int layout) {
    // rows past the last sequence hold NaN: they are not part of the problem
    Case x(kernels.isa, {1, 4, 2, 80, 310, 32, 24}, dtype, bounds, 24, 64, layout);
    x.poison_keys(kv.back());
    BackwardProblem p = x.problem();
    p.batch = (int64_t)q.size() - 1;
    p.q.batch = p.k.batch = p.v.batch = p.out.batch = p.lse.batch = p.d_out.batch = p.d_q.batch = p.d_k.batch = p.d_v.batch = 1 << 30;
    x.run(kernels, p, q.data(), kv.data(), 2);
    for (size_t b = 0; b + 1 < q.size(); b++) x.check(0, q[b], q[b + 1] - q[b], kv[b], kv[b + 1] - kv[b]);
    expect(std::isnan(x.d_q.value(0, 0, 77, 0)) && std::isnan(x.d_k.value(0, 0, 300, 0)), x.label + ": wrote past the last sequence");
  });
}

// Through score steps and a map; hidden tiles of keys hold NaN. The same bits on any number of threads.
void modified(const Kernels& kernels) {
  for (DType dtype : DTYPES)
    for (const Bounds& bounds : {ALL, CAUSAL, Bounds{90, 40, true}}) {
      Case x(kernels.isa, {1, 4, 2, 130, 200, 24, 16}, dtype, bounds, 96, 128);
      x.modify();
      const int64_t tiles_kv = Case::tiles(200, MAP_KEYS);
      for (int64_t key = 0; key < 200; key++) {
        bool hidden = true;
        for (int64_t row = 0; row < 130; row += MAP_ROWS) hidden &= x.places[row / MAP_ROWS * tiles_kv + key / MAP_KEYS] == PLACE_HIDDEN;
        for (int64_t h = 0; hidden && h < 2; h++) x.k.fill_row(0, h, key, NAN);
      }
      x.run(kernels);
      x.check();
      const std::string once = x.result();
      const std::vector<float> d_bias = x.d_bias;
      for (int threads : {1, 5}) {
        std::fill(x.d_bias.begin(), x.d_bias.end(), 0.f);
        x.run(kernels, threads);
        expect(x.result() == once && x.d_bias == d_bias, x.label + ": other bits on " + std::to_string(threads) + " threads");
      }
    }
}

// A gradient that nobody asked for changes no bit of the others.
void subsets(const Kernels& kernels) {
  Case x(kernels.isa, {1, 2, 1, 50, 80, 24, 16}, DType::bfloat16, CAUSAL, 24, 32);
  for (Tensor* grad : {&x.d_q, &x.d_k, &x.d_v}) memset(grad->memory.get(), 0, grad->extent * 2);  // between rows, too
  x.run(kernels);
  const std::string whole[] = {x.d_q.bytes(), x.d_k.bytes(), x.d_v.bytes()};
  for (int asked = 1; asked < 8; asked++) {
    BackwardProblem p = x.problem();
    p.tile_q = x.tile_q;
    p.tile_kv = x.tile_kv;
    BackwardOperands o = x.operands();
    Tensor* grads[] = {&x.d_q, &x.d_k, &x.d_v};
    void** places[] = {&o.d_q, &o.d_k, &o.d_v};
    for (int g = 0; g < 3; g++) {
      memset(grads[g]->memory.get(), 0, grads[g]->extent * 2);
      if (!(asked >> g & 1)) *places[g] = nullptr;
    }
    run_backward(kernels, p, o, nullptr, nullptr, 2);
    for (int g = 0; g < 3; g++)
      expect(grads[g]->bytes() == (asked >> g & 1 ? whole[g] : std::string(grads[g]->extent * 2, 0)), x.label + ": asked for " + std::to_string(asked));
  }
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
    not_finite(*kernels);
    outliers(*kernels);
    rows_without_keys(*kernels);
    large_scores(*kernels);
    varlen(*kernels);
    subsets(*kernels);
    modified(*kernels);
    printf("%s: %d checks\n", kernels->isa, checks - before);
  }
  printf("%d checks, %d failures\n", checks, failures);
  return failures || !checks ? 1 : 0;
}
