"""The CPU backend's backward calls: memory for the gradients, and the native kernel for its strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnworks.backends import Gradients, Needs
from attnworks.backends.cpu.modifiers import Modifiers
from attnworks.modifiers import grad_sink
from attnworks.problem import Operands, Problem, Strides, packed_strides, strides_of


class Backward:
    """``run`` is a ``BackwardLauncher``. ``forward``: the native forward whose tiles are the backward's; None without
    heads, for the kernels divide by them."""

    def __init__(self, problem: Problem, modifiers: Modifiers, native: Any, forward: Any) -> None:
        self.problem, self._modifiers, self._native, self._forward = problem, modifiers, native, forward
        # By the strides of what autograd hands over and of the gradients, which the problem doesn't know.
        self._kernels: dict[tuple[Strides, ...], Any] = {}

    def run(
        self, o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        inputs, ends = (o.q, o.k, o.v), (o.cu_seqlens_q, o.cu_seqlens_kv, o.cu_seqlens_kv)
        grads = [_empty(x) if need else None for x, need in zip(inputs, needs[:3], strict=True)]
        for grad, cu_seqlens in zip(grads, ends, strict=True):
            if grad is not None and cu_seqlens is not None:
                grad[int(cu_seqlens[-1]) :] = 0
        biases, steps = self._biases(o, needs)
        if self._forward is not None:
            strides = tuple((0, 0, 0) if x is None else self._strides(x) for x in (d_out, *grads))
            if strides not in self._kernels:
                self._kernels[strides] = self._native.Backward(self._forward, *strides)
            tensors = (*inputs, out, lse, d_out, d_lse, *grads, *ends[:2])
            pointers = (0 if x is None else x.data_ptr() for x in tensors)
            reads, _alive = self._modifiers.operands(o)
            self._kernels[strides](*pointers, torch.get_num_threads(), reads, steps)
        scores = [None if x is None else x.view(of.shape).to(of.dtype) for x, of in zip(biases, o.scores, strict=True)]
        for term in self.problem.scores:
            if term.kind == "sink" and term.operand is not None and needs[3 + term.operand.index]:
                scores[term.operand.index] = self._sink(o.scores[term.operand.index], out, lse, d_out, d_lse)
        d_q, d_k, d_v = (_as_empty_like(grad, x) for grad, x in zip(grads, inputs, strict=True))
        return Gradients(d_q, d_k, d_v, tuple(scores))

    def _biases(self, o: Operands, needs: Needs) -> tuple[list[Tensor | None], list[Any]]:
        """Zeros in fp32 for the gradients of the biases among the scores' operands that are asked for, and what the
        kernel is told of them: (step, address, strides)."""
        sums: list[Tensor | None] = [None] * len(o.scores)
        told = []
        for step, term in enumerate(term for term in self.problem.scores if term.kind != "sink"):
            if term.kind != "bias" or term.operand is None or not needs[3 + term.operand.index]:
                continue
            shape = o.scores[term.operand.index].shape
            made = torch.zeros((1,) * (4 - len(shape)) + tuple(shape), dtype=torch.float32, device="cpu")
            strides = [0 if size == 1 else stride for size, stride in zip(made.shape, made.stride(), strict=True)]
            sums[term.operand.index] = made
            told.append((step, made.data_ptr(), strides))
        return sums, told

    def _sink(self, sink: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
        delta = (out.float() * d_out.float()).sum(-1)
        if self.problem.form == "varlen" or self.problem.layout == "bshd":  # rows before heads
            delta = delta.transpose(-1, -2)
        if d_lse is not None:
            delta = delta - d_lse
        return grad_sink(sink, lse, delta)

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
