// Score steps, sinks and tile maps in prefill, packed sequences and decode, against a naive reference in double precision that looks at one
// pair of query and key at a time. Operands end where their last element ends (for the address sanitizer), hidden tiles of K and V are NaN.
#include <algorithm>
#include <functional>
#include <random>

#include "../schedule.h"
#include "../tilemap.h"
#include "numbers.h"

using namespace attnworks;
using namespace attnworks::test;

namespace {

std::mt19937 generator(2026);

// Contiguous elements of any dtype in memory of exactly their size.
struct Array {
  DType dtype;
  std::vector<char> memory;
  Array(DType dtype, int64_t count, float size = 1) : dtype(dtype), memory(count * size_of(dtype)) {
    std::normal_distribution<float> normal(0, size);
    for (int64_t i = 0; i < count; i++) put(i, normal(generator));
  }
  double operator[](int64_t i) const { return get(dtype, memory.data() + i * size_of(dtype)); }
  std::vector<double> values() const {
    std::vector<double> all;
    for (size_t i = 0; i < memory.size() / size_of(dtype); i++) all.push_back((*this)[i]);
    return all;
  }
  void put(int64_t i, float x) { set(dtype, memory.data() + i * size_of(dtype), x); }
  void* data() { return memory.data(); }
};

// One step and the elements it reads.
struct Step {
  ScoreStep step;
  Array operand;
  double apply(double s, int64_t b, int64_t h, int64_t i, int64_t j, int64_t longer) const {
    if (step.kind == StepKind::softcap) return step.cap * tanh(s / step.cap);
    const double x = operand[b * step.batch + h * step.head + i * step.row + j * step.key];
    return step.kind == StepKind::bias ? s + x : s - x * (double)std::abs(i + longer - j);
  }
};
Step softcap(float cap) { return {{StepKind::softcap, cap, DType::float32, 0, 0, 0, 0}, Array(DType::float32, 0)}; }

using Visible = std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)>;

struct Case {
  std::string label;
  DType dtype;
  int64_t batch, heads_q, heads_kv, seq_q, seq_kv, dim;
  Bounds bounds = {UNLIMITED, UNLIMITED, false};
  std::vector<Step> steps = {};
  std::vector<float> sink = {};
  Visible visible = nullptr;  // besides the bounds
  Array q, k, v, out, lse;
  std::vector<int32_t> places = {};
  std::vector<uint64_t> bits = {};
  TileMap map = {};

  Case(const Kernels& kernels, const std::string& what, DType dtype, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seq_q,
       int64_t seq_kv, int64_t dim)
      : label(std::string(kernels.isa) + " " + name(dtype) + " " + what), dtype(dtype), batch(batch), heads_q(heads_q), heads_kv(heads_kv),
        seq_q(seq_q), seq_kv(seq_kv), dim(dim), q(dtype, batch * heads_q * seq_q * dim), k(dtype, batch * heads_kv * seq_kv * dim),
        v(dtype, batch * heads_kv * seq_kv * dim), out(dtype, batch * heads_q * seq_q * dim), lse(DType::float32, batch * heads_q * seq_q) {}

