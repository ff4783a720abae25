"""Tracing: a user's function is called once with stand-ins for its indices, which write down what is done to them.

What a function read besides its arguments (closure, defaults, globals) is kept with its expression, and the function is
traced again once any of it is another object. The values of tensors are read at each call and may change; a function
that reads any other mutable object is traced at every call, as is a callable that is no plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import ref

from torch import Tensor

from attnworks.expressions.graph import Builder, Expression, Kind, NotTraced, operand_spec
from attnworks.expressions.proxies import Proxy, Recorder
from attnworks.expressions.reads import Reads

MASK_INPUTS = ("b", "h", "q", "k")
SCORE_INPUTS = ("s", *MASK_INPUTS)


class Traced(NamedTuple):
    """A function's expression and the tensors it captured; or, in words, why there is none."""

    expression: Expression | None
    operands: tuple[Tensor, ...]
    why_not: str = ""


def trace(function: Callable[..., Any], inputs: tuple[str, ...]) -> Traced:
    """Trace a mask (``MASK_INPUTS``, a bool result) or a score function (``SCORE_INPUTS``, a float result).

    The function is called once. A function seen before is not called again unless something it reads was replaced.
    """
    known = getattr(function, _ATTRIBUTE, None)
    if known is not None and known.inputs == inputs and known.is_current(function):
        return cast("Traced", known.traced)
    traced = _trace(function, inputs)
    if type(function) is FunctionType:
        reads = Reads.of(function)
        if reads is not None:
            setattr(function, _ATTRIBUTE, _Known(function, inputs, traced, reads))
    return traced


def _trace(function: Callable[..., Any], inputs: tuple[str, ...]) -> Traced:
    builder = Builder()
    recorder = Recorder(builder)
    arguments = [Proxy(recorder, builder.add("input", "float" if name == "s" else "int", (), name)) for name in inputs]
    must: Kind = "float" if "s" in inputs else "bool"
    try:
        with recorder:
            result = function(*arguments)
        if not isinstance(result, Proxy):
            raise NotTraced(f"returns {type(result).__name__}, not something made from its arguments")
        if result.kind != must:
            raise NotTraced(f"returns {result.kind}, must return {must}")
    except NotTraced as reason:
        return Traced(None, (), str(reason))
    except Exception as error:  # whatever the user's code makes of stand-ins
        return Traced(None, (), f"{type(error).__name__}: {error}")
    if any(tensor.is_neg() for tensor in recorder.operands):  # its memory holds other values than it
        return Traced(None, (), "captures a tensor that torch negates lazily: clone() it")
    specs = tuple(operand_spec(tensor, index) for index, tensor in enumerate(recorder.operands))
    return Traced(builder.finish(result.place, specs), tuple(recorder.operands))


_ATTRIBUTE = "__attnworks_traced__"


class _Known:
    """What is known of a function, kept on the function itself so that it goes with it."""

    __slots__ = ("inputs", "looks", "owner", "reads", "traced")

    def __init__(self, function: FunctionType, inputs: tuple[str, ...], traced: Traced, reads: Reads) -> None:
        self.owner = ref(function)  # functools.wraps copies attributes to another function
        self.inputs, self.traced, self.reads = inputs, traced, reads
        tensors = {id(tensor): tensor for tensor in (*traced.operands, *reads.tensors())}
        self.looks = tuple((tensor, _look(tensor)) for tensor in tensors.values())

    def is_current(self, function: Callable[..., Any]) -> bool:
        if self.owner() is not function or not self.reads.are_current(function):
            return False
        return all(_look(tensor) == look for tensor, look in self.looks)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a function that is pickled by value is traced anew


def _look(tensor: Tensor) -> Any:
    """What ``OperandSpec`` holds: ``.data`` and ``resize_`` change it under the same object."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
