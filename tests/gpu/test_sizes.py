"""Extents past 2^31 elements and grids past 65,535: against the same values in an ordinary place, to the bit."""

import pytest
import torch

from attnworks import Causal, attention, attention_decode, attention_varlen
from gpu_helpers import assert_close, exact, gradients, randn

PAST = 2**31 + 2**20  # elements
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def huge():
    """A little more than 2^31 bf16 elements; tests write to the places they use."""
    if torch.cuda.get_device_properties(0).total_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    return torch.zeros(2**31 + 2**28, dtype=BF16, device="cuda")


def spread(huge, values, strides):
    view = huge.as_strided(values.shape, strides)
    view.copy_(values)
    return view


@pytest.mark.parametrize("far", ["batch", "heads", "rows"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_strides_past_two_to_the_31(huge, far, operand):
    tensors = {name: randn(2, 2, 2, 16) for name in "qkv"}
    expected = attention(*tensors.values(), mask=Causal(), backend="triton")
    strides = [64, 32, 16, 1]
    strides[{"batch": 0, "heads": 1, "rows": 2}[far]] = PAST
    tensors[operand] = spread(huge, tensors[operand], tuple(strides))
    assert torch.equal(attention(*tensors.values(), mask=Causal(), backend="triton"), expected)


@pytest.mark.parametrize("operand", ["k", "v"])
def test_rows_of_a_fused_buffer_that_run_past_two_to_the_31(huge, operand):
    """B1 H56 D128, row stride 21504, 110,000 keys: numel is small, the view's extent is not."""
    seq, heads, dim, row = 110_000, 2, 128, 21_504
    given = {name: randn(1, heads, seq if name != "q" else 65, dim) for name in "qkv"}
    expected = attention(*given.values(), backend="triton")
    given[operand] = spread(huge, given[operand], (seq * row, dim, row, 1))
    assert torch.equal(attention(*given.values(), backend="triton"), expected)


def test_sequence_major_keys_whose_stride_times_index_passes_two_to_the_31(huge):
    """K and V stored (keys, batch, dim): the row stride is batch · dim. Gradients, too, which get the same strides."""
    batch, seq, dim, row = 2, 24_000, 64, 92_160
    assert (seq - 1) * row > 2**31
    q = randn(batch, 1, 256, dim).requires_grad_()
    k, v = (randn(batch, 1, seq, dim) for _ in "kv")
    d_out = randn(batch, 1, 256, dim)
    leaves = [q, k.requires_grad_(), v.requires_grad_()]
    plain = attention(*leaves, backend="triton")
    expected = plain, *gradients(plain, leaves, d_out)
    for number in (1, 2):  # one of them at a time: two views of this extent would overlap
        moved = list(leaves)
        moved[number] = spread(huge, leaves[number].detach(), (dim, dim, row, 1)).requires_grad_()
        out = attention(*moved, backend="triton")
        for got, wanted in zip((out, *gradients(out, moved, d_out)), expected, strict=True):
            assert torch.equal(got, wanted)


def test_query_rows_and_their_gradient_past_two_to_the_31(huge):
    q, k, v, d_out = randn(1, 1, 130, 64), randn(1, 1, 70, 64), randn(1, 1, 70, 64), randn(1, 1, 130, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plain = attention(*leaves, backend="triton")
    expected = gradients(plain, leaves, d_out)
    far = spread(huge, q.detach(), (1, 1, 2**31 // 128, 1)).requires_grad_()
    out = attention(far, *leaves[1:], backend="triton")
    assert torch.equal(out, plain)
    for got, wanted in zip(gradients(out, [far, *leaves[1:]], d_out), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_cache_whose_batch_entries_lie_past_two_to_the_31(huge):
    k, v, q, new = randn(2, 40, 2, 64), randn(2, 40, 2, 64), randn(2, 1, 4, 64), randn(2, 1, 2, 64)
    lens = torch.tensor([4, 33], device="cuda", dtype=torch.int32)
    options = {"kv_lens": lens, "k_new": new, "v_new": new, "backend": "triton"}
    expected_k = k.clone()
    expected = attention_decode(q, expected_k, v.clone(), **options)
    far = spread(huge, k, (PAST, 128, 64, 1))
    assert torch.equal(attention_decode(q, far, v.clone(), **options), expected)
    assert torch.equal(far, expected_k)


def test_pages_that_lie_past_two_to_the_31(huge):
    k, v, q = randn(3, 16, 2, 64), randn(3, 16, 2, 64), randn(1, 1, 4, 64)
    options = {"kv_lens": torch.tensor([40], device="cuda", dtype=torch.int32), "backend": "triton"}
    table = torch.tensor([[2, 0, 1]], device="cuda", dtype=torch.int32)
    expected = attention_decode(q, k, v, page_table=table, **options)
    far = spread(huge, k, (2**30 + 2**18, 128, 64, 1))
    assert torch.equal(attention_decode(q, far, v, page_table=table, **options), expected)


def test_batch_times_heads_past_65535():
    q, k, v = (randn(1100, 64, n, 16) for n in (3, 5, 5))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask=Causal(), backend="triton")
    d_out = torch.randn_like(out)
    grads = gradients(out, leaves, d_out)
    last = [x.detach()[-1:].double().requires_grad_() for x in leaves]
    expected = exact(*last, causal=True)
    assert_close(out[-1:], expected)
    for got, wanted in zip(grads, gradients(expected, last, d_out[-1:].double()), strict=True):
        assert_close(got[-1:], wanted)


def test_65536_sequences_of_one_token():
    n = 2**16
    q, k, v = (randn(n, 2, 64) for _ in "qkv")
    offsets = torch.arange(n + 1, device="cuda", dtype=torch.int32)
    lengths = {"max_seqlen_q": 1, "max_seqlen_kv": 1}
    out = attention_varlen(q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, **lengths, backend="triton")
    assert torch.equal(out, v), "one key gives its value"


def test_65536_caches():
    n = 2**16
    q, k, v = randn(n, 1, 4, 64), randn(n, 2, 1, 64), randn(n, 2, 1, 64)
    lens = torch.ones(n, device="cuda", dtype=torch.int32)
    out = attention_decode(q, k, v, kv_lens=lens, backend="triton")
    assert torch.equal(out, v[:, :1].expand_as(out))
