"""Tuning on the GPU at hand: verified candidates of the Triton backend's forward timed in the same rounds, and the
fastest kept as rows of tuned plans (``tuned.py``).

For each problem: the backend's own choice, what an older file hints at, and a grid of tiles → those that the compiler
says fit the card → a short race of all → the best few and the backend's choice held against fp64 → the final, in
interleaved rounds. A row is kept only where the winner is faster than the backend's choice beyond doubt.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnworks import tuned
from attnworks.backends import Backend, cuda, triton
from attnworks.hardware import Hardware, detect
from attnworks.masks import Bounds, MaskSpec
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem
from attnworks.tuned import Row
from attnworks.workbench import environment, quick_check, statistics, tile_sweep
from attnworks.workbench.device_time import Clock
from attnworks.workbench.quick_check import NotVerifiedError
from attnworks.workbench.statistics import Ratio

# (tile_q, warps) and (tile_kv, stages) of prefill; the second of decode too.
ROWS = ((64, 4), (128, 4), (128, 8))
KEYS = ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
SPLIT_FACTORS = (0.5, 1, 2)
RACE_ROUNDS, FINAL_ROUNDS, FINALISTS = 4, 40, 4
CHECKED_SEQUENCES = 2
CAUSAL: MaskSpec = (Bounds(None, 0, "bottom-right"),)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, problems done and problems in all."""


@dataclass(frozen=True)
class Outcome:
    """Of one problem: the backend's choice, the fastest of ``tried`` candidates, and how many times as fast it is; the
    row if that is beyond doubt. ``not_right``: what was left out since its result is wrong."""

    key: str
    table: Plan
    best: Plan
    ratio: Ratio
    seconds: float
    tried: int
    not_right: tuple[str, ...]
    row: Row | None

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key, "table": self.table.to_json(), "best": self.best.to_json(), "ratio": self.ratio.to_json(),
            "seconds": self.seconds, "tried": self.tried, "not_right": list(self.not_right),
            "row": self.row.to_json() if self.row else None,
        }  # fmt: skip


# ---- problems --------------------------------------------------------------------------------------------------------


def dense(batch: int, heads_q: int, heads_kv: int, seq: int, dim: int, mask: MaskSpec = (), seq_q: int = 0) -> Problem:
    """bf16, contiguous, "bhsd"; ``seq_q``: ``seq`` if it is 0."""
    rows = seq_q or seq
    q_strides, kv_strides = ((heads * n * dim, n * dim, dim) for heads, n in ((heads_q, rows), (heads_kv, seq)))
    return Problem(
        "dense", batch, heads_q, heads_kv, rows, seq, dim, dim, torch.bfloat16, "cuda", dim**-0.5,
        q_strides, kv_strides, kv_strides, mask=mask,
    )  # fmt: skip


def decode(batch: int, heads_q: int, heads_kv: int, capacity: int, dim: int, page_size: int = 0) -> Problem:
    """bf16, one query for each sequence, full caches."""
    q_strides = (heads_q * dim, dim, heads_q * dim)
    kv_strides = ((page_size or capacity) * heads_kv * dim, dim, heads_kv * dim)
    return Problem(
        "decode", batch, heads_q, heads_kv, 1, capacity, dim, dim, torch.bfloat16, "cuda", dim**-0.5,
        q_strides, kv_strides, kv_strides, layout="bshd", page_size=page_size,
    )  # fmt: skip