  Step bias(DType of, bool by_batch, bool by_head, bool by_row, bool by_key) const {
    const int64_t key = by_key, row = by_row ? (by_key ? seq_kv : 1) : 0;
    const int64_t head_size = (by_row ? seq_q : 1) * (by_key ? seq_kv : 1), head = by_head ? head_size : 0;
    const int64_t batch_size = head_size * (by_head ? heads_q : 1);
    return {{StepKind::bias, 0, of, by_batch ? batch_size : 0, head, row, key}, Array(of, batch_size * (by_batch ? batch : 1), 2)};
  }
  Step alibi(DType of, bool by_batch) const {
    return {{StepKind::alibi, 0, of, by_batch ? heads_q : 0, 1, 0, 0}, Array(of, heads_q * (by_batch ? batch : 1), 0.1f)};
  }
  // Makes the map of `visible`; tells it apart by batch, head and query only where `by_` says so.
  void show(Visible by, bool by_batch, bool by_head, bool by_row) {
    visible = by;
    const int64_t b = by_batch ? batch : 1, h = by_head ? heads_q : 1, rows = by_row ? seq_q : 1;
    std::vector<uint8_t> dense(b * h * rows * seq_kv);
    for (int64_t n = 0; n < (int64_t)dense.size(); n++)
      dense[n] = visible(n / seq_kv / rows / h, n / seq_kv / rows % h, n / seq_kv % rows, n % seq_kv);
    const int64_t tile_rows = by_row ? MAP_ROWS : 1, tiles_q = (rows + tile_rows - 1) / tile_rows, tiles_kv = (seq_kv + MAP_KEYS - 1) / MAP_KEYS;
    places.resize(b * h * tiles_q * tiles_kv);
    bits.resize(places.size() * tile_rows);
    pack_mask({dense.data(), b, h, rows, seq_kv, h * rows * seq_kv, rows * seq_kv, seq_kv, 1}, tile_rows, places.data(), bits.data(), 2);
    map = {by_batch ? h * tiles_q * tiles_kv : 0, by_head ? tiles_q * tiles_kv : 0, tiles_kv, tile_rows};
  }
  // Keys that no query of the call is shown, in whole tiles, become NaN.
  void poison_hidden_tiles() {
    for (int64_t b = 0; b < batch; b++)
      for (int64_t tile = 0; tile < seq_kv; tile += MAP_KEYS) {
        const int64_t end = std::min(tile + MAP_KEYS, seq_kv);
        bool any = false;
        for (int64_t h = 0; h < heads_q; h++)
          for (int64_t i = 0; i < seq_q; i++)
            for (int64_t j = tile; j < end; j++) any |= visible(b, h, i, j);
        for (int64_t h = 0; !any && h < heads_kv; h++)
          for (int64_t x = ((b * heads_kv + h) * seq_kv + tile) * dim; x < ((b * heads_kv + h) * seq_kv + end) * dim; x++) {
            k.put(x, NAN);
            v.put(x, NAN);
          }
      }
  }

  Modifiers modifiers() const {
    Modifiers m;
    for (const Step& step : steps) m.steps[m.count++] = step.step;
    m.map = map;
    return m;
  }
  Operands operands() {
    Operands x = {q.data(), k.data(), v.data(), out.data(), (float*)lse.data()};
    for (size_t n = 0; n < steps.size(); n++) x.modifiers.steps[n] = steps[n].operand.data();
    if (!sink.empty()) x.modifiers.sink = sink.data();
    if (visible) x.modifiers.places = places.data();
    x.modifiers.bits = bits.data();
    return x;
  }
  Strides strides(int64_t heads, int64_t rows) const { return {heads * rows * dim, rows * dim, dim}; }
  ForwardProblem forward(int64_t tile_q, int64_t tile_kv) const {
    return {dtype, batch, heads_q, heads_kv, seq_q, seq_kv, dim, dim, strides(heads_q, seq_q), strides(heads_kv, seq_kv),
            strides(heads_kv, seq_kv), strides(heads_q, seq_q), {heads_q * seq_q, seq_q, 1}, 1 / sqrtf((float)dim), bounds, tile_q, tile_kv,
            modifiers()};
  }
  void prefill(const Kernels& kernels, int threads = 2, int64_t tile_q = 192, int64_t tile_kv = 256) {
    run_forward(kernels, forward(tile_q, tile_kv), operands(), threads);
  }
  void decode(const Kernels& kernels, const std::vector<int64_t>& lens, int64_t split_kv) {
    const DecodeProblem p = {dtype, batch, seq_q, heads_q, heads_kv, dim, dim, strides(heads_q, seq_q), strides(heads_kv, seq_kv),
                             strides(heads_kv, seq_kv), strides(heads_q, seq_q), {heads_q * seq_q, seq_q, 1}, 0, 1 / sqrtf((float)dim),
                             bounds, split_kv, modifiers()};
    run_decode(kernels, p, operands(), lens.data(), nullptr, 0, 2);
  }

