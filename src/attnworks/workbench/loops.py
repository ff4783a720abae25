"""Schedules as data: which matrix's tile is loaded, kept, updated or written in which loop over tiles.

A ``Schedule`` is a few ``Pass``es, each a loop over tiles of queries and one over tiles of keys, in either order. From
the one description come the steps that ``attnworks flow`` draws (``walk``) and the bytes that ``attnworks traffic``
counts by memory level (``counting.py``). A schedule of your own takes a few lines:

    from attnworks.workbench.loops import Pass, Schedule

    body = Pass("forward", outer="q", inner="kv", keeps=("q",), streams=("k", "v"), leaves=("out",), products=(1, 1))
    MINE = Schedule("wide tiles of queries", (body,), tile_q=256, tile_kv=64)

Matrices go by the names of ``ARRAYS``; others can be made with ``Array`` and named in the schedule's ``arrays``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from attnworks.masks import Bounds
from attnworks.problem import Problem
from attnworks.traffic import Lengths
from attnworks.workbench.grid import Grid, Maps, grid_of, mapped, packed, together_seen

Axis = Literal["q", "kv"]
Kind = Literal["begin", "visit", "end"]
_FP32 = 4


@dataclass(frozen=True)
class Array:
    """A matrix of one head. ``axis``: what its rows go by; "pair" has an element for each query and key. ``row_bytes``:
    bytes of a row (of an element) for a problem. ``temporary``: neither input nor result of the whole. ``partial``: of
    pairs, read only in tiles that are seen in part."""

    name: str
    axis: Literal["q", "kv", "pair"]
    row_bytes: Callable[[Problem], float]
    temporary: bool = False
    partial: bool = False


def _kv_size(p: Problem) -> int:
    return (p.kv_dtype or p.dtype).itemsize


ARRAYS = {
    array.name: array
    for array in (
        Array("q", "q", lambda p: p.head_dim * p.element_size),
        Array("k", "kv", lambda p: p.head_dim * _kv_size(p)),
        Array("v", "kv", lambda p: p.head_dim_v * _kv_size(p)),
        Array("out", "q", lambda p: p.head_dim_v * p.element_size),
        Array("lse", "q", lambda p: _FP32),
        Array("m", "q", lambda p: _FP32),
        Array("l", "q", lambda p: _FP32),
        Array("s", "pair", lambda p: p.element_size, temporary=True),
        Array("p", "pair", lambda p: p.element_size, temporary=True),
        Array("acc", "q", lambda p: p.head_dim_v * _FP32, temporary=True),  # a running O in fp32
        Array("part", "q", lambda p: (p.head_dim_v + 1) * _FP32, temporary=True),  # O and LSE of some of the keys
        Array("d_out", "q", lambda p: p.head_dim_v * p.element_size),
        Array("delta", "q", lambda p: _FP32, temporary=True),
        Array("d_q", "q", lambda p: p.head_dim * p.element_size),
        Array("d_k", "kv", lambda p: p.head_dim * p.element_size),
        Array("d_v", "kv", lambda p: p.head_dim_v * p.element_size),
        Array("d_q_sum", "q", lambda p: p.head_dim * _FP32, temporary=True),  # a running dQ in fp32
        Array("d_p", "pair", lambda p: p.element_size, temporary=True),
        Array("d_s", "pair", lambda p: p.element_size, temporary=True),
        Array("page_table", "kv", lambda p: 8 / p.page_size if p.page_size else 0),
    )
}


@dataclass(frozen=True)
class Pass:
    """One loop nest over the tiles of a head: ``outer`` tiles outside, ``inner`` ones inside (None: no inner loop).

    ``keeps``: loaded at the start of an outer tile and kept on chip until it is done. ``streams``: loaded for every
    inner tile. ``updates``: loaded and stored again for every inner tile. ``writes``: stored for every inner tile.
    ``leaves``: stored when the outer tile is done. ``once``: loaded when a tile is first needed and counted as kept
    from then on, whatever it takes, as the bill of standard attention does.

    ``skips``: tile pairs that the mask hides are not visited. ``shared``: keys that query heads share are kept, or
    left, once for all of them, whose tiles go by in turn. ``together``: the query heads of a group are rows of one
    tile. ``splits``: the keys are shared out in ``Schedule.split_kv``, an outer tile for each share.
    ``cuts``: of the last tiles of queries, those of all heads and sequences in a row, for each the tiles of keys at
    which its keys are cut (none: it is one part). Every part is an outer tile, which stores ``parts`` where a whole
    tile stores ``leaves``. Without an inner loop the pass goes over these tiles alone, loads what it keeps of every
    part, and stores ``leaves`` after the last.
    ``programs``: what runs in parallel, each outer "tile" or each "head". ``fused``: in the program of the pass before.
    ``products``: how many of width head_dim and head_dim_v each pair takes. ``tile_q``, ``tile_kv``: if not the
    schedule's. ``resident``: programs of a unit at a time, 0 for as many as their tiles leave room for. ``section``:
    how many query heads of a problem begin together, the last tile of queries of each first; None where they follow
    one another. ``registers``: what lives there. ``says``: what happens at the start of an outer tile, at an inner one
    and at the end, with {i} and {j} for the numbers of the tiles of queries and keys.
    """

    name: str
    outer: Axis
    inner: Axis | None = None
    keeps: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    skips: bool = True
    shared: bool = False
    together: bool = False
    splits: bool = False
    cuts: tuple[tuple[int, ...], ...] = ()
    programs: Literal["tile", "head"] = "tile"
    fused: bool = False
    products: tuple[int, int] = (0, 0)
    tile_q: int = 0
    tile_kv: int = 0
    resident: int = 0
    section: Callable[[Problem], int] | None = None
    registers: tuple[str, ...] = ()
    says: tuple[str, str, str] = ("", "", "")

    def __post_init__(self) -> None:
        if self.outer not in ("q", "kv") or self.inner not in ("q", "kv", None) or self.inner == self.outer:
            raise ValueError(f"Pass outer, inner: were {self.outer!r}, {self.inner!r}, must be 'q' and 'kv' or None")
        inside = self.streams + self.updates + self.writes
        if self.inner is None and (inside or self.once):
            raise ValueError(f"Pass inner: was None, must be an axis for {inside + self.once} to be moved along")
        if self.splits and self.outer != "q":
            raise ValueError("Pass splits: was True, must be False where the outer tiles are of keys")
        if self.cuts and (self.outer != "q" or self.splits or self.together):
            raise ValueError("Pass cuts: must be () where outer tiles are of keys, and beside splits and together")
        if self.parts and not (self.cuts and self.inner):
            raise ValueError(f"Pass parts: was {self.parts}, must be () where no tile is cut")


@dataclass(frozen=True)
class Schedule:
    """Passes one after the other, with the tiles they take. ``arrays``: matrices beside those of ``ARRAYS``."""

    name: str
    passes: tuple[Pass, ...]
    tile_q: int = 64
    tile_kv: int = 64
    split_kv: int = 0
    arrays: tuple[Array, ...] = ()
    backward: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_q", "tile_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"Schedule {name}: was {getattr(self, name)}, must be >= 1")
        for one in self.passes:
            for name in (*one.keeps, *one.streams, *one.updates, *one.writes, *one.leaves, *one.parts, *one.once):
                if name not in self.known:
                    raise ValueError(f"Pass {one.name!r}: {name!r} is no matrix, must be one of {sorted(self.known)}")

    @property
    def known(self) -> dict[str, Array]:
        return ARRAYS | {array.name: array for array in self.arrays}

    def with_tiles(self, tile_q: int = 0, tile_kv: int = 0) -> Schedule:
        """The schedule with other tiles; 0 keeps its own. Raises ``ValueError`` where ``cuts`` are for these."""
        own, asked = (self.tile_q, self.tile_kv), (tile_q or self.tile_q, tile_kv or self.tile_kv)
        if asked != own and any(one.cuts for one in self.passes):
            raise ValueError(f"tile_q, tile_kv: were {asked}, must be {own}, for which {self.name!r} says where to cut")
        return replace(self, tile_q=tile_q or self.tile_q, tile_kv=tile_kv or self.tile_kv)


# ---- tiles and the mask ----------------------------------------------------------------------------------------------


def _tiles(schedule: Schedule, one: Pass) -> tuple[int, int]:
    return one.tile_q or schedule.tile_q, one.tile_kv or schedule.tile_kv


def grid_of_pass(p: Problem, schedule: Schedule, one: Pass, lengths: Lengths | None = None) -> Grid:
    """The grid of a head as closed bounds leave it: of one sequence, or of packed ones of these ``lengths``. Raises
    ``ValueError`` for keys that are shared out of packed sequences."""
    sizes = _tiles(schedule, one)
    if one.cuts:
        return _uncut_grid(p, schedule, one, lengths)
    if lengths is None:
        return grid_of(p, *sizes, together=one.together, all_tiles=not one.skips)
    if one.splits and schedule.split_kv:
        raise ValueError(f"schedule: {schedule.name!r} shares keys out, which no packed sequences can have")
    return packed(p, lengths, *sizes, together=one.together, all_tiles=not one.skips)


def _uncut_grid(p: Problem, schedule: Schedule, one: Pass, lengths: Lengths | None) -> Grid:
    """The grid of a pass that has ``cuts``. Raises ``ValueError`` where not all sequences and heads see all keys."""
    grid = grid_of(p, *_tiles(schedule, one))
    whole = bool((grid.visits == len(grid.keys)).all()) and all(isinstance(term, Bounds) for term in p.mask)
    if lengths is not None or p.form == "varlen" or not whole:
        raise ValueError(
            f"schedule: {schedule.name!r} cuts tiles of queries, which no mask or packed sequence can have"
        )
    tiles, keys = p.batch * p.heads_q * len(grid.rows), range(1, len(grid.keys))
    if len(one.cuts) > tiles:
        raise ValueError(
            f"Pass cuts: was of {len(one.cuts)} tiles of queries, must be of at most {tiles}, as there are"
        )
    for cut in one.cuts:
        if list(cut) != sorted(set(cut).intersection(keys)):
            raise ValueError(f"Pass cuts: held {cut}, must be rising numbers of tiles of keys in 1..{len(keys)}")
    return grid


class Heads(NamedTuple):
    """Grids, and how many heads of all sequences each stands for: query heads, or groups that are rows of one tile; and
    KV heads with what any of their query heads sees."""

    of_q: list[tuple[Grid, int]]
    of_kv: list[tuple[Grid, int]]


def heads_of(p: Problem, schedule: Schedule, one: Pass, maps: Maps | None) -> Heads:
    grid = grid_of_pass(p, schedule, one)
    if maps is None or one.together or not one.skips:  # of heads that are rows of one tile no backend has a map
        of_kv = [(grid, p.batch * p.heads_kv)]
        return Heads(of_kv if one.together else [(grid, p.batch * p.heads_q)], of_kv)
    found = maps.at(*_tiles(schedule, one))
    grids = {(b, h): each for b, h, each in mapped(grid, found)}
    times = p.batch // found.batch if found.batch else 0
    of_q = [(each, times * (p.heads_q // found.heads)) for each in grids.values()]
    if found.heads <= 1:
        return Heads(of_q, [(each, times * p.heads_kv) for each in grids.values()])
    groups = [
        [grids[b, h] for h in range(first, first + p.group)]
        for b in range(found.batch)
        for first in range(0, p.heads_q, p.group)
    ]
    return Heads(of_q, [(together_seen(group), times) for group in groups])


def shares_of(p: Problem, schedule: Schedule, one: Pass) -> list[tuple[int, int]]:
    """Of each share of the keys its tiles, first .. last - 1; all tiles where keys are not shared out."""
    tile_kv = one.tile_kv or schedule.tile_kv
    tiles = math.ceil(p.seq_kv / tile_kv)
    each = math.ceil(schedule.split_kv / tile_kv) if one.splits and schedule.split_kv else max(tiles, 1)
    return [(start, min(start + each, tiles)) for start in range(0, max(tiles, 1), each)]


def parts_of_head(p: Problem, one: Pass, grid: Grid, head: int = -1) -> list[tuple[tuple[int, int], ...]]:
    """Of a pass that has ``cuts``, for each tile of queries of a head (counted over all sequences): its parts, as tiles
    of keys first .. last - 1; () for a tile that is whole."""
    heads, tiles = p.batch * p.heads_q, len(grid.rows)
    first = head % heads * tiles - (heads * tiles - len(one.cuts))
    places = range(first, first + tiles)
    return [tuple(pairwise((0, *one.cuts[place], len(grid.keys)))) if place >= 0 else () for place in places]


# ---- step by step ----------------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """Bytes of one tile between slow memory and chip. ``part``: under which of the bill's names they are counted."""

    array: str
    stored: bool
    bytes: int
    part: str


