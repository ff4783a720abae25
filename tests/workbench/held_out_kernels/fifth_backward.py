"""The fifth set: right forward, faults in a backward of its own. Right inside ``third.repaired()``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, scale_of
from workbench.held_out_kernels.third import broken, no_inf

# ---- tiles of keys over the saved LSE, as flash_attn_func ------------------------------------------------------------


class _Tiled(torch.autograd.Function):
    """Queries grouped as (batch, heads_kv, group, rows, dim), so that K's and V's gradients sum over the group.
    ``fault``: which of the faults below it has."""

    @staticmethod
    def forward(ctx, q, k, v, slopes, scale, causal, cap, fault):
        B, M, H, D = q.shape
        G = k.shape[2]
        ctx.options, ctx.dims = (scale, causal, cap, fault), (B, M, H, D, k.shape[1], G, H // max(G, 1))
        x = _split_heads(q, G)
        s, _ = _capped(x @ _keys(k).mT * scale, cap, slopes, ctx.dims)
        s = s.masked_fill(~_visible(ctx.dims, causal), -INF)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -INF)
        p = torch.exp(s - no_inf(top))
        total = p.sum(-1, keepdim=True)
        out = _join_heads(p @ _keys(v) / torch.where(total == 0, 1.0, total)).to(q.dtype)
        ctx.save_for_backward(q, k, v, slopes, out, top + total.log())
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, slopes, out, lse = ctx.saved_tensors
        scale, causal, cap, fault = ctx.options
        M, N, G = ctx.dims[1], ctx.dims[4], ctx.dims[5]
        wrong = fault if broken() else ""
        x, y, z, g = _split_heads(q, G), _keys(k), _keys(v), _split_heads(d_out, G)
        delta = (_split_heads(out, G) * g).sum(-1, keepdim=True)
        if wrong == "lse":
            lse = lse * math.log2(math.e)
        if wrong == "alibi":
            slopes = None
        sees = _visible(ctx.dims, causal)
        dx, dy, dz = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(z)
        for keys in torch.arange(N).split(32) if N else []:
            products = x @ y[..., keys, :].mT * scale
            s, slope = _capped(products, cap, slopes, ctx.dims, keys)
            if wrong == "cap" and cap:
                slope = 1 - torch.tanh(cap * torch.tanh(products / cap) / cap) ** 2
            s = s.masked_fill(~sees[:, keys], -INF)
            p = torch.exp(s - (lse if wrong == "empty" else no_inf(lse)))
            ds = p * (g @ z[..., keys, :].mT - delta) * slope
            dx += ds @ y[..., keys, :] * scale
            if causal and wrong == "start":
                # Query tiles of 16 before the one with the number of the tile's first key.
                first = int(keys[0]) // 16 * 16
                p, ds = (t.index_fill(-2, torch.arange(min(first, M)), 0.0) for t in (p, ds))
            dy[..., keys, :] = (ds.mT @ x * scale).sum(2, keepdim=True)
            dz[..., keys, :] = (p.mT @ g).sum(2, keepdim=True)
        dk, dv = (d.squeeze(2).transpose(1, 2) for d in (dy, dz))
        return _join_heads(dx).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _split_heads(x: Tensor, heads_kv: int) -> Tensor:
    b, rows, heads, dim = x.shape
    return x.float().reshape(b, rows, heads_kv, heads // max(heads_kv, 1), dim).permute(0, 2, 3, 1, 4)


def _join_heads(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _keys(x: Tensor) -> Tensor:
    return x.float().transpose(1, 2).unsqueeze(2)


def _visible(dims: tuple[int, ...], causal: bool) -> Tensor:
    rows, keys = dims[1], dims[4]
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows if causal else keys)


def _capped(s, cap, slopes, dims, keys=None):
    """Scores after softcap and ALiBi, and the softcap's derivative."""
    _, M, _, _, N, G, group = dims
    slope = torch.ones(())
    if cap:
        slope = 1 - torch.tanh(s / cap) ** 2
        s = cap * torch.tanh(s / cap)
    if slopes is not None:
        keys = torch.arange(N) if keys is None else keys
        distance = (torch.arange(M)[:, None] + N - M - keys).abs()
        s = s - slopes.float().reshape(*slopes.shape[:-1], G, group, 1, 1) * distance
    return s, slope


def saved_statistics_in_base_2(q, k, v, softmax_scale=None, causal=False):
    """Forward saves the LSE in base 2, backward subtracts it from natural scores."""
    return _Tiled.apply(q, k, v, None, scale_of(q, softmax_scale), causal, 0.0, "lse")


def query_loop_begins_at_the_key(q, k, v, softmax_scale=None, causal=False):
    """Under causal, dK and dV begin at the query with the key's own number, also where there are more keys than
    queries."""
    return _Tiled.apply(q, k, v, None, scale_of(q, softmax_scale), causal, 0.0, "start")


