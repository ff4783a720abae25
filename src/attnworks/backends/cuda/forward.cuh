// The forward kernel for Hopper: FlashAttention-3's plan (arXiv:2407.08608). A persistent thread block on each
// multiprocessor: one producer warp keeps TMA copies under way, GROUPS warpgroups of consumers own 64 query rows each.
// While the tensor cores work on S of the next KV tile and on P V of this one, the warps take exponentials; with two
// groups, they take turns at issuing products, so that one's exponentials lie under the other's products.
//
//   producer   find a tile of rows -> Q, K and V of it, into rings of STAGES buffers
//   consumers  S = Q K^T -> score -> mask -> softmax -> O += P V; after the last KV tile LSE and O

constexpr int Q_CHUNKS = (HEAD_DIM + 63) / 64;               // as V_CHUNKS
constexpr u32 Q_CHUNK = 64 * 128, KV_CHUNK = TILE_KV * 128;  // bytes
constexpr u32 OUT_BYTES = BULK_STORE ? 4 * GROUPS * V_CHUNKS * STAGE_CHUNK : 0;
constexpr u32 Q_BYTES = Q_CHUNKS * Q_CHUNK, K_BYTES = Q_CHUNKS * KV_CHUNK, V_BYTES = V_CHUNKS * KV_CHUNK;

// Shared memory: Q of each group, rings of K and of V, with BULK_STORE each warp's results, barriers, two slots for what
// the producer found. shared_bytes (source.py) is its size. Of each barrier: what its phases tell whom.
struct Shared {
  u32 q, k, v, out;
  u32 q_full;   // [GROUPS] TMA -> group: its 64 rows of Q are there
  u32 q_empty;  // [GROUPS] group -> producer: the last product that reads Q is done, the next tile's may come
  u32 k_full;   // [STAGES] TMA -> consumers: a tile of K is there
  u32 k_empty;  // [STAGES] consumers -> producer: all warps are done with it
  u32 v_full, v_empty;        // [STAGES] the same for V
  u32 work_full, work_empty;  // [2] producer -> consumers: a tile of rows was found; consumers -> producer: it was read
  u32 work;
};
DEV Shared layout(u32 base) {
  Shared s;
  s.q = base, s.k = s.q + GROUPS * Q_BYTES, s.v = s.k + STAGES * K_BYTES;
  s.out = s.v + STAGES * V_BYTES, s.work = s.out + OUT_BYTES;
  s.q_full = s.work + 2 * WORK_BYTES, s.q_empty = s.q_full + 8 * GROUPS;
  s.k_full = s.q_empty + 8 * GROUPS, s.k_empty = s.k_full + 8 * STAGES;
  s.v_full = s.k_empty + 8 * STAGES, s.v_empty = s.v_full + 8 * STAGES;
  s.work_full = s.v_empty + 8 * STAGES, s.work_empty = s.work_full + 16;
  return s;
}
DEV void init_barriers(const Shared& s) {
  const int warps = 4 * GROUPS;  // each consumer warp arrives once, by its first lane, but for work: by all that read it
  for (int i = 0; i < GROUPS; i++) barrier_init(s.q_full + 8 * i, 1), barrier_init(s.q_empty + 8 * i, 4);
  for (int i = 0; i < STAGES; i++) {
    barrier_init(s.k_full + 8 * i, 1), barrier_init(s.k_empty + 8 * i, warps);
    barrier_init(s.v_full + 8 * i, 1), barrier_init(s.v_empty + 8 * i, warps);
  }
  for (int i = 0; i < 2; i++) barrier_init(s.work_full + 8 * i, 1), barrier_init(s.work_empty + 8 * i, 32 * warps);
  barrier_init_done();
}

