"""S as a grid of tiles: which tile of queries meets which tile of keys, and where one is seen whole.

Closed bounds show a tile of queries one run of tiles of keys; any other mask of a dense problem shows what its tile map
lists (``Maps``), which may differ from head to head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnworks import masks, tilemap
from attnworks.problem import Problem
from attnworks.tilemap import TileLists, TileMap
from attnworks.traffic import Lengths, visible_range


class Span(NamedTuple):
    """Tiles ``start`` .. ``stop`` - 1 of keys, which a tile of queries sees, all of them ``whole`` or none."""

    start: int
    stop: int
    whole: bool


@dataclass(frozen=True)
class Grid:
    """S of one head: rows and keys of each tile, and for every tile of queries the tiles of keys that it sees: of
    ``first`` .. ``last`` - 1 all, or those of ``seen``; of these it sees whole ``full_first`` .. ``full_last`` - 1, or
    those of ``whole``. ``seen`` and ``whole`` are booleans (tiles of queries, tiles of keys). ``own``: [start, stop) of
    the tiles of keys of each tile's sequence, which are all unless sequences are packed. ``position``: the query that
    each tile of queries begins with."""

    rows: Tensor
    keys: Tensor
    position: Tensor
    own: Tensor
    first: Tensor
    last: Tensor
    full_first: Tensor
    full_last: Tensor
    seen: Tensor | None = None
    whole: Tensor | None = None

    @property
    def visits(self) -> Tensor:
        """Tiles of keys that each tile of queries sees."""
        return self.last - self.first if self.seen is None else self.seen.sum(1)

    @property
    def visible_keys(self) -> Tensor:
        """Keys in the tiles that each tile of queries sees."""
        if self.seen is not None:
            return (self.seen * self.keys).sum(1)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.keys.cumsum(0)])
        return before[self.last] - before[self.first]

    @property
    def pairs(self) -> int:
        """Pairs of the tiles that are seen."""
        return int((self.visible_keys * self.rows).sum())

    @property
    def partial_pairs(self) -> int:
        """Those of tiles that are seen in part; where no map tells, all may be."""
        if self.seen is None or self.whole is None:
            return self.pairs
        return int(((self.seen & ~self.whole) * self.keys * self.rows[:, None]).sum())

    @property
    def met(self) -> Tensor:
        """For each tile of keys, whether any tile of queries sees it."""
        if self.seen is not None:
            return self.seen.any(0)
        change = torch.zeros(len(self.keys) + 1, dtype=torch.int64)
        some = self.visits > 0
        change.index_add_(0, self.first[some], torch.ones_like(self.first[some]))
        change.index_add_(0, self.last[some], -torch.ones_like(self.last[some]))
        return change.cumsum(0)[:-1] > 0

    @property
    def common(self) -> Tensor:
        """For each place between two tiles of queries, before the first and after the last as well: keys in the tiles
        that are seen both before and behind it."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.keys.cumsum(0)])
        if self.seen is not None:
            edge = torch.zeros(1, len(self.keys), dtype=torch.bool)
            ahead = torch.cat([edge, self.seen.cumsum(0) > 0])
            behind = torch.cat([self.seen.flip(0).cumsum(0).flip(0) > 0, edge])
            return ((ahead & behind) * self.keys).sum(1)
        none = torch.full((1,), len(self.keys)), torch.zeros(1, dtype=torch.int64)
        first, last = (
            torch.where(self.visits > 0, self.first, none[0]),
            torch.where(self.visits > 0, self.last, none[1]),
        )
        low = torch.maximum(
            torch.cat([none[0], first.cummin(0).values]), torch.cat([first.flip(0).cummin(0).values.flip(0), none[0]])
        )
        high = torch.minimum(
            torch.cat([none[1], last.cummax(0).values]), torch.cat([last.flip(0).cummax(0).values.flip(0), none[1]])
        )
        return (before[high] - before[low]).clamp(min=0)

    def meets(self, low: int, high: int) -> Tensor:
        """For each tile of queries, whether it sees any of the tiles of keys ``low`` .. ``high`` - 1."""
        if self.seen is not None:
            return self.seen[:, low:high].any(1)
        return self.last.clamp(low, high) > self.first.clamp(low, high)

    def tiles_of(self, row: int, low: int, high: int) -> Sequence[int]:
        """Of tiles of keys ``low`` .. ``high`` - 1 those that a tile of queries sees."""
        if self.seen is None:
            return range(max(int(self.first[row]), low), min(int(self.last[row]), high))
        return [low + int(tile) for tile in self.seen[row, low:high].nonzero().flatten()]

    def rows_of(self, tile: int) -> list[int]:
        """The tiles of queries that see a tile of keys."""
        seen = (self.first <= tile) & (tile < self.last) if self.seen is None else self.seen[:, tile]
        return [int(row) for row in seen.nonzero().flatten()]

    def spans(self, row: int) -> list[Span]:
        """What a tile of queries sees, in order."""
        if self.seen is None or self.whole is None:
            first, last, full_first, full_last = (
                int(x[row]) for x in (self.first, self.last, self.full_first, self.full_last)
            )
            cuts = ((first, full_first, False), (full_first, full_last, True), (full_last, last, False))
            return [Span(*cut) for cut in cuts if cut[0] < cut[1]]
        whole: list[bool] = self.whole[row].tolist()
        found: list[Span] = []
        for tile in self.tiles_of(row, 0, len(self.keys)):
            if found and (found[-1].stop, found[-1].whole) == (tile, whole[tile]):
                found[-1] = found[-1]._replace(stop=tile + 1)
            else:
                found.append(Span(tile, tile + 1, whole[tile]))
        return found


