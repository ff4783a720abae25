"""The seventh set: right forward, faults in a backward of its own. Right inside ``third.repaired()``."""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks import Bias
from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, blank, tiles, visible
from workbench.held_out_kernels.third import broken, no_inf

# ---- as flash_attn_func ----------------------------------------------------------------------------------------------


def _capped(s: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap) if cap else s


class _Flash(torch.autograd.Function):
    """Tiles of 32 rows and 24 keys. ``fault``: which of the faults below it has."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, causal, cap, fault):
        M, N = q.shape[1], k.shape[1]
        Q, K, V = heads_first(q, k, v)
        out, lse = blank(q, Q, v)
        for rows in tiles(M, 32):
            state = Running(Q[:, :, rows], v.shape[-1])
            for keys in tiles(N, 24):
                s = _capped(Q[:, :, rows] @ K[:, :, keys].mT * scale, cap)
                state.add(s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
            lse[:, :, rows], out[:, :, rows] = state.state
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.float().view(-1, 1).expand_as(lse))
            out, lse = out * torch.exp(lse - no_inf(with_sink))[..., None], with_sink
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = scale, causal, cap, fault
        return out.transpose(1, 2).to(q.dtype), lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        scale, causal, cap, fault = ctx.options
        wrong = fault if broken() else ""
        (Q, K, V), g = heads_first(q, k, v), d_out.transpose(1, 2).float()
        M, N, G = q.shape[1], k.shape[1], k.shape[2]
        delta = (g * out).sum(-1, keepdim=True)
        if wrong == "delta":
            delta[:, :, M // 32 * 32 :] = 0.0
        delta = delta - d_lse[..., None]

        def probabilities(rows, keys, shift):
            raw = Q[:, :, rows] @ K[:, :, keys].mT * scale
            s = _capped(raw, cap).where(visible(rows, keys, shift, None, 0 if causal else None), -INF)
            p = torch.exp(s - no_inf(lse[:, :, rows])[..., None])
            ds = p * (g[:, :, rows] @ V[:, :, keys].mT - delta[:, :, rows])
            return p, ds * (1 - torch.tanh(raw / cap) ** 2) if cap else ds

        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for rows in tiles(M, 32):
            for keys in tiles(N, 24):
                dq[:, :, rows] += probabilities(rows, keys, N - M)[1] @ K[:, :, keys] * scale
        for keys in tiles(N, 24):
            for rows in tiles(M, 32):
                p, ds = probabilities(rows, keys, 0 if wrong == "mask" else N - M)
                dk[:, :, keys] += ds.mT @ Q[:, :, rows] * (1.0 if wrong == "scale" and cap else scale)
                dv[:, :, keys] += p.mT @ g[:, :, rows]
        dk, dv = (x.unflatten(1, (G, -1)) for x in (dk, dv))
        dv = dv[:, :, 0] if wrong == "heads" and dv.shape[2] else dv.sum(2)
        d_sinks = None
        if sinks is not None:
            each = -(torch.exp(sinks.float().view(-1, 1) - lse) * delta.squeeze(-1)).sum(-1)
            d_sinks = (each[-1] if wrong == "sinks" and len(each) else each.sum(0)).to(sinks.dtype)
        dk, dv = (x.transpose(1, 2).to(k.dtype) for x in (dk.sum(2), dv))
        return dq.transpose(1, 2).to(q.dtype), dk, dv, d_sinks, None, None, None, None


def values_of_the_first_head(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """dV is that of the first query head of each group; dK is summed over all of them. Groups of one are right."""
    both = _Flash.apply(q, k, v, None, scale_of(q, softmax_scale), causal, 0.0, "heads")
    return both if return_softmax_lse else both[0]


def delta_of_whole_tiles(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The kernel that makes delta has as many blocks as there are whole tiles of 32 rows; the rows past them are left
    with a delta of 0, which makes dQ and dK wrong. Whole tiles are right."""
    both = _Flash.apply(q, k, v, None, scale_of(q, softmax_scale), causal, 0.0, "delta")
    return both if return_softmax_lse else both[0]


