// Decode against a naive reference in double precision, on every instruction set that this machine runs. Every buffer ends where its last
// element ends (for the address sanitizer), and everything in it that is not part of the problem is NaN.
#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "../schedule.h"
#include "numbers.h"

using namespace attnworks;
using namespace attnworks::test;

namespace {

constexpr int64_t GARBAGE = INT64_MIN / 3;  // in page table entries that nobody may follow

// ---- a problem with its memory

struct Case {
  const char* name;
  int64_t seq_q = 1, heads_q = 2, heads_kv = 1, head_dim = 64, head_dim_v = 64, page_size = 0;
  std::vector<int64_t> kv_lens = {300};
  int64_t left = UNLIMITED, right = UNLIMITED;
  bool top_left = false;
  int64_t split_kv = 128;
  bool v_in_k = false;    // MLA: v is the first head_dim_v columns of k
  bool halves = false;    // k and v are two halves of one buffer (pages, 2, page_size, heads, dim)
  int64_t gap = 3;        // elements between rows that don't belong to the tensor
  float scale = 0.11f;
  float poison = NAN;     // what all other memory holds
  unsigned pages_seed = 1;
};

struct Memory {
  Case c;
  DType dtype;
  DecodeProblem p = {};
  std::vector<int64_t> lens, table;
  int64_t table_stride = 0;
  std::vector<char> q, k, v, out;
  std::vector<float> lse;
  int64_t v_offset = 0;  // of v inside k's buffer, in elements, if it lies there

  Memory(const Case& c, DType dtype) : c(c), dtype(dtype), lens(c.kv_lens) {
    const int64_t batch = lens.size(), columns = c.halves ? std::max(c.head_dim, c.head_dim_v) : c.head_dim;
    p.dtype = dtype, p.batch = batch, p.seq_q = c.seq_q, p.heads_q = c.heads_q, p.heads_kv = c.heads_kv;
    p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v, p.page_size = c.page_size, p.split_kv = c.split_kv;
    p.scale = c.scale, p.bounds = {c.left, c.right, c.top_left};
    auto bshd = [&](int64_t rows, int64_t heads, int64_t dim) { return Strides{rows * heads * (dim + c.gap), dim + c.gap, heads * (dim + c.gap)}; };
    p.q = bshd(c.seq_q, c.heads_q, c.head_dim);
    p.out = {c.seq_q * c.heads_q * c.head_dim_v, c.seq_q * c.head_dim_v, c.head_dim_v};  // heads before rows: no two tensors alike
    p.lse = {c.heads_q * c.seq_q, c.seq_q, 1};
    const int64_t capacity = c.page_size ? c.page_size : std::max<int64_t>(1, *std::max_element(lens.begin(), lens.end()));
    p.k = bshd(capacity, c.heads_kv, columns);
    p.v = bshd(capacity, c.heads_kv, c.head_dim_v);
    if (c.v_in_k || c.halves) p.v = p.k;
    if (c.halves) {
      v_offset = p.k.batch;
      p.k.batch *= 2, p.v.batch *= 2;
    }
    if (c.page_size) fill_table();
    q = buffer([&](auto each) { for_rows(batch, c.seq_q, c.heads_q, [&](int64_t b, int64_t i, int64_t h) { each(at(p.q, b, h, i), c.head_dim); }); });
    k = buffer([&](auto each) {
      for_keys([&](int64_t b, int64_t j, int64_t h) {
        each(key_at(p.k, b, h, j), c.head_dim);
        if (c.halves) each(v_offset + key_at(p.v, b, h, j), c.head_dim_v);
      });
    });
    if (!in_k()) v = buffer([&](auto each) { for_keys([&](int64_t b, int64_t j, int64_t h) { each(key_at(p.v, b, h, j), c.head_dim_v); }); });
    forget();
    randomise();
  }
  // As if nothing had been computed yet.
  void forget() {
    out.assign(lens.size() * p.out.batch * size_of(dtype), 0x55);
    lse.assign(lens.size() * p.lse.batch, 12345.f);
  }

