"""Offsets past 2^31 elements, through views: the memory is mapped but hardly touched, so the tests stay small."""

import mmap

import pytest
import torch

from attnworks import Causal, attention, attention_decode, attention_varlen
from helpers import assert_close, causal, dense_oracle, or_skip, oracle, randn

PAST = 2**31 + 2**20  # elements


@pytest.fixture(scope="module")
def huge() -> torch.Tensor:
    """2^31 + 2^25 fp16 elements of address space; only pages that are written take memory."""
    size = 2 * (2**31 + 2**25)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        mapped = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        pytest.skip(f"cannot map {size} bytes: {error}")
    return torch.frombuffer(mapped, dtype=torch.float16)


def spread(huge: torch.Tensor, values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    view = huge.as_strided(values.shape, strides)
    view.copy_(values)
    return view


@pytest.mark.parametrize("far", ["batch", "heads", "rows"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_strides_past_two_to_the_31(backend, huge, far, operand):
    tensors = {name: randn(2, 2, 2, 16, dtype=torch.float16) for name in "qkv"}
    expected = dense_oracle(*tensors.values(), causal(2, 2))[0]
    place = {"batch": 0, "heads": 1, "rows": 2}[far]
    strides = [64, 32, 16, 1]
    strides[place] = PAST
    tensors[operand] = spread(huge, tensors[operand], tuple(strides))
    assert_close(attention(*tensors.values(), mask=Causal(), backend=backend), expected)


def test_a_fused_buffer_whose_rows_run_past_two_to_the_31(backend, huge):
    """V with the row stride of a wide fused projection; no row is far from the next, the last is far from the first."""
    seq = 2**31 // 2**24 + 1
    q, k = randn(1, 1, 3, 16, dtype=torch.float16), randn(1, 1, seq, 16, dtype=torch.float16)
    v = randn(1, 1, seq, 16, dtype=torch.float16)
    strided = spread(huge, v, (2**31, 2**31, 2**24, 1))
    assert_close(attention(q, k, strided, backend=backend), dense_oracle(q, k, v)[0])


def test_a_cache_whose_batches_lie_past_two_to_the_31(backend, huge):
    k, v, q = (randn(2, n, 1, 16, dtype=torch.float16) for n in (9, 9, 1))
    k_cache = spread(huge, k, (PAST, 32, 16, 1))
    new = randn(2, 1, 1, 16, dtype=torch.float16)
    out = or_skip(
        attention_decode,
        q,
        k_cache,
        v.clone(),
        kv_lens=torch.tensor([4, 8]),
        k_new=new,
        v_new=new,
        backend=backend,
    )
    for b, n in enumerate((4, 8)):
        keys, values = torch.cat((k[b, :n, 0], new[b, :, 0])), torch.cat((v[b, :n, 0], new[b, :, 0]))
        assert_close(out[b, :, 0], oracle(q[b, :, 0], keys, values)[0])
        assert torch.equal(k_cache[b, n], new[b, 0])
        assert torch.equal(k_cache[b, :n], k[b, :n])


def test_pages_that_lie_past_two_to_the_31(backend, huge):
    k, q = randn(2, 4, 1, 16, dtype=torch.float16), randn(1, 1, 1, 16, dtype=torch.float16)
    pages = spread(huge, k, (PAST, 16, 16, 1))
    out = or_skip(
        attention_decode,
        q,
        pages,
        pages,
        kv_lens=torch.tensor([7]),
        page_table=torch.tensor([[1, 0]]),
        backend=backend,
    )
    keys = torch.cat((k[1], k[0, :3]))[:, 0]
    assert_close(out[0, :, 0], oracle(q[0, :, 0], keys, keys)[0])


def test_packed_rows_past_two_to_the_31(backend, huge):
    values = randn(3, 1, 16, dtype=torch.float16)
    packed = spread(huge, values, (2**30 + 2**19, 16, 1))
    cu = torch.tensor([0, 1, 3])
    out = attention_varlen(packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend)
    for rows in (slice(0, 1), slice(1, 3)):
        assert_close(out[rows, 0], oracle(*[values[rows, 0]] * 3)[0])


@pytest.mark.parametrize("operand", ["k", "v"])
def test_expanded_operands_are_read_in_place(backend, operand):
    """70,000 batches that share one key and value of stride 0: copying them would take gigabytes."""
    batch = 70_000
    q = randn(batch, 1, 1, 64)
    shared = {"k": randn(1, 1, 8, 64), "v": randn(1, 1, 8, 64)}
    k, v = (shared[name].expand(batch, 1, 8, 64) for name in "kv")
    out = attention(q, k, v, backend=backend)
    expected = torch.softmax(q[:, 0, 0].double() @ shared["k"][0, 0].double().T / 8, -1) @ shared["v"][0, 0].double()
    assert_close(out[:, 0, 0], expected)
