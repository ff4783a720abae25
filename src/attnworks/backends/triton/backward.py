"""The backward kernels: P is computed again from the saved LSE (FlashAttention-2, arXiv:2307.08691, algorithm 2).

With S, P as in the forward pass and dP = dO Vᵀ:

    dV = Pᵀ dO      dS = P ∘ (dP - delta)      dQ = scale · dS K      dK = scale · dSᵀ Q

``delta`` = rowsum(dO ∘ O) - dLSE holds all that the softmax's denominator and an LSE cotangent contribute. Two kernels,
each of which owns what it writes, so that nothing is added up in an order that varies from run to run:

    grad_kv   one KV tile: load K, V → for each query head of the group, each Q tile that sees it: load Q, dO → Sᵀ → Pᵀ
              → dV += Pᵀ dO → dSᵀ → dK += dSᵀ Q → store dK, dV
    grad_q    one Q tile: load Q, dO → for each KV tile it sees: load K, V → S → P → dS → dQ += dS K → store dQ

S is therefore computed twice: seven products where one kernel with atomic additions to dQ would do five.
"""

import triton
import triton.language as tl

from attnworks.backends.triton.parts import (
    LOG2E,
    diagonals,
    in_part,
    load_described,
    load_tile,
    offsets_of,
    padded_start,
    seen,
    sequence,
    store_tile,
    task,
    tile_at,
    visited_tiles,
)


