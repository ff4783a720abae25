"""What NVIDIA's profiler counts of one call: bytes to and from the device's memory and through its L2, cycles, and the
share of the time that the tensor cores worked. Nsight Compute through its command line, ``ncu``.

The call runs in a process of its own, begun by ``ncu`` and told to this module's ``main`` in a file. Clocks are left as
they are (``--clock-control none``); each kernel begins with cold caches and runs several times, once for each group of
counters."""

from __future__ import annotations

import csv
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnworks.problem import Problem
from attnworks.workbench.providers import Provider, by_name, random_inputs

TIMEOUT_SECONDS = 300.0
WARM_UPS = 3

READ, WRITTEN, L2 = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"
CYCLES, DURATION = "sm__cycles_elapsed.max", "gpu__time_duration.sum"
# Tensor cores of all generations, Hopper's asynchronous products included.
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu.sum"
METRICS = (READ, WRITTEN, L2, CYCLES, DURATION, TENSOR, CONFLICTS)
_UNITS = {
    "byte": 1,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "nsecond": 1,
    "ns": 1,
    "usecond": 1e3,
    "us": 1e3,
    "ms": 1e6,
}


class ProfilerError(RuntimeError):
    """There is no profiler here, or it says why it can't count."""


@dataclass(frozen=True)
class Profile:
    """Of one call: sums over its ``kernels``, in order; None for what this GPU's profiler doesn't count.

    ``tensor_share``: of the cycles, in which the tensor cores worked; of all kernels, by their cycles.
    ``bank_conflicts``: of shared memory, in cycles."""

    kernels: tuple[str, ...]
    dram_read_bytes: int | None
    dram_written_bytes: int | None
    l2_bytes: int | None
    cycles: int | None
    seconds: float | None
    tensor_share: float | None
    bank_conflicts: int | None

    @property
    def dram_bytes(self) -> int | None:
        if self.dram_read_bytes is None or self.dram_written_bytes is None:
            return None
        return self.dram_read_bytes + self.dram_written_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kernels": list(self.kernels), "dram_bytes": self.dram_bytes}


# ---- what ncu prints -------------------------------------------------------------------------------------------------


def parse(text: str) -> Profile:
    """The profile in what ``ncu --csv --page raw`` printed. Raises ``ProfilerError`` where there is none, with what it
    printed instead."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        said = [line for line in lines if line.startswith("==")] or lines or ["nothing"]
        raise ProfilerError("ncu counted no kernel: " + " ".join(said[-3:]))
    units, *rows = csv.DictReader(line for line in lines[begin:] if line.startswith('"'))
    if not rows:
        raise ProfilerError("ncu counted no kernel")
    table = [{name: _number(row.get(name), units.get(name)) for name in METRICS} for row in rows]
    cycles = [row[CYCLES] for row in table]
    shares = [row[TENSOR] for row in table]
    tensor = None
    if None not in cycles and None not in shares:
        worked = sum(share * cycle for share, cycle in zip(_numbers(shares), _numbers(cycles), strict=True))
        tensor = worked / 100 / max(sum(_numbers(cycles)), 1.0)
    nanoseconds = _sum(table, DURATION)
    return Profile(
        kernels=tuple(row["Kernel Name"] for row in rows),
        dram_read_bytes=_sum(table, READ),
        dram_written_bytes=_sum(table, WRITTEN),
        l2_bytes=_sum(table, L2),
        cycles=_sum(table, CYCLES),
        seconds=None if nanoseconds is None else nanoseconds / 1e9,
        tensor_share=tensor,
        bank_conflicts=_sum(table, CONFLICTS),
    )


def _number(value: str | None, unit: str | None) -> float | None:
    if not value or value in ("n/a", "nan"):
        return None
    return float(value.replace(",", "")) * _UNITS.get(unit or "", 1)


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(table: Sequence[dict[str, float | None]], name: str) -> int | None:
    values = [row[name] for row in table]
    return None if None in values else round(sum(_numbers(values)))


# ---- running it ------------------------------------------------------------------------------------------------------

Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def profile(provider: str | Provider, problem: Problem, seed: int = 0, runner: Runner | None = None) -> Profile:
    """One call of a provider, named as in ``providers.by_name`` or one that can be pickled, on a problem that is on a
    GPU.

    Raises ``ProfilerError`` where ``ncu`` is missing or may not count. A counter that this GPU does not have is left
    out. ``runner``: starts a command, for tests."""
    if problem.device == "cpu":
        raise ProfilerError("counters of a CPU are not read")
    ncu = shutil.which("ncu")
    if ncu is None and runner is None:
        raise ProfilerError("ncu (Nsight Compute) is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((provider, problem, seed)))
        metrics = list(METRICS)
        while True:
            command = [
                ncu or "ncu",
                *_OPTIONS,
                "--metrics",
                ",".join(metrics),
                sys.executable,
                "-m",
                __name__,
                str(job),
            ]
            ran = (runner or _run)(command)
            unknown = [name for name in metrics if name.startswith(_refused(ran.stdout + ran.stderr))]
            if not unknown:
                break
            metrics = [name for name in metrics if name not in unknown]
    if ran.returncode:
        said = (ran.stdout + ran.stderr).strip().splitlines() or ["nothing"]
        raise ProfilerError("ncu failed: " + " ".join(said[-3:]))
    return parse(ran.stdout)


_OPTIONS = ("--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=os.environ | {"PYTHONPATH": _path()}
        )
    except subprocess.TimeoutExpired as error:
        raise ProfilerError(f"ncu took more than {TIMEOUT_SECONDS:g} seconds") from error


def _path() -> str:
    """The other process finds what this one does, wherever it was found."""
    return os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))


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
