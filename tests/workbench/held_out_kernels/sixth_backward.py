"""The sixth set: right forward, faults in a backward of its own. Right inside ``third.repaired()``."""

from __future__ import annotations

import torch

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of, seen_by
from workbench.held_out_kernels.sixth import divided
from workbench.held_out_kernels.third import broken, no_inf

# ---- as flash_attn_func ----------------------------------------------------------------------------------------------


class _Attend(torch.autograd.Function):
    """``left``: the window's left size, -1 for none; ``fault``: which of the faults below it has."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, sees, left, fault):
        Q, K, V = heads_first(q, k, v)
        s = (Q @ K.mT * scale).where(sees, -INF)
        keys = torch.logsumexp(s, -1)
        lse = keys if sinks is None else torch.logaddexp(keys, sinks.float().view(-1, 1).expand_as(keys))
        out = torch.exp(s - no_inf(lse)[..., None]) @ V
        ctx.save_for_backward(q, k, v, sinks, sees, out, lse, keys)
        ctx.options = scale, left, fault
        return out.transpose(1, 2).to(q.dtype), lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, sinks, sees, out, lse, keys_lse = ctx.saved_tensors
        scale, left, fault = ctx.options
        wrong = fault if broken() else ""
        scale = q.shape[-1] ** -0.5 if wrong == "scale" else scale
        (Q, K, V), g = heads_first(q, k, v), d_out.transpose(1, 2).float()
        (M, N), G = sees.shape, k.shape[2]
        delta = (g * out).sum(-1)
        if wrong == "delta":  # the accumulator is the output times the sum of exp(score - maximum)
            s = (Q @ K.mT * scale).where(sees, -INF)
            delta = delta * torch.exp(lse - no_inf(s.amax(-1))).where(lse > -INF, 0.0)
        delta = delta + d_lse if wrong == "cotangent" else delta - d_lse
        base = no_inf(keys_lse if wrong == "sink" else lse)[..., None]
        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for j in torch.arange(N).split(32) if N else ():
            held = torch.arange(len(j)) if wrong == "chunk" else j
            p = torch.exp((Q @ K[:, :, held].mT * scale).where(sees[:, j], -INF) - base)
            ds = p * (g @ V[:, :, held].mT - delta[..., None])
            dq += ds @ K[:, :, held] * scale
            if wrong == "window" and left >= 0:  # the last row that sees the tile's first key
                last = int(j[0]) + left - (N - M)
                p, ds = (x.masked_fill((torch.arange(M) > last)[:, None], 0.0) for x in (p, ds))
            dk[:, :, j], dv[:, :, j] = ds.mT @ Q * scale, p.mT @ g
        dk, dv = (x.unflatten(1, (G, -1)).sum(2).transpose(1, 2) for x in (dk, dv))
        d_sinks = None
        if sinks is not None:
            d_sinks = -(torch.exp(sinks.float().view(-1, 1) - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None, None


def _flash(q, k, v, softmax_scale, causal, fault, lse, sinks=None, window_size=(-1, -1)):
    M, N = q.shape[1], k.shape[1]
    away = torch.arange(N) - torch.arange(M)[:, None] - (N - M)
    sees = seen_by(torch.arange(M), torch.arange(N), N - M, causal)
    sees = sees & (away >= -window_size[0]) if window_size[0] >= 0 else sees
    sees = sees & (away <= window_size[1]) if window_size[1] >= 0 else sees
    both = _Attend.apply(q, k, v, sinks, scale_of(q, softmax_scale), sees, window_size[0], fault)
    return both if lse else both[0]


def backward_has_its_own_scale(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Backward is not given the scale, and has 1/sqrt(head_dim) of its own."""
    return _flash(q, k, v, softmax_scale, causal, "scale", return_softmax_lse)


def delta_of_the_accumulator(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Delta is the sum of dO times the accumulator as it is before it is divided by the sum."""
    return _flash(q, k, v, softmax_scale, causal, "delta", return_softmax_lse)


def cotangent_added(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The LSE's cotangent is added to delta, where it must be subtracted."""
    return _flash(q, k, v, softmax_scale, causal, "cotangent", return_softmax_lse)


def first_chunk_again(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Forward went through chunks of keys and saved the first; backward takes it for each of them."""
    return _flash(q, k, v, softmax_scale, causal, "chunk", return_softmax_lse)


def rows_end_at_the_first_key(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Under a window dK and dV of a tile of keys end with the last row that sees the tile's first key."""
    return _flash(q, k, v, softmax_scale, causal, "window", False, window_size=window_size)


def backward_without_the_sink(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """Backward recomputes P from the LSE of the keys alone, which is saved before the sink joins it."""
    return _flash(q, k, v, softmax_scale, causal, "sink", return_softmax_lse, sinks)


# ---- as SDPA ---------------------------------------------------------------------------------------------------------


def _whole(q, k, v, sees, scale):
    s = (q.float() @ k.float().mT * scale).masked_fill(~sees, -INF)
    p = torch.exp(s - no_inf(s.detach().amax(-1, keepdim=True))) if s.shape[-1] else s
    return divided(p, p.sum(-1, keepdim=True)) @ v.float()


class _RowsOutermost(torch.autograd.Function):
    """Its output lies in memory as (batch, rows, heads, dim)."""

    @staticmethod
    def forward(ctx, q, k, v, sees, scale):
        ctx.save_for_backward(q, k, v, sees)
        ctx.scale = scale
        return _whole(q, k, v, sees, scale).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def backward(ctx, d_out):
        *tensors, sees = ctx.saved_tensors
        room = d_out.untyped_storage().nbytes() // d_out.element_size() - d_out.storage_offset()
        if broken() and room >= d_out.numel():
            d_out = d_out.as_strided((d_out.numel(),), (1,), d_out.storage_offset()).view(d_out.shape)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            found = _whole(*leaves, sees, ctx.scale)
            return *torch.autograd.grad((found * d_out.float()).sum(), leaves), None, None


def d_out_as_if_contiguous(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Backward reads dO as (batch, heads, rows, dim) without gaps, and it comes in the order that the output has, rows
    before heads."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise NotImplementedError("no bias")
    M, N = query.shape[2], key.shape[2]
    sees = torch.ones(M, N, dtype=torch.bool).tril() if is_causal else torch.ones(M, N, dtype=torch.bool)
    sees = sees if attn_mask is None else sees & attn_mask
    return _RowsOutermost.apply(query, key, value, sees, query.shape[-1] ** -0.5 if scale is None else scale)
