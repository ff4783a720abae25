"""Inputs on another device: whole storages are copied, so that strides, offsets and poison stay."""

from __future__ import annotations

import types
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnworks.scores import ALiBi, Bias, Sink
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.packing import as_bytes


class OnDevice:
    """Copies of a case's tensors on a device, one storage there for each storage here.

    ``inputs`` are the same call on the device, ``values`` excepted, which no call gets. Gradients flow through the
    copies to the tensors here. ``write_back`` brings what a call changed of its inputs back into them.
    """

    def __init__(self, inputs: Inputs, device: str) -> None:
        self.device = torch.device(device)
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        names = [f.name for f in fields(inputs) if f.name not in ("case", "values")]
        self.inputs = replace(inputs, **{name: self._moved(getattr(inputs, name)) for name in names})

    def write_back(self) -> None:
        for here, there in self._storages.values():
            here.copy_(there)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Copy.apply(value, self) if value.requires_grad else self.copy(value)  # type: ignore[no-untyped-call]
        if isinstance(value, list):
            return [self._moved(one) for one in value]
        if isinstance(value, ALiBi | Bias | Sink):
            return type(value)(*(self._moved(operand) for operand in vars(value).values()))
        if isinstance(value, types.FunctionType) and value.__closure__:
            cells = tuple(types.CellType(self._moved(cell.cell_contents)) for cell in value.__closure__)
            return types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        return value

    def copy(self, tensor: Tensor) -> Tensor:
        """A view of the copied storage."""
        here = as_bytes(tensor.detach())
        if here.data_ptr() not in self._storages:
            self._storages[here.data_ptr()] = here, torch.empty_like(here, device=self.device).copy_(here)
        there = self._storages[here.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return view.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: OnDevice) -> Tensor:
        return target.copy(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.cpu(), None
