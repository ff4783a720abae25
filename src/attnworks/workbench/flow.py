"""The page of ``attnworks flow``: data movement step by step, from the same loops that count the bytes.

``story`` turns schedules into JSON-ready data, ``render`` puts it into one HTML page that needs nothing else. Steps of
an inner loop that move the same bytes are written as one run, so that the page stays small; the browser adds up, it
knows no model of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import torch

from attnworks import masks
from attnworks.problem import Problem
from attnworks.traffic import visible_range
from attnworks.workbench import loops, schedules
from attnworks.workbench.loops import Grid, Pass, Schedule, Step

MOST_TILES = 128  # on a side of the grid: more would be too small to see
PARTS = {
    "q": "rows of queries read",
    "kv": "keys and values read",
    "scores_and_probs": "N × N matrices written and read",
    "state": "running results read and written again",
    "out": "results written",
}
_NAMES = {
    "q": "Q", "k": "K", "v": "V", "out": "O", "lse": "LSE", "m": "m", "l": "l", "s": "S", "p": "P", "acc": "acc",
    "part": "partial O", "d_out": "dO", "delta": "delta", "d_q": "dQ", "d_k": "dK", "d_v": "dV", "d_q_sum": "dQ (fp32)",
    "d_p": "dP", "d_s": "dS", "page_table": "page table",
}  # fmt: skip
_KINDS = ("begin", "visit", "end")


def render(told: dict[str, Any]) -> str:
    """The page of what ``story`` told, as a string. Raises ``ModuleNotFoundError`` without jinja2, naming the extra to
    install."""
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"flow needs {error.name}: pip install 'attnworks[report]'", name=error.name
        ) from error
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = files("attnworks.workbench").joinpath("templates/flow.html.j2").read_text(encoding="utf-8")
    return engine.from_string(text).render(story=told)


def story(p: Problem, asked: Sequence[Schedule]) -> dict[str, Any]:
    """What the page shows, JSON-ready: the problem in words, and for each schedule its grids, passes, steps and bytes.

    One query head of one sequence is stepped through; ``all_bytes`` counts every one. Raises ``ValueError`` for a
    problem whose grid has more than ``MOST_TILES`` tiles on a side.
    """
    for schedule in asked:
        for one in schedule.passes:
            _check_size(p, schedule, one)
    return {
        "problem": _in_words(p),
        "mask": masks.describe(p.mask),
        "heads": p.batch * p.heads_q,
        "group": p.group,
        "backward": any(schedule.backward for schedule in asked),
        "parts": PARTS,
        "schedules": [_schedule(p, schedule) for schedule in asked],
    }


def totals(steps: Iterable[Step]) -> Counter[str]:
    """Bytes of steps by the bill's names."""
    found: Counter[str] = Counter()
    for step in steps:
        for move in step.moves:
            found[move.part] += move.bytes
    return found


def _check_size(p: Problem, schedule: Schedule, one: Pass) -> None:
    for name, length in (("tile_q", p.seq_q), ("tile_kv", p.seq_kv)):
        tile = getattr(one, name) or getattr(schedule, name)
        if -(-length // tile) > MOST_TILES:
            raise ValueError(
                f"{name}: was {tile}, which makes {-(-length // tile)} tiles of {length} rows, must be at least "
                f"{-(-length // MOST_TILES)} for {MOST_TILES} tiles to be drawn"
            )


def _in_words(p: Problem) -> str:
    keys = f" × {p.seq_kv}" if p.seq_kv != p.seq_q else ""
    count = f"{p.heads_q} head{'s' if p.heads_q > 1 else ''}"
    heads = count if p.group == 1 else f"{count} on {p.heads_kv} KV heads"
    dims = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim} and {p.head_dim_v}"
    dtype = str(p.dtype).removeprefix("torch.")
    return f"N = {p.seq_q}{keys}, head_dim {dims}, {dtype}, batch {p.batch}, {heads}, mask: {masks.describe(p.mask)}"


def _schedule(p: Problem, schedule: Schedule) -> dict[str, Any]:
    labels = schedules.BACKWARD_LABELS if schedule.backward else schedules.LABELS
    steps = list(loops.walk(p, schedule))
    moved = loops.count(p, schedule)
    used = {name for one in schedule.passes for name in _arrays_of(one)}
    grids: list[dict[str, Any]] = []
    passes = [_pass(p, schedule, one, grids) for one in schedule.passes]
    if not schedule.backward:
        for grid in grids:
            grid["example"] = _example(p, grid)
    stored = {move.array for step in steps for move in step.moves if move.stored}
    sets: dict[tuple[Any, ...], int] = {}
    runs = _runs(schedule, steps, sets)
    return {
        "name": schedule.name,
        "label": labels.get(schedule.name, schedule.name),
        "arrays": [
            {"name": name, "label": _NAMES.get(name, name), "axis": schedule.known[name].axis, "made": name in stored}
            for name in sorted(used, key=lambda name: list(schedule.known).index(name))
        ],
        "grids": grids,
        "passes": passes,
        "moves": [[list(move) for move in moves] for moves in sets],
        "runs": runs,
        "steps": len(steps),
        "head_bytes": dict(totals(steps)),
        "all_bytes": sum(one.loaded + one.stored for one in moved),
    }


