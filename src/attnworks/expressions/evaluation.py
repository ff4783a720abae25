"""Expressions computed by torch, differentiable by autograd in s and in the captured tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnworks.expressions.graph import FLOAT_FUNCTIONS, READ_AS, Expression, Node

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "mod")},
    **{name: getattr(operator, name) for name in ("floordiv", "xor", "neg", "invert", "abs")},
    "and": operator.and_,
    "or": operator.or_,
    "div": operator.truediv,
    "where": torch.where,
    **{name: getattr(torch, name) for name in FLOAT_FUNCTIONS},
}


def evaluate(
    expression: Expression, inputs: Mapping[str, Tensor], operands: Sequence[Tensor], *, nearest: bool = False
) -> Tensor:
    """The expression's value for index tensors ``inputs["b"]``, "h", "q", "k" (int64) and, in a score, "s", broadcast
    against each other.

    Python's and torch's rules: // and % round down, a negative index counts from the end. An index outside its tensor
    raises torch's ``IndexError``; with ``nearest`` it reads the nearest element, or 0 in a tensor without elements.
    """
    nodes = expression.nodes
    last_use = {arg: place for place, node in enumerate(nodes) for arg in node.args}
    values: dict[int, Any] = {}
    for place, node in enumerate(nodes):
        values[place] = _value(node, [values[arg] for arg in node.args], inputs, operands, nearest)
        for arg in node.args:
            if last_use[arg] == place:
                values.pop(arg, None)  # a block of scores has many intermediate values: none outlives its use
    result = values[len(nodes) - 1]
    if isinstance(result, Tensor):
        return result
    return torch.full((), result, device=next(iter(inputs.values())).device)  # a constant, such as a derivative


def _value(node: Node, args: list[Any], inputs: Mapping[str, Tensor], operands: Sequence[Tensor], nearest: bool) -> Any:
    if node.op == "input":
        return inputs[node.literal]
    if node.op == "const":
        return node.value
    if node.op == "load":
        tensor = operands[int(node.literal)]
        if nearest:
            tensor, args = _within(tensor, args)
        found = tensor[tuple(args)] if args else tensor
        return found.to(READ_AS[tensor.dtype])
    if node.op == "cast":
        return args[0].to(torch.int64 if node.kind == "int" else torch.float32)
    if node.op in ("minimum", "maximum"):
        return getattr(torch, node.op)(*_as_tensors(args))
    return _OPERATIONS[node.op](*args)


def _within(tensor: Tensor, args: list[Any]) -> tuple[Tensor, list[Any]]:
    """Indices clamped to the tensor."""
    if tensor.numel() == 0:
        return tensor.new_zeros(()), []
    limits = [(-size, size - 1) for size in tensor.shape]
    return tensor, [
        arg.clamp(*limit) if isinstance(arg, Tensor) else min(max(arg, limit[0]), limit[1])
        for arg, limit in zip(args, limits, strict=True)
    ]


def _as_tensors(args: list[Any]) -> list[Tensor]:
    """Numbers as tensors without dimensions, which promote nothing."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    return [
        arg
        if isinstance(arg, Tensor)
        else torch.tensor(arg, dtype=torch.int64 if isinstance(arg, int) else torch.float64, device=device)
        for arg in args
    ]
