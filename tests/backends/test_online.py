"""The online softmax and its tiled backward: every tiling gives the oracle's answer, the state means what it says, a
finite sentinel does not work, hidden tiles are not read, and each small step is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnworks import ALiBi, Bias, Causal, Plan, Sink, Softcap, Window
from attnworks.backends import reference
from attnworks.backends.reference import backward, online, tiles
from attnworks.problem import Operands
from helpers import assert_close, problem_of
from reference_helpers import EAGER, TILED, grad, inputs, run, schedules, with_grad

f64 = torch.float64
LOOPS = {"q_outer": online.q_outer, "kv_outer": online.kv_outer}
loops = pytest.mark.parametrize("loop", LOOPS)


def call(loop: str, q: Tensor, k: Tensor, v: Tensor, tile_q: int = 2, tile_kv: int = 3, **options: Any) -> Any:
    """A loop itself, without the API: (out, lse)."""
    initial_max = options.pop("initial_max", -math.inf)
    problem = problem_of(q, k, v, **options)
    return LOOPS[loop](problem, Operands(q, k, v), q, k, v, tile_q=tile_q, tile_kv=tile_kv, initial_max=initial_max)


# ---- every tiling ----

MASKS: dict[str, Any] = {
    "full": None,
    "causal": Causal(),
    "top-left": Causal("top-left"),
    "window": Window(2, 1),
    "left": Window(3, None),
    "both": Window(2, 3) & Causal("top-left"),
    "predicate": Causal() & (lambda b, h, q, k: (k % 3 != 1) | (h == 0)),
}


@loops
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(11, 11), (7, 13), (13, 7), (1, 9), (9, 1)])
def test_every_tiling_equals_the_oracle(loop: str, mask: str, lengths: tuple[int, int]) -> None:
    """Tiles that divide the lengths, that do not, of one row or key, and larger than everything; with gradients."""
    seq_q, seq_kv = lengths
    tensors = inputs(1, 4, 2, seq_q, seq_kv)
    operands = (torch.randn(4, 1, seq_kv, dtype=f64), torch.randn(4, dtype=f64), torch.rand(4, dtype=f64))
    weights, lse_weights = torch.randn(1, 4, seq_q, 3, dtype=f64), torch.randn(1, 4, seq_q, dtype=f64)

    def gradients(plan: Plan) -> list[Tensor]:
        q, k, v, bias, sink, slopes = leaves = with_grad(*tensors, *operands)
        scores = (Softcap(3.0), Bias(bias), ALiBi(slopes), Sink(sink))
        out, lse = run(q, k, v, mask=MASKS[mask], scores=scores, plan=plan)
        ((out * weights).sum() + (lse * lse_weights).sum()).backward()
        return [out, lse, *map(grad, leaves)]

    expected = gradients(EAGER)
    for tile_q, tile_kv in ((1, 1), (2, 3), (3, 2), (4, 7), (5, 64), (64, 4), (13, 13)):
        for got, right in zip(gradients(Plan("reference", loop, tile_q, tile_kv)), expected, strict=True):
            assert_close(got, right)


@loops
@given(
    seq_q=st.integers(0, 9),
    seq_kv=st.integers(0, 9),
    tile_q=st.integers(1, 10),
    tile_kv=st.integers(1, 10),
    left=st.none() | st.integers(0, 10),
    right=st.none() | st.integers(0, 10),
)
def test_any_sizes(
    loop: str, seq_q: int, seq_kv: int, tile_q: int, tile_kv: int, left: int | None, right: int | None
) -> None:
    q, k, v = inputs(1, 2, 1, seq_q, seq_kv)
    out, lse = run(q, k, v, mask=Window(left, right), plan=Plan("reference", loop, tile_q, tile_kv))
    expected, expected_lse = run(q, k, v, mask=Window(left, right))
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@loops
@pytest.mark.parametrize("rising", [True, False])
def test_large_scores(loop: str, rising: bool) -> None:
    """Scores up to ±1e4 whose maximum rises (or falls) in every tile; exp of any of them alone would overflow."""
    step = 1e4 if rising else -1e4
    q = torch.ones(1, 1, 3, 1, dtype=f64)
    k = torch.linspace(-step, step, 16, dtype=f64).view(1, 1, 16, 1)
    v = torch.randn(1, 1, 16, 2, dtype=f64)
    out, lse = call(loop, q, k, v, tile_q=2, tile_kv=3, scale=1.0)
    assert_close(out, v[:, :, -1 if rising else 0].unsqueeze(2).expand_as(out))
    assert_close(lse, torch.full_like(lse, 1e4))


# ---- the state ----


def test_the_state_is_attention_over_the_keys_so_far() -> None:
    """Scores ln 2 · (0 1 1 2), V = (6 0), (0 3), (3 -3), (9 12), two keys a tile: test_reference.py's third row."""
    ln2 = math.log(2)
    q = torch.zeros(1, 1, 1, 1, dtype=f64)
    problem = problem_of(q, q, torch.zeros(1, 1, 1, 2, dtype=f64))
    state = online.initial_state(problem, Operands(q, q, q), q, 1, -math.inf, f64)
    scores = ln2 * torch.tensor([[[[0, 1, 1, 2]]]], dtype=f64)
    v = torch.tensor([[[[6, 0], [0, 3], [3, -3], [9, 12]]]], dtype=f64)

    state = online.step(state, scores[..., :2], v[:, :, :2])
    # m = ln 2; P = 1/2, 1; l = 3/2; acc = (3 3); O = (2 2); LSE = ln 3.
    assert state.running_max.item() == ln2
    assert state.running_sum.item() == 1.5
    assert state.acc.flatten().tolist() == [3.0, 3.0]
    assert online.normalise(state.acc, state.running_sum).flatten().tolist() == [2.0, 2.0]
    assert online.log_sum_exp(state.running_max, state.running_sum).item() == pytest.approx(math.log(3))

    state = online.step(state, scores[..., 2:], v[:, :, 2:])
    # m = 2 ln 2, alpha = 1/2; P = 1/2, 1; l = 1/2 · 3/2 + 3/2 = 9/4; acc = 1/2 (3 3) + (10.5 10.5) = (12 12).
    assert state.running_max.item() == 2 * ln2
    assert state.running_sum.item() == pytest.approx(9 / 4, rel=1e-15)
    assert state.acc.flatten().tolist() == pytest.approx([12.0, 12.0], rel=1e-15)
    assert online.normalise(state.acc, state.running_sum).flatten().tolist() == pytest.approx([16 / 3, 16 / 3])
    assert online.log_sum_exp(state.running_max, state.running_sum).item() == pytest.approx(math.log(9))


