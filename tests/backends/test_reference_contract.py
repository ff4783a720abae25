"""The contract's corners on every schedule of the reference: empty rows, sizes of 0, NaN, Inf, sinks, bias."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnworks import Bias, Causal, Plan, Sink, Softcap
from helpers import assert_close
from reference_helpers import TILED, all_schedules, grad, inputs, run, with_grad

f64 = torch.float64


@all_schedules
def test_rows_without_keys(plan: Plan) -> None:
    q, k, v = inputs(heads_kv=4)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    leaves = with_grad(q, k, v)
    out, lse = run(*leaves, mask=mask, plan=plan)
    assert not out[:, :, 2].any() and (lse[:, :, 2] == -math.inf).all()
    (out.sum() + lse[lse > -math.inf].sum()).backward()
    rest = [0, 1, 3, 4]
    assert_close(out[:, :, rest], run(q[:, :, rest], k, v)[0])
    for leaf in leaves:
        assert grad(leaf).isfinite().all() and grad(leaf).any()
    assert not grad(leaves[0])[:, :, 2].any()


@all_schedules
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_visible_nan_stays(plan: Plan, where: str) -> None:
    tensors = dict(zip("qkv", inputs(), strict=True))
    tensors[where][0, 0, 0] = math.nan
    out, lse = run(*tensors.values(), plan=plan)
    rows = out[0, 0, :1] if where == "q" else out[0, :2]
    assert rows.isnan().all()
    assert out[1].isfinite().all() and out[0, 2:].isfinite().all()
    assert where == "v" or lse[0, 0, 0].isnan()


@all_schedules
def test_infinite_scores(plan: Plan) -> None:
    q, k, v = inputs(heads_kv=4)
    bias = torch.zeros(5, 7, dtype=f64)
    bias[1, 3], bias[2, 4], bias[4] = math.inf, -math.inf, -math.inf
    out, lse = run(q, k, v, scores=(Bias(bias),), plan=plan)
    assert out[:, :, 1].isnan().all() and not lse[:, :, 1].isfinite().any()
    assert not out[:, :, 4].any() and (lse[:, :, 4] == -math.inf).all()
    assert_close(out[:, :, 2], scaled_dot_product_attention(q, k, v, bias > -math.inf)[:, :, 2])


def test_nan_in_what_nobody_sees_reaches_nothing() -> None:
    """Keys hidden from every row, and rows that see no key: neither outputs nor gradients."""
    q, k, v = inputs(heads_kv=4)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 6], mask[3] = False, False
    clean = with_grad(q, k, v)
    run(*clean, mask=mask)[0].square().sum().backward()
    q[:, :, 3], k[:, :, 6], v[:, :, 6] = math.nan, math.nan, math.inf
    dirty = with_grad(q, k, v)
    out, _ = run(*dirty, mask=mask)
    out.square().sum().backward()
    assert out.isfinite().all()
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(grad(a), grad(b))


@all_schedules
@pytest.mark.parametrize("sizes", [(0, 4, 2, 5, 7), (2, 0, 0, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0), (0, 0, 0, 0, 0)])
def test_sizes_of_zero(plan: Plan, sizes: tuple[int, int, int, int, int]) -> None:
    batch, heads_q, _, seq_q, seq_kv = sizes
    leaves = with_grad(*inputs(*sizes))
    bias, sink = with_grad(torch.randn(1, heads_q, 1, seq_kv, dtype=f64), torch.randn(heads_q, dtype=f64))
    for mask in (None, Causal(), torch.ones(seq_q, 1, dtype=torch.bool), lambda b, h, q, k: q >= k):
        out, lse = run(*leaves, mask=mask, plan=plan)
        assert out.shape == (batch, heads_q, seq_q, 3) and not out.any()
        assert lse.shape == (batch, heads_q, seq_q) and (lse == -math.inf).all()
        out, lse = run(*leaves, mask=mask, scores=(Softcap(2.0), Bias(bias), Sink(sink)), plan=plan)
        assert not out.any() and torch.equal(lse, sink.view(1, -1, 1).expand_as(lse))
        (out.sum() + lse.sum()).backward()
    assert not grad(bias).any()
    assert_close(grad(sink), torch.full_like(sink, 4.0 * batch * seq_q))
    for leaf in leaves:
        assert not grad(leaf).any()


@all_schedules
def test_sinks(plan: Plan) -> None:
    q, k, v = inputs()
    bare, lse = run(q, k, v, plan=plan)
    sink = torch.tensor([100.0, 0.5, -200.0, -math.inf], dtype=f64)
    out, with_sink = run(q, k, v, scores=(Sink(sink),), plan=plan)
    assert_close(with_sink, torch.logaddexp(lse, sink.view(1, -1, 1).expand_as(lse)))
    assert_close(out, bare * torch.exp(lse - with_sink).unsqueeze(-1))
    assert_close(with_sink[:, 0], torch.full_like(lse[:, 0], 100.0))
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    out, with_sink = run(q, k, v, mask=hidden, scores=(Sink(sink),), plan=plan)
    assert not out.any() and torch.equal(with_sink, sink.view(1, -1, 1).expand_as(lse))


@all_schedules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, f64])
def test_softcap_of_large_scores(plan: Plan, dtype: torch.dtype) -> None:
    q = torch.tensor([5000, 10000, -10000], dtype=dtype).view(1, 1, 3, 1)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    _, lse = run(q, one, one, scale=1.0, scores=(Softcap(50.0),), plan=plan)
    assert lse.flatten().tolist() == [50.0, 50.0, -50.0]


@all_schedules
@pytest.mark.parametrize("pattern", range(16))
def test_every_broadcast_of_a_bias_and_a_mask(plan: Plan, pattern: int) -> None:
    q, k, v = inputs()
    shape = tuple(size if pattern >> n & 1 else 1 for n, size in enumerate((2, 4, 5, 7)))
    bias, mask = torch.randn(shape, dtype=f64), torch.rand(shape) < 0.7
    full = torch.where(mask, bias, -math.inf).expand(2, 4, 5, 7)
    expected = torch.nan_to_num(scaled_dot_product_attention(q, k, v, full, enable_gqa=True), nan=0.0)
    assert_close(run(q, k, v, mask=mask, scores=(Bias(bias),), plan=plan)[0], expected)
    leaf, twin = with_grad(bias, bias)
    run(q, k, v, scores=(Bias(leaf),), plan=plan)[0].square().sum().backward()
    scaled_dot_product_attention(q, k, v, twin.expand_as(full), enable_gqa=True).square().sum().backward()
    assert_close(grad(leaf), grad(twin))
    if pattern < 8:
        assert_close(run(q, k, v, scores=(Bias(full[..., :1]),), plan=plan)[0], expected)


@all_schedules
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_batch_invariance(plan: Plan, layout: str) -> None:
    """A sequence's bits alone, first and last in a batch of others, with the bias that is its own."""
    seq_q, seq_kv = (9, 20) if plan in TILED else (33, 77)  # in tiles of 2 and 3, which the products see alone
    q, k, v = (x.float() for x in inputs(9, 4, 2, seq_q, seq_kv, 20, 12))
    bias = torch.randn(9, 1, seq_q, 1)

    def bits(*batch: int) -> tuple[Tensor, Tensor]:
        chosen = [x[list(batch)] for x in (q, k, v)]
        chosen = [x if layout == "bhsd" else x.transpose(1, 2) for x in chosen]
        scores = (Softcap(9.0), Bias(bias[list(batch)]))
        out, lse = run(*chosen, scores=scores, mask=Causal(), layout=layout, batch_invariant=True, plan=plan)
        return (out if layout == "bhsd" else out.transpose(1, 2)), lse

    for got, alone in zip(bits(4, 0, 1, 2, 3, 5, 6, 7, 4), bits(4), strict=True):
        assert torch.equal(got[0], alone[0]) and torch.equal(got[-1], alone[0])
