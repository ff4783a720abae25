"""The CUDA driver through ctypes: modules, tensor maps and launches in the context that torch makes.

``PyDLL`` keeps the interpreter's lock during a call, which saves a microsecond for functions that never wait.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

import torch

INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a CUlaunchAttributeID


class DriverError(RuntimeError):
    """What the CUDA driver refused, in its own words, and what was asked of it."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a number for its value."""

    _fields_ = (("id", c_int), ("_", c_int), ("value", c_int), ("_rest", c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


class Driver:
    """The functions that are used here. ``library``: libcuda as ctypes loads it. Raises ``DriverError`` where that is
    older than CUDA 12, whose tensor maps it needs."""

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            self.launch = library.cuLaunchKernelEx
            self.encode = library.cuTensorMapEncodeTiled
        except AttributeError as error:
            raise DriverError(f"the CUDA driver is older than CUDA 12: {error}") from error
        self.launch.argtypes = [c_void_p] * 4
        self.encode.argtypes = [c_void_p, c_int, c_uint, *[c_void_p] * 5, *[c_int] * 4]

    def check(self, status: int, what: str) -> None:
        """Raise ``DriverError`` unless the driver's answer was 0."""
        if not status:
            return
        name, text = c_char_p(), c_char_p()
        self._library.cuGetErrorName(status, byref(name))
        self._library.cuGetErrorString(status, byref(text))
        words = [(part.value or b"unknown").decode() for part in (name, text)]
        raise DriverError(f"the CUDA driver answered {words[0]} ({words[1]}) to {what}")

    def function(self, code: bytes, name: str, shared_bytes: int) -> int:
        """The kernel ``name`` of a module of machine code, in the current context, allowed so much shared memory. The
        module stays loaded as long as the process lives."""
        module, function = c_void_p(), c_void_p()
        self.check(self._library.cuModuleLoadData(byref(module), code), "loading a module")
        self.check(self._library.cuModuleGetFunction(byref(function), module, name.encode()), f"finding kernel {name}")
        status = self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        self.check(status, f"allowing kernel {name} {shared_bytes} bytes of shared memory")
        return int(function.value or 0)

    def context(self) -> int:
        """The context of the current device."""
        context = c_void_p()
        self.check(self._library.cuCtxGetCurrent(byref(context)), "asking for the current context")
        if not context.value:
            torch.cuda.synchronize()  # torch makes it with the first call that needs it
            self.check(self._library.cuCtxGetCurrent(byref(context)), "asking for the current context")
        return int(context.value or 0)

    def make_current(self, context: int) -> None:
        self.check(self._library.cuCtxSetCurrent(c_void_p(context)), "making a context current")


@cache
def driver() -> Driver:
    try:
        library = ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver could not be loaded: {error}") from error
    return Driver(library)
