"""Schedules as data: which matrix's tile is loaded, kept, updated or written in which loop over tiles.

A ``Schedule`` is a few ``Pass``es, each a loop over tiles of queries and one over tiles of keys, in either order. From
the one description come the steps that ``attnworks flow`` draws (``walk``) and the bytes that ``attnworks traffic``
counts by memory level (``count``). A schedule of your own takes a few lines:

    from attnworks.workbench.loops import Pass, Schedule

    body = Pass("forward", outer="q", inner="kv", keeps=("q",), streams=("k", "v"), leaves=("out",), products=(1, 1))
    MINE = Schedule("wide tiles of queries", (body,), tile_q=256, tile_kv=64)

Matrices go by the names of ``ARRAYS``; others can be made with ``Array`` and named in the schedule's ``arrays``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from attnworks.masks import DenseMask
from attnworks.problem import Problem
from attnworks.traffic import visible_range

Axis = Literal["q", "kv"]
Kind = Literal["begin", "visit", "end"]
_FP32 = 4


@dataclass(frozen=True)
class Array:
    """A matrix of one head. ``axis``: what its rows go by; "pair" has an element for each query and key. ``row_bytes``:
    bytes of a row (of an element) for a problem. ``temporary``: neither input nor result of the whole."""

    name: str
    axis: Literal["q", "kv", "pair"]
    row_bytes: Callable[[Problem], float]
    temporary: bool = False


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
    ``programs``: what runs in parallel, each outer "tile" or each "head". ``fused``: in the program of the pass before.
    ``products``: how many of width head_dim and head_dim_v each pair takes. ``tile_q``, ``tile_kv``: if not the
    schedule's. ``registers``: what lives there. ``says``: what happens at the start of an outer tile, at an inner one
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
    once: tuple[str, ...] = ()
    skips: bool = True
    shared: bool = False
    together: bool = False
    splits: bool = False
    programs: Literal["tile", "head"] = "tile"
    fused: bool = False
    products: tuple[int, int] = (0, 0)
    tile_q: int = 0
    tile_kv: int = 0
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
            for name in (*one.keeps, *one.streams, *one.updates, *one.writes, *one.leaves, *one.once):
                if name not in self.known:
                    raise ValueError(f"Pass {one.name!r}: {name!r} is no matrix, must be one of {sorted(self.known)}")

    @property
    def known(self) -> dict[str, Array]:
        return ARRAYS | {array.name: array for array in self.arrays}

    def with_tiles(self, tile_q: int = 0, tile_kv: int = 0) -> Schedule:
        """The schedule with other tiles; 0 keeps its own."""
        return replace(self, tile_q=tile_q or self.tile_q, tile_kv=tile_kv or self.tile_kv)


# ---- tiles and the mask ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """S as a grid of tiles: rows and keys of each, and for every tile of queries the tiles of keys that it sees,
    ``first`` .. ``last`` - 1, and of these the ones that it sees whole, ``full_first`` .. ``full_last`` - 1."""

    rows: torch.Tensor
    keys: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    full_first: torch.Tensor
    full_last: torch.Tensor

    @property
    def visits(self) -> torch.Tensor:
        """Tiles of keys that each tile of queries sees."""
        return self.last - self.first

    @property
    def met(self) -> torch.Tensor:
        """For each tile of keys, whether any tile of queries sees it."""
        change = torch.zeros(len(self.keys) + 1, dtype=torch.int64)
        seen = self.visits > 0
        change.index_add_(0, self.first[seen], torch.ones_like(self.first[seen]))
        change.index_add_(0, self.last[seen], -torch.ones_like(self.last[seen]))
        return change.cumsum(0)[:-1] > 0


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
    return Grid(rows, keys, first, last, full_first, full_last.clamp(full_first, last))


def _grid(p: Problem, schedule: Schedule, one: Pass) -> Grid:
    tile_q, tile_kv = one.tile_q or schedule.tile_q, one.tile_kv or schedule.tile_kv
    return grid_of(p, tile_q, tile_kv, together=one.together, all_tiles=not one.skips)


def _splits(p: Problem, schedule: Schedule, one: Pass) -> list[tuple[int, int]]:
    """Of each share of the keys its tiles, first .. last - 1; all tiles where keys are not shared out."""
    tile_kv = one.tile_kv or schedule.tile_kv
    tiles = math.ceil(p.seq_kv / tile_kv)
    each = math.ceil(schedule.split_kv / tile_kv) if one.splits and schedule.split_kv else max(tiles, 1)
    return [(start, min(start + each, tiles)) for start in range(0, max(tiles, 1), each)]


# ---- step by step ----------------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """Bytes of one tile between slow memory and chip. ``part``: under which of the bill's names they are counted."""

    array: str
    stored: bool
    bytes: int
    part: str