def grid_of(p: Problem, tile_q: int, tile_kv: int, *, together: bool = False, all_tiles: bool = False) -> Grid:
    """The grid of a head of one sequence; of a KV head's group of query heads, if ``together``. Closed bounds alone
    hide tiles; with ``all_tiles`` nothing does."""
    group = p.group if together else 1
    starts = torch.arange(0, p.seq_q * group, tile_q, dtype=torch.int64)
    rows = (p.seq_q * group - starts).clamp_max(tile_q)
    begins = torch.arange(0, p.seq_kv, tile_kv, dtype=torch.int64)
    keys = (p.seq_kv - begins).clamp_max(tile_kv)
    position, end = starts // group, (starts + rows - 1) // group + 1
    low, high = visible_range(p, position, end - position)
    seen = high > low
    # Seen by every row: from the last row's lowest key to the first one's highest. A tile may end with the keys.
    sure_low, _ = visible_range(p, end - 1, torch.ones_like(end))
    _, sure_high = visible_range(p, position, torch.ones_like(end))
    first, last = low // tile_kv, (high + tile_kv - 1) // tile_kv
    full_first = (sure_low + tile_kv - 1) // tile_kv
    full_last = torch.where(sure_high == p.seq_kv, len(begins), sure_high // tile_kv)
    if all_tiles:
        first, last, seen = torch.zeros_like(first), torch.full_like(last, len(begins)), torch.ones_like(seen)
    last = torch.where(seen, last, first)
    full_first = torch.where(full_first < full_last, full_first, last).clamp(first, last)
    own = torch.stack([torch.zeros_like(first), torch.full_like(first, len(begins))], 1)
    return Grid(rows, keys, position, own, first, last, full_first, full_last.clamp(full_first, last))


def packed(
    p: Problem, lengths: Lengths, tile_q: int, tile_kv: int, *, together: bool = False, all_tiles: bool = False
) -> Grid:
    """The grids of packed sequences along the diagonal of one; none sees a tile of another."""
    parts, tiles = [], 0
    for seq_q, seq_kv in lengths:
        alone = replace(p, seq_q=seq_q, seq_kv=seq_kv)
        one = grid_of(alone, tile_q, tile_kv, together=together, all_tiles=all_tiles)
        ranges = ("own", "first", "last", "full_first", "full_last")
        parts.append(replace(one, **{name: getattr(one, name) + tiles for name in ranges}))
        tiles += len(one.keys)
    names = ("rows", "keys", "position", "own", "first", "last", "full_first", "full_last")
    return Grid(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


# ---- tile maps -------------------------------------------------------------------------------------------------------


class Maps:
    """The tile maps of a dense problem's mask and the tensors that it reads, for tiles of any size."""

    def __init__(self, p: Problem, operands: tuple[Tensor, ...]) -> None:
        self.problem, self.operands = p, operands
        self._made: dict[tuple[int, int], TileMap] = {}

    def at(self, tile_q: int, tile_kv: int) -> TileMap:
        """Raises ``ValueError`` for a predicate that was not traced, and for one that reads past what it captured."""
        p, size = self.problem, (tile_q, tile_kv)
        if size not in self._made:
            try:
                self._made[size] = tilemap.build(
                    p.mask, self.operands, batch=p.batch, heads=p.heads_q, seq_q=p.seq_q, seq_kv=p.seq_kv,
                    tile_q=tile_q, tile_kv=tile_kv, device="cpu",
                )  # fmt: skip
            except IndexError as error:
                raise ValueError(f"mask: reads past the end of a tensor that it captured: {error}") from error
        return self._made[size]

    @property
    def visible_pairs(self) -> int:
        """Of all heads and sequences."""
        found = next(iter(self._made.values()), None) or self.at(128, 128)
        heads = max(found.batch * found.heads, 1)
        return found.visible_pairs * self.problem.batch * self.problem.heads_q // heads


def maps_of(p: Problem, operands: tuple[Tensor, ...]) -> Maps | None:
    """None where closed bounds are the whole mask, and where a backend has no map: packed sequences and caches."""
    bounds_alone = all(isinstance(term, masks.Bounds) for term in p.mask)
    return None if bounds_alone or p.form != "dense" else Maps(p, operands)


def mapped(grid: Grid, found: TileMap) -> Iterator[tuple[int, int, Grid]]:
    """(batch, head, ``grid`` with what a tile map of its tiles shows that head), for each that the map tells apart."""
    partial, whole = (_matrices(found, lists) for lists in (found.partial, found.full))
    for b in range(found.batch):
        for h in range(found.heads):
            yield b, h, _showing(grid, partial[b, h] | whole[b, h], whole[b, h])


def together_seen(grids: Sequence[Grid]) -> Grid:
    """What any of several heads sees."""
    first, *others = grids
    if first.seen is None or first.whole is None or not others:
        return first
    seen, whole = first.seen, first.whole
    for other in others:
        assert other.seen is not None and other.whole is not None
        seen, whole = seen | other.seen, whole & other.whole
    return _showing(first, seen, whole)


def _matrices(found: TileMap, lists: TileLists) -> Tensor:
    """Booleans (batch, heads, tiles of queries, tiles of keys) of lists by row."""
    shown = torch.zeros(found.batch * found.heads * found.tiles_q, found.tiles_kv, dtype=torch.bool)
    row = torch.repeat_interleave(torch.arange(len(shown)), lists.offsets.diff().long())
    shown[row, lists.tiles.long()] = True
    return shown.view(found.batch, found.heads, found.tiles_q, found.tiles_kv)


def _showing(grid: Grid, seen: Tensor, whole: Tensor) -> Grid:
    tiles = torch.arange(seen.shape[1]).expand_as(seen)
    first = torch.where(seen, tiles, seen.shape[1]).amin(1) if seen.shape[1] else grid.first
    last = torch.where(seen, tiles + 1, 0).amax(1) if seen.shape[1] else grid.last
    first = torch.minimum(first, last)
    return replace(grid, first=first, last=last, full_first=last, full_last=last, seen=seen, whole=whole)
