"""Bytes by memory level: what a schedule's programs load and store, and how much of it reaches the slow memory.

``counting.count`` says what crosses the edge of the chip. Between that and the slow memory stands a shared cache (a
GPU's L2, a CPU's last level), and the model of it is this:

- A program works on one outer tile (or one head), and as many run at once as there are units, times the programs whose
  tiles fit a unit's on-chip memory. They are handed out head after head, or by sections of heads with the long tiles
  first.
- What several of them read (the keys of a head, say) is read from the slow memory once for all that run at the same
  time, which walk over it in step. Those of a later turn find what ``USABLE`` of the cache has not lost since
  (``reuse.py``): what all programs read is in the cache twice, once for each half of the multiprocessors, and what one
  program alone reads or leaves is in it once.
- Where a mask makes walks of different lengths, head after head, they are soon out of step, and what does not fit
  ``USABLE`` of the cache of what the heads in flight read again (the working set) is read anew each time.
- A program that has a head to itself shares with nobody: what does not fit it reads anew in every turn.
- What one pass leaves is found by the next if all that both touch fits; between passes of one program, if it fits for
  the heads in flight. Tiles that are cut ("stream-K") come last: of their parts' results so much is lost as by half of
  what these tiles, and the pass that merges them, touch. Before the first pass the cache is cold.
- Everything stored reaches the slow memory once, sooner or later; what is updated in place, once if it fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnworks.hardware import Hardware
from attnworks.problem import Problem
from attnworks.traffic import Lengths, default_lengths
from attnworks.workbench import counting, reuse
from attnworks.workbench.counting import Moved
from attnworks.workbench.grid import Maps
from attnworks.workbench.loops import Pass, Schedule
from attnworks.workbench.reuse import Turns

# On NVIDIA's larger cards each half of the L2 serves half of the multiprocessors: what all read is in both. Of CPUs'
# last levels the rest holds what streams by.
USABLE = 0.5
MOST_RESIDENT = 8  # programs of a multiprocessor; registers allow no more of the kernels here


class Crossed(NamedTuple):
    """Bytes of one matrix in one pass. ``cache``: loaded and stored by programs, re-reads included. ``read`` and
    ``written``: of these from and to the slow memory. ``why``: what the cache did."""

    kernel: str
    array: str
    cache: int
    read: int
    written: int
    why: str


@dataclass(frozen=True)
class Levels:
    """One problem under one schedule on one machine.

    ``held_bytes``: the tiles that one program has on chip at a time. ``flops``: executed, of all visited tiles.
    ``memory_seconds`` and ``compute_seconds``: what the slow memory and the products take at the machine's rates, None
    where those are unknown; the latter with the units that are left idle by the last wave of programs.
    """

    schedule: str
    machine: str
    rows: tuple[Crossed, ...]
    held_bytes: int
    flops: int
    memory_seconds: float | None
    compute_seconds: float | None
    idle: float

    @property
    def read(self) -> int:
        return sum(row.read for row in self.rows)

    @property
    def written(self) -> int:
        return sum(row.written for row in self.rows)

    @property
    def cache(self) -> int:
        return sum(row.cache for row in self.rows)

    @property
    def seconds(self) -> float | None:
        """The longer of the two, as if the shorter were hidden under it."""
        if self.memory_seconds is None or self.compute_seconds is None:
            return None
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        """What takes that long: "slow memory", "products", "idle units"; "" where it is unknown."""
        if self.memory_seconds is None or self.compute_seconds is None:
            return ""
        if self.memory_seconds >= self.compute_seconds:
            return "slow memory"
        busy = self.compute_seconds * (1 - self.idle)
        return "idle units" if self.idle > 0.5 or busy < self.memory_seconds else "products"

    def to_json(self) -> dict[str, Any]:
        own = asdict(self) | {"rows": [row._asdict() for row in self.rows]}
        return own | {name: getattr(self, name) for name in ("read", "written", "cache", "seconds", "bound")}


def levels(
    p: Problem, schedule: Schedule, hardware: Hardware, *, lengths: Lengths | None = None, maps: Maps | None = None
) -> Levels:
    """``schedule`` on ``hardware``. ``lengths``: (seq_q, seq_kv) of each sequence of a packed or cached problem, by
    default as ``traffic.default_lengths`` has them. ``maps``: which tiles a mask hides, beyond closed bounds
    (``grid.maps_of``)."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    flops = held = 0
    stretched = 0.0
    for (seq_q, seq_kv), sequences in Counter(lengths or default_lengths(p)).items():
        one = replace(p, batch=sequences, seq_q=seq_q, seq_kv=seq_kv)
        for row in _rows(one, schedule, hardware, maps):
            sums = rows.setdefault((row.kernel, row.array, row.why), [0, 0, 0])
            for place, size in enumerate((row.cache, row.read, row.written)):
                sums[place] += size
        for part, products in zip(schedule.passes, counting.flops_of_passes(one, schedule, maps), strict=True):
            flops += products
            stretched += products / (1 - _idle(one, schedule, part, hardware))
            held = max(held, _held(one, schedule, part))
    rate = hardware.flops_for(p.dtype)
    moved = sum(read + written for _, read, written in rows.values())
    return Levels(
        schedule=schedule.name,
        machine=hardware.name,
        rows=tuple(Crossed(*of[:2], sizes[0], sizes[1], sizes[2], of[2]) for of, sizes in rows.items()),
        held_bytes=held,
        flops=flops,
        memory_seconds=moved / hardware.bandwidth if hardware.bandwidth else None,
        compute_seconds=stretched / rate if rate else None,
        idle=1 - flops / stretched if stretched else 0.0,
    )


