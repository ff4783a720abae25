"""Right kernels in the styles of the wrong ones, and some with two faults or a fault that no list would have."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import Function

import attnworks as aw

INF = float("inf")


def _merge_state(state, s: Tensor, v: Tensor):
    m, total, acc = state
    new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
    at = new.masked_fill(new == -INF, 0)
    alpha, p = torch.exp(m - at), torch.exp(s - at)
    return new, alpha * total + p.sum(-1, keepdim=True), alpha * acc + p @ v


def _result(state):
    m, total, acc = state
    some = total.masked_fill(total == 0, 1)
    return acc / some, (m + some.log()).masked_fill(total == 0, -INF)[..., 0]


def _nothing(q: Tensor, dim_v: int):
    shape = q.shape[:-1]
    return q.new_full((*shape, 1), -INF), q.new_zeros(*shape, 1), q.new_zeros(*shape, dim_v)


def eager(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Right: all scores at once, called as SDPA is."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.float().repeat_interleave(query.shape[1] // max(x.shape[1], 1), 1) for x in (key, value))
    scores = scale * query.float() @ k.mT
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -INF) if attn_mask.dtype == torch.bool else scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INF)
    empty = (scores == -INF).all(-1, keepdim=True)
    return (scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v).to(query.dtype)


def blocked(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
            alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """Right: an online softmax over tiles of 40 queries and 72 keys, called as flash_attn_func is."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    batch, heads_q, seq_q, dim = q.shape
    heads_kv, seq_kv = k.shape[1:3]
    group = heads_q // max(heads_kv, 1)
    q = q.reshape(batch, heads_kv, group, seq_q, dim)
    k, v = k[:, :, None], v[:, :, None]
    left, right = window_size[0], 0 if causal else window_size[1]
    states = []
    for i in range(0, max(seq_q, 1), 40):
        qi = q[..., i : i + 40, :]
        rows = torch.arange(i, i + qi.shape[3])[:, None] + seq_kv - seq_q
        state = _nothing(qi, v.shape[-1])
        for j in range(0, seq_kv, 72):
            ahead = torch.arange(j, min(j + 72, seq_kv)) - rows
            s = scale * qi @ k[..., j : j + 72, :].mT
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if alibi_slopes is not None:
                slopes = alibi_slopes.expand(batch, heads_q).reshape(batch, heads_kv, group, 1, 1)
                s = s - slopes * ahead.abs()
            hidden = torch.zeros_like(ahead, dtype=torch.bool)
            hidden = hidden | (ahead < -left) if left >= 0 else hidden
            hidden = hidden | (ahead > right) if right >= 0 else hidden
            state = _merge_state(state, s.masked_fill(hidden, -INF), v[..., j : j + 72, :])
        states.append(_result(state))
    out = torch.cat([o for o, _ in states], 3).reshape(batch, heads_q, seq_q, v.shape[-1])
    out = out.transpose(1, 2).to(dtype)
    return (
        (out, torch.cat([e for _, e in states], 3).reshape(batch, heads_q, seq_q), None) if return_attn_probs else out
    )


