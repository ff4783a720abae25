"""Masks: which keys a query may see.

A user's mask (``Causal``, ``Window``, a boolean tensor, a predicate, or an intersection of them made with ``&``) is
split into a hashable spec, which decides how a kernel is built, and the operand tensors passed beside it. A spec is a
tuple of terms; a key is visible if every term lets it through, so ``()`` hides nothing.

Positions: query i and key j of one sequence. ``shift`` places query 0 among the keys: ``seq_kv - seq_q`` for
bottom-right alignment (the last query sees the last key), 0 for top-left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from attnworks.expressions import Expression, OperandSpec, kernel_operand, operand_spec

Align = Literal["bottom-right", "top-left"]
ALIGNS = ("bottom-right", "top-left")

# "No limit" where a kernel wants an integer: beyond any sequence, far from overflowing 64 bits when added to one.
UNLIMITED = 2**40


def _check_align(owner: str, align: object) -> None:
    if align not in ALIGNS:
        raise ValueError(f"{owner} align: was {align!r}, must be one of {ALIGNS}")


def _check_extent(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Window {name}: was {value!r}, must be None or an int")
    if value < 0:
        raise ValueError(f"Window {name}: was {value}, must be None (unlimited) or >= 0")


class _Mask:
    """Gives the user's mask classes ``&``."""

    def __and__(self, other: object) -> AllOf:
        return AllOf((self, other))

    def __rand__(self, other: object) -> AllOf:
        return AllOf((other, self))


@dataclass(frozen=True)
class Causal(_Mask):
    """Query i sees keys j <= i + shift.

    ``align="bottom-right"`` (default): shift = seq_kv - seq_q, as in flash-attn 2.1 and later. ``"top-left"``: shift 0,
    as in ``torch.nn.functional.scaled_dot_product_attention(is_causal=True)``. Raises ``ValueError`` for another align.
    """

    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        _check_align("Causal", self.align)


@dataclass(frozen=True)
class Window(_Mask):
    """Query i sees keys i + shift - left <= j <= i + shift + right: neighbours beside itself.

    ``None`` is unlimited; a window of W tokens that ends at the query itself is ``Window(W - 1, 0)``. ``align`` as in
    ``Causal``. Raises ``TypeError`` or ``ValueError`` for extents that are not None or ints >= 0.
    """

    left: int | None = None
    right: int | None = None
    align: Align = "bottom-right"

    def __post_init__(self) -> None:
        _check_extent("left", self.left)
        _check_extent("right", self.right)
        _check_align("Window", self.align)


# Masks that are their own key; others are split into a spec first, whose operands come anew with each call.
OWN_KEY = (type(None), Causal, Window)


@dataclass(frozen=True, eq=False)
class AllOf(_Mask):
    """The intersection of several masks; made by ``Causal() & other``."""

    parts: tuple[object, ...]


# ---- specs: what a kernel is built for -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Closed bounds: visible keys of query i are [i + shift - left, i + shift + right]; None is unlimited."""

    left: int | None
    right: int | None
    align: Align


@dataclass(frozen=True)
class DenseMask:
    """A boolean tensor, True where visible, any broadcast of (batch, heads_q, seq_q, seq_kv)."""

    operand: OperandSpec


@dataclass(frozen=True)
class Predicate:
    """A user function ``visible = function(b, h, q, k)`` of raw indices (FlexAttention's mask_mod signature).

    Traced functions are equal if they say the same: ``expression`` is what they say, its operands are those of the mask
    from number ``first`` on, and ``function`` is None, so that nothing keeps alive what it captured. Where there is no
    expression, ``why_not`` says why, and ``function`` is called.
    """

    function: Callable[..., Any] | None
    expression: Expression | None = None
    first: int = 0
    name: str = field(default="?", compare=False)
    why_not: str = field(default="", compare=False)

    def own(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The captured tensors among the mask's operands."""
        return operands[self.first : self.first + len(self.expression.operands)] if self.expression else ()


MaskTerm = Bounds | DenseMask | Predicate
MaskSpec = tuple[MaskTerm, ...]
UserMask = Causal | Window | AllOf | Tensor | Callable[..., Any] | None


def split(mask: object) -> tuple[MaskSpec, tuple[Tensor, ...]]:
    """Split a user's mask into its spec and its operand tensors.

    Bounds of the same alignment are intersected into one. Raises ``TypeError`` if the mask, or a part of it, is not a
    mask.
    """
    bounds: dict[Align, Bounds] = {}
    others: list[MaskTerm] = []
    operands: list[Tensor] = []
    for part in flatten(mask):
        if isinstance(part, Causal | Window):
            left, right = (None, 0) if isinstance(part, Causal) else (_limit(part.left), _limit(part.right))
            if left is None and right is None:
                continue
            old = bounds.get(part.align, Bounds(None, None, part.align))
            bounds[part.align] = Bounds(_tighter(old.left, left), _tighter(old.right, right), part.align)
        elif isinstance(part, Tensor):
            if part.dtype != torch.bool:
                raise TypeError(
                    f"mask: was a tensor of dtype {part.dtype}, must be torch.bool, True where a key is visible "
                    "(for an additive mask pass scores=(Bias(tensor),))"
                )
            part = kernel_operand(part, "mask")
            others.append(DenseMask(operand_spec(part, len(operands))))
            operands.append(part)
        elif callable(part) and not isinstance(part, type):
            from attnworks.expressions.tracing import MASK_INPUTS, trace  # most programs never need it

            traced = trace(part, MASK_INPUTS)
            if traced.expression is None:
                others.append(Predicate(part, name=name_of(part), why_not=traced.why_not))
            else:
                others.append(_traced(traced.expression, len(operands), name_of(part)))
                operands += traced.operands
        else:
            raise TypeError(
                f"mask: was {part!r}, must be None, Causal(), Window(), a boolean tensor, a function (b, h, q, k), "
                "or an intersection of these made with &"
            )
    return (*bounds.values(), *others), tuple(operands)


def flatten(mask: object) -> list[object]:
    """The parts of an intersection; no part hides nothing."""
    if mask is None:
        return []
    if isinstance(mask, AllOf):
        return [leaf for part in mask.parts for leaf in flatten(part)]
    return [mask]


@lru_cache(maxsize=1024)
def _traced(expression: Expression, first: int, name: str) -> Predicate:
    return Predicate(None, expression, first, name)


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _limit(extent: int | None) -> int | None:
    """None where the extent is beyond any sequence: so large a number overflows the arithmetic on positions."""
    return None if extent is None or extent >= UNLIMITED else extent


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def closed_bounds(spec: MaskSpec) -> Bounds | None:
    """The whole mask as one pair of closed bounds, or None if it cannot be written so."""
    if not spec:
        return Bounds(None, None, "bottom-right")
    return spec[0] if len(spec) == 1 and isinstance(spec[0], Bounds) else None


def describe(spec: MaskSpec) -> str:
    """The mask in words, for tables and error messages."""
    if not spec:
        return "none"
    return " & ".join(_describe_term(term) for term in spec)


def _describe_term(term: MaskTerm) -> str:
    if isinstance(term, Predicate):
        return f"predicate {term.name}" + (f" (not traced: {term.why_not})" if term.why_not else "")
    if isinstance(term, DenseMask):
        return f"boolean tensor {term.operand.shape}"
    suffix = "" if term.align == "bottom-right" else f" {term.align}"
    if (term.left, term.right) == (None, 0):
        return "causal" + suffix
    return f"window({term.left}, {term.right}){suffix}"
