"""The CPU backend: what its verdict says, how its plans are made, and that instruction sets and tiles agree."""

import dataclasses
import itertools
import time

import pytest
import torch

from attnworks import ALiBi, Bias, Causal, Plan, Sink, Softcap, Window, attention, attention_decode, attention_varlen
from attnworks.backends import cpu
from attnworks.hardware import detect
from attnworks.problem import Problem
from helpers import assert_close, problem_of, randn

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the cpu backend's verdict: native extension not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MACHINE = detect("cpu")


def problem(**changes) -> Problem:
    q, k = randn(1, 4, 64, 32), randn(1, 2, 64, 32)
    return dataclasses.replace(problem_of(q, k, k), **changes)


def reasons(**changes) -> str:
    return " | ".join(cpu.verdict(problem(**changes), MACHINE).reasons)


def masked(mask) -> dict:
    q = randn(1, 4, 64, 32)
    return {"mask": problem_of(q, q, q, mask=mask).mask}


def scored(*scores) -> dict:
    q = randn(1, 4, 64, 32)
    return {"scores": problem_of(q, q, q, scores=scores).scores}


# ---- the verdict -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["dense", "varlen", "decode"])
def test_it_runs_the_plain_problems(form, dtype):
    for head_dims in ((1, 1), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)):
        sizes = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
        for mask in (None, Causal(), Causal("top-left"), Window(3, 4), Window(5, 0) & Causal()):
            assert reasons(form=form, dtype=dtype, **sizes, **masked(mask)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cuda:0"}, "tensors are on cuda:0, it runs on the CPU"),
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"kv_dtype": torch.int8}, "caches of torch.int8"),
        ({"form": "decode", "differentiable": True}, "an input requires grad, and it has no backward through caches"),
        ({"transformed": True}, "forward-mode AD or a functorch transform must see torch operations"),
        ({"head_dim": 577}, "head_dim 577 (at most 576)"),
        ({"head_dim_v": 513}, "head_dim_v 513 (at most 512)"),
    ],
)
def test_it_gives_its_reason(changes, reason):
    assert reason in reasons(**changes)


def test_it_runs_masks_and_modifiers():
    boolean = torch.ones(64, 64, dtype=torch.bool)
    for mask in (boolean, lambda b, h, q, k: q == k, Causal() & Causal("top-left"), Causal() & boolean):
        assert reasons(**masked(mask)) == ""
    for score in (Softcap(5.0), ALiBi(randn(4)), Bias(randn(64, 64)), Sink(randn(4))):
        assert reasons(**scored(score)) == ""
    assert reasons(**scored(lambda s, b, h, q, k: s)) == "score function <lambda> (has softcap, ALiBi, bias and sink)"


def test_all_reasons_come_at_once():
    told = cpu.verdict(problem(dtype=torch.float64, traced=True, **scored(lambda s, b, h, q, k: s)), MACHINE).reasons
    assert len(told) == 3


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_few_rows_over_many_keys_are_split_over_the_keys():
    few = problem(seq_q=1, seq_kv=5000)
    assert [plan.schedule for plan in cpu.candidates(few, MACHINE)] == ["split_kv"]
    assert {plan.schedule for plan in cpu.candidates(problem(), MACHINE)} == {"tiled"}
    assert [plan.schedule for plan in cpu.candidates(problem(form="decode"), MACHINE)] == ["split_kv"]


def test_decode_takes_tiles_where_enough_rows_of_bf16_share_a_head(monkeypatch):
    monkeypatch.setattr(cpu, "isas", lambda: ("amx_bf16", "avx512_bf16", "avx512"))

    def isa(**changes) -> str:
        shape = {"form": "decode", "dtype": torch.bfloat16, "heads_q": 16, "heads_kv": 2, "seq_q": 1, "page_size": 0}
        [plan] = cpu.candidates(problem(**(shape | changes)), MACHINE)
        return plan.isa

    assert isa() == isa(heads_q=8) == isa(heads_q=2, seq_q=4) == isa(page_size=16) == "amx_bf16"
    assert isa(heads_q=6) == isa(heads_q=2, seq_q=3) == "avx512"
    assert isa(dtype=torch.float32) == isa(dtype=torch.float16) == "avx512"


def test_resources_grow_with_the_tile():
    small, large = (
        cpu.resources(problem(), Plan("cpu", "tiled", tile_q=size, tile_kv=size))["scratch"] for size in (16, 256)
    )
    assert 0 < small < large


