"""benchmarks/cpu.py: rows, bars and verdicts from made-up times, and one section run for real."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnworks.workbench import ceilings
from attnworks.workbench.bench import Result
from record_helpers import RECORD

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cpu")


def result(ratio: float, noise: float = 0.0) -> Result:
    """attnworks in one second, SDPA in ``ratio`` seconds, more or less."""
    theirs = tuple(ratio * (1 + noise * (-1) ** i) for i in range(20))
    ours = replace(RECORD, seconds=(1.0,) * 20, load={"busy": False, "other_cores": 0.0})
    return Result((ours, replace(ours, provider="sdpa", seconds=theirs)), failed={"standard": "wrong"})


def test_bars_hold_or_fail(bars: Any) -> None:
    assert bars.ratio_row("prefill", "p", result(1.3), "sdpa", 1.15).passed is True
    assert bars.ratio_row("prefill", "p", result(1.1), "sdpa", 1.15).passed is False
    other = bars.ratio_row("prefill", "p", result(1.1), "sdpa", 1.15, "meant for another CPU")
    assert other.passed is None
    assert "meant for another CPU" in other.detail


def test_a_bar_within_the_noise_is_marked(bars: Any) -> None:
    assert "within the noise" in bars.ratio_row("prefill", "p", result(1.15, 0.1), "sdpa", 1.15).detail
    assert "within the noise" not in bars.ratio_row("prefill", "p", result(1.5, 0.1), "sdpa", 1.15).detail


def test_a_kernel_of_ours_that_fails_its_check_fails_the_bar(bars: Any) -> None:
    peer_failed = bars.ratio_row("prefill", "p", result(2.0), "standard", 1.15)
    assert peer_failed.passed is None
    assert "wrong" in peer_failed.detail
    ours_failed = Result(result(2.0).records[1:], failed={"attnworks": "wrong"})
    assert bars.ratio_row("prefill", "p", ours_failed, "sdpa", 1.15).passed is False


def test_bandwidth_and_memory_bars(bars: Any) -> None:
    assert bars._bandwidth_row("d", result(1.0), "attnworks").passed is False  # 400 of 3200 bytes/s
    assert bars._memory_row("m", "attnworks", 2 * bars.MIB, bars.MEMORY_BAR).passed is True
    assert bars._memory_row("m", "attnworks", 65 * bars.MIB, bars.MEMORY_BAR).passed is False
    assert bars._memory_row("m", "standard", 65 * bars.MIB, None).passed is None


def test_scaling_goes_through_the_powers_of_two(bars: Any) -> None:
    assert [bars.cpu_scaling.thread_counts(most) for most in (1, 2, 6, 16)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]


def test_scaling_compares_each_with_itself_on_one_thread(bars: Any) -> None:
    alone: dict[str, float] = {}
    assert bars.cpu_scaling._told(result(3.0), "sdpa", 1, alone) == ""
    faster = Result(tuple(replace(record, seconds=(0.5,) * 20) for record in result(3.0).records))
    assert bars.cpu_scaling._told(faster, "sdpa", 4, alone) == "; 2.00 and 6.00 times as fast as on 1 thread"


def test_one_section_for_real(bars: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(ceilings, "_LARGEST_FLUSH_BYTES", 1 << 20)
    path = tmp_path / "table.md"
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--section", "overhead", "--json", "--markdown", str(path)])
    code = bars.main()
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert code == (0 if row["passed"] else 1)
    assert row["section"] == "overhead"
    page = path.read_text(encoding="utf-8")
    assert "| B1 H1 N16 D64 | torch SDPA |" in page
    assert "- called: torch SDPA: " in page and "F.scaled_dot_product_attention(q, k, v)" in page


def test_tables_of_gpus_say_how_each_was_called(bars: Any, capsys: Any) -> None:
    gpu, hopper = importlib.import_module("gpu"), importlib.import_module("hopper")
    q = torch.zeros(1, 1, 8, 8)
    assert set(gpu.forwards(q, q, q, False)) <= set(gpu.CALLS), "with everybody that is timed"
    assert set(hopper.PEERS) <= set(hopper.CALLS)
    times = {"attnworks": [1.0] * 12, "cuDNN": [2.0] * 12}
    for script, backend in ((gpu, "triton"), (hopper, "cuda")):
        rows = list(script.rows_of("Forward", "D=8", times, {"cuDNN": 1.0}, 1e9))
        script.show({"all": lambda rows=rows: iter(rows)}, ["all"], as_json=False, path=None, title="", introduction="")
        said = capsys.readouterr().out
        assert f'called: attnworks: attention(q, k, v, mask=..., backend="{backend}")' in said
        assert "called: cuDNN: F.scaled_dot_product_attention(" in said and "CUDNN_ATTENTION" in said
