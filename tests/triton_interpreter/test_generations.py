"""Standard attention and FlashAttention-1 as plans of the Triton backend, in Triton's interpreter."""

import os
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1", allow_module_level=True)

import torch

import attnworks
from attnworks import ALiBi, Bias, Causal, Sink, Softcap, Window
from attnworks.backends.triton import check_plan, plans
from attnworks.plan import Plan
from helpers import assert_close, dense_oracle, problem_of, randn

SCHEDULES = plans.OLDER
pytestmark = [
    # The interpreter evaluates both branches of tl.where, and so takes the logarithm of an empty row's 0.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning"),
    # The interpreter's own way of reading a range's bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def plan(schedule: str, tile_q: int = 16, tile_kv: int = 32) -> Plan:
    return Plan("triton", schedule, tile_q, tile_kv, warps=4, stages=1)


def run(schedule, q, k, v, **options):
    options.setdefault("plan", plan(schedule))
    return attnworks.attention(q, k, v, backend="triton", return_lse=True, **options)


def blocks(b, h, q, k):
    return (q // 20 == k // 20) | (k < 2)


MASKS = {
    "none": (None, None),
    "causal": (Causal(), lambda i, j, sq, sk: j <= i + sk - sq),
    "causal, top-left": (Causal("top-left"), lambda i, j, sq, sk: j <= i),
    "window": (Window(9, 3), lambda i, j, sq, sk: -9 <= j - (i + sk - sq) <= 3),
    "function": (blocks, lambda i, j, sq, sk: i // 20 == j // 20 or j < 2),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(32, 64), (34, 70), (20, 9)], ids=str)
def test_values_agree_with_fp64(schedule, name, lengths):
    """Whole tiles, ragged ones, and more queries than keys, so that the first rows of a causal mask see none."""
    mask, visible = MASKS[name]
    seq_q, seq_kv = lengths
    q, k, v = randn(1, 2, seq_q, 16), randn(1, 1, seq_kv, 16), randn(1, 1, seq_kv, 24)
    out, lse = run(schedule, q, k, v, mask=mask)
    expected, expected_lse = dense_oracle(
        q, k, v, None if visible is None else lambda i, j: visible(i, j, seq_q, seq_kv)
    )
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scores_go_through_the_same_parts(schedule):
    q, k, v = randn(2, 4, 33, 16), randn(2, 2, 50, 16), randn(2, 2, 50, 16)
    scores = (Softcap(3.0), ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.0])), Bias(randn(4, 33, 50)), Sink(randn(4)))
    out, lse = run(schedule, q, k, v, mask=Causal(), scores=scores)
    expected, expected_lse = attnworks.attention(
        *(x.double() for x in (q, k, v)), mask=Causal(), scores=scores, backend="reference", return_lse=True
    )
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_other_layout_and_strides_are_read_in_place(schedule):
    packed = randn(2, 40, 3, 2, 16)
    q, k, v = packed.unbind(2)
    out, _ = run(schedule, q, k, v, layout="bshd")
    expected, _ = dense_oracle(*(x.transpose(1, 2) for x in (q, k, v)))
    assert out.shape == q.shape
    assert_close(out.transpose(1, 2), expected, torch.float32)


def test_flashattention_1_keeps_its_state_in_fp32():
    """Many KV tiles: a running O rounded to fp16 in every step would be further off than the state on chip."""
    q, k, v = (randn(1, 1, length, 16, dtype=torch.float16) for length in (16, 512, 512))
    expected, _ = dense_oracle(q, k, v)
    out, _ = run("kv_outer", q, k, v, plan=plan("kv_outer", 16, 16))
    on_chip, _ = run("q_outer", q, k, v, plan=plan("q_outer", 16, 16))
    limit = 1.2 * (on_chip.double() - expected).norm()
    assert limit < 1e-3 * expected.norm()
    assert (out.double() - expected).norm() <= limit


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_standard_attention_rounds_its_scores():
    """S is written in the input dtype: a score beyond fp16's range overflows, which no tiled schedule does."""
    q = torch.full((1, 1, 1, 16), 100.0, dtype=torch.float16)
    k, v = torch.cat([q, q / 2], 2), torch.ones(1, 1, 2, 16, dtype=torch.float16)
    assert torch.isnan(run("standard", q, k, v, scale=1.0)[0]).all()
    assert (run("kv_outer", q, k, v, scale=1.0)[0] == 1).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (1, 2, 0, 8), (1, 2, 8, 0)], ids=["batch", "queries", "keys"])
def test_empty(schedule, shape):
    batch, heads, seq_q, seq_kv = shape
    q, k = randn(batch, heads, seq_q, 16), randn(batch, heads, seq_kv, 16)
    out, lse = run(schedule, q, k, k)
    assert out.shape == q.shape and (out == 0).all()
    assert (lse == -torch.inf).all()


def test_a_long_row_is_read_in_blocks(monkeypatch):
    from attnworks.backends.triton import generations

    monkeypatch.setattr(generations, "ROW_MAX_BLOCK", 32)
    q, k, v = randn(1, 1, 5, 16), randn(1, 1, 75, 16), randn(1, 1, 75, 16)
    problem = problem_of(q, k, v)
    launch = generations.prepare(problem, plan("standard"))
    out, _ = launch(attnworks.problem.Operands(q, k, v))
    assert_close(out, dense_oracle(q, k, v)[0], torch.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_they_do_not_do_is_refused(schedule):
    q = randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"plan schedule: was .*, must be 'q_outer' where an input requires grad"):
        run(schedule, q.clone().requires_grad_(), q, q)
    lengths = torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"plan schedule: was .*, must be 'q_outer' or 'grouped' for packed sequences"):
        attnworks.attention_varlen(
            q[0].transpose(0, 1), q[0].transpose(0, 1), q[0].transpose(0, 1),
            cu_seqlens_q=lengths, cu_seqlens_kv=lengths, backend="triton", plan=plan(schedule),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"plan split_kv: was 64, must be 0 for schedule"):
        check_plan(problem_of(q, q, q), Plan("triton", schedule, 16, 32, 64, warps=4, stages=1))


@pytest.mark.parametrize("schedule", ["standard", "kv_outer", "q_outer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_the_plan_shown_of_each_generation_is_one_that_runs(schedule, dtype, dim):
    q = torch.zeros(1, 1, 8, dim, dtype=dtype)
    problem = problem_of(q, q, q)
    check_plan(problem, plans.generation(problem, schedule))


@pytest.mark.parametrize("lengths", [(40, 72), (34, 20)], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Causal("top-left"), Window(9, 3)], ids=str)
def test_visiting_every_tile_changes_no_result(mask, lengths):
    seq_q, seq_kv = lengths
    q, k, v = randn(1, 2, seq_q, 16), randn(1, 1, seq_kv, 16), randn(1, 1, seq_kv, 24)
    skipping, visiting = (
        run("", q, k, v, mask=mask, plan=replace(plan("q_outer"), visit_all=every)) for every in (False, True)
    )
    assert_close(visiting[0], skipping[0])
    assert_close(visiting[1], skipping[1])


def test_it_does_visit_every_tile():
    q, k, v = (randn(1, 1, 64, 16) for _ in "qkv")
    v[..., -1, :] = torch.nan
    for every in (False, True):
        out, _ = run("", q, k, v, mask=Causal(), plan=replace(plan("q_outer"), visit_all=every))
        assert out[..., :16, :].isnan().any() == every
    with pytest.raises(ValueError, match="plan visit_all: was True, must be False for schedule 'kv_outer'"):
        check_plan(problem_of(q, k, v), replace(plan("kv_outer"), visit_all=True))
