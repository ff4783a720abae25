"""The forward kernel: FlashAttention-2's loop (arXiv:2307.08691, algorithm 1) for dense, packed and cached keys.

One program owns TILE_Q query rows and walks over the KV tiles they see:

    load Q → for each KV tile: load K → scores → score modifiers → mask → online softmax → load V → accumulate
           → add the sink → normalise → store O and LSE

Tiles that the mask hides are never visited; only tiles seen in part are masked. Where few queries share a KV head
(decode, short prefills), the query heads of its group become rows of one tile (GROUPED), so that K and V are read once
for all of them.
With SPLITS the keys are shared out among programs, and ``combine`` merges their partial results by their LSE.
"""

import triton
import triton.language as tl

from attnworks.backends.triton.parts import (
    LN2,
    LOG2E,
    diagonals,
    in_part,
    load_described,
    load_tile,
    offsets_of,
    seen,
    sequence,
    store_tile,
    task,
    tile_at,
    visited_tiles,
)


@triton.jit
def forward(
    q, k, v, out, lse,
    cu_seqlens_q, cu_seqlens_kv, kv_lens, page_table, k_scale, v_scale, sink, tile_map, score_operands, mask_operands,
    q_strides, k_strides, v_strides, out_strides, lse_strides, split_strides, table_stride,
    batch, heads, group, seq_q, seq_kv, total_q, scale, low_bottom, high_bottom, low_top, high_top, split_kv,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, GROUPED: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr,
    EQUAL_ROWS: tl.constexpr, DESCRIBED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TAIL: tl.constexpr, SPLITS: tl.constexpr, FOLDED: tl.constexpr,
    SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    KEEP_MAXIMUM: tl.constexpr, HOLD_Q: tl.constexpr,
):  # fmt: skip
    """O and LSE of one tile of rows. Grid: (row tiles · heads · batch, splits); packed sequences have one batch entry
    more, for the rows after the last sequence. ``heads``: of KV if GROUPED, else of Q. Strides are (batch, head, row).
    EQUAL_ROWS: rows of K and V are equally far apart; DESCRIBED: K and V are tensor descriptors. ``scale`` multiplies
    Q Kᵀ; if FOLDED it is > 0 and there are no score modifiers. Without TAIL the keys end on a tile's edge. REST:
    columns of Q and K beyond the first HEAD_DIM, for all of which one power of two would be too wide. KEEP_MAXIMUM:
    see ``attend_with_one_maximum``; HOLD_Q: see ``plans.holds_q``."""
    row_tiles = tl.num_programs(0) // (heads * (batch if cu_seqlens_q is None else batch + 1))
    row_tile, head, b = task(tl.program_id(0), row_tiles, heads, RIGHT, RIGHT)
    if cu_seqlens_q is not None:
        if b == batch:
            first = tl.load(cu_seqlens_q + batch)
            if GROUPED:
                for member in range(group):
                    _empty_rows(
                        out, lse, first, total_q, row_tile, row_tiles, head * group + member, out_strides, lse_strides,
                        TILE_Q, HEAD_DIM_V, BLOCK_DV,
                    )  # fmt: skip
            else:
                _empty_rows(
                    out, lse, first, total_q, row_tile, row_tiles, head, out_strides, lse_strides,
                    TILE_Q, HEAD_DIM_V, BLOCK_DV,
                )  # fmt: skip
            return

    rows_q, q_start = sequence(b, seq_q, cu_seqlens_q, q_strides[0], q_strides[2])
    _, out_start = sequence(b, seq_q, cu_seqlens_q, out_strides[0], out_strides[2])
    _, lse_start = sequence(b, seq_q, cu_seqlens_q, lse_strides[0], lse_strides[2])
    keys_kv, k_start = sequence(b, seq_kv, cu_seqlens_kv, k_strides[0], k_strides[2])
    _, v_start = sequence(b, seq_kv, cu_seqlens_kv, v_strides[0], v_strides[2])
    if kv_lens is not None:
        keys_kv = tl.load(kv_lens + b).to(tl.int32)
    table = page_table
    if PAGE:
        k_start, v_start, table = k_start * 0, v_start * 0, page_table + b.to(tl.int64) * table_stride

    rows = row_tile * TILE_Q + tl.arange(0, TILE_Q)
    if row_tile * TILE_Q >= (rows_q * group if GROUPED else rows_q):
        return
    if GROUPED:
        positions, heads_q, kv_head = rows // group, head * group + rows % group, head
    else:
        positions, heads_q, kv_head = rows, head + rows * 0, head // group
    head_axis = heads_q[:, None] if GROUPED else head
    valid = positions < rows_q
    heads_wide = heads_q.to(tl.int64)
    q_offsets = positions.to(tl.int64) * q_strides[2] + heads_wide * q_strides[1]
    q_tile = load_tile(q + q_start, q_offsets, valid, HEAD_DIM, BLOCK_D, True)
    if HOLD_Q:  # what is just loaded the compiler keeps in shared memory for the products, anything else in registers
        q_tile = tl.where(valid[:, None], q_tile, 0.0)
    q_rest = None
    if REST:
        q_rest = load_tile(q + q_start + HEAD_DIM, q_offsets, valid, REST, BLOCK_REST, True)
    k_head, v_head = k, v
    if not DESCRIBED:
        k_head = k + k_start + kv_head.to(tl.int64) * k_strides[1]
        v_head = v + v_start + kv_head.to(tl.int64) * v_strides[1]
    factor = scale if k_scale is None else scale * tl.load(k_scale + kv_head)

    low, high = diagonals(rows_q, keys_kv, low_bottom, high_bottom, low_top, high_top)
    begin, end = 0, keys_kv
    if SPLITS:
        begin = tl.program_id(1) * split_kv
        end = tl.minimum(begin + split_kv, keys_kv)
    last = row_tile * TILE_Q + TILE_Q - 1
    first_position = row_tile * TILE_Q // group if GROUPED else row_tile * TILE_Q
    last_position = tl.minimum(last // group if GROUPED else last, rows_q - 1)
    acc = tl.zeros([TILE_Q, BLOCK_DV], dtype=tl.float32)
    running_sum = tl.zeros([TILE_Q], dtype=tl.float32)
    running_max = tl.full([TILE_Q], -float("inf"), dtype=tl.float32)
    start, full_start, full_end, stop = visited_tiles(
        begin, end, first_position, last_position, low, high, tile_map, b, head, row_tile, TILE_KV, LEFT, RIGHT, MASK
    )
    # fmt: off
    if KEEP_MAXIMUM:
        acc, running_sum, running_max = attend_with_one_maximum(
            acc, running_sum, q_tile, k_head, v_head, table, tile_map, start, full_start, full_end, stop,
            b, kv_head, head_axis, positions, rows_q, keys_kv, low, high, factor, score_operands, mask_operands,
            k_strides, v_strides, TILE_KV, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
            LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST,
        )
    else:
        acc, running_sum, running_max, _ = attend(
            acc, running_sum, running_max, q_tile, k_head, v_head, table, tile_map, start, full_start, full_end, stop,
            b, kv_head, head_axis, positions, rows_q, keys_kv, low, high, factor, score_operands, mask_operands,
            k_strides, v_strides, TILE_KV, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
            LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST, "running",
        )
    # fmt: on

    if sink is not None and not SPLITS:
        acc, running_sum, running_max = add_sink(acc, running_sum, running_max, sink, heads_q, valid)
    empty = running_sum == 0.0
    scale_v = 1.0 if v_scale is None else tl.load(v_scale + kv_head)
    acc = acc * (scale_v / tl.where(empty, 1.0, running_sum))[:, None]
    row_lse = tl.where(empty, -float("inf"), (running_max + tl.math.log2(running_sum)) * LN2)
    part = tl.program_id(1).to(tl.int64) if SPLITS else 0
    out_offsets = positions.to(tl.int64) * out_strides[2] + heads_wide * out_strides[1]
    store_tile(out + part * split_strides[0] + out_start, out_offsets, valid, acc, HEAD_DIM_V, BLOCK_DV)
    if lse is not None:
        lse_offsets = part * split_strides[1] + lse_start + positions.to(tl.int64) * lse_strides[2]
        tl.store(lse + lse_offsets + heads_wide * lse_strides[1], row_lse, mask=valid)


MOST_SUM = tl.constexpr(8192.0)  # of a row's probs in one tile; fp16 reaches 65504
LEAST_SUM = tl.constexpr(2.0**-64)  # of a row's probs: what underflowed beside it would not change it


@triton.jit
def attend_with_one_maximum(
    acc, running_sum, q, k_head, v_head, table, tile_map, first_place, full_start, full_end, stop_place,
    b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides, v_strides,
    TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, EQUAL_ROWS: tl.constexpr,
    DESCRIBED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TAIL: tl.constexpr, FOLDED: tl.constexpr,
    SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    q_rest, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The softmax over all KV tiles with one number for each row in its maximum's place, so that O is never rescaled
    and one tile alone looks for a maximum. Any number will do from which probs and sums stay in range; it is the
    largest score of the first tile walked to, which all rows see whole if there is such a one, or 0 for a row that sees
    none of it. The sums say whether it did: where they don't, the row's largest score of all is sought, and the tile of
    rows computed again. Other rows then get the same bits again."""
    # fmt: off
    acc, running_sum, shift, peak = attend(
        acc, running_sum, running_sum, q, k_head, v_head, table, tile_map, first_place, full_start, full_end,
        stop_place, b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands,
        k_strides, v_strides, TILE_KV, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
        LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST, "first",
    )
    in_range = (peak <= MOST_SUM) & (running_sum >= LEAST_SUM)
    all_are = tl.min(in_range.to(tl.int32), 0)
    if all_are < 1:
        # first_place, but the compiler doesn't know: else its addresses would take registers until here.
        again = first_place + all_are
        largest = largest_score(
            q, k_head, v_head, table, tile_map, again, full_start, full_end, stop_place,
            b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides,
            v_strides, TILE_KV, HEAD_DIM, BLOCK_D, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
            LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST,
        )
        shift = tl.where(in_range, shift, tl.where(largest == -float("inf"), 0.0, largest))
        acc, running_sum, shift, _ = attend(
            tl.zeros_like(acc), tl.zeros_like(running_sum), shift, q, k_head, v_head, table, tile_map,
            again, full_start, full_end, stop_place,
            b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides,
            v_strides, TILE_KV, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
            LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST, "given",
        )
    # fmt: on
    return acc, running_sum, tl.where(running_sum == 0.0, -float("inf"), shift)


@triton.jit
def largest_score(
    q, k_head, v_head, table, tile_map, first_place, full_start, full_end, stop_place,
    b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides, v_strides,
    TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr, EQUAL_ROWS: tl.constexpr,
    DESCRIBED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TAIL: tl.constexpr, FOLDED: tl.constexpr,
    SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    q_rest, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Of each row in the KV tiles from first_place to stop_place - 1, as an exponent of 2; -inf if it sees none."""
    factor = scale * LOG2E if FOLDED else 1.0
    largest = tl.full([q.shape[0]], -float("inf"), dtype=tl.float32)
    for place in tl.range(first_place, stop_place, num_stages=1):  # rare: not worth a pipeline
        start = tile_at(place, tile_map, stop_place) * TILE_KV
        # fmt: off
        scores, _, _, _ = tile_scores(
            q, k_head, v_head, table, place, start, full_start, full_end,
            b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides,
            v_strides, TILE_KV, HEAD_DIM, BLOCK_D, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
            LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST,
        )
        # fmt: on
        largest = tl.maximum(largest, tl.max(scores, 1) * factor)
    return largest


@triton.jit
def attend(
    acc, running_sum, running_max, q, k_head, v_head, table, tile_map, first_place, full_start, full_end, stop_place,
    b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides, v_strides,
    TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, EQUAL_ROWS: tl.constexpr,
    DESCRIBED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TAIL: tl.constexpr, FOLDED: tl.constexpr,
    SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    q_rest, REST: tl.constexpr, BLOCK_REST: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """The online softmax over the KV tiles that ``visited_tiles`` found, from first_place to stop_place - 1. Those seen
    whole and in part go through one loop: a second would have to fill its pipeline anew, and made the compiler run the
    matrix products one by one. MAXIMUM: "running", or of the "first" tile alone, or "given"; with these tiles seen
    whole come first, those before them last, and peak, returned last, is a row's largest sum of a tile's probs."""
    one, end = first_place, stop_place
    if MAXIMUM != "running" and LEFT and MASK is None:
        one = full_start if full_start < full_end else first_place
        end = one + (stop_place - first_place)
    listed = tile_at(one, tile_map, stop_place)
    peak = running_sum
    for step in range(one, end):
        place = step
        if MAXIMUM != "running" and LEFT and MASK is None:
            place = tl.where(step < stop_place, step, step - (stop_place - first_place))
        start = (place if tile_map is None else listed) * TILE_KV
        listed = tile_at(place + 1, tile_map, stop_place)  # a tile ahead, so that no load of K waits for its number
        # fmt: off
        scores, v_tile, v_offsets, present = tile_scores(
            q, k_head, v_head, table, place, start, full_start, full_end,
            b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides,
            v_strides, TILE_KV, HEAD_DIM, BLOCK_D, PAGE, WIDE, EQUAL_ROWS, DESCRIBED,
            LEFT, RIGHT, TAIL, FOLDED, SCORE, MASK, PRECISION, q_rest, REST, BLOCK_REST,
        )
        # fmt: on
        # Folded, the scale is one more factor in the exponential's argument, which a fused multiply-add takes along.
        factor = scale * LOG2E if FOLDED else 1.0
        if MAXIMUM != "running":
            if MAXIMUM == "first":
                if step == one:
                    largest = tl.max(scores, 1) * factor
                    running_max = tl.where(largest == -float("inf"), 0.0, largest)
            probs = tl.math.exp2(scores * factor - running_max[:, None])
            sums = tl.sum(probs, 1)
            running_sum += sums
            peak = tl.maximum(peak, sums)
        else:
            new_max = tl.maximum(running_max, tl.max(scores, 1) * factor)
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # no key seen yet: nothing to subtract
            probs = tl.math.exp2(scores * factor - shift[:, None])
            alpha = tl.math.exp2(running_max - shift)
            running_sum = running_sum * alpha + tl.sum(probs, 1)
            running_max = new_max
        if DESCRIBED:
            v = load_described(v_head, b, kv_head, start, TILE_KV, BLOCK_DV)
        else:
            v = load_tile(v_tile, v_offsets, present, HEAD_DIM_V, BLOCK_DV, TAIL).to(q.dtype)
        if MAXIMUM != "running":
            acc = tl.dot(probs.to(q.dtype), v, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(probs.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, running_sum, running_max, peak


@triton.jit
def tile_scores(
    q, k_head, v_head, table, place, start, full_start, full_end,
    b, kv_head, heads, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_strides, v_strides,
    TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr, EQUAL_ROWS: tl.constexpr,
    DESCRIBED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TAIL: tl.constexpr, FOLDED: tl.constexpr,
    SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    q_rest, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Scores of the KV tile from ``start`` on, modified and masked: exponents of 2 or, FOLDED, without their factor.
    And where its rows of V lie, and which of them there are: a place, offsets from it, booleans."""
    k_row = k_strides[2]
    v_row = k_row if EQUAL_ROWS else v_strides[2]  # one set of offsets for both saves registers
    lanes = tl.arange(0, TILE_KV)
    keys = start + lanes
    present = keys < seq_kv
    v_tile, v_offsets = v_head, lanes
    if DESCRIBED:
        k = load_described(k_head, b, kv_head, start, TILE_KV, BLOCK_D)
    else:
        if PAGE == 0:
            # One 64-bit offset for the tile; those within it stay the same from tile to tile.
            k_tile, v_tile = k_head + start.to(tl.int64) * k_row, v_head + start.to(tl.int64) * v_row
            k_offsets, v_offsets = offsets_of(lanes, k_row, WIDE), offsets_of(lanes, v_row, WIDE)
        elif PAGE % TILE_KV == 0:  # the tile lies in one page: one entry of the table, and the tile does begin
            page = tl.load(table + start // PAGE).to(tl.int64)
            k_tile = k_head + page * k_strides[0] + (start % PAGE).to(tl.int64) * k_row
            v_tile = v_head + page * v_strides[0] + (start % PAGE).to(tl.int64) * v_row
            k_offsets, v_offsets = offsets_of(lanes, k_row, WIDE), offsets_of(lanes, v_row, WIDE)
        else:
            pages = tl.load(table + keys // PAGE, mask=present, other=0).to(tl.int64)
            k_tile, v_tile = k_head, v_head
            k_offsets = pages * k_strides[0] + (keys % PAGE).to(tl.int64) * k_row
            v_offsets = pages * v_strides[0] + (keys % PAGE).to(tl.int64) * v_row
        k = load_tile(k_tile, k_offsets, present, HEAD_DIM, BLOCK_D, TAIL).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if REST:
        k_rest = load_tile(k_tile + HEAD_DIM, k_offsets, present, REST, BLOCK_REST, TAIL).to(q.dtype)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
    if not FOLDED:
        scores = scores * scale
        if SCORE is not None:
            scores = SCORE(scores, b, heads, positions[:, None], keys[None, :], seq_kv - seq_q, score_operands).to(
                tl.float32
            )
        scores = scores * LOG2E
    if LEFT or RIGHT or MASK is not None or TAIL:
        if in_part(place, full_start, full_end, LEFT and MASK is None):
            visible = seen(b, heads, positions, keys, seq_q, seq_kv, low, high, mask_operands, LEFT, MASK)
            scores = tl.where(visible, scores, -float("inf"))
    return scores, v_tile, v_offsets, present


@triton.jit
def add_sink(acc, running_sum, running_max, sink, heads, valid):
    """One more logit per head that carries no value: as if another tile held it alone."""
    logit = tl.load(sink + heads, mask=valid, other=-float("inf")).to(tl.float32) * LOG2E
    new_max = tl.maximum(running_max, logit)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha = tl.math.exp2(running_max - shift)
    return acc * alpha[:, None], running_sum * alpha + tl.math.exp2(logit - shift), new_max


@triton.jit
def _empty_rows(
    out, lse, first, total, tile, tiles, head, out_strides, lse_strides,
    TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that belong to no sequence: 0, with LSE -inf."""
    for start in range(first + tile * TILE, total, tiles * TILE):
        rows = (start + tl.arange(0, TILE)).to(tl.int64)
        valid = rows < total
        store_tile(
            out + head.to(tl.int64) * out_strides[1], rows * out_strides[2], valid,
            tl.zeros([TILE, BLOCK], dtype=tl.float32), DIM, BLOCK,
        )  # fmt: skip
        if lse is not None:
            lse_rows = lse + head.to(tl.int64) * lse_strides[1] + rows * lse_strides[2]
            tl.store(lse_rows, tl.full([TILE], -float("inf"), dtype=tl.float32), mask=valid)


@triton.jit
def combine(
    parts, part_lse, out, lse, sink, out_strides, lse_strides, split_strides, heads, seq_q, splits,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial results over disjoint keys merged by their LSE, one program for each (batch, head, query).

    O = Σ O_s 2^(L_s - m) / Σ 2^(L_s - m), LSE = m + log2 Σ 2^(L_s - m), with m the largest L_s; parts without a key
    have L_s = -inf and weigh nothing (arXiv:2205.14135, section 3.1, applied to whole splits).
    ``parts`` (splits, batch, seq_q, heads, DIM) fp32, ``part_lse`` (splits, batch, heads, seq_q), SPLITS >= splits.
    """
    program = tl.program_id(0)
    position, head, b = program % seq_q, program // seq_q % heads, program // seq_q // heads
    row = position.to(tl.int64) * out_strides[2] + head * out_strides[1] + b.to(tl.int64) * out_strides[0]
    lse_row = position + head * lse_strides[1] + b.to(tl.int64) * lse_strides[0]
    index = tl.arange(0, SPLITS)
    part_lses = tl.load(
        part_lse + index.to(tl.int64) * split_strides[1] + lse_row, mask=index < splits, other=-float("inf")
    )
    part_lses = part_lses * LOG2E
    maximum = tl.max(part_lses, 0)
    if sink is not None:
        logit = tl.load(sink + head).to(tl.float32) * LOG2E
        maximum = tl.maximum(maximum, logit)
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(tl.math.exp2(part_lses - shift), 0)
    if sink is not None:
        total += tl.math.exp2(logit - shift)
    columns = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    from_part, from_lse = parts + row + columns, part_lse + lse_row
    for _ in range(splits):
        weight = tl.math.exp2(tl.load(from_lse) * LOG2E - shift)
        acc += weight * tl.load(from_part, mask=columns < DIM, other=0.0)  # 0 where the part has no key
        from_part += split_strides[0]
        from_lse += split_strides[1]
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row + columns, acc.to(out.dtype.element_ty), mask=columns < DIM)
    if lse is not None:
        tl.store(lse + lse_row, tl.where(total == 0.0, -float("inf"), (maximum + tl.math.log2(total)) * LN2))
