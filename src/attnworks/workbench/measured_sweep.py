"""Tiles measured on the device at hand: candidates that fit are verified, raced in heats, and the fastest held against
the backend's own choice.

In each heat a few candidates and the backend's choice are benchmarked in the same rounds (``bench.py``), so that every
candidate has a ratio to that choice, whatever the machine did meanwhile. A heat's records are in the history before the
next begins: a sweep that is killed, or whose time is up, goes on where it was. Once all have run, the fastest few meet
in a final, and only a plan that is faster there beyond doubt becomes a row of tuned plans.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import product
from typing import Any, NamedTuple

import torch

from attnworks import dispatch, tuned
from attnworks.backends import Backend
from attnworks.hardware import Hardware, detect
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.tuned import Row
from attnworks.workbench import bench, counters, tile_sweep, tune
from attnworks.workbench.bench import Protocol
from attnworks.workbench.findings import newest_attempt
from attnworks.workbench.history import History
from attnworks.workbench.providers import Attnworks
from attnworks.workbench.quick_check import NotVerifiedError
from attnworks.workbench.records import Record
from attnworks.workbench.statistics import Ratio

HEAT = 3  # candidates beside the backend's choice
FINALISTS = 3
RACE = Protocol(runs=7, fewest_runs=5, warm_ups=3, budget_seconds=6.0, input_sets=2)
FINAL = Protocol(runs=40, fewest_runs=10, most_runs=120, warm_ups=5, input_sets=4)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, candidates done and candidates in all."""


class Grid(NamedTuple):
    """What is tried: every combination."""

    tile_q: tuple[int, ...]
    tile_kv: tuple[int, ...]
    warps: tuple[int, ...] = (0,)
    stages: tuple[int, ...] = (0,)


# Of few queries over many keys the CPU's second number is the keys of a task.
GRIDS = {
    "cpu": Grid((96, 192, 384, 768), (64, 128, 256, 512)),
    "triton": Grid((64, 128), (32, 64, 128), (4, 8), (2, 3)),
    "cuda": Grid((128, 192), (64, 80, 96, 112, 128, 144, 160, 176), (0,), (2, 3)),
}


@dataclass(frozen=True)
class Standing:
    """How a candidate stands. ``rejected``: every reason why it was not timed. ``record``: its last heat. ``ratio``:
    how many times as fast it was there as the backend's choice; ``final``: whether that heat was the final."""

    plan: Plan
    rejected: tuple[str, ...] = ()
    record: Record | None = None
    ratio: Ratio | None = None
    final: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "rejected": list(self.rejected),
            "seconds": self.record.median if self.record else None,
            "error": self.record.check if self.record else None,
            "ratio": self.ratio.to_json() if self.ratio else None,
            "final": self.final,
            "profile": self.record.profile if self.record else None,
        }


@dataclass(frozen=True)
class Found:
    """What a sweep has found so far. ``table``: the backend's own choice. ``remaining``: candidates that the time did
    not suffice for. ``best``: the final's winner with its ``ratio`` to the table's choice, None before the final;
    ``row``: the tuned plan, where that is beyond doubt."""

    key: str
    problem: Problem
    hardware: Hardware
    table: Plan
    standings: tuple[Standing, ...]
    remaining: int
    best: Plan | None = None
    ratio: Ratio | None = None
    row: Row | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "sweep": self.key,
            "problem": self.problem.to_json(),
            "machine": self.hardware.name,
            "table": self.table.to_json(),
            "candidates": [one.to_json() for one in self.standings],
            "remaining": self.remaining,
            "best": self.best.to_json() if self.best else None,
            "ratio": self.ratio.to_json() if self.ratio else None,
            "row": self.row.to_json() if self.row else None,
        }


