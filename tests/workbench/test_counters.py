"""What is counted of one call: kernels added up, unknown counters left out, and how the other process is told."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnworks import Plan, masks
from attnworks.hardware import load
from attnworks.workbench import counters, profile
from attnworks.workbench.cli.counted import in_counts
from attnworks.workbench.counters import METRICS, Counted, count
from attnworks.workbench.profile import Kernel, ProfilerError
from attnworks.workbench.providers import Attnworks, describe
from record_helpers import RECORD

SIZES = {"form": "dense", "batch": 1, "heads_q": 2, "heads_kv": 2, "seq_q": 64, "seq_kv": 64, "head_dim": 16}
PROBLEM = replace(describe(**SIZES, head_dim_v=16, dtype=torch.float16), device="cuda:0")
FIRST = dict(zip(METRICS, (1_000_000, 250_000, 4_000_000, 30_000, 20e-6, 50.0, 12, 100), strict=True))
SECOND = dict(zip(METRICS, (500_000, 0, 1_000_000, 10_000, 5e-6, 10.0, 0, 20), strict=True))


def test_kernels_of_a_call_are_added_up() -> None:
    found = Counted.of([Kernel("scores", FIRST), Kernel("out", SECOND)])
    assert found.kernels == ("scores", "out")
    assert (found.dram_read_bytes, found.dram_written_bytes, found.dram_bytes) == (1_500_000, 250_000, 1_750_000)
    assert (found.l2_bytes, found.cycles, found.bank_conflicts, found.shared_turns) == (5_000_000, 40_000, 12, 120)
    assert found.seconds == pytest.approx(25e-6)
    assert found.tensor_share == pytest.approx(0.4), "weighed by cycles"
    assert found.to_json()["dram_bytes"] == 1_750_000


def test_what_is_not_counted_is_not_made_up() -> None:
    without = {
        name: value for name, value in SECOND.items() if name not in (profile.DRAM_WRITTEN, profile.TENSOR_SHARE)
    }
    found = Counted.of([Kernel("scores", FIRST), Kernel("out", without)])
    assert found.tensor_share is None and found.dram_written_bytes is None and found.dram_bytes is None
    assert found.dram_read_bytes == 1_500_000


class Ncu:
    """Answers as ``profile.profile`` does; refuses the metric it is told to."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.asked: list[tuple[str, ...]] = []
        self.job: Any = None

    def __call__(self, command: Sequence[str], metrics: tuple[str, ...], **options: Any) -> list[Kernel]:
        assert list(command[1:3]) == ["-m", "attnworks.workbench.counters"]
        assert options["cache_control"] == "all" and "PYTHONPATH" in options["env"]
        self.asked.append(metrics)
        self.job = pickle.loads(Path(command[-1]).read_bytes())
        if self.refuses and any(name.startswith(self.refuses) for name in metrics):
            raise ProfilerError(f"ncu ended with code 1 and 0 kernels:\n==ERROR== Failed to find metric {self.refuses}")
        return [Kernel("k", {name: FIRST[name] for name in metrics})]


def test_the_other_process_is_told_provider_problem_and_seed() -> None:
    ncu = Ncu()
    assert count("sdpa", PROBLEM, seed=3, profiler=ncu).cycles == 30_000
    assert ncu.job == ("sdpa", PROBLEM, 3)
    tiles = Plan("triton", "q_outer", 64, 64, warps=4, stages=2)
    count(Attnworks("tiles", "triton", tiles), PROBLEM, profiler=ncu)
    assert ncu.job[0].name == "tiles" and ncu.job[0]._explicit == tiles


def test_what_the_model_predicts_stands_beside_what_was_counted(monkeypatch) -> None:
    monkeypatch.setattr(counters, "count", lambda provider, problem: Counted.of([Kernel("k", FIRST)]))
    monkeypatch.setattr(counters, "detect", lambda device: load("h200-sxm"))
    plan = Plan("triton", "q_outer", 64, 64, warps=4, stages=2)
    record = replace(RECORD, plan=plan.to_json(), problem=PROBLEM.to_json())
    made = counters.with_profile(PROBLEM, record, Attnworks("tiles", "triton", plan))
    moved = 4 * 2 * 64 * 16 * 2  # Q, K, V and O of two heads
    assert made.profile["predicted_bytes"] == moved and made.measured_bytes == 1_250_000
    assert in_counts(made, gpu=True)[:2] == ("1.19 MiB", "16 KiB (-99%)")
    foreign = counters.with_profile(PROBLEM, replace(record, plan=None), Attnworks("tiles", "triton", plan))
    assert in_counts(foreign, gpu=True)[1] == "-"
    hidden = replace(PROBLEM, mask=masks.split(torch.ones(64, 64, dtype=torch.bool))[0])
    assert counters.predicted(hidden, record) is None


def test_a_counter_that_the_gpu_does_not_have_is_left_out() -> None:
    ncu = Ncu(refuses=profile.TENSOR_SHARE.split(".")[0])
    found = count("sdpa", PROBLEM, profiler=ncu)
    assert len(ncu.asked) == 2 and profile.TENSOR_SHARE not in ncu.asked[1]
    assert found.tensor_share is None and found.cycles == 30_000


def test_what_the_profiler_says_is_passed_on() -> None:
    def refuse(*_: Any, **__: Any) -> list[Kernel]:
        raise ProfilerError("ERR_NVGPUCTRPERM")

    with pytest.raises(ProfilerError, match="ERR_NVGPUCTRPERM"):
        count("sdpa", PROBLEM, profiler=refuse)
    with pytest.raises(ValueError, match="was on the CPU, must be on a GPU"):
        count("sdpa", replace(PROBLEM, device="cpu"))
