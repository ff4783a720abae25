"""Standard attention, FlashAttention-1 and FlashAttention-2 side by side, and the classic claims held against them.

On a GPU they are the Triton backend's plans "standard", "kv_outer" and "q_outer", which differ in nothing but their
schedule; on the CPU the reference's, which are written to be read: there bytes and memory mean something, times do not.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnworks import traffic
from attnworks.backends import Launcher, reference
from attnworks.hardware import detect
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem
from attnworks.workbench import quick_check, schedules, statistics
from attnworks.workbench.device_time import Clock
from attnworks.workbench.memory import peak_extra
from attnworks.workbench.providers import Inputs, random_inputs
from attnworks.workbench.quick_check import NotVerifiedError
from attnworks.workbench.statistics import Ratio

SCHEDULES = traffic.SCHEDULES
REFERENCE_TILE = 64
WARM_UPS = 3
# Below this a measured growth of memory is the allocators' granularity. Resident pages of a CPU process are coarser.
FEWEST_GROWTH_BYTES = {"cuda": 1 << 16, "cpu": 4 << 20}

Progress = Callable[[str, int, int], None]
"""Called with what is being done, rounds done and rounds in all."""


@dataclass(frozen=True)
class Measured:
    """One schedule at one length. ``extra_bytes``: the most memory that the call held beside inputs and results; None
    where it can't be measured. ``refused``: why there is no time, such as memory that did not suffice."""

    schedule: str
    plan: Plan
    modelled_bytes: int
    seconds: tuple[float, ...] = ()
    extra_bytes: int | None = None
    refused: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.to_json(), "median": self.median}


@dataclass(frozen=True)
class AtLength:
    """All schedules at one length, timed in the same rounds."""

    length: int
    rows: tuple[Measured, ...]

    def of(self, schedule: str) -> Measured:
        return next(row for row in self.rows if row.schedule == schedule)

    def speedup(self, old: str, new: str) -> Ratio | None:
        """How many times as fast ``new`` is as ``old``; None if either was not timed."""
        theirs, own = self.of(old).seconds, self.of(new).seconds
        return statistics.ratio(own, theirs, paired=True) if own and theirs else None

    def to_json(self) -> dict[str, Any]:
        pairs = (("standard", "kv_outer"), ("kv_outer", "q_outer"), ("standard", "q_outer"))
        ratios = {f"{new} over {old}": found.to_json() for old, new in pairs if (found := self.speedup(old, new))}
        return {"length": self.length, "rows": [row.to_json() for row in self.rows], "speedups": ratios}


@dataclass(frozen=True)
class Claim:
    """What a paper says, what was found here, and whether that agrees; ``seen`` is None where nothing here can tell."""

    source: str
    says: str
    found: str
    seen: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    shape: Problem,
    lengths: Sequence[int],
    device: str,
    *,
    runs: int = 50,
    budget_seconds: float = 20.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[AtLength]:
    """The schedules at each of ``lengths``, ascending; ``shape`` gives all else of the problem.

    Verified first, at the shortest length. ``runs`` rounds, in each of which every schedule runs once, in random order
    and after a flush of the cache; fewer, but at least 5, where they would take longer than ``budget_seconds``. Raises
    ``NotVerifiedError`` for wrong results, ``ValueError`` for lengths or masks that don't go.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths: were {list(lengths)}, must be one or more, each at least 1")
    report = progress or (lambda what, done, total: None)
    found = []
    with torch.no_grad():
        for number, length in enumerate(sorted(set(lengths))):
            problem = at_length(shape, length, device)
            inputs = random_inputs(replace(problem, device="cpu"), torch.Generator().manual_seed(seed))
            if number == 0:
                report("checking", 0, 0)
                for schedule in SCHEDULES:
                    _verify(problem, schedule, inputs)
            meter: _Gpu | _Cpu = _Gpu(device) if device.startswith("cuda") else _Cpu()
            rows = [_prepare(problem, schedule, inputs, meter) for schedule in SCHEDULES]
            _time([row for row in rows if not row.refused], meter, runs, budget_seconds, seed, length, report)
            found.append(AtLength(length, tuple(row.result() for row in rows)))
    return found


def at_length(shape: Problem, length: int, device: str) -> Problem:
    """``shape`` with contiguous inputs of ``length`` queries and keys on ``device``."""
    p = replace(shape, seq_q=length, seq_kv=length, device=device, return_lse=True)
    strides = {
        name: (heads * length * dim, length * dim, dim)
        for name, heads, dim in (
            ("q_strides", p.heads_q, p.head_dim),
            ("k_strides", p.heads_kv, p.head_dim),
            ("v_strides", p.heads_kv, p.head_dim_v),
        )
    }
    return replace(p, **strides)  # type: ignore[arg-type]


def plan_of(problem: Problem, schedule: str) -> Plan:
    """The plan by which a schedule is shown on the problem's device."""
    if problem.device.startswith("cuda"):
        from attnworks.backends.triton import plans

        return plans.generation(problem, schedule)
    tile = 0 if schedule == "standard" else REFERENCE_TILE
    return Plan("reference", schedule, tile, tile)


