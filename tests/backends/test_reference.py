"""The reference's schedules: hand-computed numbers, torch's SDPA, predicates, varlen and decode, precision, plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnworks import ALiBi, Bias, Causal, Plan, Sink, Window, attention, attention_decode, attention_varlen
from attnworks.backends import reference
from helpers import assert_close
from reference_helpers import EAGER, STANDARD, all_schedules, grad, inputs, run, with_grad

f64 = torch.float64


# ---- by hand: with scale ln 2 every exp(s) is 2^(q·k), so that all of P is rational ----

Q = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=f64)
K = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=f64)
V = torch.tensor([[6, 0], [0, 3], [3, -3], [9, 12]], dtype=f64)
D_OUT = torch.tensor([[6, 0], [0, 6], [9, 0], [0, 4]], dtype=f64)
LN2 = math.log(2)

# The rows of 2^(q·k): (1 2 1 2), (1 1 2 2), (1 2 2 4), (1 1 1 1); their sums 6, 6, 9, 4.
FULL_OUT = [[27 / 6, 27 / 6], [30 / 6, 21 / 6], [48 / 9, 48 / 9], [18 / 4, 12 / 4]]
FULL_SUM = [6, 6, 9, 4]
# Causal: (1), (1 1), (1 2 2), (1 1 1 1).
CAUSAL_OUT = [[6, 0], [6 / 2, 3 / 2], [12 / 5, 0 / 5], [18 / 4, 12 / 4]]
CAUSAL_SUM = [1, 2, 5, 4]
# A sink of logit ln 2 adds 2 to every sum.
SINK_OUT = [[27 / 8, 27 / 8], [30 / 8, 21 / 8], [48 / 11, 48 / 11], [18 / 6, 12 / 6]]
SINK_SUM = [8, 8, 11, 6]
# dP = dO Vᵀ, delta = 27, 21, 48, 12; dS = P (dP - delta) is (9 -54 -9 54)/6, (-21 -3 -78 102)/6, (6 -96 -42 132)/9,
# (-12 0 -24 36)/4; dQ = ln 2 · dS K, dK = ln 2 · dSᵀ Q.
D_Q = [[0, 15 / 2], [33 / 2, 4], [4, 10], [9, 3]]
D_K = [[13 / 6, -17 / 6], [-59 / 3, -67 / 6], [-37 / 6, -53 / 3], [71 / 3, 95 / 3]]
D_V = [[2, 2], [4, 2], [3, 3], [6, 3]]


@all_schedules
@pytest.mark.parametrize(
    ("options", "out", "sums"),
    [
        ({}, FULL_OUT, FULL_SUM),
        ({"mask": Causal()}, CAUSAL_OUT, CAUSAL_SUM),
        ({"scores": (Sink(torch.tensor([LN2], dtype=f64)),)}, SINK_OUT, SINK_SUM),
    ],
    ids=["full", "causal", "sink"],
)
def test_by_hand_forward(plan: Plan, options: dict[str, Any], out: list[list[float]], sums: list[float]) -> None:
    got, lse = run(Q[None, None], K[None, None], V[None, None], scale=LN2, plan=plan, **options)
    assert_close(got[0, 0], torch.tensor(out, dtype=f64))
    assert_close(lse[0, 0], torch.tensor([math.log(x) for x in sums], dtype=f64))


@all_schedules
def test_by_hand_backward(plan: Plan) -> None:
    q, k, v = with_grad(Q[None, None], K[None, None], V[None, None])
    out, _ = run(q, k, v, scale=LN2, plan=plan)
    out.backward(D_OUT[None, None])
    for leaf, expected, factor in ((q, D_Q, LN2), (k, D_K, LN2), (v, D_V, 1)):
        assert_close(grad(leaf)[0, 0], factor * torch.tensor(expected, dtype=f64))


@all_schedules
def test_by_hand_lse_gradient(plan: Plan) -> None:
    """The LSE's gradient by the scores is P itself: with cotangent 1, dQ = ln 2 · P K, first row (2 + 2, 1 + 2) / 6."""
    (q,) = with_grad(Q[None, None])
    _, lse = run(q, K[None, None], V[None, None], scale=LN2, plan=plan)
    lse.sum().backward()
    rows = [[4 / 6, 3 / 6], [3 / 6, 4 / 6], [6 / 9, 6 / 9], [2 / 4, 2 / 4]]
    assert_close(grad(q)[0, 0], LN2 * torch.tensor(rows, dtype=f64))


# ---- against torch's own ----


