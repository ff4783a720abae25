"""Standard attention (arXiv:2205.14135, algorithm 0): three kernels with S and P in device memory.

    write_scores   one tile of S: load Q, K → scores → score modifiers → mask → store S
    write_probs    one row: load S → maximum and sum, and the sink's → store P and LSE
    weigh_values   one tile of rows: for each KV tile: load P, V → accumulate → store O

S and P are of the input dtype, as frameworks write them, and that costs what it costs: in fp16 a score beyond 65,504
overflows. Every tile is computed, whatever the mask hides.
"""

import triton
import triton.language as tl

from attnworks.backends.triton.parts import LN2, LOG2E, diagonals, load_tile, seen, store_tile


@triton.jit
def write_scores(
    q, k, scores, score_operands, mask_operands, q_strides, k_strides,
    heads, group, seq_q, seq_kv, scale, low_bottom, high_bottom, low_top, high_top,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S = scale · Q Kᵀ, modified and masked: one tile of it. Grid: KV tiles · Q tiles · heads · batch.

    ``scores`` (batch, heads, seq_q, seq_kv), contiguous."""
    kv_tiles, q_tiles = tl.cdiv(seq_kv, TILE_KV), tl.cdiv(seq_q, TILE_Q)
    program = tl.program_id(0)
    kv_tile, q_tile = program % kv_tiles, program // kv_tiles % q_tiles
    unit = program // kv_tiles // q_tiles
    head, b = unit % heads, unit // heads
    h, wide_b, kv_head = head.to(tl.int64), b.to(tl.int64), (head // group).to(tl.int64)
    positions, keys = q_tile * TILE_Q + tl.arange(0, TILE_Q), kv_tile * TILE_KV + tl.arange(0, TILE_KV)
    rows, columns = positions.to(tl.int64), keys.to(tl.int64)
    q_head = q + wide_b * q_strides[0] + h * q_strides[1]
    k_head = k + wide_b * k_strides[0] + kv_head * k_strides[1]
    q_rows = load_tile(q_head, rows * q_strides[2], positions < seq_q, HEAD_DIM, BLOCK_D, True)
    k_rows = load_tile(k_head, columns * k_strides[2], keys < seq_kv, HEAD_DIM, BLOCK_D, True)
    s = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION) * scale
    if SCORE is not None:
        s = SCORE(s, b, head, positions[:, None], keys[None, :], seq_kv - seq_q, score_operands)
    if LEFT or RIGHT or MASK is not None:
        low, high = diagonals(seq_q, seq_kv, low_bottom, high_bottom, low_top, high_top)
        visible = seen(b, head, positions, keys, seq_q, seq_kv, low, high, mask_operands, LEFT, MASK)
        s = tl.where(visible, s, -float("inf"))
    to = scores + (unit.to(tl.int64) * seq_q + rows[:, None]) * seq_kv + columns[None, :]
    tl.store(to, s.to(scores.dtype.element_ty), mask=(positions < seq_q)[:, None] & (keys < seq_kv)[None, :])


@triton.jit
def write_probs(
    scores, probs, lse, sink, lse_strides, heads, seq_q, seq_kv, BLOCK: tl.constexpr, SINGLE: tl.constexpr
):  # fmt: skip
    """P = softmax(S) of one row, 0 where it sees no key, and its LSE. Grid: seq_q · heads · batch.

    SINGLE: the row fits into one BLOCK and is read once; a longer one is read a second time, from the cache."""
    program = tl.program_id(0)
    position, unit = program % seq_q, program // seq_q
    head, b = unit % heads, unit // heads
    row = program.to(tl.int64) * seq_kv
    lanes = tl.arange(0, BLOCK)
    m = tl.full([], -float("inf"), dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    if sink is not None:
        m = tl.load(sink + head).to(tl.float32) * LOG2E
        total = tl.where(m == -float("inf"), 0.0, 1.0)
    s = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, seq_kv, BLOCK):
        s = tl.load(scores + row + start + lanes, mask=start + lanes < seq_kv, other=-float("inf")).to(tl.float32)
        s = s * LOG2E
        new_max = tl.maximum(m, tl.max(s, 0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        total = total * tl.math.exp2(m - shift) + tl.sum(tl.math.exp2(s - shift), 0)
        m = new_max
    shift = tl.where(m == -float("inf"), 0.0, m)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    for start in range(0, seq_kv, BLOCK):
        if not SINGLE:
            s = tl.load(scores + row + start + lanes, mask=start + lanes < seq_kv, other=-float("inf"))
            s = s.to(tl.float32) * LOG2E
        p = tl.math.exp2(s - shift) * share
        tl.store(probs + row + start + lanes, p.to(probs.dtype.element_ty), mask=start + lanes < seq_kv)
    if lse is not None:
        to = lse + b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + position * lse_strides[2]
        tl.store(to, tl.where(total == 0.0, -float("inf"), (m + tl.math.log2(total)) * LN2))


@triton.jit
def weigh_values(
    probs, v, out, v_strides, out_strides, heads, group, seq_q, seq_kv,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O = P V of one tile of rows. Grid: Q tiles · heads · batch."""
    q_tiles = tl.cdiv(seq_q, TILE_Q)
    q_tile, unit = tl.program_id(0) % q_tiles, tl.program_id(0) // q_tiles
    head, b = unit % heads, unit // heads
    h, wide_b, kv_head = head.to(tl.int64), b.to(tl.int64), (head // group).to(tl.int64)
    positions = q_tile * TILE_Q + tl.arange(0, TILE_Q)
    rows, valid = positions.to(tl.int64), positions < seq_q
    v_head = v + wide_b * v_strides[0] + kv_head * v_strides[1]
    from_rows = probs + (unit.to(tl.int64) * seq_q + rows[:, None]) * seq_kv
    acc = tl.zeros([TILE_Q, BLOCK_DV], dtype=tl.float32)
    for start in range(0, seq_kv, TILE_KV):
        keys = start + tl.arange(0, TILE_KV)
        present = keys < seq_kv
        p = tl.load(from_rows + keys[None, :], mask=valid[:, None] & present[None, :], other=0.0)
        values = load_tile(v_head, keys.to(tl.int64) * v_strides[2], present, HEAD_DIM_V, BLOCK_DV, True)
        acc = tl.dot(p, values, acc, input_precision=PRECISION)
    out_head = out + wide_b * out_strides[0] + h * out_strides[1]
    store_tile(out_head, rows * out_strides[2], valid, acc, HEAD_DIM_V, BLOCK_DV)
