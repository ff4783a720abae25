"""A benchmark on the GPU at hand: what the unit tests do with one that is made up."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnworks import Causal
from attnworks.problem import Problem
from attnworks.workbench import counters, sampling
from attnworks.workbench.bench import Protocol, measure
from attnworks.workbench.cli import main
from attnworks.workbench.device_time import Clock, capturable
from attnworks.workbench.profile import ProfilerError
from attnworks.workbench.providers import Attnworks, Bound, Inputs, Provider, by_name, describe
from attnworks.workbench.quick_check import NotVerifiedError

SHORT = Protocol(runs=20, budget_seconds=5, seed=1)
KERNEL = """
import torch.nn.functional as F


def mine(q, k, v, causal=False, softmax_scale=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
"""


def problem(**changes: Any) -> Problem:
    sizes = {"form": "dense", "batch": 2, "heads_q": 8, "heads_kv": 8, "seq_q": 2048, "seq_kv": 2048}
    dims = {"head_dim": 64, "head_dim_v": 64, "dtype": torch.bfloat16, "mask": Causal()}
    return replace(describe(**sizes | dims | changes), device="cuda")


class Sleeping(Provider):
    """SDPA after so many cycles of sleep; beside the stream that is timed if ``astray``."""

    def __init__(self, name: str, cycles: int = 0, astray: bool = False) -> None:
        self.name, self.cycles, self.astray = name, cycles, astray
        self.side = torch.cuda.Stream()

    def form(self, problem: Problem) -> str:
        return f"{self.name}(q, k, v)"

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        bound = by_name("sdpa").bind(problem, inputs)

        def run() -> Any:
            if not self.astray:
                torch.cuda._sleep(self.cycles)
                return bound.run()
            out = torch.zeros_like(inputs.q)
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(10_000_000)
                out.copy_(bound.run())
            return out

        return Bound(run, bound.out)


def test_a_record_of_a_gpu_tells_everything() -> None:
    names = ("attnworks", "sdpa", "sdpa-flash", "standard")
    result = measure(problem(), [by_name(name) for name in names], SHORT)
    assert not result.failed
    assert result.records[0].provider == "attnworks"
    for record in result.records:
        assert len(record.seconds) == 20 and len(record.host_seconds) == 20
        assert 1e-6 < record.median < 0.1 and 1e-7 < record.host_median < 0.1
        assert record.conditions["timed_by"] == "CUDA graph replays"
        assert record.conditions["flush_is_real"], record.conditions
        assert 0 < record.share_of_peak_flops < 1.5
        assert record.ceilings["copy_bytes_per_second"] > 1e11
        assert record.machine["kind"] == "gpu" and record.machine["driver"]
        assert 0 < record.check["relative_error"] < 0.02
        if find_spec("pynvml"):
            assert record.state.get("samples", 0) > 0 or "missing" in record.state, record.state
    standard, own = result.record("standard"), result.record("attnworks")
    assert standard.peak_extra_bytes > 2 * own.peak_extra_bytes + 2**20
    json.dumps(result.to_json())


def test_decode_on_a_gpu() -> None:
    sizes = {"form": "decode", "seq_q": 1, "seq_kv": 4096, "heads_q": 32, "head_dim": 128, "head_dim_v": 128}
    result = measure(problem(**sizes, mask=None), [by_name("attnworks"), by_name("sdpa-grouped")], SHORT)
    assert not result.failed and len(result.records) == 2
    assert 0 < result.records[0].share_of_read_bandwidth < 1.2


def test_a_slower_kernel_is_found_and_the_same_one_is_not() -> None:
    fast, same, slow = Sleeping("fast"), Sleeping("same"), Sleeping("slow", cycles=20_000)
    result = measure(problem(), [fast, same, slow], SHORT)
    first = result.records[0]
    assert first.ratio_to(result.records[2]).verdict == "faster"
    assert first.ratio_to(result.records[1]).verdict == "undecided"


def test_work_beside_the_timed_stream_is_not_timed() -> None:
    """What it gives is looked at when the timed stream says it is done, and is not there yet."""
    with pytest.raises(NotVerifiedError, match="after the timing, astray: error of"):
        measure(problem(), [Sleeping("honest"), Sleeping("astray", astray=True)], SHORT)
    torch.cuda.synchronize()


def test_what_waits_for_the_device_is_timed_by_events() -> None:
    assert capturable(lambda: torch.zeros(8, device="cuda") + 1)
    ones = torch.ones(8, device="cuda")
    assert not capturable(lambda: ones.sum().item())
    assert float((ones + 1).sum()) == 16, "the device goes on"


def test_the_flush_empties_the_l2() -> None:
    clock = Clock("cuda")
    assert clock.flush_slowdown() > 1.2
    ones = torch.ones(1 << 20, device="cuda")
    found = clock.interleaved({"a": [ones.sum, ones.sum], "b": [ones.sum, ones.sum]}, 10, order=random.Random(0))
    assert all(0 < seconds < 1e-3 for runs in found.values() for seconds in runs)


@pytest.mark.skipif(not find_spec("pynvml"), reason="nvidia-ml-py is not installed")
def test_the_gpus_state_is_sampled_or_it_is_said_why_not() -> None:
    sampler = sampling.sampler("cuda:0")
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with sampling.meanwhile(sampler):
        for _ in range(200):
            left @ left
        torch.cuda.synchronize()
        sampler.sample()
    state = sampler.state()
    assert "missing" in state or (state["samples"] > 0 and state["sm_mhz"]["highest"] > 100), state


def test_a_kernel_of_anybody(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNEL)
    tiny = ("--device", "cuda", "--seq", "512", "--runs", "10", "--causal", "--providers", "attnworks")
    command = ["bench", f"{file}:mine", "--no-verify", *tiny, "--db", str(tmp_path / "history.db")]
    result = CliRunner().invoke(main, command, env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert "mine(q, k, v, causal=True)" in result.stdout and "host" in result.stdout
    listed = CliRunner().invoke(main, ["history", "--db", str(tmp_path / "history.db")], env={"COLUMNS": "300"})
    assert torch.cuda.get_device_name() in listed.stdout


@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not on the PATH")
def test_a_profile_counts_the_bytes() -> None:
    """Or says why it can't: counters are often closed to users."""
    asked = problem(seq_q=4096, seq_kv=4096)
    try:
        found = counters.count(Attnworks("attnworks", "triton"), asked)
    except ProfilerError as error:
        pytest.skip(str(error))
    assert found.dram_bytes is not None and 0.5 * asked.minimum_bytes() < found.dram_bytes < 20 * asked.minimum_bytes()
    assert found.cycles and found.tensor_share and 0.05 < found.tensor_share < 1


def test_results_are_on_the_gpu_and_checked() -> None:
    class Zeros(Sleeping):
        def bind(self, problem: Problem, inputs: Inputs) -> Bound:
            assert inputs.q.is_cuda
            return Bound(lambda: torch.zeros_like(inputs.q), lambda out: out)

    result = measure(problem(), [Zeros("zeros")], SHORT)
    assert "zeros" in result.failed and not result.records
