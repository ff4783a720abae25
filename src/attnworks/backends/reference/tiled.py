"""The online-softmax loops joined to their backward, so that autograd can use them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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

    Differentiable once by q, k, v and the score operands. Double backward, forward-mode AD and functorch's transforms
    are refused by torch with an error; "eager" has them.
    """
    if not problem.differentiable:
        return LOOPS[schedule](problem, o, q, k, v, first, tile_q=tile_q, tile_kv=tile_kv)
    tiles = {"tile_q": tile_q, "tile_kv": tile_kv}
    result = _Tiled.apply(problem, o.mask, first, schedule, tiles, q, k, v, *o.scores)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", result)


def tile_bytes(problem: Problem, tile_q: int, tile_kv: int) -> int:
    """Bytes of what a step of the forward holds at once: tiles of Q, K, V and of the scores, and the state."""
    compute = torch.promote_types(problem.dtype, torch.float32).itemsize
    inputs = (tile_q + tile_kv) * problem.head_dim + tile_kv * problem.head_dim_v
    state = tile_q * (problem.head_dim_v + 2)
    return compute * (inputs + tile_q * tile_kv + state)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        mask: tuple[Tensor, ...],
        first: int,
        schedule: str,
        tiles: dict[str, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, *scores = tensors
        operands = Operands(q, k, v, mask, tuple(scores))
        out, lse = LOOPS[schedule](problem, operands, q, k, v, first, **tiles)
        ctx.save_for_backward(out, lse, *mask, *tensors)
        ctx.static = problem, len(mask), first, tiles
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        problem, masks, first, tiles = ctx.static
        out, lse, *rest = ctx.saved_tensors
        q, k, v, *scores = rest[masks:]
        operands = Operands(q, k, v, tuple(rest[:masks]), tuple(scores))
        d = backward(problem, operands, q, k, v, out, lse, d_out, d_lse, first, **tiles)
        return None, None, None, None, None, d.q, d.k, d.v, *d.scores
