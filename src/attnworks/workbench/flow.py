"""The page of ``attnworks flow``: data movement step by step, from the same loops that count the bytes.

``story`` turns schedules into JSON-ready data, ``render`` puts it into one HTML page that needs nothing else. Steps of
an inner loop that move the same bytes are written as one run, so that the page stays small; the browser adds up, it
knows no model of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from attnworks import masks, tilemap
from attnworks.masks import Bounds
from attnworks.problem import Problem
from attnworks.tilemap import Sizes
from attnworks.traffic import Lengths, default_lengths, visible_range
from attnworks.workbench import counting, loops, papers
from attnworks.workbench.grid import Grid, Maps
from attnworks.workbench.loops import Pass, Schedule, Step

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


@dataclass(frozen=True)
class _Shown:
    """What is stepped through: ``p`` is one sequence, or packed ones of ``lengths``; ``maps`` say what a mask hides
    beyond closed bounds."""

    p: Problem
    lengths: Lengths | None
    maps: Maps | None


def story(
    p: Problem, asked: Sequence[Schedule], *, lengths: Lengths | None = None, maps: Maps | None = None
) -> dict[str, Any]:
    """What the page shows, JSON-ready: the problem in words, and for each schedule its grids, passes, steps and bytes.

    One query head is stepped through, of one sequence (the longest) or of all packed ones; ``all_bytes`` counts every
    head and sequence. ``lengths``: (seq_q, seq_kv) of each sequence of a packed or cached problem, by default as
    ``traffic.default_lengths`` has them. Raises ``ValueError`` for a problem whose grid has more than ``MOST_TILES``
    tiles on a side.
    """
    lengths = default_lengths(p) if lengths is None else lengths
    longest = max(lengths, key=lambda one: one[::-1], default=(p.seq_q, p.seq_kv))
    one = p if p.form == "varlen" else replace(p, seq_q=longest[0], seq_kv=longest[1])
    shown = _Shown(one, lengths if p.form == "varlen" else None, maps)
    return {
        "problem": _in_words(p, lengths),
        "stepped": _stepped(p, asked, lengths),
        "mask": masks.describe(p.mask),
        "backward": any(schedule.backward for schedule in asked),
        "parts": PARTS,
        "schedules": [
            _schedule(shown, schedule) | {"all_bytes": _all_bytes(p, schedule, lengths, maps)} for schedule in asked
        ],
    }


def _all_bytes(p: Problem, schedule: Schedule, lengths: Lengths, maps: Maps | None) -> int:
    total = 0
    for (seq_q, seq_kv), sequences in Counter(lengths).items():
        moved = counting.count(replace(p, batch=sequences, seq_q=seq_q, seq_kv=seq_kv), schedule, maps)
        total += sum(one.loaded + one.stored for one in moved)
    return total


def totals(steps: Iterable[Step]) -> Counter[str]:
    """Bytes of steps by the bill's names."""
    found: Counter[str] = Counter()
    for step in steps:
        for move in step.moves:
            found[move.part] += move.bytes
    return found


def _check_size(grid: Grid, tile_q: int, tile_kv: int) -> None:
    for name, tile, parts in (("tile_q", tile_q, grid.rows), ("tile_kv", tile_kv, grid.keys)):
        if len(parts) > MOST_TILES:
            length = int(parts.sum())
            raise ValueError(
                f"{name}: was {tile}, which makes {len(parts)} tiles of {length} rows, must be at least "
                f"{-(-length // MOST_TILES)} for {MOST_TILES} tiles to be drawn"
            )


def _in_words(p: Problem, lengths: Lengths) -> str:
    keys = f" × {p.seq_kv}" if p.seq_kv != p.seq_q else ""
    sizes = f"N = {p.seq_q}{keys}"
    if p.form == "varlen":
        each = ", ".join(f"{q}" if q == kv else f"{q} × {kv}" for q, kv in lengths)
        sizes = f"{len(lengths)} packed sequence{'s' if len(lengths) > 1 else ''}, N = {each}"
    elif p.form == "decode":
        held = sorted({kv for _, kv in lengths})
        keys = f"{held[0]}" if len(held) == 1 else f"{held[0]} to {held[-1]}"
        sizes = f"decode: {p.seq_q} quer{'y' if p.seq_q == 1 else 'ies'} on caches of {keys} keys"
    count = f"{p.heads_q} head{'s' if p.heads_q > 1 else ''}"
    heads = count if p.group == 1 else f"{count} on {p.heads_kv} KV head{'s' if p.heads_kv > 1 else ''}"
    dims = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim} and {p.head_dim_v}"
    dtype = str(p.dtype).removeprefix("torch.")
    batch = "" if p.form == "varlen" else f"batch {p.batch}, "
    return f"{sizes}, head_dim {dims}, {dtype}, {batch}{heads}, mask: {masks.describe(p.mask)}"


