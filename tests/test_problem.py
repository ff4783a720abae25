import dataclasses
import json

import pytest
import torch

from attnworks import Causal, Softcap, Window
from attnworks.masks import Bounds
from attnworks.problem import Problem
from helpers import problem_of, randn


def dense(seq_q=6, seq_kv=10, mask=(), **changes) -> Problem:
    q, k, v = randn(2, 4, seq_q, 8), randn(2, 2, seq_kv, 8), randn(2, 2, seq_kv, 12)
    return dataclasses.replace(problem_of(q, k, v), mask=mask, **changes)


def test_sizes_are_read_off_both_layouts():
    q, k, v = randn(2, 4, 6, 8), randn(2, 2, 10, 8), randn(2, 2, 10, 12)
    bhsd = problem_of(q, k, v)
    bshd = problem_of(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd")
    sizes = (2, 4, 2, 6, 10, 8, 12)
    names = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v")
    for found in (bhsd, bshd):
        assert tuple(getattr(found, name) for name in names) == sizes
        assert (found.q_strides, found.k_strides, found.v_strides) == ((192, 48, 8), (160, 80, 8), (240, 120, 12))
    assert bhsd.group == 2


def test_it_is_hashable_and_blind_to_memory():
    first, second = dense(), dense()
    assert first == second
    assert len({first, second, dense(seq_q=7)}) == 2
    assert not any(isinstance(getattr(first, field.name), torch.Tensor) for field in dataclasses.fields(first))


def test_visible_pairs_match_a_count_by_the_definition():
    for seq_q, seq_kv in ((6, 10), (10, 6), (1, 1), (0, 4), (4, 0)):
        for left, right in ((None, 0), (2, 1), (0, 0), (None, None), (None, 3), (4, None)):
            for align in ("bottom-right", "top-left"):
                shift = seq_kv - seq_q if align == "bottom-right" else 0
                counted = sum(
                    (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
                    for i in range(seq_q)
                    for j in range(seq_kv)
                )
                assert dense(seq_q, seq_kv, (Bounds(left, right, align),)).visible_pairs() == counted


def test_flops_and_bytes_of_the_textbook_problem():
    """N = 4096, d = 128, fp16, one head: 8.6 GFLOP forward, 4 MiB that must move."""
    q = torch.empty(1, 1, 4096, 128, dtype=torch.float16)
    problem = problem_of(q, q, q)
    assert problem.flops() == 8_589_934_592
    assert problem.flops(backward=True) == 5 * problem.flops() // 2
    assert problem.minimum_bytes() == 4 * 4096 * 128 * 2
    assert problem_of(q, q, q, return_lse=True).minimum_bytes() == problem.minimum_bytes() + 4 * 4096


def test_json_says_masks_and_scores_in_words():
    q = randn(1, 2, 4, 8)
    told = json.loads(json.dumps(problem_of(q, q, q, mask=Causal() & Window(2, 0), scores=(Softcap(5),)).to_json()))
    assert told["mask"] == "window(2, 0)"
    assert told["scores"] == "softcap(5)"
    assert told["dtype"] == "float32"
    assert told["kv_dtype"] is None


def test_scale_defaults_to_one_over_root_head_dim():
    q = randn(1, 1, 2, 16)
    assert problem_of(q, q, q).scale == 0.25
    assert problem_of(q, q, q, scale=2).scale == 2.0


@pytest.mark.parametrize("needs", ["q", "k", "v", "none"])
def test_it_is_differentiable_if_any_input_requires_grad(needs):
    q, k, v = (randn(1, 1, 2, 8).requires_grad_(name == needs) for name in "qkv")
    assert problem_of(q, k, v).differentiable == (needs != "none")
    with torch.no_grad():
        assert not problem_of(q, k, v).differentiable
