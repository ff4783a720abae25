"""The case study: long-sequence inference, from standard attention to tiles that fit, one change at a time.

Each step is measured in the same rounds as the baseline, with its error against fp64 beside it; for a card elsewhere
the same steps are predicted from its facts (``porting.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from attnworks import dispatch, traffic
from attnworks.backends import Backend
from attnworks.hardware import Hardware, detect
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench import bench, measured_sweep, porting
from attnworks.workbench.bench import Protocol
from attnworks.workbench.measured_sweep import Planned, Progress
from attnworks.workbench.providers import Provider, Standard, random_inputs
from attnworks.workbench.records import Record

PROTOCOL = Protocol(runs=30, fewest_runs=5, warm_ups=3, budget_seconds=30.0, input_sets=2)
KERNELS_SHOWN = 8
LEAST_SHARE = 0.005
OWN = "the tiles that a call takes by itself"
FIRST = "the tiles that the porting report would try first"


@dataclass(frozen=True)
class Step:
    """One change. ``plan``: None for standard attention."""

    name: str
    change: str
    plan: Plan | None


@dataclass(frozen=True)
class Row:
    """How a step went. ``rejected``: why it was not run. ``share``: its time relative to the baseline's 1.00."""

    step: Step
    rejected: tuple[str, ...] = ()
    record: Record | None = None
    share: float | None = None

    def to_json(self) -> dict[str, Any]:
        record = self.record.to_json() if self.record else None
        return {"step": self.step.name, "change": self.step.change, "rejected": list(self.rejected),
                "plan": self.step.plan.to_json() if self.step.plan else None, "share": self.share,
                "record": record}  # fmt: skip


@dataclass(frozen=True)
class Guess:
    """A step on a card elsewhere: its least time and that without hits in the L2, relative to the baseline's."""

    step: Step
    rejected: tuple[str, ...] = ()
    prediction: porting.Prediction | None = None
    shares: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Kernel:
    """What a profile of standard attention has of one kernel: how often it ran, and its share of the time."""

    name: str
    calls: int
    share: float


@dataclass(frozen=True)
class Profile:
    """Of one call of standard attention. ``matrix_bytes``: of S, and again of P, which it writes out and reads back."""

    kernels: tuple[Kernel, ...]
    matrix_bytes: int
    minimum_bytes: int
    modelled_bytes: int


@dataclass(frozen=True)
class Study:
    """Of one problem on the device at hand."""

    problem: Problem
    profile: Profile
    rows: tuple[Row, ...]

    @property
    def records(self) -> list[Record]:
        return [row.record for row in self.rows if row.record]

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {"problem": self.problem.to_json(), "profile": asdict(self.profile), "rows": rows}


# ---- the steps -------------------------------------------------------------------------------------------------------


def steps(backend: str, *, stages: int = 3, isa: str = "", last: Plan | None = None, why: str = OWN) -> list[Step]:
    """From standard attention to ``last``, where that is none of the others; ``why`` it is there."""
    if backend == "cpu":
        large, small = (Plan("cpu", "tiled", q, kv, isa=isa) for q, kv in ((4096, 1024), (64, 64)))
    else:
        large = Plan("triton", "q_outer", 256, 128, warps=8, stages=stages)
        small = Plan("triton", "q_outer", 64, 64, warps=4, stages=stages)
    found = [
        Step("standard attention", "the baseline: S and P written out", None),
        Step(f"tiles {large.tile_q} x {large.tile_kv}", "tiles on chip, as large as they come", large),
        Step("tiles 64 x 64", "tiles that fit; every tile visited", replace(small, visit_all=True)),
        Step("causal skip", "tiles that the mask hides are left out", small),
    ]
    if last and last not in [step.plan for step in found]:
        found.append(Step(f"tiles {last.tile_q} x {last.tile_kv}", why, last))
    return found


