"""The CPU backend's gradients: every instruction set, biases however they are broadcast, and memory of any strides."""

import itertools

import pytest
import torch

from attnworks import ALiBi, Bias, Causal, Plan, Sink, Softcap, UnsupportedError, Window, attention, attention_varlen
from attnworks.backends import cpu
from helpers import assert_close, randn

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the cpu backend's verdict: native extension not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradients(call, leaves, cotangents, dtype, **options):
    """Of both results of ``call(*leaves, **options)``, in fp64."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    results = call(*leaves, return_lse=True, **options)
    given = [x.to(of.dtype) for x, of in zip(cotangents, results, strict=True)]
    return torch.autograd.grad(results, leaves, given)


def agree(call, leaves, cotangents, **options):
    exact = gradients(call, leaves, cotangents, torch.float64, backend="reference")
    for got, want in zip(gradients(call, leaves, cotangents, leaves[0].dtype, **options), exact, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_in_every_form(isa, dtype):
    plan = Plan("cpu", "tiled", tile_q=48, tile_kv=128, isa=isa)
    q, k, v = randn(2, 130, 4, 40, dtype=dtype), randn(2, 200, 2, 40, dtype=dtype), randn(2, 200, 2, 24, dtype=dtype)
    for mask in (None, Window(50, 9, "top-left")):

        def dense(*tensors, mask=mask, **options):
            return attention(*tensors, mask=mask, layout="bshd", **options)

        agree(dense, (q, k, v), (randn(2, 130, 4, 24, dtype=dtype), randn(2, 4, 130)), plan=plan)
    cu = {"cu_seqlens_q": torch.tensor([0, 20, 120]), "cu_seqlens_kv": torch.tensor([0, 61, 190])}

    def packed(*tensors, **options):
        return attention_varlen(*tensors, **cu, mask=Causal(), **options)

    found = gradients(packed, (q[0], k[0], v[0]), (randn(130, 4, 24), randn(4, 130)), dtype, plan=plan)
    for x, used in zip(found, (120, 190, 190), strict=True):
        assert not x[used:].any()
    agree(packed, (q[0], k[0], v[0]), (randn(130, 4, 24, dtype=dtype), randn(4, 130)), plan=plan)


@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 4), (1, 100), (1, 300))))
def test_a_bias_however_it_is_broadcast(shape):
    q, k, bias, sink = randn(2, 4, 100, 16), randn(2, 2, 300, 16), randn(*shape), randn(4)

    def call(q, k, v, bias, sink, **options):
        scores = (Bias(bias), Softcap(3.0), Sink(sink))
        return attention(q, k, v, mask=Window(150, 30), scores=scores, **options)

    agree(call, (q, k, randn(2, 2, 300, 16), bias, sink), (randn(2, 4, 100, 16), randn(2, 4, 100)), backend="cpu")


def test_a_bias_gets_the_same_bits_on_any_number_of_threads():
    q, bias, threads = randn(2, 4, 300, 16), randn(1, 4, 300, 300), torch.get_num_threads()

    def call(*tensors, **options):
        return attention(*tensors[:3], mask=Causal(), scores=(Bias(tensors[3]),), **options)

    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(gradients(call, (q, q, q, bias), (q, randn(2, 4, 300) * 0), torch.float32, backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_rows_that_overlap_get_a_gradient_each():
    """``empty_like`` of such a tensor does not have its last dimension contiguous."""
    memory = randn(80)
    q = memory.as_strided((1, 1, 10, 64), (80, 80, 1, 1))
    assert torch.empty_like(q).stride(-1) != 1
    leaf = q.detach().requires_grad_()
    assert leaf.stride() == q.stride()
    k = randn(1, 1, 20, 64)
    (got,) = torch.autograd.grad(attention(leaf, k, k, backend="cpu").sum(), leaf)
    whole = q.double().contiguous().requires_grad_()
    (want,) = torch.autograd.grad(attention(whole, k.double(), k.double()).sum(), whole)
    assert_close(got, want)


def test_slopes_have_no_native_gradient():
    q, slopes = randn(1, 2, 5, 8), randn(2).requires_grad_()
    with pytest.raises(UnsupportedError, match="score modifier alibi requires grad"):
        attention(q, q, q, scores=(ALiBi(slopes),), backend="cpu")
    attention(q.requires_grad_(), q, q, scores=(ALiBi(slopes.detach()),), backend="cpu").sum().backward()
    assert q.grad is not None