def _idle(p: Problem, schedule: Schedule, one: Pass, hardware: Hardware) -> float:
    """The share of the units' time that programs of equal length leave unused. Tiles that are cut are dealt out to all
    units as evenly as their tiles of keys allow."""
    units = max(hardware.units, 1)
    tiles, heads = counting.programs(p, schedule, one)
    programs = tiles * heads
    if not programs:
        return 0.0
    if not (one.cuts and one.inner):
        return 1 - programs / (math.ceil(programs / units) * units)
    inner = max(math.ceil(p.seq_kv / (one.tile_kv or schedule.tile_kv)), 1)
    longest = math.ceil((programs - len(one.cuts)) / units) * inner + math.ceil(len(one.cuts) * inner / units)
    return 1 - programs * inner / (longest * units)


def _held(p: Problem, schedule: Schedule, one: Pass) -> int:
    """Bytes of the tiles that a program has on chip."""
    tile_q, tile_kv = min(one.tile_q or schedule.tile_q, p.seq_q), min(one.tile_kv or schedule.tile_kv, p.seq_kv)
    names = (*one.keeps, *one.streams, *one.updates)
    rows = {"q": tile_q, "kv": tile_kv, "pair": tile_q * tile_kv}
    return round(sum(rows[schedule.known[name].axis] * schedule.known[name].row_bytes(p) for name in names))


# ---- the cache -------------------------------------------------------------------------------------------------------


class _InFlight(NamedTuple):
    """Of a pass: programs in all and that run at once, heads (sequences times those that have tiles of their own) that
    these belong to, programs of a head, whether all of them walk over equally many tiles, heads of a section (0: none),
    and the share of the keys that ``counting.keys_in_common`` has."""

    programs: int
    at_once: int
    heads: int
    tiles: int
    in_step: bool
    section: int
    common: Tensor


def _in_flight(p: Problem, schedule: Schedule, one: Pass, hardware: Hardware, maps: Maps | None) -> _InFlight:
    tiles, heads = counting.programs(p, schedule, one)
    resident = one.resident or 1
    if not one.resident and hardware.kind == "gpu" and hardware.on_chip_bytes:
        fit = hardware.on_chip_bytes // max(2 * _held(p, schedule, one), 1)  # a second tile is on its way
        resident = min(max(fit, 1), MOST_RESIDENT)
    at_once = min(max(tiles * heads, 1), max(hardware.units, 1) * resident)
    section = one.section(p) if one.section else 0
    at_a_time = min(section or math.ceil(at_once / max(tiles, 1)), max(heads, 1))
    equal = counting.equal_walks(p, schedule, one, maps)
    common = counting.keys_in_common(p, schedule, one, maps)
    return _InFlight(tiles * heads, at_once, at_a_time, tiles, equal, section, common)


def _rows(p: Problem, schedule: Schedule, hardware: Hardware, maps: Maps | None) -> Iterator[Crossed]:
    capacity = USABLE * (hardware.shared_cache_bytes or 0)
    moved = counting.count(p, schedule, maps)
    found: list[Crossed] = []
    left: dict[str, int] = {}  # what the passes before left in the cache: bytes by matrix
    for number, one in enumerate(schedule.passes):
        own = [part for part in moved if part.number == number]
        flight = _in_flight(p, schedule, one, hardware, maps)
        touched: dict[str, int] = Counter()
        for part in own:
            touched[part.array] += part.distinct
        last = _last_touched(p, schedule, number) if one.cuts else touched
        heads_of_pass = max(counting.programs(p, schedule, one)[1], 1)
        share = flight.heads / heads_of_pass if one.fused else 1.0
        survives = share * sum((left | touched).values()) <= capacity
        lost = 0.0 if survives else 1.0
        if one.cuts and not one.inner:  # half of it came after what is looked for, on average
            lost = float(reuse.lost(torch.tensor(sum((left | last).values()) / 2), capacity))
        kept = min(capacity / max(_working_set(p, one, own, flight), 1e-9), 1.0)
        missed = _missed(p, one, own, flight, capacity)
        for part in own:
            read, written, why = _through_cache(one, part, flight, kept, missed.get(part.array, 0.0))
            if lost < 1 and part.array in left:
                if part.loaded:
                    read, why = round(part.loaded * lost), "left by the pass before"
                if written:  # over what has not reached the slow memory yet
                    found = [row._replace(written=0) if row.array == part.array else row for row in found]
            found.append(Crossed(one.name, part.array, part.loaded + part.stored, read, written, why))
        left = last | left if survives else last
    yield from found