// Where one side of a ring is. Full barriers are waited for at `phase`, empty ones at the phase before, which for the
// first lap is over from the beginning.
struct Ring {
  int stage = 0, phase = 0;
  DEV void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Rows of K or V from `key` on. The rows past the sequence's last arrive as 0: a packed sequence is described by a tensor
// with two dimensions more, in which any row can be the last (maps.py).
constexpr int WRAP = 1 << 30;
DEV void load_rows(u32 to, const TensorMap* map, u32 barrier, int chunks, int key, int head, const Work& w) {
  const int present = min(TILE_KV, w.keys - key);
  for (int c = 0; c < chunks; c++) {
    if (VARLEN)
      tma_load(to + c * KV_CHUNK, map, barrier, 64 * c, WRAP - present, head, w.start_kv + key + present, WRAP);
    else
      tma_load(to + c * KV_CHUNK, map, barrier, 64 * c, key, head, w.batch);
  }
}

// Of Q's tensor: the tile's first row.
DEV int first_row(const Work& w) { return VARLEN ? w.start_q + w.row : w.row; }

constexpr int DRAW_AHEAD = 2;  // KV tiles before its own last: time enough for the number to arrive; 1 and 4 are no better
DEV void produce(const Shared& s, const TensorMap* q, const TensorMap* k, const TensorMap* v, const Params& p, int lane) {
  Ring k_ring, v_ring;
  Cursor cursor = {};
  const bool leads = !VARLEN || lane == 0;  // of packed sequences the whole warp looks for the next tile
  Work w;
  int n = blockIdx.x;
  bool more = find(p, n, lane, cursor, w);
#pragma unroll 1
  for (int turn = 0;; turn++) {
#if MAPPED
    w.span = more ? listed(p, w) : Span{};
#endif
    // The slot's last reader must be done with it; only then is it written, and only then may it be read.
    barrier_wait(s.work_empty + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
    if (leads) {
#if PARTIAL
      w.start_q = w.part;  // the place of what only packed sequences have
#endif
      shared_store(s.work + (turn & 1) * WORK_BYTES, make_int4(w.row, w.head, w.batch, w.start_q));
      if (VARLEN) shared_store(s.work + (turn & 1) * WORK_BYTES + 16, make_int4(w.rows, w.keys, 0, 0));
#if MAPPED
      shared_store(s.work + (turn & 1) * WORK_BYTES + 16, make_int4(w.span.first, w.span.last, w.span.whole, w.span.bits));
#elif STREAM_K
      shared_store(s.work + (turn & 1) * WORK_BYTES + 16, make_int4(w.span.first, w.span.last, 0, 0));
#endif
      barrier_arrive(s.work_full + 8 * (turn & 1));
    }
    if (!more) break;
    const Span span = span_of(p, w, diagonals(p, w.rows, w.keys));
    const int kv_head = w.head / p.group;
    auto load = [&](Ring& ring, const TensorMap* map, u32 full, u32 empty, u32 to, u32 bytes, int chunks, int place) {
      const int tile = MAPPED ? tile_at(p, place) : place;  // a map's list is read while the buffer is still in use
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);  // every consumer is done with what the buffer held
      if (leads) {
        barrier_expect(full + 8 * ring.stage, bytes);
        load_rows(to + ring.stage * bytes, map, full + 8 * ring.stage, chunks, tile * TILE_KV, kv_head, w);
      }
      ring.advance();
    };
    auto load_k = [&](int tile) { load(k_ring, k, s.k_full, s.k_empty, s.k, K_BYTES, Q_CHUNKS, tile); };
    auto load_v = [&](int tile) { load(v_ring, v, s.v_full, s.v_empty, s.v, V_BYTES, V_CHUNKS, tile); };
    load_k(span.last - 1);
    for (int g = 0; g < GROUPS; g++) {
      barrier_wait(s.q_empty + 8 * g, (turn & 1) ^ 1);  // the group's last product with the Q of the tile before is done
      if (leads) {
        barrier_expect(s.q_full + 8 * g, Q_BYTES);
        for (int c = 0; c < Q_CHUNKS; c++)
          tma_load(s.q + g * Q_BYTES + c * Q_CHUNK, q, s.q_full + 8 * g, 64 * c, first_row(w) + 64 * g, w.head,
                   VARLEN ? 0 : w.batch);
      }
    }
    int tile = span.last - 2;
#pragma unroll 1
    for (; tile >= span.first + DRAW_AHEAD; tile--) load_k(tile), load_v(tile + 1);
    // Drawn only now: a thread block with a long tile must not keep one that another would get to sooner.
    n += gridDim.x;
    if (DYNAMIC) {
      if (leads) n = (int)(atomicAdd(p.counter, 1u) + gridDim.x);
      if (VARLEN) n = __shfl_sync(~0u, n, 0);
    }
#pragma unroll 1
    for (; tile >= span.first; tile--) load_k(tile), load_v(tile + 1);
    // The next tile's Q can't be loaded before its buffer is free, which is when it is needed; so that it is near then.
    // After the last V is asked for it would be too late: that lost 1 to 5 % to 4k keys (H200, 2026-11-30).
    Work next;
    more = find(p, n, lane, cursor, next);
    if (more && leads)
      for (int c = 0; c < GROUPS * Q_CHUNKS; c++)
        tma_prefetch(q, 64 * (c % Q_CHUNKS), first_row(next) + 64 * (c / Q_CHUNKS), next.head, VARLEN ? 0 : next.batch);
    load_v(span.first);
    w = next;
  }
#if PARTIAL
  if (leads) next_kernel_may_begin();
#endif
  // The last thread block leaves the counters as it found them, for the next launch: all have drawn their last number.
  if (DYNAMIC && leads && atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = 0, p.counter[1] = 0;
}

// S = Q K^T once more, by one warp and from shared memory, where what softmax_kept() made of it can't be used. `q`, `k`: the
// group's rows, and the tile. Chunk c of a line's 16 bytes lies at c ^ (line % 8) (the copy engine's swizzle).
DEV void scores_again(float (&S)[TILE_KV / 2], u32 q, u32 k, int warp, int lane) {
  asm volatile("" : "+r"(q), "+r"(k), "+r"(warp));  // nothing of it is to be kept in registers for this rare case
  auto place = [](u32 lines, int line, int chunk) { return lines + line * 128 + ((chunk ^ (line % 8)) << 4); };
#pragma unroll
  for (int i = 0; i < TILE_KV / 2; i++) S[i] = 0;
#pragma unroll 1
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    u32 a[4], b[2];
    shared_load_matrices(a, place(q + i / 4 * Q_CHUNK, 16 * warp + lane % 16, i % 4 * 2 + lane / 16));
#pragma unroll
    for (int n = 0; n < TILE_KV / 8; n++) {
      shared_load_matrices(b, place(k + i / 4 * KV_CHUNK, 8 * n + lane % 8, i % 4 * 2 + lane / 8 % 2));
      mma(S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3], a, b[0], b[1]);
    }
  }
}

