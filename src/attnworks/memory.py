"""Memory for results, without the dispatcher where torch has such a way.

torch's compiled programs allocate by functions of their own, which save half a microsecond over torch.empty_strided,
and tens where other work has emptied the caches. They are private, so the public function stands in for a missing one;
and where torch is to be deterministic, since it then fills fresh memory, as a user may have asked and tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

_deterministic = torch._C._get_deterministic_algorithms


def _empty_on(device: str) -> Empty:
    private: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    short: Empty | None = getattr(private, f"_empty_strided_{device}", None)

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if short is None or _deterministic():
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return short(shape, strides, dtype)

    return empty


empty_cpu = _empty_on("cpu")
"""A tensor of shape, strides (both tuples) and dtype, with whatever the memory held."""

empty_cuda = _empty_on("cuda")
"""The same on the current CUDA device."""