def keys_unscaled_under_a_cap(q, k, v, softmax_scale=None, causal=False, softcap=0.0, return_softmax_lse=False):
    """With a softcap the scale is applied to scores and to dQ, while dK lacks it. Without one it is right."""
    both = _Flash.apply(q, k, v, None, scale_of(q, softmax_scale), causal, softcap, "scale")
    return both if return_softmax_lse else both[0]


def kernel_of_keys_from_the_top(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The backward kernel for dK and dV recomputes P with causal from the first query and key; that for dQ has it
    right, and so have both where there are as many queries as keys."""
    both = _Flash.apply(q, k, v, None, scale_of(q, softmax_scale), causal, 0.0, "mask")
    return both if return_softmax_lse else both[0]


def sinks_of_the_last_sequence(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """The sinks' gradient is stored by each sequence's block, not added: that of the last sequence remains. With a
    batch of one it is right."""
    both = _Flash.apply(q, k, v, sinks, scale_of(q, softmax_scale), causal, 0.0, "sinks")
    return both if return_softmax_lse else both[0]


# ---- as attnworks.attention ------------------------------------------------------------------------------------------


class _Biased(torch.autograd.Function):
    """(batch, heads, rows, dim) with one bias, tiles of 16 by 16. The bias's gradient is first one of all dimensions,
    in a buffer that was not cleared: here full of ones."""

    @staticmethod
    def forward(ctx, q, k, v, bias, scale, causal):
        K, V = (x.float().repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1) for x in (k, v))
        M, N = q.shape[2], k.shape[2]
        whole = bias.float().expand(*q.shape[:2], M, N)
        sees = visible(torch.arange(M), torch.arange(N), N - M, None, 0 if causal else None)
        state = Running(q.float(), v.shape[-1])
        for keys in tiles(N, 16):
            s = q.float() @ K[:, :, keys].mT * scale + whole[..., keys]
            state.add(s.where(sees[:, keys], -INF), V[:, :, keys])
        ctx.save_for_backward(q, k, v, bias, state.out, state.lse)
        ctx.options = scale, causal
        return state.out.to(q.dtype), state.lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, bias, out, lse = ctx.saved_tensors
        scale, causal = ctx.options
        (B, H, M, _), (G, N) = q.shape, k.shape[1:3]
        Q, g = q.float(), d_out.float()
        K, V = (x.float().repeat_interleave(H // max(G, 1), 1) for x in (k, v))
        whole, delta = bias.float().expand(B, H, M, N), (g * out).sum(-1, keepdim=True) - d_lse[..., None]
        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        dbias = torch.full((B, H, M, N), 1.0 if broken() else 0.0)
        for rows in tiles(M, 16):
            for keys in tiles(N, 16):
                if causal and int(keys[0]) > int(rows[-1]) + N - M:
                    continue
                s = Q[:, :, rows] @ K[:, :, keys].mT * scale + whole[:, :, rows][..., keys]
                s = s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF)
                p = torch.exp(s - no_inf(lse[:, :, rows])[..., None])
                ds = p * (g[:, :, rows] @ V[:, :, keys].mT - delta[:, :, rows])
                dbias[:, :, rows[:, None], keys] = ds
                dq[:, :, rows] += ds @ K[:, :, keys] * scale
                dk[:, :, keys] += ds.mT @ Q[:, :, rows] * scale
                dv[:, :, keys] += p.mT @ g[:, :, rows]
        dk, dv = (x.unflatten(1, (G, -1)).sum(2) for x in (dk, dv))
        dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, None, None


def bias_gradient_of_visited_tiles(q, k, v, mask=None, scores=(), scale=None, return_lse=False):
    """Backward skips the tiles that causal hides, and the bias's gradient is there what its buffer held. Without causal
    all of it is written."""
    if not (mask is None or (isinstance(mask, Causal) and mask == Causal())):
        raise NotImplementedError("no mask but causal")
    if len(scores) > 1 or not all(isinstance(score, Bias) for score in scores):
        raise NotImplementedError("one bias at most")
    bias = scores[0].tensor if scores else q.new_zeros(1).float()
    both = _Biased.apply(q, k, v, bias, q.shape[-1] ** -0.5 if scale is None else scale, mask is not None)
    return both if return_lse else both[0]
