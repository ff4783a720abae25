"""FlashAttention-1's loop (arXiv:2205.14135, algorithm 1): a tile of K and V stays on chip while all queries go by.

One program does a whole head of a sequence, since every KV tile adds to every row's state; that is all the parallelism
there is. O, m and l lie in device memory and are read and written again for each pair of tiles:

    write O = 0, m = -inf, l = 0 → for each KV tile: load K, V → for each Q tile that sees it: load Q, O, m, l → scores
          → score modifiers → mask → m, l, O anew → store O, m, l
    → for each Q tile: load O, m, l → store O and LSE

O is divided by l in every step, as in the paper (line 12), so that the time holds the divisions that FlashAttention-2
does away with. It is kept in fp32, as the paper's own kernels keep it; hence the last pass, which rounds it.
"""

import triton
import triton.language as tl

from attnworks.backends.triton.parts import (
    LN2,
    LOG2E,
    diagonals,
    in_part,
    load_tile,
    offsets_of,
    seen,
    store_tile,
    tile_at,
    visited_tiles,
)


@triton.jit
def kv_outer(
    q, k, v, out, lse, acc, running_max, running_sum, sink, tile_map, score_operands, mask_operands,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    heads, group, seq_q, seq_kv, scale, low_bottom, high_bottom, low_top, high_top,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TAIL_Q: tl.constexpr, TAIL_KV: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O and LSE of one head of one sequence. Grid: heads · batch.

    ``acc`` (batch, heads, seq_q, HEAD_DIM_V), ``running_max`` and ``running_sum`` (batch, heads, seq_q): fp32,
    contiguous, undefined before. Without TAIL_Q the queries end on a tile's edge, without TAIL_KV the keys.
    """
    head, b = tl.program_id(0) % heads, tl.program_id(0) // heads
    h, wide_b, kv_head = head.to(tl.int64), b.to(tl.int64), (head // group).to(tl.int64)
    first_row = tl.program_id(0).to(tl.int64) * seq_q
    acc, running_max, running_sum = acc + first_row * HEAD_DIM_V, running_max + first_row, running_sum + first_row
    q_head = q + wide_b * q_strides[0] + h * q_strides[1]
    k_head = k + wide_b * k_strides[0] + kv_head * k_strides[1]
    v_head = v + wide_b * v_strides[0] + kv_head * v_strides[1]
    q_tiles = tl.cdiv(seq_q, TILE_Q)

    for tile in range(q_tiles):
        state = tl.zeros([TILE_Q], dtype=tl.float32)
        logit = state - float("inf")
        if sink is not None:  # a key seen already, whose value is 0
            logit = state + tl.load(sink + head).to(tl.float32) * LOG2E
            state = tl.where(logit == -float("inf"), 0.0, 1.0)
        save(acc, running_max, running_sum, tile, seq_q, tl.zeros([TILE_Q, BLOCK_DV], dtype=tl.float32), logit, state,
             TILE_Q, HEAD_DIM_V, BLOCK_DV)  # fmt: skip
    # What some threads of the program wrote, others read in the next pass.
    tl.debug_barrier()

    low, high = diagonals(seq_q, seq_kv, low_bottom, high_bottom, low_top, high_top)
    for kv_tile in range(tl.cdiv(seq_kv, TILE_KV)):
        keys = kv_tile * TILE_KV + tl.arange(0, TILE_KV)
        present, wide = keys < seq_kv, keys.to(tl.int64)
        k_tile = load_tile(k_head, wide * k_strides[2], present, HEAD_DIM, BLOCK_D, True)
        v_tile = load_tile(v_head, wide * v_strides[2], present, HEAD_DIM_V, BLOCK_DV, True)
        # Query i sees key j if i + low <= j <= i + high: seen from the key, j - high <= i <= j - low.
        last_key = tl.minimum(kv_tile * TILE_KV + TILE_KV, seq_kv) - 1
        start, full_start, full_end, stop = visited_tiles(
            0, seq_q, kv_tile * TILE_KV, last_key, -high, -low, tile_map, b, head, kv_tile, TILE_Q, RIGHT, LEFT, MASK
        )
        visit(
            q_head, k_tile, v_tile, acc, running_max, running_sum, tile_map, start, full_start, full_end, stop,
            b, head, keys, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, q_strides[2],
            TILE_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, WIDE, LEFT, RIGHT, TAIL_Q, TAIL_KV,
            SCORE, MASK, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()

    for tile in range(q_tiles):
        o, m, total = restore(acc, running_max, running_sum, tile, seq_q, TILE_Q, HEAD_DIM_V, BLOCK_DV)
        rows = tile * TILE_Q + tl.arange(0, TILE_Q)
        valid, wide = rows < seq_q, rows.to(tl.int64)
        row_lse = tl.where(total == 0.0, -float("inf"), (m + tl.math.log2(total)) * LN2)
        out_head = out + wide_b * out_strides[0] + h * out_strides[1]
        store_tile(out_head, wide * out_strides[2], valid, o, HEAD_DIM_V, BLOCK_DV)
        if lse is not None:
            tl.store(lse + wide_b * lse_strides[0] + h * lse_strides[1] + wide * lse_strides[2], row_lse, mask=valid)


@triton.jit
def visit(
    q_head, k, v, acc, running_max, running_sum, tile_map, first_place, full_start, full_end, stop_place,
    b, head, keys, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, q_row,
    TILE_Q: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TAIL_Q: tl.constexpr, TAIL_KV: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One KV tile added to the state of the Q tiles that ``visited_tiles`` found."""
    for place in range(first_place, stop_place):
        tile = tile_at(place, tile_map, stop_place)
        start = tile * TILE_Q
        lanes = tl.arange(0, TILE_Q)
        positions = start + lanes
        q_tile = q_head + start.to(tl.int64) * q_row
        q = load_tile(q_tile, offsets_of(lanes, q_row, WIDE), positions < seq_q, HEAD_DIM, BLOCK_D, TAIL_Q)
        o, m, total = restore(acc, running_max, running_sum, tile, seq_q, TILE_Q, HEAD_DIM_V, BLOCK_DV)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SCORE is not None:
            scores = SCORE(scores, b, head, positions[:, None], keys[None, :], seq_kv - seq_q, score_operands)
        scores = scores.to(tl.float32) * LOG2E
        if LEFT or RIGHT or MASK is not None:
            if in_part(place, full_start, full_end, RIGHT and MASK is None):
                visible = seen(b, head, positions, keys, seq_q, seq_kv, low, high, mask_operands, LEFT, MASK)
                scores = tl.where(visible, scores, -float("inf"))
        if TAIL_KV:
            scores = tl.where((keys < seq_kv)[None, :], scores, -float("inf"))
        new_max = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # no key seen yet: nothing to subtract
        probs = tl.math.exp2(scores - shift[:, None])
        weight = total * tl.math.exp2(m - shift)  # of the O so far
        new_sum = weight + tl.sum(probs, 1)
        o = tl.dot(probs.to(v.dtype), v, o * weight[:, None], input_precision=PRECISION)
        o = o / tl.where(new_sum == 0.0, 1.0, new_sum)[:, None]
        save(acc, running_max, running_sum, tile, seq_q, o, new_max, new_sum, TILE_Q, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def restore(
    acc, running_max, running_sum, tile, seq_q, TILE_Q: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(O, m, l) of a Q tile from device memory."""
    rows = tile * TILE_Q + tl.arange(0, TILE_Q)
    valid, wide = rows < seq_q, rows.to(tl.int64)
    o = load_tile(acc, wide * DIM, valid, DIM, BLOCK, True)
    m = tl.load(running_max + wide, mask=valid, other=-float("inf"))
    return o, m, tl.load(running_sum + wide, mask=valid, other=0.0)


@triton.jit
def save(
    acc, running_max, running_sum, tile, seq_q, o, m, total,
    TILE_Q: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(O, m, l) of a Q tile to device memory."""
    rows = tile * TILE_Q + tl.arange(0, TILE_Q)
    valid, wide = rows < seq_q, rows.to(tl.int64)
    store_tile(acc, wide * DIM, valid, o, DIM, BLOCK)
    tl.store(running_max + wide, m, mask=valid)
    tl.store(running_sum + wide, total, mask=valid)