def cap_differentiated_at_its_result(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """The softcap's derivative 1 - tanh² is taken of the capped scores, where those before the cap belong."""
    return _Tiled.apply(q, k, v, None, scale_of(q, softmax_scale), causal, softcap, "cap")


def slopes_forward_only(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None):
    """Backward recomputes P without ALiBi, which it is not given."""
    return _Tiled.apply(q, k, v, alibi_slopes, scale_of(q, softmax_scale), causal, 0.0, "alibi")


def rows_without_keys_make_nan(q, k, v, softmax_scale=None, causal=False):
    """Backward takes exp(score - LSE) as it is, which is NaN for rows without keys."""
    return _Tiled.apply(q, k, v, None, scale_of(q, softmax_scale), causal, 0.0, "empty")


# ---- whole matrices with a bias, as SDPA -----------------------------------------------------------------------------


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, hidden, scale, fault):
        s = q.float() @ k.float().mT * scale
        s = s if bias is None else s + bias
        s = s if hidden is None else s.masked_fill(hidden, -INF)
        p = torch.softmax(s, -1).masked_fill((s == -INF).all(-1, keepdim=True), 0.0)
        out = (p @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, p, out)
        ctx.scale, ctx.fault = scale, fault
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, bias, p, out = ctx.saved_tensors
        wrong = ctx.fault if broken() else ""
        g = d_out.float()
        delta = (g * out.float()).sum(-1)
        if wrong == "delta":  # (batch, heads, rows) written, (batch, rows, heads) read
            b, h, m = delta.shape
            delta = delta.reshape(b, m, h).mT
        ds = p * (g @ v.float().mT - delta[..., None])
        dq, dk, dv = ds @ k.float() * ctx.scale, ds.mT @ q.float() * ctx.scale, p.mT @ g
        if wrong == "order" and dk.shape == dv.shape:
            dk, dv = dv, dk
        d_bias = None
        if bias is not None:
            d_bias = ds
            for axis, size in enumerate(bias.shape):
                if size == 1 and ds.shape[axis] > 1:
                    d_bias = d_bias.narrow(axis, 0, 1) if wrong == "bias" else d_bias.sum(axis, keepdim=True)
            d_bias = d_bias.to(bias.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias, None, None, None


def _biased(q, k, v, attn_mask, is_causal, scale, fault):
    hidden = bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    elif attn_mask is not None:
        bias = attn_mask.view((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    if is_causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        hidden = later if hidden is None else hidden | later
    return _Biased.apply(q, k, v, bias, hidden, q.shape[-1] ** -0.5 if scale is None else scale, fault)


def bias_gradient_of_the_first(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Where a bias was broadcast its gradient is the first head's or sequence's, not the sum over all."""
    return _biased(query, key, value, attn_mask, is_causal, scale, "bias")


def gradients_in_the_wrong_order(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Backward returns (dQ, dV, dK)."""
    return _biased(query, key, value, attn_mask, is_causal, scale, "order")


def delta_read_rows_first(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """The first pass writes delta as (batch, heads, rows), the second reads it as (batch, rows, heads)."""
    return _biased(query, key, value, attn_mask, is_causal, scale, "delta")


# ---- sinks -----------------------------------------------------------------------------------------------------------


class _Sunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, causal):
        b, h, m, _ = q.shape
        n = k.shape[2]
        s = torch.einsum("bhmd,bhnd->bhmn", q.float(), k.float()) * scale
        s = s.masked_fill(torch.arange(n) > torch.arange(m)[:, None] + n - m, -INF) if causal else s
        joined = torch.cat([s, sinks.float().view(1, h, 1, 1).expand(b, h, m, 1)], -1)
        p = torch.softmax(joined, -1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return (p[..., :-1] @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, p = ctx.saved_tensors
        g, keys = d_out.float(), p[..., :-1]
        dp = g @ v.float().mT
        delta = (keys * dp).sum(-1, keepdim=True)
        ds = keys * (dp - delta) * ctx.scale
        d_sink = (p[..., -1:] * delta).sum((0, 2, 3))
        dk, dv = ds.mT @ q.float(), keys.mT @ g
        return (
            (ds @ k.float()).to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            d_sink if broken() else -d_sink,
            None,
            None,
        )


def sink_pulled_the_other_way(q, k, v, softmax_scale=None, causal=False, sinks=None):
    """The sink's gradient has the wrong sign: P of the sink times delta, where minus delta belongs."""
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    logits = torch.full((q.shape[2],), -1e30) if sinks is None else sinks
    return _Sunk.apply(q.transpose(1, 2), k, v, logits, scale_of(q, softmax_scale), causal).transpose(1, 2)
