"""The custom ops by torch's own checks: schema, fake against real, autograd, tracing; and what they do as they run."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnworks import (
    Bias,
    Causal,
    Plan,
    Sink,
    UnsupportedError,
    attention,
    attention_decode,
    attention_varlen,
    ops,
    specs,
)
from helpers import assert_close, randn

TILED = Plan("reference", "q_outer", 4, 3)
OPS = torch.ops.attnworks


def spec(form: str, *, mask=(), scores=(), layout="bhsd", grad=False, backend="auto", plan=None, validate=False) -> str:
    flags = grad, False, False, validate
    values = None if plan is None else [getattr(plan, name) for name in specs.PLAN_FIELDS]
    return json.dumps((form, layout, *flags, backend, values, mask, scores))


def qkv(grad=False, layout="bhsd", heads=(4, 2), dtype=torch.float32):
    """Also with strides that are not dense: k and v are parts of one tensor."""
    q, kv = randn(2, heads[0], 5, 8, dtype=dtype), randn(2, heads[1], 7, 14, dtype=dtype)
    made = (q, kv[..., :8], kv[..., 8:])
    if layout == "bshd":
        made = tuple(x.transpose(1, 2) for x in made)
    return [x.requires_grad_(grad) for x in made]


CAUSAL = (None, 0, "bottom-right")
FORWARD = {
    "plain": lambda: (*qkv(), [], [], None, None, None, None, None, spec("dense", mask=[CAUSAL])),
    "bshd": lambda: (*qkv(layout="bshd"), [], [], None, None, None, None, 0.5, spec("dense", layout="bshd")),
    "bf16": lambda: (*qkv(dtype=torch.bfloat16), [], [], None, None, None, None, None, spec("dense")),
    "no keys": lambda: (
        randn(2, 2, 3, 4),
        *[randn(2, 1, 0, 4)] * 2,
        [],
        [],
        None,
        None,
        None,
        None,
        None,
        spec("dense"),
    ),
    "bias, sink, mask, grad": lambda: (
        *qkv(grad=True),
        [randn(1, 4, 1, 7).requires_grad_(), randn(4).requires_grad_()],
        [torch.ones(5, 7, dtype=torch.bool).tril(2)],
        *[None] * 5,
        spec("dense", mask=[None], scores=["bias", "sink"], grad=True),
    ),
    "heads outermost, grad": lambda: (
        *[randn(h, 2, n, 8).transpose(0, 1).requires_grad_() for h, n in ((4, 5), (2, 7), (2, 7))],
        [],
        [],
        *[None] * 5,
        spec("dense", grad=True),
    ),
    "bshd, grad, tiled": lambda: (
        *qkv(grad=True, layout="bshd"),
        [randn(4).requires_grad_()],
        [],
        *[None] * 5,
        spec("dense", layout="bshd", scores=["sink"], grad=True, plan=TILED),
    ),
    "varlen": lambda: (
        *[x[0].transpose(0, 1) for x in qkv()],
        [],
        [],
        torch.tensor([0, 2, 4]),
        torch.tensor([0, 3, 7]),
        None,
        None,
        None,
        spec("varlen", mask=[CAUSAL]),
    ),
    "varlen, grad": lambda: (
        *[x.detach()[0].transpose(0, 1).requires_grad_() for x in qkv()],
        [randn(2, 1, 1, 5).requires_grad_()],
        [],
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([0, 3, 6], dtype=torch.int32),
        4,
        5,
        None,
        spec("varlen", scores=["bias"], grad=True, plan=TILED),
    ),
}
TABLE = torch.tensor([[2, 0], [1, 3]])
DECODE = {
    "plain": lambda: (*cached(), [], [], torch.tensor([3, 6]), None, None, None, None, spec("decode", mask=[CAUSAL])),
    "paged, grad": lambda: (
        *cached(pages=True, grad=True),
        [randn(4).requires_grad_()],
        [],
        torch.tensor([3, 6]),
        TABLE,
        None,
        None,
        None,
        spec("decode", scores=["sink"], grad=True),
    ),
    "int8": lambda: (
        randn(2, 1, 4, 8),
        *[torch.ones(2, 6, 2, 8, dtype=torch.int8)] * 2,
        [],
        [],
        torch.tensor([3, 6]),
        None,
        torch.ones(1),
        torch.full((2,), 0.5),
        None,
        spec("decode"),
    ),
}


def cached(pages=False, grad=False):
    shape = (4, 3, 2, 8) if pages else (2, 6, 2, 8)
    return [x.requires_grad_(grad) for x in (randn(2, 2, 4, 8), randn(*shape), randn(*shape))]


@pytest.mark.parametrize("case", FORWARD)
def test_forward_by_opcheck(case):
    torch.library.opcheck(OPS.forward.default, FORWARD[case]())


@pytest.mark.parametrize("case", DECODE)
def test_decode_by_opcheck(case):
    torch.library.opcheck(OPS.decode.default, DECODE[case]())


@pytest.mark.parametrize("table", [None, TABLE])
def test_lengths_by_opcheck(table):
    pages, page_size = (0, 0) if table is None else (4, 3)
    args = (torch.tensor([3, 5], dtype=torch.int32), table, 6, 1, pages, page_size, None, False)
    torch.library.opcheck(OPS.lengths.default, args)


def backward_args(case, needs, d_out, d_lse):
    if case in DECODE:
        *inputs, lens, table, k_scale, v_scale, scale, said = DECODE[case]()
        lengths, longest = (None, None, lens, table, k_scale, v_scale), (None, None)
        out, lse = OPS.decode(*inputs, lens, table, k_scale, v_scale, scale, said)
    else:
        *inputs, cu_q, cu_kv, longest_q, longest_kv, scale, said = FORWARD[case]()
        lengths, longest = (cu_q, cu_kv, None, None, None, None), (longest_q, longest_kv)
        out, lse = OPS.forward(*inputs, cu_q, cu_kv, *longest, scale, said)
    inputs = [x if isinstance(x, list) else x.detach() for x in inputs]
    inputs[3] = [x.detach() for x in inputs[3]]
    cotangents = torch.randn_like(out.detach()) if d_out else None, torch.randn_like(lse.detach()) if d_lse else None
    return (*inputs, *lengths, out.detach(), lse.detach(), *cotangents, needs, *longest, scale, said)


@pytest.mark.parametrize(
    ("case", "needs", "d_out", "d_lse"),
    [
        ("bias, sink, mask, grad", [True] * 5, True, True),
        ("bias, sink, mask, grad", [False, True, False, True, False], True, False),
        ("bshd, grad, tiled", [True] * 4, True, False),
        ("bshd, grad, tiled", [True, False, True, True], False, True),
        ("heads outermost, grad", [True] * 3, True, False),
        ("varlen, grad", [True] * 4, True, True),
        ("paged, grad", [True] * 4, True, False),
    ],
)
def test_backward_by_opcheck(case, needs, d_out, d_lse):
    torch.library.opcheck(OPS.backward.default, backward_args(case, needs, d_out, d_lse))


@pytest.mark.parametrize("case", ["bias, sink, mask, grad", "varlen, grad", "bshd, grad, tiled"])
def test_an_ops_gradients_are_the_eager_calls(case):
    q, k, v, scores, mask, cu_q, cu_kv, _, _, _, said = args = FORWARD[case]()
    leaves = [q, k, v, *scores]
    results = OPS.forward(*args)
    cotangents = [torch.randn_like(x) for x in results]
    modifiers = {"bias, sink, mask, grad": (Bias, Sink), "varlen, grad": (Bias,), "bshd, grad, tiled": (Sink,)}[case]
    options = {"scores": tuple(kind(x) for kind, x in zip(modifiers, scores, strict=True)), "return_lse": True}
    if cu_q is None:
        eager = attention(q, k, v, mask=mask[0] if mask else None, layout=specs.parse(said).layout, **options)
    else:
        eager = attention_varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=4, max_seqlen_kv=5, **options
        )
    for got, want in zip(results, eager, strict=True):
        assert_close(got, want)
    found = torch.autograd.grad(results, leaves, cotangents)
    for got, want in zip(found, torch.autograd.grad(eager, leaves, cotangents), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_second_derivative_is_an_error():
    args = FORWARD["bshd, grad, tiled"]()
    out, _ = OPS.forward(*args)
    (gradient,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        gradient.sum().backward()


def test_values_are_checked_as_the_node_runs():
    args = list(FORWARD["varlen"]())
    args[5] = torch.tensor([0, 5, 4])
    with pytest.raises(ValueError, match=r"cu_seqlens_q: was \[0, 5, 4\], must never fall"):
        OPS.forward(*args)
    args = list(DECODE["plain"]())
    args[5] = torch.tensor([3, 7])
    with pytest.raises(ValueError, match=r"kv_lens: ranged from 3 to 7"):
        OPS.decode(*args)
    with pytest.raises(ValueError, match=r"rotary cos: had 5 positions, must have at least 6"):
        OPS.lengths(torch.tensor([5]), None, 9, 1, 0, 0, 5, False)


def test_a_named_backend_is_used_or_refused():
    q, k, v = qkv()
    none = [None] * 5
    with pytest.raises(UnsupportedError, match=r"no backward through caches|not built"):
        OPS.decode(*DECODE["plain"]()[:-1], spec("decode", grad=True, backend="cpu"))
    assert_close(
        OPS.forward(q, k, v, [], [], *none, spec("dense", plan=TILED))[0], attention(q, k, v, backend="reference")
    )


def test_wrong_shapes_are_errors_before_anything_runs():
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in qkv())
        with pytest.raises(ValueError, match=r"k: was of shape \(2, 2, 7, 6\), must have head_dim = 8"):
            OPS.forward(q, k[..., :6], v, [], [], *[None] * 5, spec("dense"))


def test_the_string_says_what_was_said():
    def predicate(b, h, q, k):
        return k <= q

    tensor = torch.ones(5, 7, dtype=torch.bool)
    q, k, v = qkv()
    options = {"batch_invariant": True, "validate": False, "backend": "reference"}
    mask, scores = Causal() & tensor & predicate, (Sink(randn(4)),)
    text, score_operands, mask_operands = specs.split(
        "dense", (q, k, v), mask=mask, scores=scores, plan=TILED, **options
    )
    said = specs.parse(text)
    assert said.form == "dense" and said.plan == TILED and said.backend == "reference"
    assert (said.differentiable, said.deterministic, said.batch_invariant, said.validate) == (False, False, True, False)
    assert said.mask[1:] == (None, predicate) and (said.mask[0].left, said.mask[0].right) == (None, 0)
    assert said.scores == (Sink,)
    assert score_operands == [scores[0].logits] and mask_operands == [tensor]


def test_reading_lengths_copies_them():
    lens = torch.tensor([3, 5])
    (read,) = ops._lengths(lens, None, 6, 1, 0, 0, None, False)
    lens.zero_()
    assert read.tolist() == [3, 5]
    assert attention_decode(*cached(), kv_lens=read).isfinite().all()
