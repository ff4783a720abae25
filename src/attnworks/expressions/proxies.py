"""Stand-ins for indices and scores: whatever is done to one becomes a node of an expression, or a readable refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnworks.expressions.graph import FLOAT_FUNCTIONS, INFIX, READ_AS, Builder, Kind, NotTraced
from attnworks.expressions.source import in_words

_DTYPES: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
_CONVERSIONS: dict[torch.dtype, Kind] = {
    torch.bool: "bool",
    torch.int32: "int",
    torch.int64: "int",
    torch.float32: "float",
    torch.float64: "float",
}

# torch's other names for operations.
_ALIASES = {
    "true_divide": "div",
    "divide": "div",
    "truediv": "div",
    "multiply": "mul",
    "subtract": "sub",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "greater": "gt",
    "less": "lt",
    "greater_equal": "ge",
    "less_equal": "le",
    "not_equal": "ne",
    "negative": "neg",
    "absolute": "abs",
    "bitwise_not": "invert",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "special_expit": "sigmoid",
    "min": "minimum",
    "expit": "sigmoid",
    "max": "maximum",
    "clip": "clamp",
    "not": "invert",
    "special_erf": "erf",
    "pow": "power",
}
_REFLECTED = ("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rand", "ror", "rxor", "rdiv")
_METADATA = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride", "len", "requires_grad", "layout")


class Proxy:
    """One value of a traced function: an index, the score, or what was made of them."""

    def __init__(self, recorder: Recorder, place: int) -> None:
        self._recorder, self.place = recorder, place

    @property
    def kind(self) -> Kind:
        return self._recorder.builder.kind(self.place)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    def __repr__(self) -> str:
        return in_words(self._recorder.builder.nodes, self.place)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # x.where(condition, other)
            return lambda condition, other: apply(self._recorder, name, (condition, self, other), {})
        return lambda *args, **kwargs: apply(self._recorder, name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached where no ``Recorder`` is: within torch's own Python code that the recorder called."""
        raise NotTraced(f"uses {_name(function)}")

    def _refuse(self, what: str) -> NoReturn:
        raise NotTraced(f"{what} {self}")

    def __bool__(self) -> bool:
        raise NotTraced(f"branches on {self} (if, and, or, not, min, max): use torch.where, &, | or ~")

    def __index__(self) -> int:
        self._refuse("needs a Python number for")

    __int__ = __len__ = __index__

    def __float__(self) -> float:
        self._refuse("needs a Python number for")

    def __iter__(self) -> NoReturn:
        self._refuse("iterates over")

    def __contains__(self, _: object) -> bool:
        self._refuse("searches in")

    def __getitem__(self, _: object) -> NoReturn:
        self._refuse("indexes")

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: apply(self._recorder, name, (self, *others), {})


for _op in (*INFIX, "truediv", "neg", "abs", "invert", "pow", "pos", "rpow", "matmul", "lshift", "rshift", *_REFLECTED):
    setattr(Proxy, f"__{_op}__", _operator(_op))


class Row:
    """A captured tensor indexed by fewer indices than it has dimensions, e.g. doc[b] of doc[b][q]."""

    def __init__(self, recorder: Recorder, tensor: Tensor, indices: tuple[object, ...]) -> None:
        self._recorder, self._tensor, self._indices = recorder, tensor, indices

    def __getitem__(self, index: object) -> object:
        return self._recorder.index(self._tensor, self._indices + (index if isinstance(index, tuple) else (index,)))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotTraced(f"uses .{name} on a row of a captured tensor: index all its {self._tensor.dim()} dimensions")

    __torch_function__ = Proxy.__torch_function__  # so that torch hands it to the recorder


