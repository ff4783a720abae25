"""What a number depends on besides the kernel: machine, versions, commit, and who else was using the machine
meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import attnworks
from attnworks.backends import cpu
from attnworks.hardware import detect

# Above this share of one core that others took, the run is marked.
BUSY_CORES = 0.2


def machine(device: str = "cpu") -> dict[str, Any]:
    """The CPU or GPU at hand, JSON-ready."""
    found = detect(device)
    if found.kind == "gpu":
        return {
            "name": found.name,
            "kind": found.kind,
            "units": found.units,
            "capability": found.capability,
            "arch": found.arch,
            "shared_cache_bytes": found.shared_cache_bytes,
            "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
            "driver": driver(device),
            "host": detect("cpu").name,
            "system": platform.platform(),
        }
    return {
        "name": found.name,
        "kind": found.kind,
        "units": found.units,
        "capability": found.capability,
        "isas": list(cpu.isas()),
        "on_chip_bytes": found.on_chip_bytes,
        "shared_cache_bytes": found.shared_cache_bytes,
        "system": platform.platform(),
    }


def place(device: str) -> str:
    """A device with its number: "cuda" is the current GPU. Raises ``ValueError`` for one that is not here."""
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: was {device!r}, must be cpu, cuda or cuda:N") from None
    if named.type == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if named.type == "cuda" else 0
    if named.type != "cuda" or count == 0 or (named.index or 0) >= count:
        here = "PyTorch finds no GPU here" if count == 0 else f"there are {count} GPUs here"
        raise ValueError(f"device: was {device!r}, must be cpu, cuda or cuda:N; {here}")
    return f"cuda:{torch.cuda.current_device() if named.index is None else named.index}"


@cache
def versions() -> dict[str, str]:
    found = {"attnworks": attnworks.__version__, "torch": torch.__version__, "python": platform.python_version()}
    installed = {name for name in ("numpy", "triton", "openvino", "onnxruntime") if find_spec(name)}
    return found | {name: metadata.version(name) for name in sorted(installed)}


@cache
def driver(device: str = "cuda") -> str:
    """The GPU driver's version; for AMD the runtime's that torch was built for. "unknown" where nothing tells it."""
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    index = torch.device(device).index or 0
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@cache
def commit() -> str | None:
    """The commit of the source tree that attnworks is imported from, "-dirty" if sources differ; None outside of
    one."""
    folder = Path(attnworks.__file__).parent
    try:
        hash_ = _git(folder, "rev-parse", "--short=12", "HEAD")
        tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return hash_ + ("-dirty" if dirty else "") if tracked else None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()


@dataclass(frozen=True)
class Load:
    """Use of the machine by others during a run: ``other_cores`` (cores' worth of their time) and ``stolen_cores``
    (taken by the hypervisor), both None where the system does not tell; ``load_average`` over the last minute, at the
    end."""

    other_cores: float | None
    stolen_cores: float | None
    load_average: float | None

    @property
    def busy(self) -> bool:
        return (self.other_cores or 0) + (self.stolen_cores or 0) > BUSY_CORES

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.busy}


class LoadMeter:
    """Measures the ``Load`` between its making and ``read``."""

    def __init__(self) -> None:
        self._start = self._ticks()
        self._own_start = _own_seconds()
        self._time = time.perf_counter()

    def read(self) -> Load:
        elapsed = max(time.perf_counter() - self._time, 1e-9)
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        end = self._ticks()
        if self._start is None or end is None:
            return Load(None, None, average)
        busy, stolen = ((after - before) / elapsed for before, after in zip(self._start, end, strict=True))
        other = busy - (_own_seconds() - self._own_start) / elapsed
        return Load(round(max(other, 0.0), 3), round(stolen, 3), average)

    @staticmethod
    def _ticks() -> tuple[float, float] | None:
        """(busy, stolen) seconds of all cores since boot, from /proc/stat."""
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        user, nice, system, _, _, irq, softirq, steal = fields[:8]
        ticks = os.sysconf("SC_CLK_TCK")
        return (user + nice + system + irq + softirq) / ticks, steal / ticks


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