def _last_touched(p: Problem, schedule: Schedule, number: int) -> dict[str, int]:
    """What a pass touches last, bytes by matrix; of what one program alone reads or stores the ``USABLE`` share, as it
    goes through one half of the cache."""
    found = counting.last_touched(p, schedule, number)
    return {name: size if schedule.known[name].axis == "kv" else round(USABLE * size) for name, size in found.items()}


def _working_set(p: Problem, one: Pass, moved: list[Moved], flight: _InFlight) -> float:
    """Bytes that the heads in flight read more than once."""
    by_kv_head = one.together or one.shared
    total = 0.0
    for part in moved:
        if not _again(part):
            continue
        heads, at_once = p.batch * (p.heads_kv if by_kv_head else p.heads_q), flight.heads
        if part.part == "kv" and not by_kv_head:  # query heads of a group have these keys in common
            heads, at_once = p.batch * p.heads_kv, math.ceil(flight.heads / p.group)
        total += part.distinct * min(at_once / max(heads, 1), 1.0)
    return total


def _again(part: Moved) -> bool:
    return max(part.loaded, part.stored) > part.distinct


def _missed(p: Problem, one: Pass, moved: list[Moved], flight: _InFlight, capacity: float) -> dict[str, float]:
    """By matrix, how many times over it is read anew by later turns of programs."""
    # Several programs read the queries of a tile that is cut, but all in the same turn.
    again = [part for part in moved if _again(part) and (part.part == "kv" or not one.cuts)]
    passing = sum(part.loaded + part.stored for part in moved if part not in again) * flight.at_once / 2
    found = {}
    for part in again:
        if one.outer == "kv" and not flight.in_step:
            continue  # each tile of keys sees other rows, and what several see is not worked out
        by_group = part.part == "kv" and not (one.together or one.shared)
        turns = Turns(flight.programs, flight.at_once, flight.tiles * (flight.section or (p.group if by_group else 1)))
        if flight.section:
            share, blocks = reuse.longest_first(turns, flight.section, flight.common)
        else:
            share, blocks = reuse.head_after_head(
                turns, flight.common if len(flight.common) == turns.block + 1 else None
            )
        touched = blocks * turns.block * sum(each.distinct for each in again) + passing
        found[part.array] = float((share * reuse.lost(touched / flight.programs, capacity)).sum())
    return found


def _through_cache(one: Pass, part: Moved, flight: _InFlight, kept: float, missed: float) -> tuple[int, int, str]:
    """(read, written, why) of the slow memory. ``kept``: the share of the working set that fits; ``missed``: how many
    times over the matrix is read anew by later turns."""
    if not _again(part):
        return part.loaded, part.stored, ""
    if part.stored or one.programs == "head":
        if kept == 1:
            return min(part.loaded, part.distinct), min(part.stored, part.distinct), "re-reads from the cache"
        return part.loaded, part.stored, "does not fit the cache"
    drifting = 0.0 if flight.in_step or flight.section else (part.loaded - part.distinct) * (1 - kept)
    anew = min(max(drifting, part.distinct * missed), part.loaded - part.distinct)
    share = anew / max(part.distinct, 1)
    why = f"{share:.0%} read again, lost by the cache" if share >= 0.005 else "re-reads from the cache"
    return part.distinct + round(anew), 0, why


# ---- measured --------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Bytes of one call that a profiler counted, None where it didn't."""

    read: float | None
    written: float | None
    cache: float | None


def measured_from(value: Any) -> Measured:
    """From JSON: a Record with a profile, a profile (``dram_read_bytes``, ``dram_written_bytes``, ``l2_bytes``), or a
    list of kernels as ``profile.Kernel.to_json`` writes them. Raises ``ValueError`` for anything else."""
    from attnworks.workbench import profile

    if isinstance(value, dict) and isinstance(value.get("profile"), dict):
        value = value["profile"]
    if isinstance(value, dict) and "dram_read_bytes" in value:
        return Measured(*(value.get(name) for name in ("dram_read_bytes", "dram_written_bytes", "l2_bytes")))
    if isinstance(value, list) and value and all(isinstance(one, dict) and "metrics" in one for one in value):
        kernels = [profile.Kernel(one.get("name", ""), one["metrics"]) for one in value]
        return Measured(*(profile.total(kernels, metric) for metric in profile.BYTES))
    raise ValueError(
        "measured: was neither a record with a profile, nor an object with dram_read_bytes, dram_written_bytes and "
        "l2_bytes, nor a list of kernels with metrics"
    )


def compared(found: Levels, measured: Measured) -> list[tuple[str, int, float | None, float | None]]:
    """(level, predicted, measured, error) for each; the error is (predicted - measured) / measured."""
    total = None if measured.read is None or measured.written is None else measured.read + measured.written
    pairs = (
        ("slow memory, read", found.read, measured.read),
        ("slow memory, written", found.written, measured.written),
        ("slow memory", found.read + found.written, total),
        ("shared cache", found.cache, measured.cache),
    )
    return [(name, ours, theirs, (ours - theirs) / theirs if theirs else None) for name, ours, theirs in pairs]
