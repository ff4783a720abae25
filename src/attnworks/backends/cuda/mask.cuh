// The mask part: hides keys, as -inf. By closed bounds, or by the bits that a tile map holds of what is seen in part, bounds
// included. How S lies in registers: softmax.cuh.

// Which keys of a partial tile the thread's rows see: bit 2 i + e is column 8 i + 2 (lane % 4) + e, as in S.
struct Bits {
#if MAPPED
  u32 rows[2];
#endif
};
#if MAPPED
DEV Bits bits_of(const Params& p, Span span, int place, int row, int lane) {
  if (place < span.whole) return {~0u, ~0u};
  const u32* word = p.map_bits + ((i64)(place + span.bits) * TILE_Q + row) * 4 + lane % 4;
  return {(u32)load_constant((const int*)word), (u32)load_constant((const int*)word + 8 * 4)};
}
#endif

// Hides keys past the last and outside of the bounds, or what has no bit. `row`: the thread's first; `key`: the tile's first.
template <int N> DEV void mask(float (&S)[N], const Bits& bits, int row, int key, int keys, Diagonals d, int lane) {
#if MAPPED
#pragma unroll
  for (int i = 0; i < N; i++)
    if (!((bits.rows[(i >> 1) & 1] >> (2 * (i >> 2) + (i & 1))) & 1)) S[i] = -INFINITE;
#else
  const int column = key + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int stop = (RIGHT ? min(keys, row + 8 * r + d.high + 1) : keys) - column;
    const int start = row + 8 * r + d.low - column;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (8 * i + e >= stop || (LEFT && 8 * i + e < start)) S[4 * i + 2 * r + e] = -INFINITE;
  }
#endif
}
