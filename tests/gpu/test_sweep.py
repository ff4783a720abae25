"""The sweep, the case study and plans that visit every tile, on the GPU at hand."""

from dataclasses import replace

import pytest
import torch

from attnworks import Causal, Plan, attention, dispatch
from attnworks.backends import cuda
from attnworks.hardware import detect
from attnworks.workbench import bench, casestudy, measured_sweep
from attnworks.workbench.history import History
from attnworks.workbench.measured_sweep import Grid
from attnworks.workbench.providers import describe
from gpu_helpers import assert_close, randn


def problem(seq=1024, dtype=torch.float16):
    posed = describe(
        form="dense", batch=2, heads_q=4, heads_kv=4, seq_q=seq, seq_kv=seq, head_dim=128, head_dim_v=128, dtype=dtype,
        mask=Causal(),
    )  # fmt: skip
    return replace(posed, device="cuda:0")


@pytest.mark.parametrize(("dtype", "seq"), [(torch.float16, 1000), (torch.bfloat16, 512), (torch.float32, 300)])
def test_visiting_every_tile_changes_no_result(dtype, seq):
    q, k, v = (randn(1, 2, seq, 64, dtype=dtype) for _ in "qkv")
    plan = Plan("triton", "q_outer", 64, 32, warps=4, stages=2)
    skipping, visiting = (
        attention(q, k, v, mask=Causal(), plan=replace(plan, visit_all=every)) for every in (False, True)
    )
    assert_close(visiting, skipping)


def test_triton_tiles_are_swept_resumed_and_what_does_not_fit_is_told(tmp_path, monkeypatch):
    history, heats = History(tmp_path / "h.db"), []
    run = bench.measure
    monkeypatch.setattr(bench, "measure", lambda *arguments: heats.append(1) or run(*arguments))
    options = {"backend": "triton", "grid": Grid((64, 128), (64, 256), (4,), (2, 4)), "seconds": 200.0, "jobs": 8}
    found = measured_sweep.sweep(problem(), history, **options)
    assert found.remaining == 0 and found.best is not None and found.ratio is not None
    assert any("shared memory" in " ".join(one.rejected) for one in found.standings), "128 x 256 in 4 stages"
    timed = [one for one in found.standings if one.record]
    assert len(timed) >= 3 and all(one.record.check["worst_share_of_bound"] <= 1 for one in timed)
    count = len(heats)
    assert measured_sweep.sweep(problem(), history, **options).best == found.best and len(heats) == count


def test_hopper_tiles_are_swept(tmp_path):
    if not cuda.verdict(problem(), detect("cuda")).supported:
        pytest.skip("the cuda backend runs on Hopper only")
    found = measured_sweep.sweep(
        problem(),
        History(tmp_path / "h.db"),
        backend="cuda",
        grid=Grid((128, 192), (128, 256), (0,), (2, 4)),
        seconds=200,
    )
    assert found.remaining == 0 and found.best is not None
    assert any(one.rejected for one in found.standings)


def test_the_case_study_is_measured():
    found = casestudy.study(problem(2048), bench.Protocol(runs=10, warm_ups=5, input_sets=2))
    rows = {row.step.name: row for row in found.rows}
    assert rows["standard attention"].share == 1 and rows["tiles 256 x 128"].rejected
    assert rows["causal skip"].share < rows["tiles 64 x 64"].share < 1
    own = dispatch.choose(problem(2048))[1]
    assert any(row.step.plan == own and row.record for row in found.rows)
    assert found.profile.kernels and found.profile.matrix_bytes == 2 * 4 * 2048**2 * 2
