"""Packing: a value with tensors in it as bytes and the memory of its tensors, to be built again over other memory.

Views of one storage stay views of one storage, with strides and offsets. Functions that have no importable name (the
predicates of cases) travel as their code with the globals they use, so both ends must be the same Python.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Packed:
    """``payload`` to be unpickled over copies of ``memory``, one uint8 tensor for each storage."""

    payload: bytes
    memory: list[Tensor]

    @property
    def sizes(self) -> list[int]:
        return [part.numel() for part in self.memory]


def as_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def pack(value: Any) -> Packed:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    return Packed(stream.getvalue(), list(pickler.memory.values()))


def unpack(payload: bytes, memory: Sequence[Tensor]) -> Any:
    """What was packed, with tensors that lie in ``memory``. Those that required grad are leaves that do."""
    return _Unpickler(io.BytesIO(payload), memory).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.memory: dict[int, Tensor] = {}
        self._slots: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        whole = as_bytes(obj.detach())
        key = whole.data_ptr() if whole.numel() else -1 - len(self.memory)
        slot = self._slots.setdefault(key, len(self._slots))
        self.memory.setdefault(slot, whole)
        return slot, obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset(), obj.requires_grad, id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:
            names = _names(obj.__code__)
            used = {name: obj.__globals__[name] for name in names if name in obj.__globals__}
            cells = tuple(cell.cell_contents for cell in obj.__closure__ or ())
            return _function, (marshal.dumps(obj.__code__), used, obj.__name__, obj.__defaults__, cells)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._memory = memory
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        slot, dtype, shape, strides, offset, requires_grad, identity = pid
        if identity not in self._made:  # one tensor met twice stays one leaf
            part = self._memory[slot]
            used = part[: part.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            self._made[identity] = used.as_strided(shape, strides, used.storage_offset() + offset)
            if requires_grad:
                self._made[identity].requires_grad_()
        return self._made[identity]


def _names(code: types.CodeType) -> set[str]:
    """Globals that a function and those inside it may use."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _function(code: bytes, used: dict[str, Any], name: str, defaults: Any, cells: tuple[Any, ...]) -> Any:
    closure = tuple(types.CellType(value) for value in cells)
    return types.FunctionType(marshal.loads(code), {"__builtins__": __builtins__, **used}, name, defaults, closure)