class Step(NamedTuple):
    """One step of a pass. ``kind``: "begin" and "end" of an outer tile, or "visit". Tiles are None where there is
    none. ``share``: of the keys, where they are shared out."""

    number: int  # of the pass
    kind: Kind
    q_tile: int | None
    kv_tile: int | None
    moves: tuple[Move, ...]
    share: int = 0


def walk(
    p: Problem,
    schedule: Schedule,
    *,
    first_of_group: bool = True,
    lengths: Lengths | None = None,
    maps: Maps | None = None,
    head: int = -1,
) -> Iterator[Step]:
    """The steps of one query head of one sequence (of a KV head's group where its heads are rows of one tile), or of
    all packed sequences of these ``lengths``; with ``maps`` the first head of the first sequence.

    ``first_of_group``: what the heads of a group load or leave once for all of them is counted with the first.
    ``head``: of all sequences, where they differ because some tiles are cut; by default the last.
    """
    for number, one in enumerate(schedule.passes):
        grid = walked_grid(p, schedule, one, lengths, maps)
        walker = _Walker(p, schedule, one, grid, first_of_group)
        if one.cuts:
            yield from (Step(number, *step) for step in walker.cut_steps(parts_of_head(p, one, grid, head)))
            continue
        shares = [(0, len(grid.keys))] if lengths else shares_of(p, schedule, one)
        for share, (low, high) in enumerate(shares):
            for outer in range(len(grid.rows) if one.outer == "q" else len(grid.keys)):
                yield from (Step(number, *step, share) for step in walker.steps(outer, low, high))


