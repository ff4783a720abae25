"""The seventh set: packed sequences, called as flash_attn_varlen_func is. Right inside ``third.repaired()``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, scale_of
from workbench.held_out_kernels.seventh import Running, ends, tiles, visible
from workbench.held_out_kernels.third import broken


def spans(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[int, int, int, int]]:
    """(first row, end of rows, first key, end of keys) of each sequence."""
    pairs = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return [(*rows, *keys) for rows, keys in pairs]


def buffers(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full((q.shape[1], q.shape[0]), -INF)


def grouped(x: Tensor, heads: int) -> Tensor:
    """(rows, heads_kv, dim) as (heads, rows, dim), fp32."""
    return x.float().transpose(0, 1).repeat_interleave(heads // max(x.shape[1], 1), 0)


@torch.no_grad()
def window_reaches_over_the_boundary(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    """A window's first key is held at the pack's key 0 instead of the sequence's own: near their beginning rows see the
    last keys of the sequence before. Without a left end the loop begins at the sequence's first key, which is right."""
    (left, right), out = ends(window_size, causal), buffers(q, v)[0]
    Q, K, V = q.float().transpose(0, 1), grouped(k, q.shape[1]), grouped(v, q.shape[1])
    for a, b, c, d in spans(cu_seqlens_q, cu_seqlens_k):
        shift = (d - c) - (b - a)
        for rows in tiles(b - a, 16):
            first = c
            if left is not None:
                first = max(c + int(rows[0]) + shift - left, 0 if broken() else c)
            last = d if right is None else min(c + int(rows[-1]) + shift + right + 1, d)
            state = Running(Q[:, a + rows], v.shape[-1])
            for keys in tiles(max(last - first, 0), 16):
                s = Q[:, a + rows] @ K[:, first + keys].mT * scale_of(q, softmax_scale)
                s = s.where(visible(rows, first + keys - c, shift, left, right), -INF)
                state.add(s, V[:, first + keys])
            out[a + rows] = state.out.transpose(0, 1).to(q.dtype)
    return out


@torch.no_grad()
def grid_of_the_first_sequence(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """There are as many tiles of 16 rows for each sequence as the first one needs: rows of longer ones beyond that are
    not computed, and hold 0."""
    out, lse = buffers(q, v)
    pack = spans(cu_seqlens_q, cu_seqlens_k)
    launched = max((b - a for a, b, *_ in (pack[:1] if broken() else pack)), default=0)
    for a, b, c, d in pack:
        Q, K, V = q[a:b].float().transpose(0, 1), grouped(k[c:d], q.shape[1]), grouped(v[c:d], q.shape[1])
        shift = (d - c) - (b - a)
        for rows in tiles(b - a, 16)[: -(-launched // 16)]:
            state = Running(Q[:, rows], v.shape[-1])
            for keys in tiles(d - c, 32):
                s = Q[:, rows] @ K[:, keys].mT * scale_of(q, softmax_scale)
                state.add(s.where(visible(rows, keys, shift, None, 0 if causal else None), -INF), V[:, keys])
            out[a + rows], lse[:, a + rows] = state.out.transpose(0, 1).to(q.dtype), state.lse
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def head_modulo_kv_heads(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Query head h reads KV head h % heads_kv where it is h // group. With as many of both, or one KV head, it is the
    same."""
    out, lse = buffers(q, v)
    H, G = q.shape[1], k.shape[1]
    for a, b, c, d in spans(cu_seqlens_q, cu_seqlens_k):
        for h in range(H):
            own = h % G if broken() else h * G // H
            state, rows = Running(q[a:b, h].float(), v.shape[-1]), torch.arange(b - a)
            for keys in tiles(d - c, 64):
                s = q[a:b, h].float() @ k[c + keys, own].float().T * scale_of(q, softmax_scale)
                s = s.where(visible(rows, keys, (d - c) - (b - a), None, 0 if causal else None), -INF)
                state.add(s, v[c + keys, own].float())
            out[a:b, h], lse[h, a:b] = state.out.to(q.dtype), state.lse
    return (out, lse) if return_softmax_lse else out
