"""The third set, backward: three hand-written ones, of the whole matrix, of loops over tiles and of probabilities that
were saved, with a fault named by whoever calls them. A kernel's first line says what is wrong with it; right once
``broken`` says False."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.held_out_kernels.third import broken, no_inf

NEG = float("-inf")


def _visible(rows: int, keys: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> Tensor:
    behind = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    seen = seen & (behind <= window[0]) if window[0] >= 0 else seen
    return seen & (behind >= -window[1]) if window[1] >= 0 and not causal else seen


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(..., rows, dim), as many heads of K and V as of Q."""
    s = (q @ k.mT * scale).masked_fill(~seen, NEG)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - no_inf(lse)[..., None]) @ v, lse


# ---- tile by tile ----------------------------------------------------------------------------------------------------


class _Tiles(torch.autograd.Function):
    """Columns of 48 keys outside, rows of 32 queries inside, one query head after the other; (batch, heads, rows, dim)
    in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, window, fault):
        group = q.shape[1] // max(k.shape[1], 1)
        seen = _visible(q.shape[2], k.shape[2], causal, window)
        out, lse = _forward(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scale, seen)
        ctx.save_for_backward(q, k, v, out, lse, seen)
        ctx.rest = scale, causal, fault if broken() else ""
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, out, lse, seen = ctx.saved_tensors
        scale, causal, fault = ctx.rest
        if fault == "window":
            seen = _visible(*seen.shape, causal)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        channels = slice(0, 32) if fault == "delta of 32 channels" else slice(None)
        delta = (do * out)[..., channels].sum(-1)
        for b, h, c in product(range(q.shape[0]), range(q.shape[1]), range(0, k.shape[2], 48)):
            kv = h // (q.shape[1] // k.shape[1])
            y, z = k[b, kv, c : c + 48], v[b, kv, c : c + 48]
            short = 48 - len(y) if fault == "padding" else 0
            y, z = (torch.cat([x, x.new_zeros(short, x.shape[1])]) for x in (y, z))
            dy, dz = torch.zeros_like(y), torch.zeros_like(z)
            for r in range(0, q.shape[2], 32):
                x, d = q[b, h, r : r + 32], do[b, h, r : r + 32]
                shown = seen[r : r + 32, c : c + 48]
                shown = torch.cat([shown, shown.new_ones(len(x), short)], 1)
                p = torch.exp((x @ y.T * scale).masked_fill(~shown, NEG) - no_inf(lse[b, h, r : r + 32])[:, None])
                ds = p * (d @ z.T - delta[b, h, r : r + 32, None])
                if fault == "no P":
                    ds = (d @ z.T - delta[b, h, r : r + 32, None]).masked_fill(~shown, 0)
                if fault == "last rows":
                    dy, dz = ds.T @ x * scale, p.T @ d
                else:
                    dy, dz = dy + ds.T @ x * scale, dz + p.T @ d
                part = ds @ y * scale
                dq[b, h, r : r + 32] = part if fault == "store" else dq[b, h, r : r + 32] + part
            dk[b, kv, c : c + 48] += dy[: 48 - short]
            dv[b, kv, c : c + 48] += dz[: 48 - short]
        return dq, dk, dv, None, None, None, None


def _tiled(q, k, v, scale, causal, fault, window=(-1, -1)):
    heads_first = (x.transpose(1, 2).float() for x in (q, k, v))
    out = _Tiles.apply(*heads_first, scale or q.shape[-1] ** -0.5, causal, window, fault)
    return out.transpose(1, 2).to(q.dtype)


def derivative_without_probabilities(q, k, v, softmax_scale=None, causal=False):
    """dS is dP - delta, not P times that."""
    return _tiled(q, k, v, softmax_scale, causal, "no P")


def inner_loop_overwrites(q, k, v, softmax_scale=None, causal=False):
    """dK and dV of a tile are overwritten by each tile of rows."""
    return _tiled(q, k, v, softmax_scale, causal, "last rows")


def store_for_an_atomic_add(q, k, v, softmax_scale=None, causal=False):
    """dQ is stored where it has to be added: the last tile of keys remains."""
    return _tiled(q, k, v, softmax_scale, causal, "store")


def delta_of_some_channels(q, k, v, softmax_scale=None, causal=False):
    """The preprocessing kernel sums dO times O over one block of 32 channels, whatever the head dim."""
    return _tiled(q, k, v, softmax_scale, causal, "delta of 32 channels")


def padding_with_a_probability(q, k, v, softmax_scale=None, causal=False):
    """The backward's last tile is padded with keys that score 0, so that exp(0 - LSE) overflows if the LSE is low."""
    return _tiled(q, k, v, softmax_scale, causal, "padding")