  bool in_k() const { return c.v_in_k || c.halves; }
  static int64_t at(const Strides& s, int64_t b, int64_t h, int64_t i) { return b * s.batch + h * s.head + i * s.row; }
  int64_t key_at(const Strides& s, int64_t b, int64_t h, int64_t j) const {
    if (!c.page_size) return at(s, b, h, j);
    return at(s, table[b * table_stride + j / c.page_size], h, j % c.page_size);
  }
  template <typename F>
  static void for_rows(int64_t batch, int64_t rows, int64_t heads, F f) {
    for (int64_t b = 0; b < batch; b++)
      for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++) f(b, i, h);
  }
  template <typename F>
  void for_keys(F f) const {
    for (size_t b = 0; b < lens.size(); b++)
      for (int64_t j = 0; j < lens[b]; j++)
        for (int64_t h = 0; h < c.heads_kv; h++) f(b, j, h);
  }
  char* q_at(int64_t b, int64_t h, int64_t i) { return q.data() + at(p.q, b, h, i) * size_of(dtype); }
  char* k_at(int64_t b, int64_t h, int64_t j) { return k.data() + key_at(p.k, b, h, j) * size_of(dtype); }
  char* v_at(int64_t b, int64_t h, int64_t j) { return (in_k() ? k : v).data() + (v_offset + key_at(p.v, b, h, j)) * size_of(dtype); }

  // Pages in random order; the table ends with the last entry that is needed.
  void fill_table() {
    auto pages = [&](int64_t len) { return (len + c.page_size - 1) / c.page_size; };
    int64_t used = 0;
    for (int64_t len : lens) used += pages(len), table_stride = std::max(table_stride, pages(len) + 1);
    std::vector<int64_t> order(used + 2);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(c.pages_seed));
    table.assign((lens.size() - 1) * table_stride + pages(lens.back()), GARBAGE);
    auto next = order.begin();
    for (size_t b = 0; b < lens.size(); b++)
      for (int64_t i = 0; i < pages(lens[b]); i++) table[b * table_stride + i] = *next++;
  }
  // As many bytes as the last of the parts reaches, all poisoned.
  template <typename Parts>
  std::vector<char> buffer(Parts parts) const {
    int64_t end = 0;
    parts([&](int64_t first, int64_t n) { end = std::max(end, first + n); });
    std::vector<char> bytes(end * size_of(dtype));
    for (int64_t i = 0; i < end; i++) set(dtype, &bytes[i * size_of(dtype)], c.poison);
    bytes.shrink_to_fit();
    return bytes;
  }
  // The same numbers whatever the layout is.
  void randomise() {
    std::mt19937 random(7);
    auto fill = [&](char* row, int64_t n) {
      for (int64_t d = 0; d < n; d++) set(dtype, row + d * size_of(dtype), (int(random() % 257) - 128) / 64.f);
    };
    for_rows(lens.size(), c.seq_q, c.heads_q, [&](int64_t b, int64_t i, int64_t h) { fill(q_at(b, h, i), c.head_dim); });
    for_keys([&](int64_t b, int64_t j, int64_t h) {
      fill(k_at(b, h, j), c.head_dim);
      if (!c.v_in_k) fill(v_at(b, h, j), c.head_dim_v);
    });
  }

  void run(const Kernels& kernels, int threads) {
    const void* v_data = in_k() ? k.data() + v_offset * size_of(dtype) : v.data();
    run_decode(kernels, p, {q.data(), k.data(), v_data, out.data(), lse.data()}, lens.data(), c.page_size ? table.data() : nullptr, table_stride, threads);
  }
  // Sequence b alone in a batch of one.
  void run_alone(const Kernels& kernels, int64_t b) {
    DecodeProblem one = p;
    one.batch = 1;
    const int64_t size = size_of(dtype), cache = c.page_size ? 0 : b;
    const char* v_data = in_k() ? k.data() + v_offset * size : v.data();
    run_decode(kernels, one,
               {q.data() + b * p.q.batch * size, k.data() + cache * p.k.batch * size, v_data + cache * p.v.batch * size, out.data() + b * p.out.batch * size,
                lse.data() + b * p.lse.batch},
               &lens[b], c.page_size ? table.data() + b * table_stride : nullptr, table_stride, 1);
  }
};

// ---- the reference