  struct Values {
    std::vector<double> q, k, v;
  };
  void check() const { check(std::vector<int64_t>(batch, seq_kv)); }
  void check(const std::vector<int64_t>& lens) const {
    const Values values = {q.values(), k.values(), v.values()};
    for (int64_t b = 0; b < batch; b++)
      for (int64_t h = 0; h < heads_q; h++)
        for (int64_t i = 0; i < seq_q; i++) check_row(values, b, h, i, (b * heads_q + h) * seq_q + i, b * heads_kv * seq_kv, lens[b], seq_q);
  }
  // Row `at` of q and out: query i of sequence b, whose keys begin at row kv0 + h_kv * seq_kv of k.
  void check_row(const Values& x, int64_t b, int64_t h, int64_t i, int64_t at, int64_t kv0, int64_t keys, int64_t queries) const {
    const int64_t first = kv0 + h / (heads_q / heads_kv) * seq_kv, shift = bounds.top_left ? 0 : keys - queries;
    std::vector<double> scores(keys, -INFINITY), sizes(keys, 0);
    double highest = -INFINITY, sum = 0, largest = 0;
    for (int64_t j = 0; j < keys; j++) {
      if (j < i + shift - bounds.left || j > i + shift + bounds.right || (visible && !visible(b, h, i, j))) continue;
      const Product product(&x.q[at * dim], &x.k[(first + j) * dim], dim, 1 / sqrt((double)dim));
      scores[j] = product.value;
      sizes[j] = product.size;
      for (const Step& step : steps) {
        scores[j] = step.apply(scores[j], b, h, i, j, keys - queries);
        sizes[j] = std::max(sizes[j], fabs(scores[j]));
      }
      highest = std::max(highest, scores[j]);
      largest = std::max(largest, sizes[j]);
    }
    const double sink_logit = sink.empty() ? -INFINITY : sink[h];
    highest = std::max(highest, sink_logit);
    for (int64_t j = 0; j < keys; j++) sum += scores[j] = scores[j] == -INFINITY ? 0 : exp(scores[j] - highest);
    if (sink_logit != -INFINITY) sum += exp(sink_logit - highest);
    const double expected_lse = sum == 0 ? -INFINITY : highest + log(sum), got_lse = lse[at];
    const double lse_bound = 8 * 0x1p-24 * (1 + fabs(expected_lse) + largest) + (dtype == DType::bfloat16 ? 1e-4 : 0);
    expect(got_lse == expected_lse || fabs(got_lse - expected_lse) <= lse_bound, [&] {
      return label + ": lse of row " + std::to_string(at) + " was " + std::to_string(got_lse) + ", must be " + std::to_string(expected_lse);
    });
    WeightedSum expected(dim, 1e-7);
    for (int64_t j = 0; j < keys; j++) {
      if (scores[j] == 0) continue;  // its value may be NaN
      const double prob = scores[j] / sum;
      expected.add(prob, 8 * prob * (roundoff(dtype) + 0x1p-24 * sizes[j]), &x.v[(first + j) * dim]);
    }
    for (int64_t d = 0; d < dim; d++) {
      const double got = out[at * dim + d];
      expect(fabs(got - expected.value[d]) <= expected.bound[d], [&] {
        return label + ": out of row " + std::to_string(at) + " column " + std::to_string(d) + " was " + std::to_string(got) + ", must be " +
               std::to_string(expected.value[d]);
      });
    }
  }
};

const Bounds CAUSAL = {UNLIMITED, 0, false};
int64_t document(int64_t i) { return i * i / 9000; }  // ever shorter ones

// One key: its LSE is what the steps make of its score.
void softcap_values(const Kernels& kernels) {
  for (float cap : {1.f, 30.f})
    for (float size = 1e-6f; size < 1e6f; size *= 1.7f)
      for (float s : {size, -size}) {
        Case x(kernels, "softcap of " + std::to_string(s), DType::float32, 1, 1, 1, 1, 1, 1);
        x.steps.push_back(softcap(cap));
        x.q.put(0, s);
        x.k.put(0, 1);
        x.prefill(kernels);
        const double expected = cap * tanh((double)s / cap);
        expect(fabs(x.lse[0] - expected) <= 4e-7 * fabs(expected), x.label + " was " + std::to_string(x.lse[0]));
      }
}

void steps(const Kernels& kernels) {
  for (DType dtype : DTYPES)
    for (int which = 0; which < 20; which++) {
      Case x(kernels, "steps " + std::to_string(which), dtype, 2, 4, 2, 1 + which * 3, 150, 24);
      if (which % 3) x.bounds = which % 3 == 1 ? CAUSAL : Bounds{40, 10, true};
      if (which % 4 < 2) x.steps.push_back(softcap(3));
      if (which < 16) x.steps.push_back(x.bias(DTYPES[which % 3], which & 1, which & 2, which & 4, which & 8));
      if (which % 5 < 2) x.steps.push_back(x.alibi(DTYPES[which % 3], which & 1));
      if (which % 4 > 2) x.steps.push_back(softcap(2));
      if (which % 2) x.sink = {-3, 0.5f, 9, -INFINITY};
      x.prefill(kernels, 2, 50, which % 2 ? 32 : 256);
      x.check();
      x.decode(kernels, {150, 150}, 64);
      x.check();
    }
}

