"""Gradients through paged caches, in Triton's interpreter: what no case of the suite has."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1", allow_module_level=True)

import torch

from attnworks import Bias, Causal, UnsupportedError, attention_decode
from helpers import randn

# The interpreter's own way of reading a range's bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def test_a_page_that_sequences_share_gets_the_gradients_of_all_of_them():
    """Page 2 begins both sequences, page 0 belongs to nobody, and unused entries of the table name no page."""
    table = torch.tensor([[2, 1, 3], [2, -7, 999]])
    lens = torch.tensor([11, 3])
    leaves = randn(2, 2, 4, 16), randn(4, 4, 2, 16), randn(4, 4, 2, 16), randn(1, 4, 1, 12)
    leaves[1][0] = leaves[2][0] = float("nan")
    found = {}
    for backend in ("triton", "reference"):
        q, k, v, bias = tensors = [x.clone().requires_grad_() for x in leaves]
        out, lse = attention_decode(
            q, k, v, kv_lens=lens, page_table=table, mask=Causal(), scores=(Bias(bias),), return_lse=True,
            backend=backend,
        )  # fmt: skip
        (out.square().sum() + lse.cos().sum()).backward()
        found[backend] = [x.grad for x in tensors]
    for own, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    assert (found["triton"][1][0] == 0).all() and (found["triton"][2][3, 3:] == 0).all()


def test_a_quantised_cache_has_no_backward_here():
    q, cache = randn(1, 1, 2, 16).requires_grad_(), torch.zeros(1, 4, 2, 16, dtype=torch.int8)
    lens, one = torch.tensor([2]), torch.ones(1)
    with pytest.raises(UnsupportedError, match=r"no backward through caches of torch.int8"):
        attention_decode(q, cache, cache, kv_lens=lens, k_scale=one, v_scale=one, backend="triton")
