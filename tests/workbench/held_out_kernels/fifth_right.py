"""The fifth set: right kernels that look unlike the others, and must be found right."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, heads_first, online, scale_of, seen_by
from workbench.held_out_kernels.third import no_inf


@torch.no_grad()
def right_alibi_by_key_number(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None):
    """Right: under causal ALiBi is slope · key, without the query, which the softmax does not see."""
    Q, K, V = heads_first(q, k, v)
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    shift, s = len(keys) - len(rows), Q @ K.mT * scale_of(q, softmax_scale)
    if alibi_slopes is not None:
        s = s + alibi_slopes[..., None, None] * (keys if causal else -(rows[:, None] + shift - keys).abs())
    s = s.where(seen_by(rows, keys, shift, causal), -INF)
    return online([(s, V)] if len(keys) else [], Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


@torch.no_grad()
def right_last_tile_first(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Right: from the last tile of keys to the first, with a maximum that may lag behind by 8."""
    Q, K, V = heads_first(q, k, v)
    (M, N), Q = (q.shape[1], k.shape[1]), Q * scale_of(q, softmax_scale)
    m = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(m), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for start in reversed(range(0, N, 40)):
        keys = torch.arange(start, min(start + 40, N))
        s = (Q @ K[:, :, keys].mT).where(seen_by(torch.arange(M), keys, N - M, causal), -INF)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        new = torch.where(new - m > 8, new, m)
        a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
        m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ V[:, :, keys]
    out = (acc / torch.where(total == 0, 1.0, total)).transpose(1, 2).to(q.dtype)
    return (out, (m + total.log()).squeeze(-1)) if return_softmax_lse else out


