"""Tensor maps: how TMA, the copy engine, finds Q, K and V. Encoded once, then only their addresses are replaced.

A copy takes a box of 64 columns by some rows; what of it lies outside of the tensor arrives as 0, which pads head dims
and ends K and V after the last key. A packed sequence ends where another begins, so its K and V are described with one
dimension more: TILE_KV rows that begin anywhere, i.e. element (column, i, j, head) is row j + i - TILE_KV. A box that
begins at (0, TILE_KV - n, first + n) then holds the rows from ``first`` on, and after n of them runs out of the second
dimension. The map's base lies TILE_KV rows before the tensor, where nothing is read.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_uint64
from typing import NamedTuple

import torch

from attnworks.backends.cuda.driver import driver
from attnworks.plan import Plan
from attnworks.problem import Problem, Strides

MAP_BYTES, ALIGNMENT = 128, 64
ADDRESS_MULTIPLE = 16  # bytes: of a tensor's address and of its strides
STRIDE_LIMIT = 2**40
CHUNK = 64  # columns of a box: 128 bytes, one swizzled line
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_TO_256B, _FILL_WITH_ZEROS = 0, 3, 3, 0


class Description(NamedTuple):
    """Of one tensor: ``sizes`` from the columns outwards, ``strides`` in bytes of all but the columns, ``box``: what a
    copy takes, ``before``: bytes from the base to the tensor's address."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]
    before: int = 0


def describe(p: Problem, plan: Plan) -> tuple[Description, Description, Description]:
    """Of q, k and v."""
    if p.form == "varlen":
        return (
            _dense(p, p.q_strides, p.head_dim, (p.total_q, p.heads_q, 1), 64),
            _packed(p, p.k_strides, p.head_dim, plan.tile_kv),
            _packed(p, p.v_strides, p.head_dim_v, plan.tile_kv),
        )
    keys = p.seq_kv, p.heads_kv, p.batch
    return (
        _dense(p, p.q_strides, p.head_dim, (p.seq_q, p.heads_q, p.batch), 64),
        _dense(p, p.k_strides, p.head_dim, keys, plan.tile_kv),
        _dense(p, p.v_strides, p.head_dim_v, keys, plan.tile_kv),
    )


def _dense(p: Problem, strides: Strides, dim: int, sizes: tuple[int, int, int], rows: int) -> Description:
    batch, head, row = strides
    steps = [
        ADDRESS_MULTIPLE if size == 1 else step * p.element_size  # the stride of one element may be anything
        for size, step in zip(sizes, (row, head, batch), strict=True)
    ]
    return Description((dim, *sizes), (steps[0], steps[1], steps[2]), (CHUNK, rows, 1, 1))


def _packed(p: Problem, strides: Strides, dim: int, rows: int) -> Description:
    _, head, row = strides
    row_bytes = row * p.element_size
    head_bytes = ADDRESS_MULTIPLE if p.heads_kv == 1 else head * p.element_size
    sizes = (dim, rows, p.total_kv + 1, p.heads_kv)
    return Description(sizes, (row_bytes, row_bytes, head_bytes), (CHUNK, rows, 1, 1), rows * row_bytes)


def stride_reasons(p: Problem) -> list[str]:
    """Why TMA can't read the problem's tensors where they lie; empty if it can."""
    packed = p.form == "varlen"
    queries = (1, p.heads_q, p.total_q) if packed else (p.batch, p.heads_q, p.seq_q)
    keys = (1, p.heads_kv, p.total_kv) if packed else (p.batch, p.heads_kv, p.seq_kv)
    reasons = []
    for name, strides, sizes in (("q", p.q_strides, queries), ("k", p.k_strides, keys), ("v", p.v_strides, keys)):
        steps = [step * p.element_size for step, size in zip(strides, sizes, strict=True) if size > 1]
        if any(step % ADDRESS_MULTIPLE or not 0 < step < STRIDE_LIMIT for step in steps):
            reasons.append(
                f"{name} has strides {strides} (of batch, head and row; TMA copies need multiples of "
                f"{ADDRESS_MULTIPLE // p.element_size}, more than 0 and less than 2^39)"
            )
    if not p.aligned:
        reasons.append(f"q, k or v begins at an address that is no multiple of {ADDRESS_MULTIPLE}")
    return reasons


class Maps:
    """The maps of q, k and v in memory of their own; ``places`` are their addresses."""

    def __init__(self, p: Problem, plan: Plan) -> None:
        self._memory = ctypes.create_string_buffer(3 * MAP_BYTES + ALIGNMENT)
        start = ctypes.addressof(self._memory)
        start += -start % ALIGNMENT
        self.places = (start, start + MAP_BYTES, start + 2 * MAP_BYTES)
        self._data_type = _DATA_TYPES[p.dtype]
        self._described = describe(p, plan)
        self._addresses = [0, 0, 0]

    def point_to(self, addresses: list[int]) -> None:
        """Raises ``DriverError``."""
        if addresses == self._addresses:
            return
        for number, address in enumerate(addresses):
            old = self._addresses[number]
            if address == old:
                continue
            base = address - self._described[number].before
            if old:
                status = driver().replace_address(self.places[number], base)
                driver().check(status, "replacing the address of a tensor map")
            else:
                self._encode(number, base)
            self._addresses[number] = address

    def _encode(self, number: int, base: int) -> None:
        sizes, strides, box, _ = described = self._described[number]
        status = driver().encode(
            self.places[number], self._data_type, 4, base,
            (c_uint64 * 4)(*sizes), (c_uint64 * 3)(*strides), (c_uint * 4)(*box), (c_uint * 4)(1, 1, 1, 1),
            _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_TO_256B, _FILL_WITH_ZEROS,
        )  # fmt: skip
        driver().check(status, f"mapping {'qkv'[number]}: {described}")
