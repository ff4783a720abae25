"""Expressions printed: as a Triton function, as a CUDA C++ function, and in Python's words for messages.

Kernels hold indices in 32 bits and widen where a result may not fit (``ranges``). Triton and C++ truncate // and %;
where an argument may be negative a correction is printed. Kernels also evaluate lanes outside the problem, so every
index of a captured tensor is clamped to its dimension; inside the problem an index is read as in torch, negative ones
from the end. ``PRELUDES`` holds the few helpers that the printed text calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from attnworks.expressions.graph import INFIX, Expression, Node, OperandSpec
from attnworks.expressions.ranges import Ranges

Target = Literal["triton", "cuda"]


def in_words(nodes: Sequence[Node], place: int) -> str:
    """A node as the Python expression that it was made by; deep ones are shortened."""
    text = _words(nodes, place, 6)
    return text[1:-1] if nodes[place].op in INFIX and text.startswith("(") else text


def _words(nodes: Sequence[Node], place: int, depth: int) -> str:
    node = nodes[place]
    if node.op in ("input", "const"):
        return node.literal
    args = [_words(nodes, arg, depth - 1) if depth else "…" for arg in node.args]
    if node.op in INFIX:
        return f"({args[0]} {INFIX[node.op]} {args[1]})"
    if node.op == "load":
        return f"tensor{node.literal}" + (f"[{', '.join(args)}]" if args else "")
    if node.op in ("neg", "invert"):
        return {"neg": "-", "invert": "~"}[node.op] + args[0]
    return f"{node.kind if node.op == 'cast' else node.op}({', '.join(args)})"


# ---- functions of a kernel's language --------------------------------------------------------------------------------


def to_source(expression: Expression, target: Target, name: str = "") -> str:
    """A function that computes the expression, named ``name`` ("mask" or "score" by default).

    "triton": ``def mask(b, h, q, k, shift, operands)`` or ``score(s, b, h, q, k, shift, operands)``, to be decorated
    with ``triton.jit``; indices are int32 tensors (not constexpr) that broadcast against each other, ``operands`` is a
    tuple: one pointer for each operand, then their ``operand_facts``. The result has the shape of what it depends on,
    int1 for a mask.
    "cuda": a ``__device__`` function of ints, for a score first the float s, then one pointer for each operand.
    ``shift``: seq_kv - seq_q, which places query 0 among the keys (users' functions don't know it, ALiBi does).
    """
    name = name or ("mask" if expression.kind == "bool" else "score")
    return {"triton": _Triton, "cuda": _Cuda}[target](expression).function(name)


def operand_facts(expression: Expression) -> tuple[int, ...]:
    """Size and stride of each dimension of each operand, in a row."""
    return tuple(
        number
        for spec in expression.operands
        for dimension in zip(spec.shape, spec.strides, strict=True)
        for number in dimension
    )


class _Printer:
    """What the two languages share: values used twice, and loads, get a name; others stand where they are used."""

    temporary = "{} = {}"

    def __init__(self, expression: Expression) -> None:
        self.expression, self.nodes = expression, expression.nodes
        self.ranges = Ranges(expression)
        self.texts: list[str] = []

    def body(self) -> list[str]:
        uses = Counter(arg for node in self.nodes for arg in node.args)
        lines: list[str] = []
        for place, node in enumerate(self.nodes):
            text = self.text(node, place)
            last = place == len(self.nodes) - 1
            if not last and node.op not in ("input", "const") and (uses[place] > 1 or node.op == "load"):
                name = f"{'x' if node.op == 'load' else 't'}{len(lines)}"
                lines.append(self.temporary.format(name, _bare(text)))
                text = name
            self.texts.append(text)
        text = _bare(self.texts[-1])
        return [*lines, self.result(self.filled(text) if self.nodes[-1].op == "const" else text)]

    def text(self, node: Node, place: int) -> str:
        args = [self.texts[arg] for arg in node.args]
        if node.op == "input":
            return node.literal
        if node.op == "const":
            return self.const(node)
        if node.op == "load":
            return self.load(self.expression.operands[int(node.literal)], node)
        if node.op == "cast":
            return self.cast(args[0], node.kind, self.ranges.wide[place])
        if self.ranges.wide[place] and not any(self.ranges.wide[arg] for arg in node.args):
            widened = next(i for i, arg in enumerate(node.args) if self.nodes[arg].op != "const")
            args[widened] = self.cast(args[widened], "int", True)
        if node.op in ("floordiv", "mod"):
            sure = self.ranges.nonnegative(node.args[0]) and self.ranges.of[node.args[1]][0] > 0
            if not sure:
                return f"{'floor_div' if node.op == 'floordiv' else 'floor_mod'}({args[0]}, {args[1]})"
        return self.operation(node, args)

    def offset(self, spec: OperandSpec, node: Node) -> str:
        """Where an element lies, every index clamped to its dimension; "" for the first."""
        extent = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True))
        terms = []
        for dim, (arg, size, stride) in enumerate(zip(node.args, spec.shape, spec.strides, strict=True)):
            if size == 1 or stride == 0:
                continue
            index = self.texts[arg]
            if self.nodes[arg].op != "const":
                known = self.ranges.nonnegative(arg)
                index = (
                    self.clamped(index, self.last(spec, dim)) if known else f"index_in({index}, {self.size(spec, dim)})"
                )
                if extent >= 2**31 and not self.ranges.wide[arg]:
                    index = self.cast(index, "int", True)
            terms.append(index if stride == 1 else f"{index} * {self.stride(spec, dim)}")
        return " + ".join(terms)

    def size(self, spec: OperandSpec, dim: int) -> str:
        return str(spec.shape[dim])

    def last(self, spec: OperandSpec, dim: int) -> str:
        return str(spec.shape[dim] - 1)

    def stride(self, spec: OperandSpec, dim: int) -> str:
        return str(spec.strides[dim])

    def const(self, node: Node) -> str:
        raise NotImplementedError

    def load(self, spec: OperandSpec, node: Node) -> str:
        raise NotImplementedError

    def cast(self, text: str, kind: str, wide: bool) -> str:
        raise NotImplementedError

    def clamped(self, index: str, last: str) -> str:
        raise NotImplementedError

    def operation(self, node: Node, args: list[str]) -> str:
        raise NotImplementedError

    def filled(self, text: str) -> str:
        """A constant result, in the shape of a score."""
        return text

    def result(self, text: str) -> str:
        raise NotImplementedError

    def function(self, name: str) -> str:
        raise NotImplementedError


class _Triton(_Printer):
    def const(self, node: Node) -> str:
        return f"float({node.literal!r})" if node.literal in ("inf", "-inf", "nan") else node.literal

    def load(self, spec: OperandSpec, node: Node) -> str:
        at = self.offset(spec, node)
        text = f"tl.load(operands[{spec.index}]" + (f" + {at})" if at else ")")
        narrow = {torch.bfloat16: "float32", torch.float16: "float32"} | dict.fromkeys(_SMALL_INTS, "int32")
        return f"{text}.to(tl.{narrow[spec.dtype]})" if spec.dtype in narrow else text

    def cast(self, text: str, kind: str, wide: bool) -> str:
        return f"{text}.to(tl.{'float32' if kind == 'float' else 'int64' if wide else 'int32'})"

    def clamped(self, index: str, last: str) -> str:
        return f"tl.minimum({_bare(index)}, {last})"

    # Sizes and strides come with the call, so that other lengths run the same compiled kernel.

    def size(self, spec: OperandSpec, dim: int) -> str:
        return f"operands[{self._facts(spec) + 2 * dim}]"

    def last(self, spec: OperandSpec, dim: int) -> str:
        return f"{self.size(spec, dim)} - 1"

    def stride(self, spec: OperandSpec, dim: int) -> str:
        return f"operands[{self._facts(spec) + 2 * dim + 1}]"

    def _facts(self, spec: OperandSpec) -> int:
        """Where ``operand_facts`` of this operand begin."""
        specs = self.expression.operands
        return len(specs) + 2 * sum(len(before.shape) for before in specs[: spec.index])

    def operation(self, node: Node, args: list[str]) -> str:
        if node.op in INFIX:
            return f"({args[0]} {INFIX[node.op]} {args[1]})"
        if node.op in ("neg", "invert"):
            return f"({'-' if node.op == 'neg' else '~'}{args[0]})"
        args = [_bare(arg) for arg in args]
        if node.op in ("minimum", "maximum") and node.kind == "float":
            args.append("propagate_nan=tl.PropagateNan.ALL")
        return f"{'' if node.op == 'tanh' else 'tl.'}{node.op}({', '.join(args)})"

    def filled(self, text: str) -> str:
        return f"tl.full(s.shape, {text}, s.dtype)"

    def result(self, text: str) -> str:
        return f"return {text}"

    def function(self, name: str) -> str:
        inputs = "b, h, q, k, shift" if self.expression.kind == "bool" else "s, b, h, q, k, shift"
        return "\n    ".join([f"def {name}({inputs}, operands):", *self.body()]) + "\n"


class _Cuda(_Printer):
    temporary = "const auto {} = {};"

    def const(self, node: Node) -> str:
        if node.kind == "bool":
            return node.literal.lower()
        if node.kind == "float":
            special = {"inf": "0x7f800000", "-inf": "0xff800000", "nan": "0x7fc00000"}
            return f"__int_as_float({special[node.literal]})" if node.literal in special else f"{node.literal}f"
        return node.literal if abs(int(node.literal)) < 2**31 else f"{node.literal}ll"

    def load(self, spec: OperandSpec, node: Node) -> str:
        text = f"operand{spec.index}[{self.offset(spec, node) or 0}]"
        if spec.dtype in (torch.bfloat16, torch.float16):
            return f"static_cast<float>({text})"
        return f"static_cast<int>({text})" if spec.dtype in _SMALL_INTS else text

    def cast(self, text: str, kind: str, wide: bool) -> str:
        return f"static_cast<{'float' if kind == 'float' else 'long long' if wide else 'int'}>({_bare(text)})"

    def clamped(self, index: str, last: str) -> str:
        return f"minimum({_bare(index)}, {last})"

    def operation(self, node: Node, args: list[str]) -> str:
        if node.op == "div" and all(self.nodes[arg].kind != "float" for arg in node.args):
            args = [self.cast(arg, "float", False) for arg in args]
        if node.op in INFIX:
            sign = INFIX[{"floordiv": "div"}.get(node.op, node.op)]
            return f"({args[0]} {sign} {args[1]})"
        if node.op in ("neg", "invert"):
            return f"({'-' if node.op == 'neg' else '!' if node.kind == 'bool' else '~'}{args[0]})"
        if node.op == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        return f"{node.op}({', '.join(_bare(arg) for arg in args)})"

    def result(self, text: str) -> str:
        return f"return {text};"

    def function(self, name: str) -> str:
        kind = self.expression.kind
        inputs = [] if kind == "bool" else ["float s"]
        inputs += [f"int {index}" for index in ("b", "h", "q", "k", "shift")]
        inputs += [f"const {_C_TYPES[spec.dtype]}* operand{spec.index}" for spec in self.expression.operands]
        head = f"__device__ __forceinline__ {kind} {name}({', '.join(inputs)}) {{"
        return "\n    ".join([head, *self.body()]) + "\n}\n"


def _bare(text: str) -> str:
    """Without the brackets around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


