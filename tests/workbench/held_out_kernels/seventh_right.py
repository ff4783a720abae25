"""The seventh set: right kernels that are made in unusual ways, which must be found right."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch

from attnworks import ALiBi, Bias, Softcap
from attnworks.masks import Causal, Window
from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, ends, stored, tiles, visible
from workbench.held_out_kernels.seventh_caches import append, batched, per_head, shown
from workbench.held_out_kernels.third import no_inf

# ---- dense -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def right_whole_exponents(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_softmax_lse=False
):
    """Right: in base 2 with a maximum that is rounded up to a whole number, so that corrections only change exponents;
    the maximum follows only when it rises by more than 3, which statistics and LSE share."""
    M, N, log2e, (left, right) = q.shape[1], k.shape[1], math.log2(math.e), ends(window_size, causal)
    Q, K, V = heads_first(q, k, v)
    top = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(top), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in tiles(N, 20):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = (softcap * torch.tanh(s / softcap) if softcap else s) * log2e
        s = s.where(visible(torch.arange(M), keys, N - M, left, right), -INF)
        new = torch.maximum(top, s.amax(-1, keepdim=True).ceil())
        new = torch.where((top == -INF) | ~(new - no_inf(top) <= 3), new, top)
        kept = torch.ldexp(torch.ones(()), (top - no_inf(new)).clamp(-200, 0)).masked_fill(top == -INF, 0.0)
        p = torch.exp2(s - no_inf(new))
        top, total, acc = new, total * kept + p.sum(-1, keepdim=True), acc * kept + p @ V[:, :, keys]
    out = acc / torch.where(total == 0, 1.0, total)
    return stored(q, out, ((top + total.log2()) / log2e).squeeze(-1), return_softmax_lse)


@torch.no_grad()
def right_smallest_score_first(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Right: a row's keys are sorted by their scores, and sums run from the smallest to the largest, in fp64."""
    (M, D), N = query.shape[2:], key.shape[2]
    group = query.shape[1] // max(key.shape[1], 1) if enable_gqa else 1
    K, V = (x.double().repeat_interleave(group, 1) for x in (key, value))
    s = query.double() @ K.mT * (D**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -INF) if attn_mask.dtype == torch.bool else s + attn_mask.double()
    if is_causal:
        s = s.masked_fill(torch.arange(N) > torch.arange(M)[:, None], -INF)
    if not N:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    s, order = s.sort(-1)
    p = torch.exp(s - no_inf(s[..., -1:]))
    running = p.cumsum(-1)[..., -1:]
    weights = torch.zeros_like(p).scatter(-1, order, p / torch.where(running == 0, 1.0, running))
    return (weights @ V).to(query.dtype)


