"""Hardware counters of kernels on NVIDIA GPUs: ncu (Nsight Compute) runs a program, its CSV becomes numbers by kernel.

The program decides what is measured: ncu looks only between ``torch.cuda.profiler.start()`` and ``stop()``. Clocks are
left alone. A metric that ncu can't read on the card at hand is missing from the result, not 0.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DRAM_READ, DRAM_WRITTEN, L2 = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"
BYTES = (DRAM_READ, DRAM_WRITTEN, L2)
"""Bytes between L2 and device memory, and all that the L2 looked up. Few enough for one pass: a kernel is then run
once, with the caches as the kernel before left them."""

CYCLES, SECONDS = "sm__cycles_elapsed.max", "gpu__time_duration.sum"
TENSOR_SHARE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
"""Of shared memory: turns that its accesses took, and how many of them because lanes met in a bank. What tensor cores
and bulk copies read and write by themselves is in neither."""

_DESCRIPTION, _REPLAYS = "Kernel Name", "profiler__replayer_passes"
_PASSES = re.compile(r"^==PROF== Profiling .* - (\d+)(?: \(\d+/\d+\))?: .* (\d+) pass", re.MULTILINE)
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {
    "second": 1.0,
    "msecond": 1e-3,
    "usecond": 1e-6,
    "nsecond": 1e-9,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "ns": 1e-9,
}


@dataclass(frozen=True)
class Kernel:
    """One launch: its name and its metrics by ncu's names, in base units (bytes, seconds, cycles, percent). ``passes``:
    how often ncu ran it to read them all, None where it didn't say; from the second on it finds the caches warm."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    passes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ProfilerError(RuntimeError):
    """ncu is not there, was refused the counters, or found no kernel; its own words are in the message."""


def ncu() -> str | None:
    """Where ncu is, None if it is not on the PATH."""
    return shutil.which("ncu")


def profile(
    command: Sequence[str],
    metrics: Iterable[str] = BYTES,
    *,
    cache_control: str = "none",
    timeout: float = 600.0,
    env: dict[str, str] | None = None,
) -> list[Kernel]:
    """Run ``command`` under ncu; the kernels it launched between the profiler's start and stop, in order.

    ``cache_control``: "none" leaves the caches as the program left them, "all" flushes them before every kernel (and
    every pass over it, where the metrics need several). Raises ``ProfilerError``.
    """
    wanted = tuple(metrics)
    found = ncu()
    if found is None:
        raise ProfilerError("ncu is not on the PATH: install Nsight Compute, which CUDA's toolkit brings")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = [
            *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), "--force-overwrite"),
            *("--metrics", ",".join(wanted), "--profile-from-start", "off", "--target-processes", "all"),
            *("--clock-control", "none", "--cache-control", cache_control),
        ]
        try:
            ran = subprocess.run(
                [found, *options, *command], capture_output=True, text=True, timeout=timeout, check=False, env=env
            )
        except subprocess.TimeoutExpired as error:
            raise ProfilerError(f"ncu took longer than {timeout:.0f} s: {' '.join(command)}") from error
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    kernels = parse(text, wanted)
    if ran.returncode or not kernels:
        said = [line for line in (text + ran.stdout).splitlines() if line.startswith("==")]
        tail = "\n".join([*said[-5:], *ran.stderr.splitlines()[-15:]])
        raise ProfilerError(f"ncu ended with code {ran.returncode} and {len(kernels)} kernels:\n{tail}")
    return kernels


def parse(text: str, wanted: Iterable[str] = ()) -> list[Kernel]:
    """The kernels in what ``ncu --csv --page raw`` wrote: a row of names, one of units, then a row for each launch.
    Metrics are those that were ``wanted``, all for none: the page holds a device's attributes as well.

    Lines before the names (ncu's messages, the program's own output) are skipped; [] where there is no such table.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"') and f'"{_DESCRIPTION}"' in line), None)
    if start is None:
        return []
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    if len(rows) < 2:
        return []
    names, units, *launches = rows
    columns = [n for n, name in enumerate(names) if "__" in name]
    wanted, passes = set(wanted), {number: int(count) for number, count in _PASSES.findall(text)}
    kernels = []
    for launch in launches:
        values = {names[n]: _number(launch[n], units[n]) for n in columns if n < len(launch)}
        known = {name: value for name, value in values.items() if value is not None}
        ran = int(known[_REPLAYS]) if _REPLAYS in known else passes.get(launch[0])
        kept = {name: value for name, value in known.items() if name in wanted or not wanted}
        kernels.append(Kernel(launch[names.index(_DESCRIPTION)], kept, ran))
    return kernels


def total(kernels: Iterable[Kernel], metric: str) -> float | None:
    """The sum over launches, None where one of them lacks the metric or there is none."""
    values = [kernel.metrics.get(metric) for kernel in kernels]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def calls(kernels: Iterable[Kernel], last: str) -> list[list[Kernel]]:
    """The kernels of each call, where every call ends with one or more whose name holds ``last``, such as what reads a
    large buffer to empty the caches. Those are part of it; what comes after the last of them is left out."""
    found: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if found[-1] and last in found[-1][-1].name and last not in kernel.name:
            found.append([])
        found[-1].append(kernel)
    return [call for call in found if call and last in call[-1].name]


def _number(text: str, unit: str) -> float | None:
    """A metric in base units: "1,234.5" of "Kbyte" is 1234500. None for what is no number ("n/a")."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    if unit in _TIMES:
        return value * _TIMES[unit]
    prefix = unit.removesuffix("byte") if unit.endswith("byte") else ""
    return value * _PREFIXES.get(prefix, 1.0)