@triton.jit
def row_delta(
    out, grad_out, grad_lse, lse, delta, lse2, cu_seqlens_q, out_strides, grad_strides, lse_strides, row_strides,
    batch, heads, seq_q, TILE_Q: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO ∘ O) - dLSE of a tile of rows, and the LSE in base 2, +inf where a row has seen no key, so that
    every P of the row comes out as 0. Grid: row tiles · heads · batch.

    They lie in rows of their own, padded to PAD (``padded_start``) with what a row without keys has, so that the
    kernels below read whole tiles of them, aligned, whatever the lengths. TILE_Q is a multiple of PAD."""
    row_tiles = tl.num_programs(0) // (heads * batch)
    program = tl.program_id(0)
    tile, head, b = program % row_tiles, program // row_tiles % heads, program // row_tiles // heads
    rows_q, start = sequence(b, seq_q, cu_seqlens_q, out_strides[0], out_strides[2])
    _, grad_start = sequence(b, seq_q, cu_seqlens_q, grad_strides[0], grad_strides[2])
    _, lse_start = sequence(b, seq_q, cu_seqlens_q, lse_strides[0], lse_strides[2])
    if tile * TILE_Q >= rows_q:
        return
    rows = tile * TILE_Q + tl.arange(0, TILE_Q)
    valid = rows < rows_q
    wide, h = rows.to(tl.int64), head.to(tl.int64)
    o = load_tile(out + start + h * out_strides[1], wide * out_strides[2], valid, DIM, BLOCK, True).to(tl.float32)
    d = load_tile(grad_out + grad_start + h * grad_strides[1], wide * grad_strides[2], valid, DIM, BLOCK, True)
    total = tl.sum(o * d.to(tl.float32), 1)
    offsets = lse_start + h * lse_strides[1] + wide * lse_strides[2]
    if grad_lse is not None:
        total -= tl.load(grad_lse + offsets, mask=valid, other=0.0)
    row_lse = tl.load(lse + offsets, mask=valid, other=-float("inf"))
    places = padded_start(b, cu_seqlens_q, row_strides[0], PAD) + h * row_strides[1] + wide
    tl.store(delta + places, total)
    tl.store(lse2 + places, tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2E))


@triton.jit
def probs_and_grad(
    products, grad_probs, row_lse, row_delta, b, head, positions, keys, shift, scale, score_operands,
    SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr,
):  # fmt: skip
    """(P, dS before the score modifiers) of one tile in either orientation: ``positions``, ``keys``, ``row_lse`` and
    ``row_delta`` come with the axes they broadcast along. Where a key is hidden the caller puts 0 in their place: they,
    a modifier and its derivative may be infinite or NaN there."""
    if SCORE is None:  # one factor, which a fused multiply-add takes along
        probs = tl.math.exp2(products * (scale * LOG2E) - row_lse)
    else:
        scores = SCORE(products * scale, b, head, positions, keys, shift, score_operands).to(tl.float32)
        probs = tl.math.exp2(scores * LOG2E - row_lse)
    grad = probs * (grad_probs - row_delta)
    if SCORE is not None:
        slope = SCORE_GRAD(products * scale, b, head, positions, keys, shift, score_operands)
        grad = grad * slope.to(tl.float32)
    return probs, grad


@triton.jit
def grad_kv(
    q, k, v, grad_out, lse2, delta, grad_k, grad_v, cu_seqlens_q, cu_seqlens_kv, kv_lens,
    tile_map, score_operands, mask_operands,
    q_strides, k_strides, v_strides, grad_out_strides, row_strides, grad_k_strides, grad_v_strides,
    batch, heads_kv, group, seq_q, seq_kv, total_kv, scale, low_bottom, high_bottom, low_top, high_top,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TAIL: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PAD: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys. Grid: KV tiles · heads_kv · batch (packed sequences: batch + 1). DESCRIBED: Q, dO,
    ``lse2`` and ``delta`` are tensor descriptors."""
    kv_tiles = tl.num_programs(0) // (heads_kv * (batch if cu_seqlens_kv is None else batch + 1))
    kv_tile, kv_head, b = task(tl.program_id(0), kv_tiles, heads_kv, RIGHT, False)
    if cu_seqlens_kv is not None:
        if b == batch:
            first = tl.load(cu_seqlens_kv + batch)
            zero_rows(grad_k, first, total_kv, kv_tile, kv_tiles, kv_head, grad_k_strides, TILE_KV, HEAD_DIM, BLOCK_D)
            zero_rows(
                grad_v, first, total_kv, kv_tile, kv_tiles, kv_head, grad_v_strides, TILE_KV, HEAD_DIM_V, BLOCK_DV
            )
            return
    rows_q, q_start = sequence(b, seq_q, cu_seqlens_q, q_strides[0], q_strides[2])
    _, grad_start = sequence(b, seq_q, cu_seqlens_q, grad_out_strides[0], grad_out_strides[2])
    row_start = padded_start(b, cu_seqlens_q, row_strides[0], PAD)
    keys_kv, k_start = sequence(b, seq_kv, cu_seqlens_kv, k_strides[0], k_strides[2])
    _, v_start = sequence(b, seq_kv, cu_seqlens_kv, v_strides[0], v_strides[2])
    if kv_lens is not None:
        keys_kv = tl.load(kv_lens + b).to(tl.int32)
    _, grad_k_start = sequence(b, seq_kv, cu_seqlens_kv, grad_k_strides[0], grad_k_strides[2])
    _, grad_v_start = sequence(b, seq_kv, cu_seqlens_kv, grad_v_strides[0], grad_v_strides[2])
    if kv_tile * TILE_KV >= keys_kv:
        return
    keys = kv_tile * TILE_KV + tl.arange(0, TILE_KV)
    present, wide, h = keys < keys_kv, keys.to(tl.int64), kv_head.to(tl.int64)
    k_tile = load_tile(k + k_start + h * k_strides[1], wide * k_strides[2], present, HEAD_DIM, BLOCK_D, True)
    v_tile = load_tile(v + v_start + h * v_strides[1], wide * v_strides[2], present, HEAD_DIM_V, BLOCK_DV, True)
    acc_k = tl.zeros([TILE_KV, BLOCK_D], dtype=tl.float32)
    acc_v = tl.zeros([TILE_KV, BLOCK_DV], dtype=tl.float32)
    low, high = diagonals(rows_q, keys_kv, low_bottom, high_bottom, low_top, high_top)
    # Query i sees key j if i + low <= j <= i + high: seen from the key, j - high <= i <= j - low.
    last_key = tl.minimum(kv_tile * TILE_KV + TILE_KV, keys_kv) - 1
    for member in range(group):
        head = kv_head * group + member
        wide_head = head.to(tl.int64)
        start, full_start, full_end, stop = visited_tiles(
            0, rows_q, kv_tile * TILE_KV, last_key, -high, -low, tile_map, b, head, kv_tile, TILE_Q, RIGHT, LEFT, MASK
        )
        q_head, d_head, lse_head, delta_head = q, grad_out, lse2, delta
        if not DESCRIBED:
            q_head = q + q_start + wide_head * q_strides[1]
            d_head = grad_out + grad_start + wide_head * grad_out_strides[1]
            lse_head = lse2 + row_start + wide_head * row_strides[1]
            delta_head = delta + row_start + wide_head * row_strides[1]
        acc_k, acc_v = gather_queries(
            acc_k, acc_v, k_tile, v_tile, q_head, d_head, lse_head, delta_head,
            tile_map, start, full_start, full_end, stop, b, head, keys, rows_q, keys_kv, low, high,
            scale, score_operands, mask_operands, q_strides[2], grad_out_strides[2],
            TILE_Q, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, WIDE, LEFT, RIGHT, TAIL,
            SCORE, SCORE_GRAD, MASK, PRECISION, DESCRIBED,
        )  # fmt: skip
    store_tile(
        grad_k + grad_k_start + h * grad_k_strides[1],
        wide * grad_k_strides[2],
        present,
        acc_k * scale,
        HEAD_DIM,
        BLOCK_D,
    )
    store_tile(
        grad_v + grad_v_start + h * grad_v_strides[1], wide * grad_v_strides[2], present, acc_v, HEAD_DIM_V, BLOCK_DV
    )


