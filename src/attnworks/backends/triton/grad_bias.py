"""The gradient of a bias: dS at its place, summed over what it was broadcast along, always in one order."""

import triton
import triton.language as tl

from attnworks.backends.triton.backward import probs_and_grad
from attnworks.backends.triton.parts import diagonals, load_tile, padded_start, seen, sequence, tile_ranges


@triton.jit
def grad_bias(
    q, k, v, grad_out, lse2, delta, grad, cu_seqlens_q, cu_seqlens_kv, kv_lens, score_operands, mask_operands,
    q_strides, k_strides, v_strides, grad_out_strides, row_strides, bias_strides,
    batch, heads, group, seq_q, seq_kv, tiles_q, tiles_kv, scale, low_bottom, high_bottom, low_top, high_top,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    OVER_B: tl.constexpr, OVER_H: tl.constexpr, OVER_Q: tl.constexpr, OVER_K: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """The gradient of a bias: dS at its place, summed OVER the dimensions that it is broadcast along. One program for
    each tile of the bias as it is; grid: batch · heads · Q tiles · KV tiles, without those that are summed over.
    ``grad`` is fp32, (batch or 1, heads or 1, seq_q or 1, seq_kv or 1), contiguous."""
    program = tl.program_id(0)
    k_tiles = 1 if OVER_K else tiles_kv
    q_tiles = 1 if OVER_Q else tiles_q
    bias_heads = 1 if OVER_H else heads
    own_k, rest = program % k_tiles, program // k_tiles
    own_q, rest = rest % q_tiles, rest // q_tiles
    own_h, own_b = rest % bias_heads, rest // bias_heads
    acc = tl.zeros([TILE_Q, TILE_KV], dtype=tl.float32)
    for b_step in range(batch if OVER_B else 1):
        b = own_b + b_step
        rows_q, q_start = sequence(b, seq_q, cu_seqlens_q, q_strides[0], q_strides[2])
        _, grad_start = sequence(b, seq_q, cu_seqlens_q, grad_out_strides[0], grad_out_strides[2])
        row_start = padded_start(b, cu_seqlens_q, row_strides[0], PAD)
        keys_kv, k_start = sequence(b, seq_kv, cu_seqlens_kv, k_strides[0], k_strides[2])
        _, v_start = sequence(b, seq_kv, cu_seqlens_kv, v_strides[0], v_strides[2])
        if kv_lens is not None:
            keys_kv = tl.load(kv_lens + b).to(tl.int32)
        low, high = diagonals(rows_q, keys_kv, low_bottom, high_bottom, low_top, high_top)
        for h_step in range(heads if OVER_H else 1):
            head = own_h + h_step
            h, kv_head = head.to(tl.int64), (head // group).to(tl.int64)
            for q_step in range(tiles_q if OVER_Q else 1):
                tile_q = own_q + q_step
                positions = tile_q * TILE_Q + tl.arange(0, TILE_Q)
                valid, wide = positions < rows_q, positions.to(tl.int64)
                q_tile = load_tile(q + q_start + h * q_strides[1], wide * q_strides[2], valid, HEAD_DIM, BLOCK_D, True)
                d_tile = load_tile(
                    grad_out + grad_start + h * grad_out_strides[1], wide * grad_out_strides[2], valid,
                    HEAD_DIM_V, BLOCK_DV, True,
                )  # fmt: skip
                rows = row_start + h * row_strides[1] + wide
                row_lse = tl.load(lse2 + rows, mask=valid, other=float("inf"))[:, None]
                row_delta = tl.load(delta + rows, mask=valid, other=0.0)[:, None]
                last = tl.minimum(tile_q * TILE_Q + TILE_Q, rows_q) - 1
                start, _, _, stop = tile_ranges(0, keys_kv, tile_q * TILE_Q, last, low, high, TILE_KV, LEFT, RIGHT)
                if not OVER_K:
                    start, stop = tl.maximum(start, own_k), tl.minimum(stop, own_k + 1)
                for tile in range(start, stop):
                    keys = tile * TILE_KV + tl.arange(0, TILE_KV)
                    present, far = keys < keys_kv, keys.to(tl.int64)
                    k_tile = load_tile(
                        k + k_start + kv_head * k_strides[1], far * k_strides[2], present, HEAD_DIM, BLOCK_D, True
                    )
                    v_tile = load_tile(
                        v + v_start + kv_head * v_strides[1], far * v_strides[2], present, HEAD_DIM_V, BLOCK_DV, True
                    )
                    visible = seen(b, head, positions, keys, rows_q, keys_kv, low, high, mask_operands, LEFT, MASK)
                    at_q, at_k = positions[:, None], keys[None, :]
                    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    grad_probs = tl.dot(d_tile, tl.trans(v_tile), input_precision=PRECISION)
                    _probs, grad_scores = probs_and_grad(
                        products, grad_probs, row_lse, row_delta, b, head, at_q, at_k, keys_kv - rows_q, scale,
                        score_operands, SCORE, SLOPE,
                    )  # fmt: skip
                    acc += tl.where(visible, grad_scores, 0.0)
    b_at = 0 if OVER_B else own_b.to(tl.int64) * bias_strides[0]
    h_at = 0 if OVER_H else own_h.to(tl.int64) * bias_strides[1]
    at_q = own_q * TILE_Q + tl.arange(0, TILE_Q)
    at_k = own_k * TILE_KV + tl.arange(0, TILE_KV)
    base = grad + b_at + h_at
    if OVER_Q and OVER_K:
        tl.store(base, tl.sum(acc))
    elif OVER_Q:
        tl.store(base + at_k, tl.sum(acc, 0), mask=at_k < seq_kv)
    elif OVER_K:
        tl.store(base + at_q, tl.sum(acc, 1), mask=at_q < seq_q)
    else:
        places = base + at_q.to(tl.int64)[:, None] * bias_strides[2] + at_k[None, :]
        tl.store(places, acc, mask=(at_q < seq_q)[:, None] & (at_k < seq_kv)[None, :])
