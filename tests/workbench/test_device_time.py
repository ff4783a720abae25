"""How a GPU is timed, with a GPU that is made up here: a clock that only what runs on it moves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnworks.hardware import Hardware
from attnworks.workbench import ceilings, device_time, meters
from attnworks.workbench.device_time import Clock
from attnworks.workbench.meters import Entry, GpuMeter, Timed
from attnworks.workbench.providers import Bound, Inputs
from attnworks.workbench.sampling import Missing

L2 = 3 << 20


class Gpu:
    """``now``: seconds of device time. ``warm``: whether what is read lies in the L2."""

    def __init__(self) -> None:
        self.now, self.warm, self.slept, self.captured = 0.0, False, 0, 0

    def kernel(self, seconds: float, cold: float = 0.0) -> None:
        self.now += seconds + (0 if self.warm else cold)
        self.warm = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            made.now += 1e-12  # what is no kernel of this GPU takes some time too
            self.at = made.now

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    def sleep(cycles: int) -> None:
        made.slept += 1
        made.now += 0.5e-3

    def graphed(run: Callable[[], Any], pool: Any = None) -> Callable[[], Any]:
        made.captured += 1
        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(device_time, "graphed", graphed)
    monkeypatch.setattr(device_time, "FEWEST_FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(device_time, "detect", lambda device: Hardware("H", "gpu", 1, shared_cache_bytes=L2))
    monkeypatch.setattr(ceilings, "_GPU_BYTES", 1 << 12)
    monkeypatch.setattr(ceilings, "_GPU_PRODUCT", {2: 8, 4: 8})

    def write(self: Tensor, value: int) -> Tensor:
        made.warm = False
        made.now += 1e-3
        return self

    monkeypatch.setattr(torch.Tensor, "add_", write)  # the flush
    return made


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_only_the_run_is_timed_and_the_cache_is_cold(gpu: Gpu) -> None:
    clock = Clock("cpu")
    run = lambda: gpu.kernel(1e-3, cold=1e-3)  # noqa: E731
    assert clock.seconds(run) == pytest.approx(2e-3)
    assert clock.seconds(run, flush=False) == pytest.approx(1e-3)
    assert clock.seconds(run, asleep=True) == pytest.approx(2e-3)
    assert gpu.slept == 1
    assert clock.flush_bytes == 4 * L2


def test_rounds_share_a_set_of_inputs_and_draw_their_order(gpu: Gpu) -> None:
    called: list[tuple[str, int]] = []

    def run(name: str, number: int) -> Callable[[], None]:
        def once() -> None:
            called.append((name, number))
            gpu.kernel(1e-3 if name == "a" else 2e-3, cold=1e-4)

        return once

    sets = {name: [run(name, number) for number in range(3)] for name in "ab"}
    found = Clock("cpu").interleaved(sets, 20, order=random.Random(1))
    assert found["a"] == pytest.approx([1.1e-3] * 20) and found["b"] == pytest.approx([2.1e-3] * 20)
    rounds = list(zip(called[::2], called[1::2], strict=True))
    assert all({one[0], two[0]} == {"a", "b"} and one[1] == two[1] for one, two in rounds)
    assert {one[1] for one, _ in rounds} == {0, 1, 2}
    assert {one[0] for one, _ in rounds} == {"a", "b"}
    assert gpu.captured == 6
    Clock("cpu").interleaved({"a": run("a", 0)}, 2, graphs=False)
    assert gpu.slept == 2 + device_time.WARM_UPS and gpu.captured == 6


def test_a_flush_that_does_nothing_is_seen(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Tensor) -> Tensor:
        gpu.kernel(1e-5 + 1e-5 * (self.numel() > 1), cold=1e-5 * (self.numel() > 1))  # 10 µs of launching
        return self

    monkeypatch.setattr(torch.Tensor, "sum", read)
    assert Clock("cpu").flush_slowdown() == pytest.approx(2)
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, value: self)
    assert Clock("cpu").flush_slowdown() == pytest.approx(1)


# ---- the meter -------------------------------------------------------------------------------------------------------


def entries(gpu: Gpu, seconds: dict[str, float], host: float = 0.0) -> list[Entry]:
    def bound(name: str, inputs: int) -> Bound:
        def run() -> Tensor:
            time.sleep(host)
            gpu.kernel(seconds[name])
            return torch.full((1, 1, 2, 2), float(inputs))

        return Bound(run, lambda out: out)

    return [Entry(name, [bound(name, number) for number in range(3)]) for name in seconds]


def timed(gpu: Gpu, given: Sequence[Entry], rounds: int = 12) -> Timed:
    meter = GpuMeter(Clock("cpu"), "cpu", torch.float32, Missing("a test"))
    return meter.rounds(given, rounds, random.Random(0), True, lambda *_: None)


def test_device_time_and_host_time_are_apart(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "capturable", lambda run: True)
    found = timed(gpu, entries(gpu, {"a": 1e-5, "b": 3e-5}, host=1e-3))
    assert found.seconds["a"] == pytest.approx([1e-5] * 12) and found.seconds["b"] == pytest.approx([3e-5] * 12)
    assert all(seconds >= 1e-3 for seconds in found.host_seconds["a"])
    assert len(found.host_seconds["b"]) == 12
    assert found.means == "CUDA graph replays"
    assert set(found.ceilings) == {"read_bytes_per_second", "copy_bytes_per_second", "flops_per_second"}
    for chosen, out in found.last.values():
        assert chosen != 0 and out[0, 0, 0, 0] == chosen


def test_all_are_timed_by_the_same_means(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = entries(gpu, {"a": 1e-5, "cannot be captured": 1e-5})
    monkeypatch.setattr(meters, "capturable", lambda run: run is given[0].bound[0].run)
    found = timed(gpu, given)
    assert "asleep" in found.means
    assert gpu.captured == 0 and gpu.slept >= 2 * 12


def test_inputs_are_placed_and_results_are_copies(gpu: Gpu) -> None:
    meter = GpuMeter(Clock("cpu"), "cpu", torch.float32)
    inputs = Inputs(*(torch.ones(1, 1, 2, 2) for _ in "qkv"))
    assert all(torch.equal(x, y) for x, y in zip(meter.place(inputs), inputs, strict=True))
    result = torch.zeros(1, 1, 2, 2)
    seconds, out = meter.once(Bound(lambda: gpu.kernel(2e-5) or result, lambda out: out), flush=True)
    result.fill_(5)
    assert seconds == pytest.approx(2e-5) and not out.any()
    out, extra = meter.first(Bound(lambda: result, lambda out: out))
    assert out.all() and extra == 0


def test_the_real_graph_capture_is_refused_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((RuntimeError, AssertionError)):
        device_time.graphed(lambda: None)
