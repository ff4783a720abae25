"""The Triton backend's tables of tiles, held against the cards of machines/*.toml; nothing is compiled."""

from dataclasses import replace

import pytest
import torch

from attnworks import masks
from attnworks.backends import triton
from attnworks.backends.triton import plans
from attnworks.hardware import load
from attnworks.masks import Bounds
from attnworks.problem import Problem

CARDS = ("a100-sxm-40gb", "l4", "rtx-3090", "rtx-4090", "rtx-5090", "h100-sxm", "h200-sxm", "b200")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
PREFILL = Problem(
    "dense", 2, 8, 8, 1024, 1024, 64, 64, torch.bfloat16, "cuda:0", 0.125, (1, 1, 1), (1, 1, 1), (1, 1, 1)
)
DECODE = replace(PREFILL, form="decode", layout="bshd", heads_q=128, heads_kv=1, seq_q=1, seq_kv=8192)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("problem", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_plan_fits_every_card_or_the_verdict_says_in_numbers_why_none_does(card, problem, dtype):
    hardware = load(card)
    for dim, dim_v in DIMS:
        posed = replace(problem, dtype=dtype, head_dim=dim, head_dim_v=dim_v)
        verdict = triton.verdict(posed, hardware)
        if not verdict.supported:
            assert (dim, dtype) == (576, torch.float32)
            assert f"the card has {hardware.block_bytes}" in verdict.reasons[0]
            continue
        [plan] = triton.candidates(posed, hardware)
        triton.check_plan(posed, plan)
        assert triton.resources(posed, plan)["shared"] <= hardware.block_bytes


def test_the_h200_runs_all_of_mla():
    for problem in (PREFILL, DECODE, replace(DECODE, page_size=64), replace(DECODE, kv_dtype=torch.float8_e4m3fn)):
        assert triton.verdict(replace(problem, head_dim=576, head_dim_v=512), load("h200-sxm")).supported
    wider = triton.verdict(replace(PREFILL, head_dim=577), load("h200-sxm"))
    assert wider.reasons == ("head_dim 577 (at most 576)",)


@pytest.mark.parametrize(("seq_q", "group", "expected"), [(16, 8, True), (64, 8, False), (65, 8, True), (16, 1, False)])
def test_heads_of_a_group_are_packed_where_that_saves_a_quarter_of_the_tiles(seq_q, group, expected):
    problem = replace(PREFILL, seq_q=seq_q, heads_kv=8 // group)
    assert plans.packs_heads(problem, 64) is expected
    by_tiles = replace(problem, mask=masks.split(torch.ones(1024, dtype=torch.bool))[0])
    assert not plans.packs_heads(by_tiles, 64)
    packed = replace(problem, form="varlen", seq_q=4096, total_q=2 * seq_q, total_kv=2048)
    assert plans.packs_heads(packed, 64) is expected, "by the mean length: the longest says little"


def test_older_schedules_hold_a_head_in_one_block():
    with pytest.raises(ValueError, match=r"plan schedule: was 'kv_outer', must be 'q_outer' for head_dim 576"):
        triton.check_plan(replace(PREFILL, head_dim=576), plans.generation(PREFILL, "kv_outer"))


CAUSAL = (Bounds(None, 0, "bottom-right"),)
ROWS = (1048576, 131072, 128)  # contiguous
LONG = replace(PREFILL, batch=16, head_dim=128, head_dim_v=128, q_strides=ROWS, k_strides=ROWS, v_strides=ROWS)


@pytest.mark.parametrize(
    ("card", "changes", "expected"),
    [
        ("h200-sxm", {}, plans.TMA),
        ("b200", {}, plans.TMA),
        ("a100-sxm-40gb", {}, ""),
        ("mi300x", {}, ""),
        ("h200-sxm", {"seq_q": 1023}, ""),
        ("h200-sxm", {"dtype": torch.float32}, ""),
        ("h200-sxm", {"head_dim": 129}, ""),
        ("h200-sxm", {"head_dim": 64, "head_dim_v": 64}, ""),
        ("h200-sxm", {"batch": 1}, ""),
        ("h200-sxm", {"k_strides": (1048576, 131072, 132)}, ""),
        ("h200-sxm", {"v_strides": (1048576, 0, 128)}, ""),
        ("h200-sxm", {"v_strides": (2**40, 131072, 128)}, ""),
        ("h200-sxm", {"batch": 1, "heads_q": 128, "v_strides": (1, 131072, 128)}, plans.TMA),
        ("h200-sxm", {"form": "varlen", "total_q": 2048, "total_kv": 2048}, ""),
        ("h200-sxm", {"seq_q": 1, "seq_kv": 4096}, ""),
    ],
    ids=str,
)
def test_tiles_are_described_where_that_is_possible_and_worth_it(card, changes, expected):
    plan = plans.possible(replace(LONG, **changes), load(card))[0]
    assert plan.isa == expected
    plans.check(replace(LONG, **changes), plan)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({}, {"isa": "avx2"}, "plan isa: was 'avx2', must be '' or 'tma' on backend 'triton'"),
        ({}, {"schedule": "kv_outer"}, "plan isa: was 'tma', must be '' for schedule 'kv_outer'"),
        ({"k_strides": (1, 1, 1)}, {}, "whose strides are multiples of 16 bytes"),
        ({"seq_kv": 0}, {}, "must be '' for other than dense"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_describe_its_tiles_is_refused(changes, fields, message):
    plan = replace(plans.candidates(LONG, load("h200-sxm"))[0], **fields)
    with pytest.raises(ValueError, match=message):
        plans.check(replace(LONG, **changes), plan)


def test_a_tuned_plan_does_without_descriptors_where_strides_have_none():
    hardware = load("h200-sxm")
    plan = plans.candidates(LONG, hardware)[0]
    assert triton.adapt(LONG, plan, hardware) == plan
    assert triton.adapt(replace(LONG, k_strides=(1, 1, 1)), plan, hardware) == replace(plan, isa="")


@pytest.mark.parametrize(
    ("dim", "mask", "expected"),
    [
        (128, (), ("", plans.TMA)),
        (128, CAUSAL, ("", plans.TMA)),
        (64, (), ("", plans.TMA)),
        (64, CAUSAL, (plans.TMA, "")),
        (64, (Bounds(1023, 0, "bottom-right"),), ("", "")),
        (256, (), ("", "")),
    ],
    ids=str,
)
def test_of_the_backward_what_gains_by_it_is_described(dim, mask, expected):
    problem = replace(LONG, head_dim=dim, head_dim_v=dim, mask=mask)
    assert tuple(tiles.isa for tiles in plans.backward_tiles(problem, copies=True)) == expected
    assert all(not tiles.isa for tiles in plans.backward_tiles(problem))