class Step(NamedTuple):
    """One step of a pass. ``kind``: "begin" and "end" of an outer tile, or "visit". Tiles are None where there is
    none."""

    number: int  # of the pass
    kind: Kind
    q_tile: int | None
    kv_tile: int | None
    moves: tuple[Move, ...]


def walk(p: Problem, schedule: Schedule, *, first_of_group: bool = True) -> Iterator[Step]:
    """The steps of one query head of one sequence (of a KV head's group where its heads are rows of one tile).

    ``first_of_group``: what the heads of a group load or leave once for all of them is counted with the first.
    """
    for number, one in enumerate(schedule.passes):
        walker = _Walker(p, schedule, one, first_of_group)
        for low, high in _splits(p, schedule, one):
            for kind, i, j, moves in walker.steps(low, high):
                yield Step(number, kind, i, j, moves)


class _Walker:
    """One pass. Tiles that are None stand for all of them."""

    def __init__(self, p: Problem, schedule: Schedule, one: Pass, first_of_group: bool) -> None:
        grid = _grid(p, schedule, one)
        self.one, self.first_of_group = one, first_of_group
        self.arrays = [
            (where, schedule.known[name], schedule.known[name].row_bytes(p))
            for where in ("once", "keeps", "streams", "updates", "writes", "leaves")
            for name in getattr(one, where)
        ]
        self.rows, self.keys = grid.rows.tolist(), grid.keys.tolist()
        self.first, self.last = grid.first.tolist(), grid.last.tolist()
        self.at_hand: set[tuple[str, int]] = set()  # of ``once``

    def steps(self, low: int, high: int) -> Iterator[tuple[Kind, int | None, int | None, tuple[Move, ...]]]:
        """Over the tiles of keys ``low`` .. ``high`` - 1, and all of the queries."""
        one = self.one
        for outer in range(len(self.rows) if one.outer == "q" else len(self.keys)):
            at = (outer, None) if one.outer == "q" else (None, outer)
            met = self._met(outer, low, high)
            keeps = ("keeps",) if met or one.inner is None or not one.skips else ()
            yield "begin", *at, self._moves(keeps, *at, stored=False)
            for inner in met:
                pair = (outer, inner) if one.outer == "q" else (inner, outer)
                loads = self._moves(("once", "streams", "updates"), *pair, stored=False)
                yield "visit", *pair, loads + self._moves(("updates", "writes"), *pair, stored=True)
            yield "end", *at, self._moves(("leaves",), *at, stored=True)

    def _met(self, outer: int, low: int, high: int) -> Sequence[int]:
        if self.one.inner is None:
            return ()
        if self.one.outer == "q":
            return range(max(self.first[outer], low), min(self.last[outer], high))
        return [i for i in range(len(self.rows)) if self.first[i] <= outer < self.last[i]]

    def _moves(self, wheres: tuple[str, ...], i: int | None, j: int | None, *, stored: bool) -> tuple[Move, ...]:
        found = []
        for where, array, row_bytes in self.arrays:
            if where not in wheres or (not self.first_of_group and _by_kv_head(self.one, array, where)):
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


def _by_kv_head(one: Pass, array: Array, where: str) -> bool:
    """Whether the query heads of a group move it once for all of them."""
    return array.axis == "kv" and (where == "once" or (one.shared and where in ("keeps", "leaves")))


def part_of(array: Array, stored: bool, update: bool) -> str:
    """Under which of the names of ``traffic.Traffic`` the bytes count."""
    if array.axis == "pair":
        return "scores_and_probs"
    if update or array.temporary:
        return "state"
    return "out" if stored else array.axis


