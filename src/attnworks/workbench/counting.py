"""The bytes and FLOPs of a schedule over all heads and sequences: what ``loops.walk`` moves, without walking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnworks.problem import Problem
from attnworks.workbench.grid import Grid, Maps
from attnworks.workbench.loops import Array, Pass, Schedule, by_kv_head, grid_of_pass, heads_of, part_of, shares_of


class Moved(NamedTuple):
    """Bytes of one matrix in one pass over all heads of ``batch`` equal sequences: ``loaded`` and ``stored`` across the
    edge of the chip, with re-reads; ``distinct``: of different memory. ``part`` as in ``Move``."""

    number: int  # of the pass
    array: str
    loaded: int
    stored: int
    distinct: int
    part: str


def count(p: Problem, schedule: Schedule, maps: Maps | None = None) -> list[Moved]:
    """What ``walk`` moves over all heads and sequences, without walking."""
    return [
        moved
        for number in range(len(schedule.passes))
        for moved in _count_pass(p, schedule, number, maps)
        if sum(moved[2:4])
    ]


def _count_pass(p: Problem, schedule: Schedule, number: int, maps: Maps | None) -> Iterator[Moved]:
    one = schedule.passes[number]
    if one.cuts and maps is not None:
        raise ValueError(f"schedule: {schedule.name!r} cuts tiles of queries, which none with a tile map can have")
    heads, shares = heads_of(p, schedule, one, maps), shares_of(p, schedule, one)
    for where in ("keeps", "once", "streams", "updates", "writes", "leaves", "parts"):
        for name in getattr(one, where):
            array = schedule.known[name]
            if one.cuts and where in ("keeps", "leaves", "parts"):
                yield from _moved_by_cut_tiles(p, schedule, number, array, where)
                continue
            size, update = array.row_bytes(p), where == "updates"
            moving = heads.of_kv if by_kv_head(one, array, where) else heads.of_q
            holding = heads.of_kv if array.axis == "kv" else heads.of_q
            rows = [(*_rows_moved(grid, one, shares, array, where), n) for grid, n in moving]
            across = sum(round(moved * size) * n for moved, _, n in rows)
            if moving is not holding:
                rows = [(*_rows_moved(grid, one, shares, array, where), n) for grid, n in holding]
            different = sum(round(distinct * size) * n for _, distinct, n in rows)
            stored = across if where in ("updates", "writes", "leaves") else 0
            loaded = across if where not in ("writes", "leaves") else 0
            yield Moved(number, name, loaded, stored, different, part_of(array, bool(stored), update))


class _Rows(NamedTuple):
    """Of a pass that has ``cuts``, over all heads and sequences: rows of tiles that are whole, rows of those that are
    cut, and the latter once for each of their parts."""

    whole: int
    cut: int
    in_parts: int


def _cut_rows(p: Problem, schedule: Schedule, one: Pass) -> _Rows:
    rows = grid_of_pass(p, schedule, one).rows.tolist()
    # Whole heads before do not change a tile's place in its own.
    tiles = [(rows[-place % len(rows)], len(cuts) + 1) for place, cuts in enumerate(reversed(one.cuts), 1)]
    cut = sum(size for size, _ in tiles)
    return _Rows(p.batch * p.heads_q * p.seq_q - cut, cut, sum(size * parts for size, parts in tiles))


def _moved_by_cut_tiles(p: Problem, schedule: Schedule, number: int, array: Array, where: str) -> Iterator[Moved]:
    """What tiles of queries, and parts of them, load before and store after. Of whole ones and of parts apart: what the
    latter load several programs do."""
    one = schedule.passes[number]
    rows, size = _cut_rows(p, schedule, one), array.row_bytes(p)
    if where == "keeps":
        own = rows.in_parts if array.temporary else rows.cut
        moved = [(rows.whole if one.inner else 0, rows.whole if one.inner else 0), (rows.in_parts, own)]
    elif where == "leaves":
        moved = [(rows.whole if one.inner else rows.cut,) * 2]
    else:
        moved = [(rows.in_parts, rows.in_parts)]
    for across, different in moved:
        loaded, stored = (across, 0) if where == "keeps" else (0, across)
        part = part_of(array, where != "keeps", False)
        yield Moved(number, array.name, round(loaded * size), round(stored * size), round(different * size), part)


def last_touched(p: Problem, schedule: Schedule, number: int) -> dict[str, int]:
    """Different bytes that a pass loads or stores of tiles that are cut, by matrix: what it touches last."""
    one = schedule.passes[number]
    rows, tiles = _cut_rows(p, schedule, one), len(grid_of_pass(p, schedule, one).rows)
    heads_kv = -(-len(one.cuts) // (tiles * p.group))
    of_axis = {"q": rows.cut, "kv": heads_kv * p.seq_kv}
    names = (*one.keeps, *one.streams, *one.parts, *(() if one.inner else one.leaves))
    arrays = [schedule.known[name] for name in names]
    count = {array.name: rows.in_parts if array.temporary else of_axis[array.axis] for array in arrays}
    return {array.name: round(count[array.name] * array.row_bytes(p)) for array in arrays}


def _rows_moved(grid: Grid, one: Pass, shares: list[tuple[int, int]], array: Array, where: str) -> tuple[int, int]:
    """(rows moved, different ones) of a head; of pairs, elements."""
    if array.axis == "pair":
        pairs = grid.partial_pairs if array.partial else grid.pairs
        return pairs, pairs
    by_q = array.axis == "q"
    every, seen = (grid.rows, grid.visits > 0) if by_q else (grid.keys, grid.met)
    if where in ("streams", "updates", "writes"):
        moved = grid.visits * grid.rows if by_q else grid.visible_keys
        return int(moved.sum()), int(every[seen].sum())
    whole = where == "leaves" or (where == "keeps" and (one.inner is None or not one.skips))
    distinct = int(every.sum() if whole else every[seen].sum())
    if where == "once" or not by_q:
        return distinct, distinct
    if whole:
        return distinct * len(shares), distinct * (len(shares) if array.temporary else 1)  # of each share its own
    kept = sum(int(grid.rows[grid.meets(low, high)].sum()) for low, high in shares)
    return (kept if one.outer == "q" else distinct), distinct


def executed_flops(p: Problem, schedule: Schedule, maps: Maps | None = None) -> int:
    """FLOPs of the matrix products of all visited tiles, over all heads and sequences."""
    return sum(flops_of_passes(p, schedule, maps))


def flops_of_passes(p: Problem, schedule: Schedule, maps: Maps | None = None) -> list[int]:
    """``executed_flops`` of each pass."""
    found = []
    for one in schedule.passes:
        wide = one.products[0] * p.head_dim + one.products[1] * p.head_dim_v
        pairs = sum(grid.pairs * heads for grid, heads in heads_of(p, schedule, one, maps).of_q) if wide else 0
        found.append(2 * pairs * wide)
    return found


def programs(p: Problem, schedule: Schedule, one: Pass) -> tuple[int, int]:
    """(outer tiles of a head, heads of all sequences that have tiles of their own)."""
    grid = grid_of_pass(p, schedule, one)
    tiles = len(grid.rows) * len(shares_of(p, schedule, one)) if one.outer == "q" else len(grid.keys)
    heads = p.heads_kv if one.together or one.shared else p.heads_q
    return (1 if one.programs == "head" else tiles), p.batch * heads


def equal_walks(p: Problem, schedule: Schedule, one: Pass, maps: Maps | None = None) -> bool:
    """Whether the outer tiles of a pass meet equally many inner tiles each."""
    visits = [grid.visits for grid, _ in heads_of(p, schedule, one, maps).of_q]
    if one.outer == "q":
        return all(bool((each == visits[0][:1]).all()) for each in visits)
    keys = len(grid_of_pass(p, schedule, one).keys)
    return all(bool((each == keys).all()) for each in visits)


def keys_in_common(p: Problem, schedule: Schedule, one: Pass, maps: Maps | None = None) -> Tensor:
    """For each place between two tiles of queries of a head: the share of the keys that are seen at all which are seen
    both before and behind it; the mean over heads. Of passes over tiles of keys all of them."""
    heads = heads_of(p, schedule, one, maps).of_q
    if one.outer == "kv":
        return torch.ones(len(heads[0][0].keys) + 1, dtype=torch.float64)
    shares = [grid.common.double() / max(int(grid.keys[grid.met].sum()), 1) * count for grid, count in heads]
    return torch.stack(shares).sum(0) / max(sum(count for _, count in heads), 1)
