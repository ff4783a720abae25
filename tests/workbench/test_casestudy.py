"""The case study: its steps in order, what is rejected and why, and that each has its time and its error."""

from __future__ import annotations

import json
import re

import pytest
import torch
from click.testing import CliRunner

from attnworks import Causal, Plan
from attnworks.backends import cpu
from attnworks.hardware import load
from attnworks.workbench import bench, casestudy, tile_sweep
from attnworks.workbench.cli import main
from attnworks.workbench.history import History
from attnworks.workbench.providers import describe

FEW = bench.Protocol(runs=5, warm_ups=3, input_sets=2, flush=False)
needs_native = pytest.mark.skipif(not cpu.isas(), reason="the native extension is not built")


def problem(seq=4096, heads=16, batch=8, dtype=torch.float16, head_dim=128):
    sizes = {"seq_q": seq, "seq_kv": seq, "heads_q": heads, "heads_kv": heads, "batch": batch}
    return describe(form="dense", head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, mask=Causal(), **sizes)


@needs_native
def test_the_command_measures_each_step_and_keeps_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(casestudy, "PROTOCOL", FEW)
    db = tmp_path / "h.db"
    arguments = [
        "casestudy",
        "--device",
        "cpu",
        "--lengths",
        "640",
        "--heads",
        "4",
        "--head-dim",
        "32",
        "--db",
        str(db),
    ]
    ran = CliRunner().invoke(main, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    [one] = told["studies"]
    names = [row["step"] for row in one["rows"]]
    assert names == ["standard attention", "tiles 4096 x 1024", "tiles 64 x 64", "causal skip", "tiles 768 x 256"]
    assert one["rows"][1]["rejected"] and one["rows"][1]["record"] is None
    ran_rows = [row for row in one["rows"] if row["record"]]
    assert len(ran_rows) == 4 and ran_rows[0]["share"] == 1
    for row in ran_rows:
        assert row["record"]["check"]["worst_share_of_bound"] <= 1 and row["share"] > 0
    visiting, skipping = (row["record"]["modelled_bytes"] for row in one["rows"][2:4])
    assert 1.5 < visiting / skipping < 2
    assert one["profile"]["matrix_bytes"] == 4 * 640 * 640 * 4
    assert any("bmm" in kernel["name"] or "mm" in kernel["name"] for kernel in one["profile"]["kernels"])
    assert [record.conditions["study"] for record in History(db).records().values()] == [names[0], *names[2:]]


def test_what_a_t4_would_take_is_predicted_and_what_does_not_fit_is_rejected():
    rows = casestudy.predicted(problem(), load("t4"))
    assert rows[0].shares == (1.0, 1.0)
    assert rows[1].rejected == ("131072 bytes of shared memory, the card gives a program 65536",)
    visiting, skipping, first = (row.shares for row in rows[2:])
    assert 1.9 < visiting[0] / skipping[0] < 2 and visiting[1] > skipping[1] >= first[1]
    assert (rows[4].step.plan.tile_q, rows[4].step.plan.tile_kv) == (64, 32)


def test_on_a_gpu_nothing_is_compiled_to_find_what_does_not_fit(monkeypatch):
    from attnworks.backends import triton

    monkeypatch.setattr(casestudy, "detect", lambda device: load("h200-sxm"))
    monkeypatch.setattr(tile_sweep, "compile_all", lambda *_: pytest.fail("compiled"))
    own = Plan("cuda", "q_outer", 128, 128, warps=12, stages=2)
    asked = [step.plan for step in casestudy.steps("triton", last=own) if step.plan]
    why = casestudy._rejected(problem(), asked, triton, own)
    assert why[asked[0]] == ("262144 bytes of shared memory, the card gives a program 232448",)
    assert not any(why[plan] for plan in asked[1:])


def test_a_dtype_that_a_card_has_no_rate_for_is_not_guessed():
    rows = casestudy.predicted(problem(dtype=torch.bfloat16), load("t4"))
    assert all(row.prediction is None and row.shares is None for row in rows)


def test_steps_differ_in_one_thing_and_end_with_the_own_choice_once():
    own = Plan("triton", "q_outer", 64, 64, warps=4, stages=3)
    named = [step.name for step in casestudy.steps("triton", last=own)]
    assert named == ["standard attention", "tiles 256 x 128", "tiles 64 x 64", "causal skip"]
    visiting, skipping = (step.plan for step in casestudy.steps("triton")[2:4])
    assert visiting != skipping and visiting.to_json() | {"visit_all": False} == skipping.to_json()


@needs_native
def test_the_profile_is_of_standard_attention():
    found = casestudy.profile(problem(512, 2, 1, torch.float32, 16))  # in smaller ones calls weigh as much as kernels
    assert abs(sum(kernel.share for kernel in found.kernels) - 1) < 0.1
    assert found.modelled_bytes > 4 * found.matrix_bytes
    names = " ".join(kernel.name for kernel in found.kernels)
    assert re.search("softmax", names) and re.search("mm", names)
