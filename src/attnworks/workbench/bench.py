"""Benchmarks that can be trusted: competitors verified, interleaved in random order, caches flushed, ratios with
intervals.

Every round runs every competitor once, in an order drawn anew, on the same inputs; before each run the last-level
cache is flushed. So drift of the machine hits all alike and cancels in the ratios, and nobody profits from what ran
before. Who may take part is decided in ``entrants.py``, the timing itself is in ``meters.py``."""

from __future__ import annotations

import datetime
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from attnworks.hardware import detect
from attnworks.problem import Problem
from attnworks.workbench import ceilings, environment, sampling, statistics
from attnworks.workbench.entrants import Entrant, check_after, enter, input_sets
from attnworks.workbench.meters import Meter, Progress, Timed, meter_for
from attnworks.workbench.providers import Provider
from attnworks.workbench.records import Record
from attnworks.workbench.schedules import modelled_bytes

STEADY = 0.05  # a warm-up ends when two runs in a row differ by less
FEWEST_WARM_UPS = 3
FAR = 1.2  # a ratio whose interval lies beyond needs no more runs to be believed
SLOW_SECONDS = 1.0  # a longer run is steady after one warm-up: nothing it needs is still being loaded


@dataclass(frozen=True)
class Protocol:
    """How a benchmark runs.

    ``runs``: timed runs of each competitor; fewer, but at least ``fewest_runs``, where they would take longer than
    ``budget_seconds`` (the records say so); more, up to ``most_runs`` (None: no more), while the interval of a close
    ratio reaches further than ``precision`` and time is left. ``flush``: empty the last-level cache before every run.
    ``input_sets``: at most so many sets of random inputs are visited, fewer (at least 2) where they take more than
    ``input_bytes``. ``threads``: None for torch's own number. ``seed``: of inputs and order, None for a new one each
    time.
    """

    runs: int = 50
    fewest_runs: int = 5
    most_runs: int | None = None
    precision: float = 0.02
    warm_ups: int = 20
    budget_seconds: float = 30.0
    flush: bool = True
    input_sets: int = 8
    input_bytes: int = 512 << 20
    threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.fewest_runs <= self.runs:
            raise ValueError(f"fewest_runs: was {self.fewest_runs}, must lie in 1..{self.runs} (runs)")
        if self.most_runs is not None and self.most_runs < self.runs:
            raise ValueError(f"most_runs: was {self.most_runs}, must be None or >= {self.runs} (runs)")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads: was {self.threads}, must be None or >= 1")


@dataclass(frozen=True)
class Result:
    """What ``measure`` found: a record for each competitor that ran, reasons for the others.

    ``refused``: the competitor does not do the problem. ``failed``: its results are wrong, so that it was not timed.
    """

    records: tuple[Record, ...]
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def record(self, provider: str) -> Record | None:
        return next((record for record in self.records if record.provider == provider), None)

    def to_json(self) -> dict[str, Any]:
        first = self.records[:1]
        ratios = {f"{one.provider}/{r.provider}": one.ratio_to(r).to_json() for one in first for r in self.records[1:]}
        return {
            "records": [record.to_json() for record in self.records],
            "ratios": ratios,
            "refused": self.refused,
            "failed": self.failed,
        }


def measure(
    problem: Problem, providers: Sequence[Provider], protocol: Protocol = Protocol(), progress: Progress | None = None
) -> Result:
    """Measure providers against each other on one problem, on the problem's device.

    Only kernels that pass ``quick_check`` on this very problem are timed, and afterwards they are checked again.
    Raises ``NotVerifiedError`` if that second check fails, ``ValueError`` for a device that is not here and
    for two providers of one name.
    """
    names = [provider.name for provider in providers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"providers: held {twice[0]!r} twice, must have names of their own")
    problem = replace(problem, device=environment.place(problem.device))
    seed = random.SystemRandom().getrandbits(32) if protocol.seed is None else protocol.seed
    report = progress or (lambda what, done, total: None)
    with _threads(protocol.threads) as threads, torch.no_grad():
        report("checking", 0, 0)
        meter = meter_for(problem, threads)
        sets = list(input_sets(problem, meter, seed, protocol.input_sets, protocol.input_bytes))
        entrants, refused, failed = enter(problem, providers, sets, meter)
        if not entrants:
            return Result((), refused, failed)
        conditions = asdict(protocol) | {"threads": threads, "seed": seed, "input_sets": len(sets)}
        conditions |= {"inputs": "unit normal"} | (meter.flush_conditions() if protocol.flush else {})
        report("warming up", 0, 0)
        round_seconds = sum(_warm_up(one, protocol, meter) for one in entrants)
        rounds = _rounds(protocol, round_seconds)
        load_meter = environment.LoadMeter()
        timed = _timed(entrants, meter, protocol, rounds, seed, report)
        load = load_meter.read()
        report("checking again", 0, 0)
        check_after(problem, entrants, sets, timed, meter, seed, protocol.flush)
        conditions |= {"timed_by": timed.means}
        notes = _notes(protocol, round_seconds, conditions, load, timed)
        records = _records(problem, entrants, timed, conditions, load, notes)
    return Result(tuple(records), refused, failed)


