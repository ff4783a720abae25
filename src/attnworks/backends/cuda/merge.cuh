// Results over parts of the keys put together, each weighed by e^LSE: O = sum of e^(LSE_s - LSE) O_s, in the parts' order,
// so that the same parts give the same bits. A sink enters here, once. A warp for each row.
struct MergeParams {
  const float* parts;      // O of each part, as `out` is laid out
  const float* parts_lse;  // (splits, batch, heads, rows)
  void* out;
  float* lse;              // null: not asked for
  const float* sink;       // null, or one logit for each head
  i64 out_batch, out_head, out_row, out_split, lse_split;  // strides in elements; lse_split: rows in all
  int heads, rows, splits, dim_v;
};
constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS) merge(const MergeParams p) {
  const i64 n = (i64)blockIdx.x * WARPS + threadIdx.x / 32, unit = n / p.rows;
  const int lane = threadIdx.x % 32, head = unit % p.heads;
  if (n >= p.lse_split) return;
  const i64 at = unit / p.heads * p.out_batch + head * p.out_head + n % p.rows * p.out_row;
  const float logit = p.sink ? p.sink[head] : -INFINITE;
  float most = logit;
  for (int s = 0; s < p.splits; s++) most = fmaxf(most, p.parts_lse[s * p.lse_split + n]);
  const float shift = most == -INFINITE ? 0.f : most;  // no part saw a key: nothing to subtract
  float sum = exp2_fast((logit - shift) * LOG2E);
  for (int s = 0; s < p.splits; s++) sum += exp2_fast((p.parts_lse[s * p.lse_split + n] - shift) * LOG2E);
  const float scale = sum == 0 ? 0.f : 1 / sum;
  for (int c = 2 * lane; c < p.dim_v; c += 64) {
    float x = 0, y = 0;
    for (int s = 0; s < p.splits; s++) {
      const float weight = exp2_fast((p.parts_lse[s * p.lse_split + n] - shift) * LOG2E) * scale;
      const float2 part = *(const float2*)(p.parts + s * p.out_split + at + c);
      x += weight * part.x, y += weight * part.y;
    }
    *(u32*)((unsigned short*)p.out + at + c) = pack(x, y);
  }
  if (p.lse && lane == 0) p.lse[n] = sum == 0 ? -INFINITE : shift + log2_fast(sum) * LN2;
}
