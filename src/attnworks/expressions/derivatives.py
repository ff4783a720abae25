"""The derivative of a score function by its score, for the backward pass: dS before the function = dS after · it."""

from __future__ import annotations

import math
from functools import lru_cache

from attnworks.expressions.graph import Builder, Expression


@lru_cache(maxsize=1024)
def derivative(expression: Expression, wrt: str = "s") -> Expression:
    """d expression / d ``wrt`` as an expression of the same inputs and operands.

    Simplified where a factor is 0 or 1. Kinks as in torch: 0 for abs at 0, half for the extremes of two equal values.
    Raises ``ValueError`` for another input than "s": indices are integers.
    """
    if wrt != "s":
        raise ValueError(f"wrt: was {wrt!r}, must be 's'")
    rules = _Rules(Builder(expression.nodes))
    slopes: list[int | None] = []  # None is zero
    for place, node in enumerate(expression.nodes):
        if node.op == "input" and node.literal == wrt:
            slopes.append(rules.one)
        elif node.kind != "float" or not node.args or all(slopes[arg] is None for arg in node.args):
            slopes.append(None)
        else:
            slopes.append(rules.of(node.op, node.args, place, [slopes[arg] for arg in node.args]))
    return rules.builder.finish(rules.or_zero(slopes[-1]), expression.operands)


class _Rules:
    """The rules of differentiation; a slope of None is 0 and is never written."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.one = builder.const(1.0)

    def or_zero(self, slope: int | None) -> int:
        return self.builder.const(0.0) if slope is None else slope

    def times(self, a: int | None, b: int) -> int | None:
        if a is None or a == self.one:
            return None if a is None else self.builder.cast(b, "float")
        return a if b == self.one else self.builder.binary("mul", a, b)

    def plus(self, a: int | None, b: int | None) -> int | None:
        if a is None or b is None:
            return b if a is None else a
        return self.builder.binary("add", a, b)

    def minus(self, a: int | None) -> int | None:
        return None if a is None else self.builder.unary("neg", a)

    def where(self, condition: int, a: int | None, b: int | None) -> int | None:
        return a if a == b else self.builder.where(condition, self.or_zero(a), self.or_zero(b))

    def of(self, op: str, args: tuple[int, ...], place: int, slopes: list[int | None]) -> int | None:
        """The slope of the node at ``place`` from those of what it reads."""
        x, dx = args[0], slopes[0]
        if op == "add":
            return self.plus(dx, slopes[1])
        if op == "sub":
            return self.plus(dx, self.minus(slopes[1]))
        if op == "mul":
            return self.plus(self.times(dx, args[1]), self.times(slopes[1], x))
        if op == "div":  # (x / y)' = (x' - (x / y) y') / y
            top = self.plus(dx, self.minus(self.times(slopes[1], place)))
            return None if top is None else self.builder.binary("div", top, args[1])
        if op == "where":
            return self.where(x, slopes[1], slopes[2])
        if op in ("minimum", "maximum"):
            return self._extreme("lt" if op == "minimum" else "gt", args, slopes)
        if op == "neg":
            return self.minus(dx)
        return self.times(dx, self._inner(op, x, place)) if op not in ("floor", "ceil", "cast") else None

    def _extreme(self, first: str, args: tuple[int, ...], slopes: list[int | None]) -> int | None:
        a, b = args
        for x, bound, dx in ((a, b, slopes[0]), (b, a, slopes[1])):
            if self.builder.nodes[bound].op == "const":  # clamp, whose bounds belong to the inside
                return self.where(self.builder.binary(first.replace("t", "e"), x, bound), dx, None)
        half = self.plus(slopes[0], slopes[1])
        tie = self.times(half, self.builder.const(0.5))
        wins, ties = self.builder.binary(first, a, b), self.builder.binary("eq", a, b)
        return self.where(ties, tie, self.where(wins, slopes[0], slopes[1]))

    def _inner(self, op: str, x: int, y: int) -> int:
        """f'(x) of a function f by its name, y = f(x)."""
        b = self.builder
        if op == "exp":
            return y
        if op == "exp2":
            return b.binary("mul", b.const(math.log(2)), y)
        if op in ("log", "log2"):
            return b.binary("div", b.const(1.0 if op == "log" else 1 / math.log(2)), x)
        if op == "sqrt":
            return b.binary("div", b.const(0.5), y)
        if op == "rsqrt":  # -1/2 x^(-3/2)
            return b.binary("mul", b.const(-0.5), b.power(y, 3))
        if op == "sin":
            return b.unary("cos", x)
        if op == "cos":
            return b.unary("neg", b.unary("sin", x))
        if op == "tanh":
            return b.binary("sub", self.one, b.binary("mul", y, y))
        if op == "sigmoid":
            return b.binary("mul", y, b.binary("sub", self.one, y))
        if op == "erf":
            bell = b.unary("exp", b.unary("neg", b.binary("mul", x, x)))
            return b.binary("mul", b.const(2 / math.sqrt(math.pi)), bell)
        assert op == "abs", op
        sign = b.where(b.binary("gt", x, b.const(0)), self.one, b.const(0.0))
        return b.where(b.binary("lt", x, b.const(0)), b.const(-1.0), sign)