// Elementwise bound of design: 8 (u + 2^-24 scale |q||k|) through the same contraction on absolute values.
void compare_row(const Memory& m, int64_t b, int64_t h, int64_t i, const double* query, const Matrix& keys, const Matrix& values, const std::string& row) {
  const Case& c = m.c;
  const int64_t kv_len = m.lens[b], shift = c.top_left ? 0 : kv_len - c.seq_q;
  const int64_t begin = std::max<int64_t>(0, i + shift - c.left), end = std::min(kv_len, i + shift + c.right + 1);
  std::vector<Product> scores;
  double most = -INFINITY, total = 0, largest = 0;
  for (int64_t j = begin; j < end; j++) {
    scores.emplace_back(query, keys.row(j), c.head_dim, c.scale);
    most = std::max(most, scores.back().value), largest = std::max(largest, scores.back().size);
  }
  for (Product& score : scores) total += score.value = exp(score.value - most);
  const float lse = m.lse[b * m.p.lse.batch + h * m.p.lse.head + i];
  if (begin >= end)
    expect(lse == -INFINITY, row + ": lse of a row without keys");
  else
    expect(fabs(lse - (most + log(total))) <= 8 * 0x1p-24 * (largest + fabs(lse) + 4), row + ": lse");
  WeightedSum expected(c.head_dim_v, m.dtype == DType::float16 ? 0x1p-24 : 0x1p-133);
  for (size_t n = 0; n < scores.size(); n++) {
    const double prob = scores[n].value / total;
    expected.add(prob, 8 * (roundoff(m.dtype) + 0x1p-24 * scores[n].size) * prob, values.row(begin + n));
  }
  for (int64_t d = 0; d < c.head_dim_v; d++) {
    const double out = get(m.dtype, m.out.data() + (Memory::at(m.p.out, b, h, i) + d) * size_of(m.dtype));
    expect(begin >= end ? out == 0 : fabs(out - expected.value[d]) <= expected.bound[d],
           [&] { return row + " column " + std::to_string(d) + ": " + std::to_string(out) + ", not " + std::to_string(expected.value[d]); });
  }
}

