// Results to device memory. Where shared memory has room (BULK_STORE), a warp lays its 16 rows there and the copy engine
// takes them away, which leaves out what is past the sequence's last row. Packed sequences have another one's first row
// there; their results, and those of the widest heads, go straight from registers.
constexpr int V_CHUNKS = (HEAD_DIM_V + 63) / 64;  // of 64 columns: one swizzled line
constexpr u32 STAGE_CHUNK = 16 * 128;             // bytes of one of them of a warp's results
struct Place {
#if !BULK_STORE && !SPLIT
  unsigned short* out;  // of the thread's first row, at its columns
#endif
#if !BULK_STORE || PARTIAL  // else worked out when they are needed: registers are short until then
  float* lse;  // of the thread's first row
  int left;    // rows of the sequence from that row on
#endif
#if BULK_STORE || PARTIAL
  int row, head, batch;  // of the warp's first row
#endif
};
DEV float* lse_of(const Params& p, int batch, int head, i64 at) {
  return p.lse ? p.lse + batch * p.lse_batch + head * p.lse_head + at : nullptr;
}
DEV Place place_of(const Params& p, const Work& w, int row, int lane) {
  Place to;
#if !BULK_STORE || PARTIAL
  const i64 b = VARLEN ? 0 : w.batch, at = VARLEN ? (i64)w.start_q + row : row;
  to.lse = lse_of(p, b, w.head, at);
  to.left = w.rows - row;
#endif
#if BULK_STORE || PARTIAL
  to.row = row - lane / 4, to.head = w.head, to.batch = w.batch;
#endif
#if PARTIAL  // a part's results, which merge.cuh puts together: batch < 0, and in its place and the head's which of them
  if (SPLIT || w.part >= 0) {
    const i64 n = (b * p.heads + w.head) * p.rows + row - p.first;
    to.lse = p.parts_lse + w.part * p.lse_split + n;
    to.row = (int)n, to.head = w.part, to.batch = -1;
  }
#endif
#if !BULK_STORE && !SPLIT
  to.out = (unsigned short*)p.out + b * p.out_batch + w.head * p.out_head + at * p.out_row + 4 * (lane / 2 % 2) + 8 * (lane % 2);
#endif
  return to;
}

// The rows' sums are complete: LSE (natural log), and 1 / sum for O. A row that saw no key: -inf and 0.
DEV void finish(Rows& rows, const Params& p, const Place& to, float sink, int lane) {
#if !BULK_STORE || PARTIAL
  float* const lse = to.lse;
  const int left = to.left;
#else
  const int row = to.row + lane / 4, left = p.rows - row;
  float* const lse = lse_of(p, to.batch, to.head, row);
#endif
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
    if (lse && lane % 4 == 0 && 8 * r < left)
      lse[8 * r] = sum == 0 ? -INFINITE : (maximum + log2_fast(sum)) * LN2;
  }
}

#if PARTIAL
// By a vote, though all lanes know: then the compiler knows that they go one way, and keeps what the products of the loop
// around it need in uniform registers, without which stream-K lost 10 % (H200, 2026-11-30).
DEV bool is_part(const Place& to) { return SPLIT || __any_sync(~0u, to.batch < 0); }
// O · scale of a part of the keys, as it is: a lane holds two columns of each eight.
template <int N> DEV void store_part(const float (&O)[N], const Rows& rows, const Params& p, const Place& to, int lane) {
  float* part = p.parts + to.head * p.out_split + (i64)to.row * p.dim_v + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      if (8 * r < to.left && (!PARTIAL_V || 8 * i + 2 * (lane % 4) < p.dim_v))
        *(float2*)(part + r * 8 * p.dim_v + 8 * i) =
            make_float2(O[4 * i + 2 * r] * rows.scale[r], O[4 * i + 2 * r + 1] * rows.scale[r]);
}
#else
DEV bool is_part(const Place&) { return false; }
template <int N> DEV void store_part(const float (&)[N], const Rows&, const Params&, const Place&, int) {}
#endif

// O · scale. `stage`: the warp's own part of shared memory, V_CHUNKS of 16 rows in 128-byte swizzled lines.
template <int N> DEV void store(const float (&O)[N], const Rows& rows, const Params& p, const Place& to, int lane, u32 stage,
                                const TensorMap* map) {
#if !SPLIT
  auto rounded = [&](int i, int r) {  // of column i of the lane's each two and two
    return pack(O[4 * i + 2 * r] * rows.scale[r], O[4 * i + 2 * r + 1] * rows.scale[r]);
  };
#if BULK_STORE
  if (lane == 0) tma_store_wait();  // what this warp laid there before has been read
  __syncwarp();
  // Of 16 columns four matrices: lane l points to row l % 16 of them, in the left or the right eight.
  const u32 at = stage + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
  for (int i = 0; i < N / 4; i += 2)
    shared_store_matrices((at + i / 8 * STAGE_CHUNK) ^ (i % 8 << 4), rounded(i, 0), rounded(i, 1), rounded(i + 1, 0),
                          rounded(i + 1, 1));
  tma_store_fence();
  __syncwarp();  // all of the warp's writes are visible to the copy engine
  if (lane == 0) {
#pragma unroll
    for (int c = 0; c < V_CHUNKS; c++)
      tma_store(map, stage + c * STAGE_CHUNK, 64 * c, to.row, to.head, to.batch);
    tma_store_commit();
  }
#else  // two lanes give each other two columns, so that each has four of the same eight: 8 bytes, 32 in a row
  const bool odd = lane & 1;
#pragma unroll
  for (int i = 0; i < N / 4; i += 2)
#pragma unroll
    for (int r = 0; r < 2; r++) {  // inside, as rows outside leave maps at 256 a register short
      const u32 a = rounded(i, r), b = rounded(i + 1, r), got = __shfl_xor_sync(~0u, odd ? a : b, 1);
      if (8 * r < to.left && (!PARTIAL_V || 8 * i + 8 * (lane % 2) < p.dim_v))
        *(uint2*)(to.out + r * 8 * p.out_row + 8 * i) = odd ? make_uint2(got, b) : make_uint2(a, got);
    }
#endif
#endif
}

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
