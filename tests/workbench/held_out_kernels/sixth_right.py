"""The sixth set: right kernels in other orders than people are used to, which must be found right."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of, seen_by
from workbench.held_out_kernels.sixth import LOG2E, causal_of, chunks, divided
from workbench.held_out_kernels.third import no_inf


def _joined(one, other):
    """Two states of (LSE, output) as one."""
    lse = torch.logaddexp(one[0], other[0])
    share, rest = (torch.exp(state[0] - no_inf(lse))[..., None] for state in (one, other))
    return lse, one[1] * share + other[1] * rest


def _state(s, values):
    """(LSE, output) of scores and values."""
    lse = torch.logsumexp(s, -1)
    return lse, torch.exp(s - no_inf(lse)[..., None]) @ values


@torch.no_grad()
def right_keys_outermost(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Right: the outer loop goes through 56 keys, the inner one through 24 rows, whose states lie in memory; the output
    there is normalised after each tile, and exponentials are of base 2."""
    Q, K, V = heads_first(q, k, v)
    m = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, out = torch.zeros_like(m), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    K = K * (scale_of(q, softmax_scale) * LOG2E)
    for keys in chunks(k.shape[1], 56):
        for rows in chunks(q.shape[1], 24):
            s = (Q[:, :, rows] @ K[:, :, keys].mT).where(causal_of(q, k, causal)(rows, keys), -INF)
            old_m, old_total = m[:, :, rows], total[:, :, rows]
            new = torch.maximum(old_m, s.amax(-1, keepdim=True))
            p, kept = torch.exp2(s - no_inf(new)), old_total * torch.exp2(old_m - no_inf(new))
            total[:, :, rows] = kept + p.sum(-1, keepdim=True)
            out[:, :, rows] = divided(out[:, :, rows] * kept + p @ V[:, :, keys], total[:, :, rows])
            m[:, :, rows] = new
    lse = ((m + total.log2()) * math.log(2)).squeeze(-1)
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def right_in_two_passes(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """Right: a first pass from the last key to the first finds maxima and sums, a second one makes the output, by 13
    keys, with the quotient in the exponent."""
    Q, K, V = heads_first(q, k, v)
    rows, scale = torch.arange(q.shape[1]), scale_of(q, softmax_scale)

    def scores(keys):
        s = torch.einsum("bhmd,bhnd->bhmn", Q, K[:, :, keys]) * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return s.where(causal_of(q, k, causal)(rows, keys), -INF)

    lse = Q.new_full(Q.shape[:-1], -INF)
    for keys in reversed(chunks(k.shape[1], 50)):
        lse = torch.logaddexp(lse, torch.logsumexp(scores(keys), -1))
    out = Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in chunks(k.shape[1], 13):
        out += torch.exp(scores(keys) - no_inf(lse)[..., None]) @ V[:, :, keys]
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def right_every_seventh_key(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """Right: seven splits, of which each has every seventh key, merged in pairs; the sink joins as an eighth."""
    Q, K, V = heads_first(q, k, v)
    M, N, states = q.shape[1], k.shape[1], []
    for n in range(min(7, N)):
        keys = torch.arange(n, N, 7)
        s = (Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)).where(
            seen_by(torch.arange(M), keys, N - M, causal), -INF
        )
        states.append(_state(s, V[:, :, keys]))
    if sinks is not None or not states:
        lse = Q.new_full(Q.shape[:-1], -INF) if sinks is None else sinks.float().view(-1, 1).expand(Q.shape[:-1])
        states.append((lse, Q.new_zeros(*Q.shape[:-1], v.shape[-1])))
    while len(states) > 1:
        pairs = [_joined(*states[n : n + 2]) for n in range(0, len(states) - 1, 2)]
        states = pairs + states[len(pairs) * 2 :]
    lse, out = states[0]
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def right_by_diagonals(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Right: one diagonal of the score matrix after the other, each row's one key at a time; a window is which of them
    there are."""
    (left, right), (M, N) = window_size, (q.shape[1], k.shape[1])
    Q, K, V = (x.double() for x in heads_first(q, k, v))  # which are as many sums in a row as there are keys
    m = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(m), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    right = 0 if causal else right
    first, last = max(-left if left >= 0 else -N, 1 - N), min(right if right >= 0 else M, M - 1)
    for away in range(first, last + 1):
        rows = torch.arange(max(M - N - away, 0), min(M - away, M))
        keys = rows + N - M + away
        s = (Q[:, :, rows] * K[:, :, keys]).sum(-1, keepdim=True) * scale_of(q, softmax_scale)
        new = torch.maximum(m[:, :, rows], s)
        a, p = torch.exp(m[:, :, rows] - new), torch.exp(s - new)
        m[:, :, rows], total[:, :, rows] = new, total[:, :, rows] * a + p
        acc[:, :, rows] = acc[:, :, rows] * a + p * V[:, :, keys]
    return divided(acc, total).transpose(1, 2).to(q.dtype)


@torch.no_grad()
def right_keys_in_another_order(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Right: keys are sorted by their length before anything else, and masks and biases with them; heads of a group are
    rows of one product."""
    (B, H, M, D), (G, N) = query.shape, key.shape[1:3]
    heads = (G, H // G) if enable_gqa else (H, 1)
    order = key.float().norm(dim=-1).sum(1).argsort(-1)  # (batch, keys)
    k, v = (x.float().gather(2, order[:, None, :, None].expand(x.shape)) for x in (key, value))
    term = torch.zeros(M, N)
    if is_causal:
        term = term.masked_fill(torch.ones(M, N, dtype=torch.bool).triu(1), -INF)
    if attn_mask is not None:
        term = term + (torch.zeros(()).where(attn_mask, -INF) if attn_mask.dtype == torch.bool else attn_mask)
    term = term.expand(B, H, M, N).gather(3, order[:, None, None].expand(B, H, M, N))
    x = query.float().unflatten(1, heads).flatten(2, 3)  # (batch, heads_kv, group · rows, dim)
    s = x @ k.mT * (D**-0.5 if scale is None else scale) + term.unflatten(1, heads).flatten(2, 3)
    return _state(s, v)[1].unflatten(2, (heads[1], M)).flatten(1, 2).to(query.dtype)


class _TwoKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        Q, K, V = heads_first(q, k, v)
        s = (Q @ K.mT * scale).where(causal_of(q, k, causal)(*map(torch.arange, (q.shape[1], k.shape[1]))), -INF)
        lse, out = _state(s, V)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = scale, causal
        return out.transpose(1, 2).to(q.dtype), lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal = ctx.options
        (Q, K, V), g, sees = heads_first(q, k, v), d_out.transpose(1, 2).float(), causal_of(q, k, causal)
        delta, base = (g * out).sum(-1, keepdim=True) - d_lse[..., None], no_inf(lse)[..., None]
        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        everything = torch.arange(q.shape[1]), torch.arange(k.shape[1])
        for rows in chunks(q.shape[1], 20):
            s = (Q[:, :, rows] @ K.mT * scale).where(sees(rows, everything[1]), -INF)
            p = torch.exp(s - base[:, :, rows])
            dq[:, :, rows] = p * (g[:, :, rows] @ V.mT - delta[:, :, rows]) @ K * scale
        for keys in reversed(chunks(k.shape[1], 36)):
            s = (K[:, :, keys] @ Q.mT * scale).where(sees(everything[0], keys).T, -INF)
            p = torch.exp(s - base.mT)
            dv[:, :, keys] = p @ g
            dk[:, :, keys] = p * (V[:, :, keys] @ g.mT - delta.mT) @ Q * scale
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2).transpose(1, 2) for x in (dk, dv))
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def right_backward_in_two_kernels(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Right: backward makes dQ by rows and, in a pass of its own that has scores as (keys, rows), dK and dV by keys;
    the LSE is differentiated through delta."""
    out, lse = _TwoKernels.apply(q, k, v, scale_of(q, softmax_scale), causal)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def right_padded_batch(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Right: packed sequences are padded at their front to the longest, so that causal is the same for all, and what is
    padded is hidden; sums are in fp64."""
    spans = [list(pairwise(cu.tolist())) for cu in (cu_seqlens_q, cu_seqlens_k)]
    count, (M, N) = len(spans[0]), (max((b - a for a, b in span), default=0) for span in spans)
    padded = [x.new_zeros(count, size, *x.shape[1:]) for x, size in ((q, M), (k, N), (v, N))]
    real = torch.zeros(count, N, dtype=torch.bool)
    for n, ((a, b), (c, d)) in enumerate(zip(*spans, strict=True)):
        padded[0][n, M - (b - a) :], padded[1][n, N - (d - c) :], padded[2][n, N - (d - c) :] = q[a:b], k[c:d], v[c:d]
        real[n, N - (d - c) :] = True
    Q, K, V = (x.double() for x in heads_first(*padded))
    sees = seen_by(torch.arange(M), torch.arange(N), N - M, causal) & real[:, None, None]
    lse, found = _state((Q @ K.mT * scale_of(q, softmax_scale)).where(sees, -INF), V)
    out, packed = q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full((q.shape[1], q.shape[0]), -INF)
    for n, (a, b) in enumerate(spans[0]):
        out[a:b], packed[:, a:b] = found[n, :, M - (b - a) :].transpose(0, 1).to(q.dtype), lse[n, :, M - (b - a) :]
    return (out, packed) if return_softmax_lse else out


@torch.no_grad()
def right_newest_slot_first(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Right: each sequence from its newest slot back, in splits of its own number, each as long as the ones before it
    together."""
    M, outs, lses = q.shape[1], [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        x = q[b].float().transpose(0, 1)
        state = x.new_full(x.shape[:-1], -INF), x.new_zeros(*x.shape[:-1], v_cache.shape[-1])
        last, step = length, 5
        while last > 0:
            slots = torch.arange(last - 1, max(last - step, 0) - 1, -1)
            size = k_cache.shape[1]
            page = torch.full_like(slots, b) if block_table is None else block_table[b].long()[slots // size]
            keys, values = (
                cache[page, slots % size].float().repeat_interleave(len(x) // cache.shape[2], 1).transpose(0, 1)
                for cache in (k_cache, v_cache)
            )
            s = (x @ keys.mT * scale_of(q, softmax_scale)).where(
                seen_by(torch.arange(M), slots, length - M, causal), -INF
            )
            state = _joined(state, _state(s, values))
            last, step = last - step, step * 2
        lses.append(state[0])
        outs.append(state[1].transpose(0, 1))
    out = torch.stack(outs).to(q.dtype) if outs else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
    return (out, torch.stack(lses)) if return_softmax_lse and lses else out
