"""Tile maps: for each tile of queries the tiles of keys that a mask shows it, so that kernels skip what is hidden.

For any mask: closed bounds, boolean tensors, traced predicates and their intersections. It is evaluated element by
element in blocks of bounded size; only counts by tile outlive a block (``partly_visible`` gives the elements of partial
tiles again, for kernels that read them). Dense problems only: packed sequences and caches
of different lengths would need a map each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnworks.expressions.evaluation import evaluate
from attnworks.masks import Bounds, DenseMask, MaskSpec, Predicate

# Elements of a block: with its int64 intermediates about 64 MB.
BLOCK = 2**20

CACHE_LIMIT = 64

T = TypeVar("T")


@dataclass(frozen=True)
class TileLists:
    """Lists of tiles by row in compressed form: row r has ``tiles[offsets[r] : offsets[r + 1]]``, ascending; int32."""

    offsets: Tensor
    tiles: Tensor

    def row(self, row: int) -> list[int]:
        return [int(tile) for tile in self.tiles[int(self.offsets[row]) : int(self.offsets[row + 1])]]


@dataclass(frozen=True)
class Sizes:
    """Of a map: heads and lengths, and how many tiles cover them."""

    batch: int
    heads: int
    seq_q: int
    seq_kv: int
    tile_q: int
    tile_kv: int

    @property
    def tiles_q(self) -> int:
        return -(-self.seq_q // self.tile_q)

    @property
    def tiles_kv(self) -> int:
        return -(-self.seq_kv // self.tile_kv)


@dataclass(frozen=True)
class TileMap(Sizes):
    """Which tiles of (tile_q, tile_kv) are shown in part or in full; all others are hidden.

    Row ``(b · heads + h) · tiles_q + t`` of ``partial`` and ``full`` lists the KV tiles of query tile t; ``batch`` and
    ``heads`` are 1 where the mask does not depend on them (use b = 0, h = 0). A tile that reaches past ``seq_q`` or
    ``seq_kv`` is never full. ``visible_pairs`` counts query-key pairs over ``batch`` and ``heads``.
    """

    partial: TileLists
    full: TileLists
    visible_pairs: int

    @property
    def partial_tiles(self) -> int:
        return self.partial.tiles.numel()

    @property
    def full_tiles(self) -> int:
        return self.full.tiles.numel()

    @property
    def hidden_tiles(self) -> int:
        return self.batch * self.heads * self.tiles_q * self.tiles_kv - self.partial_tiles - self.full_tiles

    @property
    def visible_share(self) -> float:
        """Of all query-key pairs; 0 for a problem without pairs."""
        return self.visible_pairs / max(self.batch * self.heads * self.seq_q * self.seq_kv, 1)

    @cached_property
    def visited(self) -> tuple[Tensor, Tensor, Tensor]:
        """(offsets, full_ends, tiles), int32: row r visits ``tiles[offsets[r] : offsets[r + 1]]``, first the full ones,
        up to ``full_ends[r]``, then the partial ones. One list for kernels with one loop."""
        offsets = self.full.offsets + self.partial.offsets
        full_ends = offsets[:-1] + self.full.offsets.diff()
        tiles = torch.empty(self.full_tiles + self.partial_tiles, dtype=torch.int32, device=offsets.device)
        for lists, begin in ((self.full, offsets[:-1]), (self.partial, full_ends)):
            count = lists.offsets.diff()
            shift = torch.repeat_interleave(begin - lists.offsets[:-1], count, output_size=lists.tiles.numel())
            tiles[torch.arange(lists.tiles.numel(), device=tiles.device) + shift] = lists.tiles
        return offsets, full_ends, tiles

    @cached_property
    def transposed(self) -> TileMap:
        """The same tiles listed by KV tile: row ``(b · heads + h) · tiles_kv + t`` lists query tiles, for dK and dV.

        In it queries and keys have changed places, and so have the sizes.
        """
        lists = (self._transpose(self.partial), self._transpose(self.full))
        sizes = (self.seq_kv, self.seq_q, self.tile_kv, self.tile_q)
        return TileMap(self.batch, self.heads, *sizes, *lists, self.visible_pairs)

    def _transpose(self, lists: TileLists) -> TileLists:
        rows = torch.arange(lists.offsets.numel() - 1, device=lists.tiles.device)
        row = torch.repeat_interleave(rows, lists.offsets.diff().long(), output_size=lists.tiles.numel())
        tiles_q = max(self.tiles_q, 1)
        new_row = (row // tiles_q) * self.tiles_kv + lists.tiles
        order = torch.argsort(new_row, stable=True)  # keeps query tiles ascending
        return _compress(new_row, (row % tiles_q)[order], self.batch * self.heads * self.tiles_kv)


def build(
    spec: MaskSpec,
    operands: tuple[Tensor, ...],
    *,
    batch: int,
    heads: int,
    seq_q: int,
    seq_kv: int,
    tile_q: int,
    tile_kv: int,
    device: torch.device | str,
) -> TileMap:
    """The tile map of a dense problem's mask, its lists on ``device``.

    Scratch is about 64 MB and a byte for each tile. On a GPU it waits for the device, whose counts it reads.
    Raises ``ValueError`` for a predicate that was not traced.
    """
    for term in spec:
        if isinstance(term, Predicate) and term.expression is None:
            raise ValueError(f"mask: predicate {term.name} has no tile map, as it was not traced: {term.why_not}")
    device = torch.device(device)
    batch = batch if any(reads(term, "b") for term in spec) else min(batch, 1)
    heads = heads if any(reads(term, "h") for term in spec) else min(heads, 1)
    sizes = Sizes(batch, heads, seq_q, seq_kv, tile_q, tile_kv)
    states = torch.zeros(batch * heads * sizes.tiles_q, sizes.tiles_kv, dtype=torch.uint8, device=device)
    pairs = torch.zeros((), dtype=torch.int64, device=device)
    for units, tiles in _blocks(spec, sizes):
        at_units, at_tiles = (torch.arange(x.start, x.stop, device=device) for x in (units, tiles))
        counts = visible(spec, operands, sizes, at_units[:, None], at_tiles).sum((-2, -1))
        pairs += counts.sum()
        full = counts == tile_q * tile_kv  # never so where the tile reaches past the queries or the keys
        states[units.start : units.stop, tiles.start : tiles.stop] = (counts > 0).to(torch.uint8) + full
    partial, shown = ((states == kind).nonzero(as_tuple=True) for kind in (_PARTIAL, _FULL))
    lists = [_compress(row, tile, states.shape[0]) for row, tile in (partial, shown)]
    return TileMap(batch, heads, seq_q, seq_kv, tile_q, tile_kv, lists[0], lists[1], int(pairs))


_PARTIAL, _FULL = 1, 2  # states of a tile; 0 is hidden


def reads(term: Bounds | DenseMask | Predicate, name: str) -> bool:
    """Whether a term of a mask depends on "b", "h" or "q"."""
    if isinstance(term, Predicate):
        return term.expression is not None and term.expression.reads(name)
    if isinstance(term, DenseMask):
        axis = len(term.operand.shape) - 4 + "bhq".index(name)
        return axis >= 0 and term.operand.shape[axis] > 1 and term.operand.strides[axis] != 0
    return name == "q"


def _blocks(spec: MaskSpec, sizes: Sizes) -> Iterator[tuple[range, range]]:
    """Units (query tiles of all batches and heads, numbered as a map's rows) and KV tiles whose pairs make a block.

    KV tiles that the bounds hide from all of a block are left out.
    """
    total = sizes.batch * sizes.heads * sizes.tiles_q
    row_pairs = sizes.tile_q * sizes.tiles_kv * sizes.tile_kv
    units_each = max(1, BLOCK // max(row_pairs, 1))
    tiles_each = max(1, BLOCK // (sizes.tile_q * sizes.tile_kv))
    for first in range(0, total, units_each):
        last = min(first + units_each, total)
        start, stop = _tiles_within_bounds(spec, sizes, first, last)
        for tile in range(start, stop, tiles_each):
            yield range(first, last), range(tile, min(tile + tiles_each, stop))


def _tiles_within_bounds(spec: MaskSpec, sizes: Sizes, first: int, last: int) -> tuple[int, int]:
    """The KV tiles that closed bounds may show to the units first..last - 1."""
    low_q, high_q = 0, sizes.seq_q - 1
    if first // sizes.tiles_q == (last - 1) // sizes.tiles_q:  # all of one head
        low_q = first % sizes.tiles_q * sizes.tile_q
        high_q = min((last - 1) % sizes.tiles_q * sizes.tile_q + sizes.tile_q, sizes.seq_q) - 1
    start, stop = 0, sizes.seq_kv
    for term in spec:
        if isinstance(term, Bounds):
            shift = _shift(term, sizes)
            start = start if term.left is None else max(start, low_q + shift - term.left)
            stop = stop if term.right is None else min(stop, high_q + shift + term.right + 1)
    return start // sizes.tile_kv, -(-stop // sizes.tile_kv)


def _shift(term: Bounds, sizes: Sizes) -> int:
    return sizes.seq_kv - sizes.seq_q if term.align == "bottom-right" else 0


def partly_visible(spec: MaskSpec, operands: tuple[Tensor, ...], found: TileMap) -> Iterator[tuple[slice, Tensor]]:
    """(which of ``found.partial.tiles``, which pairs of theirs are visible as booleans (tiles, tile_q, tile_kv)), in
    blocks of bounded size. ``spec`` and ``operands``: those that the map was built of."""
    offsets, tiles = found.partial.offsets, found.partial.tiles
    rows = torch.arange(offsets.numel() - 1, device=tiles.device)
    units = torch.repeat_interleave(rows, offsets.diff().long(), output_size=tiles.numel())
    each = max(1, BLOCK // (found.tile_q * found.tile_kv))
    for first in range(0, tiles.numel(), each):
        part = slice(first, min(first + each, tiles.numel()))
        yield part, visible(spec, operands, found, units[part], tiles[part].long())


def visible(spec: MaskSpec, operands: tuple[Tensor, ...], sizes: Sizes, units: Tensor, tiles: Tensor) -> Tensor:
    """Booleans (..., tile_q, tile_kv): the visible pairs of units and tiles, which are broadcast against each other."""
    units, tiles = units[..., None, None], tiles[..., None, None]
    head = units // sizes.tiles_q
    q = units % sizes.tiles_q * sizes.tile_q + torch.arange(sizes.tile_q, device=units.device)[:, None]
    k = tiles * sizes.tile_kv + torch.arange(sizes.tile_kv, device=units.device)
    inside = (q < sizes.seq_q) & (k < sizes.seq_kv)
    at = {
        "b": head // sizes.heads,
        "h": head % sizes.heads,
        "q": q.clamp_max(sizes.seq_q - 1),
        "k": k.clamp_max(sizes.seq_kv - 1),
    }
    for term in spec:
        if isinstance(term, Bounds):
            ahead = k - (q + _shift(term, sizes))
            inside = inside if term.left is None else inside & (ahead >= -term.left)
            inside = inside if term.right is None else inside & (ahead <= term.right)
        elif isinstance(term, DenseMask):
            tensor = _four(operands[term.operand.index])
            index = [
                at[name] if size > 1 else torch.zeros((), dtype=torch.int64, device=units.device)
                for name, size in zip("bhqk", tensor.shape, strict=True)
            ]
            inside = inside & tensor[tuple(index)]
        else:
            assert term.expression is not None, "build() refuses before"
            inside = inside & evaluate(term.expression, at, term.own(operands))
    return inside


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]


def _compress(row: Tensor, sorted_tiles: Tensor, rows: int) -> TileLists:
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=row.device)
    offsets[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    return TileLists(offsets.int(), sorted_tiles.int())


# ---- kept between calls ----------------------------------------------------------------------------------------------

_Kept = tuple[Any, tuple[tuple[int, int], ...], tuple[weakref.ref[Tensor], ...]]
_CACHE: dict[Hashable, _Kept] = {}
_CAPTURED: dict[int, Any] = {}


def cached(
    spec: MaskSpec,
    operands: tuple[Tensor, ...],
    *,
    batch: int,
    heads: int,
    seq_q: int,
    seq_kv: int,
    tile_q: int,
    tile_kv: int,
    device: torch.device | str,
) -> TileMap:
    """``build``, or the map that it gave for the same mask, sizes and operands."""
    sizes = {"batch": batch, "heads": heads, "seq_q": seq_q, "seq_kv": seq_kv, "tile_q": tile_q, "tile_kv": tile_kv}
    key = (spec, *sizes.values(), str(device))
    return kept(key, operands, lambda: build(spec, operands, **sizes, device=device))


def kept(key: Hashable, operands: tuple[Tensor, ...], make: Callable[[], T]) -> T:
    """``make()``, or what it gave for an equal key and the same operands.

    Operands are the same while they are the same tensor objects over the same memory in the same version, so one that
    was freed or written to by torch is made of anew. Writes that torch doesn't count (through ``.data``, NumPy or a
    kernel of one's own) are not seen. Inference tensors count no versions: nothing made of them is kept.

    What a CUDA graph's capture is given stays for good: the graph reads it as often as it is replayed.
    """
    value = _kept(key, operands, make)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        _CAPTURED[id(value)] = value
    return value


def _kept(key: Hashable, operands: tuple[Tensor, ...], make: Callable[[], T]) -> T:
    if any(operand.is_inference() for operand in operands):
        return make()
    states = tuple((operand.data_ptr(), operand._version) for operand in operands)
    place = (key, tuple(map(id, operands)))
    found = _CACHE.get(place)
    if found is not None and found[1] == states:
        value: T = found[0]
        return value
    made = make()
    if place not in _CACHE and len(_CACHE) >= CACHE_LIMIT:
        del _CACHE[next(iter(_CACHE))]
    _CACHE[place] = made, states, tuple(weakref.ref(operand, lambda _: _CACHE.pop(place, None)) for operand in operands)
    return made