# ---- counted ---------------------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """Bytes of one matrix in one pass over all heads of ``batch`` equal sequences: ``loaded`` and ``stored`` across the
    edge of the chip, with re-reads; ``distinct``: of different memory. ``part`` as in ``Move``."""

    number: int  # of the pass
    array: str
    loaded: int
    stored: int
    distinct: int
    part: str


def count(p: Problem, schedule: Schedule) -> list[Moved]:
    """What ``walk`` moves over all heads and sequences, without walking."""
    return [
        moved for number in range(len(schedule.passes)) for moved in _count_pass(p, schedule, number) if sum(moved[2:4])
    ]


def _count_pass(p: Problem, schedule: Schedule, number: int) -> Iterator[Moved]:
    one = schedule.passes[number]
    grid, shares = _grid(p, schedule, one), _splits(p, schedule, one)
    visited = _tally(grid)
    all_rows, all_keys = int(grid.rows.sum()), int(grid.keys.sum())

    def rows_of(array: Array, where: str) -> tuple[int, int]:
        """(rows moved, different ones) of a head; of pairs, elements."""
        if array.axis == "pair":
            return visited.pairs, visited.pairs
        by_q = array.axis == "q"
        every, seen = (all_rows, visited.seen_rows) if by_q else (all_keys, visited.seen_keys)
        if where in ("streams", "updates", "writes"):
            return (visited.q_rows if by_q else visited.kv_rows), seen
        whole = where == "leaves" or (where == "keeps" and (one.inner is None or not one.skips))
        distinct = every if whole else seen
        if where == "once" or not by_q:
            return distinct, distinct
        if whole:
            return every * len(shares), every * (len(shares) if array.temporary else 1)  # of each share its own
        return (_kept_rows(grid, shares) if one.outer == "q" else distinct), distinct

    heads = p.heads_kv if one.together else p.heads_q
    for where in ("keeps", "once", "streams", "updates", "writes", "leaves"):
        for name in getattr(one, where):
            array = schedule.known[name]
            moved, distinct = rows_of(array, where)
            shared = _by_kv_head(one, array, where)
            size, update = array.row_bytes(p), where == "updates"
            across = round(moved * size) * p.batch * (p.heads_kv if shared else heads)
            different = round(distinct * size) * p.batch * (p.heads_kv if array.axis == "kv" else heads)
            stored = across if where in ("updates", "writes", "leaves") else 0
            loaded = across if where not in ("writes", "leaves") else 0
            yield Moved(number, name, loaded, stored, different, part_of(array, bool(stored), update))


class _Tally(NamedTuple):
    """Of the visited tile pairs of a head: rows of Q and of K that they load, pairs, and the rows and keys in any."""

    q_rows: int
    kv_rows: int
    pairs: int
    seen_rows: int
    seen_keys: int


def _tally(grid: Grid) -> _Tally:
    before = torch.cat([torch.zeros(1, dtype=torch.int64), grid.keys.cumsum(0)])
    keys = before[grid.last] - before[grid.first]
    return _Tally(
        q_rows=int((grid.visits * grid.rows).sum()),
        kv_rows=int(keys.sum()),
        pairs=int((keys * grid.rows).sum()),
        seen_rows=int(grid.rows[grid.visits > 0].sum()),
        seen_keys=int(grid.keys[grid.met].sum()),
    )


def _kept_rows(grid: Grid, shares: list[tuple[int, int]]) -> int:
    """Rows of Q that are loaded for each share of the keys in which they see a tile."""
    return sum(int(grid.rows[grid.last.clamp(low, high) > grid.first.clamp(low, high)].sum()) for low, high in shares)


def executed_flops(p: Problem, schedule: Schedule) -> int:
    """FLOPs of the matrix products of all visited tiles, over all heads and sequences."""
    return sum(flops_of_passes(p, schedule))


def flops_of_passes(p: Problem, schedule: Schedule) -> list[int]:
    """``executed_flops`` of each pass."""
    found = []
    for one in schedule.passes:
        wide = one.products[0] * p.head_dim + one.products[1] * p.head_dim_v
        heads = p.heads_kv if one.together else p.heads_q
        found.append(2 * p.batch * heads * _tally(_grid(p, schedule, one)).pairs * wide if wide else 0)
    return found


def programs(p: Problem, schedule: Schedule, one: Pass) -> tuple[int, int]:
    """(outer tiles of a head, heads of all sequences that have tiles of their own)."""
    grid = _grid(p, schedule, one)
    tiles = len(grid.rows) * len(_splits(p, schedule, one)) if one.outer == "q" else len(grid.keys)
    heads = p.heads_kv if one.together or one.shared else p.heads_q
    return (1 if one.programs == "head" else tiles), p.batch * heads


def equal_walks(p: Problem, schedule: Schedule, one: Pass) -> bool:
    """Whether the outer tiles of a pass meet equally many inner tiles each."""
    grid = _grid(p, schedule, one)
    if one.outer == "q":
        return bool((grid.visits == grid.visits[:1]).all())
    return bool((grid.visits == len(grid.keys)).all())


def pair_operands(p: Problem) -> tuple[Array, ...]:
    """Boolean masks and biases with an element for each pair, which every visited tile reads."""
    terms = [("mask", term.operand) for term in p.mask if isinstance(term, DenseMask)]
    terms += [("bias", term.operand) for term in p.scores if term.kind == "bias" and term.operand is not None]
    return tuple(
        Array(f"{name} {number}", "pair", lambda _, size=spec.dtype.itemsize: size)  # type: ignore[misc]
        for number, (name, spec) in enumerate(terms)
        if len(spec.shape) >= 2 and min(spec.shape[-2:]) > 1
    )
