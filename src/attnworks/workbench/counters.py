"""What NVIDIA's profiler counts of one call of a provider: bytes to and from the device's memory and through its L2,
cycles, and the share of the time that the tensor cores worked.

The call runs in a process of its own, which ``profile.py`` begins under ncu and which is told what to do in a file:
``main`` here. Each kernel begins with cold caches and runs several times, once for each group of counters."""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnworks.hardware import detect
from attnworks.masks import Bounds
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench import levels, perf_events, profile, schedules
from attnworks.workbench.profile import Kernel, ProfilerError, total
from attnworks.workbench.providers import Provider, by_name, random_inputs
from attnworks.workbench.records import Record

WARM_UPS = 3
METRICS = (
    *profile.BYTES,
    profile.CYCLES,
    profile.SECONDS,
    profile.TENSOR_SHARE,
    profile.BANK_CONFLICTS,
    profile.WAVEFRONTS,
)

Profiler = Callable[..., list[Kernel]]


@dataclass(frozen=True)
class Counted:
    """Of one call: sums over its ``kernels``, in order; None for what this GPU's profiler doesn't count.

    ``tensor_share``: of the cycles, in which the tensor cores worked; of all kernels, by their cycles.
    ``bank_conflicts``: of shared memory, in its turns (wavefronts), and ``shared_turns``: all of them."""

    kernels: tuple[str, ...]
    dram_read_bytes: float | None
    dram_written_bytes: float | None
    l2_bytes: float | None
    cycles: float | None
    seconds: float | None
    tensor_share: float | None
    bank_conflicts: float | None
    shared_turns: float | None

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> Counted:
        cycles, tensor = total(kernels, profile.CYCLES), None
        if cycles and total(kernels, profile.TENSOR_SHARE) is not None:
            worked = (one.metrics[profile.TENSOR_SHARE] * one.metrics[profile.CYCLES] for one in kernels)
            tensor = sum(worked) / 100 / cycles
        return cls(
            kernels=tuple(kernel.name for kernel in kernels),
            dram_read_bytes=total(kernels, profile.DRAM_READ),
            dram_written_bytes=total(kernels, profile.DRAM_WRITTEN),
            l2_bytes=total(kernels, profile.L2),
            cycles=cycles,
            seconds=total(kernels, profile.SECONDS),
            tensor_share=tensor,
            bank_conflicts=total(kernels, profile.BANK_CONFLICTS),
            shared_turns=total(kernels, profile.WAVEFRONTS),
        )

    @property
    def dram_bytes(self) -> int | None:
        if self.dram_read_bytes is None or self.dram_written_bytes is None:
            return None
        return round(self.dram_read_bytes + self.dram_written_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kernels": list(self.kernels), "dram_bytes": self.dram_bytes}


def count(provider: str | Provider, problem: Problem, seed: int = 0, profiler: Profiler = profile.profile) -> Counted:
    """One call of a provider, named as in ``providers.by_name`` or one that can be pickled, on a problem that is on a
    GPU. A counter that ncu does not know there is left out. Raises ``ProfilerError``."""
    if problem.device == "cpu":
        raise ValueError("problem: was on the CPU, must be on a GPU (perf_events.count reads a CPU's counters)")
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((provider, problem, seed)))
        command = [sys.executable, "-m", __name__, str(job)]
        # The other process finds what this one does, wherever it was found.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}
        return Counted.of(_known(METRICS, lambda metrics: profiler(command, metrics, cache_control="all", env=env)))


def with_profile(problem: Problem, record: Record, provider: Provider) -> Record:
    """The record with what the device's profiler counted, or a note why it did not."""
    try:
        if problem.device == "cpu":
            counted = perf_events.count(provider, problem, record.conditions.get("threads")).to_json()
        else:
            counted = count(provider, problem).to_json() | {"predicted_bytes": predicted(problem, record)}
    except ProfilerError as error:
        whose = "" if problem.device == "cpu" else f" of {record.provider}"  # a CPU refuses all alike
        return replace(record, notes=(*record.notes, f"no profile{whose}: {error}"))
    return replace(record, profile=counted)


def predicted(problem: Problem, record: Record) -> int | None:
    """Bytes of the device's memory by ``levels``, for the record's plan; None where that is not known, or which tiles a
    mask hides."""
    if record.plan is None or not all(isinstance(term, Bounds) for term in problem.mask):
        return None
    on = detect(problem.device)
    found = levels.levels(problem, schedules.of_plan(problem, Plan(**record.plan), on.units), on)
    return found.read + found.written


def _known(metrics: tuple[str, ...], run: Callable[[tuple[str, ...]], list[Kernel]]) -> list[Kernel]:
    """``run`` with those of ``metrics`` that it does not refuse by name."""
    try:
        return run(metrics)
    except ProfilerError as error:
        known = tuple(name for name in metrics if not name.startswith(_refused(str(error))))
        if len(known) == len(metrics) or not known:
            raise
    return _known(known, run)


def _refused(text: str) -> tuple[str, ...]:
    """Counters that ncu says it doesn't know, perhaps without their ends."""
    said = (line for line in text.splitlines() if "metric" in line.lower() and line.startswith("=="))
    return tuple(name.rstrip(".") for line in said for name in re.findall(r"[a-z0-9_]+__[a-z0-9_.]+", line))


def main(job: str) -> None:
    """In the process that ncu watches: warm up, then one call between the profiler's start and stop."""
    provider, problem, seed = pickle.loads(Path(job).read_bytes())
    values = random_inputs(problem, torch.Generator().manual_seed(seed))
    chosen = by_name(provider) if isinstance(provider, str) else provider
    bound = chosen.bind(problem, type(values)(*(x.to(problem.device) for x in values)))
    with torch.no_grad():
        for _ in range(WARM_UPS):
            bound.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        bound.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1])
