"""The second set, backward: one autograd.Function whose backward recomputes P in the way that each kernel gives it.
Each function's first line says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.held_out_kernels.second import (
    INF,
    LOG2E,
    Scale,
    as_rows,
    band,
    products,
    safe,
    scale_of,
    seen_by_all,
    soft,
    tiles,
    with_lse,
)

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Saved:
    """What a backward has: (..., heads, rows, dim) in fp32, K and V for their own heads, and how it was called."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor
    scale: float
    seen: Tensor
    cap: float

    @property
    def group(self) -> int:
        return self.q.shape[-3] // max(self.k.shape[-3], 1)

    def wide(self, x: Tensor) -> Tensor:
        """A KV tensor for every query head."""
        return x.repeat_interleave(self.group, -3)

    def narrow(self, x: Tensor) -> Tensor:
        """A group's gradients summed."""
        return x.unflatten(-3, (-1, self.group)).sum(-3)

    def capped(self, s: Tensor) -> Tensor:
        return torch.tanh(s / self.cap) * self.cap if self.cap else s

    def probs(self) -> Tensor:
        s = self.capped(products(self.q, self.wide(self.k), self.scale)).masked_fill(~self.seen, -INF)
        return torch.exp(s - safe(self.lse)[..., None])

    def d_probs(self) -> Tensor:
        return self.d_out @ self.wide(self.v).transpose(-1, -2)

    def delta(self) -> Tensor:
        return ((self.d_out * self.out).sum(-1) - self.d_lse)[..., None]

    def slope(self) -> Tensor | float:
        """The softcap's derivative."""
        if not self.cap:
            return 1.0
        return 1 - torch.tanh(products(self.q, self.wide(self.k), self.scale) / self.cap) ** 2

    def grads(self, p: Tensor, ds: Tensor) -> Grads:
        """From P and the gradient of the scaled products."""
        d_q = ds @ self.wide(self.k) * self.scale
        return (
            d_q,
            self.narrow(ds.transpose(-1, -2) @ self.q) * self.scale,
            self.narrow(p.transpose(-1, -2) @ self.d_out),
        )


Backward = Callable[[Saved], Grads]