def _stepped(p: Problem, asked: Sequence[Schedule], lengths: Lengths) -> str:
    """Which of the heads and sequences are stepped through, where there are several."""
    packed, together = p.form == "varlen", any(one.together for schedule in asked for one in schedule.passes)
    heads = p.heads_q if packed else p.batch * p.heads_q
    said = []
    if heads > 1:
        where = " of the longest sequence" if len(set(lengths)) > 1 and not packed else ""
        shared = f" (what {p.group} query heads share is counted with this one)" if p.group > 1 else ""
        said.append(f"One query head of {heads}{where} is stepped through; the last column counts them all{shared}.")
    if any(one.cuts for schedule in asked for one in schedule.passes):
        said.append("It is the last head: of the last tiles of queries the keys are cut into parts.")
    if packed and len(lengths) > 1:
        said.append("The sequences lie one behind the other: tiles of different ones never meet.")
    if together and p.group > 1:
        said.append(
            f"Where the {p.group} query heads of a group are rows of one tile, all of them are stepped through."
        )
    return " ".join(said)


def _schedule(shown: _Shown, schedule: Schedule) -> dict[str, Any]:
    labels = papers.BACKWARD_LABELS if schedule.backward else papers.LABELS
    grids: list[dict[str, Any]] = []
    passes = [_pass(shown, schedule, one, grids) for one in schedule.passes]
    steps = list(loops.walk(shown.p, schedule, lengths=shown.lengths, maps=shown.maps))
    used = {name for one in schedule.passes for name in _arrays_of(one)}
    stored = {move.array for step in steps for move in step.moves if move.stored}
    sets: dict[tuple[Any, ...], int] = {}
    runs = _runs(schedule, steps, sets)
    shares = {
        name: len(told["shares"])
        for told in passes
        for name in (*told["leaves"], *told["parts"])
        if schedule.known[name].temporary
    }
    return {
        "name": schedule.name,
        "label": labels.get(schedule.name, schedule.name),
        "arrays": [
            {"name": name, "label": _NAMES.get(name, name), "axis": schedule.known[name].axis, "made": name in stored,
             "shares": shares.get(name, 1)}
            for name in sorted(used, key=lambda name: list(schedule.known).index(name))
        ],
        "grids": grids,
        "passes": passes,
        "moves": [[list(move) for move in moves] for moves in sets],
        "runs": runs,
        "steps": len(steps),
        "head_bytes": dict(totals(steps)),
    }  # fmt: skip


def _arrays_of(one: Pass) -> tuple[str, ...]:
    return (*one.keeps, *one.once, *one.streams, *one.updates, *one.writes, *one.leaves, *one.parts)


def _pass(shown: _Shown, schedule: Schedule, one: Pass, grids: list[dict[str, Any]]) -> dict[str, Any]:
    tile_q, tile_kv = one.tile_q or schedule.tile_q, one.tile_kv or schedule.tile_kv
    walked = loops.walked_grid(shown.p, schedule, one, shown.lengths, shown.maps)
    _check_size(walked, tile_q, tile_kv)
    grid = _grid(walked, tile_q, tile_kv)
    if grid not in grids:
        grids.append(grid)
    shares = _shares(shown, schedule, one, walked)
    sums = one.inner and "m" in one.registers and not schedule.backward
    begin, visit, end = one.says
    return {
        "name": one.name,
        "outer": one.outer,
        "inner": one.inner,
        "skips": one.skips,
        "grid": grids.index(grid),
        "shares": shares,
        "whole": sum(not parts for parts in loops.parts_of_head(shown.p, one, walked))
        if one.cuts
        else len(walked.rows),
        "example": _example(shown, walked, shares) if sums else None,
        "registers": [_NAMES.get(name, name) for name in one.registers],
        "says": [begin or _plain(one, "begin"), visit or _plain(one, "visit"), end or _plain(one, "end")],
        **{
            name: list(getattr(one, name))
            for name in ("keeps", "once", "streams", "updates", "writes", "leaves", "parts")
        },
    }