def _arrays_of(one: Pass) -> tuple[str, ...]:
    return (*one.keeps, *one.once, *one.streams, *one.updates, *one.writes, *one.leaves)


def _pass(p: Problem, schedule: Schedule, one: Pass, grids: list[dict[str, Any]]) -> dict[str, Any]:
    tile_q, tile_kv = one.tile_q or schedule.tile_q, one.tile_kv or schedule.tile_kv
    grid = _grid(loops.grid_of(p, tile_q, tile_kv, together=one.together), tile_q, tile_kv)
    if grid not in grids:
        grids.append(grid)
    begin, visit, end = one.says
    return {
        "name": one.name,
        "outer": one.outer,
        "inner": one.inner,
        "skips": one.skips,
        "grid": grids.index(grid),
        "registers": [_NAMES.get(name, name) for name in one.registers],
        "says": [begin or _plain(one, "begin"), visit or _plain(one, "visit"), end or _plain(one, "end")],
        **{name: list(getattr(one, name)) for name in ("keeps", "once", "streams", "updates", "writes", "leaves")},
    }


def _plain(one: Pass, kind: str) -> str:
    """What a schedule without words of its own does."""
    lists = {
        "begin": (("Load and keep", one.keeps),),
        "visit": (("Load", one.streams), ("Load and write back", one.updates), ("Write", one.writes)),
        "end": (("Write", one.leaves),),
    }
    said = [f"{verb} {', '.join(_NAMES.get(name, name) for name in names)}." for verb, names in lists[kind] if names]
    return " ".join(said)


def _grid(grid: Grid, tile_q: int, tile_kv: int) -> dict[str, Any]:
    ranges = (grid.first, grid.last, grid.full_first, grid.full_last)
    return {
        "tile_q": tile_q,
        "tile_kv": tile_kv,
        "rows": len(grid.rows),
        "keys": len(grid.keys),
        "ranges": [[int(x) for x in row] for row in zip(*ranges, strict=True)],
    }


def _example(p: Problem, grid: dict[str, Any]) -> list[list[tuple[float | None, float]]]:
    """For the first row of each tile of queries of random inputs: (m, l) after each tile of keys that the tile sees; m
    is None while the row saw no key."""
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(grid["rows"], p.head_dim, generator=drawn, dtype=torch.float64)
    k = torch.randn(p.seq_kv, p.head_dim, generator=drawn, dtype=torch.float64)
    first = torch.arange(grid["rows"]) * grid["tile_q"]
    low, high = visible_range(p, first, torch.ones_like(first))
    keys = torch.arange(p.seq_kv)
    scores = (q @ k.T * p.scale).masked_fill((keys < low[:, None]) | (keys >= high[:, None]), -math.inf)
    found = []
    for row, (start, stop, _, _) in zip(scores, grid["ranges"], strict=True):
        states: list[tuple[float | None, float]] = []
        running_max, running_sum = -math.inf, 0.0
        for tile in range(start, stop):
            part = row[tile * grid["tile_kv"] : (tile + 1) * grid["tile_kv"]]
            new_max = max(running_max, float(part.max()))
            if new_max > -math.inf:
                running_sum = running_sum * math.exp(running_max - new_max) + float((part - new_max).exp().sum())
                running_max = new_max
            states.append((round(running_max, 3) if running_max > -math.inf else None, round(running_sum, 3)))
        found.append(states)
    return found


def _runs(schedule: Schedule, steps: Sequence[Step], sets: dict[tuple[Any, ...], int]) -> list[list[int]]:
    """Steps as [pass, kind, tile of queries, tile of keys, steps, moves]: in a run the inner tile goes up by one each
    step. −1 where there is no tile. ``sets`` numbers the different moves."""
    runs: list[list[int]] = []
    for step in steps:
        tiles = [-1 if tile is None else tile for tile in (step.q_tile, step.kv_tile)]
        number = sets.setdefault(step.moves, len(sets))
        if runs and step.kind == "visit":
            in_pass, kind, q_tile, kv_tile, length, moves = runs[-1]
            by_kv = schedule.passes[step.number].inner == "kv"
            expected = [q_tile, kv_tile + length] if by_kv else [q_tile + length, kv_tile]
            if (in_pass, kind, moves) == (step.number, _KINDS.index("visit"), number) and tiles == expected:
                runs[-1][4] += 1
                continue
        runs.append([step.number, _KINDS.index(step.kind), *tiles, 1, number])
    return runs
