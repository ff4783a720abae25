"""A problem's score modifiers, and its mask apart from closed bounds, each as one expression for kernels to inline.

Softcap, ALiBi, bias and boolean masks become expressions like those of users' functions, so that a kernel has one way
to apply them all and a derivative of the whole. A sink is no function of a score and stays apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnworks.expressions import Expression, OperandSpec
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.graph import Builder, Kind
from attnworks.masks import Bounds, DenseMask, MaskSpec, Predicate
from attnworks.scores import ScoreSpec, ScoreTerm

_INDICES = ("b", "h", "q", "k")


def score_expression(spec: ScoreSpec) -> Expression | None:
    """What the modifiers make of s, left to right, as an expression of s, b, h, q, k, shift; None if they leave it as
    it is. Its operands are those of the scores."""
    return _chain(spec, spec)


def slope_after(spec: ScoreSpec, place: int) -> Expression:
    """d (the last score) / d (the score that modifier number ``place`` gives), as an expression of the first score: dS
    times this is the gradient of a bias at that place."""
    after = _chain(spec[place + 1 :], spec)
    builder = _Composer(_operand_specs(spec))
    score = builder.input("s")
    for term in spec[: place + 1]:
        score = builder.modified(score, term)
    if after is None:
        return builder.finish(builder.const(1.0))
    return builder.finish(builder.spliced(derivative(after), 0, {"s": score}))


def grad_sink(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of a sink's logits: its P is exp(sink - LSE), its dP is 0, so dsink = -Σ P · delta. Heads come last
    but one in ``lse`` and ``delta`` = rowsum(dO ∘ O) - dLSE."""
    probs = torch.where(lse == -math.inf, 0.0, torch.exp(sink.float()[:, None] - lse))
    each = torch.where(probs == 0.0, 0.0, probs * -delta)
    return each.sum([dim for dim in range(each.dim()) if dim != each.dim() - 2]).to(sink.dtype)


def mask_expression(spec: MaskSpec, *, bounds: bool = False) -> Expression | None:
    """Whether the mask, apart from its closed bounds, lets query q see key k; None if it has nothing but bounds. With
    ``bounds`` these are part of it, too. Its operands are those of the mask. Raises ``ValueError`` for a predicate that
    was not traced."""
    builder = _Composer(_operand_specs(spec))
    visible: int | None = None
    for term in spec:
        if isinstance(term, Bounds):
            if not bounds:
                continue
            one = builder.within(term)
        elif isinstance(term, DenseMask):
            one = builder.loaded(term.operand, "bool")
        else:
            one = builder.spliced(_traced(term), term.first, {})
        visible = one if visible is None else builder.binary("and", visible, one)
    return None if visible is None else builder.finish(visible)


def _chain(part: ScoreSpec, whole: ScoreSpec) -> Expression | None:
    builder = _Composer(_operand_specs(whole))
    score = start = builder.input("s")
    for term in part:
        score = builder.modified(score, term)
    return None if score == start else builder.finish(score)


def _traced(term: Predicate | ScoreTerm) -> Expression:
    if term.expression is None:
        raise ValueError(f"{term.name} was not traced: {term.why_not}")
    return term.expression


def _operand_specs(spec: MaskSpec | ScoreSpec) -> tuple[OperandSpec, ...]:
    """Of all terms, by their index."""
    found: dict[int, OperandSpec] = {}
    for term in spec:
        operand = getattr(term, "operand", None)
        if operand is not None:
            found[operand.index] = operand
        expression = getattr(term, "expression", None)
        if expression is not None:
            first: int = getattr(term, "first", 0)
            found |= {first + one.index: replace(one, index=first + one.index) for one in expression.operands}
    return tuple(found[index] for index in sorted(found))


class _Composer(Builder):
    """Builds one expression out of several."""

    def __init__(self, operands: Sequence[OperandSpec]) -> None:
        super().__init__()
        self.operands = tuple(operands)

    def input(self, name: str) -> int:
        return self.add("input", "float" if name == "s" else "int", (), name)

    def loaded(self, operand: OperandSpec, kind: Kind, names: Sequence[str] = _INDICES) -> int:
        """The element at (b, h, q, k) of a tensor that broadcasts along them from the right."""
        names = names[len(names) - len(operand.shape) :]
        places = [
            self.const(0) if size == 1 else self.input(name) for name, size in zip(names, operand.shape, strict=True)
        ]
        return self.add("load", kind, tuple(places), str(operand.index))

    def within(self, term: Bounds) -> int:
        """Whether key k is one of the query's neighbours."""
        ahead = self.binary("sub", self.input("k"), self.input("q"))
        if term.align == "bottom-right":
            ahead = self.binary("sub", ahead, self.input("shift"))
        sides = [
            self.binary(relation, ahead, self.const(edge))
            for relation, edge in (("ge", None if term.left is None else -term.left), ("le", term.right))
            if edge is not None
        ]
        return sides[0] if len(sides) == 1 else self.binary("and", *sides)

    def modified(self, score: int, term: ScoreTerm) -> int:
        """``score`` after one modifier (their formulas: ``scores.py``)."""
        if term.kind == "softcap":
            cap = self.const(term.cap)
            return self.binary("mul", cap, self.unary("tanh", self.binary("div", score, cap)))
        if term.kind == "function":
            return self.spliced(_traced(term), term.first, {"s": score})
        if term.operand is None or term.kind == "sink":
            return score
        if term.kind == "bias":
            return self.binary("add", score, self.loaded(term.operand, "float"))
        slope = self.loaded(term.operand, "float", ("b", "h"))
        origin = self.binary("add", self.input("q"), self.input("shift"))
        distance = self.unary("abs", self.binary("sub", origin, self.input("k")))
        return self.binary("sub", score, self.binary("mul", slope, self.cast(distance, "float")))

    def spliced(self, expression: Expression, first: int, inputs: dict[str, int]) -> int:
        """Another expression's result, its operands counted from ``first`` and some of its inputs replaced."""
        places: list[int] = []
        for node in expression.nodes:
            if node.op == "input" and node.literal in inputs:
                places.append(inputs[node.literal])
                continue
            literal = str(first + int(node.literal)) if node.op == "load" else node.literal
            places.append(self.add(node.op, node.kind, tuple(places[arg] for arg in node.args), literal))
        return places[-1]

    def finish(self, root: int, operands: tuple[OperandSpec, ...] | None = None) -> Expression:
        return super().finish(root, self.operands if operands is None else operands)
