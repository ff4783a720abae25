"""Benchmarks that can be trusted: competitors verified, interleaved in random order, caches flushed, ratios with
intervals.

Every round runs every competitor once, in an order drawn anew, on the same inputs; before each run the last-level
cache is flushed. So drift of the machine hits all alike and cancels in the ratios, and nobody profits from what ran
before."""

from __future__ import annotations

import datetime
import gc
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnworks import traffic
from attnworks.problem import Problem
from attnworks.workbench import ceilings, environment, quick_check, statistics
from attnworks.workbench.memory import peak_extra
from attnworks.workbench.providers import Bound, Inputs, Provider, random_inputs
from attnworks.workbench.quick_check import Check, NotVerifiedError
from attnworks.workbench.records import Record

STEADY = 0.05  # a warm-up ends when two runs in a row differ by less
FEWEST_WARM_UPS = 3
# One library's threads spin on after their work; before another library's turn they must have gone to sleep.
SETTLE_SECONDS = 0.01
SLOW_SECONDS = 1.0  # a longer run is steady after one warm-up: nothing it needs is still being loaded

Progress = Callable[[str, int, int], None]
"""Called with what is being done, rounds done and rounds in all."""


@dataclass(frozen=True)
class Protocol:
    """How a benchmark runs.

    ``runs``: timed runs of each competitor; fewer, but at least ``fewest_runs``, where they would take longer than
    ``budget_seconds`` (the records say so). ``flush``: empty the last-level cache before every run. ``input_sets``: at
    most so many sets of random inputs are visited, fewer (at least 2) where they take more than ``input_bytes``.
    ``threads``: None for torch's own number. ``seed``: of inputs and order, None for a new one each time.
    """

    runs: int = 50
    fewest_runs: int = 5
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


@dataclass
class _Competitor:
    provider: Provider
    bound: list[Bound]  # one for each set of inputs
    check: Check
    extra_bytes: int | None
    seconds: list[float] = field(default_factory=list)
    last: tuple[int, Tensor] | None = None


def measure(
    problem: Problem, providers: Sequence[Provider], protocol: Protocol = Protocol(), progress: Progress | None = None
) -> Result:
    """Measure providers against each other on one problem.

    Only kernels that pass ``quick_check`` on this very problem are timed, and their last timed result is checked again.
    Raises ``NotVerifiedError`` if that second check fails, ``ValueError`` for a problem that is not on the CPU.
    """
    if not problem.device.startswith("cpu"):
        raise ValueError(f"problem: was on {problem.device}, must be on the CPU")
    seed = random.SystemRandom().getrandbits(32) if protocol.seed is None else protocol.seed
    report = progress or (lambda what, done, total: None)
    with _threads(protocol.threads) as threads, torch.no_grad():
        report("checking", 0, 0)
        sets = _input_sets(problem, protocol, seed)
        competitors, refused, failed = _enter(problem, providers, sets)
        if not competitors:
            return Result((), refused, failed)
        caches = ceilings.Caches(threads)
        conditions = _conditions(problem, protocol, threads, seed, len(sets), caches)
        report("warming up", 0, 0)
        round_seconds = sum(_warm_up(one, protocol) for one in competitors)
        rounds = _rounds(protocol, round_seconds)
        meter = environment.LoadMeter()
        found = _time(problem, competitors, rounds, len(sets), caches if protocol.flush else None, seed, report)
        load = meter.read()
        _check_last(problem, competitors, sets)
        notes = _notes(protocol, rounds, round_seconds, conditions, load)
        records = _records(problem, competitors, found, conditions, load, notes)
    return Result(tuple(records), refused, failed)


# ---- before the timing -----------------------------------------------------------------------------------------------
# -------------------------------------------------------------------------------------------------


