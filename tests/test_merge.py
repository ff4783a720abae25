import math

import pytest
import torch

from attnworks import merge
from helpers import assert_close, oracle, randn


def parts(seq_q=5, seq_kv=9, cut=4, heads=2, dtype=torch.float32):
    """(whole, part a, part b) as (out, lse) of one batch in "bhsd"."""
    q, k, v = randn(heads, seq_q, 8), randn(heads, seq_kv, 8), randn(heads, seq_kv, 6)

    def over(keys):
        results = [oracle(q[h], k[h, keys], v[h, keys]) for h in range(heads)]
        return torch.stack([r[0] for r in results])[None].to(dtype), torch.stack([r[1] for r in results])[None].float()

    return over(slice(None)), over(slice(cut)), over(slice(cut, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_disjoint_parts_give_the_whole(dtype):
    (out, lse), a, b = parts(dtype=dtype)
    merged, merged_lse = merge(*a, *b)
    assert merged.dtype == dtype
    assert_close(merged, out)
    assert_close(merged_lse, lse)


def test_every_layout():
    (out, lse), a, b = parts()
    bshd = merge(a[0].transpose(1, 2), a[1], b[0].transpose(1, 2), b[1], layout="bshd")
    assert_close(bshd[0].transpose(1, 2), out)
    assert_close(bshd[1], lse)
    packed = merge(a[0][0].transpose(0, 1), a[1][0], b[0][0].transpose(0, 1), b[1][0])
    assert_close(packed[0].transpose(0, 1), out[0])
    assert_close(packed[1], lse[0])


def test_an_empty_part_changes_no_bit():
    _, (out, lse), _ = parts()
    empty = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged, merged_lse in (merge(out, lse, *empty), merge(*empty, out, lse)):
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


def test_an_empty_part_may_hold_anything():
    """The output beside an LSE of -inf is not read: a partial kernel may have left it unwritten."""
    _, (out, lse), _ = parts()
    merged, merged_lse = merge(out, lse, torch.full_like(out, math.nan), torch.full_like(lse, -math.inf))
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


def test_two_empty_parts_are_empty():
    out, lse = torch.zeros(1, 1, 1, 64), torch.full((1, 1, 1), -math.inf)
    merged, merged_lse = merge(out, lse, out, lse)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


def test_lses_far_apart_neither_overflow_nor_underflow():
    out = torch.ones(1, 1, 1, 4)
    merged, lse = merge(out, torch.full((1, 1, 1), 1e5), 3 * out, torch.full((1, 1, 1), -1e5))
    assert torch.equal(merged, out)
    assert lse.item() == 1e5
    merged, lse = merge(out, torch.full((1, 1, 1), -1e5), 3 * out, torch.full((1, 1, 1), -1e5))
    assert torch.equal(merged, 2 * out)
    assert lse.item() == pytest.approx(-1e5 + math.log(2))


def test_nan_stays():
    _, (out, lse), b = parts()
    out[0, 0, 0, 0] = math.nan
    assert merge(out, lse, *b)[0].isnan().sum() == 1


def test_gradients_match_finite_differences():
    _, a, b = parts()
    tensors = [t.double().requires_grad_() for t in (*a, *b)]
    assert torch.autograd.gradcheck(merge, tensors)


def test_gradients_beside_an_empty_part_are_finite():
    _, a, _ = parts()
    tensors = [a[0], a[1], torch.zeros_like(a[0]), torch.full_like(a[1], -math.inf)]
    tensors = [t.requires_grad_() for t in tensors]
    out, lse = merge(*tensors)
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_sizes_of_zero(shape):
    out, lse = torch.zeros(shape), torch.zeros(shape[:3])
    merged, merged_lse = merge(out, lse, out, lse)
    assert merged.shape == shape
    assert merged_lse.shape == shape[:3]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out_a": None}, TypeError, r"out_a: was NoneType, must be a floating-point tensor"),
        ({"lse_b": torch.zeros(1, 2, 5, dtype=torch.int64)}, TypeError, r"lse_b: was torch.int64"),
        ({"out_b": torch.zeros(1, 2, 5, 7)}, ValueError, r"out_b: was of shape \(1, 2, 5, 7\), must be \(1, 2, 5, 6\)"),
        ({"lse_a": torch.zeros(1, 5, 2)}, ValueError, r"lse_a: was of shape \(1, 5, 2\), must be \(1, 2, 5\)"),
        ({"out_a": torch.zeros(5, 6)}, ValueError, r"out_a: was of shape \(5, 6\), must have 4 dimensions"),
        ({"layout": "sbhd"}, ValueError, r"layout: was 'sbhd'"),
        ({"lse_b": torch.zeros(1, 2, 5, device="meta")}, ValueError, r"lse_b: was on meta, must be on cpu like out_a"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    _, a, b = parts()
    given = {"out_a": a[0], "lse_a": a[1], "out_b": b[0], "lse_b": b[1]} | change
    with pytest.raises(error, match=message):
        merge(**given)