def _shares(shown: _Shown, schedule: Schedule, one: Pass, grid: Grid) -> list[Any]:
    """[first, last) of the tiles of keys of each share, for each tile of queries where some of these are cut: the parts
    of those that have fewer than others end with the keys."""
    keys = len(grid.keys)
    if not one.cuts:
        found = [(0, keys)] if shown.lengths else loops.shares_of(shown.p, schedule, one)
        return [list(share) for share in found]
    rows = loops.parts_of_head(shown.p, one, grid)
    most = max(1, *map(len, rows))
    return [[list(((parts or ((0, keys),))[n : n + 1] or ((keys, keys),))[0]) for parts in rows] for n in range(most)]


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
    return {
        "tile_q": tile_q,
        "tile_kv": tile_kv,
        "rows": len(grid.rows),
        "keys": len(grid.keys),
        "own": grid.own.tolist(),
        "spans": [[[int(x) for x in span] for span in grid.spans(row)] for row in range(len(grid.rows))],
    }


def _example(shown: _Shown, grid: Grid, shares: list[Any]) -> list[list[tuple[float | None, float]]] | None:
    """For the first row of each tile of queries of random inputs: (m, l) after each tile of keys that the tile sees,
    begun anew in each share; m is None while the row saw no key. None where a mask is known to kernels alone."""
    visible = _first_rows(shown, grid)
    if visible is None:
        return None
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(len(grid.rows), shown.p.head_dim, generator=drawn, dtype=torch.float64)
    k = torch.randn(visible.shape[1], shown.p.head_dim, generator=drawn, dtype=torch.float64)
    scores = torch.split((q @ k.T * shown.p.scale).masked_fill(~visible, -math.inf), grid.keys.tolist(), 1)
    found = []
    for row in range(len(grid.rows)):
        states: list[tuple[float | None, float]] = []
        for share in shares:
            low, high = share[row] if isinstance(share[0], list) else share
            running_max, running_sum = -math.inf, 0.0
            for tile in grid.tiles_of(row, low, high):
                part = scores[tile][row]
                new_max = max(running_max, float(part.max()))
                if new_max > -math.inf:
                    running_sum = running_sum * math.exp(running_max - new_max) + float((part - new_max).exp().sum())
                    running_max = new_max
                states.append((round(running_max, 3) if running_max > -math.inf else None, round(running_sum, 3)))
        found.append(states)
    return found


def _first_rows(shown: _Shown, grid: Grid) -> Tensor | None:
    """Booleans (tiles of queries, keys): which keys the first row of each tile sees."""
    p = shown.p
    if shown.maps is not None:
        sizes = Sizes(1, 1, p.seq_q, p.seq_kv, 1, p.seq_kv)
        return tilemap.visible(p.mask, shown.maps.operands, sizes, grid.position, torch.zeros_like(grid.position))[:, 0]
    if not all(isinstance(term, Bounds) for term in p.mask):
        return None
    visible = torch.zeros(len(grid.rows), int(grid.keys.sum()), dtype=torch.bool)
    sequence, before = (grid.position == 0).cumsum(0) - 1, 0
    lengths = shown.lengths or [(p.seq_q, p.seq_kv)]
    with_rows = [number for number, (seq_q, _) in enumerate(lengths) if seq_q]
    for number, (seq_q, seq_kv) in enumerate(lengths):
        rows = sequence == with_rows.index(number) if seq_q else torch.zeros_like(sequence, dtype=torch.bool)
        position = grid.position[rows]
        low, high = visible_range(replace(p, seq_q=seq_q, seq_kv=seq_kv), position, torch.ones_like(position))
        keys = torch.arange(seq_kv)
        visible[rows, before : before + seq_kv] = (keys >= low[:, None]) & (keys < high[:, None])
        before += seq_kv
    return visible


def _runs(schedule: Schedule, steps: Sequence[Step], sets: dict[tuple[Any, ...], int]) -> list[list[int]]:
    """Steps as [pass, kind, tile of queries, tile of keys, steps, moves, share]: in a run the inner tile goes up by one
    each step. −1 where there is no tile. ``sets`` numbers the different moves."""
    runs: list[list[int]] = []
    for step in steps:
        tiles = [-1 if tile is None else tile for tile in (step.q_tile, step.kv_tile)]
        number = sets.setdefault(step.moves, len(sets))
        if runs and step.kind == "visit":
            in_pass, kind, q_tile, kv_tile, length, moves, share = runs[-1]
            by_kv = schedule.passes[step.number].inner == "kv"
            expected = [q_tile, kv_tile + length] if by_kv else [q_tile + length, kv_tile]
            here = (step.number, _KINDS.index("visit"), number, step.share)
            if (in_pass, kind, moves, share) == here and tiles == expected:
                runs[-1][4] += 1
                continue
        runs.append([step.number, _KINDS.index(step.kind), *tiles, 1, number, step.share])
    return runs