def study(problem: Problem, protocol: Protocol = PROTOCOL, progress: Progress | None = None) -> Study:
    """Profile and measure the steps on the problem's device: on the CPU with the native kernels, on a GPU with
    Triton's.

    Raises ``UnsupportedError`` where their backend refuses the problem, ``NotVerifiedError`` for wrong results."""
    backend, tiles, _ = dispatch.choose(problem, "cpu" if problem.device == "cpu" else "triton")
    own = dispatch.choose(problem)[1]
    planned = steps(backend.NAME, isa=tiles.isa, last=own)
    why = _rejected(problem, [step.plan for step in planned if step.plan], backend, own)
    providers = {step: _provider(step) for step in planned if step.plan is None or not why[step.plan]}
    result = bench.measure(problem, list(providers.values()), protocol, progress)
    said = result.failed | result.refused
    rows: list[Row] = []
    for step in planned:
        record = result.record(providers[step].name) if step in providers else None
        if record is None:
            reasons = (said[providers[step].name],) if step in providers else why[step.plan] if step.plan else ()
            rows.append(Row(step, reasons))
            continue
        base = rows[0].record if rows else record
        record = _marked(record, problem, step)
        rows.append(Row(step, (), record, 1 / record.ratio_to(base).value if base else None))
    return Study(problem, profile(problem), tuple(rows))


def _provider(step: Step) -> Provider:
    return Standard() if step.plan is None else Planned(step.plan)


def _rejected(problem: Problem, asked: Sequence[Plan], backend: Backend, own: Plan) -> dict[Plan, tuple[str, ...]]:
    """Why a plan would be no good; the backend's own choice runs, and may be another backend's. Of a GPU by what a
    plan declares, as on the cards that are predicted: what only the compiler can tell shows when the step is run."""
    plans, machine = [plan for plan in asked if plan != own], detect(problem.device)
    found = measured_sweep.reasons(problem, plans, backend, machine, compiled=False)
    if machine.block_bytes:  # as a GPU has them
        said = {plan: porting.why_not(problem, plan, machine) for plan in plans if not found[plan]}
        found |= {plan: (why,) for plan, why in said.items() if why}
    return found | {own: ()}


def _marked(record: Record, problem: Problem, step: Step) -> Record:
    bytes_ = record.modelled_bytes
    if step.plan and step.plan.visit_all:
        unmasked = replace(problem, mask=())
        bytes_ = traffic.estimate(unmasked, step.plan.schedule, step.plan.tile_q, step.plan.tile_kv).total_bytes
    return replace(record, conditions=record.conditions | {"study": step.name}, modelled_bytes=bytes_)


# ---- the profile -----------------------------------------------------------------------------------------------------


def profile(problem: Problem) -> Profile:
    """Kernels of one call of standard attention by PyTorch's profiler, and what S and P take."""
    gpu = problem.device != "cpu"
    inputs = random_inputs(replace(problem, device="cpu"), torch.Generator().manual_seed(0))
    run = Standard().bind(problem, type(inputs)(*(x.to(problem.device) for x in inputs))).run
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # PyTorch's profiler else says on stderr that it begins and ends
    with torch.no_grad():
        run()
        activities = [torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as seen:
            run()
            if gpu:
                torch.cuda.synchronize(problem.device)
    times = {event.key: (event.count, _own_time(event, gpu)) for event in seen.key_averages()}
    total = sum(time for _, time in times.values()) or 1.0
    kernels = [Kernel(key, count, time / total) for key, (count, time) in times.items() if time > LEAST_SHARE * total]
    kernels.sort(key=lambda kernel: -kernel.share)
    p = problem
    matrix = p.batch * p.heads_q * p.seq_q * p.seq_kv * p.element_size
    modelled = traffic.estimate(p, "standard").total_bytes
    return Profile(tuple(kernels[:KERNELS_SHOWN]), matrix, p.minimum_bytes(), modelled)


def _own_time(event: Any, gpu: bool) -> float:
    return float(event.self_device_time_total if gpu else event.self_cpu_time_total)


# ---- predicted -------------------------------------------------------------------------------------------------------


def predicted(problem: Problem, machine: Hardware) -> list[Guess]:
    """The steps on a card elsewhere, with the tiles that its porting report would try first at the end."""
    ported = porting.report(problem, machine)
    first = ported.first[0].plan if ported.first else None
    guesses = []
    for step in steps("triton", stages=first.stages if first else 1, last=first, why=FIRST):
        plan = step.plan or Plan("reference", "standard")
        why = porting.why_not(problem, plan, machine) if step.plan else ""
        guess = None if why else porting.predict(problem, plan, machine)
        shares = None
        if guess and ported.standard:
            shares = guess.least / ported.standard.least, guess.seconds / ported.standard.seconds
        guesses.append(Guess(step, (why,) if why else (), guess, shares))
    return guesses