// `out`: the map of the results, with BULK_STORE.
DEV void consume(const Shared& s, const Params& p, const TensorMap* out, int group, int warp, int lane) {
  float O[HEAD_DIM_V / 2], S[TILE_KV / 2];
  u32 P[TILE_KV / 4];
  Rows rows = {};
  Ring k_ring, v_ring;
  const u64 q_tile = descriptor(s.q + group * Q_BYTES, 16), k_tiles = descriptor(s.k, 16);
  const u64 v_tiles = descriptor(s.v, KV_CHUNK);
  const u32 stage = s.out + (4 * group + warp) * (V_CHUNKS * STAGE_CHUNK);
  Work w;
  Diagonals d;
  Span span = {0, 1};
  Place to;
#if LATE_STORE
  Place owed_to = {};
  bool owed = false;  // O holds the results of the tile of rows before, which belong there
#endif
  Added added = {};
  Bits bits = {};
  int turn = 0, row = 0, tile = 0;
  int before = 0;  // KV tiles before a part's, which the loop does not count: it ends at a constant, as for whole tiles
  float sink = 0;

  auto first_tile = [&] { return LEFT || MAPPED || SPLIT ? span.first : 0; };  // the one that is walked to last
  // One lane speaks for its warp: its products are done (wgmma_wait), so the warp no longer reads the buffer.
  auto release = [&](u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  auto wait_k = [&] { barrier_wait(s.k_full + 8 * k_ring.stage, k_ring.phase); };  // TMA's writes before our products
  auto wait_v = [&] { barrier_wait(s.v_full + 8 * v_ring.stage, v_ring.phase); };
  auto scores = [&] {  // S = Q K^T, begun
    const u64 b = k_tiles + k_ring.stage * (K_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++)
      wgmma_qk(S, q_tile + (i / 4) * (Q_CHUNK >> 4) + (i % 4) * 2, b + (i / 4) * (KV_CHUNK >> 4) + (i % 4) * 2, i != 0);
    wgmma_commit();
  };
  auto accumulate = [&](bool pass_turn) {  // O += P V, begun
#if LATE_STORE  // results that are owed leave their registers first, while the tensor cores still work on S
    const bool anew = owed;
    if (__builtin_expect(owed, false)) store(O, rows, p, owed_to, lane, stage, out), owed = false;
#else
    const bool anew = false;
#endif
    const u64 b = v_tiles + v_ring.stage * (V_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE_KV / 16; i++)
      wgmma_pv(O, P[4 * i], P[4 * i + 1], P[4 * i + 2], P[4 * i + 3], b + i * (16 * 128 >> 4), i > 0 || !anew);
    if (PINGPONG && pass_turn) named_arrive(2 + (group ^ 1), 256);  // the other group may issue its products
    wgmma_commit();
  };
  auto await_turn = [&] {
    if (PINGPONG) named_sync(2 + group, 256);
  };
  auto end_turns = [&] {  // takes the turn that group 1 passed last, so that no arrival is left behind
    if (PINGPONG && group == 0) named_sync(2, 256);
  };
  auto done_with_k = [&] {
    release(s.k_empty + 8 * k_ring.stage);
    if (tile == first_tile()) release(s.q_empty + 8 * group);  // no product of this tile of rows needs Q again
    k_ring.advance();
  };
  auto done_with_v = [&] {
    release(s.v_empty + 8 * v_ring.stage);
    v_ring.advance();
  };
  auto next_work = [&] {  // false when there is none
    barrier_wait(s.work_full + 8 * (turn & 1), turn >> 1 & 1);
    const u32 slot = s.work + (turn & 1) * WORK_BYTES;
    const int4 found = shared_load(slot);
    w.row = found.x, w.head = found.y, w.batch = found.z, w.start_q = found.w, w.rows = p.rows, w.keys = p.keys;
    if (VARLEN) {
      const int4 lengths = shared_load(slot + 16);
      w.rows = lengths.x, w.keys = lengths.y;
    }
#if PARTIAL
    w.part = found.w;
#endif
#if MAPPED
    const int4 listed = shared_load(slot + 16);
    w.span = {listed.x, listed.y, listed.z, listed.w};
#elif STREAM_K
    const int4 listed = shared_load(slot + 16);
    before = listed.x, w.span = {0, listed.y - listed.x};
#endif
    barrier_arrive(s.work_empty + 8 * (turn & 1));
    if (w.batch < 0) return false;
    d = diagonals(p, w.rows, w.keys);
    span = span_of(p, w, d);
    tile = span.last - 1, row = w.row + 64 * group + 16 * warp + lane / 4;
    added = added_to(p, w, row, lane);
    barrier_wait(s.q_full + 8 * group, turn & 1);  // TMA's writes of Q before our products
    turn++;
    return true;
  };
  auto begin_rows = [&] {
    to = place_of(p, w, row, lane);
    if (SINK) sink = p.sink[w.head];
  };
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) O[i] = 0;
  };
  auto put = [&] {
    if (is_part(to))
      store_part(O, rows, p, to, lane);
    else
      store(O, rows, p, to, lane, stage, out);
  };
  auto owe = [&] {
#if LATE_STORE
    owed = true, owed_to = to;
#endif
  };
  auto fetch_bits = [&] {  // begun before the products whose S they mask
#if MAPPED
    bits = bits_of(p, span, tile, row - w.row, lane);
#endif
  };
  auto first_probs = [&] {  // the tile that holds the last visible key; all rows may see it whole, if there is one
    score(S, p);
    add<true>(S, p, added, tile, w.keys, lane);
    if (LEFT || RIGHT || MAPPED || VARLEN || w.keys % TILE_KV) mask(S, bits, row, (before + tile) * TILE_KV, w.keys, d, lane);
    softmax<true>(S, rows, p.factor);
  };
  auto step = [&](bool masked) {  // S of the next KV tile and P V of this one in flight together
    tile--;
    if (masked) fetch_bits();
    prefetch_bias(p, added, max(tile - 1, first_tile()), w.keys, lane);
    await_turn();
    pin(S), pin(O), pin(P);
    scores();
    wait_v();
    accumulate(true);
    auto modify = [&] {
      score(S, p);
      if (masked)
        add<true>(S, p, added, tile, w.keys, lane), mask(S, bits, row, tile * TILE_KV, w.keys, d, lane);
      else
        add<false>(S, p, added, tile, w.keys, lane);
    };
    wgmma_wait<1>();  // S is there
    pin(S);
    if (KEEP_MAXIMUM && !masked) {
      modify();
      if (!softmax_kept(S, rows, p.factor)) {
        scores_again(S, s.q + group * Q_BYTES, s.k + k_ring.stage * K_BYTES, warp, lane);
        modify();
        softmax<false, true>(S, rows, p.factor);
      }
      done_with_k();  // not sooner: S might have been needed again
    } else {
      done_with_k();
      modify();
      softmax<false>(S, rows, p.factor);
    }
    wgmma_wait<0>();  // O and P are free
    pin(O), pin(P);
    done_with_v();
    to_operand(P, S);
    rescale(O, rows);
    if (tile > first_tile()) wait_k();
  };

  // A group all of whose 64 rows lie past the last one frees each buffer when it is filled, for the others. Of two groups
  // it takes part all the same, as they take turns.
  auto idle = [&] { return GROUPS == 3 && w.row + 64 * group >= w.rows; };
  auto pass = [&] {
    for (;; tile--) {
      wait_k();
      done_with_k();
      wait_v();
      done_with_v();
      if (tile == first_tile()) break;
    }
  };

  if (PINGPONG && group == 1) named_arrive(2, 256);  // the first turn is group 0's
  if (!next_work()) {
    end_turns();
    return;
  }
  bool more = true;
  do {
    if (idle()) {
      pass();
      more = next_work();
      continue;
    }
    wait_k();
    fetch_bits();
    pin(S);
    scores();
    begin_rows();
    clear();
    wgmma_wait<0>();
    pin(S);
    done_with_k();
    first_probs();
    to_operand(P, S);
    if (tile > first_tile()) wait_k();
    for (bool joined = true; joined;) {
      const int first = first_tile();
#if MAPPED
      while (tile > span.whole) step(true);  // listed last, walked first
#endif
      if (RIGHT) {  // down to the tiles that all rows see whole
        const int whole = max(first, min(w.keys, w.row + d.high + 1) / TILE_KV);
        while (tile > whole) step(true);
      }
      if (LEFT) {
        const int whole = max(first, (w.row + TILE_Q - 1 + d.low + TILE_KV - 1) / TILE_KV);
        while (tile > whole) step(false);
        while (tile > first) step(true);
      } else {
        while (tile > first) step(false);
      }
      more = next_work();
      joined = more && !idle();
      if (joined) {  // the last P V of this tile of rows beside the first S of the next
        wait_k();
        fetch_bits();
        await_turn();
        pin(S), pin(O), pin(P);
        scores();
        wait_v();
        accumulate(true);
        finish(rows, p, to, sink, lane);
        wgmma_wait<1>();
        pin(S);
        done_with_k();
        first_probs();
        wgmma_wait<0>();
        pin(O), pin(P);
        done_with_v();
        to_operand(P, S);
        if (LATE_STORE && !is_part(to)) {
          owe();
          begin_rows();
        } else {
          put();
          begin_rows();
          clear();
        }
        if (tile > first_tile()) wait_k();
      } else {
        wait_v();
        pin(O), pin(P);
        accumulate(false);
        finish(rows, p, to, sink, lane);
        wgmma_wait<0>();
        pin(O);
        done_with_v();
        put();
      }
    }
  } while (more);
  end_turns();
#if BULK_STORE
  if (lane == 0) tma_store_wait();  // shared memory lasts as long as the thread block
#endif
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
            const Params p
#if BULK_STORE
            ,
            const __grid_constant__ TensorMap out
#endif
    ) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared s = layout(shared_address(memory));
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init_barriers(s);
  __syncthreads();  // nobody waits on a barrier before it is initialised
  if (group == GROUPS) {
    registers_give<PRODUCER_REGISTERS>();
    if (warp == 0 && (VARLEN || lane == 0)) produce(s, &q, &k, &v, p, lane);
#if VARLEN
    else if (warp > 0) store_rows_of_none(p, 3 * blockIdx.x + warp - 1, 3 * gridDim.x, lane);
#endif
  } else {
    registers_take<CONSUMER_REGISTERS>();
#if BULK_STORE
    consume(s, p, &out, group, warp, lane);
#else
    consume(s, p, nullptr, group, warp, lane);
#endif
  }
}
