"""From a Problem and a Plan to launches of the kernels, with as little host work for each call as Triton allows.

Triton's own ``kernel[grid](...)`` looks at every argument of every launch to find the compiled variant. All it would
look at is settled by the Problem, but for one thing: whether pointers are aligned to 16 bytes. So a ``Launch`` keeps
the compiled kernel for each pattern of alignment and hands its arguments straight to the driver. Triton's interpreter,
which runs kernels on a CPU, has no compiled kernel, and always takes Triton's own way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Launches with tensors of device "meta", which have no memory: noted for ``compile.py``, which compiles them for a GPU
# that need not be here.
NOTED: list[tuple[Launch, tuple[Any, ...]]] = []


class Launch:
    """One kernel with everything fixed but the tensors.

    ``kernel``: the jitted function; ``grid``: up to three sizes; ``fixed``: its other arguments by name, ``options``:
    ``num_warps``, ``num_stages``. Called with the tensors by position, which come first in the kernel's signature.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: dict[str, Any], **options: int) -> None:
        self.kernel, self.options = kernel, options
        self.grid = (*grid, 1, 1)[:3]
        self.fixed = fixed
        self.empty = 0 in grid
        self.compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Any) -> None:
        if self.empty:
            return
        if INTERPRETED:
            self.kernel[self.grid](*tensors, **self.fixed, **self.options)
            return
        first = tensors[0]
        device = first.device.index
        if device is None:
            NOTED.append((self, tensors))
            return
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):  # kernels launch on the current device, whatever their tensors' is
                self(*tensors)
            return
        key = (device, *(_alignment(x) for x in tensors))
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel[self.grid](*tensors, **self.fixed, **self.options)
            names = self.kernel.arg_names[len(tensors) :]
            self.compiled[key] = compiled, tuple(self.fixed[name] for name in names)
            return
        compiled, rest = found
        stream = torch.cuda.current_stream(device).cuda_stream
        compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *tensors, *rest)


def _alignment(value: Any) -> Any:
    """What Triton's specialisation depends on."""
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return tuple(map(_alignment, value)) if isinstance(value, tuple) else value is None