@all_schedules
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_equals_sdpa(plan: Plan, layout: str) -> None:
    q, k, v = with_grad(*inputs())
    twins = with_grad(q.detach(), k.detach(), v.detach())
    expected = scaled_dot_product_attention(*twins, enable_gqa=True)
    views = (q, k, v) if layout == "bhsd" else [x.transpose(1, 2) for x in (q, k, v)]
    out = attention(*views, backend="reference", plan=plan, layout=layout)
    assert isinstance(out, Tensor)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    weights = torch.randn_like(expected)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_close(out, expected)
    for mine, theirs in zip((q, k, v), twins, strict=True):
        assert_close(grad(mine), grad(theirs))


@all_schedules
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_masks_equal_sdpa_with_their_definition(plan: Plan, align: Any) -> None:
    q, k, v = inputs(heads_kv=4)
    shift = 2 if align == "bottom-right" else 0
    seen = torch.tensor([[i + shift - 3 <= j <= i + shift + 1 for j in range(7)] for i in range(5)])
    causal = torch.tensor([[j <= i + shift for j in range(7)] for i in range(5)])
    assert_close(run(q, k, v, mask=Window(3, 1, align), plan=plan)[0], scaled_dot_product_attention(q, k, v, seen))
    assert_close(run(q, k, v, mask=Causal(align), plan=plan)[0], scaled_dot_product_attention(q, k, v, causal))


# ---- predicates ----


@all_schedules
def test_predicates(plan: Plan) -> None:
    q, k, v = inputs()
    document = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
    limit = torch.tensor([0, 2, 4, 6])

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[b, i] == document[b, j]
        return (same & ~(j > i + 2)) | torch.where(h < 2, j < limit[h], (j == 0) & (i > 1))

    mask = torch.zeros(2, 4, 5, 7, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            for i in range(5):
                for j in range(7):
                    same = bool(document[b, i] == document[b, j])
                    early = j < int(limit[h]) if h < 2 else (j == 0 and i > 1)
                    mask[b, h, i, j] = (same and not j > i + 2) or early
    out, lse = run(q, k, v, mask=sees, plan=plan)
    expected, expected_lse = run(q, k, v, mask=mask)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@all_schedules
@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (True, TypeError, r"predicate .* returned bool, must return a torch\.bool tensor"),
        (torch.ones(5, 7, dtype=torch.int64), TypeError, r"returned a tensor of torch\.int64"),
        (torch.ones(9, dtype=torch.bool), ValueError, r"returned shape \(9,\), must broadcast to"),
        (torch.ones(1, 1, 1, 5, 7, dtype=torch.bool), ValueError, r"must broadcast to"),
    ],
    ids=["bool", "int", "width", "dims"],
)
def test_bad_predicates(plan: Plan, returned: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(*inputs(), mask=lambda b, h, q, k: returned, plan=plan)


@all_schedules
@pytest.mark.parametrize("returned", [1.0, torch.ones(5, 7, dtype=torch.int64)], ids=["float", "int"])
def test_bad_score_functions(plan: Plan, returned: object) -> None:
    with pytest.raises(TypeError, match=r"scores: function .* must return a floating-point tensor"):
        run(*inputs(), scores=(lambda s, b, h, q, k: returned,), plan=plan)


# ---- the other forms ----


@all_schedules
def test_varlen_is_each_sequence_by_itself(plan: Plan) -> None:
    q, k, v = (torch.randn(12, heads, 4, dtype=f64, requires_grad=True) for heads in (4, 2, 2))
    offsets_q, offsets_kv = [0, 3, 3, 10], [0, 5, 7, 11]
    slopes, bias = torch.rand(3, 4, dtype=f64), torch.randn(3, 1, 7, 5, dtype=f64)
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=torch.tensor(offsets_q),
        cu_seqlens_kv=torch.tensor(offsets_kv, dtype=torch.int32),
        mask=Causal(),
        scores=(ALiBi(slopes), Bias(bias)),
        return_lse=True,
        backend="reference",
        plan=plan,
    )
    for n in range(3):
        rows, keys = slice(*offsets_q[n : n + 2]), slice(*offsets_kv[n : n + 2])
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        size_q, size_kv = one[0].shape[2], one[1].shape[2]
        scores = (ALiBi(slopes[n]), Bias(bias[n, :, :size_q, :size_kv]))
        expected, expected_lse = run(*one, mask=Causal(), scores=scores)
        assert_close(out[rows], expected[0].transpose(0, 1))
        assert_close(lse[:, rows], expected_lse[0])
    assert not out[10:].any() and (lse[:, 10:] == -math.inf).all()
    out.square().sum().backward()
    assert grad(k)[:5].any() and not grad(k)[5:7].any() and not grad(k)[11:].any()
    assert grad(q)[:3].any() and not grad(q)[10:].any()


