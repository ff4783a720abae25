// What there is to do: tiles of rows, in which order, and which keys each of them visits.
struct Params {
  void* out;
  float* lse;          // null: not asked for
  u32* counter;        // two words, zero between launches: the next tile, thread blocks that are done
  const i64* ends_q;   // packed sequences: where each begins, and the last ends (cu_seqlens)
  const i64* ends_kv;
  const float* sink;   // one logit for each query head
  i64 out_batch, out_head, out_row, lse_batch, lse_head;  // strides in elements
  int batch, heads, group, rows, keys;  // group: query heads of one KV head; rows, keys: of a sequence, if not packed
  int tiles, section;                   // tiles of rows of a sequence; heads whose K and V stay in L2 together
  int total_q, dim_v;
  int low_bottom, high_bottom, low_top, high_top;  // query i sees keys i + low to i + high, from either corner
  float factor;   // takes scores, after score(), to exponents of 2
  float inner;    // what score() multiplies by
#if EXTENDED  // what plain kernels have no use for
  const int4* map_rows;   // tile map, for each tile of rows: {first, last, whole, bits} of its Span
  const int* map_tiles;   // the KV tiles at those places
  const u32* map_bits;    // of partial tiles [TILE_Q][4]: which keys a row sees, a word for each lane of the row's four
  const float* slopes;    // ALiBi, for each query head
  const void* bias;
  i64 bias_batch, bias_head, bias_row, bias_key;  // strides in elements, 0 where it is broadcast
  int map_batch, map_head, slopes_batch;          // rows of the map, and slopes, from one batch or head to the next
  float outer;                                    // takes S, after score(), to the units of slopes and bias
  float* parts;             // results of parts of the keys (part, row, dim_v), and their LSE, of all heads' and sequences'
  float* parts_lse;         // rows in a row, from `first` on
  i64 first;
  i64 out_split, lse_split; // elements from one part's results to the next's
  int splits, split_tiles;  // SPLIT: parts, each of so many KV tiles
  Stretches stretches;      // STREAM_K
#endif
};

// The KV tiles of a tile of rows: first..last - 1, walked from the last to the first. With a tile map these are places in
// its list, of which those before `whole` hold tiles that all rows see whole, and place + bits numbers a partial tile's bits.
struct Span {
  int first, last;
#if MAPPED
  int whole, bits;
#endif
};

// One tile of rows, as the producer finds it and the consumers read it from shared memory. batch < 0: no more work.
struct Work {
  int row, head, batch, rows, keys, start_q, start_kv;
#if MAPPED || STREAM_K
  Span span;
#endif
#if PARTIAL
  int part;  // which of the parts of the keys; -1: all of them
#endif
};
constexpr u32 WORK_BYTES = 32;  // of which packed sequences, tile maps and stretches use more than the first 16

struct Diagonals {
  int low, high;
};
DEV Diagonals diagonals(const Params& p, int rows, int keys) {
  const int shift = keys - rows;
  return {LEFT ? max(p.low_bottom + shift, p.low_top) : 0, RIGHT ? min(p.high_bottom + shift, p.high_top) : 0};
}

// A tile of rows that sees no key visits one all the same, all of it masked, so that it goes the way of the others and
// comes out as 0. Tile maps list one for it, without a bit.
DEV Span visited(int row, int rows, int keys, Diagonals d) {
  const int begin = LEFT ? max(0, row + d.low) : 0;
  const int end = RIGHT ? min(keys, min(row + TILE_Q, rows) + d.high) : keys;
  if (end <= begin) return {0, 1};
  return {begin / TILE_KV, (end + TILE_KV - 1) / TILE_KV};
}

DEV Span span_of(const Params& p, const Work& w, Diagonals d) {
#if MAPPED || STREAM_K
  return w.span;
#elif SPLIT  // where none of the part's tiles is visited, its first one is: nothing in it is seen
  const Span all = visited(w.row, w.rows, w.keys, d);
  const int begin = w.part * p.split_tiles, first = max(all.first, begin), last = min(all.last, begin + p.split_tiles);
  return first < last ? Span{first, last} : Span{begin, begin + 1};
#else
  return visited(w.row, w.rows, w.keys, d);
#endif
}
DEV int tile_at(const Params& p, int place) {
#if MAPPED
  return load_constant(p.map_tiles + place);
#else
  return place;
#endif
}
#if MAPPED
DEV Span listed(const Params& p, const Work& w) {
  const int4 found = load_constant(p.map_rows + (i64)w.batch * p.map_batch + w.head * p.map_head + w.row / TILE_Q);
  return {found.x, found.y, found.z, found.w};
}
#endif

