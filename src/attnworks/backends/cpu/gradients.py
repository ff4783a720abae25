"""The CPU backend's backward calls: memory for the gradients, and the native kernel for its strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnworks.backends import Gradients, Needs
from attnworks.problem import Operands, Problem, Strides, packed_strides, strides_of


class Backward:
    """``run`` is a ``BackwardLauncher``. ``kernel``: from the strides of d_out, d_q, d_k and d_v to what computes."""

    def __init__(self, problem: Problem, kernel: Callable[..., Any]) -> None:
        self.problem, self._kernel = problem, kernel
        # By the strides of what autograd hands over and of the gradients, which the problem doesn't know.
        self._kernels: dict[tuple[Strides, ...], Any] = {}

    def run(
        self, o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        inputs, ends = (o.q, o.k, o.v), (o.cu_seqlens_q, o.cu_seqlens_kv, o.cu_seqlens_kv)
        grads = [_empty(x) if need else None for x, need in zip(inputs, needs, strict=True)]
        for grad, cu_seqlens in zip(grads, ends, strict=True):
            if grad is not None and cu_seqlens is not None:
                grad[int(cu_seqlens[-1]) :] = 0
        if self.problem.heads_kv:  # the kernels divide by it
            strides = tuple((0, 0, 0) if x is None else self._strides(x) for x in (d_out, *grads))
            if strides not in self._kernels:
                self._kernels[strides] = self._kernel(*strides)
            tensors = (*inputs, out, lse, d_out, d_lse, *grads, *ends[:2])
            pointers = (0 if x is None else x.data_ptr() for x in tensors)
            self._kernels[strides](*pointers, torch.get_num_threads())
        return Gradients(*(_as_empty_like(grad, x) for grad, x in zip(grads, inputs, strict=True)), scores=())

    def _strides(self, tensor: Tensor) -> Strides:
        return packed_strides(tensor) if self.problem.form == "varlen" else strides_of(tensor, self.problem.layout)


def _empty(x: Tensor) -> Tensor:
    """Memory for a gradient, its last dimension contiguous: where rows overlap, ``empty_like`` may have another so."""
    like = torch.empty_like(x)
    return like if like.stride(-1) == 1 or like.shape[-1] == 1 else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _as_empty_like(grad: Tensor | None, x: Tensor) -> Tensor | None:
    if grad is None or grad.stride() == torch.empty_like(x, device="meta").stride():
        return grad
    return torch.empty_like(x).copy_(grad)
