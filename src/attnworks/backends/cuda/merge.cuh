// Results over parts of the keys put together, each weighed by e^LSE: O = sum of e^(LSE_s - LSE) O_s, in the parts' order,
// so that the same parts give the same bits. A sink enters here, once. A warp for each row; its lanes share out the parts'
// LSEs, as a part after the other would wait for memory once for each.
struct MergeParams {
  const float* parts;      // O of each part (part, row, dim_v), of all heads' and sequences' rows in a row, from `first` on
  const float* parts_lse;  // (part, row)
  void* out;
  float* lse;              // null: not asked for
  const float* sink;       // null, or one logit for each head
  i64 out_batch, out_head, out_row, out_split, lse_split;  // strides in elements
  i64 first, end;          // rows that have parts
  int heads, rows, splits, dim_v;
  int tile_q, tiles;       // rows of a tile, tiles of a sequence
  Stretches stretches;     // where the number of parts is not `splits`, which is 0 then
};
constexpr int WARPS = 4, TURNS = 4;  // TURNS: parts of a lane, so that there are at most 128: MOST_PARTS in plans.py

DEV int parts_of(const MergeParams& p, i64 n) {
  if (p.splits) return p.splits;
  const Stretches& s = p.stretches;
  const int tile = (int)(n / p.rows * p.tiles + n % p.rows / p.tile_q) - s.whole;
  return stretch_of(s, (tile + 1) * s.kv_tiles - 1) - stretch_of(s, tile * s.kv_tiles) + 1;
}
template <typename F> DEV float reduced(float x, F both) {  // of all lanes, for all of them
#pragma unroll
  for (int d = 16; d; d /= 2) x = both(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) merge(const MergeParams p) {
  const i64 m = (i64)blockIdx.x * WARPS + threadIdx.x / 32, n = p.first + m, unit = n / p.rows;
  const int lane = threadIdx.x % 32, head = unit % p.heads;
  if (n >= p.end) return;
  const i64 at = unit / p.heads * p.out_batch + head * p.out_head + n % p.rows * p.out_row;
  const int parts = parts_of(p, n);
  const float logit = p.sink ? p.sink[head] : -INFINITE;
  float weight[TURNS], most = logit;
  await_kernel_before();  // which writes the parts
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int s = 32 * t + lane;
    weight[t] = s < parts ? p.parts_lse[s * p.lse_split + m] : -INFINITE, most = fmaxf(most, weight[t]);
  }
  most = reduced(most, [](float x, float y) { return fmaxf(x, y); });
  const float shift = most == -INFINITE ? 0.f : most;  // no part saw a key: nothing to subtract
  float sum = 0;
#pragma unroll
  for (int t = 0; t < TURNS; t++) weight[t] = exp2_fast((weight[t] - shift) * LOG2E), sum += weight[t];
  sum = reduced(sum, [](float x, float y) { return x + y; }) + exp2_fast((logit - shift) * LOG2E);
  const float scale = sum == 0 ? 0.f : 1 / sum;
  for (int c = 2 * lane; c - 2 * lane < p.dim_v; c += 64) {  // all lanes, as they tell each other weights
    const bool inside = c < p.dim_v;
    const float* part = p.parts + m * p.dim_v + (inside ? c : 0);
    float x = 0, y = 0;
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
      const int stop = min(parts - 32 * t, 32);
#pragma unroll 8
      for (int s = 0; s < stop; s++, part += p.out_split) {
        const float w = __shfl_sync(~0u, weight[t], s) * scale;
        const float2 o = *(const float2*)part;
        x += w * o.x, y += w * o.y;
      }
    }
    if (inside) *(u32*)((unsigned short*)p.out + at + c) = pack(x, y);
  }
  if (p.lse && lane == 0) p.lse[n] = sum == 0 ? -INFINITE : shift + log2_fast(sum) * LN2;
}