// What a bias does to whole rows: the lowest finite numbers for all keys hide nothing, -inf does; NaN stays.
void extreme_biases(const Kernels& kernels) {
  Case x(kernels, "extreme biases", DType::float32, 1, 1, 1, 4, 70, 8);
  x.steps.push_back(x.bias(DType::float32, false, false, true, true));
  for (int64_t j = 0; j < 70; j++) {
    x.steps[0].operand.put(j, -3.4028235e38f);
    x.steps[0].operand.put(70 + j, -INFINITY);
    x.steps[0].operand.put(140 + j, j < 69 ? -INFINITY : -1e30f);
  }
  x.steps[0].operand.put(3 * 70 + 5, NAN);
  x.prefill(kernels);
  double mean = 0;
  for (int64_t j = 0; j < 70; j++) mean += x.v[j * 8] / 70;
  expect(fabs(x.out[0] - mean) < 1e-5, x.label + ": equal scores, however low, weigh alike");
  expect(x.out[8] == 0 && x.lse[1] == -INFINITY, x.label + ": -inf hides");
  expect(x.out[16] == x.v[69 * 8], x.label + ": one key gives its value");
  expect(std::isnan(x.out[24]), x.label + ": NaN vanished");
}

// Biases that rise from tile to tile, fall or stay, each row's by as much as it likes: whether the maximum of the tiles before will do for a row
// is its own affair, so it has the same bits alone.
void rising_biases(const Kernels& kernels) {
  const float rises[] = {0, 1, 5, 12, 20, 100, 1000, -5, -100, -1000};
  for (DType dtype : DTYPES) {
    Case x(kernels, "rising biases", dtype, 1, 1, 1, 40, 400, 16);
    x.steps.push_back(x.bias(DType::float32, false, false, true, true));
    for (int64_t i = 0; i < 40; i++)
      for (int64_t j = 0; j < 400; j++)
        x.steps[0].operand.put(i * 400 + j, i % 3 == 0 && j < 64 ? -INFINITY : rises[i * 7 % 10] * (float)(j / 64));
    x.sink = {50};
    x.prefill(kernels, 2, 192, 64);
    x.check();
    for (int64_t i = 0; i < 40; i++) {
      Case alone(kernels, "alone", dtype, 1, 1, 1, 1, 400, 16);
      alone.steps.push_back(alone.bias(DType::float32, false, false, true, true));
      alone.sink = x.sink;
      alone.k = x.k;
      alone.v = x.v;
      memcpy(alone.q.data(), (char*)x.q.data() + i * 16 * size_of(dtype), 16 * size_of(dtype));
      memcpy(alone.steps[0].operand.data(), (float*)x.steps[0].operand.data() + i * 400, 400 * 4);
      alone.prefill(kernels, 1, 192, 64);
      expect(memcmp(alone.out.data(), (char*)x.out.data() + i * 16 * size_of(dtype), 16 * size_of(dtype)) == 0 && alone.lse[0] == x.lse[i],
             x.label + ": row " + std::to_string(i) + " has other bits alone");
    }
  }
}

void maps(const Kernels& kernels) {
  const auto same_document = [](int64_t, int64_t, int64_t i, int64_t j) { return document(i) == document(j); };
  const auto blocks = [](int64_t b, int64_t h, int64_t i, int64_t j) { return (i / 96 + j / 64 + b + h) % 3 == 0; };
  const auto ragged = [](int64_t b, int64_t h, int64_t i, int64_t j) { return (i * 7 + j * 13 + b + h) % 11 < 4 && j > 70; };
  const auto padding = [](int64_t b, int64_t, int64_t, int64_t j) { return j < 100 + 130 * b; };
  const auto nothing = [](int64_t, int64_t, int64_t, int64_t) { return false; };
  for (DType dtype : DTYPES)
    for (int which = 0; which < 10; which++) {
      Case x(kernels, "map " + std::to_string(which), dtype, 2, 2, 1, which < 5 ? 200 : 5, which < 5 ? 230 : 500, 16);
      if (which % 5 == 0) x.show(same_document, false, false, true);
      if (which % 5 == 1) x.show(blocks, true, true, true);
      if (which % 5 == 2) x.show(ragged, true, true, true);
      if (which % 5 == 3) x.show(padding, true, false, false);
      if (which % 5 == 4) x.show(nothing, false, false, false);
      if (which % 2) x.bounds = CAUSAL;
      if (which % 3 == 0) x.steps.push_back(softcap(3));
      if (which % 4 == 0) x.sink = {0.5f, -2};
      x.poison_hidden_tiles();
      x.prefill(kernels, 2, 192, which % 2 ? 96 : 256);
      x.check();
      const std::string once(x.out.memory.begin(), x.out.memory.end());
      for (int64_t tile_q : {1, 100, 1000}) {  // neither the tasks nor the threads change a bit
        x.prefill(kernels, tile_q == 100 ? 5 : 1, tile_q, which % 2 ? 96 : 256);
        expect(std::equal(once.begin(), once.end(), x.out.memory.begin()), x.label + ": other bits with tile_q " + std::to_string(tile_q));
      }
      if (which < 5) continue;
      const std::vector<int64_t> lens = {x.seq_kv, 333};
      x.decode(kernels, lens, 256);
      x.check(lens);
    }
}

