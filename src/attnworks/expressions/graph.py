"""Expressions: what a user's mask or score function computes, as an immutable list of operations.

Each node names the nodes it reads by their place in the list, and the last one is the result. Equal subexpressions are
one node. Kinds are torch's categories bool < int < float: ints are int64, floats fp32 (fp64 where s or a captured
tensor is). Captured tensors are known by their number and an ``OperandSpec``; the tensors themselves travel beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Kind = Literal["bool", "int", "float"]

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BITWISE = {"and": "&", "or": "|", "xor": "^"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
INFIX = ARITHMETIC | BITWISE | COMPARISONS
FLOAT_FUNCTIONS = (
    *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "floor", "ceil"),
)

# What a captured tensor is read as: narrow ints and floats are widened, so that all backends compute alike.
READ_AS: dict[torch.dtype, torch.dtype] = {
    torch.bool: torch.bool,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), torch.float32),
    torch.float64: torch.float64,
}


class NotTraced(Exception):
    """Why a function has no expression, in words that name the operation."""


@dataclass(frozen=True)
class OperandSpec:
    """A tensor that travels beside a spec: its place among the operands and what a kernel must know of it."""

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool = False


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where its memory doesn't hold its values: torch negates some tensors lazily (such as
    ``x.conj().imag``), and has zeros without memory."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


def kernel_operand(tensor: Tensor, name: str) -> Tensor:
    """A mask's or score's tensor as kernels read it: ``in_memory``. ``TypeError`` where it is sparse or nested."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise TypeError(f"{name}: was {kind}, must be torch.strided")
    return in_memory(tensor)


def operand_spec(tensor: Tensor, index: int) -> OperandSpec:
    return OperandSpec(
        index, tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad
    )


@dataclass(frozen=True)
class Node:
    """One operation. ``literal``: the value of a "const", the name of an "input", the operand number of a "load"."""

    op: str
    kind: Kind
    args: tuple[int, ...] = ()
    literal: str = ""

    @property
    def value(self) -> bool | int | float:
        """Of a constant."""
        return self.literal == "True" if self.kind == "bool" else {"int": int, "float": float}[self.kind](self.literal)


class Expression:
    """Nodes in the order in which they can be computed; the last is the result. ``operands``: the captured tensors'
    specs, ``index`` counting from 0. Equal expressions are one object, so that comparing and hashing cost nothing."""

    __slots__ = ("__weakref__", "nodes", "operands")
    nodes: tuple[Node, ...]
    operands: tuple[OperandSpec, ...]

    def __new__(cls, nodes: tuple[Node, ...], operands: tuple[OperandSpec, ...]) -> Expression:
        found = _KNOWN.get((nodes, operands))
        if found is None:
            found = super().__new__(cls)
            found.nodes, found.operands = nodes, operands
            _KNOWN[nodes, operands] = found
        return found

    def __reduce__(self) -> tuple[type[Expression], tuple[object, ...]]:
        return Expression, (self.nodes, self.operands)

    @property
    def kind(self) -> Kind:
        return self.nodes[-1].kind

    @property
    def operands_require_grad(self) -> bool:
        """Whether a captured tensor requires grad: kernels that give no gradient to it must refuse."""
        return any(spec.requires_grad for spec in self.operands)

    def reads(self, name: str) -> bool:
        """Whether the result depends on an input ("s", "b", "h", "q" or "k")."""
        return any(node.op == "input" and node.literal == name for node in self.nodes)

    def __str__(self) -> str:
        from attnworks.expressions.source import in_words  # which imports this file

        return in_words(self.nodes, len(self.nodes) - 1)

    def __repr__(self) -> str:
        return f"Expression({self})"


_KNOWN: WeakValueDictionary[tuple[tuple[Node, ...], tuple[OperandSpec, ...]], Expression] = WeakValueDictionary()


def highest(*kinds: Kind) -> Kind:
    """What torch makes of values of these kinds."""
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


