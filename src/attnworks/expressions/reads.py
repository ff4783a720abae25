"""What a function reads besides its arguments, and whether that is still what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FIXED = (type(None), bool, int, float, str, torch.dtype, torch.device, BuiltinFunctionType)
_NOTHING = object()


class Reads(NamedTuple):
    """Closure cells, global names and functions with their code and defaults, each with what was there.

    The first function stands as None: a function that held itself would be freed late.
    """

    cells: tuple[tuple[CellType, object], ...]
    names: tuple[tuple[dict[str, Any], str, object], ...]
    functions: tuple[tuple[FunctionType | None, object, object, object], ...]

    def are_current(self, function: Callable[..., Any]) -> bool:
        for cell, value in self.cells:
            if _contents(cell) is not value:
                return False
        for namespace, name, value in self.names:
            if namespace.get(name, _NOTHING) is not value:
                return False
        for other, code, defaults, keywords in self.functions:
            now: Any = function if other is None else other
            if now.__code__ is not code or now.__defaults__ is not defaults or now.__kwdefaults__ is not keywords:
                return False
        return True

    def tensors(self) -> Iterator[Tensor]:
        for *_, value in (*self.cells, *self.names):
            if isinstance(value, Tensor):
                yield value

    @staticmethod
    def of(function: FunctionType) -> Reads | None:
        """All that a function and the functions it calls read; None if any of it may change without being replaced."""
        cells: list[tuple[CellType, object]] = []
        names: list[tuple[dict[str, Any], str, object]] = []
        functions: list[tuple[FunctionType | None, object, object, object]] = []
        waiting, seen = [function], {function}
        while waiting:
            current = waiting.pop()
            keywords = current.__kwdefaults__
            functions.append(
                (None if current is function else current, current.__code__, current.__defaults__, keywords)
            )
            own_cells = [(cell, _contents(cell)) for cell in current.__closure__ or ()]
            space = current.__globals__
            own_names = [(space, name, space[name]) for name in sorted(_names(current.__code__)) if name in space]
            if keywords:
                own_names += [(keywords, name, value) for name, value in keywords.items()]
            cells += own_cells
            names += own_names
            for value in [*(x[-1] for x in own_cells), *(x[-1] for x in own_names), *(current.__defaults__ or ())]:
                if isinstance(value, FunctionType) and not str(value.__module__).startswith("torch."):
                    if value not in seen:
                        seen.add(value)
                        waiting.append(value)
                elif not _is_fixed(value):
                    return None
        return Reads(tuple(cells), tuple(names), tuple(functions))


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled, or emptied
        return _NOTHING


def _names(code: CodeType) -> set[str]:
    """Names that code and the functions written inside it look up; attributes' names are among them."""
    inside = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inside))


def _is_fixed(value: object) -> bool:
    """Whether it can only be replaced, not changed; tensors count, as their values are read at each call."""
    if isinstance(value, ModuleType):
        return value.__name__ in ("math", "torch") or value.__name__.startswith("torch.")
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    return isinstance(value, Tensor | FunctionType) or type(value) in _FIXED or value is _NOTHING