// A map and a bias by sequence, whose positions are local to each.
void packed(const Kernels& kernels) {
  const std::vector<int64_t> q = {0, 100, 100, 230}, kv = {0, 90, 120, 310};
  for (DType dtype : DTYPES) {
    Case x(kernels, "packed", dtype, 1, 2, 1, 230, 310, 16);
    x.batch = 3, x.seq_q = 130, x.seq_kv = 190;  // the longest
    x.show([](int64_t b, int64_t h, int64_t i, int64_t j) { return (i + j * (b + 1) + h) % 5 < 3; }, true, true, true);
    x.steps.push_back(x.bias(DType::float32, true, true, true, true));
    x.bounds = CAUSAL;
    ForwardProblem p = x.forward(192, 128);
    p.q = p.out = {0, 230 * 16, 16};
    p.k = p.v = {0, 310 * 16, 16};
    p.lse = {0, 230, 1};
    run_forward_varlen(kernels, p, x.operands(), q.data(), kv.data(), 2);
    const Case::Values values = {x.q.values(), x.k.values(), x.v.values()};
    for (int64_t b = 0; b < 3; b++)
      for (int64_t h = 0; h < 2; h++)
        for (int64_t i = 0; i < q[b + 1] - q[b]; i++)
          x.check_row(values, b, h, i, h * 230 + q[b] + i, kv[b], kv[b + 1] - kv[b], q[b + 1] - q[b]);
  }
}

// pack_mask, for bytes that lie anyhow.
void packing() {
  const int64_t batch = 2, heads = 3, rows = 100, keys = 130;
  std::vector<uint8_t> bytes(batch * heads * rows * keys);
  for (uint8_t& byte : bytes) byte = generator() % 4 ? 0 : 1 + generator() % 255;
  for (bool turned : {false, true}) {
    const MaskTensor mask = {bytes.data(), batch, heads, rows, keys, heads * rows * keys, rows * keys, turned ? 1 : keys, turned ? rows : 1};
    std::vector<int32_t> places(batch * heads * 2 * 3);
    std::vector<uint64_t> bits(places.size() * MAP_ROWS);
    pack_mask(mask, MAP_ROWS, places.data(), bits.data(), 2);
    for (int64_t n = 0; n < (int64_t)bytes.size(); n++) {
      const int64_t b = n / keys / rows / heads, h = n / keys / rows % heads, i = n / keys % rows, j = n % keys;
      const int64_t tile = ((b * heads + h) * 2 + i / MAP_ROWS) * 3 + j / MAP_KEYS;
      const bool is = bytes[b * mask.stride_batch + h * mask.stride_head + i * mask.stride_row + j * mask.stride_key];
      expect(places[tile] == PLACE_HIDDEN ? !is : places[tile] == PLACE_FULL ? is : (bits[places[tile] * MAP_ROWS + i % MAP_ROWS] >> j % MAP_KEYS & 1) == is,
             "pack_mask: pair " + std::to_string(n) + (turned ? ", turned" : ""));
    }
  }
  std::vector<uint8_t> ones(40, 1), zeros(40, 0);  // a tile that reaches past the keys is full or hidden by what lies inside
  int32_t place = 5;
  std::vector<uint64_t> bits(MAP_ROWS);
  pack_mask({ones.data(), 1, 1, 2, 20, 0, 0, 20, 1}, MAP_ROWS, &place, bits.data(), 1);
  expect(place == PLACE_FULL, "pack_mask: a full tile");
  pack_mask({zeros.data(), 1, 1, 2, 20, 0, 0, 20, 1}, MAP_ROWS, &place, bits.data(), 1);
  expect(place == PLACE_HIDDEN, "pack_mask: a hidden tile");
}

}  // namespace

// An argument names the only instruction set to test.
int main(int argc, char** argv) {
  packing();
  for (const Kernels* kernels : all_kernels()) {
    if (argc > 1 && std::string(kernels->isa) != argv[1]) continue;
    const int before = checks;
    softcap_values(*kernels);
    steps(*kernels);
    extreme_biases(*kernels);
    rising_biases(*kernels);
    maps(*kernels);
    packed(*kernels);
    printf("%s: %d checks\n", kernels->isa, checks - before);
  }
  printf("%d checks, %d failures\n", checks, failures);
  return failures || !checks ? 1 : 0;
}
