// Results to device memory, straight from registers: tiles may be partial, and a sequence's last row may have another
// sequence's first behind it.
#if SPLIT
typedef float Result;  // a part's, which merge.cuh puts together
#else
typedef unsigned short Result;
#endif
struct Place {
  Result* out;          // of the thread's first row, at its columns
  float* lse;
  int left;             // rows of the sequence from that row on
};
DEV Place place_of(const Params& p, const Work& w, int row, int lane) {
  const i64 b = VARLEN ? 0 : w.batch, at = VARLEN ? (i64)w.start_q + row : row;
#if SPLIT
  float* part = (float*)p.out + w.split * p.out_split + b * p.out_batch + w.head * p.out_head + at * p.out_row;
  float* lse = p.lse + w.split * p.lse_split + b * p.lse_batch + w.head * p.lse_head + at;
  return {part + 2 * (lane % 4), lse, w.rows - row};
#else
  unsigned short* out = (unsigned short*)p.out + b * p.out_batch + w.head * p.out_head + at * p.out_row + 8 * (lane % 4);
  return {out, p.lse ? p.lse + b * p.lse_batch + w.head * p.lse_head + at : nullptr, w.rows - row};
#endif
}

// The rows' sums are complete: LSE (natural log), and 1 / sum for O. A row that saw no key: -inf and 0.
DEV void finish(Rows& rows, const Place& to, float sink, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = rows.sum[r], maximum = rows.maximum[r], scale = 1;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (SINK) {  // one more logit that carries no value
      const float logit = sink * LOG2E, both = fmaxf(maximum, logit), shift = both == -INFINITE ? 0.f : both;
      scale = exp2_fast(maximum - shift);
      sum = sum * scale + exp2_fast(logit - shift), maximum = both;
    }
    rows.scale[r] = sum == 0 ? 0.f : scale / sum;
    if (to.lse && lane % 4 == 0 && 8 * r < to.left)
      to.lse[8 * r] = sum == 0 ? -INFINITE : (maximum + log2_fast(sum)) * LN2;
  }
}

#if SPLIT
// O · scale as it is: a lane holds two columns of each eight.
template <int N> DEV void store(const float (&O)[N], const Rows& rows, const Params& p, const Place& to, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      if (8 * r < to.left && (!PARTIAL_V || 8 * i + 2 * (lane % 4) < p.dim_v))
        *(float2*)(to.out + r * 8 * p.out_row + 8 * i) =
            make_float2(O[4 * i + 2 * r] * rows.scale[r], O[4 * i + 2 * r + 1] * rows.scale[r]);
}
#else
// O · scale, rounded. Lanes of a row hold two columns of each eight: transposing 4 x 4 among the four lanes gives each of
// them eight columns in a row, 16 bytes.
template <int N> DEV void store(const float (&O)[N], const Rows& rows, const Params& p, const Place& to, int lane) {
  const bool high = lane & 2, odd = lane & 1;
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int g = 0; g < N / 16; g++) {
      u32 w[4], x[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        w[i] = pack(O[16 * g + 4 * i + 2 * r] * rows.scale[r], O[16 * g + 4 * i + 2 * r + 1] * rows.scale[r]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 got = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
        x[i] = high ? got : w[i], x[i + 2] = high ? w[i + 2] : got;
      }
      const u32 a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
      if (8 * r < to.left && (!PARTIAL_V || 32 * g + 8 * (lane % 4) < p.dim_v))
        *(uint4*)(to.out + r * 8 * p.out_row + g * 32) = odd ? make_uint4(a, x[1], b, x[3]) : make_uint4(x[0], a, x[2], b);
    }
  }
}

#endif

#if VARLEN
// Rows after the last sequence belong to none: 0, and LSE -inf. Written by warps that have nothing else to do.
DEV void store_rows_of_none(const Params& p, int worker, int workers, int lane) {
  for (i64 row = p.ends_q[p.batch] + worker; row < p.total_q; row += workers)
    for (int h = 0; h < p.heads; h++) {
      unsigned short* out = (unsigned short*)p.out + h * p.out_head + row * p.out_row;
      for (int c = 8 * lane; c < p.dim_v; c += 256) *(uint4*)(out + c) = make_uint4(0, 0, 0, 0);
      if (p.lse && lane == 0) p.lse[h * p.lse_head + row] = -INFINITE;
    }
}
#endif
