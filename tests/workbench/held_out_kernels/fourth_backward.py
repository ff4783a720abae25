"""The fourth set, kernels with a backward of their own: the forward is right, one gradient is not. Called as PyTorch's
SDPA is, without a bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.held_out_kernels.fourth import INF, factor, heads, shown, weighted


@dataclass
class Gradients:
    """What backward found, by query heads: dk and dv still to be summed over groups of ``group``."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    p: Tensor
    d_out: Tensor
    group: int
    dtype: torch.dtype


Spoil = Callable[[Gradients], None]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, spoil: Spoil) -> Tensor:
        wide_q, wide_k, wide_v = heads(q, k, v)
        out, lse = weighted((scale * (wide_q @ wide_k.mT)).masked_fill(~seen, -INF), wide_v, q.dtype)
        ctx.save_for_backward(q, k, v, seen, lse)
        ctx.scale, ctx.spoil = scale, spoil
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, seen, lse = ctx.saved_tensors
        wide_q, wide_k, wide_v = heads(q, k, v)
        d_out = d_out.float()
        s = (ctx.scale * (wide_q @ wide_k.mT)).masked_fill(~seen, -INF)
        p = torch.exp(s - torch.where(lse == -INF, 0.0, lse)[..., None])
        ds = p * (d_out @ wide_v.mT - (d_out * (p @ wide_v)).sum(-1, keepdim=True))
        g = Gradients(
            dq=ctx.scale * ds @ wide_k, dk=ctx.scale * ds.mT @ wide_q, dv=p.mT @ d_out, p=p, d_out=d_out,
            group=q.shape[1] // max(k.shape[1], 1), dtype=q.dtype,
        )  # fmt: skip
        ctx.spoil(g)
        dk, dv = (x.unflatten(1, (k.shape[1], g.group)).sum(2) for x in (g.dk, g.dv))
        return g.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def sdpa(spoil: Spoil) -> Callable[..., Tensor]:
    """A kernel whose gradients are spoilt so before they are returned."""

    def kernel(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            raise NotImplementedError("no bias")
        seen = shown(query.shape[-2], key.shape[-2], is_causal, shift=0)
        seen = seen if attn_mask is None else attn_mask
        return _Attend.apply(query, key, value, seen, factor(scale, query.shape[-1]), spoil)

    kernel.__name__, kernel.__doc__ = spoil.__name__, spoil.__doc__
    return kernel


@sdpa
def dk_halved_in_the_tail(g: Gradients) -> None:
    """dK is halved past the last whole tile of 32 keys."""
    g.dk[:, :, g.dk.shape[2] // 32 * 32 :] *= 0.5


@sdpa
def dk_of_the_tail_is_the_tiles_before(g: Gradients) -> None:
    """dK past the last whole tile of 32 keys is that of the tile before."""
    rest = g.dk.shape[2] % 32
    if rest and g.dk.shape[2] > 32:
        g.dk[:, :, -rest:] = g.dk[:, :, -rest - 32 : -32].clone()


@sdpa
def dq_of_64_rows_only(g: Gradients) -> None:
    """dQ is 0 past the first 64 rows."""
    g.dq[:, :, 64:] = 0


@sdpa
def dv_divided_by_the_group(g: Gradients) -> None:
    """dV is the mean over a group's heads instead of their sum."""
    g.dv /= g.group


@sdpa
def dv_in_fp16(g: Gradients) -> None:
    """For fp32 inputs P and dO are rounded to fp16 before they make dV."""
    if g.dtype == torch.float32:
        g.dv = g.p.half().float().mT @ g.d_out.half().float()


@sdpa
def right_backward_of_its_own(g: Gradients) -> None:
    """Right: a backward that recomputes P from the LSE, called as SDPA is."""
