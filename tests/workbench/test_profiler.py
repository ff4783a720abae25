"""What Nsight Compute prints, read; and how it is started. Its output is written out here: no GPU is needed."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnworks import Plan
from attnworks.workbench import profiler
from attnworks.workbench.profiler import METRICS, ProfilerError, parse, profile
from attnworks.workbench.providers import Attnworks, describe

PROBLEM = replace(
    describe(
        form="dense",
        batch=1,
        heads_q=2,
        heads_kv=2,
        seq_q=64,
        seq_kv=64,
        head_dim=16,
        head_dim_v=16,
        dtype=torch.float16,
    ),
    device="cuda:0",
)
HEAD = '"ID","Process ID","Kernel Name","Block Size","CC",' + ",".join(f'"{name}"' for name in METRICS)
UNITS = '"","","","","","byte","byte","byte","cycle","ns","%",""'
ROWS = (
    '"0","77","scores_kernel","(128, 1, 1)","9.0","1,000,000","250,000","4,000,000","30,000","20,000","50.00","12"',
    '"1","77","void out<float, 3>(Tensor)","(128, 1, 1)","9.0","500,000","0","1,000,000","10,000","5,000","10.00","0"',
)
PRINTED = "\n".join(
    ("==PROF== Connected to process 77", '==PROF== Profiling "scores_kernel": 0%....100%', HEAD, UNITS, *ROWS)
)


def test_kernels_of_a_call_are_added_up() -> None:
    found = parse(PRINTED)
    assert found.kernels == ("scores_kernel", "void out<float, 3>(Tensor)")
    assert (found.dram_read_bytes, found.dram_written_bytes, found.dram_bytes) == (1_500_000, 250_000, 1_750_000)
    assert (found.l2_bytes, found.cycles, found.bank_conflicts) == (5_000_000, 40_000, 12)
    assert found.seconds == pytest.approx(25e-6)
    assert found.tensor_share == pytest.approx(0.4), "weighed by cycles"
    assert found.to_json()["dram_bytes"] == 1_750_000


def test_units_are_read() -> None:
    units = '"","","","","","Mbyte","Kbyte","byte","cycle","usecond","%",""'
    found = parse("\n".join((HEAD, units, ROWS[0].replace("1,000,000", "1.5"))))
    assert (found.dram_read_bytes, found.dram_written_bytes) == (1_500_000, 250_000_000)
    assert found.seconds == pytest.approx(20e-3)


def test_what_is_not_counted_is_not_made_up() -> None:
    without = parse("\n".join((HEAD, UNITS, ROWS[0].replace('"50.00"', '"n/a"').replace('"250,000"', '""'))))
    assert without.tensor_share is None and without.dram_written_bytes is None and without.dram_bytes is None
    assert without.dram_read_bytes == 1_000_000
    fewer = parse("\n".join((HEAD.replace(f',"{METRICS[-1]}"', ""), UNITS[:-3], ROWS[0][:-5])))
    assert fewer.bank_conflicts is None and fewer.cycles == 30_000


@pytest.mark.parametrize("printed", ["", "==ERROR== ERR_NVGPUCTRPERM - no permission", "\n".join((HEAD, UNITS))])
def test_no_kernel_is_an_error_with_what_was_said(printed: str) -> None:
    with pytest.raises(ProfilerError, match=r"ERR_NVGPUCTRPERM|counted no kernel"):
        parse(printed)


class Ncu:
    """Answers as ncu does; refuses the metrics it is told to."""

    def __init__(self, refuses: str = "", code: int = 0) -> None:
        self.refuses, self.code = refuses, code
        self.commands: list[Sequence[str]] = []
        self.job: object = None

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.job = pickle.loads(Path(command[-1]).read_bytes())
        asked = command[command.index("--metrics") + 1]
        if self.refuses and self.refuses in asked:
            return subprocess.CompletedProcess(command, 1, f"==ERROR== Failed to find metric {self.refuses}\n", "")
        return subprocess.CompletedProcess(command, self.code, PRINTED, "")


def test_ncu_is_started_with_the_clocks_left_alone() -> None:
    ncu = Ncu()
    assert profile("sdpa", PROBLEM, seed=3, runner=ncu).cycles == 40_000
    (command,) = ncu.commands
    assert "--clock-control none" in " ".join(command)
    assert command[-3:-1] == ["-m", "attnworks.workbench.profiler"]
    assert ncu.job == ("sdpa", PROBLEM, 3)
    tiles = Plan("triton", "q_outer", 64, 64, warps=4, stages=2)
    profile(Attnworks("tiles", "triton", tiles), PROBLEM, runner=ncu)
    assert isinstance(ncu.job, tuple) and ncu.job[0]._explicit == tiles


def test_a_counter_that_the_gpu_does_not_have_is_left_out() -> None:
    ncu = Ncu(refuses=profiler.TENSOR.split(".")[0])
    profile("sdpa", PROBLEM, runner=ncu)
    assert len(ncu.commands) == 2
    assert profiler.TENSOR not in " ".join(ncu.commands[1])


def test_no_profiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfilerError, match="ncu failed"):
        profile("sdpa", PROBLEM, runner=Ncu(code=9))
    with pytest.raises(ProfilerError, match="CPU"):
        profile("sdpa", replace(PROBLEM, device="cpu"))
    monkeypatch.setattr(profiler.shutil, "which", lambda name: None)
    with pytest.raises(ProfilerError, match="not on the PATH"):
        profile("sdpa", PROBLEM)
