// Results over parts of the keys put together, each weighed by e^LSE: O = sum of e^(LSE_s - LSE) O_s, in the parts' order,
// so that the same parts give the same bits. A sink enters here, once. A warp for each row.
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
constexpr int WARPS = 4;

DEV int parts_of(const MergeParams& p, i64 n) {
  if (p.splits) return p.splits;
  const Stretches& s = p.stretches;
  const int tile = (int)(n / p.rows * p.tiles + n % p.rows / p.tile_q) - s.whole;
  return stretch_of(s, (tile + 1) * s.kv_tiles - 1) - stretch_of(s, tile * s.kv_tiles) + 1;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) merge(const MergeParams p) {
  const i64 m = (i64)blockIdx.x * WARPS + threadIdx.x / 32, n = p.first + m, unit = n / p.rows;
  const int lane = threadIdx.x % 32, head = unit % p.heads;
  if (n >= p.end) return;
  const i64 at = unit / p.heads * p.out_batch + head * p.out_head + n % p.rows * p.out_row;
  const int parts = parts_of(p, n);
  const float logit = p.sink ? p.sink[head] : -INFINITE;
  float most = logit;
  for (int s = 0; s < parts; s++) most = fmaxf(most, p.parts_lse[s * p.lse_split + m]);
  const float shift = most == -INFINITE ? 0.f : most;  // no part saw a key: nothing to subtract
  float sum = exp2_fast((logit - shift) * LOG2E);
  for (int s = 0; s < parts; s++) sum += exp2_fast((p.parts_lse[s * p.lse_split + m] - shift) * LOG2E);
  const float scale = sum == 0 ? 0.f : 1 / sum;
  for (int c = 2 * lane; c < p.dim_v; c += 64) {
    float x = 0, y = 0;
    for (int s = 0; s < parts; s++) {
      const float weight = exp2_fast((p.parts_lse[s * p.lse_split + m] - shift) * LOG2E) * scale;
      const float2 part = *(const float2*)(p.parts + s * p.out_split + m * p.dim_v + c);
      x += weight * part.x, y += weight * part.y;
    }
    *(u32*)((unsigned short*)p.out + at + c) = pack(x, y);
  }
  if (p.lse && lane == 0) p.lse[n] = sum == 0 ? -INFINITE : shift + log2_fast(sum) * LN2;
}