@torch.no_grad()
def right_sink_is_a_key(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None,
    return_softmax_lse=False,
):  # fmt: skip
    """Right: a group's heads are rows of one tile, query by query; a sink is a key of its own whose value is 0, in the
    middle of the others."""
    (B, M, H, D), (N, G), (left, right) = q.shape, k.shape[1:3], ends(window_size, causal)
    group = H // max(G, 1)
    Q = q.float().reshape(B, M, G, group, D).transpose(1, 2).reshape(B, G, M * group, D)
    row = torch.arange(M * group)
    query, head = row // max(group, 1), torch.arange(G)[:, None] * group + row % max(group, 1)
    state = Running(Q, v.shape[-1])
    for number, keys in enumerate([*tiles(N, 28), None]):
        if number == min(1, -(-N // 28)) and sinks is not None:
            logits = sinks.float()[head][None, ..., None].expand(B, -1, -1, 1)
            state.add(logits, torch.zeros(B, G, 1, v.shape[-1]))
        if keys is None:
            continue
        s = Q @ k[:, keys].float().permute(0, 2, 3, 1) * scale_of(q, softmax_scale)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if alibi_slopes is not None:
            slopes = alibi_slopes.float().expand(B, H)[:, head][..., None]
            s = s - slopes * (query[:, None] + N - M - keys).abs()
        state.add(s.where(visible(query, keys, N - M, left, right), -INF), v[:, keys].float().transpose(1, 2))
    out = state.out.unflatten(2, (M, group)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    return stored(q, out, state.lse.unflatten(2, (M, group)).transpose(2, 3).flatten(1, 2), return_softmax_lse)


class _DeltaFromKeys(torch.autograd.Function):
    """Nothing but the inputs and the LSE is saved."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, ends, cap):
        (Q, K, V), M, N = heads_first(q, k, v), q.shape[1], k.shape[1]
        state = Running(Q, v.shape[-1])
        for keys in tiles(N, 44):
            s = Q @ K[:, :, keys].mT * scale
            s = cap * torch.tanh(s / cap) if cap else s
            state.add(s.where(visible(torch.arange(M), keys, N - M, *ends), -INF), V[:, :, keys])
        ctx.save_for_backward(q, k, v, state.lse)
        ctx.options = scale, ends, cap
        return state.out.transpose(1, 2).to(q.dtype), state.lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, lse = ctx.saved_tensors
        scale, ends, cap = ctx.options
        (Q, K, V), g, M, N = heads_first(q, k, v), d_out.transpose(1, 2).float(), q.shape[1], k.shape[1]

        def parts(keys):
            s, steep = Q @ K[:, :, keys].mT * scale, 1.0
            if cap:
                bent = torch.tanh(s / cap)
                s, steep = cap * bent, 1 - bent * bent
            sees = visible(torch.arange(M), keys, N - M, *ends)
            return torch.exp(s.where(sees, -INF) - no_inf(lse)[..., None]), g @ V[:, :, keys].mT, steep

        delta = Q.new_zeros(*Q.shape[:-1], 1) - d_lse[..., None]
        for keys in tiles(N, 36):
            p, dp, _ = parts(keys)
            delta = delta + (p * dp).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for keys in reversed(tiles(N, 28)):
            p, dp, steep = parts(keys)
            ds = p * (dp - delta) * steep * scale
            dq, dk[:, :, keys], dv[:, :, keys] = dq + ds @ K[:, :, keys], ds.mT @ Q, p.mT @ g
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2).transpose(1, 2) for x in (dk, dv))
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def right_delta_from_keys(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_softmax_lse=False
):
    """Right: the output is not saved for backward, which makes delta in a pass over the keys of its own, as the sum of
    P dP, before a second makes the gradients."""
    both = _DeltaFromKeys.apply(q, k, v, scale_of(q, softmax_scale), causal, ends(window_size, causal), softcap)
    return both if return_softmax_lse else both[0]


@torch.no_grad()
def right_in_the_order_given(q, k, v, mask=None, scores=(), scale=None, return_lse=False):
    """Right: queries from the last to the first, one at a time, each for all sequences and heads; masks and scores are
    applied in the order that the call has."""
    (B, H, M, D), (G, N) = q.shape, k.shape[1:3]
    K, V = (x.double().repeat_interleave(H // max(G, 1), 1) for x in (k, v))
    if isinstance(mask, torch.Tensor):
        sees = mask.expand(B, H, M, N)
    elif mask is None or isinstance(mask, Causal | Window):
        left, right = (mask.left, mask.right) if isinstance(mask, Window) else (None, None if mask is None else 0)
        shift = 0 if mask is None or mask.align == "top-left" else N - M
        sees = visible(torch.arange(M), torch.arange(N), shift, left, right).expand(B, H, M, N)
    else:
        raise NotImplementedError("no predicates and no intersections")
    out, lse = torch.zeros(B, H, M, v.shape[-1], dtype=torch.float64), torch.full((B, H, M), -INF)
    for i in reversed(range(M)):
        s = (K @ q[:, :, i, :, None].double()).squeeze(-1) * (D**-0.5 if scale is None else scale)
        for score in scores:
            if isinstance(score, Softcap):
                s = score.cap * torch.tanh(s / score.cap)
            elif isinstance(score, ALiBi):
                s = s - score.slopes.double()[..., None] * (torch.arange(N) - (i + N - M)).abs()
            elif isinstance(score, Bias):
                s = s + score.tensor.double().expand(B, H, M, N)[:, :, i]
            else:
                raise NotImplementedError("no sinks and no functions")
        whole = torch.logsumexp(s.where(sees[:, :, i], -INF), -1, keepdim=True)
        lse[:, :, i] = whole.squeeze(-1).float()
        weights = torch.exp(s.where(sees[:, :, i], -INF) - no_inf(whole))
        out[:, :, i] = (weights[..., None, :] @ V).squeeze(-2)
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


# ---- packed sequences ------------------------------------------------------------------------------------------------


@torch.no_grad()
def right_longest_work_first(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, window_size=(-1, -1),
    return_softmax_lse=False,
):  # fmt: skip
    """Right: pieces of 12 rows of one head are worked off in numpy, those with most keys first, whatever their
    sequence."""
    (left, right), (H, G) = ends(window_size, causal), (q.shape[1], k.shape[1])
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.full((H, q.shape[0]), -np.inf)
    Q, K, V = (x.double().numpy() for x in (q, k, v))
    queue = []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        for h in range(H):
            queue += [(d - c, a, b, c, d, at, min(at + 12, b), h) for at in range(a, b, 12)]
    for _, a, b, c, d, first, last, h in sorted(queue, reverse=True):
        place = np.arange(first - a, last - a)[:, None] + (d - c) - (b - a)
        away = np.arange(d - c) - place
        sees = (away >= (-math.inf if left is None else -left)) & (away <= (math.inf if right is None else right))
        s = Q[first:last, h] @ K[c:d, h * G // H].T * scale_of(q, softmax_scale)
        s = np.where(sees, s, -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        with np.errstate(all="ignore"):
            p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
            total = p.sum(-1, keepdims=True)
            out[first:last, h] = p @ V[c:d, h * G // H] / np.where(total == 0, 1.0, total)
            lse[h, first:last] = (top + np.log(total))[:, 0]
    found = torch.from_numpy(out).to(q.dtype)
    return (found, torch.from_numpy(lse).float()) if return_softmax_lse else found


# ---- caches ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def right_every_third_page(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
):  # fmt: skip
    """Right: three splits, of which each has every third page (or 16 slots); their sums and accumulators, not their
    outputs, are brought to a common maximum and added."""
    M, (left, right), size = q.shape[1], ends(window_size, causal), 16 if block_table is None else k_cache.shape[1]

    def one(b, length):
        if k is not None:
            append(k_cache, block_table, b, length, k[b])
            append(v_cache, block_table, b, length, v[b])
            length += k.shape[1]
        x = q[b].float().transpose(0, 1)
        splits = [Running(x, v_cache.shape[-1]) for _ in range(3)]
        for number, slots in enumerate(tiles(length, size)):
            at = (b, slots) if block_table is None else (int(block_table[b, number]), slots - slots[0])
            s = x @ per_head(k_cache[at], len(x)).mT * scale_of(q, softmax_scale)
            s = softcap * torch.tanh(s / softcap) if softcap else s
            s = s.where(visible(torch.arange(M), slots, length - M, left, right), -INF)
            splits[number % 3].add(s, per_head(v_cache[at], len(x)))
        top = torch.stack([part.top for part in splits]).amax(0)
        shares = [torch.exp(part.top - no_inf(top)) for part in splits]
        total = sum(part.total * share for part, share in zip(splits, shares, strict=True))
        acc = sum(part.acc * share for part, share in zip(splits, shares, strict=True))
        return acc / torch.where(total == 0, 1.0, total), (top + total.log()).squeeze(-1)

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def right_by_a_table_of_256(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None, return_lse=False
):
    """Right: what an 8-bit cache holds is looked up, by its byte, in a table of the 256 numbers that it may be, which
    has the head's scale in it."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    M, (H, G), size = q.shape[1], (q.shape[2], k_cache.shape[2]), k_cache.shape[1]

    def read(cache, factor, b, slots):
        place = (b, slots) if page_table is None else (page_table[b].long()[slots // size], slots % size)
        held = cache[place]
        if held.element_size() > 1:
            return held.float()
        numbers = torch.arange(256).to(torch.uint8).view(held.dtype).float()
        factor = torch.ones(1) if factor is None else factor.float()
        table = (numbers * factor.expand(G)[:, None]).flatten()
        return table[held.view(torch.uint8).long() + 256 * torch.arange(G)[:, None]]

    def one(b, length):
        x = q[b].float().transpose(0, 1)
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 30):
            s = x @ per_head(read(k_cache, k_scale, b, slots), H).mT * scale_of(q, scale)
            s = s.where(shown(torch.arange(M), slots, length - M, mask is not None), -INF)
            state.add(s, per_head(read(v_cache, v_scale, b, slots), H))
        return state.out, state.lse

    out, lse = batched(q, v_cache, kv_lens.tolist(), one)
    return (out, lse) if return_lse else out
