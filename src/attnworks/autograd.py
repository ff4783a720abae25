"""A backend's own forward and backward joined for autograd: the first derivative, in reverse mode, and no silent zero
beyond it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnworks.backends import Backend, BackwardLauncher, Gradients, Launcher, Needs
from attnworks.expressions import in_memory
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, last_contiguous, restrided


class Joined:
    """A prepared differentiable call whose backend has a backward of its own.

    ``forward`` gives the LSE, whoever asked for it.
    """

    def __init__(
        self, problem: Problem, backend: Backend, plan: Plan, forward: Launcher, backward: BackwardLauncher
    ) -> None:
        self.problem, self.name, self.forward = problem, backend.NAME, forward
        self._backend, self._plan, self._backward = backend, plan, backward

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        counts = len(o.scores), len(o.mask)
        out, lse = _Attention.apply(self, counts, *o.tensors())  # type: ignore[no-untyped-call]
        return out, lse if self.problem.return_lse else None

    def backward(
        self, o: Operands, out: Tensor, lse: Tensor, d_out: Tensor | None, d_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        """The gradients, from tensors of any strides: hooks on saved tensors keep only values, and a cotangent may be
        expanded."""
        o.q, o.k, o.v = last_contiguous(o.q), last_contiguous(o.k), last_contiguous(o.v)
        problem = restrided(self.problem, o)
        launch = self._backward
        if problem is not self.problem:
            anew = self._backend.prepare_backward(problem, self._plan)
            assert anew is not None
            launch = anew
        d_out = torch.zeros_like(out) if d_out is None else last_contiguous(d_out)
        d_lse = None if d_lse is None else in_memory(d_lse).contiguous()
        return launch(o, out.contiguous(), lse.contiguous(), d_out, d_lse, needs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Joined, counts: tuple[int, int], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        if any(ctx.needs_input_grad[5 + counts[0] :]):
            raise ValueError(
                f"k_scale, v_scale: required grad, which backend {call.name!r} has no derivative for: call it with "
                "backend='reference'"
            )
        out, lse = call.forward(Operands.of(counts, tensors))
        assert lse is not None
        ctx.call, ctx.counts = call, counts
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[2:]
        args = ctx.call, ctx.counts, asked, d_out, d_lse, *ctx.saved_tensors
        # Grad mode is on only under create_graph=True; without it nobody can ask for a second derivative.
        found = _Backward.apply(*args) if torch.is_grad_enabled() else _gradients(*args)  # type: ignore[no-untyped-call]
        return (None, None, *found, *(None for _ in asked[len(found) :]))


class _Backward(torch.autograd.Function):
    """The backward as a function of all it reads, so that torch knows what its result depends on. Differentiated again
    it raises; ``once_differentiable`` gives a silent zero where the cotangent itself needs no gradient."""

    @staticmethod
    def forward(ctx: Any, call: Joined, *args: Any) -> tuple[Tensor | None, ...]:
        ctx.name = call.name
        return _gradients(call, *args)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise NotImplementedError(no_second_derivative(ctx.name))


def no_second_derivative(name: str) -> str:
    return (
        f"the backward of backend {name!r} has no derivative of its own: for second derivatives call attention with "
        "backend='reference', plan=Plan('reference', 'eager')"
    )


def _gradients(
    call: Joined,
    counts: tuple[int, int],
    asked: Needs,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *tensors: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the score operands."""
    found = call.backward(Operands.of(counts, tensors), out, lse, d_out, d_lse, asked[: 3 + counts[0]])
    return found.q, found.k, found.v, *found.scores