@all_schedules
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scales", [torch.tensor(0.25), torch.tensor([0.25, 0.5])], ids=["one", "per head"])
def test_quantised_paged_decode(plan: Plan, dtype: torch.dtype, scales: Tensor) -> None:
    """Equals attention over the dequantised cache, whatever lies past the lengths."""
    k_cache, v_cache = ((3 * torch.randn(5, 4, 2, dim)).to(dtype) for dim in (8, 6))
    q = torch.randn(2, 3, 4, 8, dtype=f64)
    pages, lens = torch.tensor([[4, 0, 99], [1, 2, 3]]), [7, 12]
    out, lse = attention_decode(
        q,
        k_cache,
        v_cache,
        kv_lens=torch.tensor(lens),
        page_table=pages,
        k_scale=scales,
        v_scale=2 * scales,
        mask=Causal(),
        return_lse=True,
        backend="reference",
        plan=plan,
    )
    for n, length in enumerate(lens):
        k, v = (
            (cache.double()[pages[n, : -(-length // 4)]].flatten(0, 1)[:length] * scale.double().view(-1, 1))
            for cache, scale in ((k_cache, scales), (v_cache, 2 * scales))
        )
        expected, expected_lse = run(*(x.transpose(0, 1)[None] for x in (q[n], k, v)), mask=Causal())
        assert_close(out[n], expected[0].transpose(0, 1))
        assert_close(lse[n], expected_lse[0])


@all_schedules
def test_decode_is_differentiable(plan: Plan) -> None:
    q, k, v = (
        torch.randn(2, rows, heads, 4, dtype=f64, requires_grad=True) for rows, heads in ((2, 4), (6, 2), (6, 2))
    )
    out = attention_decode(q, k, v, kv_lens=torch.tensor([3, 6]), backend="reference", plan=plan)
    assert isinstance(out, Tensor)
    out.square().sum().backward()
    for leaf in (q, k, v):
        assert grad(leaf).any() and grad(leaf).isfinite().all()
    assert not grad(k)[0, 3:].any()


# ---- precision and plans ----


@all_schedules
def test_autocast_does_not_lower_the_precision(plan: Plan) -> None:
    q, k, v = (x.float() for x in inputs())
    expected, _ = run(q, k, v, plan=plan)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = run(q, k, v, plan=plan)
    assert out.dtype == torch.float32 and torch.equal(out, expected)


@all_schedules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(plan: Plan, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(seq_q=33, seq_kv=47, dim=16, dim_v=8))
    out, lse = run(q, k, v, plan=plan)
    assert out.dtype == dtype and lse.dtype == torch.float32
    expected, expected_lse = run(q.double(), k.double(), v.double())
    assert_close(out, expected)
    assert_close(lse, expected_lse, dtype if plan is STANDARD else torch.float32)


def test_standard_rounds_scores_and_probs_to_the_dtype() -> None:
    """What makes it the baseline: S = 256 + 1 needs 9 bits, bf16 has 8. The oracle keeps them."""
    q = torch.tensor([[[[16.0, 1.0]]]], dtype=torch.bfloat16)
    k = torch.tensor([[[[16.0, 0.0], [16.0, 1.0]]]], dtype=torch.bfloat16)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.bfloat16)
    assert run(q, k, v, scale=1.0, plan=STANDARD)[0].item() == 0.5
    assert run(q, k, v, scale=1.0)[0].item() == pytest.approx(1 / (1 + math.exp(-1)), rel=2**-8)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan("reference", "tiled"), "plan schedule: was 'tiled', must be one of"),
        (Plan("reference", "q_outer", 0, 4), "plan tile_q: was 0, must be >= 1"),
        (Plan("reference", "kv_outer", 4), "plan tile_kv: was 0, must be >= 1"),
        (Plan("reference", "eager", 4), "plan tile_q: was 4, must be 0"),
        (Plan("reference", "q_outer", 4, 4, split_kv=8), "plan split_kv: was 8, but"),
        (Plan("reference", "q_outer", 4, 4, warps=4), "plan warps: was 4, but"),
        (Plan("reference", "eager", isa="avx2"), "plan isa: was 'avx2', but"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.schedule,
)
def test_plans_that_do_not_fit(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*inputs(), plan=plan)


def test_the_oracle_is_the_default() -> None:
    assert reference.NAME == "reference"
    q, k, v = inputs()
    out = attention(q, k, v, backend="reference")
    assert isinstance(out, Tensor) and torch.equal(out, run(q, k, v, plan=EAGER)[0])
