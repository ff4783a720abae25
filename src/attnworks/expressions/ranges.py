"""Which values integers in an expression may take: where 32 bits are enough, and where // and % need no correction."""

from __future__ import annotations

import torch

from attnworks.expressions.graph import Expression, Node

# Indices of batch, heads, queries and keys lie below this.
INDEX_LIMIT = 2**28

_INT32 = (-(2**31), 2**31 - 1)
_INT64 = (-(2**63), 2**63 - 1)
Range = tuple[int, int]


class Ranges:
    """For each node the values it may take (ints), and whether a kernel holds it in 64 bits."""

    def __init__(self, expression: Expression) -> None:
        self.of: list[Range] = []
        self.wide: list[bool] = []
        for node in expression.nodes:
            args = [self.of[arg] for arg in node.args]
            low, high = self._range(expression, node, args) if node.kind == "int" else (0, 1)
            if low < _INT64[0] or high > _INT64[1]:
                low, high = _INT64
            self.of.append((low, high))
            mixed = any(self.wide[arg] for arg in node.args) and node.op != "load"
            self.wide.append(node.kind == "int" and (mixed or not self.fits(len(self.of) - 1)))

    def fits(self, place: int) -> bool:
        low, high = self.of[place]
        return _INT32[0] <= low and high <= _INT32[1]

    def nonnegative(self, place: int) -> bool:
        return self.of[place][0] >= 0

    def _range(self, expression: Expression, node: Node, args: list[Range]) -> Range:
        if node.op == "input":
            return (1 - INDEX_LIMIT if node.literal == "shift" else 0), INDEX_LIMIT - 1
        if node.op == "const":
            return int(node.value), int(node.value)
        if node.op == "load":
            info = torch.iinfo(expression.operands[int(node.literal)].dtype)
            return info.min, info.max
        if node.op == "cast":
            return (0, 1) if expression.nodes[node.args[0]].kind == "bool" else _INT64
        if node.op == "where":
            args = args[1:]
        corners = [end for arg in args for end in arg]
        hull = min(corners), max(corners)
        if node.op in ("add", "sub", "mul"):
            (a, b), (c, d) = args
            results = {"add": (a + c, b + d), "sub": (a - d, b - c)}.get(node.op, (a * c, a * d, b * c, b * d))
            return min(results), max(results)
        if node.op == "neg":
            return -hull[1], -hull[0]
        if node.op == "abs":
            return 0, max(-hull[0], hull[1])
        if node.op == "floordiv":  # no divisor makes it larger than the dividend
            (a, b), (c, _) = args
            return (min(a, 0), max(b, 0)) if c > 0 else (min(a, -b), max(b, -a))
        if node.op == "mod":
            c, d = args[1]
            return (0, d - 1) if c > 0 else (min(c, 0), max(d, 0))
        if node.op in ("minimum", "maximum"):
            pick = min if node.op == "minimum" else max
            return pick(a for a, _ in args), pick(b for _, b in args)
        if node.op == "where":
            return hull
        # Bitwise: no more bits than the arguments have.
        bits = max(max(abs(low + 1), abs(high)).bit_length() for low, high in (hull, (0, 0)))
        return (0 if hull[0] >= 0 and node.op != "invert" else -(2**bits)), 2**bits - 1