@contextmanager
def _threads(wanted: int | None) -> Any:
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _input_sets(problem: Problem, protocol: Protocol, seed: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(seed)
    first = random_inputs(problem, generator)
    count = max(2, min(protocol.input_sets, protocol.input_bytes // max(first.bytes, 1)))
    return [first, *(random_inputs(problem, generator) for _ in range(count - 1))]


def _enter(
    problem: Problem, providers: Sequence[Provider], sets: list[Inputs]
) -> tuple[list[_Competitor], dict[str, str], dict[str, str]]:
    """The competitors that run the problem and pass the check, and the reasons of the others."""
    refused = {provider.name: reason for provider in providers if (reason := provider.refuses(problem))}
    failed: dict[str, str] = {}
    competitors = []
    _wake_threads()
    for provider in providers:
        if provider.name in refused:
            continue
        bound = [provider.bind(problem, inputs) for inputs in sets]
        result, extra = peak_extra(bound[0].run)
        out = bound[0].out(result)
        extra = None if extra is None else max(extra - out.nbytes, 0)
        check = quick_check.check(provider.answers(problem), *sets[0], out)
        if check.passed:
            competitors.append(_Competitor(provider, bound, check, extra))
        else:
            failed[provider.name] = _complaint(provider, check)
    return competitors, refused, failed


def _wake_threads() -> None:
    """What the first parallel call of a process loads belongs to no competitor."""
    (torch.ones(512, 512) @ torch.ones(512, 512)).sum()


def _complaint(provider: Provider, check: Check) -> str:
    return (
        f"{provider.name}: error of {check.worst:.3g} times its bound at (batch, head, row, channel) {check.where}, "
        "must be at most 1: not benchmarked"
    )


def _warm_up(one: _Competitor, protocol: Protocol) -> float:
    """Run until two runs in a row take equally long. Returns the seconds of the last."""
    before = 0.0
    for count in range(1, protocol.warm_ups + 1):
        bound = one.bound[count % len(one.bound)]
        start = time.perf_counter()
        bound.run()
        last = time.perf_counter() - start
        if last > SLOW_SECONDS or (count >= FEWEST_WARM_UPS and abs(last - before) < STEADY * last):
            break
        before = last
    return last


def _rounds(protocol: Protocol, round_seconds: float) -> int:
    affordable = int(protocol.budget_seconds / max(round_seconds, 1e-9))
    return max(protocol.fewest_runs, min(protocol.runs, affordable))


# ---- the timing ------------------------------------------------------------------------------------------------------


def _time(
    problem: Problem,
    competitors: list[_Competitor],
    rounds: int,
    sets: int,
    caches: ceilings.Caches | None,
    seed: int,
    report: Progress,
) -> dict[str, float | None]:
    """Fill in every competitor's seconds; returns the ceilings measured between the runs."""
    order = random.Random(seed)
    dtype = str(problem.dtype).removeprefix("torch.")
    bandwidths: list[float] = []
    peaks: list[float] = []
    settle = SETTLE_SECONDS if any(one.provider.brings_threads for one in competitors) else 0.0
    gc.collect()
    gc.disable()
    try:
        for done in range(rounds):
            report("timing", done, rounds)
            chosen = order.randrange(sets)
            for one in order.sample(competitors, len(competitors)):
                bandwidths += _known(caches.flush() if caches else None)
                run = one.bound[chosen].run
                if settle:
                    time.sleep(settle)
                start = time.perf_counter()
                result = run()
                one.seconds.append(time.perf_counter() - start)
                one.last = (chosen, result) if done == rounds - 1 else None
                del result
            peaks += _known(ceilings.peak_flops(dtype, torch.get_num_threads()) if caches else None)
    finally:
        gc.enable()
    report("timing", rounds, rounds)
    return {
        "read_bytes_per_second": statistics.median(bandwidths) if bandwidths else None,
        "flops_per_second": statistics.median(peaks) if peaks else None,
    }


def _known(rate: float | None) -> list[float]:
    return [] if rate is None else [rate]


def _check_last(problem: Problem, competitors: list[_Competitor], sets: list[Inputs]) -> None:
    for one in competitors:
        assert one.last is not None, "the last round keeps it"
        chosen, result = one.last
        check = quick_check.check(one.provider.answers(problem), *sets[chosen], one.bound[chosen].out(result), seed=1)
        if not check.passed:
            raise NotVerifiedError("after the timing, " + _complaint(one.provider, check))


# ---- after the timing ------------------------------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------


def _conditions(
    problem: Problem, protocol: Protocol, threads: int, seed: int, sets: int, caches: ceilings.Caches
) -> dict[str, Any]:
    conditions = asdict(protocol) | {"threads": threads, "seed": seed, "input_sets": sets, "inputs": "unit normal"}
    if protocol.flush:
        slowdown = caches.check()
        conditions |= {
            "flush_bytes": caches.buffer_bytes,
            "flush_slows_a_read_by": round(slowdown, 2),
            "flush_is_real": slowdown >= ceilings.REAL_FLUSH,
        }
    return conditions


def _notes(
    protocol: Protocol, rounds: int, round_seconds: float, conditions: dict[str, Any], load: environment.Load
) -> tuple[str, ...]:
    notes = []
    if rounds < protocol.runs:
        notes.append(f"{rounds} runs instead of {protocol.runs}: a round takes {round_seconds:.2g} s")
    if protocol.flush and not conditions["flush_is_real"]:
        slowdown = conditions["flush_slows_a_read_by"]
        notes.append(f"the cache flush was not seen to work: a read took {slowdown} times as long after it")
    if not protocol.flush:
        notes.append("caches were not flushed between runs")
    if load.busy:
        notes.append(f"others used {load.other_cores} cores meanwhile, the hypervisor took {load.stolen_cores}")
    if ceilings.native_missing():
        notes.append("no ceilings: the native extension is not built")
    return tuple(notes)


def _records(
    problem: Problem,
    competitors: list[_Competitor],
    found: dict[str, float | None],
    conditions: dict[str, Any],
    load: environment.Load,
    notes: tuple[str, ...],
) -> list[Record]:
    session, when = uuid.uuid4().hex, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    records = []
    for one in competitors:
        answered = one.provider.answers(problem)
        plan = one.provider.plan(answered)
        own_notes = () if answered == problem else ("it solves another problem: see its form",)
        records.append(
            Record(
                session=session,
                when=when,
                provider=one.provider.name,
                form=one.provider.form(problem),
                problem=answered.to_json(),
                plan=plan.to_json() if plan else None,
                seconds=tuple(one.seconds),
                check=one.check.to_json(),
                flops=answered.flops(),
                minimum_bytes=answered.minimum_bytes(),
                modelled_bytes=modelled_bytes(answered, plan),
                peak_extra_bytes=one.extra_bytes,
                ceilings=found,
                conditions=conditions,
                machine=environment.machine(),
                versions=environment.versions(),
                commit=environment.commit(),
                load=load.to_json(),
                notes=notes + own_notes,
            )
        )
    return records


def modelled_bytes(problem: Problem, plan: Any) -> int | None:
    """Bytes by the traffic model; None for a provider whose plan is not known."""
    if plan is None:
        return None
    tile_kv = plan.split_kv if plan.schedule == "split_kv" else plan.tile_kv
    return traffic.estimate(problem, plan.schedule, plan.tile_q, tile_kv).total_bytes
