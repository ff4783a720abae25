"""Random shapes, strides, layouts, lengths and page tables against the eager fp64 reference, found by hypothesis."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnworks import Bias, Causal, Plan, Sink, Softcap, Window, attention, attention_decode, attention_varlen, merge
from attnworks.backends import cpu
from helpers import assert_close

FAST = [torch.float32, torch.bfloat16, torch.float16]
heads = st.tuples(st.integers(1, 3), st.integers(1, 4)).map(lambda t: (t[0], t[0] * t[1]))  # (heads_kv, heads_q)
dims = st.integers(1, 40) | st.sampled_from([64, 80, 128, 192, 256])
lengths = st.integers(0, 70) | st.sampled_from([127, 128, 129, 255, 513])
extents = st.none() | st.integers(0, 90)
aligns = st.sampled_from(["bottom-right", "top-left"])
bounds = st.none() | st.builds(Causal, aligns) | st.builds(Window, extents, extents, aligns)
few = settings(max_examples=60) if settings.default.derandomize else settings()  # as many as the profile "fuzz" says


@st.composite
def strided(draw, shape, dtype):
    """A tensor of ``shape`` cut out of a larger one with permuted dimensions, steps and offsets; around it lies NaN."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) if size < 40 else 1 for size in shape]
    pads = [draw(st.integers(0, 2)) for _ in shape]
    padded = [size * step + pad for size, step, pad in zip(shape, steps, pads, strict=True)]
    memory = torch.full([padded[i] for i in order], math.nan, dtype=dtype)
    view = memory.permute([order.index(i) for i in range(len(shape))])
    view = view[tuple(slice(pad, pad + size * step, step) for size, step, pad in zip(shape, steps, pads, strict=True))]
    assert tuple(view.shape) == tuple(shape)
    view.copy_(torch.randn(shape).to(dtype))
    return view


def seeded(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))


def double(*tensors):
    return tuple(x.double() for x in tensors)


def check(got, expected, dtype):
    """(out, lse) of a fast backend against the reference's in fp64."""
    assert got[0].dtype == dtype
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], torch.float32)


@few
@given(st.data())
def test_dense(data):
    seeded(data)
    dtype, layout = data.draw(st.sampled_from(FAST)), data.draw(st.sampled_from(["bhsd", "bshd"]))
    (heads_kv, heads_q), batch = data.draw(heads), data.draw(st.integers(0, 3))
    seq_q, seq_kv, dim, dim_v = (data.draw(s) for s in (lengths, lengths, dims, dims))

    def shape(n_heads, seq, size):
        return (batch, n_heads, seq, size) if layout == "bhsd" else (batch, seq, n_heads, size)

    q = data.draw(strided(shape(heads_q, seq_q, dim), dtype))
    k = data.draw(strided(shape(heads_kv, seq_kv, dim), dtype))
    v = data.draw(strided(shape(heads_kv, seq_kv, dim_v), dtype))
    options = {"mask": data.draw(bounds), "layout": layout, "return_lse": True}
    expected = attention(*double(q, k, v), **options, backend="reference")
    check(attention(q, k, v, **options), expected, dtype)
    check(attention(q, k, v, **options, backend="reference"), expected, dtype)