def test_a_hidden_tile_changes_nothing() -> None:
    """Also not when it comes first, where exp(-inf - (-inf)) lurks."""
    q, k, v = inputs(1, 1, 1, 3, 4)
    problem = problem_of(q, k, v)
    empty = online.initial_state(problem, Operands(q, k, v), q, 3, -math.inf, f64)
    hidden = torch.full((1, 1, 3, 4), -math.inf, dtype=f64)
    for state in (empty, online.step(empty, q @ k.transpose(-1, -2), v)):
        for before, after in zip(state, online.step(state, hidden, v), strict=True):
            assert torch.equal(before, after)
    assert online.log_sum_exp(empty.running_max, empty.running_sum).tolist() == [[[-math.inf] * 3]]
    assert not online.normalise(empty.acc, empty.running_sum).any()


# ---- the initial maximum ----

FP16_MIN = torch.finfo(torch.float16).min


@loops
@pytest.mark.parametrize("sentinel", [-1e4, FP16_MIN])
def test_a_finite_sentinel_loses_scores_below_it(loop: str, sentinel: float) -> None:
    """One key with a score of -1e5: softmax over one key is V whatever the score. With a finite stand-in for -inf above
    the score its weight is exp(-1e5 - sentinel) = 0: the sum is empty, V and the LSE are lost."""
    q = torch.full((1, 1, 1, 1), 1e5, dtype=f64)
    k = torch.full((1, 1, 1, 1), -1.0, dtype=f64)
    v = torch.tensor([[[[3.0, -2.0]]]], dtype=f64)
    out, lse = call(loop, q, k, v, scale=1.0)
    assert out.flatten().tolist() == [3.0, -2.0] and lse.item() == -1e5
    out, lse = call(loop, q, k, v, scale=1.0, initial_max=sentinel)
    assert out.flatten().tolist() == [0.0, 0.0] and lse.item() == -math.inf