@triton.jit
def gather_queries(
    acc_k, acc_v, k_tile, v_tile, q, grad_out, lse2, delta, tile_map, first_place, full_start, full_end, stop_place,
    b, head, keys, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, q_row, grad_row,
    TILE_Q: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TAIL: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """What the Q tiles that ``visited_tiles`` found add to dK and dV."""
    listed = tile_at(first_place, tile_map, stop_place)
    for place in range(first_place, stop_place):
        start = (place if tile_map is None else listed) * TILE_Q
        listed = tile_at(place + 1, tile_map, stop_place)
        lanes = tl.arange(0, TILE_Q)
        positions = start + lanes
        valid = positions < seq_q
        far = start.to(tl.int64)
        if DESCRIBED:
            q_tile = load_described(q, b, head, start, TILE_Q, BLOCK_D)
            row_lse = lse2.load([b, head, start]).reshape(TILE_Q)
            row_delta = delta.load([b, head, start]).reshape(TILE_Q)
        else:
            q_tile = load_tile(q + far * q_row, offsets_of(lanes, q_row, WIDE), valid, HEAD_DIM, BLOCK_D, TAIL)
            row_lse, row_delta = tl.load(lse2 + far + lanes), tl.load(delta + far + lanes)
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        if DESCRIBED:
            d_tile = load_described(grad_out, b, head, start, TILE_Q, BLOCK_DV)
        else:
            d_tile = load_tile(
                grad_out + far * grad_row, offsets_of(lanes, grad_row, WIDE), valid, HEAD_DIM_V, BLOCK_DV, TAIL
            )
        grad_probs = tl.dot(v_tile, tl.trans(d_tile), input_precision=PRECISION)
        probs, grad = probs_and_grad(
            products, grad_probs, row_lse[None, :], row_delta[None, :],
            b, head, positions[None, :], keys[:, None], seq_kv - seq_q, scale, score_operands, SCORE, SCORE_GRAD,
        )  # fmt: skip
        # Rows past the end need no mask: their LSE of +inf makes P and dS 0.
        if LEFT or RIGHT or MASK is not None:
            if in_part(place, full_start, full_end, RIGHT and MASK is None):
                visible = seen(b, head, positions, keys, seq_q, seq_kv, low, high, mask_operands, LEFT, MASK, True)
                probs, grad = tl.where(visible, probs, 0.0), tl.where(visible, grad, 0.0)
        acc_v = tl.dot(probs.to(d_tile.dtype), d_tile, acc_v, input_precision=PRECISION)
        acc_k = tl.dot(grad.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit
def grad_q(
    q, k, v, grad_out, lse2, delta, grad_q, cu_seqlens_q, cu_seqlens_kv, kv_lens,
    tile_map, score_operands, mask_operands,
    q_strides, k_strides, v_strides, grad_out_strides, row_strides, grad_q_strides,
    batch, heads, group, seq_q, seq_kv, total_q, scale, low_bottom, high_bottom, low_top, high_top,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TAIL: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PAD: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of rows. Grid: row tiles · heads · batch (packed sequences: batch + 1). DESCRIBED: K and V are
    tensor descriptors."""
    row_tiles = tl.num_programs(0) // (heads * (batch if cu_seqlens_q is None else batch + 1))
    row_tile, head, b = task(tl.program_id(0), row_tiles, heads, RIGHT, RIGHT)
    if cu_seqlens_q is not None:
        if b == batch:
            first = tl.load(cu_seqlens_q + batch)
            zero_rows(grad_q, first, total_q, row_tile, row_tiles, head, grad_q_strides, TILE_Q, HEAD_DIM, BLOCK_D)
            return
    rows_q, q_start = sequence(b, seq_q, cu_seqlens_q, q_strides[0], q_strides[2])
    _, grad_start = sequence(b, seq_q, cu_seqlens_q, grad_out_strides[0], grad_out_strides[2])
    _, grad_q_start = sequence(b, seq_q, cu_seqlens_q, grad_q_strides[0], grad_q_strides[2])
    keys_kv, k_start = sequence(b, seq_kv, cu_seqlens_kv, k_strides[0], k_strides[2])
    _, v_start = sequence(b, seq_kv, cu_seqlens_kv, v_strides[0], v_strides[2])
    if kv_lens is not None:
        keys_kv = tl.load(kv_lens + b).to(tl.int32)
    if row_tile * TILE_Q >= rows_q:
        return
    positions = row_tile * TILE_Q + tl.arange(0, TILE_Q)
    valid, wide, h, kv_head = (
        positions < rows_q,
        positions.to(tl.int64),
        head.to(tl.int64),
        (head // group).to(tl.int64),
    )
    q_tile = load_tile(q + q_start + h * q_strides[1], wide * q_strides[2], valid, HEAD_DIM, BLOCK_D, True)
    d_tile = load_tile(
        grad_out + grad_start + h * grad_out_strides[1], wide * grad_out_strides[2], valid, HEAD_DIM_V, BLOCK_DV, True
    )
    places = padded_start(b, cu_seqlens_q, row_strides[0], PAD) + h * row_strides[1] + wide
    row_lse = tl.load(lse2 + places, mask=valid, other=float("inf"))[:, None]
    row_delta = tl.load(delta + places, mask=valid, other=0.0)[:, None]
    acc = tl.zeros([TILE_Q, BLOCK_D], dtype=tl.float32)
    low, high = diagonals(rows_q, keys_kv, low_bottom, high_bottom, low_top, high_top)
    last = tl.minimum(row_tile * TILE_Q + TILE_Q, rows_q) - 1
    start, full_start, full_end, stop = visited_tiles(
        0, keys_kv, row_tile * TILE_Q, last, low, high, tile_map, b, head, row_tile, TILE_KV, LEFT, RIGHT, MASK
    )
    k_head, v_head = k, v
    if not DESCRIBED:
        k_head, v_head = k + k_start + kv_head * k_strides[1], v + v_start + kv_head * v_strides[1]
    acc = gather_keys(
        acc, q_tile, d_tile, row_lse, row_delta, k_head, v_head, tile_map, start, full_start, full_end, stop,
        b, head // group, head, positions, rows_q, keys_kv, low, high, scale, score_operands, mask_operands,
        k_strides[2], v_strides[2], TILE_KV, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, WIDE, LEFT, RIGHT, TAIL,
        SCORE, SCORE_GRAD, MASK, PRECISION, DESCRIBED,
    )  # fmt: skip
    store_tile(
        grad_q + grad_q_start + h * grad_q_strides[1], wide * grad_q_strides[2], valid, acc * scale, HEAD_DIM, BLOCK_D
    )


@triton.jit
def gather_keys(
    acc, q_tile, d_tile, row_lse, row_delta, k, v, tile_map, first_place, full_start, full_end, stop_place,
    b, kv_head, head, positions, seq_q, seq_kv, low, high, scale, score_operands, mask_operands, k_row, v_row,
    TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TAIL: tl.constexpr, SCORE: tl.constexpr, SCORE_GRAD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """What the KV tiles that ``visited_tiles`` found add to dQ / scale."""
    listed = tile_at(first_place, tile_map, stop_place)
    for place in range(first_place, stop_place):
        start = (place if tile_map is None else listed) * TILE_KV
        listed = tile_at(place + 1, tile_map, stop_place)
        lanes = tl.arange(0, TILE_KV)
        keys = start + lanes
        present, far = keys < seq_kv, start.to(tl.int64)
        if DESCRIBED:
            k_tile = load_described(k, b, kv_head, start, TILE_KV, BLOCK_D)
            v_tile = load_described(v, b, kv_head, start, TILE_KV, BLOCK_DV)
        else:
            k_tile = load_tile(k + far * k_row, offsets_of(lanes, k_row, WIDE), present, HEAD_DIM, BLOCK_D, TAIL)
            v_tile = load_tile(v + far * v_row, offsets_of(lanes, v_row, WIDE), present, HEAD_DIM_V, BLOCK_DV, TAIL)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        grad_probs = tl.dot(d_tile, tl.trans(v_tile), input_precision=PRECISION)
        _, grad = probs_and_grad(
            products, grad_probs, row_lse, row_delta,
            b, head, positions[:, None], keys[None, :], seq_kv - seq_q, scale, score_operands, SCORE, SCORE_GRAD,
        )  # fmt: skip
        if LEFT or RIGHT or MASK is not None or TAIL:
            if in_part(place, full_start, full_end, LEFT and MASK is None):
                visible = seen(b, head, positions, keys, seq_q, seq_kv, low, high, mask_operands, LEFT, MASK)
                grad = tl.where(visible, grad, 0.0)
        acc = tl.dot(grad.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def zero_rows(
    out, first, total, tile, tiles, head, strides, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows ``first`` to ``total`` - 1, which belong to no sequence, are written as 0, shared out among ``tiles``."""
    for start in range(first + tile * TILE, total, tiles * TILE):
        rows = (start + tl.arange(0, TILE)).to(tl.int64)
        store_tile(
            out + head.to(tl.int64) * strides[1], rows * strides[2], rows < total,
            tl.zeros([TILE, BLOCK], dtype=tl.float32), DIM, BLOCK,
        )  # fmt: skip