def test_a_cache_is_not_run_by_tiles_nor_packed_rows_by_splits():
    with pytest.raises(ValueError, match=r"plan schedule: was 'tiled', must be 'split_kv' for a cache"):
        cpu.check_plan(problem(form="decode"), Plan("cpu", "tiled", tile_q=16, tile_kv=16))
    with pytest.raises(ValueError, match=r"plan schedule: was 'split_kv', must be 'tiled' for packed sequences"):
        cpu.check_plan(problem(form="varlen"), Plan("cpu", "split_kv", split_kv=64))


# ---- instruction sets, tiles and splits ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dims", [(64, 64), (40, 24), (128, 128), (192, 128), (5, 7)])
def test_every_instruction_set_agrees_with_the_reference(isa, dtype, head_dims):
    q, k = randn(1, 4, 130, head_dims[0], dtype=dtype), randn(1, 2, 260, head_dims[0], dtype=dtype)
    v = randn(1, 2, 260, head_dims[1], dtype=dtype)
    for mask in (None, Causal(), Window(50, 9)):
        expected, expected_lse = attention(q.double(), k.double(), v.double(), mask=mask, return_lse=True)
        plan = Plan("cpu", "tiled", tile_q=48, tile_kv=128, isa=isa)
        out, lse = attention(q, k, v, mask=mask, return_lse=True, plan=plan)
        assert_close(out, expected)
        assert_close(lse, expected_lse)
        split = Plan("cpu", "split_kv", split_kv=100, isa=isa)
        out, lse = attention(q, k, v, mask=mask, return_lse=True, plan=split)
        assert_close(out, expected)
        assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_in_every_form(isa, dtype):
    q, k, v = randn(50, 4, 64, dtype=dtype), randn(90, 2, 64, dtype=dtype), randn(90, 2, 48, dtype=dtype)
    cu = {"cu_seqlens_q": torch.tensor([0, 20, 50]), "cu_seqlens_kv": torch.tensor([0, 61, 90])}
    plan = Plan("cpu", "tiled", tile_q=48, tile_kv=128, isa=isa)
    out = attention_varlen(q, k, v, **cu, mask=Causal(), plan=plan)
    assert_close(out, attention_varlen(q.double(), k.double(), v.double(), **cu, mask=Causal()))

    pages = {"kv_lens": torch.tensor([77, 13]), "page_table": torch.randperm(18).view(2, 9)}
    q, k, v = randn(2, 3, 4, 64, dtype=dtype), randn(18, 9, 2, 64, dtype=dtype), randn(18, 9, 2, 48, dtype=dtype)
    split = Plan("cpu", "split_kv", split_kv=32, isa=isa)
    out = attention_decode(q, k, v, **pages, mask=Causal(), plan=split)
    assert_close(out, attention_decode(q.double(), k.double(), v.double(), **pages, mask=Causal()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_q_tile_changes_no_bit(dtype):
    """So that rows can be dealt to any number of threads: what a row sees depends on the KV tiles alone."""
    q = randn(1, 2, 300, 64, dtype=dtype)
    outs = [
        attention(q, q, q, mask=Causal(), plan=Plan("cpu", "tiled", tile_q=tile, tile_kv=128))
        for tile in (1, 7, 48, 96, 192, 300, 5000)
    ]
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("split", [1, 2, 3, 64, 1000, 5000])
def test_any_split_gives_the_same_value(split):
    lens = torch.tensor([0, 1, 64, 200])
    q, k = randn(4, 2, 4, 32), randn(4, 200, 2, 32)
    out, lse = attention_decode(
        q, k, k, kv_lens=lens, mask=Window(70, 0), return_lse=True, plan=Plan("cpu", "split_kv", split_kv=split)
    )
    expected = attention_decode(q, k, k, kv_lens=lens, mask=Window(70, 0), return_lse=True, backend="reference")
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


def test_hidden_tiles_are_never_loaded():
    """Whole tiles outside the bounds hold NaN: skipped, they cannot reach a row even as weight 0 times NaN."""
    k = randn(1, 1, 2048, 32)
    k[:, :, :512] = float("nan")
    k[:, :, 1536:] = float("nan")
    q = randn(1, 1, 2048, 32)
    plan = Plan("cpu", "tiled", tile_q=48, tile_kv=128)
    out = attention(q, k, k, mask=Window(64, 64), plan=plan)
    assert out[:, :, 768:1280].isfinite().all()
    clean = torch.nan_to_num(k)
    assert torch.equal(out[:, :, 768:1280], attention(q, clean, clean, mask=Window(64, 64), plan=plan)[:, :, 768:1280])


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("seq_q", [1, 2, 7])
def test_groups_of_query_heads_share_a_kv_head(group, seq_q):
    q, k = randn(2, seq_q, 2 * group, 16), randn(2, 90, 2, 16)
    lens = torch.tensor([90, 41])
    out = attention_decode(q, k, k, kv_lens=lens, mask=Causal(), backend="cpu")
    assert_close(out, attention_decode(q.double(), k.double(), k.double(), kv_lens=lens, mask=Causal()))
    dense = attention(q, k, k, layout="bshd", mask=Causal(), backend="cpu")
    assert_close(dense, attention(q.double(), k.double(), k.double(), layout="bshd", mask=Causal()))


def test_unaligned_memory():
    """Tensors that begin at any element, not at a multiple of a vector."""
    memory = randn(3 * 2000 + 40)
    for start, dtype in itertools.product((1, 3, 5), DTYPES):
        q, k, v = (memory.to(dtype)[start + 2000 * n :][: 2 * 33 * 24].view(1, 2, 33, 24) for n in range(3))
        assert q.data_ptr() % 16 != 0
        assert_close(attention(q, k, v, backend="cpu"), attention(q.double(), k.double(), v.double()))


# ---- every tile visited ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", cpu.isas())
def test_a_plan_that_visits_hidden_tiles_changes_no_result(isa, dtype):
    for mask, (seq_q, seq_kv) in itertools.product(
        (Causal(), Causal("top-left"), Window(9, 3), Window(0, 0)), ((150, 150), (40, 150), (150, 40))
    ):
        q, k, v = (
            randn(1, 2, seq_q, 16, dtype=dtype),
            randn(1, 1, seq_kv, 16, dtype=dtype),
            randn(1, 1, seq_kv, 24, dtype=dtype),
        )
        plan = Plan("cpu", "tiled", tile_q=32, tile_kv=32, isa=isa)
        skipping, visiting = (
            attention(q, k, v, mask=mask, return_lse=True, plan=dataclasses.replace(plan, visit_all=every))
            for every in (False, True)
        )
        assert_close(visiting[0], skipping[0])
        assert_close(visiting[1], skipping[1])


def test_it_does_visit_them():
    """What lies in a hidden tile is multiplied by probabilities of 0, which a NaN shows."""
    q, k, v = (randn(1, 1, 128, 16) for _ in "qkv")
    v[..., -1, :] = torch.nan
    plan = Plan("cpu", "tiled", tile_q=32, tile_kv=32)
    assert attention(q, k, v, mask=Causal(), plan=plan)[..., :32, :].isfinite().all()
    seen = attention(q, k, v, mask=Causal(), plan=dataclasses.replace(plan, visit_all=True))
    assert seen[..., :32, :].isnan().any()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("warps", Plan("cpu", "tiled", 32, 32, warps=4)),
        ("stages", Plan("cpu", "split_kv", split_kv=32, stages=2)),
        ("split_kv", Plan("cpu", "tiled", 32, 32, split_kv=64)),
        ("tile_q", Plan("cpu", "split_kv", tile_q=8, split_kv=32)),
    ],
)
def test_what_a_schedule_has_no_choice_of_is_refused(name, plan):
    q = randn(1, 1, 64, 16)
    with pytest.raises(ValueError, match=f"plan {name}: was .*, must be 0: '{plan.schedule}' of backend 'cpu' has no"):
        attention(q, q, q, plan=plan)


def test_schedules_without_hidden_tiles_refuse_to_visit_them():
    q = randn(1, 1, 64, 16)
    for plan in (
        Plan("cpu", "split_kv", split_kv=32, visit_all=True),
        Plan("reference", "q_outer", 8, 8, visit_all=True),
    ):
        with pytest.raises(ValueError, match="plan visit_all: was True"):
            attention(q, q, q, plan=plan)


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_loop_that_measures_the_peak_multiplies(isa, dtype):
    """A compiler that sees through it leaves nothing to measure."""
    started = time.perf_counter()
    flops = cpu._native.peak_flops(isa, dtype, 1, 10_000_000)
    assert flops > 1e8
    assert flops / (time.perf_counter() - started) < 1e13