// The n-th tile of `heads` heads with `tiles` tiles each. Those that take long go first, so that none of them is left for
// the end, inside of sections of heads whose keys stay in L2: the last rows of a causal mask, while of full attention
// the last ones may leave groups idle.
DEV void place(int n, int tiles, int heads, int section, int& tile, int& head) {
  if (LONGEST_FIRST || SHORTEST_LAST) {
    const int per = section * tiles, s = n / per, r = n - s * per, inside = min(section, heads - s * section);
    const int x = r / inside;
    tile = LONGEST_FIRST ? tiles - 1 - x : x, head = s * section + (r - x * inside);
  } else {
    head = n / tiles, tile = n - head * tiles;
  }
}

#if VARLEN
// Packed sequences have no fixed number of tiles: the producer's warp walks along cu_seqlens, 32 sequences at a time, to
// the one that holds tile n. n only grows, so each thread block walks along them once.
struct Cursor {
  int sequence, before;  // the first of the 32 in view; tiles of the sequences before it
};
DEV bool find(const Params& p, int n, int lane, Cursor& c, Work& w) {
  for (; c.sequence < p.batch; c.sequence += 32) {
    const int s = c.sequence + lane;
    const int rows = s < p.batch ? (int)(p.ends_q[s + 1] - p.ends_q[s]) : 0;
    const int own = (rows + TILE_Q - 1) / TILE_Q * p.heads;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const u32 reached = __ballot_sync(~0u, n < c.before + sum);
    if (reached) {
      const int l = __ffs(reached) - 1, r = n - c.before - __shfl_sync(~0u, sum - own, l);
      w.batch = c.sequence + l, w.rows = __shfl_sync(~0u, rows, l);
      w.start_q = (int)p.ends_q[w.batch], w.start_kv = (int)p.ends_kv[w.batch];
      w.keys = (int)(p.ends_kv[w.batch + 1] - w.start_kv);
      const i64 bytes = max((i64)w.keys * KV_ROW_BYTES, (i64)1);
      const int section = (int)min((i64)p.heads, max(L2_SECTION_BYTES / bytes, (i64)1) * p.group);
      int tile;
      place(r, (w.rows + TILE_Q - 1) / TILE_Q, p.heads, section, tile, w.head);
      w.row = tile * TILE_Q;
      return true;
    }
    c.before += __shfl_sync(~0u, sum, 31);
  }
  w.batch = -1;
  return false;
}
#else
struct Cursor {};
DEV bool find(const Params& p, int n, int, Cursor&, Work& w) {
#if SPLIT
  w.part = n % p.splits, n /= p.splits;
#endif
#if STREAM_K
  const Stretches& s = p.stretches;
  w.part = -1, w.span = {0, s.kv_tiles};
  if (n >= s.whole) {  // of its stretch first what lies in one tile of rows, then what lies in the next
    const int worker = (n - s.whole) % gridDim.x, turn = (n - s.whole) / gridDim.x;
    int begin = 0, end = 0, shared = 0;
    if (worker < s.workers) {
      begin = stretch_begin(s, worker), end = stretch_begin(s, worker + 1), shared = begin / s.kv_tiles;
      const int edge = (shared + 1) * s.kv_tiles;
      if (turn == 0)
        end = min(end, edge);
      else
        begin = edge, shared++;
    }
    if (turn > 1 || begin >= end) {
      w.batch = -1;
      return false;
    }
    w.span = {begin - shared * s.kv_tiles, end - shared * s.kv_tiles};
    w.part = worker - stretch_of(s, shared * s.kv_tiles), n = s.whole + shared;
  }
#endif
  if (n >= p.tiles * p.batch * p.heads) {
    w.batch = -1;
    return false;
  }
  int tile, head;
  place(n, p.tiles, p.batch * p.heads, p.section, tile, head);
  w.batch = head / p.heads, w.head = head - w.batch * p.heads, w.row = tile * TILE_Q;
  w.rows = p.rows, w.keys = p.keys;
  return true;
}
#endif
