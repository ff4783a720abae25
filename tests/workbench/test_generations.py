"""The comparison of generations, on the CPU; and claims held against made-up measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from attnworks import traffic
from attnworks.backends import reference
from attnworks.plan import Plan
from attnworks.workbench import generations, schedules
from attnworks.workbench.cli import main
from attnworks.workbench.generations import AtLength, Measured
from attnworks.workbench.providers import describe
from attnworks.workbench.quick_check import NotVerifiedError

SHAPE = describe(
    form="dense", batch=1, heads_q=2, heads_kv=2, seq_q=1, seq_kv=1, head_dim=16, head_dim_v=16, dtype=torch.float32
)


def made_up(length: int, seconds: tuple[float, float, float], extra: tuple[int, int, int]) -> AtLength:
    moved = (8 * length, 2 * length, length)
    facts = zip(generations.SCHEDULES, seconds, extra, moved, strict=True)
    return AtLength(
        length, tuple(Measured(s, Plan("triton", s), b, (time,) * 20, memory) for s, time, memory, b in facts)
    )


CLASSIC = [
    made_up(1024, (8.0, 4.0, 2.0), (1 << 26, 1 << 20, 0)),
    made_up(4096, (128.0, 40.0, 20.0), (1 << 30, 1 << 22, 0)),
]


def seen(found: list[AtLength], device: str = "cuda") -> list[bool | None]:
    return [claim.seen for claim in generations.claims(found, device)]


def test_the_classic_picture_is_recognised():
    assert seen(CLASSIC) == [True] * 7


def test_each_claim_can_fail():
    linear = [replace_extra(CLASSIC[0], 0, 1 << 28), CLASSIC[1]]
    assert seen(linear)[0] is False
    assert seen([CLASSIC[0], replace_extra(CLASSIC[1], 1, 1 << 26)])[1] is False
    assert seen([replace_extra(CLASSIC[0], 2, 1 << 20), replace_extra(CLASSIC[1], 2, 1 << 24)])[2] is False
    slow = [made_up(at.length, (3.0, 2.0, 1.5), tuple(row.extra_bytes for row in at.rows)) for at in CLASSIC]
    assert seen(slow)[4:] == [False, False, False]
    heavy = [AtLength(at.length, tuple(replace(row, modelled_bytes=at.length) for row in at.rows)) for at in CLASSIC]
    assert seen(heavy)[3] is False


def replace_extra(at: AtLength, place: int, extra: int) -> AtLength:
    rows = list(at.rows)
    rows[place] = replace(rows[place], extra_bytes=extra)
    return AtLength(at.length, tuple(rows))


def test_what_cannot_be_told_is_not_told():
    assert seen(CLASSIC, "cpu")[4:] == [None, None, None]
    assert seen(CLASSIC[:1])[:3] == [None, None, None]
    tiny = [made_up(n, (8.0, 4.0, 2.0), (n, n, n)) for n in (64, 128)]
    assert seen(tiny)[:3] == [None, None, None]


def test_modelled_bytes_are_the_papers_where_the_state_is_of_the_inputs_dtype():
    """In fp32 only the last pass over the state is beyond the paper's bill."""
    problem = generations.at_length(SHAPE, 128, "cpu")
    plan = generations.plan_of(problem, "kv_outer")
    bill = traffic.estimate(problem, "kv_outer", plan.tile_q, plan.tile_kv)
    rows = 2 * 128
    # Its m and l count as output of the paper's; ours are read once more with O, and an LSE is written.
    assert schedules.modelled_bytes(problem, plan, 1) - bill.total_bytes == rows * (2 * (64 + 8) + 64 + 4 - (64 + 8))
    half = replace(problem, dtype=torch.float16)
    narrow = traffic.estimate(half, "kv_outer", plan.tile_q, plan.tile_kv)
    visits = rows * 2  # two KV tiles
    assert narrow.state == 2 * visits * (32 + 8)
    extra = 2 * visits * 32 + rows * (2 * (64 + 8) + 32 + 4 - (32 + 8))
    assert schedules.modelled_bytes(half, plan, 1) == narrow.total_bytes + extra


def test_measured_on_the_cpu():
    found = generations.measure(SHAPE, [48, 32], "cpu", runs=5, budget_seconds=0)
    assert [at.length for at in found] == [32, 48]
    for at in found:
        assert [row.schedule for row in at.rows] == ["standard", "kv_outer", "q_outer"]
        assert all(len(row.seconds) == 5 and row.median > 0 for row in at.rows)
    with pytest.raises(ValueError, match=r"lengths: were \[0\], must be one or more, each at least 1"):
        generations.measure(SHAPE, [0], "cpu")


def test_a_wrong_schedule_is_not_measured(monkeypatch):
    right = reference.prepare

    def wrong(problem, plan):
        launch = right(problem, plan)
        return lambda o: (launch(o)[0] * (1.01 if plan.schedule == "kv_outer" else 1), None)

    monkeypatch.setattr(reference, "prepare", wrong)
    with pytest.raises(NotVerifiedError, match=r"kv_outer: error of .* not measured"):
        generations.measure(SHAPE, [32], "cpu")


def test_the_command():
    arguments = ["generations", "--device", "cpu", "--lengths", "32,64", "--runs", "5", "--budget", "0", "--causal"]
    printed = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})
    assert printed.exit_code == 0, printed.output
    assert "FA-1: KV outer" in printed.output and "written to be read" in printed.output
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert [at["length"] for at in found["lengths"]] == [32, 64]
    assert len(found["claims"]) == 7
    refused = CliRunner().invoke(main, ["generations", "--device", "tpu"])
    assert refused.exit_code == 2 and "must be cpu, cuda or cuda:N" in refused.output