def usual_problems() -> list[Problem]:
    """What models ask for most, the most usual first: prefill of 16k tokens, decode of grouped heads."""
    tokens, width = 16384, 2048
    found = [
        dense(tokens // n, width // dim, width // dim, n, dim, mask)
        for n in (4096, 16384, 8192, 2048, 1024)
        for dim in (128, 64)
        for mask in (CAUSAL, ())
    ]
    found += [decode(batch, 32, 8, n, 128, page) for page in (0, 16, 64) for n in (4096, 16384) for batch in (1, 8, 64)]
    found += [dense(tokens // n, 32, 8, n, 128, CAUSAL) for n in (4096, 16384, 1024)]
    found += [dense(batch, 32, 8, 4096, 128, CAUSAL, seq_q) for batch in (1, 8) for seq_q in (16, 64, 256)]
    found += [dense(4, 8, 8, 4096, 256, mask) for mask in (CAUSAL, ())]
    found += [dense(1, 16, 16, tokens, 128, (Bounds(1023, 0, "bottom-right"),))]
    return found


# ---- candidates ------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    """The backend's choice first, then the hint of an older file, its other candidates and a grid around them."""
    from attnworks.backends.triton import plans

    listed = plans.candidates(problem, hardware)
    hint = tuned.hint(problem, hardware, triton.NAME, triton.KERNELS)
    found = [listed[0], *([hint.row.plan] if hint else []), *listed[1:]]
    if listed[0].schedule == "split_kv":
        for (tile_kv, stages), factor in product(((32, 3), *KEYS), SPLIT_FACTORS):
            keys = max(round(listed[0].split_kv * factor / tile_kv), 1) * tile_kv
            found.append(replace(listed[0], tile_kv=tile_kv, stages=stages, split_kv=keys))
    else:
        schedules = ("q_outer", "grouped") if problem.group > 1 and problem.seq_q <= 2 * ROWS[0][0] else ("q_outer",)
        for schedule, (tile_q, warps), (tile_kv, stages) in product(schedules, ROWS, KEYS):
            found.append(
                replace(listed[0], schedule=schedule, tile_q=tile_q, tile_kv=tile_kv, warps=warps, stages=stages)
            )
    return list(dict.fromkeys(found))


def _that_fit(
    asked: Sequence[tuple[Problem, Plan]], hardware: Hardware, jobs: int, progress: Progress
) -> list[tuple[Problem, Plan]]:
    """Those that the compiler rejects for no reason. Compiling them all at once, in ``jobs`` processes, also fills
    Triton's cache on disk, from which the launches take them."""
    like: dict[Any, list[int]] = {}  # lengths hardly change a kernel: each is compiled once
    for place, (p, plan) in enumerate(asked):
        fields = p.form, p.dtype, p.kv_dtype, p.head_dim, p.head_dim_v, p.group, p.mask, p.scores, p.page_size
        splits = plan.split_kv < p.seq_kv if plan.split_kv else False
        key = (*fields, p.batch == 1, p.seq_q == 1, replace(plan, split_kv=plan.split_kv and plan.tile_kv), splits)
        like.setdefault(key, []).append(place)
    groups = list(like.values())
    kept: list[int] = []
    target = tile_sweep.target_of(hardware)
    first = [asked[group[0]] for group in groups]
    for done, (index, compiled) in enumerate(tile_sweep.compile_all(target, first, jobs), 1):
        progress("compiling", done, len(groups))
        if not tile_sweep.judge(*first[index], compiled, hardware).rejected:
            kept += groups[index]
    return [asked[place] for place in sorted(kept)]


# ---- the race --------------------------------------------------------------------------------------------------------


def tune(
    problems: Sequence[Problem],
    device: str = "cuda",
    *,
    seconds: float = 180.0,
    jobs: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Outcome]:
    """An ``Outcome`` for each problem that is reached within ``seconds``, in their order; ``rows_of`` makes a file's
    rows of them. ``jobs``: processes that compile. Raises ``ValueError`` for problems that the Triton backend refuses,
    ``NotVerifiedError`` where the backend's own choice gives wrong results."""
    started = time.perf_counter()
    report = progress or (lambda what, done, total: None)
    hardware = detect(device)
    problems = [replace(problem, device=device) for problem in problems]
    for problem in problems:
        if not (verdict := triton.verdict(problem, hardware)).supported:
            raise ValueError(str(verdict))
    tried = {problem: candidates(problem, hardware) for problem in problems}
    asked = [(problem, plan) for problem, plans in tried.items() for plan in plans]
    fitting = {problem: plans[:1] for problem, plans in tried.items()}  # the backend's choice runs, whatever it takes
    for problem, plan in _that_fit(asked, hardware, jobs, report):
        if plan not in fitting[problem]:
            fitting[problem].append(plan)
    clock = Clock(device)
    found = []
    for done, (problem, plans) in enumerate(fitting.items()):
        if time.perf_counter() - started > seconds:
            break
        report(tuned.key_of(problem, hardware, triton.NAME), done, len(fitting))
        found.append(_race(problem, plans, hardware, clock, seed))
    return found


def rows_of(outcomes: Sequence[Outcome]) -> dict[str, Row | None]:
    """For ``tuned.write``: None where the backend's own choice is as good, so that an older row goes."""
    return {outcome.key: outcome.row for outcome in outcomes}


def _race(problem: Problem, plans: list[Plan], hardware: Hardware, clock: Clock, seed: int) -> Outcome:
    torch.manual_seed(seed)
    o = _inputs(problem)
    table = plans[0]
    runs = {plan: _run(problem, plan, o) for plan in plans}
    times = _timed(clock, runs, RACE_ROUNDS)
    fastest = sorted(plans, key=lambda plan: statistics.median(times[plan]))
    finalists = list(dict.fromkeys([table, *fastest[:FINALISTS]]))
    right = _checker(problem, o)
    wrong = [plan for plan in finalists if not right(runs[plan]())]
    if table in wrong:
        raise NotVerifiedError(f"{table}: its result is wrong for {tuned.key_of(problem, hardware, triton.NAME)}")
    times = _timed(clock, {plan: runs[plan] for plan in finalists if plan not in wrong}, FINAL_ROUNDS)
    best, ratio, row = decide(times, table, triton, problem.device, seed)
    key, own = tuned.key_of(problem, hardware, triton.NAME), statistics.median(times[best])
    return Outcome(key, table, best, ratio, own, len(plans), tuple(str(plan) for plan in wrong), row)


def decide(
    times: Mapping[Plan, Sequence[float]], table: Plan, backend: Backend, device: str, seed: int = 0
) -> tuple[Plan, Ratio, Row | None]:
    """(the fastest plan of a final, how many times as fast it is as the table's choice, the row to keep): None where it
    is the table's choice itself, or not faster beyond doubt."""
    best = min(times, key=lambda plan: statistics.median(times[plan]))
    ratio = statistics.ratio(times[best], times[table], paired=True, seed=seed)
    if best == table or ratio.verdict != "faster":
        return best, ratio, None
    made_with = _made_with(backend.NAME, device)
    return best, ratio, Row(best, round(ratio.value, 3), tuned.kernels_hash(backend.KERNELS), *made_with)


def _timed(clock: Clock, runs: dict[Plan, Callable[[], Tensor]], rounds: int) -> dict[Plan, list[float]]:
    by_number = dict(enumerate(runs))
    times = clock.interleaved({str(number): runs[plan] for number, plan in by_number.items()}, rounds)
    return {plan: times[str(number)] for number, plan in by_number.items()}


def _run(problem: Problem, plan: Plan, o: Operands) -> Callable[[], Tensor]:
    triton.check_plan(problem, plan)
    launch = triton.prepare(problem, plan)
    return lambda: launch(o)[0]


def _inputs(p: Problem) -> Operands:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=p.dtype, device=p.device)

    if p.form == "dense":
        q, k = normal(p.batch, p.heads_q, p.seq_q, p.head_dim), normal(p.batch, p.heads_kv, p.seq_kv, p.head_dim)
        return Operands(q, k, normal(p.batch, p.heads_kv, p.seq_kv, p.head_dim_v))
    lens = torch.full((p.batch,), p.seq_kv, dtype=torch.int64, device=p.device)
    table, caches = None, (p.batch, p.seq_kv)
    if p.page_size:
        pages = p.batch * p.seq_kv // p.page_size
        table = torch.randperm(pages, device=p.device).view(p.batch, -1)
        caches = (pages, p.page_size)
    k, v = (normal(*caches, p.heads_kv, dim) for dim in (p.head_dim, p.head_dim_v))
    return Operands(normal(p.batch, p.seq_q, p.heads_q, p.head_dim), k, v, kv_lens=lens, page_table=table)


def _checker(p: Problem, o: Operands) -> Callable[[Tensor], bool]:
    """Whether a result is right, by ``quick_check`` of the first sequences; a cache is the dense problem it holds."""
    few = min(p.batch, CHECKED_SEQUENCES)
    q, k, v, cache = o.q[:few], o.k, o.v, p.form == "decode"
    k, v = (x[:few] if o.page_table is None else x[o.page_table[:few]].flatten(1, 2) for x in (k, v))
    q, k, v = ((x.transpose(1, 2) if cache else x).cpu() for x in (q, k, v))
    held = replace(p, form="dense", batch=few, page_size=0)

    def right(out: Tensor) -> bool:
        return quick_check.check(held, q, k, v, (out.transpose(1, 2) if cache else out)[:few].cpu()).passed

    return right


def _made_with(backend: str, device: str) -> tuple[str, str, str]:
    """(driver, compiler, commit); of a CPU its system and the extension's own version."""
    versions = environment.versions()
    own = f"attnworks {versions['attnworks']}"
    if device.startswith("cpu"):
        return platform.platform(), f"{own}, torch {versions['torch']}", environment.commit() or own
    if backend == cuda.NAME:
        from attnworks.backends.cuda import compile as nvrtc

        compiler = f"NVRTC {nvrtc.version()}"
    else:
        compiler = f"triton {versions.get('triton', '?')}"
    return environment.driver(device), f"{compiler}, torch {versions['torch']}", environment.commit() or own