class Recorder(TorchFunctionMode):
    """Sees every torch function that the traced function calls, also ``table[h]`` of a tensor that is no stand-in."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.builder = builder
        self.operands: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(function)
        flat = [*args, *kwargs.values()]
        if name == "getitem" and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return self.index(args[0], index)
        if any(isinstance(value, Proxy | Row) for value in flat):
            if function is Tensor.where:
                args = (args[1], args[0], *args[2:])
            return apply(self, name, args, kwargs)
        if any(isinstance(value, Tensor) for value in flat):
            if name in _METADATA:
                return function(*args, **kwargs)
            raise NotTraced(f"computes {name} of a captured tensor: compute it outside the function")
        if name in ("tensor", "scalar_tensor", "as_tensor") and isinstance(args[0], bool | int | float):
            return args[0]
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            raise NotTraced(f"makes a tensor by {name}: make it outside the function")
        return result

    def index(self, tensor: Tensor, indices: tuple[object, ...]) -> object:
        """The element of a captured tensor, or the row where indices are missing."""
        if tensor.dtype not in READ_AS:
            raise NotTraced(f"captures a tensor of {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise NotTraced(f"captures a tensor of layout {tensor.layout}")
        if len(indices) > tensor.dim():
            raise NotTraced(f"indexes a captured tensor of shape {tuple(tensor.shape)} by {len(indices)} indices")
        places = tuple(self._index_place(index, size) for index, size in zip(indices, tensor.shape, strict=False))
        if len(indices) < tensor.dim():
            return Row(self, tensor, indices)
        number = next((i for i, known in enumerate(self.operands) if known is tensor), len(self.operands))
        if number == len(self.operands):
            self.operands.append(tensor)
        read = READ_AS[tensor.dtype]
        kind: Kind = "bool" if read == torch.bool else "int" if read == torch.int64 else "float"
        return Proxy(self, self.builder.add("load", kind, places, str(number)))

    def _index_place(self, index: object, size: int) -> int:
        if isinstance(index, Tensor):
            index = self.index(index, ())
        if isinstance(index, Proxy) and index.kind == "int" and size:
            return index.place
        if isinstance(index, int) and not isinstance(index, bool) and -size <= index < size:
            return self.builder.const(index % size)
        was = f"a {index.kind}" if isinstance(index, Proxy) else repr(index)
        raise NotTraced(f"indexes a dimension of {size} of a captured tensor by {was}: must be an int inside it")


def apply(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
    """The named operation, an operator's, a torch function's or a method's, as a node."""
    builder = recorder.builder
    if name.endswith("_"):
        raise NotTraced(f"changes {args[0]} in place by {name}")
    if name in _REFLECTED:
        name, args = name[1:], (args[1], args[0])
    logical = name.startswith("logical_")
    name = name.removeprefix("logical_")
    name = _ALIASES.get(name, name)

    def place(value: object) -> int:
        if isinstance(value, Tensor):
            value = recorder.index(value, ())
        if isinstance(value, Proxy):
            return value.place
        if isinstance(value, bool | int | float):
            return builder.const(value)
        if isinstance(value, Row):
            raise NotTraced(f"uses {name} on a row of a captured tensor: index all its dimensions")
        raise NotTraced(f"uses {name} with {type(value).__name__}")

    if logical:
        args = tuple(Proxy(recorder, builder.cast(place(arg), "bool")) for arg in args)
    if name == "clamp":
        return Proxy(recorder, _clamp(builder, place, *args, **kwargs))
    if kwargs:
        raise NotTraced(f"uses {name} with {', '.join(kwargs)}")
    cast = _cast_kind(name, args)
    count = len(args)
    if cast is not None:
        made = builder.cast(place(args[0]), cast)
    elif name in INFIX and count == 2:
        made = builder.binary(name, place(args[0]), place(args[1]))
    elif (name in FLOAT_FUNCTIONS or name in ("neg", "abs", "invert")) and count == 1:
        made = builder.unary(name, place(args[0]))
    elif name == "where" and count == 3:
        made = builder.where(*map(place, args))
    elif name in ("minimum", "maximum") and count == 2:
        made = builder.extreme(name, place(args[0]), place(args[1]))
    elif name == "power" and count == 2:
        made = builder.power(place(args[0]), args[1])
    elif name == "relu" and count == 1:
        x, zero = place(args[0]), builder.const(0)
        made = builder.where(builder.binary("le", x, zero), zero, x)
    elif name == "square" and count == 1:
        made = builder.power(place(args[0]), 2)
    elif name == "pos" and count == 1:
        made = place(args[0])
    else:
        raise NotTraced(f"uses {name}")
    return Proxy(recorder, made)


def _clamp(builder: Builder, place: Callable[[object], int], x: object, min: object = None, max: object = None) -> int:
    made = place(x)
    made = made if min is None else builder.extreme("maximum", made, place(min))
    return made if max is None else builder.extreme("minimum", made, place(max))


def _cast_kind(name: str, args: tuple[Any, ...]) -> Kind | None:
    """The kind that a conversion asks for; None for what is no conversion. Floats are never made less precise."""
    kinds: dict[str, Kind] = {"float": "float", "double": "float", "long": "int", "int": "int", "bool": "bool"}
    if name in kinds and len(args) == 1:
        return kinds[name]
    if name == "type_as" and len(args) == 2 and isinstance(args[1], Proxy):
        return args[1].kind
    if name in ("to", "type") and len(args) == 2 and isinstance(args[1], torch.dtype):
        if args[1] not in _CONVERSIONS:
            raise NotTraced(f"converts to {args[1]}")
        return _CONVERSIONS[args[1]]
    return None


def _name(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__", "__delete__"):  # of a property such as Tensor.shape
        name = str(getattr(function.__self__, "__name__", name))
    return name.strip("_") if name.startswith("__") else name