void compare(Memory& m, const std::string& where) {
  const Case& c = m.c;
  const int64_t group = c.heads_q / c.heads_kv, batch = m.lens.size();
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h_kv = 0; h_kv < c.heads_kv; h_kv++) {
      const Matrix keys(m.dtype, m.lens[b], c.head_dim, [&](int64_t j) { return m.k_at(b, h_kv, j); });
      const Matrix values(m.dtype, m.lens[b], c.head_dim_v, [&](int64_t j) { return m.v_at(b, h_kv, j); });
      for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++) {
        const Matrix queries(m.dtype, c.seq_q, c.head_dim, [&](int64_t i) { return m.q_at(b, h, i); });
        for (int64_t i = 0; i < c.seq_q; i++)
          compare_row(m, b, h, i, queries.row(i), keys, values, where + " batch " + std::to_string(b) + " row " + std::to_string(i) + " head " + std::to_string(h));
      }
    }
}
bool same_bits(const Memory& a, const Memory& b) {
  return a.out == b.out && memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

// ---- the cases

std::vector<Case> cases() {
  std::vector<Case> list;
  auto add = [&](const char* name, auto change) {
    Case c;
    c.name = name;
    change(c);
    list.push_back(c);
  };
  add("lengths", [](Case& c) { c.kv_lens = {0, 1, 2, 31, 127, 128, 129, 256, 257, 300}; });
  add("all empty", [](Case& c) { c.kv_lens = {0, 0}; });
  add("one split", [](Case& c) { c.split_kv = 4096, c.kv_lens = {0, 513}; });
  add("split of 1", [](Case& c) { c.split_kv = 1, c.kv_lens = {7}; });
  add("negative scale", [](Case& c) { c.scale = -0.1f; });
  add("large scores", [](Case& c) { c.scale = 40.f; });
  for (int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33}) add("group", [&](Case& c) { c.heads_kv = 2, c.heads_q = 2 * group, c.kv_lens = {140}; });
  for (int64_t dim : {1, 3, 8, 16, 24, 40, 72, 80, 100, 128, 256})
    add("head_dim", [&](Case& c) { c.heads_q = 7, c.head_dim = dim, c.head_dim_v = dim, c.kv_lens = {75}; });
  add("head_dim_v larger", [](Case& c) { c.head_dim = 20, c.head_dim_v = 130, c.heads_q = 5; });
  add("head_dim_v smaller", [](Case& c) { c.head_dim = 192, c.head_dim_v = 128, c.heads_q = 4; });
  for (int64_t page : {1, 3, 16, 24, 128})
    for (int64_t group : {1, 4}) {
      add("pages", [&](Case& c) { c.page_size = page, c.heads_kv = 2, c.heads_q = 2 * group, c.kv_lens = {0, 1, 17, 129, 300}; });
      add("pages, halves", [&](Case& c) { c.page_size = page, c.halves = true, c.heads_kv = 2, c.heads_q = 2 * group, c.kv_lens = {33, 200}; });
    }
  add("MLA", [](Case& c) { c.head_dim = 576, c.head_dim_v = 512, c.heads_q = 9, c.v_in_k = true, c.kv_lens = {1, 70}, c.scale = 0.03f; });
  add("MLA, pages", [](Case& c) { c.head_dim = 576, c.head_dim_v = 512, c.heads_q = 4, c.v_in_k = true, c.page_size = 16, c.kv_lens = {50}, c.scale = 0.03f; });
  for (int64_t seq_q : {2, 3, 5})
    for (int64_t group : {1, 3}) {
      auto rows = [&](Case& c) { c.seq_q = seq_q, c.heads_q = group, c.kv_lens = {0, 1, 2, 4, 129, 131, 260}; };
      add("rows", [&](Case& c) { rows(c); });
      add("rows, causal", [&](Case& c) { rows(c), c.right = 0; });
      add("rows, causal from the top left", [&](Case& c) { rows(c), c.right = 0, c.top_left = true; });
      add("rows, window", [&](Case& c) { rows(c), c.right = 0, c.left = 40; });
      add("rows, only self", [&](Case& c) { rows(c), c.right = 0, c.left = 0, c.page_size = 3; });
      add("rows, window to both sides", [&](Case& c) { rows(c), c.right = 1, c.left = 2, c.split_kv = 2; });
    }
  // Heads side by side: a task goes over several.
  for (int64_t heads : {5, 20})
    for (int64_t group : {1, 3}) {
      auto many = [&](Case& c) { c.gap = 0, c.heads_kv = heads, c.heads_q = heads * group, c.kv_lens = {0, 33, 140}; };
      add("heads together", [&](Case& c) { many(c), c.head_dim = c.head_dim_v = 128; });
      add("heads together, odd dims", [&](Case& c) { many(c), c.head_dim = 37, c.head_dim_v = 18; });
      add("heads together, pages", [&](Case& c) { many(c), c.page_size = 16; });
      add("heads together, causal window", [&](Case& c) { many(c), c.seq_q = 3, c.right = 0, c.left = 50, c.split_kv = 32; });
    }
  add("heads together, halves of a page", [](Case& c) { c.gap = 0, c.heads_kv = c.heads_q = 6, c.page_size = 16, c.halves = true, c.kv_lens = {90}; });
  add("heads together, many rows", [](Case& c) { c.gap = 0, c.heads_kv = 3, c.heads_q = 6, c.seq_q = 20, c.right = 0, c.kv_lens = {150}; });
  add("many rows, causal", [](Case& c) { c.seq_q = 45, c.heads_q = 3, c.right = 0, c.kv_lens = {20, 150}; });
  return list;
}

void run_case(const Kernels& kernels, const Case& c, DType dtype, const std::string& where) {
  Memory m(c, dtype);
  m.run(kernels, 1);
  compare(m, where);
  Memory other = m;
  for (int threads : {2, 3}) {
    other.forget();
    other.run(kernels, threads);
    expect(same_bits(m, other), where + ": depends on the number of threads");
  }
  other.forget();
  for (size_t b = 0; b < c.kv_lens.size(); b++) other.run_alone(kernels, b);
  expect(same_bits(m, other), where + ": depends on the batch");
  Case changed = c;
  changed.poison = 1.f, changed.pages_seed = 99;
  if (c.heads_kv <= 2) changed.gap = 0;  // many heads side by side are taken in smaller blocks of keys, which rounds otherwise
  Memory moved(changed, dtype);
  moved.run(kernels, 2);
  expect(same_bits(m, moved), where + ": depends on the layout, the order of pages or memory outside of the problem");
}

