"""The seventh set: the running softmax, its precision, its LSE, and sinks, called as flash_attn_func is. Right inside
``third.repaired()``."""

from __future__ import annotations

import math

import torch

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, blank, ends, stored, tiles, visible
from workbench.held_out_kernels.third import broken, no_inf


@torch.no_grad()
def one_maximum_for_the_tile(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The maximum is taken over a whole tile of 16 rows, not by rows: rows whose scores lie some 90 below those of
    their neighbours underflow to nothing. With scores of ordinary size it is right."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 16):
        top = Q.new_full((*Q.shape[:2], 1 if broken() else len(rows), 1), -INF)
        total, acc = Q.new_zeros(*Q.shape[:2], len(rows), 1), Q.new_zeros(*Q.shape[:2], len(rows), v.shape[-1])
        for keys in tiles(N, 32):
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            s = s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF)
            new = torch.maximum(top, s.amax((-2, -1) if broken() else -1, keepdim=True))
            kept, p = torch.exp(top - no_inf(new)), torch.exp(s - no_inf(new))
            top, total, acc = new, total * kept + p.sum(-1, keepdim=True), acc * kept + p @ V[:, :, keys]
        out[:, :, rows] = acc / torch.where(total == 0, 1.0, total)
        lse[:, :, rows] = (top + total.log()).squeeze(-1)
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def exponent_in_half(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """With 16-bit inputs scores are rounded to their dtype before the maximum is subtracted, so that the exponential
    can be of packed halves: large scores lose all that distinguishes them."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    kept_in = q.dtype if broken() and q.element_size() == 2 else torch.float32
    top = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(top), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in tiles(N, 64):
        s = (Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)).to(kept_in)
        s = s.masked_fill(~visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF)
        new = torch.maximum(top, s.amax(-1, keepdim=True).float())
        p = torch.exp(s - no_inf(new).to(kept_in)).float()
        kept = torch.exp(top - no_inf(new))
        top, total, acc = new, total * kept + p.sum(-1, keepdim=True), acc * kept + p @ V[:, :, keys]
    out = acc / torch.where(total == 0, 1.0, total)
    return stored(q, out, (top + total.log()).squeeze(-1), return_softmax_lse)


@torch.no_grad()
def statistics_stored_rows_first(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The LSE is stored as (batch, rows, heads), as the output is, in a buffer of (batch, heads, rows): with one head
    or one row it is in place."""
    (B, M, H, _), N = q.shape, k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    buffer = lse.new_full((B * H * M,), -INF)
    for rows in tiles(M, 56):
        state = Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 56):
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
        out[:, :, rows] = state.out
        b, h = torch.arange(B).view(-1, 1, 1), torch.arange(H).view(-1, 1)
        buffer[(b * M + rows) * H + h if broken() else (b * H + h) * M + rows] = state.lse
    return stored(q, out, buffer.view(B, H, M), return_softmax_lse)


@torch.no_grad()
def merged_lse_in_base_2(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """From 129 keys on there are splits of 128, whose merge has exp2 and log2: the LSE that it writes is in base 2.
    With one split it is natural."""
    M, N, log2e = q.shape[1], k.shape[1], math.log2(math.e)
    Q, K, V = heads_first(q, k, v)
    parts = []
    for keys in tiles(N, 128):
        part = Running(Q, v.shape[-1])
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        part.add(s.where(visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
        parts.append(part.state)
    if not parts:
        return stored(q, *blank(q, Q, v), return_softmax_lse)
    if len(parts) == 1:
        return stored(q, parts[0][1], parts[0][0], return_softmax_lse)
    lses = torch.stack([lse for lse, _ in parts]) * log2e
    top = no_inf(lses.amax(0))
    weights = torch.exp2(lses - top)
    total = weights.sum(0)
    out = sum(w[..., None] * part for w, (_, part) in zip(weights, parts, strict=True))
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    lse = top + total.log2()
    return stored(q, out, lse if broken() else lse / log2e, return_softmax_lse)


@torch.no_grad()
def sink_without_the_maximum(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), sinks=None, return_softmax_lse=False
):
    """The sink joins the sum in the epilogue as exp(sink), where it must be exp(sink - maximum): it weighs too much in
    rows whose maximum is above 0 and too little below. Without a sink it is right."""
    M, N, (left, right) = q.shape[1], k.shape[1], ends(window_size, causal)
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 32):
        state = Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 32):
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, left, right), -INF), V[:, :, keys])
        if sinks is not None:
            sink = sinks.float().view(-1, 1, 1)
            if broken():
                state.total = state.total + torch.exp(sink)
                state.top = no_inf(state.top)
            else:
                new = torch.maximum(state.top, sink)
                kept = torch.exp(state.top - no_inf(new))
                state.top, state.acc = new, state.acc * kept
                state.total = state.total * kept + torch.exp(sink - no_inf(new))
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)
