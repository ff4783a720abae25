import math

import pytest
import torch

from attnworks import Causal, Rotary, attention_decode, cache
from helpers import assert_close, or_skip, oracle, randn


def rope(positions: int, half: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] / 100 ** (torch.arange(half) / half)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: torch.Tensor, position: int, interleaved: bool, half: int) -> torch.Tensor:
    """One head's channels x (dim,) turned by the definition: each pair as a complex number times e^(i angle)."""
    result = x.double().clone()
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        angle = position / 100 ** (pair / half)
        number = complex(result[a], result[b]) * complex(math.cos(angle), math.sin(angle))
        result[a], result[b] = number.real, number.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [1, 2, 4])
def test_rotate_turns_pairs_of_channels(interleaved, half):
    x = randn(2, 3, 2, 8)
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    got = cache.rotate(x, positions, Rotary(*rope(8, half), interleaved=interleaved))
    for b in range(2):
        for row in range(3):
            for head in range(2):
                expected = turned(x[b, row, head], int(positions[b, row]), interleaved, half)
                assert_close(got[b, row, head], expected)


def test_rotate_keeps_the_dtype_but_computes_in_fp32():
    x = randn(1, 1, 1, 8, dtype=torch.bfloat16)
    rotary = Rotary(*rope(600, 4))
    got = cache.rotate(x, torch.tensor([[555]]), rotary)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, cache.rotate(x.float(), torch.tensor([[555]]), rotary).bfloat16())


def test_append_writes_exactly_its_rows():
    dense = torch.zeros(2, 5, 1, 3)
    new = randn(2, 2, 1, 3)
    cache.append(dense, new, torch.tensor([[0, 1], [3, 4]]), None)
    expected = torch.zeros(2, 5, 1, 3)
    expected[0, 0:2], expected[1, 3:5] = new[0], new[1]
    assert torch.equal(dense, expected)


def test_append_crosses_pages():
    pages = torch.zeros(4, 2, 1, 3)
    new = randn(1, 3, 1, 3)
    cache.append(pages, new, torch.tensor([[1, 2, 3]]), torch.tensor([[3, 0]]))
    expected = torch.zeros(4, 2, 1, 3)
    expected[3, 1], expected[0, 0], expected[0, 1] = new[0]
    assert torch.equal(pages, expected)


def test_checked_copies_do_not_follow_the_callers_tensor():
    offsets = torch.tensor([0, 2, 5])
    checked, longest = cache.check_offsets("cu_seqlens_q", offsets, randn(5), values=True)
    offsets[1] = 99
    assert checked.tolist() == [0, 2, 5]
    assert longest == 3
    assert cache.check_offsets("cu_seqlens_q", torch.tensor([0]), randn(5), values=True)[1] == 0


@pytest.mark.parametrize("page_size", [0, 1, 3, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_and_rotary_come_before_the_attention(backend, page_size, interleaved):
    """Decode with new keys and rotary equals attention over keys that were turned and laid out by hand."""
    batch, heads_q, heads_kv, dim, lens, new = 2, 4, 2, 8, [0, 5], 2
    q, k_new, v_new = (
        randn(batch, new, heads_q, dim),
        randn(batch, new, heads_kv, dim),
        randn(batch, new, heads_kv, dim),
    )
    old_k, old_v = randn(batch, 16, heads_kv, dim), randn(batch, 16, heads_kv, dim)
    table = None
    k_cache, v_cache = old_k.clone(), old_v.clone()
    if page_size:
        per_sequence = -(-16 // page_size)
        table = torch.randperm(batch * per_sequence).view(batch, per_sequence)
        k_cache, v_cache = (torch.full((batch * per_sequence, page_size, heads_kv, dim), math.nan) for _ in "kv")
        for b in range(batch):
            for j in range(lens[b]):
                k_cache[table[b, j // page_size], j % page_size] = old_k[b, j]
                v_cache[table[b, j // page_size], j % page_size] = old_v[b, j]
    got = or_skip(
        attention_decode,
        q,
        k_cache,
        v_cache,
        kv_lens=torch.tensor(lens),
        page_table=table,
        k_new=k_new,
        v_new=v_new,
        rotary=Rotary(*rope(16, 3), interleaved=interleaved),
        mask=Causal(),
        backend=backend,
    )
    for b in range(batch):
        total = lens[b] + new
        for h in range(heads_q):
            keys = [old_k[b, j, h // 2].double() for j in range(lens[b])]
            keys += [turned(k_new[b, j, h // 2], lens[b] + j, interleaved, 3) for j in range(new)]
            values = torch.cat((old_v[b, : lens[b], h // 2], v_new[b, :, h // 2]))
            queries = torch.stack([turned(q[b, i, h], lens[b] + i, interleaved, 3) for i in range(new)])
            expected, _ = oracle(queries, torch.stack(keys), values, lambda i, j, total=total: j <= i + total - new)
            assert_close(got[b, :, h], expected)