@loops
def test_a_finite_sentinel_near_the_scores_costs_bits(loop: str) -> None:
    """Between right and lost: in fp32 a maximum 95 below the sentinel leaves exp(-95), a subnormal with few bits."""
    q = torch.full((1, 1, 1, 1), -95.0)
    k = torch.tensor([1.0, 1.005]).view(1, 1, 2, 1)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    right = 1 / (1 + math.exp(-95 * 0.005))
    assert call(loop, q, k, v, scale=1.0)[0].item() == pytest.approx(right, rel=1e-5)
    assert call(loop, q, k, v, scale=1.0, initial_max=0.0)[0].item() != pytest.approx(right, rel=1e-5)


# ---- hidden tiles ----


@loops
@pytest.mark.parametrize(
    ("mask", "visits"),
    [(None, 16), (Causal(), 10), (Causal("top-left"), 10), (Window(2, 0), 7), (Window(0, 0), 4), (Window(None, 2), 13)],
    ids=str,
)
def test_hidden_tiles_are_never_loaded(loop: str, mask: Any, visits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 by 8 in tiles of 2 by 2: tiles computed, of 16; forward and backward alike."""
    seen = {"forward": 0, "backward": 0}

    def counted(owner: Any, name: str, key: str) -> None:
        inner: Callable[..., Tensor] = getattr(owner, name)

        def count(*args: Any) -> Tensor:
            seen[key] += 1
            return inner(*args)

        monkeypatch.setattr(owner, name, count)

    counted(online, "product", "forward")
    counted(backward, "product", "backward")
    q, k, v = with_grad(*inputs(1, 1, 1, 8, 8))
    out, _ = run(q, k, v, mask=mask, plan=Plan("reference", loop, 2, 2))
    out.sum().backward()
    assert seen == {"forward": visits, "backward": visits}


@loops
def test_nan_in_a_hidden_tile_is_not_read(loop: str) -> None:
    q, k, v = inputs(1, 2, 1, 6, 6)
    clean, _ = run(q, k, v, mask=Causal(), plan=Plan("reference", loop, 2, 3))
    k[:, :, 3:], v[:, :, 3:] = math.nan, math.nan
    out, _ = run(q, k, v, mask=Causal(), plan=Plan("reference", loop, 2, 3))
    assert torch.equal(out[:, :, :2], clean[:, :, :2]) and out[:, :, 3:].isnan().all()


@loops
def test_a_later_key_never_changes_an_earlier_row(loop: str) -> None:
    q, k, v = (x.to(torch.bfloat16) for x in inputs(1, 4, 4, 16, 16))
    plan = Plan("reference", loop, 5, 4)
    before, _ = run(q, k, v, mask=Causal(), plan=plan)
    for j in (3, 9, 15):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, j], v2[:, :, j] = 7, -7
        after, _ = run(q, k2, v2, mask=Causal(), plan=plan)
        assert torch.equal(before[:, :, :j], after[:, :, :j]) and not torch.equal(before[:, :, j:], after[:, :, j:])


# ---- the backward ----


@schedules(*TILED)
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("dims", [(4, 2), (2, 4)])
def test_backward_of_shared_heads(plan: Plan, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    """Groups whose size is not the number of KV heads; head_dim_v below and above head_dim."""
    tensors = inputs(2, *heads, 5, 6, *dims)
    results = []
    for p in (EAGER, plan):
        leaves = with_grad(*tensors)
        run(*leaves, plan=p)[0].square().sum().backward()
        results.append([grad(leaf) for leaf in leaves])
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected)


@schedules(*TILED)
@pytest.mark.parametrize("level", [-300.0, 300.0])
def test_backward_of_a_padded_tile_far_from_zero(plan: Plan, level: float) -> None:
    """LSE about ±300: the filling of the last tile scores 0, and exp(0 + 300) · 0 would be NaN were it not masked."""
    q, k, v = (x.float() for x in inputs(1, 1, 1, 4, 4))
    bias = torch.full((1, 1), level)
    leaves = with_grad(q, k, v)
    out, lse = run(*leaves, scores=(Bias(bias),), plan=plan)
    assert (lse - level).abs().max() < 10
    out.square().sum().backward()
    twins = with_grad(q, k, v)
    run(*twins)[0].square().sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        # fp32 scores of 300 have an ulp of 3e-5, so P is right to that.
        torch.testing.assert_close(grad(leaf), grad(twin), atol=1e-3, rtol=1e-3)


@schedules(*TILED)
def test_saved_tensors_may_travel(plan: Plan) -> None:
    """Through hooks that copy what is saved, as for offloading: nothing relies on its strides."""
    q, k, v = with_grad(*inputs())
    mask = torch.rand(2, 1, 5, 1) < 0.8

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(copied, lambda tensor: tensor):
        out, _ = run(q, k, v, mask=mask, scores=(Bias(torch.ones(7, dtype=f64)),), plan=plan)
    out.square().sum().backward()
    twins = with_grad(q.detach(), k.detach(), v.detach())
    run(*twins, mask=mask)[0].square().sum().backward()
    for leaf, twin in zip((q, k, v), twins, strict=True):
        assert_close(grad(leaf), grad(twin))


# ---- every step is needed ----


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "acc not rescaled": (online, "rescale_acc", lambda acc, alpha: acc),
    "sum not rescaled": (online, "update_sum", lambda total, alpha, probs: total + probs.sum(-1, keepdim=True)),
    "alpha inverted": (
        online,
        "rescale_factor",
        lambda old, new: torch.exp(online.pivot_of(new) - old).nan_to_num(0, 0),
    ),
    "acc not divided": (online, "normalise", lambda acc, total: acc),
    "lse without the sum": (online, "log_sum_exp", lambda top, total: top.squeeze(-1)),
    "tail not masked": (tiles, "mask_tail", lambda scores, keys: scores),
    "heads interleaved": (tiles, "kv_head", lambda head, group: head % 2),
    "heads interleaved in backward": (backward, "kv_head", lambda head, group: head % 2),
    "scale missing": (online, "product", lambda q, k, scale: q @ k.transpose(-1, -2)),
    "delta dropped": (backward, "delta", lambda d_out, out: torch.zeros_like(out[..., :1])),
    "lse cotangent dropped": (backward, "dscores", lambda p, dp, delta, d_lse: p * (dp - delta)),
    "lse cotangent negative": (backward, "dscores", lambda p, dp, delta, d_lse: p * (dp - delta - d_lse)),
    "probs missing from dS": (backward, "dscores", lambda p, dp, delta, d_lse: dp - delta + d_lse),
    "sink without gradient": (backward, "dsink", lambda sink, lse, delta, d_lse: torch.zeros_like(sink).flatten()),
}


@schedules(*TILED)
@pytest.mark.parametrize("fault", ["none", *WRONG])
def test_the_comparison_notices_a_wrong_step(plan: Plan, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaking any one step moves out, lse or a gradient by far more than rounding; breaking none does not."""
    tensors = (*inputs(1, 4, 2, 5, 7), torch.randn(4, dtype=f64))
    weights, lse_weights = torch.randn(1, 4, 5, 3, dtype=f64), torch.randn(1, 4, 5, dtype=f64)

    def results(plan: Plan) -> list[Tensor]:
        q, k, v, sink = leaves = with_grad(*tensors)
        out, lse = run(q, k, v, mask=Causal(), scores=(Sink(sink),), plan=plan)
        ((out * weights).sum() + (lse * lse_weights).sum()).backward()
        return [out, lse, *map(grad, leaves)]

    expected = results(EAGER)
    if fault != "none":
        owner, name, replacement = WRONG[fault]
        monkeypatch.setattr(owner, name, replacement)
    error = max(float((a - b).detach().abs().max()) for a, b in zip(results(plan), expected, strict=True))
    assert not error < 1e-3 if fault != "none" else error < 1e-12


def test_resources_are_the_tiles() -> None:
    """4 · ((128 + 64) · 64 + 64 · 32 + 128 · 64 + 128 · (32 + 2)) bytes of Q, K, V, scores and state in fp32."""
    q, k, v = (torch.zeros(1, 1, 256, dim, dtype=torch.bfloat16) for dim in (64, 64, 32))
    plan = Plan("reference", "q_outer", 128, 64)
    assert reference.resources(problem_of(q, k, v), plan) == {"tiles": 4 * (12288 + 2048 + 8192 + 4352)}
    assert reference.resources(problem_of(q, k, v), EAGER) == {}
