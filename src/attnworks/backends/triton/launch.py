"""From a Problem and a Plan to launches of the kernels, with as little host work for each call as Triton allows.

Triton's own ``kernel[grid](...)`` looks at every argument of every launch to find the compiled variant. All it would
look at is settled by the Problem, but for one thing: whether pointers are aligned to 16 bytes. So a ``Launch`` keeps
the compiled kernel for each pattern of alignment and hands its arguments straight to the driver, pointers as numbers.
Triton's interpreter, which runs kernels on a CPU, has no compiled kernel, and always takes Triton's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnworks.backends.triton.plans import ALIGNMENT, block
from attnworks.problem import Strides

Sizes = tuple[int, int, int]

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Launches with tensors of device "meta", which have no memory: noted for ``compile.py``, which compiles them for a GPU
# that need not be here.
NOTED: list[tuple[Launch, tuple[Any, ...]]] = []


class Described(TensorDescriptor):  # type: ignore[misc]
    """A tensor that a kernel reads in blocks through a tensor descriptor. Where the card has a copy engine (NVIDIA from
    compute capability 9.0) each block is one copy that it makes by itself.

    What Triton would check at each call ``plans.describable`` and ``aligned`` have found out before.
    """

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding = "zero"

    @property
    def device(self) -> torch.device:
        return self.base.device


@lru_cache(maxsize=256)
def describer(
    shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...]
) -> Callable[[Tensor], Described]:
    """What describes tensors of this shape; ``strides`` are those of all dimensions but the last."""
    # A dimension of size 1 may have any stride, also one that a descriptor can't have.
    steps = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides, strict=True)] + [1]
    sizes, blocks = list(shape), list(block_shape)
    return lambda tensor: Described(tensor, sizes, steps, blocks)


def describer_of_rows(shape: Sizes, dim: int, strides: Strides, tile: int) -> Callable[[Tensor], Described]:
    """For tensors of ``shape`` (batch, heads, rows) and ``dim`` columns, in blocks of ``tile`` whole rows."""
    return describer((*shape, dim), strides, (1, 1, tile, block(dim)))


def aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


class Launch:
    """One kernel with everything fixed but the tensors.

    ``kernel``: the jitted function; ``grid``: up to three sizes; ``fixed``: its other arguments by name, ``options``:
    ``num_warps``, ``num_stages``. Called with what varies, by position, first in the kernel's signature: tensors, also
    described ones, None, or tuples of tensors and numbers.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: dict[str, Any], **options: int) -> None:
        self.kernel, self.options = kernel, options
        self.grid = (*grid, 1, 1)[:3]
        self.fixed = fixed
        self.empty = 0 in grid
        self.compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *varying: Any) -> None:
        if self.empty:
            return
        if INTERPRETED:
            self.kernel[self.grid](*varying, **self.fixed, **self.options)
            return
        device = varying[0].device.index
        if device is None:
            NOTED.append((self, varying))
            return
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):  # kernels launch on the current device, whatever their tensors' is
                self(*varying)
            return
        seen: list[Any] = [device]
        arguments = [_argument(value, seen) for value in varying]
        key = tuple(seen)
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel[self.grid](*varying, **self.fixed, **self.options)
            names = self.kernel.arg_names[len(varying) :]
            self.compiled[key] = compiled, tuple(self.fixed[name] for name in names)
            return
        compiled, rest = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        metadata = compiled.packed_metadata
        compiled.run(*self.grid, stream, compiled.function, metadata, None, None, None, *arguments, *rest)


def _argument(value: Any, seen: list[Any]) -> Any:
    """``value`` as the driver wants it; what Triton's specialisation depends on is added to ``seen``."""
    if isinstance(value, Tensor):
        pointer = value.data_ptr()
        seen.append(pointer % 16 == 0)
        return pointer
    if isinstance(value, Described):
        return value
    if isinstance(value, tuple):
        seen.append(len(value))
        return tuple([_argument(part, seen) for part in value])
    # None, or a number, which is specialised by being 1, a multiple of 16, or more than 31 bits long.
    seen.append(None if value is None else (value == 1, value % 16 == 0, value.bit_length() > 31))
    return value
