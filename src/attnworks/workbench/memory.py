"""Peak extra memory of a call: the high-water mark of the resident set above what was resident before."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def measurable() -> bool:
    """Whether the high-water mark can be read and reset here."""
    return os.access(_CLEAR_REFS, os.W_OK)


def peak_extra(call: Callable[[], T]) -> tuple[T, int | None]:
    """(result of ``call``, bytes that were resident at its peak and not before; None where Linux's /proc is missing).

    The result's own memory is part of it. Memory that an earlier call left in the process's pools counts as resident
    before: measure the first call.
    """
    gc.collect()
    _return_free_memory()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _read("VmRSS")
    except OSError:
        return call(), None
    result = call()
    return result, max(_read("VmHWM") - before, 0)


def _read(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


def _return_free_memory() -> None:
    """Free memory that malloc kept would hide an allocation of the call; hand it back to the system."""
    name = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None
    if trim is not None:
        trim(0)