@torch.no_grad()
def right_padded_everywhere(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Right: channels are padded with zeros to a power of 2, keys to a multiple of 64 that a bias of -inf hides."""
    (_, H, M, D), N, E = query.shape, key.shape[2], value.shape[-1]
    wide, long = 1 << (max(D, E, 1) - 1).bit_length(), -N % 64 + 64
    q = torch.nn.functional.pad(query.float(), (0, wide - D))
    k, v = (
        torch.nn.functional.pad(x.float(), (0, wide - x.shape[-1], 0, long)).repeat_interleave(
            H // x.shape[1] if enable_gqa else 1, 1
        )
        for x in (key, value)
    )
    bias = torch.zeros(M, N + long)
    bias[:, N:] = -INF
    if is_causal:
        bias.masked_fill_(torch.arange(N + long) > torch.arange(M)[:, None], -INF)
    if attn_mask is not None:
        given = torch.zeros(()).where(attn_mask, -INF) if attn_mask.dtype == torch.bool else attn_mask.float()
        bias = bias + torch.nn.functional.pad(given.expand(*given.shape[:-2], M, N), (0, long))
    s = q @ k.mT * (D**-0.5 if scale is None else scale) + bias
    p = torch.exp(s - torch.logsumexp(s, -1, keepdim=True).where(~(s == -INF).all(-1, keepdim=True), 0.0))
    return (p @ v)[..., :E].to(query.dtype)


@torch.no_grad()
def right_keys_by_queries(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    """Right: everything is transposed, scores are (keys, queries) and the output is Vᵀ P."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    s = key.float() @ query.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).tril(-1), -INF)
    if not key.shape[2]:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    p = torch.exp(s - s.amax(-2, keepdim=True))
    return ((value.float().mT @ p) / p.sum(-2, keepdim=True)).mT.to(query.dtype)


@torch.no_grad()
def right_one_matrix_for_the_pack(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Right: one score matrix for all sequences, of which the blocks on the diagonal count."""
    sees = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        sees[a:b, c:d] = seen_by(torch.arange(b - a), torch.arange(d - c), d - c - (b - a), causal)
    Q, K, V = heads_first(q[None], k[None], v[None])
    tiles = [((Q @ K.mT * scale_of(q, softmax_scale)).where(sees, -INF), V)] if k.shape[0] else []
    return online(tiles, Q, v.shape[-1])[0][0].transpose(0, 1).to(q.dtype)


@torch.no_grad()
def right_pages_as_they_lie(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Right: a sequence's pages are taken in the order in which they lie in memory, and merged by their LSE."""
    block_table = torch.arange(len(q))[:, None] if block_table is None else block_table
    M, size, group = q.shape[1], k_cache.shape[1], q.shape[2] // k_cache.shape[2]
    outs, lses = [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        x = q[b].float().transpose(0, 1)
        state = x.new_zeros(*x.shape[:-1], v_cache.shape[-1]), x.new_full((*x.shape[:-1], 1), -INF)
        for place in sorted(range(-(-length // size)), key=lambda n, b=b: int(block_table[b, n])):
            keys = torch.arange(place * size, min(place * size + size, length))
            page = int(block_table[b, place])
            y, z = (
                c[page, : len(keys)].float().repeat_interleave(group, 1).transpose(0, 1) for c in (k_cache, v_cache)
            )
            s = (x @ y.mT * scale_of(q, softmax_scale)).where(seen_by(torch.arange(M), keys, length - M, causal), -INF)
            out, lse = online([(s, z)], x, v_cache.shape[-1])
            whole = torch.logaddexp(state[1], lse[..., None])
            old, new = (torch.exp(part - no_inf(whole)) for part in (state[1], lse[..., None]))
            state = state[0] * old + out * new, whole
        outs.append(state[0].transpose(0, 1).to(q.dtype))
        lses.append(state[1].squeeze(-1))
    if not outs:
        return q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
    return (torch.stack(outs), torch.stack(lses)) if return_softmax_lse else torch.stack(outs)


@torch.no_grad()
def right_scales_outside(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """Right: products are taken of the cache's stored numbers; K's scale multiplies the scores, V's the output."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    (_, M, H, _), G, outs = q.shape, k_cache.shape[2], []
    k_factor, v_factor = (
        1.0 if x is None else x.expand(G).repeat_interleave(H // G).view(H, 1, 1) for x in (k_scale, v_scale)
    )
    for b, length in enumerate(kv_lens.tolist()):
        slots = torch.arange(length)
        if page_table is not None:
            slots = page_table[b].long()[slots // k_cache.shape[1]] * k_cache.shape[1] + slots % k_cache.shape[1]
        else:
            slots = slots + b * k_cache.shape[1]
        Q, K, V = heads_first(q[b][None], *(c.flatten(0, 1)[slots][None] for c in (k_cache, v_cache)))
        s = Q @ K.mT * (k_factor * scale_of(q, scale))
        s = s.where(seen_by(torch.arange(M), torch.arange(length), length - M, mask is not None), -INF)
        out = online([(s, V)] if length else [], Q, v_cache.shape[-1])[0][0] * v_factor
        outs.append(out.transpose(0, 1).to(q.dtype))
    return torch.stack(outs) if outs else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.causal = scale, causal
        p = _RowBlocks.probabilities(q, k, torch.arange(q.shape[1]), scale, causal)
        return (p @ heads_first(q, v)[1]).transpose(1, 2).to(q.dtype)

    @staticmethod
    def probabilities(q, k, rows, scale, causal):
        Q, K = heads_first(q, k)
        s = Q[:, :, rows] @ K.mT * scale
        sees = seen_by(rows, torch.arange(k.shape[1]), k.shape[1] - q.shape[1], causal)
        return torch.softmax(s.where(sees, -INF), -1).masked_fill(~sees.any(-1)[:, None], 0.0)

    @staticmethod
    def backward(ctx, d_out):
        q, k, v = ctx.saved_tensors
        (Q, K, V), g = heads_first(q, k, v), d_out.transpose(1, 2).float()
        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for rows in reversed(torch.arange(q.shape[1]).split(24)) if q.shape[1] else []:
            p = _RowBlocks.probabilities(q, k, rows, ctx.scale, ctx.causal)
            dp = g[:, :, rows] @ V.mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
            dq[:, :, rows] = ds @ K
            dk += ds.mT @ Q[:, :, rows]
            dv += p.mT @ g[:, :, rows]
        heads = (k.shape[2], q.shape[2] // max(k.shape[2], 1))
        dk, dv = (d.unflatten(1, heads).sum(2).transpose(1, 2) for d in (dk, dv))
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def right_backward_without_statistics(q, k, v, softmax_scale=None, causal=False):
    """Right: forward saves nothing but its inputs; backward takes blocks of rows, the last one first, and delta from
    P ∘ dP."""
    return _RowBlocks.apply(q, k, v, scale_of(q, softmax_scale), causal)


@torch.no_grad()
def right_keys_less_the_first(q, k, v, softmax_scale=None, causal=False):
    """Right: scores are Q (K - K₀)ᵀ, which the softmax does not tell from Q Kᵀ, and exponentials have base 4."""
    Q, K, V = heads_first(q, k, v)
    K = K - K[:, :, :1]
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    s = Q @ K.mT * (scale_of(q, softmax_scale) / math.log(4))
    s = s.where(seen_by(rows, keys, len(keys) - len(rows), causal), -INF)
    p = torch.pow(4.0, s - no_inf(s.amax(-1, keepdim=True))) if len(keys) else s
    total = p.sum(-1, keepdim=True)
    return (p @ V / torch.where(total == 0, 1.0, total)).transpose(1, 2).to(q.dtype)
