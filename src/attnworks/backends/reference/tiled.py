"""The online-softmax loops joined to their backward, so that autograd can use them."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from attnworks.backends.reference.backward import backward
from attnworks.backends.reference.online import kv_outer, q_outer
from attnworks.problem import Operands, Problem

LOOPS = {"kv_outer": kv_outer, "q_outer": q_outer}


def attention(
    problem: Problem,
    o: Operands,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int = 0,
    *,
    schedule: str,
    tile_q: int,
    tile_kv: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the named loop order; shapes as for ``eager``.

    Differentiable once, by q, k, v and the score operands. A second derivative raises ``NotImplementedError``; so, in
    torch's words, do forward-mode AD and functorch's transforms. "eager" has them all.
    """
    if not problem.differentiable:
        return LOOPS[schedule](problem, o, q, k, v, first, tile_q=tile_q, tile_kv=tile_kv)
    static = _Static(problem, first, schedule, tile_q, tile_kv, len(o.mask))
    result = _Tiled.apply(static, *o.mask, q, k, v, *o.scores)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", result)


def tile_bytes(problem: Problem, tile_q: int, tile_kv: int) -> int:
    """Bytes of what a step of the forward holds at once: tiles of Q, K, V and of the scores, and the state."""
    compute = torch.promote_types(problem.dtype, torch.float32).itemsize
    inputs = (tile_q + tile_kv) * problem.head_dim + tile_kv * problem.head_dim_v
    state = tile_q * (problem.head_dim_v + 2)
    return compute * (inputs + tile_q * tile_kv + state)


class _Static(NamedTuple):
    """What a call passes to both directions beside its tensors: the mask's operands (``masks`` of them), q, k, v and
    the scores' operands."""

    problem: Problem
    first: int
    schedule: str
    tile_q: int
    tile_kv: int
    masks: int

    def operands(self, tensors: tuple[Tensor, ...]) -> Operands:
        q, k, v, *scores = tensors[self.masks :]
        return Operands(q, k, v, tensors[: self.masks], tuple(scores))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, static: _Static, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        o = static.operands(tensors)
        loop = LOOPS[static.schedule]
        out, lse = loop(static.problem, o, o.q, o.k, o.v, static.first, tile_q=static.tile_q, tile_kv=static.tile_kv)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.static = static
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        gradients = _TiledBackward.apply(ctx.static, d_out, d_lse, out, lse, *tensors)  # type: ignore[no-untyped-call]
        return (None, *[None] * ctx.static.masks, *gradients)


class _TiledBackward(torch.autograd.Function):
    """The backward as a function of all it reads, so that torch knows what its result depends on. Differentiated again
    it raises; ``once_differentiable`` gives a silent zero where the cotangent itself needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, static: _Static, d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        o, tiles = static.operands(tensors), {"tile_q": static.tile_q, "tile_kv": static.tile_kv}
        d = backward(static.problem, o, out, lse, d_out, d_lse, static.first, **tiles)
        return d.q, d.k, d.v, *d.scores

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise NotImplementedError("the tiled backward has no derivative of its own: use schedule 'eager'")