@torch.no_grad()
def split(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Right: splits of 56 keys merged by their LSE, called as flash_attn_func is, without gradients."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1) for x in (k, v))
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    out, lse = torch.zeros(*q.shape[:3], v.shape[3]), torch.full(q.shape[:3], -INF)
    for j in range(0, k.shape[2], 56):
        s = scale * q @ k[:, :, j : j + 56].mT
        if causal:
            s = s.masked_fill(torch.arange(j, j + s.shape[-1]) > rows, -INF)
        part, part_lse = _result(_merge_state(_nothing(q, v.shape[3]), s, v[:, :, j : j + 56]))
        both = torch.logaddexp(lse, part_lse)
        at = both.masked_fill(both == -INF, 0)
        out = out * torch.exp(lse - at)[..., None] + part * torch.exp(part_lse - at)[..., None]
        lse = both
    out = out.transpose(1, 2).to(dtype)
    return (out, lse, None) if return_attn_probs else out


def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
           softcap=0.0, return_attn_probs=False):  # fmt: skip
    """Right: each sequence by itself, called as flash_attn_varlen_func is."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [torch.zeros(q.shape[1], 0)]
    ends = torch.stack((cu_seqlens_q, cu_seqlens_k), 1).tolist()
    for (i, j), (end_i, end_j) in pairwise(ends):
        qs, ks, vs = (x.float().transpose(0, 1) for x in (q[i:end_i], k[j:end_j], v[j:end_j]))
        ks, vs = (x.repeat_interleave(qs.shape[0] // x.shape[0], 0) for x in (ks, vs))
        state = _nothing(qs, vs.shape[2])
        if end_j > j:
            s = scale * qs @ ks.mT
            s = softcap * torch.tanh(s / softcap) if softcap else s
            rows = torch.arange(end_i - i)[:, None] + (end_j - j) - (end_i - i)
            s = s.masked_fill(torch.arange(end_j - j) > rows, -INF) if causal else s
            state = _merge_state(state, s, vs)
        out, lse = _result(state)
        outs.append(out.transpose(0, 1).to(q.dtype))
        lses.append(lse)
    return (torch.cat(outs), torch.cat(lses, 1), None) if return_attn_probs else torch.cat(outs)


def cached(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
           return_softmax_lse=False):  # fmt: skip
    """Right: page by page over a cache, dense or paged, called as flash_attn_with_kvcache is."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group, new = q.shape[2] // max(k_cache.shape[2], 1), 0 if k is None else k.shape[1]
    size = 40 if block_table is None else k_cache.shape[1]

    def page(cache: Tensor, b: int, n: int) -> Tensor:
        return cache[b, n * size : n * size + size] if block_table is None else cache[int(block_table[b, n])]

    outs, lses = [], []
    for b, before in enumerate(cache_seqlens.tolist()):
        length = before + new
        for n in range(new):
            at = before + n
            with torch.no_grad():
                page(k_cache, b, at // size)[at % size], page(v_cache, b, at // size)[at % size] = k[b, n], v[b, n]
        queries = q[b].transpose(0, 1).float()
        rows = torch.arange(q.shape[1])[:, None] + length - q.shape[1]
        state = _nothing(queries, v_cache.shape[-1])
        for first in range(0, length, size):
            used = min(size, length - first)
            kp, vp = (page(x, b, first // size)[:used].transpose(0, 1).float() for x in (k_cache, v_cache))
            s = scale * queries @ kp.repeat_interleave(group, 0).mT
            s = s.masked_fill(torch.arange(first, first + used) > rows, -INF) if causal else s
            state = _merge_state(state, s, vp.repeat_interleave(group, 0))
        out, lse = _result(state)
        outs.append(out.transpose(0, 1).to(q.dtype))
        lses.append(lse)
    return (torch.stack(outs), torch.stack(lses)) if return_softmax_lse else torch.stack(outs)


class _OwnBackward(Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, hidden):
        s = (scale * q.float() @ k.float().mT).masked_fill(hidden, -INF)
        state = _nothing(q.float(), v.shape[-1])
        out, lse = _result(_merge_state(state, s, v.float()) if k.shape[2] else state)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.hidden = scale, hidden
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        qf, kf, vf, grad = q.float(), k.float(), v.float(), grad.float()
        s = (ctx.scale * qf @ kf.mT).masked_fill(ctx.hidden, -INF)
        p = torch.exp(s - lse.masked_fill(lse == -INF, 0)[..., None])
        delta = (grad * out.float()).sum(-1, keepdim=True) - grad_lse[..., None]
        ds = p * (grad @ vf.mT - delta)
        dq, dk, dv = ctx.scale * ds @ kf, ctx.scale * ds.mT @ qf, p.mT @ grad
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _bounds(mask, seq_q: int, seq_kv: int) -> Tensor:
    ahead = torch.arange(seq_kv) - torch.arange(seq_q)[:, None]
    if mask is None:
        return torch.zeros_like(ahead, dtype=torch.bool)
    if not isinstance(mask, aw.Causal | aw.Window):
        raise NotImplementedError(f"does not do {mask!r}")
    ahead = ahead - (seq_kv - seq_q if mask.align == "bottom-right" else 0)
    left, right = (None, 0) if isinstance(mask, aw.Causal) else (mask.left, mask.right)
    return (ahead < (-INF if left is None else -left)) | (ahead > (INF if right is None else right))


def own_backward(q, k, v, *, mask=None, scale=None, return_lse=False):
    """Right: a backward of its own from the LSE, called as attnworks.attention is, without grouped heads."""
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError("grouped heads")
    hidden = _bounds(mask, q.shape[2], k.shape[2])
    out, lse = _OwnBackward.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, hidden)
    return (out, lse) if return_lse else out


def base_2(q, k, v, *, mask=None, scores=(), scale=None, layout="bhsd", return_lse=False):
    """Right: exponentials in base 2 and a natural LSE, with a sink, called as attnworks.attention is."""
    if any(not isinstance(score, aw.Sink) for score in scores):
        raise NotImplementedError("only sinks")
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group, log2e = q.shape[1] // max(k.shape[1], 1), 1.4426950408889634
    scale = (q.shape[-1] ** -0.5 if scale is None else scale) * log2e
    s = q.float() @ k.float().repeat_interleave(group, 1).mT * scale
    s = s.masked_fill(_bounds(mask, *s.shape[-2:]), -INF)
    if scores:
        s = torch.cat((s, (scores[0].logits.float() * log2e).view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -INF)
    p = torch.exp2(s - top.masked_fill(top == -INF, 0))
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    out = (p[..., : k.shape[2]] @ v.float().repeat_interleave(group, 1) / some).to(q.dtype)
    lse = ((top + some.log2()) / log2e).masked_fill(total == 0, -INF)[..., 0]
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out


# ---- two faults, or one that no list would have ----------------------------------------------------------------------


def scale_and_causal(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Two faults: the scores are not scaled, and causal shows one key ahead."""
    return _odd(q, k, v, 1.0, causal, return_attn_probs, shift=1)


def heads_and_sum(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Two faults: heads are grouped modulo heads_kv, and the sum lacks the first key."""
    heads = torch.arange(q.shape[2]) % max(k.shape[2], 1)
    change = lambda p: torch.cat((p[..., :1] * 0, p[..., 1:]), -1)  # noqa: E731
    return _odd(q, k[:, :, heads], v[:, :, heads], softmax_scale, causal, return_attn_probs, summed=change)


def some_keys_twice(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Every seventh key of a row counts twice in the output but once in the sum."""

    def change(p):
        return torch.where(torch.arange(p.shape[-1]) % 7 == 3, 2 * p, p)

    return _odd(q, k, v, softmax_scale, causal, return_attn_probs, weighted=change)


def channels_rotated(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """In odd rows the output's channels are rotated by three."""
    result = _odd(q, k, v, softmax_scale, causal, True)
    out = result[0].clone()
    out[:, 1::2] = out[:, 1::2].roll(3, -1)
    return (out, *result[1:]) if return_attn_probs else out


def smoothed_scores(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Each score is averaged with that of the key before it."""

    def change(s):
        return torch.cat((s[..., :1], (s[..., 1:] + s[..., :-1]) / 2), -1)

    return _odd(q, k, v, softmax_scale, causal, return_attn_probs, scored=change)


def _odd(q, k, v, scale, causal, wanted, shift=0, scored=None, weighted=None, summed=None):
    dtype = q.dtype
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1) for x in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    s = s if scored is None else scored(s)
    if causal:
        rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] + shift
        s = s.masked_fill(torch.arange(k.shape[2]) > rows, -INF)
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -INF)
    p = torch.exp(s - top.masked_fill(top == -INF, 0))
    total = (p if summed is None else summed(p)).sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    out = ((p if weighted is None else weighted(p)) @ v / some).transpose(1, 2).to(dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0], None) if wanted else out