@few
@given(st.data())
def test_masks_scores_and_gradients(data):
    """Tensors of every broadcast, in any strides, as mask and bias; softcap and sink; all gradients."""
    seeded(data)
    dtype, (heads_kv, heads_q) = data.draw(st.sampled_from([torch.float32, torch.bfloat16])), data.draw(heads)
    batch, seq_q, seq_kv = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 70)), data.draw(st.integers(1, 150))
    full, dim = (batch, heads_q, seq_q, seq_kv), data.draw(st.integers(1, 40))

    def broadcast():
        return tuple(data.draw(st.sampled_from([1, size])) for size in full)

    sizes = ((heads_q, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv))
    tensors = [data.draw(strided((batch, *size, dim), dtype)).requires_grad_() for size in sizes]
    mask, scores, given = data.draw(bounds), [], list(tensors)
    if data.draw(st.booleans()):
        shown = data.draw(strided(broadcast(), torch.float32)) > data.draw(st.sampled_from([-2.0, 0.0, 2.0]))
        mask = shown if mask is None else mask & shown
    if data.draw(st.booleans()):
        scores.append(Softcap(data.draw(st.sampled_from([0.5, 20.0]))))
    for kind, shape in ((Bias, broadcast()), (Sink, (heads_q,))):
        if data.draw(st.booleans()):
            given.append(data.draw(strided(shape, torch.float32)).requires_grad_())
            scores.append(kind(given[-1]))

    def weights_of(out):
        return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).sin()

    def run(inputs, backend):
        extra = iter(inputs[3:])
        modifiers = tuple(type(s)(next(extra)) if isinstance(s, Bias | Sink) else s for s in scores)
        out, lse = attention(*inputs[:3], mask=mask, scores=modifiers, return_lse=True, backend=backend)
        return out, lse, torch.autograd.grad((out.double() * weights_of(out)).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in given]
    expected, got = run(exact, "reference"), run(given, "auto")
    check([x.detach() for x in got[:2]], expected, dtype)
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    # delta comes from the rounded output: so every row adds an error of its own to the biases and sinks that it shares
    # with other rows, also where their exact gradients cancel.
    of_rows = torch.finfo(dtype).eps / 2 * (weights_of(expected[0]) * expected[0]).abs().sum(-1, keepdim=True)
    for x, a, b in zip(given, got[2], expected[2], strict=True):
        shape = (1, heads_q, 1, 1) if x.dim() == 1 else (*x.shape[:3], 1)
        shared = 0.0 if any(x is y for y in tensors) else of_rows.detach().sum_to_size(shape).norm()
        assert (a.double() - b).norm() <= limit * (b.norm() + 1) + shared


@few
@given(st.data())
def test_varlen(data):
    seeded(data)
    dtype, (heads_kv, heads_q) = data.draw(st.sampled_from(FAST)), data.draw(heads)
    dim, dim_v, count = data.draw(dims), data.draw(dims), data.draw(st.integers(0, 5))
    lens_q, lens_kv = ([data.draw(st.integers(0, 40)) for _ in range(count)] for _ in "qk")
    spare_q, spare_kv = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    q = data.draw(strided((sum(lens_q) + spare_q, heads_q, dim), dtype))
    k = data.draw(strided((sum(lens_kv) + spare_kv, heads_kv, dim), dtype))
    v = data.draw(strided((sum(lens_kv) + spare_kv, heads_kv, dim_v), dtype))
    for x, used in ((q, sum(lens_q)), (k, sum(lens_kv)), (v, sum(lens_kv))):
        x[used:] = math.nan
    integer = data.draw(st.sampled_from([torch.int32, torch.int64]))
    options = {
        "cu_seqlens_q": torch.tensor([0, *lens_q]).cumsum(0).to(integer),
        "cu_seqlens_kv": torch.tensor([0, *lens_kv]).cumsum(0).to(integer),
        "mask": data.draw(bounds),
        "return_lse": True,
    }
    if data.draw(st.booleans()):
        options["max_seqlen_q"] = max(lens_q, default=0) + data.draw(st.integers(0, 9))
        options["max_seqlen_kv"] = max(lens_kv, default=0) + data.draw(st.integers(0, 9))
    expected = attention_varlen(*double(q, k, v), **options, backend="reference")
    got = attention_varlen(q, k, v, **options)
    check(got, expected, dtype)
    assert torch.equal(got[0][sum(lens_q) :], torch.zeros(spare_q, heads_q, dim_v, dtype=dtype))