class _Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        nothing = torch.empty(0)
        saved = Saved(q, k, v, nothing, nothing, nothing, nothing, *rest)
        s = saved.capped(products(q, saved.wide(k), saved.scale)).masked_fill(~saved.seen, -INF)
        p, lse = soft(s)
        out = p @ saved.wide(v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = backward, rest
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        backward, rest = ctx.how
        return None, *backward(Saved(*ctx.saved_tensors, d_out, d_lse, *rest)), None, None, None


def _run(backward: Backward, tensors: Grads, scale: float | None, causal: bool,
         window: tuple[int, int] = (-1, -1), cap: float = 0.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q, k, v (..., rows, heads, dim)."""
    q, k, v = (x.transpose(-3, -2).float() for x in tensors)
    out, lse = _Recomputing.apply(backward, q, k, v, scale_of(q, scale), seen_by_all(q, k, causal, window), cap)
    return as_rows(out, tensors[0]), lse


def _right(t: Saved) -> Grads:
    p = t.probs()
    return t.grads(p, p * (t.d_probs() - t.delta()) * t.slope())


# ---- dense, called like flash-attn -----------------------------------------------------------------------------------


def no_delta(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None, causal: bool = False) -> Tensor:
    """dS is P times dP, as if each row's sum were a constant."""

    def backward(t: Saved) -> Grads:
        p = t.probs()
        return t.grads(p, p * t.d_probs())

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


def delta_of_the_first_tile(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                            causal: bool = False) -> Tensor:  # fmt: skip
    """Delta is read once, before the loop over tiles of 24 queries, for the rows of the first tile."""

    def backward(t: Saved) -> Grads:
        p, d_p, delta = t.probs(), t.d_probs(), t.delta()[..., :24, :]
        ds = torch.zeros_like(p)
        for at in tiles(p.shape[-2], 24):
            ds[..., at, :] = p[..., at, :] * (d_p[..., at, :] - delta[..., : at.stop - at.start, :])
        return t.grads(p, ds)

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


def last_head_of_the_group_stays(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                                 causal: bool = False) -> Tensor:  # fmt: skip
    """A loop over the query heads stores dK and dV of their KV head instead of adding to them."""

    def backward(t: Saved) -> Grads:
        p = t.probs()
        ds = p * (t.d_probs() - t.delta())
        d_k, d_v = torch.zeros_like(t.k), torch.zeros_like(t.v)
        for head in range(t.q.shape[-3]):
            d_k[:, head // t.group] = ds[:, head].transpose(-1, -2) @ t.q[:, head] * t.scale
            d_v[:, head // t.group] = p[:, head].transpose(-1, -2) @ t.d_out[:, head]
        return t.grads(p, ds)[0], d_k, d_v

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


def dv_of_exponentials(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                       causal: bool = False) -> Tensor:  # fmt: skip
    """P is recomputed with the maximum, and the division by the sum comes after dV."""

    def backward(t: Saved) -> Grads:
        s = products(t.q, t.wide(t.k), t.scale).masked_fill(~t.seen, -INF)
        top = torch.cat([s, s.new_full((*s.shape[:-1], 1), -INF)], -1).amax(-1, keepdim=True)
        raw = torch.exp(s - safe(top))
        total = raw.sum(-1, keepdim=True)
        p = raw / torch.where(total == 0, 1.0, total)
        return t.grads(raw, p * (t.d_probs() - t.delta()))

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


def backward_sees_everything(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
    """The backward's P is exp(S - LSE) for hidden keys too."""
    return _run(lambda t: _right(replace(t, seen=torch.ones_like(t.seen))), (q, k, v), softmax_scale, causal,
                window_size)[0]  # fmt: skip


def backward_diagonal_from_the_top(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                                   causal: bool = False) -> Tensor:  # fmt: skip
    """The backward's causal mask is the lower triangle, whatever the lengths."""

    def backward(t: Saved) -> Grads:
        rows, keys = t.seen.shape
        return _right(replace(t, seen=band(torch.arange(rows), torch.arange(keys), 0, causal)))

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


def dq_of_the_first_half(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                         causal: bool = False) -> Tensor:  # fmt: skip
    """Two halves of the keys make a partial dQ each, and only the first is kept."""

    def backward(t: Saved) -> Grads:
        p = t.probs()
        ds = p * (t.d_probs() - t.delta())
        half = -(-ds.shape[-1] // 2)
        partial = [ds[..., at] @ t.wide(t.k)[..., at, :] * t.scale for at in (slice(0, half), slice(half, None))]
        return partial[0], *t.grads(p, ds)[1:]

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


def cap_is_constant(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None, causal: bool = False,
                    softcap: float = 0.0, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """The backward recomputes P with the softcap and goes on as if the softcap had a slope of 1."""

    def backward(t: Saved) -> Grads:
        p = t.probs()
        return t.grads(p, p * (t.d_probs() - t.delta()))

    out, lse = _run(backward, (q, k, v), softmax_scale, causal, cap=softcap)
    return with_lse(out, lse, return_softmax_lse)


def ln_2_left_in_the_gradients(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                               causal: bool = False) -> Tensor:  # fmt: skip
    """The scale of dQ and dK is the one of base 2, with log2(e) in it."""

    def backward(t: Saved) -> Grads:
        d_q, d_k, d_v = _right(t)
        return d_q * LOG2E, d_k * LOG2E, d_v

    return _run(backward, (q, k, v), softmax_scale, causal)[0]


# ---- packed ----------------------------------------------------------------------------------------------------------


def _packed(backward: Backward, tensors: Grads, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            scale: float | None, causal: bool) -> Tensor:  # fmt: skip
    q, k, v = tensors
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for mine, theirs in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        parts = q[slice(*mine)], k[slice(*theirs)], v[slice(*theirs)]
        found.append(_run(backward, parts, scale, causal)[0])
    return torch.cat(found)


def dk_of_unscaled_products(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                            softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """dQ is scaled when it is stored, dK is stored without."""

    def backward(t: Saved) -> Grads:
        d_q, _, d_v = _right(t)
        ds = t.probs() * (t.d_probs() - t.delta())
        return d_q, t.narrow(torch.einsum("...qk,...qd->...kd", ds, t.q)), d_v

    return _packed(backward, (q, k, v), cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)


def right_packed_in_base_2(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """Right: packed, with a backward that recomputes P in base 2, tile by tile of 56 keys."""

    def backward(t: Saved) -> Grads:
        d_q, d_k, d_v, delta = torch.zeros_like(t.q), [], [], t.delta()
        keys, values = t.wide(t.k), t.wide(t.v)
        for at in tiles(keys.shape[-2], 56):
            s = products(t.q, keys[:, at], t.scale * LOG2E, t.seen[:, at])
            p = torch.exp2(s - safe(t.lse)[..., None] / math.log(2))
            ds = p * (t.d_out @ values[:, at].transpose(-1, -2) - delta)
            d_q += ds @ keys[:, at] * t.scale
            d_k.append(t.narrow(ds.transpose(-1, -2) @ t.q) * t.scale)
            d_v.append(t.narrow(p.transpose(-1, -2) @ t.d_out))
        if not d_k:
            return d_q, torch.zeros_like(t.k), torch.zeros_like(t.v)
        return d_q, torch.cat(d_k, -2), torch.cat(d_v, -2)

    return _packed(backward, (q, k, v), cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
