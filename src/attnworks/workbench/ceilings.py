"""The machine's ceilings, measured: bytes moved per second and multiply-adds per second; and a flush of its caches.

The flush is a plain read of several times the last-level cache. Its time is the read bandwidth, so every flush between
two timed runs also measures the ceiling at that moment.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from attnworks.backends import cpu
from attnworks.backends.cpu.modifiers import DTYPES
from attnworks.hardware import Hardware, detect
from attnworks.workbench import statistics
from attnworks.workbench.device_time import Clock

_UNKNOWN_CACHE_BYTES = 64 << 20
_FLUSH_CACHES = 4
_LARGEST_FLUSH_BYTES = 2 << 30
_PROBE_BYTES = 2 << 20
_BURST_SECONDS = 5e-3
# A cold read must take at least this many times as long as a warm one for the flush to count as real.
REAL_FLUSH = 1.3


class Caches:
    """Flushes the last-level cache. ``buffer_bytes``: four times its size."""

    def __init__(self, threads: int, hardware: Hardware | None = None) -> None:
        cache_bytes = (hardware or detect("cpu")).shared_cache_bytes or _UNKNOWN_CACHE_BYTES
        self.buffer_bytes = min(_FLUSH_CACHES * cache_bytes, _LARGEST_FLUSH_BYTES)
        self._threads = threads
        self._buffer = torch.ones(self.buffer_bytes // 4)

    def flush(self) -> float | None:
        """Read the buffer once. Returns bytes per second, None without the native extension (which reads it
        plainly)."""
        start = time.perf_counter()
        if not _read(self._buffer, self._threads):
            return None
        return self.buffer_bytes / (time.perf_counter() - start)

    def check(self, attempts: int = 9) -> float:
        """How many times as long a read of a small buffer takes after a flush as before it (medians). About 1: the
        flush does nothing."""
        probe = torch.ones(_PROBE_BYTES // 4)
        warm, cold = [], []
        for _ in range(attempts):
            _timed_read(probe)
            warm.append(_timed_read(probe))
            self.flush()
            cold.append(_timed_read(probe))
        return statistics.median(cold) / statistics.median(warm)


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best with ``threads`` threads: bytes/s read, FLOP/s of multiply-adds by dtype name."""

    threads: int
    read_bytes_per_second: float
    flops_per_second: dict[str, float]


def native() -> ModuleType | None:
    """The native extension, which measures both; None where the CPU backend cannot use it."""
    return cpu._native


def native_missing() -> bool:
    return native() is None


def measure(threads: int, repeats: int = 9) -> Ceilings | None:
    """Both ceilings, the best of several short bursts (a ceiling is what is possible); None without the extension."""
    if native_missing():
        return None
    caches = Caches(threads)
    bandwidth = max(caches.flush() or 0.0 for _ in range(repeats))
    flops = {name: max(peak_flops(name, threads) or 0.0 for _ in range(repeats)) for name in DTYPES.values()}
    return Ceilings(threads, bandwidth, flops)


def measured_hardware(threads: int) -> Hardware:
    """``detect("cpu")`` with bandwidth and rates filled in from ``measure``, where it can."""
    found, ceilings = detect("cpu"), measure(threads)
    if ceilings is None:
        return found
    sources = {"bandwidth": "measured now: plain read", "matrix_flops": "measured now: multiply-adds in registers"}
    return Hardware(
        name=found.name,
        kind=found.kind,
        units=threads,
        bandwidth=ceilings.read_bytes_per_second,
        matrix_flops=ceilings.flops_per_second,
        on_chip_bytes=found.on_chip_bytes,
        shared_cache_bytes=found.shared_cache_bytes,
        isas=cpu.isas(),
        capability=found.capability,
        sources=found.sources | sources,
    )


def peak_flops(dtype: str, threads: int) -> float | None:
    """FLOP/s of one burst of a few milliseconds; None without the native extension."""
    extension = native()
    if extension is None:
        return None
    isa = cpu.isas()[0]
    iterations = _burst_iterations(extension, isa, dtype)
    start = time.perf_counter()
    done: float = extension.peak_flops(isa, dtype, threads, iterations)
    return done / (time.perf_counter() - start)


@cache
def _burst_iterations(extension: ModuleType, isa: str, dtype: str) -> int:
    iterations = 1000
    while True:
        # On one thread, and the best of three: what it takes to wake threads says nothing of the loop.
        spent = []
        for _ in range(3):
            start = time.perf_counter()
            extension.peak_flops(isa, dtype, 1, iterations)
            spent.append(time.perf_counter() - start)
        if min(spent) > _BURST_SECONDS:
            return iterations
        iterations *= 2


def _read(tensor: torch.Tensor, threads: int) -> bool:
    """Read a tensor's memory; False if torch had to do it, whose sum is no plain read to quote a bandwidth from."""
    extension = native()
    if extension is None:
        tensor.sum()
        return False
    extension.read_bandwidth(tensor.data_ptr(), tensor.nbytes, threads)
    return True


def _timed_read(tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    _read(tensor, 1)
    return time.perf_counter() - start


# ---- a GPU -----------------------------------------------------------------------------------------------------------

_GPU_BYTES = 512 << 20
_GPU_PRODUCT = {2: 8192, 4: 4096}  # rows and columns of a square product, by bytes of an element


class GpuCeilings:
    """Of one GPU, by torch's own kernels: a sum as a plain read, a copy within the device (bytes read and written), and
    a large product of matrices in ``dtype``, of which none gets through without losing a few percent."""

    def __init__(self, clock: Clock, device: str, dtype: torch.dtype) -> None:
        size = _GPU_PRODUCT.get(dtype.itemsize, 4096)
        self._clock = clock
        self._from = torch.ones(_GPU_BYTES // 4, device=device)
        self._to = torch.empty_like(self._from)
        self._left, self._right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._found: dict[str, list[float]] = defaultdict(list)

    def measure(self, times: int = 5) -> None:
        """Before and after what is measured: neither disturbs it nor is far from it."""
        runs: dict[str, tuple[Callable[[], object], float]] = {
            "read_bytes_per_second": (self._from.sum, _GPU_BYTES),
            "copy_bytes_per_second": (lambda: self._to.copy_(self._from), 2 * _GPU_BYTES),
            "flops_per_second": (lambda: self._left @ self._right, 2 * self._left.shape[0] ** 3),
        }
        for _ in range(times):
            for name, (run, work) in runs.items():
                self._found[name].append(work / self._clock.seconds(run, asleep=True))

    def rates(self) -> dict[str, float | None]:
        """Medians of what was measured."""
        return {name: statistics.median(rates) for name, rates in self._found.items()}