def window_forward_only(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The backward takes causal from its arguments, but no window."""
    return _tiled(q, k, v, softmax_scale, causal, "window", window_size)


# ---- the whole matrix, a group's heads as a dimension ----------------------------------------------------------------


class _Whole(torch.autograd.Function):
    """(batch, heads, rows, dim); Q is saved as it was multiplied by the scale."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, fault):
        x = q.float().unflatten(1, (k.shape[1], -1)) * scale if k.shape[1] else q.float()[:, :, None]
        y, z = k.float().unsqueeze(2), v.float().unsqueeze(2)
        seen = _visible(x.shape[-2], y.shape[-2], causal)
        out, lse = _forward(x, y, z, 1.0, seen)
        ctx.save_for_backward(x, y, z, out, lse, seen)
        ctx.rest = scale, fault if broken() else "", q.dtype
        return out.flatten(1, 2).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, y, z, out, lse, seen = ctx.saved_tensors
        scale, fault, dtype = ctx.rest
        g = d_out.float().view(out.shape)
        p = torch.exp((x @ y.mT).masked_fill(~seen, NEG) - no_inf(lse)[..., None])
        delta = (g * out).sum(-1, keepdim=True)
        ds = p * (g @ z.mT + delta if fault == "plus" else g @ z.mT - delta)
        if fault == "fp8":
            top = ds.abs().amax().clamp_min(1e-20) / 448
            ds = (ds / top).to(torch.float8_e4m3fn).float() * top
        dq = torch.einsum("bngij,bngjd->bngid", ds, y.expand(-1, -1, x.shape[2], -1, -1)) * scale
        dk, dv = ds.mT @ x, p.mT @ g
        if fault == "dq twice":
            dq = dq * scale
        if fault == "dk twice":
            dk = dk * scale
        if fault == "interleaved":  # head h = (group, KV head) here, (KV head, group) everywhere else
            dk, dv = (t.flatten(1, 2).unflatten(1, (t.shape[2], -1)).transpose(1, 2) for t in (dk, dv))
        return dq.flatten(1, 2).to(dtype), dk.sum(2).to(dtype), dv.sum(2).to(dtype), None, None, None


def _sdpa(query, key, value, causal, scale, fault):
    return _Whole.apply(query, key, value, scale or query.shape[-1] ** -0.5, causal, fault)


def delta_is_added(q, k, v, softmax_scale=None, causal=False):
    """dS is P times (dP + delta)."""
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return _sdpa(*tensors, causal, softmax_scale, "plus").transpose(1, 2)


def scale_in_ds_and_in_dq(q, k, v, softmax_scale=None, causal=False):
    """dS is multiplied by the scale when it is stored for dQ, and dQ again at the end."""
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return _sdpa(*tensors, causal, softmax_scale, "dq twice").transpose(1, 2)


def saved_q_was_scaled(q, k, v, softmax_scale=None, causal=False):
    """dK is made from the scaled Q that the forward saved, and is multiplied by the scale."""
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return _sdpa(*tensors, causal, softmax_scale, "dk twice").transpose(1, 2)


def ds_in_eight_bits(q, k, v, softmax_scale=None, causal=False):
    """dS goes through e4m3 with one scale for the whole tensor."""
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return _sdpa(*tensors, causal, softmax_scale, "fp8").transpose(1, 2)


def groups_interleaved_in_backward(q, k, v, softmax_scale=None, causal=False):
    """The sums of dK and dV over a group take query head h for one of KV head h modulo the KV heads."""
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return _sdpa(*tensors, causal, softmax_scale, "interleaved").transpose(1, 2)


# ---- probabilities that were saved, with sinks and an LSE ------------------------------------------------------------


class _Saved(torch.autograd.Function):
    """P itself is kept for the backward; ``sink``: (heads,) or None."""

    @staticmethod
    def forward(ctx, q, k, v, sink, scale, causal, fault):
        n = max(q.shape[2] // max(k.shape[2], 1), 1)
        x, y, z = (t.transpose(1, 2).float() for t in (q, k, v))
        y, z = y.repeat_interleave(n, 1), z.repeat_interleave(n, 1)
        stand_in = -1e30 if fault == "finite" and broken() else NEG
        s = (x @ y.mT * scale).masked_fill(~_visible(x.shape[2], y.shape[2], causal), stand_in)
        columns = s.new_full((*s.shape[:-1], 1), NEG)
        if sink is not None:
            columns = sink.float()[None, :, None, None].expand(columns.shape)
        lse = torch.logsumexp(torch.cat([s, columns], -1), -1)
        p = torch.exp(s - no_inf(lse)[..., None])
        shown = ~(lse < -1e29)[..., None]
        out = p.masked_fill(~shown, 0) @ z  # rows without keys are 0 either way
        ctx.save_for_backward(x, y, z, out, lse, p, torch.empty(0) if sink is None else sink)
        ctx.rest = n, scale, fault if broken() else "", q.dtype
        return out.transpose(1, 2).to(q.dtype), lse.masked_fill(~shown[..., 0], NEG)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        x, y, z, out, lse, p, sink = ctx.saved_tensors
        n, scale, fault, dtype = ctx.rest
        g = d_out.transpose(1, 2).float()
        delta = (g * out).sum(-1)
        if fault != "lse":
            delta = delta - d_lse
        ds = p * (g @ z.mT - delta[..., None])
        d_sink = None
        if sink.numel() and fault != "sink":
            d_sink = -(torch.exp(sink.float()[:, None] - lse) * delta).sum((0, 2)).to(sink.dtype)
        elif sink.numel():
            d_sink = torch.zeros_like(sink)
        dq, dk, dv = ds @ y * scale, ds.mT @ x * scale, p.mT @ g
        dk, dv = (t.unflatten(1, (t.shape[1] // n, n)).sum(2) for t in (dk, dv))
        return *(t.transpose(1, 2).to(dtype) for t in (dq, dk, dv)), d_sink, None, None, None


def _with_lse(result, wanted):
    return result if wanted else result[0]


def sinks_do_not_learn(q, k, v, softmax_scale=None, causal=False, s_aux=None, return_softmax_lse=False):
    """The sinks' gradient is a tensor of zeros."""
    found = _Saved.apply(q, k, v, s_aux, softmax_scale or q.shape[-1] ** -0.5, causal, "sink")
    return _with_lse(found, return_softmax_lse)


def rows_of_nothing_give_gradients(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Hidden scores are -1e30: rows without keys are put right in the output and the LSE, but not in the P that the
    backward uses."""
    found = _Saved.apply(q, k, v, None, softmax_scale or q.shape[-1] ** -0.5, causal, "finite")
    return _with_lse(found, return_softmax_lse)


def statistics_are_not_differentiated(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The LSE is returned with a gradient function, whose argument is not used."""
    found = _Saved.apply(q, k, v, None, softmax_scale or math.sqrt(1 / q.shape[-1]), causal, "lse")
    return _with_lse(found, return_softmax_lse)