class Builder:
    """Appends nodes, giving each its kind by torch's rules; an operation that is there already is found, not added."""

    def __init__(self, nodes: tuple[Node, ...] = ()) -> None:
        self.nodes = list(nodes)
        self._places = {node: place for place, node in enumerate(nodes)}

    def add(self, op: str, kind: Kind, args: tuple[int, ...] = (), literal: str = "") -> int:
        node = Node(op, kind, args, literal)
        place = self._places.setdefault(node, len(self.nodes))
        if place == len(self.nodes):
            self.nodes.append(node)
        return place

    def kind(self, place: int) -> Kind:
        return self.nodes[place].kind

    def const(self, value: bool | int | float) -> int:
        kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        return self.add("const", kind, literal=repr(value))

    def cast(self, place: int, kind: Kind) -> int:
        """The value as another kind; floats keep their precision. Float to int truncates, as in torch."""
        node = self.nodes[place]
        if node.kind == kind:
            return place
        if node.op == "const":
            return self.const({"bool": bool, "int": int, "float": float}[kind](node.value))
        return self.binary("ne", place, self.const(0)) if kind == "bool" else self.add("cast", kind, (place,))

    def _joined(self, *places: int) -> tuple[int, ...]:
        """The values, bools raised to the highest kind among them; torch, Triton and C mix ints and floats alike."""
        kind = highest(*map(self.kind, places))
        return tuple(self.cast(place, kind) if self.kind(place) == "bool" else place for place in places)

    def binary(self, op: str, a: int, b: int) -> int:
        if op in ("add", "mul") and self.kind(a) == self.kind(b) == "bool":
            op = {"add": "or", "mul": "and"}[op]  # as in torch
        kinds = (self.kind(a), self.kind(b))
        if op in BITWISE and "float" in kinds:
            raise NotTraced(f"uses {INFIX[op]} on a float")
        if op in ("floordiv", "mod") and "float" in kinds:
            raise NotTraced(f"uses {INFIX[op]} on a float: write torch.floor(a / b)")
        if op not in BITWISE and op not in ("eq", "ne") and kinds == ("bool", "bool"):
            if op == "sub":
                raise NotTraced("subtracts bools: use ^")
            a, b = self.cast(a, "int"), self.cast(b, "int")
        a, b = self._joined(a, b)
        if op in COMPARISONS:
            return self.add(op, "bool", (a, b))
        kind = "float" if op == "div" else highest(self.kind(a), self.kind(b))
        return self.add(op, kind, (a, b))

    def unary(self, op: str, a: int) -> int:
        kind = self.kind(a)
        if op in FLOAT_FUNCTIONS:
            if op in ("floor", "ceil") and kind == "int":
                return a
            return self.add(op, "float", (self.cast(a, "float"),))
        if op == "invert" and kind == "float":
            raise NotTraced("uses ~ on a float")
        if op in ("neg", "abs") and kind == "bool":
            raise NotTraced(f"uses {op} on a bool: use ~ or torch.where")
        return self.add(op, kind, (a,))

    def where(self, condition: int, a: int, b: int) -> int:
        if self.kind(condition) != "bool":
            raise NotTraced("uses torch.where with a condition that is no bool")
        a, b = self._joined(a, b)
        return self.add("where", highest(self.kind(a), self.kind(b)), (condition, a, b))

    def extreme(self, op: str, a: int, b: int) -> int:
        """minimum or maximum, both arguments of one kind."""
        kind = highest(self.kind(a), self.kind(b))
        if kind == "bool":
            raise NotTraced(f"uses torch.{op} on bools: use & or |")
        return self.add(op, kind, (self.cast(a, kind), self.cast(b, kind)))

    def power(self, a: int, exponent: object) -> int:
        """Integer exponents by products, so that every target rounds alike; 0.5 is a square root."""
        if isinstance(exponent, bool) or not isinstance(exponent, int | float):
            raise NotTraced(f"uses ** {exponent!r}: exponents are constants")
        if exponent == 0.5:
            return self.unary("sqrt", a)
        if exponent % 1 != 0:
            raise NotTraced(f"uses ** {exponent!r}: exponents are integers or 0.5")
        if not 1 <= abs(exponent) <= 16 or (exponent < 0 and self.kind(a) != "float"):
            raise NotTraced(f"uses ** {exponent!r}: exponents lie in 1..16, of floats also in -16..-1")
        if isinstance(exponent, float) or self.kind(a) == "bool":
            a = self.cast(a, "float" if isinstance(exponent, float) else "int")
        result, square, left = None, a, abs(int(exponent))
        while left:
            if left & 1:
                result = square if result is None else self.binary("mul", result, square)
            left >>= 1
            square = self.binary("mul", square, square) if left else square
        assert result is not None, "the exponent is not 0"
        return self.binary("div", self.const(1.0), result) if exponent < 0 else result

    def finish(self, root: int, operands: tuple[OperandSpec, ...]) -> Expression:
        """The expression of ``root``: only what it needs, numbered in the order of its own reading."""
        places: dict[int, int] = {}
        nodes: list[Node] = []
        stack = [root]
        while stack:
            place = stack[-1]
            missing = [arg for arg in self.nodes[place].args if arg not in places]
            if place in places or not missing:
                stack.pop()
                if place not in places:
                    node = self.nodes[place]
                    places[place] = len(nodes)
                    nodes.append(Node(node.op, node.kind, tuple(places[arg] for arg in node.args), node.literal))
            else:
                stack.extend(reversed(missing))
        return Expression(tuple(nodes), operands)
