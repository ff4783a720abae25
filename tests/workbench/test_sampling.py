"""What is sampled while something is measured: read from files and from an NVML that is made up here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attnworks.workbench import sampling
from attnworks.workbench.sampling import CpuSampler, Missing, NvmlSampler, meanwhile, remarks, sampler


class Nvml:
    """As ``pynvml`` answers for a GPU that gets hot; it has no power limit to tell."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.time = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not uuid.startswith("GPU-"):
            raise self.NVMLError("Invalid Argument")
        return uuid

    def nvmlDeviceGetClockInfo(self, gpu: str, clock: int) -> int:
        self.time += clock == 1
        return {1: [1980, 1980, 1700, 1410][self.time - 1], 2: 3201}[clock]

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        return 60 + self.time

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: str) -> int:
        return 0x1 if self.time < 3 else 0x4 | (0x20 if self.time == 4 else 0)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        raise self.NVMLError("Not Supported")


def test_a_gpu_is_sampled_and_what_held_it_back_is_said() -> None:
    sampled = NvmlSampler(Nvml(), "GPU-1")
    for _ in range(4):
        sampled.sample()
    state = sampled.state()
    assert state["samples"] == 4
    assert state["sm_mhz"] == {"lowest": 1410, "median": 1840, "highest": 1980}
    assert state["memory_mhz"]["median"] == 3201
    assert state["watts"]["highest"] == 700
    assert state["celsius"] == {"lowest": 61, "median": 62.5, "highest": 64}
    assert state["limit_watts"] is None
    assert state["held_back"] == {"power cap": 0.5, "software thermal limit": 0.25}
    said = "; ".join(remarks(state))
    assert "moved between 1410 and 1980 MHz" in said
    assert "50% of the samples: power cap" in said


def test_a_steady_gpu_is_nothing_to_remark_on() -> None:
    state = {"samples": 9, "sm_mhz": {"lowest": 1950, "median": 1980, "highest": 1980}, "held_back": {}}
    assert remarks(state) == []


def test_what_cannot_be_sampled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "find_spec", lambda name: None)
    missing = sampler("cuda:0")
    missing.sample()
    assert isinstance(missing, Missing)
    assert "attnworks[gpu]" in remarks(missing.state())[0]
    assert "missing" in NvmlSampler(Nvml(), "GPU-1").state(), "never asked"


def test_the_frequency_of_a_cpu(tmp_path: Path) -> None:
    assert "missing" in CpuSampler(tmp_path).state()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\ncpu MHz\t\t: 2000.5\nprocessor : 1\ncpu MHz\t\t: 3000.5\n")
    plain = CpuSampler(tmp_path)
    plain.sample()
    assert plain.state()["core_mhz"]["median"] == 2500.5
    for core, khz in enumerate((1_000_000, 3_000_000)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
    governed = CpuSampler(tmp_path)
    governed.sample()
    (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").write_text("3000000\n")
    governed.sample()
    state = governed.state()
    assert (state["source"], state["core_mhz"]["lowest"], state["core_mhz"]["highest"]) == ("cpufreq", 2000, 3000)
    assert "moved between 2000 and 3000 MHz" in remarks(state)[0]


def test_a_thread_samples_while_the_caller_waits() -> None:
    class Counting(Missing):
        count = 0

        def sample(self) -> None:
            self.count += 1

    counting = Counting("")
    with meanwhile(counting, period=0.001):
        time.sleep(0.1)
    before = counting.count
    time.sleep(0.01)
    assert 2 <= before == counting.count