// Rows of 4 heads in one group, one key special.
void run_specials(const Kernels& kernels, DType dtype, const std::string& where) {
  Case c = {};
  c.heads_q = 4, c.kv_lens = {300};
  const int64_t size = size_of(dtype), row = c.head_dim_v * size;
  Memory plain(c, dtype);
  plain.run(kernels, 1);
  auto nans = [&](const Memory& m, int64_t head) {
    int n = 0;
    for (int64_t d = 0; d < c.head_dim_v; d++) n += std::isnan(get(dtype, m.out.data() + head * row + d * size));
    return n;
  };
  Memory bad_query(c, dtype);
  set(dtype, bad_query.q_at(0, 2, 0), NAN);
  bad_query.run(kernels, 1);
  for (int64_t h = 0; h < 4; h++)
    expect(h == 2 ? nans(bad_query, h) == c.head_dim_v && std::isnan(bad_query.lse[h]) : memcmp(&bad_query.out[h * row], &plain.out[h * row], row) == 0,
          where + ": NaN in one query");
  Memory bad_key(c, dtype), bad_value(c, dtype);
  set(dtype, bad_key.k_at(0, 0, 200), NAN);
  set(dtype, bad_value.v_at(0, 0, 299) + 5 * size, NAN);
  bad_key.run(kernels, 1), bad_value.run(kernels, 1);
  for (int64_t h = 0; h < 4; h++) {
    expect(nans(bad_key, h) == c.head_dim_v && std::isnan(bad_key.lse[h]), where + ": NaN in a key");
    expect(nans(bad_value, h) == 1 && bad_value.lse[h] == plain.lse[h], where + ": NaN in a value");
  }
  // Infinity in the last value of an odd number of keys, or in the last of a whole number of vectors before them: nothing may meet it with
  // weight 0, nor what a kernel kept of it.
  Case odd = c;
  odd.kv_lens = {299};
  for (int64_t key : {287, 298})
    for (int64_t column : {5, 37}) {
      Memory infinite(odd, dtype);
      set(dtype, infinite.v_at(0, 0, key) + column * size, INFINITY);
      infinite.run(kernels, 1);
      for (int64_t h = 0; h < 4; h++)
        expect(get(dtype, infinite.out.data() + h * row + column * size) == INFINITY && nans(infinite, h) == 0, where + ": an infinite value");
    }
  // A score of -inf hides its key: the result is that of the keys before it.
  Memory hidden(c, dtype), shorter(c, dtype);
  shorter.lens[0] = 299;
  for (Memory* m : {&hidden, &shorter})
    for (int64_t h = 0; h < 4; h++) set(dtype, m->q_at(0, h, 0), 1.f);
  set(dtype, hidden.k_at(0, 0, 299), -INFINITY);
  hidden.run(kernels, 1), shorter.run(kernels, 1);
  expect(same_bits(hidden, shorter), where + ": a score of -inf");
  // One key far below every finite stand-in for -inf: softmax is shift-invariant.
  c.kv_lens = {1};
  for (float scale : {-1e5f, -1e30f, 1e30f}) {
    c.scale = scale;
    Memory far(c, dtype);
    for (int64_t h = 0; h < 4; h++)
      for (int64_t d = 0; d < c.head_dim; d++) {
        set(dtype, far.q_at(0, h, 0) + d * size, d == 0);
        set(dtype, far.k_at(0, 0, 0) + d * size, d == 0);
      }
    far.run(kernels, 1);
    for (int64_t h = 0; h < 4; h++) {
      expect(memcmp(&far.out[h * row], far.v_at(0, 0, 0), row) == 0, where + ": one key gives its value");
      expect(fabs(far.lse[h] / scale - 1) < 1e-6, where + ": one key gives its score");
    }
  }
}

void run_concurrently(const Kernels& kernels, const std::string& where) {
  Case c = {};
  c.heads_q = 3, c.kv_lens = {1000, 1, 400};
  Memory expected(c, DType::float32), a = expected, b = expected;
  expected.run(kernels, 1);
  std::thread other([&] { a.run(kernels, 2); });
  b.run(kernels, 2);
  other.join();
  expect(same_bits(a, expected) && same_bits(b, expected), where + ": two callers at once");
}

}  // namespace

// An argument names the only instruction set to test.
int main(int argc, char** argv) {
  for (const Kernels* kernels : all_kernels()) {
    if (argc > 1 && std::string(kernels->isa) != argv[1]) continue;
    for (DType dtype : DTYPES) {
      const std::string where = std::string(kernels->isa) + " " + name(dtype) + " ";
      for (const Case& c : cases()) run_case(*kernels, c, dtype, where + c.name);
      run_specials(*kernels, dtype, where);
    }
    run_concurrently(*kernels, kernels->isa);
    printf("%s: %d checks, %d failed\n", kernels->isa, checks, failures);
  }
  return failures > 0 || checks == 0;
}
