"""Counters by which thread blocks draw their tiles: two words for each launch, zero before it and left at zero by it.

Launches on one stream follow each other, so they share one; those on two streams, or of a captured graph, which may be
replayed on any, may run at once, and a counter shared between them would hand out tiles twice or never.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_CHUNK, _BYTES = 4096, 8


class Counters:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._free: list[int] = []
        self._of_stream: dict[int, int] = {}

    def ready(self) -> None:
        """Sees to it that there are some left, where memory may be allocated: while a graph is captured it may not."""
        if len(self._free) < _CHUNK // 4 and not torch._C._cuda_isCurrentStreamCapturing():
            self._grow()

    def take(self, stream: int) -> int:
        """The address of the counter for a launch on the current stream, which has this handle."""
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._next()  # for good: the graph may be replayed as long as the process lives
        found = self._of_stream.get(stream)
        if found is None:
            found = self._of_stream.setdefault(stream, self._next())
        return found

    def _next(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            self._grow()
            return self._free.pop()

    def _grow(self) -> None:
        # On a stream of its own, since the current one may be captured, which must not see this.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            chunk = torch.zeros(_CHUNK, _BYTES // 4, dtype=torch.int32, device=self._device)
        side.synchronize()
        self._chunks.append(chunk)
        self._free += [chunk.data_ptr() + _BYTES * i for i in range(_CHUNK)]


@cache
def counters(device: int) -> Counters:
    """The counters of device number ``device``."""
    return Counters(torch.device("cuda", device))
