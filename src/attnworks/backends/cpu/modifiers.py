"""What the native CPU kernels are told of a problem's scores and mask: steps, a sink, bounds and a tile map.

The kernels know one pair of closed bounds. Everything else that a mask says becomes a tile map (``maps.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnworks.masks import UNLIMITED, Bounds, MaskSpec, Predicate
from attnworks.problem import Operands, Problem, contiguous_strides
from attnworks.scores import ScoreSpec, ScoreTerm

if TYPE_CHECKING:
    from attnworks.backends.cpu.maps import Map

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MAX_STEPS = 8


def refusals(problem: Problem) -> list[str]:
    """What of the problem's scores and mask the native kernels cannot do."""
    functions = [term for term in problem.scores if term.kind == "function"]
    found = [f"score function {term.name} (has softcap, ALiBi, bias and sink)" for term in functions]
    if len(_steps(problem.scores)) > MAX_STEPS:
        found.append(f"{len(_steps(problem.scores))} score modifiers (at most {MAX_STEPS})")
    predicates = [term for term in problem.mask if isinstance(term, Predicate)]
    return found + [f"mask {term.name}: {term.why_not}" for term in predicates if term.expression is None]


class Modifiers:
    """Of one problem: ``bounds``, what ``modify`` tells a native kernel once, what ``operands`` gives it each call."""

    def __init__(self, problem: Problem, native: Any) -> None:
        self._native = native
        self._steps = _steps(problem.scores)
        self._sink = next((term.operand for term in problem.scores if term.kind == "sink"), None)
        bounds, rest = _split(problem.mask)
        self.bounds = (_limit(bounds.left), _limit(bounds.right), bounds.align == "top-left")
        self._map = _map(rest, problem, native) if rest else None
        self._needed = bool(self._steps or self._sink or self._map)  # anything but bounds

    def modify(self, kernel: Any) -> Any:
        """The kernel, told of the steps and the shape of the map."""
        if self._needed:
            steps = [(t.kind, t.cap, DTYPES.get(_dtype(t), "float32"), _strides(t)) for t in self._steps]
            kernel.modify(steps, self._map.layout if self._map else (0, 0, 0, 1))
        return kernel

    def operands(self, o: Operands) -> tuple[Any, tuple[Tensor, ...]]:
        """What the kernel reads, by its address, None for nothing; and tensors that must live as long as it does."""
        if not self._needed:
            return None, ()
        made = [None if t.operand is None else _readable(o.scores[t.operand.index]) for t in self._steps]
        sink = None if self._sink is None else _readable(o.scores[self._sink.index]).contiguous()
        places, bits = (None, None) if self._map is None else self._map.tensors(o)
        sink_dtype = DTYPES[sink.dtype] if sink is not None else "float32"
        addresses = [0 if x is None else x.data_ptr() for x in (sink, places, bits)]
        steps = [0 if x is None else x.data_ptr() for x in made]
        native = self._native.ModifierOperands(steps, addresses[0], sink_dtype, *addresses[1:])
        return native, tuple(x for x in (*made, sink, places, bits) if x is not None)


# ---- scores ----------------------------------------------------------------------------------------------------------


def _steps(spec: ScoreSpec) -> list[ScoreTerm]:
    """The modifiers that change a score."""
    return [term for term in spec if term.kind != "sink"]


def _dtype(term: ScoreTerm) -> torch.dtype:
    return torch.float32 if term.operand is None else term.operand.dtype


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself where the kernels read its dtype, else a copy that they do."""
    return tensor if tensor.dtype in DTYPES else tensor.to(torch.float32).contiguous()


def _strides(term: ScoreTerm) -> tuple[int, ...]:
    """Of a step's operand by batch, head, row and key, in elements; 0 where it is broadcast."""
    if term.operand is None:
        return (0, 0, 0, 0)
    shape, strides = term.operand.shape, term.operand.strides
    if term.operand.dtype not in DTYPES:
        strides = contiguous_strides(shape)
    known = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    if term.kind == "alibi":
        known += (0, 0)
    return (0,) * (4 - len(known)) + known


# ---- masks -----------------------------------------------------------------------------------------------------------


def _split(spec: MaskSpec) -> tuple[Bounds, MaskSpec]:
    """The bounds that the kernels apply, and the terms for a map.

    Of two bounds the top-left one goes into the map: it does not depend on a sequence's length, as a map must not.
    """
    bounds = sorted((term for term in spec if isinstance(term, Bounds)), key=lambda term: term.align)
    if not bounds:
        return Bounds(None, None, "bottom-right"), spec
    return bounds[0], tuple(term for term in spec if term is not bounds[0])


def _limit(extent: int | None) -> int:
    return UNLIMITED if extent is None else min(extent, UNLIMITED)


def _map(rest: MaskSpec, problem: Problem, native: Any) -> Map:
    from attnworks.backends.cpu.maps import Map  # most programs never need it

    return Map(rest, problem, native)