_SMALL_INTS = (torch.uint8, torch.int8, torch.int16)
_C_TYPES = {
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
}

# tanh near 0 by its series, elsewhere by exp, which overflows to the right limit; both within a few units in fp32.
PRELUDES: dict[Target, str] = {
    "triton": """
@triton.jit
def floor_div(a, b):
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def floor_mod(a, b):
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def index_in(index, size):
    index = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def tanh(x):
    square = x * x
    near = x + x * square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869488)))
    return tl.where(square < 0.04, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
""",
    "cuda": """
template <class A, class B> __device__ __forceinline__ auto floor_div(A a, B b) {
    const auto quotient = a / b, rest = a - quotient * b;
    return rest != 0 && (rest < 0) != (b < 0) ? quotient - 1 : quotient;
}
template <class A, class B> __device__ __forceinline__ auto floor_mod(A a, B b) {
    const auto rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class A, class B> __device__ __forceinline__ auto minimum(A a, B b) { return a < b || a != a ? a : b; }
template <class A, class B> __device__ __forceinline__ auto maximum(A a, B b) { return a > b || a != a ? a : b; }
template <class A> __device__ __forceinline__ A index_in(A index, long long size) {
    index = index < 0 ? static_cast<A>(index + size) : index;
    return index < 0 ? 0 : index >= size ? static_cast<A>(size - 1) : index;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
""",
}