# ---- verified, prepared, timed ---------------------------------------------------------------------------------------


def _launcher(problem: Problem, plan: Plan) -> Launcher:
    if plan.backend == "reference":
        reference.check_plan(problem, plan)
        return reference.prepare(problem, plan)
    from attnworks.backends import triton

    verdict = triton.verdict(problem, detect(problem.device))
    if not verdict.supported:
        raise ValueError(str(verdict))
    triton.check_plan(problem, plan)
    return triton.prepare(problem, plan)


def _verify(problem: Problem, schedule: str, inputs: Inputs) -> None:
    """Against fp64. Standard attention rounds S to the input dtype, which no budget is made for: it is checked in
    fp32."""
    if schedule == "standard":
        problem = replace(problem, dtype=torch.float32)
        inputs = Inputs(*(x.float() for x in inputs))
    out, _ = _launcher(problem, plan_of(problem, schedule))(_operands(problem, inputs))
    check = quick_check.check(problem, *inputs, out.cpu())
    if not check.passed:
        raise NotVerifiedError(
            f"{schedule}: error of {check.worst:.3g} times its bound at (batch, head, row, channel) {check.where}, "
            "must be at most 1: not measured"
        )


def _operands(problem: Problem, inputs: Inputs) -> Operands:
    q, k, v = (x.to(problem.device) for x in inputs)
    return Operands(q, k, v)


class _Row:
    """A schedule at a length, ready to be timed."""

    def __init__(self, problem: Problem, schedule: str, operands: Operands) -> None:
        self.schedule, self.plan = schedule, plan_of(problem, schedule)
        self.modelled = schedules.modelled_bytes(problem, self.plan, units=1)
        launch = _launcher(problem, self.plan)
        self.run = lambda: launch(operands)
        self.seconds: list[float] = []
        self.extra: int | None = None
        self.refused = ""

    def result(self) -> Measured:
        return Measured(self.schedule, self.plan, self.modelled, tuple(self.seconds), self.extra, self.refused)


def _prepare(problem: Problem, schedule: str, inputs: Inputs, meter: _Gpu | _Cpu) -> _Row:
    row = _Row(problem, schedule, _operands(problem, inputs))
    try:
        meter.memory(row.run)  # the first call also compiles and builds what is kept
        row.extra = meter.memory(row.run)
    except torch.OutOfMemoryError:
        row.refused = "out of memory"
    return row


def _time(
    rows: list[_Row], meter: _Gpu | _Cpu, runs: int, budget: float, seed: int, length: int, report: Progress
) -> None:
    if not rows:
        return
    order = random.Random(seed)
    for _ in range(WARM_UPS):
        start = time.perf_counter()
        for row in rows:
            meter.seconds(row.run)
        last = time.perf_counter() - start
        if last > 1.0:
            break
    rounds = max(5, min(runs, int(budget / max(last, 1e-9))))
    for done in range(rounds):
        report(f"N = {length}", done, rounds)
        for row in order.sample(rows, len(rows)):
            row.seconds.append(meter.seconds(row.run))
    report(f"N = {length}", rounds, rounds)


