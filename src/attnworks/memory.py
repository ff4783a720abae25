"""Memory for results, without the dispatcher where torch has such a way.

torch's compiled programs allocate by functions of their own, which save half a microsecond over torch.empty_strided,
and tens where other work has emptied the caches. They are private, so the public function stands in for a missing one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def _by_the_dispatcher(device: str) -> Empty:
    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


_private: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

empty_cpu: Empty = getattr(_private, "_empty_strided_cpu", None) or _by_the_dispatcher("cpu")
"""A tensor of shape, strides (both tuples) and dtype, with whatever the memory held."""

empty_cuda: Empty = getattr(_private, "_empty_strided_cuda", None) or _by_the_dispatcher("cuda")
"""The same on the current CUDA device."""
