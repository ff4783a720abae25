"""Porting reports: each rule on a card that it applies to and on one that it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnworks import Causal, Plan, hardware
from attnworks.backends.triton import plans
from attnworks.workbench import porting
from attnworks.workbench.providers import describe

T4, MI50, MI100, A100, H200 = (hardware.load(name) for name in ("t4", "mi50", "mi100", "a100-sxm-40gb", "h200-sxm"))


def problem(dtype=torch.float16, head_dim=128, mask=None):
    return describe(
        form="dense", batch=8, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=head_dim, head_dim_v=head_dim,
        dtype=dtype, mask=mask,
    )  # fmt: skip


def said(machine, topic, **changes):
    return " ".join(one.says for one in porting.report(problem(**changes), machine).findings if one.topic == topic)


def test_what_does_not_fit_is_told_in_bytes():
    told = said(T4, "does not fit")
    assert "64 x 64 with 3 stages, take 114688 bytes" in told and "the 65536 that a program" in told
    assert not said(A100, "does not fit") and "114688" in said(A100, "fits")


@pytest.mark.parametrize(
    ("machine", "shape", "words"),
    [
        (T4, "m16n8k8:", "Half as deep"),
        (A100, "m16n8k16:", "needs no shared memory"),
        (H200, "m64n8k16 to m64n256k16:", "groups of 64"),
        (MI100, "32x32x8:", "compute S transposed"),
        (MI50, "No matrix instructions", "vector units"),
    ],
)
def test_the_layout_follows_from_the_matrix_instruction(machine, shape, words):
    told = said(machine, "layout")
    assert told.startswith(shape) and words in told
    assert ("Wavefronts of 64" in told) == (machine is MI100)


def test_head_dims_are_padded_to_the_instructions_depth():
    assert "head_dim 72 is padded to 80" in said(A100, "layout", head_dim=72)
    assert "padded to" not in said(T4, "layout", head_dim=72).replace("head dims padded to 8 only", "")


def test_copies_without_async_begin_with_one_stage():
    assert "No asynchronous copy" in said(T4, "pipeline") and {
        one.plan.stages for one in porting.report(problem(), T4).first
    } == {1}
    assert "TMA" in said(A100, "pipeline") and not said(H200, "pipeline") and not said(MI100, "pipeline")


def test_a_dtype_without_a_rate_is_told_and_nothing_predicted():
    assert "No rate for bfloat16: use float16" in said(T4, "rates", dtype=torch.bfloat16)
    found = porting.report(problem(dtype=torch.bfloat16), T4)
    assert found.standard is None and found.first == ()


def test_the_tiles_to_try_first_fit_and_leave_room_for_a_second_program():
    found = porting.report(problem(), T4)
    best = found.first[0].plan
    assert (best.tile_q, best.tile_kv, best.warps) == (64, 32, 4)
    for one in found.first:
        assert one.shared == plans.shared_bytes(problem(), one.plan) <= 65536 and one.programs >= 2
        assert one.registers <= 255
    assert sum(found.rejected.values()) < found.tried
    small = porting.report(problem(), replace(T4, thread_registers=80))
    assert small.rejected["registers"] > found.rejected["registers"]
    assert "take 88 registers a thread, which has 80" in porting.why_not(
        problem(), best, replace(T4, thread_registers=80)
    )


def test_registers_are_those_of_s_p_and_o():
    plan = Plan("triton", "q_outer", 64, 32, warps=4, stages=1)
    # (64 x 32 of S + half as much of P + 64 x 128 of O) / 128 threads
    assert porting.registers_of(problem(), plan, T4) == 88


def test_predictions_are_the_longer_of_bytes_and_products():
    causal, plan = problem(mask=Causal()), Plan("triton", "q_outer", 64, 64, warps=4, stages=1)
    skipped, visited = (porting.predict(causal, replace(plan, visit_all=every), T4) for every in (False, True))
    assert skipped.seconds == max(skipped.bytes / 3.2e11, skipped.flops / 6.5e13) > skipped.least
    assert visited == porting.predict(problem(), plan, T4)
    assert 1.8 < visited.flops / skipped.flops < 2
    standard = porting.predict(causal, Plan("reference", "standard"), T4)
    assert standard.bound == "memory" and standard.least == standard.seconds
    assert standard.flops == 4 * 8 * 16 * 4096**2 * 128
    assert porting.predict(problem(), plan, MI50).bound == "products"


def test_machines_without_shared_memory_are_refused():
    with pytest.raises(ValueError, match="must be a GPU whose file states block_bytes"):
        porting.report(problem(), hardware.load("textbook"))


def test_every_finding_names_its_source():
    for name in hardware.machines():
        machine = hardware.load(name)
        if machine.block_bytes:
            assert all(one.source and one.says for one in porting.report(problem(), machine).findings), name