# ---- before the timing -----------------------------------------------------------------------------------------------


@contextmanager
def _threads(wanted: int | None) -> Any:
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _warm_up(one: Entrant, protocol: Protocol, meter: Meter) -> float:
    """Run until two runs in a row take equally long. Returns the seconds of the last."""
    before = 0.0
    for count in range(1, protocol.warm_ups + 1):
        last, _ = meter.once(one.bound[count % len(one.bound)], flush=False)
        if last > SLOW_SECONDS or (count >= FEWEST_WARM_UPS and abs(last - before) < STEADY * last):
            break
        before = last
    return last


def _rounds(protocol: Protocol, round_seconds: float) -> int:
    affordable = int(protocol.budget_seconds / max(round_seconds, 1e-9))
    return max(protocol.fewest_runs, min(protocol.runs, affordable))


# ---- the timing ------------------------------------------------------------------------------------------------------


def _timed(
    entrants: Sequence[Entrant], meter: Meter, protocol: Protocol, rounds: int, seed: int, report: Progress
) -> Timed:
    """Rounds, and as many again while the ratios are not precise. When to stop depends on how wide the intervals are,
    not on what they say: who looks at the verdict after each round and stops when he likes it will find one."""
    entries, order = [one.entry for one in entrants], random.Random(seed)
    start = time.perf_counter()
    found = meter.rounds(entries, rounds, order, protocol.flush, report)
    while found.rounds < (protocol.most_runs or 0) and not _precise(found, protocol.precision):
        spent = time.perf_counter() - start
        affordable = int((protocol.budget_seconds - spent) / (spent / found.rounds))
        more = min(found.rounds, (protocol.most_runs or 0) - found.rounds, affordable)
        if more < 1:
            break
        found = found.joined(meter.rounds(entries, more, order, protocol.flush, report))
    return found


def _precise(timed: Timed, precision: float) -> bool:
    """Whether the ratios of all others to the first are known well enough; of those far from 1 nobody asks for more."""
    first, *others = timed.seconds.values()
    ratios = [statistics.ratio(first, other, paired=True) for other in others]
    return all(
        max(ratio.high / ratio.value, ratio.value / ratio.low) <= 1 + precision
        or ratio.low > FAR
        or ratio.high < 1 / FAR
        for ratio in ratios
    )


# ---- after the timing ------------------------------------------------------------------------------------------------


def _notes(
    protocol: Protocol,
    round_seconds: float,
    conditions: dict[str, Any],
    load: environment.Load,
    timed: Timed,
) -> tuple[str, ...]:
    notes = []
    rounds = timed.rounds
    if rounds < protocol.runs:
        notes.append(f"{rounds} runs instead of {protocol.runs}: a round takes {round_seconds:.2g} s")
    if protocol.flush and not conditions["flush_is_real"]:
        slowdown = conditions["flush_slows_a_read_by"]
        notes.append(f"the cache flush was not seen to work: a read took {slowdown} times as long after it")
    if not protocol.flush:
        notes.append("caches were not flushed between runs")
    if load.busy:
        notes.append(f"others used {load.other_cores} cores meanwhile, the hypervisor took {load.stolen_cores}")
    if not timed.host_seconds and ceilings.native_missing():
        notes.append("no ceilings: the native extension is not built")
    return (*notes, *sampling.remarks(timed.state))


def _records(
    problem: Problem,
    entrants: list[Entrant],
    timed: Timed,
    conditions: dict[str, Any],
    load: environment.Load,
    notes: tuple[str, ...],
) -> list[Record]:
    session, when = uuid.uuid4().hex, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    records, units = [], detect(problem.device).units
    for one in entrants:
        name, answered = one.provider.name, one.provider.answers(problem)
        plan = one.provider.plan(answered)
        record = Record(
            session=session,
            when=when,
            provider=name,
            form=one.provider.form(problem),
            problem=answered.to_json(),
            plan=plan.to_json() if plan else None,
            seconds=tuple(timed.seconds[name]),
            check=one.check.to_json(),
            flops=answered.flops(),
            minimum_bytes=answered.minimum_bytes(),
            modelled_bytes=modelled_bytes(answered, plan, units) if plan else None,
            peak_extra_bytes=one.extra_bytes,
            ceilings=timed.ceilings,
            conditions=conditions,
            machine=environment.machine(problem.device),
            versions=environment.versions(),
            commit=environment.commit(),
            load=load.to_json(),
            notes=notes + (() if answered == problem else ("it solves another problem: see its form",)),
            host_seconds=tuple(timed.host_seconds.get(name, ())),
            state=timed.state,
        )
        records.append(record if not record.host_bound else replace(record, notes=(*record.notes, _host_bound(record))))
    return records


def _host_bound(record: Record) -> str:
    assert record.host_median is not None
    return (
        f"{record.provider} is host-bound: a call takes the host {record.host_median * 1e6:.0f} µs, the device "
        f"{record.median * 1e6:.0f} µs"
    )