class _Gpu:
    """Device time between two events after a flush of the L2, and the allocator's high-water mark."""

    def __init__(self, device: str) -> None:
        self.seconds = Clock(device).seconds
        self._device = device

    def memory(self, run: Callable[[], tuple[Tensor, Tensor | None]]) -> int | None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        results = run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before - _bytes(results)


class _Cpu:
    """Wall-clock time, no flush, and the high-water mark of resident memory."""

    def seconds(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def memory(self, run: Callable[[], tuple[Tensor, Tensor | None]]) -> int | None:
        results, extra = peak_extra(run)
        return None if extra is None else max(extra - _bytes(results), 0)


def _bytes(results: tuple[Tensor, Tensor | None]) -> int:
    return sum(x.nbytes for x in results if x is not None)


# ---- what the papers say ---------------------------------------------------------------------------------------------

FA1, FA2 = "FA-1 (arXiv:2205.14135)", "FA-2 (arXiv:2307.08691)"


def claims(found: Sequence[AtLength], device: str) -> list[Claim]:
    """The classic claims beside what was measured. Times on a CPU are those of Python, and tell nothing of them."""
    timed = device.startswith("cuda")
    return [
        _growth(found, device, "standard", 2, f"{FA1}, section 2.2", "standard attention's extra memory grows as N²"),
        _growth(found, device, "kv_outer", 1, f"{FA1}, theorem 1", "FA-1's extra memory grows as N"),
        _growth(found, device, "q_outer", 1, f"{FA2}, section 3.1", "FA-2's extra memory grows as N"),
        _fewer_bytes(found),
        _faster(
            found, timed, "standard", "kv_outer", 2.0, f"{FA2}, abstract", "FA-1 is 2 to 4 times as fast as standard"
        ),
        _faster(
            found, timed, "kv_outer", "q_outer", 1.7, f"{FA2}, section 4.1", "FA-2 is 1.7 to 3 times as fast as FA-1"
        ),
        _faster(
            found, timed, "standard", "q_outer", 3.0, f"{FA2}, section 4.1", "FA-2 is 3 to 10 times as fast as standard"
        ),
    ]


def _growth(found: Sequence[AtLength], device: str, schedule: str, power: int, source: str, says: str) -> Claim:
    """The power of N by which memory grew from the shortest length to the longest."""
    known = [(at.length, at.of(schedule).extra_bytes or 0) for at in found if at.of(schedule).extra_bytes is not None]
    if len(known) < 2:
        return Claim(source, says, "fewer than two lengths were measured", None)
    (short, least), (long, most) = known[0], known[-1]
    fewest = FEWEST_GROWTH_BYTES["cuda" if device.startswith("cuda") else "cpu"]
    if most < fewest:  # which says something only where a matrix would have been seen
        told = schedule != "standard" and (found[-1].of("standard").extra_bytes or 0) >= 4 * fewest
        limit = f"{most:,} bytes at N = {long}"
        return Claim(
            source, says, f"{limit}: no N x N matrix" if told else f"{limit}: too little to tell", told or None
        )
    grown = math.log(most / max(least, 1)) / math.log(long / short)
    return Claim(
        source, says, f"as N to the power {grown:.2f}, to {most:,} bytes at N = {long}", abs(grown - power) < 0.3
    )


def _fewer_bytes(found: Sequence[AtLength]) -> Claim:
    ratios = [at.of("standard").modelled_bytes / at.of("kv_outer").modelled_bytes for at in found]
    says = "FA-1 moves fewer bytes than standard attention"
    low, high = min(ratios), max(ratios)
    return Claim(f"{FA1}, theorem 2", says, f"standard moves {low:.2f} to {high:.2f} times the bytes (model)", low > 1)


def _faster(found: Sequence[AtLength], timed: bool, old: str, new: str, least: float, source: str, says: str) -> Claim:
    ratios = [ratio.value for at in found if (ratio := at.speedup(old, new))]
    if not timed or not ratios:
        return Claim(source, says, "not measured on a GPU" if not timed else "never both timed", None)
    reached = f"{min(ratios):.2f} to {max(ratios):.2f} times, for these kernels on this card"
    return Claim(source, says, reached, min(ratios) >= least)
