"""Tensor maps: how TMA, the copy engine, finds Q, K, V and results. Made once for a problem, given addresses by calls.

A copy takes a box of 64 columns by some rows; what of it lies outside of the tensor arrives as 0, which pads head dims
and ends K and V after the last key. A packed sequence ends where another begins, so its K and V are described with rows
that may begin anywhere: element (column, i, head, j, w) is row i + j - w, i below ALL = 2^30. A box that begins at
(0, ALL - n, head, first + n, ALL) holds the rows from ``first`` on, and after n of them runs out of i. The stride of w
is 2^34 - row bytes: ALL times that is minus ALL rows, addresses being counted modulo 2^64 (the idea of Triton's ragged
tensor descriptors).

For what lies outside of the tensor the engine fetches something too, from the map's base, before it puts 0 in its
place. So the base has to be memory that can be read: it is the tensor's own address, never one before it.
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
NAMES = "q", "k", "v", "out"
CHUNK = 64  # columns of a box: 128 bytes, one swizzled line
ALL = 2**30  # rows of a packed tensor's map, more than there are; WRAP in forward.cuh
WRAP_BYTES = 2**64 // ALL
_STEP = MAP_BYTES // 8  # words from one map to the next
_Words = c_uint64 * _STEP
_PROBES = 0x5555_5555_5550, 0x2AAA_AAAA_AAA0  # two addresses that have no bit in common
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_TO_256B, _FILL_WITH_ZEROS = 0, 3, 3, 0


class Description(NamedTuple):
    """Of one tensor: ``sizes`` from the columns outwards, ``strides`` in bytes of all but the columns, ``rows`` of a
    box."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int


def describe(p: Problem, plan: Plan, *, out: bool) -> tuple[Description, ...]:
    """Of q, k and v; and of the results of a dense problem, of which a warp stores its 16 rows at once."""
    if p.form == "varlen":
        return (
            _dense(p, p.q_strides, p.head_dim, (p.total_q, p.heads_q, 1), 64),
            _packed(p, p.k_strides, p.head_dim, plan.tile_kv),
            _packed(p, p.v_strides, p.head_dim_v, plan.tile_kv),
        )
    keys = p.seq_kv, p.heads_kv, p.batch
    queries = p.seq_q, p.heads_q, p.batch
    found = (
        _dense(p, p.q_strides, p.head_dim, queries, 64),
        _dense(p, p.k_strides, p.head_dim, keys, plan.tile_kv),
        _dense(p, p.v_strides, p.head_dim_v, keys, plan.tile_kv),
    )
    return (*found, _dense(p, p.result_strides()[0], p.head_dim_v, queries, 16)) if out else found


def _dense(p: Problem, strides: Strides, dim: int, sizes: tuple[int, int, int], rows: int) -> Description:
    batch, head, row = strides
    steps = [
        ADDRESS_MULTIPLE if size == 1 else step * p.element_size  # the stride of one element may be anything
        for size, step in zip(sizes, (row, head, batch), strict=True)
    ]
    return Description((dim, *sizes), tuple(steps), rows)


def _packed(p: Problem, strides: Strides, dim: int, rows: int) -> Description:
    _, head, row = strides
    row_bytes = ADDRESS_MULTIPLE if p.total_kv == 1 else row * p.element_size
    head_bytes = ADDRESS_MULTIPLE if p.heads_kv == 1 else head * p.element_size
    # No larger than what boxes reach, as the engine may touch all that a map promises.
    sizes = (dim, ALL, p.heads_kv, p.total_kv + 1, ALL + 1)
    return Description(sizes, (row_bytes, head_bytes, row_bytes, WRAP_BYTES - row_bytes), rows)


