"""The state of the machine while something is measured: clocks, power, temperature, and what held the clocks back.

On NVIDIA GPUs from NVML (package nvidia-ml-py, extra ``gpu``); on a CPU the frequency that Linux tells. What is not
told is said."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

PERIOD_SECONDS = 0.02
MOST_CORES = 16  # whose frequency is read: on a large machine all of them would take longer than the run
STEADY_CLOCK = 0.95  # a clock whose lowest sample is under this share of its highest has moved

# Bits of NVML's clock event reasons (nvml.h). Idle and the clocks that somebody set are no limits met.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "synchronised boost",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}
_NVML_CLOCKS = {"sm_mhz": 1, "memory_mhz": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_NVML_GPU_SENSOR = 0


class Sampler(Protocol):
    def sample(self) -> None:
        """Read everything once."""

    def state(self) -> dict[str, Any]:
        """What was read, JSON-ready: ``source``, ``samples``, and lowest, median and highest of each quantity; or only
        ``missing``, why nothing was."""


class Missing:
    """A sampler of a machine that tells nothing."""

    def __init__(self, why: str) -> None:
        self._why = why

    def sample(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"missing": self._why}


class CpuSampler:
    """The mean frequency of the cores, from sysfs' cpufreq, else from /proc/cpuinfo (which on many virtual machines is
    a constant)."""

    def __init__(self, system: Path = Path("/")) -> None:
        self._governed = sorted(system.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))[:MOST_CORES]
        self._cpuinfo = system / "proc/cpuinfo"
        self._mhz: list[float] = []

    def sample(self) -> None:
        if read := self._read():
            self._mhz.append(sum(read) / len(read))

    def _read(self) -> list[float]:
        try:
            if self._governed:
                return [int(path.read_text()) / 1e3 for path in self._governed]
            lines = self._cpuinfo.read_text().splitlines()
            return [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")][:MOST_CORES]
        except (OSError, ValueError):
            return []

    def state(self) -> dict[str, Any]:
        if not self._mhz:
            return {"missing": "Linux tells no frequency of this CPU"}
        source = "cpufreq" if self._governed else "/proc/cpuinfo"
        return {"source": source, "samples": len(self._mhz), "core_mhz": _summary(self._mhz)}


class NvmlSampler:
    """One GPU through NVML. ``nvml``: the module ``pynvml``, initialised; ``uuid``: the GPU's, "GPU-..."."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._read: dict[str, list[float]] = defaultdict(list)
        self._held_back: Counter[str] = Counter()
        self._samples = 0
        self._limit_watts = self._ask("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)

    def sample(self) -> None:
        self._samples += 1
        readings = {name: self._ask("nvmlDeviceGetClockInfo", clock) for name, clock in _NVML_CLOCKS.items()}
        readings["watts"] = self._ask("nvmlDeviceGetPowerUsage", scale=1e-3)
        readings["celsius"] = self._ask("nvmlDeviceGetTemperature", _NVML_GPU_SENSOR)
        for name, value in readings.items():
            if value is not None:
                self._read[name].append(value)
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        self._held_back.update(reason for bit, reason in REASONS.items() if bits is not None and int(bits) & bit)

    def _ask(self, function: str, *arguments: Any, scale: float = 1.0) -> float | None:
        """None for what this GPU or driver does not tell."""
        try:
            return float(getattr(self._nvml, function)(self._gpu, *arguments)) * scale
        except (self._nvml.NVMLError, AttributeError):
            return None

    def state(self) -> dict[str, Any]:
        if not self._samples:
            return {"missing": "NVML was not asked in time"}
        found: dict[str, Any] = {"source": "NVML", "samples": self._samples}
        found |= {name: _summary(values) for name, values in self._read.items()}
        held_back = {reason: round(count / self._samples, 3) for reason, count in self._held_back.items()}
        return found | {"limit_watts": self._limit_watts, "held_back": held_back}


def _summary(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = (round(float(x), 1) for x in np.percentile(values, [0, 50, 100]))
    return {"lowest": low, "median": middle, "highest": high}


def sampler(device: str) -> Sampler:
    """Of "cpu" or "cuda:N"."""
    if device == "cpu":
        return CpuSampler()
    if torch.version.hip is not None:
        return Missing("an AMD GPU has no NVML")
    if find_spec("pynvml") is None:
        return Missing("nvidia-ml-py is not installed (pip install 'attnworks[gpu]')")
    import pynvml

    try:
        pynvml.nvmlInit()
        return NvmlSampler(pynvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        return Missing(f"NVML: {error}")


@contextmanager
def meanwhile(sampled: Sampler, period: float = PERIOD_SECONDS) -> Iterator[None]:
    """Sample every ``period`` seconds from a thread, while the caller waits for a device."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(period):
            sampled.sample()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def remarks(state: dict[str, Any]) -> list[str]:
    """What a reader of the numbers must know of a state."""
    if "missing" in state:
        return [f"clocks were not sampled: {state['missing']}"]
    found = []
    for name, what in (("sm_mhz", "the GPU's clock"), ("core_mhz", "the cores' clock")):
        clock = state.get(name)
        if clock and clock["lowest"] < STEADY_CLOCK * clock["highest"]:
            found.append(f"{what} moved between {clock['lowest']:.0f} and {clock['highest']:.0f} MHz")
    for reason, share in state.get("held_back", {}).items():
        found.append(f"clocks were held back in {share:.0%} of the samples: {reason}")
    return found