def walked_grid(p: Problem, schedule: Schedule, one: Pass, lengths: Lengths | None, maps: Maps | None) -> Grid:
    """The grid that ``walk`` goes over in a pass."""
    if lengths is not None:
        return grid_of_pass(p, schedule, one, lengths)
    return heads_of(p, schedule, one, maps).of_q[0][0]


_Moves: TypeAlias = "tuple[Kind, int | None, int | None, tuple[Move, ...]]"


class _Walker:
    """One pass over a grid. Tiles that are None stand for all of them."""

    def __init__(self, p: Problem, schedule: Schedule, one: Pass, grid: Grid, first_of_group: bool) -> None:
        self.one, self.grid, self.first_of_group = one, grid, first_of_group
        self.arrays = [
            (where, schedule.known[name], schedule.known[name].row_bytes(p))
            for where in ("once", "keeps", "streams", "updates", "writes", "leaves", "parts")
            for name in getattr(one, where)
        ]
        self.rows, self.keys = grid.rows.tolist(), grid.keys.tolist()
        self.whole = None if grid.whole is None else grid.whole.tolist()
        self.at_hand: set[tuple[str, int]] = set()  # of ``once``

    def steps(self, outer: int, low: int, high: int, leaves: str = "leaves") -> Iterator[_Moves]:
        """Of an outer tile, over the tiles of keys ``low`` .. ``high`` - 1 or all tiles of queries."""
        one = self.one
        at = (outer, None) if one.outer == "q" else (None, outer)
        met = self._met(outer, low, high)
        keeps = ("keeps",) if met or one.inner is None or not one.skips else ()
        yield "begin", *at, self._moves(keeps, *at, stored=False)
        for inner in met:
            pair = (outer, inner) if one.outer == "q" else (inner, outer)
            loads = self._moves(("once", "streams", "updates"), *pair, stored=False)
            yield "visit", *pair, loads + self._moves(("updates", "writes"), *pair, stored=True)
        yield "end", *at, self._moves((leaves,), *at, stored=True)

    def cut_steps(
        self, parts: list[tuple[tuple[int, int], ...]]
    ) -> Iterator[tuple[Kind, int | None, int | None, tuple[Move, ...], int]]:
        """Of all tiles of queries, with the part's number: first what is whole and the first parts, then the second;
        of a pass without an inner loop tile by tile."""
        if self.one.inner is None:
            for row, own in enumerate(parts):
                for part in range(len(own)):
                    yield "begin", row, None, self._moves(("keeps",), row, None, stored=False), part
                if own:
                    yield "end", row, None, self._moves(("leaves",), row, None, stored=True), len(own) - 1
            return
        for part in range(max(1, *map(len, parts))):
            for row, own in enumerate(parts):
                spans = own or ((0, len(self.keys)),)
                for low, high in spans[part : part + 1]:
                    for step in self.steps(row, low, high, "parts" if own else "leaves"):
                        yield *step, part

    def _met(self, outer: int, low: int, high: int) -> Sequence[int]:
        if self.one.inner is None:
            return ()
        return self.grid.tiles_of(outer, low, high) if self.one.outer == "q" else self.grid.rows_of(outer)

    def _moves(self, wheres: tuple[str, ...], i: int | None, j: int | None, *, stored: bool) -> tuple[Move, ...]:
        found = []
        for where, array, row_bytes in self.arrays:
            if where not in wheres or (not self.first_of_group and by_kv_head(self.one, array, where)):
                continue
            if array.partial and self.whole and i is not None and j is not None and self.whole[i][j]:
                continue
            if where == "once":
                tile = (array.name, (i if array.axis == "q" else j) or 0)
                if tile in self.at_hand:
                    continue
                self.at_hand.add(tile)
            size = round(self._rows_of(array, i, j) * row_bytes)
            found.append(Move(array.name, stored, size, part_of(array, stored, where == "updates")))
        return tuple(found)

    def _rows_of(self, array: Array, i: int | None, j: int | None) -> int:
        """Rows of a matrix in a tile; of pairs, elements."""
        rows = sum(self.rows) if i is None else self.rows[i]
        keys = sum(self.keys) if j is None else self.keys[j]
        return int({"q": rows, "kv": keys, "pair": rows * keys}[array.axis])


def by_kv_head(one: Pass, array: Array, where: str) -> bool:
    """Whether the query heads of a group move it once for all of them."""
    return array.axis == "kv" and (where == "once" or (one.shared and where in ("keeps", "leaves")))


def part_of(array: Array, stored: bool, update: bool) -> str:
    """Under which of the names of ``traffic.Traffic`` the bytes count."""
    if array.axis == "pair":
        return "scores_and_probs"
    if update or array.temporary:
        return "state"
    return "out" if stored else array.axis