def stride_reasons(p: Problem) -> list[str]:
    """Why TMA can't read the problem's tensors where they lie; empty if it can."""
    packed = p.form == "varlen"
    queries = (1, p.heads_q, p.total_q) if packed else (p.batch, p.heads_q, p.seq_q)
    keys = (1, p.heads_kv, p.total_kv) if packed else (p.batch, p.heads_kv, p.seq_kv)
    reasons = []
    for name, strides, sizes in (("q", p.q_strides, queries), ("k", p.k_strides, keys), ("v", p.v_strides, keys)):
        row_limit = WRAP_BYTES if packed and name != "q" else STRIDE_LIMIT
        limits = (STRIDE_LIMIT, STRIDE_LIMIT, row_limit)
        used = zip(strides, sizes, limits, strict=True)
        steps = [(step * p.element_size, most) for step, size, most in used if size > 1]
        if any(step % ADDRESS_MULTIPLE or not 0 < step < most for step, most in steps):
            power = (row_limit // p.element_size).bit_length() - 1
            reasons.append(
                f"{name} has strides {strides} (of batch, head and row; TMA copies need multiples of "
                f"{ADDRESS_MULTIPLE // p.element_size}, more than 0 and less than 2^{power})"
            )
    if not p.aligned:
        reasons.append(f"q, k or v begins at an address that is no multiple of {ADDRESS_MULTIPLE}")
    return reasons


class Maps:
    """The maps of q, k and v, and of the results where they are described too, in memory of their own; ``places`` are
    their addresses."""

    def __init__(self, p: Problem, described: tuple[Description, ...]) -> None:
        self._memory, self.places = _memory_of(len(NAMES))
        self.places = self.places[: len(described)]
        self._data_type = _DATA_TYPES[p.dtype]
        self._described = described
        self._addresses: tuple[int, ...] = ()
        self._words: memoryview | None = None

    def point_to(self, q: int, k: int, v: int, out: int) -> None:
        """Of q, k, v and the results, whether those have a map or not. Raises ``DriverError``."""
        words = self._words
        if words is not None:  # one by one, as every call comes here
            words[0], words[_STEP], words[2 * _STEP], words[3 * _STEP] = q, k, v, out
        elif (addresses := (q, k, v, out)) != self._addresses:
            for number, address in enumerate(addresses[: len(self.places)]):
                status = self._encode(self.places[number], number, address)
                driver().check(status, f"mapping {NAMES[number]}: {self._described[number]}")
            if not self._addresses and all(map(self._begins_with_address, range(len(self.places)))):
                start = self.places[0] - ctypes.addressof(self._memory)
                self._words = memoryview(self._memory).cast("B")[start : start + len(NAMES) * MAP_BYTES].cast("Q")
            self._addresses = addresses

    def _begins_with_address(self, number: int) -> bool:
        """Whether maps of other addresses differ from this one in their first word alone, which is the address. Writing
        it takes a tenth of the driver's cuTensorMapReplaceAddress, which takes as long as a new map; but a map's inside
        is the driver's, so each has to prove it."""
        _kept, (place,) = _memory_of(1)
        words, own = (_Words.from_address(at) for at in (place, self.places[number]))
        return all(
            not self._encode(place, number, address) and words[0] == address and words[1:] == own[1:]
            for address in _PROBES
        )

    def _encode(self, place: int, number: int, address: int) -> int:
        """The driver's answer."""
        sizes, strides, rows = self._described[number]
        rank = len(sizes)
        box = (CHUNK, rows, *[1] * (rank - 2))
        status: int = driver().encode(
            place, self._data_type, rank, address, (c_uint64 * rank)(*sizes), (c_uint64 * (rank - 1))(*strides),
            (c_uint * rank)(*box), (c_uint * rank)(*[1] * rank),
            _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_TO_256B, _FILL_WITH_ZEROS,
        )  # fmt: skip
        return status


def _memory_of(maps: int) -> tuple[ctypes.Array[ctypes.c_char], tuple[int, ...]]:
    """Memory for so many maps, and where in it each is."""
    memory = ctypes.create_string_buffer(maps * MAP_BYTES + ALIGNMENT)
    start = ctypes.addressof(memory)
    start += -start % ALIGNMENT
    return memory, tuple(start + number * MAP_BYTES for number in range(maps))