@few
@given(st.data())
def test_decode(data):
    seeded(data)
    dtype, (heads_kv, heads_q) = data.draw(st.sampled_from(FAST)), data.draw(heads)
    batch, seq_q = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    dim, dim_v = data.draw(dims), data.draw(dims)
    page_size = data.draw(st.sampled_from([0, 1, 2, 5, 16, 64]))
    most = data.draw(st.integers(0, 200))
    lens = torch.tensor([data.draw(st.integers(0, most)) for _ in range(batch)], dtype=torch.int32)
    options = {"kv_lens": lens, "mask": data.draw(bounds), "return_lse": True}
    if page_size:
        width = -(-most // page_size) + data.draw(st.integers(0, 2))
        pages = batch * width + data.draw(st.integers(0, 3))
        table = torch.randperm(pages)[: batch * width].view(batch, width)
        used = torch.arange(width) * page_size < lens[:, None]
        leading = (pages, page_size)
        options["page_table"] = torch.where(used, table, data.draw(st.integers(-(2**40), 2**40)))
    else:
        leading = (batch, most + data.draw(st.integers(0, 3)))
    q = data.draw(strided((batch, seq_q, heads_q, dim), dtype))
    k, v = (data.draw(strided((*leading, heads_kv, size), dtype)) for size in (dim, dim_v))
    reference_k, reference_v = double(k, v)
    for cache in (k, v):  # poison what no sequence uses
        hidden = torch.ones(leading, dtype=torch.bool)
        for b, n in enumerate(lens.tolist()):
            for j in range(n):
                page, row = (int(table[b, j // page_size]), j % page_size) if page_size else (b, j)
                hidden[page, row] = False
        cache[hidden] = math.nan
    expected = attention_decode(q.double(), reference_k, reference_v, **options, backend="reference")
    check(attention_decode(q, k, v, **options), expected, dtype)


@pytest.mark.skipif(not cpu.isas(), reason="the cpu backend's verdict: native extension not built")
@few
@given(st.data())
def test_every_plan_gives_the_same_value(data):
    """Tiles and splits of any size, instruction sets of any kind: values agree with the fp64 reference."""
    seeded(data)
    dtype, isa = data.draw(st.sampled_from(FAST)), data.draw(st.sampled_from(cpu.isas()))
    seq_q, seq_kv, dim = data.draw(lengths), data.draw(lengths), data.draw(dims)
    q, k = torch.randn(1, 2, seq_q, dim).to(dtype), torch.randn(1, 1, seq_kv, dim).to(dtype)
    v, mask = torch.randn(1, 1, seq_kv, data.draw(dims)).to(dtype), data.draw(bounds)
    tiles = {name: data.draw(st.integers(1, 300) | st.just(2**31 - 1)) for name in ("tile_q", "tile_kv")}
    plan = data.draw(
        st.sampled_from(
            [
                Plan("cpu", "tiled", **tiles, isa=isa),
                Plan("cpu", "split_kv", split_kv=data.draw(st.integers(1, 300) | st.just(2**31 - 1)), isa=isa),
            ]
        )
    )
    expected = attention(*double(q, k, v), mask=mask, return_lse=True, backend="reference")
    check(attention(q, k, v, mask=mask, return_lse=True, plan=plan), expected, dtype)


@few
@given(st.data())
def test_merging_any_split_of_the_keys(data):
    seeded(data)
    seq_q, seq_kv = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 90))
    cut = data.draw(st.integers(0, seq_kv))
    q, k, v = (torch.randn(2, 2, n, 16) * data.draw(st.sampled_from([1.0, 30.0])) for n in (seq_q, seq_kv, seq_kv))
    parts = [attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(cut), slice(cut, None))]
    whole = attention(*double(q, k, v), return_lse=True, backend="reference")
    out, lse = merge(*parts[0], *parts[1])
    # The rounding error of a score, which grows with its terms, is a relative error of its probability.
    scores = torch.cat([q.abs() @ k.abs().mT / 4, torch.zeros(2, 2, seq_q, 1)], -1).amax(-1).double()
    limit = 8 * 2**-24 * (1 + scores)
    weighted = attention(*double(q, k, v.abs()), backend="reference")
    assert bool(((out.double() - whole[0]).abs() <= limit[..., None] * weighted + 1e-30).all())
    torch.testing.assert_close(lse.double(), whole[1], atol=float(limit.max()), rtol=1e-5)