class Planned(Attnworks):
    """attnworks with one plan, named by what the sweep changes of it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(words(plan), plan.backend, plan)

    def form(self, problem: Problem) -> str:
        assert self._explicit is not None
        chosen = [f"{name}={value!r}" for name, value in self._explicit.to_json().items() if value]
        return f"{super().form(problem)[:-1]}, plan=Plan({', '.join(chosen)}))"


def words(plan: Plan) -> str:
    """The numbers of a plan that a sweep changes."""
    sizes = f"split {plan.split_kv}" if plan.split_kv else f"{plan.tile_q} x {plan.tile_kv}"
    every = ", every tile" if plan.visit_all else ""
    return sizes + (f", {plan.warps} warps, {plan.stages} stages" if plan.warps else "") + every


def backend_for(problem: Problem, name: str = "auto") -> str:
    """The backend whose tiles are swept. Raises what ``dispatch.choose`` raises, ``ValueError`` for one without tiles
    to choose."""
    chosen = dispatch.choose(problem, name)[0].NAME
    if chosen not in GRIDS:
        raise ValueError(f"backend: {chosen!r} runs the problem, must be one of {tuple(GRIDS)} for a sweep")
    return chosen


def plans(problem: Problem, table: Plan, grid: Grid, backend: Backend, hardware: Hardware) -> list[Plan]:
    """The backend's choice, and every plan of the grid that differs from it in nothing else."""
    found = [table]
    for tile_q, tile_kv, warps, stages in product(*grid):
        if table.backend == "cpu":
            split = table.schedule == "split_kv"
            found.append(replace(table, split_kv=tile_kv) if split else replace(table, tile_q=tile_q, tile_kv=tile_kv))
            continue
        shape = replace(table, tile_q=tile_q, tile_kv=tile_kv, stages=stages)
        if table.backend == "cuda":  # whose warps follow from its rows
            found.append(backend.adapt(problem, replace(shape, warps=tile_q // 16 + 4), hardware))
        elif table.schedule == "split_kv":
            split_kv = max(round(table.split_kv / tile_kv), 1) * tile_kv
            found.append(replace(shape, tile_q=table.tile_q, split_kv=split_kv, warps=warps))
        else:
            found.append(replace(shape, warps=warps))
    return list(dict.fromkeys(found))


# ---- feasibility -----------------------------------------------------------------------------------------------------


def reasons(
    problem: Problem,
    asked: Sequence[Plan],
    backend: Backend,
    hardware: Hardware,
    *,
    compiled: bool = True,
    jobs: int = 1,
    report: Progress = lambda *_: None,
) -> dict[Plan, tuple[str, ...]]:
    """Why each plan would be no good, before anything is run: by the backend's own word, the sizes of the machine, and
    if ``compiled`` for GPUs by the compiler, in so many processes as ``jobs``."""
    found: dict[Plan, tuple[str, ...]] = {}
    for plan in asked:
        why = tile_sweep.refusal(problem, plan, backend)
        found[plan] = (why,) if why else ()
    if backend.NAME == "cpu":
        found |= {plan: _outgrown(problem, plan, backend, hardware) for plan in asked if not found[plan]}
    good = [plan for plan in asked if not found[plan]]
    if backend.NAME != "cpu" and compiled:
        target = tile_sweep.target_of(hardware)
        made = tile_sweep.compile_all(target, [(problem, plan) for plan in good], jobs)
        for done, (index, one) in enumerate(made, 1):
            report("compiling", done, len(good))
            found[good[index]] = tile_sweep.judge(problem, good[index], one, hardware).rejected
    return found


def _outgrown(problem: Problem, plan: Plan, backend: Backend, hardware: Hardware) -> tuple[str, ...]:
    """Of a CPU: tiles that the kernel would cut, and scratch that the last cache does not hold for all threads."""
    from attnworks.backends import cpu

    sizes = zip(("tile_q", "tile_kv"), (plan.tile_q, plan.tile_kv), cpu.largest_tiles(), strict=True)
    found = [f"{name} {size}: the kernel cuts it to {most}" for name, size, most in sizes if size > most]
    scratch, threads = backend.resources(problem, plan)["scratch"], torch.get_num_threads()
    last = hardware.shared_cache_bytes
    if last and scratch * threads > last:
        found.append(f"{scratch} bytes of scratch for each of {threads} threads, the last cache has {last}")
    return tuple(found)


# ---- the sweep -------------------------------------------------------------------------------------------------------


def sweep(
    problem: Problem,
    history: History,
    *,
    backend: str,
    grid: Grid,
    seconds: float = 120.0,
    jobs: int = 1,
    again: bool = False,
    progress: Progress | None = None,
) -> Found:
    """Race every plan of ``grid`` for ``problem`` on its device, with a backend of ``GRIDS``.

    What ``history`` holds of the same sweep is not run again, unless ``again``. No heat begins that would likely end
    after ``seconds``. Raises ``UnsupportedError`` where the backend refuses the problem, ``NotVerifiedError`` where its
    own choice gives wrong results."""
    ends, report = time.monotonic() + seconds, progress or (lambda what, done, total: None)
    hardware = detect(problem.device)
    chosen, _, _ = dispatch.choose(problem, backend)
    table = chosen.candidates(problem, hardware)[0]
    asked = plans(problem, table, grid, chosen, hardware)
    key = key_of(problem, chosen, hardware)
    begun, kept = ("", {}) if again else _kept(history, key, problem)
    known = {table, *kept}  # the backend's choice runs, whatever is said of it, and others have run
    judged = reasons(problem, [plan for plan in asked if plan not in known], chosen, hardware, jobs=jobs, report=report)
    rejected = {plan: judged.get(plan, ()) for plan in asked}
    marks = {"sweep": key, "begun": begun or datetime.now(timezone.utc).isoformat()}
    race = _Race(marks, problem, table, history, kept)
    waiting = [plan for plan in asked if plan != table and not rejected[plan] and plan not in race.standing]
    total = sum(not why for why in rejected.values()) - 1
    longest = 0.0
    while waiting and time.monotonic() + longest < ends:
        report(words(waiting[0]), total - len(waiting), total)
        started = time.monotonic()
        race.heat(waiting[:HEAT], RACE, final=False)
        del waiting[:HEAT]
        longest = max(longest, time.monotonic() - started)
    if not waiting and not race.decided:
        report("final", total, total)
        budget = ends - time.monotonic()
        if budget > 0:
            race.heat(race.finalists(), replace(FINAL, budget_seconds=budget), final=True)
    for plan, why in rejected.items():
        if why:
            race.standing[plan] = Standing(plan, why)
    standings = tuple(race.standing.get(plan, Standing(plan)) for plan in asked)
    result = Found(key, problem, hardware, table, standings, len(waiting))
    if waiting or not race.decided:
        return result
    times = {one.plan: one.record.seconds for one in standings if one.final and one.record}
    best, ratio, row = tune.decide(times, table, chosen, problem.device)
    return replace(result, best=best, ratio=ratio, row=row)


def profiled(found: Found, report: Progress = lambda *_: None) -> Found:
    """With what the device's profiler counted of those that met in the final, or notes why it did not."""
    finalists = [one for one in found.standings if one.final and one.record]
    counted = {}
    for done, one in enumerate(finalists):
        report(f"profiling {words(one.plan)}", done, len(finalists))
        assert one.record is not None
        counted[one.plan] = counters.with_profile(found.problem, one.record, Planned(one.plan))
    standings = (replace(one, record=counted.get(one.plan, one.record)) for one in found.standings)
    return replace(found, standings=tuple(standings))


def key_of(problem: Problem, backend: Backend, hardware: Hardware) -> str:
    """Sweeps with equal keys go on with each other's heats: the same problem, machine, threads and kernels."""
    kernels = tuned.kernels_hash(backend.KERNELS) if backend.KERNELS else ""
    said = [problem.to_json(), backend.NAME, kernels, hardware.name, torch.get_num_threads(), torch.__version__]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


class _Race:
    """Heats of one sweep, those of earlier runs among them. ``standing``: the last of each plan."""

    def __init__(
        self, marks: dict[str, str], problem: Problem, table: Plan, history: History, standing: dict[Plan, Standing]
    ) -> None:
        self.standing = standing
        self._marks, self._problem, self._table, self._history = marks, problem, table, history

    @property
    def decided(self) -> bool:
        return self._table in self.standing and self.standing[self._table].final

    def heat(self, runners: Sequence[Plan], protocol: Protocol, *, final: bool) -> None:
        providers = [Planned(plan) for plan in (self._table, *runners)]
        result = bench.measure(self._problem, providers, protocol)
        if complaint := result.failed.get(words(self._table)):
            raise NotVerifiedError(complaint)
        marks = self._marks | {"final": final}
        records = [replace(one, conditions=one.conditions | marks) for one in result.records]
        self._history.add(records)
        self.standing |= _standings([records])
        for plan in runners:
            name = words(plan)
            if why := result.failed.get(name) or result.refused.get(name):
                self.standing[plan] = Standing(plan, (why,))

    def finalists(self) -> list[Plan]:
        raced = [one for one in self.standing.values() if one.ratio and one.plan != self._table]
        raced.sort(key=lambda one: -one.ratio.value if one.ratio else 0.0)
        return [one.plan for one in raced[:FINALISTS]]


def _kept(history: History, key: str, problem: Problem) -> tuple[str, dict[Plan, Standing]]:
    """When the newest attempt at a sweep began, "" for none, and what it left: the final's records after the heats'."""
    heats = newest_attempt(
        [one for one in history.records(problem=problem).values() if one.conditions.get("sweep") == key]
    )
    return str(heats[0][0].conditions["begun"]) if heats else "", _standings(heats)


def _standings(heats: Sequence[Sequence[Record]]) -> dict[Plan, Standing]:
    """Of heats, each of which begins with the backend's choice."""
    found = {}
    for heat in heats:
        for one in heat:
            assert one.plan is not None, "a sweep's competitors are plans"
            plan = Plan(**one.plan)
            found[plan] = Standing(plan, (), one, one.ratio_to(heat[0]), bool(one.conditions["final"]))
    return found
