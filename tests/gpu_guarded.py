"""Device memory of a tensor's own, between pages that are not mapped: touching a byte outside is an illegal access."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import torch
from torch import Tensor

_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3
_GUARD = 32  # pages on each side


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", c_int), ("device", c_int), ("metadata", c_void_p),
        ("flags", c_uint64),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", c_int), ("device", c_int), ("flags", c_int))


class _Memory:
    """What torch takes as a tensor of 16-bit numbers."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i2", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def guarded(tensor: Tensor, at_end: bool) -> Tensor:
    """A contiguous copy on device 0 at the beginning, or the end, of memory of its own, which is never freed."""
    library = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(library, name)(*arguments)
        assert status == 0, f"{name} answered {status}"

    wanted, page = _Properties(type=_PINNED, location=_DEVICE), c_size_t()
    call("cuMemGetAllocationGranularity", byref(page), byref(wanted), c_int(0))
    size = tensor.numel() * tensor.element_size()
    length = -(-size // page.value) * page.value
    start, handle = c_uint64(), c_uint64()
    reserved = length + 2 * _GUARD * page.value
    call("cuMemAddressReserve", byref(start), c_size_t(reserved), c_size_t(0), c_uint64(0), c_uint64(0))
    call("cuMemCreate", byref(handle), c_size_t(length), byref(wanted), c_uint64(0))
    first = start.value + _GUARD * page.value
    call("cuMemMap", c_uint64(first), c_size_t(length), c_size_t(0), handle, c_uint64(0))
    access = _Access(_DEVICE, 0, _READ_WRITE)
    call("cuMemSetAccess", c_uint64(first), c_size_t(length), byref(access), c_size_t(1))
    address = first + (length - size if at_end else 0)
    copy = torch.as_tensor(_Memory(address, tensor.numel()), device="cuda").view(tensor.dtype).view(tensor.shape)
    assert copy.data_ptr() == address
    return copy.copy_(tensor)
